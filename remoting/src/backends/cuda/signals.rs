//! Words that the device writes when it has done its work, which a client that waits looks at: between
//! the end of the work and the end of the wait there is neither the driver nor this process.
//!
//! A wait says more than that work is done: that nothing has failed, and by then what kernels have
//! printed is printed. The first is so where the device writes the word, as it does nothing behind a
//! failure; what this side knows of failures, and kernels that may print, make it refuse.

use std::sync::atomic::{AtomicU32, Ordering};

use cuda_definition::driver::types::{CUdeviceptr, CUstream};

use super::{
    Server,
    backend::{LegacyWork, is_legacy},
    cover::Extent,
    driver::cu,
};
use crate::apis::cuda::{LEGACY, NEVER, calls::Signal, codes};

/// Why the client has to ask.
enum Refused {
    /// This time.
    Now,
    /// And each time from now on.
    Always,
}

/// What becomes of a word.
enum Given {
    /// The device writes it.
    Device,
    /// There is no work that it would be behind: a way to the device and back is for nothing.
    Idle,
}

impl Server {
    pub(super) fn signal(&mut self, call: &Signal) -> Result<(), i32> {
        let words = self.window.at(call.words, 8);
        let words = words.filter(|_| call.words.is_multiple_of(8));
        let words = words.ok_or(codes::INVALID_VALUE)?.cast::<AtomicU32>();
        // SAFETY: two words are there, aligned, in memory that stays as long as the session and that
        // both sides use by atomic operations alone.
        let (done, refused) = unsafe { (&*words, &*words.add(1)) };
        let given = self.try_signal(call, words as CUdeviceptr);
        if given.is_ok() {
            // The client waits, as for an answer; where it is refused, it asks for one.
            self.sharing.synchronous();
        }
        match given {
            Ok(Given::Device) => {}
            Ok(Given::Idle) => done.store(call.value, Ordering::Release),
            Err(Refused::Now) => refused.store(call.value, Ordering::Release),
            Err(Refused::Always) => refused.store(NEVER, Ordering::Release),
        }
        Ok(())
    }

    /// Whether a stream and others wait for each other's work, with which a word counts.
    fn waits_for_others(&mut self, context: u32, stream: u32) -> bool {
        if is_legacy(stream) {
            let backend = &self.backend;
            return backend.objects.has_streams() || backend.left.contains(&context);
        }
        // Where a word has told the client of the end of the legacy stream's work, nobody has asked the driver.
        let legacy = LEGACY as usize as CUstream;
        if let LegacyWork::Of(own) = self.backend.legacy
            && self.enter(context) == Ok(own)
            && cu!(self.backend.api, cuStreamQuery(legacy)) == 0
        {
            self.backend.legacy.done(own);
        }
        self.backend.legacy != LegacyWork::Nobodys
    }

    fn try_signal(&mut self, call: &Signal, word: CUdeviceptr) -> Result<Given, Refused> {
        let backend = &mut self.backend;
        if backend.printed.is_some() && backend.prints {
            return Err(Refused::Always);
        }
        let stream = call.stream.unwrap_or(LEGACY);
        let knows_more = !backend.deferred.is_empty()
            || backend.captures.is_any()
            || backend.has_pending()
            || self.expected > 0;
        if knows_more || self.waits_for_others(call.context, stream) {
            return Err(Refused::Now);
        }
        // What is wrong with them the client is told when it asks. A word is no work.
        let before = self.backend.legacy;
        let submitted = self.submit_to(call.context, stream);
        self.backend.legacy = before;
        let submitted = submitted.map_err(|_| Refused::Now)?;
        let backend = &mut self.backend;
        let known = backend.cover.reach(
            &backend.api,
            &self.window,
            call.context,
            (call.words, 8),
            Extent::Ahead,
        );
        if !known {
            return Err(Refused::Always);
        }
        let stream = submitted.raw as CUstream;
        // One that has just been given a kernel need not be asked whether it has work.
        if backend.launched.take() != Some(submitted.raw) {
            match cu!(backend.api, cuStreamQuery(stream)) {
                0 => return Ok(Given::Idle),
                codes::NOT_READY => {}
                _ => return Err(Refused::Now),
            }
        }
        match cu!(
            backend.api,
            cuStreamWriteValue32_v2(stream, word, call.value, 0)
        ) {
            0 => Ok(Given::Device),
            codes::NOT_SUPPORTED => Err(Refused::Always),
            _ => Err(Refused::Now),
        }
    }
}

//! Words that the device writes when it has finished its work, and that a waiting client polls. Neither the driver nor
//! this process is then involved between the end of the work and the end of the wait.
//!
//! A wait guarantees more than the end of the work: that nothing has failed, and that what kernels have printed has
//! appeared. The first holds if the device writes the word, because it executes nothing after a failure. If this side
//! knows of failures, or if kernels may print, it refuses.

use std::sync::atomic::{AtomicU32, Ordering};

use cuda_definition::driver::types::{CUdeviceptr, CUstream};
use remoting_proto::apis::cuda::{LEGACY, NEVER, calls::Signal, codes};

use super::{
    Server,
    backend::{LegacyWork, is_legacy},
    cover::Extent,
    driver::cu,
};

/// Why the client has to send a wait request instead.
enum Refused {
    /// Only this time.
    Now,
    /// From now on, every time.
    Always,
}

/// How the word gets its value.
enum Given {
    /// The device writes it.
    Device,
    /// There is no outstanding work to follow, so a round trip to the device would be wasted.
    Idle,
}

impl Server {
    pub(super) fn signal(&mut self, call: &Signal) -> Result<(), i32> {
        let words = self.window.at(call.words, 8);
        let words = words.filter(|_| call.words.is_multiple_of(8));
        let words = words.ok_or(codes::INVALID_VALUE)?.cast::<AtomicU32>();
        // SAFETY: two aligned words in memory that stays mapped as long as the session and that both sides access only
        // atomically.
        let (done, refused) = unsafe { (&*words, &*words.add(1)) };
        let given = self.try_signal(call, words as CUdeviceptr);
        if given.is_ok() {
            // The client waits, as for an answer. If this is refused, it asks for one.
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

    /// Whether a stream and others wait for each other's work; a word counts as work.
    pub(super) fn waits_for_others(&mut self, context: u32, stream: u32) -> bool {
        if is_legacy(stream) {
            let backend = &self.backend;
            return backend.objects.has_streams() || backend.left.contains(&context);
        }
        // If a word has told the client of the end of the legacy stream's work, nobody has queried the driver yet.
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
        // Errors are reported when the client sends the wait request. The word itself is not counted as work.
        let before = self.backend.legacy;
        let submitted = self.submit_to(call.context, stream);
        self.backend.legacy = before;
        let submitted = submitted.map_err(|_| Refused::Now)?;
        let backend = &mut self.session.backend;
        let known = backend.cover.reach(
            &backend.api,
            &self.session.window,
            call.context,
            (call.words, 8),
            Extent::Ahead,
        );
        if known.is_err() {
            return Err(Refused::Always);
        }
        let stream = submitted.raw as CUstream;
        // A stream on which a kernel was just launched need not be queried for work.
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
            0 => {
                self.passes_through(call.context, (call.words, 8));
                self.note_passage((submitted.context, submitted.raw));
                Ok(Given::Device)
            }
            codes::NOT_SUPPORTED => Err(Refused::Always),
            _ => Err(Refused::Now),
        }
    }
}

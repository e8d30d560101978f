//! Closing descriptors that untrusted peers have sent, or may have sent.
//!
//! A peer can send descriptors that nobody expects, and the last close of one may block: that of a TCP socket that
//! lingers, or of a file on a file system that another process serves. Descriptors that were never received are closed
//! with the connection. A thread that serves many peers therefore closes no peer's connection itself.
//!
//! A thread is started whenever all others are busy, up to a maximum, so a close that hangs delays no other. When all
//! of them hang, later descriptors stay open until one thread has finished; the serving thread still does not wait.
//! Where the kernel lets a socket refuse descriptors ([`refuse_files`](super::socket::refuse_files)), nothing hangs in
//! the first place.

use std::{
    any::Any,
    collections::VecDeque,
    fmt, io,
    mem::ManuallyDrop,
    net::Shutdown,
    ops::Deref,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use base::Unpoisoned;

use super::socket;

/// Maximum number of threads: each costs little more than its stack while it hangs.
const MOST: usize = 32;
/// Stack size of a closing thread in bytes.
const STACK: usize = 64 << 10;

#[derive(Default)]
struct State {
    waiting: VecDeque<Box<dyn Any + Send>>,
    idle: usize,
    threads: usize,
    /// Whether it was logged that all threads hang.
    said: bool,
}

/// Drops values in threads of its own.
#[derive(Clone, Default)]
pub struct Closer(Arc<(Mutex<State>, Condvar)>);

impl fmt::Debug for Closer {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Closer").finish_non_exhaustive()
    }
}

impl Closer {
    /// Drops a value soon, without waiting for it.
    pub fn close(&self, thing: impl Any + Send) {
        let (state, news) = &*self.0;
        let mut state = state.lock_unpoisoned();
        state.waiting.push_back(Box::new(thing));
        if state.waiting.len() <= state.idle {
            news.notify_one();
            return;
        }
        if state.threads < MOST {
            let shared = self.clone();
            let thread = thread::Builder::new().name("close".to_owned());
            // If no thread starts, the value waits for the existing ones, or for the next attempt.
            let started = thread.stack_size(STACK).spawn(move || shared.work());
            state.threads += usize::from(started.is_ok());
        } else if !state.said {
            state.said = true;
            drop(state);
            base::note!(
                "gantry: {MOST} files that others have sent do not close: further ones stay open"
            );
        }
    }

    fn work(&self) {
        let (state, news) = &*self.0;
        let mut state_now = state.lock_unpoisoned();
        loop {
            if let Some(thing) = state_now.waiting.pop_front() {
                drop(state_now);
                drop(thing);
                state_now = state.lock_unpoisoned();
                continue;
            }
            state_now.idle += 1;
            state_now = news.wait(state_now).unwrap_or_else(PoisonError::into_inner);
            state_now.idle -= 1;
        }
    }
}

/// A peer's connection, which a [`Closer`] closes when it is dropped.
#[derive(Debug)]
pub struct Connection {
    stream: ManuallyDrop<UnixStream>,
    closer: Closer,
}

impl Connection {
    /// A connection that `closer` will close.
    pub fn new(stream: UnixStream, closer: &Closer) -> Self {
        Self {
            stream: ManuallyDrop::new(stream),
            closer: closer.clone(),
        }
    }

    /// Receives bytes. Files that come with them are received and handed to the closer: a read that ignored them would
    /// close them itself.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let received = socket::receive(&self.stream, bytes);
        let (got, files) = received.or_else(socket::FilesLost::arrived)?;
        for file in files {
            self.closer.close(file);
        }
        Ok(got)
    }
}

impl Deref for Connection {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        &self.stream
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The other side sees the end now, even if the close hangs.
        let _ = self.stream.shutdown(Shutdown::Both);
        // SAFETY: nobody uses it after this.
        self.closer
            .close(unsafe { ManuallyDrop::take(&mut self.stream) });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    /// Its end waits until the other side has ended.
    struct Hangs(mpsc::Receiver<()>);

    impl Drop for Hangs {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    struct Tells(mpsc::Sender<()>);

    impl Drop for Tells {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    #[test]
    fn one_that_hangs_holds_up_neither_its_owner_nor_others() {
        let closer = Closer::default();
        let (hold, held) = mpsc::channel();
        closer.close(Hangs(held));
        let (tell, told) = mpsc::channel();
        for _ in 0..100 {
            closer.close(Tells(tell.clone()));
            told.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        drop(hold);
    }

    #[test]
    fn when_all_threads_hang_the_owner_does_not_and_the_rest_is_closed_later() {
        let closer = Closer::default();
        let holds: Vec<_> = (0..2 * MOST)
            .map(|_| {
                let (hold, held) = mpsc::channel();
                closer.close(Hangs(held));
                hold
            })
            .collect();
        let (tell, told) = mpsc::channel();
        closer.close(Tells(tell));
        assert!(told.try_recv().is_err());
        drop(holds);
        told.recv_timeout(Duration::from_secs(10)).unwrap();
    }
}

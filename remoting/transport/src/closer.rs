//! Closing descriptors that untrusted peers have sent, or may have sent.
//!
//! A peer can send descriptors that nobody expects, and the last close of one may block: that of a TCP socket that
//! lingers, or of a file on a file system that another process serves. Descriptors that were never received are closed
//! with the connection. A thread that serves many peers therefore closes no peer's connection itself.
//!
//! A thread is started whenever all others are busy, up to a maximum, so a close that hangs delays no other. A timer of
//! each thread interrupts what it waits for: the kernel goes on with a socket that lingers by itself then. Another
//! process's file system may be waited for in a way that nothing interrupts. When all threads do, later descriptors stay
//! open until one thread has finished; the serving thread still does not wait. Where the kernel lets a socket refuse
//! descriptors ([`refuse_files`](super::socket::refuse_files)), nothing hangs in the first place.

use std::{
    any::Any,
    collections::VecDeque,
    fmt, io,
    mem::ManuallyDrop,
    net::Shutdown,
    ops::Deref,
    os::unix::net::UnixStream,
    ptr,
    sync::{Arc, Condvar, Mutex, Once, PoisonError},
    thread,
};

use base::Unpoisoned;

use super::socket;

/// Maximum number of threads: each costs little more than its stack while it hangs.
const MOST: usize = 32;
/// Stack size of a closing thread in bytes.
const STACK: usize = 64 << 10;
/// How often what a thread waits for is interrupted, in nanoseconds.
const INTERVAL: libc::c_long = 100_000_000;

/// A timer that interrupts its thread, again and again, while it runs: a single signal may come before the thread waits.
struct Interrupter(libc::timer_t);

impl Interrupter {
    /// That of the calling thread, at rest.
    fn of_this_thread() -> io::Result<Self> {
        extern "C" fn nothing(_: libc::c_int) {}
        static HANDLED: Once = Once::new();
        let signal = libc::SIGRTMIN();
        // SAFETY: all-zero values are valid. The handler does nothing. The structures outlive the calls.
        unsafe {
            HANDLED.call_once(|| {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = nothing as *const () as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            });
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = ptr::null_mut();
            match libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) {
                0 => Ok(Self(timer)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Starts or stops it.
    fn run(&self, runs: bool) {
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: if runs { INTERVAL } else { 0 },
        };
        let time = libc::itimerspec {
            it_interval: time,
            it_value: time,
        };
        // SAFETY: the timer exists as long as this. It cannot fail with these values.
        unsafe { libc::timer_settime(self.0, 0, &raw const time, ptr::null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: nobody uses it after this.
        unsafe { libc::timer_delete(self.0) };
    }
}

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
        // Without it, what hangs keeps this thread.
        let interrupter = Interrupter::of_this_thread().ok();
        let (state, news) = &*self.0;
        let mut state_now = state.lock_unpoisoned();
        loop {
            if let Some(thing) = state_now.waiting.pop_front() {
                drop(state_now);
                interrupter.iter().for_each(|timer| timer.run(true));
                drop(thing);
                interrupter.iter().for_each(|timer| timer.run(false));
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
    use std::{
        io::Write,
        net::{TcpListener, TcpStream},
        os::fd::{AsFd, AsRawFd},
        sync::mpsc,
        time::Duration,
    };

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

    /// A connection by which a socket was sent whose close waits for a peer that reads nothing, and that peer.
    fn lingering() -> io::Result<(UnixStream, UnixStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 600,
        };
        let length = size_of_val(&linger) as libc::socklen_t;
        let linger = (&raw const linger).cast();
        let descriptor = socket.as_raw_fd();
        // SAFETY: the kernel reads as many bytes as the length says, from a local.
        let set = unsafe {
            libc::setsockopt(
                descriptor,
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                linger,
                length,
            )
        };
        assert_eq!(set, 0);
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 1 << 16]).is_ok() {}
        let (ours, theirs) = UnixStream::pair()?;
        socket::send(&theirs, &[1], &[socket.as_fd()])?;
        // SAFETY: nobody uses it any more. The last one, in the queue of `ours`, is what lingers.
        unsafe { libc::close(std::os::fd::IntoRawFd::into_raw_fd(socket)) };
        Ok((ours, theirs, peer))
    }

    #[test]
    fn sockets_that_linger_keep_no_thread() {
        let closer = Closer::default();
        let all: Vec<_> = (0..=MOST).map(|_| lingering().unwrap()).collect();
        let (closed, peers): (Vec<_>, Vec<_>) = all
            .into_iter()
            .map(|(ours, theirs, peer)| (ours, (theirs, peer)))
            .unzip();
        closed.into_iter().for_each(|ours| closer.close(ours));
        let (tell, told) = mpsc::channel();
        closer.close(Tells(tell));
        told.recv_timeout(Duration::from_secs(60)).unwrap();
        drop(peers);
    }
}

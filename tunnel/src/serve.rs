//! The process: a thread for each tunnel.

use std::{
    io,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use base::{Chain, Unpoisoned, note::Seldom};

use crate::{
    door::{self, Known},
    doors::Doors,
    place::Place,
    relay,
    request::{self, Answer, Request},
};

/// Maximum number of concurrent tunnels: a few times the number of connections of a migration.
const MOST: usize = 512;

/// How long to wait for descriptors or memory to become available.
const PAUSE: Duration = Duration::from_millis(100);

/// Rate-limited messages about tunnels: a moving VM has many of them that end alike.
#[derive(Default)]
struct Said {
    failed: Mutex<Seldom>,
    ended: Mutex<Seldom>,
}

/// Listens for VMMs of this user.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = base::socket::listen_privately(path)?;
    base::socket::refuse_files(&listener);
    Ok(listener)
}

/// Serves forever, unless `listener` is not a listening socket.
pub fn run(listener: &UnixListener) -> io::Error {
    let busy = Arc::new(AtomicUsize::new(0));
    let doors = Doors::default();
    let said = Arc::new(Said::default());
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if passes(&error) => {
                base::note!("gantry-tunnel: cannot accept, and tries again: {error}");
                thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return error,
        };
        if busy.load(Ordering::SeqCst) >= MOST {
            base::note!("gantry-tunnel: turned away: there are {MOST} tunnels");
            continue;
        }
        let place = Place::take(&busy);
        let (doors, said) = (doors.clone(), Arc::clone(&said));
        let work = move || {
            let _place = place;
            if let Err(error) = serve(stream, &doors, &said.failed)
                && let Some(unsaid) = said.ended.lock_unpoisoned().due()
            {
                base::note!("gantry-tunnel: a tunnel has ended: {error}{unsaid}");
            }
        };
        // If it cannot be started, the place is released and the connection closed.
        if let Err(error) = thread::Builder::new().name("tunnel".into()).spawn(work) {
            base::note!("gantry-tunnel: turned away: cannot start a thread: {error}");
        }
    }
}

/// Whether the next attempt may succeed: the client has gone, or the host is short of some
/// resource.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EINTR
                | libc::ECONNABORTED
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOBUFS
                | libc::ENOMEM
        )
    )
}

fn serve(mut vmm: UnixStream, doors: &Doors, said: &Mutex<Seldom>) -> io::Result<()> {
    let line = request::read_line(&mut vmm)?;
    let failed = |vmm: &mut UnixStream, reason: String| {
        // The VMM receives the full reason each time; only the log is rate-limited.
        if let Some(unsaid) = said.lock_unpoisoned().due() {
            base::note!("gantry-tunnel: no tunnel: {reason}{unsaid}");
        }
        request::answer(vmm, &Answer::Failed(reason))
    };
    let request: Request = match serde_json::from_slice(&line) {
        Ok(request) => request,
        Err(error) => return failed(&mut vmm, format!("the request does not parse: {error}")),
    };
    match open(&mut vmm, &request, doors) {
        Ok(known) => relay::run(&vmm, known, relay::LINGER),
        // The VMM has received its answer, and has hung up.
        Err(door::Error::Gone) => Ok(()),
        Err(error) => failed(&mut vmm, Chain(&error).to_string()),
    }
}

/// Opens a tunnel, and tells the VMM.
fn open(vmm: &mut UnixStream, request: &Request, doors: &Doors) -> Result<Known, door::Error> {
    let told =
        |vmm: &mut UnixStream| request::answer(vmm, &Answer::Ready).map_err(|_| door::Error::Gone);
    match request {
        Request::Connect { to, tls_dir } => {
            let known = door::connect(to, tls_dir)?;
            told(vmm)?;
            Ok(known)
        }
        Request::Listen { at, tls_dir } => {
            let door = doors.open(at, tls_dir)?;
            told(vmm)?;
            let known = door.wait(vmm)?;
            if let Err(error) = doors.leave(door, tls_dir) {
                base::note!(
                    "gantry-tunnel: {at} is closed for a moment: cannot start a thread: {error}"
                );
            }
            Ok(known)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_short_of_something_is_asked_again() {
        let passing = |number| passes(&io::Error::from_raw_os_error(number));
        assert!(passing(libc::EMFILE) && passing(libc::ENOMEM) && passing(libc::ECONNABORTED));
        assert!(!passing(libc::EBADF) && !passing(libc::EINVAL));
    }
}

//! The process: a thread for each tunnel.

use std::{
    fs, io,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use base::Chain;

use crate::{
    door::{self, Door, Known},
    relay,
    request::{self, Answer, Request},
};

/// Tunnels at once: as many as a migration has connections, a few times.
const MOST: usize = 512;

/// Listens for VMMs of this user.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = base::socket::listen(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    base::socket::refuse_files(&listener);
    Ok(listener)
}

/// Serves for ever.
pub fn run(listener: &UnixListener) -> io::Error {
    let busy = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return error,
        };
        if busy.load(Ordering::SeqCst) >= MOST {
            eprintln!("turned away: there are {MOST} tunnels");
            continue;
        }
        busy.fetch_add(1, Ordering::SeqCst);
        let busy = Arc::clone(&busy);
        thread::spawn(move || {
            if let Err(error) = serve(stream) {
                eprintln!("a tunnel has ended: {error}");
            }
            busy.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

fn serve(mut vmm: UnixStream) -> io::Result<()> {
    let line = request::read_line(&mut vmm)?;
    let failed = |vmm: &mut UnixStream, reason: String| {
        eprintln!("no tunnel: {reason}");
        request::answer(vmm, &Answer::Failed(reason))
    };
    let request: Request = match serde_json::from_slice(&line) {
        Ok(request) => request,
        Err(error) => return failed(&mut vmm, format!("the request does not parse: {error}")),
    };
    match open(&mut vmm, &request) {
        Ok(known) => relay::run(&vmm, known),
        // It has had its answer, and is gone.
        Err(door::Error::Gone) => Ok(()),
        Err(error) => failed(&mut vmm, Chain(&error).to_string()),
    }
}

/// A tunnel, of which the VMM has been told.
fn open(vmm: &mut UnixStream, request: &Request) -> Result<Known, door::Error> {
    let told =
        |vmm: &mut UnixStream| request::answer(vmm, &Answer::Ready).map_err(|_| door::Error::Gone);
    match request {
        Request::Connect { to, tls_dir } => {
            let known = door::connect(to, tls_dir)?;
            told(vmm)?;
            Ok(known)
        }
        Request::Listen { at, tls_dir } => {
            let door = Door::open(at, tls_dir)?;
            told(vmm)?;
            door.wait(vmm)
        }
    }
}

//! Tests the agent with clients some of which are hostile, in a guest without a port: a client that
//! has said hello is turned away, which shows that it was heard.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::mpsc,
    thread,
};

use remoting_proto::apis::{cuda::Cuda, opencl::OpenCl};

use super::*;

/// How long a close blocks, and the maximum time that an honest client waits, in seconds.
const HANGS: u16 = 30;
const SOON: Duration = Duration::from_secs(10);

/// Starts an agent after applying `change` to its listener.
fn agent(change: fn(&UnixListener)) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (ready, wait) = mpsc::channel();
    let at = path.clone();
    thread::spawn(move || {
        let seats = Seats::new("", at.clone());
        let server = Server::new(&at, Some("none".to_owned()), None, seats).unwrap();
        change(&server.listener);
        ready.send(()).unwrap();
        server.run();
    });
    wait.recv().unwrap();
    (folder, path)
}

/// Makes a socket accept files, as on a kernel before 6.16. Returns whether this kernel is a later
/// one.
fn take_files(socket: impl AsFd) -> bool {
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads the given number of bytes from a local. 83 is SO_PASSRIGHTS.
    let set = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            83,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    set == 0
}

/// A socket whose last close blocks until its peer is gone.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: HANGS.into(),
    };
    // SAFETY: the kernel reads the given number of bytes from a local.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, peer)
}

/// Checks that an honest client is heard soon.
fn is_served(path: &Path) {
    let mut client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client
        .write_all(&Hello::client::<OpenCl>().to_bytes())
        .unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
}

#[test]
fn files_whose_close_hangs_keep_nobody_from_being_served() {
    let (_folder, path) = agent(|listener| {
        take_files(listener);
    });
    let hello = Hello::client::<OpenCl>().to_bytes();
    let mut peers = Vec::new();
    // With a hello, with half of one, and after one: what is received, and what is not.
    for (first, second) in [(&hello[..], 0), (&hello[..4], 0), (&hello[..], 4)] {
        let client = UnixStream::connect(&path).unwrap();
        let (socket, peer) = lingering();
        peers.push(peer);
        if second > 0 {
            socket::send(&client, first, &[]).unwrap();
            // The client may have been turned away already.
            let _ = socket::send(&client, &first[..second], &[socket.as_fd()]);
            drop(client);
        } else {
            socket::send(&client, first, &[socket.as_fd()]).unwrap();
        }
        // The last close is the test's, if the agent's was faster.
        thread::spawn(move || drop(socket));
        is_served(&path);
        is_served(&path);
    }
}

#[test]
fn where_the_kernel_can_it_refuses_files_for_the_agent() {
    let (_folder, path) = agent(|_| {});
    let client = UnixStream::connect(&path).unwrap();
    let (socket, peer) = lingering();
    let sent = socket::send(&client, &[0], &[socket.as_fd()]);
    if take_files(&client) {
        // The close does not block without the peer.
        drop(peer);
        assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
    } else {
        sent.unwrap();
        drop(socket);
    }
    is_served(&path);
}

#[test]
fn who_connects_without_an_end_has_a_share_of_the_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let seats = Seats::new("", path.clone());
    let mut server = Server::new(&path, Some("none".to_owned()), None, seats).unwrap();
    let clients: Vec<_> = (0..WAITING)
        .map(|_| UnixStream::connect(&path).unwrap())
        .collect();
    server.accept();
    assert_eq!(server.clients.len(), OF_ONE_USER);
    let user = server.clients[0].user;
    assert!(!server.has_room(user));
    assert!(server.has_room(user.map(|user| user + 1)));
    // The others are told at once.
    let mut refused = &clients[OF_ONE_USER];
    refused.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(refused.read(&mut [0]).unwrap(), 0);
}

#[test]
fn who_does_not_speak_the_protocol_is_let_go() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut client = Client {
        stream: Connection::new(here, &Closer::default()),
        user: None,
        step: Step::Hello,
        may_go: false,
        since: Instant::now(),
    };
    (&there).write_all(&[0; hello::SIZE]).unwrap();
    assert!(!said(&mut client));
    let hello = Hello::client::<OpenCl>().to_bytes();
    (&there).write_all(&hello).unwrap();
    assert!(said(&mut client) && matches!(client.step, Step::Queued(_)));
}

#[test]
fn only_those_of_one_api_change_between_the_guest_s_pool_and_a_port() {
    for (hello, expected) in [
        (Hello::client::<OpenCl>(), true),
        (Hello::client::<Cuda>(), false),
    ] {
        let (here, there) = UnixStream::pair().unwrap();
        let mut client = Client {
            stream: Connection::new(here, &Closer::default()),
            user: None,
            step: Step::Hello,
            may_go: false,
            since: Instant::now(),
        };
        (&there).write_all(&hello.to_bytes()).unwrap();
        assert!(said(&mut client));
        assert_eq!(client.may_go, expected, "{:?}", hello.api);
    }
}

//! A pool that serves OpenCL and CUDA at one socket.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::Duration,
};

use remoting_proto::{
    apis::{self, cuda::Cuda, opencl::OpenCl},
    port::{Attachment, READY, REFUSED},
    wire::{
        api::{ApiId, Spoken},
        hello::{self, Form, Hello, Refused},
    },
};
use remoting_transport::{account::Account, mapping, socket, window};

use crate::library::{serving_apis, serving_within};

/// A pool that ends with this.
struct Pool {
    child: Child,
    socket: PathBuf,
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pool {
    fn of(folder: &Path, apis: &str) -> Self {
        Self::of_command(folder, serving_apis(&folder.join("cache"), apis))
    }

    fn of_command(folder: &Path, mut command: Command) -> Self {
        let socket = folder.join("socket");
        let child = command.arg("--socket").arg(&socket).spawn().unwrap();
        Self { child, socket }
    }

    /// A connection, as soon as it listens.
    fn connect(&self) -> UnixStream {
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => return stream,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

/// A machine's port, of which each slice is for an application of either API.
struct Port {
    account: OwnedFd,
}

/// A slice that a pool was asked to serve.
struct Slice {
    worker: UnixStream,
    memory: File,
}

impl Port {
    fn new() -> Self {
        let (_, account) = Account::create().unwrap();
        Self { account }
    }

    /// Asks for a worker for an application of one API, which says that it calls another one, or the same.
    fn attach(&self, pool: &Pool, slice: u32, api: ApiId, says: Hello) -> Slice {
        self.attach_with(pool, (slice, event()), api, says)
    }

    /// The same, with this in place of an interrupt.
    fn attach_with(
        &self,
        pool: &Pool,
        (slice, interrupt): (u32, OwnedFd),
        api: ApiId,
        says: Hello,
    ) -> Slice {
        let memory = File::from(mapping::create(window::SMALLEST).unwrap());
        memory
            .write_all_at(&says.to_bytes(), window::CLIENT_HELLO)
            .unwrap();
        let worker = pool.connect();
        let attachment = Attachment {
            slice,
            client: "machine".to_owned(),
            ..Attachment::new(apis::spoken(api), window::SMALLEST)
        };
        let doorbell = event();
        let files = [
            memory.as_fd(),
            doorbell.as_fd(),
            interrupt.as_fd(),
            self.account.as_fd(),
        ];
        socket::send(&worker, &attachment.to_bytes(), &files).unwrap();
        // The pool may have closed its copy by now: then this is the last, and may wait for its peer.
        thread::spawn(move || drop(interrupt));
        Slice { worker, memory }
    }
}

impl Slice {
    /// The first that the worker says.
    fn said(&self) -> u8 {
        let mut said = [0];
        (&self.worker).read_exact(&mut said).unwrap();
        said[0]
    }

    /// What the application is told.
    fn answer(&self) -> [u8; hello::SIZE] {
        let mut answer = [0; hello::SIZE];
        self.memory
            .read_exact_at(&mut answer, window::REPLY)
            .unwrap();
        answer
    }

    fn is_served(&self) -> bool {
        self.worker.set_nonblocking(true).unwrap();
        let ended = (&self.worker).read(&mut [0]);
        ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

fn event() -> OwnedFd {
    // SAFETY: a fresh descriptor that nobody else owns.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)) }
}

/// A socket whose last close waits for its peer, which is returned too and never reads.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 600,
    };
    // SAFETY: the kernel reads as many bytes as the length says, from a local.
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
    (socket.into(), peer)
}

#[test]
fn files_of_a_machine_that_do_not_close_hold_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::of(folder.path(), "opencl,cuda");
    let port = Port::new();
    let hello = Hello::client::<OpenCl>();
    // Longer than anything takes, unless it hangs.
    let patience = Some(Duration::from_secs(120));
    let mut peers = Vec::new();
    // More than there are threads that close files.
    for slice in 0..34 {
        let (interrupt, peer) = lingering();
        peers.push(peer);
        let machine = port.attach_with(&pool, (slice, interrupt), ApiId::OpenCl, hello);
        machine.worker.set_read_timeout(patience).unwrap();
        assert_eq!(machine.said(), REFUSED);
    }
    for _ in 0..3 {
        let stream = pool.connect();
        stream.set_read_timeout(patience).unwrap();
        socket::send_hello(&stream, hello, &[]).unwrap();
        let (said, _) = socket::receive_hello(&stream).unwrap();
        assert!(Hello::check_for::<OpenCl>(&said).is_ok());
    }
}

#[test]
fn a_machine_with_a_file_of_another_file_system_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::of(folder.path(), "opencl,cuda");
    let port = Port::new();
    for (api, hello) in [
        (ApiId::OpenCl, Hello::client::<OpenCl>()),
        (ApiId::Cuda, Hello::client::<Cuda>()),
    ] {
        let file = File::open("/proc/version").unwrap();
        let machine = port.attach_with(&pool, (0, file.into()), api, hello);
        assert_eq!(machine.said(), REFUSED);
        let machine = port.attach(&pool, 1, api, hello);
        assert_eq!(machine.said(), READY);
    }
}

#[test]
fn one_pool_serves_both_apis_also_a_build_that_disagrees_about_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::of(folder.path(), "opencl,cuda");
    // What a worker answers to somebody who says this, and the files that come along.
    let answer = |hello: Hello| -> (_, Vec<OwnedFd>) {
        let stream = pool.connect();
        socket::send_hello(&stream, hello, &[]).unwrap();
        socket::receive_hello(&stream).unwrap()
    };
    let (cuda, opencl) = (Hello::client::<Cuda>(), Hello::client::<OpenCl>());
    let mut other = opencl;
    other.version.fingerprint ^= 1;
    for _ in 0..2 {
        let (said, window) = answer(cuda);
        assert!(Hello::check_for::<Cuda>(&said).is_ok());
        assert_eq!(window.len(), 1);
        let (said, window) = answer(opencl);
        assert!(Hello::check_for::<OpenCl>(&said).is_ok());
        assert_eq!(window.len(), 1);
        // It learns which version is spoken here.
        let (said, none) = answer(other);
        let told = Hello::check(
            &said,
            &[Spoken {
                version: other.version,
                ..Spoken::of::<OpenCl>()
            }],
        );
        let theirs = opencl.version;
        assert!(matches!(told, Err(Refused::Version { theirs: told, .. }) if told == theirs));
        assert!(none.is_empty());
    }
}

#[test]
fn a_pool_says_which_apis_it_serves_and_goes_on_to_serve() {
    for (served, all) in [
        ("opencl,cuda", &[ApiId::OpenCl, ApiId::Cuda][..]),
        ("cuda", &[ApiId::Cuda]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let pool = Pool::of(folder.path(), served);
        for api in [ApiId::OpenCl, ApiId::Cuda, ApiId::OpenCl] {
            let stream = pool.connect();
            let mut asks = Hello::asks(apis::spoken(api));
            // What it does not know of it is not asked.
            asks.version.fingerprint ^= 1;
            socket::send_hello(&stream, asks, &[]).unwrap();
            let (said, files) = socket::receive_hello(&stream).unwrap();
            let said = Hello::check(&said, &apis::ALL).unwrap();
            assert_eq!(said.form, Form::Asks);
            assert_eq!(said.api == api, all.contains(&api), "{served}: {api:?}");
            assert!(files.is_empty());
            assert_eq!((&stream).read(&mut [0]).unwrap(), 0);
        }
    }
}

#[test]
fn one_port_s_applications_of_both_apis_are_served_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::of(folder.path(), "opencl,cuda");
    let port = Port::new();
    let cuda = port.attach(&pool, 0, ApiId::Cuda, Hello::client::<Cuda>());
    assert_eq!(cuda.said(), READY);
    let opencl = port.attach(&pool, 1, ApiId::OpenCl, Hello::client::<OpenCl>());
    assert_eq!(opencl.said(), READY);
    assert!(Hello::check_for::<Cuda>(&cuda.answer()).is_ok());
    assert!(Hello::check_for::<OpenCl>(&opencl.answer()).is_ok());
    // One that says something else than its port has said for it is not served; the others are.
    let liar = port.attach(&pool, 2, ApiId::OpenCl, Hello::client::<Cuda>());
    assert_eq!(liar.said(), REFUSED);
    let told = Hello::check_for::<Cuda>(&liar.answer());
    let (ours, theirs) = (ApiId::Cuda, ApiId::OpenCl.number());
    assert_eq!(told, Err(Refused::Api { ours, theirs }));
    assert!(cuda.is_served());
}

#[test]
fn a_pool_with_a_total_serves_no_machine_which_could_name_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let command = serving_within(
        &folder.path().join("cache"),
        "opencl,cuda",
        "--memory-total",
    );
    let pool = Pool::of_command(folder.path(), command);
    let port = Port::new();
    for (api, hello) in [
        (ApiId::OpenCl, Hello::client::<OpenCl>()),
        (ApiId::Cuda, Hello::client::<Cuda>()),
    ] {
        let machine = port.attach(&pool, 0, api, hello);
        assert_eq!(machine.said(), REFUSED);
        let stream = pool.connect();
        socket::send_hello(&stream, hello, &[]).unwrap();
        let (said, _) = socket::receive_hello(&stream).unwrap();
        assert!(Hello::check(&said, &apis::ALL).is_ok());
    }
}

#[test]
fn a_pool_for_one_api_tells_an_application_of_another_which_one_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::of(folder.path(), "cuda");
    let port = Port::new();
    let hello = Hello::client::<OpenCl>();
    let refused = port.attach(&pool, 0, ApiId::OpenCl, hello);
    let (machine_is_told, _) = socket::receive_hello(&refused.worker).unwrap();
    assert!(Hello::check_for::<Cuda>(&machine_is_told).is_ok());
    let (ours, theirs) = (ApiId::OpenCl, ApiId::Cuda.number());
    let told = Hello::check_for::<OpenCl>(&refused.answer());
    assert_eq!(told, Err(Refused::Api { ours, theirs }));
    let served = port.attach(&pool, 1, ApiId::Cuda, Hello::client::<Cuda>());
    assert_eq!(served.said(), READY);
}

#[test]
fn a_library_that_may_be_either_apis_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_gantry-accel"), "serve", "--api"])
        .args(["opencl,cuda", "--library", "libcuda.so.1", "--socket"])
        .arg(folder.path().join("socket"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("--library API=FILE"), "{text}");
}

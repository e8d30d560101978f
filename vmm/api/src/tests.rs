//! Tests of the server over real Unix sockets.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use devices::thread::Unconfined;
use tempfile::TempDir;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::*;

/// Answers like a VMM that has no VM, and reports each request.
struct Machine {
    asked: mpsc::Sender<Request>,
    /// Blocks each request until something can be received.
    hold: Option<mpsc::Receiver<()>>,
    ended: bool,
}

impl Handler for Machine {
    fn handle(&mut self, request: Request) -> Result<Response, ApiError> {
        let answer = match &request {
            Request::VmmPing => Ok(Response::Ping(VmmPingResponse::current())),
            Request::VmmMetrics => Ok(Response::Metrics(crate::metrics::Metrics::default())),
            Request::VmmShutdown => {
                self.ended = true;
                Ok(Response::Empty)
            }
            Request::VmAdd(device) => Ok(Response::Device(PciDeviceInfo {
                id: device.common().id.clone().unwrap_or_default(),
                bdf: "0000:00:04.0".to_owned(),
            })),
            Request::VmBoot => Ok(Response::Empty),
            Request::VmPause => Err(ApiError::wrong_state("not booted").context("cannot pause")),
            _ => Err(ApiError::not_created()),
        };
        let _ = self.asked.send(request);
        if let Some(hold) = &self.hold {
            let _ = hold.recv();
        }
        answer
    }
}

struct Rig {
    path: PathBuf,
    asked: mpsc::Receiver<Request>,
    servers: Vec<Server>,
    machine: Option<thread::JoinHandle<()>>,
    _dir: TempDir,
}

impl Rig {
    fn new(hold: Option<mpsc::Receiver<()>>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let listener = Listener::open(&ApiSocket::Path(path.clone())).unwrap();
        let (sender, receiver) = channel().unwrap();
        let metrics = Listener::open_for_metrics(&dir.path().join("metrics")).unwrap();
        let servers = [(metrics, sender.try_clone().unwrap()), (listener, sender)];
        let servers =
            servers.map(|(listener, sender)| Server::start(listener, sender, &Unconfined).unwrap());
        let (asked_sender, asked) = mpsc::channel();
        let machine = thread::spawn(move || {
            let mut machine = Machine {
                asked: asked_sender,
                hold,
                ended: false,
            };
            let mut poll = libc::pollfd {
                fd: receiver.event().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            while !machine.ended {
                // SAFETY: one valid entry.
                unsafe { libc::poll(&raw mut poll, 1, -1) };
                receiver.serve(&mut machine);
            }
        });
        Self {
            path,
            asked,
            servers: servers.into(),
            machine: Some(machine),
            _dir: dir,
        }
    }

    fn connect(&self) -> UnixStream {
        self.connect_to("api")
    }

    fn connect_to(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.path.with_file_name(name)).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = self.connect();
        send(&mut stream, method, path, body);
        receive(&mut stream)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if self.machine.is_some() && !thread::panicking() {
            assert_eq!(self.ask("PUT", "vmm.shutdown", ""), (200, String::new()));
            self.machine.take().unwrap().join().unwrap();
            self.servers.drain(..).for_each(Server::stop);
            assert!(!self.path.exists());
            assert!(!self.path.with_file_name("metrics").exists());
        }
    }
}

fn send(stream: &mut UnixStream, method: &str, path: &str, body: &str) {
    let length = match body.len() {
        0 => String::new(),
        length => format!("Content-Length: {length}\r\n"),
    };
    let head = format!("{method} /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
}

/// Reads one response and returns its status and body.
fn receive(stream: &mut UnixStream) -> (u16, String) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    // Everything after the version, as Cloud Hypervisor's command-line client reads it.
    let status = head.lines().next().unwrap()[9..].trim().parse().unwrap();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "))
        .map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    let json = head.contains("Content-Type: application/json\r\n");
    assert!(json || length == 0 || head.contains("text/plain"), "{head}");
    (status, String::from_utf8(body).unwrap())
}

#[test]
fn requests_are_answered_in_the_form_that_clients_expect() {
    let rig = Rig::new(None);
    let (status, body) = rig.ask("GET", "vmm.ping", "");
    let ping: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(ping["version"], "54.0.0");
    assert_eq!(ping["build_version"], "v54.0.0");
    assert_eq!(ping["pid"], std::process::id());
    assert_eq!(ping["features"], serde_json::json!(["kvm"]));
    assert_eq!(rig.ask("PUT", "vm.boot", ""), (204, String::new()));
    assert_eq!(
        rig.ask("PUT", "vm.pause", ""),
        (405, r#"["cannot pause","not booted"]"#.to_owned())
    );
    assert_eq!(rig.ask("GET", "vm.info", "").0, 404);
    assert_eq!(rig.ask("PUT", "vmm.ping", "").0, 405);
    assert_eq!(rig.ask("GET", "nowhere", "").0, 404);
    assert!(rig.ask("GET", "vmm.metrics", "").1.contains("gantry_info"));
}

#[test]
fn clients_of_a_metrics_socket_read_metrics_and_do_nothing_else() {
    let rig = Rig::new(None);
    let mut stream = rig.connect_to("metrics");
    let mut ask = |method, path, body| {
        send(&mut stream, method, path, body);
        receive(&mut stream)
    };
    let (status, body) = ask("GET", "vmm.metrics", "");
    assert!(status == 200 && body.contains("gantry_info"), "{body}");
    assert_eq!(ask("PUT", "vmm.metrics", "").0, 405);
    for route in routes() {
        if route.path != "vmm.metrics" {
            let (status, body) = ask(route.method, route.path, "");
            assert!(status == 404 && body.contains("metrics socket"), "{body}");
        }
    }
    // A body is not waited for, let alone parsed.
    let head = "PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    assert_eq!(receive(&mut stream).0, 413);
    // Nothing else has reached the machine.
    let asked: Vec<_> = rig.asked.try_iter().collect();
    assert!(matches!(asked[..], [Request::VmmMetrics]), "{asked:?}");
}

#[test]
fn however_often_metrics_are_read_the_machine_is_asked_seldom() {
    let rig = Rig::new(None);
    let mut stream = rig.connect_to("metrics");
    let request = "GET /api/v1/vmm.metrics HTTP/1.1\r\n\r\n";
    stream.write_all(request.repeat(20).as_bytes()).unwrap();
    for _ in 0..20 {
        let (status, body) = receive(&mut stream);
        assert!(status == 200 && body.contains("gantry_info"), "{body}");
    }
    assert_eq!(rig.asked.try_iter().count(), 1);
}

#[test]
fn a_user_has_few_connections_to_a_metrics_socket() {
    let rig = Rig::new(None);
    let mut streams: Vec<_> = (0..5).map(|_| rig.connect_to("metrics")).collect();
    // The oldest makes way.
    assert_eq!(streams[0].read(&mut [0]).unwrap(), 0);
    for stream in &mut streams[1..] {
        send(stream, "GET", "vmm.metrics", "");
        assert_eq!(receive(stream).0, 200);
    }
}

#[test]
fn a_bad_body_is_explained_and_the_connection_goes_on() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    send(
        &mut stream,
        "PUT",
        "vm.create",
        r#"{"payload":{"kernel":7}}"#,
    );
    let (status, body) = receive(&mut stream);
    assert_eq!(status, 400);
    assert!(
        body.contains("payload.kernel") && body.contains("column"),
        "{body}"
    );
    send(
        &mut stream,
        "PUT",
        "vm.create",
        r#"{"payload":{},"vdpa":[{"path":"/v"}]}"#,
    );
    let (status, body) = receive(&mut stream);
    assert_eq!(status, 400);
    assert!(body.contains("not supported by Gantry"), "{body}");
    send(&mut stream, "GET", "vmm.ping", "");
    assert_eq!(receive(&mut stream).0, 200);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    let request = |method, path| format!("{method} /api/v1/{path} HTTP/1.1\r\n\r\n");
    let all = request("GET", "vmm.ping")
        + &request("PUT", "vm.boot")
        + &request("GET", "nowhere")
        + &request("PUT", "vm.pause");
    stream.write_all(all.as_bytes()).unwrap();
    let statuses: Vec<u16> = (0..4).map(|_| receive(&mut stream).0).collect();
    assert_eq!(statuses, [200, 204, 404, 405]);
}

#[test]
fn a_request_may_arrive_byte_by_byte() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    let body = r#"{"destination_url":"file:///s"}"#;
    let text = format!(
        "PUT /api/v1/vm.snapshot HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    for byte in text.bytes() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(receive(&mut stream).0, 404);
    assert!(matches!(rig.asked.recv(), Ok(Request::VmSnapshot(_))));
}

#[test]
fn a_client_that_waits_for_permission_to_send_gets_it() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    let head =
        "PUT /api/v1/vm.add-disk HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    assert_eq!(receive(&mut stream).0, 100);
    stream.write_all(b"{}").unwrap();
    assert_eq!(receive(&mut stream).0, 400);
}

#[test]
fn a_body_of_100_mib_is_refused_without_being_kept() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    let head = "PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let chunk = vec![b' '; 1 << 20];
    for _ in 0..100 {
        stream.write_all(&chunk).unwrap();
    }
    assert_eq!(receive(&mut stream).0, 413);
    let mut rest = Vec::new();
    assert_eq!(stream.read_to_end(&mut rest).unwrap(), 0);
    assert_eq!(rig.ask("GET", "vmm.ping", "").0, 200);
}

#[test]
fn a_client_that_asks_and_never_listens_is_not_listened_to_either() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    stream
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let requests = "GET /nowhere HTTP/1.1\r\n\r\n".repeat(10_000);
    let mut sent = 0;
    while sent < 32 << 20 {
        match stream.write(requests.as_bytes()) {
            Ok(len) => sent += len,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(sent < 4 << 20, "the server has taken {sent} bytes");
    assert_eq!(rig.ask("GET", "vmm.ping", "").0, 200);
}

#[test]
fn noise_is_refused_and_the_connection_closed() {
    let rig = Rig::new(None);
    let mut stream = rig.connect();
    stream.write_all(b"\x16\x03\x01 not http\r\n\r\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(receive(&mut stream).0, 400);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_thousand_connections_that_send_nothing_do_not_keep_others_out() {
    let rig = Rig::new(None);
    let mut early = rig.connect();
    send(&mut early, "GET", "vmm.ping", "");
    assert_eq!(receive(&mut early).0, 200);
    let mut idle = Vec::new();
    for count in 0..1000 {
        idle.push(rig.connect());
        if count % 50 == 0 {
            assert_eq!(rig.ask("GET", "vmm.ping", "").0, 200);
        }
    }
    assert_eq!(rig.ask("GET", "vmm.ping", "").0, 200);
}

#[test]
fn a_long_request_does_not_keep_the_server_from_accepting_and_refusing() {
    let (release, hold) = mpsc::channel();
    let rig = Rig::new(Some(hold));
    let mut slow = rig.connect();
    send(
        &mut slow,
        "PUT",
        "vm.snapshot",
        r#"{"destination_url":"file:///s"}"#,
    );
    assert!(matches!(rig.asked.recv(), Ok(Request::VmSnapshot(_))));
    // Requests that do not need the machine are answered meanwhile.
    assert_eq!(rig.ask("PUT", "vm.create", "{").0, 400);
    let mut waiting = rig.connect();
    send(&mut waiting, "GET", "vmm.ping", "");
    release.send(()).unwrap();
    assert_eq!(receive(&mut slow).0, 404);
    release.send(()).unwrap();
    assert_eq!(receive(&mut waiting).0, 200);
    drop(release);
}

#[test]
fn a_client_that_goes_while_its_request_runs_leaves_no_trace() {
    let (release, hold) = mpsc::channel();
    let rig = Rig::new(Some(hold));
    let mut client = rig.connect();
    send(&mut client, "PUT", "vm.boot", "");
    assert!(matches!(rig.asked.recv(), Ok(Request::VmBoot)));
    drop(client);
    release.send(()).unwrap();
    drop(release);
    assert_eq!(rig.ask("GET", "vmm.ping", "").0, 200);
}

#[test]
fn descriptors_arrive_with_their_request() {
    let rig = Rig::new(None);
    let (mut reader, writer) = io::pipe().unwrap();
    let mut stream = rig.connect();
    let body = r#"{"id":"net7","num_queues":2}"#;
    let head = format!(
        "PUT /api/v1/vm.add-net HTTP/1.1\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream
        .send_with_fd(head.as_bytes(), writer.as_raw_fd())
        .unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let (status, answer) = receive(&mut stream);
    assert_eq!(status, 200);
    assert_eq!(answer, r#"{"id":"net7","bdf":"0000:00:04.0"}"#);
    let Ok(Request::VmAdd(net)) = rig.asked.recv() else {
        panic!("no network card");
    };
    assert_eq!(net.common().id.as_deref(), Some("net7"));
    let copy = net.descriptors().pop().unwrap();
    // SAFETY: `net` owns the descriptor until the end of the test.
    let copy = unsafe { BorrowedFd::borrow_raw(copy) };
    let mut copy = std::fs::File::from(copy.try_clone_to_owned().unwrap());
    copy.write_all(b"x").unwrap();
    let mut byte = [0];
    reader.read_exact(&mut byte).unwrap();
    assert_eq!(byte, *b"x");
}

#[test]
fn descriptors_that_nobody_asked_for_are_refused_and_closed() {
    let rig = Rig::new(None);
    let (mut reader, writer) = io::pipe().unwrap();
    let mut stream = rig.connect();
    let head = b"GET /api/v1/vmm.ping HTTP/1.1\r\n\r\n";
    stream.send_with_fd(&head[..], writer.as_raw_fd()).unwrap();
    drop(writer);
    assert_eq!(receive(&mut stream).0, 400);
    // The server's copy is closed, so the pipe has reached its end.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_inherited_socket_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let fd = OwnedFd::from(socket);
    let raw = fd.as_raw_fd();
    std::mem::forget(fd);
    let listener = Listener::open(&ApiSocket::Fd(raw)).unwrap();
    let (sender, receiver) = channel().unwrap();
    let server = Server::start(listener, sender, &Unconfined).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    send(&mut stream, "GET", "nowhere", "");
    assert_eq!(receive(&mut stream).0, 404);
    // If the machine is gone, the client gets an error instead of no reply.
    drop(receiver);
    send(&mut stream, "GET", "vmm.ping", "");
    assert_eq!(receive(&mut stream).0, 500);
    server.stop();
    assert!(path.exists());
}

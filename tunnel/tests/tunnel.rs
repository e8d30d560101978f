//! Two VMMs, each with a tunnel of its own, and peers that are turned away.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use gantry_tunnel::{
    door::{self, Door},
    doors, relay,
    request::{Answer, Request, read_line},
    serve,
    strangers::MOST,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Longer than any machine needs for one step.
const PATIENCE: Duration = Duration::from_secs(60);

/// An authority, and the certificates that it has signed for `localhost`, in a directory.
fn certificates(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(dir.join("ca-cert.pem"), authority.pem()).unwrap();
    for role in ["client", "server"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        fs::write(dir.join(format!("{role}-cert.pem")), certificate.pem()).unwrap();
        fs::write(dir.join(format!("{role}-key.pem")), key.serialize_pem()).unwrap();
    }
}

/// Serves at a path for as long as the test runs.
fn tunnel(path: &Path) {
    let listener = serve::listen(path).unwrap();
    thread::spawn(move || serve::run(&listener));
}

fn ask(tunnel: &Path, request: &Request) -> (UnixStream, Answer) {
    let mut stream = UnixStream::connect(tunnel).unwrap();
    let mut line = serde_json::to_vec(request).unwrap();
    line.push(b'\n');
    stream.write_all(&line).unwrap();
    let answer = serde_json::from_slice(&read_line(&mut stream).unwrap()).unwrap();
    (stream, answer)
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn only_who_has_a_certificate_gets_through_and_all_bytes_arrive_in_both_directions() {
    let dir = tempfile::tempdir().unwrap();
    let (tls_dir, others) = (dir.path().join("tls"), dir.path().join("others"));
    certificates(&tls_dir);
    certificates(&others);
    let [here, there] = ["here", "there"].map(|name| dir.path().join(name));
    tunnel(&here);
    tunnel(&there);
    let port = free_port();
    let at = format!("127.0.0.1:{port}");
    let to = format!("localhost:{port}");
    let listen = Request::Listen {
        at: at.clone(),
        tls_dir: tls_dir.clone(),
    };
    let (mut destination, answer) = ask(&there, &listen);
    assert_eq!(answer, Answer::Ready);
    // A silent peer, one without TLS, and one with another authority.
    let silent = TcpStream::connect(&at).unwrap();
    TcpStream::connect(&at)
        .unwrap()
        .write_all(b"GET /")
        .unwrap();
    let connect = |tls_dir: &Path| Request::Connect {
        to: to.clone(),
        tls_dir: tls_dir.to_owned(),
    };
    let (_, refused) = ask(&here, &connect(&others));
    assert!(matches!(refused, Answer::Failed(_)), "{refused:?}");
    let (mut source, answer) = ask(&here, &connect(&tls_dir));
    assert_eq!(answer, Answer::Ready);
    drop(silent);
    // More than all buffers together, so that each side has to wait for the other.
    let sent: Vec<u8> = (0..8_u32 << 20).map(|at| ((at * 7) >> 3) as u8).collect();
    let expected = sent.clone();
    let mut writer = source.try_clone().unwrap();
    let sending = thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    destination.set_read_timeout(None).unwrap();
    let mut arrived = Vec::new();
    destination.read_to_end(&mut arrived).unwrap();
    sending.join().unwrap();
    assert!(arrived == expected, "{} bytes", arrived.len());
    destination.write_all(b"thanks").unwrap();
    drop(destination);
    source.set_read_timeout(None).unwrap();
    let mut answer = String::new();
    source.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "thanks");
}

#[test]
fn whoever_connects_between_two_connections_of_a_vm_waits_for_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (tls_dir, path) = (dir.path().join("tls"), dir.path().join("tunnel"));
    certificates(&tls_dir);
    tunnel(&path);
    let port = free_port();
    let at = format!("127.0.0.1:{port}");
    let connect = Request::Connect {
        to: format!("localhost:{port}"),
        tls_dir: tls_dir.clone(),
    };
    let listen = Request::Listen {
        at: at.clone(),
        tls_dir,
    };
    for _ in 0..2 {
        let (mut destination, answer) = ask(&path, &listen);
        assert_eq!(answer, Answer::Ready);
        let (mut source, answer) = ask(&path, &connect);
        assert_eq!(answer, Answer::Ready);
        source.write_all(b"x").unwrap();
        // Nobody waits at the address any more when this arrives.
        destination.read_exact(&mut [0]).unwrap();
        // A peer without a certificate is turned away by the next wait.
        TcpStream::connect(&at).unwrap();
    }
    // It does not stay open forever.
    let start = Instant::now();
    while TcpStream::connect(&at).is_ok() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(doors::OPEN / 10);
    }
}

#[test]
fn what_cannot_be_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tunnel");
    tunnel(&path);
    let nowhere = Request::Connect {
        to: "localhost:1".to_owned(),
        tls_dir: dir.path().join("none"),
    };
    let (_, answer) = ask(&path, &nowhere);
    let Answer::Failed(reason) = answer else {
        panic!("there is a tunnel");
    };
    assert!(
        reason.contains("ca-cert.pem") || reason.contains("client-cert.pem"),
        "{reason}"
    );
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"{}\n").unwrap();
    let answer = read_line(&mut stream).unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("does not parse"));
}

#[test]
fn a_peer_that_never_closes_does_not_keep_a_tunnel_whose_vmm_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let tls_dir = dir.path().join("tls");
    certificates(&tls_dir);
    let door = Door::open("127.0.0.1:0", &tls_dir).unwrap();
    let to = format!("localhost:{}", door.port().unwrap());
    let (vmm, gone) = UnixStream::pair().unwrap();
    let peer = thread::spawn(move || door::connect(&to, &tls_dir).unwrap());
    let known = door.wait(&vmm).unwrap();
    let peer = peer.join().unwrap();
    drop(gone);
    let ended = relay::run(&vmm, known, Duration::from_millis(50)).unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::TimedOut);
    drop(peer);
}

#[test]
fn what_comes_with_the_end_of_the_handshake_is_not_kept_until_more_comes() {
    let dir = tempfile::tempdir().unwrap();
    let tls_dir = dir.path().join("tls");
    certificates(&tls_dir);
    // The network decides whether both arrive in one segment, so this is repeated.
    for _ in 0..20 {
        let door = Door::open("127.0.0.1:0", &tls_dir).unwrap();
        let to = format!("localhost:{}", door.port().unwrap());
        let (vmm, mut end) = UnixStream::pair().unwrap();
        let tls_dir = tls_dir.clone();
        let peer = thread::spawn(move || {
            let mut known = door::connect(&to, &tls_dir).unwrap();
            known.tls.writer().write_all(b"first").unwrap();
            while known.tls.wants_write() {
                known.tls.write_tls(&mut known.socket).unwrap();
            }
            known
        });
        let known = door.wait(&vmm).unwrap();
        let relayed = thread::spawn(move || relay::run(&vmm, known, Duration::from_millis(50)));
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut first = [0; 5];
        end.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"first");
        drop((end, peer.join().unwrap()));
        let _ = relayed.join().unwrap();
    }
}

/// A process that ends with its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program, which serves at a path, and returns the lines that it prints.
fn program(path: &Path) -> (Process, mpsc::Receiver<String>) {
    let process = Command::new(env!("CARGO_BIN_EXE_gantry-tunnel"))
        .arg("--socket")
        .arg(path)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut process = Process(process);
    let lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
    let (sender, said) = mpsc::channel();
    // Ends with the program.
    thread::spawn(move || {
        for line in lines {
            let _ = sender.send(line.unwrap());
        }
    });
    let first = said.recv_timeout(PATIENCE).unwrap();
    assert!(first.contains("serving at"), "{first}");
    (process, said)
}

#[test]
fn tunnels_that_fail_one_after_the_other_are_counted_and_not_all_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tunnel");
    let (_process, said) = program(&path);
    let start = Instant::now();
    let mut failed = 0;
    let line = loop {
        assert!(start.elapsed() < PATIENCE, "{failed} have failed");
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"{}\n").unwrap();
        read_line(&mut stream).unwrap();
        failed += 1;
        if let Some(line) = said.try_iter().find(|line| line.contains("others before")) {
            break line;
        }
    };
    assert!(
        line.contains("no tunnel: the request does not parse"),
        "{line}"
    );
}

#[test]
fn too_many_without_a_certificate_are_named_and_keep_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let (tls_dir, path) = (dir.path().join("tls"), dir.path().join("tunnel"));
    certificates(&tls_dir);
    let (_process, said) = program(&path);
    let port = free_port();
    let at = format!("127.0.0.1:{port}");
    let listen = Request::Listen {
        at: at.clone(),
        tls_dir: tls_dir.clone(),
    };
    let connect = Request::Connect {
        to: format!("localhost:{port}"),
        tls_dir,
    };
    let (vmm, answer) = ask(&path, &listen);
    assert_eq!(answer, Answer::Ready);
    let silent: Vec<_> = (0..=MOST)
        .map(|_| TcpStream::connect(&at).unwrap())
        .collect();
    let oldest = silent[0].local_addr().unwrap();
    let line = said.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        line,
        format!(
            "gantry-tunnel: {oldest} is turned away: {MOST} others have come before it has shown a certificate"
        )
    );
    // They occupy all places, but keep nobody out.
    let (_source, answer) = ask(&path, &connect);
    assert_eq!(answer, Answer::Ready);
    drop((vmm, silent));
}

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    let program = env!("CARGO_BIN_EXE_gantry-tunnel");
    let lines = ["--help", "--version", "man", "completions bash"];
    manual::check_unread(program, &lines);
}

#[test]
fn a_log_that_may_not_grow_does_not_end_the_program_by_a_signal() {
    let program = env!("CARGO_BIN_EXE_gantry-tunnel");
    manual::check_scarce(program, "--socket /proc/none/socket", None);
}

#[test]
fn a_client_without_a_thread_is_refused_and_the_tunnel_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let socket = dir.path().join("socket");
    let program = env!("CARGO_BIN_EXE_gantry-tunnel");
    let line = format!("--socket {}", socket.display());
    let Some(mut command) = manual::with_one_process(program, &line) else {
        return;
    };
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.contains("serving"), "{first}");
    for _ in 0..2 {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let said = lines.next().unwrap().unwrap();
        assert!(
            said.contains("turned away: cannot start a thread"),
            "{said}"
        );
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it is closed");
    }
    process.kill().unwrap();
    process.wait().unwrap();
}

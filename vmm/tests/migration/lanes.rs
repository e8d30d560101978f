//! VMs whose memory goes over many connections.

use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::Child,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use gantry_tunnel::request::{Answer, answer, read_line};
use vmm_migration::{
    frame::{HEADER, Header, Kind, MAX_PAGES, MAX_RUNS, Run, encode_runs},
    lanes::TOKEN,
};

use super::{
    Fault, PATIENCE, Vmm, certificates, check_counting, check_moved, free_port, has_kvm,
    one_runs_after, pass,
};

/// As many as there may be.
const MOST: usize = 128;

/// Connections beside the first one in the matrix of what can happen to them.
const FURTHER: usize = 3;

/// A VMM that waits at a port, and whoever waits for that.
fn awaiting(dir: &Path, name: &str, port: u16, from: &Vmm, how: &[&str]) -> (Vmm, Child) {
    let mut vmm = Vmm::start(dir, name, &[]);
    let receiving = vmm.receive_at(&format!("tcp:127.0.0.1:{port}"), &from.serial, how);
    vmm.until("it listens", |_| {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    (vmm, receiving)
}

/// Between both sides, for all of their connections: frames with pages that have passed by each of them.
fn counting(path: &Path, to: &Path) -> Arc<Mutex<Vec<u32>>> {
    let listener = UnixListener::bind(path).unwrap();
    let (counted, to) = (Arc::<Mutex<Vec<u32>>>::default(), to.to_owned());
    let frames = Arc::clone(&counted);
    thread::spawn(move || {
        for (number, source) in listener.incoming().enumerate() {
            let source = source.unwrap();
            // The wait is over.
            let Ok(destination) = UnixStream::connect(&to) else {
                return;
            };
            frames.lock().unwrap().push(0);
            let clone = |stream: &UnixStream| stream.try_clone().unwrap();
            let forward = (clone(&source), clone(&destination));
            let frames = Arc::clone(&frames);
            let count = move |kind: Kind, head: &mut [u8]| {
                let head: &[u8; HEADER] = (&*head).try_into().unwrap();
                // Without pages there is a count of none.
                if kind == Kind::Pages && Header::decode(head).unwrap().length > 4 {
                    frames.lock().unwrap()[number] += 1;
                }
                true
            };
            thread::spawn(move || pass(forward.0, forward.1, count));
            thread::spawn(move || pass(destination, source, |_, _| true));
        }
    });
    counted
}

/// The next one who connects.
fn accept(listener: &UnixListener) -> UnixStream {
    let mut entry = [libc::pollfd {
        fd: listener.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    let came = base::poll::poll(&mut entry, Some(PATIENCE)).unwrap();
    assert_eq!(came, 1, "nobody has connected");
    listener.accept().unwrap().0
}

#[test]
fn memory_goes_over_as_many_connections_as_are_asked_for() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::filling(dir.path(), "size=64M", &[]);
    let mut counted = Vec::new();
    let mut by = |from: &mut Vmm, name: &str, how: &[&str]| {
        let to_it = |awaited: &Path| {
            let path = awaited.with_file_name("wire");
            counted.push(counting(&path, awaited));
            path
        };
        from.move_by(dir.path(), name, how, to_it)
    };
    let many = ["--connections", "128", "--verify"];
    let (mut second, info) = by(&mut first, "second", &many);
    println!("by {MOST} connections: {info}");
    let (mut third, info) = by(&mut second, "third", &["--connections", "4", "--verify"]);
    println!("by four: {info}");
    let (fourth, _) = by(&mut third, "fourth", &["--verify"]);
    for (counted, connections) in counted.into_iter().zip([MOST, 4, 0]) {
        let frames = counted.lock().unwrap();
        let (first, further) = frames.split_first().unwrap();
        // One carries all, or says which ones do.
        assert_eq!(*first > 0, connections == 0, "{frames:?}");
        assert_eq!(further.len(), connections, "{frames:?}");
        assert!(further.iter().all(|frames| *frames > 0), "{frames:?}");
    }
    // The same over TCP.
    let paths = ["--paths", dir.path().to_str().unwrap()];
    let port = free_port();
    let (mut fifth, receiving) = awaiting(dir.path(), "fifth", port, &fourth, &paths);
    let sent = fourth.send(&format!("tcp:127.0.0.1:{port}"), &many);
    check_moved(&sent, receiving, &fourth, &fifth);
    fifth.until("it counts on", |vmm| vmm.printed().len() > 100);
    check_counting(&[&first, &second, &third, &fourth, &fifth]);
    for count in ["0", "129"] {
        let refused = fifth.ctl(&["send-migration", "unix:/nowhere", "--connections", count]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && text.contains("1 to 128"),
            "{text}"
        );
    }
}

#[test]
fn many_connections_are_encrypted_and_who_never_shows_a_certificate_holds_none_of_them_up() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [tls_dir, tunnel] = ["tls", "tunnel"].map(|name| dir.path().join(name));
    certificates(&tls_dir);
    let listener = gantry_tunnel::serve::listen(&tunnel).unwrap();
    thread::spawn(move || gantry_tunnel::serve::run(&listener));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let [tls_dir, tunnel] = [&tls_dir, &tunnel].map(|path| text(path));
    let tls = ["--tls-dir", &tls_dir, "--tunnel", &tunnel];
    let first = Vmm::filling(dir.path(), "size=32M", &[]);
    let port = free_port();
    let (mut second, receiving) = awaiting(dir.path(), "second", port, &first, &tls);
    let url = format!("tcp:localhost:{port}");
    let many = ["--verify", "--connections", "128"];
    let (sent, _silent) = thread::scope(|scope| {
        let (over, is_over) = mpsc::channel::<()>();
        // Fewer than a tunnel speaks to at once.
        let silent = scope.spawn(move || {
            let mut silent = Vec::new();
            while silent.len() < 8
                && is_over.recv_timeout(Duration::from_millis(1))
                    == Err(mpsc::RecvTimeoutError::Timeout)
            {
                silent.extend(TcpStream::connect(("127.0.0.1", port)));
            }
            silent
        });
        let sent = first.send(&url, &[&tls[..], &many].concat());
        drop(over);
        (sent, silent.join().unwrap())
    });
    check_moved(&sent, receiving, &first, &second);
    println!("by TLS: {}", first.migration());
    second.until("it counts on", |vmm| vmm.printed().len() > 100);
    check_counting(&[&first, &second]);
}

/// The socket of a tunnel that cannot listen for some time: these of the requests to listen fail, counted from 0.
fn short_of_something(path: &Path, tunnel: &Path, fail: Range<usize>) -> Arc<AtomicUsize> {
    let listener = UnixListener::bind(path).unwrap();
    let tunnel = tunnel.to_owned();
    let asked = Arc::<AtomicUsize>::default();
    let requests = Arc::clone(&asked);
    thread::spawn(move || {
        for vmm in listener.incoming() {
            let mut vmm = vmm.unwrap();
            let mut line = read_line(&mut vmm).unwrap();
            let is_listen = line.starts_with(b"{\"listen\"");
            if is_listen && fail.contains(&requests.fetch_add(1, Ordering::SeqCst)) {
                let failed = Answer::Failed("too many files are open".to_owned());
                answer(&mut vmm, &failed).unwrap();
                continue;
            }
            vmm.set_read_timeout(None).unwrap();
            line.push(b'\n');
            let mut tunnel = UnixStream::connect(&tunnel).unwrap();
            tunnel.write_all(&line).unwrap();
            let clone = |stream: &UnixStream| stream.try_clone().unwrap();
            for (mut from, mut to) in [(clone(&vmm), clone(&tunnel)), (tunnel, vmm)] {
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    asked
}

#[test]
fn a_tunnel_that_cannot_listen_for_a_moment_does_not_end_a_move_of_which_some_connections_have_come()
 {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [tls_dir, tunnel, short] = ["tls", "tunnel", "short"].map(|name| dir.path().join(name));
    certificates(&tls_dir);
    let listener = gantry_tunnel::serve::listen(&tunnel).unwrap();
    thread::spawn(move || gantry_tunnel::serve::run(&listener));
    // The first one is for the offer.
    let asked = short_of_something(&short, &tunnel, 2..4);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let [tls_dir, tunnel, short] = [&tls_dir, &tunnel, &short].map(|path| text(path));
    let mut first = Vmm::filling(dir.path(), "size=32M", &[]);
    let port = free_port();
    let tls = ["--tls-dir", &tls_dir, "--tunnel", &short];
    let (second, receiving) = awaiting(dir.path(), "second", port, &first, &tls);
    let how = [
        "--tls-dir",
        &tls_dir,
        "--tunnel",
        &tunnel,
        "--connections",
        "4",
    ];
    let sent = first.send(&format!("tcp:localhost:{port}"), &how);
    check_moved(&sent, receiving, &first, &second);
    assert_eq!(asked.load(Ordering::SeqCst), 1 + 4 + 2);
    first.until("it has left", |vmm| vmm.migration()["phase"] == "Completed");
    check_counting(&[&first, &second]);
}

#[test]
fn whatever_happens_to_a_further_connection_one_guest_at_most_runs_and_it_has_the_disk() {
    if !has_kvm() {
        return;
    }
    let faults = [
        (Fault::SourceKilled, None),
        (Fault::DestinationKilled, Some(0)),
        (Fault::Cut, Some(0)),
        (Fault::Damaged, Some(0)),
        (Fault::Stalled, Some(0)),
    ];
    for at in [Kind::Pages, Kind::Barrier] {
        for (fault, one) in faults {
            one_runs_after(at, fault, (FURTHER, FURTHER), one);
        }
    }
    // It is made again.
    for fault in [Fault::Cut, Fault::Damaged] {
        one_runs_after(Kind::Join, fault, (1, FURTHER), Some(1));
    }
}

#[test]
fn one_of_many_connections_that_fails_leaves_the_guest_where_it_is() {
    if !has_kvm() {
        return;
    }
    let one_of = |at, fault, one| one_runs_after(at, fault, (77, MOST), one);
    one_of(Kind::Pages, Fault::Cut, Some(0));
    one_of(Kind::Pages, Fault::Stalled, Some(0));
    one_of(Kind::Barrier, Fault::Damaged, Some(0));
    // While they are made: without the other side nobody waits for the rest of them.
    one_of(Kind::Join, Fault::SourceKilled, None);
    one_of(Kind::Join, Fault::DestinationKilled, Some(0));
}

/// What a process has in memory that is its own, in bytes.
fn own_memory(process: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<usize>().unwrap() << 10
}

/// Threads of a process that carry memory.
fn carriers(process: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names
        .filter(|name| {
            let number = name.trim().strip_prefix("_migration");
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        })
        .count()
}

/// Bytes that the other side has not received.
fn unreceived(stream: &UnixStream) -> libc::c_int {
    let mut bytes = 0;
    // SAFETY: the kernel writes a number there.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(done, 0);
    bytes
}

/// All but the last byte of the largest frame: as many runs as there may be, and a MiB of pages.
fn endless_frame() -> Vec<u8> {
    let pages = MAX_PAGES / 4096;
    // The zeroes name pages above those that the frame has, each of them once.
    let runs: Vec<Run> = (0..MAX_RUNS)
        .map(|number| Run {
            guest: (16 << 20) + number as u64 * 4096,
            pages: 1,
            zero: number >= pages,
        })
        .collect();
    let mut list = Vec::new();
    encode_runs(&runs, &mut list);
    let mut frame = Header::of_pages(0, &list, MAX_PAGES, None)
        .encode()
        .to_vec();
    frame.extend(&list);
    frame.resize(frame.len() + MAX_PAGES - 1, 0x5a);
    frame
}

/// Passes a frame with so many bytes of contents on.
fn pass_one(from: &mut UnixStream, to: &mut UnixStream, contents: usize) {
    let mut frame = vec![0; HEADER + contents];
    from.read_exact(&mut frame).unwrap();
    to.write_all(&frame).unwrap();
}

#[test]
fn frames_that_never_end_on_all_connections_cost_the_destination_little_memory() {
    /// More than stacks and lists need, and much less than the frames have.
    const LITTLE: usize = 32 << 20;
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::counting(dir.path(), "size=32M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (receiving, _) = second.receive(&first.serial);
    let wire = dir.path().join("wire");
    let listener = UnixListener::bind(&wire).unwrap();
    let to = second.socket.with_file_name("migration");
    first.send_migration(&serde_json::json!({
        "destination_url": format!("unix:{}", wire.display()), "preserve_source": true,
        "connections": MOST, "stall_s": PATIENCE.as_secs(),
    }));
    let connected = || {
        let source = accept(&listener);
        (source, UnixStream::connect(&to).unwrap())
    };
    let (source, destination) = connected();
    let clone = |stream: &UnixStream| stream.try_clone().unwrap();
    let (control, forward) = (clone(&destination), (clone(&source), clone(&destination)));
    for (mut from, mut to) in [forward, (destination, source)] {
        // Ends with the connection.
        thread::spawn(move || std::io::copy(&mut from, &mut to).is_ok());
    }
    let mut lanes: Vec<_> = (0..MOST)
        .map(|_| {
            let (mut source, mut destination) = connected();
            pass_one(&mut source, &mut destination, TOKEN);
            pass_one(&mut destination, &mut source, 0);
            (source, destination)
        })
        .collect();
    let process = second.process.id();
    second.until("it takes from all of them", |_| carriers(process) == MOST);
    let before = own_memory(process);
    let frame = endless_frame();
    for (_, destination) in &mut lanes {
        destination.write_all(&frame).unwrap();
    }
    second.until("it has received all of it", |_| {
        lanes
            .iter()
            .all(|(_, destination)| unreceived(destination) == 0)
    });
    let more = own_memory(process).saturating_sub(before);
    println!(
        "{} KiB more for {} MiB of frames",
        more >> 10,
        (MOST * frame.len()) >> 20
    );
    assert!(more < LITTLE, "{more} bytes more, after {before}");
    // Without the source nothing of it is left.
    control.shutdown(Shutdown::Both).unwrap();
    let received = receiving.wait_with_output().unwrap();
    assert!(!received.status.success());
    second.until("its threads have ended", |_| carriers(process) == 0);
    drop(lanes);
    first.until("it has failed", |vmm| vmm.migration()["phase"] == "Failed");
    let process = first.process.id();
    first.until("its threads have ended", |_| carriers(process) == 0);
    let before = first.printed().len();
    first.until("it counts on", |vmm| vmm.printed().len() > before + 20);
    check_counting(&[&first]);
}

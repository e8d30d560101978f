//! VMs whose memory goes over many connections.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::Child,
    sync::mpsc,
    thread,
    time::Duration,
};

use vmm::migration::{
    frame::{HEADER, Header, Kind, MAX_PAGES, MAX_RUNS, Run, encode_runs},
    lanes::TOKEN,
};

use super::{Fault, PATIENCE, Vmm, certificates, check_counting, has_kvm, one_runs_after};

/// As many as there may be.
const MOST: usize = 128;

/// Connections beside the first one in the matrix of what can happen to them.
const FURTHER: usize = 3;

/// A port of this host that is free.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A VMM that waits at a port, and whoever waits for that.
fn awaiting(dir: &Path, name: &str, port: u16, from: &Vmm, how: &[&str]) -> (Vmm, Child) {
    let mut vmm = Vmm::start(dir, name, &[]);
    let receiving = vmm.receive_at(&format!("tcp:127.0.0.1:{port}"), &from.serial, how);
    vmm.until("it listens", |_| {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    (vmm, receiving)
}

#[test]
fn memory_goes_over_as_many_connections_as_are_asked_for() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::filling(dir.path(), "size=64M", &[]);
    let many = ["--connections", "128", "--verify"];
    let (mut second, info) = first.move_to(dir.path(), "second", &many);
    println!("by {MOST} connections: {info}");
    let few = ["--connections", "4", "--verify"];
    let (third, info) = second.move_to(dir.path(), "third", &few);
    println!("by four: {info}");
    // The same over TCP.
    let port = free_port();
    let (mut fourth, receiving) = awaiting(dir.path(), "fourth", port, &third, &[]);
    let url = format!("tcp:127.0.0.1:{port}");
    let all = ["send-migration", &url, "--watch", "--preserve-source"];
    let sent = third.ctl(&[&all[..], &many].concat());
    let received = receiving.wait_with_output().unwrap();
    assert!(
        sent.status.success() && received.status.success(),
        "{}\n{}",
        third.said(),
        fourth.said()
    );
    fourth.until("it counts on", |vmm| vmm.printed().len() > 100);
    check_counting(&[&first, &second, &third, &fourth]);
    for count in ["0", "129"] {
        let refused = fourth.ctl(&["send-migration", "unix:/nowhere", "--connections", count]);
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
    let all = ["send-migration", &url, "--watch", "--preserve-source"];
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
        let sent = first.ctl(&[&all[..], &tls, &many].concat());
        drop(over);
        (sent, silent.join().unwrap())
    });
    let received = receiving.wait_with_output().unwrap();
    assert!(
        sent.status.success() && received.status.success(),
        "{}\n{}",
        first.said(),
        second.said()
    );
    println!("by TLS: {}", first.migration());
    second.until("it counts on", |vmm| vmm.printed().len() > 100);
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
    let accept = || {
        let (source, _) = listener.accept().unwrap();
        (source, UnixStream::connect(&to).unwrap())
    };
    let (source, destination) = accept();
    let clone = |stream: &UnixStream| stream.try_clone().unwrap();
    let (control, forward) = (clone(&destination), (clone(&source), clone(&destination)));
    for (mut from, mut to) in [forward, (destination, source)] {
        // Ends with the connection.
        thread::spawn(move || std::io::copy(&mut from, &mut to).is_ok());
    }
    let mut lanes: Vec<_> = (0..MOST)
        .map(|_| {
            let (mut source, mut destination) = accept();
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
    control.shutdown(std::net::Shutdown::Both).unwrap();
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

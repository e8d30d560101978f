//! VMs that move between processes of this host, with a guest that is made by hand: it runs on any
//! KVM, in a fraction of a second. Without one there is nothing to test.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::{
        fs::FileExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use devices::disk::{LockGranularity, lock};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;
use vmm_migration::frame::{HEADER, Header, Kind};

#[path = "migration/applications.rs"]
mod applications;
#[path = "migration/door.rs"]
mod door;
#[path = "migration/firmware.rs"]
mod firmware;
#[path = "migration/hanging_flush.rs"]
mod hanging_flush;
#[path = "migration/lanes.rs"]
mod lanes;
#[path = "migration/metrics.rs"]
mod metrics;
#[path = "migration/on_demand.rs"]
mod on_demand;
#[path = "migration/power_off.rs"]
mod power_off;
#[path = "migration/slow_disk.rs"]
mod slow_disk;
#[path = "migration/storage.rs"]
mod storage;
#[path = "migration/watched.rs"]
mod watched;
// By its path: the crate that has it is above this one.
#[path = "../../tests/src/bare_kernel.rs"]
#[allow(dead_code)]
mod bare_kernel;

const GANTRY: &str = env!("CARGO_BIN_EXE_gantry");

/// Longer than any machine needs for one step.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the guest is loaded, and starts.
const AT: u32 = 0x10_0000;

/// A guest that counts: each number is a line of eight hexadecimal digits on the serial port. It is
/// in a register and in memory, and they are compared; and it is written to one of 256 pages. An `X`
/// says that memory has changed.
fn counting_code() -> Vec<u8> {
    let mut code = vec![0xfa, 0x31, 0xdb]; // cli; xor ebx, ebx
    let outer = code.len();
    code.extend([0x39, 0x1d, 0, 0, 0x20, 0]); // cmp [0x200000], ebx
    code.extend([0x74, 8]); // je over the next three
    code.extend([0xb0, b'X', 0xba, 0xf8, 3, 0, 0, 0xee]); // mov al, 'X'; mov edx, 0x3f8; out
    code.push(0x43); // inc ebx
    code.extend([0x89, 0x1d, 0, 0, 0x20, 0]); // mov [0x200000], ebx
    code.extend([0x0f, 0xb6, 0xc3, 0xc1, 0xe0, 12]); // movzx eax, bl; shl eax, 12
    code.extend([0x89, 0x98, 0, 0, 0x40, 0]); // mov [eax + 0x400000], ebx
    code.extend([0xb9, 8, 0, 0, 0, 0xba, 0xf8, 3, 0, 0]); // mov ecx, 8; mov edx, 0x3f8
    code.extend([0x89, 0xde]); // mov esi, ebx
    let digit = code.len();
    code.extend([0xc1, 0xc6, 4, 0x89, 0xf0, 0x83, 0xe0, 15]); // rol esi, 4; eax = esi & 15
    code.extend([0x3c, 10, 0x72, 2, 4, 39, 4, 48, 0xee]); // to a digit; out dx, al
    code.extend([0x49, 0x75]); // dec ecx; jnz digit
    code.push(back(digit, code.len()));
    code.extend([0xb0, 10, 0xee]); // the end of the line
    code.extend([0xb9, 0, 8, 0, 0, 0x49, 0x75, 0xfd]); // a pause
    code.push(0xeb); // jmp outer
    code.push(back(outer, code.len()));
    code
}

/// Writes to 2048 pages from 0x500000 on: 8 MiB.
fn filling_code() -> Vec<u8> {
    let mut code = vec![0xb8, 0, 0, 0x50, 0]; // mov eax, 0x500000
    let next = code.len();
    code.extend([0x89, 0x00, 0x05, 0, 0x10, 0, 0]); // mov [eax], eax; add eax, 4096
    code.extend([0x3d, 0, 0, 0xd0, 0, 0x72]); // cmp eax, 0xd00000; jb next
    code.push(back(next, code.len()));
    code
}

/// The operand at `at` of a short jump back to `to`.
fn back(to: usize, at: usize) -> u8 {
    i8::try_from(to as i64 - (at as i64 + 1))
        .unwrap()
        .cast_unsigned()
}

fn kernel(code: &[u8]) -> Vec<u8> {
    bare_kernel::elf(AT, code)
}

/// A VMM in a folder of its own, where its guest prints to `serial`; killed with the test.
struct Vmm {
    process: Child,
    socket: PathBuf,
    serial: PathBuf,
    log: PathBuf,
}

impl Vmm {
    fn start(dir: &Path, name: &str, more: &[&str]) -> Self {
        let dir = dir.join(name);
        fs::create_dir(&dir).unwrap();
        let log = dir.join("log");
        let process = Command::new(GANTRY)
            .arg("--api-socket")
            .arg(dir.join("api"))
            .args(["-v", "--seccomp", "true"])
            .args(more)
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut vmm = Self {
            process,
            socket: dir.join("api"),
            serial: dir.join("serial"),
            log,
        };
        vmm.until("it answers", |vmm| vmm.ctl(&["ping"]).status.success());
        vmm
    }

    /// One with a guest that counts.
    fn counting(dir: &Path, memory: &str, more: &[&str]) -> Self {
        let serial = format!("file={}", dir.join("first/serial").display());
        let mut vmm = Self::counting_to(dir, memory, &serial, more);
        vmm.until("it counts", |vmm| !vmm.printed().is_empty());
        vmm
    }

    /// As [`Vmm::counting`], with several frames of memory.
    fn filling(dir: &Path, memory: &str, more: &[&str]) -> Self {
        let serial = format!("file={}", dir.join("first/serial").display());
        let code = [filling_code(), counting_code()].concat();
        let mut vmm = Self::running(dir, &code, memory, &serial, more);
        vmm.until("it counts", |vmm| !vmm.printed().is_empty());
        vmm
    }

    /// As [`Vmm::counting`], with another serial port.
    fn counting_to(dir: &Path, memory: &str, serial: &str, more: &[&str]) -> Self {
        Self::running(dir, &counting_code(), memory, serial, more)
    }

    fn running(dir: &Path, code: &[u8], memory: &str, serial: &str, more: &[&str]) -> Self {
        let path = dir.join("kernel");
        fs::write(&path, kernel(code)).unwrap();
        let arguments = [
            &["--kernel", path.to_str().unwrap(), "--memory", memory][..],
            &["--serial", serial, "--console", "off", "--cpus", "boot=1"],
            more,
        ];
        Self::start(dir, "first", &arguments.concat())
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            let ended = self.process.try_wait().unwrap();
            assert!(
                ended.is_none() && start.elapsed() < PATIENCE,
                "not: {what}; {ended:?}\n{}",
                self.said()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn ctl(&self, arguments: &[&str]) -> Output {
        let socket = self.socket.to_str().unwrap();
        let all = [&["ctl", "--socket", socket], arguments].concat();
        Command::new(GANTRY).args(all).output().unwrap()
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn printed(&self) -> String {
        fs::read_to_string(&self.serial).unwrap_or_default()
    }

    /// Waits for a guest that prints to `serial`, and returns the client that waits, and the URL.
    fn receive(&mut self, serial: &Path) -> (Child, String) {
        let path = self.socket.with_file_name("migration");
        let url = format!("unix:{}", path.display());
        let receiving = self.receive_at(&url, serial, &[]);
        self.until("it listens", |_| path.exists());
        (receiving, url)
    }

    fn receive_at(&self, url: &str, serial: &Path, how: &[&str]) -> Child {
        let rename = format!("{}={}", serial.display(), self.serial.display());
        Command::new(GANTRY)
            .args(["ctl", "--socket", self.socket.to_str().unwrap()])
            .args(["receive-migration", url, "--rename", &rename])
            .args(how)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// `vm.send-migration`, also with what the command line has no option for.
    fn send_migration(&self, body: &Value) {
        let body = body.to_string();
        let request = format!(
            "PUT /api/v1/vm.send-migration HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 204", "{}", self.said());
    }

    /// What `vm.migration` says.
    fn migration(&self) -> Value {
        serde_json::from_slice(&self.ctl(&["migration"]).stdout).unwrap_or_default()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Moves the guest to a new VMM in `dir`, and returns that and what `vm.migration` says.
    fn move_to(&mut self, dir: &Path, name: &str, how: &[&str]) -> (Self, Value) {
        self.move_by(dir, name, how, Path::to_owned)
    }

    /// The same by a path that leads to the one where it is awaited.
    fn move_by(
        &mut self,
        dir: &Path,
        name: &str,
        how: &[&str],
        leads_to: impl FnOnce(&Path) -> PathBuf,
    ) -> (Self, Value) {
        let mut next = Self::start(dir, name, &[]);
        let (receiving, _) = next.receive(&self.serial);
        let path = leads_to(&next.socket.with_file_name("migration"));
        let sent = self.send(&format!("unix:{}", path.display()), how);
        check_moved(&sent, receiving, self, &next);
        (next, self.migration())
    }

    /// `send-migration`, to its end; the VMM stays.
    fn send(&self, url: &str, how: &[&str]) -> Output {
        let all = ["send-migration", url, "--watch", "--preserve-source"];
        self.ctl(&[&all[..], how].concat())
    }
}

/// Both sides of a move say that it is over, and that all went well.
fn check_moved(sent: &Output, receiving: Child, first: &Vmm, second: &Vmm) {
    let received = receiving.wait_with_output().unwrap();
    let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        sent.status.success() && received.status.success(),
        "{}{}\n{}\n{}",
        text(sent),
        text(&received),
        first.said(),
        second.said()
    );
}

/// A port of this host that is free.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.said());
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn has_kvm() -> bool {
    let there = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !there {
        eprintln!("not tested: there is no /dev/kvm here");
    }
    there
}

/// What the guest has printed wherever it was: every number once, in order.
fn check_counting(everywhere: &[&Vmm]) {
    let text: String = everywhere.iter().map(|vmm| vmm.printed()).collect();
    let mut lines: Vec<_> = text.lines().collect();
    // It may be printing.
    lines.pop();
    assert!(lines.len() > 10, "{lines:?}");
    for (line, expected) in lines.iter().zip(1..) {
        assert_eq!(u32::from_str_radix(line, 16), Ok(expected), "{line:?}");
    }
}

#[test]
fn a_guest_moves_on_without_losing_or_repeating_anything() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={},image_type=raw", disk.display());
    let memory = "size=64M,shared=on";
    let mut first = Vmm::counting(dir.path(), memory, &["--disk", &disk]);
    // By then it has written all of its pages.
    first.until("it has counted on", |vmm| vmm.printed().len() > 9 * 300);
    let (mut second, handed) = first.move_to(dir.path(), "second", &["--local"]);
    assert_eq!(
        (&handed["sent_bytes"], &handed["rounds"]),
        (&0.into(), &0.into()),
        "{handed}"
    );
    let (mut third, copied) = second.move_to(dir.path(), "third", &["--verify"]);
    assert!(copied["sent_bytes"].as_u64().unwrap() > 256 * 4096);
    let slow = ["--bandwidth", "1M", "--max-throttle", "99"];
    let (mut fourth, limited) = third.move_to(dir.path(), "fourth", &slow);
    println!("handed over: {handed}\ncopied: {copied}\nlimited: {limited}");
    fourth.until("it counts on", |vmm| vmm.printed().len() > 1000);
    check_counting(&[&first, &second, &third, &fourth]);
    assert!(limited["elapsed_ms"].as_u64().unwrap() >= 900, "{limited}");
}

/// What a process has: descriptors, mappings, threads.
fn possessions(process: u32) -> [usize; 3] {
    let count = |of: &str| {
        let entries = fs::read_dir(format!("/proc/{process}/{of}"));
        entries.unwrap().count()
    };
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    [count("fd"), maps.lines().count(), count("task")]
}

/// A guest goes to and fro between two processes. What each has when it has no guest, for each of its
/// turns.
fn to_and_fro(moves: usize) -> [Vec<[usize; 3]>; 2] {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={},image_type=raw", path.display());
    let more = ["--disk", &disk, "--balloon", "size=0"];
    let mut both = [
        Vmm::counting(dir.path(), "size=32M", &more),
        Vmm::start(dir.path(), "second", &[]),
    ];
    let mut had = [Vec::new(), Vec::new()];
    let mut printed = String::new();
    for turn in 0..moves {
        let serial = dir.path().join(format!("serial{turn}"));
        let before = both[turn % 2].serial.clone();
        let [first, second] = &mut both;
        let (from, to) = match turn % 2 {
            0 => (first, second),
            _ => (second, first),
        };
        to.serial = serial;
        let (receiving, url) = to.receive(&before);
        // So that further connections leave nothing either.
        let how: &[&str] = match turn % 3 {
            0 => &["--connections", "128"],
            _ => &["--verify"],
        };
        let sent = from.send(&url, how);
        check_moved(&sent, receiving, from, to);
        assert!(from.ctl(&["delete"]).status.success());
        // Threads end by themselves, and connections of clients.
        let process = from.process.id();
        let mut least = possessions(process);
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(10));
            let now = possessions(process);
            least = [0, 1, 2].map(|what: usize| least[what].min(now[what]));
        }
        had[turn % 2].push(least);
        to.until("it counts on", |vmm| vmm.printed().len() > 20);
        printed.push_str(&fs::read_to_string(before).unwrap());
    }
    let mut lines: Vec<_> = printed.lines().collect();
    lines.pop();
    for (line, expected) in lines.iter().zip(1..) {
        assert_eq!(u32::from_str_radix(line, 16), Ok(expected), "{line:?}");
    }
    had
}

/// Neither descriptors nor threads become more, and mappings by no more than the allocator's: each thread that makes or ends a
/// machine may have some, and each of many connections.
fn check_possessions(had: &[Vec<[usize; 3]>; 2]) {
    for (process, of_one) in had.iter().enumerate() {
        let (early, last) = (of_one[1], of_one[of_one.len() - 1]);
        assert!(last[0] <= early[0] && last[2] <= early[2], "{of_one:?}");
        // One way of a move leaves another number of them than another.
        for way in 0..3 {
            let turns = of_one.iter().zip((process..).step_by(2));
            let of_way = turns.filter(|(_, turn)| turn % 3 == way);
            let mappings: Vec<usize> = of_way.map(|([_, mappings, _], _)| *mappings).collect();
            assert!(
                mappings[mappings.len() - 1] <= mappings[0] + 16,
                "{of_one:?}"
            );
        }
    }
}

#[test]
fn to_and_fro_nothing_is_left_behind() {
    if has_kvm() {
        // Twice each way from each side.
        check_possessions(&to_and_fro(12));
    }
}

/// `cargo test -p vmm --test migration fifty -- --ignored --nocapture`
#[test]
#[ignore = "takes a minute: its figures are in measurements/migration.md"]
fn fifty_moves_leave_nothing_behind() {
    if has_kvm() {
        let had = to_and_fro(50);
        println!("descriptors, mappings, threads: {had:?}");
        check_possessions(&had);
    }
}

/// `cargo test -p vmm --test migration rate -- --ignored --nocapture`
#[test]
#[ignore = "takes half a minute: its figures are in measurements/migration.md"]
fn rate_of_a_guest_while_its_memory_moves() {
    const LOOK: Duration = Duration::from_secs(4);
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::counting(dir.path(), "size=64M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (mut receiving, url) = second.receive(&first.serial);
    let rate = |vmm: &Vmm| {
        let (start, before) = (Instant::now(), vmm.printed().len());
        thread::sleep(LOOK);
        // A line has nine bytes.
        (vmm.printed().len() - before) as f64 / 9.0 / start.elapsed().as_secs_f64()
    };
    let alone = rate(&first);
    // It writes its 256 pages all the time, so that rounds go on.
    let for_ever = [
        "--bandwidth",
        "10M",
        "--downtime-ms",
        "1",
        "--max-throttle",
        "0",
    ];
    let sent = first.ctl(&[&["send-migration", &url][..], &for_ever].concat());
    assert!(sent.status.success());
    first.until("memory moves", |vmm| vmm.migration()["phase"] == "Rounds");
    let moving = rate(&first);
    let info = first.migration();
    assert!(first.ctl(&["cancel-migration"]).status.success());
    receiving.wait().unwrap();
    let after = rate(&first);
    println!(
        "numbers a second: {alone:.0} alone, {moving:.0} while memory moves, {after:.0} after; {info}"
    );
    assert_eq!(info["phase"], "Rounds");
}

/// The next numbers that a guest prints to a socket.
fn numbers(socket: &Path) -> Vec<u32> {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let lines = BufReader::new(stream).lines().skip(1).take(20);
    let number = |line: io::Result<String>| u32::from_str_radix(&line.unwrap(), 16).unwrap();
    lines.map(number).collect()
}

#[test]
fn sockets_go_with_a_guest_to_another_process_and_stay_when_the_first_ends() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [serial, vsock] = ["serial", "vsock"].map(|name| dir.path().join(name));
    let mut first = Vmm::counting_to(
        dir.path(),
        "size=32M,shared=on",
        &format!("socket={}", serial.display()),
        &["--vsock", &format!("cid=3,socket={}", vsock.display())],
    );
    let before = numbers(&serial);
    // A destination that cannot take it leaves everything as it is.
    let refused = first.ctl(&["send-migration", "unix:/nowhere", "--local", "--watch"]);
    assert!(!refused.status.success());
    let (mut second, info) = first.move_to(dir.path(), "second", &["--local"]);
    println!("handed over: {info}");
    let after = numbers(&serial);
    assert!(first.ctl(&["shutdown-vmm"]).status.success());
    first.process.wait().unwrap();
    let later = numbers(&serial);
    UnixStream::connect(&vsock).unwrap();
    let all = [before, after, later].concat();
    assert_eq!(all.len(), 60);
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
    // They are the second one's now.
    assert!(second.ctl(&["shutdown-vmm"]).status.success());
    second.process.wait().unwrap();
    assert!(!serial.exists() && !vsock.exists());
}

/// An authority, and what it has signed for both sides, in a directory.
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

#[test]
fn a_guest_moves_by_tls_and_a_source_without_a_certificate_does_not_end_the_wait() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [tls_dir, others, tunnel] = ["tls", "others", "tunnel"].map(|name| dir.path().join(name));
    certificates(&tls_dir);
    certificates(&others);
    let listener = gantry_tunnel::serve::listen(&tunnel).unwrap();
    thread::spawn(move || gantry_tunnel::serve::run(&listener));
    let port = free_port();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let [tls_dir, others, tunnel] = [&tls_dir, &others, &tunnel].map(|path| text(path));
    let own = ["--tls-dir", &tls_dir, "--tunnel", &tunnel];
    let foreign = ["--tls-dir", &others, "--tunnel", &tunnel];
    let mut first = Vmm::counting(dir.path(), "size=32M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let receiving = second.receive_at(&format!("tcp:127.0.0.1:{port}"), &first.serial, &own);
    second.until("it listens", |_| {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    let url = format!("tcp:localhost:{port}");
    let send = |vmm: &Vmm, tls: &[&str], more: &[&str]| vmm.send(&url, &[tls, more].concat());
    assert!(!send(&first, &foreign, &[]).status.success());
    let asked = send(&first, &own, &["--dry-run"]);
    assert!(asked.status.success(), "{}", first.said());
    // The tunnel waits anew after a question.
    let start = Instant::now();
    let how = ["--verify", "--connections", "2"];
    let mut sent = send(&first, &own, &how);
    while !sent.status.success() && start.elapsed() < PATIENCE {
        sent = send(&first, &own, &how);
    }
    check_moved(&sent, receiving, &first, &second);
    first.until("it has left", |vmm| vmm.migration()["phase"] == "Completed");
    second.until("it counts on", |vmm| vmm.printed().len() > 100);
    check_counting(&[&first, &second]);
}

#[test]
fn memory_in_a_file_moves_whole_and_nothing_of_an_earlier_vm_stays() {
    if !has_kvm() {
        return;
    }
    const EARLIER: u64 = 40 << 20;
    for shared in ["on", "off"] {
        let dir = tempfile::tempdir().unwrap();
        let [here, there] = ["here", "there"].map(|name| dir.path().join(name));
        let mut earlier = vec![0; 64 << 20];
        earlier[EARLIER as usize..][..4096].fill(0xff);
        fs::write(&there, earlier).unwrap();
        let zone = format!("id=z,size=64M,shared={shared},file={}", here.display());
        let mut first = Vmm::counting(dir.path(), "size=0", &["--memory-zone", &zone]);
        let mut second = Vmm::start(dir.path(), "second", &[]);
        let path = second.socket.with_file_name("migration");
        let url = format!("unix:{}", path.display());
        let rename = format!("{}={}", here.display(), there.display());
        let receiving = second.receive_at(&url, &first.serial, &["--rename", &rename]);
        second.until("it listens", |_| path.exists());
        let sent = first.send(&url, &["--verify"]);
        check_moved(&sent, receiving, &first, &second);
        let moved = second.printed().len();
        second.until("it counts on", |vmm| vmm.printed().len() > moved + 9);
        check_counting(&[&first, &second]);
        if shared == "on" {
            let mut page = [1; 4096];
            let file = fs::File::open(&there).unwrap();
            file.read_exact_at(&mut page, EARLIER).unwrap();
            assert!(page == [0; 4096]);
        }
        first.kill();
        second.kill();
    }
}

#[test]
fn whichever_side_is_killed_while_memory_moves_at_most_one_guest_is_left_with_the_disk() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={},image_type=raw", disk.display());
    let mut first = Vmm::filling(dir.path(), "size=32M", &["--disk", &disk]);
    let in_rounds = |vmm: &Vmm| vmm.migration()["phase"] == "Rounds";
    let over = |vmm: &Vmm| vmm.migration()["phase"] == "Failed";
    let slow = ["--bandwidth", "256K", "--max-throttle", "0"];
    // The destination: the guest goes on, with its disk.
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (mut receiving, url) = second.receive(&first.serial);
    let send = |vmm: &Vmm, url: &str| {
        let sent = vmm.ctl(&[&["send-migration", url][..], &slow].concat());
        assert!(sent.status.success());
    };
    send(&first, &url);
    first.until("memory moves", in_rounds);
    second.kill();
    receiving.wait().unwrap();
    first.until("it has failed", over);
    let before = first.printed().len();
    first.until("it counts on", |vmm| vmm.printed().len() > before + 100);
    let kernel = dir.path().join("kernel");
    let boots = ["--kernel", kernel.to_str().unwrap(), "--disk", &disk];
    let other = Command::new(GANTRY).args(boots).output().unwrap();
    let text = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && text.contains("in use"), "{text}");
    check_counting(&[&first]);
    // The source: nothing is left of the guest, and the disk is free.
    let mut third = Vmm::start(dir.path(), "third", &[]);
    let (receiving, url) = third.receive(&first.serial);
    send(&first, &url);
    first.until("memory moves", in_rounds);
    first.kill();
    let received = receiving.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&received.stderr).into_owned();
    assert!(
        !received.status.success() && text.contains("no VM has arrived"),
        "{text}"
    );
    assert!(!third.ctl(&["info"]).status.success(), "there is a VM");
    assert!(third.printed().is_empty());
}

/// What happens when the first frame of a kind passes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fault {
    SourceKilled,
    DestinationKilled,
    /// Nothing passes any more; that frame neither.
    Cut,
    /// A bit of the frame's header is another one.
    Damaged,
    /// Nothing follows, and the connection stays.
    Stalled,
}

/// Passes frames on in one direction; at the first of that kind, what `at` says whether it passes.
fn pass(mut from: UnixStream, mut to: UnixStream, mut at: impl FnMut(Kind, &mut [u8]) -> bool) {
    let mut done = || -> io::Result<()> {
        loop {
            let mut head = [0; HEADER];
            from.read_exact(&mut head)?;
            let header = Header::decode(&head).unwrap();
            let mut contents = vec![0; header.length];
            from.read_exact(&mut contents)?;
            if !at(header.kind, &mut head) {
                return Ok(());
            }
            to.write_all(&head)?;
            to.write_all(&contents)?;
        }
    };
    // One side has ended.
    let _ = done();
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Between both sides, for all of their connections: it happens to that of this number, from 0.
fn between(
    (path, to): (&Path, &Path),
    connection: usize,
    at: Kind,
    fault: Fault,
    processes: [u32; 2],
) {
    let listener = UnixListener::bind(path).unwrap();
    let to = to.to_owned();
    thread::spawn(move || {
        for (number, source) in listener.incoming().enumerate() {
            // It may have ended by then.
            let Ok(destination) = UnixStream::connect(&to) else {
                return;
            };
            // One that nothing happens to.
            let at = (number == connection).then_some(at);
            pass_both(source.unwrap(), destination, at, fault, processes);
        }
    });
}

/// One connection; it ends with that.
fn pass_both(
    source: UnixStream,
    destination: UnixStream,
    at: Option<Kind>,
    fault: Fault,
    processes: [u32; 2],
) {
    thread::spawn(move || {
        let kill = |process: u32| {
            // SAFETY: a child of this test, which has not been waited for.
            unsafe { libc::kill(process.cast_signed(), libc::SIGKILL) };
        };
        let happened = AtomicBool::new(false);
        let happens = |kind: Kind, head: &mut [u8]| {
            if Some(kind) != at || happened.swap(true, Ordering::SeqCst) {
                return true;
            }
            match fault {
                Fault::SourceKilled => kill(processes[0]),
                Fault::DestinationKilled => kill(processes[1]),
                Fault::Cut => return false,
                Fault::Damaged => head[9] ^= 4,
                Fault::Stalled => thread::sleep(PATIENCE * 2),
            }
            true
        };
        let clone = |stream: &UnixStream| stream.try_clone().unwrap();
        let forward = (clone(&source), clone(&destination));
        let happens = &happens;
        thread::scope(|scope| {
            scope.spawn(move || pass(forward.0, forward.1, happens));
            pass(destination, source, happens);
        });
    });
}

/// Where the guest runs afterwards.
fn expected(at: Kind, fault: Fault) -> Option<usize> {
    match (fault, at) {
        // It was the destination's from GO on.
        (Fault::SourceKilled, Kind::Go | Kind::Running) => Some(1),
        (Fault::SourceKilled, _) => None,
        // It had begun to run there.
        (Fault::DestinationKilled, Kind::Running) => None,
        // What is lost is only that it runs there, which the disk's lock says.
        (Fault::Cut | Fault::Damaged, Kind::Running) => Some(1),
        _ => Some(0),
    }
}

#[test]
fn whatever_happens_in_whichever_phase_one_guest_at_most_runs_and_it_has_the_disk() {
    if !has_kvm() {
        return;
    }
    // Without an offer the destination goes on waiting.
    let kinds = [
        Kind::Prepared,
        Kind::Pages,
        Kind::Barrier,
        Kind::State,
        Kind::Ready,
        Kind::Go,
        Kind::Running,
    ];
    let faults = [
        Fault::SourceKilled,
        Fault::DestinationKilled,
        Fault::Cut,
        Fault::Damaged,
    ];
    for at in kinds {
        for fault in faults {
            one_runs_after(at, fault, (0, 1), expected(at, fault));
        }
    }
}

/// It happens to a connection of this number, of so many that carry memory; the first one has number 0.
fn one_runs_after(
    at: Kind,
    fault: Fault,
    (connection, connections): (usize, usize),
    one: Option<usize>,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={},image_type=raw", path.display());
    let mut first = Vmm::filling(dir.path(), "size=16M", &["--disk", &disk]);
    // Enough to look at, however early it is killed.
    first.until("it has counted on", |vmm| vmm.printed().len() > 9 * 20);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (receiving, _) = second.receive(&first.serial);
    let wire = dir.path().join("wire");
    let processes = [first.process.id(), second.process.id()];
    between(
        (&wire, &second.socket.with_file_name("migration")),
        connection,
        at,
        fault,
        processes,
    );
    let url = format!("unix:{}", wire.display());
    first.send_migration(&serde_json::json!({
        "destination_url": url, "preserve_source": true, "connections": connections, "stall_s": 2,
    }));
    let over = |vmm: &Vmm| {
        let info = vmm.migration();
        ["Completed", "Failed"]
            .iter()
            .any(|phase| info["phase"] == *phase)
    };
    if fault == Fault::SourceKilled {
        let start = Instant::now();
        while first.process.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "it has not happened");
            thread::sleep(Duration::from_millis(5));
        }
    } else {
        first.until("it is over", over);
    }
    let received = receiving.wait_with_output().unwrap();
    let what = format!(
        "{fault:?} at {at:?} of {connection} of {connections}: {} {received:?}\n{}",
        first.said(),
        second.said()
    );
    let runs = |vmm: &Vmm| {
        let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap_or_default();
        info["state"] == "Running"
    };
    let running = [runs(&first), runs(&second)];
    assert_eq!(running, [one == Some(0), one == Some(1)], "{what}");
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let free = lock::lock(&file, 1 << 20, false, LockGranularity::ByteRange).is_ok();
    assert_eq!(free, one.is_none(), "{what}");
    if let Some(one) = one {
        let vmm = [&mut first, &mut second].into_iter().nth(one).unwrap();
        let before = vmm.printed().len();
        vmm.until("it counts on", |vmm| vmm.printed().len() > before + 20);
    }
    check_counting(&[&first, &second]);
}

#[test]
fn private_memory_is_not_handed_over_and_the_reason_says_what_would_be() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::counting(dir.path(), "size=64M", &[]);
    let refused = first.ctl(&["send-migration", "unix:/nowhere", "--local"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && text.contains("shared=on"),
        "{text}"
    );
    let before = first.printed().len();
    first.until("it counts on", |vmm| vmm.printed().len() > before + 100);
    check_counting(&[&first]);
}

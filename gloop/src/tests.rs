//! Tests the service's thread with real files and sockets, and with a test in place of the GPU.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    layout::Rings,
    memory::Memory,
    ring::{Consumer, Producer},
    serve::{Answered, Area, Reach, Service},
    slots::Limits,
};

const PAGE: usize = 8192;
const PAGES: usize = 4;

/// A block that does by hand what a kernel does.
struct Device {
    service: Service,
    area: Arc<Area>,
    number: usize,
    sent: Vec<Producer<16>>,
    got: Vec<Consumer<4>>,
}

impl Device {
    fn new(reach: &Reach, blocks: usize) -> Self {
        let limits = Limits {
            page_bytes: PAGE as u32,
            page_count: PAGES as u32,
        };
        let area = Arc::new(Area {
            rings: Memory::new(blocks * size_of::<Rings>()).unwrap(),
            pages: Memory::new(blocks * PAGES * PAGE).unwrap(),
            blocks,
            limits,
            answered: Answered::default(),
        });
        let service = Service::start(reach).unwrap();
        let number = service.add(Arc::clone(&area)).unwrap();
        Self {
            service,
            area,
            number,
            sent: (0..blocks).map(|_| Producer::default()).collect(),
            got: (0..blocks).map(|_| Consumer::default()).collect(),
        }
    }

    fn ask(&mut self, block: usize, words: [u32; 16]) {
        self.sent[block].push(self.area.rings.rings(block).0, words);
    }

    fn poll(&mut self, block: usize) -> Option<(u32, i64)> {
        let [low, high, tag, _] = self.got[block].take(self.area.rings.rings(block).1)?;
        Some((tag, (u64::from(high) << 32 | u64::from(low)) as i64))
    }

    fn answer(&mut self, block: usize) -> (u32, i64) {
        let begun = Instant::now();
        loop {
            if let Some(answer) = self.poll(block) {
                return answer;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "no answer");
            thread::yield_now();
        }
    }

    /// Makes a request and waits for the answer.
    fn call(&mut self, block: usize, words: [u32; 16]) -> i64 {
        self.ask(block, words);
        let (tag, result) = self.answer(block);
        assert_eq!(tag, words[1]);
        result
    }

    fn write(&self, block: usize, page: usize, bytes: &[u8]) {
        let at = (block * PAGES + page) * PAGE;
        for (index, byte) in bytes.iter().enumerate() {
            // Whole words, as written by a GPU's threads, would be just as free of races.
            let word = self.area.pages.word((at + index) / 4);
            let shift = (at + index) % 4 * 8;
            let old = word.load(Ordering::Relaxed) & !(0xff << shift);
            word.store(old | u32::from(*byte) << shift, Ordering::Release);
        }
    }

    fn read(&self, block: usize, page: usize, count: usize) -> Vec<u8> {
        let at = (block * PAGES + page) * PAGE;
        let byte = |index: usize| {
            let word = self
                .area
                .pages
                .word((at + index) / 4)
                .load(Ordering::Acquire);
            (word >> ((at + index) % 4 * 8)) as u8
        };
        (0..count).map(byte).collect()
    }

    fn open(&mut self, path: &str, how: u32) -> i64 {
        self.write(0, 0, path.as_bytes());
        let mut words = request(1, 3);
        (words[6], words[8]) = (path.len() as u32, how);
        self.call(0, words)
    }
}

fn request(opcode: u32, handle: u32) -> [u32; 16] {
    let mut words = [0; 16];
    (words[0], words[1], words[2]) = (opcode, opcode, handle);
    words
}

/// A request with this many bytes of data in a page, at an offset.
fn data(opcode: u32, handle: i64, page: u32, offset: u32, bytes: usize) -> [u32; 16] {
    let mut words = request(opcode, handle as u32);
    (words[3], words[4], words[6]) = (page, offset, bytes as u32);
    words
}

fn beneath(folder: &tempfile::TempDir) -> Reach {
    Reach {
        folder: Some(folder.path().to_owned()),
        ..Reach::default()
    }
}

#[test]
fn files_are_made_written_read_measured_and_closed() {
    let folder = tempfile::tempdir().unwrap();
    let mut device = Device::new(&beneath(&folder), 1);
    let file = device.open("new", 2);
    assert!(file >= 0, "{file}");
    device.write(0, 1, b"from the GPU");
    assert_eq!(device.call(0, data(6, file, 1, 5, 12)), 12);
    assert_eq!(device.call(0, request(3, file as u32)), 17);
    let mut truncate = request(4, file as u32);
    truncate[6] = 9;
    assert_eq!(device.call(0, truncate), 0);
    assert_eq!(device.call(0, data(5, file, 2, 5, 100)), 4);
    assert_eq!(device.read(0, 2, 4), b"from");
    assert_eq!(device.call(0, request(2, file as u32)), 0);
    assert_eq!(
        device.call(0, request(3, file as u32)),
        -i64::from(libc::EBADF)
    );
    let contents = std::fs::read(folder.path().join("new")).unwrap();
    assert_eq!(contents, b"\0\0\0\0\0from");
}

#[test]
fn files_outside_of_the_folder_cannot_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("link")).unwrap();
    let mut device = Device::new(&beneath(&folder), 1);
    for path in ["/etc/passwd", "../../etc/passwd", "link"] {
        assert_eq!(device.open(path, 0), -i64::from(libc::EXDEV), "{path}");
    }
    assert_eq!(device.open("none", 0), -i64::from(libc::ENOENT));
}

#[test]
fn a_connection_is_accepted_echoed_and_ended() {
    let mut device = Device::new(&Reach::default(), 2);
    let server = device.call(0, request(8, 0));
    let port = device.service.port(server as u32).unwrap();
    device.ask(1, request(10, server as u32));
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        stream.read_exact(&mut got).unwrap();
        got
    });
    let (_, socket) = device.answer(1);
    assert!(socket >= 0, "{socket}");
    let got = device.call(1, data(12, socket, 3, 0, PAGE)) as usize;
    assert_eq!(device.read(1, 3, got), b"hello");
    assert_eq!(device.call(1, data(13, socket, 3, 0, got)), got as i64);
    assert_eq!(&client.join().unwrap(), b"hello");
    assert_eq!(device.call(1, data(12, socket, 3, 0, PAGE)), 0);
    assert_eq!(device.call(1, request(11, socket as u32)), 0);
    // A socket is neither a server nor a file.
    assert_eq!(
        device.call(1, request(9, socket as u32)),
        -i64::from(libc::EBADF)
    );
}

#[test]
fn a_device_can_connect_to_a_server() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut device = Device::new(&Reach::default(), 1);
    let mut connect = request(7, 0);
    connect[4] = 0x7f00_0001;
    connect[8] = u32::from(listener.local_addr().unwrap().port());
    let socket = device.call(0, connect);
    assert!(socket >= 0, "{socket}");
    let (mut there, _) = listener.accept().unwrap();
    device.write(0, 0, b"GET");
    assert_eq!(device.call(0, data(13, socket, 0, 0, 3)), 3);
    let mut got = [0; 3];
    there.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"GET");
}

#[test]
fn who_waits_for_nobody_is_forgotten_when_its_job_ends() {
    let mut device = Device::new(&Reach::default(), 1);
    let server = device.call(0, request(8, 0));
    // Nobody connects.
    device.ask(0, request(10, server as u32));
    thread::sleep(Duration::from_millis(20));
    device.service.remove(device.number).unwrap();
    assert_eq!(device.poll(0), None);
    // What it had opened remains the runtime's.
    assert!(device.service.port(server as u32).is_ok());
}

#[test]
fn requests_that_make_no_sense_harm_nobody_else() {
    let mut device = Device::new(&Reach::default(), 2);
    let mut random = 1u32;
    let mut next = move || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        random >> 8
    };
    let mut asked = 0;
    let mut answered = 0;
    for _ in 0..2000 {
        let mut words = [0; 16].map(|_: u32| next());
        words[0] %= 16;
        // No ports of this machine, no paths, and nothing that would wait.
        if matches!(words[0], 1 | 7 | 8 | 10) {
            continue;
        }
        words[1] %= 40;
        asked += i32::from(words[1] < 32);
        device.ask(0, words);
        while asked - answered > 16 {
            let (tag, result) = device.answer(0);
            assert!(tag < 32 && result < 0, "{tag} {result}");
            answered += 1;
        }
    }
    assert!(device.call(1, request(8, 0)) >= 0);
}

#[test]
fn a_device_that_asks_more_than_it_may_waits_for_its_answers() {
    let mut device = Device::new(&Reach::default(), 2);
    let server = device.call(0, request(8, 0));
    // Its ring is overwritten again and again, and nobody connects.
    for _ in 0..1000 {
        device.ask(1, request(10, server as u32));
    }
    assert_eq!(device.call(0, request(3, 99)), -i64::from(libc::EBADF));
    assert_eq!(device.poll(1), None);
}

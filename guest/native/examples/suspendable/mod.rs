//! A program whose device memory another process moves to its own memory, as NVIDIA's driver does for every program: the
//! driver's part is a thread here, which the stand-in of the driver's library asks.

use std::{
    ffi::CStr,
    io::{Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use super::{
    Doorbells, PAUSE, SYSTEM, memory, pin,
    program::{Opened, close, mmap},
};

/// By which a process is recognized as one that uses the driver.
const LIBRARY: &CStr = c"libcuda.so.1";
/// Bytes of device memory, and the words of it that are used.
const BYTES: usize = 0x21000;
const WORDS: usize = 1024;
/// As long as this file exists, the program's calls do not end.
const HOLD: &str = "/tmp/hold";
const INVALID: u8 = 1;
const ILLEGAL_STATE: u8 = 145;

/// What the program has of its device.
struct OnDevice {
    opened: Opened,
    doorbells: Doorbells,
    contents: *mut u64,
}

/// The contents of device memory.
enum Contents {
    OnDevice(OnDevice),
    InMemory(Vec<u64>),
}

// SAFETY: the addresses are valid in all threads of this process.
unsafe impl Send for OnDevice {}

impl OnDevice {
    fn new(words: &[u64]) -> Self {
        let opened = Opened::new();
        assert_eq!(
            opened.memory(SYSTEM, 0x3e, BYTES as u64),
            0,
            "device memory"
        );
        let (status, _, file) = opened.map(SYSTEM, BYTES as u64);
        assert_eq!(status, 0, "device memory is mapped");
        let contents = mmap(file, BYTES, libc::MAP_SHARED, 0).expect("device memory maps");
        close(file);
        for (at, word) in words.iter().enumerate() {
            // SAFETY: the mapping has all of them.
            unsafe { contents.add(at).write_volatile(*word) };
        }
        let doorbells = Doorbells::map(&opened);
        Self {
            opened,
            doorbells,
            contents,
        }
    }

    /// Copies the contents, and gives the device back.
    fn leave(self) -> Vec<u64> {
        // SAFETY: the mapping has all of them.
        let word = |at| unsafe { self.contents.add(at).read_volatile() };
        let words = (0..WORDS).map(word).collect();
        self.doorbells.unmap(&self.opened);
        assert_eq!(self.opened.free(SYSTEM), 0);
        // SAFETY: the mapping was made with this length, and is not used any longer.
        unsafe { libc::munmap(self.contents.cast(), BYTES) };
        close(self.opened.gpu);
        close(self.opened.control);
        words
    }

    /// The device does the work of a round.
    fn round(&self, pinned: *mut u64, round: u64) -> u64 {
        assert!(self.doorbells.are_the_devices(), "the device is there");
        // SAFETY: the mapping has all of them.
        let words = unsafe { std::slice::from_raw_parts_mut(self.contents, WORDS) };
        let sum = next(words, round);
        pin(&self.opened, pinned, sum).expect("the device answers");
        sum
    }
}

/// The contents after a round, and their sum.
fn next(words: &mut [u64], round: u64) -> u64 {
    for (at, word) in words.iter_mut().enumerate() {
        *word = word.wrapping_mul(6_364_136_223_846_793_005) ^ (round + at as u64);
    }
    words
        .iter()
        .fold(0, |sum: u64, word| sum.wrapping_add(*word))
}

/// What the driver does in the program when another process asks: the program's calls wait while it is locked.
fn serve(listener: &UnixListener, contents: &Mutex<Contents>) {
    let mut locked: Option<MutexGuard<'_, Contents>> = None;
    for mut stream in listener.incoming().flatten() {
        let mut what = [0];
        if stream.read_exact(&mut what).is_err() {
            continue;
        }
        let answer = match (what[0], &mut locked) {
            (b'S', None) => 0,
            (b'S', Some(contents)) => match **contents {
                Contents::OnDevice(_) => 1,
                Contents::InMemory(_) => 2,
            },
            (b'L', None) => {
                while Path::new(HOLD).exists() {
                    thread::sleep(PAUSE);
                }
                locked = Some(contents.lock().unwrap_or_else(PoisonError::into_inner));
                0
            }
            (b'U', Some(_)) => {
                locked = None;
                0
            }
            (b'C' | b'R', Some(contents)) => change(contents, what[0]),
            _ => INVALID,
        };
        answer_to(&mut stream, answer);
    }
}

fn answer_to(stream: &mut UnixStream, answer: u8) {
    // Whoever has asked may have been killed.
    let _ = stream.write_all(&[answer]);
}

fn change(contents: &mut Contents, what: u8) -> u8 {
    let now = std::mem::replace(contents, Contents::InMemory(Vec::new()));
    let (changed, answer) = match (now, what) {
        (Contents::OnDevice(device), b'C') => (Contents::InMemory(device.leave()), 0),
        (Contents::InMemory(words), b'R') => (Contents::OnDevice(OnDevice::new(&words)), 0),
        (same, _) => (same, ILLEGAL_STATE),
    };
    *contents = changed;
    answer
}

/// Computes, a line for each round, and can be suspended.
pub fn computes() {
    // SAFETY: a valid name. The library has no initializers.
    assert!(!unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) }.is_null());
    let name = format!("stand-in-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("nobody else has the address");
    let contents = Arc::new(Mutex::new(Contents::OnDevice(OnDevice::new(&[0; WORDS]))));
    let shared = Arc::clone(&contents);
    thread::spawn(move || serve(&listener, &shared));
    let pinned = memory();
    for round in 0.. {
        let now = contents.lock().unwrap_or_else(PoisonError::into_inner);
        let Contents::OnDevice(device) = &*now else {
            panic!("a suspended program goes on");
        };
        let sum = device.round(pinned, round);
        drop(now);
        println!("round {round} {sum:016x}");
        thread::sleep(PAUSE);
    }
}

/// The line of a round, without a device.
pub fn expected(round: u64) {
    let mut words = [0; WORDS];
    let last = (0..=round).fold(0, |_, round| next(&mut words, round));
    println!("round {round} {last:016x}");
}

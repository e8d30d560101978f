//! Measures the first round of memory, alternating with a plain copy of the same number of bytes.

use std::time::Instant;

use super::*;
use crate::pages::PAGE;

/// Number of pages of RAM, and how many of every sixteen are non-zero.
const PAGES: u64 = 64 << 10;
const FULL: u64 = 6;
const TURNS: usize = 7;

/// A destination that only receives memory.
struct Fresh;

impl Host for Fresh {
    fn examine(&mut self, _offer: &Offer, _cancel: &Cancel) -> Vec<String> {
        Vec::new()
    }

    fn is_here(&self, _host: &HostId) -> bool {
        true
    }

    fn prepare(
        &mut self,
        _offer: Offer,
        _files: Vec<GivenFile>,
        _cancel: Cancel,
    ) -> std::result::Result<Vec<Region>, String> {
        let region = Region::unused(0, PAGES * PAGE).map_err(|error| error.to_string())?;
        Ok(vec![region])
    }

    fn restore(
        &mut self,
        _state: Vec<u8>,
        _saved_at: Option<Moment>,
        _archive: Option<File>,
        _cancel: Cancel,
    ) -> std::result::Result<(), String> {
        Err("nothing but memory".to_owned())
    }

    fn start(&mut self, body: lanes::Body) -> std::result::Result<(), String> {
        thread::spawn(body);
        Ok(())
    }

    fn take_locks(&mut self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn run(&mut self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn has_moved(&mut self, _fixed: Duration) {}
}

/// Number of bytes transferred, and the duration.
fn first_round(memory: &mut Departing) -> (u64, Duration) {
    let (here, there) = UnixStream::pair().unwrap();
    let receiving = thread::spawn(move || {
        let progress = Progress::new(Direction::Incoming, "test");
        let connection = Connection::of_unix(there, progress.clone()).unwrap();
        Destination::new(connection, &mut Fresh, progress).run()
    });
    let progress = Progress::new(Direction::Outgoing, "test");
    let mut connection = Connection::of_unix(here, progress.clone()).unwrap();
    let text = serde_json::to_vec(&offer()).unwrap();
    connection.send(Kind::Offer, 0, &text).unwrap();
    connection
        .receive(&[Kind::Prepared], &mut Vec::new())
        .unwrap();
    let began = Instant::now();
    let sent = memory.send_round(0, &mut connection, &progress).unwrap();
    let took = began.elapsed();
    drop(connection);
    assert!(receiving.join().unwrap().is_err(), "there was no state");
    (sent, took)
}

/// Duration of sending this many bytes through a socket into fresh memory.
fn plain_copy(bytes: u64) -> Duration {
    let (mut here, mut there) = UnixStream::pair().unwrap();
    let receiving = thread::spawn(move || {
        let region = Region::unused(0, bytes).unwrap();
        there.read_exact(super::bytes(&region)).unwrap();
    });
    let source = vec![0x5a; 1 << 20];
    let began = Instant::now();
    for _ in 0..bytes >> 20 {
        here.write_all(&source).unwrap();
    }
    here.write_all(&source[..(bytes % (1 << 20)) as usize])
        .unwrap();
    receiving.join().unwrap();
    began.elapsed()
}

/// `cargo test --release -p vmm --lib first_round -- --ignored --nocapture`
#[test]
#[ignore = "takes half a minute on a busy machine: its figures are in measurements/migration.md"]
fn first_round_beside_a_plain_copy() {
    let region = Region::unused(0, PAGES * PAGE).unwrap();
    for (number, page) in bytes(&region).chunks_mut(PAGE as usize).enumerate() {
        // Runs of one to six pages with zero pages between them; half of the memory was never
        // touched.
        match number as u64 {
            page if page >= PAGES / 2 => {}
            number if number % 16 < FULL && number % 7 != 3 => page.fill(number as u8 | 1),
            _ => page[0] = 0,
        }
    }
    let mut memory = Departing::unwatched(vec![region]);
    let mut all = Vec::new();
    for _ in 0..TURNS {
        let (sent, took) = first_round(&mut memory);
        let plain = plain_copy(sent);
        println!(
            "{} KiB: {} us, a plain copy {} us",
            sent >> 10,
            took.as_micros(),
            plain.as_micros()
        );
        all.push(took.as_secs_f64() / plain.as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    println!(
        "times a plain copy, median of {TURNS}: {:.2}",
        all[TURNS / 2]
    );
}

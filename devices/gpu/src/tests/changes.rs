//! Changes below an active GPU: RAM that the guest returns to the host, and BARs that move.

use super::*;

/// A command of the channel: its semaphore waits until a word has a value (1), or sets it (2).
fn semaphore(at: u64, word: u32, operation: u32) -> [u32; 5] {
    let run = Header::Increasing(Run {
        subchannel: 0,
        address: 0x10,
        count: 4,
    });
    let high = (at >> 32) as u32;
    [run.encode(), high, at as u32, word, 1 << 24 | operation]
}

impl Guest {
    /// Like a balloon: punches holes in the file behind RAM.
    fn give_back(&self, page: usize, count: usize) {
        let (at, len) = (page * PAGE as usize, count * PAGE as usize);
        assert!(at + len <= self.ram.len());
        // SAFETY: within the mapping; nothing relies on any of its bytes.
        let given =
            unsafe { libc::madvise(self.ram.start().add(at).cast(), len, libc::MADV_REMOVE) };
        assert_eq!(given, 0);
    }

    /// Submits words from a page of RAM.
    fn submit_from_ram(&self, page: u32, words: &[u32]) {
        let at = u64::from(page) * PAGE;
        for (at, word) in (at as usize..).step_by(4).zip(words) {
            self.set_ram(at, *word);
        }
        self.submit_page(page, words.len());
    }

    /// Submits what is in a page of RAM.
    fn submit_page(&self, page: u32, words: usize) {
        let entry = GpEntry {
            address: RAM_VA + u64::from(page) * PAGE,
            words: words as u32,
        };
        let put = self.put.get();
        self.poke64(u64::from(RING) * PAGE + u64::from(put) * 8, entry.encode());
        self.put.set(put + 1);
        self.doorbell(put + 1);
    }
}

#[test]
fn ram_that_is_given_back_is_zero_for_the_gpu_and_the_guests_again_once_either_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    guest.give_back(0, 1);
    assert_eq!(guest.ram(0), 0);
    guest.works(2);
    // It waits for a zero, which is not there until the page is returned.
    guest.set_ram(PAGE as usize, 9);
    let wait_for_zero = semaphore(RAM_VA + PAGE, 0, 1);
    let words = [wait_for_zero, semaphore(RAM_VA, 3, 2)].concat();
    guest.submit_from_ram(2, &words);
    guest.give_back(1, 1);
    wait("the word", || guest.ram(0) == 3);
    // Writes of the GPU to the page are visible to the guest, and vice versa.
    guest.release(RAM_VA + PAGE, 4);
    wait("the word", || guest.ram(PAGE as usize) == 4);
    guest.give_back(1, 1);
    guest.set_ram(PAGE as usize, 5);
    let wait_for_it = semaphore(RAM_VA + PAGE, 5, 1);
    guest.submit_from_ram(2, &[wait_for_it, semaphore(RAM_VA, 6, 2)].concat());
    wait("the word", || guest.ram(0) == 6);
    assert_eq!(guest.faults(), 0);
}

#[test]
fn commands_that_are_given_back_and_pages_that_go_during_a_copy_cost_the_channel_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    let (bad, good) = (Guest::new(&socket), Guest::new(&socket));
    good.works(1);
    bad.submit_from_ram(2, &semaphore(RAM_VA, 7, 2));
    wait("the word", || bad.ram(0) == 7);
    bad.give_back(2, 1);
    bad.submit_page(2, 1024);
    bad.channel();
    bad.works(8);
    // Copies lines of 4 KiB from and to RAM repeatedly, as long as it runs.
    let run = |address, words: &[u32]| {
        let count = words.len() as u16;
        let header = Header::Increasing(Run {
            subchannel: 4,
            address,
            count,
        });
        let mut all = vec![header.encode()];
        all.extend(words);
        all
    };
    let [from, to] = [16, 96].map(|page: u32| (RAM_VA + u64::from(page) * PAGE) as u32);
    let mut words = run(0, &[0x90b5]);
    let line = PAGE as u32;
    words.extend(run(0x30c, &[0, from, 0, to, line, line, line, 64]));
    for _ in 0..200 {
        words.extend(run(0x300, &[0x110]));
    }
    bad.submit_from_ram(8, &words);
    for _ in 0..50 {
        bad.give_back(16, 240);
    }
    good.works(2);
    bad.channel();
    bad.works(9);
    good.works(3);
}

#[test]
fn a_flush_waits_for_work_of_a_channel_that_lost_its_ring() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    // It writes a word when it finds another one.
    let at = RAM_VA + 3 * PAGE;
    let words = [semaphore(RAM_VA + PAGE, 7, 1), semaphore(at, 2, 2)];
    guest.submit_from_ram(2, &words.concat());
    // The next submission is where nothing is mapped: the channel ends.
    let entry = u64::from(SMALL) * PAGE + (VRAM_VA / PAGE + u64::from(RING)) * 8;
    guest.poke64(entry, 0);
    guest.doorbell(guest.put.get() + 1);
    assert_ne!(guest.faults(), 0);
    let ring = Target::Vram(VramPage(RING));
    guest.poke64(entry, Pte::linear(ring).encode());
    // What has begun still runs, so it must see the new page after the flush.
    let new = Target::Ram(Gfn(9));
    guest.map(SMALL, at / PAGE, std::iter::once(new));
    guest.flush();
    guest.set_ram(PAGE as usize, 7);
    wait("the word", || {
        (guest.ram(3 * PAGE as usize), guest.ram(9 * PAGE as usize)) != (0, 0)
    });
    assert_eq!(guest.ram(9 * PAGE as usize), 2);
    assert_eq!(guest.ram(3 * PAGE as usize), 0);
}

#[test]
fn a_bar_that_moves_is_memory_where_it_is_only_and_what_is_written_there_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    let places = [BAR1, BAR1 + (128 << 20), BAR1 - (128 << 20)];
    let at = SHOWN * PAGE + RAM_VA / PAGE * 8;
    guest.front.place(1, Some(BAR1)).unwrap();
    guest.show_table(SHOWN);
    guest.works(1);
    for (page, nth) in (1_u32..13).zip([1, 2, 0].into_iter().cycle()) {
        // Work is in progress meanwhile: it waits for a word.
        let hold = semaphore(RAM_VA + 200 * PAGE, page, 1);
        guest.submit_from_ram(250, &hold);
        guest.front.place(1, None).unwrap();
        assert!(places.iter().all(|at| !guest.space.write(at + SHOWN, 0)));
        guest.front.place(1, Some(places[nth])).unwrap();
        for (its, place) in places.iter().enumerate() {
            let entry = Pte::linear(Target::Ram(Gfn(page))).encode();
            let words = [entry as u32, (entry >> 32) as u32];
            for (at, word) in (at..).step_by(4).zip(words) {
                assert_eq!(guest.space.write(place + at, word), its == nth);
            }
        }
        // Submissions are also noticed at the new address.
        let bell = u64::from(CHANNEL) * userd::STRIDE + userd::GP_PUT;
        assert!(!guest.space.write(places[nth] + bell, 1));
        guest.set_ram(200 * PAGE as usize, page);
        guest.flush();
        guest.lands(page << 8, page);
    }
    assert_eq!(guest.faults(), 0);
}

#[test]
fn a_reset_amid_work_ends_the_work_and_whoever_starts_then_has_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    for word in 1..5 {
        guest.works(word);
        // It would write a word when it finds another one.
        let stopped = [
            semaphore(RAM_VA + PAGE, 7, 1),
            semaphore(RAM_VA + 3 * PAGE, 0xbad, 2),
        ];
        guest.submit_from_ram(2, &stopped.concat());
        guest.front.reset();
        guest.set_ram(PAGE as usize, 7);
        guest.start();
        guest.works(word << 8);
        assert_eq!(guest.ram(3 * PAGE as usize), 0);
        assert_eq!(guest.faults(), 0);
        guest.set_ram(PAGE as usize, 0);
    }
}

#[test]
fn a_paused_vm_has_a_gpu_that_does_nothing_until_it_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    let (guest, other) = (Guest::new(&socket), Guest::new(&socket));
    guest.works(1);
    // It would write a word when it finds another one.
    let at = PAGE as usize;
    let words = [semaphore(RAM_VA + PAGE, 7, 1), semaphore(RAM_VA, 2, 2)];
    guest.submit_from_ram(2, &words.concat());
    guest.front.hold(true);
    guest.set_ram(at, 7);
    // What is submitted meanwhile waits, too. Others have the GPU.
    guest.prepare(RAM_VA + 4, 3);
    guest.doorbell(guest.put.get());
    for word in 1..20 {
        other.works(word);
    }
    assert_eq!((guest.ram(0), guest.ram(4)), (1, 0));
    // A mediator that comes back learns of the pause.
    guest.front.hold(false);
    wait("the word", || guest.ram(0) == 2);
    wait("the word", || guest.ram(4) == 3);
    guest.front.hold(true);
    guest.front.cut();
    wait("the mediator", || guest.counter("reconnections") == 1);
    guest.channel();
    guest.release(RAM_VA, 4);
    for word in 20..40 {
        other.works(word);
    }
    assert_eq!(guest.ram(0), 2);
    guest.front.hold(false);
    guest.channel();
    guest.works(5);
}

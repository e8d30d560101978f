//! Programs under the library, a worker, and a stand-in for the driver. Each test starts the worker in its own
//! process, and itself once more as the program.

mod program;

use std::{
    env,
    fs::File,
    io::Write,
    os::{fd::AsRawFd, unix::fs::FileExt},
    process::{Command, Stdio},
    thread,
};

use gantry_nvidia::{
    server::{Listener, Worker},
    stand_in::{ADDED, StandIn},
};
use program::{DEVICE, Opened, call, close, mmap, open, put, put_long, word};

/// Which test the program is of.
const PROGRAM: &str = "GANTRY_NATIVE_TEST_PROGRAM";

/// In the test's process: starts a worker and the program, and checks that the program succeeds. Answers the stand-in,
/// or nothing in the program.
fn with_program(test: &str) -> Option<StandIn> {
    if env::var(PROGRAM).is_ok_and(|program| program == test) {
        return None;
    }
    let folder = tempfile::tempdir().expect("there is room");
    let socket = folder.path().join("nvidia.sock");
    let listener = Listener::bind(&socket).expect("the folder is new");
    let device = StandIn::default();
    let worker = Worker::new(Box::new(device.clone()), 64 << 20, None, None)
        .expect("the stand-in is a known branch");
    thread::spawn(move || worker.serve(&listener));
    let own = env::current_exe().expect("it is a file");
    let library = own.with_file_name("libgantry_nvidia_preload.so");
    assert!(library.exists(), "{}", library.display());
    let mut program = Command::new(&own)
        .args(["--exact", test, "--nocapture"])
        .env(PROGRAM, test)
        .env("LD_PRELOAD", &library)
        .env("GANTRY_NVIDIA_SOCKET", &socket)
        .stdin(Stdio::piped())
        // Its lines must not get among those of this process, which are read by line.
        .stdout(Stdio::piped())
        .spawn()
        .expect("it is executable");
    // The program's end of input says that the test's process is gone.
    let mut input = program.stdin.take().expect("it is a pipe");
    // A program that reads nothing may have ended.
    let _ = input.write_all(b"\n");
    let output = program.wait_with_output().expect("it is a child");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{}: {said}",
        output.status
    );
    Some(device)
}

const MEMORY: u32 = 0x5c00_0019;

#[test]
fn system_memory_of_the_driver_is_the_programs_slice() {
    let Some(device) = with_program("system_memory_of_the_driver_is_the_programs_slice") else {
        let opened = Opened::new();
        assert_eq!(opened.memory(MEMORY, 0x3e, 0x21000), 0);
        let (status, number, file) = opened.map(MEMORY, 0x21000);
        assert_eq!(status, 0);
        assert!(
            number != 0 && number < 1 << 40,
            "no address of the driver: {number:#x}"
        );
        let memory = mmap(file, 0x21000, libc::MAP_SHARED, 0).expect("it maps");
        close(file);
        // SAFETY: the mapping has two words. The device has looked at them before the program.
        unsafe {
            assert_eq!(memory.add(1).read_volatile(), ADDED);
            memory.write_volatile(7);
        }
        assert!(
            mmap(opened.control, 0x1000, libc::MAP_SHARED, 0).is_err(),
            "nothing was mapped there"
        );
        assert_eq!(opened.free(MEMORY), 0);
        assert_eq!(opened.free(MEMORY), 0x31, "it is gone");
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    assert!(
        state.objects.keys().all(|(_, handle)| *handle != MEMORY),
        "it is freed"
    );
}

#[test]
fn memory_that_is_pinned_keeps_address_and_contents() {
    let Some(_) = with_program("memory_that_is_pinned_keeps_address_and_contents") else {
        let opened = Opened::new();
        for flags in [
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        ] {
            let memory = mmap(-1, 1 << 20, flags, 0).expect("there is memory");
            let last = (1 << 17) - 1;
            // SAFETY: the mapping has these words; the device writes to the second.
            unsafe {
                memory.write_volatile(41);
                memory.add(last).write_volatile(5);
                assert_eq!(opened.describe(MEMORY, memory, 1 << 20), 0);
                let words = [0, 1, last].map(|at| memory.add(at).read_volatile());
                assert_eq!(words, [41, 41 + ADDED, 5]);
                // A child has a copy, unless the memory is shared with children.
                let is_shared = flags & libc::MAP_SHARED != 0;
                let child = libc::fork();
                if child == 0 {
                    let words = [0, 1, last].map(|at| memory.add(at).read_volatile());
                    memory.add(last).write_volatile(77);
                    libc::_exit(i32::from(words != [41, 41 + ADDED, 5]));
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                assert_eq!(status, 0, "the child has the contents");
                let seen = memory.add(last).read_volatile();
                assert_eq!(seen, if is_shared { 77 } else { 5 });
                memory.add(last).write_volatile(5);
                memory.write_volatile(43);
                assert_eq!(opened.free(MEMORY), 0);
                let words = [0, 1, last].map(|at| memory.add(at).read_volatile());
                assert_eq!(words, [43, 41 + ADDED, 5], "after it was put back");
            }
            let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
            assert!(!maps.contains("gantry-slice"), "none of it is the slice's");
        }
        return;
    };
}

#[test]
fn memory_that_others_write_is_not_pinned() {
    let Some(_) = with_program("memory_that_others_write_is_not_pinned") else {
        let opened = Opened::new();
        // A file that cannot be written, and one that is mapped for this program alone.
        let own = File::open("/proc/self/exe").expect("it is there");
        for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
            // SAFETY: a new mapping.
            let memory = unsafe {
                let place = std::ptr::null_mut();
                libc::mmap(place, 1 << 12, libc::PROT_READ, flags, own.as_raw_fd(), 0)
            };
            assert_ne!(memory, libc::MAP_FAILED);
            assert_eq!(opened.describe(MEMORY, memory.cast(), 1 << 12), 0x56);
        }
        let file = tempfile::tempfile_in("/dev/shm").expect("there is room");
        file.set_len(1 << 16).expect("there is room");
        let memory = mmap(file.as_raw_fd(), 1 << 16, libc::MAP_PRIVATE, 0).expect("it maps");
        assert_eq!(opened.describe(MEMORY, memory, 1 << 16), 0x56, "a copy");
        let memory =
            mmap(-1, 1 << 16, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0).expect("there is memory");
        // SAFETY: the second half is not used.
        unsafe { libc::munmap(memory.add(1 << 12).cast(), 1 << 15) };
        assert_eq!(
            opened.describe(MEMORY, memory, 1 << 16),
            0x56,
            "half of it is not mapped"
        );
        assert_eq!(
            opened.describe(MEMORY, memory.wrapping_byte_add(8), 1 << 12),
            0x56,
            "not at a page"
        );
        return;
    };
}

#[test]
fn shared_memory_of_programs_is_lent() {
    let Some(device) = with_program("shared_memory_of_programs_is_lent") else {
        let opened = Opened::new();
        let length = 3 << 12;
        let check = |file: &File, describe: &dyn Fn(*mut u64) -> u32| {
            file.set_len(length as u64 + 4096).expect("there is room");
            let map = |offset| mmap(file.as_raw_fd(), length, libc::MAP_SHARED, offset);
            let (memory, other) = (map(4096).expect("it maps"), map(4096).expect("it maps"));
            // SAFETY: both mappings have two words, which the device has looked at before the program.
            unsafe {
                memory.write_volatile(41);
                assert_eq!(describe(memory), 0);
                let words = [memory, other].map(|at| at.add(1).read_volatile());
                assert_eq!(
                    words,
                    [41 + ADDED; 2],
                    "others see what the device has written"
                );
                assert_eq!(libc::munmap(memory.cast(), length), 0);
                assert_eq!(libc::munmap(other.cast(), length), 0);
            }
        };
        let named = tempfile::NamedTempFile::new_in("/dev/shm").expect("there is room");
        let describe = |memory| opened.describe(MEMORY, memory, length as u64);
        check(named.as_file(), &|memory| {
            // In the middle of a mapping, and by its name: nobody has it open.
            let file = File::options().read(true).write(true).open(named.path());
            let file = file.expect("it is there");
            let whole =
                mmap(file.as_raw_fd(), length + 4096, libc::MAP_SHARED, 0).expect("it maps");
            drop(file);
            let middle = whole.wrapping_byte_add(4096);
            assert_eq!(opened.describe(MEMORY + 1, middle, length as u64), 0);
            describe(memory)
        });
        assert_eq!(opened.free(MEMORY), 0);
        let (status, _, file) = opened.map(MEMORY + 1, 4096);
        assert_eq!(status, 0x56, "the slice is not shown in place of the file");
        close(file);
        // Without a name it is found as the program has it open.
        let unnamed = tempfile::tempfile_in("/dev/shm").expect("there is room");
        check(&unnamed, &describe);
        let memory = mmap(unnamed.as_raw_fd(), length, libc::MAP_SHARED, 0).expect("it maps");
        drop(unnamed);
        assert_eq!(opened.free(MEMORY), 0);
        assert_eq!(describe(memory), 0x56, "it cannot be opened again");
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    assert!(state.objects.keys().all(|(_, handle)| *handle != MEMORY));
}

#[test]
fn memory_without_the_rights_to_use_it_is_not_pinned() {
    let Some(_) = with_program("memory_without_the_rights_to_use_it_is_not_pinned") else {
        let opened = Opened::new();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = mmap(-1, 1 << 16, flags, 0).expect("there is memory");
        let protect = |protection: i32| {
            // SAFETY: the last page of the mapping.
            let result =
                unsafe { libc::mprotect(memory.byte_add(15 << 12).cast(), 4096, protection) };
            assert_eq!(result, 0);
        };
        for protection in [
            libc::PROT_NONE,
            libc::PROT_READ,
            libc::PROT_READ | libc::PROT_EXEC,
        ] {
            protect(protection);
            assert_eq!(
                opened.describe(MEMORY, memory, 1 << 16),
                0x56,
                "{protection}"
            );
        }
        protect(libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(opened.describe(MEMORY, memory, 1 << 16), 0);
        return;
    };
}

#[test]
fn pinned_memory_keeps_the_rights_that_it_was_given() {
    let Some(_) = with_program("pinned_memory_keeps_the_rights_that_it_was_given") else {
        let opened = Opened::new();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        for (protection, shown) in [(libc::PROT_NONE, "---p"), (libc::PROT_READ, "r--p")] {
            let memory = mmap(-1, 1 << 16, flags, 0).expect("there is memory");
            // SAFETY: the mapping has the word.
            unsafe { memory.write_volatile(41) };
            assert_eq!(opened.describe(MEMORY, memory, 1 << 16), 0);
            // SAFETY: the mapping's pages.
            let protected = unsafe { libc::mprotect(memory.cast(), 1 << 16, protection) };
            assert_eq!(protected, 0);
            assert_eq!(opened.free(MEMORY), 0);
            let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
            assert!(!maps.contains("gantry-slice"), "none of it is the slice's");
            let start = format!("{:x}-", memory as usize);
            let line = maps.lines().find(|line| line.starts_with(&start));
            assert!(line.is_some_and(|line| line.contains(shown)), "{line:?}");
            // SAFETY: the mapping's pages, and its first word.
            unsafe {
                assert_eq!(libc::mprotect(memory.cast(), 1 << 16, libc::PROT_READ), 0);
                assert_eq!(memory.read_volatile(), 41);
                libc::munmap(memory.cast(), 1 << 16);
            }
        }
        return;
    };
}

#[test]
fn writes_of_other_threads_are_not_lost_when_memory_is_pinned() {
    let Some(_) = with_program("writes_of_other_threads_are_not_lost_when_memory_is_pinned") else {
        const PAGES: usize = 1 << 10;
        let opened = Opened::new();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = mmap(-1, PAGES << 12, flags, 0).expect("there is memory") as usize;
        let is_over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let counters: Vec<_> = (0..4usize)
                .map(|thread| {
                    let is_over = &is_over;
                    scope.spawn(move || {
                        let mut rounds = 0u64;
                        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                            rounds += 1;
                            for page in 0..PAGES {
                                // SAFETY: each thread has a word of each page to itself, none of the device's.
                                unsafe {
                                    ((memory + (page << 12)) as *mut u64)
                                        .add(2 + thread)
                                        .write_volatile(rounds)
                                };
                            }
                        }
                        rounds
                    })
                })
                .collect();
            for _ in 0..20 {
                assert_eq!(
                    opened.describe(MEMORY, memory as *mut u64, (PAGES << 12) as u64),
                    0
                );
                assert_eq!(opened.free(MEMORY), 0);
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            for (thread, counter) in counters.into_iter().enumerate() {
                let rounds = counter.join().expect("it has not failed");
                for page in 0..PAGES {
                    // SAFETY: as above.
                    let seen = unsafe {
                        ((memory + (page << 12)) as *mut u64)
                            .add(2 + thread)
                            .read_volatile()
                    };
                    assert_eq!(seen, rounds, "thread {thread}, page {page}");
                }
            }
        });
        return;
    };
}

#[test]
fn video_memory_is_mapped_only_before_it_is_used() {
    let Some(device) = with_program("video_memory_is_mapped_only_before_it_is_used") else {
        let opened = Opened::new();
        let used = MEMORY + 1;
        assert_eq!(opened.memory(MEMORY, 0x40, 2 << 20), 0);
        assert_eq!(opened.memory(used, 0x40, 2 << 20), 0);
        let mut register = [0; 4];
        put(&mut register, 0, used);
        assert_eq!(
            opened.control(opened.client, DEVICE, 0x503c_0105, &mut register),
            0
        );
        assert_eq!(opened.map(used, 2 << 20).0, 0x56);
        let (status, _, file) = opened.map(MEMORY, 2 << 20);
        assert_eq!(status, 0);
        let memory = mmap(file, 2 << 20, libc::MAP_SHARED, 0).expect("it maps");
        // SAFETY: the mapping has these words. The device has written the second.
        assert_eq!(unsafe { memory.add(1).read_volatile() }, ADDED);
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    let class = |handle: u32| {
        state
            .objects
            .iter()
            .find(|(key, _)| key.1 == handle)
            .map(|(_, class)| *class)
    };
    assert_eq!((class(MEMORY), class(MEMORY + 1)), (Some(0x71), Some(0x40)));
}

#[test]
fn a_doorbell_is_the_devices_own_page() {
    let Some(device) = with_program("a_doorbell_is_the_devices_own_page") else {
        let opened = Opened::new();
        assert_eq!(opened.allocate(DEVICE, MEMORY, 0xc661, &mut [0; 2]), 0);
        let (status, number, file) = opened.map(MEMORY, 0x10000);
        assert_eq!(status, 0);
        assert!(number < 1 << 40, "no address of the driver: {number:#x}");
        let doorbell = mmap(file, 0x10000, libc::MAP_SHARED, 0).expect("it maps");
        assert!(
            mmap(file, 0x11000, libc::MAP_SHARED, 0).is_err(),
            "more than was mapped"
        );
        // SAFETY: the mapping has the word.
        unsafe { doorbell.add(0x90 / 8).write_volatile(0x1234) };
        assert!(!child_has(doorbell, 0x10000), "a child rings nothing");
        let mut block = [0; 32];
        for (at, value) in [(0, opened.client), (4, DEVICE), (8, MEMORY)] {
            put(&mut block, at, value);
        }
        put_long(&mut block, 16, number);
        call(opened.control, program::UNMAP, &mut block).expect("the call is made");
        assert_eq!(
            (word(&block, 24), &block[16..24]),
            (0, &number.to_le_bytes()[..])
        );
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    let mut rung = [0; 8];
    let doorbell = state.doorbell.as_ref().expect("it was mapped");
    doorbell
        .read_exact_at(&mut rung, 0x90)
        .expect("it is as long");
    assert_eq!(rung, 0x1234u64.to_le_bytes());
}

#[test]
fn an_event_of_the_device_wakes_whoever_polls_once() {
    let Some(_) = with_program("an_event_of_the_device_wakes_whoever_polls_once") else {
        let opened = Opened::new();
        let file = open("/dev/nvidiactl").expect("it opens");
        let poll = |timeout| {
            let mut entry = libc::pollfd {
                fd: file,
                events: libc::POLLPRI,
                revents: 0,
            };
            // SAFETY: one entry.
            let ready = unsafe { libc::poll(&mut entry, 1, timeout) };
            (ready, entry.revents, entry.events)
        };
        assert_eq!(poll(0), (0, 0, libc::POLLPRI));
        let mut block = [0; 16];
        for (at, value) in [(0, opened.client), (4, DEVICE), (8, file.cast_unsigned())] {
            put(&mut block, at, value);
        }
        call(opened.control, program::EVENT, &mut block).expect("the call is made");
        assert_eq!(poll(60_000), (1, libc::POLLPRI, libc::POLLPRI));
        assert_eq!(poll(0), (0, 0, libc::POLLPRI), "the event is taken");
        return;
    };
}

#[test]
fn the_answer_hides_processes_and_the_share_policy_of_the_worker() {
    let Some(device) =
        with_program("the_answer_hides_processes_and_the_share_policy_of_the_worker")
    else {
        let opened = Opened::new();
        let mut processes = [0; 3812];
        assert_eq!(
            opened.control(opened.client, DEVICE, 0x2080_018d, &mut processes),
            0
        );
        assert!(processes.iter().all(|byte| *byte == 0));
        for share_type in [1, 2, 0] {
            let mut policy = [0; 12];
            put(&mut policy, 8, share_type);
            assert_eq!(
                opened.control(opened.client, opened.client, 0xd04, &mut policy),
                0
            );
            assert_eq!(word(&policy, 8), share_type);
        }
        let mut texts = [[0u8; 16]; 3];
        let mut version = [0; 40];
        put(&mut version, 0, 16);
        for (text, at) in texts.iter_mut().zip([8, 16, 24]) {
            put_long(&mut version, at, text.as_mut_ptr() as u64);
        }
        let pointers = version;
        assert_eq!(
            opened.control(opened.client, opened.client, 0x101, &mut version),
            0
        );
        assert_eq!(version, pointers);
        assert_eq!(std::hint::black_box(texts), [[b'v'; 16]; 3]);
        assert_eq!(
            opened.control(opened.client, DEVICE, 0x2080_0122, &mut [0; 48]),
            0x56,
            "registers"
        );
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    assert_eq!(state.share_types, [4, 4, 0]);
}

#[test]
fn a_file_is_the_same_when_copied_passed_or_inherited() {
    let Some(_) = with_program("a_file_is_the_same_when_copied_passed_or_inherited") else {
        let opened = Opened::new();
        // SAFETY: calls without pointers but those to local values.
        unsafe {
            let copy = libc::dup(opened.control);
            let copied = Opened {
                control: copy,
                ..opened
            };
            assert_eq!(
                copied.control(copied.client, copied.client, 0xd01, &mut [0; 12]),
                0
            );
            let mut found: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(copy, &mut found), 0);
            assert_eq!(
                (found.st_mode & libc::S_IFMT, libc::major(found.st_rdev)),
                (libc::S_IFCHR, 195)
            );
            // A child has its parent's files by number, but not its contexts; it may open files of its own.
            let child = libc::fork();
            if child == 0 {
                let mut block = [0; 8];
                let inherited = libc::ioctl(copy, 0xc008_46d6, block.as_mut_ptr());
                let own = Opened::new();
                let foreign = own.control(copied.client, copied.client, 0xd01, &mut [0; 12]);
                libc::_exit(i32::from(inherited != -1 || foreign != 0x23));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert_eq!(status, 0);
        }
        return;
    };
}

#[test]
fn a_program_without_device_files_goes_on_with_another_worker() {
    let Some(_) = with_program("a_program_without_device_files_goes_on_with_another_worker") else {
        let (first, second) = (Opened::new(), open("/dev/nvidiactl"));
        let memory = mmap(-1, 1 << 16, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0);
        let memory = memory.expect("there is memory");
        // SAFETY: the mapping has this word.
        unsafe { memory.write_volatile(41) };
        assert_eq!(first.describe(MEMORY, memory, 1 << 16), 0);
        // To the program the worker has ended.
        for file in 900..1000 {
            // SAFETY: the library's own descriptors are there, and none of the test's.
            unsafe { libc::shutdown(file, libc::SHUT_RDWR) };
        }
        let other = mmap(-1, 1 << 16, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0);
        let other = other.expect("there is memory");
        let lost = first.try_describe(MEMORY + 1, other, 1 << 16);
        let lost = lost.expect_err("its worker has ended");
        assert_eq!(lost.kind(), std::io::ErrorKind::BrokenPipe);
        close(first.control);
        close(first.gpu);
        assert!(second.is_ok(), "it was opened before");
        assert!(
            open("/dev/nvidiactl").is_err(),
            "a file of the worker is left"
        );
        close(second.expect("as above"));
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("it is there");
        assert!(maps().contains("gantry-slice"), "it was pinned");
        let again = Opened::new();
        // SAFETY: as above.
        assert_eq!(unsafe { memory.read_volatile() }, 41);
        assert!(
            !maps().contains("gantry-slice"),
            "none of it is the slice's"
        );
        assert_eq!(
            again.describe(MEMORY, memory, 1 << 16),
            0,
            "it is pinned anew"
        );
        return;
    };
}

#[test]
fn a_child_that_shares_memory_keeps_its_parents_files() {
    let Some(_) = with_program("a_child_that_shares_memory_keeps_its_parents_files") else {
        let opened = Opened::new();
        // SAFETY: the child makes a call and ends, as between vfork and exec.
        unsafe {
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            let mut stack = vec![0u128; 1 << 16];
            let top = stack.as_mut_ptr().add(stack.len()).cast();
            let file = std::ptr::from_ref(&opened.control).cast_mut();
            let child = libc::clone(stat_and_end, top, flags, file.cast());
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert_eq!(status, 0, "the child knows the file");
        }
        assert_eq!(opened.memory(MEMORY, 0x3e, 0x1000), 0, "it is still ours");
        return;
    };
}

extern "C" fn stat_and_end(file: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the test gives a file; zeroes are a valid value that the call fills.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        let result = libc::fstat(*file.cast::<i32>(), &mut found);
        i32::from(result != 0 || found.st_mode & libc::S_IFMT != libc::S_IFCHR)
    }
}

#[test]
fn a_path_that_is_no_device_file_of_the_program_does_not_open() {
    let Some(_) = with_program("a_path_that_is_no_device_file_of_the_program_does_not_open") else {
        for (path, error) in [
            ("/dev/nvidia1", libc::ENOENT),
            ("/dev/nvidia-uvm-tools", libc::ENOENT),
            ("/dev/nvidia-caps/nvidia-cap1", libc::ENOENT),
            ("/dev/nvidia0/../null", libc::ENOENT),
        ] {
            let refused = open(path).expect_err(path);
            assert_eq!(refused.raw_os_error(), Some(error), "{path}");
        }
        close(open("/dev/null").expect("others open as ever"));
        // SAFETY: zeroes are a valid value that the call fills.
        let found = unsafe {
            let mut found: libc::stat = std::mem::zeroed();
            assert_eq!(libc::stat(c"/dev/nvidia0".as_ptr(), &mut found), 0);
            assert_eq!(libc::access(c"/dev/nvidia1".as_ptr(), libc::R_OK), -1);
            found
        };
        assert_eq!(
            (found.st_rdev, found.st_mode),
            (libc::makedev(195, 0), libc::S_IFCHR | 0o666)
        );
        return;
    };
}

/// Where programs have managed memory.
const MANAGED: usize = 0x2_0000_0000;

/// Maps managed memory.
fn managed(uvm: i32, length: usize) -> std::io::Result<*mut u64> {
    map_at(MANAGED, length, libc::MAP_SHARED, uvm)
}

fn map_at(at: usize, length: usize, flags: i32, file: i32) -> std::io::Result<*mut u64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = flags | libc::MAP_FIXED;
    // SAFETY: nothing else of the program is there.
    let mapped = unsafe { libc::mmap(at as *mut _, length, protection, flags, file, at as i64) };
    if mapped == libc::MAP_FAILED {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(mapped.cast())
    }
}

/// Whether a child of fork has all of a mapping, of at most 1 MiB.
fn child_has(memory: *mut u64, length: usize) -> bool {
    // SAFETY: the child looks whether the memory is there, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let mut there = [0u8; 256];
            let looked = libc::mincore(memory.cast(), length, there.as_mut_ptr());
            libc::_exit(i32::from(looked == 0));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status != 0
    }
}

fn unmap(at: usize, length: usize) {
    // SAFETY: nobody uses what is there.
    assert_eq!(unsafe { libc::munmap(at as *mut _, length) }, 0);
}

/// Registers an address space with a file of unified memory.
fn register(opened: &Opened, uvm: i32) {
    const SPACE: u32 = 0x5c00_0010;
    assert_eq!(opened.allocate(DEVICE, SPACE, 0x90f1, &mut [0; 56]), 0);
    let mut block = [0; 32];
    for (at, value) in [
        (16, opened.control.cast_unsigned()),
        (20, opened.client),
        (24, SPACE),
    ] {
        put(&mut block, at, value);
    }
    call(uvm, 0x19, &mut block).expect("the call is made");
    assert_eq!(word(&block, 28), 0);
}

/// Gives a preferred location to a range. Answers the status.
fn advise(uvm: i32, base: usize, length: usize) -> u32 {
    let mut advice = [0; 40];
    put_long(&mut advice, 0, base as u64);
    put_long(&mut advice, 8, length as u64);
    call(uvm, 0x2a, &mut advice).expect("the call is made");
    word(&advice, 36)
}

#[test]
fn managed_memory_is_freed_when_its_mapping_is_gone() {
    const LENGTH: usize = 1 << 20;
    let Some(device) = with_program("managed_memory_is_freed_when_its_mapping_is_gone") else {
        let opened = Opened::new();
        let uvm = open("/dev/nvidia-uvm").expect("it opens");
        let early = managed(uvm, LENGTH).expect_err("no GPU is registered");
        assert_eq!(early.raw_os_error(), Some(libc::ENOMEM));
        register(&opened, uvm);
        let private = map_at(MANAGED, LENGTH, libc::MAP_PRIVATE, uvm);
        assert_eq!(
            private.expect_err("as the driver").raw_os_error(),
            Some(libc::EINVAL)
        );
        let memory = managed(uvm, LENGTH).expect("it maps");
        // SAFETY: the mapping has these words. The device has written the second.
        unsafe {
            assert_eq!(memory.add(1).read_volatile(), ADDED);
            memory.write_volatile(7);
        }
        // A preferred location of all of it, and of what is no managed memory.
        for base in [MANAGED, MANAGED + LENGTH] {
            assert_eq!(advise(uvm, base, LENGTH), 0);
        }
        assert!(!child_has(memory, LENGTH), "a child has no managed memory");
        unmap(MANAGED + 4096, LENGTH - 4096);
        // SAFETY: this page is left.
        assert_eq!(unsafe { memory.read_volatile() }, 7);
        unmap(MANAGED - 4096, 8192);
        // More than the slice has, one after the other.
        for _ in 0..100 {
            managed(uvm, LENGTH).expect("there is room again");
            map_at(MANAGED, LENGTH, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
                .expect("something else is there");
        }
        let memory = managed(uvm, LENGTH).expect("it maps");
        // SAFETY: the mapping has the word.
        unsafe { memory.add(9).write_volatile(7) };
        let memory = managed(uvm, LENGTH).expect("anew");
        // SAFETY: as above.
        assert_eq!(unsafe { memory.add(9).read_volatile() }, 0);
        unmap(MANAGED + 4096, 4096);
        let part = managed(uvm, 4096).expect_err("a part of what is there already");
        assert_eq!(part.raw_os_error(), Some(libc::EINVAL));
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    let ranges = state.ranges.iter();
    let of_program = ranges.filter(|(command, _)| [0x49, 0x22, 0x2a].contains(command));
    let (create, free) = ((0x49, MANAGED as u64), (0x22, MANAGED as u64));
    let mut expected = vec![create, (0x2a, (MANAGED + LENGTH) as u64), free];
    expected.extend([create, free].repeat(100));
    expected.extend([create, free, create]);
    assert!(of_program.copied().eq(expected), "{:x?}", state.ranges);
}

#[test]
fn a_fork_handler_unmaps_while_there_is_managed_memory() {
    use std::sync::{LazyLock, Mutex, mpsc};

    const LENGTH: usize = 1 << 16;
    /// What a thread unmaps for the handler: it is asked for it, and says that it has done so.
    type Unmapping = (mpsc::Sender<()>, mpsc::Receiver<()>);
    static OTHER: LazyLock<Mutex<Unmapping>> = LazyLock::new(|| {
        let (asked, to_do) = mpsc::channel();
        let (did, done) = mpsc::channel();
        thread::spawn(move || {
            for () in to_do {
                unmap_new();
                did.send(()).expect("it is waited for");
            }
        });
        Mutex::new((asked, done))
    });
    fn unmap_new() {
        let memory = mmap(-1, 4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0);
        unmap(memory.expect("there is memory") as usize, 4096);
    }
    extern "C" fn before_fork() {
        unmap_new();
        let (ask, done) = &*OTHER.lock().expect("nothing has panicked");
        ask.send(()).expect("it lives");
        done.recv().expect("it lives");
        unmap(MANAGED, LENGTH);
    }
    let Some(_) = with_program("a_fork_handler_unmaps_while_there_is_managed_memory") else {
        LazyLock::force(&OTHER);
        // SAFETY: the handler is valid for ever. It was registered before those of the library, and runs after them.
        // A program that hangs is killed.
        unsafe {
            assert_eq!(libc::pthread_atfork(Some(before_fork), None, None), 0);
            libc::alarm(300);
        }
        let opened = Opened::new();
        let uvm = open("/dev/nvidia-uvm").expect("it opens");
        register(&opened, uvm);
        managed(uvm, LENGTH).expect("it maps");
        // SAFETY: the child ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert_eq!(status, 0);
        }
        managed(uvm, LENGTH).expect("there is room again");
        return;
    };
}

#[test]
fn memory_that_is_managed_anew_while_it_is_unmapped_stays() {
    const LENGTH: usize = 1 << 16;
    let Some(device) = with_program("memory_that_is_managed_anew_while_it_is_unmapped_stays")
    else {
        let opened = Opened::new();
        let uvm = open("/dev/nvidia-uvm").expect("it opens");
        register(&opened, uvm);
        for _ in 0..300 {
            let memory = managed(uvm, LENGTH).expect("it maps") as usize;
            thread::scope(|scope| {
                scope.spawn(|| unmap(MANAGED, LENGTH));
                let mut there = [0; LENGTH / 4096];
                // SAFETY: the call writes the array.
                while unsafe { libc::mincore(memory as *mut _, LENGTH, there.as_mut_ptr()) } == 0 {}
                managed(uvm, LENGTH).expect("there is room again");
            });
            assert_eq!(advise(uvm, MANAGED, LENGTH), 0);
            unmap(MANAGED, LENGTH);
        }
        return;
    };
    let state = device.0.lock().expect("no call has panicked");
    let mut ranges = state.ranges.iter();
    assert!(
        ranges.all(|(command, _)| *command != 0x2a),
        "the range was freed: the driver is advised"
    );
}

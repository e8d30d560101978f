//! Images whose process ends at any time. `qemu-img check` is the judge of their tables.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use device_model::memory::GuestRam;
use imago::{StorageExt, format::PreallocateMode};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{Buffers, ImageType};

/// Number of blocks that are written and discarded, in places all over the disk.
const BLOCKS: u64 = 1024;
/// Length of a block in bytes, of which writes change a part.
const BLOCK: u64 = 16 << 10;
const CHANGED: usize = 4096;
/// Blocks that have content from the beginning, which is compressed.
const FILLED: u64 = 64;
/// Numbers of threads that write, and of requests between two flushes.
const THREADS: u64 = 3;
const BATCH: u64 = 8;

fn options(path: &Path) -> DiskOptions {
    DiskOptions {
        path: path.to_owned(),
        read_only: false,
        direct: false,
        image_type: ImageType::Qcow2,
        logical_block: None,
        backing_files: false,
        sparse: true,
        lock_granularity: LockGranularity::ByteRange,
        lock_later: false,
        io_uring: false,
    }
}

fn try_open(path: &Path) -> Result<Qcow2Image, DiskError> {
    let open = || File::options().read(true).write(true).open(path).unwrap();
    let size = fs::metadata(path).unwrap().len();
    Qcow2Image::open(open(), &open(), size, &options(path), &Claim::default())
}

fn open(path: &Path) -> Qcow2Image {
    try_open(path).unwrap()
}

fn qemu_img(arguments: &[&str]) -> std::process::Output {
    let output = Command::new("qemu-img").args(arguments).output();
    output.expect("qemu-img is in the package qemu-utils")
}

/// Asserts that the image has no defects; space may be left over.
fn check(path: &Path, when: &str) {
    let output = qemu_img(&["check", "-f", "qcow2", path.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        matches!(output.status.code(), Some(0 | 3)),
        "{when}: {said}"
    );
}

fn create(path: &Path, size: u64, cluster: u64) {
    let cluster = format!("cluster_size={cluster}");
    let size = size.to_string();
    let path = path.to_str().unwrap();
    let output = qemu_img(&["create", "-f", "qcow2", "-o", &cluster, path, &size]);
    assert!(output.status.success(), "{output:?}");
}

fn transfer(
    image: &Qcow2Image,
    operation: Operation,
    offset: u64,
    bytes: &mut [u8],
) -> io::Result<()> {
    thread_local! {
        static RAM: Arc<GuestRam> =
            Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap());
    }
    let ram = RAM.with(Arc::clone);
    ram.write_slice(bytes, GuestAddress(0)).unwrap();
    let mut buffers = Buffers::default();
    buffers.reset(Arc::clone(&ram));
    assert!(buffers.push(GuestAddress(0), bytes.len()));
    image.perform(&mut Io::transfer(operation, offset, buffers, 0))?;
    ram.read_slice(bytes, GuestAddress(0)).unwrap();
    Ok(())
}

fn write(image: &Qcow2Image, offset: u64, bytes: &[u8]) {
    let operation = Operation::Write { durable: false };
    transfer(image, operation, offset, &mut bytes.to_vec()).unwrap();
}

fn read(image: &Qcow2Image, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    transfer(image, Operation::Read, offset, &mut bytes).unwrap();
    bytes
}

/// A copy of the image as it would be if this process ended now.
fn killed(path: &Path) -> PathBuf {
    let copy = path.with_extension("killed");
    fs::copy(path, &copy).unwrap();
    copy
}

fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

#[test]
fn what_was_written_and_not_flushed_takes_no_later_writes_place() {
    let folder = folder();
    let path = folder.path().join("disk");
    create(&path, 8 << 30, 65536);
    let image = open(&path);
    write(&image, 1 << 20, &[1; 65536]);
    let copy = killed(&path);
    check(&copy, "killed");
    let image = open(&copy);
    for (offset, byte) in [(4 << 30, 187), (0, 51)] {
        write(&image, offset, &[byte; 65536]);
        image.flush().unwrap();
    }
    assert_eq!(read(&image, 4 << 30, 512), [187; 512]);
    assert_eq!(read(&image, 0, 512), [51; 512]);
    write(&image, (4 << 30) + 65536, &[68; 65536]);
    assert_eq!(read(&image, 65536, 512), [0; 512]);
    drop(image);
    check(&copy, "written to again");
}

#[test]
fn a_disk_that_has_grown_and_is_not_flushed_keeps_its_data() {
    let folder = folder();
    let path = folder.path().join("disk");
    create(&path, 1 << 30, 65536);
    let image = open(&path);
    write(&image, 0, &[0x11; 1 << 20]);
    image.flush().unwrap();
    let access = image.access.read_unpoisoned();
    access.resize_grow(1 << 40, PreallocateMode::None).unwrap();
    let copy = killed(&path);
    check(&copy, "killed");
    let image = open(&copy);
    assert_eq!(image.size(), 1 << 40);
    for part in 0..2 {
        write(&image, (1 + part) << 20, &[0x22; 1 << 20]);
    }
    image.flush().unwrap();
    drop(image);
    let image = open(&copy);
    assert_eq!(read(&image, 0, 1 << 20), [0x11; 1 << 20]);
    assert_eq!(read(&image, 2 << 20, 1 << 20), [0x22; 1 << 20]);
}

#[test]
fn tables_that_an_earlier_version_left_without_a_count_are_mended_and_shared_ones_refused() {
    let folder = folder();
    let path = folder.path().join("disk");
    create(&path, 8 << 30, 65536);
    let image = open(&path);
    for offset in [0, 4 << 30] {
        write(&image, offset, &[1; 65536]);
    }
    image.flush().unwrap();
    drop(image);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let (l1, counts) = (word(40), word(word(48)));
    let table = word(l1) & !COPIED;
    file.write_all_at(&[0; 2], counts + table / 65536 * 2)
        .unwrap();
    let output = qemu_img(&["check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    drop(open(&path));
    check(&path, "mended");
    file.write_all_at(&(table | COPIED).to_be_bytes(), l1 + 8 * 8)
        .unwrap();
    let error = try_open(&path).err().unwrap().to_string();
    assert!(error.contains("name the same L2 table"), "{error}");
    assert!(error.contains("qemu-img check -r all"), "{error}");
}

/// The image's storage, as the library has it.
fn storage(image: &Qcow2Image, path: &Path) -> CountedFile {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let options = StorageOpenOptions::new().filename(path).write(true);
    let file = imago::file::File::from_open_file(file, options).unwrap();
    CountedFile::new(file, image.tables.clone())
}

#[test]
fn a_table_that_could_not_be_named_fails_all_later_flushes() {
    let folder = folder();
    let path = folder.path().join("disk");
    create(&path, 8 << 30, 65536);
    let image = open(&path);
    write(&image, 0, &[1; 65536]);
    image.flush().unwrap();
    let file = File::open(&path).unwrap();
    let mut l1 = [0; 8];
    file.read_exact_at(&mut l1, 40).unwrap();
    let second = u64::from_be_bytes(l1) + 8;
    // There is no place for its count.
    let entry = (COPIED | 1 << 40).to_be_bytes();
    let storage = storage(&image, &path);
    storage.write(&entry[..], second).unwrap_err();
    file.read_exact_at(&mut l1, second).unwrap();
    assert_eq!(l1, [0; 8]);
    image.flush().unwrap_err();
}

#[test]
fn an_older_copy_of_counts_does_not_take_back_what_was_raised() {
    let folder = folder();
    let path = folder.path().join("disk");
    create(&path, 8 << 30, 65536);
    let image = open(&path);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let counts = word(word(48));
    let mut older = vec![0; 65536];
    file.read_exact_at(&mut older, counts).unwrap();
    write(&image, 4 << 30, &[1; 65536]);
    storage(&image, &path).write(&older, counts).unwrap();
    check(&killed(&path), "an older copy of counts");
    image.flush().unwrap();
    drop(image);
    check(&path, "closed");
}

/// The bit of an L1 entry that its table has no other user.
const COPIED: u64 = 1 << 63;

/// What a thread of the process that is killed does to a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Write,
    Discard,
    Zero,
}

/// A number that depends on others only.
fn mixed(numbers: [u64; 3]) -> u64 {
    let mut mixed = 0x9e37_79b9_7f4a_7c15_u64;
    for number in numbers {
        mixed = (mixed ^ number).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^= mixed >> 29;
    }
    mixed
}

/// The step with this number of a thread, and its block.
fn step(round: u64, thread: u64, number: u64) -> (Step, u64) {
    let random = mixed([round, thread, number]);
    // Often one of the blocks that are filled.
    let among = if random & 3 == 0 { FILLED } else { BLOCKS };
    let block = (random >> 8) % (among / THREADS) * THREADS + thread;
    let step = match (random >> 2) & 7 {
        0 => Step::Discard,
        1 => Step::Zero,
        _ => Step::Write,
    };
    (step, block)
}

/// What a step writes to a block, repeatedly. No step has the mark 0.
fn mark(round: u64, number: u64, block: u64) -> u64 {
    round << 56 | (number + 1) << 16 | block
}

fn marked(mark: u64, len: usize) -> Vec<u8> {
    mark.to_be_bytes().repeat(len / 8)
}

/// The image, the round and the distance of blocks, for the process that is killed.
const VICTIM: &str = "GANTRY_TEST_VICTIM";

/// The process that is killed.
#[test]
#[ignore = "changes an image until it is killed"]
fn victim() {
    let what = std::env::var(VICTIM).unwrap();
    let parts: Vec<_> = what.split(' ').collect();
    let (round, distance): (u64, u64) = (parts[1].parse().unwrap(), parts[2].parse().unwrap());
    let image = &open(Path::new(parts[0]));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for number in 0.. {
                    let (step, block) = step(round, thread, number);
                    let offset = block * distance;
                    let range = |operation| {
                        image
                            .perform(&mut Io::range(operation, offset, BLOCK, 0))
                            .unwrap();
                    };
                    match step {
                        Step::Write => {
                            write(image, offset, &marked(mark(round, number, block), CHANGED));
                        }
                        Step::Discard => range(Operation::Discard),
                        Step::Zero => range(Operation::WriteZeroes {
                            may_unmap: false,
                            durable: false,
                        }),
                    }
                    if number % BATCH == BATCH - 1 {
                        image.flush().unwrap();
                        let mut out = io::stdout().lock();
                        writeln!(out, "flushed {thread} {number}").unwrap();
                    }
                    if thread == 0 && number % 32 == 31 {
                        image.grow(image.size() + (32 << 20)).unwrap();
                    }
                }
            });
        }
    });
}

/// Lets a process change the image, and kills it. Returns how many steps of each thread were flushed.
fn kill(path: &Path, round: u64, distance: u64, after: Duration) -> HashMap<u64, u64> {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "qcow2::tests::victim",
            "--ignored",
            "--nocapture",
        ])
        .env(VICTIM, format!("{} {round} {distance}", path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let (begun, begins) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut flushed = HashMap::new();
        while let Some(Ok(line)) = lines.next() {
            let Some((_, line)) = line.split_once("flushed ") else {
                continue;
            };
            let (thread, number) = line.split_once(' ').unwrap();
            flushed.insert(thread.parse().unwrap(), number.parse::<u64>().unwrap() + 1);
            let _ = begun.send(());
        }
        flushed
    });
    begins.recv().expect("the process changes the image");
    thread::sleep(after);
    victim.kill().unwrap();
    victim.wait().unwrap();
    reader.join().unwrap()
}

/// Contents of a block: the part that writes change, and the rest.
type Contents = [u64; 2];

fn contents(image: &Qcow2Image, block: u64, distance: u64) -> Contents {
    [0, BLOCK - 512].map(|at| {
        let bytes = read(image, block * distance + at, 512);
        let mark = u64::from_be_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(bytes, marked(mark, 512), "block {block} at {at}");
        mark
    })
}

fn after(step: Step, mark: u64, contents: Contents) -> Contents {
    match step {
        Step::Write => [mark, contents[1]],
        Step::Discard | Step::Zero => [0, 0],
    }
}

/// Asserts that each block has the contents of its last flushed step, or of a later one.
fn compare(
    image: &Qcow2Image,
    distance: u64,
    round: u64,
    flushed: &HashMap<u64, u64>,
    before: &mut HashMap<u64, Contents>,
) {
    let mut possible: HashMap<u64, Vec<Contents>> = HashMap::new();
    for thread in 0..THREADS {
        let flushed = flushed.get(&thread).copied().unwrap_or(0);
        // The process may have flushed once more without being able to say so.
        for number in 0..flushed + 2 * BATCH {
            let (step, block) = step(round, thread, number);
            let before = before.get(&block).copied().unwrap_or_default();
            let all = possible.entry(block).or_insert_with(|| vec![before]);
            let mark = mark(round, number, block);
            let now: Vec<_> = all.iter().map(|it| after(step, mark, *it)).collect();
            match number < flushed {
                true => *all = now,
                false => all.extend(now),
            }
        }
    }
    for block in 0..BLOCKS {
        let now = contents(image, block, distance);
        let unchanged = [before.get(&block).copied().unwrap_or_default()];
        let possible = possible.get(&block).map_or(&unchanged[..], |all| all);
        // A step that was not flushed may have changed one part only.
        for part in 0..2 {
            assert!(
                possible.iter().any(|it| it[part] == now[part]),
                "round {round}, block {block}: {now:x?}, expected one of {possible:x?}"
            );
        }
        before.insert(block, now);
    }
}

#[test]
fn an_image_whose_process_is_killed_at_any_time_is_whole() {
    // Small clusters: all kinds of tables grow often.
    for (cluster, distance) in [(512, 64 << 10), (4096, 1 << 20), (65536, 32 << 20)] {
        let folder = folder();
        let path = folder.path().join("disk");
        let raw = folder.path().join("raw");
        let file = File::create(&raw).unwrap();
        file.set_len(BLOCKS * distance).unwrap();
        let mut before = HashMap::new();
        for block in 0..FILLED {
            let mark = mark(0, 0, block);
            file.write_all_at(&marked(mark, BLOCK as usize), block * distance)
                .unwrap();
            before.insert(block, [mark; 2]);
        }
        let output = qemu_img(&[
            "convert",
            "-c",
            "-O",
            "qcow2",
            "-o",
            &format!("cluster_size={cluster}"),
            raw.to_str().unwrap(),
            path.to_str().unwrap(),
        ]);
        assert!(output.status.success(), "{output:?}");
        for round in 1..=2 {
            let delay = mixed([cluster, round, 0]) % 120;
            let flushed = kill(&path, round, distance, Duration::from_millis(delay));
            let when = format!("cluster {cluster}, round {round}");
            check(&path, &when);
            compare(&open(&path), distance, round, &flushed, &mut before);
        }
    }
}

//! Images of every kind, valid and invalid.

use std::{
    fs, fs::File, os::fd::AsRawFd, os::fd::FromRawFd, os::unix::fs::FileExt, process::Command,
    time::Duration,
};

use disk::{ImageType, LockGranularity};

use super::{
    DATA, DISCARD, IN, Image, OUT, Rig, WRITE, WRITE_ZEROES, grow, make_qcow2, new_blk,
    on_both_engines, pattern,
};
use crate::{blk::Options, device::VirtioDevice};

#[test]
fn direct_io_takes_misaligned_guest_memory() {
    for io_uring in [true, false] {
        let image = Image::raw(&pattern(64));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        options.disk.direct = true;
        let blk = match new_blk(options) {
            Ok(blk) => blk,
            Err(error) => {
                println!("skipped: no direct I/O in the folder for temporary files: {error}");
                return;
            }
        };
        let features = blk.features();
        let mut rig = Rig::with(blk, features);
        rig.fill(DATA + 3, &[0x5a; 4096]);
        assert_eq!(rig.request(OUT, 8, (DATA + 3, 4096, 0)).0, 0);
        assert_eq!(image.content()[8 * 512..16 * 512], [0x5a; 4096]);
        assert_eq!(rig.request(IN, 16, (DATA + 1, 4096, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA + 1, 4096), pattern(64)[16 * 512..24 * 512]);
    }
}

#[test]
fn qcow2_images_keep_what_the_guest_writes() {
    let image = Image::qcow2(64 << 20);
    {
        let mut rig = Rig::new(image.options());
        assert_eq!(rig.blk.handle().size(), 64 << 20);
        rig.fill(DATA, &pattern(8));
        assert_eq!(rig.request(OUT, 100_000, (DATA, 4096, 0)).0, 0);
        assert_eq!(rig.flush(), 0);
        assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA, 512), [0; 512]);
        assert_eq!(rig.request(IN, 131_072, (DATA, 512, WRITE)).0, 1);
    }
    let mut rig = Rig::new(image.options());
    assert_eq!(rig.request(IN, 100_000, (DATA, 4096, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 4096), pattern(8));
    assert_eq!(rig.range(WRITE_ZEROES, 100_001, 1, 0), 0);
    assert_eq!(rig.range(WRITE_ZEROES, 100_003, 1, 1), 0);
    assert_eq!(rig.request(IN, 100_000, (DATA, 4096, WRITE)).0, 0);
    let mut expected = pattern(8);
    expected[512..1024].fill(0);
    expected[3 * 512..4 * 512].fill(0);
    assert_eq!(rig.bytes(DATA, 4096), expected);
    assert!(image.content().len() < 2 << 20, "it grows only as needed");
}

#[test]
fn a_qcow2_image_grows_while_it_is_in_use_and_what_is_new_is_zero() {
    let image = Image::qcow2(1 << 20);
    {
        let mut rig = Rig::new(image.options());
        rig.fill(DATA, &pattern(8));
        assert_eq!(rig.request(OUT, 2040, (DATA, 4096, 0)).0, 0);
        grow(&rig.blk.handle(), 1 << 40).unwrap();
        assert_eq!(rig.blk.handle().size(), 1 << 40);
        for sector in [2048, 4000, (1 << 31) - 8] {
            assert_eq!(rig.request(IN, sector, (DATA, 4096, WRITE)).0, 0);
            assert_eq!(rig.bytes(DATA, 4096), [0; 4096], "{sector}");
        }
        rig.fill(DATA, &pattern(8));
        assert_eq!(rig.request(OUT, (1 << 31) - 8, (DATA, 4096, 0)).0, 0);
        // As after kill -9: nothing more is written.
        let copy = image.path.with_file_name("copy.img");
        fs::copy(&image.path, &copy).unwrap();
        let mut copied = image.options();
        copied.disk.path = copy;
        assert_eq!(new_blk(copied).unwrap().handle().size(), 1 << 40);
        grow(&rig.blk.handle(), 1 << 20).unwrap_err();
    }
    let mut rig = Rig::new(image.options());
    assert_eq!(rig.blk.handle().size(), 1 << 40);
    for sector in [2040, (1 << 31) - 8] {
        assert_eq!(rig.request(IN, sector, (DATA, 4096, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA, 4096), pattern(8), "{sector}");
    }
}

#[test]
fn a_qcow2_image_whose_new_part_might_not_be_zero_stays_as_it_is() {
    let image = Image::qcow2(1 << 20);
    let base = image.path.with_file_name("base.img");
    fs::write(&base, pattern(8192)).unwrap();
    let refused = |image: &Image, words: &str| {
        let mut options = image.options();
        options.disk.backing_files = true;
        let blk = new_blk(options).unwrap();
        let before = image.content();
        let error = grow(&blk.handle(), 2 << 20).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        grow(&blk.handle(), 1 << 20).unwrap();
        assert_eq!(image.content(), before);
    };
    make_qcow2(&image.path, 1 << 20, Some((&base, "raw")));
    refused(&image, "it has a backing file");
    let image = Image::qcow2(1 << 20);
    // One internal snapshot, by the header.
    let file = File::options().write(true).open(&image.path).unwrap();
    file.write_all_at(&1_u32.to_be_bytes(), 60).unwrap();
    refused(&image, "it has internal snapshots");
}

#[test]
fn the_guest_sees_blocks_of_the_size_that_was_asked_for() {
    let block_size = |options: Options| {
        let blk = new_blk(options)?;
        let mut size = [0; 4];
        blk.read_config(20, &mut size);
        Ok::<_, crate::blk::Error>(u32::from_le_bytes(size))
    };
    for image in [Image::raw(&pattern(16)), Image::qcow2(16 * 512)] {
        for size in [512, 4096] {
            let mut options = image.options();
            options.disk.logical_block = Some(size);
            assert_eq!(block_size(options).unwrap(), size);
        }
    }
    for image in [Image::raw(&pattern(9)), Image::qcow2(9 * 512)] {
        let mut options = image.options();
        options.disk.logical_block = Some(4096);
        let error = block_size(options).unwrap_err().to_string();
        assert!(error.contains("not a multiple of 4096"), "{error}");
    }
}

/// The image as its file is now.
fn copied(image: &Image) -> Image {
    Image::raw(&image.content())
}

/// What a disk has at a sector.
fn sector(rig: &mut Rig, at: u64) -> u8 {
    assert_eq!(rig.request(IN, at, (DATA, 512, WRITE)).0, 0);
    rig.bytes(DATA, 512)[0]
}

fn write_sector(rig: &mut Rig, at: u64, value: u8) {
    rig.fill(DATA, &[value; 512]);
    assert_eq!(rig.request(OUT, at, (DATA, 512, 0)).0, 0);
}

#[test]
fn a_flush_that_is_left_behind_writes_nothing_to_the_image() {
    let image = Image::qcow2(8 << 30);
    let mut rig = Rig::new(image.options());
    write_sector(&mut rig, 4096, 99);
    let early = rig.blk.handle().flush();
    let before = image.content();
    early().unwrap_err();
    assert!(image.content() == before);
    rig.blk.quiesce(Duration::from_secs(60)).unwrap();
    let left = rig.blk.handle().flush();
    drop(rig);
    // Another VM has it.
    let rig = Rig::new(image.options());
    let before = image.content();
    left().unwrap();
    assert!(image.content() == before);
    drop(rig);
}

#[test]
fn whoever_copies_the_image_of_a_quiet_disk_has_all_that_was_written() {
    for is_active in [true, false] {
        let image = Image::qcow2(8 << 30);
        let mut rig = Rig::new(image.options());
        write_sector(&mut rig, 4096, 99);
        let patience = Duration::from_secs(60);
        match is_active {
            true => rig.blk.quiesce(patience).unwrap(),
            // Its driver has reset it.
            false => {
                rig.blk.deactivate();
                rig.blk.settle(patience).unwrap();
            }
        }
        rig.blk.settled().unwrap();
        let copy = copied(&image);
        let mut rig = Rig::new(copy.options());
        assert_eq!(sector(&mut rig, 4096), 99);
    }
}

#[test]
fn a_disk_whose_tables_cannot_be_written_says_so_and_its_end_does_not_wait() {
    // SAFETY: the name is a C string; the descriptor is new, and owned by the File.
    let file = unsafe {
        let fd = libc::memfd_create(c"disk".as_ptr(), libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    };
    let mut options = Image::raw(&[]).options();
    options.disk.path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    make_qcow2(&options.disk.path, 64 << 20, None);
    let mut rig = Rig::new(options);
    write_sector(&mut rig, 4096, 99);
    // SAFETY: no memory is involved.
    let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
    assert_eq!(sealed, 0);
    for _ in 0..2 {
        rig.blk.quiesce(Duration::from_secs(60)).unwrap();
        let error = rig.blk.settled().unwrap_err().to_string();
        assert!(error.contains("could not be written"), "{error}");
    }
    rig.blk.carry_on();
    assert_eq!(rig.flush(), 1);
}

#[test]
fn parts_of_a_devices_blocks_are_neither_discarded_nor_zeroed() {
    let image = Image::raw(&[0; 1 << 20]);
    let losetup = |arguments: &[&str]| {
        let output = Command::new("losetup").args(arguments).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    };
    let file = image.path.to_str().unwrap();
    let Some(device) = losetup(&["--find", "--show", "--sector-size", "4096", file]) else {
        eprintln!("not tested: this user or host makes no loop devices");
        return;
    };
    let opened = File::open(&device).unwrap();
    // It goes when it is closed, whatever happens.
    losetup(&["--detach", &device]).unwrap();
    let features = |logical_block| {
        let mut options = image.options();
        options.disk.path = device.clone().into();
        options.disk.logical_block = logical_block;
        new_blk(options).unwrap().features()
    };
    // Discard and write zeroes.
    let both = 0b11 << 13;
    assert_eq!(features(None) & both, both);
    assert_eq!(features(Some(512)) & both, 0);
    drop(opened);
}

#[test]
fn backing_files_are_opened_only_when_allowed() {
    let image = Image::qcow2(1 << 20);
    let base = image.path.with_file_name("base.img");
    fs::write(&base, pattern(2048)).unwrap();
    make_qcow2(&image.path, 1 << 20, Some((&base, "raw")));
    let error = new_blk(image.options()).err().unwrap().to_string();
    assert!(error.contains("backing_files=on"), "{error}");
    let mut options = image.options();
    options.disk.backing_files = true;
    let mut rig = Rig::new(options.clone());
    assert_eq!(rig.request(IN, 700, (DATA, 512, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 512), pattern(2048)[700 * 512..701 * 512]);
    rig.fill(DATA, &[1; 512]);
    assert_eq!(rig.request(OUT, 701, (DATA, 512, 0)).0, 0);
    assert_eq!(rig.request(IN, 700, (DATA, 1024, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 512), pattern(2048)[700 * 512..701 * 512]);
    assert_eq!(rig.bytes(DATA + 512, 512), [1; 512]);
    assert_eq!(fs::read(&base).unwrap(), pattern(2048));
    drop(rig);
    // An image that is its own backing file must not cause a hang.
    make_qcow2(&image.path, 1 << 20, Some((&image.path, "qcow2")));
    assert!(new_blk(options).is_err());
}

#[test]
fn unusable_images_are_refused_with_the_reason_and_a_cure() {
    fn refused(options: Options) -> String {
        new_blk(options).err().unwrap().to_string()
    }
    let image = Image::raw(&pattern(8));
    let with = |change: fn(&mut Options)| {
        let mut options = image.options();
        change(&mut options);
        options
    };
    assert!(refused(with(|o| o.disk.path = "/".into())).contains("a directory"));
    assert!(refused(with(|o| o.disk.path = "/dev/null".into())).contains("a special file"));
    assert!(refused(with(|o| o.disk.path = "/nowhere".into())).contains("check the path"));
    assert!(refused(with(|o| o.disk.image_type = ImageType::Qcow2)).contains("no qcow2 header"));
    assert!(refused(with(|o| o.disk.image_type = ImageType::Vhdx)).contains("convert -O raw"));
    assert!(refused(with(|o| o.num_queues = 0)).contains("1 to 256"));
    assert!(refused(with(|o| o.queue_size = 100)).contains("power of two"));
    assert!(refused(with(|o| o.affinity = vec![(1, vec![0])])).contains("1 queues"));
    assert!(refused(Image::raw(&[]).options()).contains("is empty"));
    assert!(refused(Image::raw(&[1; 1000]).options()).contains("multiple of 512"));
    let odd = Image::qcow2(1000);
    assert!(refused(odd.options()).contains("`qemu-img resize"));
    let mut vhd = pattern(8);
    vhd[7 * 512..7 * 512 + 8].copy_from_slice(b"conectix");
    assert!(refused(Image::raw(&vhd).options()).contains("is VHD"));
    let qcow2 = Image::qcow2(64 << 20);
    let file = File::options().write(true).open(&qcow2.path).unwrap();
    file.set_len(70_000).unwrap();
    assert!(refused(qcow2.options()).contains("is truncated"));
    file.write_all_at(&[0xff; 60], 8).unwrap();
    new_blk(qcow2.options()).err().unwrap();
    let image = Image::raw(b"QFI\xfb");
    let mut short = image.options();
    short.disk.image_type = ImageType::Qcow2;
    assert!(refused(short).contains("is truncated"));
}

#[test]
fn a_discard_of_a_qcow2_image_frees_storage_of_the_host_and_nothing_else() {
    use std::os::unix::fs::MetadataExt;

    const PIECE: usize = 512 << 10;
    let image = Image::qcow2(64 << 20);
    let base = image.path.with_file_name("base.img");
    fs::write(&base, vec![0x77; 8 << 20]).unwrap();
    make_qcow2(&image.path, 64 << 20, Some((&base, "raw")));
    let mut options = image.options();
    options.disk.backing_files = true;
    let mut rig = Rig::new(options);
    let stored = || fs::metadata(&image.path).unwrap().blocks() * 512;
    rig.fill(DATA, &vec![0x5a; PIECE]);
    for nth in 0..8 {
        let (sector, len) = (nth * (PIECE as u64) / 512, PIECE as u32);
        assert_eq!(rig.request(OUT, sector, (DATA, len, 0)).0, 0);
    }
    assert_eq!(rig.flush(), 0);
    let before = stored();
    // All but the first and the last sector of the 4 MiB.
    assert_eq!(rig.range(DISCARD, 1, 8190, 0), 0);
    assert_eq!(rig.flush(), 0);
    assert!(stored() + (3 << 20) < before, "{} of {before}", stored());
    for (sector, byte) in [
        (0, 0x5a),
        (1, 0),
        (4096, 0),
        (8190, 0),
        (8191, 0x5a),
        (8192, 0x77),
    ] {
        assert_eq!(rig.request(IN, sector, (DATA, 512, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA, 512), [byte; 512], "sector {sector}");
    }
    assert_eq!(fs::read(&base).unwrap(), vec![0x77; 8 << 20]);
}

#[test]
fn images_of_other_formats_are_never_taken_for_raw_unasked() {
    let cases: [(usize, &[u8], &str, &str); 7] = [
        (
            0,
            b"QFI\xfb\0\0\0\x01",
            "is qcow,",
            "qemu-img convert -O raw",
        ),
        (0, b"QED\0", "is QED", "qemu-img convert -O raw"),
        (0, b"KDMV", "is VMDK", "qemu-img convert -O raw"),
        (0, b"COWD", "is VMDK", "qemu-img convert -O raw"),
        (
            0,
            b"# Disk DescriptorFile\n",
            "is VMDK",
            "qemu-img convert -O raw",
        ),
        (64, b"\x7f\x10\xda\xbe", "is VDI", "qemu-img convert -O raw"),
        (
            0,
            b"WithouFreSpacExt",
            "is Parallels",
            "qemu-img convert -O raw",
        ),
    ];
    for (offset, magic, format, command) in cases {
        let mut content = vec![0; 4096];
        content[offset..offset + magic.len()].copy_from_slice(magic);
        let image = Image::raw(&content);
        let error = new_blk(image.options()).err().unwrap().to_string();
        for part in [format, command, "image_type=raw"] {
            assert!(error.contains(part), "{error}");
        }
        let mut stated = image.options();
        stated.disk.image_type = ImageType::Raw;
        new_blk(stated).unwrap();
    }
    // A text that is shorter than a sector says what it is, not that it is too short.
    let text = Image::raw(b"# Disk DescriptorFile\nversion=1\n");
    let error = new_blk(text.options()).err().unwrap().to_string();
    assert!(error.contains("is VMDK"), "{error}");
    let mut encrypted = pattern(8);
    encrypted[..6].copy_from_slice(b"LUKS\xba\xbe");
    let image = Image::raw(&encrypted);
    let mut rig = Rig::new(image.options());
    assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 512), encrypted[..512]);
}

#[test]
fn a_guest_may_write_a_compressed_file_to_its_raw_disk() {
    let cases: [(&[u8], &str, &str); 4] = [
        (b"\x1f\x8b\x08\0", "gzip", "`gunzip`"),
        (b"BZh91AY&SY", "bzip2", "`bunzip2`"),
        (b"\xfd7zXZ\0", "xz", "`unxz`"),
        (b"\x28\xb5\x2f\xfd", "zstd", "`unzstd`"),
    ];
    for (magic, format, command) in cases {
        let image = Image::raw(&pattern(8));
        let mut rig = Rig::new(image.options());
        rig.fill(DATA, magic);
        assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 0, "{format}");
        // No other format's header.
        rig.fill(DATA, b"QED\0");
        assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 1);
        drop(rig);
        // It is the guest's disk at the next start, too, and still guarded.
        let mut rig = Rig::new(image.options());
        assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA, magic.len()), magic, "{format}");
        rig.fill(DATA, b"QED\0");
        assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 1);
        drop(rig);
        // It is stated to be qcow2.
        let mut stated = image.options();
        stated.disk.image_type = ImageType::Qcow2;
        let error = new_blk(stated).err().unwrap().to_string();
        assert!(error.contains("no qcow2 header"), "{error}");
        // A file of this size is no disk that a guest has written.
        let mut content = magic.to_vec();
        content.resize(4097, 1);
        let error = new_blk(Image::raw(&content).options()).err().unwrap();
        let error = error.to_string();
        assert!(error.contains(format) && error.contains(command), "{error}");
    }
    // A VHD stays one, whatever it contains.
    let mut vhd = vec![0; 4096];
    vhd[..3].copy_from_slice(b"\x1f\x8b\x08");
    vhd[3584..3592].copy_from_slice(b"conectix");
    let error = new_blk(Image::raw(&vhd).options()).err().unwrap();
    assert!(error.to_string().contains("is VHD"), "{error}");
}

#[test]
fn a_guest_cannot_make_its_raw_disk_end_like_a_vhd() {
    for io_uring in [true, false] {
        let image = Image::raw(&pattern(1024));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        let footer = |rig: &mut Rig, sectors: u64, end: u64| {
            let len = sectors as usize * 512;
            let mut bytes = vec![7; len];
            bytes[len - 512..len - 504].copy_from_slice(b"conectix");
            rig.fill(DATA, &bytes);
            rig.request(OUT, end - sectors, (DATA, len as u32, 0)).0
        };
        // Alone, at the end of a longer write, and of one that takes several steps.
        for sectors in [1, 2, 1000] {
            assert_eq!(footer(&mut rig, sectors, 1024), 1, "{sectors}");
        }
        // Elsewhere it is not a footer, and the end may have any other contents.
        assert_eq!(footer(&mut rig, 2, 1023), 0);
        rig.fill(DATA, &[7; 1024]);
        assert_eq!(rig.request(OUT, 1022, (DATA, 1024, 0)).0, 0);
        // The end moves with the disk's size.
        grow(&rig.blk.handle(), 2048 * 512).unwrap();
        assert_eq!(footer(&mut rig, 2, 2048), 1);
        assert_eq!(footer(&mut rig, 2, 1024), 0);
        drop(rig);
        new_blk(image.options()).unwrap();
    }
}

#[test]
fn a_qcow2_image_that_needs_a_command_first_is_refused_with_it() {
    for (features, what, command) in [
        (1, "dirty", "qemu-img check -r all"),
        (2, "corrupt", "qemu-img check -r all"),
        (8, "zstd", "qemu-img convert -O qcow2"),
        (16, "extended L2", "qemu-img convert -O qcow2"),
    ] {
        for read_only in [false, true] {
            let image = Image::qcow2(1 << 20);
            let file = File::options().write(true).open(&image.path).unwrap();
            file.write_all_at(&u64::to_be_bytes(features), 72).unwrap();
            let mut options = image.options();
            options.disk.read_only = read_only;
            let error = new_blk(options).err().unwrap().to_string();
            assert!(error.contains(what) && error.contains(command), "{error}");
        }
    }
    let image = Image::qcow2(1 << 20);
    let backing = std::path::Path::new("json:{\"driver\":\"raw\"}");
    make_qcow2(&image.path, 1 << 20, Some((backing, "raw")));
    let mut options = image.options();
    options.disk.backing_files = true;
    let error = new_blk(options).err().unwrap().to_string();
    assert!(error.contains("qemu-img rebase"), "{error}");
    let mut options = image.options();
    options.disk.path = backing.to_owned();
    let error = new_blk(options).err().unwrap().to_string();
    assert!(error.contains("the path of the image itself"), "{error}");
}

#[test]
fn two_disks_share_an_image_only_for_reading() {
    for granularity in [LockGranularity::ByteRange, LockGranularity::Full] {
        let image = Image::raw(&pattern(8));
        let options = |read_only| {
            let mut options = image.options();
            options.disk.read_only = read_only;
            options.disk.lock_granularity = granularity;
            options
        };
        let writer = new_blk(options(false)).unwrap();
        for read_only in [false, true] {
            let error = new_blk(options(read_only)).err().unwrap().to_string();
            assert!(error.contains("disk.img is in use elsewhere"), "{error}");
        }
        drop(writer);
        let _reader = new_blk(options(true)).unwrap();
        let _another = new_blk(options(true)).unwrap();
        new_blk(options(false)).err().unwrap();
    }
}

#[test]
fn an_image_that_shrinks_under_the_guest_gives_errors_and_no_stale_data() {
    on_both_engines(&pattern(64), |image, rig| {
        let file = File::options().write(true).open(&image.path).unwrap();
        file.set_len(16 * 512).unwrap();
        assert_eq!(rig.request(IN, 8, (DATA, 16 * 512, WRITE)).0, 1);
        assert_eq!(rig.request(IN, 15, (DATA, 512, WRITE)).0, 0);
    });
}

#[test]
fn a_write_that_the_host_refuses_is_an_error_and_the_device_goes_on() {
    for io_uring in [true, false] {
        // SAFETY: the name is a C string; the descriptor is new, and owned by the File.
        let file = unsafe {
            let fd = libc::memfd_create(c"disk".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        file.write_all_at(&pattern(8), 0).unwrap();
        let mut options = Image::raw(&[]).options();
        options.disk.path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        // SAFETY: no memory is involved.
        let sealed =
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
        assert_eq!(sealed, 0);
        assert_eq!(rig.request(OUT, 1, (DATA, 512, 0)), (1, 1));
        assert_eq!(rig.request(IN, 1, (DATA, 512, WRITE)), (0, 513));
        assert_eq!(rig.bytes(DATA, 512), pattern(8)[512..1024]);
        let counters = rig.blk.counters();
        assert!(counters.contains(&("write_ops", 0)));
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// A damaged qcow2 image is refused or causes I/O errors; nothing panics or hangs.
    #[test]
    fn damaged_qcow2_images_harm_nobody(
        damage in proptest::collection::vec((0..8_u64, 0..112_u64, 0..=255_u8), 1..4),
    ) {
        let image = Image::qcow2(1 << 20);
        let file = File::options().write(true).open(&image.path).unwrap();
        for (place, offset, value) in damage {
            // Mostly the header; otherwise the start of a table.
            file.write_all_at(&[value], place.saturating_sub(3) * 0x10000 + offset).unwrap();
        }
        if let Ok(blk) = new_blk(image.options()) {
            let features = blk.features();
            let mut rig = Rig::with(blk, features);
            for sector in [0, 100, 1 << 11, 1 << 30] {
                rig.request(OUT, sector, (DATA, 4096, 0));
                rig.request(IN, sector, (DATA, 4096, WRITE));
            }
            rig.flush();
        }
    }
}

#[test]
fn qcow2_images_that_the_library_would_stumble_over_are_refused() {
    for (offset, value, reason) in [
        (0x3b, 0, "no reference counts"),
        (0, 0, "cut short"),
        (0x17, 30, "cluster size"),
        (0x24, 1, "L1 table is too long"),
        (0x2f, 1, "not aligned"),
    ] {
        let image = Image::qcow2(1 << 20);
        let file = File::options().write(true).open(&image.path).unwrap();
        if reason == "cut short" {
            // The table of feature names is the first extension: shorten it.
            let start = image.content()[100..104].try_into().unwrap();
            let start = u64::from(u32::from_be_bytes(start));
            file.write_all_at(&0x6803_f857_u32.to_be_bytes(), start)
                .unwrap();
            file.write_all_at(&1_u32.to_be_bytes(), start + 4).unwrap();
        } else {
            file.write_all_at(&[value], offset).unwrap();
        }
        let error = new_blk(image.options()).err().unwrap().to_string();
        assert!(
            error.contains("is damaged") && error.contains(reason),
            "{error}"
        );
    }
}

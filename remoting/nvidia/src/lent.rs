//! Files of shared memory that programs lend: `/dev/shm`, or files in memory without a name.

use std::{io, os::fd::OwnedFd};

use base::{
    mapping::{Access, Mapping},
    memfd,
};
use rustix::fs::{FileType, fstat, fstatfs};

use crate::convert::PAGE;

/// The file system of shared memory.
const TMPFS: u64 = 0x0102_1994;

/// Maps a part of a file for the driver to pin. This process must not touch it: the program may shorten the file at any
/// time.
///
/// # Errors
/// The file is not on tmpfs, it is shorter, or it is not open for writing.
pub fn map(file: &OwnedFd, offset: u64, length: u64) -> io::Result<Mapping> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    // First: others' file systems may not answer what follows.
    if !memfd::is_shared_memory(file) {
        return Err(invalid());
    }
    let size = fstat(file)?;
    let is_shared = FileType::from_raw_mode(size.st_mode) == FileType::RegularFile
        && u64::try_from(fstatfs(file)?.f_type).is_ok_and(|kind| kind == TMPFS);
    // The last page is there as a whole.
    let size = u64::try_from(size.st_size).map_err(|_| invalid())?;
    let size = size.checked_next_multiple_of(PAGE);
    let end = offset.checked_add(length).filter(|end| Some(*end) <= size);
    if !is_shared || end.is_none() {
        return Err(invalid());
    }
    let length = usize::try_from(length).map_err(|_| invalid())?;
    Mapping::shared(file, offset, length, Access::ReadWrite)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd, thread};

    use seccompiler::{SeccompAction, SeccompFilter};

    use super::*;

    #[test]
    fn the_file_system_of_a_program_s_file_is_asked_nothing() {
        let file: OwnedFd = File::open("/proc/version").expect("it is there").into();
        // Stands for one that does not answer.
        let calls = [
            libc::SYS_fstat,
            libc::SYS_newfstatat,
            libc::SYS_statx,
            libc::SYS_fstatfs,
            libc::SYS_mmap,
        ];
        let filter = SeccompFilter::new(
            calls.map(|call| (call, Vec::new())).into(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::ESTALE as u32),
            std::env::consts::ARCH.try_into().expect("it is known"),
        );
        let filter: seccompiler::BpfProgram =
            filter.and_then(TryInto::try_into).expect("it is small");
        let mapped = thread::spawn(move || {
            seccompiler::apply_filter(&filter).expect("the kernel has seccomp");
            map(&file, 0, PAGE).map(drop).map_err(|error| error.kind())
        });
        let mapped = mapped.join().expect("it does not panic");
        assert_eq!(mapped, Err(io::ErrorKind::InvalidInput));
    }

    #[test]
    fn only_whole_parts_of_writable_shared_memory_are_mapped() {
        let memory: OwnedFd = base::memfd::sealed(c"lent", 1 << 16)
            .expect("there is memory")
            .into();
        assert!(map(&memory, 1 << 12, 0xf000).is_ok());
        for (offset, length) in [
            (0, (1 << 16) + 1),
            (1 << 16, 1),
            (u64::MAX, 1),
            (1 << 12, u64::MAX),
        ] {
            assert!(map(&memory, offset, length).is_err(), "{offset} {length}");
        }
        let odd: OwnedFd = base::memfd::sealed(c"odd", (1 << 12) + 4)
            .expect("there is memory")
            .into();
        assert!(map(&odd, 0, 2 << 12).is_ok(), "the last page as a whole");
        assert!(map(&odd, 0, 3 << 12).is_err());
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let others = [path.as_str(), "/dev/zero", "/proc/self/exe"]
            .map(|path| File::open(path).expect("it is there"));
        for other in others {
            assert!(map(&other.into(), 0, 1 << 12).is_err());
        }
    }
}

//! Core dumps of the guest: an ELF file in the format of QEMU's `dump-guest-memory`, for `crash`
//! and `gdb`.
//!
//! ```text
//!   ELF header | program headers | notes: per vCPU NT_PRSTATUS and QEMU's registers | RAM
//! ```

use std::{
    fs::{self, File},
    io::{self, BufWriter, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vmm_memory::Region;
use vmm_snapshot::{
    memory_file::{self, Untouched},
    writing::Writing,
};

use super::{Machine, error::MachineError};

const PAGE: u64 = 4096;
const HEADER_LEN: u64 = 64;
const PROGRAM_HEADER_LEN: u64 = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_PRSTATUS: u32 = 1;
/// Size of `struct elf_prstatus` on x86-64.
const PRSTATUS_LEN: usize = 336;
/// Offset of its general-purpose registers.
const PRSTATUS_REGS: usize = 112;

/// A core dump of a paused machine. Another thread may write it, as long as the machine stays paused.
pub struct Core {
    path: PathBuf,
    notes: Vec<u8>,
    regions: Vec<Region>,
    untouched: Untouched,
}

impl Machine {
    /// The core dump that is to be written to a new file.
    pub fn core(&self, path: &Path) -> Result<Core, MachineError> {
        let registers = self.cpus.registers()?;
        let mut notes = Vec::new();
        for (vcpu, (regs, sregs)) in &registers {
            note(
                &mut notes,
                b"CORE\0",
                NT_PRSTATUS,
                &prstatus(*vcpu, regs, sregs),
            );
            note(&mut notes, b"QEMU\0", 0, &qemu_state(regs, sregs));
        }
        Ok(Core {
            path: path.to_owned(),
            notes,
            regions: self.ram.regions().to_vec(),
            untouched: self.untouched(),
        })
    }
}

impl Core {
    /// Number of bytes of memory.
    pub fn memory(&self) -> u64 {
        memory_file::total(&self.regions)
    }

    /// Writes the guest's memory and registers to the file. It has another name until it is complete, and is removed if
    /// that fails.
    pub fn write(self, writing: &Writing) -> Result<(), MachineError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| MachineError::Coredump { path, source }
        };
        let (path, new) = (&self.path, incomplete(&self.path));
        absent(path).map_err(failed(path))?;
        let file = memory_file::create_private(&new)
            .map_err(left_over)
            .map_err(failed(&new))?;
        let complete = || {
            self.write_to(file, writing)?;
            let _seal = writing.seal()?;
            give_name(&new, path)
        };
        complete()
            .inspect_err(|_| remove(&new))
            .map_err(failed(path))
    }

    fn write_to(&self, file: File, writing: &Writing) -> io::Result<()> {
        let Self { notes, regions, .. } = self;
        // Cannot exceed 2^16 - 1 headers: a machine has far fewer memory slots.
        let headers = regions.len() as u16 + 1;
        let notes_at = HEADER_LEN + u64::from(headers) * PROGRAM_HEADER_LEN;
        let mut out = BufWriter::new(file);
        out.write_all(&elf_header(headers))?;
        let notes_len = notes.len() as u64;
        out.write_all(&program_header(PT_NOTE, notes_at, 0, notes_len))?;
        let memory_at = (notes_at + notes_len).next_multiple_of(PAGE);
        let mut offset = memory_at;
        for region in regions {
            let len = region.mapping.size() as u64;
            out.write_all(&program_header(PT_LOAD, offset, region.guest, len))?;
            offset += len;
        }
        out.write_all(notes)?;
        out.seek(io::SeekFrom::Start(memory_at))?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut offset = memory_at;
        for region in regions {
            memory_file::write_memory(&file, offset, &region.mapping, &self.untouched, writing)?;
            offset += region.mapping.size() as u64;
        }
        file.set_len(offset)?;
        file.sync_all()
    }
}

/// The name of a core dump that is not complete.
fn incomplete(path: &Path) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(".new");
    name.into()
}

/// Renames a complete core dump, unless there is a file of the name: it has both names for a moment. Where the file
/// system has no hard links, the name is first taken by an empty file, which every file system refuses if there is one;
/// not all of them have `RENAME_NOREPLACE`.
fn give_name(new: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(new, path) {
        Ok(()) => {
            remove(new);
            return Ok(());
        }
        // The answer of a server of files may have been lost, and the operation repeated.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if !is_same(new, path) {
                return Err(error);
            }
            remove(new);
            return Ok(());
        }
        Err(_) => {}
    }
    memory_file::create_private(path)?;
    fs::rename(new, path).inspect_err(|_| remove(path))
}

/// Whether these are names of one file.
fn is_same(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| {
        let metadata = path.symlink_metadata().ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    file(one).is_some_and(|one| Some(one) == file(other))
}

/// Explains an incomplete core dump that is there already.
fn left_over(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists => io::Error::new(
            io::ErrorKind::AlreadyExists,
            "it exists: remove it if no core dump is in progress; a VMM that was killed may have left it",
        ),
        _ => error,
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        log::warn!("cannot remove {}: {error}", path.display());
    }
}

/// Fails if there is such a file.
fn absent(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn elf_header(program_headers: u16) -> Vec<u8> {
    const CORE: u16 = 4;
    const X86_64: u16 = 62;
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend(CORE.to_le_bytes());
    bytes.extend(X86_64.to_le_bytes());
    bytes.extend(1_u32.to_le_bytes());
    // No entry point; program headers follow; no sections.
    for value in [0, HEADER_LEN, 0] {
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend(0_u32.to_le_bytes());
    let sizes = [
        HEADER_LEN as u16,
        PROGRAM_HEADER_LEN as u16,
        program_headers,
        0,
        0,
        0,
    ];
    bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
    bytes
}

fn program_header(kind: u32, offset: u64, address: u64, len: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0_u32.to_le_bytes());
    // Virtual address unknown; size in the file and in memory; no alignment.
    for value in [offset, 0, address, len, len, 0] {
        bytes.extend(value.to_le_bytes());
    }
    bytes
}

fn note(notes: &mut Vec<u8>, name: &[u8], kind: u32, contents: &[u8]) {
    for value in [name.len() as u32, contents.len() as u32, kind] {
        notes.extend(value.to_le_bytes());
    }
    for part in [name, contents] {
        notes.extend(part);
        notes.resize(notes.len().next_multiple_of(4), 0);
    }
}

fn prstatus(vcpu: u32, regs: &kvm_regs, sregs: &kvm_sregs) -> Vec<u8> {
    const PID: usize = 32;
    let mut bytes = vec![0; PRSTATUS_LEN];
    // By convention the number of the vCPU, starting at 1.
    bytes[PID..PID + 4].copy_from_slice(&(vcpu + 1).to_le_bytes());
    // `struct user_regs_struct`.
    let values = [
        regs.r15,
        regs.r14,
        regs.r13,
        regs.r12,
        regs.rbp,
        regs.rbx,
        regs.r11,
        regs.r10,
        regs.r9,
        regs.r8,
        regs.rax,
        regs.rcx,
        regs.rdx,
        regs.rsi,
        regs.rdi,
        regs.rax,
        regs.rip,
        sregs.cs.selector.into(),
        regs.rflags,
        regs.rsp,
        sregs.ss.selector.into(),
        sregs.fs.base,
        sregs.gs.base,
        sregs.ds.selector.into(),
        sregs.es.selector.into(),
        sregs.fs.selector.into(),
        sregs.gs.selector.into(),
    ];
    for (slot, value) in bytes[PRSTATUS_REGS..].chunks_exact_mut(8).zip(values) {
        slot.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// QEMU's `QEMUCPUState`, from which `crash` reads control registers and segments.
fn qemu_state(regs: &kvm_regs, sregs: &kvm_sregs) -> Vec<u8> {
    const VERSION: u32 = 1;
    const LEN: u32 = 440;
    let mut bytes = VERSION.to_le_bytes().to_vec();
    bytes.extend(LEN.to_le_bytes());
    let general = [
        regs.rax,
        regs.rbx,
        regs.rcx,
        regs.rdx,
        regs.rsi,
        regs.rdi,
        regs.rsp,
        regs.rbp,
        regs.r8,
        regs.r9,
        regs.r10,
        regs.r11,
        regs.r12,
        regs.r13,
        regs.r14,
        regs.r15,
        regs.rip,
        regs.rflags,
    ];
    bytes.extend(general.iter().flat_map(|value| value.to_le_bytes()));
    let mut descriptor = |selector: u32, limit: u32, flags: u32, base: u64| {
        for value in [selector, limit, flags, 0] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(base.to_le_bytes());
    };
    let segments = [
        sregs.cs, sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss, sregs.ldt, sregs.tr,
    ];
    for segment in segments {
        descriptor(
            segment.selector.into(),
            segment.limit,
            flags(&segment),
            segment.base,
        );
    }
    for table in [sregs.gdt, sregs.idt] {
        descriptor(0, table.limit.into(), 0, table.base);
    }
    let control = [sregs.cr0, 0, sregs.cr2, sregs.cr3, sregs.cr4, 0];
    bytes.extend(control.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// Segment attributes in the layout of a descriptor's second word (SDM volume 3, 3.4.5).
fn flags(segment: &kvm_segment) -> u32 {
    let bits = [
        (segment.type_, 8),
        (segment.s, 12),
        (segment.dpl, 13),
        (segment.present, 15),
        (segment.avl, 20),
        (segment.l, 21),
        (segment.db, 22),
        (segment.g, 23),
    ];
    bits.iter().fold(0, |flags, (value, shift)| {
        flags | u32::from(*value) << shift
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_that_readers_expect() {
        let (regs, sregs) = (kvm_regs::default(), kvm_sregs::default());
        assert_eq!(elf_header(1).len() as u64, HEADER_LEN);
        assert_eq!(
            program_header(PT_LOAD, 0, 0, 0).len() as u64,
            PROGRAM_HEADER_LEN
        );
        assert_eq!(prstatus(0, &regs, &sregs).len(), PRSTATUS_LEN);
        assert_eq!(qemu_state(&regs, &sregs).len(), 440);
    }

    fn core(path: &Path) -> Core {
        Core {
            path: path.to_owned(),
            notes: Vec::new(),
            regions: Vec::new(),
            untouched: Untouched::Skip(None),
        }
    }

    #[test]
    fn a_core_dump_has_its_name_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("core");
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        // A process that was killed leaves what it has written, under another name.
        let file = memory_file::create_private(&incomplete(&path)).unwrap();
        core(&path).write_to(file, &Writing::new(0)).unwrap();
        assert_eq!(names(), ["core.new"]);
        let refused = core(&path).write(&Writing::new(0)).unwrap_err();
        let MachineError::Coredump {
            path: named,
            source,
        } = refused
        else {
            panic!("{refused}");
        };
        assert!(source.to_string().contains("remove it"), "{source}");
        assert_eq!(named, dir.path().join("core.new"));
        fs::remove_file(named).unwrap();
        let cancelled = Writing::new(0);
        assert!(cancelled.cancel());
        core(&path).write(&cancelled).unwrap_err();
        assert_eq!(names(), [""; 0]);
        core(&path).write(&Writing::new(0)).unwrap();
        assert_eq!(names(), ["core"]);
        let whole = fs::read(&path).unwrap();
        core(&path).write(&Writing::new(0)).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), whole);
    }

    #[test]
    fn a_name_that_was_given_already_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let [path, new] = ["core", "core.new"].map(|name| dir.path().join(name));
        fs::write(&new, "ours").unwrap();
        fs::hard_link(&new, &path).unwrap();
        give_name(&new, &path).unwrap();
        assert!(!new.exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
    }

    #[test]
    fn a_file_that_appears_meanwhile_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let [path, new] = ["core", "core.new"].map(|name| dir.path().join(name));
        let both = std::sync::Barrier::new(2);
        for _ in 0..500 {
            fs::write(&new, "ours").unwrap();
            let (named, created) = std::thread::scope(|scope| {
                let others = scope.spawn(|| {
                    both.wait();
                    File::create_new(&path)
                });
                both.wait();
                let named = give_name(&new, &path);
                (named, others.join().unwrap())
            });
            // One of them has the name.
            assert_ne!(named.is_ok(), created.is_ok());
            let expected = if named.is_ok() { "ours" } else { "" };
            assert_eq!(fs::read_to_string(&path).unwrap(), expected);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn nobody_sees_the_name_of_a_core_dump_without_its_contents() {
        let dir = tempfile::tempdir().unwrap();
        let [path, new] = ["core", "core.new"].map(|name| dir.path().join(name));
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let order = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !is_over.load(order) {
                    // Absent between two of them.
                    let seen = fs::read_to_string(&path).unwrap_or("whole".to_owned());
                    assert_eq!(seen, "whole");
                }
            });
            for _ in 0..5000 {
                fs::write(&new, "whole").unwrap();
                give_name(&new, &path).unwrap();
                fs::remove_file(&path).unwrap();
            }
            is_over.store(true, order);
            looks.join().unwrap();
        });
    }

    #[test]
    fn notes_are_padded_to_words() {
        let mut notes = Vec::new();
        note(&mut notes, b"CORE\0", 1, &[1, 2, 3]);
        assert_eq!(notes.len(), 12 + 8 + 4);
        assert_eq!(notes[..4], [5, 0, 0, 0]);
        assert_eq!(notes[20..], [1, 2, 3, 0]);
    }
}

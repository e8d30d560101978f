//! An `ioctl` on a device file.

use std::{io, os::fd::RawFd, sync::Mutex};

use libc::c_int;
use nvidia_abi::{
    Call, Listed, Meaning, Refusal, Source, status, walk,
    wire::{Operation, Request},
};

use crate::{
    files::{File, Program},
    memory,
    pinned::Wanted,
};

/// Escapes that concern memory of the program.
const MAKE_DESCRIPTOR: u32 = 0x27;
const FREE: u32 = 0x29;

/// A program's memory, from which the walk takes.
struct Memory(Vec<u8>);

impl Source for Memory {
    fn take(&mut self, address: u64, length: usize) -> Result<(), Refusal> {
        memory::read(address, length, &mut self.0).map_err(|_| Refusal::Fault)
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn errno(number: c_int) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// A 32-bit word. The walk has shown that it is there.
fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

/// A 64-bit word. The walk has shown that it is there.
fn long(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u64::from_le_bytes(*word))
}

/// Writes bytes. The walk has shown that they are there.
fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(place) = bytes
        .get_mut(at..)
        .and_then(|bytes| bytes.first_chunk_mut())
    {
        *place = value;
    }
}

/// Whether an error is that of a connection whose worker has ended.
fn is_lost(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

impl Program {
    /// Makes a call.
    pub fn call(&mut self, file: File, command: u32, argument: u64) -> io::Result<c_int> {
        let branch = self.connection()?.branch;
        let mut source = Memory(Vec::new());
        let call = match walk(branch, file.kind, command, argument, &mut source) {
            Ok(call) => call,
            Err(refusal) => return refused(refusal, argument),
        };
        let original = source.0;
        let mut bytes = original.clone();
        self.number_files(&call, &mut bytes)?;
        let is_frontend = call.kind() == nvidia_abi::Kind::Frontend;
        let mut wanted = None;
        if is_frontend && call.number == MAKE_DESCRIPTOR {
            match self.pin(long(&bytes, 24), long(&bytes, 32)) {
                Ok(memory) => {
                    put(&mut bytes, 24, memory.offset().to_le_bytes());
                    wanted = Some(memory);
                }
                // Without a worker, the memory is not the cause.
                Err(error) if is_lost(&error) => return Err(error),
                Err(error) => {
                    eprintln!("gantry-nvidia: memory cannot be shared with the device: {error}");
                    return answer_status(&call, argument, status::NOT_SUPPORTED);
                }
            }
        }
        let request = Request {
            operation: Operation::Call,
            file: file.number,
            a: argument,
            b: command.into(),
            length: 0,
        };
        let lent = wanted.as_ref().and_then(Wanted::file);
        let reply = self.connection()?.send(request, &bytes, lent, true);
        let is_done = reply.as_ref().is_ok_and(|reply| {
            reply.answer.result == 0
                && call
                    .status_at()
                    .is_none_or(|at| word(&reply.bytes, at) == status::OK)
        });
        if let (Some(_), Err(error)) = (lent, &reply)
            && error.raw_os_error() == Some(libc::EOPNOTSUPP)
        {
            // The worker is not on this machine.
            eprintln!(
                "gantry-nvidia: memory cannot be shared with the device: a file cannot be lent from a virtual machine"
            );
            return answer_status(&call, argument, status::NOT_SUPPORTED);
        }
        if let Some(Wanted::Moved(mut pages)) = wanted {
            if is_done {
                let handle = reply.as_ref().map_or(0, |reply| word(&reply.bytes, 8));
                pages.object = [word(&original, 0), word(&original, 4), handle];
                self.pinned.push(pages);
            } else {
                self.put_back(&pages);
            }
        }
        let mut reply = reply?;
        if reply.bytes.len() != original.len() {
            return Err(errno(libc::EIO));
        }
        if is_frontend && call.number == FREE && is_done {
            self.unpin(word(&original, 0), word(&original, 8));
        }
        for operand in call.operands() {
            if matches!(operand.meaning, Meaning::File32 | Meaning::File64) {
                let field = operand.at..operand.at + operand.meaning.width();
                reply.bytes[field.clone()].copy_from_slice(&original[field]);
            }
        }
        if is_frontend && call.number == MAKE_DESCRIPTOR {
            reply.bytes[24..32].copy_from_slice(&original[24..32]);
        }
        for (start, length) in call.segments() {
            let pointer = call
                .pointers()
                .iter()
                .find(|pointer| pointer.to == Some(start));
            let address = pointer.map_or(argument, |pointer| long(&original, pointer.at));
            let segment = &reply.bytes[start..start + length];
            if segment != &original[start..start + length] {
                memory::write(address, segment)?;
            }
        }
        Ok(reply.answer.result)
    }

    /// Puts the numbers that the worker knows where the program has descriptors.
    fn number_files(&mut self, call: &Call, bytes: &mut [u8]) -> io::Result<()> {
        let mut number = |descriptor: i64| {
            let descriptor = RawFd::try_from(descriptor).map_err(|_| errno(libc::EBADF))?;
            let file = self.find(descriptor)?.ok_or_else(|| errno(libc::EBADF))?;
            Ok::<u32, io::Error>(file.number)
        };
        for operand in call.operands() {
            match operand.meaning {
                Meaning::File32 => {
                    let descriptor = word(bytes, operand.at).cast_signed();
                    if descriptor >= 0 {
                        put(bytes, operand.at, number(descriptor.into())?.to_le_bytes());
                    }
                }
                Meaning::File64 => {
                    let descriptor = long(bytes, operand.at).cast_signed();
                    if descriptor >= 0 {
                        put(
                            bytes,
                            operand.at,
                            u64::from(number(descriptor)?).to_le_bytes(),
                        );
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn answer_status(call: &Call, argument: u64, status: u32) -> io::Result<c_int> {
    let at = call.status_at().ok_or_else(|| errno(libc::EINVAL))?;
    memory::write(argument + at as u64, &status.to_le_bytes())?;
    Ok(0)
}

/// Answers a call that is not made. What a list does not name is printed once.
fn refused(refusal: Refusal, argument: u64) -> io::Result<c_int> {
    static PRINTED: Mutex<Vec<(Listed, u32)>> = Mutex::new(Vec::new());
    const MOST: usize = 64;
    match refusal {
        Refusal::Fault => Err(errno(libc::EFAULT)),
        Refusal::Malformed => Err(errno(libc::EINVAL)),
        Refusal::Unlisted {
            list,
            number,
            status,
        } => {
            if let Ok(mut printed) = PRINTED.lock()
                && printed.len() < MOST
                && !printed.contains(&(list, number))
            {
                printed.push((list, number));
                let list = match list {
                    Listed::Escape | Listed::Uvm => "call",
                    Listed::Control => "control",
                    Listed::Class => "class",
                };
                eprintln!("gantry-nvidia: {list} {number:x} is not allowed");
            }
            let (status, at) = status.ok_or_else(|| errno(libc::EINVAL))?;
            memory::write(argument + u64::from(at), &status.to_le_bytes())?;
            Ok(0)
        }
    }
}

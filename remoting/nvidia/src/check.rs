//! What a call names must be the program's: files, clients, objects.

use std::sync::Arc;

use base::Unpoisoned;
use nvidia_abi::{Call, Kind, Meaning, status};

use crate::{
    files::OpenFile,
    session::{Errno, Session},
};

/// A call is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The call itself fails.
    Errno(Errno),
    /// It is answered with a status.
    Status(u32),
}

/// A 32-bit word. The walk has shown that it is there.
pub fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

/// A 64-bit word. The walk has shown that it is there.
pub fn long(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u64::from_le_bytes(*word))
}

/// Writes bytes. The walk has shown that they are there.
pub fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(place) = bytes
        .get_mut(at..)
        .and_then(|bytes| bytes.first_chunk_mut())
    {
        *place = value;
    }
}

/// Control commands that do not use the object that they name.
const ADDRESS_SPACE_TYPE: u32 = 0xd01;
/// Escapes that do not use the object that they name.
const FREE: u32 = 0x29;
const MAP: u32 = 0x4e;

/// Checks what a call names, and puts descriptors where it has numbers of files. Answers these files, in order; their
/// descriptors are valid as long as they live.
pub fn check(
    session: &Session,
    call: &Call,
    bytes: &mut [u8],
) -> Result<Vec<Arc<OpenFile>>, Denied> {
    let mut files = Vec::new();
    let is_frontend = call.kind() == Kind::Frontend;
    let own_client = if is_frontend
        && call
            .operands()
            .next()
            .is_some_and(|first| first.meaning == Meaning::Client)
    {
        word(bytes, 0)
    } else {
        0
    };
    let uses = !(is_frontend
        && (matches!(call.number, FREE | MAP) || call.inner == Some(ADDRESS_SPACE_TYPE)));
    let mut objects = session.worker().objects.lock_unpoisoned();
    let mut object = |client: u32, handle: u32| {
        if handle == 0 {
            return Ok(());
        }
        let client_of = objects
            .client(client)
            .filter(|client| session.has(client.file));
        let client_of = client_of.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        if handle == client {
            return Ok(());
        }
        let object = client_of
            .object(handle)
            .ok_or(Denied::Status(status::INVALID_OBJECT))?;
        object.is_fresh &= !uses;
        Ok(())
    };
    let used = |bytes: &[u8], block: usize, count: u16, used_at: Option<u16>| {
        let used = used_at.map_or(count, |at| word(bytes, block + usize::from(at)) as u16);
        if used > count {
            Err(Denied::Errno(libc::EINVAL))
        } else {
            Ok(usize::from(used))
        }
    };
    for operand in call.operands() {
        match operand.meaning {
            Meaning::Client => {
                let client = word(bytes, operand.at);
                object(client, client)?;
            }
            Meaning::Object { client_at } => {
                let client = client_at.map_or(own_client, |at| {
                    word(bytes, operand.block + usize::from(at))
                });
                object(client, word(bytes, operand.at))?;
            }
            Meaning::Objects { count, used_at } => {
                for index in 0..used(bytes, operand.block, count, used_at)? {
                    object(own_client, word(bytes, operand.at + 4 * index))?;
                }
            }
            Meaning::NewObjects { count, used_at } => {
                used(bytes, operand.block, count, Some(used_at))?;
            }
            Meaning::List {
                count_at,
                handles: true,
                ..
            } => {
                let count = word(bytes, operand.block + usize::from(count_at)) as usize;
                let list = call.list(operand.at).into_iter();
                for at in list.flat_map(|list| (0..count).map(move |index| list + 4 * index)) {
                    object(own_client, word(bytes, at))?;
                }
            }
            Meaning::List { .. } | Meaning::NewObject => {}
            Meaning::Masked { length } => {
                let masked = operand.at..operand.at + usize::from(length);
                bytes
                    .get_mut(masked)
                    .into_iter()
                    .flatten()
                    .for_each(|byte| *byte = 0);
            }
            Meaning::File32 => {
                let number = word(bytes, operand.at);
                if number.cast_signed() >= 0 {
                    let file = session.file(number).ok_or(Denied::Errno(libc::EBADF))?;
                    put(bytes, operand.at, descriptor(&file).to_le_bytes());
                    files.push(file);
                }
            }
            Meaning::File64 => {
                let number = long(bytes, operand.at);
                if number.cast_signed() >= 0 {
                    let file = u32::try_from(number)
                        .ok()
                        .and_then(|number| session.file(number));
                    let file = file.ok_or(Denied::Errno(libc::EBADF))?;
                    put(
                        bytes,
                        operand.at,
                        i64::from(descriptor(&file)).to_le_bytes(),
                    );
                    files.push(file);
                }
            }
        }
    }
    Ok(files)
}

/// The number of a device file in this process.
pub fn descriptor(file: &OpenFile) -> i32 {
    use std::os::fd::AsRawFd;
    file.device().as_raw_fd()
}

//! Validates a block's requests. The words come from a GPU kernel that may be hostile. They were
//! copied before they are examined, and whatever they contain, the host accesses nothing but the
//! block's own pages and the application's own files and sockets.

use crate::layout::SLOTS;

/// What a block may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The size of a page in bytes.
    pub page_bytes: u32,
    /// The number of pages per block.
    pub page_count: u32,
}

/// Data at the start of one of the block's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// The number of the page, below the limit.
    pub page: u32,
    /// The number of bytes, at most the size of a page.
    pub length: u32,
}

/// A file, socket or server as named by the device, not yet looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name(pub u32);

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// For reading.
    ReadOnly,
    /// For reading and writing; created if it does not exist.
    ReadWrite,
    /// For reading and writing; truncated first.
    Create,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Opens the file whose path is the data.
    Open(Data, How),
    /// Closes a file.
    Close(Name),
    /// Returns a file's size.
    Stat(Name),
    /// Sets a file's size in bytes.
    Truncate(Name, u64),
    /// Reads from an offset in bytes.
    Read(Name, u64, Data),
    /// Writes to an offset in bytes.
    Write(Name, u64, Data),
    /// Connects to an IPv4 address and a port.
    Connect(u32, u16),
    /// Listens on a port, 0 for any.
    Bind(u16),
    /// Closes a server.
    Unbind(Name),
    /// Accepts the next connection of a server.
    Accept(Name),
    /// Closes a socket.
    HangUp(Name),
    /// Receives from a socket.
    Receive(Name, Data),
    /// Sends to a socket.
    Send(Name, Data),
}

/// A request and its origin. The slot is below [`SLOTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The slot that waits for the answer.
    pub tag: u32,
    /// The request, or the `errno` to answer.
    pub call: Result<Call, i32>,
}

/// Parses a request's words, which are laid out as in [`crate::layout::Request`].
///
/// Returns None if nobody can be answered, since the slot does not exist.
pub fn parse(words: &[u32; 16], limits: Limits) -> Option<Asked> {
    let [opcode, tag, handle, page, rest @ ..] = *words;
    let [offset_low, offset_high, length_low, length_high, flags, ..] = rest;
    let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let (offset, length) = (wide(offset_low, offset_high), wide(length_low, length_high));
    if tag >= SLOTS {
        return None;
    }
    let name = Name(handle);
    let data = || match u32::try_from(length) {
        Ok(length) if length <= limits.page_bytes && page < limits.page_count => {
            Ok(Data { page, length })
        }
        _ => Err(libc::EFAULT),
    };
    // Offsets are signed for the kernel.
    let position = |offset: u64| match i64::try_from(offset) {
        Ok(_) => Ok(offset),
        Err(_) => Err(libc::EINVAL),
    };
    let port = || u16::try_from(flags).map_err(|_| libc::EINVAL);
    let call = (|| {
        Ok(match opcode {
            1 => {
                let how = match flags {
                    0 => How::ReadOnly,
                    1 => How::ReadWrite,
                    2 => How::Create,
                    _ => return Err(libc::EINVAL),
                };
                Call::Open(data()?, how)
            }
            2 => Call::Close(name),
            3 => Call::Stat(name),
            4 => Call::Truncate(name, position(length)?),
            5 => Call::Read(name, position(offset)?, data()?),
            6 => Call::Write(name, position(offset)?, data()?),
            7 => {
                let address = u32::try_from(offset).map_err(|_| libc::EINVAL)?;
                Call::Connect(address, port()?)
            }
            8 => Call::Bind(port()?),
            9 => Call::Unbind(name),
            10 => Call::Accept(name),
            11 => Call::HangUp(name),
            12 => Call::Receive(name, data()?),
            13 => Call::Send(name, data()?),
            _ => return Err(libc::ENOSYS),
        })
    })();
    Some(Asked { tag, call })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::OPCODES;

    const LIMITS: Limits = Limits {
        page_bytes: 4096,
        page_count: 4,
    };

    fn words(opcode: u32) -> [u32; 16] {
        let mut words = [0; 16];
        words[0] = opcode;
        words
    }

    #[test]
    fn each_opcode_of_the_header_is_known() {
        for (name, opcode) in OPCODES {
            let asked = parse(&words(*opcode), LIMITS).unwrap();
            assert!(asked.call.is_ok(), "{name}: {asked:?}");
        }
        let asked = parse(&words(OPCODES.len() as u32 + 1), LIMITS).unwrap();
        assert_eq!(asked.call, Err(libc::ENOSYS));
    }

    #[test]
    fn data_outside_of_a_block_s_pages_is_refused() {
        for (page, length, fine) in [
            (3, 4096, true),
            (4, 1, false),
            (u32::MAX, 1, false),
            (0, 4097, false),
        ] {
            let mut read = words(5);
            (read[3], read[6]) = (page, length);
            assert_eq!(
                parse(&read, LIMITS).unwrap().call.is_ok(),
                fine,
                "{page} {length}"
            );
        }
        let mut long = words(6);
        long[7] = 1;
        assert_eq!(parse(&long, LIMITS).unwrap().call, Err(libc::EFAULT));
    }

    proptest! {
        #[test]
        fn any_words_name_a_slot_and_data_in_the_pages(words in any::<[u32; 16]>(), opcode in 0..16u32) {
            let mut words = words;
            words[0] = opcode;
            if let Some(Asked { tag, call }) = parse(&words, LIMITS) {
                prop_assert!(tag < SLOTS);
                if let Ok(Call::Read(_, _, data) | Call::Write(_, _, data) | Call::Open(data, _)) = call {
                    prop_assert!(data.page < 4 && data.length <= 4096);
                }
            }
        }
    }
}

//! What a block asks for, checked. The words come from a GPU kernel that may have been written to
//! do harm: they were copied out before anybody looked into them, and whatever they say, the host
//! touches nothing but the block's own pages and the application's own files and sockets.

use crate::layout::SLOTS;

/// What a block may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Pages of a block.
    pub page_count: u32,
}

/// Data in one of the block's pages: from its start on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Which page: below the limit.
    pub page: u32,
    /// How many bytes: at most a page's.
    pub length: u32,
}

/// A file, socket or server, as the device names it: not yet looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name(pub u32);

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// To read.
    ReadOnly,
    /// To write; made if there is none.
    ReadWrite,
    /// To write; emptied first.
    Create,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The data is the path.
    Open(Data, How),
    /// Closes a file.
    Close(Name),
    /// A file's size.
    Stat(Name),
    /// A file's new size in bytes.
    Truncate(Name, u64),
    /// From an offset in bytes.
    Read(Name, u64, Data),
    /// To an offset in bytes.
    Write(Name, u64, Data),
    /// To an IPv4 address and a port.
    Connect(u32, u16),
    /// On a port, 0 for any.
    Bind(u16),
    /// Closes a server.
    Unbind(Name),
    /// The next connection of a server.
    Accept(Name),
    /// Closes a socket.
    HangUp(Name),
    /// From a socket.
    Receive(Name, Data),
    /// To a socket.
    Send(Name, Data),
}

/// Who asks for what: the slot is below [`SLOTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The slot of who waits.
    pub tag: u32,
    /// What is asked for, or the `errno` of the answer.
    pub call: Result<Call, i32>,
}

/// Reads a request's words, as [`crate::layout::Request`] has them.
///
/// Nothing if nobody can be told: the slot does not exist.
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
    // What the kernel takes as an offset is signed.
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

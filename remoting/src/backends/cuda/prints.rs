//! Determines which images have kernels that may print: those that contain the name of the device's
//! print function, and those that cannot be inspected.

use std::io::Read;

/// The function that printing kernels call. Both PTX and machine code must contain the name,
/// because the driver links the function in.
const NAME: &[u8] = b"vprintf";
/// Magic number of fat binaries; see [`parts`] for the headers of their parts.
const FAT: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
const ELF: &[u8] = b"\x7fELF";
/// Size in bytes of a fat binary's header, and of the relevant fields of its parts' headers.
const HEADER: usize = 16;
const PART: usize = 64;
/// Flags that give a part's compression.
const LZ4: u64 = 0x2000;
const ZSTANDARD: u64 = 0x8000;
/// Maximum number of bytes searched: a larger image counts as one that may print.
const LARGEST: usize = 4 << 20;

/// Whether no kernel of an image prints.
pub(super) fn is_silent(image: &[u8]) -> bool {
    image.len() <= LARGEST
        && if image.starts_with(&FAT) {
            all_silent(image) == Some(true)
        } else {
            is_plain_and_silent(image)
        }
}

fn number<const BYTES: usize>(of: &[u8], at: usize) -> Option<[u8; BYTES]> {
    of.get(at..at.checked_add(BYTES)?)?.try_into().ok()
}

/// Whether the image is machine code or PTX without the name.
fn is_plain_and_silent(image: &[u8]) -> bool {
    // The driver reads text only up to the first zero; the rest is searched, too.
    let starts_as_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    (image.starts_with(ELF) || image.iter().take(16).all(starts_as_text))
        && !image.windows(NAME.len()).any(|part| part == NAME)
}

/// Whether all parts of a fat binary are silent; `None` if it cannot be parsed.
fn all_silent(image: &[u8]) -> Option<bool> {
    let mut at = usize::from(u16::from_le_bytes(number(image, 6)?));
    let bytes = u64::from_le_bytes(number(image, 8)?);
    let end = HEADER.checked_add(usize::try_from(bytes).ok()?)?;
    let (mut room, mut parts) = (LARGEST, 0);
    if at != HEADER || end > image.len() {
        return None;
    }
    while at + PART <= end {
        let header = &image[at..end];
        let start = u32::from_le_bytes(number(header, 4)?) as usize;
        let size = usize::try_from(u64::from_le_bytes(number(header, 8)?)).ok()?;
        let packed = u32::from_le_bytes(number(header, 16)?) as usize;
        let flags = u64::from_le_bytes(number(header, 40)?);
        let next = start.checked_add(size)?;
        let part = header.get(start.max(PART)..next)?;
        let silent = match (flags & LZ4, flags & ZSTANDARD) {
            (0, 0) => is_plain_and_silent(part),
            (0, _) => is_plain_and_silent(&unpacked(part.get(..packed)?, &mut room)?),
            _ => return None,
        };
        if !silent {
            return Some(false);
        }
        parts += 1;
        at += next;
    }
    // A binary without known parts has nothing that could be inspected.
    Some(parts > 0)
}

/// Decompresses a part; `None` if it exceeds the remaining room.
fn unpacked(mut packed: &[u8], room: &mut usize) -> Option<Vec<u8>> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(&mut packed).ok()?;
    let mut all = Vec::new();
    let limit = *room as u64 + 1;
    decoder.take(limit).read_to_end(&mut all).ok()?;
    *room = room.checked_sub(all.len())?;
    Some(all)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A fat binary with the given parts and their flags.
    fn fat(parts: &[(u64, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (flags, part) in parts {
            let mut header = vec![0u8; PART];
            header[4..8].copy_from_slice(&(PART as u32).to_le_bytes());
            header[8..16].copy_from_slice(&(part.len() as u64).to_le_bytes());
            header[16..20].copy_from_slice(&(part.len() as u32).to_le_bytes());
            header[40..48].copy_from_slice(&flags.to_le_bytes());
            body.extend(header);
            body.extend(*part);
        }
        let mut all = FAT.to_vec();
        all.extend([1, 0, HEADER as u8, 0]);
        all.extend((body.len() as u64).to_le_bytes());
        all.extend(body);
        all
    }

    /// Zstandard without compression: a frame of one raw block.
    fn framed(bytes: &[u8]) -> Vec<u8> {
        let mut all = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
        all.extend((bytes.len() as u32).to_le_bytes());
        let block = (bytes.len() as u32) << 3 | 1;
        all.extend(&block.to_le_bytes()[..3]);
        all.extend(bytes);
        all
    }

    const QUIET: &[u8] = b".version 8.0\n.target sm_80\n.entry kernel() { ret; }\0";
    const LOUD: &[u8] = b".version 8.0\n.target sm_80\n.extern .func vprintf;\n.entry kernel();\0";

    #[test]
    fn text_and_machine_code_are_silent_without_the_name() {
        assert!(is_silent(QUIET) && !is_silent(LOUD));
        assert!(is_silent(b"\x7fELF\x02\x01 .text.kernel"));
        assert!(!is_silent(b"\x7fELF\x02\x01 .text.kernel\0vprintf\0"));
    }

    #[test]
    fn every_part_of_a_fat_binary_is_looked_at() {
        assert!(is_silent(&fat(&[(0, QUIET), (ZSTANDARD, &framed(QUIET))])));
        assert!(!is_silent(&fat(&[(0, QUIET), (0, LOUD)])));
        assert!(!is_silent(&fat(&[(0, QUIET), (ZSTANDARD, &framed(LOUD))])));
    }

    #[test]
    fn what_cannot_be_looked_into_may_print() {
        for image in [
            &b"\x01\x02\x03\x04 unknown"[..],
            &fat(&[]),
            &fat(&[(LZ4, QUIET)]),
            &fat(&[(ZSTANDARD, QUIET)]),
            &fat(&[(0, &framed(QUIET))]),
            &vec![b' '; LARGEST + 1],
            &fat(&[(ZSTANDARD, &framed(&vec![b' '; LARGEST + 1]))]),
        ] {
            assert!(!is_silent(image));
        }
        let whole = fat(&[(0, LOUD)]);
        for end in FAT.len()..whole.len() {
            assert!(!is_silent(&whole[..end]), "{end}");
        }
    }
}

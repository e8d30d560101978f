//! Images of kernels and variables: text (PTX), machine code (ELF), and fat binaries, which have several parts of either,
//! for several GPUs, compressed or not. The format of fat binaries is not published; what follows is known from CUDA's
//! tools.

use std::{borrow::Cow, io::Read};

/// How machine code begins.
pub(super) const ELF: &[u8] = b"\x7fELF";
/// Magic number of fat binaries.
pub(super) const FAT: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
/// Size in bytes of a fat binary's header, and of the relevant fields of its parts' headers.
const HEADER: usize = 16;
const PART: usize = 64;
/// Flags that give a part's compression.
pub(super) const LZ4: u64 = 0x2000;
pub(super) const ZSTANDARD: u64 = 0x8000;

/// Shows each part of an image, decompressed: the image itself if it is no fat binary. Returns whether all parts were
/// shown: a fat binary may be damaged, or its parts have more than `room` bytes when they are decompressed.
pub(super) fn each_part(image: &[u8], room: usize, mut each: impl FnMut(&[u8])) -> bool {
    if !image.starts_with(&FAT) {
        each(image);
        return true;
    }
    each_of_fat(image, room, each).is_some()
}

fn number<const BYTES: usize>(of: &[u8], at: usize) -> Option<[u8; BYTES]> {
    of.get(at..at.checked_add(BYTES)?)?.try_into().ok()
}

fn each_of_fat(image: &[u8], mut room: usize, mut each: impl FnMut(&[u8])) -> Option<()> {
    let mut at = usize::from(u16::from_le_bytes(number(image, 6)?));
    let bytes = u64::from_le_bytes(number(image, 8)?);
    let end = HEADER.checked_add(usize::try_from(bytes).ok()?)?;
    if at != HEADER || end > image.len() {
        return None;
    }
    while at + PART <= end {
        let header = &image[at..end];
        let start = u32::from_le_bytes(number(header, 4)?) as usize;
        let size = usize::try_from(u64::from_le_bytes(number(header, 8)?)).ok()?;
        let packed = u32::from_le_bytes(number(header, 16)?) as usize;
        let flags = u64::from_le_bytes(number(header, 40)?);
        let whole = usize::try_from(u64::from_le_bytes(number(header, 56)?)).ok()?;
        let next = start.checked_add(size)?;
        if start < PART {
            return None;
        }
        let part = header.get(start..next)?;
        let part = match (flags & LZ4, flags & ZSTANDARD) {
            (0, 0) => Cow::Borrowed(part),
            (0, _) => Cow::Owned(unpacked(part.get(..packed)?, whole, &mut room)?),
            (_, 0) => {
                room = room.checked_sub(whole)?;
                Cow::Owned(lz4_flex::block::decompress(part.get(..packed)?, whole).ok()?)
            }
            _ => return None,
        };
        each(&part);
        at += next;
    }
    Some(())
}

/// Decompresses a part of one frame; `None` if it exceeds the remaining room, or has another size than its header says
/// (0 if that does not say any).
fn unpacked(mut packed: &[u8], whole: usize, room: &mut usize) -> Option<Vec<u8>> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(&mut packed).ok()?;
    let mut all = Vec::new();
    let limit = *room as u64 + 1;
    decoder.take(limit).read_to_end(&mut all).ok()?;
    *room = room.checked_sub(all.len())?;
    // Others may decompress what follows, too.
    (packed.is_empty() && (whole == 0 || whole == all.len())).then_some(all)
}

#[cfg(test)]
pub(super) mod testing {
    use super::{FAT, HEADER, PART};

    /// A fat binary with the given parts and their flags.
    pub(crate) fn fat(parts: &[(u64, &[u8])]) -> Vec<u8> {
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
    pub(crate) fn framed(bytes: &[u8]) -> Vec<u8> {
        let mut all = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
        all.extend((bytes.len() as u32).to_le_bytes());
        let block = (bytes.len() as u32) << 3 | 1;
        all.extend(&block.to_le_bytes()[..3]);
        all.extend(bytes);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{fat, framed},
        *,
    };

    #[test]
    fn parts_are_shown_decompressed() {
        let text = b".version 8.0 .version 8.0 .version 8.0";
        let packed = lz4(text);
        let mut image = fat(&[(0, text), (ZSTANDARD, &framed(text)), (LZ4, &packed)]);
        let last = image.len() - packed.len() - PART;
        image[last + 56..last + 64].copy_from_slice(&(text.len() as u64).to_le_bytes());
        let mut seen = Vec::new();
        assert!(each_part(&image, 1 << 20, |part| seen.push(part.to_vec())));
        assert_eq!(seen, [text; 3]);
        assert!(!each_part(&image, text.len(), |_| ()));
        let frames = [framed(text), framed(text)].concat();
        assert!(!each_part(&fat(&[(ZSTANDARD, &frames)]), 1 << 20, |_| ()));
        let mut plain = Vec::new();
        assert!(each_part(text, 0, |part| plain.push(part.to_vec())));
        assert_eq!(plain, [text]);
    }

    /// An LZ4 block of literals alone.
    fn lz4(bytes: &[u8]) -> Vec<u8> {
        let rest = (bytes.len() - 15) as u8;
        [&[0xf0, rest][..], bytes].concat()
    }
}

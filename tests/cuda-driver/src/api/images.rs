//! Fat binaries: what a compiler embeds in a program, with an image per architecture.
//!
//! A fat binary has a header (magic number, version, its own size, number of bytes that follow) and
//! a sequence of images. Each image has a header (kind, sizes, architecture, flags) and data, which
//! may be compressed.

use std::io::Read;

use cuda_definition::driver::types::CUresult;

/// Magic number of a fat binary.
pub const MAGIC: u32 = 0xba55_ed50;
/// Size of the header in bytes.
const HEADER: usize = 16;
/// Maximum size in bytes of a fat binary and of a decompressed image.
const LARGEST: u64 = 1 << 30;
/// The image kind of PTX; machine code is 2.
const PTX: u16 = 1;
/// Size in bytes of the part of an image's header that is used here.
const IMAGE_HEADER: usize = 64;
/// Flags for the compression of an image.
const LZ4: u64 = 0x2000;
const ZSTANDARD: u64 = 0x8000;

type Failure = (CUresult, String);

fn invalid(what: &str) -> Failure {
    (
        CUresult::CUDA_ERROR_INVALID_IMAGE,
        format!("fat binary: {what}"),
    )
}

/// The newest PTX in a fat binary that is not newer than an architecture (80 for `sm_80`).
///
/// # Safety
/// The image is as long as its header says.
///
/// # Errors
/// It contains none, or is damaged.
pub unsafe fn ptx(image: *const u8, architecture: u32) -> Result<String, Failure> {
    // SAFETY: the caller's promise: there is a header and as many bytes as it says.
    let all = unsafe {
        let header = std::slice::from_raw_parts(image, HEADER);
        let bytes = u64::from_le_bytes(number(header, 8)?);
        if bytes > LARGEST {
            return Err(invalid("it is too large"));
        }
        std::slice::from_raw_parts(image, HEADER + bytes as usize)
    };
    within(all, architecture)
}

fn number<const BYTES: usize>(of: &[u8], at: usize) -> Result<[u8; BYTES], Failure> {
    let end = at.checked_add(BYTES);
    let found = end.and_then(|end| of.get(at..end)?.try_into().ok());
    found.ok_or_else(|| invalid("it ends too early"))
}

fn within(all: &[u8], architecture: u32) -> Result<String, Failure> {
    let mut rest = usize::from(u16::from_le_bytes(number(all, 6)?));
    let (mut best, mut kinds) = (None, Vec::new());
    while rest + IMAGE_HEADER <= all.len() {
        let header = &all[rest..];
        let kind = u16::from_le_bytes(number(header, 0)?);
        let start = u32::from_le_bytes(number(header, 4)?) as usize;
        let bytes = u64::from_le_bytes(number(header, 8)?);
        let own = u32::from_le_bytes(number(header, 28)?);
        let end = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| start.checked_add(bytes));
        let end = end.filter(|end| start >= IMAGE_HEADER && *end <= header.len());
        let end = end.ok_or_else(|| invalid("an image is larger than all of it"))?;
        kinds.push(format!(
            "{} for sm_{own}",
            if kind == PTX { "PTX" } else { "machine code" }
        ));
        let newer = best.as_ref().is_none_or(|(newest, _)| own > *newest);
        if kind == PTX && own <= architecture && newer {
            best = Some((own, (header, start..end)));
        }
        rest += end;
    }
    let Some((_, (header, range))) = best else {
        let what = format!(
            "a fat binary has no PTX for sm_{architecture} or older, but {}: compile for compute_75 or compute_80",
            if kinds.is_empty() {
                "nothing".to_owned()
            } else {
                kinds.join(", ")
            }
        );
        return Err((CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, what));
    };
    let text = unpacked(header, &header[range])?;
    let text = String::from_utf8(text).map_err(|_| invalid("PTX that is no text"))?;
    Ok(text.trim_end_matches('\0').to_owned())
}

/// An image in decompressed form.
fn unpacked(header: &[u8], image: &[u8]) -> Result<Vec<u8>, Failure> {
    let flags = u64::from_le_bytes(number(header, 40)?);
    let packed = u32::from_le_bytes(number(header, 16)?) as usize;
    let bytes = u64::from_le_bytes(number(header, 56)?);
    if flags & (LZ4 | ZSTANDARD) == 0 {
        return Ok(image.to_vec());
    }
    if flags & LZ4 != 0 || bytes > LARGEST {
        return Err(invalid(
            "this compression is not supported: compile with --no-compress",
        ));
    }
    let mut packed = image
        .get(..packed)
        .ok_or_else(|| invalid("it ends too early"))?;
    let damaged =
        |error: &dyn std::fmt::Display| invalid(&format!("compressed data is damaged: {error}"));
    let decoder =
        ruzstd::decoding::StreamingDecoder::new(&mut packed).map_err(|error| damaged(&error))?;
    let mut all = Vec::new();
    decoder
        .take(bytes)
        .read_to_end(&mut all)
        .map_err(|error| damaged(&error))?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fat binary with images of these kinds and architectures.
    fn container(images: &[(u16, u32, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (kind, architecture, image) in images {
            let mut header = vec![0u8; 64];
            header[0..2].copy_from_slice(&kind.to_le_bytes());
            header[4..8].copy_from_slice(&64u32.to_le_bytes());
            header[8..16].copy_from_slice(&(image.len() as u64).to_le_bytes());
            header[28..32].copy_from_slice(&architecture.to_le_bytes());
            body.extend(header);
            body.extend(*image);
        }
        let mut all = MAGIC.to_le_bytes().to_vec();
        all.extend([1, 0, 16, 0]);
        all.extend((body.len() as u64).to_le_bytes());
        all.extend(body);
        all
    }

    #[test]
    fn the_newest_ptx_that_the_device_can_execute_is_taken() {
        let all = container(&[
            (1, 75, b"older\0"),
            (2, 80, b"machine code"),
            (1, 80, b"newest\0\0"),
            (1, 90, b"too new"),
        ]);
        assert_eq!(within(&all, 80).expect("there is one"), "newest");
        assert_eq!(within(&all, 75).expect("there is one"), "older");
        let (error, what) = within(&all, 70).expect_err("all are newer");
        assert_eq!(error, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert!(what.contains("machine code for sm_80"), "{what}");
    }

    #[test]
    fn a_damaged_one_is_refused() {
        let whole = container(&[(1, 75, b"text"), (1, 80, b"more text")]);
        for at in 0..whole.len() {
            let _either = within(&whole[..at], 80);
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let _either = within(&damaged, 80);
            }
        }
        let mut long = whole.clone();
        long[16 + 8] = 0xff;
        assert_eq!(
            within(&long, 80).expect_err("it is too long").0,
            CUresult::CUDA_ERROR_INVALID_IMAGE
        );
    }
}

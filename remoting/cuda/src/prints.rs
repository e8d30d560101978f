//! Determines which images have kernels that may print: those that contain the name of the device's
//! print function, and those that cannot be inspected.

use super::images::{self, ELF};

/// The function that printing kernels call. Both PTX and machine code must contain the name,
/// because the driver links the function in.
const NAME: &[u8] = b"vprintf";
/// Maximum number of bytes searched: a larger image counts as one that may print.
const LARGEST: usize = 4 << 20;

/// Whether no kernel of an image prints.
pub(super) fn is_silent(image: &[u8]) -> bool {
    if image.len() > LARGEST {
        return false;
    }
    let (mut silent, mut parts) = (true, 0);
    let is_whole = images::each_part(image, LARGEST, |part| {
        parts += 1;
        silent &= is_plain_and_silent(part);
    });
    // A binary without known parts has nothing that could be inspected.
    is_whole && silent && parts > 0
}

/// Whether the image is machine code or PTX without the name.
fn is_plain_and_silent(image: &[u8]) -> bool {
    // The driver reads text only up to the first zero; the rest is searched, too.
    let starts_as_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    (image.starts_with(ELF) || image.iter().take(16).all(starts_as_text))
        && !image.windows(NAME.len()).any(|part| part == NAME)
}

#[cfg(test)]
mod tests {
    use super::{
        super::images::{
            FAT, LZ4, ZSTANDARD,
            testing::{fat, framed},
        },
        *,
    };

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
            &fat(&[(LZ4, &[0xff])]),
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

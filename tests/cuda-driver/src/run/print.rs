//! `printf` in kernels: a format, and consecutive arguments, each aligned to its size.

use std::ffi::CString;

use super::Fault;

/// Maximum length of a string in bytes.
const LONGEST: usize = 8 << 10;

/// Reads a string at a generic address.
///
/// # Errors
/// It is in unallocated memory.
pub fn text(at: u64, byte: &dyn Fn(u64) -> Result<u8, Fault>) -> Result<Vec<u8>, Fault> {
    let mut all = Vec::new();
    while all.len() < LONGEST {
        match byte(at.wrapping_add(all.len() as u64))? {
            0 => break,
            other => all.push(other),
        }
    }
    Ok(all)
}

/// The formatted text, and the number of arguments that the format takes.
///
/// # Errors
/// The format or an argument is in unallocated memory.
pub fn formatted(
    format: u64,
    arguments: u64,
    byte: &dyn Fn(u64) -> Result<u8, Fault>,
) -> Result<(Vec<u8>, u64), Fault> {
    let format = text(format, byte)?;
    let (mut out, mut count, mut at) = (Vec::new(), 0, arguments);
    let mut argument = |size: u64| {
        at = at.next_multiple_of(size);
        let mut value = 0;
        for offset in 0..size {
            value |= u64::from(byte(at.wrapping_add(offset))?) << (8 * offset);
        }
        at = at.wrapping_add(size);
        count += 1;
        Ok::<_, Fault>(value)
    };
    let mut rest = format.as_slice();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            out.push(first);
            continue;
        }
        let mut spec = vec![b'%'];
        let mut long = 0;
        loop {
            let Some((&next, after)) = rest.split_first() else {
                return Ok((out, count));
            };
            rest = after;
            match next {
                b'%' => {
                    out.push(b'%');
                    break;
                }
                b'0'..=b'9' | b'.' | b'-' | b'+' | b' ' | b'#' if spec.len() < 24 => {
                    spec.push(next)
                }
                b'*' => {
                    let width = argument(4)? as u32;
                    spec.extend(
                        width
                            .cast_signed()
                            .clamp(-999, 999)
                            .to_string()
                            .into_bytes(),
                    );
                }
                b'l' | b'z' | b'j' | b't' => long += 1,
                b'h' => {}
                b'd' | b'i' | b'u' | b'x' | b'X' | b'o' => {
                    let bits = argument(if long > 0 { 8 } else { 4 })?;
                    let bits = match next {
                        b'd' | b'i' if long == 0 => {
                            i64::from((bits as u32).cast_signed()).cast_unsigned()
                        }
                        _ => bits,
                    };
                    spec.extend([b'l', b'l', next]);
                    out.extend(one(&spec, &Value::Integer(bits)));
                    break;
                }
                b'c' => {
                    out.push(argument(4)? as u8);
                    break;
                }
                b'p' => {
                    out.extend(format!("{:#x}", argument(8)?).into_bytes());
                    break;
                }
                b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' => {
                    spec.push(next);
                    out.extend(one(&spec, &Value::Float(f64::from_bits(argument(8)?))));
                    break;
                }
                b's' => {
                    let string = text(argument(8)?, byte)?;
                    spec.push(b's');
                    if let Ok(string) = CString::new(string) {
                        out.extend(one(&spec, &Value::Text(string)));
                    }
                    break;
                }
                // Not a conversion: printed unchanged.
                other => {
                    spec.push(other);
                    out.extend(&spec);
                    break;
                }
            }
        }
        if out.len() > LONGEST {
            out.truncate(LONGEST);
            break;
        }
    }
    Ok((out, count))
}

enum Value {
    Integer(u64),
    Float(f64),
    Text(CString),
}

/// Formats one conversion as C does. Flags, width and precision come from the kernel unchecked; the
/// conversion matches the value.
fn one(spec: &[u8], value: &Value) -> Vec<u8> {
    let Ok(spec) = CString::new(widths_limited(spec)) else {
        return Vec::new();
    };
    let mut buffer = vec![0u8; LONGEST + 2048];
    let (to, size, spec) = (buffer.as_mut_ptr().cast(), buffer.len(), spec.as_ptr());
    // SAFETY: the buffer has that size; the format has exactly one conversion, which `formatted`
    // has matched to the value's type.
    let length = unsafe {
        match value {
            Value::Integer(bits) => libc::snprintf(to, size, spec, *bits),
            Value::Float(float) => libc::snprintf(to, size, spec, *float),
            Value::Text(text) => libc::snprintf(to, size, spec, text.as_ptr()),
        }
    };
    buffer.truncate(usize::try_from(length).unwrap_or(0).min(size - 1));
    buffer
}

/// Limits widths: those with more than three digits would only print spaces.
fn widths_limited(spec: &[u8]) -> Vec<u8> {
    let mut digits = 0;
    let keep = |byte: &&u8| {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        digits <= 3
    };
    spec.iter().filter(keep).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(format: &str, arguments: &[u8]) -> String {
        let mut memory = format.as_bytes().to_vec();
        memory.resize(512, 0);
        memory.extend(arguments);
        memory.extend(b"text\0");
        let byte = |at: u64| Ok(memory.get(at as usize).copied().unwrap_or(0));
        let (text, _) = formatted(0, 512, &byte).expect("all is in memory");
        String::from_utf8(text).expect("it is text")
    }

    #[test]
    fn arguments_are_aligned_to_their_size() {
        let mut arguments = (-5i32).to_le_bytes().to_vec();
        arguments.extend([0; 4]);
        arguments.extend(2.5f64.to_le_bytes());
        arguments.extend(u64::MAX.to_le_bytes());
        arguments.extend((512u64 + 32).to_le_bytes());
        assert_eq!(
            print("%3d %5.1f %llx %6s %%", &arguments),
            " -5   2.5 ffffffffffffffff   text %"
        );
    }

    #[test]
    fn odd_formats_are_shown_or_end() {
        assert_eq!(print("100%", &[]), "100");
        assert_eq!(print("%y", &[]), "%y");
        assert!(print("%99999999d", &[1, 0, 0, 0]).len() < 2000);
        assert_eq!(print("%*d|", &[4, 0, 0, 0, 7, 0, 0, 0]), "   7|");
    }
}

//! PTX tokens.

use super::Error;

/// A token; [`tokens`] pairs it with its line.
#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    /// A name, including the first part of an opcode.
    Word(String),
    /// A part after a dot.
    Dot(String),
    /// An integer as bits.
    Integer(u64),
    /// `0f...`
    Float(u32),
    /// `0d...`
    Double(u64),
    /// A quoted text.
    Text,
    /// Anything else.
    Mark(char),
}

/// Splits a module into tokens, each with its line.
pub fn tokens(text: &str) -> Result<Vec<(Token, u32)>, Error> {
    let bytes = text.as_bytes();
    let (mut at, mut line, mut all) = (0, 1, Vec::new());
    let run = |from: usize, is: &dyn Fn(u8) -> bool| {
        from + bytes[from..].iter().take_while(|byte| is(**byte)).count()
    };
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$';
    while let Some(&byte) = bytes.get(at) {
        let next = bytes.get(at + 1).copied().unwrap_or(0);
        match byte {
            b'\n' => {
                line += 1;
                at += 1;
            }
            _ if byte.is_ascii_whitespace() => at += 1,
            b'/' if next == b'/' => at = run(at, &|byte| byte != b'\n'),
            b'/' if next == b'*' => {
                let end = text[at..]
                    .find("*/")
                    .map_or(bytes.len(), |end| at + end + 2);
                line += count_lines(&bytes[at..end]);
                at = end;
            }
            b'"' => {
                let end = run(at + 1, &|byte| byte != b'"' && byte != b'\n');
                at = (end + 1).min(bytes.len());
                all.push((Token::Text, line));
            }
            b'.' if word(next) => {
                let mut end = run(at + 1, &word);
                while bytes[end..].starts_with(b"::") {
                    end = run(end + 2, &word);
                }
                let name = text[at + 1..end].to_owned();
                // Directives about source lines end with the line, not with a semicolon.
                if name == "loc" || name == "file" {
                    at = run(at, &|byte| byte != b'\n');
                    continue;
                }
                all.push((Token::Dot(name), line));
                at = end;
            }
            b'%' | b'_' | b'$' => {
                let end = run(at + 1, &word);
                all.push((Token::Word(text[at..end].to_owned()), line));
                at = end;
            }
            _ if byte.is_ascii_alphabetic() => {
                let end = run(at, &word);
                all.push((Token::Word(text[at..end].to_owned()), line));
                at = end;
            }
            _ if byte.is_ascii_digit() => {
                let end = run(at, &|byte| byte.is_ascii_alphanumeric());
                // A version contains a dot; none of NVRTC's constants does.
                let fraction = bytes.get(end) == Some(&b'.')
                    && bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
                let digits = &text[at..end];
                let number = number(digits)
                    .ok_or_else(|| Error::new(line, format!("{digits} is no number")))?;
                all.push((number, line));
                at = if fraction {
                    run(end + 1, &|byte| byte.is_ascii_digit())
                } else {
                    end
                };
            }
            _ if byte.is_ascii() => {
                all.push((Token::Mark(byte as char), line));
                at += 1;
            }
            _ => return Err(Error::new(line, "a character that is not ASCII")),
        }
    }
    Ok(all)
}

fn count_lines(bytes: &[u8]) -> u32 {
    let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
    u32::try_from(lines).unwrap_or(u32::MAX)
}

fn number(digits: &str) -> Option<Token> {
    let digits_of = |prefix: &str| {
        let lower = digits.get(..prefix.len())?.to_ascii_lowercase();
        (lower == prefix).then(|| &digits[prefix.len()..])
    };
    if let Some(bits) = digits_of("0f") {
        return u32::from_str_radix(bits, 16).ok().map(Token::Float);
    }
    if let Some(bits) = digits_of("0d") {
        return u64::from_str_radix(bits, 16).ok().map(Token::Double);
    }
    let digits = digits.trim_end_matches('U');
    let integer = if let Some(bits) = digits_hex(digits) {
        u64::from_str_radix(bits, 16)
    } else if let Some(bits) = digits.strip_prefix("0b") {
        u64::from_str_radix(bits, 2)
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(digits, 8)
    } else {
        digits.parse()
    };
    integer.ok().map(Token::Integer)
}

fn digits_hex(digits: &str) -> Option<&str> {
    digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
}

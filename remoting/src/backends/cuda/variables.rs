//! What the variables of an image take on the device, which is charged like other memory: an image of a few hundred bytes
//! may declare as much as the device has.
//!
//! Machine code says so in its sections, text (PTX) in its declarations. Of a fat binary the driver chooses one part: the
//! largest counts. A library's variables count once, though each context that uses them has its own.

use object::{Endianness, Object as _, ObjectSection as _, read::elf::ElfFile64};

use super::images::{self, ELF};

/// Maximum number of bytes of a fat binary's parts, decompressed, that are looked at.
const LARGEST: usize = 1 << 30;
/// How sections of variables begin.
const SECTION: &str = ".nv.global";

/// The bytes that variables of an image take. `None` if that cannot be told: the image is damaged, or declares the size
/// of a variable by more than numbers, sums and products.
pub(super) fn bytes(image: &[u8]) -> Option<u64> {
    let mut most = Some(0);
    let is_whole = images::each_part(image, LARGEST, |part| {
        let part = match part.starts_with(ELF) {
            true => of_code(part),
            false => of_text(part),
        };
        most = most.and_then(|most: u64| Some(most.max(part?)));
    });
    most.filter(|_| is_whole)
}

fn of_code(image: &[u8]) -> Option<u64> {
    let code = ElfFile64::<Endianness>::parse(image).ok()?;
    let of_variables = code.sections().filter(|section| {
        section
            .name_bytes()
            .is_ok_and(|name| name.starts_with(SECTION.as_bytes()))
    });
    let sizes = of_variables.map(|section| section.size());
    Some(sizes.fold(0, u64::saturating_add))
}

/// The same of PTX. The driver reads text up to the first zero.
fn of_text(image: &[u8]) -> Option<u64> {
    let end = image.iter().position(|byte| *byte == 0);
    let text = String::from_utf8_lossy(&image[..end.unwrap_or(image.len())]);
    let text = without_comments(&text);
    if !text.trim_start().starts_with(".version") {
        // The driver refuses whatever it is.
        return Some(0);
    }
    let mut all = 0u64;
    // Directives end with a semicolon or, those of functions, begin a block.
    for statement in text.split([';', '{', '}']) {
        let mut words = statement.split_whitespace();
        if words.any(|word| word == ".global") && !statement.contains(".extern") {
            all = all.saturating_add(declared(statement)?);
        }
    }
    Some(all)
}

fn without_comments(text: &str) -> String {
    let (mut kept, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('/') {
        let (before, from) = rest.split_at(at);
        kept.push_str(before);
        let end = if from.starts_with("//") {
            from.find('\n')
        } else if let Some(comment) = from.strip_prefix("/*") {
            comment.find("*/").map(|end| end + 4)
        } else {
            kept.push('/');
            Some(1)
        };
        kept.push(' ');
        rest = end.map_or("", |end| &from[end..]);
    }
    kept.push_str(rest);
    kept
}

/// The bytes of the variables that a statement declares.
fn declared(statement: &str) -> Option<u64> {
    let at = statement.find(".global")?;
    let declaration = &statement[at + ".global".len()..];
    // What follows is another variable's name, or a value, whose braces have ended the statement.
    let declaration = declaration.split('=').next()?;
    let mut element = 1u64;
    for word in declaration.split(|one: char| one.is_whitespace() || one == '[') {
        let factor = match word {
            ".v2" => 2,
            ".v4" => 4,
            ".v8" => 8,
            _ => match word.strip_prefix('.') {
                Some(kind) => width(kind).unwrap_or(1),
                None => continue,
            },
        };
        element = element.saturating_mul(factor);
    }
    let mut all = 0u64;
    for variable in declaration.split(',') {
        let mut elements = 1u64;
        for dimension in variable.split('[').skip(1) {
            let (length, _) = dimension.split_once(']')?;
            elements = elements.saturating_mul(length_of(length)?);
        }
        all = all.saturating_add(elements.saturating_mul(element));
    }
    Some(all)
}

/// The bytes of a type. Alignment and attributes are none.
fn width(kind: &str) -> Option<u64> {
    let bits = kind.trim_start_matches(|one: char| one.is_ascii_alphabetic());
    match (kind, bits.parse::<u64>()) {
        ("texref" | "surfref" | "samplerref", _) => Some(8),
        // Packed types name each part: f16x2.
        _ if kind.contains('x') && kind.bytes().all(|one| one.is_ascii_alphanumeric()) => Some(4),
        (_, Ok(bits @ 8..=128)) => Some(bits / 8),
        _ => None,
    }
}

/// A length: sums of products of numbers. Nothing means that the initial values tell it, which take more text than memory.
fn length_of(text: &str) -> Option<u64> {
    if text.trim().is_empty() {
        return Some(0);
    }
    let product = |text: &str| {
        let mut factors = text.split('*').map(number);
        factors.try_fold(1u64, |product, factor| {
            Some(product.saturating_mul(factor?))
        })
    };
    let mut sums = text.split('+').map(product);
    sums.try_fold(0u64, |sum, one| Some(sum.saturating_add(one?)))
}

fn number(text: &str) -> Option<u64> {
    let text = text.trim().trim_end_matches('U');
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    let is_number = digits.bytes().all(|digit| digit.is_ascii_hexdigit()) && !digits.is_empty();
    // Larger numbers are no less.
    is_number.then(|| u64::from_str_radix(digits, radix).unwrap_or(u64::MAX))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{super::images::testing::fat, *};

    const START: &str = "/* as compilers begin */ .version 8.0\n.target sm_80\n";

    fn code(sections: &[(&str, u64)]) -> Vec<u8> {
        let (format, machine) = (object::BinaryFormat::Elf, object::Architecture::X86_64);
        let mut object = object::write::Object::new(format, machine, object::Endianness::Little);
        for (name, size) in sections {
            let kind = object::SectionKind::UninitializedData;
            let section = object.add_section(Vec::new(), name.as_bytes().to_vec(), kind);
            object.append_section_bss(section, *size, 1);
        }
        object.write().expect("sections have names and sizes")
    }

    #[test]
    fn variables_of_text_are_counted_by_their_declarations() {
        for (text, expected) in [
            (".global .align 8 .b8 a[8589934592];", 8 << 30),
            (".visible .global .align 4 .u32 one;", 4),
            (
                ".global .align 16 .v4 .f32 many[3][0x10] = {0f00000000};",
                16 * 48,
            ),
            (".extern .global .b8 elsewhere[100];", 0),
            (
                ".global .u16 a[2], b, c[1024*1024 + 8];",
                2 * (2 + 1 + (1 << 20) + 8),
            ),
            (".global .attribute(.managed) .align 8 .b64 shared[4];", 32),
            (
                "// .global .b8 a[9];\n/* .global .b8 a[9]; */ .const .b8 b[9];",
                0,
            ),
            (
                ".entry k() { ld.global.u32 %r1, [%rd1]; ret; }\n.global .b8 last[7];",
                7,
            ),
            (".global\t.b8 tab[5]\n;", 5),
            (
                ".version 8.0\n.target sm_80\n.global .f64 unsized[] = {1, 2};",
                0,
            ),
        ] {
            let text = format!("{START}{text}");
            assert_eq!(bytes(text.as_bytes()), Some(expected), "{text}");
        }
        let text = format!("{START}.global .b8 a[7];\0.global .b8 behind[7];");
        assert_eq!(bytes(text.as_bytes()), Some(7));
        assert_eq!(bytes(b"no PTX, but .global a[N];"), Some(0));
    }

    #[test]
    fn a_length_that_cannot_be_told_is_not_taken_for_none() {
        for length in ["1<<40", "(9)", "N", "-1", "9"] {
            let text = format!("{START}.global .b8 a[{length}];");
            let expected = (length == "9").then_some(9);
            assert_eq!(bytes(text.as_bytes()), expected, "{length}");
        }
        assert_eq!(
            bytes(format!("{START}.global .b8 open[9;").as_bytes()),
            None
        );
        let endless = format!("{START}.global .b64 a[99999999999999999999];");
        assert_eq!(bytes(endless.as_bytes()), Some(u64::MAX));
    }

    #[test]
    fn variables_of_machine_code_are_counted_by_sections() {
        let image = code(&[
            (".nv.global", 8 << 30),
            (".nv.global.init", 24),
            (".nv.shared.kernel", 4096),
        ]);
        assert_eq!(bytes(&image), Some((8 << 30) + 24));
        assert_eq!(bytes(&code(&[])), Some(0));
        assert_eq!(bytes(b"\x7fELF, cut off"), None);
    }

    #[test]
    fn the_largest_part_of_a_fat_binary_counts() {
        let text = format!("{START}.global .b8 a[100];");
        let image = fat(&[(0, text.as_bytes()), (0, &code(&[(".nv.global", 300)]))]);
        assert_eq!(bytes(&image), Some(300));
        assert_eq!(bytes(&image[..image.len() - 1]), None);
    }
}

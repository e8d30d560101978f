//! The variables that a text (PTX) declares in the device's memory.

/// Maximum number of bytes of a text that is looked at.
const LARGEST: usize = 64 << 20;

/// The bytes of all variables in the state space `.global`, those of other modules aside. `None` if the text is too long, or
/// is not understood: it does not begin as PTX does, or declares the size of a variable by more than numbers, sums and
/// products. The driver reads it up to the first zero.
pub(super) fn variables(text: &[u8]) -> Option<u64> {
    let end = text.iter().position(|byte| *byte == 0);
    let text = &text[..end.unwrap_or(text.len())];
    if text.len() > LARGEST {
        return None;
    }
    let mut tokens = Tokens {
        rest: text,
        chain: Chain::None,
        is_bad: false,
    };
    if tokens.next() != Some(Token::Directive(b"version")) {
        return None;
    }
    let (mut all, mut depth, mut is_extern) = (0u64, 0usize, false);
    // Of a list of parameters, in which .ptr .global says where a pointer points to.
    let (mut parentheses, mut was_ptr) = (0usize, false);
    while let Some(token) = tokens.next() {
        let is_pointer = std::mem::replace(&mut was_ptr, token == Token::Directive(b"ptr"));
        match token {
            Token::Mark(b'{') => depth += 1,
            Token::Mark(b'}') => depth = depth.saturating_sub(1),
            Token::Mark(b'(') => parentheses += 1,
            Token::Mark(b')') => parentheses = parentheses.saturating_sub(1),
            Token::Directive(b"global") if is_pointer && parentheses > 0 => {}
            // Of instructions, it is the space of their operand.
            Token::Directive(b"global") if depth == 0 || tokens.chain == Chain::Directives => {
                let bytes = declared(&mut tokens)?;
                if !is_extern {
                    all = all.saturating_add(bytes);
                }
            }
            _ => {}
        }
        is_extern = match token {
            Token::Directive(b"extern") => true,
            Token::Directive(b"visible" | b"weak" | b"common") => is_extern,
            _ => false,
        };
    }
    (!tokens.is_bad).then_some(all)
}

/// The bytes of the variables of a declaration, of which the space has been read.
fn declared(tokens: &mut Tokens) -> Option<u64> {
    let (mut element, mut align, mut vector) = (None, 1u64, 1u64);
    let mut token = tokens.next()?;
    while let Token::Directive(name) = token {
        match name {
            b"attribute" => tokens.skip_parentheses()?,
            b"align" => align = tokens.number()?,
            b"v2" => vector = 2,
            b"v4" => vector = 4,
            b"v8" => vector = 8,
            name => element = Some(width(name)?),
        }
        token = tokens.next()?;
    }
    let element = element?.checked_mul(vector)?;
    let mut all = 0u64;
    loop {
        if !matches!(token, Token::Word(_)) {
            return None;
        }
        let (mut variables, mut count) = (1u64, 1u64);
        let (mut dimensions, mut unsized_at) = (0, None);
        token = tokens.next()?;
        // Names with a number of variables: v<100>.
        if token == Token::Mark(b'<') {
            variables = tokens.number()?;
            (tokens.next()? == Token::Mark(b'>')).then_some(())?;
            token = tokens.next()?;
        }
        while token == Token::Mark(b'[') {
            match tokens.length()? {
                Some(length) => count = count.saturating_mul(length),
                None => unsized_at = Some(dimensions),
            }
            dimensions += 1;
            token = tokens.next()?;
        }
        let mut values = 0;
        if token == Token::Mark(b'=') {
            (values, token) = tokens.skip_value()?;
        }
        match (unsized_at, dimensions) {
            (None, _) => {}
            (Some(0), 1) => count = count.saturating_mul(values),
            _ => return None,
        }
        // Each variable is aligned, the elements of an array are not.
        let bytes = element.saturating_mul(count);
        let bytes = bytes.checked_next_multiple_of(align.max(1));
        let bytes = bytes.unwrap_or(u64::MAX).saturating_mul(variables);
        all = all.saturating_add(bytes);
        match token {
            Token::Mark(b';') => return Some(all),
            Token::Mark(b',') => token = tokens.next()?,
            _ => return None,
        }
    }
}

/// The bytes of a type.
fn width(name: &[u8]) -> Option<u64> {
    let name = std::str::from_utf8(name).ok()?;
    if matches!(name, "texref" | "surfref" | "samplerref") {
        return Some(8);
    }
    let digits = name.trim_start_matches(|one: char| one.is_ascii_alphabetic());
    match digits.split_once('x') {
        // Packed: f16x2.
        Some((part, parts)) => Some(
            (part.parse::<u64>().ok()? * parts.parse::<u64>().ok()?)
                .div_ceil(8)
                .max(4),
        ),
        None => digits
            .parse::<u64>()
            .ok()
            .filter(|bits| (8..=256).contains(bits))
            .map(|bits| bits / 8),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    /// A name that begins with a point, without it.
    Directive(&'a [u8]),
    /// A name, a number or the beginning of an instruction.
    Word(&'a [u8]),
    Text,
    Mark(u8),
}

/// What names that follow each other without a space began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chain {
    None,
    Directives,
    Word,
}

struct Tokens<'a> {
    rest: &'a [u8],
    /// Of the last token.
    chain: Chain,
    /// Whether something was not understood.
    is_bad: bool,
}

impl<'a> Tokens<'a> {
    fn next(&mut self) -> Option<Token<'a>> {
        let before = self.rest.len();
        self.skip_space()?;
        let follows = self.rest.len() == before;
        let (&first, behind) = self.rest.split_first()?;
        let is_name =
            |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%');
        let length = |of: &[u8]| {
            of.iter()
                .position(|byte| !is_name(byte))
                .unwrap_or(of.len())
        };
        if first == b'"' {
            let end = behind
                .iter()
                .position(|byte| matches!(byte, b'"' | b'\\' | b'\n'));
            // Whether a quotation mark may be escaped is not known.
            let Some(end) = end.filter(|end| behind[*end] == b'"') else {
                self.is_bad = true;
                return None;
            };
            self.rest = &behind[end + 1..];
            self.chain = Chain::None;
            return Some(Token::Text);
        }
        if first == b'.' {
            let (name, rest) = behind.split_at(length(behind));
            self.rest = rest;
            self.chain = match self.chain {
                Chain::Word if follows => Chain::Word,
                _ => Chain::Directives,
            };
            return Some(Token::Directive(name));
        }
        if is_name(&first) {
            let (name, rest) = self.rest.split_at(length(self.rest));
            self.rest = rest;
            self.chain = Chain::Word;
            return Some(Token::Word(name));
        }
        // Preprocessed text has lines that begin with a number sign.
        self.is_bad |= first == b'#';
        self.rest = behind;
        self.chain = Chain::None;
        Some(Token::Mark(first))
    }

    /// Skips white space and comments.
    fn skip_space(&mut self) -> Option<()> {
        loop {
            let text = self.rest.trim_ascii_start();
            // A vertical tab is white space for others.
            let text = text.strip_prefix(b"\x0b").unwrap_or(text);
            let end = if text.starts_with(b"//") {
                text.iter().position(|byte| *byte == b'\n')
            } else if let Some(comment) = text.strip_prefix(b"/*") {
                comment
                    .windows(2)
                    .position(|two| two == b"*/")
                    .map(|at| at + 4)
            } else if text.len() == self.rest.len() {
                return Some(());
            } else {
                Some(0)
            };
            self.rest = end.map_or(&[][..], |end| &text[end..]);
        }
    }

    fn skip_parentheses(&mut self) -> Option<()> {
        (self.next()? == Token::Mark(b'(')).then_some(())?;
        let mut open = 1;
        while open > 0 {
            match self.next()? {
                Token::Mark(b'(') => open += 1,
                Token::Mark(b')') => open -= 1,
                _ => {}
            }
        }
        Some(())
    }

    /// Skips an initial value. Returns the number of its parts, and the token behind it.
    fn skip_value(&mut self) -> Option<(u64, Token<'a>)> {
        let (mut open, mut parts) = (0, 1);
        loop {
            match self.next()? {
                Token::Mark(b'{' | b'(') => open += 1,
                Token::Mark(b'}' | b')') => open -= 1,
                end @ Token::Mark(b',' | b';') if open == 0 => return Some((parts, end)),
                Token::Mark(b',') => parts += 1,
                Token::Mark(b';') => return None,
                _ => {}
            }
        }
    }

    fn number(&mut self) -> Option<u64> {
        match self.next()? {
            Token::Word(word) => number(word),
            _ => None,
        }
    }

    /// The length of a dimension, up to its closing bracket: sums of products of numbers. `None` in it if it has none.
    fn length(&mut self) -> Option<Option<u64>> {
        let mut token = self.next()?;
        if token == Token::Mark(b']') {
            return Some(None);
        }
        let (mut sum, mut product) = (0u64, 1u64);
        loop {
            let Token::Word(word) = token else {
                return None;
            };
            product = product.saturating_mul(number(word)?);
            match self.next()? {
                Token::Mark(b'*') => {}
                Token::Mark(b'+') => {
                    sum = sum.saturating_add(product);
                    product = 1;
                }
                Token::Mark(b']') => return Some(Some(sum.saturating_add(product))),
                _ => return None,
            }
            token = self.next()?;
        }
    }
}

/// Numbers that do not fit count as the largest.
fn number(word: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(word).ok()?.trim_end_matches('U');
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    let is_number = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    is_number.then(|| u64::from_str_radix(digits, radix).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "/* as compilers begin */ .version 8.0\n.target sm_80\n";

    fn of(text: &str) -> Option<u64> {
        variables(format!("{START}{text}").as_bytes())
    }

    #[test]
    fn variables_are_counted_by_their_declarations() {
        for (text, expected) in [
            (".global .align 8 .b8 a[8589934592];", 8 << 30),
            (".visible .global .align 4 .u32 one;", 4),
            (
                ".global .align 16 .v4 .f32 many[3][0x10] = {0f00000000};",
                16 * 48,
            ),
            (".extern .global .b8 elsewhere[100];", 0),
            (".extern .func f; .global .b8 here[100];", 100),
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
            (
                ".entry k() { st.volatile.global.v2.u32 [%rd1], {%r1, %r2}; }",
                0,
            ),
            (".entry k() {.global .b8 inner[5]; ret;}", 5),
            (".global\t.b8 tab[5]\n;", 5),
            (".global .f64 unsized[] = {1, 2};", 16),
            (".global .b8 a[2]={1,2}, b[8589934592];", 2 + (8 << 30)),
            (".global .b32 a = 5, b[3];", 16),
            (".global .v4 .f32 v<10000000>;", 160_000_000),
            (".global .align 1048576 .b8 small;", 1 << 20),
            (".global .align 128 .b8 v<100>;", 12_800),
            (".global .align 128 .b8 v<100>[3], w[3];", 12_928),
            (".visible.global .b8 joined[9];.global.v4.f32 x[2];", 9 + 32),
            (".file 1 \"/*\"\n.global .b8 x[11];\n.file 2 \"*/\"", 11),
            (".file 1 \"a.extern\"\n.global .b8 x[11];", 11),
            (".pragma \"//\"; .global .b8 x[11];", 11),
            (".target sm_80.global .b8 x[11];", 11),
            (".global .b8 p = generic(x), q[3];", 4),
            (
                ".entry k(.param .u64 .ptr .global .align 16 a, .param .u32 n) { ret; }",
                0,
            ),
            (".ptr .global .b8 x[9];", 9),
        ] {
            assert_eq!(of(text), Some(expected), "{text}");
        }
        assert_eq!(of(".global .b8 a[7];\0.global .b8 behind[7];"), Some(7));
    }

    #[test]
    fn what_compilers_write_is_understood() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/cuda-driver/tests/kernels"
        );
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "ptx") {
                let text = std::fs::read(&path).unwrap();
                assert!(variables(&text).is_some(), "{}", path.display());
                count += 1;
            }
        }
        assert!(count > 5, "{count} files");
    }

    #[test]
    fn what_is_not_understood_is_not_taken_for_nothing() {
        for text in [
            ".global .b8 a[1<<40];",
            ".global .b8 a[(9)];",
            ".global .b8 a[N];",
            ".global .b8 a[-1];",
            ".global .b8 open[9;",
            ".global .b64 x[][134217728] = {{0},{0}};",
            ".global .unknown x[9];",
            ".file 1 \"\\\"/*\"\n.global .b8 x[11];",
            "# 1 \"file\"\n.global .b8 x[11];",
            ".global .b8 unfinished[9]",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
        assert_eq!(variables(b"no PTX, but .global .b8 a[8];"), None);
        assert_eq!(of(".global .b64 a[99999999999999999999];"), Some(u64::MAX));
    }
}

//! Whether sources declare variables that kernels may change.
//!
//! This is no parser of the language: it knows the shapes of declarations that are surely of no such variable (functions,
//! types, constants), and takes all others for one. Macros are judged by their definitions where they are used at program
//! scope; conditions of the preprocessor are not evaluated, each branch counts.

use std::collections::HashMap;

/// How often definitions of macros are gone through until what is known of each agrees with what is known of those that
/// it uses. Sources that need more are taken for ones that declare.
const MOST_ROUNDS: usize = 32;

/// Whether one of these texts of a program declares such a variable. In a language with classes (C++ for OpenCL),
/// `type name(value);` does.
pub(super) fn are_in(texts: &[String], has_classes: bool) -> bool {
    let texts: Vec<_> = texts.iter().map(|text| literals_removed(text)).collect();
    let mut definitions: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut code = Vec::new();
    for text in &texts {
        let (directives, lines): (Vec<_>, Vec<_>) = text
            .lines()
            .partition(|line| line.trim_start().starts_with('#'));
        for (name, body) in directives.into_iter().filter_map(definition) {
            definitions.entry(name).or_default().push(body);
        }
        code.push(lines.join("\n"));
    }
    let Some(macros) = Macros::of(&definitions, has_classes) else {
        return true;
    };
    code.iter()
        .any(|text| macros.read(text).is_none_or(|rest| rest.is_variable()))
}

/// The macro that a line for the preprocessor defines, and what for.
fn definition(line: &str) -> Option<(&str, &str)> {
    let define = line.trim_start().trim_start_matches('#').trim_start();
    let define = define.strip_prefix("define")?.trim_start();
    let name = define.find(|one: char| !is_of_word(one));
    let (name, behind) = define.split_at(name.unwrap_or(define.len()));
    let body = match behind.strip_prefix('(') {
        Some(behind) => behind.split_once(')').map_or("", |(_, body)| body),
        None => behind,
    };
    Some((name, body))
}

/// What a macro stands for at program scope.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Nothing,
    /// Words of a declaration, with pointers and attributes.
    Words,
    /// A function but for its body.
    Head(Tail),
    /// Functions, types and constants, from begin to end.
    Whole,
    /// A variable, or what is not understood.
    Unknown,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Macro {
    meaning: Meaning,
    /// It has a semicolon.
    ends: bool,
    /// It opens or closes what it does not close or open.
    is_unbalanced: bool,
    has_static: bool,
    /// It makes words, which may be names of macros that have semicolons.
    pastes: bool,
    /// Its words have a pointer.
    has_pointer: bool,
    /// Its words make a constant.
    is_fixed: bool,
}

impl Macro {
    const WORDS: Self = Self {
        meaning: Meaning::Words,
        ends: false,
        is_unbalanced: false,
        has_static: false,
        pastes: false,
        has_pointer: false,
        is_fixed: false,
    };

    /// One that is defined in this way or that.
    fn or(self, other: Self) -> Self {
        let meaning = match (self.meaning, other.meaning) {
            (one, other) if one == other => one,
            (Meaning::Nothing, one) | (one, Meaning::Nothing) => one,
            _ => Meaning::Unknown,
        };
        Self {
            meaning,
            ends: self.ends || other.ends,
            is_unbalanced: self.is_unbalanced || other.is_unbalanced,
            has_static: self.has_static || other.has_static,
            pastes: self.pastes || other.pastes,
            has_pointer: self.has_pointer || other.has_pointer,
            is_fixed: self.is_fixed && other.is_fixed,
        }
    }
}

/// A program's macros by their names.
#[derive(PartialEq, Eq)]
struct Macros<'a> {
    all: HashMap<&'a str, Macro>,
    /// One is not understood, and has a semicolon.
    has_unknown: bool,
    has_classes: bool,
}

impl<'a> Macros<'a> {
    /// None if that takes too many rounds.
    fn of(definitions: &HashMap<&'a str, Vec<&'a str>>, has_classes: bool) -> Option<Self> {
        let names = definitions.keys();
        let mut known = Self {
            all: names.map(|name| (*name, Macro::WORDS)).collect(),
            has_unknown: false,
            has_classes,
        };
        for _ in 0..MOST_ROUNDS {
            let all = definitions.iter().filter_map(|(name, bodies)| {
                let bodies = bodies.iter().map(|body| known.of_body(body));
                Some((*name, bodies.reduce(Macro::or)?))
            });
            let all: HashMap<_, _> = all.collect();
            let is_unknown = |one: &Macro| one.meaning == Meaning::Unknown && one.ends;
            let next = Self {
                has_unknown: all.values().any(is_unknown),
                all,
                has_classes,
            };
            if next == known {
                return Some(known);
            }
            known = next;
        }
        None
    }

    fn of_body(&self, body: &str) -> Macro {
        let mut found = Macro::WORDS;
        let (mut open, mut has_end) = (0usize, false);
        for token in Tokens(body) {
            match token {
                "(" | "[" | "{" => open += 1,
                ")" | "]" | "}" if open == 0 => found.is_unbalanced = true,
                ")" | "]" | "}" => open -= 1,
                ";" => found.ends = true,
                "static" => found.has_static = true,
                "#" => found.pastes |= self.has_unknown,
                word => {
                    if let Some(used) = self.all.get(word) {
                        found.ends |= used.ends;
                        found.is_unbalanced |= used.is_unbalanced;
                        found.has_static |= used.has_static;
                        found.pastes |= used.pastes;
                        has_end |= used.meaning == Meaning::Whole;
                    }
                }
            }
            has_end |= matches!(token, ";" | "}");
        }
        found.is_unbalanced |= open > 0;
        found.meaning = match self.read(body) {
            _ if body.trim().is_empty() => Meaning::Nothing,
            Some(rest) if has_end && rest.is_empty() => Meaning::Whole,
            Some(rest) if !found.ends => {
                (found.has_pointer, found.is_fixed) = (rest.has_pointer, rest.is_fixed);
                rest.meaning()
            }
            _ => Meaning::Unknown,
        };
        found
    }

    /// Reads code without literals and lines for the preprocessor. Gives what is left of it behind the last declaration.
    /// None if it declares a variable, or is not understood.
    fn read<'b>(&self, text: &'b str) -> Option<Statement<'b>> {
        let new = || Statement::new(self.has_classes);
        let mut statement = new();
        // In a function or type.
        let mut inner: Option<Statement<'_>> = None;
        let (mut depth, mut namespaces) = (0usize, 0usize);
        for token in Tokens(text) {
            let found = self.all.get(token);
            if found.is_some_and(|found| found.is_unbalanced) {
                return None;
            }
            match (&mut inner, token) {
                (Some(declared), ";" | "{" | "}") => {
                    if declared.is_variable() {
                        return None;
                    }
                    inner = None;
                }
                (Some(declared), token) => declared.add(token, found)?,
                (None, "static") if depth > 0 => inner = Some(new()),
                (None, token) => match found.filter(|found| depth > 0 && found.has_static) {
                    Some(found) if found.meaning == Meaning::Unknown => return None,
                    Some(found) if found.meaning == Meaning::Words => {
                        inner.insert(new()).add(token, Some(found))?;
                    }
                    _ => {}
                },
            }
            match token {
                // What is in it is outside of functions, too.
                "{" if depth == 0 && statement.is_scope() => {
                    namespaces += 1;
                    statement = new();
                }
                "{" => {
                    if depth == 0 && statement.is_function(true) {
                        statement = new();
                        statement.is_over = true;
                    }
                    depth += 1;
                    statement.has_body = true;
                }
                "}" if depth == 0 => {
                    namespaces = namespaces.checked_sub(1)?;
                }
                "}" => {
                    depth -= 1;
                    if depth == 0 && statement.is_over {
                        statement = new();
                    }
                }
                _ if depth > 0 => {}
                ";" => {
                    if statement.is_variable() {
                        return None;
                    }
                    statement = new();
                }
                token => statement.add(token, found)?,
            }
        }
        (depth == 0 && namespaces == 0).then_some(statement)
    }
}

/// What may stand behind the name of a variable, with parentheses.
const ATTRIBUTES: [&str; 7] = [
    "__attribute__",
    "__attribute",
    "_Alignas",
    "alignas",
    "__asm__",
    "__asm",
    "asm",
];

/// What is no type by itself, and no name.
const QUALIFIERS: [&str; 16] = [
    "global",
    "__global",
    "static",
    "extern",
    "volatile",
    "const",
    "restrict",
    "kernel",
    "__kernel",
    "inline",
    "__inline",
    "__inline__",
    "template",
    "_Atomic",
    "__extension__",
    "__volatile__",
];

/// Types that others may stand before: parentheses behind them are not of parameters.
const TYPES: [&str; 11] = [
    "int", "char", "short", "long", "double", "float", "signed", "unsigned", "bool", "half", "void",
];

/// What makes something else of the name behind it.
const KINDS: [&str; 5] = ["struct", "union", "enum", "class", "typename"];

/// What the end of a declaration looks like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tail {
    /// Not like that of a function.
    Other,
    /// It may be parameters.
    Perhaps,
    Parameters,
}

/// What is in front of a token.
#[derive(Clone, Copy)]
enum Before<'a> {
    Word(&'a str),
    /// Something with parentheses that belong to it.
    Arguments,
    /// A macro that stands for words.
    Macro,
    Other,
}

/// What has been seen of a declaration outside of braces.
struct Statement<'a> {
    words: Vec<&'a str>,
    before: Before<'a>,
    /// Words since the body of a type.
    behind: usize,
    /// How many parentheses and brackets are open.
    open: usize,
    tail: Tail,
    /// It declares several.
    is_list: bool,
    /// It is in a value.
    is_value: bool,
    has_value: bool,
    has_body: bool,
    has_pointer: bool,
    /// It is a constant, as far as it has been seen.
    is_fixed: bool,
    /// It has parentheses that are not understood.
    is_doubtful: bool,
    /// It is a function, whose body has begun.
    is_over: bool,
    has_classes: bool,
}

impl<'a> Statement<'a> {
    /// The most words that decide what a declaration is.
    const MOST: usize = 64;

    fn new(has_classes: bool) -> Self {
        Self {
            words: Vec::new(),
            before: Before::Other,
            behind: 0,
            open: 0,
            tail: Tail::Other,
            is_list: false,
            is_value: false,
            has_value: false,
            has_body: false,
            has_pointer: false,
            is_fixed: false,
            is_doubtful: false,
            is_over: false,
            has_classes,
        }
    }

    /// Takes a token, which may be a macro's name. None if that is a variable, or not understood.
    fn add(&mut self, token: &'a str, used: Option<&Macro>) -> Option<()> {
        let is_inside = self.open > 0 || self.is_value;
        if used.is_some_and(|used| is_inside && used.ends) {
            return None;
        }
        match token {
            "(" | "[" => {
                if token == "(" && !is_inside {
                    self.open_parentheses();
                }
                self.open += 1;
                return Some(());
            }
            ")" | "]" => self.open = self.open.saturating_sub(1),
            _ if self.open > 0 => {}
            "," => {
                self.is_list |= self.words.first() != Some(&"template");
                self.is_value = false;
                self.is_fixed &= !self.has_pointer;
            }
            _ if self.is_value => {}
            "=" => (self.is_value, self.has_value) = (true, true),
            // With one in angle brackets, what is constant is not known.
            "*" | ">" => self.point(),
            word if is_word(word) => return self.add_word(word, used),
            _ => {}
        }
        if self.open == 0 && !matches!((token, self.before), (")", Before::Arguments)) {
            self.before = Before::Other;
        }
        Some(())
    }

    fn add_word(&mut self, word: &'a str, used: Option<&Macro>) -> Option<()> {
        self.before = Before::Arguments;
        match used.map(|used| used.meaning) {
            Some(Meaning::Unknown) => return None,
            Some(Meaning::Nothing) => return Some(()),
            Some(Meaning::Whole) => {
                if self.is_begun() || self.is_doubtful {
                    return None;
                }
                *self = Self {
                    before: Before::Arguments,
                    ..Self::new(self.has_classes)
                };
                return Some(());
            }
            Some(Meaning::Head(tail)) => self.tail = tail,
            Some(Meaning::Words) if !self.is_begun() && used?.pastes => return None,
            Some(Meaning::Words) => (self.before, self.tail) = (Before::Macro, Tail::Other),
            None if ATTRIBUTES.contains(&word) => return Some(()),
            None => (self.before, self.tail) = (Before::Word(word), Tail::Other),
        }
        if used.is_some_and(|used| used.has_pointer) {
            self.point();
        }
        self.is_fixed |= used.is_some_and(|used| used.is_fixed)
            || ["const", "constexpr", "constant", "__constant"].contains(&word);
        self.behind += usize::from(self.has_body);
        if self.words.len() < Self::MOST {
            self.words.push(word);
        }
        Some(())
    }

    /// Whether it has a type or a name.
    fn is_begun(&self) -> bool {
        self.words.iter().any(|word| !QUALIFIERS.contains(word))
    }

    fn point(&mut self) {
        (self.has_pointer, self.is_fixed) = (true, false);
    }

    /// Parentheses begin outside of others and of values.
    fn open_parentheses(&mut self) {
        let [front @ .., last] = &*self.words else {
            // Of a type in another's place, or of a macro that is not known.
            if !matches!(self.before, Before::Arguments) {
                self.is_doubtful = true;
                self.point();
            }
            return;
        };
        let is_typed = front.iter().any(|word| !QUALIFIERS.contains(word))
            && !front.last().is_some_and(|word| KINDS.contains(word));
        let is_name = |word: &&str| {
            ![&QUALIFIERS[..], &TYPES, &KINDS]
                .iter()
                .any(|all| all.contains(word))
        };
        match self.before {
            Before::Arguments => {}
            Before::Macro => {
                self.before = Before::Arguments;
                if is_typed {
                    self.tail = Tail::Perhaps;
                }
            }
            Before::Word(word) if is_typed && is_name(&word) && *last == word => {
                self.tail = match self.has_classes {
                    true => Tail::Perhaps,
                    false => Tail::Parameters,
                };
            }
            _ => {
                self.tail = Tail::Other;
                self.is_doubtful = true;
                self.point();
            }
        }
    }

    fn has(&self, any: &[&str]) -> bool {
        self.words.iter().any(|word| any.contains(word))
    }

    fn is_empty(&self) -> bool {
        self.words.is_empty() && !self.has_value && !self.is_doubtful && self.open == 0
    }

    /// What a macro stands for that stands for this.
    fn meaning(&self) -> Meaning {
        let is_more = self.is_list || self.has_value || self.has_body;
        match self.tail {
            _ if is_more || self.open > 0 => Meaning::Unknown,
            Tail::Other if self.is_doubtful => Meaning::Unknown,
            Tail::Other => Meaning::Words,
            tail => Meaning::Head(tail),
        }
    }

    /// Whether what its braces enclose is at program scope.
    fn is_scope(&self) -> bool {
        self.has(&["namespace", "extern"]) && !self.has_value && self.tail == Tail::Other
    }

    fn is_function(&self, has_body: bool) -> bool {
        let is_one = match self.tail {
            Tail::Other => false,
            Tail::Perhaps => has_body,
            Tail::Parameters => true,
        };
        is_one && !self.is_list && !self.has_value && self.open == 0
    }

    /// Whether it declares a variable that is not constant, or may.
    fn is_variable(&self) -> bool {
        if self.is_over || self.is_empty() {
            return false;
        }
        if self.has(&["typedef", "sampler_t", "using"])
            || matches!(
                self.words.first(),
                Some(&("_Static_assert" | "static_assert"))
            )
        {
            return false;
        }
        if self.is_fixed || self.is_function(false) {
            return false;
        }
        let is_more = self.has_value || self.is_doubtful;
        match (self.has(&KINDS), self.has_body) {
            // A type by itself is none.
            (true, true) => self.behind > 0 || is_more,
            (true, false) => self.words.len() != 2 || is_more,
            (false, _) => true,
        }
    }
}

fn is_word(token: &str) -> bool {
    token.starts_with(is_of_word)
}

fn is_of_word(one: char) -> bool {
    one.is_ascii_alphanumeric() || one == '_'
}

/// A source without comments, and without what is in quotation marks.
fn literals_removed(text: &str) -> String {
    let text = text.replace("\\\r\n", " ").replace("\\\n", " ");
    let (mut kept, mut rest) = (String::with_capacity(text.len()), &*text);
    // Comments may begin before a line for the preprocessor and end behind it.
    while let Some(at) = rest.find(['/', '"', '\'']) {
        let (before, from) = rest.split_at(at);
        kept.push_str(before);
        let end = if from.starts_with("//") {
            kept.push(' ');
            from.find('\n')
        } else if let Some(comment) = from.strip_prefix("/*") {
            kept.push(' ');
            comment.find("*/").map(|end| end + 4)
        } else if from.starts_with('/') {
            kept.push('/');
            Some(1)
        } else if from.starts_with('\'') && before.ends_with(|one: char| one.is_ascii_hexdigit()) {
            // It separates digits.
            Some(1)
        } else {
            Some(literal(from))
        };
        rest = end.map_or("", |end| &from[end..]);
    }
    kept.push_str(rest);
    kept
}

/// The bytes of the literal that a text begins with: up to the next mark like its first one. It ends with its line.
fn literal(text: &str) -> usize {
    let mark = text.as_bytes()[0];
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'\n' => return at,
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            byte if byte == mark => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Words, and characters that are none.
struct Tokens<'a>(&'a str);

impl<'a> Iterator for Tokens<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let text = self.0.trim_start();
        let first = text.chars().next()?;
        let length = match is_of_word(first) {
            true => text.find(|one| !is_of_word(one)).unwrap_or(text.len()),
            false => first.len_utf8(),
        };
        let (token, rest) = text.split_at(length);
        self.0 = rest;
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_of_variables_are_found_outside_of_functions() {
        for text in [
            "global int c[(W + 1) * (H + 1)];",
            "global int c[sizeof(int4) / 4];",
            "int c[(4)];",
            "kernel void k(void) { static int c[(2)]; }",
            "_Alignas(16) int c;",
            "__typeof__(0) c; static _Atomic(int) d;",
            "int f(void), c;",
            "int c, f(int x);",
            "int (c);",
            "static unsigned int (c);",
            "global pair (c);",
            "struct pair (c);",
            "enum { ONE } (c);",
            "int (*p)[3];",
            "const int (*p)[3];",
            "const int a = 1, *p = 0;",
            "constant int *p;",
            "const int *const p = 0, *q;",
            "int c __attribute__((aligned(16)));",
            "kernel void k(void) {\n#ifdef A\n{\n#else\n{\n#endif\n} } int c;",
            "#define DECL(n) int n = 0;\nDECL(c)",
            "#define DECL(n) int n = 0;\nDECL(c) kernel void k(void) {}",
            "#define VAR int c = 0;\nVAR",
            "#define VAR int c\nVAR;",
            "#define VAR int c\n#define ALL VAR;\nALL kernel void k(void) {}",
            "#define LIST(X) X(a) X(b)\n#define DECL(n) int n;\nLIST(DECL)",
            "#define APPLY(m) m\n#define VAR int c;\nAPPLY(VAR) kernel void k(void) {}",
            "#define APPLY(n) VAR_##n\n#define VAR_1 int c;\nAPPLY(1) kernel void k(void) {}",
            "#define NAME(a) a##_count\nint NAME(c);",
            "#define ARRAY(n) [n]\nint c ARRAY(3);",
            "#define POINTER int *\nconst POINTER p;",
            "#define END ;\nconst int a = 1 END int c;",
            "#define CLOSE }\nkernel void k(void) { { CLOSE } int c;",
            "#define S static int c\nkernel void k(void) { S; }",
            "#define KEEP static\nkernel void k(void) { KEEP int c = 1; }",
            "#ifdef A\n#define VAR\n#else\n#define VAR int c;\n#endif\nVAR",
            "global int n = 40; kernel void k(global int *o) { *o = ++n; }",
            "kernel void k(global int *o) { *o = 1; }\nstatic __global float table[16];",
            "int plain;",
            "/* a */ global /* b */ int * where; // c",
            "struct pair { int a, b; } both;",
            "struct pair { int a, b; };\nstruct pair both = { 1, 2 };",
            "#define DECLARE(x) global int x\n#ifdef A\nglobal int hidden;\n#endif",
            "global atomic_int count = ATOMIC_VAR_INIT(0);",
            "const int fixed = 3; const global int *moving;",
            "global int unfinished",
            "namespace a { kernel void k(void) {} int hidden; }",
            "kernel void k(global int *o) { static global int n; *o = ++n; }",
            "int f(void) { if (1) { static int n = 3; return ++n; } return 0; }",
            "#define DECLARE(x) global int x\nDECLARE(n);",
            "# define DECLARE(x) __global x;\nDECLARE(int n)",
            "#define ONE \\\n  static int n = 0;\nONE",
            "#define COUNT(f) int f(void) { static int n; return ++n; }\nCOUNT(f)",
            "constant char quote = '\"'; global int n; constant char other = '\"';",
            "constant char quote = '\\''; global int n; constant char other = '\\'';",
            "constant char text[] = \"a\\\"\"; global int n; constant char other[] = \"\\\"\";",
            "constant int many = 1'000; global int n;",
        ] {
            assert!(are_in(&[text.to_owned()], false), "{text}");
        }
    }

    #[test]
    fn macros_of_one_text_are_known_in_the_others() {
        let macros = ["int n = 0;", ""].map(|body| format!("#define VAR {body}"));
        let text = "VAR kernel void k(void) {}".to_owned();
        for (define, expected) in macros.into_iter().zip([true, false]) {
            let texts = [text.clone(), define];
            assert_eq!(are_in(&texts, false), expected, "{texts:?}");
        }
    }

    #[test]
    fn a_name_with_parentheses_is_a_variable_in_c_plus_plus() {
        for (text, expected) in [("kernel void k(void) {}", false), ("pair c(1);", true)] {
            assert_eq!(are_in(&[text.to_owned()], true), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_variable_or_never_changes_is_not_found() {
        for text in [
            "kernel void k(global int *o, local float *t) { global int *p = o; int n = 1; *p = n; }",
            "constant int table[2] = { 1, 2 }; __constant float pi = 3.14f;",
            "const sampler_t s = CLK_FILTER_NEAREST; sampler_t t = CLK_ADDRESS_NONE;",
            "typedef struct { int a; } pair; struct forward; enum { ONE, TWO }; struct s { int x; };",
            "float f(float x); inline float f(float x) { return x; }",
            "__attribute__((reqd_work_group_size(64, 1, 1))) kernel void k(void) {}",
            "// global int n;\n/* int m; */\n#define N int m;\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable",
            "const float2 unit = (float2)(1, 0);",
            "kernel void k(void) { } ;",
            "kernel void k(void) { static constant int t[] = { 1 }; static const int u = 2; }",
            "#define GLOBAL __global\n#define POINTER __global const float *restrict\n#define FN static void",
            "#define FN static inline __attribute__((always_inline))\nFN int f(void) { return 1; }",
            "#define CAST(p) ((__global float *)(p))\n#define K(f) kernel void f(global int *o)\nK(f);K(f) {}",
            "#define DECLARE(x) global int x;\nkernel void k(void) {}",
            "#define NAME(a, b) a##b\nkernel void NAME(k, 1)(global int *o) { o[0] = 1; }",
            "#define KERNEL copy\n#define REAL float\nkernel void KERNEL(global REAL *o) {} REAL f(REAL x);",
            "#define DEFINE(f) int f(void) { return 1; }\n#define BOTH DEFINE(a) DEFINE(b)\nDEFINE(f) DEFINE(g); BOTH",
            "#ifdef A\n#define REAL double\n#else\n#define REAL float\n#endif\nREAL f(REAL x) { return x; }",
            "#define CONSTANT __constant\nCONSTANT float t[] = { 1, 2 };",
            "#define PURE __attribute__((pure))\nPURE int f(void); int g(void) __attribute__((pure));",
            "#define A B\n#define B A\nA f(int x) { return x; }",
            "#define FOR(n) for (int i = 0; i < n; i++)\nkernel void k(void) { FOR(3) { } }",
            "__kernel __attribute__((reqd_work_group_size(1, 1, 1)))\nvoid k(__global int *o) { *o = 1; }",
            "struct pair f(struct pair x) { return x; } extern int g(int x) { int y = x; return y; }",
            "_Static_assert(1, \"\"); struct __attribute__((packed)) s { int a; };",
            "constant char *constant names[] = { 0 }; const int *const p = 0;",
            "kernel void k(void) { char a = '{'; } constant char b[] = \"\\\"; global int n; \";",
            "",
        ] {
            assert!(!are_in(&[text.to_owned()], false), "{text}");
        }
    }
}

//! The `key=value,key=value` syntax of the command line.
//!
//! Each topic has a table of [`Key`]s, which defines how a key is written and which field of the JSON form it sets. An
//! option is converted to JSON and then to the type, so names and defaults are defined only once.
//!
//! - Options are separated by commas; a comma inside `[...]` or `"..."` does not separate.
//! - `""` inside quotes is a literal quote. A key without a value (`key=`) counts as absent.
//! - Switches are `on`, `off`, `true`, `false`. Sizes take a suffix K, M, G or T, or KB, KiB and so on (powers of
//!   1024).
//! - Lists are `[1-3,5]` or `[a,b]`, lists of pairs `[1@20,2@30]` or `[0@[1,2],1@[3]]`.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::nearest::nearest;

/// Maximum number of numbers in a list: more than any machine has of anything.
const MAX_LIST: usize = 4096;

/// Syntax of a value.
#[derive(Clone, Copy, Debug)]
pub enum ValueType {
    /// Text.
    Text,
    /// A number, decimal or hexadecimal with `0x`.
    Number,
    /// A number, or this word for that one.
    NumberOr(&'static str, u64),
    /// A size in bytes.
    Size,
    /// `on` or `off`.
    Switch,
    /// One of several words (in lower case), which may contain commas; the second item of each pair is the JSON form.
    Choice(&'static [(&'static str, &'static str)]),
    /// The bare key sets a field to this text: `off`, `null`.
    Word(&'static str),
    /// A list of numbers and ranges.
    Numbers,
    /// A list of texts.
    Texts,
    /// Names of switches in the object that is the field's value.
    Switches,
    /// Numbers separated by colons, for the fields of the object that is the field's value.
    Fields(&'static [&'static str]),
    /// `[a@b,...]`: a list of objects.
    Pairs(Part, Part),
}

/// Half of a pair: its field in the object, and its syntax.
#[derive(Clone, Copy, Debug)]
pub struct Part(pub &'static str, pub &'static ValueType);

/// A key of an option.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The name on the command line.
    pub name: &'static str,
    /// The field of the JSON form; levels are separated by dots. Empty if there is none.
    pub field: &'static str,
    /// Syntax of its value.
    pub kind: ValueType,
}

impl Key {
    /// A key with the same name as its field.
    pub const fn new(name: &'static str, kind: ValueType) -> Self {
        Self {
            name,
            field: name,
            kind,
        }
    }

    /// A key whose name differs from that of its field.
    pub const fn named(name: &'static str, field: &'static str, kind: ValueType) -> Self {
        Self { name, field, kind }
    }

    /// Whether `text` is one of the words of a choice.
    fn is_choice(&self, text: &str) -> bool {
        let ValueType::Choice(choices) = self.kind else {
            return false;
        };
        choices
            .iter()
            .any(|(word, _)| word.eq_ignore_ascii_case(text))
    }
}

/// Rate limits for bytes and operations.
pub const LIMITS: &[Key] = &[
    limit("bw_size", "rate_limiter_config.bandwidth.size"),
    limit(
        "bw_one_time_burst",
        "rate_limiter_config.bandwidth.one_time_burst",
    ),
    limit(
        "bw_refill_time",
        "rate_limiter_config.bandwidth.refill_time",
    ),
    limit("ops_size", "rate_limiter_config.ops.size"),
    limit(
        "ops_one_time_burst",
        "rate_limiter_config.ops.one_time_burst",
    ),
    limit("ops_refill_time", "rate_limiter_config.ops.refill_time"),
];

const fn limit(name: &'static str, field: &'static str) -> Key {
    Key::named(name, field, ValueType::Size)
}

/// The location keys that every PCI device has.
pub const PLACE: &[Key] = &[
    Key::new("id", ValueType::Text),
    Key::new("pci_segment", ValueType::Number),
    Key::new("pci_device_id", ValueType::Number),
];

/// Further location keys for passed-through devices.
pub const FUNCTION: &[Key] = &[
    Key::new("pci_function", ValueType::Number),
    Key::new("parent", ValueType::Text),
];

/// `iommu=on|off`.
pub const IOMMU: &[Key] = &[Key::new("iommu", ValueType::Switch)];

/// A command-line option that cannot be parsed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{option} {input}: {problem}")]
pub struct SyntaxError {
    option: &'static str,
    input: String,
    problem: SyntaxProblem,
}

impl SyntaxError {
    /// The problem, without the option and its value.
    pub fn problem(&self) -> &SyntaxProblem {
        &self.problem
    }
}

/// Formats a suggestion for a misspelled key.
fn meant(near: Option<&str>) -> String {
    near.map(|near| format!(" ({near}?)")).unwrap_or_default()
}

/// What is wrong.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SyntaxProblem {
    /// A quote or bracket is not closed.
    #[error("a quote or bracket has no partner")]
    Unbalanced,
    /// There is no such key.
    #[error("unknown key '{key}'{}; known are {known}", meant(near.as_deref()))]
    UnknownKey {
        /// The key as it was written.
        key: String,
        /// The most similar known key, if any.
        near: Option<String>,
        /// The known keys.
        known: String,
    },
    /// A key has no value.
    #[error("'{0}' needs a value: {0}=...")]
    NoValue(String),
    /// A key is given twice.
    #[error("'{0}' stands there twice")]
    Twice(&'static str),
    /// A value has the wrong syntax.
    #[error("{key}={value} is not {expected}")]
    Value {
        /// Its key.
        key: &'static str,
        /// The value as it was written.
        value: String,
        /// The expected syntax.
        expected: String,
    },
    /// A required key is missing.
    #[error("{0}= is missing")]
    Missing(&'static str),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// A parsed option, to be converted into a configuration.
#[derive(Debug)]
pub struct Parsed {
    option: &'static str,
    input: String,
    /// The JSON form.
    pub object: Map<String, Value>,
    aside: Vec<(&'static str, Value)>,
}

/// Parses `input`, the value of `option`, with the keys of all `tables`.
pub fn parse(
    option: &'static str,
    input: &str,
    tables: &[&'static [Key]],
) -> Result<Parsed, SyntaxError> {
    let mut parsed = Parsed {
        option,
        input: input.to_owned(),
        object: Map::new(),
        aside: Vec::new(),
    };
    match parsed.fill(input, tables) {
        Ok(()) => Ok(parsed),
        Err(problem) => Err(parsed.error(problem)),
    }
}

/// A placeholder that describes the syntax of a value in error messages.
fn placeholder(kind: &ValueType) -> String {
    match kind {
        ValueType::Text | ValueType::Word(_) => "TEXT".to_owned(),
        ValueType::Number => "N".to_owned(),
        ValueType::NumberOr(word, _) => format!("N|{word}"),
        ValueType::Size => "SIZE".to_owned(),
        ValueType::Switch => "on|off".to_owned(),
        ValueType::Choice(choices) => {
            let words: Vec<&str> = choices.iter().map(|choice| choice.0).collect();
            words.join("|")
        }
        ValueType::Numbers => "[N,N-N]".to_owned(),
        ValueType::Texts | ValueType::Switches => "[TEXT,TEXT]".to_owned(),
        ValueType::Fields(fields) => fields.join(":"),
        ValueType::Pairs(first, second) => {
            format!("[{}@{}]", placeholder(first.1), placeholder(second.1))
        }
    }
}

impl Parsed {
    fn fill(&mut self, input: &str, tables: &[&'static [Key]]) -> Result<(), SyntaxProblem> {
        let mut seen = Vec::new();
        let items = split(input)?;
        let mut items = items.iter().map(|item| item.trim()).peekable();
        while let Some(item) = items.next() {
            if item.is_empty() {
                continue;
            }
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name.trim(), Some(value.trim())),
                None => (item, None),
            };
            let key = tables.iter().copied().flatten().find(|key| {
                key.name == name && matches!(key.kind, ValueType::Word(_)) == value.is_none()
            });
            let Some(key) = key else {
                let keys = || tables.iter().copied().flatten();
                if value.is_none() && keys().any(|key| key.name == name) {
                    return Err(SyntaxProblem::NoValue(name.to_owned()));
                }
                let known: Vec<&str> = keys().map(|key| key.name).collect();
                return Err(SyntaxProblem::UnknownKey {
                    key: name.to_owned(),
                    near: nearest(name, known.iter().copied()).map(str::to_owned),
                    known: known.join(", "),
                });
            };
            if seen.contains(&key.name) {
                return Err(SyntaxProblem::Twice(key.name));
            }
            seen.push(key.name);
            if value == Some("") {
                continue;
            }
            let mut value = value.unwrap_or_default().to_owned();
            // The items that follow may belong to the value.
            while let Some(longer) = items.peek().map(|next| format!("{value},{next}"))
                && key.is_choice(&longer)
            {
                value = longer;
                items.next();
            }
            let value = convert(&key.kind, &value)?.map_err(|expected| SyntaxProblem::Value {
                key: key.name,
                value,
                expected,
            })?;
            if key.field.is_empty() {
                self.aside.push((key.name, value));
            } else {
                insert(&mut self.object, key.field, value);
            }
        }
        self.check_limits()
    }

    /// A limit needs both its size and its time; a limit of 0 is removed.
    fn check_limits(&mut self) -> Result<(), SyntaxProblem> {
        let Some(Value::Object(limits)) = self.object.get_mut("rate_limiter_config") else {
            return Ok(());
        };
        for (field, size_key, time_key) in [
            ("bandwidth", "bw_size", "bw_refill_time"),
            ("ops", "ops_size", "ops_refill_time"),
        ] {
            let Some(bucket) = limits.get(field) else {
                continue;
            };
            let size = bucket.get("size").ok_or(SyntaxProblem::Missing(size_key))?;
            let time = bucket
                .get("refill_time")
                .ok_or(SyntaxProblem::Missing(time_key))?;
            if size == 0 || time == 0 {
                limits.remove(field);
            }
        }
        if limits.is_empty() {
            self.object.remove("rate_limiter_config");
        }
        Ok(())
    }

    /// Creates an error about this option.
    pub fn error(&self, problem: SyntaxProblem) -> SyntaxError {
        SyntaxError {
            option: self.option,
            input: self.input.clone(),
            problem,
        }
    }

    /// Fails unless the key for `field` was given.
    pub fn require(&self, key: &'static str, field: &str) -> Result<(), SyntaxError> {
        if self.object.contains_key(field) {
            Ok(())
        } else {
            Err(self.error(SyntaxProblem::Missing(key)))
        }
    }

    /// Takes the value of a key that has no field; `None` if it is absent or has another type.
    pub fn take<T: DeserializeOwned>(&mut self, key: &str) -> Option<T> {
        let index = self.aside.iter().position(|(name, _)| *name == key)?;
        serde_json::from_value(self.aside.remove(index).1).ok()
    }

    /// Sets `field` to `value` if it is not set.
    pub fn default(&mut self, field: &str, value: impl Into<Value>) {
        self.object.entry(field).or_insert_with(|| value.into());
    }

    /// Converts the option into the configuration.
    pub fn build<T: DeserializeOwned>(self) -> Result<T, SyntaxError> {
        serde_json::from_value(Value::Object(self.object)).map_err(|error| SyntaxError {
            option: self.option,
            input: self.input,
            problem: SyntaxProblem::Other(error.to_string()),
        })
    }
}

/// Inserts a value into nested objects.
fn insert(object: &mut Map<String, Value>, field: &str, value: Value) {
    match field.split_once('.') {
        None => {
            object.insert(field.to_owned(), value);
        }
        Some((first, rest)) => {
            let inner = object
                .entry(first)
                .or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

/// Converts the value to JSON. The inner error tells what was expected.
fn convert(kind: &ValueType, text: &str) -> Result<Result<Value, String>, SyntaxProblem> {
    Ok(match kind {
        ValueType::Text => Ok(Value::from(unquote(text))),
        ValueType::Number => number(text).map(Value::from).ok_or("a number".to_owned()),
        ValueType::NumberOr(word, json) if text.eq_ignore_ascii_case(word) => {
            Ok(Value::from(*json))
        }
        ValueType::NumberOr(word, _) => number(text)
            .map(Value::from)
            .ok_or(format!("a number or {word}")),
        ValueType::Size => size(text)
            .map(Value::from)
            .ok_or("a size, such as 4096, 512M, 2G or 2GiB".to_owned()),
        ValueType::Switch => match text.to_ascii_lowercase().as_str() {
            "on" | "true" => Ok(Value::from(true)),
            "off" | "false" => Ok(Value::from(false)),
            _ => Err("on or off".to_owned()),
        },
        ValueType::Choice(choices) => choices
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(&unquote(text)))
            .map(|(_, json)| Value::from(*json))
            .ok_or_else(|| format!("one of {}", placeholder(kind).replace('|', ", "))),
        ValueType::Word(json) => Ok(Value::from(*json)),
        ValueType::Numbers => numbers(text).ok_or("a list of numbers, such as [0-3,5]".to_owned()),
        ValueType::Texts => {
            let items = split(in_brackets(text).unwrap_or(text))?;
            Ok(items.iter().map(|item| unquote(item.trim())).collect())
        }
        ValueType::Switches => {
            let items = split(in_brackets(text).unwrap_or(text))?;
            let switch = |item: &String| (unquote(item.trim()), Value::from(true));
            Ok(Value::Object(items.iter().map(switch).collect()))
        }
        ValueType::Fields(fields) => {
            let parts: Option<Vec<u64>> = text.split(':').map(number).collect();
            match parts {
                Some(parts) if parts.len() == fields.len() => {
                    let names = fields.iter().map(|field| (*field).to_owned());
                    Ok(Value::Object(
                        names.zip(parts.into_iter().map(Value::from)).collect(),
                    ))
                }
                _ => Err(format!("of the form {}", fields.join(":"))),
            }
        }
        ValueType::Pairs(first, second) => {
            let expected = || format!("a list of the form {}", placeholder(kind));
            let Some(inner) = in_brackets(text) else {
                return Ok(Err(expected()));
            };
            let mut list = Vec::new();
            for item in split(inner)? {
                let Some((left, right)) = split_pair(item.trim()) else {
                    return Ok(Err(expected()));
                };
                let (Ok(left), Ok(right)) = (convert(first.1, left)?, convert(second.1, right)?)
                else {
                    return Ok(Err(expected()));
                };
                list.push(Value::Object(Map::from_iter([
                    (first.0.to_owned(), left),
                    (second.0.to_owned(), right),
                ])));
            }
            Ok(Value::from(list))
        }
    })
}

/// Splits at commas outside quotes and brackets.
fn split(text: &str) -> Result<Vec<String>, SyntaxProblem> {
    let mut items = Vec::new();
    let mut item = String::new();
    let mut depth = 0_u32;
    let mut quoted = false;
    for character in text.chars() {
        match character {
            '"' => quoted = !quoted,
            '[' if !quoted => depth += 1,
            ']' if !quoted => depth = depth.checked_sub(1).ok_or(SyntaxProblem::Unbalanced)?,
            ',' if !quoted && depth == 0 => {
                items.push(std::mem::take(&mut item));
                continue;
            }
            _ => {}
        }
        item.push(character);
    }
    if quoted || depth > 0 {
        return Err(SyntaxProblem::Unbalanced);
    }
    items.push(item);
    Ok(items)
}

/// Splits at the first `@` outside quotes.
fn split_pair(text: &str) -> Option<(&str, &str)> {
    let mut quoted = false;
    let at = text.find(|character| {
        quoted ^= character == '"';
        character == '@' && !quoted
    })?;
    Some((&text[..at], &text[at + 1..]))
}

fn in_brackets(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']')
}

/// Removes the quotes of a text; two in a row inside quotes become one.
fn unquote(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut quoted = false;
    let mut closed = false;
    for character in text.chars() {
        if character == '"' {
            if closed && !quoted {
                result.push('"');
            }
            closed = quoted;
            quoted = !quoted;
        } else {
            closed = false;
            result.push(character);
        }
    }
    result
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Parses a number of bytes with a suffix K, M, G or T, which may also be written as KB or KiB. All suffixes are powers
/// of 1024, as is usual for memory and disks.
pub fn size(text: &str) -> Option<u64> {
    let is_hexadecimal = text.starts_with("0x");
    let prefix = text
        .strip_suffix("iB")
        .or_else(|| text.strip_suffix('B').filter(|_| !is_hexadecimal))
        .unwrap_or(text);
    let shift = match prefix.as_bytes().last()? {
        b'K' | b'k' => 10,
        b'M' | b'm' => 20,
        b'G' | b'g' => 30,
        b'T' | b't' => 40,
        // A bare B could be mistaken for another unit.
        _ => return number(text),
    };
    // The last byte is ASCII, so the text can be cut before it.
    number(&prefix[..prefix.len() - 1])?.checked_mul(1 << shift)
}

/// Formats a number of bytes for humans, in the largest unit that leaves no remainder.
pub fn write_size(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let unit = units
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    match unit {
        Some((shift, name)) => format!("{}{name}", bytes >> shift),
        None => format!("{bytes}"),
    }
}

fn numbers(text: &str) -> Option<Value> {
    let mut list = Vec::new();
    for range in in_brackets(text).unwrap_or(text).split(',') {
        let range = range.trim();
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last - first >= MAX_LIST as u64 {
            return None;
        }
        list.extend((first..=last).map(Value::from));
        if list.len() > MAX_LIST {
            return None;
        }
    }
    Some(Value::from(list))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const ALL: &[Key] = &[
        Key::new("text", ValueType::Text),
        Key::new("number", ValueType::Number),
        Key::new("size", ValueType::Size),
        Key::new("switch", ValueType::Switch),
        Key::new(
            "choice",
            ValueType::Choice(&[("one", "One"), ("two", "Two"), ("one,two", "Both")]),
        ),
        Key::named("null", "mode", ValueType::Word("Null")),
        Key::new("numbers", ValueType::Numbers),
        Key::new("texts", ValueType::Texts),
        Key::new("switches", ValueType::Switches),
        Key::new("fields", ValueType::Fields(&["a", "b"])),
        Key::new(
            "pairs",
            ValueType::Pairs(
                Part("k", &ValueType::Number),
                Part("v", &ValueType::Numbers),
            ),
        ),
    ];

    fn object(input: &str) -> Value {
        Value::Object(parse("--test", input, &[ALL, LIMITS]).unwrap().object)
    }

    fn problem(input: &str) -> String {
        parse("--test", input, &[ALL, LIMITS])
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn every_kind_of_value_is_understood() {
        assert_eq!(
            object("text=a b,number=0x10,size=2G,switch=on,choice=Two,null"),
            json!({"text":"a b","number":16,"size":2_147_483_648_u64,"switch":true,
                   "choice":"Two","mode":"Null"})
        );
        assert_eq!(
            object("numbers=[1-3,5],texts=[a,b],switches=[amx],fields=1:2,pairs=[0@[1,2],1@[4-5]]"),
            json!({"numbers":[1,2,3,5],"texts":["a","b"],"switches":{"amx":true},
                   "fields":{"a":1,"b":2},
                   "pairs":[{"k":0,"v":[1,2]},{"k":1,"v":[4,5]}]})
        );
        assert_eq!(object("numbers=7"), json!({"numbers":[7]}));
        assert_eq!(object(""), json!({}));
        assert_eq!(object("text=,number=1"), json!({"number":1}));
    }

    #[test]
    fn a_choice_may_have_a_comma() {
        assert_eq!(
            object("choice=one,number=1"),
            json!({"choice":"One","number":1})
        );
        for input in ["choice=One, two,number=1", r#"choice="one,two",number=1"#] {
            assert_eq!(
                object(input),
                json!({"choice":"Both","number":1}),
                "{input}"
            );
        }
        assert!(problem("choice=two,one").contains("unknown key 'one'"));
    }

    #[test]
    fn quotes_protect_commas_brackets_and_quotes() {
        assert_eq!(object(r#"text="a,b=[c""#), json!({"text":"a,b=[c"}));
        assert_eq!(object(r#"text="a""b""#), json!({"text":"a\"b"}));
        assert_eq!(object(r#"texts=["a,b",c]"#), json!({"texts":["a,b","c"]}));
    }

    #[test]
    fn errors_name_the_option_the_key_and_what_would_be_right() {
        assert_eq!(
            problem("switch=maybe"),
            "--test switch=maybe: switch=maybe is not on or off"
        );
        assert!(problem("colour=red").contains("unknown key 'colour'; known are text, number"));
        assert!(problem("swich=on").contains("unknown key 'swich' (switch?); known are"));
        assert!(problem("text").contains("'text' needs a value"));
        assert!(problem("number=1,number=2").contains("'number' stands there twice"));
        assert!(problem("choice=three").contains("one of one, two"));
        assert!(problem("size=99999999999G").contains("is not a size"));
        assert!(problem("fields=1:2:3").contains("of the form a:b"));
        assert!(problem("numbers=[3-1]").contains("list of numbers"));
        for input in ["text=\"a", "numbers=[1", "numbers=1]"] {
            assert!(problem(input).contains("no partner"), "{input}");
        }
    }

    #[test]
    fn a_list_is_bounded_whatever_range_is_asked_for() {
        assert!(problem("numbers=[0-18446744073709551615]").contains("list of numbers"));
        assert!(problem("numbers=[0-4095,0-4095]").contains("list of numbers"));
    }

    #[test]
    fn half_a_rate_limit_is_an_error_and_one_of_zero_is_none() {
        assert!(problem("bw_size=1M").contains("bw_refill_time= is missing"));
        assert!(problem("ops_refill_time=10").contains("ops_size= is missing"));
        assert_eq!(object("bw_size=0,bw_refill_time=100"), json!({}));
        assert_eq!(
            object("ops_size=5,ops_refill_time=10"),
            json!({"rate_limiter_config":{"ops":{"size":5,"refill_time":10}}})
        );
    }

    #[test]
    fn sizes_have_the_units_that_people_write() {
        for (text, bytes) in [
            ("1G", 1 << 30),
            ("1GB", 1 << 30),
            ("1GiB", 1 << 30),
            ("1g", 1 << 30),
            ("4KiB", 4096),
            ("3TB", 3 << 40),
            ("0x1b", 0x1b),
            ("0x10M", 16 << 20),
            ("512", 512),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in [
            "", "B", "iB", "1B", "1iB", "G", "GiB", "1Gi", "1Gb", "1 G", "1XB", "éiB",
        ] {
            assert_eq!(size(text), None, "{text}");
        }
        let written = [0, 512, 1536 << 20, 2 << 40].map(write_size);
        assert_eq!(written, ["0", "512", "1536M", "2T"]);
    }

    proptest! {
        #[test]
        fn no_input_makes_the_parser_panic(input in "\\PC*") {
            let _ = parse("--test", &input, &[ALL, LIMITS]);
        }

        #[test]
        fn no_input_that_looks_right_makes_the_parser_panic(
            input in "((text|number|size|numbers|texts|pairs|fields)=[\\[\\]\"@:0-9a-zKé,-]{0,12},?){0,4}",
        ) {
            let _ = parse("--test", &input, &[ALL, LIMITS]);
        }

        #[test]
        fn quoted_text_arrives_as_it_was(text in "\\PC*") {
            let quoted = format!("text=\"{}\"", text.replace('"', "\"\""));
            prop_assume!(!text.is_empty());
            prop_assert_eq!(object(&quoted), json!({"text": text}));
        }
    }
}

//! Request bodies: converts JSON to types, with errors that name the location.

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use vmm_config::{SHARED, nearest};

use super::{ApiError, Status, fields::fields};

/// Maximum number of unknown fields that an error names.
const MOST_UNKNOWN: usize = 8;

/// Alternative names of fields.
const ALIASES: &[&str] = &["serial_number", "uuid", "backend"];

/// Fields that are accepted with a value that requests nothing, although Gantry does not know them or omits them from
/// its own output. Any other unknown field is rejected.
pub const SAY_NOTHING: &[(&str, Nothing)] = &[
    // Omitted where it is 0.
    ("pci_function", Nothing::Zero),
    // Cloud Hypervisor's builds with a debugger stub include it in vm.info, which clients send back.
    ("gdb", Nothing::Off),
    // Kata Containers describes the serial port as a console.
    ("iommu", Nothing::Off),
    // ch-remote sends these with each disk, to leave the choice to the VMM.
    ("disable_io_uring", Nothing::Off),
    ("disable_aio", Nothing::Off),
    // The default of an accelerator, for either transport.
    ("shared", Nothing::Is(SHARED)),
];

/// A value that requests nothing, besides `null` and an empty list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Nothing {
    /// 0.
    Zero,
    /// `false`.
    Off,
    /// A number that equals the default.
    Is(u64),
}

impl Nothing {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Zero => *value == 0,
            Self::Off => *value == false,
            Self::Is(number) => *value == number,
        }
    }
}

/// Parses a body. An unknown field is an error, because the client that sent it expects an effect.
pub fn parse<T: DeserializeOwned + Serialize>(path: &str, body: &[u8]) -> Result<T, ApiError> {
    parse_with(
        path,
        body,
        |body| serde_json::from_slice(body),
        |parsed| serde_json::to_value(parsed),
    )
}

/// As [`parse`], for values that `read` and `write` convert from and to JSON.
pub fn parse_with<T>(
    path: &str,
    body: &[u8],
    read: impl FnOnce(&[u8]) -> serde_json::Result<T>,
    write: impl FnOnce(&T) -> serde_json::Result<Value>,
) -> Result<T, ApiError> {
    if body.is_empty() {
        let message = format!("{path} needs a JSON body");
        return Err(ApiError::message(Status::BadRequest, message));
    }
    let parsed = read(body).map_err(|error| {
        let place = place(body, offset(body, error.line(), error.column()));
        if let Some(slip) = slip(body, &place, &error.to_string()) {
            let message = format!("the body of {path} has unknown fields: {slip}");
            return ApiError::message(Status::BadRequest, message);
        }
        let place = if place.is_empty() {
            String::new()
        } else {
            format!(" at {place}")
        };
        ApiError::new(Status::BadRequest, &error)
            .context(format!("the body of {path} is not as it should be{place}"))
    })?;
    let mut unknown = Vec::new();
    // Both were parsed, or created from parsed values, so neither conversion fails.
    if let (Ok(sent), Ok(known)) = (serde_json::from_slice::<Value>(body), write(&parsed)) {
        if let Some(place) = list_for_object(&sent, &known) {
            let message = format!("the body of {path} has a list instead of an object{place}");
            return Err(ApiError::message(Status::BadRequest, message));
        }
        unknown_fields(&sent, &known, "", &mut unknown);
    }
    if !unknown.is_empty() {
        let message = format!(
            "the body of {path} has unknown fields: {}",
            unknown.join(", ")
        );
        return Err(ApiError::message(Status::BadRequest, message));
    }
    Ok(parsed)
}

/// Finds a list that was sent in place of an object and interpreted as its values in order, which could mean something
/// else in another version. Returns ` at PLACE`, or an empty text for the body itself.
fn list_for_object(sent: &Value, known: &Value) -> Option<String> {
    let within = |step: String, sent, known| {
        let place = list_for_object(sent, known)?;
        let inner = place.strip_prefix(" at ").unwrap_or_default();
        let dot = if inner.is_empty() || inner.starts_with('[') {
            ""
        } else {
            "."
        };
        Some(format!(" at {step}{dot}{inner}"))
    };
    match (sent, known) {
        (Value::Array(_), Value::Object(_)) => Some(String::new()),
        (Value::Object(sent), Value::Object(known)) => sent
            .iter()
            .find_map(|(name, value)| within(name.clone(), value, known.get(name)?)),
        (Value::Array(sent), Value::Array(known)) => {
            let mut pairs = sent.iter().zip(known).enumerate();
            pairs.find_map(|(index, (sent, known))| within(format!("[{index}]"), sent, known))
        }
        _ => None,
    }
}

/// Formats an unknown field for an error, with the most similar known field: one of the same object, or else any.
fn unknown(place: &str, name: &str, known: &Map<String, Value>) -> String {
    let beside = nearest(name, known.keys().map(String::as_str));
    match beside.or_else(|| nearest(name, fields())) {
        Some(near) => format!("{place} ({near}?)"),
        None => place.to_owned(),
    }
}

/// The field that was sent in place of a required one that serde reports as missing.
fn slip(body: &[u8], place: &str, error: &str) -> Option<String> {
    let missing = error.strip_prefix("missing field `")?.split('`').next()?;
    let body = serde_json::from_slice(body).ok()?;
    let sent = at(&body, place)?.as_object()?;
    let unknown = |name: &&str| !ALIASES.contains(name) && fields().all(|known| known != *name);
    let near = nearest(missing, sent.keys().map(String::as_str).filter(unknown))?;
    let dot = if place.is_empty() { "" } else { "." };
    Some(format!("{place}{dot}{near} ({missing}?)"))
}

/// The value at a location as returned by [`place`].
fn at<'a>(value: &'a Value, place: &str) -> Option<&'a Value> {
    let mut steps = place.split(['.', '[', ']']).filter(|step| !step.is_empty());
    steps.try_fold(value, |value, step| match value {
        Value::Array(list) => list.get(step.parse::<usize>().ok()?),
        value => value.get(step),
    })
}

/// Collects fields that were sent and are not part of the parsed result. `null` and empty lists request nothing.
fn unknown_fields(sent: &Value, known: &Value, place: &str, found: &mut Vec<String>) {
    match (sent, known) {
        (Value::Object(sent), Value::Object(known)) => {
            for (name, value) in sent {
                let place = if place.is_empty() {
                    name.clone()
                } else {
                    format!("{place}.{name}")
                };
                match known.get(name) {
                    Some(known) => unknown_fields(value, known, &place, found),
                    None if value.is_null() || *value == Value::Array(Vec::new()) => {}
                    None if ALIASES.contains(&name.as_str()) => {}
                    None if says_nothing(name, value) => {}
                    None if found.len() == MOST_UNKNOWN => {}
                    None => found.push(unknown(&place, name, known)),
                }
            }
        }
        (Value::Array(sent), Value::Array(known)) => {
            for (index, (sent, known)) in sent.iter().zip(known).enumerate() {
                unknown_fields(sent, known, &format!("{place}[{index}]"), found);
            }
        }
        _ => {}
    }
}

fn says_nothing(name: &str, value: &Value) -> bool {
    let mut fields = SAY_NOTHING.iter();
    fields.any(|(field, nothing)| *field == name && nothing.is(value))
}

/// Byte offset of a line and column, both counted from 1.
fn offset(body: &[u8], line: usize, column: usize) -> usize {
    let before: usize = body
        .split_inclusive(|byte| *byte == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    (before + column).min(body.len())
}

enum Level {
    Object { key: String },
    Array { index: usize },
}

/// Path of the value that ends at or encloses the offset `end`: `disks[1].readonly`.
fn place(body: &[u8], end: usize) -> String {
    let mut levels: Vec<Level> = Vec::new();
    let mut text: Option<String> = None;
    let mut escaped = false;
    let mut last = String::new();
    for &byte in &body[..end.min(body.len())] {
        if let Some(current) = &mut text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    last = text.take().unwrap_or_default();
                    continue;
                }
                _ => {}
            }
            current.push(char::from(byte));
            continue;
        }
        match byte {
            b'"' => text = Some(String::new()),
            b'{' => levels.push(Level::Object { key: String::new() }),
            b'[' => levels.push(Level::Array { index: 0 }),
            // The last byte read may close the value that the error is about.
            b'}' | b']' => drop(levels.pop()),
            b':' => {
                if let Some(Level::Object { key }) = levels.last_mut() {
                    *key = std::mem::take(&mut last);
                }
            }
            b',' => match levels.last_mut() {
                Some(Level::Array { index }) => *index += 1,
                Some(Level::Object { key }) => key.clear(),
                None => {}
            },
            _ => {}
        }
    }
    let mut place = String::new();
    for level in levels {
        match level {
            Level::Object { key } if key.is_empty() => {}
            Level::Object { key } => {
                if !place.is_empty() {
                    place.push('.');
                }
                place.push_str(&key);
            }
            Level::Array { index } => place.push_str(&format!("[{index}]")),
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use vmm_config::VmConfig;

    fn error(body: &str) -> String {
        parse::<VmConfig>("vm.create", body.as_bytes())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_list_is_no_object() {
        let text = error(r#"{"payload":{},"cpus":[1,1]}"#);
        assert!(
            text.ends_with("a list instead of an object at cpus"),
            "{text}"
        );
        let text = error(r#"{"payload":{},"numa":[{"guest_numa_id":0},[1]]}"#);
        assert!(
            text.contains("list instead of an object at numa[1]"),
            "{text}"
        );
        let sent = parse::<crate::VmResize>("vm.resize", b"[null, null, null]");
        let text = sent.unwrap_err().to_string();
        assert!(
            text.ends_with("vm.resize has a list instead of an object"),
            "{text}"
        );
    }

    #[test]
    fn an_error_says_where_the_body_is_wrong() {
        let text = error(r#"{"payload":{},"disks":[{"path":"a"},{"readonly":"no"}]}"#);
        assert!(
            text.contains("at disks[1].readonly: invalid type"),
            "{text}"
        );
        assert!(text.contains("line 1 column 52"), "{text}");
        let text = error("{\"payload\":{},\n\"cpus\":{\"boot_vcpus\":1}}");
        assert!(
            text.contains("at cpus: missing field `max_vcpus`"),
            "{text}"
        );
        assert!(error("").contains("needs a JSON body"));
        assert!(error("{").contains("EOF"));
        assert!(error("[]]").contains("invalid length 0") || error("[]]").contains("invalid"));
    }

    #[test]
    fn fields_that_mean_something_and_are_not_known_are_found() {
        let sent = serde_json::json!({"a": {"b": 1, "x": 2, "n": null}, "l": [{"y": 0}], "e": []});
        let known = serde_json::json!({"a": {"b": 1}, "l": [{"z": 1}]});
        let mut found = Vec::new();
        unknown_fields(&sent, &known, "", &mut found);
        assert_eq!(found, ["a.x", "l[0].y"]);
    }

    #[test]
    fn a_slip_is_refused_with_the_name_that_was_meant() {
        let text = error(r#"{"payload":{},"memry":{"size":1}}"#);
        assert!(text.contains("unknown fields: memry (memory?)"), "{text}");
        let text = error(r#"{"payload":{},"disks":[{"path":"a"},{"pth":"b","qwertz":1}]}"#);
        assert!(
            text.contains("disks[1].pth (path?), disks[1].qwertz"),
            "{text}"
        );
        let text = error(r#"{"payload":{},"cpus":{"boot_vcpu":1,"max_vcpus":1}}"#);
        assert!(
            text.ends_with("unknown fields: cpus.boot_vcpu (boot_vcpus?)"),
            "{text}"
        );
        let text =
            error(r#"{"payload":{},"fs":[{"tag":"a","socket":"/s"},{"tga":"b","socket":"/s"}]}"#);
        assert!(text.ends_with("fs[1].tga (tag?)"), "{text}");
        let text = error(r#"{"payloat":{}}"#);
        assert!(text.ends_with("payloat (payload?)"), "{text}");
        let many: String = (0..100).map(|n| format!(",\"unknown{n}\":1")).collect();
        let text = error(&format!("{{\"payload\":{{}}{many}}}"));
        assert_eq!(text.matches("unknown").count(), 1 + MOST_UNKNOWN, "{text}");
    }

    #[test]
    fn what_asks_for_nothing_is_let_through() {
        for body in [
            r#"{"payload":{},"gdb":false,"ivshmem":null,"zone_updates":[]}"#,
            r#"{"payload":{},"devices":[{"path":"/d","pci_function":0}]}"#,
            r#"{"payload":{},"serial":{"mode":"Off","iommu":false}}"#,
            r#"{"payload":{},"disks":[{"path":"/d","disable_aio":false,"disable_io_uring":false}]}"#,
            r#"{"payload":{},"accels":[{"shared":1048576}]}"#,
        ] {
            parse::<VmConfig>("vm.create", body.as_bytes()).unwrap();
        }
        for body in [
            r#"{"payload":{},"gdb":true}"#,
            r#"{"payload":{},"ivshmem":{"path":"/x"}}"#,
            r#"{"payload":{},"devices":[{"path":"/d","fd":3}]}"#,
            r#"{"payload":{},"devices":[{"path":"/d","shared":4096}]}"#,
        ] {
            assert!(error(body).contains("unknown fields"), "{body}");
        }
    }

    proptest! {
        #[test]
        fn no_body_makes_the_parser_panic(body in "[\\[\\]{}\",:a\\\\\n0-9]{0,64}") {
            let _ = parse::<VmConfig>("vm.create", body.as_bytes());
            let _ = place(body.as_bytes(), body.len());
        }
    }
}

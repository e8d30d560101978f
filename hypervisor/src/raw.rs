//! Serializes KVM's structures in a snapshot as base64 of their bytes. This is a fraction of the
//! length of a list of numbers, and takes a fraction of the time to read.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, Serializer, de::Error};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Serializes a structure.
pub fn serialize<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: IntoBytes + Immutable + ?Sized,
    S: Serializer,
{
    serializer.serialize_str(&BASE64_STANDARD.encode(value.as_bytes()))
}

/// Deserializes a structure. The input must have exactly its length.
pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromBytes,
    D: Deserializer<'de>,
{
    let bytes = decode(deserializer)?;
    T::read_from_bytes(&bytes).map_err(|_| wrong_length::<T, _>(&bytes))
}

fn decode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64_STANDARD.decode(text).map_err(D::Error::custom)
}

fn wrong_length<T, E: Error>(bytes: &[u8]) -> E {
    let (name, size) = (std::any::type_name::<T>(), size_of::<T>());
    E::custom(format!(
        "{} bytes are no {name} of {size} bytes",
        bytes.len()
    ))
}

/// The same for a sequence of structures.
pub mod list {
    use super::*;

    /// Serializes the structures.
    pub fn serialize<T, S>(values: &[T], serializer: S) -> Result<S::Ok, S::Error>
    where
        T: IntoBytes + Immutable,
        S: Serializer,
    {
        super::serialize(values, serializer)
    }

    /// Deserializes the structures.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
    where
        T: FromBytes,
        D: Deserializer<'de>,
    {
        let bytes = decode(deserializer)?;
        bytes
            .chunks(size_of::<T>())
            .map(|bytes| T::read_from_bytes(bytes).map_err(|_| wrong_length::<T, _>(bytes)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Saved {
        #[serde(with = "super")]
        one: u32,
        #[serde(with = "super::list")]
        many: Vec<u16>,
    }

    #[test]
    fn bytes_come_back_and_others_than_the_structure_has_are_refused() {
        let saved = Saved {
            one: 0x0403_0201,
            many: vec![1, 2],
        };
        let json = serde_json::to_value(&saved).unwrap();
        assert_eq!(json, json!({"one": "AQIDBA==", "many": "AQACAA=="}));
        assert_eq!(serde_json::from_value::<Saved>(json).unwrap(), saved);
        for broken in [
            json!({"one": "AQID", "many": ""}),
            json!({"one": "AQIDBA==", "many": "AQAC"}),
            json!({"one": "AQIDBA=", "many": ""}),
            json!({"one": [1, 2, 3, 4], "many": ""}),
        ] {
            assert!(serde_json::from_value::<Saved>(broken).is_err());
        }
    }
}

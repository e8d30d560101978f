//! Holds the API's description (`resources/openapi/gantry.yaml`) against three things: a table of
//! Cloud Hypervisor's paths and types, the routes of the server, and the types that it parses.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    any::type_name,
    collections::{BTreeMap, BTreeSet},
};

use saphyr::{LoadableYamlNode, Scalar, Yaml};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

const GANTRY: &str = include_str!("../../resources/openapi/gantry.yaml");

/// Paths, methods, statuses and properties of Cloud Hypervisor 54; facts only.
const CLOUD_HYPERVISOR: &str = include_str!("data/cloud_hypervisor_api.json");

/// Defaults of the description that the types do not fill in, because they depend on other
/// settings or stand for what an absent value means anyway.
const CONTEXTUAL: &[&str] = &[
    // Only for a tap that Gantry makes.
    "NetConfig.ip",
    "NetConfig.mask",
    // Only with vhost_user.
    "NetConfig.vhost_mode",
    // Only with transport Gate.
    "AccelConfig.shared",
    // Only with api Nvidia.
    "AccelConfig.pages",
];

/// Answers, and types that mean nothing unless all their properties are there, although the
/// description does not say so.
const STRICT: &[&str] = &[
    "CpuTopology",
    "DeviceNode",
    "VmCoredumpData",
    "MovedAccel",
    "VmInfo",
    "VmRemoveDevice",
    "VmResizeDisk",
    "VmResizeZone",
    "VmSnapshotConfig",
    "VmMoveAccel",
    "VmSwapDevice",
    "VmmPingResponse",
];

/// What only answers have: their numbers are whatever they are.
const ANSWERS: &[&str] = &[
    "InProgress",
    "MigrationInfo",
    "MovedAccel",
    "VmInfo",
    "VmmPingResponse",
];

fn json_of(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::Value(Scalar::Boolean(value)) => json!(value),
        Yaml::Value(Scalar::Integer(value)) => json!(value),
        // The largest number of 64 bits is beyond the parser's integers.
        Yaml::Value(Scalar::FloatingPoint(value)) => json!(value.into_inner() as u64),
        Yaml::Value(Scalar::String(value)) => json!(value),
        Yaml::Sequence(items) => items.iter().map(json_of).collect(),
        Yaml::Mapping(fields) => {
            let field = |(name, value): (&Yaml, &Yaml)| (key(name), json_of(value));
            Value::Object(fields.iter().map(field).collect())
        }
        other => panic!("unexpected in the description: {other:?}"),
    }
}

fn key(yaml: &Yaml) -> String {
    match yaml {
        Yaml::Value(Scalar::String(text)) => text.to_string(),
        other => panic!("unexpected as a key: {other:?}"),
    }
}

fn gantry() -> Value {
    json_of(&Yaml::load_from_str(GANTRY).unwrap()[0])
}

fn table() -> Value {
    serde_json::from_str(CLOUD_HYPERVISOR).unwrap()
}

fn object(value: &Value) -> &Map<String, Value> {
    value
        .as_object()
        .unwrap_or_else(|| panic!("no object: {value}"))
}

/// The last part of a reference.
fn target(reference: &Value) -> &str {
    reference.as_str().unwrap().rsplit('/').next().unwrap()
}

/// The name of the JSON type that a request body or response has.
fn content(value: &Value) -> Value {
    let reference = &value["content"]["application/json"]["schema"]["$ref"];
    match reference {
        Value::Null => Value::Null,
        reference => json!(target(reference)),
    }
}

/// A property as the table has it: without descriptions.
fn facts(property: &Value) -> Value {
    let mut facts = Map::new();
    for (name, value) in object(property) {
        match name.as_str() {
            "description" | "properties" | "required" => {}
            "$ref" => drop(facts.insert("ref".to_owned(), json!(target(value)))),
            "items" | "additionalProperties" if value.is_object() => {
                drop(facts.insert(name.clone(), self::facts(value)))
            }
            _ => drop(facts.insert(name.clone(), value.clone())),
        }
    }
    Value::Object(facts)
}

/// Keywords that say which values of its type a property may have.
const BOUNDS: &[&str] = &[
    "additionalProperties",
    "anyOf",
    "enum",
    "maxItems",
    "maxLength",
    "maximum",
    "minLength",
    "minimum",
    "multipleOf",
    "not",
    "pattern",
];

/// The same, without bounds that only this description states.
fn facts_beside(property: &Value, expected: &Value) -> Value {
    let mut facts = facts(property);
    let stated = facts.as_object_mut().unwrap();
    stated.retain(|name, _| !BOUNDS.contains(&name.as_str()) || expected.get(name).is_some());
    if let Some(items) = stated.get_mut("items") {
        *items = facts_beside(&property["items"], &expected["items"]);
    }
    facts
}

#[test]
fn every_path_of_cloud_hypervisor_is_described_with_its_statuses_and_bodies() {
    let (gantry, table) = (gantry(), table());
    for (path, expected) in object(&table["paths"]) {
        let method = expected["method"].as_str().unwrap();
        let operation = &gantry["paths"][path][method];
        assert!(operation.is_object(), "{method} {path} is missing");
        let body = expected.get("body").unwrap_or(&Value::Null);
        assert_eq!(content(&operation["requestBody"]), *body, "{path}");
        for (status, response) in object(&expected["responses"]) {
            let described = &operation["responses"][status];
            assert!(described.is_object(), "{path}: {status} is missing");
            if !response.is_null() {
                assert_eq!(content(described), *response, "{path}: {status}");
            }
        }
    }
}

/// Values of enumerations that only Gantry has.
const ADDED_VALUES: &[(&str, &str)] = &[("VmState", "Frozen")];

#[test]
fn every_property_of_cloud_hypervisor_is_described_with_its_type_and_default() {
    let (gantry, table) = (gantry(), table());
    for (name, expected) in object(&table["schemas"]) {
        let schema = &gantry["components"]["schemas"][name];
        assert!(schema.is_object(), "{name} is missing");
        let mut own = facts(expected);
        own.as_object_mut().unwrap().remove("required");
        for (_, value) in ADDED_VALUES.iter().filter(|(of, _)| of == name) {
            own["enum"].as_array_mut().unwrap().push(json!(value));
        }
        assert_eq!(facts_beside(schema, &own), own, "{name}");
        let required = |schema: &Value| -> BTreeSet<String> {
            let names = schema["required"].as_array();
            let text = |name: &Value| name.as_str().unwrap().to_owned();
            names.into_iter().flatten().map(text).collect()
        };
        // Some are missing there, although nothing can be done without them.
        let missing = required(expected).difference(&required(schema)).count();
        assert_eq!(missing, 0, "{name}");
        for (property, expected) in expected["properties"].as_object().into_iter().flatten() {
            let place = format!("{name}.{property}");
            let described = &schema["properties"][property];
            assert_eq!(facts_beside(described, expected), *expected, "{place}");
        }
    }
}

#[test]
fn the_description_has_exactly_the_paths_that_are_served() {
    let gantry = gantry();
    let described: BTreeSet<(String, String)> = object(&gantry["paths"])
        .iter()
        .flat_map(|(path, methods)| {
            let path = path.trim_start_matches('/').to_owned();
            let method = |method: &String| (method.to_uppercase(), path.clone());
            object(methods).keys().map(method).collect::<Vec<_>>()
        })
        .collect();
    let served: BTreeSet<(String, String)> = vmm_api::routes()
        .map(|route| (route.method.to_owned(), route.path.to_owned()))
        .collect();
    assert_eq!(described, served);
}

/// Makes values from the description.
struct Samples {
    schemas: Map<String, Value>,
}

impl Samples {
    fn new() -> Self {
        let gantry = gantry();
        Self {
            schemas: object(&gantry["components"]["schemas"]).clone(),
        }
    }

    /// A value of the property's type that is not its default.
    fn value(&self, name: &str, property: &Value) -> Value {
        if let Some(reference) = property.get("$ref") {
            return self.full(target(reference));
        }
        if let Some(choices) = property["enum"].as_array() {
            return choices.last().unwrap().clone();
        }
        match property["type"].as_str().unwrap() {
            "boolean" => json!(property["default"] != json!(true)),
            // Fits every width, and no default has it.
            "integer" => json!(7),
            "array" => json!([self.value(name, &property["items"])]),
            "object" => json!({}),
            _ => match name {
                "ip" | "mask" => json!("10.0.0.7"),
                _ => json!("text"),
            },
        }
    }

    /// All properties of an accelerator by one transport.
    fn accelerator(&self, transport: &str) -> Value {
        const GATE: [&str; 2] = ["server", "shared"];
        const RING: [&str; 9] = [
            "socket",
            "device",
            "weight",
            "latency",
            "memory",
            "window",
            "slices",
            "compiler_cache",
            "pages",
        ];
        let mut full = object(&self.all("AccelConfig")).clone();
        full.insert("transport".to_owned(), json!(transport));
        let others: &[&str] = if transport == "Ring" { &GATE } else { &RING };
        full.retain(|name, _| !others.contains(&name.as_str()));
        Value::Object(full)
    }

    /// All properties that go together, except older names of others.
    fn full(&self, name: &str) -> Value {
        match name {
            "AccelConfig" => self.accelerator("Gate"),
            _ => self.all(name),
        }
    }

    fn all(&self, name: &str) -> Value {
        let schema = &self.schemas[name];
        let Some(properties) = schema["properties"].as_object() else {
            return self.value(name, schema);
        };
        properties
            .iter()
            .filter(|(_, property)| property["deprecated"] != json!(true))
            .map(|(name, property)| (name.clone(), self.value(name, property)))
            .collect()
    }

    /// The required properties.
    fn minimal(&self, name: &str) -> Value {
        if STRICT.contains(&name) {
            return self.full(name);
        }
        let schema = &self.schemas[name];
        let properties = &schema["properties"];
        let mut minimal = Map::new();
        for required in schema["required"].as_array().into_iter().flatten() {
            let property = required.as_str().unwrap();
            let value = match properties[property].get("$ref") {
                Some(reference) if self.schemas[target(reference)]["properties"].is_object() => {
                    self.minimal(target(reference))
                }
                _ => self.value(property, &properties[property]),
            };
            minimal.insert(property.to_owned(), value);
        }
        Value::Object(minimal)
    }

    /// Numbers have bounds: what is within fits the type, and what is below is refused with it.
    fn check_bounds<T: DeserializeOwned>(&self, name: &str, full: &Value) {
        let properties = self.schemas[name]["properties"].as_object();
        for (property, described) in properties.into_iter().flatten() {
            let (described, in_list) = match &described["items"] {
                Value::Null => (described, false),
                items => (items, true),
            };
            if described["type"] != "integer" || ANSWERS.contains(&name) {
                continue;
            }
            let place = format!("{name}.{property}");
            let [smallest, largest] = match described["enum"].as_array() {
                Some(choices) => [choices.first(), choices.last()].map(|one| one.unwrap().clone()),
                None => ["minimum", "maximum"].map(|bound| described[bound].clone()),
            };
            assert!(
                smallest.is_number() && largest.is_number(),
                "{place} has no bounds"
            );
            let Some(place_in) = full.get(property).map(|_| property) else {
                // An older name of another, or the other transport's.
                continue;
            };
            let with = |number: Value| {
                let mut changed = full.clone();
                changed[place_in] = if in_list { json!([number]) } else { number };
                serde_json::from_value::<T>(changed)
            };
            for bound in [&smallest, &largest] {
                assert!(with(bound.clone()).is_ok(), "{place} may not be {bound}");
            }
            assert!(with(json!(-1)).is_err(), "{place} may be -1");
        }
    }

    /// Parsed and written again, everything that was described comes back.
    fn check<T: DeserializeOwned + Serialize>(&self, name: &str) {
        let again = |value: &Value| {
            let parsed: T = serde_json::from_value(value.clone())
                .unwrap_or_else(|error| panic!("{name}: {error}: {value}"));
            serde_json::to_value(parsed).unwrap()
        };
        if name == "AccelConfig" {
            let ring = self.accelerator("Ring");
            assert_eq!(again(&ring), ring, "{name} by rings");
        }
        let full = self.full(name);
        assert_eq!(again(&full), full, "{name} is not {}", type_name::<T>());
        self.check_bounds::<T>(name, &full);
        let Some(properties) = self.schemas[name]["properties"].as_object() else {
            return;
        };
        let minimal = again(&self.minimal(name));
        for (property, value) in object(&minimal) {
            assert!(
                properties.contains_key(property),
                "{name}.{property} is not described"
            );
            let default = &properties[property]["default"];
            let sent = self.minimal(name).get(property).is_some();
            assert!(
                default.is_null() || sent || default == value,
                "{name}.{property} is {value} by default, not {default}"
            );
        }
        for (property, described) in properties {
            let place = format!("{name}.{property}");
            let filled = minimal.get(property).is_some() || CONTEXTUAL.contains(&place.as_str());
            assert!(
                described["default"].is_null() || filled,
                "{place} has no default"
            );
        }
    }
}

type Check = fn(&Samples, &str);

/// The type behind each name.
fn types() -> BTreeMap<&'static str, Check> {
    BTreeMap::from([
        (
            "VmmPingResponse",
            Samples::check::<vmm_api::VmmPingResponse> as Check,
        ),
        ("VmInfo", Samples::check::<vmm_api::VmInfo>),
        ("VmState", Samples::check::<vmm_api::VmState>),
        ("VmCounters", Samples::check::<vmm_api::VmCounters>),
        ("DeviceNode", Samples::check::<vmm_api::DeviceNode>),
        ("InProgress", Samples::check::<vmm_api::InProgress>),
        ("Operation", Samples::check::<vmm_api::Operation>),
        ("PciDeviceInfo", Samples::check::<vmm_api::PciDeviceInfo>),
        ("VmResize", Samples::check::<vmm_api::VmResize>),
        ("VmResizeDisk", Samples::check::<vmm_api::VmResizeDisk>),
        ("VmResizeZone", Samples::check::<vmm_api::VmResizeZone>),
        ("VmRemoveDevice", Samples::check::<vmm_api::VmRemoveDevice>),
        ("VmSwapDevice", Samples::check::<vmm_api::VmSwapDevice>),
        ("VmMoveAccel", Samples::check::<vmm_api::VmMoveAccel>),
        ("MovedAccel", Samples::check::<vmm_api::MovedAccel>),
        ("AccelSeat", Samples::check::<vmm_api::AccelSeat>),
        (
            "VmSnapshotConfig",
            Samples::check::<vmm_api::VmSnapshotConfig>,
        ),
        ("VmCoredumpData", Samples::check::<vmm_api::VmCoredumpData>),
        ("RestoreConfig", Samples::check::<vmm_api::RestoreConfig>),
        (
            "RestoredAccelConfig",
            Samples::check::<vmm_api::RestoredAccel>,
        ),
        ("RestoredNetConfig", Samples::check::<vmm_api::RestoredNet>),
        (
            "MemoryRestoreMode",
            Samples::check::<vmm_api::MemoryRestoreMode>,
        ),
        ("RestoredClock", Samples::check::<vmm_api::RestoredClock>),
        (
            "VmMemoryZoneUpdateData",
            Samples::check::<vmm_api::VmMemoryZoneUpdate>,
        ),
        ("Error", Samples::check::<Vec<String>>),
        ("VmConfig", Samples::check::<vmm_config::VmConfig>),
        ("PayloadConfig", Samples::check::<vmm_config::PayloadConfig>),
        ("CpusConfig", Samples::check::<vmm_config::CpusConfig>),
        ("CpuAffinity", Samples::check::<vmm_config::CpuAffinity>),
        ("CpuFeatures", Samples::check::<vmm_config::CpuFeatures>),
        ("CpuTopology", Samples::check::<vmm_config::CpuTopology>),
        (
            "CoreSchedulingMode",
            Samples::check::<vmm_config::CoreScheduling>,
        ),
        ("MemoryConfig", Samples::check::<vmm_config::MemoryConfig>),
        (
            "MemoryZoneConfig",
            Samples::check::<vmm_config::MemoryZoneConfig>,
        ),
        (
            "PlatformConfig",
            Samples::check::<vmm_config::PlatformConfig>,
        ),
        (
            "PciRootPortConfig",
            Samples::check::<vmm_config::PciRootPortConfig>,
        ),
        (
            "PciSegmentConfig",
            Samples::check::<vmm_config::PciSegmentConfig>,
        ),
        ("NumaConfig", Samples::check::<vmm_config::NumaConfig>),
        ("NumaDistance", Samples::check::<vmm_config::NumaDistance>),
        ("DiskConfig", Samples::check::<vmm_config::DiskConfig>),
        ("ImageType", Samples::check::<vmm_config::ImageType>),
        (
            "LockGranularity",
            Samples::check::<vmm_config::LockGranularity>,
        ),
        (
            "VirtQueueAffinity",
            Samples::check::<vmm_config::VirtQueueAffinity>,
        ),
        (
            "RateLimitGroupConfig",
            Samples::check::<vmm_config::RateLimitGroupConfig>,
        ),
        (
            "RateLimiterConfig",
            Samples::check::<devices::rate_limiter::RateLimiterConfig>,
        ),
        (
            "TokenBucket",
            Samples::check::<devices::rate_limiter::TokenBucketConfig>,
        ),
        ("NetConfig", Samples::check::<vmm_config::NetConfig>),
        ("RngConfig", Samples::check::<vmm_config::RngConfig>),
        ("BalloonConfig", Samples::check::<vmm_config::BalloonConfig>),
        ("AccelApi", Samples::check::<vmm_config::AccelApi>),
        ("AccelConfig", Samples::check::<vmm_config::AccelConfig>),
        (
            "AccelTransport",
            Samples::check::<vmm_config::AccelTransport>,
        ),
        (
            "AccelServerConfig",
            Samples::check::<vmm_config::AccelServerConfig>,
        ),
        ("PmemConfig", Samples::check::<vmm_config::PmemConfig>),
        ("VsockConfig", Samples::check::<vmm_config::VsockConfig>),
        ("ConsoleMode", Samples::check::<vmm_config::ConsoleMode>),
        ("ConsoleConfig", Samples::check::<vmm_config::ConsoleConfig>),
        ("SerialConfig", Samples::check::<vmm_config::SerialConfig>),
        (
            "DebugConsoleConfig",
            Samples::check::<vmm_config::DebugConsoleConfig>,
        ),
        (
            "LandlockConfig",
            Samples::check::<vmm_config::LandlockConfig>,
        ),
        ("DeviceConfig", Samples::check::<vmm_config::DeviceConfig>),
        ("GpuConfig", Samples::check::<vmm_config::GpuConfig>),
        (
            "UserDeviceConfig",
            Samples::check::<vmm_config::UserDeviceConfig>,
        ),
        (
            "VmAddUserDevice",
            Samples::check::<vmm_config::UserDeviceConfig>,
        ),
        ("FsConfig", Samples::check::<vmm_config::FsConfig>),
        (
            "GenericVhostUserConfig",
            Samples::check::<vmm_config::GenericVhostUserConfig>,
        ),
        ("VdpaConfig", Samples::check::<vmm_config::VdpaConfig>),
        ("TpmConfig", Samples::check::<vmm_config::TpmConfig>),
        ("RtcConfig", Samples::check::<vmm_config::RtcConfig>),
        ("AccelMigration", Samples::check::<vmm_api::AccelMigration>),
        (
            "PassthroughMigration",
            Samples::check::<vmm_api::PassthroughMigration>,
        ),
        ("MigrationMode", Samples::check::<vmm_api::MigrationMode>),
        (
            "ReceiveMigrationData",
            Samples::check::<vmm_api::ReceiveMigration>,
        ),
        (
            "SendMigrationData",
            Samples::check::<vmm_api::SendMigration>,
        ),
        (
            "TimeoutStrategy",
            Samples::check::<vmm_api::TimeoutStrategy>,
        ),
        ("Rename", Samples::check::<vmm_api::Rename>),
        (
            "ResolveMigrationData",
            Samples::check::<vmm_api::ResolveMigration>,
        ),
        ("RunsAt", Samples::check::<vmm_api::RunsAt>),
        (
            "MigrationDirection",
            Samples::check::<vmm_migration::progress::Direction>,
        ),
        (
            "MigrationPhase",
            Samples::check::<vmm_migration::progress::Phase>,
        ),
        (
            "MigrationInfo",
            Samples::check::<vmm_migration::progress::MigrationInfo>,
        ),
    ])
}

#[test]
fn the_types_parse_and_write_what_is_described_with_the_same_defaults() {
    let samples = Samples::new();
    let types = types();
    for name in samples.schemas.keys() {
        match types.get(name.as_str()) {
            Some(check) => check(&samples, name),
            None => panic!("{name} has no type"),
        }
    }
}

#[test]
fn older_names_of_properties_are_understood() {
    let platform: vmm_config::PlatformConfig =
        serde_json::from_value(json!({"serial_number": "s", "uuid": "u"})).unwrap();
    assert_eq!(platform.system_serial_number.as_deref(), Some("s"));
    assert_eq!(platform.system_uuid.as_deref(), Some("u"));
}

#[test]
fn every_field_of_the_description_is_known_by_name_and_no_other() {
    fn collect(schema: &Value, found: &mut BTreeSet<String>) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            found.insert(name.clone());
            collect(property, found);
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(inner) = schema.get(inner) {
                collect(inner, found);
            }
        }
    }
    let mut described = BTreeSet::new();
    for schema in object(&gantry()["components"]["schemas"]).values() {
        collect(schema, &mut described);
    }
    let known: BTreeSet<String> = vmm_api::fields().map(str::to_owned).collect();
    assert_eq!(known, described);
}

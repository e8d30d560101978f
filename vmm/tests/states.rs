//! States that older versions wrote are read. A version that changes the format adds its state here.

#![allow(clippy::unwrap_used, reason = "tests")]

use vmm_machine::save::SavedMachine;
use vmm_snapshot::state_file::{OLDEST, VERSION, decode, encode};

/// A machine with a vCPU, a disk, a balloon, vsock and a source of randomness. Each is the same
/// without what later versions have added (4: the state of a guest's own VMs; 5: the time, and the
/// place of the generation ID; 6: what firmware has found).
const RECORDED: [(u32, &[u8]); 4] = [
    (3, include_bytes!("data/state-v3.json")),
    (4, include_bytes!("data/state-v4.json")),
    (5, include_bytes!("data/state-v5.json")),
    (6, include_bytes!("data/state-v6.json")),
];

#[test]
fn there_is_a_state_of_each_version_that_is_read() {
    let versions: Vec<_> = RECORDED.iter().map(|(version, _)| *version).collect();
    assert_eq!(versions, (OLDEST..=VERSION).collect::<Vec<_>>());
}

#[test]
fn each_of_them_has_all_of_its_machine() {
    for (version, bytes) in RECORDED {
        let head = format!("\"version\":{version},");
        assert!(String::from_utf8_lossy(&bytes[..80]).contains(&head));
        let state: SavedMachine = decode(bytes).unwrap();
        let again = encode(&state, VERSION).unwrap();
        let text = String::from_utf8_lossy(&again).into_owned();
        for part in [
            "_disk0",
            "_balloon",
            "_vsock",
            "_rng",
            "\"clock\"",
            "\"pit\"",
        ] {
            assert!(text.contains(part), "version {version}: {part}");
        }
        let of_firmware = [
            "\"bar\":\"Below4G\"",
            "\"firmware\":true",
            "\"written\":[[11,2]]",
        ];
        for part in of_firmware {
            assert_eq!(
                text.contains(part),
                version >= 6,
                "version {version}: {part}"
            );
        }
        // What is read is what this version would have written.
        let now: SavedMachine = decode(&again).unwrap();
        assert_eq!(encode(&now, VERSION).unwrap(), again, "version {version}");
    }
}

//! SMBIOS tables: the identification of the machine, its manufacturer and its owner (DSP0134 3.7).

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use crate::layout::{SMBIOS_END, SMBIOS_START};

const BIOS_INFORMATION: u8 = 0;
const SYSTEM_INFORMATION: u8 = 1;
const CHASSIS: u8 = 3;
const OEM_STRINGS: u8 = 11;
const END_OF_TABLE: u8 = 127;

/// Size of the 64-bit entry point (DSP0134, 5.2.2).
const ENTRY_POINT_SIZE: usize = 24;
/// Structures start at the next multiple of 16 after the entry point.
const STRUCTURES_START: u64 = SMBIOS_START + 32;
/// Strings are numbered from one by a byte.
const MAX_STRINGS: usize = 255;
/// Maximum length of a string: enough for any vendor's serial number, or a cloud-init location.
const MAX_STRING: usize = 4096;
/// Power-up by power switch.
const WAKE_UP_POWER_SWITCH: u8 = 6;
/// A chassis of type "other".
const CHASSIS_OTHER: u8 = 1;
const STATE_SAFE: u8 = 3;
/// BIOS characteristics: not supported.
const BIOS_CHARACTERISTICS: u64 = 1 << 3;
/// Second extension byte: this is a virtual machine.
const BIOS_VIRTUAL_MACHINE: u8 = 1 << 4;

/// Why the tables cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SmbiosError {
    /// A string is too long or cannot be represented.
    #[error(
        "the platform's {what} has {len} bytes or holds a zero byte; use at most {MAX_STRING} \
         bytes of text"
    )]
    String {
        /// Which one.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
    },
    /// There are too many OEM strings.
    #[error("{count} OEM strings are too many; use at most {MAX_STRINGS}")]
    TooManyStrings {
        /// How many there are.
        count: usize,
    },
    /// The tables need more room than there is.
    #[error(
        "the SMBIOS tables take {size} bytes, there is room for {}; use fewer or shorter OEM \
         strings", SMBIOS_END - STRUCTURES_START
    )]
    TooLarge {
        /// Size of the tables in bytes.
        size: usize,
    },
    /// Guest memory could not be written.
    #[error("cannot write SMBIOS tables to guest memory")]
    Write(#[source] GuestMemoryError),
}

/// What users can specify about the machine. Empty strings are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    /// Manufacturer; "Gantry" if not given.
    pub manufacturer: Option<String>,
    /// Product name; "Gantry virtual machine" if not given.
    pub product: Option<String>,
    /// Version of the product.
    pub version: Option<String>,
    /// Serial number of the system.
    pub serial_number: Option<String>,
    /// The sixteen bytes of the UUID in the order in which it is written; all zero (not present) if
    /// not given.
    pub uuid: Option<[u8; 16]>,
    /// Stock-keeping unit.
    pub sku: Option<String>,
    /// Product family.
    pub family: Option<String>,
    /// Asset tag of the chassis.
    pub chassis_asset_tag: Option<String>,
    /// Free text for software in the guest (systemd credentials, cloud-init).
    pub oem_strings: Vec<String>,
}

/// Writes the entry point, where a guest scans for it, and the tables after it.
///
/// # Errors
///
/// [`SmbiosError`] if a string is invalid, or the tables do not fit.
pub fn write(memory: &impl GuestMemoryBackend, platform: &Platform) -> Result<(), SmbiosError> {
    let structures = structures(platform)?;
    // Fits in 32 bits, since there is room for only 64 KiB.
    let entry = entry_point(structures.len() as u32);
    memory
        .write_slice(&structures, GuestAddress(STRUCTURES_START))
        .and_then(|()| memory.write_slice(&entry, GuestAddress(SMBIOS_START)))
        .map_err(SmbiosError::Write)
}

/// The SMBIOS 3 entry point for structures of `len` bytes.
fn entry_point(len: u32) -> [u8; ENTRY_POINT_SIZE] {
    let mut entry = [0; ENTRY_POINT_SIZE];
    entry[..5].copy_from_slice(b"_SM3_");
    entry[6] = ENTRY_POINT_SIZE as u8;
    // Version 3.2, revision 1 of the entry point.
    entry[7..11].copy_from_slice(&[3, 2, 0, 1]);
    entry[12..16].copy_from_slice(&len.to_le_bytes());
    entry[16..24].copy_from_slice(&STRUCTURES_START.to_le_bytes());
    let sum = entry.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    entry[5] = sum.wrapping_neg();
    entry
}

fn structures(platform: &Platform) -> Result<Vec<u8>, SmbiosError> {
    let mut tables = Tables::default();
    let mut strings = Strings::default();
    let vendor = strings.add("BIOS vendor", Some("Gantry"))?;
    let version = strings.add("BIOS version", Some(env!("CARGO_PKG_VERSION")))?;
    let mut bios = vec![vendor, version, 0, 0, 0, 0];
    bios.extend_from_slice(&BIOS_CHARACTERISTICS.to_le_bytes());
    // 0xff means that the release numbers of BIOS and controller are not given.
    bios.extend_from_slice(&[0, BIOS_VIRTUAL_MACHINE, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    tables.push(BIOS_INFORMATION, &bios, &strings);

    let manufacturer = Some(platform.manufacturer.as_deref().unwrap_or("Gantry"));
    let product = platform
        .product
        .as_deref()
        .unwrap_or("Gantry virtual machine");
    let mut strings = Strings::default();
    let mut system = vec![
        strings.add("manufacturer", manufacturer)?,
        strings.add("product name", Some(product))?,
        strings.add("version", platform.version.as_deref())?,
        strings.add("serial number", platform.serial_number.as_deref())?,
    ];
    system.extend_from_slice(&encode_uuid(platform.uuid.unwrap_or_default()));
    system.push(WAKE_UP_POWER_SWITCH);
    system.push(strings.add("SKU number", platform.sku.as_deref())?);
    system.push(strings.add("family", platform.family.as_deref())?);
    tables.push(SYSTEM_INFORMATION, &system, &strings);

    let mut strings = Strings::default();
    let chassis_manufacturer = strings.add("manufacturer", manufacturer)?;
    let tag = strings.add("chassis asset tag", platform.chassis_asset_tag.as_deref())?;
    let mut chassis = vec![chassis_manufacturer, CHASSIS_OTHER, 0, 0, tag];
    // Boot-up, power supply, thermal and security state; OEM data; height, power cords, contained
    // elements and the size of their records; SKU number.
    chassis.extend_from_slice(&[STATE_SAFE, STATE_SAFE, STATE_SAFE, 2]);
    chassis.extend_from_slice(&[0; 4 + 4 + 1]);
    tables.push(CHASSIS, &chassis, &strings);

    if !platform.oem_strings.is_empty() {
        let count = platform.oem_strings.len();
        let number = u8::try_from(count).map_err(|_| SmbiosError::TooManyStrings { count })?;
        let mut strings = Strings::default();
        for string in &platform.oem_strings {
            // An empty string would end the set; a blank preserves the numbers of the other
            // strings.
            let text = if string.is_empty() { " " } else { string };
            strings.add("OEM string", Some(text))?;
        }
        tables.push(OEM_STRINGS, &[number], &strings);
    }
    tables.push(END_OF_TABLE, &[], &Strings::default());
    let size = tables.bytes.len();
    if size as u64 > SMBIOS_END - STRUCTURES_START {
        return Err(SmbiosError::TooLarge { size });
    }
    Ok(tables.bytes)
}

/// SMBIOS stores the first three fields of a UUID in little-endian order (DSP0134, 7.2.1).
fn encode_uuid(written: [u8; 16]) -> [u8; 16] {
    let mut uuid = written;
    uuid[..4].reverse();
    uuid[4..6].reverse();
    uuid[6..8].reverse();
    uuid
}

/// The string set that follows a structure.
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    /// At most [`MAX_STRINGS`]: the length of the only variable list is checked first.
    count: u8,
}

impl Strings {
    /// Appends a string and returns its number; 0 if there is no string.
    fn add(&mut self, what: &'static str, string: Option<&str>) -> Result<u8, SmbiosError> {
        let Some(string) = string.filter(|string| !string.is_empty()) else {
            return Ok(0);
        };
        if string.len() > MAX_STRING || string.bytes().any(|byte| byte == 0) {
            return Err(SmbiosError::String {
                what,
                len: string.len(),
            });
        }
        self.bytes.extend_from_slice(string.as_bytes());
        self.bytes.push(0);
        self.count += 1;
        Ok(self.count)
    }
}

/// Consecutive structures. The handle of a structure is its index.
#[derive(Default)]
struct Tables {
    bytes: Vec<u8>,
    count: u16,
}

impl Tables {
    /// Appends a structure with these fields after its four-byte header.
    fn push(&mut self, kind: u8, fields: &[u8], strings: &Strings) {
        // The longest structure above has 27 bytes.
        self.bytes
            .extend_from_slice(&[kind, fields.len() as u8 + 4]);
        self.bytes.extend_from_slice(&self.count.to_le_bytes());
        self.bytes.extend_from_slice(fields);
        self.bytes.extend_from_slice(&strings.bytes);
        if strings.count == 0 {
            self.bytes.push(0);
        }
        self.bytes.push(0);
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::MIB;

    /// Kind, formatted part and strings of each structure.
    fn parse(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let (fields, rest) = bytes.split_at(usize::from(bytes[1]));
            let end = rest.windows(2).position(|pair| pair == [0, 0]).unwrap();
            let strings = rest[..end]
                .split(|byte| *byte == 0)
                .filter(|text| !text.is_empty())
                .map(|text| String::from_utf8(text.to_vec()).unwrap())
                .collect();
            found.push((fields[0], fields.to_vec(), strings));
            bytes = &rest[end + 2..];
        }
        found
    }

    #[test]
    fn a_guest_finds_what_the_user_said() {
        let memory =
            vm_memory::GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)])
                .unwrap();
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&(0..16).collect::<Vec<u8>>());
        let platform = Platform {
            serial_number: Some("S-1".into()),
            uuid: Some(uuid),
            oem_strings: vec!["one".into(), String::new(), "three".into()],
            chassis_asset_tag: Some("tag".into()),
            ..Default::default()
        };
        write(&memory, &platform).unwrap();
        let mut entry = [0; ENTRY_POINT_SIZE];
        memory
            .read_slice(&mut entry, GuestAddress(SMBIOS_START))
            .unwrap();
        assert!(entry.starts_with(b"_SM3_"));
        assert_eq!(entry.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
        let len = u32::from_le_bytes(entry[12..16].try_into().unwrap());
        let mut bytes = vec![0; len as usize];
        memory
            .read_slice(&mut bytes, GuestAddress(STRUCTURES_START))
            .unwrap();
        let found = parse(&bytes);
        let kinds: Vec<u8> = found.iter().map(|(kind, ..)| *kind).collect();
        assert_eq!(kinds, [0, 1, 3, 11, 127]);
        let lengths: Vec<usize> = found.iter().map(|(_, fields, _)| fields.len()).collect();
        assert_eq!(lengths, [26, 27, 22, 5, 4]);
        let (_, system, strings) = &found[1];
        assert_eq!(strings, &["Gantry", "Gantry virtual machine", "S-1"]);
        assert_eq!(system[7], 3);
        assert_eq!(
            system[8..24],
            [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15]
        );
        assert_eq!(found[2].2, ["Gantry", "tag"]);
        assert_eq!(found[3].2, ["one", " ", "three"]);
    }

    #[test]
    fn unfit_strings_are_refused() {
        let fails = |platform: Platform| structures(&platform).unwrap_err();
        let zero = Platform {
            sku: Some("a\0b".into()),
            ..Default::default()
        };
        assert!(matches!(
            fails(zero),
            SmbiosError::String {
                what: "SKU number",
                len: 3
            }
        ));
        let many = Platform {
            oem_strings: vec!["x".into(); 256],
            ..Default::default()
        };
        assert!(matches!(
            fails(many),
            SmbiosError::TooManyStrings { count: 256 }
        ));
        let large = Platform {
            oem_strings: vec!["x".repeat(4096); 17],
            ..Default::default()
        };
        assert!(matches!(fails(large), SmbiosError::TooLarge { .. }));
    }
}

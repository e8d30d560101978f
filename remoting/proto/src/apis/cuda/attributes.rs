//! Attributes of cuBLASLt's descriptors: of what is computed, of a matrix's layout, of what is preferred.
//!
//! Descriptors are kept in the guest and travel with what uses them: which attributes they have, as a bit
//! for each of a table, then their values in its order.

use alloc::vec::Vec;

use crate::wire::codec::{named, with};

/// An attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Its number in the API.
    pub number: u32,
    /// Bytes of its value.
    pub size: usize,
    /// Whether that is an address on the device.
    pub is_address: bool,
}

const fn value(number: u32, size: usize) -> Attribute {
    let is_address = false;
    Attribute {
        number,
        size,
        is_address,
    }
}

const fn address(number: u32) -> Attribute {
    Attribute {
        number,
        size: 8,
        is_address: true,
    }
}

/// A kind of descriptor: its attributes.
pub type Table = &'static [Attribute];

/// `cublasLtMatmulDescAttributes_t`, but for the emulation's descriptor.
pub const OPERATION: Table = &[
    value(0, 4), // compute type
    value(1, 4), // scale type
    value(2, 4), // pointer mode
    value(3, 4), // transposed: A
    value(4, 4),
    value(5, 4),
    value(6, 4), // fill mode
    value(7, 4), // epilogue
    address(8),  // bias
    value(10, 8),
    address(11), // the epilogue's other output
    value(12, 8),
    value(13, 8),
    value(14, 8), // stride of alpha
    value(15, 4), // multiprocessors
    address(17),  // scales of A, B, C, D
    address(18),
    address(19),
    address(20),
    address(21), // largest of D
    value(22, 4),
    address(23),
    address(24),
    value(25, 1), // fast accumulation
    value(26, 4), // type of the bias
    value(31, 4), // modes of scales
    value(32, 4),
    value(33, 4),
    value(34, 4),
    value(35, 4),
    address(36),
    value(37, 4),
];

/// `cublasLtMatrixLayoutAttribute_t`
pub const LAYOUT: Table = &[
    value(0, 4), // type
    value(1, 4), // order
    value(2, 8), // rows
    value(3, 8), // columns
    value(4, 8), // leading dimension
    value(5, 4), // batch
    value(6, 8), // stride
    value(7, 8), // plane
    value(8, 4), // batch mode
];

/// `cublasLtMatmulPreferenceAttributes_t`
pub const PREFERENCE: Table = &[
    value(0, 4), // search mode
    value(1, 8), // workspace
    value(3, 4), // reduction schemes
    value(5, 4), // alignments of A, B, C, D
    value(6, 4),
    value(7, 4),
    value(8, 4),
    value(9, 4),  // waves
    value(12, 8), // implementations
];

const fn table(mut hash: u64, table: Table) -> u64 {
    let mut at = 0;
    while at < table.len() {
        hash = with(with(hash, table[at].number as u64), table[at].size as u64);
        at += 1;
    }
    hash
}

/// Hash of all tables.
pub const FINGERPRINT: u64 = table(
    table(table(named("attributes"), OPERATION), LAYOUT),
    PREFERENCE,
);

/// Attributes that are present, in order, each with its value. None of bytes that are no attributes.
pub fn read(table: Table, bytes: &[u8]) -> Option<Vec<(u32, &[u8])>> {
    let (mask, mut rest) = bytes.split_first_chunk::<8>()?;
    let mask = u64::from_le_bytes(*mask);
    if mask.checked_shr(table.len() as u32) != Some(0) {
        return None;
    }
    let mut found = Vec::with_capacity(mask.count_ones() as usize);
    for (bit, attribute) in table.iter().enumerate() {
        if mask >> bit & 1 == 1 {
            let (value, left) = rest.split_at_checked(attribute.size)?;
            found.push((attribute.number, value));
            rest = left;
        }
    }
    rest.is_empty().then_some(found)
}

/// Hash of attributes as they travel, as [`Descriptor::likeness`] is of a descriptor.
pub fn likeness(table: Table, bytes: &[u8], hash: u64) -> u64 {
    let Some(found) = read(table, bytes) else {
        return with(hash, bytes.len() as u64);
    };
    found.iter().fold(hash, |hash, (number, value)| {
        let is_address = table
            .iter()
            .any(|one| one.number == *number && one.is_address);
        let mut word = [0; 8];
        word[..value.len()].copy_from_slice(value);
        let word = u64::from_le_bytes(word);
        let part = if is_address { word % 256 } else { word };
        with(with(hash, u64::from(*number)), part)
    })
}

/// A descriptor in memory of a program's, which the API says the size of: a bit for each attribute that
/// is there, and a place for each.
#[derive(Debug)]
pub struct Descriptor<'a> {
    table: Table,
    bytes: &'a mut [u8],
}

impl<'a> Descriptor<'a> {
    /// A descriptor without attributes, in memory that has room for all.
    pub fn empty(table: Table, bytes: &'a mut [u8]) -> Self {
        bytes.fill(0);
        Self::at(table, bytes)
    }

    /// One that is there.
    pub fn at(table: Table, bytes: &'a mut [u8]) -> Self {
        debug_assert!(bytes.len() >= 8 + table.iter().map(|one| one.size).sum::<usize>());
        Self { table, bytes }
    }

    fn mask(&self) -> u64 {
        let mask = self.bytes.first_chunk::<8>();
        mask.map_or(0, |mask| u64::from_le_bytes(*mask))
    }

    /// Bit and place of an attribute.
    fn place(&self, number: u32) -> Option<(usize, core::ops::Range<usize>)> {
        let bit = self.table.iter().position(|one| one.number == number)?;
        let start = 8 + self.table[..bit].iter().map(|one| one.size).sum::<usize>();
        Some((bit, start..start + self.table[bit].size))
    }

    /// Bytes of an attribute; none if there is no such.
    pub fn size(&self, number: u32) -> Option<usize> {
        self.place(number).map(|(_, place)| place.len())
    }

    /// Sets an attribute. False if there is none of this number and size.
    pub fn set(&mut self, number: u32, value: &[u8]) -> bool {
        let Some((bit, place)) = self.place(number) else {
            return false;
        };
        let mask = self.mask() | 1 << bit;
        let Some(to) = self
            .bytes
            .get_mut(place)
            .filter(|to| to.len() == value.len())
        else {
            return false;
        };
        to.copy_from_slice(value);
        self.bytes[..8].copy_from_slice(&mask.to_le_bytes());
        true
    }

    /// An attribute's value, if it has been set.
    pub fn get(&self, number: u32) -> Option<&[u8]> {
        let (bit, place) = self.place(number)?;
        if self.mask() >> bit & 1 == 0 {
            return None;
        }
        self.bytes.get(place)
    }

    /// The same as a number of 32 bits.
    pub fn number(&self, attribute: u32) -> Option<u32> {
        let bytes = self.get(attribute)?.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*bytes))
    }

    /// As it travels.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mask = self.mask();
        out.extend_from_slice(&mask.to_le_bytes());
        let mut start = 8;
        for (bit, attribute) in self.table.iter().enumerate() {
            if mask >> bit & 1 == 1 {
                out.extend_from_slice(self.bytes.get(start..start + attribute.size).unwrap_or(&[]));
            }
            start += attribute.size;
        }
    }

    /// Hash of all values but addresses, of which the alignment counts: what decides whether it is
    /// acceptable.
    pub fn likeness(&self, mut hash: u64) -> u64 {
        let mask = self.mask();
        hash = with(hash, mask);
        let mut start = 8;
        for (bit, attribute) in self.table.iter().enumerate() {
            if mask >> bit & 1 == 1 {
                let mut word = [0; 8];
                let value = self.bytes.get(start..start + attribute.size).unwrap_or(&[]);
                word[..value.len()].copy_from_slice(value);
                let word = u64::from_le_bytes(word);
                hash = with(
                    hash,
                    if attribute.is_address {
                        word % 256
                    } else {
                        word
                    },
                );
            }
            start += attribute.size;
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_have_room_where_programs_keep_them() {
        use cuda_definition::cublaslt::types::*;
        let room = |table: Table| 8 + table.iter().map(|one| one.size).sum::<usize>();
        assert!(room(OPERATION) <= size_of::<cublasLtMatmulDescOpaque_t>());
        assert!(room(LAYOUT) <= size_of::<cublasLtMatrixLayoutOpaque_t>());
        assert!(room(PREFERENCE) <= size_of::<cublasLtMatmulPreferenceOpaque_t>());
    }

    #[test]
    fn what_has_been_set_arrives_and_nothing_else() {
        let mut memory = [0xff; 256];
        let mut descriptor = Descriptor::empty(OPERATION, &mut memory);
        assert!(descriptor.set(0, &68u32.to_le_bytes()) && descriptor.set(25, &[1]));
        assert!(descriptor.set(37, &2u32.to_le_bytes()));
        assert!(!descriptor.set(25, &[1, 0]) && !descriptor.set(38, &[0; 8]));
        assert_eq!(descriptor.number(0), Some(68));
        assert_eq!(descriptor.get(8), None);
        let mut bytes = Vec::new();
        descriptor.write(&mut bytes);
        let found = read(OPERATION, &bytes).unwrap();
        let numbers: Vec<u32> = found.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [0, 25, 37]);
        assert_eq!(found[1].1, [1]);
    }

    #[test]
    fn bytes_that_are_no_attributes_are_refused() {
        assert_eq!(read(LAYOUT, &[]), None);
        assert_eq!(read(LAYOUT, &(1u64 << 9).to_le_bytes()), None);
        assert_eq!(read(LAYOUT, &u64::MAX.to_le_bytes()), None);
        assert_eq!(read(LAYOUT, &1u64.to_le_bytes()), None);
        assert_eq!(read(LAYOUT, &[0; 9]), None);
        assert_eq!(read(LAYOUT, &[0; 8]), Some(Vec::new()));
    }

    #[test]
    fn likeness_is_of_shapes_and_not_of_addresses() {
        let likeness = |bias: u64, epilogue: u32| {
            let mut memory = [0; 256];
            let mut descriptor = Descriptor::empty(OPERATION, &mut memory);
            descriptor.set(8, &bias.to_le_bytes());
            descriptor.set(7, &epilogue.to_le_bytes());
            descriptor.likeness(1)
        };
        assert_eq!(likeness(0x1000, 4), likeness(0x2000, 4));
        assert_ne!(likeness(0x1000, 4), likeness(0x1004, 4));
        assert_ne!(likeness(0x1000, 4), likeness(0x1000, 5));
    }
}

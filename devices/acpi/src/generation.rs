//! The VM generation ID: tells the guest that it is a copy of a saved machine.
//!
//! Two guests that are restored from one snapshot have the same random pool. The guest learns of
//! that by a value that differs in each copy, in memory that this device names, and by a
//! notification (Microsoft, "Virtual Machine Generation ID", 2012). Linux since 5.18 reseeds its
//! random number generator then (drivers/virt/vmgenid.c).

use acpi_tables::{Aml, AmlSink, aml};

/// Size of the value in bytes.
pub const GENERATION_ID_SIZE: usize = 16;

/// The device's name in the namespace.
pub(crate) const PATH: &str = "\\_SB_.VGEN";

/// Describes the value's address to the guest.
#[derive(Clone, Copy, Debug)]
pub struct GenerationId {
    /// Guest-physical address of the value, a multiple of 8, in memory that the guest does not use
    /// otherwise.
    pub address: u64,
}

impl Aml for GenerationId {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        // The halves of the address.
        let (low, high) = (self.address as u32, (self.address >> 32) as u32);
        aml::Device::new(
            PATH.into(),
            vec![
                &aml::Name::new("_HID".into(), &"GNTYVMID"),
                // What drivers look for. A name of the specification, longer than others.
                &aml::Name::new("_CID".into(), &"VM_Gen_Counter"),
                &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
                &aml::Name::new("ADDR".into(), &aml::Package::new(vec![&low, &high])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_names_both_halves_of_the_address() {
        let mut bytes = Vec::new();
        let address = 0x1_2345_6788;
        GenerationId { address }.to_aml_bytes(&mut bytes);
        let contains = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(contains(b"\x08_HID\x0dGNTYVMID\0"));
        assert!(contains(b"\x08_CID\x0dVM_Gen_Counter\0"));
        // A package of two: a double word, and the constant 1.
        assert!(contains(b"\x08ADDR\x12\x08\x02\x0c\x88\x67\x45\x23\x01"));
    }
}

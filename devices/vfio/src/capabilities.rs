//! Selects the capabilities of a device that the guest sees.
//!
//! Each keeps its offset, because some vendors' drivers expect theirs at a fixed offset.
//! Capabilities that are meaningful only on the host's bus are omitted.

use pci::{ConfigError, ConfigSpace};

/// Power management (PCI PM 1.2).
const POWER_MANAGEMENT: u8 = 0x01;
/// Message-signalled interrupts (PCI 3.0, 6.8.1).
const MSI: u8 = 0x05;
/// Vendor specific.
const VENDOR: u8 = 0x09;
/// PCI Express (7.5.3).
const EXPRESS: u8 = 0x10;
/// Extended message-signalled interrupts (PCI 3.0, 6.8.2).
const MSIX: u8 = 0x11;
/// SATA.
const SATA: u8 = 0x12;

const FIRST: usize = 0x40;
const HEADER_END: usize = 0x100;

/// A capability in the device's list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CapabilityKind {
    /// Emulated: the guest's messages differ from the device's.
    Msi,
    /// Emulated.
    Msix,
    /// Emulated: the device stays in D0.
    Power,
    /// Passed through; resets through it are intercepted.
    Express,
    /// Passed through: the guest reads and writes the device's own registers. vfio-pci protects
    /// those that matter to the host.
    Through,
}

/// A capability that the guest sees.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Capability {
    /// Its ID.
    pub id: u8,
    /// How it is handled.
    pub kind: CapabilityKind,
    /// Its offset.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// The capabilities that the guest sees, from the first 256 bytes of the device's configuration
/// space.
pub fn visible(config: &[u8; HEADER_END]) -> Vec<Capability> {
    let mut found: Vec<(u8, usize)> = Vec::new();
    let mut at = usize::from(config[0x34] & !3);
    // A cyclic list ends where the cycle closes.
    while (FIRST..HEADER_END).contains(&at) && !found.iter().any(|(_, seen)| *seen == at) {
        found.push((config[at], at));
        at = usize::from(config[at + 1] & !3);
    }
    let end_of = |at: usize| {
        let behind = found.iter().map(|(_, other)| *other);
        behind
            .filter(|other| *other > at)
            .min()
            .unwrap_or(HEADER_END)
    };
    found
        .iter()
        .filter_map(|&(id, at)| {
            let room = end_of(at) - at;
            let word = |offset: usize| {
                let at = at + offset;
                let bytes = [config.get(at).copied(), config.get(at + 1).copied()];
                u16::from_le_bytes(bytes.map(Option::unwrap_or_default))
            };
            let (kind, len) = match id {
                MSI if word(2) & 0x80 != 0 => (CapabilityKind::Msi, 14),
                MSI => (CapabilityKind::Msi, 10),
                MSIX => (CapabilityKind::Msix, 12),
                POWER_MANAGEMENT => (CapabilityKind::Power, 8),
                SATA => (CapabilityKind::Through, 8),
                EXPRESS => (CapabilityKind::Express, 0x3c),
                VENDOR => (CapabilityKind::Through, usize::from(word(2) & 0xff).max(3)),
                _ => return None,
            };
            Some(Capability {
                id,
                kind,
                at,
                len: len.min(room),
            })
        })
        .collect()
}

/// Adds a passed-through capability to the list. Its registers are not writable in `config`,
/// because writes go to the device.
pub fn place_through(
    config: &mut ConfigSpace,
    physical: &[u8; HEADER_END],
    capability: Capability,
) -> Result<(), ConfigError> {
    let Capability { id, at, len, .. } = capability;
    config.place_capability(at, id, &physical[at + 2..at + len.max(2)], &[])
}

/// Vendor ID of NVIDIA.
const NVIDIA: u16 = 0x10de;
/// Class of displays and 3D controllers.
const DISPLAY: u8 = 0x03;
/// Where NVIDIA's driver looks for the clique.
const CLIQUE_PLACES: [usize; 2] = [0xc8, 0xd4];
/// Length of the clique's capability in bytes.
const CLIQUE_LEN: u8 = 8;

/// Why a device cannot be in a GPUDirect clique.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NoClique {
    /// Only NVIDIA's driver knows of cliques.
    #[error("it is no GPU of NVIDIA")]
    NoGpu,
    /// Both places are taken.
    #[error("its own capabilities are at both places where the driver looks for the clique")]
    NoRoom,
}

/// Adds the number of the device's GPUDirect clique, 0 to 15, after its other capabilities: a
/// vendor-specific capability by which NVIDIA's driver in a guest knows which GPUs can reach each
/// other (QEMU, hw/vfio/pci-quirks.c).
pub fn place_clique(
    config: &mut ConfigSpace,
    physical: &[u8; HEADER_END],
    clique: u8,
) -> Result<(), NoClique> {
    if u16::from_le_bytes([physical[0], physical[1]]) != NVIDIA || physical[0xb] != DISPLAY {
        return Err(NoClique::NoGpu);
    }
    let visible = visible(physical);
    let is_free = |at: &&usize| {
        let end = **at + usize::from(CLIQUE_LEN);
        let overlaps = |its: &Capability| its.at < end && **at < its.at + its.len;
        !visible.iter().any(overlaps)
    };
    let at = CLIQUE_PLACES.iter().find(is_free);
    let at = *at.ok_or(NoClique::NoRoom)?;
    let body = [CLIQUE_LEN, b'P', b'2', b'P', (clique & 0xf) << 3, 0];
    let placed = config.place_capability(at, VENDOR, &body, &[]);
    placed.map_err(|_| NoClique::NoRoom)
}

#[cfg(test)]
mod tests {
    use pci::Identity;

    use super::*;

    fn list(entries: &[(usize, &[u8])]) -> [u8; HEADER_END] {
        let mut config = [0; HEADER_END];
        config[0x34] = entries.first().map_or(0, |(at, _)| *at as u8);
        for (index, (at, body)) in entries.iter().enumerate() {
            config[*at..*at + body.len()].copy_from_slice(body);
            config[at + 1] = entries.get(index + 1).map_or(0, |(next, _)| *next as u8);
        }
        config
    }

    #[test]
    fn what_concerns_only_the_host_is_left_out() {
        // Vital product data, MSI with 64-bit addresses, and a vendor-specific one.
        let config = list(&[
            (0x40, &[0x03, 0]),
            (0x50, &[0x05, 0, 0x80, 0]),
            (0x60, &[0x09, 0, 8]),
        ]);
        assert_eq!(
            visible(&config),
            [
                Capability {
                    id: 5,
                    kind: CapabilityKind::Msi,
                    at: 0x50,
                    len: 14
                },
                Capability {
                    id: 9,
                    kind: CapabilityKind::Through,
                    at: 0x60,
                    len: 8
                },
            ]
        );
    }

    #[test]
    fn a_gpu_of_nvidia_says_its_clique_where_the_driver_looks_for_it() {
        let mut gpu = list(&[(0x60, &[0x01, 0])]);
        gpu[..2].copy_from_slice(&NVIDIA.to_le_bytes());
        gpu[0xb] = DISPLAY;
        let place = |physical: &[u8; HEADER_END]| {
            let mut config = ConfigSpace::new(Identity::default());
            for capability in visible(physical) {
                place_through(&mut config, physical, capability).unwrap();
            }
            place_clique(&mut config, physical, 5)?;
            let mut seen = [0; HEADER_END];
            config.read(0, &mut seen);
            Ok::<_, NoClique>(seen)
        };
        let seen = place(&gpu).unwrap();
        assert_eq!((seen[0x34], seen[0x61]), (0x60, 0xc8));
        assert_eq!(seen[0xc8..0xd0], [9, 0, 8, b'P', b'2', b'P', 5 << 3, 0]);
        // MSI-X there, as in newer GPUs.
        gpu[0x61] = 0xc4;
        gpu[0xc4] = 0x11;
        let seen = place(&gpu).unwrap();
        assert_eq!(seen[0xd4..0xdc], [9, 0, 8, b'P', b'2', b'P', 5 << 3, 0]);
        gpu[0xc5] = 0xd0;
        gpu[0xd0..0xd3].copy_from_slice(&[9, 0, 8]);
        assert_eq!(place(&gpu), Err(NoClique::NoRoom));
        gpu[0] = 0;
        assert_eq!(place(&gpu), Err(NoClique::NoGpu));
    }

    #[test]
    fn a_list_without_end_ends() {
        let mut config = list(&[(0x40, &[0x01, 0]), (0x48, &[0x10, 0])]);
        config[0x49] = 0x40;
        let found = visible(&config);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].len, 8, "as far as the next one");
    }
}

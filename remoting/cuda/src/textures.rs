//! Arrays, textures and surfaces: checks and charges.

use std::sync::Arc;

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{Kind, codes, plan::Argument};
use remoting_session::quota::Charge;

use super::Server;

/// Maximum number of textures and surfaces at a time.
const MOST: usize = 1 << 20;

/// A texture or surface. Kernels use its handle as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Texture {
    /// The driver's handles are unique only within a context.
    pub(super) context: u32,
    pub(super) is_surface: bool,
    pub(super) handle: u64,
}

/// Size in bytes of a component of this format, or an upper bound.
fn format(format: u32) -> u64 {
    match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        // Block-compressed and planar formats have at most 16 bytes for their four components.
        _ => 4,
    }
}

/// A GPU stores arrays in tiles of this many bytes of a row and this many rows.
const TILE: (u64, u64) = (64, 8);

/// Size in bytes of the described array, with all its levels, as a GPU stores it.
fn size(words: &[u64], is_flat: bool, has_levels: bool) -> Option<u64> {
    let depth = if is_flat { 0 } else { *words.get(2)? };
    let kind = *words.get(if is_flat { 2 } else { 3 })?;
    let element = format(kind as u32) * (kind >> 32).max(1);
    let row = words.first()?.checked_mul(element)?;
    let row = row.checked_next_multiple_of(TILE.0)?;
    let rows = words.get(1)?.max(&1).checked_next_multiple_of(TILE.1)?;
    let all = row.checked_mul(rows)?.checked_mul(depth.max(1))?;
    // A level has at most half the size of the one before.
    all.checked_mul(if has_levels { 2 } else { 1 })
}

impl Server {
    /// Charges an array.
    pub(super) fn charge_array(
        &mut self,
        arguments: &[Argument],
        is_flat: bool,
        has_levels: bool,
    ) -> Result<Option<Arc<Charge>>, i32> {
        let Some(Argument::Memory { words, .. }) = arguments.get(1) else {
            return Err(codes::INVALID_VALUE);
        };
        let size = size(words, is_flat, has_levels).ok_or(codes::INVALID_VALUE)?;
        self.charge(size).map(Some)
    }

    /// Attaches a charge to a new allocation or array, for as long as that exists.
    pub(super) fn costs(&mut self, kind: Kind, id: u32, charge: Option<Arc<Charge>>) {
        if let Ok(object) = self.backend.objects.get_mut(kind, id) {
            object.charge = charge;
        }
    }

    /// Records a new texture or surface.
    pub(super) fn texture_made(&mut self, texture: Texture) {
        self.backend.textures.insert(texture);
    }

    /// Records that a texture or surface has been destroyed.
    pub(super) fn texture_ended(&mut self, texture: Texture) {
        self.backend.textures.remove(&texture);
    }

    /// Checks that this is a texture or surface of the client.
    pub(super) fn check_texture(&self, texture: Texture) -> Result<Option<Arc<Charge>>, i32> {
        match self.backend.textures.contains(&texture) {
            true => Ok(None),
            false => Err(codes::INVALID_VALUE),
        }
    }

    /// Checks that one more may be created.
    pub(super) fn check_textures(&self) -> Result<Option<Arc<Charge>>, i32> {
        match self.backend.textures.len() < MOST {
            true => Ok(None),
            false => Err(codes::OUT_OF_MEMORY),
        }
    }

    /// Checks the resource of a texture or surface: numbers become handles, and memory has to be
    /// the client's.
    pub(super) fn resource(&self, described: &mut CUDA_RESOURCE_DESC) -> Result<(), i32> {
        use CUresourcetype as T;
        let objects = &self.backend.objects;
        // SAFETY: numbers and pointers, for which any value is valid; the kind selects the variant.
        unsafe {
            match described.resType {
                T::CU_RESOURCE_TYPE_ARRAY => {
                    let id = described.res.array.hArray as u32;
                    described.res.array.hArray = objects.get(Kind::Array, id)?.raw as CUarray;
                    Ok(())
                }
                T::CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
                    let id = described.res.mipmap.hMipmappedArray as u32;
                    let raw = objects.get(Kind::Mipmap, id)?.raw;
                    described.res.mipmap.hMipmappedArray = raw as CUmipmappedArray;
                    Ok(())
                }
                T::CU_RESOURCE_TYPE_LINEAR => {
                    let linear = described.res.linear;
                    self.own(linear.devPtr, Some(linear.sizeInBytes as u64))
                }
                T::CU_RESOURCE_TYPE_PITCH2D => {
                    let rows = described.res.pitch2D;
                    let element = format(rows.format.0) * u64::from(rows.numChannels);
                    let width = (rows.width as u64).checked_mul(element);
                    let others = (rows.height as u64).saturating_sub(1);
                    let others = others.checked_mul(rows.pitchInBytes as u64);
                    let size = width.zip(others).and_then(|(a, b)| a.checked_add(b));
                    self.own(rows.devPtr, size)
                }
                _ => Err(codes::INVALID_VALUE),
            }
        }
    }

    fn own(&self, at: u64, size: Option<u64>) -> Result<(), i32> {
        match size.is_some_and(|size| self.is_clients(at, size)) {
            true => Ok(()),
            false => Err(codes::INVALID_VALUE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_cost_what_they_hold() {
        let float = 0x20 | 2 << 32;
        assert_eq!(size(&[24, 9, float], true, false), Some(192 * 16));
        assert_eq!(size(&[24, 0, float], true, false), Some(192 * 8));
        assert_eq!(size(&[24, 9, 2, float], false, false), Some(192 * 16 * 2));
        assert_eq!(size(&[24, 9, 2, float], false, true), Some(192 * 16 * 4));
        let thin = 0x01 | 1 << 32;
        assert_eq!(size(&[1, 1 << 16, thin], true, false), Some(64 << 16));
        assert_eq!(size(&[u64::MAX, 3, 0x01 | 1 << 32], true, false), None);
        assert_eq!(size(&[10], true, false), None);
    }
}

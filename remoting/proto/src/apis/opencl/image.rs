//! Images: their description in the API, and how large pixels are.

use super::codes;

/// `cl_image_format`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageFormat {
    /// `image_channel_order`.
    pub order: u32,
    /// `image_channel_data_type`.
    pub data: u32,
}

/// `cl_image_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageDesc {
    /// `image_type`.
    pub kind: u32,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Depth in pixels.
    pub depth: usize,
    /// `image_array_size`.
    pub layers: usize,
    /// `image_row_pitch`, bytes.
    pub row_pitch: usize,
    /// `image_slice_pitch`, bytes.
    pub slice_pitch: usize,
    /// `num_mip_levels`.
    pub mip_levels: u32,
    /// `num_samples`.
    pub samples: u32,
    /// `buffer` or `mem_object`.
    pub of: usize,
}

/// Bytes of a pixel, for the formats of the specification's table.
pub fn pixel_size(order: u32, data: u32) -> Option<u64> {
    let channels = match order {
        codes::R | codes::A | codes::Rx | codes::INTENSITY | codes::LUMINANCE | codes::DEPTH => 1,
        codes::RG | codes::RA | codes::RGx => 2,
        codes::RGB | codes::RGBx | codes::sRGB => 3,
        codes::RGBA
        | codes::BGRA
        | codes::ARGB
        | codes::ABGR
        | codes::sRGBA
        | codes::sBGRA
        | codes::sRGBx => 4,
        _ => return None,
    };
    let channel = match data {
        codes::SNORM_INT8 | codes::UNORM_INT8 | codes::SIGNED_INT8 | codes::UNSIGNED_INT8 => 1,
        codes::SNORM_INT16
        | codes::UNORM_INT16
        | codes::SIGNED_INT16
        | codes::UNSIGNED_INT16
        | codes::HALF_FLOAT => 2,
        codes::SIGNED_INT32 | codes::UNSIGNED_INT32 | codes::FLOAT => 4,
        // Formats that pack a whole pixel.
        codes::UNORM_SHORT_565 | codes::UNORM_SHORT_555 => return Some(2),
        codes::UNORM_INT_101010 | codes::UNORM_INT_101010_2 => return Some(4),
        _ => return None,
    };
    Some(channels * channel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_have_the_sizes_of_the_specification() {
        assert_eq!(pixel_size(codes::RGBA, codes::UNORM_INT8), Some(4));
        assert_eq!(pixel_size(codes::RGBA, codes::FLOAT), Some(16));
        assert_eq!(pixel_size(codes::RGB, codes::UNORM_SHORT_565), Some(2));
        assert_eq!(pixel_size(codes::R, 0), None);
    }
}

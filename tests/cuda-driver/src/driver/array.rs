//! Arrays: memory in rows without gaps.

use std::sync::Arc;

use cuda_definition::driver::types::*;

use super::{
    Answer, context,
    memory::{Kind, memory},
};

/// An array.
pub struct Array {
    /// Its start address.
    pub at: u64,
    /// Size of a row in bytes.
    pub row: usize,
    /// What it was created from.
    pub described: CUDA_ARRAY3D_DESCRIPTOR,
}

impl Array {
    /// Allocates an array in the current context.
    ///
    /// # Errors
    /// There is no context or not enough memory, or the description is invalid.
    pub fn new(described: CUDA_ARRAY3D_DESCRIPTOR) -> Answer<Arc<Self>> {
        use CUarray_format as F;
        let bytes = match described.Format {
            F::CU_AD_FORMAT_UNSIGNED_INT8 | F::CU_AD_FORMAT_SIGNED_INT8 => 1,
            F::CU_AD_FORMAT_UNSIGNED_INT16
            | F::CU_AD_FORMAT_SIGNED_INT16
            | F::CU_AD_FORMAT_HALF => 2,
            F::CU_AD_FORMAT_UNSIGNED_INT32
            | F::CU_AD_FORMAT_SIGNED_INT32
            | F::CU_AD_FORMAT_FLOAT => 4,
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        if !matches!(described.NumChannels, 1 | 2 | 4) || described.Width == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let row = described
            .Width
            .checked_mul(bytes * described.NumChannels as usize);
        let rows = described.Height.max(1).checked_mul(described.Depth.max(1));
        let size = row.zip(rows).and_then(|(row, rows)| row.checked_mul(rows));
        let context = context::current()?;
        let at = memory().allocate(
            size.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)? as u64,
            Kind::Device,
            0,
            context.owner(),
        )?;
        Ok(Arc::new(Self {
            at,
            row: row.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
            described,
        }))
    }

    /// Number of rows in a plane.
    pub fn height(&self) -> usize {
        self.described.Height.max(1)
    }
}

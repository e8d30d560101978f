//! The sizes of numbers whose type is given at run time.

/// The size of a number of a `cudaDataType` in bytes.
pub fn of_type(of: u32) -> usize {
    match of {
        // 16 bits: half, bfloat16; complex numbers of 8-bit integers.
        2 | 14 | 7 | 9 | 20 | 22 => 2,
        // float, 32-bit integers; complex numbers of 16 bits.
        0 | 10 | 12 | 6 | 15 | 21 | 23 => 4,
        // double, 64-bit integers; complex numbers of 32 bits.
        1 | 24 | 26 | 4 | 11 | 13 => 8,
        5 | 25 | 27 => 16,
        // Integers and floating-point numbers of at most 8 bits.
        _ => 1,
    }
}

/// The size of alpha and beta in bytes, by the `cublasComputeType_t` and the result's
/// `cudaDataType`.
pub fn of_compute(compute: u32, result: u32) -> usize {
    let real = match compute {
        64 | 65 => 2,
        70 | 71 | 79 => 8,
        _ => 4,
    };
    // Complex types: of floating-point numbers, of integers.
    let complex = matches!(
        result,
        4..=7 | 9 | 11 | 13 | 15 | 17 | 19 | 21 | 23 | 25 | 27
    );
    if complex { 2 * real } else { real }
}

#[cfg(test)]
mod tests {
    use cuda_definition::cublas::types::{cublasComputeType_t as C, cudaDataType_t as T};

    use super::*;

    #[test]
    fn scalars_have_the_length_of_what_is_computed_with() {
        let cases = [
            (C::CUBLAS_COMPUTE_16F, T::CUDA_R_16F, 2),
            (C::CUBLAS_COMPUTE_32F, T::CUDA_R_16BF, 4),
            (C::CUBLAS_COMPUTE_32F_FAST_TF32, T::CUDA_R_32F, 4),
            (C::CUBLAS_COMPUTE_32F, T::CUDA_C_32F, 8),
            (C::CUBLAS_COMPUTE_64F, T::CUDA_R_64F, 8),
            (C::CUBLAS_COMPUTE_64F, T::CUDA_C_64F, 16),
            (C::CUBLAS_COMPUTE_32I, T::CUDA_R_32I, 4),
        ];
        for (compute, result, bytes) in cases {
            assert_eq!(
                of_compute(compute.0, result.0),
                bytes,
                "{compute:?} {result:?}"
            );
        }
        for (of, bytes) in [
            (T::CUDA_R_16F, 2),
            (T::CUDA_R_32F, 4),
            (T::CUDA_C_32F, 8),
            (T::CUDA_C_64F, 16),
        ] {
            assert_eq!(of_type(of.0), bytes, "{of:?}");
        }
    }
}

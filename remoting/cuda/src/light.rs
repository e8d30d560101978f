//! cuBLASLt calls that take descriptors. The descriptors are created for each call from what the
//! client has sent.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use cuda_definition::cublaslt::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        attributes::{LAYOUT, OPERATION, PREFERENCE, Table, read},
        codes,
        libraries::{Heuristic, INVALID_VALUE, Matmul, STATUS, Scalar},
    },
    wire::Wire,
};

use super::{
    Server,
    backend::Submitted,
    libraries::{Light, status},
};

/// Maximum number of results of a heuristic.
const RESULTS: u32 = 256;
/// Maximum number of algorithms returned to a client.
const ALGORITHMS: usize = 1 << 16;
const NOT_SUPPORTED: i32 = STATUS + 15;

/// An algorithm, as the library returned it.
pub(super) type Algorithm = [u64; 8];

/// Calls a function that may be missing.
macro_rules! lt {
    ($light:expr, $name:ident($($argument:expr),* $(,)?)) => {
        match $light.$name {
            // SAFETY: descriptors and handles are the library's own; pointers refer to memory of
            // the size given in the definition, valid for the call.
            Some(function) => status(unsafe { function($($argument),*) }.0.cast_signed()),
            None => Err(NOT_SUPPORTED),
        }
    };
}

/// A library descriptor that lives for one call.
struct Made<'a> {
    light: &'a Light,
    of: Of,
}

#[derive(Clone, Copy)]
enum Of {
    Operation(cublasLtMatmulDesc_t),
    Layout(cublasLtMatrixLayout_t),
    Preference(cublasLtMatmulPreference_t),
    Nothing,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // Destroying an existing descriptor does not fail.
        let _ = match self.of {
            Of::Operation(raw) => lt!(self.light, cublasLtMatmulDescDestroy(raw)),
            Of::Layout(raw) => lt!(self.light, cublasLtMatrixLayoutDestroy(raw)),
            Of::Preference(raw) => lt!(self.light, cublasLtMatmulPreferenceDestroy(raw)),
            Of::Nothing => Ok(()),
        };
    }
}

/// Attributes sent by a client.
struct Sent<'a>(Vec<(u32, &'a [u8])>);

impl<'a> Sent<'a> {
    fn new(table: Table, bytes: &'a [u8]) -> Result<Self, i32> {
        read(table, bytes).map(Self).ok_or(INVALID_VALUE)
    }

    fn number(&self, attribute: u32) -> Option<u64> {
        let (_, value) = self.0.iter().find(|(number, _)| *number == attribute)?;
        let mut word = [0; 8];
        word.get_mut(..value.len())?.copy_from_slice(value);
        Some(u64::from_le_bytes(word))
    }

    fn needed(&self, attribute: u32) -> Result<u64, i32> {
        self.number(attribute).ok_or(INVALID_VALUE)
    }

    /// The attributes that creation does not take.
    fn others<'b>(&'b self, taken: &'b [u32]) -> impl Iterator<Item = (u32, &'a [u8])> + 'b {
        let all = self.0.iter().copied();
        all.filter(|(number, _)| !taken.contains(number))
    }
}

impl<'a> Made<'a> {
    fn operation(light: &'a Light, sent: &Sent<'_>) -> Result<Self, i32> {
        let mut raw = null_mut();
        let compute = cublasComputeType_t(sent.needed(0)? as u32);
        let scale = cudaDataType_t(sent.needed(1)? as u32);
        lt!(
            light,
            cublasLtMatmulDescCreate(&raw mut raw, compute, scale)
        )?;
        let made = Self {
            light,
            of: Of::Operation(raw),
        };
        for (number, value) in sent.others(&[0, 1]) {
            let (attribute, at) = (
                cublasLtMatmulDescAttributes_t(number),
                value.as_ptr().cast(),
            );
            lt!(
                light,
                cublasLtMatmulDescSetAttribute(raw, attribute, at, value.len())
            )?;
        }
        Ok(made)
    }

    /// Creates a layout; no layout for empty bytes.
    fn layout(light: &'a Light, bytes: &[u8]) -> Result<Self, i32> {
        if bytes.is_empty() {
            return Ok(Self {
                light,
                of: Of::Nothing,
            });
        }
        let sent = Sent::new(LAYOUT, bytes)?;
        let mut raw = null_mut();
        let of = cudaDataType_t(sent.needed(0)? as u32);
        let (rows, columns) = (sent.needed(2)?, sent.needed(3)?);
        let leading = sent.needed(4)?.cast_signed();
        lt!(
            light,
            cublasLtMatrixLayoutCreate(&raw mut raw, of, rows, columns, leading)
        )?;
        let made = Self {
            light,
            of: Of::Layout(raw),
        };
        for (number, value) in sent.others(&[0, 2, 3, 4]) {
            let (attribute, at) = (
                cublasLtMatrixLayoutAttribute_t(number),
                value.as_ptr().cast(),
            );
            lt!(
                light,
                cublasLtMatrixLayoutSetAttribute(raw, attribute, at, value.len())
            )?;
        }
        Ok(made)
    }

    fn preference(light: &'a Light, bytes: &[u8]) -> Result<Self, i32> {
        let sent = Sent::new(PREFERENCE, bytes)?;
        let mut raw = null_mut();
        lt!(light, cublasLtMatmulPreferenceCreate(&raw mut raw))?;
        let made = Self {
            light,
            of: Of::Preference(raw),
        };
        for (number, value) in sent.others(&[]) {
            let attribute = cublasLtMatmulPreferenceAttributes_t(number);
            let at = value.as_ptr().cast();
            lt!(
                light,
                cublasLtMatmulPreferenceSetAttribute(raw, attribute, at, value.len())
            )?;
        }
        Ok(made)
    }

    fn as_operation(&self) -> cublasLtMatmulDesc_t {
        match self.of {
            Of::Operation(raw) => raw,
            _ => null_mut(),
        }
    }

    fn as_layout(&self) -> cublasLtMatrixLayout_t {
        match self.of {
            Of::Layout(raw) => raw,
            _ => null_mut(),
        }
    }

    fn as_preference(&self) -> cublasLtMatmulPreference_t {
        match self.of {
            Of::Preference(raw) => raw,
            _ => null_mut(),
        }
    }
}

/// Whether alpha and beta are in host memory in this pointer mode.
fn are_hosts(mode: u64) -> Result<(bool, bool), i32> {
    match mode {
        0 => Ok((true, true)),
        // A single number or one per row, on the device; with beta zero or in host memory.
        1..=3 => Ok((false, false)),
        4 => Ok((false, true)),
        _ => Err(INVALID_VALUE),
    }
}

/// A scalar for the library, which dereferences host addresses if the mode says so.
fn scalar(scalar: &Scalar, is_hosts: bool) -> Result<*const c_void, i32> {
    match (scalar.here, is_hosts) {
        (true, true) => Ok(scalar.bytes.as_ptr().cast()),
        (false, false) => Ok(scalar.bytes[0] as *const c_void),
        _ => Err(INVALID_VALUE),
    }
}

impl Server {
    pub(super) fn matmul(&mut self, bytes: &[u8]) -> Result<Submitted, i32> {
        let call = Matmul::from_bytes(bytes).map_err(|_| INVALID_VALUE)?;
        let (handle, context) = self.library_handle(Kind::BlasLt, call.handle)?;
        let submitted = self.submit_to(context, call.stream)?;
        let light = self.backend.api.libraries.light()?;
        let sent = Sent::new(OPERATION, &call.operation.0)?;
        let hosts = are_hosts(sent.number(2).unwrap_or(0))?;
        let operation = Made::operation(light, &sent)?;
        let layout = |bytes: &[u8]| Made::layout(light, bytes);
        let (a, b, c) = (layout(&call.a.0)?, layout(&call.b.0)?, layout(&call.c.0)?);
        let d = layout(&call.d.0)?;
        let mut algorithm: Algorithm = [0; 8];
        let chosen = match call.algorithm.0.as_chunks::<8>() {
            ([], []) => null(),
            (words, []) if words.len() == algorithm.len() => {
                for (to, word) in algorithm.iter_mut().zip(words) {
                    *to = u64::from_le_bytes(*word);
                }
                // The library uses its contents to look things up, so it must be one that the
                // library returned.
                if !self.backend.algorithms.contains(&algorithm) {
                    return Err(INVALID_VALUE);
                }
                algorithm.as_ptr().cast::<cublasLtMatmulAlgo_t>()
            }
            _ => return Err(INVALID_VALUE),
        };
        let [at_a, at_b, at_c, at_d] = call.matrices.map(|at| at as *mut c_void);
        lt!(
            light,
            cublasLtMatmul(
                handle as cublasLtHandle_t,
                operation.as_operation(),
                scalar(&call.alpha, hosts.0)?,
                at_a,
                a.as_layout(),
                at_b,
                b.as_layout(),
                scalar(&call.beta, hosts.1)?,
                at_c,
                c.as_layout(),
                at_d,
                d.as_layout(),
                chosen,
                call.workspace.0 as *mut c_void,
                call.workspace.1 as usize,
                submitted.raw as cudaStream_t,
            )
        )?;
        Ok(submitted)
    }

    /// Returns results of 96 bytes each.
    pub(super) fn heuristic(&mut self, bytes: &[u8]) -> Result<Vec<u8>, i32> {
        let call = Heuristic::from_bytes(bytes).map_err(|_| INVALID_VALUE)?;
        let (handle, context) = self.library_handle(Kind::BlasLt, call.handle)?;
        self.enter(context)?;
        let wanted = call.count.min(RESULTS);
        if wanted == 0 {
            return Err(INVALID_VALUE);
        }
        if self.backend.algorithms.len() >= ALGORITHMS {
            return Err(codes::OUT_OF_MEMORY);
        }
        let light = self.session.backend.api.libraries.light()?;
        let operation = Made::operation(light, &Sent::new(OPERATION, &call.operation.0)?)?;
        let layout = |bytes: &[u8]| Made::layout(light, bytes);
        let (a, b, c) = (layout(&call.a.0)?, layout(&call.b.0)?, layout(&call.c.0)?);
        let d = layout(&call.d.0)?;
        let preference = Made::preference(light, &call.preference.0)?;
        let none = cublasLtMatmulHeuristicResult_t {
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let (mut results, mut found) = (vec![none; wanted as usize], 0);
        lt!(
            light,
            cublasLtMatmulAlgoGetHeuristic(
                handle as cublasLtHandle_t,
                operation.as_operation(),
                a.as_layout(),
                b.as_layout(),
                c.as_layout(),
                d.as_layout(),
                preference.as_preference(),
                wanted.cast_signed(),
                results.as_mut_ptr(),
                &raw mut found,
            )
        )?;
        results.truncate(usize::try_from(found).unwrap_or(0));
        let mut answer = Vec::new();
        for result in &results {
            let success = result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS;
            if success {
                self.session.backend.algorithms.insert(result.algo.data);
            }
            result.algo.data.put(&mut answer);
            (result.workspaceSize as u64).put(&mut answer);
            result.state.0.put(&mut answer);
            result.wavesCount.to_bits().put(&mut answer);
            result.reserved.put(&mut answer);
        }
        Ok(answer)
    }

    /// `cublasLtGetVersion`; returns 8 bytes.
    pub(super) fn light_version(&self) -> Result<Vec<u8>, i32> {
        let light = self.backend.api.libraries.light()?;
        let version = light.cublasLtGetVersion.ok_or(NOT_SUPPORTED)?;
        // SAFETY: it takes no parameters.
        let version = unsafe { version() } as u64;
        Ok(version.to_le_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_no_scalars_where_the_library_reads_the_host_s_memory() {
        let address = Scalar {
            here: false,
            bytes: [0x7fff_0000_1000, 0],
        };
        for mode in [0, 4] {
            let (_, beta) = are_hosts(mode).unwrap();
            assert_eq!(scalar(&address, beta), Err(INVALID_VALUE));
        }
        assert!(scalar(&address, are_hosts(0).unwrap().0).is_err());
        assert!(scalar(&address, are_hosts(1).unwrap().0).is_ok());
        assert!(are_hosts(5).is_err());
    }

    #[test]
    fn attributes_that_creation_needs_must_be_there() {
        let none = 0u64.to_le_bytes();
        let sent = Sent::new(OPERATION, &none).unwrap();
        assert_eq!(sent.needed(0), Err(INVALID_VALUE));
        assert!(Sent::new(OPERATION, &[1]).is_err());
    }
}

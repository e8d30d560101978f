//! Names of errors, and functions by name.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    sync::OnceLock,
};

use cuda_definition::{
    Streams, by_name,
    driver::{ENTRY_POINTS, types::*},
};

use super::{entry_points, exports, offer, put, text};

fn named(error: CUresult) -> Option<&'static CString> {
    static NAMES: OnceLock<Vec<(CUresult, CString)>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let all = CUresult::NAMES.iter();
        all.map(|(name, error)| (*error, CString::new(*name).unwrap_or_default()))
            .collect()
    });
    names
        .iter()
        .find(|(known, _)| *known == error)
        .map(|(_, name)| name)
}

entry_points! {
    fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) {
        match named(error) {
            Some(name) => put(pStr, name.as_ptr()),
            None => {
                offer(pStr, std::ptr::null());
                Err(CUresult::CUDA_ERROR_INVALID_VALUE)
            }
        }
    }

    // The name is descriptive enough; the texts are the vendor's.
    fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) {
        match named(error) {
            Some(name) => put(pStr, name.as_ptr()),
            None => {
                offer(pStr, std::ptr::null());
                Err(CUresult::CUDA_ERROR_INVALID_VALUE)
            }
        }
    }

    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        pfn: *mut *mut c_void,
        cudaVersion: c_int,
        flags: cuuint64_t,
        symbolStatus: *mut CUdriverProcAddressQueryResult,
    ) {
        use CUdriverProcAddressQueryResult as Found;
        let name = text(symbol)?;
        let streams = if flags & 2 == 0 { Streams::Legacy } else { Streams::PerThread };
        let version = u32::try_from(cudaVersion).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let entry = by_name(ENTRY_POINTS, name, version, streams);
        let export = entry.and_then(|entry| exports().find(|export| export.symbol == entry.symbol));
        match export {
            Some(export) => {
                offer(symbolStatus, Found::CU_GET_PROC_ADDRESS_SUCCESS);
                put(pfn, (export.address)() as *mut c_void)
            }
            None => {
                offer(symbolStatus, Found::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
                offer(pfn, std::ptr::null_mut());
                Err(CUresult::CUDA_ERROR_NOT_FOUND)
            }
        }
    }

    // Private tables are not provided.
    fn cuGetExportTable(ppExportTable: *mut *const c_void, _pExportTableId: *const CUuuid) {
        offer(ppExportTable, std::ptr::null());
        Err(CUresult::CUDA_ERROR_NOT_FOUND)
    }
}

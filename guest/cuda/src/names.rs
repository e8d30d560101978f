//! Errors and functions by name.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::null,
    sync::{Mutex, OnceLock},
};

use base::Unpoisoned;
use cuda_definition::{
    Streams, by_name,
    driver::{ENTRY_POINTS, types::*},
};
use remoting_proto::apis::cuda::{calls::Describe, codes};

use crate::{
    entry::{Outcome, entry_points, is_forked, offer, put, run},
    generated::SYMBOLS,
    link,
};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// An entry point that is not supported. Reports this once.
pub fn unsupported(symbol: &'static str) -> CUresult {
    static TOLD: Mutex<Option<HashSet<&str>>> = Mutex::new(None);
    run(|| {
        if TOLD
            .lock_unpoisoned()
            .get_or_insert_default()
            .insert(symbol)
        {
            base::note!("gantry-cuda: {symbol} is not supported");
        }
        Err(codes::NOT_SUPPORTED)
    })
}

/// Makes the tables of this module, so that forked children need not wait for a thread of their
/// parent's that does.
pub fn prepare() {
    names();
    addresses();
}

fn names() -> &'static HashMap<u32, CString> {
    static NAMES: OnceLock<HashMap<u32, CString>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let all = CUresult::NAMES.iter();
        all.map(|(name, error)| (error.0, CString::new(*name).unwrap_or_default()))
            .collect()
    })
}

fn addresses() -> &'static HashMap<&'static str, usize> {
    static ADDRESSES: OnceLock<HashMap<&str, usize>> = OnceLock::new();
    ADDRESSES.get_or_init(|| {
        let all = SYMBOLS.iter();
        all.map(|symbol| (symbol.name, symbol.address as usize))
            .collect()
    })
}

fn name(error: CUresult) -> Option<&'static CStr> {
    names().get(&error.0).map(CString::as_c_str)
}

/// The driver's description of an error, as on the host. Its name if there is no worker, and in a
/// forked child.
fn words(error: CUresult) -> Option<*const c_char> {
    static WORDS: Mutex<Option<HashMap<u32, CString>>> = Mutex::new(None);
    let name = name(error)?;
    if is_forked() {
        return Some(name.as_ptr());
    }
    let mut words = WORDS.lock_unpoisoned();
    let words = words.get_or_insert_default();
    if let Some(known) = words.get(&error.0) {
        return Some(known.as_ptr());
    }
    let ask = Describe {
        error: error.0.cast_signed(),
    };
    let told = link::get().and_then(|link| link.ask(&ask).ok());
    let Some(text) = told.and_then(|text| CString::new(text.0).ok()) else {
        return Some(name.as_ptr());
    };
    // The texts are kept as long as the process.
    Some(words.entry(error.0).or_insert(text).as_ptr())
}

/// The address of the function that a name means to a program built for this version.
fn address(name: &str, version: u32, flags: u64) -> Option<*const ()> {
    let streams = if flags & PER_THREAD == 0 {
        Streams::Legacy
    } else {
        Streams::PerThread
    };
    let entry = by_name(ENTRY_POINTS, name, version, streams)?;
    addresses()
        .get(entry.symbol)
        .map(|address| *address as *const ())
}

/// # Safety
/// As the API requires.
unsafe fn find(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> Outcome<bool> {
    if symbol.is_null() || pfn.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    let symbol = symbol.to_str().map_err(|_| codes::INVALID_VALUE)?;
    let version = u32::try_from(version).map_err(|_| codes::INVALID_VALUE)?;
    let found = address(symbol, version, flags);
    // SAFETY: as above.
    unsafe { pfn.write(found.unwrap_or(null()) as *mut c_void) };
    Ok(found.is_some())
}

unsafe extern "C" {
    /// From glibc's execinfo.h.
    fn backtrace(buffer: *mut *mut c_void, size: c_int) -> c_int;
}

/// The file of the library or program that called into this library.
fn caller() -> Option<String> {
    let mut frames = [std::ptr::null_mut(); 16];
    // SAFETY: there is room for this many.
    let count = unsafe { backtrace(frames.as_mut_ptr(), 16) };
    let object = |address: *mut c_void| {
        // SAFETY: all zeroes are valid; the structure is filled in if something is found.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            (libc::dladdr(address, &raw mut info) != 0).then_some(info)
        }
    };
    let own = object(caller as *mut c_void)?.dli_fbase;
    let frames = frames.iter().take(usize::try_from(count).unwrap_or(0));
    let outside = frames
        .filter_map(|frame| object(*frame))
        .find(|info| info.dli_fbase != own)?;
    // SAFETY: the text is the loader's.
    let file = unsafe { CStr::from_ptr(outside.dli_fname) };
    Some(file.to_string_lossy().into_owned())
}

/// Reports, once for each caller, what a caller can do that is refused a private table.
fn refuse_table() {
    static TOLD: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let caller = caller().unwrap_or_else(|| "this program".to_owned());
    let file = caller.rsplit('/').next().unwrap_or_default();
    // These libraries continue without one.
    const CONTENT: [&str; 3] = ["libnvrtc", "libnvJitLink", "libnvidia-ml"];
    if CONTENT.iter().any(|name| file.starts_with(name)) {
        return;
    }
    if TOLD
        .lock_unpoisoned()
        .get_or_insert_default()
        .insert(caller.clone())
    {
        base::note!(
            "gantry-cuda: {caller} asks for private tables of NVIDIA's driver, which are not served: \
             link it with -cudart shared, or with -cudart none -lgantry_cudart_static"
        );
    }
}

entry_points! { everywhere:
    fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) {
        let Some(name) = name(error) else {
            offer(pStr, null());
            return Err(codes::INVALID_VALUE);
        };
        put(pStr, name.as_ptr())
    }

    fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) {
        let Some(words) = words(error) else {
            offer(pStr, null());
            return Err(codes::INVALID_VALUE);
        };
        put(pStr, words)
    }

    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        pfn: *mut *mut c_void,
        cudaVersion: c_int,
        flags: cuuint64_t,
        symbolStatus: *mut CUdriverProcAddressQueryResult,
    ) {
        use CUdriverProcAddressQueryResult as Found;
        let found = find(symbol, pfn, cudaVersion, flags)?;
        offer(symbolStatus, match found {
            true => Found::CU_GET_PROC_ADDRESS_SUCCESS,
            false => Found::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
        });
        if found { Ok(()) } else { Err(codes::NOT_FOUND) }
    }

    fn cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: cuuint64_t) {
        if find(symbol, pfn, cudaVersion, flags)? { Ok(()) } else { Err(codes::NOT_FOUND) }
    }
}

entry_points! {
    fn cuGetExportTable(ppExportTable: *mut *const c_void, _pExportTableId: *const CUuuid) {
        refuse_table();
        offer(ppExportTable, null());
        Err(codes::NOT_FOUND)
    }
}

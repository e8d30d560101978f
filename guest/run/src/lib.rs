//! An auditing library of the system's loader (rtld-audit(7)): whenever one of NVIDIA's CUDA
//! libraries is requested, by its name, by a path, or by a name that a package has changed, the
//! loader is given Gantry's. So paths that are written into programs and libraries (RPATH), which
//! take precedence over LD_LIBRARY_PATH, have no effect, and no file is changed.
//!
//! The loader calls this library before the program runs, in a namespace of its own.

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_uint},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The environment variable that contains the folder of Gantry's libraries.
pub const VARIABLE: &str = "GANTRY_CUDA_LIBRARIES";
/// The libraries that are replaced, if the folder contains them.
const REPLACED: [&str; 6] = [
    "libcuda.so.1",
    "libcuda.so",
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libnvidia-ml.so.1",
];
/// `LA_SER_ORIG`: the name is the one that was originally requested.
const ORIGINAL: c_uint = 1;

/// The library that a file name asks for: with or without a full version appended, or with a
/// package's hash.
fn wanted(file: &[u8]) -> Option<&'static str> {
    REPLACED.into_iter().find(|library| {
        let library = library.as_bytes();
        if let Some(rest) = file.strip_prefix(library) {
            return rest.is_empty() || rest.starts_with(b".") && library != b"libcuda.so";
        }
        let dot = library.iter().position(|byte| *byte == b'.');
        let (start, end) = library.split_at(dot.unwrap_or(library.len()));
        let hash = file
            .strip_prefix(start)
            .and_then(|rest| rest.strip_suffix(end));
        let hash = hash.and_then(|rest| rest.strip_prefix(b"-"));
        hash.is_some_and(|hash| !hash.is_empty() && hash.iter().all(u8::is_ascii_hexdigit))
    })
}

/// The paths of the libraries that exist, in the order of the list.
fn paths() -> &'static [Option<CString>; REPLACED.len()] {
    static PATHS: OnceLock<[Option<CString>; REPLACED.len()]> = OnceLock::new();
    PATHS.get_or_init(|| {
        let folder = std::env::var_os(VARIABLE).map(PathBuf::from);
        REPLACED.map(|library| {
            let path = folder.as_ref()?.join(library);
            let path = path.is_file().then(|| path.into_os_string().into_vec())?;
            CString::new(path).ok()
        })
    })
}

/// The path that the loader is to use instead, if any.
fn instead(name: &CStr) -> Option<&'static CStr> {
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    let library = wanted(path.file_name()?.as_bytes())?;
    let place = REPLACED.iter().position(|one| *one == library)?;
    paths()[place].as_deref()
}

/// The loader asks for the version of its interface that this library expects. Every version has
/// what is used here.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(version: c_uint) -> c_uint {
    version
}

/// The loader is about to search for a library.
///
/// # Safety
/// The name is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    _cookie: *mut usize,
    flag: c_uint,
) -> *const c_char {
    if flag != ORIGINAL || name.is_null() {
        return name;
    }
    // SAFETY: the loader's promise.
    let asked = unsafe { CStr::from_ptr(name) };
    instead(asked).map_or(name, CStr::as_ptr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_forms_ask_for_a_library() {
        for (name, library) in [
            ("libcuda.so.1", Some("libcuda.so.1")),
            ("libcuda.so", Some("libcuda.so")),
            ("libcuda.so.580.1", None),
            ("libcudart.so.13", Some("libcudart.so.13")),
            ("libcudart.so.13.0.96", Some("libcudart.so.13")),
            ("libcudart-1f0a.so.13", Some("libcudart.so.13")),
            ("libcudart.so.130", None),
            ("libcudart.so.12", None),
            ("libcublasLt.so.13", Some("libcublasLt.so.13")),
            ("libcublasmp.so.13", None),
            ("libc.so.6", None),
        ] {
            assert_eq!(wanted(name.as_bytes()), library, "{name}");
        }
    }
}

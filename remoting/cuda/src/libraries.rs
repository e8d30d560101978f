//! The host's libraries built on the driver, cuBLAS and cuBLASLt. Each is opened when one of its functions is first
//! called.

use std::{
    ffi::c_int,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use cuda_definition::cublaslt::signatures;
use remoting_proto::apis::cuda::{
    codes,
    libraries::{Library, STATUS},
};

/// `CUBLAS_STATUS_NOT_SUPPORTED`
const NOT_SUPPORTED: i32 = STATUS + 15;
/// Maximum number of parameters of a function.
const WORDS: usize = 24;
/// Folders with the vendor's toolkit, besides the loader's own.
const TOOLKITS: &[&str] = &["/usr/local", "/opt"];
/// Folders that hold Python's package folders `python3.N`.
const PYTHONS: &[&str] = &["/usr/local/lib", "/usr/lib", "/opt/venv/lib"];

macro_rules! functions {
    ($($name:ident)*) => {
        /// cuBLASLt functions with signatures; `None` for those that the library lacks.
        #[allow(non_snake_case)]
        pub(super) struct Light { $(pub(super) $name: Option<signatures::$name>,)* }

        impl Light {
            fn of(library: &libloading::Library) -> Self {
                Self {
                    // SAFETY: a symbol of this name has the signature given in the API's definition.
                    $($name: unsafe {
                        library.get(concat!(stringify!($name), "\0").as_bytes()).ok().map(|symbol| *symbol)
                    },)*
                }
            }
        }
    };
}

functions! {
    cublasLtGetVersion cublasLtMatmul cublasLtMatmulAlgoGetHeuristic
    cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
    cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy cublasLtMatrixLayoutSetAttribute
    cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy
    cublasLtMatmulPreferenceSetAttribute
}

/// An open library. It is never closed, because it may have threads.
struct Opened {
    /// Addresses of the supported functions, by number; 0 if missing.
    functions: Vec<usize>,
    light: Light,
    _library: ManuallyDrop<libloading::Library>,
}

/// Both libraries.
pub(super) struct Libraries {
    folder: Option<PathBuf>,
    all: [OnceLock<Option<Opened>>; 2],
}

impl Libraries {
    /// Libraries from the given folder, or from where the vendor installs them.
    pub(super) fn new(folder: Option<&Path>) -> Self {
        Self {
            folder: folder.map(Path::to_owned),
            all: [const { OnceLock::new() }; 2],
        }
    }

    /// Calls a function all of whose parameters are words, and converts its status.
    ///
    /// # Safety
    /// The words are valid arguments of that function.
    pub(super) unsafe fn call(
        &self,
        library: Library,
        number: u16,
        words: &[u64],
    ) -> Result<(), i32> {
        let opened = self.opened(library)?;
        let address = opened.functions.get(usize::from(number)).copied();
        let address = address.filter(|address| *address != 0);
        let address = address.ok_or(NOT_SUPPORTED)?;
        if words.len() > WORDS {
            return Err(NOT_SUPPORTED);
        }
        let mut all = [0u64; WORDS];
        all[..words.len()].copy_from_slice(words);
        macro_rules! call {
            ($($index:literal)*) => {{
                // SAFETY: the symbol is a function of the API whose parameters are numbers, enumerations and pointers,
                // each in a register or a stack word. Surplus arguments are removed by the caller and read by nobody.
                let function = unsafe {
                    std::mem::transmute::<usize, unsafe extern "C" fn($(call!(@word $index)),*) -> c_int>(address)
                };
                // SAFETY: the caller's promise.
                unsafe { function($(all[$index]),*) }
            }};
            (@word $index:literal) => { u64 };
        }
        status(call!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23))
    }

    /// The functions of cuBLASLt.
    pub(super) fn light(&self) -> Result<&Light, i32> {
        Ok(&self.opened(Library::BlasLt)?.light)
    }

    fn opened(&self, library: Library) -> Result<&Opened, i32> {
        let place = &self.all[library as usize];
        let opened = place.get_or_init(|| {
            if library == Library::Blas {
                // cuBLAS needs cuBLASLt, and finds the open library by its name.
                let _ = self.opened(Library::BlasLt);
            }
            self.open(library)
        });
        opened.as_ref().ok_or(codes::NOT_FOUND)
    }

    fn open(&self, library: Library) -> Option<Opened> {
        let file = library.file();
        let mut said = None;
        for path in candidates(self.folder.as_deref(), file) {
            // SAFETY: the operator named the library, or the vendor's installer put it there; its constructors are
            // trusted.
            match unsafe { libloading::Library::new(&path) } {
                Ok(found) => return Some(Opened::new(library, found)),
                // The error of a file that exists says more than that others do not exist.
                Err(error) if said.is_none() || path.is_file() => said = Some(error),
                Err(_) => {}
            }
        }
        let why = said.map(|error| error.to_string()).unwrap_or_default();
        base::note!(
            "gantry-accel: no application can use {file}: {why}; name its folder by --cuda-libraries"
        );
        None
    }
}

impl Opened {
    fn new(library: Library, found: libloading::Library) -> Self {
        let address = |symbol: &str| {
            let symbol = format!("{symbol}\0");
            // SAFETY: only the address is taken.
            unsafe { found.get::<*const ()>(symbol.as_bytes()) }
                .map_or(0, |symbol| *symbol as usize)
        };
        Self {
            functions: library.functions().map(|one| address(one.symbol)).collect(),
            light: Light::of(&found),
            _library: ManuallyDrop::new(found),
        }
    }
}

/// Converts a library's status to a result.
pub(super) fn status(status: c_int) -> Result<(), i32> {
    match status {
        0 => Ok(()),
        status => Err(STATUS.saturating_add(status.saturating_abs())),
    }
}

/// Where a library may be: only in the given folder, if there is one. Otherwise by its bare name, for the loader, then
/// in toolkits' folders and Python's packages.
fn candidates(folder: Option<&Path>, file: &str) -> Vec<PathBuf> {
    if let Some(folder) = folder {
        return vec![folder.join(file)];
    }
    let inside = |folder: &str, start: &str| {
        let listed = std::fs::read_dir(folder).into_iter().flatten();
        let mut found: Vec<PathBuf> = listed
            .filter_map(Result::ok)
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(start))
            .map(|entry| entry.path())
            .collect();
        found.sort();
        // Sorted by name, the newest is last; it is tried first.
        found.reverse();
        found
    };
    let toolkits = TOOLKITS.iter().flat_map(|folder| inside(folder, "cuda"));
    let toolkits = toolkits.map(|folder| folder.join("lib64"));
    let pythons = PYTHONS.iter().flat_map(|folder| inside(folder, "python3"));
    let packages = pythons.flat_map(|folder| {
        ["site-packages", "dist-packages"].map(|part| folder.join(part).join("nvidia/cu13/lib"))
    });
    let folders = toolkits.chain(packages).map(|folder| folder.join(file));
    let folders = folders.filter(|path| path.is_file());
    std::iter::once(PathBuf::from(file))
        .chain(folders)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_named_is_the_only_one() {
        let found = candidates(Some(Path::new("/some/where")), "libcublas.so.13");
        assert_eq!(found, [Path::new("/some/where/libcublas.so.13")]);
        let found = candidates(None, "libcublas.so.13");
        assert_eq!(found[0], Path::new("libcublas.so.13"));
    }

    #[test]
    fn a_library_that_is_not_there_is_not_found_and_no_more() {
        let libraries = Libraries::new(Some(Path::new("/nowhere")));
        for library in Library::ALL {
            // SAFETY: the call has no parameters.
            let called = unsafe { libraries.call(library, 0, &[]) };
            assert_eq!(called, Err(codes::NOT_FOUND));
        }
        assert!(libraries.light().is_err());
    }
}

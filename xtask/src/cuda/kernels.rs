//! `cargo xtask cuda-kernels`: the tests' kernels, compiled by the vendor's NVRTC.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs,
    path::Path,
    ptr::{null, null_mut},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use libloading::{Library, os::unix};

use super::wheels;
use crate::programs::root;

/// What `cargo xtask cuda-kernels` is told.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    cargo xtask cuda-kernels           compile tests/cuda-driver/tests/kernels/*.cu to PTX beside them\n  \
    cargo xtask cuda-kernels --check   fail if that would change them")]
pub struct Options {
    /// Change nothing; fail if the committed PTX is not what the compiler makes.
    #[arg(long)]
    check: bool,
}

/// Architectures that the kernels are compiled for: the oldest of CUDA 13, and the stand-in's own.
const ARCHITECTURES: [&str; 2] = ["compute_75", "compute_80"];

/// Compiles all kernels.
///
/// # Errors
/// The compiler cannot be fetched, or refuses a kernel; or, with `--check`, the PTX is out of date.
pub fn run(options: &Options) -> Result<()> {
    let compiler = Compiler::open(&wheels::compiler()?)?;
    let folder = root().join("tests/cuda-driver/tests/kernels");
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let source = fs::read_to_string(&path)?;
        for architecture in ARCHITECTURES {
            let ptx = compiler
                .ptx(&source, architecture)
                .with_context(|| format!("{} for {architecture}", path.display()))?;
            let name = path.with_extension(format!("{architecture}.ptx"));
            super::place(&name, &ptx, options.check)
                .context("compiled kernels change with `cargo xtask cuda-kernels`")?;
        }
    }
    Ok(())
}

type Program = *mut c_void;

/// NVRTC.
struct Compiler {
    library: Library,
    // It opens this by name: found, as it is open already.
    _builtins: unix::Library,
}

impl Compiler {
    fn open(folder: &Path) -> Result<Self> {
        // SAFETY: the vendor's libraries, which only set themselves up when opened.
        unsafe {
            let builtins = folder.join("libnvrtc-builtins.so.13.0");
            let flags = unix::RTLD_NOW | unix::RTLD_GLOBAL;
            Ok(Self {
                _builtins: unix::Library::open(Some(builtins), flags)?,
                library: Library::new(folder.join("libnvrtc.so.13"))?,
            })
        }
    }

    fn ptx(&self, source: &str, architecture: &str) -> Result<String> {
        let (source, name) = (CString::new(source)?, c"kernel.cu");
        let option = CString::new(format!("--gpu-architecture={architecture}"))?;
        let options = [option.as_ptr()];
        let mut program: Program = null_mut();
        // SAFETY: signatures and use are those of nvrtc.h; all pointers outlive the calls.
        unsafe {
            let create = self.library.get::<unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int>(b"nvrtcCreateProgram")?;
            let made = create(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                0,
                null(),
                null(),
            );
            ensure!(made == 0, "nvrtcCreateProgram failed ({made})");
            let compile =
                self.library
                    .get::<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int>(
                        b"nvrtcCompileProgram",
                    )?;
            let compiled = compile(program, 1, options.as_ptr());
            let result = if compiled == 0 {
                self.text(program, b"nvrtcGetPTXSize", b"nvrtcGetPTX")
            } else {
                let log = self.text(program, b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog")?;
                Err(anyhow::anyhow!("the compiler says:\n{log}"))
            };
            let destroy = self
                .library
                .get::<unsafe extern "C" fn(*mut Program) -> c_int>(b"nvrtcDestroyProgram")?;
            destroy(&raw mut program);
            result
        }
    }

    /// # Safety
    /// The names are a program's size and text, in nvrtc.h's form; the program exists.
    unsafe fn text(&self, program: Program, size: &[u8], text: &[u8]) -> Result<String> {
        let mut bytes = 0usize;
        // SAFETY: the caller's promise; the buffer has the size that was told.
        unsafe {
            let get = self
                .library
                .get::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(size)?;
            ensure!(
                get(program, &raw mut bytes) == 0,
                "NVRTC does not tell a size"
            );
            let mut buffer = vec![0u8; bytes.max(1)];
            let get = self
                .library
                .get::<unsafe extern "C" fn(Program, *mut u8) -> c_int>(text)?;
            ensure!(
                get(program, buffer.as_mut_ptr()) == 0,
                "NVRTC does not tell a text"
            );
            Ok(CStr::from_bytes_until_nul(&buffer)?.to_str()?.to_owned())
        }
    }
}

//! Compiles kernels at run time with NVIDIA's NVRTC, with and without the device library. The
//! library's headers are part of this crate, so a program's machine needs none.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    fs,
    path::Path,
};

/// The device library, by the names that sources include.
pub const HEADERS: &[(&str, &str)] = &[
    (
        "gloop/gloop.cuh",
        include_str!("../include/gloop/gloop.cuh"),
    ),
    (
        "gloop/layout.cuh",
        include_str!("../include/gloop/layout.cuh"),
    ),
    ("gloop/ptx.cuh", include_str!("../include/gloop/ptx.cuh")),
    (
        "gloop/slots.cuh",
        include_str!("../include/gloop/slots.cuh"),
    ),
    ("gloop/loop.cuh", include_str!("../include/gloop/loop.cuh")),
    (
        "gloop/block.cuh",
        include_str!("../include/gloop/block.cuh"),
    ),
    ("gloop/fs.cuh", include_str!("../include/gloop/fs.cuh")),
    ("gloop/net.cuh", include_str!("../include/gloop/net.cuh")),
];

/// One of the headers. Empty for any other name.
pub fn header(name: &str) -> &'static str {
    let found = HEADERS.iter().find(|(header, _)| *header == name);
    found.map_or("", |(_, text)| text)
}

/// Why a source was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no compiler.
    #[error(
        "cannot open {library}: install NVIDIA's NVRTC (CUDA toolkit, or its Python package nvidia-cuda-nvrtc)"
    )]
    Open {
        /// The library that was to be opened.
        library: String,
        /// Why it could not be opened.
        source: libloading::Error,
    },
    /// A name or text contains a zero.
    #[error("names and sources have no zero bytes")]
    Zero,
    /// The source was refused.
    #[error("{source_name} does not compile for {architecture}:\n{log}")]
    Refused {
        /// The source's name.
        source_name: String,
        /// The architecture.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// The compiler itself has failed.
    #[error("{function} failed with {code}")]
    Failed {
        /// The function that failed.
        function: &'static str,
        /// NVRTC's error.
        code: c_int,
    },
}

type Program = usize;

/// The compiler.
#[derive(Debug)]
pub struct Compiler {
    library: libloading::Library,
    /// Kept open as long as the compiler, which asks the loader for it by name.
    _builtins: Option<libloading::Library>,
}

/// A source and its includes, by name and text.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The source's name, for messages.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
    /// The includes other than the device library, by name and text.
    pub includes: &'a [(&'a str, &'a str)],
}

/// Opens the library of built-in functions beside a compiler. If there is none, the loader looks
/// for it.
fn builtins(compiler: &Path) -> Option<libloading::Library> {
    let files = fs::read_dir(compiler.parent()?).ok()?;
    let beside = files.flatten().find(|file| {
        let name = file.file_name();
        name.to_string_lossy().starts_with("libnvrtc-builtins.so")
    })?;
    // SAFETY: its initializers make no demands on their caller.
    unsafe { libloading::Library::new(beside.path()) }.ok()
}

impl Compiler {
    /// Opens the compiler, for instance `libnvrtc.so.13`. If this is a path, its library of
    /// built-in functions is taken from the same folder, so that a Python package's works without
    /// `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// There is none.
    pub fn open(library: &Path) -> Result<Self, Error> {
        // SAFETY: NVRTC's initializers make no demands on their caller.
        match unsafe { libloading::Library::new(library) } {
            Ok(opened) => Ok(Self {
                library: opened,
                _builtins: builtins(library),
            }),
            Err(source) => Err(Error::Open {
                library: library.display().to_string(),
                source,
            }),
        }
    }

    fn function<T: Copy>(&self, name: &'static str) -> Result<T, Error> {
        // SAFETY: the callers' signatures are the documentation's.
        let found = unsafe { self.library.get::<T>(name.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|source| Error::Open {
            library: format!("{name} in NVRTC"),
            source,
        })
    }

    /// Compiles to machine code for an architecture such as `sm_90`. The source may include the
    /// device library.
    ///
    /// # Errors
    /// The source is invalid. The error contains the compiler's log.
    pub fn cubin(&self, source: Source<'_>, architecture: &str) -> Result<Vec<u8>, Error> {
        let includes: Vec<_> = HEADERS.iter().chain(source.includes).copied().collect();
        let source = Source {
            includes: &includes,
            ..source
        };
        let options = ["--std=c++17", "-default-device"];
        let get = ("nvrtcGetCUBINSize\0", "nvrtcGetCUBIN\0");
        self.compile(source, architecture, &options, get)
    }

    /// Compiles a plain CUDA C++ source to PTX for an architecture such as `compute_75`.
    ///
    /// # Errors
    /// The source is invalid. The error contains the compiler's log.
    pub fn ptx(&self, source: Source<'_>, architecture: &str) -> Result<String, Error> {
        let get = ("nvrtcGetPTXSize\0", "nvrtcGetPTX\0");
        let text = self.compile(source, architecture, &[], get)?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    fn compile(
        &self,
        source: Source<'_>,
        architecture: &str,
        options: &[&str],
        (size, get): (&'static str, &'static str),
    ) -> Result<Vec<u8>, Error> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

        let text = |text: &str| CString::new(text).map_err(|_| Error::Zero);
        let all = || source.includes.iter();
        let texts = all()
            .map(|(_, body)| text(body))
            .collect::<Result<Vec<_>, _>>()?;
        let names = all()
            .map(|(name, _)| text(name))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers =
            |strings: &[CString]| strings.iter().map(|one| one.as_ptr()).collect::<Vec<_>>();
        let (texts, names) = ((pointers(&texts), texts), (pointers(&names), names));
        let (body, name) = (text(source.text)?, text(source.name)?);
        let for_architecture = format!("--gpu-architecture={architecture}");
        let options = [&[for_architecture.as_str()], options].concat();
        let options = options
            .into_iter()
            .map(text)
            .collect::<Result<Vec<_>, _>>()?;
        let create = self.function::<Create>("nvrtcCreateProgram\0")?;
        let compile = self.function::<Compile>("nvrtcCompileProgram\0")?;
        let destroy = self.function::<Destroy>("nvrtcDestroyProgram\0")?;
        let mut program = 0;
        let count = names.0.len() as c_int;
        // SAFETY: all strings are terminated by a zero, and there are as many as are passed.
        let code = unsafe {
            let (texts, names) = (texts.0.as_ptr(), names.0.as_ptr());
            create(
                &mut program,
                body.as_ptr(),
                name.as_ptr(),
                count,
                texts,
                names,
            )
        };
        check("nvrtcCreateProgram", code)?;
        let flags = pointers(&options);
        // SAFETY: the program was created above.
        let code = unsafe { compile(program, flags.len() as c_int, flags.as_ptr()) };
        let result = match code {
            0 => self.output(program, size, get),
            _ => self.refused(program, source.name, architecture),
        };
        // SAFETY: the program is not used any longer.
        unsafe { destroy(&mut program) };
        result
    }

    /// The compiler's log for a source that it has refused.
    fn refused<T>(&self, program: Program, name: &str, architecture: &str) -> Result<T, Error> {
        let log = self.output(program, "nvrtcGetProgramLogSize\0", "nvrtcGetProgramLog\0")?;
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        Err(Error::Refused {
            source_name: name.to_owned(),
            architecture: architecture.to_owned(),
            log: log.to_string_lossy().into_owned(),
        })
    }

    fn output(
        &self,
        program: Program,
        size: &'static str,
        get: &'static str,
    ) -> Result<Vec<u8>, Error> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        let (size_of, get_it) = (self.function::<Size>(size)?, self.function::<Get>(get)?);
        let mut bytes = 0;
        // SAFETY: the program is live.
        check(size, unsafe { size_of(program, &mut bytes) })?;
        let mut output = vec![0; bytes];
        // SAFETY: there is as much room as it requires.
        check(get, unsafe { get_it(program, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }
}

fn check(function: &'static str, code: c_int) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        _ => Err(Error::Failed {
            function: function.trim_end_matches('\0'),
            code,
        }),
    }
}

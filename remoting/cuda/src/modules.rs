//! Images: modules, libraries, linking, and their contents.

use std::{
    ffi::{CStr, CString, c_void},
    ptr::{null, null_mut},
    sync::Arc,
};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{Enumerate, Examine, Input, KernelInfo, Link, Linked, Load, Loaded},
        codes,
    },
    wire::Blob,
};

use super::{
    Server,
    driver::{cu, outcome},
    images::{ELF, FAT},
    objects::Layout,
    prints,
    variables::{self, Size},
};

/// How many bytes of machine code all applications of a quota may load that it does not count: like contexts, most programs
/// need some, and the driver loads only what is used of large libraries.
pub(super) const UNCHARGED_CODE: u64 = 512 << 20;
/// What the compiler's log says of an image that is refused.
const UNCOUNTED: &str =
    "gantry: memory= limits this application, and what the image takes cannot be told";
/// Maximum number of kernel parameters to query: each takes at least one of 32,764 bytes.
const PARAMETERS: usize = 32_764;
/// Maximum length of a compiler log.
const LOG: u32 = 1 << 20;
/// Maximum number of functions to enumerate.
const ENUMERATED: u32 = 1 << 16;
/// Maximum number of images to link.
const INPUTS: usize = 4096;

/// Compiler options that are numbers. Options that would make the driver read or write memory are
/// not offered to the client.
const OPTIONS: [u32; 19] = [
    0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 29, 30, 31, 32,
];

/// Options for a compiler, with buffers for its logs.
struct Jit {
    names: Vec<CUjit_option>,
    values: Vec<*mut c_void>,
    information: Vec<u8>,
    errors: Vec<u8>,
}

impl Jit {
    fn new(options: &[(u32, u64)], room: (u32, u32)) -> Result<Self, i32> {
        let mut jit = Self {
            names: Vec::new(),
            values: Vec::new(),
            information: vec![0; room.0.min(LOG) as usize],
            errors: vec![0; room.1.min(LOG) as usize],
        };
        for (name, value) in options {
            if !OPTIONS.contains(name) || jit.names.len() >= OPTIONS.len() {
                return Err(codes::NOT_SUPPORTED);
            }
            jit.names.push(CUjit_option_enum(*name));
            jit.values.push(*value as *mut c_void);
        }
        use CUjit_option as O;
        for (log, buffer, size) in [
            (
                &mut jit.information,
                O::CU_JIT_INFO_LOG_BUFFER,
                O::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            ),
            (
                &mut jit.errors,
                O::CU_JIT_ERROR_LOG_BUFFER,
                O::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            ),
        ] {
            if !log.is_empty() {
                jit.names.extend([buffer, size]);
                let length = log.len() as *mut c_void;
                jit.values.extend([log.as_mut_ptr().cast(), length]);
            }
        }
        Ok(jit)
    }

    fn count(&self) -> u32 {
        self.names.len() as u32
    }

    /// The two logs.
    fn texts(self) -> (Blob, Blob) {
        let text = |mut log: Vec<u8>| {
            let end = log.iter().position(|byte| *byte == 0);
            log.truncate(end.unwrap_or(log.len()));
            Blob(log)
        };
        (text(self.information), text(self.errors))
    }
}

/// The answer to an image of which nobody can tell what it takes.
fn uncounted(image: &[u8], room: u32) -> Loaded {
    let code = match image {
        code if code.starts_with(ELF) => codes::NO_BINARY_FOR_GPU,
        fat if fat.starts_with(&FAT) => codes::INVALID_IMAGE,
        _ => codes::INVALID_PTX,
    };
    let mut errors = UNCOUNTED.as_bytes().to_vec();
    errors.truncate(room as usize);
    Loaded {
        code,
        id: 0,
        information: Blob(Vec::new()),
        errors: Blob(errors),
    }
}

impl Server {
    pub(super) fn load(&mut self, call: Load) -> Result<Loaded, i32> {
        if self.enter(call.context)? == 0 && !call.library {
            return Err(codes::INVALID_CONTEXT);
        }
        self.backend.objects.check_room()?;
        let mut jit = Jit::new(&call.options, call.room)?;
        let mut image = call.image.0;
        if image.is_empty() {
            return Err(codes::INVALID_IMAGE);
        }
        let is_silent = prints::is_silent(&image);
        let size = match self.quota.limit() {
            u64::MAX => Size::default(),
            _ => match variables::size(&image) {
                Some(size) => size,
                // Nothing is loaded that is not counted: it may take any amount.
                None => return Ok(uncounted(&image, call.room.1)),
            },
        };
        let cost = match call.library {
            true => self.charge_library(size)?,
            false => self.charge_image(size, 1)?,
        };
        // Terminates the image in case it is text.
        image.extend([0; 16]);
        let image = image.as_ptr().cast();
        let (names, values) = (jit.names.as_mut_ptr(), jit.values.as_mut_ptr());
        let api = &self.backend.api;
        let (mut module, mut library) = (null_mut(), null_mut());
        let code = if call.library {
            cu!(
                api,
                cuLibraryLoadData(
                    &raw mut library,
                    image,
                    names,
                    values,
                    jit.count(),
                    null_mut(),
                    null_mut(),
                    0,
                )
            )
        } else {
            cu!(
                api,
                cuModuleLoadDataEx(&raw mut module, image, jit.count(), names, values)
            )
        };
        let objects = &mut self.backend.objects;
        let id = match code {
            0 if call.library => objects.number(Kind::Library, library as usize, 0, 0),
            0 => objects.number(Kind::Module, module as usize, call.context, 0),
            _ => 0,
        };
        let kind = if call.library {
            Kind::Library
        } else {
            Kind::Module
        };
        if let Ok(object) = objects.get_mut(kind, id) {
            object.is_silent = is_silent;
            match call.library {
                true => self.library_loaded(id, size, cost),
                false => (object.charge, object.uncharged) = (cost.charge, cost.uncharged),
            }
        }
        let (information, errors) = jit.texts();
        Ok(Loaded {
            code,
            id,
            information,
            errors,
        })
    }

    pub(super) fn link(&mut self, call: Link) -> Result<Linked, i32> {
        if self.enter(call.context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        if call.inputs.len() > INPUTS {
            return Err(codes::INVALID_VALUE);
        }
        let mut jit = Jit::new(&call.options, call.room)?;
        let mut state = null_mut();
        let (names, values) = (jit.names.as_mut_ptr(), jit.values.as_mut_ptr());
        outcome(cu!(
            self.backend.api,
            cuLinkCreate_v2(jit.count(), names, values, &raw mut state)
        ))?;
        let linked = self.link_all(state, call.inputs);
        cu!(self.backend.api, cuLinkDestroy(state));
        let (information, errors) = jit.texts();
        let (code, image) = match linked {
            Ok(image) => (0, image),
            Err(code) => (code, Vec::new()),
        };
        Ok(Linked {
            code,
            image: Blob(image),
            information,
            errors,
        })
    }

    fn link_all(&self, state: CUlinkState, inputs: Vec<Input>) -> Result<Vec<u8>, i32> {
        let api = &self.backend.api;
        for input in inputs {
            let name = CString::new(input.name.0).map_err(|_| codes::INVALID_VALUE)?;
            let mut data = input.data.0;
            let size = data.len();
            data.extend([0; 16]);
            outcome(cu!(
                api,
                cuLinkAddData_v2(
                    state,
                    CUjitInputType_enum(input.kind),
                    data.as_mut_ptr().cast(),
                    size,
                    name.as_ptr(),
                    0,
                    null_mut(),
                    null_mut(),
                )
            ))?;
        }
        let (mut image, mut size) = (null_mut(), 0);
        outcome(cu!(
            api,
            cuLinkComplete(state, &raw mut image, &raw mut size)
        ))?;
        if image.is_null() {
            return Err(codes::UNKNOWN);
        }
        // SAFETY: the driver's image, valid until the state is destroyed.
        Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size) }.to_vec())
    }

    pub(super) fn enumerate(&mut self, call: &Enumerate) -> Result<Vec<u32>, i32> {
        self.enter(call.context)?;
        let library = self.backend.objects.get(Kind::Library, call.of);
        let (kind, raw) = match library {
            Ok(library) => (Kind::Kernel, library.raw),
            Err(_) => (
                Kind::Function,
                self.backend.objects.get(Kind::Module, call.of)?.raw,
            ),
        };
        let most = call.most.min(ENUMERATED);
        let mut found = vec![0usize; most as usize];
        let to = found.as_mut_ptr();
        let api = &self.backend.api;
        outcome(if kind == Kind::Kernel {
            cu!(
                api,
                cuLibraryEnumerateKernels(to.cast(), most, raw as CUlibrary)
            )
        } else {
            cu!(
                api,
                cuModuleEnumerateFunctions(to.cast(), most, raw as CUmodule)
            )
        })?;
        let context = if kind == Kind::Function {
            call.context
        } else {
            0
        };
        let objects = &mut self.backend.objects;
        let mut numbers = Vec::with_capacity(found.len());
        for raw in found {
            objects.check_room()?;
            numbers.push(objects.number(kind, raw, context, call.of));
        }
        Ok(numbers)
    }

    /// The layout of a function's or kernel's parameters, cached after the first query.
    pub(super) fn layout(&mut self, function: u32) -> Result<Arc<Layout>, i32> {
        let object = self.backend.objects.get(Kind::Function, function)?;
        if let Some(layout) = &object.layout {
            return Ok(Arc::clone(layout));
        }
        let (kind, raw) = (object.kind, object.raw);
        let mut layout = Layout {
            prints: !self.backend.objects.is_silent(function),
            ..Layout::default()
        };
        for index in 0..PARAMETERS {
            let (mut offset, mut size) = (0, 0);
            let (to, bytes) = (&raw mut offset, &raw mut size);
            let api = &self.backend.api;
            let code = if kind == Kind::Kernel {
                cu!(api, cuKernelGetParamInfo(raw as CUkernel, index, to, bytes))
            } else {
                cu!(api, cuFuncGetParamInfo(raw as CUfunction, index, to, bytes))
            };
            match code {
                0 => {}
                // There are no more parameters.
                codes::INVALID_VALUE => break,
                code => return Err(code),
            }
            let (Ok(offset), Ok(size)) = (u32::try_from(offset), u32::try_from(size)) else {
                return Err(codes::UNKNOWN);
            };
            layout.parameters.push((offset, size));
            layout.size = layout.size.max(offset.saturating_add(size));
        }
        let layout = Arc::new(layout);
        let object = self.backend.objects.get_mut(Kind::Function, function)?;
        object.layout = Some(Arc::clone(&layout));
        Ok(layout)
    }

    pub(super) fn examine(&mut self, call: &Examine) -> Result<KernelInfo, i32> {
        self.enter(call.context)?;
        let layout = self.layout(call.function)?;
        let object = self.backend.objects.get(Kind::Function, call.function)?;
        let (kind, raw) = (object.kind, object.raw);
        let api = &self.backend.api;
        let (mut name, mut threads) = (null(), 0);
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        if kind == Kind::Kernel {
            cu!(api, cuKernelGetName(&raw mut name, raw as CUkernel));
            let device = self.backend.objects.get(Kind::Context, call.context);
            let device = device.map_or(0, |context| context.device);
            cu!(
                api,
                cuKernelGetAttribute(&raw mut threads, most, raw as CUkernel, device)
            );
        } else {
            cu!(api, cuFuncGetName(&raw mut name, raw as CUfunction));
            cu!(
                api,
                cuFuncGetAttribute(&raw mut threads, most, raw as CUfunction)
            );
        }
        let name = if name.is_null() {
            Vec::new()
        } else {
            // SAFETY: the driver's name, valid as long as the function.
            unsafe { CStr::from_ptr(name) }.to_bytes().to_vec()
        };
        Ok(KernelInfo {
            parameters: layout.parameters.clone(),
            name: Blob(name),
            threads,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    const TEXT: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n.global .b8 a[4096];";

    fn load(server: &mut Server, context: u32, library: bool, image: &[u8]) -> Result<Loaded, i32> {
        server.load(Load {
            context,
            library,
            image: Blob(image.to_vec()),
            options: Vec::new(),
            room: (0, 10),
        })
    }

    #[test]
    fn an_image_that_is_not_understood_is_not_loaded_under_a_quota() {
        let mut driver = testing::driver();
        // Calls of these would be answered with NOT_SUPPORTED.
        driver.functions.cuModuleLoadDataEx = None;
        driver.functions.cuLibraryLoadData = None;
        let (mut server, ..) = testing::server_of(driver, remoting_transport::window::SMALLEST);
        let context = testing::made(&mut server, 0, "cuCtxCreate_v2", &[0, 0]);
        for library in [false, true] {
            for (image, expected) in [
                (&b"\x7fELF, cut off"[..], codes::NO_BINARY_FOR_GPU),
                (&[&FAT[..], &[0; 9]].concat(), codes::INVALID_IMAGE),
                (b".global .b8 a[", codes::INVALID_PTX),
            ] {
                let loaded = load(&mut server, context, library, image).unwrap();
                assert_eq!((loaded.code, loaded.id), (expected, 0), "{image:?}");
                assert_eq!(loaded.errors.0, UNCOUNTED.as_bytes()[..10]);
            }
        }
    }

    #[test]
    fn code_beyond_what_needs_no_charge_is_charged_until_it_is_unloaded() {
        let (mut server, ..) = testing::server();
        let context = testing::made(&mut server, 0, "cuCtxCreate_v2", &[0, 0]);
        let length = TEXT.len() as u64;
        server.backend.uncharged_code = length;
        let before = server.quota.used();
        // What needs no charge is given back, too.
        for _ in 0..2 {
            let mut loaded = Vec::new();
            for charged in [4096, 2 * 4096 + length] {
                let module = load(&mut server, context, false, TEXT).unwrap();
                assert_eq!(module.code, 0);
                loaded.push(module.id);
                assert_eq!(server.quota.used() - before, charged);
            }
            for module in loaded {
                let (function, words) = testing::arguments("cuModuleUnload", &[module.into()]);
                server.forward(context, function, &words.0).unwrap();
            }
            assert_eq!(server.quota.used(), before);
        }
    }

    #[test]
    fn a_library_s_code_needs_no_charge_in_as_many_contexts_as_it_fits_for() {
        let (mut server, ..) = testing::server();
        let make = |server: &mut Server| testing::made(server, 0, "cuCtxCreate_v2", &[0, 0]);
        let context = make(&mut server);
        let length = TEXT.len() as u64;
        server.backend.uncharged_code = 2 * length;
        let before = server.quota.used();
        let library = load(&mut server, context, true, TEXT).unwrap();
        assert_eq!((library.code, server.quota.used() - before), (0, 4096));
        make(&mut server);
        assert_eq!(server.quota.used() - before, 2 * 4096);
        make(&mut server);
        assert_eq!(server.quota.used() - before, 3 * 4096 + length);
        let (function, words) = testing::arguments("cuLibraryUnload", &[library.id.into()]);
        server.forward(context, function, &words.0).unwrap();
        assert_eq!(server.quota.used(), before);
        assert!(server.quota.uncharge(2 * length, 2 * length).is_some());
    }
}

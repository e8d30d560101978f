//! Images: modules, libraries, linking, and their contents.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    sync::Mutex,
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{Enumerate, Input, Load},
        codes,
    },
    wire::Blob,
};

use crate::{
    context,
    entry::{Outcome, connected, entry_points, offer, put},
    forward::forward,
    handles, launch,
    link::Link,
};

/// The magic numbers of ELF files and the two forms of fat binaries.
const ELF: [u8; 4] = *b"\x7fELF";
const FAT: u32 = 0xba55_ed50;
const WRAPPED: u32 = 0x466_243b1;

/// The bytes of an image. PTX ends in a zero, other kinds have headers that contain their size.
///
/// # Safety
/// It is an image.
unsafe fn image<'a>(image: *const c_void) -> Outcome<&'a [u8]> {
    if image.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    let start = image.cast::<u8>();
    // SAFETY: according to its header, every kind of image has more bytes than are read of it here.
    unsafe {
        let word = |at: usize| start.add(at).cast::<u64>().read_unaligned();
        let half = |at: usize| start.add(at).cast::<u16>().read_unaligned();
        let first = start.cast::<u32>().read_unaligned();
        let size = if first == WRAPPED {
            // Magic, version, address of the fat binary.
            return self::image(word(8) as *const c_void);
        } else if first == FAT {
            // Magic, version, header size, size of the rest.
            u64::from(half(6)).saturating_add(word(8))
        } else if first.to_le_bytes() == ELF {
            // Leaves anything that is not a complete file for the driver to judge.
            if half(52) != 64 || half(58) != 64 && half(60) != 0 || half(54) != 56 && half(56) != 0
            {
                return Ok(std::slice::from_raw_parts(start, 8));
            }
            // The end of the section headers, or of the program headers if they come last.
            let sections = word(40).saturating_add(u64::from(half(58)) * u64::from(half(60)));
            let programs = word(32).saturating_add(u64::from(half(54)) * u64::from(half(56)));
            let mut end = sections.max(programs);
            for index in 0..u64::from(half(60)) {
                let header = word(40) + index * u64::from(half(58));
                let kind = start
                    .add(header as usize + 4)
                    .cast::<u32>()
                    .read_unaligned();
                // A section that has no bytes in the file has none here.
                if kind != 8 {
                    let (at, size) = (word(header as usize + 24), word(header as usize + 32));
                    end = end.max(at.saturating_add(size));
                }
            }
            end
        } else {
            let text = CStr::from_ptr(start.cast());
            text.to_bytes_with_nul().len() as u64
        };
        if size > 60 << 20 {
            return Err(codes::OUT_OF_MEMORY);
        }
        Ok(std::slice::from_raw_parts(start, size as usize))
    }
}

/// Compiler options: numbers, and the buffers for its two logs.
#[derive(Default)]
struct Options {
    numbers: Vec<(u32, u64)>,
    information: Option<(*mut u8, usize)>,
    errors: Option<(*mut u8, usize)>,
    /// Where the lengths of the logs are written.
    lengths: [Option<*mut *mut c_void>; 2],
}

impl Options {
    /// # Safety
    /// Names and values are valid as the API requires.
    unsafe fn read(
        count: c_uint,
        names: *mut CUjit_option,
        values: *mut *mut c_void,
    ) -> Outcome<Self> {
        use CUjit_option as O;
        let mut options = Self::default();
        let (mut buffers, mut sizes) = ([None; 2], [0usize; 2]);
        if count > 0 && (names.is_null() || values.is_null()) {
            return Err(codes::INVALID_VALUE);
        }
        for index in 0..count as usize {
            // SAFETY: the caller's promise.
            let (name, slot) = unsafe { (names.add(index).read(), values.add(index)) };
            // SAFETY: as above.
            let value = unsafe { slot.read() };
            match name {
                O::CU_JIT_INFO_LOG_BUFFER => buffers[0] = Some(value.cast::<u8>()),
                O::CU_JIT_ERROR_LOG_BUFFER => buffers[1] = Some(value.cast::<u8>()),
                O::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES => {
                    sizes[0] = value as usize & 0xffff_ffff;
                    options.lengths[0] = Some(slot);
                }
                O::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES => {
                    sizes[1] = value as usize & 0xffff_ffff;
                    options.lengths[1] = Some(slot);
                }
                // Written by the driver, and of no consequence.
                O::CU_JIT_WALL_TIME => {}
                O::CU_JIT_GLOBAL_SYMBOL_NAMES
                | O::CU_JIT_GLOBAL_SYMBOL_ADDRESSES
                | O::CU_JIT_GLOBAL_SYMBOL_COUNT => return Err(codes::NOT_SUPPORTED),
                name => options.numbers.push((name.0, value as u64)),
            }
        }
        let text = |place: usize| {
            let buffer = buffers[place].filter(|at| !at.is_null());
            buffer
                .map(|at| (at, sizes[place]))
                .filter(|(_, size)| *size > 0)
        };
        options.information = text(0);
        options.errors = text(1);
        Ok(options)
    }

    fn room(&self) -> (u32, u32) {
        let of = |text: Option<(*mut u8, usize)>| text.map_or(0, |(_, size)| size as u32);
        (of(self.information), of(self.errors))
    }

    /// Writes the compiler's logs.
    ///
    /// # Safety
    /// As for `read`.
    unsafe fn write(&self, information: &[u8], errors: &[u8]) {
        let all = [(self.information, information), (self.errors, errors)];
        for (place, (buffer, text)) in all.into_iter().enumerate() {
            let Some((at, room)) = buffer else {
                continue;
            };
            let bytes = text.len().min(room - 1);
            // SAFETY: the caller promises this much room.
            unsafe {
                at.copy_from_nonoverlapping(text.as_ptr(), bytes);
                at.add(bytes).write(0);
                if let Some(length) = self.lengths[place] {
                    length.write((bytes + 1) as *mut c_void);
                }
            }
        }
    }
}

fn load(link: &Link, image: Vec<u8>, library: bool, options: &Options) -> Outcome<u64> {
    let loaded = link.ask(&Load {
        context: context::current(),
        image: Blob(image),
        library,
        options: options.numbers.clone(),
        room: options.room(),
    })?;
    // SAFETY: as when the options were read.
    unsafe { options.write(&loaded.information.0, &loaded.errors.0) };
    if loaded.code != 0 {
        return Err(loaded.code);
    }
    let kind = if library { Kind::Library } else { Kind::Module };
    Ok(handles::handle(kind, loaded.id))
}

unsafe fn load_module(module: *mut CUmodule, from: *const c_void, options: &Options) -> Outcome {
    let link = connected()?;
    context::need()?;
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = image(from)?.to_vec();
        put(module, load(link, bytes, false, options)? as CUmodule)
    }
}

unsafe fn file(name: *const c_char) -> Outcome<Vec<u8>> {
    if name.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: the caller's promise.
    let name = std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes());
    let mut image = std::fs::read(name).map_err(|_| codes::FILE_NOT_FOUND)?;
    // A text in a file is not terminated by a zero.
    image.push(0);
    Ok(image)
}

/// The names of functions, which are kept as long as the process: programs keep the pointers.
fn name(function: u64) -> Outcome<*const c_char> {
    static NAMES: Mutex<Option<HashMap<Vec<u8>, CString>>> = Mutex::new(None);
    // A null handle is a different error than an invalid one.
    if function == 0 {
        return Err(codes::INVALID_VALUE);
    }
    let kernel = launch::kernel(connected()?, function)?;
    let mut names = NAMES.lock_unpoisoned();
    let names = names.get_or_insert_default();
    let text = names
        .entry(kernel.name.clone())
        .or_insert_with(|| CString::new(kernel.name.clone()).unwrap_or_default());
    Ok(text.as_ptr())
}

unsafe fn enumerate<T>(to: *mut *mut T, count: c_uint, of: u64, kinds: (Kind, Kind)) -> Outcome {
    let link = connected()?;
    let numbers = link.ask(&Enumerate {
        context: context::current(),
        of: handles::valid(kinds.0, of)?,
        most: count,
    })?;
    if to.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    for (index, number) in numbers.into_iter().take(count as usize).enumerate() {
        // SAFETY: the caller has room for this many.
        unsafe {
            to.add(index)
                .write(handles::handle(kinds.1, number) as *mut T)
        };
    }
    Ok(())
}

/// The inputs of a link operation.
#[derive(Default)]
struct Linking {
    inputs: Vec<Input>,
    options: Vec<(u32, u64)>,
    /// The addresses of the buffers for the compiler's logs.
    texts: [Option<(usize, usize)>; 2],
    image: Vec<u8>,
}

/// All link operations in progress, by handle.
static LINKING: Mutex<Option<HashMap<u64, Linking>>> = Mutex::new(None);

fn linking<T>(state: CUlinkState, call: impl FnOnce(&mut Linking) -> Outcome<T>) -> Outcome<T> {
    let mut all = LINKING.lock_unpoisoned();
    let all = all.get_or_insert_default();
    let one = all.get_mut(&(state as u64));
    call(one.ok_or(codes::INVALID_HANDLE)?)
}

fn add_input(state: CUlinkState, kind: CUjitInputType, name: Vec<u8>, data: Vec<u8>) -> Outcome {
    linking(state, |linking| {
        linking.inputs.push(Input {
            kind: kind.0,
            name: Blob(name),
            data: Blob(data),
        });
        Ok(())
    })
}

entry_points! {
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        load_module(module, image, &Options::default())
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        numOptions: c_uint,
        options: *mut CUjit_option,
        optionValues: *mut *mut c_void,
    ) {
        load_module(module, image, &Options::read(numOptions, options, optionValues)?)
    }

    fn cuModuleLoadFatBinary(module: *mut CUmodule, fatCubin: *const c_void) {
        load_module(module, fatCubin, &Options::default())
    }

    fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char) {
        let link = connected()?;
        context::need()?;
        put(module, load(link, file(fname)?, false, &Options::default())? as CUmodule)
    }

    fn cuLibraryLoadData(
        library: *mut CUlibrary,
        code: *const c_void,
        jitOptions: *mut CUjit_option,
        jitOptionsValues: *mut *mut c_void,
        numJitOptions: c_uint,
        _libraryOptions: *mut CUlibraryOption,
        _libraryOptionValues: *mut *mut c_void,
        _numLibraryOptions: c_uint,
    ) {
        let link = connected()?;
        let options = Options::read(numJitOptions, jitOptions, jitOptionsValues)?;
        let bytes = image(code)?.to_vec();
        put(library, load(link, bytes, true, &options)? as CUlibrary)
    }

    fn cuLibraryLoadFromFile(
        library: *mut CUlibrary,
        fileName: *const c_char,
        jitOptions: *mut CUjit_option,
        jitOptionsValues: *mut *mut c_void,
        numJitOptions: c_uint,
        _libraryOptions: *mut CUlibraryOption,
        _libraryOptionValues: *mut *mut c_void,
        _numLibraryOptions: c_uint,
    ) {
        let link = connected()?;
        let options = Options::read(numJitOptions, jitOptions, jitOptionsValues)?;
        put(library, load(link, file(fileName)?, true, &options)? as CUlibrary)
    }

    fn cuModuleEnumerateFunctions(functions: *mut CUfunction, numFunctions: c_uint, r#mod: CUmodule) {
        enumerate(functions, numFunctions, r#mod as u64, (Kind::Module, Kind::Function))
    }

    fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, numKernels: c_uint, lib: CUlibrary) {
        enumerate(kernels, numKernels, lib as u64, (Kind::Library, Kind::Kernel))
    }

    fn cuModuleGetGlobal_v2(dptr: *mut CUdeviceptr, bytes: *mut usize, hmod: CUmodule, name: *const c_char) {
        context::need_connected()?;
        let (mut at, mut size) = (0u64, 0usize);
        forward("cuModuleGetGlobal_v2", &[&raw mut at as u64, &raw mut size as u64, hmod as u64, name as u64])?;
        offer(dptr, at);
        offer(bytes, size);
        Ok(())
    }

    fn cuLibraryGetGlobal(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char) {
        context::need_connected()?;
        let (mut at, mut size) = (0u64, 0usize);
        forward("cuLibraryGetGlobal", &[&raw mut at as u64, &raw mut size as u64, library as u64, name as u64])?;
        offer(dptr, at);
        offer(bytes, size);
        Ok(())
    }

    fn cuKernelGetName(name: *mut *const c_char, hfunc: CUkernel) {
        put(name, self::name(hfunc as u64)?)
    }

    fn cuFuncGetName(name: *mut *const c_char, hfunc: CUfunction) {
        put(name, self::name(hfunc as u64)?)
    }

    fn cuLinkCreate_v2(
        numOptions: c_uint,
        options: *mut CUjit_option,
        optionValues: *mut *mut c_void,
        stateOut: *mut CUlinkState,
    ) {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        connected()?;
        context::need()?;
        let options = Options::read(numOptions, options, optionValues)?;
        let text = |one: Option<(*mut u8, usize)>| one.map(|(at, size)| (at as usize, size));
        let new = Linking {
            options: options.numbers.clone(),
            texts: [text(options.information), text(options.errors)],
            ..Linking::default()
        };
        let state = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) << 4 | 0x4780_0000_0000;
        LINKING.lock_unpoisoned().get_or_insert_default().insert(state, new);
        put(stateOut, state as CUlinkState)
    }

    fn cuLinkAddData_v2(
        state: CUlinkState,
        r#type: CUjitInputType,
        data: *mut c_void,
        size: usize,
        name: *const c_char,
        _numOptions: c_uint,
        _options: *mut CUjit_option,
        _optionValues: *mut *mut c_void,
    ) {
        connected()?;
        if data.is_null() || size > 60 << 20 {
            return Err(codes::INVALID_VALUE);
        }
        let name = if name.is_null() { Vec::new() } else { CStr::from_ptr(name).to_bytes().to_vec() };
        add_input(state, r#type, name, std::slice::from_raw_parts(data.cast::<u8>(), size).to_vec())
    }

    fn cuLinkAddFile_v2(
        state: CUlinkState,
        r#type: CUjitInputType,
        path: *const c_char,
        _numOptions: c_uint,
        _options: *mut CUjit_option,
        _optionValues: *mut *mut c_void,
    ) {
        connected()?;
        let data = file(path)?;
        add_input(state, r#type, CStr::from_ptr(path).to_bytes().to_vec(), data)
    }

    fn cuLinkComplete(state: CUlinkState, cubinOut: *mut *mut c_void, sizeOut: *mut usize) {
        let link = connected()?;
        let context = context::need()?;
        let (at, size) = linking(state, |linking| {
            let size = |text: Option<(usize, usize)>| text.map_or(0, |(_, size)| size as u32);
            let linked = link.ask(&remoting_proto::apis::cuda::calls::Link {
                context,
                inputs: std::mem::take(&mut linking.inputs),
                options: linking.options.clone(),
                room: (size(linking.texts[0]), size(linking.texts[1])),
            })?;
            let buffer = |text: Option<(usize, usize)>| text.map(|(at, size)| (at as *mut u8, size));
            let options = Options {
                information: buffer(linking.texts[0]),
                errors: buffer(linking.texts[1]),
                ..Options::default()
            };
            // SAFETY: the program keeps its buffers until the state is destroyed.
            unsafe { options.write(&linked.information.0, &linked.errors.0) };
            if linked.code != 0 {
                return Err(linked.code);
            }
            linking.image = linked.image.0;
            Ok((linking.image.as_mut_ptr(), linking.image.len()))
        })?;
        offer(sizeOut, size);
        put(cubinOut, at.cast())
    }

    fn cuLinkDestroy(state: CUlinkState) {
        connected()?;
        let mut all = LINKING.lock_unpoisoned();
        let gone = all.get_or_insert_default().remove(&(state as u64));
        gone.map(drop).ok_or(codes::INVALID_HANDLE)
    }

    fn cuFuncGetParamInfo(func: CUfunction, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) {
        launch::parameter(func as u64, paramIndex, paramOffset, paramSize)
    }

    fn cuKernelGetParamInfo(kernel: CUkernel, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) {
        launch::parameter(kernel as u64, paramIndex, paramOffset, paramSize)
    }

    fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int) {
        forward("cuFuncSetAttribute", &[hfunc as u64, attrib.0.into(), value.cast_unsigned().into()])?;
        launch::forget_attributes();
        launch::note_attribute(hfunc as u64, attrib, value);
        Ok(())
    }

    fn cuKernelSetAttribute(attrib: CUfunction_attribute, val: c_int, kernel: CUkernel, dev: CUdevice) {
        if dev == 0 && launch::has_attribute(kernel as u64, attrib, val) {
            return Ok(());
        }
        let words = [attrib.0.into(), val.cast_unsigned().into(), kernel as u64, dev.cast_unsigned().into()];
        forward("cuKernelSetAttribute", &words)?;
        launch::note_attribute(kernel as u64, attrib, val);
        launch::has_got_attribute(kernel as u64, attrib, val);
        Ok(())
    }
}

//! Modules, libraries, kernels and launches.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{Arc, PoisonError},
};

use cuda_definition::driver::types::*;

use super::{device, entry_points, images, offer, put, text};
use crate::driver::{
    ARCHITECTURE, Answer, SHARED_OPT_IN, THREADS, context,
    module::{Kernel, Module, Shape},
    objects,
    stream::Task,
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Loads an image: PTX that ends with a zero byte, or a fat binary that contains PTX.
///
/// # Safety
/// The image is PTX or has the header of another kind of image; the options meet the API's requirements.
unsafe fn load(
    image: *const c_void,
    count: c_uint,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> Answer<Arc<Module>> {
    use CUjit_option as O;
    let context = context::current()?;
    if image.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller's promise: every kind of image has at least this many bytes.
    let first = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    if first == *b"\x7fELF" {
        eprintln!("stand-in CUDA driver: it executes PTX only, not machine code");
        return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    let text = if first == images::MAGIC.to_le_bytes() {
        // SAFETY: the caller's promise: the image is what its header says.
        let found = unsafe { images::ptx(image.cast(), ARCHITECTURE) };
        Cow::Owned(found.map_err(|(error, what)| {
            eprintln!("stand-in CUDA driver: {what}");
            error
        })?)
    } else {
        // SAFETY: the caller's promise.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str();
        Cow::Borrowed(text.map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?)
    };
    let loaded = Module::load(&text, context.owner());
    let (mut log, mut room) = (None, 0);
    for number in 0..if options.is_null() || values.is_null() {
        0
    } else {
        count as usize
    } {
        // SAFETY: the caller's promise.
        let (option, value) = unsafe { (options.add(number).read(), values.add(number).read()) };
        match option {
            O::CU_JIT_ERROR_LOG_BUFFER => log = Some(value.cast::<u8>()),
            // The pointer itself is the size.
            O::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES => room = value as usize & 0xffff_ffff,
            _ => {}
        }
    }
    loaded.map_err(|(error, what)| {
        eprintln!("stand-in CUDA driver: {what}");
        if let Some(log) = log.filter(|log| !log.is_null() && room > 0) {
            let bytes = what.len().min(room - 1);
            // SAFETY: the caller's promise that there is this much room.
            unsafe {
                log.copy_from_nonoverlapping(what.as_ptr(), bytes);
                log.add(bytes).write(0);
            }
        }
        error
    })
}

fn find(module: &Module, name: &str) -> Answer<CUfunction> {
    let found = module
        .kernels
        .iter()
        .find(|kernel| kernel.name.to_bytes() == name.as_bytes());
    found
        .map(|kernel| kernel.handle as CUfunction)
        .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)
}

unsafe fn variable(
    module: &Module,
    name: &str,
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
) -> Answer {
    let (at, size) = module
        .variables
        .get(name)
        .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
    // SAFETY: the caller's promise.
    unsafe {
        offer(dptr, *at);
        offer(bytes, usize::try_from(*size).unwrap_or(usize::MAX));
    }
    Ok(())
}

fn attribute(kernel: &Kernel, attribute: CUfunction_attribute) -> Answer<c_int> {
    use CUfunction_attribute as A;
    let small = |value: u64| c_int::try_from(value).unwrap_or(c_int::MAX);
    let program = &kernel.program;
    Ok(match attribute {
        A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => program.max_threads.cast_signed(),
        A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => small(program.shared),
        A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES => {
            small(program.functions.iter().map(|f| f.frame).sum())
        }
        A::CU_FUNC_ATTRIBUTE_NUM_REGS => program
            .functions
            .iter()
            .map(|f| f.registers)
            .max()
            .unwrap_or(0)
            .clamp(1, 255)
            .cast_signed(),
        A::CU_FUNC_ATTRIBUTE_PTX_VERSION | A::CU_FUNC_ATTRIBUTE_BINARY_VERSION => {
            crate::driver::ARCHITECTURE.cast_signed()
        }
        A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => small(
            *kernel
                .dynamic_limit
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        ),
        A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => -1,
        CUfunction_attribute_enum(0..=15) => 0,
        _ => return Err(INVALID),
    })
}

fn set_attribute(kernel: &Kernel, attribute: CUfunction_attribute, value: c_int) -> Answer {
    use CUfunction_attribute as A;
    match attribute {
        A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
            let size = u64::try_from(value).map_err(|_| INVALID)?;
            if size + kernel.program.shared > SHARED_OPT_IN {
                return Err(INVALID);
            }
            *kernel
                .dynamic_limit
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = size;
            Ok(())
        }
        A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => Ok(()),
        _ => Err(INVALID),
    }
}

unsafe fn parameter(kernel: &Kernel, index: usize, offset: *mut usize, size: *mut usize) -> Answer {
    let (at, bytes) = kernel.program.parameters.get(index).ok_or(INVALID)?;
    let small = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    // SAFETY: the caller's promise.
    unsafe {
        put(offset, small(*at))?;
        offer(size, small(*bytes));
    }
    Ok(())
}

/// The bytes of a kernel's parameters, given as an address for each or in a buffer.
///
/// # Safety
/// `kernelParams` and `extra` meet the API's requirements.
unsafe fn parameters(
    kernel: &Kernel,
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer<Vec<u8>> {
    let program = &kernel.program;
    let mut bytes = vec![0u8; usize::try_from(program.parameter_bytes).unwrap_or(0)];
    if !extra.is_null() {
        let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
        for pair in 0..4 {
            // SAFETY: the caller's promise: pairs up to CU_LAUNCH_PARAM_END.
            let (key, value) = unsafe {
                (extra.add(2 * pair).read() as u64, || {
                    extra.add(2 * pair + 1).read()
                })
            };
            match key {
                0 => break,
                1 => buffer = value().cast(),
                // SAFETY: the caller's promise: it points to the size.
                2 => size = unsafe { value().cast::<usize>().read() },
                _ => return Err(INVALID),
            }
        }
        if size < bytes.len() || (buffer.is_null() && !bytes.is_empty()) {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise that there are this many bytes.
        unsafe { buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        return Ok(bytes);
    }
    for (number, (at, size)) in program.parameters.iter().enumerate() {
        if each.is_null() {
            return Err(INVALID);
        }
        let (at, size) = (
            usize::try_from(*at).unwrap_or(0),
            usize::try_from(*size).unwrap_or(0),
        );
        // SAFETY: the caller's promise: an address for each parameter.
        unsafe {
            let from = each.add(number).read().cast::<u8>();
            if from.is_null() {
                return Err(INVALID);
            }
            from.copy_to_nonoverlapping(bytes[at..at + size].as_mut_ptr(), size);
        }
    }
    Ok(bytes)
}

/// A launch as work.
///
/// # Safety
/// As for [`parameters`].
pub unsafe fn work(
    function: CUfunction,
    shape: Shape,
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer<Task> {
    let kernel = objects::kernel(function)?;
    // SAFETY: the caller's promise.
    let parameters = unsafe { parameters(&kernel, each, extra) }?;
    kernel.launch(shape, parameters)
}

unsafe fn launch(
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer {
    let context = context::current()?;
    let stream = context.stream(stream)?;
    // SAFETY: the caller's promise.
    let task = unsafe { work(function, shape, each, extra) }?;
    context.submit(&stream, task)?;
    Ok(())
}

/// Number of a kernel's blocks that a multiprocessor can hold at once.
fn occupancy(kernel: &Kernel, threads: c_int, dynamic: usize) -> Answer<c_int> {
    let threads = u32::try_from(threads)
        .ok()
        .filter(|threads| *threads > 0)
        .ok_or(INVALID)?;
    if threads > kernel.program.max_threads {
        return Ok(0);
    }
    let shared = kernel.program.shared + dynamic as u64;
    let by_shared = SHARED_OPT_IN.checked_div(shared).unwrap_or(32).min(32);
    let by_threads = THREADS / threads.next_multiple_of(32);
    Ok(c_int::try_from(by_shared.min(u64::from(by_threads))).unwrap_or(0))
}

entry_points! {
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        let loaded = load(image, 0, std::ptr::null_mut(), std::ptr::null_mut())?;
        put(module, loaded.handle as CUmodule)
    }

    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        numOptions: c_uint,
        options: *mut CUjit_option,
        optionValues: *mut *mut c_void,
    ) {
        let loaded = load(image, numOptions, options, optionValues)?;
        put(module, loaded.handle as CUmodule)
    }

    fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char) {
        let mut image = std::fs::read(text(fname)?).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
        image.extend([0; 4]);
        let loaded = load(image.as_ptr().cast(), 0, std::ptr::null_mut(), std::ptr::null_mut())?;
        put(module, loaded.handle as CUmodule)
    }

    fn cuModuleUnload(hmod: CUmodule) {
        let context = context::current()?;
        let module = objects::module(hmod)?;
        context.synchronize()?;
        module.unload();
        Ok(())
    }

    fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) {
        put(mode, CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING)
    }

    fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char) {
        context::current()?;
        put(hfunc, find(&*objects::module(hmod)?, text(name)?)?)
    }

    fn cuModuleGetFunctionCount(count: *mut c_uint, r#mod: CUmodule) {
        put(count, c_uint::try_from(objects::module(r#mod)?.kernels.len()).unwrap_or(c_uint::MAX))
    }

    fn cuModuleGetGlobal_v2(dptr: *mut CUdeviceptr, bytes: *mut usize, hmod: CUmodule, name: *const c_char) {
        context::current()?;
        variable(&*objects::module(hmod)?, text(name)?, dptr, bytes)
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
        let loaded = load(code, numJitOptions, jitOptions, jitOptionsValues)?;
        put(library, loaded.handle as CUlibrary)
    }

    fn cuLibraryUnload(library: CUlibrary) {
        let module = objects::module(library)?;
        for context in objects::contexts() {
            // A fault of another context does not concern this one.
            let _: Answer = context.synchronize();
        }
        module.unload();
        Ok(())
    }

    fn cuLibraryGetKernel(pKernel: *mut CUkernel, library: CUlibrary, name: *const c_char) {
        put(pKernel, find(&*objects::module(library)?, text(name)?)?.cast())
    }

    fn cuLibraryGetKernelCount(count: *mut c_uint, lib: CUlibrary) {
        put(count, c_uint::try_from(objects::module(lib)?.kernels.len()).unwrap_or(c_uint::MAX))
    }

    fn cuLibraryGetModule(pMod: *mut CUmodule, library: CUlibrary) {
        context::current()?;
        put(pMod, objects::module(library)?.handle as CUmodule)
    }

    fn cuLibraryGetGlobal(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char) {
        context::current()?;
        variable(&*objects::module(library)?, text(name)?, dptr, bytes)
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
        let mut image = std::fs::read(text(fileName)?).map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)?;
        image.extend([0; 16]);
        let loaded = load(image.as_ptr().cast(), numJitOptions, jitOptions, jitOptionsValues)?;
        put(library, loaded.handle as CUlibrary)
    }

    fn cuLibraryGetManaged(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char) {
        context::initialised()?;
        let (module, name) = (objects::module(library)?, text(name)?);
        if !module.managed.contains(name) {
            return Err(CUresult::CUDA_ERROR_NOT_FOUND);
        }
        variable(&module, name, dptr, bytes)
    }

    fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, numKernels: c_uint, lib: CUlibrary) {
        let module = objects::module(lib)?;
        if kernels.is_null() && numKernels > 0 {
            return Err(INVALID);
        }
        for (number, kernel) in module.kernels.iter().take(numKernels as usize).enumerate() {
            kernels.add(number).write(kernel.handle as CUkernel);
        }
        Ok(())
    }

    fn cuKernelGetFunction(pFunc: *mut CUfunction, kernel: CUkernel) {
        context::current()?;
        put(pFunc, objects::kernel(kernel)?.handle as CUfunction)
    }

    fn cuKernelGetLibrary(pLib: *mut CUlibrary, kernel: CUkernel) {
        put(pLib, objects::kernel(kernel)?.module as CUlibrary)
    }

    fn cuFuncGetModule(hmod: *mut CUmodule, hfunc: CUfunction) {
        put(hmod, objects::kernel(hfunc)?.module as CUmodule)
    }

    // The name lives as long as the kernel, which is kept by the table of handles.
    fn cuKernelGetName(name: *mut *const c_char, hfunc: CUkernel) {
        put(name, objects::kernel(hfunc)?.name.as_ptr())
    }

    fn cuFuncGetName(name: *mut *const c_char, hfunc: CUfunction) {
        put(name, objects::kernel(hfunc)?.name.as_ptr())
    }

    fn cuKernelGetParamInfo(kernel: CUkernel, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) {
        parameter(&*objects::kernel(kernel)?, paramIndex, paramOffset, paramSize)
    }

    fn cuFuncGetParamInfo(func: CUfunction, paramIndex: usize, paramOffset: *mut usize, paramSize: *mut usize) {
        parameter(&*objects::kernel(func)?, paramIndex, paramOffset, paramSize)
    }

    fn cuKernelGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, kernel: CUkernel, dev: CUdevice) {
        device(dev)?;
        put(pi, attribute(&*objects::kernel(kernel)?, attrib)?)
    }

    fn cuKernelSetAttribute(attrib: CUfunction_attribute, val: c_int, kernel: CUkernel, dev: CUdevice) {
        device(dev)?;
        set_attribute(&*objects::kernel(kernel)?, attrib, val)
    }

    fn cuKernelSetCacheConfig(kernel: CUkernel, _config: CUfunc_cache, dev: CUdevice) {
        device(dev)?;
        objects::kernel(kernel).map(|_| ())
    }

    fn cuFuncGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, hfunc: CUfunction) {
        put(pi, attribute(&*objects::kernel(hfunc)?, attrib)?)
    }

    fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int) {
        set_attribute(&*objects::kernel(hfunc)?, attrib, value)
    }

    fn cuFuncSetCacheConfig(hfunc: CUfunction, _config: CUfunc_cache) {
        objects::kernel(hfunc).map(|_| ())
    }

    fn cuFuncIsLoaded(state: *mut CUfunctionLoadingState, function: CUfunction) {
        objects::kernel(function)?;
        put(state, CUfunctionLoadingState::CU_FUNCTION_LOADING_STATE_LOADED)
    }

    fn cuFuncLoad(function: CUfunction) {
        objects::kernel(function).map(|_| ())
    }

    fn cuLaunchKernel(
        f: CUfunction,
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let shape = Shape {
            grid: [gridDimX, gridDimY, gridDimZ],
            block: [blockDimX, blockDimY, blockDimZ],
            dynamic: u64::from(sharedMemBytes),
            cooperative: false,
        };
        launch(f, shape, hStream, kernelParams, extra)
    }

    fn cuLaunchCooperativeKernel(
        f: CUfunction,
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        kernelParams: *mut *mut c_void,
    ) {
        let shape = Shape {
            grid: [gridDimX, gridDimY, gridDimZ],
            block: [blockDimX, blockDimY, blockDimZ],
            dynamic: u64::from(sharedMemBytes),
            cooperative: true,
        };
        launch(f, shape, hStream, kernelParams, std::ptr::null_mut())
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        f: CUfunction,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        use CUlaunchAttributeID as Id;
        let config = config.as_ref().ok_or(INVALID)?;
        let mut cooperative = false;
        for number in 0..config.numAttrs as usize {
            let attribute = config.attrs.add(number).as_ref().ok_or(INVALID)?;
            match attribute.id {
                Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE => cooperative = attribute.value.cooperative != 0,
                Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                    let cluster = attribute.value.clusterDim;
                    if (cluster.x, cluster.y, cluster.z) != (1, 1, 1) {
                        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
                    }
                }
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT | Id::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT => {
                    return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
                }
                // Hints.
                _ => {}
            }
        }
        let shape = Shape {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            dynamic: u64::from(config.sharedMemBytes),
            cooperative,
        };
        launch(f, shape, config.hStream, kernelParams, extra)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        numBlocks: *mut c_int,
        func: CUfunction,
        blockSize: c_int,
        dynamicSMemSize: usize,
    ) {
        put(numBlocks, occupancy(&*objects::kernel(func)?, blockSize, dynamicSMemSize)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        numBlocks: *mut c_int,
        func: CUfunction,
        blockSize: c_int,
        dynamicSMemSize: usize,
        _flags: c_uint,
    ) {
        put(numBlocks, occupancy(&*objects::kernel(func)?, blockSize, dynamicSMemSize)?)
    }
}

//! Probes whether the host's driver does what this backend relies on, step by step, and reports the
//! driver's result of each.

use std::{
    ffi::{c_int, c_void},
    ptr::{null, null_mut},
};

use cuda_definition::driver::types::*;
use remoting_transport::{mapping, window::Window};

use super::{
    arena,
    driver::{Api, result},
};

/// A kernel that increments one word per thread.
const KERNEL: &[u8] = b".version 6.0\n.target sm_50\n.address_size 64\n\
    .visible .entry increment(.param .u64 words)\n{\n\
    .reg .b32 %r<3>;\n.reg .b64 %rd<4>;\n\
    ld.param.u64 %rd1, [words];\ncvta.to.global.u64 %rd2, %rd1;\n\
    mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd2, %rd2, %rd3;\n\
    ld.global.u32 %r2, [%rd2];\nadd.s32 %r2, %r2, 1;\nst.global.u32 [%rd2], %r2;\nret;\n}\n\0";
/// Number of threads, and of words.
const WORDS: usize = 256;
const BYTES: usize = WORDS * 4;
/// Size of the test window, and of its rings.
const WINDOW: u64 = 64 << 20;
const RING: u64 = 1 << 20;

/// The finding of a step, or why it failed.
pub type Found = Result<String, String>;

pub(super) fn answered(name: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("{name} answers {}", result(code))),
    }
}

macro_rules! ask {
    ($api:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::probe::answered(
            stringify!($name),
            $crate::driver::cu!($api, $name($($argument),*)),
        )
    };
}
pub(super) use ask;

/// Runs all steps up to the first that fails, and reports each. Returns whether all succeeded.
pub fn steps(library: &str, with_arena: bool, mut tell: impl FnMut(&str, &Found)) -> bool {
    let mut step = |name: &str, found: Found| {
        tell(name, &found);
        found.ok()
    };
    let mut tried = || {
        if with_arena {
            let kept = arena::fill().map(|()| "kept".to_owned());
            step("addresses", kept.map_err(|error| error.to_string()))?;
        }
        let api = Api::open(library, None);
        let started =
            match &api {
                Ok(_) => Ok("started".to_owned()),
                Err(error) => Err(base::causes(error)
                    .fold(error.to_string(), |all, cause| format!("{all}: {cause}"))),
            };
        step("driver", started)?;
        let api = api.ok()?;
        step("device", device(&api))?;
        step("context", context(&api))?;
        let mut memory = 0;
        step("memory", allocate(&api, &mut memory))?;
        let mut shared = None;
        step("window", window(&api, with_arena, &mut shared))?;
        // Stays mapped until all steps are done.
        let (_window, at) = shared?;
        step("kernel", kernel(&api, memory, at))
    };
    tried().is_some()
}

fn device(api: &Api) -> Found {
    let (mut version, mut count) = (0, 0);
    ask!(api, cuDriverGetVersion(&raw mut version))?;
    ask!(api, cuDeviceGetCount(&raw mut count))?;
    let mut name = [0u8; 256];
    ask!(api, cuDeviceGetName(name.as_mut_ptr().cast(), 255, 0))?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name);
    Ok(format!("{count}, the first is {name}; version {version}"))
}

fn context(api: &Api) -> Found {
    let mut context = null_mut();
    ask!(api, cuDevicePrimaryCtxRetain(&raw mut context, 0))?;
    ask!(api, cuCtxSetCurrent(context))?;
    Ok("made".to_owned())
}

fn allocate(api: &Api, at: &mut CUdeviceptr) -> Found {
    ask!(api, cuMemAlloc_v2(at, 64 << 20))?;
    let place = match arena::ARENA.contains(at) {
        true => "in the arena",
        false => "outside of the arena",
    };
    Ok(format!("64 MiB at {at:#x}, {place}"))
}

/// Maps a window, in its reserved place if there is one, and registers all of it with the driver.
/// Yields the address of its data.
fn window(
    api: &Api,
    kept: bool,
    shared: &mut Option<(std::sync::Arc<Window>, *mut c_void)>,
) -> Found {
    let text = |error: mapping::Error| error.to_string();
    let file = mapping::create(WINDOW).map_err(text)?;
    let mapped = match kept {
        // SAFETY: `arena::fill` has reserved the place for this.
        true => unsafe { Window::map_at(&file, WINDOW, RING, arena::WINDOW.start) },
        false => Window::map(&file, WINDOW, RING),
    };
    let mapped = mapped.map_err(text)?;
    let size = mapped.size() - mapped.data();
    let data = mapped.at(mapped.data(), size).ok_or("it has no data")?;
    let data = data.cast::<c_void>();
    ask!(api, cuMemHostRegister_v2(data, size as usize, 1 | 2))?;
    let mut pointer = 0;
    ask!(api, cuMemHostGetDevicePointer_v2(&raw mut pointer, data, 0))?;
    *shared = Some((mapped, data));
    match pointer == data as u64 {
        true => Ok(format!(
            "known to the driver, at {pointer:#x} on both sides"
        )),
        false => Err(format!(
            "at {data:?} here and at {pointer:#x} on the device"
        )),
    }
}

/// Copies words to the device, lets a kernel change them, and copies them back.
fn kernel(api: &Api, memory: CUdeviceptr, data: *mut c_void) -> Found {
    let mut module = null_mut();
    let image = KERNEL.as_ptr().cast();
    ask!(
        api,
        cuModuleLoadDataEx(&raw mut module, image, 0, null_mut(), null_mut())
    )?;
    let mut function = null_mut();
    let name = c"increment".as_ptr();
    ask!(api, cuModuleGetFunction(&raw mut function, module, name))?;
    let words = data.cast::<u32>();
    let value = |index: usize| (index as u32).wrapping_mul(0x9e37_79b9);
    for index in 0..WORDS {
        // SAFETY: the window's data area is longer, and nobody else has this window.
        unsafe { words.add(index).write_volatile(value(index)) };
    }
    let stream = null_mut();
    ask!(api, cuMemcpyHtoDAsync_v2(memory, data, BYTES, stream))?;
    let mut parameter = memory;
    let mut parameters = [(&raw mut parameter).cast::<c_void>()];
    let parameters = parameters.as_mut_ptr();
    let threads = WORDS as u32;
    ask!(
        api,
        cuLaunchKernel(
            function,
            1,
            1,
            1,
            threads,
            1,
            1,
            0,
            stream,
            parameters,
            null::<*mut c_void>().cast_mut()
        )
    )?;
    ask!(api, cuMemcpyDtoHAsync_v2(data, memory, BYTES, stream))?;
    ask!(api, cuStreamSynchronize(stream))?;
    for index in 0..WORDS {
        // SAFETY: as above.
        let word = unsafe { words.add(index).read_volatile() };
        if word != value(index).wrapping_add(1) {
            return Err(format!("word {index} is {word:#x}"));
        }
    }
    Ok("right".to_owned())
}

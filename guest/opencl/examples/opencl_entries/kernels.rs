//! Programs that are not created from source, and queries and operations of kernels.

use std::{
    ffi::{CString, c_char, c_void},
    ptr::{null, null_mut},
};

use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

use super::{Part, device::check, device::cl, more::more};

/// `CL_DEVICE_BUILT_IN_KERNELS`.
const BUILT_IN_KERNELS: u32 = 0x103F;

pub fn run(part: &mut Part) -> Result<(), String> {
    intermediate(part);
    built_in(part)?;
    clones(part)?;
    questions(part)
}

fn intermediate(part: &mut Part) {
    let context = part.device.context;
    let mut code = 0;
    // SPIR-V's first word, followed by nothing valid.
    let words = [0x0723_0203u32, 0x0001_0000, 0, 1];
    let tries = [
        ("clCreateProgramWithIL", words.as_ptr(), 16),
        ("clCreateProgramWithIL of nothing", null(), 0),
    ];
    let tries = if part.has("clCreateProgramWithIL") {
        &tries[..]
    } else {
        &[]
    };
    for &(call, from, length) in tries {
        let program = cl!(
            part.device.api,
            clCreateProgramWithIL(context, from.cast(), length, &raw mut code)
        );
        if let Some(program) = part.made(call, program, code) {
            cl!(part.device.api, clReleaseProgram(program));
        }
    }
    if !part.has("clSetProgramSpecializationConstant") {
        return;
    }
    let value = 5u32;
    for (call, value) in [
        (
            "clSetProgramSpecializationConstant of a source",
            (&raw const value).cast(),
        ),
        ("clSetProgramSpecializationConstant to nothing", null()),
    ] {
        let set = cl!(
            part.device.api,
            clSetProgramSpecializationConstant(part.program, 1, 4, value)
        );
        part.say(call, set);
    }
}

fn built_in(part: &mut Part) -> Result<(), String> {
    let context = part.device.context;
    let mut names = [0u8; 4096];
    let mut length = 0;
    let asked = cl!(
        part.device.api,
        clGetDeviceInfo(
            part.device.id,
            BUILT_IN_KERNELS,
            names.len(),
            names.as_mut_ptr().cast(),
            &raw mut length,
        )
    );
    check(asked, "asking for built-in kernels")?;
    let names = String::from_utf8_lossy(&names[..length.saturating_sub(1)]).into_owned();
    part.say("CL_DEVICE_BUILT_IN_KERNELS", &names);
    let first = names.split(';').next().unwrap_or_default().to_owned();
    for (call, name) in [
        ("clCreateProgramWithBuiltInKernels", first.as_str()),
        (
            "clCreateProgramWithBuiltInKernels of an unknown one",
            "unknown",
        ),
    ] {
        let text = CString::new(name).map_err(|error| error.to_string())?;
        let mut code = 0;
        let program = cl!(
            part.device.api,
            clCreateProgramWithBuiltInKernels(
                context,
                1,
                &raw const part.device.id,
                text.as_ptr(),
                &raw mut code,
            )
        );
        let Some(program) = part.made(call, program, code) else {
            continue;
        };
        let built = cl!(
            part.device.api,
            clBuildProgram(program, 0, null(), null(), None, null_mut())
        );
        part.say("clBuildProgram of it", built);
        let kernel = cl!(
            part.device.api,
            clCreateKernel(program, text.as_ptr(), &raw mut code)
        );
        if let Some(kernel) = part.made("clCreateKernel of it", kernel, code) {
            let count = number(part, |api, to| {
                cl!(
                    *api,
                    clGetKernelInfo(kernel, codes::KERNEL_NUM_ARGS, 4, to, null_mut())
                )
            });
            part.say("its arguments", count);
            cl!(part.device.api, clReleaseKernel(kernel));
        }
        cl!(part.device.api, clReleaseProgram(program));
    }
    Ok(())
}

/// A number that is queried, and the code.
fn number(part: &Part, ask: impl Fn(&remoting_opencl::driver::Api, *mut c_void) -> i32) -> String {
    let mut value = [0u8; 8];
    let code = ask(&part.device.api, value.as_mut_ptr().cast());
    format!("{code}, {}", u64::from_le_bytes(value))
}

fn clones(part: &mut Part) -> Result<(), String> {
    let queue = part.device.queue;
    let [kernel] = part.device.kernels_of(part.program, [c"add"])?;
    let buffer = part.numbers(part.device.context, &[0; 4])?;
    part.device.set(kernel, 0, buffer)?;
    part.device.set(kernel, 1, 1i32)?;
    if part.has("clCloneKernel") {
        clone(part, kernel, buffer)?;
    }
    // The older calls.
    let task = more!(part, clEnqueueTask(queue, kernel, 0, null(), null_mut()));
    part.say("clEnqueueTask", task);
    let mut event = 0;
    let marked = more!(part, clEnqueueMarker(queue, &raw mut event));
    part.say("clEnqueueMarker", marked);
    let barred = more!(part, clEnqueueBarrier(queue));
    part.say("clEnqueueBarrier", barred);
    let there = part.contents::<4>(queue, buffer)?;
    part.say("after the task", format_args!("{there:?}"));
    cl!(part.device.api, clReleaseEvent(event));
    cl!(part.device.api, clReleaseMemObject(buffer));
    cl!(part.device.api, clReleaseKernel(kernel));
    Ok(())
}

/// A kernel that adds 1 to a buffer's numbers, and its clone.
fn clone(part: &mut Part, kernel: Handle, buffer: Handle) -> Result<(), String> {
    let queue = part.device.queue;
    let mut code = 0;
    let clone = cl!(part.device.api, clCloneKernel(kernel, &raw mut code));
    let Some(clone) = part.made("clCloneKernel", clone, code) else {
        return Ok(());
    };
    // From here on each has its own arguments.
    part.device.set(kernel, 1, 10i32)?;
    part.say(
        "the clone's run",
        part.device.enqueue(queue, clone, 4, null_mut()),
    );
    let there = part.contents::<4>(queue, buffer)?;
    part.say("after the clone", format_args!("{there:?}"));
    part.device.set(clone, 1, 100i32)?;
    part.say(
        "the first one's run",
        part.device.enqueue(queue, kernel, 2, null_mut()),
    );
    part.say(
        "the clone's run",
        part.device.enqueue(queue, clone, 1, null_mut()),
    );
    let there = part.contents::<4>(queue, buffer)?;
    part.say("after both", format_args!("{there:?}"));
    let retained = more!(part, clRetainKernel(clone));
    part.say("clRetainKernel", retained);
    for _ in 0..2 {
        let released = cl!(part.device.api, clReleaseKernel(clone));
        part.say("clReleaseKernel", released);
    }
    Ok(())
}

fn questions(part: &mut Part) -> Result<(), String> {
    let mut kernels = [0; 2];
    let mut count = 0;
    let made = more!(
        part,
        clCreateKernelsInProgram(part.program, 2, kernels.as_mut_ptr(), &raw mut count)
    );
    part.say("clCreateKernelsInProgram", format_args!("{made}, {count}"));
    let few = more!(
        part,
        clCreateKernelsInProgram(part.program, 1, kernels.as_mut_ptr(), null_mut())
    );
    part.say("clCreateKernelsInProgram with too little room", few);
    let mut names = kernels.map(|kernel| {
        let mut name = [0u8; 32];
        let to = name.as_mut_ptr().cast();
        cl!(
            part.device.api,
            clGetKernelInfo(kernel, codes::KERNEL_FUNCTION_NAME, 32, to, null_mut())
        );
        (
            String::from_utf8_lossy(&name)
                .trim_end_matches('\0')
                .to_owned(),
            kernel,
        )
    });
    names.sort();
    let (name, kernel) = names[0].clone();
    part.say("the first kernel", name);
    let id = part.device.id;
    if part.has("clGetKernelSubGroupInfo") {
        sub_groups(part, kernel);
    }
    for (name, parameter, size) in [
        (
            "CL_KERNEL_WORK_GROUP_SIZE",
            codes::KERNEL_WORK_GROUP_SIZE,
            8,
        ),
        ("CL_KERNEL_LOCAL_MEM_SIZE", codes::KERNEL_LOCAL_MEM_SIZE, 8),
        (
            "CL_KERNEL_GLOBAL_WORK_SIZE",
            codes::KERNEL_GLOBAL_WORK_SIZE,
            24,
        ),
    ] {
        let mut value = [0u8; 24];
        let to = value.as_mut_ptr().cast();
        let asked = cl!(
            part.device.api,
            clGetKernelWorkGroupInfo(kernel, id, parameter, size, to, null_mut())
        );
        let first = i64::from_le_bytes(value[..8].try_into().unwrap_or_default());
        part.say(
            &format!("clGetKernelWorkGroupInfo {name}"),
            format_args!("{asked}, {first}"),
        );
    }
    for (_, kernel) in names {
        cl!(part.device.api, clReleaseKernel(kernel));
    }
    let name: *const c_char = c"clNoSuchFunctionKHR".as_ptr();
    let found = more!(
        part,
        clGetExtensionFunctionAddressForPlatform(part.device.platform, name)
    );
    part.say("an unknown extension's function is null", found.is_null());
    Ok(())
}

fn sub_groups(part: &mut Part, kernel: Handle) {
    let id = part.device.id;
    let group = [8usize, 1, 1];
    for (name, parameter, input, size) in [
        (
            "CL_KERNEL_MAX_SUB_GROUP_SIZE_FOR_NDRANGE",
            codes::KERNEL_MAX_SUB_GROUP_SIZE_FOR_NDRANGE,
            group.as_ptr(),
            size_of_val(&group),
        ),
        (
            "CL_KERNEL_SUB_GROUP_COUNT_FOR_NDRANGE",
            codes::KERNEL_SUB_GROUP_COUNT_FOR_NDRANGE,
            group.as_ptr(),
            size_of_val(&group),
        ),
        (
            "CL_KERNEL_MAX_NUM_SUB_GROUPS",
            codes::KERNEL_MAX_NUM_SUB_GROUPS,
            null(),
            0,
        ),
    ] {
        let value = number(part, |api, to| {
            cl!(
                *api,
                clGetKernelSubGroupInfo(
                    kernel,
                    id,
                    parameter,
                    size,
                    input.cast(),
                    8,
                    to,
                    null_mut()
                )
            )
        });
        part.say(&format!("clGetKernelSubGroupInfo {name}"), value);
    }
}

//! Sub-devices, and the device's clock.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
    thread,
};

use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

use super::{Part, device::check, device::cl, more::more};

const EQUALLY: isize = 0x1086;
const BY_COUNTS: isize = 0x1087;
const COUNTS_END: isize = 0;
const MAX_COMPUTE_UNITS: u32 = 0x1002;

pub fn run(part: &mut Part) -> Result<(), String> {
    if part.has("clGetDeviceAndHostTimer") && part.has("clGetHostTimer") {
        timers(part);
    }
    let most = part.device.id;
    let most = value::<u32>(part, most, codes::DEVICE_PARTITION_MAX_SUB_DEVICES);
    part.say("CL_DEVICE_PARTITION_MAX_SUB_DEVICES", most);
    for (call, list) in [
        ("clCreateSubDevices equally", &[EQUALLY, 1, 0][..]),
        (
            "clCreateSubDevices by counts",
            &[BY_COUNTS, 1, 1, COUNTS_END, 0],
        ),
        (
            "clCreateSubDevices of more than there is",
            &[BY_COUNTS, 100_000, COUNTS_END, 0],
        ),
        ("clCreateSubDevices by nothing known", &[77, 1, 0]),
    ] {
        let mut count = 0;
        let asked = cl!(
            part.device.api,
            clCreateSubDevices(part.device.id, list.as_ptr(), 0, null_mut(), &raw mut count)
        );
        // Results that are written in spite of an error are ignored.
        let count = if asked == 0 { count } else { 0 };
        part.say(call, format_args!("{asked}, {count}"));
        let mut devices = vec![0; count as usize];
        if count == 0 {
            continue;
        }
        let made = cl!(
            part.device.api,
            clCreateSubDevices(
                part.device.id,
                list.as_ptr(),
                count,
                devices.as_mut_ptr(),
                null_mut()
            )
        );
        part.say(call, made);
        if made == 0 {
            use_them(part, &devices)?;
        }
    }
    Ok(())
}

fn timers(part: &mut Part) {
    let id = part.device.id;
    let (mut first, mut second, mut between) = ([0u64; 2], [0u64; 2], 0);
    let ask = |part: &Part, to: &mut [u64; 2]| {
        let [there, here] = to.each_mut();
        cl!(
            part.device.api,
            clGetDeviceAndHostTimer(id, &raw mut *there, &raw mut *here)
        )
    };
    let codes = [
        ask(part, &mut first),
        more!(part, clGetHostTimer(id, &raw mut between)),
        ask(part, &mut second),
    ];
    part.say(
        "clGetDeviceAndHostTimer, clGetHostTimer, clGetDeviceAndHostTimer",
        format_args!("{codes:?}"),
    );
    if codes == [0; 3] {
        let order = first[1] <= between && between <= second[1] && first[0] <= second[0];
        part.say("times go on", order && first[0] > 0);
    }
    let none = more!(part, clGetHostTimer(id, null_mut()));
    part.say("clGetHostTimer to nowhere", none);
}

/// A value that the device reports.
fn value<T: Copy + Default>(part: &Part, device: Handle, name: u32) -> T {
    let mut value = T::default();
    let to: *mut c_void = (&raw mut value).cast();
    cl!(
        part.device.api,
        clGetDeviceInfo(device, name, size_of::<T>(), to, null_mut())
    );
    value
}

/// Computes on each sub-device in a thread of its own, in one context of all of them.
fn use_them(part: &mut Part, devices: &[Handle]) -> Result<(), String> {
    for &device in devices {
        let whole = value::<Handle>(part, device, codes::DEVICE_PARENT_DEVICE);
        let whole = whole == part.device.id;
        let units = value::<u32>(part, device, MAX_COMPUTE_UNITS);
        let list = value::<[isize; 4]>(part, device, codes::DEVICE_PARTITION_TYPE);
        part.say(
            "a part",
            format_args!("{units} units, of the device: {whole}, by {list:x?}"),
        );
    }
    let mut code = 0;
    let context = cl!(
        part.device.api,
        clCreateContext(
            null(),
            devices.len() as u32,
            devices.as_ptr(),
            None,
            null_mut(),
            &raw mut code
        )
    );
    let Some(context) = part.made("clCreateContext of the parts", context, code) else {
        return Ok(());
    };
    let text = super::SOURCE.as_ptr();
    let program = cl!(
        part.device.api,
        clCreateProgramWithSource(context, 1, &raw const text, null(), &raw mut code)
    );
    check(code, "creating a program")?;
    part.device.build(program)?;
    let buffer = part.numbers(context, &[1; 256])?;
    let shared = &*part;
    let codes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..devices.len())
            .map(|index| {
                let device = devices[index];
                scope.spawn(move || compute(shared, context, device, program, (buffer, index)))
            })
            .collect();
        let ends = threads.into_iter().map(|thread| match thread.join() {
            Ok(Ok(number)) => number.to_string(),
            Ok(Err(error)) => error,
            Err(_) => "panicked".to_owned(),
        });
        ends.collect()
    });
    part.say("computed on them", format_args!("{codes:?}"));
    cl!(part.device.api, clReleaseMemObject(buffer));
    cl!(part.device.api, clReleaseProgram(program));
    cl!(part.device.api, clReleaseContext(context));
    for &device in devices {
        let retained = more!(part, clRetainDevice(device));
        let released = [0; 2].map(|_| cl!(part.device.api, clReleaseDevice(device)));
        part.say(
            "clRetainDevice, and clReleaseDevice twice",
            format_args!("{retained}, {released:?}"),
        );
    }
    Ok(())
}

/// Adds to the numbers in this device's own part of a buffer. Returns the first result.
fn compute(
    part: &Part,
    context: Handle,
    device: Handle,
    program: Handle,
    (buffer, index): (Handle, usize),
) -> Result<i32, String> {
    const PART: usize = 256;
    let mut code = 0;
    let queue = cl!(
        part.device.api,
        clCreateCommandQueue(context, device, 0, &raw mut code)
    );
    check(code, "creating a queue")?;
    let region = [index * PART % 1024, PART];
    let own = cl!(
        part.device.api,
        clCreateSubBuffer(buffer, 0, 0x1220, region.as_ptr().cast(), &raw mut code)
    );
    check(code, "taking a part")?;
    let [kernel] = part.device.kernels_of(program, [c"add"])?;
    part.device.set(kernel, 0, own)?;
    part.device.set(kernel, 1, index as i32 + 10)?;
    let run = part.device.enqueue(queue, kernel, PART / 4, null_mut());
    check(run, "enqueuing")?;
    let [first] = part.contents(queue, own)?;
    cl!(part.device.api, clReleaseKernel(kernel));
    cl!(part.device.api, clReleaseMemObject(own));
    check(
        cl!(part.device.api, clReleaseCommandQueue(queue)),
        "releasing",
    )?;
    Ok(first)
}

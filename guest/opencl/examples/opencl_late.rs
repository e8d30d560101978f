//! Checks how errors are told that are found after a call has returned: `opencl_late [LOADER]`.
//!
//! A kernel that wants groups of eight is enqueued in groups of four. A driver that finds this at
//! once refuses the command; Gantry's finds it later, and tells it by the context's callback, by
//! the command's event and by the next call that waits, once.

use std::{
    ffi::{CStr, c_char, c_void},
    ptr::{null, null_mut},
    sync::mpsc,
    time::Duration,
};

use gantry_remoting::opencl::{Api, codes};

const SOURCE: &CStr = c"
kernel __attribute__((reqd_work_group_size(8, 1, 1))) void eights(global int *a) {
    a[get_global_id(0)] = 1;
}
";

/// Calls the driver.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: handles are live until the end of the program, and pointers are to locals of the
        // sizes that are passed beside them.
        unsafe { $api.$name($($arg),*) }
    };
}

fn check(code: i32, what: &str) -> Result<(), String> {
    if code == 0 {
        Ok(())
    } else {
        Err(format!("{what} failed with code {code}"))
    }
}

unsafe extern "C" fn told(text: *const c_char, _: *const c_void, _: usize, data: *mut c_void) {
    // SAFETY: the text is a C string, and `data` the sender that `main` keeps.
    let (text, sender) = unsafe {
        let sender = &*data.cast::<mpsc::Sender<String>>();
        (CStr::from_ptr(text).to_string_lossy().into_owned(), sender)
    };
    let _ = sender.send(text);
}

fn main() -> Result<(), String> {
    let loader = std::env::args().nth(1);
    let api =
        Api::open(loader.as_deref().unwrap_or("libOpenCL.so.1")).map_err(|e| e.to_string())?;
    let (sender, reports) = mpsc::channel::<String>();
    let (mut code, mut platform, mut device) = (0, 0, 0);
    let all = u64::from(u32::MAX);
    cl!(api, clGetPlatformIDs(1, &raw mut platform, null_mut()));
    check(
        cl!(
            api,
            clGetDeviceIDs(platform, all, 1, &raw mut device, null_mut())
        ),
        "finding a device",
    )?;
    let context = cl!(
        api,
        clCreateContext(
            null(),
            1,
            &raw const device,
            Some(told),
            (&raw const sender).cast_mut().cast(),
            &raw mut code,
        )
    );
    check(code, "creating a context")?;
    let queue = cl!(api, clCreateCommandQueue(context, device, 0, &raw mut code));
    check(code, "creating a queue")?;
    let source = SOURCE.as_ptr();
    let program = cl!(
        api,
        clCreateProgramWithSource(context, 1, &raw const source, null(), &raw mut code)
    );
    check(code, "creating a program")?;
    check(
        cl!(
            api,
            clBuildProgram(program, 0, null(), c"".as_ptr(), None, null_mut())
        ),
        "building the program",
    )?;
    let kernel = cl!(
        api,
        clCreateKernel(program, c"eights".as_ptr(), &raw mut code)
    );
    check(code, "creating the kernel")?;
    let buffer = cl!(
        api,
        clCreateBuffer(context, 0, 256, null_mut(), &raw mut code)
    );
    check(code, "creating the buffer")?;
    check(
        cl!(
            api,
            clSetKernelArg(kernel, 0, 8, (&raw const buffer).cast())
        ),
        "setting the argument",
    )?;
    let enqueue = |local: usize, event: *mut usize| {
        let global = 64usize;
        cl!(
            api,
            clEnqueueNDRangeKernel(
                queue,
                kernel,
                1,
                null(),
                &raw const global,
                &raw const local,
                0,
                null(),
                event,
            )
        )
    };
    let mut event = 0;
    let at_once = enqueue(4, &raw mut event);
    if at_once != 0 {
        println!("refused at once with code {at_once}");
        return Ok(());
    }
    let report = reports
        .recv_timeout(Duration::from_secs(10))
        .map_err(|_| "the context's callback was not called")?;
    if !report.contains(&codes::INVALID_WORK_GROUP_SIZE.to_string()) {
        return Err(format!("the context's callback was told {report:?}"));
    }
    let mut status = 0i32;
    check(
        cl!(
            api,
            clGetEventInfo(
                event,
                codes::EVENT_COMMAND_EXECUTION_STATUS,
                4,
                (&raw mut status).cast(),
                null_mut()
            )
        ),
        "asking for the event's status",
    )?;
    if status != codes::INVALID_WORK_GROUP_SIZE {
        return Err(format!("the event's status is {status}"));
    }
    let (first, second) = (cl!(api, clFinish(queue)), cl!(api, clFinish(queue)));
    if (first, second) != (codes::OUT_OF_RESOURCES, 0) {
        return Err(format!("waiting gave {first}, and then {second}"));
    }
    // The queue goes on.
    check(enqueue(8, null_mut()), "enqueuing it rightly")?;
    check(cl!(api, clFinish(queue)), "waiting for it")?;
    println!("told late: {report}");
    Ok(())
}

//! Checks how errors are reported that are found after a call has returned.
//!
//! A kernel that requires groups of eight is enqueued in groups of four. A driver that detects this
//! immediately refuses the command. Gantry's driver detects it later and reports it through the
//! context's callback, the command's event, and the next call that waits, once.

use std::{
    ffi::{CStr, c_char, c_void},
    ptr::{null, null_mut},
    sync::mpsc,
    time::Duration,
};

use device::{Device, check, cl};
use remoting_proto::apis::opencl::codes;

mod device;

const SOURCE: &CStr = c"
kernel __attribute__((reqd_work_group_size(8, 1, 1))) void eights(global int *a) {
    a[get_global_id(0)] = 1;
}
";

unsafe extern "C" fn told(text: *const c_char, _: *const c_void, _: usize, data: *mut c_void) {
    // SAFETY: the text is a C string, and `data` is the sender that `main` keeps.
    let (text, sender) = unsafe {
        let sender = &*data.cast::<mpsc::Sender<String>>();
        (CStr::from_ptr(text).to_string_lossy().into_owned(), sender)
    };
    let _ = sender.send(text);
}

fn main() -> Result<(), String> {
    let (sender, reports) = mpsc::channel::<String>();
    let device = Device::open(Some((told, (&raw const sender).cast())))?;
    let (api, queue) = (&device.api, device.queue);
    let [kernel] = device.kernels(SOURCE, [c"eights"])?;
    device.set(kernel, 0, device.buffer(0, 256, null_mut())?)?;
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
    let asked = cl!(
        api,
        clGetEventInfo(
            event,
            codes::EVENT_COMMAND_EXECUTION_STATUS,
            4,
            (&raw mut status).cast(),
            null_mut()
        )
    );
    check(asked, "asking for the event's status")?;
    if status != codes::INVALID_WORK_GROUP_SIZE {
        return Err(format!("the event's status is {status}"));
    }
    let (first, second) = (cl!(api, clFinish(queue)), cl!(api, clFinish(queue)));
    if (first, second) != (codes::OUT_OF_RESOURCES, 0) {
        return Err(format!("waiting gave {first}, and then {second}"));
    }
    // The queue is still usable.
    check(enqueue(8, null_mut()), "enqueuing it rightly")?;
    check(cl!(api, clFinish(queue)), "waiting for it")?;
    println!("told late: {report}");
    Ok(())
}

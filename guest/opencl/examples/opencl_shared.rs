//! Checks shared virtual memory where there is no Python, as in small guests: the device follows a
//! list that the host has created in two allocations, and the host reads what the device has
//! written there. `tests/programs/svm.py` checks more.

use std::{
    ffi::{CStr, c_void},
    ptr::{null, null_mut},
};

use device::{Device, check, cl};
use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

mod device;

const SOURCE: &CStr = c"
typedef struct node { global struct node *next; ulong value; } node;
kernel void walk(global node *at) {
    for (; at; at = at->next)
        at->value += 1;
}
";

/// The number of nodes, every second one in the other allocation: some pages.
const NODES: usize = 1000;

/// As declared in the kernel.
#[repr(C)]
struct Node {
    next: *mut Node,
    value: u64,
}

type Map =
    extern "C" fn(Handle, u32, u64, *mut c_void, usize, u32, *const Handle, *mut Handle) -> i32;
type Unmap = extern "C" fn(Handle, *mut c_void, u32, *const Handle, *mut Handle) -> i32;

/// A function of the loader, which is open, that the worker does not call.
fn function(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a plain call with a name.
    let found = unsafe {
        libc::dlsym(
            libc::dlopen(c"libOpenCL.so.1".as_ptr(), libc::RTLD_NOW),
            name.as_ptr(),
        )
    };
    if found.is_null() {
        return Err(format!("the loader has no {}", name.to_string_lossy()));
    }
    Ok(found)
}

fn main() -> Result<(), String> {
    let device = Device::open(None)?;
    let (api, context, queue) = (&device.api, device.context, device.queue);
    // SAFETY: the signatures are those of the specification.
    let (map, unmap) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Map>(function(c"clEnqueueSVMMap")?),
            std::mem::transmute::<*mut c_void, Unmap>(function(c"clEnqueueSVMUnmap")?),
        )
    };
    let [walk] = device.kernels(SOURCE, [c"walk"])?;
    let size = NODES / 2 * size_of::<Node>();
    let halves = [(); 2].map(|()| {
        let flags = codes::MEM_READ_WRITE;
        cl!(api, clSVMAlloc(context, flags, size, 0)).cast::<Node>()
    });
    if halves.iter().any(|half| half.is_null()) {
        return Err("there is no shared virtual memory".to_owned());
    }
    let both = |flags: u64| {
        halves.iter().try_for_each(|half| {
            let code = map(queue, 1, flags, half.cast(), size, 0, null(), null_mut());
            check(code, "mapping")
        })
    };
    let give_back = || {
        halves.iter().try_for_each(|half| {
            let code = unmap(queue, half.cast(), 0, null(), null_mut());
            check(code, "unmapping")
        })
    };
    let node = |index: usize| halves[index % 2].wrapping_add(index / 2);
    both(codes::MAP_WRITE_INVALIDATE_REGION)?;
    for index in 0..NODES {
        let next = match index + 1 {
            NODES => null_mut(),
            next => node(next),
        };
        let value = index as u64;
        // SAFETY: the node is in an allocation that is mapped.
        unsafe { node(index).write(Node { next, value }) };
    }
    give_back()?;
    let argument = cl!(api, clSetKernelArgSVMPointer(walk, 0, node(0).cast()));
    check(argument, "setting the first node")?;
    let used = halves.map(<*mut Node>::cast_const);
    let (bytes, list) = (size_of_val(&used), used.as_ptr().cast());
    let told = cl!(
        api,
        clSetKernelExecInfo(walk, codes::KERNEL_EXEC_INFO_SVM_PTRS, bytes, list)
    );
    check(told, "naming the other allocation")?;
    let ran = device.enqueue(queue, walk, 1, null_mut());
    check(ran, "running")?;
    both(codes::MAP_READ)?;
    // SAFETY: as above.
    let value = |index| unsafe { (*node(index)).value };
    if let Some(wrong) = (0..NODES).find(|index| value(*index) != *index as u64 + 1) {
        return Err(format!("node {wrong} has {}", value(wrong)));
    }
    give_back()?;
    check(cl!(api, clFinish(queue)), "waiting")?;
    for half in halves {
        cl!(api, clSVMFree(context, half.cast()));
    }
    println!("shared: the device has followed {NODES} nodes");
    Ok(())
}

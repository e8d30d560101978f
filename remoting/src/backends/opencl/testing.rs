//! A worker's server for tests.

use std::{ffi::c_void, sync::Arc, time::Duration};

use crate::session::{
    quota::Quota,
    server::{Nudge, Session, Tuning},
};
use crate::{
    apis::opencl::{
        calls::{Order, QueueId, Request},
        codes,
    },
    backends::opencl::{
        OpenClBackend, Server,
        driver::{Api, api::Handle},
    },
    link::{
        bell::Futex,
        endpoint::Receiver,
        port_bell::Waker,
        window::{self, Slice, Window},
    },
    wire::{Flags, Header},
};

/// The size of its rings, in bytes.
pub(crate) const RING: u64 = 1 << 16;
/// How it sleeps.
pub(crate) const BELL: Futex = Futex {
    patience: Duration::from_millis(1),
};

/// For a command of the first queue that waits for nothing and has no event.
pub(crate) fn order() -> Order {
    Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    }
}

/// Has a server carry a request out, as if it had come by its ring.
pub(crate) fn carry_out(server: &mut Server, request: Request) {
    let header = Header {
        length: 0,
        opcode: 70,
        flags: Flags::default(),
        sequence: 0,
    };
    server.serve(header, request).unwrap();
}

/// A server before an OpenCL that does nothing, its window, and the calls that it gets.
pub(crate) fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_before(Api::null())
}

/// The same before another OpenCL.
pub(crate) fn server_before(api: Api) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_with(api, Waker::Futex(BELL))
}

/// The same with another way of waking its client.
pub(crate) fn server_with(api: Api, waker: Waker) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let file = window::create(window::SMALLEST).unwrap();
    let window = Window::map(&file, window::SMALLEST, RING).unwrap();
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker,
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Session::new(
        OpenClBackend::new(Arc::new(api), ""),
        Arc::clone(&window),
        tuning,
        nudge,
    );
    (server, calls, window)
}

/// A parameter of a kernel, as a driver describes it: address space, name of the type with its zero, and access.
pub(crate) type Parameter = (u32, &'static [u8], u32);

/// What all kernels of a driver take.
pub(crate) trait Parameters {
    /// In their order.
    const TABLE: &[Parameter];
}

/// An OpenCL whose kernels take these parameters, and any values for them.
pub(crate) fn with_parameters<P: Parameters>(api: Api) -> Api {
    api.with_kernels(counted::<P>, described::<P>, any)
}

unsafe extern "C" fn counted<P: Parameters>(
    _: Handle,
    _: u32,
    _: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    // SAFETY: the number of arguments alone is asked for.
    unsafe { value.cast::<u32>().write(P::TABLE.len() as u32) };
    0
}

unsafe extern "C" fn described<P: Parameters>(
    _: Handle,
    index: u32,
    what: u32,
    size: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    let (space, name, access) = P::TABLE[index as usize];
    // SAFETY: there is room for what is asked for.
    unsafe {
        match what {
            codes::KERNEL_ARG_ADDRESS_QUALIFIER => value.cast::<u32>().write(space),
            codes::KERNEL_ARG_ACCESS_QUALIFIER => value.cast::<u32>().write(access),
            _ if name.len() > size => return codes::INVALID_VALUE,
            _ => value.cast::<u8>().copy_from(name.as_ptr(), name.len()),
        }
    }
    0
}

unsafe extern "C" fn any(_: Handle, _: u32, _: usize, _: *const c_void) -> i32 {
    0
}

//! Test servers of a worker.

use std::{ffi::c_void, sync::Arc, time::Duration};

use remoting_proto::{
    apis::opencl::{
        calls::{
            ContextId, CreateBuffer, CreateContext, CreateKernel, CreateProgram, CreateQueue,
            DeviceId, KernelId, MemId, Order, ProgramId, ProgramOrigin, QueueId, Request,
        },
        codes,
    },
    wire::{Blob, Flags, Header},
};
use remoting_session::{
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    mapping,
    port_bell::Waker,
    window::{self, Slice, Window},
};

use crate::{
    OpenClBackend, Server,
    driver::{Api, api::Handle},
};

/// Size of the server's rings, in bytes.
pub const RING: u64 = 1 << 16;
/// How the server sleeps.
pub const BELL: Futex = Futex {
    patience: Duration::from_millis(1),
};

/// The order of a command on the first queue that waits for nothing and has no event.
pub fn order() -> Order {
    Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    }
}

/// Makes a server execute a request as if it had arrived through its ring.
pub fn carry_out(server: &mut Server, request: Request) {
    let header = Header {
        length: 0,
        opcode: 70,
        flags: Flags::default(),
        sequence: 0,
    };
    server.serve(header, request).unwrap();
}

/// The request that creates a buffer in the first context.
pub fn buffer(id: u32, flags: u64, size: u64) -> CreateBuffer {
    CreateBuffer {
        id: MemId(id),
        context: ContextId(0),
        flags,
        size,
        contents: None,
        lives: None,
        svm: None,
    }
}

/// Creates the first context, and the first queue in it.
pub fn make_queue(server: &mut Server) {
    let all = [
        Request::CreateContext(CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(0)],
            platform: None,
        }),
        Request::CreateQueue(CreateQueue {
            id: QueueId(0),
            context: ContextId(0),
            device: DeviceId(0),
            properties: 0,
            further: Vec::new(),
        }),
    ];
    for request in all {
        carry_out(server, request);
    }
}

/// A server whose application has a context, a queue, a kernel and these buffers.
pub fn server_with_kernel(api: Api, buffers: impl IntoIterator<Item = CreateBuffer>) -> Server {
    let (mut server, ..) = server_before(api);
    make_queue(&mut server);
    let program = CreateProgram {
        id: ProgramId(0),
        context: ContextId(0),
        origin: ProgramOrigin::Source(Blob(b"source".to_vec())),
    };
    carry_out(&mut server, Request::CreateProgram(program));
    let kernel = CreateKernel {
        id: KernelId(0),
        program: ProgramId(0),
        name: Blob(b"kernel".to_vec()),
    };
    carry_out(&mut server, Request::CreateKernel(kernel));
    for buffer in buffers {
        carry_out(&mut server, Request::CreateBuffer(buffer));
    }
    server
}

/// A server with a driver that does nothing, the receiver of the calls that it gets, and its
/// window.
pub fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_before(Api::null())
}

/// The same, with another driver.
pub fn server_before(api: Api) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_with(api, Waker::Futex(BELL))
}

/// The same, with another way of waking its client.
pub fn server_with(api: Api, waker: Waker) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_of(api, waker, window::SMALLEST)
}

/// The same, with a window of this size in bytes.
pub fn server_of(
    api: Api,
    waker: Waker,
    size: u64,
) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let window = Window::map(&mapping::create(size).unwrap(), size, RING).unwrap();
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker,
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Server::new(
        OpenClBackend::new(Arc::new(api), &Default::default()),
        Arc::clone(&window),
        tuning,
        nudge,
    );
    (server, calls, window)
}

/// A kernel parameter as a driver describes it: address space, type name with its terminating zero,
/// and access.
pub type Parameter = (u32, &'static [u8], u32);

/// The address space of a parameter of which the driver tells nothing.
pub const UNTOLD: u32 = 0;

/// The parameters of all kernels of a driver.
pub trait Parameters {
    /// The parameters, in order.
    const TABLE: &[Parameter];
}

/// A driver whose kernels take these parameters, with any values for them.
pub fn with_parameters<P: Parameters>(api: Api) -> Api {
    api.with_kernels(counted::<P>, described::<P>, any)
}

unsafe extern "C" fn counted<P: Parameters>(
    _: Handle,
    _: u32,
    _: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    // SAFETY: only the number of arguments is asked for.
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
            _ if space == UNTOLD => return codes::KERNEL_ARG_INFO_NOT_AVAILABLE,
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

//! OpenCL's own part of the connection: its names, its codes, and its state.

use std::{
    collections::HashMap,
    ffi::{c_char, c_void},
    os::unix::net::UnixStream,
    ptr::null,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use base::Unpoisoned;
use gantry_client::{
    Connection, Driver,
    carry::{self, Carried},
    connect,
    ids::Numbers,
};
use remoting_proto::{
    apis::opencl::{
        calls::{
            self, Await, Call, ContextId, PrecopyState, PrepareState, ReadState, RestoreState,
            SaveState, StageId, WindowRange, WriteState,
        },
        codes,
    },
    wire::{Blob, Wire},
};
use remoting_transport::order::Order;

use crate::{svm, told};

/// OpenCL, for the core of all drivers.
#[derive(Debug)]
pub enum OpenCl {}

/// The connection.
pub type Link = gantry_client::Link<OpenCl>;

/// `clCreateContext`'s callback: text, the driver's data, its size, the application's data.
pub type Notify = extern "C" fn(*const c_char, *const c_void, usize, *mut c_void);

/// What the OpenCL driver keeps with its connection.
#[derive(Debug, Default)]
pub struct State {
    /// The numbers of objects.
    pub ids: Ids,
    /// The number of mappings of memory objects that the application has pointers to.
    pub mapped: AtomicUsize,
    /// The callbacks of contexts, with the application's data.
    notifies: Mutex<HashMap<ContextId, (Notify, usize)>>,
}

/// The numbers of objects of all kinds.
#[derive(Debug, Default)]
pub struct Ids {
    pub sub_devices: Numbers,
    pub contexts: Numbers,
    pub queues: Numbers,
    pub mems: Numbers,
    pub samplers: Numbers,
    pub programs: Numbers,
    pub kernels: Numbers,
    pub events: Numbers,
}

impl State {
    fn notifies(&self) -> MutexGuard<'_, HashMap<ContextId, (Notify, usize)>> {
        self.notifies.lock_unpoisoned()
    }
}

impl Driver for OpenCl {
    const NAME: &'static str = "gantry-opencl";
    const API: &'static str = "OpenCL";
    const ADDRESS_VARIABLE: &'static str = "GANTRY_OPENCL";
    const SPIN_VARIABLE: &'static str = "GANTRY_OPENCL_SPIN";
    const SOCKET: &'static str = base::paths::OPENCL_SOCKET;

    // Memory of a transfer stays as it is until the transfer's event is over.
    const HEAP: bool = true;

    type Schema = remoting_proto::apis::opencl::OpenCl;
    type Status = i32;
    const WORKER_LOST: i32 = codes::OUT_OF_RESOURCES;
    const WINDOW_FULL: i32 = codes::OUT_OF_HOST_MEMORY;
    // The only error that the specification allows every call.
    const FORKED: i32 = codes::OUT_OF_HOST_MEMORY;

    type State = State;

    fn connection() -> &'static Connection<Self> {
        static LINK: Connection<OpenCl> = Connection::new();
        &LINK
    }

    fn await_stage(stage: StageId) -> impl Call<Answer = ()> {
        Await { stage }
    }

    fn change_seat(
        link: &'static Link,
        order: &Order,
        orders: &UnixStream,
    ) -> Result<Option<UnixStream>, String> {
        carry::change_seat(link, order, orders)
    }

    fn in_window(pointer: *const u8, length: u64) -> Option<u64> {
        svm::in_window(pointer, length)
    }

    fn message(link: &Link, opcode: u16, body: &[u8]) {
        if opcode == calls::REPORT
            && let Ok((context, text)) = Wire::from_bytes(body)
        {
            report(link, context, text);
        }
    }

    fn expects_messages(state: &State) -> bool {
        !state.notifies().is_empty()
    }
}

impl Carried for OpenCl {
    fn precopy(round: u32) -> impl Call<Answer = (u64, Blob)> {
        PrecopyState { round }
    }

    fn save(patience: u64, rounds: u32, most: u64) -> impl Call<Answer = (u64, Blob)> {
        SaveState {
            patience,
            rounds,
            most,
        }
    }

    fn read(at: u64, to: WindowRange) -> impl Call<Answer = Blob> {
        ReadState { at, to }
    }

    fn write(at: u64, from: WindowRange) -> impl Call<Answer = Blob> {
        WriteState { at, from }
    }

    fn prepare() -> impl Call<Answer = Blob> {
        PrepareState {}
    }

    fn restore() -> impl Call<Answer = Blob> {
        RestoreState {}
    }

    fn compare() -> impl Call<Answer = Blob> {
        told::compared()
    }

    fn pinned(state: &State) -> Option<&'static str> {
        if state.mapped.load(Ordering::SeqCst) > 0 {
            return Some("memory objects are mapped, and are to be unmapped before");
        }
        svm::any()
            .then_some("it has shared virtual memory, whose addresses another worker cannot have")
    }
}

/// Calls a context's callback, if it has one.
fn report(link: &Link, context: ContextId, Blob(mut text): Blob) {
    let Some((notify, data)) = link.state.notifies().get(&context).copied() else {
        return;
    };
    // The worker's texts contain no zero.
    text.push(0);
    let call = Box::new(move |_| {
        notify(text.as_ptr().cast(), null(), 0, data as *mut c_void);
    });
    link.queue_callback(call, 0);
}

/// Registers a context's callback for reports of the worker, or unregisters it (None).
pub fn notify(link: &Link, context: ContextId, callback: Option<(Notify, usize)>) {
    let mut notifies = link.state.notifies();
    match callback {
        Some(callback) => {
            notifies.insert(context, callback);
            drop(notifies);
            link.wake_listener();
        }
        None => drop(notifies.remove(&context)),
    }
}

/// Returns the connection, connecting on first use. None if there is no worker, or if this process
/// was forked from one that uses OpenCL.
pub fn get() -> Option<&'static Link> {
    let connection = OpenCl::connection();
    #[cfg(test)]
    connection.get_or_init(|| Link::through(crate::testing::worker()).ok());
    if !connection.is_started() && !connection.is_forked() && !connection.has_failed() {
        // Whatever the program gets, a child cannot use.
        connection.start().ok()?;
        if connect::get::<OpenCl>().is_none() {
            connection.stop();
        }
    }
    connect::get()
}

/// Whether this process was forked from one that uses OpenCL. Reports this once.
pub fn is_forked() -> bool {
    /// Without std's lock of the stream, which another thread of the parent may have held.
    const SAID: &[u8] = b"gantry-opencl: this process was forked from one that uses OpenCL, and cannot use it: start \
        it by exec (posix_spawn, multiprocessing's spawn), or fork before the first call\n";
    static TOLD: AtomicBool = AtomicBool::new(false);
    let forked = OpenCl::connection().is_forked();
    if forked && !TOLD.swap(true, Ordering::Relaxed) {
        // SAFETY: a constant's bytes.
        unsafe { libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len()) };
    }
    forked
}

/// Returns the connection of an existing object, whose existence implies that of the connection.
pub fn connected() -> Result<&'static Link, i32> {
    get().ok_or(OpenCl::WORKER_LOST)
}

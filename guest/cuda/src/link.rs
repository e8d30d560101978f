//! CUDA's own part of the connection: its names, its results, and its state.

use std::{
    collections::HashMap,
    ptr::null_mut,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicPtr, Ordering},
    },
};

use gantry_client::{Connection, Driver, connect};
use remoting_proto::{
    apis::cuda::{
        self,
        calls::{Await, Started},
        codes,
    },
    wire::messages::{Call, PRINTED, StageId},
};

use crate::{host_memory::Kept, idle, launch::Kernel, memory::Memory};

/// CUDA, for the core of all drivers.
#[derive(Debug)]
pub enum Cuda {}

/// The connection.
pub type Link = gantry_client::Link<Cuda>;

/// What the CUDA driver keeps with its connection.
#[derive(Debug, Default)]
pub struct State {
    /// The kinds of addresses.
    pub memory: Mutex<Memory>,
    /// Pinned memory that was given up while streams were captured.
    pub kept: Kept,
    /// Kernels that have been launched, by number.
    pub kernels: RwLock<HashMap<u32, Arc<Kernel>>>,
}

impl Driver for Cuda {
    const NAME: &'static str = "gantry-cuda";
    const API: &'static str = "CUDA";
    const ADDRESS_VARIABLE: &'static str = "GANTRY_CUDA";
    const SPIN_VARIABLE: &'static str = "GANTRY_CUDA_SPIN";
    const SOCKET: &'static str = base::paths::CUDA_SOCKET;
    const WINDOW_AT: Option<u64> = Some(cuda::WINDOW);

    type Schema = cuda::Cuda;
    type Status = i32;
    const WORKER_LOST: i32 = codes::DEVICE_UNAVAILABLE;
    const WINDOW_FULL: i32 = codes::OUT_OF_MEMORY;
    const FORKED: i32 = codes::NOT_INITIALIZED;

    type State = State;

    fn connection() -> &'static Connection<Self> {
        static LINK: Connection<Cuda> = Connection::new();
        &LINK
    }

    fn await_stage(stage: StageId) -> impl Call<Answer = ()> {
        Await { stage }
    }

    fn sent(opcode: u16, body: &[u8]) {
        idle::note(opcode, body);
    }

    fn message(_: &Link, opcode: u16, body: &[u8]) {
        if opcode == PRINTED {
            print(body);
        }
    }
}

unsafe extern "C" {
    /// C's standard output.
    static stdout: *mut libc::FILE;
}

/// Prints the output of kernels, in order with what the program prints to C's standard output.
fn print(text: &[u8]) {
    // SAFETY: the text has this many bytes, and the stream exists as long as the process.
    unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stdout) };
}

/// Returns the connection, connecting on first use. None if there is no worker.
pub fn get() -> Option<&'static Link> {
    connect::get()
}

/// Returns the connection, if it has been established.
pub fn existing() -> Option<&'static Link> {
    connect::existing()
}

/// What the worker provides, once it has been asked. Never freed. Children that are forked have it,
/// too, and find no lock of another thread's on the way to it.
static KNOWN: AtomicPtr<Started> = AtomicPtr::new(null_mut());

/// What the worker provides, if it has been asked in this process or one that it was forked from.
pub fn known() -> Option<&'static Started> {
    // SAFETY: null, or allocated below and never freed.
    unsafe { KNOWN.load(Ordering::Acquire).as_ref() }
}

/// What the worker provides.
pub fn started(link: &Link) -> Result<&'static Started, i32> {
    if let Some(known) = known() {
        return Ok(known);
    }
    let new = Box::into_raw(Box::new(link.ask(&cuda::calls::Start {})?));
    let (good, bad) = (Ordering::AcqRel, Ordering::Acquire);
    if KNOWN.compare_exchange(null_mut(), new, good, bad).is_err() {
        // Another thread was first.
        // SAFETY: allocated above, and known to nobody else.
        drop(unsafe { Box::from_raw(new) });
    }
    known().ok_or(codes::UNKNOWN)
}

//! CUDA's own part of the connection: its names, its results, and its state.

use std::sync::{Mutex, OnceLock, RwLock};
use std::{collections::HashMap, sync::Arc};

use gantry_client::{Connection, Driver, connect};
use gantry_remoting::{
    apis::cuda::{
        self,
        calls::{Await, Started},
        codes,
    },
    wire::messages::{Call, PRINTED, StageId},
};

use crate::{idle, launch::Kernel, memory::Memory};

/// CUDA, for the core of all drivers.
#[derive(Debug)]
pub enum Cuda {}

/// The connection.
pub type Link = gantry_client::Link<Cuda>;

/// What the CUDA driver keeps with its connection.
#[derive(Debug, Default)]
pub struct State {
    /// What the worker provides.
    pub started: OnceLock<Started>,
    /// The kinds of addresses.
    pub memory: Mutex<Memory>,
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

    type State = State;

    fn connection() -> &'static Connection<Self> {
        static LINK: Connection<Cuda> = OnceLock::new();
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

/// What the worker provides.
pub fn started(link: &Link) -> Result<&Started, i32> {
    if let Some(started) = link.state.started.get() {
        return Ok(started);
    }
    let started = link.ask(&cuda::calls::Start {})?;
    Ok(link.state.started.get_or_init(|| started))
}

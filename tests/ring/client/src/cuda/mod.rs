//! The CUDA measurements. The same calls are made over a worker ([`run`]) or by any other
//! implementation ([`Calls`]), so that each figure has a single definition.

mod rings;

pub use rings::run;

use crate::{
    Surroundings,
    bench::{Direction, Samples, copies, count, time},
};

/// Adds numbers.
pub const ADD: &str =
    include_str!("../../../../cuda-driver/tests/kernels/vector_add.compute_75.ptx");
/// The kernel's name.
pub const ADD_NAME: &str = "vector_add";
/// A kernel that does nothing.
pub const NOTHING: &str = "
.version 7.8
.target sm_75
.address_size 64

.visible .entry nothing(
\t.param .u64 nothing_param_0,
\t.param .u32 nothing_param_1,
\t.param .u32 nothing_param_2,
\t.param .u32 nothing_param_3
)
{
\tret;
}
";
/// The kernel's name.
pub const NOTHING_NAME: &str = "nothing";

/// `CU_STREAM_NON_BLOCKING`, the flag of the stream.
pub const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`, the flag of the event.
pub const DISABLE_TIMING: u32 = 2;

/// Count of numbers to add.
pub const NUMBERS: u32 = 1 << 16;
/// Threads per block.
pub const BLOCK: u32 = 256;
/// Size in bytes of the device memory that is copied to and from.
pub const BUFFER: u64 = 16 << 20;
/// Sizes of copies in bytes.
pub const COPIES: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, BUFFER];
/// Launches without a wait: few enough that no queue between host and device fills up.
const BURST: u64 = 400;

/// The kinds of calls for which exits and system calls are counted, in this order.
pub const KINDS: [&str; 2] = ["synchronous calls", "launches that are waited for"];

/// A CUDA program with one stream, one event and pinned memory.
pub trait Calls {
    /// Why a call has failed.
    type Error;

    /// `cuStreamQuery`, whether or not the stream's work is done.
    fn query(&mut self) -> Result<(), Self::Error>;
    /// `cuMemGetInfo`
    fn memory(&mut self) -> Result<(), Self::Error>;
    /// `cuLaunchKernel` of the kernel that does nothing.
    fn launch(&mut self) -> Result<(), Self::Error>;
    /// `cuStreamSynchronize`
    fn synchronize(&mut self) -> Result<(), Self::Error>;
    /// `cuEventRecord`
    fn record(&mut self) -> Result<(), Self::Error>;
    /// `cuEventQuery`, whether or not the event's work is done.
    fn query_event(&mut self) -> Result<(), Self::Error>;
    /// `cuEventSynchronize`
    fn synchronize_event(&mut self) -> Result<(), Self::Error>;
    /// `cuMemcpyHtoDAsync` or `cuMemcpyDtoHAsync` with pinned memory.
    fn copy(&mut self, direction: Direction, size: u64) -> Result<(), Self::Error>;
}

/// Runs all measurements.
///
/// # Errors
/// A call has failed.
pub fn measure<C: Calls, S: Surroundings>(
    cuda: &mut C,
    here: &mut S,
    sizes: &[u64],
) -> Result<(), C::Error> {
    time(here, "query of an idle stream", 100, || cuda.query())?;
    count(here, || cuda.query())?;
    time(here, "memory info", 20, || cuda.memory())?;
    time(here, "launch + synchronize", 5, || {
        cuda.launch()?;
        cuda.synchronize()
    })?;
    count(here, || {
        cuda.launch()?;
        cuda.synchronize()
    })?;
    // The driver takes longer for this until it has waited for the whole context.
    time(here, "query of a stream behind launches", 100, || {
        cuda.query()
    })?;
    time(here, "launch, event, synchronize the event", 5, || {
        cuda.launch()?;
        cuda.record()?;
        cuda.synchronize_event()
    })?;
    time(here, "event record + query", 5, || {
        cuda.record()?;
        cuda.query_event()
    })?;
    cuda.synchronize()?;
    let mut samples = Samples::new(here);
    while samples.goes_on(here) {
        let start = here.now();
        for _ in 0..BURST {
            cuda.launch()?;
        }
        let sent = here.now().wrapping_sub(start) / BURST;
        cuda.synchronize()?;
        samples.add([sent, here.now().wrapping_sub(start) / BURST]);
    }
    let names = [
        "the caller's time for a launch of 400",
        "launches, each of 400, and a wait",
    ];
    for (what, (median, most)) in names.into_iter().zip(samples.summaries()) {
        here.time(what, median, most);
    }
    copies(here, sizes, |direction, size| {
        cuda.copy(direction, size)?;
        cuda.synchronize()
    })
}

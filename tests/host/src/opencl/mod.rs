//! OpenCL through the driver and a worker, as plain processes on this machine.
//!
//! - [`natively`]: third-party programs give the same results as with the host's driver.
//! - [`delegated`]: the same on CPUs that applications lend; [`streams`]: where no memory is shared.
//! - [`quiet`]: costs that calls and waiting must not have.
//! - [`workers`]: how workers are confined, and what happens when they end; [`descriptors`]: pools that run out of file
//!   descriptors; [`users`]: limits per user.
//! - [`moves`]: replacing workers while their applications run; [`models`]: devices of other models.
//! - [`compiled`]: what drivers compile is cached, separately for each owner.
//! - [`pool`]: the pool that serves all of them; [`applications`]: programs that are run several times.
//! - [`programs`]: programs of third parties.

mod applications;
mod compiled;
mod delegated;
mod descriptors;
mod models;
pub mod moves;
mod natively;
pub mod pool;
pub mod programs;
mod quiet;
mod streams;
mod users;
mod workers;

use anyhow::Result;
use gantry_tests::report::Outcome;

pub use self::{pool::PROGRAMS, programs::moved::PROGRAMS as MOVED};

use self::pool::Pool;
use crate::selected;

type Scenario = fn(&Pool) -> Result<()>;

/// Scenarios whose processes poll on both sides. Beside anything that keeps a CPU busy, each call of theirs takes a time
/// slice instead of a microsecond.
const POLLING: &[(&str, Scenario)] = &[
    (
        "opencl: programs compute the same by delegations, on a CPU that they lend",
        delegated::run,
    ),
    (
        "opencl: ten thousand synchronous calls make no system call on either side",
        quiet::steady,
    ),
];

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "opencl: clinfo says the same of the device as natively",
        natively::clinfo,
    ),
    (
        "opencl: vectors are added, by figures' program",
        natively::figures,
    ),
    (
        "opencl: pyopencl computes the same as natively",
        natively::pyopencl,
    ),
    (
        "opencl: shared virtual memory has the same addresses for application and device",
        natively::shared_addresses,
    ),
    (
        "opencl: seldom used entry points give the same as natively, from four threads",
        natively::entries,
    ),
    (
        "opencl: piglit's tests of the API end as natively",
        natively::piglit,
    ),
    (
        "opencl: errors that are found late are told by callback, event and wait",
        natively::late,
    ),
    (
        "opencl: children of fork are refused, share what is mapped, and their parent computes on",
        natively::forked,
    ),
    (
        "opencl: with libgantry_malloc.so large allocations lie in the window, and copies are right",
        natively::placed,
    ),
    (
        "opencl: by delegations a driver that is elsewhere is read where it may be",
        delegated::elsewhere,
    ),
    (
        "opencl: an application whose process cannot be watched is refused, and the next one served",
        delegated::unwatched,
    ),
    ("opencl: clpeak measures without an error", natively::clpeak),
    (
        "opencl: copies from window memory and to it pass the application's process untouched",
        quiet::untouched,
    ),
    (
        "opencl: an application that waits with an open context costs under 0.5 % of a processor",
        quiet::idle,
    ),
    (
        "opencl: workers are confined before an application comes",
        workers::confined,
    ),
    (
        "opencl: a killed worker costs its application an error code and nobody else anything",
        workers::killed,
    ),
    (
        "opencl: a worker that stands still ends with its application",
        workers::stopped,
    ),
    (
        "opencl: a pool that runs out of descriptors goes on, and so do its workers",
        descriptors::short,
    ),
    (
        "opencl: a pool whose limit of descriptors falls below what it polls goes on",
        descriptors::lowered,
    ),
    (
        "opencl: so many applications are served as there are descriptors for, and others wait",
        descriptors::bounded,
    ),
    (
        "opencl: a user has so many workers at a time as the pool allows, and others theirs",
        users::limited,
    ),
    (
        "opencl: what all applications of a pool have together is limited, wherever they move in it",
        users::one_sum,
    ),
    (
        "opencl: files that are sent to a pool, and hang as they close, keep nobody from it",
        users::hanging,
    ),
    (
        "opencl: a kernel that runs longer than it may costs its worker, without an arbiter",
        workers::limited,
    ),
    (
        "opencl: programs compute the same while their workers change every 50 to 500 ms",
        moves::chaos,
    ),
    (
        "opencl: programs that nobody here wrote end as natively while their workers change every 50 to 500 ms",
        programs::moved::run,
    ),
    (
        "opencl: programs compute the same while their memory follows them from worker to worker",
        moves::followed,
    ),
    (
        "opencl: a worker that is killed before its memory has followed costs an error at most",
        moves::lost,
    ),
    (
        "opencl: who is killed while an application moves costs it an error at most",
        moves::killed,
    ),
    (
        "opencl: programs compute the same while they change between pools, and through TLS",
        moves::between_pools,
    ),
    (
        "opencl: a program goes to no device, of its pool or another one, that lacks what it has asked the first one for",
        models::run,
    ),
    (
        "opencl: a program that is parked goes on with whoever serves next, also where its pool was killed",
        moves::parked,
    ),
    (
        "opencl: a program computes the same while it goes behind a gate and comes back",
        moves::behind_a_gate,
    ),
    (
        "opencl: who is killed while an application changes pools costs it an error at most",
        moves::between_killed,
    ),
    (
        "opencl: what one application has compiled the next one of its owner finds",
        compiled::kept,
    ),
    (
        "opencl: a driver that starts threads early is opened late, and finds what was compiled",
        compiled::late,
    ),
    (
        "opencl: owners' compiled programs are apart",
        compiled::apart,
    ),
    (
        "opencl: where nothing can be kept of what is compiled applications are served all the same",
        compiled::homeless,
    ),
    (
        "opencl: workers and pools that are killed in the middle of a build break no later one",
        compiled::killed,
    ),
    (
        "opencl: who fills the folder of compiled programs loses it and its worker",
        compiled::flooded,
    ),
    (
        "opencl: through a socket without shared memory programs compute the same",
        streams::unix,
    ),
    (
        "opencl: through TLS programs compute the same, and on both sides who is killed is missed",
        streams::tls,
    ),
    (
        "opencl: who shows no certificate of the authority is refused, and a port without TLS",
        streams::refused,
    ),
    (
        "opencl: who is killed at any moment of a stream harms nobody else",
        streams::killed,
    ),
    (
        "opencl: so many applications are served by streams at a time as the pool may have",
        streams::many_clients,
    ),
    (
        "opencl: who connects with a stream's port and says nothing keeps nobody else out",
        streams::silent,
    ),
];

/// Names of the scenarios.
pub fn names() -> impl Iterator<Item = &'static str> {
    let all = POLLING.iter().chain(SCENARIOS);
    all.map(|&(name, _)| name)
}

/// Runs the scenarios that the words select, or all without words, except those of [`run_polling`].
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    run_of(SCENARIOS, words, report)
}

/// Runs those of the selected scenarios that need this machine for themselves.
pub fn run_polling(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    run_of(POLLING, words, report)
}

fn run_of(
    scenarios: &[(&str, Scenario)],
    words: &[String],
    report: impl FnMut(&str, &Outcome, f64),
) -> Result<()> {
    selected::run(
        scenarios,
        words,
        Pool::start_installed,
        |scenario, pool| scenario(pool),
        report,
    )
}

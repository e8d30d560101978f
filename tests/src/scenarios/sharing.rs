//! One device for several VMs, shared by weight.

use std::{ops::ControlFlow, time::Duration};

use anyhow::{Result, bail, ensure};
use gpu_mediator::simulator::fairness::min_max_ratio;

use super::{Context, Entry};
use crate::shared_vms::{Had, Vms};

pub const SCENARIOS: &[Entry] = &[
    (
        "sharing: two VMs by weight, one of which waits for its results, and one goes on while the \
         other does wrong and when it is killed",
        |context| {
            let mut vms = by_weight(context, &[1, 2], Some(1), Duration::from_millis(1500))?;
            vms.one_does_wrong()?;
            lose_one(vms)
        },
    ),
    (
        "sharing: six VMs by weight, and five go on when one is killed",
        |context| {
            let weights = [1, 2, 2, 3, 3, 4];
            lose_one(by_weight(context, &weights, None, Duration::from_secs(1))?)
        },
    ),
];

/// How long to wait for device time.
const PATIENCE: Duration = Duration::from_secs(150);

/// Lets the guest with the least weight have the device for this long; the others must get time by weight. Each always
/// has kernels enqueued, so that equal shares would differ by as much as the weights. The guest `waiting` enqueues four
/// kernels when the previous four have ended, and would get as much as a guest of weight 1.
fn by_weight(
    context: &Context,
    weights: &[u32],
    waiting: Option<usize>,
    least: Duration,
) -> Result<Vms> {
    /// The ratio of the worst-off guest to the best-off one; equal shares give 0.5, and turns without weights (fifo)
    /// 0.64. One kernel more or less changes it by a few hundredths.
    const FAIR: f64 = 0.8;
    /// How much less than its due share a guest may have, if one guest waits for its results.
    const NEAR: f64 = 0.05;
    /// Maximum number of observed periods until one is fair: a guest whose vCPU has to wait for a CPU of this busy
    /// machine is late with its next kernels, and nobody keeps the device for it that long.
    const STRETCHES: usize = 3;
    let mut vms = Vms::start(&context.dir, "fair", weights, waiting)?;
    vms.go()?;
    let ideal: Vec<_> = weights.iter().copied().map(f64::from).collect();
    let is_fair = |had: &[Had]| {
        let device: Vec<_> = had.iter().map(|had| had.device).collect();
        let Some(waiting) = waiting else {
            return min_max_ratio(&device, &ideal) > FAIR;
        };
        let (all, due): (f64, f64) = (device.iter().sum(), ideal.iter().sum());
        had.iter()
            .zip(&ideal)
            .enumerate()
            .all(|(guest, (had, ideal))| {
                // Of the time for which it had something to do there: it may be late with its next kernels.
                let of = if guest == waiting {
                    had.device + had.queued
                } else {
                    all
                };
                had.device / of >= ideal / due - NEAR
            })
    };
    let mut stretches = Vec::new();
    while !stretches.last().is_some_and(|had: &Vec<Had>| is_fair(had)) {
        if stretches.len() >= STRETCHES {
            let state = vms.state()?;
            bail!(
                "guests of weights {weights:?}, of which {waiting:?} waits for its results, had the device for so \
                 many seconds, and waited for it, stretch by stretch: {stretches:.2?}\n{state}"
            );
        }
        let mut last = Vec::new();
        vms.watch(Duration::from_millis(200), |passed, had| {
            ensure!(
                passed < PATIENCE,
                "of the device, guests of weights {weights:?} had these seconds: {had:.2?}"
            );
            last = had.to_vec();
            Ok(match had[0].device < least.as_secs_f64() {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            })
        })?;
        stretches.push(last);
    }
    // A guest that waits for its turn sleeps until then.
    let wakes = vms.wakes()?;
    ensure!(
        wakes.iter().all(|count| *count > 0),
        "in these guests sleepers were woken so often: {wakes:?}"
    );
    Ok(vms)
}

/// One VM is killed, and the others continue.
fn lose_one(mut vms: Vms) -> Result<()> {
    vms.lose_one()?;
    let kernels = vms.end()?;
    ensure!(
        kernels.iter().all(|count| *count > 0),
        "the other guests ran so many kernels: {kernels:?}"
    );
    Ok(())
}

//! Copies from and to memory that the program has registered. As natively, they read and write it in stream order, the
//! caller does not wait, and nor do they wait for functions of the program that precede them in other streams only. A
//! stream is held until this process has filled the stage of a copy to the device. Behind a copy to the host, it is held
//! until the data has landed, so that whatever the program sees of the work behind the copy, be it a word that the device
//! writes, it finds the data in place.
//!
//! This needs a window that the worker shares. Without one, registered memory is treated like any other. If more copies
//! are outstanding than the worker keeps, the caller waits.

use gantry_client::stage::HostRegion;
use remoting_proto::wire::messages::{Call, WindowRange};

use crate::{
    copies::Order,
    entry::Outcome,
    link::Link,
    memory::{What, find},
    streams::{copy_in, exact, wait},
};

/// The most bytes that share a stage.
pub const PIECE: usize = 16 << 20;

/// Whether a stretch of at least one byte is within memory that the program has registered.
pub fn holds(link: &Link, at: u64, size: u64) -> bool {
    let within = |known: crate::memory::Known| {
        known.what == What::Registered && size <= known.size - (at - known.start)
    };
    link.is_shared() && find(link, at).is_some_and(within)
}

/// Whether all rows of a region are within memory that the program has registered.
pub fn holds_region(link: &Link, region: &HostRegion) -> bool {
    let HostRegion {
        start,
        row,
        rows,
        slices,
        row_pitch,
        slice_pitch,
    } = *region;
    let last = rows.saturating_sub(1).checked_mul(row_pitch);
    let slices = slices.saturating_sub(1).checked_mul(slice_pitch);
    let size = last
        .zip(slices)
        .and_then(|(last, slices)| last.checked_add(slices)?.checked_add(row));
    size.is_some_and(|size| holds(link, start as u64, size as u64))
}

/// Copies registered memory to the device: `call` copies from the stage. Returns false if there is no room for a stage
/// now. Everything that precedes the copy has been done then.
///
/// # Errors
/// The driver's.
pub fn write<C: Call<Answer = ()>>(
    link: &Link,
    order: Order,
    from: HostRegion,
    call: impl FnOnce(WindowRange) -> C,
) -> Outcome<bool> {
    let (context, stream) = (order.context, order.stream);
    let length = from.size() as u64;
    let Some(offset) = link.try_reserve_lasting(length) else {
        return wait(link, (context, stream)).map(|()| false);
    };
    let fill = move |status| {
        // The worker may be gone.
        if status == 0
            && let Some(link) = crate::link::existing()
        {
            // SAFETY: the caller's memory, which stays valid until the copy is done. The command that reads the space,
            // and with which it becomes free, comes after this function.
            let _ = unsafe { link.fill(offset, &from, link.reader()) };
        }
    };
    copy_in(link, (context, stream), fill).inspect_err(|_| link.free(offset, length))?;
    let call = call(link.stage(offset, length));
    match order.wait {
        true => exact(link, context, stream, link.ask(&call))?,
        false => link.post(&call)?,
    }
    Ok(true)
}

/// Copies from the device to registered memory without waiting: `call` copies to the stage. Returns false if there is no
/// room for a stage now.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// The memory is writable until the copy is done.
pub unsafe fn read<C: Call<Answer = ()>>(
    link: &Link,
    to: HostRegion,
    call: impl FnOnce(WindowRange) -> C,
) -> Outcome<bool> {
    let length = to.size() as u64;
    let Some(offset) = link.try_reserve_lasting(length) else {
        return Ok(false);
    };
    // SAFETY: the caller's promise; the reserved space is as large.
    let place = unsafe { link.stage_into(offset, length, to) };
    link.post(&call(place))?;
    Ok(true)
}

/// Holds the stream until the data of the copies before has landed: the worker reports the release of their stages
/// before it calls a function that comes after them.
///
/// # Errors
/// The driver's.
pub fn land(link: &Link, order: Order) -> Outcome {
    copy_in(link, (order.context, order.stream), |_| {})
}

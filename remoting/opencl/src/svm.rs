//! Coarse-grained shared virtual memory: pointers that mean the same to the application and to the
//! device, although the memories behind them differ.
//!
//! The driver chooses the address of an allocation, and the application's driver keeps its pages
//! free there. Contents move between both sides through the window, by commands that the client
//! sends where OpenCL lets the host access the memory (`clEnqueueSVMMap`, `clEnqueueSVMUnmap` and
//! copies). The worker itself never reads or writes there.
//!
//! Addresses from a client are numbers to be looked up. The invariant: the driver gets only
//! addresses inside an allocation that it has made for this client, in the very context of the
//! queue, kernel or buffer concerned, and with all the bytes behind the address that the call
//! covers.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    ptr::{null, null_mut},
    sync::Arc,
};

use remoting_proto::{
    apis::opencl::{
        calls::{self, Order, SvmAlloc, SvmPointers},
        codes,
    },
    wire::Header,
};
use remoting_session::{notice::Notice, quota::Charge};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    callbacks::Board,
    driver::{
        api::{Api, Handle},
        cl, enqueue, outcome,
    },
    freed::Freed,
    objects::{Home, MadeSvm, Queue},
    provenance::ContextRecord,
};

/// Allocations consist of whole pages of this size, in bytes: the client maps only those that share
/// no page with anything else.
const PAGE: u64 = 4096;
/// Bytes of address space to skip before a new address is chosen: more than large windows take,
/// since an address most likely collides with a window.
const APART: usize = 1 << 30;
/// Bytes that are allocated beyond what is asked for when an address was taken: more than fits into the holes beside heaps
/// of the C library, which are smaller than 64 MiB, from the second time on, and than the library takes from a heap (32 MiB).
/// Smaller allocations would be in the same hole again and again.
const BEYOND: u64 = 33 << 20;
/// These sizes double with each retry of the client, up to this many times.
const DOUBLINGS: u32 = 6;

/// How much is allocated beyond what is asked for, at this retry.
fn beyond(retries: u32) -> u64 {
    let doublings = retries.checked_sub(1);
    doublings.map_or(0, |doublings| BEYOND << doublings.min(DOUBLINGS))
}

/// An allocation of the driver.
#[derive(Debug)]
pub struct Allocation {
    /// Its context, to which it holds a reference.
    context: Handle,
    /// The address that the driver returned.
    raw: usize,
    /// The first byte of the client's part: page-aligned, if there was room for that.
    start: u64,
    /// Its length in bytes: whole pages, if aligned.
    length: u64,
    /// How it was made.
    #[expect(dead_code, reason = "read by who makes it again on another device")]
    made: MadeSvm,
    /// Returned with the allocation.
    _charge: Charge,
}

impl Allocation {
    /// The driver's handle of its context.
    pub fn context(&self) -> Handle {
        self.context
    }

    /// Returns it to the driver.
    pub fn free(self, api: &Api) {
        cl!(api, clSVMFree(self.context, self.raw as *mut c_void));
        cl!(api, clReleaseContext(self.context));
    }

    /// Whether it contains these bytes.
    fn has(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.start)
            .and_then(|offset| self.length.checked_sub(offset))
            .is_some_and(|rest| length <= rest && rest > 0)
    }
}

/// All allocations of a client, by the start address that it sees.
///
/// They do not end with the table, but with the process, together with whatever uses them.
#[derive(Debug, Default)]
pub struct Allocations {
    live: BTreeMap<u64, Arc<Allocation>>,
    /// How many the client has freed so far.
    frees: u64,
    /// Freed allocations that the driver still has.
    pub(crate) freed: Freed,
}

impl Allocations {
    /// Whether there is none, not even one that was freed and that the driver still has.
    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.freed.is_empty()
    }

    /// The context's allocation that contains these bytes.
    fn find(&self, context: Handle, address: u64, length: u64) -> Option<&Arc<Allocation>> {
        let (_, allocation) = self.live.range(..=address).next_back()?;
        (allocation.context == context && allocation.has(address, length)).then_some(allocation)
    }

    /// The driver's pointer to bytes in a context's allocation.
    pub(crate) fn at(&self, context: Handle, address: u64, length: u64) -> Option<*mut u8> {
        self.find(context, address, length)
            .map(|_| address as *mut u8)
    }

    /// The allocations of a context.
    pub(crate) fn of(&self, context: Handle) -> impl Iterator<Item = &Arc<Allocation>> {
        let live = self.live.values();
        live.filter(move |allocation| allocation.context == context)
    }
}

/// A kernel's address arguments: the driver does not keep the memory that they point to alive.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    by_index: BTreeMap<u32, u64>,
    /// The number of frees when all were last seen to be in allocations.
    seen: u64,
}

impl Addresses {
    /// Sets an argument's value.
    pub fn set(&mut self, index: u32, address: Option<u64>) {
        match address {
            Some(address) => {
                self.by_index.insert(index, address);
            }
            None if self.by_index.is_empty() => {}
            None => {
                self.by_index.remove(&index);
            }
        }
    }

    /// Whether all are still in allocations of a context. Takes one comparison if none was freed
    /// since.
    pub fn are_in(&mut self, all: &Allocations, context: Handle) -> bool {
        if self.by_index.is_empty() || self.seen == all.frees {
            return true;
        }
        let there = |address: &u64| all.find(context, *address, 1).is_some();
        let good = self.by_index.values().all(there);
        if good {
            self.seen = all.frees;
        }
        good
    }
}

/// Address space that is skipped while the driver chooses an address: drivers that let the kernel
/// choose get the next address below.
#[derive(Debug)]
struct Apart(*mut c_void, usize);

impl Apart {
    fn leave(retries: u32) -> Option<Self> {
        let size = APART << retries.checked_sub(1)?.min(DOUBLINGS);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh inaccessible mapping at an address chosen by the kernel.
        let start = unsafe { libc::mmap(null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self(start, size))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `leave`, which nobody uses.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// What a buffer in an allocation holds.
struct Lodger {
    allocation: Arc<Allocation>,
    board: Arc<Board>,
}

/// `clSetMemObjectDestructorCallback`'s callback for such a buffer.
///
/// # Safety
/// `data` comes from `svm_until_gone` and is passed once.
unsafe extern "C" fn left(_: Handle, data: *mut c_void) {
    // SAFETY: the driver calls each registered callback once.
    let Lodger { allocation, board } = *unsafe { Box::from_raw(data.cast::<Lodger>()) };
    drop(allocation);
    // A freed allocation is returned to the driver by the serving thread.
    board.leave(Notice::Wake);
}

impl Server {
    /// Allocates shared virtual memory: its offset in the window.
    pub fn svm_alloc(&mut self, call: &SvmAlloc) -> Result<u64, i32> {
        let context = self.backend.contexts.get(call.context.0)?;
        if !context.svm {
            return Err(codes::INVALID_OPERATION);
        }
        let access = codes::MEM_READ_WRITE | codes::MEM_READ_ONLY | codes::MEM_WRITE_ONLY;
        if call.flags & !access != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let made_in = (context.raw, Arc::clone(&context.record));
        let found = self.find_memory(&made_in, call);
        if found.is_err() && self.make_room() {
            return self.find_memory(&made_in, call);
        }
        found
    }

    fn find_memory(
        &mut self,
        (context, record): &(Handle, Arc<ContextRecord>),
        call: &SvmAlloc,
    ) -> Result<u64, i32> {
        let context = *context;
        let pages = call.size.checked_next_multiple_of(PAGE);
        let length = pages
            .filter(|length| *length > 0)
            .ok_or(codes::INVALID_VALUE)?;
        // Drivers align only to what types need. One extra page ensures that there is a page
        // boundary.
        let beside = PAGE + beyond(call.retries);
        let more = length.checked_add(beside).ok_or(codes::INVALID_VALUE)?;
        let (raw, charge) = match self.ask_for(context, call, more) {
            Ok(found) => found,
            // The largest allocations have no room for it. They are unlikely to share a page with
            // others.
            Err(_) => self.ask_for(context, call, call.size)?,
        };
        // Cannot overflow: no memory ends at the limit of the address space.
        let (start, length) = if charge.bytes() == more {
            ((raw as u64).next_multiple_of(PAGE), length)
        } else {
            (raw as u64, call.size)
        };
        cl!(self.backend.api, clRetainContext(context));
        let allocation = Allocation {
            context,
            raw,
            start,
            length,
            made: MadeSvm {
                call: call.clone(),
                context: Arc::clone(record),
            },
            _charge: charge,
        };
        self.backend.svm.live.insert(start, Arc::new(allocation));
        Ok(start)
    }

    /// Allocates this many bytes from the driver.
    fn ask_for(&self, context: Handle, call: &SvmAlloc, size: u64) -> Result<(usize, Charge), i32> {
        let charge = self.charge_once(size)?;
        // A worker without threads may have no kernel to ask for address space.
        let apart = self
            .has_threads()
            .then(|| Apart::leave(call.retries))
            .flatten();
        let raw = cl!(
            self.backend.api,
            clSVMAlloc(context, call.flags, size as usize, 0)
        ) as usize;
        drop(apart);
        if raw == 0 {
            return Err(codes::MEM_OBJECT_ALLOCATION_FAILURE);
        }
        Ok((raw, charge))
    }

    pub(crate) fn svm_free(&mut self, address: u64) -> Result<(), i32> {
        let freed = self
            .backend
            .svm
            .live
            .remove(&address)
            .ok_or(codes::INVALID_VALUE)?;
        self.backend.svm.frees += 1;
        self.keep_freed(freed);
        Ok(())
    }

    /// The allocation in which a buffer is to live.
    pub(crate) fn svm_for_buffer(
        &self,
        context: Handle,
        address: u64,
        size: u64,
    ) -> Result<Arc<Allocation>, i32> {
        let found = self.backend.svm.find(context, address, size);
        found.cloned().ok_or(codes::INVALID_HOST_PTR)
    }

    /// Keeps an allocation until the driver reports that a buffer in it is gone.
    pub(crate) fn svm_until_gone(&self, buffer: Handle, allocation: Arc<Allocation>) {
        let board = Arc::clone(&self.board);
        let data = Box::into_raw(Box::new(Lodger { allocation, board }));
        // If the driver refuses the callback, the allocation is kept.
        cl!(
            self.backend.api,
            clSetMemObjectDestructorCallback(buffer, Some(left), data.cast())
        );
    }

    pub(crate) fn svm_pointers(&mut self, call: &SvmPointers) -> Result<(), i32> {
        let kernel = self.backend.kernels.get(call.kernel.0)?;
        if !kernel.home.svm {
            return Err(codes::INVALID_OPERATION);
        }
        let pointers = call
            .addresses
            .iter()
            .map(|&address| self.backend.svm.at(kernel.home.raw, address, 1))
            .collect::<Option<Vec<_>>>()
            .ok_or(codes::INVALID_VALUE)?;
        outcome(cl!(
            self.backend.api,
            clSetKernelExecInfo(
                kernel.raw,
                codes::KERNEL_EXEC_INFO_SVM_PTRS,
                size_of_val(pointers.as_slice()),
                pointers.as_ptr().cast(),
            )
        ))
    }

    /// The context of a command's queue, if its device supports shared virtual memory.
    pub(crate) fn svm_of(&self, order: &Order) -> Result<Home, i32> {
        match self.backend.queues.get(order.queue.0)? {
            Queue {
                svm: true, home, ..
            } => Ok(*home),
            _ => Err(codes::INVALID_OPERATION),
        }
    }

    pub(crate) fn svm_copy(&mut self, header: Header, c: &calls::SvmCopy) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let context = server.svm_of(&c.order)?.raw;
            let at = |address| server.backend.svm.at(context, address, c.size);
            let (Some(from), Some(to)) = (at(c.from), at(c.to)) else {
                return Err(codes::INVALID_VALUE);
            };
            if c.from.abs_diff(c.to) < c.size {
                return Err(codes::MEM_COPY_OVERLAP);
            }
            Ok(enqueue!(
                api,
                slot,
                clEnqueueSVMMemcpy(0, to.cast(), from.cast_const().cast(), c.size as usize)
            ))
        })
    }

    pub(crate) fn svm_fill(&mut self, header: Header, c: &calls::SvmFill) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let context = server.svm_of(&c.order)?.raw;
            let to = server.backend.svm.at(context, c.address, c.size);
            let to = to.ok_or(codes::INVALID_VALUE)?;
            let (pattern, length) = (&c.pattern.0, c.pattern.0.len() as u64);
            if !(1..=128).contains(&length)
                || !length.is_power_of_two()
                || !c.address.is_multiple_of(length)
                || !c.size.is_multiple_of(length)
            {
                return Err(codes::INVALID_VALUE);
            }
            Ok(enqueue!(
                api,
                slot,
                clEnqueueSVMMemFill(
                    to.cast(),
                    pattern.as_ptr().cast(),
                    pattern.len(),
                    c.size as usize
                )
            ))
        })
    }

    pub(crate) fn svm_migrate(
        &mut self,
        header: Header,
        c: &calls::SvmMigrate,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let home = server.svm_of(&c.order)?;
            let known =
                codes::MIGRATE_MEM_OBJECT_HOST | codes::MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
            if c.ranges.is_empty() || c.flags & !known != 0 {
                return Err(codes::INVALID_VALUE);
            }
            let pointers = c
                .ranges
                .iter()
                .map(|&(address, size)| server.backend.svm.at(home.raw, address, size.max(1)))
                .collect::<Option<Vec<_>>>()
                .ok_or(codes::INVALID_VALUE)?;
            if server.platform_version(home.platform) < 21 {
                // The command is a hint, for which such a driver has no function.
                return Ok(enqueue!(api, slot, clEnqueueMarkerWithWaitList()));
            }
            let sizes: Vec<usize> = c.ranges.iter().map(|range| range.1 as usize).collect();
            Ok(enqueue!(
                api,
                slot,
                clEnqueueSVMMigrateMem(
                    pointers.len() as u32,
                    pointers.as_ptr().cast::<*const c_void>(),
                    if sizes.iter().all(|size| *size == 0) {
                        null()
                    } else {
                        sizes.as_ptr()
                    },
                    c.flags
                )
            ))
        })
    }
}

#[cfg(test)]
#[path = "svm_tests.rs"]
pub(crate) mod tests;

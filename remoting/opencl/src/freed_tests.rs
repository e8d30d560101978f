//! Tests of freeing memory while a driver's commands run for as long as the test wants.

use std::{
    cell::{Cell, RefCell},
    ffi::c_void,
};

use remoting_proto::{
    apis::opencl::{
        calls::{
            ContextId, CreateBuffer, CreateUserEvent, EventId, Grid, KernelId, MemId, NdRange,
            QueueId, Request, SetArgument, SvmFill, Value,
        },
        codes,
    },
    wire::{Blob, Flags, Header},
};
use remoting_session::quota::Quota;

use super::*;
use crate::svm::tests::{HEADER, alloc, enqueue, order, server_before};

const PAGE: u64 = 4096;
/// The charge of the smallest allocation.
const CHARGED: u64 = 2 * PAGE;
const QUEUED: i32 = 3;

thread_local! {
    static ENDED: Cell<bool> = const { Cell::new(false) };
    static MARKERS: Cell<usize> = const { Cell::new(0) };
    static WAITS: Cell<usize> = const { Cell::new(0) };
    static REFUSES: Cell<bool> = const { Cell::new(false) };
    static FREED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn marker(_: Handle, _: u32, _: *const Handle, event: *mut Handle) -> i32 {
    MARKERS.set(MARKERS.get() + 1);
    // SAFETY: the worker asks for the event.
    unsafe { event.write(1000 + MARKERS.get()) };
    if REFUSES.get() {
        codes::OUT_OF_RESOURCES
    } else {
        0
    }
}

unsafe extern "C" fn event_status(
    _: Handle,
    _: u32,
    _: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    let status = if ENDED.get() { 0 } else { QUEUED };
    // SAFETY: the worker asks for a status.
    unsafe { value.cast::<i32>().write(status) };
    0
}

unsafe extern "C" fn wait(_: u32, _: *const Handle) -> i32 {
    WAITS.set(WAITS.get() + 1);
    ENDED.set(true);
    0
}

unsafe extern "C" fn free(_: Handle, pointer: *mut c_void) {
    FREED.with_borrow_mut(|freed| freed.push(pointer as usize));
}

fn server() -> Server {
    ENDED.set(false);
    MARKERS.set(0);
    WAITS.set(0);
    REFUSES.set(false);
    FREED.take();
    server_before(Api::null().with_ends(marker, event_status, wait, free))
}

/// Makes the driver fill a byte of an allocation.
fn fill(server: &mut Server, queue: u32, address: u64) -> Result<(), i32> {
    let fill = SvmFill {
        order: order(queue),
        address,
        pattern: Blob(vec![7]),
        size: 1,
    };
    enqueue(server, queue, Request::SvmFill(fill))
}

/// How many allocations the driver has got back after the worker has checked.
fn freed(server: &mut Server) -> usize {
    server.poll_waits().unwrap();
    FREED.with_borrow(Vec::len)
}

#[test]
fn what_a_command_may_use_is_freed_when_that_has_ended_and_charged_until_then() {
    let mut server = server();
    let address = alloc(&mut server, 0, PAGE).unwrap();
    fill(&mut server, 0, address).unwrap();
    server.svm_free(address).unwrap();
    assert_eq!((freed(&mut server), server.quota.used()), (0, CHARGED));
    // The allocation no longer exists for the client.
    let refused = Err(codes::INVALID_VALUE);
    assert_eq!(fill(&mut server, 0, address), refused);
    assert_eq!(server.svm_free(address), refused);
    ENDED.set(true);
    assert_eq!((freed(&mut server), server.quota.used()), (1, 0));
}

#[test]
fn what_no_command_may_use_is_freed_at_once() {
    let mut server = server();
    let (one, other) = (
        alloc(&mut server, 0, PAGE).unwrap(),
        alloc(&mut server, 1, PAGE).unwrap(),
    );
    fill(&mut server, 1, other).unwrap();
    server.svm_free(one).unwrap();
    assert_eq!((freed(&mut server), MARKERS.get()), (1, 0));
    // Nor after a wait for all commands of the queue.
    let header = Header {
        flags: HEADER.flags.with(Flags::ALONE),
        ..HEADER
    };
    server.finish(header, QueueId(1)).unwrap();
    server.svm_free(other).unwrap();
    assert_eq!((freed(&mut server), MARKERS.get()), (2, 0));
}

#[test]
fn what_is_freed_between_two_commands_shares_a_marker() {
    let mut server = server();
    let all = [(); 4].map(|()| alloc(&mut server, 0, PAGE).unwrap());
    fill(&mut server, 0, all[0]).unwrap();
    for address in &all[..3] {
        server.svm_free(*address).unwrap();
    }
    assert_eq!(MARKERS.get(), 1);
    fill(&mut server, 0, all[3]).unwrap();
    server.svm_free(all[3]).unwrap();
    assert_eq!((freed(&mut server), MARKERS.get()), (0, 2));
    ENDED.set(true);
    assert_eq!(freed(&mut server), 4);
}

#[test]
fn commands_of_a_queue_that_is_gone_go_on() {
    let mut server = server();
    let address = alloc(&mut server, 0, PAGE).unwrap();
    fill(&mut server, 0, address).unwrap();
    server.release_queue(QueueId(0)).unwrap();
    server.svm_free(address).unwrap();
    assert_eq!((freed(&mut server), server.quota.used()), (0, CHARGED));
    ENDED.set(true);
    assert_eq!((freed(&mut server), server.quota.used()), (1, 0));
}

#[test]
fn memory_whose_use_the_driver_does_not_tell_the_end_of_stays() {
    let mut server = server();
    let all = [(); 2].map(|()| alloc(&mut server, 0, PAGE).unwrap());
    fill(&mut server, 0, all[0]).unwrap();
    REFUSES.set(true);
    server.svm_free(all[0]).unwrap();
    server.release_queue(QueueId(0)).unwrap();
    server.svm_free(all[1]).unwrap();
    ENDED.set(true);
    assert_eq!((freed(&mut server), server.quota.used()), (0, 2 * CHARGED));
}

#[test]
fn who_needs_the_room_waits_for_it_unless_the_client_is_to_act_first() {
    let mut server = server();
    server.quota = Quota::new(CHARGED);
    let buffer = |id| CreateBuffer {
        id: MemId(id),
        context: ContextId(0),
        flags: 0,
        size: CHARGED,
        contents: None,
        lives: None,
        svm: None,
    };
    let address = alloc(&mut server, 0, PAGE).unwrap();
    fill(&mut server, 0, address).unwrap();
    server.svm_free(address).unwrap();
    let user = CreateUserEvent {
        id: EventId(0),
        context: ContextId(0),
    };
    server.create_user_event(&user).unwrap();
    let full = codes::MEM_OBJECT_ALLOCATION_FAILURE;
    assert_eq!(alloc(&mut server, 0, PAGE), Err(full));
    assert_eq!(server.create_buffer(buffer(0)), Err(full));
    assert_eq!(WAITS.get(), 0);
    server.undecided = 0;
    let address = alloc(&mut server, 0, PAGE).unwrap();
    assert_eq!(WAITS.get(), 1);
    ENDED.set(false);
    fill(&mut server, 0, address).unwrap();
    server.svm_free(address).unwrap();
    assert_eq!(server.create_buffer(buffer(1)), Ok(()));
    assert_eq!(WAITS.get(), 2);
}

#[test]
fn a_kernel_does_not_run_with_the_address_of_what_was_freed() {
    let mut server = server();
    let all = [(); 3].map(|()| alloc(&mut server, 0, PAGE).unwrap());
    let set = |server: &mut Server, value| {
        let call = SetArgument {
            kernel: KernelId(0),
            index: 1,
            value,
        };
        server.set_argument(&call)
    };
    let run = |server: &mut Server| {
        let kernel = NdRange {
            order: order(0),
            kernel: KernelId(0),
            grid: Grid::line(1),
        };
        enqueue(server, 0, Request::NdRange(kernel))
    };
    set(&mut server, Value::Svm(Some(all[0] + 8))).unwrap();
    assert_eq!(run(&mut server), Ok(()));
    server.svm_free(all[1]).unwrap();
    assert_eq!(run(&mut server), Ok(()));
    server.svm_free(all[0]).unwrap();
    let refused = Err(codes::INVALID_KERNEL_ARGS);
    assert_eq!(run(&mut server), refused);
    assert_eq!(run(&mut server), refused);
    for value in [
        Value::Svm(Some(all[2])),
        Value::Svm(None),
        Value::Bytes(Blob(vec![1])),
    ] {
        set(&mut server, Value::Svm(Some(all[2]))).unwrap();
        set(&mut server, value).unwrap();
        assert_eq!(run(&mut server), Ok(()));
    }
    server.svm_free(all[2]).unwrap();
    assert_eq!(run(&mut server), Ok(()));
}

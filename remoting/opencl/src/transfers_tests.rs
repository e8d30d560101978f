//! Tests of transfers of which a driver refuses a part.

use std::{cell::Cell, ffi::c_void, sync::Arc};

use remoting_proto::{
    apis::opencl::{
        calls::{MemId, Request, StageId, WindowRange, WriteBuffer},
        codes,
    },
    wire::{Flags, Header, messages::Call},
};
use remoting_session::backend::Backend;
use remoting_transport::{port_bell::Waker, window::Window};

use crate::{
    Server,
    driver::{Api, api::Handle},
    testing::{self, BELL, buffer, carry_out, order},
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// The event of a marker.
const EVENT: Handle = 1000;
const QUEUED: i32 = 3;
const STAGE: StageId = StageId(1);

thread_local! {
    /// How many writes the driver still accepts.
    static ACCEPTED: Cell<usize> = const { Cell::new(0) };
    static ENDED: Cell<bool> = const { Cell::new(false) };
    static MARKS: Cell<bool> = const { Cell::new(true) };
    static FINISHED: Cell<i32> = const { Cell::new(0) };
}

unsafe extern "C" fn write(
    _: Handle,
    _: Handle,
    _: u32,
    _: usize,
    _: usize,
    _: *const c_void,
    _: u32,
    _: *const Handle,
    _: *mut Handle,
) -> i32 {
    match ACCEPTED.get() {
        0 => codes::INVALID_VALUE,
        left => {
            ACCEPTED.set(left - 1);
            0
        }
    }
}

unsafe extern "C" fn finish(_: Handle) -> i32 {
    let code = FINISHED.get();
    ENDED.set(ENDED.get() || code == 0);
    code
}

unsafe extern "C" fn marker(_: Handle, _: u32, _: *const Handle, event: *mut Handle) -> i32 {
    if !MARKS.get() {
        return codes::OUT_OF_RESOURCES;
    }
    // SAFETY: the worker asks for the event.
    unsafe { event.write(EVENT) };
    0
}

unsafe extern "C" fn status(_: Handle, _: u32, _: usize, value: *mut c_void, _: *mut usize) -> i32 {
    let status = if ENDED.get() { 0 } else { QUEUED };
    // SAFETY: the worker asks for a status.
    unsafe { value.cast::<i32>().write(status) };
    0
}

unsafe extern "C" fn wait(_: u32, _: *const Handle) -> i32 {
    0
}

unsafe extern "C" fn free(_: Handle, _: *mut c_void) {}

/// A server with a buffer, whose driver accepts so many parts of a write. The window's registrations meet at 8 MiB.
fn server(accepted: usize) -> (Server, Arc<Window>) {
    ACCEPTED.set(accepted);
    ENDED.set(false);
    MARKS.set(true);
    FINISHED.set(0);
    let api = Api::null()
        .with_ends(marker, status, wait, free)
        .with_writes(write, finish);
    let (mut server, _, window) = testing::server_of(api, Waker::Futex(BELL), 64 * MIB);
    testing::make_queue(&mut server);
    carry_out(&mut server, Request::CreateBuffer(buffer(0, 0, 2 * PAGE)));
    let home = server.backend.queues.get(0).unwrap().home;
    server.reach(home, window.data(), PAGE);
    (server, window)
}

/// Writes two pages, of which each is in one registration.
fn write_both(server: &mut Server, window: &Window, flags: Flags) {
    let header = Header {
        length: 0,
        opcode: WriteBuffer::OPCODE,
        flags,
        sequence: 0,
    };
    let call = WriteBuffer {
        order: order(),
        mem: MemId(0),
        offset: 0,
        from: WindowRange {
            offset: window.data() + 8 * MIB - PAGE,
            length: 2 * PAGE,
            stage: Some(STAGE),
        },
    };
    server.serve(header, Request::WriteBuffer(call)).unwrap();
}

/// The stages that are released, of which a client that waits has been told.
fn released(server: &mut Server) -> Vec<(StageId, bool)> {
    server.retire_stages();
    server.released_stages().to_vec()
}

#[test]
fn a_stage_is_used_while_a_part_of_its_transfer_is_in_progress() {
    let waits = Flags::ANSWER.with(Flags::ALONE);
    for flags in [Flags::default(), waits] {
        let (mut server, window) = server(1);
        write_both(&mut server, &window, flags);
        assert_eq!(released(&mut server), []);
        assert!(server.has_stages());
        ENDED.set(true);
        assert_eq!(released(&mut server), [(STAGE, false)]);
    }
}

#[test]
fn a_stage_is_used_while_a_transfer_is_in_progress_that_cannot_be_awaited() {
    let (mut server, window) = server(2);
    FINISHED.set(codes::OUT_OF_HOST_MEMORY);
    write_both(&mut server, &window, Flags::ANSWER.with(Flags::ALONE));
    assert_eq!(released(&mut server), []);
    assert!(server.has_stages());
    ENDED.set(true);
    assert_eq!(released(&mut server), [(STAGE, false)]);
}

#[test]
fn without_a_marker_the_part_of_a_transfer_is_waited_for() {
    let (mut server, window) = server(1);
    MARKS.set(false);
    write_both(&mut server, &window, Flags::default());
    assert!(ENDED.get());
    assert_eq!(released(&mut server), [(STAGE, false)]);
}

#[test]
fn a_stage_of_which_nothing_is_accepted_is_free_at_once() {
    let (mut server, window) = server(0);
    write_both(&mut server, &window, Flags::default());
    assert_eq!(released(&mut server), [(STAGE, false)]);
}

#[test]
fn without_a_marker_a_stage_is_released_when_no_client_is_awaited() {
    let (mut server, window) = server(1);
    MARKS.set(false);
    server.expected = 1;
    write_both(&mut server, &window, Flags::default());
    Backend::resume(&mut server).unwrap();
    assert!(!ENDED.get());
    assert_eq!(released(&mut server), []);
    server.expected = 0;
    Backend::resume(&mut server).unwrap();
    assert!(ENDED.get());
    assert_eq!(released(&mut server), [(STAGE, false)]);
    // Once.
    Backend::resume(&mut server).unwrap();
    assert_eq!(released(&mut server), [(STAGE, false)]);
}

//! Tests of which contents commands need.

use remoting_proto::{
    apis::opencl::calls::{
        BufferRect, ContextId, CopyBuffer, CopyBufferRect, CopyBufferToImage, CopyImage,
        CopyImageToBuffer, CreateSubBuffer, CreateUserEvent, EventId, FillBuffer, FillImage, Grid,
        ImageRect, KernelId, Map, Marker, Migrate, NdRange, ReadBuffer, ReleaseMem, SetArgument,
        Unmap, Value, WindowRange, WriteBuffer,
    },
    wire::Blob,
};

use super::*;
use crate::{
    driver::Api,
    testing::{self, buffer, carry_out, order},
};

const SIZE: u64 = 64;
/// The buffer whose contents are missing, a part of it, and another buffer.
const GONE: MemId = MemId(0);
const PART: MemId = MemId(1);
const HERE: MemId = MemId(2);

/// A server that has yet to fetch a buffer.
fn server() -> Server {
    let buffers = [GONE, HERE].map(|mem| buffer(mem.0, 0, SIZE));
    let mut server = testing::server_with_kernel(Api::null(), buffers);
    let part = CreateSubBuffer {
        id: PART,
        of: GONE,
        flags: 0,
        origin: 0,
        size: 8,
    };
    carry_out(&mut server, Request::CreateSubBuffer(part));
    server.await_contents(&[GONE.0]).unwrap();
    server
}

fn set(server: &mut Server, index: u32, mem: MemId) {
    let call = SetArgument {
        kernel: KernelId(0),
        index,
        value: Value::Mem(Some(mem)),
    };
    carry_out(server, Request::SetArgument(call));
}

fn run() -> Request {
    Request::NdRange(NdRange {
        order: order(),
        kernel: KernelId(0),
        grid: Grid::line(1),
    })
}

fn fill(order: Order, mem: MemId, size: u64) -> Request {
    Request::FillBuffer(FillBuffer {
        order,
        mem,
        pattern: Blob(vec![7]),
        offset: 0,
        size,
    })
}

/// Whether a command need not wait.
fn has_come(server: &mut Server, request: &Request) -> bool {
    server.contents_have_come(70, request).unwrap()
}

/// Every command that may name memory, each with some memory.
fn commands(one: MemId, other: MemId) -> Vec<Request> {
    let place = || WindowRange {
        offset: 0,
        length: 1,
        stage: None,
    };
    let (origin, region) = ([0; 3], [1; 3]);
    let order = order();
    vec![
        Request::ReadBuffer(ReadBuffer {
            order: order.clone(),
            mem: one,
            offset: 0,
            to: place(),
        }),
        Request::WriteBuffer(WriteBuffer {
            order: order.clone(),
            mem: one,
            offset: 0,
            from: place(),
        }),
        Request::BufferRect(BufferRect {
            order: order.clone(),
            mem: one,
            write: true,
            origin,
            region,
            pitches: [0; 2],
            place: place(),
        }),
        Request::ImageRect(ImageRect {
            order: order.clone(),
            mem: one,
            write: false,
            origin,
            region,
            place: place(),
        }),
        Request::CopyBuffer(CopyBuffer {
            order: order.clone(),
            from: one,
            to: other,
            offsets: [0; 2],
            size: 1,
        }),
        Request::CopyBufferRect(CopyBufferRect {
            order: order.clone(),
            from: one,
            to: other,
            origins: [origin; 2],
            region,
            pitches: [[0; 2]; 2],
        }),
        Request::CopyImage(CopyImage {
            order: order.clone(),
            from: one,
            to: other,
            origins: [origin; 2],
            region,
        }),
        Request::CopyImageToBuffer(CopyImageToBuffer {
            order: order.clone(),
            image: one,
            buffer: other,
            origin,
            region,
            offset: 0,
        }),
        Request::CopyBufferToImage(CopyBufferToImage {
            order: order.clone(),
            buffer: one,
            image: other,
            offset: 0,
            origin,
            region,
        }),
        fill(order.clone(), one, 1),
        Request::FillImage(FillImage {
            order: order.clone(),
            mem: one,
            colour: [0; 4],
            origin,
            region,
        }),
        Request::Migrate(Migrate {
            order: order.clone(),
            mems: vec![other, one],
            flags: 0,
        }),
        Request::Map(Map {
            order: order.clone(),
            mem: one,
            flags: 1,
            offset: 0,
            size: 1,
        }),
        Request::Unmap(Unmap {
            order,
            mem: one,
            offset: 0,
        }),
    ]
}

#[test]
fn a_command_waits_for_what_it_names_and_no_other() {
    let mut server = server();
    for one in [GONE, PART] {
        let both = commands(one, HERE).into_iter().chain(commands(HERE, one));
        for request in both {
            let names_one = format!("{request:?}").contains(&format!("{one:?}"));
            assert_eq!(has_come(&mut server, &request), !names_one, "{request:?}");
        }
    }
    for request in commands(HERE, HERE) {
        assert!(has_come(&mut server, &request), "{request:?}");
    }
    let marker = Request::Marker(Marker { order: order() });
    assert!(has_come(&mut server, &marker));
}

#[test]
fn a_kernel_waits_for_all_that_it_has_for_arguments() {
    let mut server = server();
    assert!(has_come(&mut server, &run()));
    set(&mut server, 0, HERE);
    assert!(has_come(&mut server, &run()));
    set(&mut server, 1, PART);
    assert!(!has_come(&mut server, &run()));
    set(&mut server, 1, HERE);
    assert!(has_come(&mut server, &run()));
    // A released object may be part of anything.
    let release = ReleaseMem {
        id: HERE,
        callback: None,
    };
    carry_out(&mut server, Request::ReleaseMem(release));
    assert!(!has_come(&mut server, &run()));
}

#[test]
fn who_overwrites_a_whole_buffer_that_nothing_can_read_before_does_not_wait() {
    let mut server = server();
    let whole = |wait| {
        let order = Order { wait, ..order() };
        fill(order, GONE, SIZE)
    };
    assert!(!has_come(&mut server, &fill(order(), GONE, SIZE - 1)));
    assert!(!has_come(&mut server, &fill(order(), PART, 8)));
    assert!(!has_come(&mut server, &whole(vec![EventId(0)])));
    let event = CreateUserEvent {
        id: EventId(1),
        context: ContextId(0),
    };
    let mut waits = server;
    carry_out(&mut waits, Request::CreateUserEvent(event));
    assert!(!has_come(&mut waits, &whole(Vec::new())));

    let mut server = self::server();
    let missing = server.backend.missing.as_ref().unwrap();
    let numbers = Arc::clone(&missing.numbers);
    assert!(has_come(&mut server, &whole(Vec::new())));
    // The old contents are not written meanwhile.
    assert_eq!(numbers.state.lock_unpoisoned().overwriting, Some(GONE.0));
    carry_out(&mut server, whole(Vec::new()));
    assert!(numbers.state.lock_unpoisoned().awaited.is_empty());
    assert!(numbers.next().is_none());
    for request in commands(GONE, PART) {
        assert!(has_come(&mut server, &request), "{request:?}");
    }
}

#[test]
fn what_is_waited_for_comes_first_and_what_was_released_not_at_all() {
    let mut server = server();
    server.backend.missing = None;
    server.await_contents(&[GONE.0, HERE.0]).unwrap();
    let missing = server.backend.missing.as_ref().unwrap();
    let numbers = Arc::clone(&missing.numbers);
    assert!(!has_come(&mut server, &fill(order(), HERE, 1)));
    let next = numbers.next().unwrap();
    assert_eq!((next.number, next.left), (HERE.0, 2 * SIZE));
    // It is being written.
    assert!(!has_come(&mut server, &fill(order(), HERE, SIZE)));
    numbers.came(HERE.0, Ok(()));
    assert!(has_come(&mut server, &fill(order(), HERE, 1)));
    drop(next);
    for id in [PART, GONE] {
        // A released object stays as long as a part of it, and no longer.
        assert!(numbers.state.lock_unpoisoned().bytes > 0);
        let callback = None;
        carry_out(
            &mut server,
            Request::ReleaseMem(ReleaseMem { id, callback }),
        );
    }
    let state = numbers.state.lock_unpoisoned();
    assert!(state.awaited.is_empty() && state.bytes == 0);
    drop(state);
    assert!(numbers.next().is_none());
    assert!(server.driver_busy().is_none());
}

#[test]
fn what_is_released_while_it_is_fetched_is_not_lost_if_that_fails() {
    let mut server = server();
    let missing = server.backend.missing.as_ref().unwrap();
    let numbers = Arc::clone(&missing.numbers);
    let next = numbers.next().unwrap();
    for id in [PART, GONE] {
        let callback = None;
        let release = ReleaseMem { id, callback };
        carry_out(&mut server, Request::ReleaseMem(release));
    }
    numbers.came(next.number, Err("killed".to_owned()));
    let missing = server.backend.missing.as_ref().unwrap();
    assert!(!missing.is_awaited());
    assert!(numbers.state.lock_unpoisoned().lost.is_empty());
}

#[test]
fn what_is_lost_and_then_released_by_whoever_waits_for_its_end_is_in_nobodys_way() {
    let mut server = server();
    server.backend.missing = None;
    server.await_contents(&[GONE.0, HERE.0]).unwrap();
    let missing = server.backend.missing.as_ref().unwrap();
    let numbers = Arc::clone(&missing.numbers);
    let next = numbers.next().unwrap();
    numbers.came(next.number, Err("killed".to_owned()));
    assert!(missing.is_awaited() && server.driver_busy().is_some());
    for (number, id) in (1..).zip([PART, GONE, HERE]) {
        let callback = Some(number);
        let release = ReleaseMem { id, callback };
        carry_out(&mut server, Request::ReleaseMem(release));
    }
    // A released object that has not arrived is not fetched any more, and the driver need not have
    // reported its end.
    assert!(numbers.next().is_none());
    assert!(!server.backend.missing.as_ref().unwrap().is_awaited());
}

//! Tests of what is recorded about commands.

use remoting_proto::{
    apis::opencl::calls::{
        ContextId, CopyBuffer, CreateImage, CreateSubBuffer, FillBuffer, FillImage, Grid,
        ImageShape, KernelId, Marker, NdRange, SetArgument, Value,
    },
    wire::Blob,
};

use super::*;
use crate::{
    driver::Api,
    testing::{self, Parameter, Parameters, buffer, carry_out, order, with_parameters},
};

const BUFFERS: u32 = 4;
/// The buffer that was made with `CL_MEM_READ_ONLY`.
const READ_ONLY: u32 = 3;

/// A server with buffers and a kernel.
fn server() -> Server {
    server_before(Api::null())
}

/// The same, with another driver.
fn server_before(api: Api) -> Server {
    let flags = |id| match id {
        READ_ONLY => codes::MEM_READ_ONLY,
        _ => 0,
    };
    let buffers = (0..BUFFERS).map(|id| buffer(id, flags(id), 64));
    testing::server_with_kernel(api, buffers)
}

fn part(server: &mut Server, id: u32, of: u32, flags: u64) {
    let call = CreateSubBuffer {
        id: MemId(id),
        of: MemId(of),
        flags,
        origin: 0,
        size: 8,
    };
    carry_out(server, Request::CreateSubBuffer(call));
}

fn set(server: &mut Server, index: u32, mem: u32) {
    let call = SetArgument {
        kernel: KernelId(0),
        index,
        value: Value::Mem(Some(MemId(mem))),
    };
    carry_out(server, Request::SetArgument(call));
}

/// The buffers that a command may write.
fn noted(server: &mut Server, request: Request) -> Vec<u32> {
    let noted = server.note_written();
    carry_out(server, request);
    let written = noted.lock_unpoisoned();
    let mems = &server.backend.mems;
    let has = |id: &u32| mems.get(*id).is_ok_and(|mem| written.has(&mem.record));
    (0..BUFFERS).filter(has).collect()
}

fn run() -> Request {
    Request::NdRange(NdRange {
        order: order(),
        kernel: KernelId(0),
        grid: Grid::line(1),
    })
}

fn fill(mem: u32) -> Request {
    Request::FillBuffer(FillBuffer {
        order: order(),
        mem: MemId(mem),
        pattern: Blob(vec![7]),
        offset: 0,
        size: 8,
    })
}

#[test]
fn nothing_is_noted_unless_somebody_wants_to_know() {
    let mut server = server();
    drop(server.note_written());
    assert!(server.backend.written.upgrade().is_none());
    carry_out(&mut server, fill(0));
}

#[test]
fn a_command_may_write_what_it_writes_to_and_nothing_else() {
    let mut server = server();
    assert_eq!(noted(&mut server, fill(1)), [1]);
    let copy = CopyBuffer {
        order: order(),
        from: MemId(0),
        to: MemId(2),
        offsets: [0, 0],
        size: 8,
    };
    assert_eq!(noted(&mut server, Request::CopyBuffer(copy)), [2]);
    let marker = Marker { order: order() };
    assert_eq!(noted(&mut server, Request::Marker(marker)), []);
    // An application may declare that no kernel writes a buffer, and write to it by commands.
    assert_eq!(noted(&mut server, fill(READ_ONLY)), [READ_ONLY]);
    part(&mut server, 9, 1, 0);
    assert_eq!(noted(&mut server, fill(9)), [1]);
}

#[test]
fn a_kernel_may_write_its_arguments_but_those_of_which_the_application_says_that_it_does_not() {
    let mut server = server();
    assert_eq!(noted(&mut server, run()), []);
    set(&mut server, 0, 1);
    set(&mut server, 1, READ_ONLY);
    assert_eq!(noted(&mut server, run()), [1]);
    part(&mut server, 9, READ_ONLY, 0);
    part(&mut server, 10, 2, codes::MEM_READ_ONLY);
    for (index, mem) in [(0, 9), (1, 10)] {
        set(&mut server, index, mem);
    }
    assert_eq!(noted(&mut server, run()), []);
    part(&mut server, 11, 2, 0);
    set(&mut server, 0, 11);
    assert_eq!(noted(&mut server, run()), [2]);
}

#[test]
fn a_kernel_with_an_argument_that_was_released_may_write_anything() {
    let mut server = server();
    part(&mut server, 9, 2, 0);
    set(&mut server, 0, 9);
    let release = remoting_proto::apis::opencl::calls::ReleaseMem {
        id: MemId(9),
        callback: None,
    };
    carry_out(&mut server, Request::ReleaseMem(release));
    assert_eq!(noted(&mut server, run()), [0, 1, 2, 3]);
    // Another object with the same number does not count.
    part(&mut server, 9, 1, 0);
    assert_eq!(noted(&mut server, run()), [0, 1, 2, 3]);
}

/// Any access other than that of read-only images.
const NONE: u32 = 0;

struct Described;

impl Parameters for Described {
    const TABLE: &[Parameter] = &[
        (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"uint*\0", NONE),
        (codes::KERNEL_ARG_ADDRESS_CONSTANT, b"uint*\0", NONE),
        (
            codes::KERNEL_ARG_ADDRESS_GLOBAL,
            b"image2d_t\0",
            codes::KERNEL_ARG_ACCESS_READ_ONLY,
        ),
        // An image that is both read and written.
        (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"image2d_t\0", NONE),
    ];
}

/// An image with memory of its own, or one made from a buffer.
fn image(server: &mut Server, id: u32, of: Option<u32>) {
    let shape = ImageShape {
        order: codes::RGBA,
        data: codes::UNSIGNED_INT8,
        kind: match of {
            Some(_) => codes::MEM_OBJECT_IMAGE1D_BUFFER,
            None => codes::MEM_OBJECT_IMAGE2D,
        },
        extent: [4, 1, 1],
        layers: 0,
        of: of.map(MemId),
    };
    let call = CreateImage {
        id: MemId(id),
        context: ContextId(0),
        flags: 0,
        shape,
        contents: None,
    };
    carry_out(server, Request::CreateImage(call));
}

#[test]
fn a_kernel_does_not_write_what_its_parameters_only_read() {
    let mut server = server_before(with_parameters::<Described>(Api::null()));
    for (index, mem) in [(0, 0), (1, 1)] {
        set(&mut server, index, mem);
    }
    image(&mut server, 9, Some(2));
    set(&mut server, 2, 9);
    assert_eq!(noted(&mut server, run()), [0]);
    // Where the kernel may write the same image, it counts as the buffer from which it was made.
    set(&mut server, 3, 9);
    assert_eq!(noted(&mut server, run()), [0, 2]);
    // The driver describes fewer arguments than are set.
    set(&mut server, 4, 1);
    assert_eq!(noted(&mut server, run()), [0, 1, 2]);
}

#[test]
fn an_image_that_is_made_of_a_buffer_is_written_with_it() {
    let mut server = server();
    image(&mut server, 9, Some(2));
    let fill = FillImage {
        order: order(),
        mem: MemId(9),
        colour: [0; 4],
        origin: [0; 3],
        region: [1; 3],
    };
    assert_eq!(noted(&mut server, Request::FillImage(fill)), [2]);
}

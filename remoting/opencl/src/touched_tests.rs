//! Tests of what is recorded about commands, and how parts are joined.

use remoting_proto::{
    apis::opencl::{
        calls::{
            BufferRect, ContextId, CopyBuffer, CopyBufferRect, CreateImage, CreateSubBuffer,
            FillBuffer, Grid, ImageShape, KernelId, Map, Marker, NdRange, ReadBuffer, SetArgument,
            Value, WindowRange, WriteBuffer,
        },
        codes,
    },
    wire::Blob,
};

use super::*;
use crate::{
    driver::Api,
    testing::{self, carry_out, order},
};

const SIZE: u64 = 8 * BLOCK + 100;
const PLACE: WindowRange = WindowRange {
    offset: 0,
    length: 8,
    stage: None,
};

/// A server with a queue, a kernel, and two buffers that nobody has written.
fn server() -> Server {
    testing::server_with_kernel(Api::null(), [buffer(0), buffer(1)])
}

fn buffer(id: u32) -> CreateBuffer {
    testing::buffer(id, 0, SIZE)
}

fn parts(server: &Server, id: u32) -> Vec<Range<u64>> {
    let mem = server.backend.mems.get(id).unwrap();
    root(&mem.record).touched.parts(SIZE)
}

fn whole(server: &Server, id: u32) -> bool {
    parts(server, id) == all()
}

fn all() -> Vec<Range<u64>> {
    Some(0..SIZE).into_iter().collect()
}

fn part_of(of: u32, id: u32) -> Request {
    Request::CreateSubBuffer(CreateSubBuffer {
        id: MemId(id),
        of: MemId(of),
        flags: 0,
        origin: BLOCK,
        size: 8,
    })
}

fn fill(mem: u32, offset: u64, size: u64) -> Request {
    Request::FillBuffer(FillBuffer {
        order: order(),
        mem: MemId(mem),
        pattern: Blob(vec![7]),
        offset,
        size,
    })
}

fn copy(offsets: [u64; 2], size: u64) -> Request {
    Request::CopyBuffer(CopyBuffer {
        order: order(),
        from: MemId(0),
        to: MemId(1),
        offsets,
        size,
    })
}

#[test]
fn a_buffer_has_the_blocks_that_commands_say_that_they_write_and_no_more() {
    let mut server = server();
    let write = Request::WriteBuffer(WriteBuffer {
        order: order(),
        mem: MemId(0),
        offset: 2 * BLOCK - 1,
        from: PLACE,
    });
    for request in [write, fill(0, SIZE - 1, 1), copy([0, 4 * BLOCK], 8)] {
        carry_out(&mut server, request);
    }
    assert_eq!(parts(&server, 0), [BLOCK..3 * BLOCK, 8 * BLOCK..SIZE]);
    assert_eq!(parts(&server, 1), [4 * BLOCK..5 * BLOCK; 1]);
}

#[test]
fn what_is_read_run_or_marked_writes_to_no_buffer() {
    let mut server = server();
    let read = Request::ReadBuffer(ReadBuffer {
        order: order(),
        mem: MemId(0),
        offset: 0,
        to: PLACE,
    });
    let run = Request::NdRange(NdRange {
        order: order(),
        kernel: KernelId(0),
        grid: Grid::line(1),
    });
    let marker = Request::Marker(Marker { order: order() });
    for request in [read, run, marker, rect(false)] {
        carry_out(&mut server, request);
    }
    assert_eq!([parts(&server, 0), parts(&server, 1)], [[], []]);
}

fn rect(write: bool) -> Request {
    Request::BufferRect(BufferRect {
        order: order(),
        write,
        mem: MemId(1),
        origin: [0; 3],
        region: [1; 3],
        pitches: [0; 2],
        place: PLACE,
    })
}

#[test]
fn what_may_write_anywhere_counts_as_having_written_all() {
    let argument = Request::SetArgument(SetArgument {
        kernel: KernelId(0),
        index: 0,
        value: Value::Mem(Some(MemId(1))),
    });
    let image = Request::CreateImage(CreateImage {
        id: MemId(9),
        context: ContextId(0),
        flags: 0,
        shape: ImageShape {
            order: codes::RGBA,
            data: codes::UNSIGNED_INT8,
            kind: codes::MEM_OBJECT_IMAGE1D_BUFFER,
            extent: [4, 1, 1],
            layers: 0,
            of: Some(MemId(1)),
        },
        contents: None,
    });
    let copied = Request::CopyBufferRect(CopyBufferRect {
        order: order(),
        from: MemId(0),
        to: MemId(1),
        origins: [[0; 3]; 2],
        region: [1; 3],
        pitches: [[0; 2]; 2],
    });
    let map = Request::Map(Map {
        order: order(),
        mem: MemId(1),
        flags: codes::MAP_READ,
        offset: 0,
        size: 8,
    });
    for request in [argument, image, copied, map, rect(true), part_of(1, 9)] {
        let mut server = server();
        // Whatever was written before.
        carry_out(&mut server, fill(1, 0, 8));
        carry_out(&mut server, request.clone());
        assert!(whole(&server, 1), "{request:?}");
        assert_eq!(parts(&server, 0), []);
    }
}

#[test]
fn what_is_made_with_contents_or_where_others_write_counts_as_a_whole() {
    let mut server = server();
    let offset = server.window.data();
    let made = [
        CreateBuffer {
            contents: Some(WindowRange {
                offset,
                length: SIZE,
                stage: None,
            }),
            ..buffer(2)
        },
        CreateBuffer {
            lives: Some(offset),
            ..buffer(3)
        },
    ];
    for call in made {
        let id = call.id.0;
        carry_out(&mut server, Request::CreateBuffer(call));
        assert!(whole(&server, id));
    }
}

#[test]
fn a_command_through_a_part_writes_to_what_it_is_a_part_of() {
    let mut server = server();
    carry_out(&mut server, part_of(0, 9));
    carry_out(&mut server, fill(9, 0, 8));
    assert!(whole(&server, 0) && whole(&server, 9));
}

#[test]
fn a_buffer_with_a_part_that_is_too_deep_to_be_recorded_counts_as_a_whole() {
    use crate::provenance::{DEEPEST, MemRecord};

    let server = server();
    let first = std::sync::Arc::clone(&server.backend.mems.get(0).unwrap().record);
    let mut last = std::sync::Arc::clone(&first);
    for _ in 0..=DEEPEST {
        let Request::CreateSubBuffer(call) = part_of(0, 9) else {
            panic!("no part");
        };
        let context = std::sync::Arc::clone(&first.context);
        last = MemRecord::new(MadeMem::Sub(call), context, Some(last));
        assert_eq!(root(&last).touched.parts(SIZE), all());
    }
    assert!(last.of.is_none());
    assert_eq!(first.touched.parts(SIZE), all());
}

#[test]
fn many_parts_are_a_whole_and_those_that_touch_are_one() {
    let touched = || Touched::of(&MadeMem::Buffer(buffer(0)));
    let length = 1 << 40;
    let apart = touched();
    for at in 0..MOST as u64 {
        apart.part(at * 2 * BLOCK, 1);
        apart.part(at * 2 * BLOCK, 1);
    }
    assert_eq!(apart.parts(length).len(), MOST);
    // This part fills the gap between two of them.
    apart.part(BLOCK, 1);
    assert_eq!(apart.parts(length)[0], 0..3 * BLOCK);
    apart.part(MOST as u64 * 4 * BLOCK, 1);
    assert_eq!(apart.parts(length).len(), MOST);
    apart.part(MOST as u64 * 6 * BLOCK, 1);
    assert_eq!(apart.parts(length), [0..length; 1]);
    let backwards = touched();
    for at in (0..100).rev() {
        backwards.part(at * BLOCK, BLOCK);
    }
    assert_eq!(backwards.parts(length), [0..100 * BLOCK; 1]);
}

#[test]
fn a_command_that_goes_beyond_a_buffer_costs_nothing_but_its_blocks() {
    let touched = Touched::of(&MadeMem::Buffer(buffer(0)));
    touched.part(5, 0);
    touched.part(SIZE * 2, 8);
    assert_eq!(touched.parts(SIZE), []);
    touched.part(u64::MAX, u64::MAX);
    assert_eq!(touched.parts(SIZE), []);
    touched.part(SIZE - 1, u64::MAX);
    assert_eq!(touched.parts(SIZE), [8 * BLOCK..SIZE; 1]);
}

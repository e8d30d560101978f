//! Arrays, textures and surfaces, and copies as graph nodes.

use std::ptr::{null, null_mut};

use cuda_definition::driver::types::*;

use crate::{
    driver::{context, cuda, current, device, ok, values},
    registered::{Gated, returns},
};

fn array(width: usize, height: usize, depth: usize) -> CUarray {
    let wanted = CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: CUarray_format::CU_AD_FORMAT_UNSIGNED_INT32,
        NumChannels: 1,
        Flags: 0,
    };
    let mut array = null_mut();
    ok!(cuArray3DCreate_v2(&mut array, &wanted));
    array
}

/// A copy of this many bytes, rows and planes, whose sides are still to be set.
fn copy(size: (usize, usize, usize)) -> CUDA_MEMCPY3D {
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (copy.WidthInBytes, copy.Height, copy.Depth) = size;
    copy
}

fn from_host(copy: &mut CUDA_MEMCPY3D, from: &[u32], pitch: usize, rows: usize) {
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.srcHost = from.as_ptr().cast();
    (copy.srcPitch, copy.srcHeight) = (pitch, rows);
}

fn to_host(copy: &mut CUDA_MEMCPY3D, to: &mut [u32], pitch: usize, rows: usize) {
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.dstHost = to.as_mut_ptr().cast();
    (copy.dstPitch, copy.dstHeight) = (pitch, rows);
}

#[test]
fn what_is_copied_to_an_array_comes_back_and_goes_to_memory() {
    let _context = context();
    // Copies five of seven words per row and three of four rows, in two planes.
    let numbers: Vec<u32> = (0..7 * 4 * 2).collect();
    let array = array(6, 4, 3);
    let mut there = copy((20, 3, 2));
    from_host(&mut there, &numbers, 28, 4);
    there.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
    there.dstArray = array;
    (there.dstXInBytes, there.dstY, there.dstZ) = (4, 1, 1);
    ok!(cuMemcpy3D_v2(&there));
    let wanted: Vec<u32> = (0..2 * 3)
        .flat_map(|row| (0..5).map(move |x| (row / 3 * 28 + row % 3 * 7 + x) as u32))
        .collect();
    let mut back = vec![0u32; 30];
    let mut here = copy((20, 3, 2));
    here.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
    here.srcArray = array;
    (here.srcXInBytes, here.srcY, here.srcZ) = (4, 1, 1);
    to_host(&mut here, &mut back, 20, 3);
    ok!(cuMemcpy3D_v2(&here));
    assert_eq!(back, wanted);
    let memory = device(&[9u32; 30]);
    here.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    here.dstDevice = memory;
    ok!(cuMemcpy3DAsync_v2(&here, null_mut()));
    assert_eq!(values::<u32>(memory, 30), wanted);
    // One plane, by the two-dimensional call.
    let mut plane = vec![0u32; 10];
    let rectangle = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: null(),
        srcDevice: memory,
        srcArray: null_mut(),
        srcPitch: 20,
        dstXInBytes: 4,
        dstY: 1,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_ARRAY,
        dstHost: null_mut(),
        dstDevice: 0,
        dstArray: array,
        dstPitch: 0,
        WidthInBytes: 20,
        Height: 2,
    };
    ok!(cuMemcpy2D_v2(&rectangle));
    let mut here = copy((20, 2, 1));
    here.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
    here.srcArray = array;
    (here.srcXInBytes, here.srcY) = (4, 1);
    to_host(&mut here, &mut plane, 20, 2);
    ok!(cuMemcpy3D_v2(&here));
    assert_eq!(plane, wanted[..10]);
    ok!(cuArrayDestroy(array));
    let again = cuda!(cuMemcpy3D_v2(&here));
    assert_ne!(again, CUresult::CUDA_SUCCESS);
}

#[test]
fn textures_and_surfaces_end_once() {
    let _context = context();
    let array = array(16, 16, 0);
    let mut told = CUDA_ARRAY3D_DESCRIPTOR {
        Width: 0,
        Height: 0,
        Depth: 9,
        Format: CUarray_format::CU_AD_FORMAT_HALF,
        NumChannels: 0,
        Flags: 9,
    };
    ok!(cuArray3DGetDescriptor_v2(&mut told, array));
    assert_eq!((told.Width, told.Height, told.Depth), (16, 16, 0));
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let (mut of, how): (CUDA_RESOURCE_DESC, CUDA_TEXTURE_DESC) = unsafe { std::mem::zeroed() };
    of.resType = CUresourcetype::CU_RESOURCE_TYPE_ARRAY;
    of.res.array.hArray = array;
    let (mut texture, mut surface) = (0, 0);
    ok!(cuTexObjectCreate(&mut texture, &of, &how, null()));
    ok!(cuSurfObjectCreate(&mut surface, &of));
    assert_ne!(texture, surface);
    ok!(cuTexObjectDestroy(texture));
    let again = cuda!(cuTexObjectDestroy(texture));
    assert_eq!(again, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(cuSurfObjectDestroy(surface));
    // Of unallocated memory, and of an invalid array.
    of.resType = CUresourcetype::CU_RESOURCE_TYPE_LINEAR;
    let word = [7u32; 4];
    of.res.linear.devPtr = word.as_ptr() as CUdeviceptr;
    of.res.linear.sizeInBytes = 16;
    let wild = cuda!(cuTexObjectCreate(&mut texture, &of, &how, null()));
    assert_eq!(wild, CUresult::CUDA_ERROR_INVALID_VALUE);
    of.resType = CUresourcetype::CU_RESOURCE_TYPE_ARRAY;
    of.res.array.hArray = 0x1234_5678 as CUarray;
    let forged = cuda!(cuTexObjectCreate(&mut texture, &of, &how, null()));
    assert_eq!(forged, CUresult::CUDA_ERROR_INVALID_HANDLE);
    ok!(cuArrayDestroy(array));
}

#[test]
fn copies_are_nodes_of_graphs_and_can_be_changed() {
    let _context = context();
    let (a, b, c) = (
        device(&[1u32, 2, 3, 4]),
        device(&[7u32; 4]),
        device(&[0u32; 4]),
    );
    let mut one = copy((16, 1, 1));
    (one.srcMemoryType, one.dstMemoryType) = (
        CUmemorytype::CU_MEMORYTYPE_DEVICE,
        CUmemorytype::CU_MEMORYTYPE_DEVICE,
    );
    (one.srcDevice, one.dstDevice) = (a, c);
    let (mut graph, mut node, mut next, mut executable) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let own = current();
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuGraphAddMemcpyNode(&mut node, graph, null(), 0, &one, own));
    // A dependent node that copies on to the second array.
    let mut two = one;
    (two.srcDevice, two.dstDevice) = (c, b);
    ok!(cuGraphAddMemcpyNode(&mut next, graph, &node, 1, &two, own));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(values::<u32>(b, 4), [1, 2, 3, 4]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    // Unallocated memory is refused before the driver gets the call.
    ok!(cuGraphCreate(&mut graph, 0));
    let word = [7u32; 4];
    one.srcDevice = word.as_ptr() as CUdeviceptr;
    let wild = cuda!(cuGraphAddMemcpyNode(&mut node, graph, null(), 0, &one, own));
    assert_eq!(wild, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(cuGraphDestroy(graph));
}

#[test]
fn a_graph_copies_from_and_to_memory_of_the_program_at_each_launch() {
    let _context = context();
    let (mut numbers, mut back) = (vec![1u32, 2, 3, 4, 5, 6, 7, 8], vec![0u32; 4]);
    let memory = device(&[0u32; 4]);
    // Two of four rows, with two words each.
    let mut there = copy((8, 2, 1));
    from_host(&mut there, &numbers, 16, 2);
    there.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (there.dstDevice, there.dstPitch, there.dstHeight) = (memory, 8, 2);
    let mut here = copy((16, 1, 1));
    here.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (here.srcDevice, here.srcPitch) = (memory, 16);
    to_host(&mut here, &mut back, 16, 1);
    let (mut graph, mut node, mut next, mut executable) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let own = current();
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuGraphAddMemcpyNode(
        &mut node,
        graph,
        null(),
        0,
        &there,
        own
    ));
    ok!(cuGraphAddMemcpyNode(&mut next, graph, &node, 1, &here, own));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    ok!(cuGraphDestroy(graph));
    for wanted in [[1u32, 2, 5, 6], [9, 2, 5, 10]] {
        ok!(cuGraphLaunch(executable, null_mut()));
        ok!(cuCtxSynchronize());
        // SAFETY: the driver writes to it without the compiler's knowledge.
        let told: Vec<u32> = back
            .iter()
            .map(|one| unsafe { std::ptr::read_volatile(one) })
            .collect();
        assert_eq!(told, wanted);
        // SAFETY: as above; the driver reads it at the next launch.
        unsafe {
            std::ptr::write_volatile(&mut numbers[0], 9);
            std::ptr::write_volatile(&mut numbers[5], 10);
        }
    }
    ok!(cuGraphExecDestroy(executable));
}

/// A graph with one copy between device memory and the program's memory, ready to launch.
fn instance(copy: &CUDA_MEMCPY3D) -> (CUgraph, CUgraphNode, CUgraphExec) {
    let (mut graph, mut node, mut executable) = (null_mut(), null_mut(), null_mut());
    let own = current();
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuGraphAddMemcpyNode(&mut node, graph, null(), 0, copy, own));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    (graph, node, executable)
}

fn to_device(from: &[u32], to: CUdeviceptr) -> CUDA_MEMCPY3D {
    let bytes = size_of_val(from);
    let mut copy = copy((bytes, 1, 1));
    from_host(&mut copy, from, bytes, 1);
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (copy.dstDevice, copy.dstPitch) = (to, bytes);
    copy
}

#[test]
fn a_graph_reads_what_the_one_before_it_in_the_stream_has_written() {
    let _context = context();
    let (from, to) = (device(&[7u32, 8, 9, 10]), device(&[0u32; 4]));
    let mut between = vec![0u32; 4];
    let mut here = copy((16, 1, 1));
    here.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (here.srcDevice, here.srcPitch) = (from, 16);
    to_host(&mut here, &mut between, 16, 1);
    let (first, _, one) = instance(&here);
    let (second, _, two) = instance(&to_device(&between, to));
    ok!(cuGraphLaunch(one, null_mut()));
    ok!(cuGraphLaunch(two, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(values::<u32>(to, 4), [7, 8, 9, 10]);
    for (graph, executable) in [(first, one), (second, two)] {
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphDestroy(graph));
    }
}

#[test]
fn graphs_that_are_made_again_and_again_keep_no_space() {
    const WORDS: usize = 64 << 10;
    let _context = context();
    let to = device(&vec![0u32; WORDS]);
    for round in 1..400u32 {
        let numbers = vec![round; WORDS];
        let (graph, _, executable) = instance(&to_device(&numbers, to));
        ok!(cuGraphLaunch(executable, null_mut()));
        // A running graph keeps its memory until it has ended.
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphDestroy(graph));
        ok!(cuCtxSynchronize());
        assert_eq!(values::<u32>(to + (WORDS as u64 - 1) * 4, 1), [round]);
    }
}

/// Zeroes in pinned or in managed memory.
fn zeroes(words: usize, is_managed: bool) -> &'static mut [u32] {
    let (mut pinned, mut managed) = (null_mut(), 0);
    match is_managed {
        true => ok!(cuMemAllocManaged(&mut managed, 4 * words, 1)),
        false => ok!(cuMemHostAlloc(&mut pinned, 4 * words, 0)),
    }
    let at = if is_managed {
        managed as *mut u32
    } else {
        pinned.cast()
    };
    // SAFETY: of that size, and freed with the context.
    unsafe {
        at.write_bytes(0, words);
        std::slice::from_raw_parts_mut(at, words)
    }
}

#[test]
fn arrays_and_pinned_memory_are_copied_in_the_order_of_the_stream() {
    let own = context();
    const WORDS: usize = 64;
    let numbers: Vec<u32> = (1..=WORDS as u32).collect();
    let (memory, array) = (device(&numbers), array(4, 3, 2));
    // Rows of four words: without gaps, with gaps between rows, and with gaps between planes.
    let shapes = [(3, 16, 3), (3, 32, 3), (3, 16, 4), (1, 16, 1), (1, 32, 1)];
    for ((rows, pitch, height), is_managed) in shapes
        .into_iter()
        .flat_map(|shape| [(shape, false), (shape, true)])
    {
        let (from, to) = (zeroes(WORDS, is_managed), zeroes(WORDS, is_managed));
        let (mut there, mut here) = (copy((16, rows, 2)), copy((16, rows, 2)));
        from_host(&mut there, from, pitch, height);
        there.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
        there.dstArray = array;
        here.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
        here.srcArray = array;
        to_host(&mut here, to, pitch, height);
        let gated = Gated::new();
        let stream = gated.stream as u64;
        let (first, there, here) = (
            from.as_mut_ptr() as u64,
            &raw const there as u64,
            &raw const here as u64,
        );
        returns(
            &own,
            || gated.open(),
            move || {
                let stream = stream as CUstream;
                ok!(cuMemcpyDtoHAsync_v2(
                    first as *mut _,
                    memory,
                    4 * WORDS,
                    stream
                ));
                ok!(cuMemcpy3DAsync_v2(there as *const _, stream));
                ok!(cuMemcpy3DAsync_v2(here as *const _, stream));
            },
        );
        ok!(cuStreamSynchronize(gated.stream));
        let mut wanted = [0u32; WORDS];
        for row in 0..2 * rows {
            let start = (row / rows * height + row % rows) * pitch / 4;
            wanted[start..start + 4].copy_from_slice(&numbers[start..start + 4]);
        }
        assert_eq!(to, wanted, "{rows} {pitch} {height} {is_managed}");
    }
    ok!(cuArrayDestroy(array));
}

#[test]
fn a_graph_copies_planes_of_one_row_of_pinned_memory_that_lie_apart() {
    let _context = context();
    let (from, to) = (zeroes(16, false), device(&[0u32; 8]));
    from.copy_from_slice(&std::array::from_fn::<u32, 16, _>(|index| index as u32));
    let mut there = copy((16, 1, 2));
    from_host(&mut there, from, 32, 1);
    there.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (there.dstDevice, there.dstPitch, there.dstHeight) = (to, 16, 1);
    let (graph, _, executable) = instance(&there);
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(values::<u32>(to, 8), [0, 1, 2, 3, 8, 9, 10, 11]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

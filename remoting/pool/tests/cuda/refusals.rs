//! What is refused as natively, although it would have no effect here.

use std::{ffi::c_void, ptr::null_mut};

use cuda_definition::driver::types::*;

use crate::driver::{begin_capture, context, cuda, device, ok};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn location(kind: CUmemLocationType, id: i32) -> CUmemLocation {
    CUmemLocation { r#type: kind, id }
}

#[test]
fn only_managed_memory_is_prefetched_advised_on_and_attached() {
    let _context = context();
    let (mut managed, plain, own) = (0, device(&[0u32; 16]), [0u32; 16]);
    ok!(cuMemAllocManaged(&mut managed, 64, 1));
    let here = location(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, 0);
    let host = location(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 0);
    let read_mostly = CUmem_advise::CU_MEM_ADVISE_SET_READ_MOSTLY;
    let prefetch = |at, count, place| cuda!(cuMemPrefetchAsync_v2(at, count, place, 0, null_mut()));
    let advise = |at, count| cuda!(cuMemAdvise_v2(at, count, read_mostly, here));
    let attach = |at, length, flags| cuda!(cuStreamAttachMemAsync(null_mut(), at, length, flags));
    for place in [here, host] {
        assert_eq!(prefetch(managed + 4, 60, place), CUresult::CUDA_SUCCESS);
    }
    ok!(cuMemPrefetchAsync(managed, 64, -1, null_mut()));
    assert_eq!(advise(managed, 64), CUresult::CUDA_SUCCESS);
    assert_eq!(attach(managed, 0, 4), CUresult::CUDA_SUCCESS);
    for at in [plain, own.as_ptr() as u64, 0x1234_5678, 0] {
        assert_eq!(prefetch(at, 4, here), INVALID, "{at:x}");
        assert_eq!(advise(at, 4), INVALID, "{at:x}");
        assert_eq!(attach(at, 0, 4), INVALID, "{at:x}");
    }
    for count in [0, 65, usize::MAX] {
        assert_eq!(prefetch(managed, count, here), INVALID, "{count}");
        assert_eq!(advise(managed, count), INVALID, "{count}");
    }
    assert_eq!(attach(managed, 4, 4), INVALID);
    assert_eq!(attach(managed, 0, 3), INVALID);
    let nowhere = location(CUmemLocationType_enum(77), 0);
    assert_eq!(prefetch(managed, 4, nowhere), INVALID);
    let no_device = location(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, 9);
    let no_device = prefetch(managed, 4, no_device);
    assert_eq!(no_device, CUresult::CUDA_ERROR_INVALID_DEVICE);
    let forged = 0x4242 as CUstream;
    let forged = cuda!(cuMemPrefetchAsync_v2(managed, 4, here, 0, forged));
    assert_eq!(forged, CUresult::CUDA_ERROR_INVALID_HANDLE);
    ok!(cuMemFree_v2(managed));
    ok!(cuMemFree_v2(plain));
}

#[test]
fn registered_memory_overlaps_no_other() {
    let _context = context();
    let pages = vec![0u8; 8 * 4096];
    let at = |page: usize| {
        pages
            .as_ptr()
            .wrapping_add(page * 4096)
            .cast_mut()
            .cast::<c_void>()
    };
    let register = |from, count: usize| cuda!(cuMemHostRegister_v2(at(from), count * 4096, 0));
    let twice = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    assert_eq!(register(2, 2), CUresult::CUDA_SUCCESS);
    for (from, count) in [(2, 2), (1, 2), (3, 2), (1, 5), (2, 1)] {
        assert_eq!(register(from, count), twice, "{from} {count}");
    }
    assert_eq!(register(4, 1), CUresult::CUDA_SUCCESS);
    assert_eq!(register(1, 1), CUresult::CUDA_SUCCESS);
    let mut flags = 0;
    ok!(cuMemHostGetFlags(&mut flags, at(2)));
    assert_eq!(flags, 2);
    let beyond = cuda!(cuMemHostRegister_v2(at(6), usize::MAX, 0));
    assert_eq!(beyond, INVALID);
    for page in [1, 2, 4] {
        ok!(cuMemHostUnregister(at(page)));
    }
    let gone = cuda!(cuMemHostUnregister(at(2)));
    assert_eq!(gone, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

#[test]
fn pinned_memory_of_no_bytes_is_null_and_pinned_memory_is_not_unregistered() {
    let _context = context();
    let mut none = 8 as *mut c_void;
    ok!(cuMemHostAlloc(&mut none, 0, 0));
    assert!(none.is_null());
    let (mut pinned, mut flags) = (null_mut(), 0);
    ok!(cuMemHostAlloc(&mut pinned, 64, 1));
    ok!(cuMemHostGetFlags(&mut flags, pinned));
    assert_eq!(flags, 3);
    assert_eq!(cuda!(cuMemHostUnregister(pinned)), INVALID);
    ok!(cuMemFreeHost(pinned));
}

/// The codes are those of measurements/cuda-refusals.md.
#[test]
fn what_is_no_memory_is_freed_and_refused_as_natively() {
    const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
    let _context = context();
    ok!(cuMemFreeHost(null_mut()));
    ok!(cuMemFree_v2(0));
    ok!(cuMemFreeAsync(0, null_mut()));
    ok!(cuMemGetAddressRange_v2(null_mut(), null_mut(), 0x1234_5678));
    let mut none = 8 as *mut c_void;
    ok!(cuMemAllocHost_v2(&mut none, 0));
    assert!(none.is_null());
    let (mut managed, mut flags, plain) = (0, 0, device(&[0u32; 16]));
    for bad in [0, 3, 4] {
        let refused = cuda!(cuMemAllocManaged(&mut managed, 64, bad));
        assert_eq!(refused, INVALID, "{bad}");
    }
    ok!(cuMemAllocManaged(&mut managed, 64, 1));
    ok!(cuMemHostGetFlags(&mut flags, managed as *mut c_void));
    assert_eq!(flags, 2);
    let no_device = location(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, 99);
    let accessed_by = CUmem_advise::CU_MEM_ADVISE_SET_ACCESSED_BY;
    let advised = cuda!(cuMemAdvise_v2(managed, 64, accessed_by, no_device));
    assert_eq!(advised, INVALID);
    let pages = vec![0u8; 4 * 4096];
    let at = |page: usize| pages.as_ptr().wrapping_add(page * 4096) as *mut c_void;
    let register = |flags| cuda!(cuMemHostRegister_v2(at(0), 2 * 4096, flags));
    assert_eq!(register(0x100), INVALID);
    assert_eq!(register(0), CUresult::CUDA_SUCCESS);
    for registered in [at(1), null_mut(), plain as *mut c_void] {
        assert_eq!(cuda!(cuMemHostUnregister(registered)), INVALID);
    }
    ok!(cuMemHostUnregister(at(0)));
    assert_eq!(cuda!(cuCtxPushCurrent_v2(null_mut())), INVALID);
    assert_eq!(cuda!(cuEventRecord(null_mut(), null_mut())), INVALID_HANDLE);
    let waited = cuda!(cuStreamWaitEvent(null_mut(), null_mut(), 0));
    assert_eq!(waited, INVALID_HANDLE);
    assert_eq!(cuda!(cuStreamWriteValue32_v2(null_mut(), 0, 1, 0)), INVALID);
    assert_eq!(cuda!(cuStreamWaitValue64_v2(null_mut(), 0, 1, 0)), INVALID);
    // None of them is reported later.
    ok!(cuStreamSynchronize(null_mut()));
    ok!(cuMemFree_v2(managed));
    ok!(cuMemFree_v2(plain));
    ok!(cuCtxSetCurrent(null_mut()));
    ok!(cuMemFreeHost(null_mut()));
    ok!(cuMemFree_v2(0));
    let no_context = CUresult::CUDA_ERROR_INVALID_CONTEXT;
    assert_eq!(cuda!(cuProfilerStart()), no_context);
    assert_eq!(cuda!(cuProfilerStop()), no_context);
}

#[test]
fn what_is_refused_in_a_capture_is_an_error_of_its_call() {
    let _context = context();
    let (from, mut stream) = (device(&[0u32]), null_mut());
    // Memory that was there, and that the library takes for the device's: a graph's.
    let (mut graph, mut node) = (null_mut(), null_mut());
    ok!(cuGraphCreate(&mut graph, 0));
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut of_graph: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    of_graph.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    of_graph.poolProps.location = location(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, 0);
    of_graph.bytesize = 64;
    ok!(cuGraphAddMemAllocNode(
        &mut node,
        graph,
        std::ptr::null(),
        0,
        &mut of_graph
    ));
    ok!(cuGraphDestroy(graph));
    let gone = of_graph.dptr;
    ok!(cuStreamCreate(&mut stream, 1));
    begin_capture(stream);
    for refused in [
        cuda!(cuMemcpyDtoDAsync_v2(gone, from, 4, stream)),
        cuda!(cuMemcpyDtoDAsync_v2(from, gone, 4, stream)),
        cuda!(cuMemsetD32Async(gone, 1, 1, stream)),
    ] {
        assert_eq!(refused, INVALID);
    }
    ok!(cuMemsetD32Async(from, 1, 1, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    let mut count = 0;
    ok!(cuGraphGetNodes(graph, null_mut(), &mut count));
    assert_eq!(count, 1);
    // Nobody is told of them later.
    ok!(cuCtxSynchronize());
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn rows_beyond_all_memory_are_refused() {
    let _context = context();
    let (memory, own) = (device(&[0u32; 16]), [0u32; 16]);
    // SAFETY: numbers and pointers: zero is a value of each.
    let (mut rows, mut planes): (CUDA_MEMCPY2D, CUDA_MEMCPY3D) = unsafe { std::mem::zeroed() };
    (rows.WidthInBytes, rows.Height) = (4, 3);
    rows.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    rows.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (rows.srcHost, rows.srcPitch) = (own.as_ptr().cast(), 1 << 63);
    rows.dstDevice = memory;
    assert_eq!(cuda!(cuMemcpy2D_v2(&rows)), INVALID);
    (planes.WidthInBytes, planes.Height, planes.Depth) = (4, 1, 3);
    planes.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    planes.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (planes.srcHost, planes.srcPitch) = (own.as_ptr().cast(), 4);
    (planes.srcHeight, planes.dstDevice) = (1 << 63, memory);
    assert_eq!(cuda!(cuMemcpy3D_v2(&planes)), INVALID);
    ok!(cuMemFree_v2(memory));
}

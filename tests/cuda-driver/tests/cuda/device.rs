//! Memory, attributes and parameters.

use std::ptr::null_mut;

use cuda_definition::driver::types::*;

use crate::driver::{alone, context, cuda, device, function, module, ok, values};

const MIXED: &str = include_str!("../kernels/mixed.compute_75.ptx");
const HISTOGRAM: &str = include_str!("../kernels/histogram.compute_75.ptx");

#[test]
fn device_memory_is_where_guests_keep_room_for_it() {
    let _context = context();
    let at = device(&[0u8; 100]);
    assert!(
        (0x2000_0000_0000..0x3000_0000_0000).contains(&at),
        "{at:#x}"
    );
    let (mut base, mut size) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&mut base, &mut size, at + 99));
    assert_eq!((base, size), (at, 100));
    let behind = cuda!(cuMemGetAddressRange_v2(&mut base, &mut size, at + 100));
    assert_eq!(behind, CUresult::CUDA_ERROR_NOT_FOUND);
}

#[test]
fn memory_is_counted_and_refused_where_it_ends() {
    let _alone = alone();
    let _context = context();
    let (mut free, mut total, mut at) = (0, 0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    assert!(free <= total);
    assert_eq!(
        cuda!(cuMemAlloc_v2(&mut at, total + 1)),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY
    );
    assert_eq!(
        cuda!(cuMemAlloc_v2(&mut at, 0)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    // More than any other test allocates.
    let most = total / 8 * 7;
    ok!(cuMemAlloc_v2(&mut at, most));
    let mut after = 0;
    ok!(cuMemGetInfo_v2(&mut after, &mut total));
    assert!(after <= total - most);
    ok!(cuMemFree_v2(at));
    assert_eq!(cuda!(cuMemFree_v2(at)), CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn memory_that_is_freed_in_a_stream_is_there_until_then() {
    /// A size that no other test uses: other tests may get this address as soon as it is free.
    const SIZE: usize = 12_345;
    let _context = context();
    let mut at = 0;
    ok!(cuMemAllocAsync(&mut at, SIZE, null_mut()));
    ok!(cuMemsetD8Async(at, 9, SIZE, null_mut()));
    assert_eq!(values::<u8>(at, SIZE), vec![9; SIZE]);
    ok!(cuMemFreeAsync(at, null_mut()));
    ok!(cuCtxSynchronize());
    let (mut base, mut size) = (0, 0);
    let found = cuda!(cuMemGetAddressRange_v2(&mut base, &mut size, at));
    assert!(found == CUresult::CUDA_ERROR_NOT_FOUND || size != SIZE);
}

#[test]
fn kernels_tell_their_parameters_and_attributes() {
    let _context = context();
    let mixed = function(module(MIXED), "mixed");
    let info = |index| {
        let (mut offset, mut size) = (0, 0);
        let result = cuda!(cuFuncGetParamInfo(mixed, index, &mut offset, &mut size));
        (result == CUresult::CUDA_SUCCESS).then_some((offset, size))
    };
    assert_eq!(
        [info(0), info(1), info(2), info(3)],
        [Some((0, 16)), Some((16, 8)), Some((24, 8)), None]
    );
    let mut shared = 0;
    let histogram = function(module(HISTOGRAM), "histogram");
    ok!(cuFuncGetAttribute(
        &mut shared,
        CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        histogram
    ));
    assert_eq!(shared, 0);
    let mut blocks = 0;
    ok!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &mut blocks,
        histogram,
        256,
        0
    ));
    assert_eq!(blocks, 8);
}

#[test]
fn what_has_been_told_is_told_anew_when_it_has_changed() {
    // In the order of all tests: who has the context's turn waits for nobody who is alone.
    let _alone = alone();
    let _context = context();
    let histogram = function(module(HISTOGRAM), "histogram");
    let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    for wanted in [1024, 2048, 1024] {
        ok!(cuFuncSetAttribute(histogram, most, wanted));
        for _ in 0..2 {
            let mut told = 0;
            ok!(cuFuncGetAttribute(&mut told, most, histogram));
            assert_eq!(told, wanted);
        }
    }
    let state = || {
        let (mut flags, mut active) = (0, -1);
        ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
        active
    };
    let before = state();
    let mut primary = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&mut primary, 0));
    assert_eq!((state(), state()), (1, 1));
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!((state(), state()), (before, before));
}

#[test]
fn libraries_are_modules_by_another_name() {
    let _context = context();
    let ptx = std::ffi::CString::new(MIXED).expect("PTX has no zero byte");
    let (mut library, mut kernel, mut function) = (null_mut(), null_mut(), null_mut());
    let none = null_mut();
    ok!(cuLibraryLoadData(
        &mut library,
        ptx.as_ptr().cast(),
        none,
        null_mut(),
        0,
        null_mut(),
        null_mut(),
        0
    ));
    ok!(cuLibraryGetKernel(&mut kernel, library, c"mixed".as_ptr()));
    ok!(cuKernelGetFunction(&mut function, kernel));
    let mut name = std::ptr::null();
    ok!(cuFuncGetName(&mut name, function));
    // SAFETY: the driver's own text.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(name) }, c"mixed");
    ok!(cuLibraryUnload(library));
    let gone = cuda!(cuKernelGetFunction(&mut function, kernel));
    assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn primary_contexts_live_as_long_as_they_are_retained() {
    let (_alone, _turn) = (alone(), crate::library::turn());
    ok!(cuInit(0));
    let (mut first, mut second, mut flags, mut active) = (null_mut(), null_mut(), 0, 0);
    ok!(cuDevicePrimaryCtxRetain(&mut first, 0));
    ok!(cuDevicePrimaryCtxRetain(&mut second, 0));
    assert_eq!(first, second);
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 1);
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 0);
    assert_eq!(
        cuda!(cuCtxSetCurrent(first)),
        CUresult::CUDA_ERROR_INVALID_CONTEXT
    );
}

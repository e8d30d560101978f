//! Batches of copies.

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::atomic::{AtomicU32, Ordering},
};

use cuda_definition::driver::types::*;

use crate::driver::{context, cuda, device, ok, values};

#[test]
fn a_source_is_read_when_its_attributes_say() {
    let _context = context();
    let (mut stream, mut pinned) = (null_mut(), null_mut::<c_void>());
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuMemHostAlloc(&mut pinned, 12, 2));
    // SAFETY: of that size; the device and this thread access single words.
    let word = |index| unsafe { AtomicU32::from_ptr(pinned.cast::<u32>().add(index)) };
    let set = |values: [u32; 3]| {
        // The gate last.
        for (index, value) in values.into_iter().enumerate().rev() {
            word(index).store(value, Ordering::SeqCst);
        }
    };
    let at = pinned as CUdeviceptr;
    let to = device(&[0u32; 2]);
    let mut attributes =
        [CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM; 2].map(|order| {
            // SAFETY: numbers, for which zero is a valid value.
            let mut attributes: CUmemcpyAttributes = unsafe { std::mem::zeroed() };
            attributes.srcAccessOrder = order;
            attributes
        });
    attributes[1].srcAccessOrder =
        CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    let (mut indices, mut sizes) = ([0usize, 1], [4usize; 2]);
    let (mut targets, mut sources) = ([to, to + 4], [at + 4, at + 8]);
    set([0, 1, 10]);
    ok!(cuStreamWaitValue32_v2(stream, at, 1, 0));
    ok!(cuMemcpyBatchAsync_v2(
        targets.as_mut_ptr(),
        sources.as_mut_ptr(),
        sizes.as_mut_ptr(),
        2,
        attributes.as_mut_ptr(),
        indices.as_mut_ptr(),
        2,
        stream
    ));
    set([1, 2, 20]);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(values::<u32>(to, 2), [2, 10]);
    let wrong = cuda!(cuMemcpyBatchAsync_v2(
        targets.as_mut_ptr(),
        sources.as_mut_ptr(),
        sizes.as_mut_ptr(),
        2,
        null_mut(),
        indices.as_mut_ptr(),
        2,
        stream
    ));
    assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(cuStreamDestroy_v2(stream));
}

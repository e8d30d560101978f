//! What is no handle, and more memory than there may be.

use std::ptr::null_mut;

use cuda_definition::driver::types::*;

use crate::{
    driver::{context, cuda, ok},
    library::MEMORY,
};

#[test]
fn forged_handles_are_refused() {
    let own = context();
    for forged in [
        3u64,
        0x1234_5678,
        0x4702_0000_ffff,
        u64::MAX,
        own.handle() as u64,
    ] {
        let event = cuda!(cuEventQuery(forged as CUevent));
        assert_eq!(event, CUresult::CUDA_ERROR_INVALID_HANDLE, "{forged:x}");
        let stream = cuda!(cuStreamSynchronize(forged as CUstream));
        assert_eq!(stream, CUresult::CUDA_ERROR_INVALID_HANDLE, "{forged:x}");
        let mut function = null_mut();
        let name = c"kernel".as_ptr();
        let found = cuda!(cuModuleGetFunction(&mut function, forged as CUmodule, name));
        assert_eq!(found, CUresult::CUDA_ERROR_INVALID_HANDLE, "{forged:x}");
    }
    let current = cuda!(cuCtxSetCurrent(0x4242 as CUcontext));
    assert_eq!(current, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    // The worker is still there.
    ok!(cuCtxSynchronize());
}

#[test]
fn a_handle_is_none_any_more_when_its_object_is_destroyed() {
    let _own = context();
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, 0));
    ok!(cuEventDestroy_v2(event));
    let again = cuda!(cuEventDestroy_v2(event));
    assert_eq!(again, CUresult::CUDA_ERROR_INVALID_HANDLE);
    let recorded = cuda!(cuEventRecord(event, null_mut()));
    assert_eq!(recorded, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn memory_ends_with_the_quota_and_is_there_again_when_some_is_freed() {
    let _alone = crate::driver::alone();
    let _own = context();
    let (mut free, mut all) = (0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut all));
    assert_eq!(all, (MEMORY as usize) << 20);
    let most = (MEMORY as usize) << 20;
    let (mut first, mut second) = (0, 0);
    let too_much = cuda!(cuMemAlloc_v2(&mut first, most + 1));
    assert_eq!(too_much, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuMemAlloc_v2(&mut first, most / 2));
    let too_much = cuda!(cuMemAlloc_v2(&mut second, most / 2 + 1));
    assert_eq!(too_much, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let before = free;
    ok!(cuMemGetInfo_v2(&mut free, &mut all));
    assert!(free + most / 2 <= before + (64 << 20), "{free} of {before}");
    ok!(cuMemFree_v2(first));
    ok!(cuMemAlloc_v2(&mut second, most / 2));
    ok!(cuMemFree_v2(second));
}

#[test]
fn variables_of_a_module_count_in_the_quota() {
    let _alone = crate::driver::alone();
    let _own = context();
    let most = (MEMORY as usize) << 20;
    let text = |bytes: usize| {
        let text =
            format!(".version 8.0\n.target sm_80\n.address_size 64\n.global .b8 many[{bytes}];\n");
        std::ffi::CString::new(text).unwrap()
    };
    let (mut module, mut first) = (null_mut(), 0);
    let too_much = cuda!(cuModuleLoadData(
        &mut module,
        text(most + 1).as_ptr().cast()
    ));
    assert_eq!(too_much, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuModuleLoadData(
        &mut module,
        text(most / 2).as_ptr().cast()
    ));
    let too_much = cuda!(cuMemAlloc_v2(&mut first, most / 2 + 1));
    assert_eq!(too_much, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuModuleUnload(module));
    ok!(cuMemAlloc_v2(&mut first, most / 2 + 1));
    ok!(cuMemFree_v2(first));
}

#[test]
fn addresses_that_are_nobodys_are_refused() {
    let _own = context();
    let word = [7u32];
    let at = word.as_ptr() as CUdeviceptr;
    let copied = cuda!(cuMemcpyHtoD_v2(at, word.as_ptr().cast(), 4));
    assert_eq!(copied, CUresult::CUDA_ERROR_INVALID_VALUE);
    let filled = cuda!(cuMemsetD32_v2(0x2000_0000_0000, 1, 1));
    assert_eq!(filled, CUresult::CUDA_ERROR_INVALID_VALUE);
    let freed = cuda!(cuMemFree_v2(0x2100_0000_0000 + 4));
    assert_eq!(freed, CUresult::CUDA_ERROR_INVALID_VALUE);
}

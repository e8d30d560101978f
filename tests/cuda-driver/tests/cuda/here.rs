//! Tests of what holds only where the driver is in the program's own process.

use std::ffi::c_void;

use cuda_definition::driver::types::*;

use crate::driver::{context, cuda, ok};

#[test]
fn registered_memory_has_the_same_address_on_the_device() {
    let _context = context();
    let mut own = vec![3u32; 1024];
    let start: *mut c_void = own.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(start, 4096, 2));
    let again = cuda!(cuMemHostRegister_v2(start, 4096, 2));
    assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    let mut at = 0;
    ok!(cuMemHostGetDevicePointer_v2(&mut at, start, 0));
    assert_eq!(at, start as u64);
    let mut kind = 0u32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    ok!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, at));
    assert_eq!(CUmemorytype::CU_MEMORYTYPE_HOST.0, kind);
    ok!(cuMemsetD32_v2(at, 8, 1024));
    ok!(cuMemHostUnregister(start));
    assert_eq!(own, vec![8u32; 1024]);
    let gone = cuda!(cuMemHostUnregister(start));
    assert_eq!(gone, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

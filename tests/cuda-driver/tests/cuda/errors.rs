//! Errors of programs.

use std::{ffi::CString, ptr::null_mut};

use cuda_definition::driver::types::*;

use crate::driver::{argument, context, cuda, device, function, launch, module, ok, run, values};

const ORDER: &str = include_str!("../kernels/order.compute_75.ptx");
const HEAD: &str = ".version 8.0\n.target sm_75\n.address_size 64\n";

fn refused(text: &str) -> (CUresult, String) {
    let text = CString::new(text).expect("PTX has no zero byte");
    let mut log = vec![0u8; 512];
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values = [log.as_mut_ptr().cast(), log.len() as *mut _];
    let mut module = null_mut();
    let result = cuda!(cuModuleLoadDataEx(
        &mut module,
        text.as_ptr().cast(),
        2,
        options.as_mut_ptr(),
        values.as_mut_ptr()
    ));
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
    (result, String::from_utf8_lossy(&log[..end]).into_owned())
}

#[test]
fn an_instruction_that_is_not_supported_is_named_with_its_line() {
    let _context = context();
    let text = format!(
        "{HEAD}.visible .entry k()\n{{\n.reg .f64 %f<2>;\nadd.rz.f64 %f1, %f1, %f1;\nret;\n}}\n"
    );
    let (result, log) = refused(&text);
    assert_eq!(result, CUresult::CUDA_ERROR_INVALID_PTX);
    assert_eq!(log, "line 7: the instruction add.rz.f64 is not supported");
}

#[test]
fn text_that_is_not_ptx_is_refused() {
    let _context = context();
    for text in [
        "",
        "hello",
        ".version 8.0",
        ".target sm_75 .entry k( {",
        ".target sm_75 .entry k() { bra nowhere; }",
    ] {
        assert_eq!(refused(text).0, CUresult::CUDA_ERROR_INVALID_PTX, "{text}");
    }
    let newer = HEAD.replace("sm_75", "sm_90a");
    assert_eq!(refused(&newer).1, "sm_90 is newer than this device, sm_80");
    let (elf, mut module) = (*b"\x7fELF\x02\x01\x01\0", null_mut());
    let result = cuda!(cuModuleLoadData(&mut module, elf.as_ptr().cast()));
    assert_eq!(result, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
}

#[test]
fn an_access_outside_its_allocation_ends_the_context_and_no_other() {
    let other = context();
    let kept = device(&[7u32; 4]);
    {
        let _context = context();
        let beyond = function(module(ORDER), "beyond");
        let memory = device(&[0u32; 4]);
        let at = 3u32;
        run(
            beyond,
            [1, 1, 1],
            [1, 1, 1],
            0,
            &[argument(&memory), argument(&at)],
        );
        assert_eq!(values::<u32>(memory, 4), [0, 0, 0, 1]);
        let at = 4u32;
        let result = launch(
            beyond,
            [1, 1, 1],
            [1, 1, 1],
            0,
            null_mut(),
            &[argument(&memory), argument(&at)],
        );
        assert_eq!(result, CUresult::CUDA_SUCCESS);
        assert_eq!(
            cuda!(cuCtxSynchronize()),
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
        let mut more = 0;
        assert_eq!(
            cuda!(cuMemAlloc_v2(&mut more, 16)),
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
    }
    ok!(cuCtxSetCurrent(other.handle()));
    assert_eq!(values::<u32>(kept, 4), [7; 4]);
}

#[test]
fn a_misaligned_access_is_a_fault_of_its_own() {
    let _context = context();
    let twice = function(module(ORDER), "twice");
    let memory = device(&[0u32; 4]) + 2;
    let count = 1u32;
    launch(
        twice,
        [1, 1, 1],
        [1, 1, 1],
        0,
        null_mut(),
        &[argument(&memory), argument(&count)],
    );
    assert_eq!(
        cuda!(cuCtxSynchronize()),
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
    );
}

#[test]
fn threads_that_wait_for_nobody_are_a_fault_and_not_for_ever() {
    let _context = context();
    let text = format!(
        "{HEAD}.visible .entry k()\n{{\n.reg .pred %p<2>;\n.reg .b32 %r<2>;\nmov.u32 %r1, %tid.x;\n\
         setp.eq.u32 %p1, %r1, 0;\n@%p1 bra A;\nbar.sync 1;\nret;\nA:\nbar.sync 2;\nret;\n}}\n"
    );
    let k = function(module(&text), "k");
    launch(k, [1, 1, 1], [64, 1, 1], 0, null_mut(), &[]);
    assert_eq!(
        cuda!(cuCtxSynchronize()),
        CUresult::CUDA_ERROR_LAUNCH_FAILED
    );
}

#[test]
fn launches_that_cannot_be_are_refused_at_once() {
    let _context = context();
    let twice = function(module(ORDER), "twice");
    let memory = device(&[1u32; 4]);
    let count = 4u32;
    let arguments = [argument(&memory), argument(&count)];
    for (grid, block, shared) in [
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [1025, 1, 1], 0),
        ([1, 1, 1], [32, 32, 2], 0),
        ([1, 70_000, 1], [1, 1, 1], 0),
        ([1, 1, 1], [1, 1, 1], 49 << 10),
    ] {
        let result = launch(twice, grid, block, shared, null_mut(), &arguments);
        assert_eq!(
            result,
            CUresult::CUDA_ERROR_INVALID_VALUE,
            "{grid:?} {block:?} {shared}"
        );
    }
    // The kernel opts in to more shared memory, and gets it.
    let more = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    ok!(cuFuncSetAttribute(twice, more, 64 << 10));
    run(twice, [1, 1, 1], [4, 1, 1], 64 << 10, &arguments);
    assert_eq!(values::<u32>(memory, 4), [2; 4]);
}

#[test]
fn wrong_handles_are_errors() {
    let context = context();
    let wrong = 0x7c00_dead_0000u64;
    assert_eq!(
        cuda!(cuStreamSynchronize(wrong as CUstream)),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        cuda!(cuEventQuery(wrong as CUevent)),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        cuda!(cuModuleUnload(context.handle().cast())),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        cuda!(cuCtxSetCurrent(wrong as CUcontext)),
        CUresult::CUDA_ERROR_INVALID_CONTEXT
    );
    assert_eq!(
        cuda!(cuMemFree_v2(wrong)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    let result = launch(
        wrong as CUfunction,
        [1, 1, 1],
        [1, 1, 1],
        0,
        null_mut(),
        &[],
    );
    assert_eq!(result, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn attributes_of_kernels_are_those_that_were_set_last_by_whichever_handle() {
    let _context = context();
    let ptx = CString::new(ORDER).expect("PTX has no zero byte");
    let (mut library, mut kernel, mut function) = (null_mut(), null_mut(), null_mut());
    ok!(cuLibraryLoadData(
        &mut library,
        ptx.as_ptr().cast(),
        null_mut(),
        null_mut(),
        0,
        null_mut(),
        null_mut(),
        0
    ));
    ok!(cuLibraryGetKernel(&mut kernel, library, c"twice".as_ptr()));
    ok!(cuKernelGetFunction(&mut function, kernel));
    let shared = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let is = |expected: i32| {
        let mut value = 0;
        ok!(cuKernelGetAttribute(&mut value, shared, kernel, 0));
        assert_eq!(value, expected);
    };
    for size in [64 << 10, 64 << 10, 50 << 10, 64 << 10] {
        ok!(cuKernelSetAttribute(shared, size, kernel, 0));
        is(size);
    }
    ok!(cuFuncSetAttribute(function, shared, 52 << 10));
    is(52 << 10);
    ok!(cuKernelSetAttribute(shared, 64 << 10, kernel, 0));
    is(64 << 10);
    ok!(cuLibraryUnload(library));
}

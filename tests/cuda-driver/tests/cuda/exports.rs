//! Compares what the library exports with the definition.

use std::{collections::BTreeSet, process::Command};

use cuda_definition::driver::{ENTRY_POINTS, signatures, types::*};

use crate::{
    driver::{context, cuda, ok},
    library::{library, path},
};

/// Dynamic symbols that the library itself defines.
fn symbols() -> BTreeSet<String> {
    let nm = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(path())
        .output()
        .expect("binutils are installed");
    assert!(nm.status.success());
    let text = String::from_utf8(nm.stdout).expect("symbols are text");
    text.lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_symbol_is_of_the_definition_and_listed_with_its_signature() {
    // Signatures are compared when the list is compiled.
    let listed: BTreeSet<_> = gantry_cuda_driver::exported().map(str::to_owned).collect();
    assert_eq!(symbols(), listed);
    for symbol in &listed {
        assert!(
            cuda_definition::by_symbol(ENTRY_POINTS, symbol).is_some(),
            "{symbol}"
        );
        // SAFETY: only the address is taken.
        assert!(unsafe { library().get::<*const ()>(symbol.as_bytes()) }.is_ok());
    }
}

#[test]
fn functions_are_found_by_name_and_version() {
    let _context = context();
    let find = |name: &std::ffi::CStr, version| {
        let (mut found, mut status) = (
            std::ptr::null_mut(),
            CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS,
        );
        let result = cuda!(cuGetProcAddress_v2(
            name.as_ptr(),
            &mut found,
            version,
            0,
            &mut status
        ));
        (result, found, status)
    };
    let (result, found, _) = find(c"cuDriverGetVersion", 13000);
    assert_eq!(result, CUresult::CUDA_SUCCESS);
    // SAFETY: the name determines the function's type.
    let function = unsafe {
        std::mem::transmute::<*mut std::ffi::c_void, signatures::cuDriverGetVersion>(found)
    };
    let mut version = 0;
    // SAFETY: as above.
    let result = unsafe { function(&raw mut version) };
    assert_eq!(result, CUresult::CUDA_SUCCESS);
    assert_eq!(version, 13000);
    // The first version of cuMemAlloc is missing; new programs get the second one.
    let (result, found, status) = find(c"cuMemAlloc", 2000);
    assert_eq!(result, CUresult::CUDA_ERROR_NOT_FOUND);
    assert!(found.is_null());
    assert_eq!(
        status,
        CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    );
    // SAFETY: only the address is taken.
    let second = unsafe { library().get::<*const ()>(b"cuMemAlloc_v2") }.expect("it is exported");
    assert_eq!(
        find(c"cuMemAlloc", 13000).1.cast_const().cast::<()>(),
        *second
    );
}

#[test]
fn errors_have_their_names() {
    let mut name = std::ptr::null();
    ok!(cuGetErrorName(CUresult::CUDA_ERROR_NOT_READY, &mut name));
    // SAFETY: the driver's own text.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    assert_eq!(name, c"CUDA_ERROR_NOT_READY");
}

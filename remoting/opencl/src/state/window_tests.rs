//! Tests of buffers in the window, with a driver that caches their contents.

use std::{ptr::null, ptr::null_mut, sync::Arc};

use remoting_proto::apis::opencl::calls::{
    ContextId, CreateBuffer, CreateContext, CreateSubBuffer, DeviceId, MemId,
};

use super::*;
use crate::{
    driver::{adder, cl},
    testing,
};

const SIZE: usize = 16 << 10;
/// The size of the part, and of its mapping, which starts at the second byte.
const PART: usize = 4 << 10;
const MAPPED: usize = 1 << 10;

#[test]
fn a_copy_that_a_driver_keeps_is_renewed_but_where_a_part_is_mapped() {
    let (mut server, _, window) = testing::server_before(adder::open());
    let context = CreateContext {
        id: ContextId(0),
        devices: vec![DeviceId(0)],
        platform: None,
    };
    server.create_context(context).unwrap();
    let buffer = CreateBuffer {
        id: MemId(0),
        context: ContextId(0),
        flags: 0,
        size: SIZE as u64,
        contents: None,
        lives: Some(window.data()),
        svm: None,
    };
    server.create_buffer(buffer).unwrap();
    let part = CreateSubBuffer {
        id: MemId(1),
        of: MemId(0),
        flags: 0,
        origin: PART as u64,
        size: PART as u64,
    };
    server.create_sub_buffer(part).unwrap();
    let place = window.at(window.data(), SIZE as u64).unwrap();
    // SAFETY: within the window, which nobody else uses.
    unsafe { place.write_bytes(7, SIZE) };
    let map = Mapping {
        mem: MemId(1),
        offset: 1,
        size: MAPPED as u64,
    };
    contents::renew(&server, &[map]).unwrap();

    let api = Arc::clone(&server.backend.api);
    let raw = server.backend.mems.get(0).unwrap().raw;
    let mut kept = vec![1; SIZE];
    let to = kept.as_mut_ptr().cast();
    cl!(
        api,
        clEnqueueReadBuffer(0, raw, 1, 0, SIZE, to, 0, null(), null_mut())
    );
    let mut expected = vec![7u8; SIZE];
    expected[PART + 1..PART + 1 + MAPPED].fill(0);
    assert!(kept == expected);
}

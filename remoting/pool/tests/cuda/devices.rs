//! Several devices: whose memory is whose. Each test runs again in a process of its own, before a pool with three.

use std::{
    ffi::c_void,
    path::Path,
    process::Command,
    ptr::{null, null_mut},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use cuda_definition::driver::types::*;

use crate::{
    driver::{cuda, module, ok, values},
    library,
};

const SYMBOLS: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/symbols.compute_75.ptx");
/// Set in a process that has several devices.
const SEVERAL: &str = "GANTRY_TEST_DEVICES";

/// Whether this process has several devices. If not, runs the test again in one that has, with these variables.
fn has_several(test: &str, variables: &[(&str, &str)]) -> bool {
    static POOL: OnceLock<std::path::PathBuf> = OnceLock::new();
    is_before(|| POOL.get_or_init(|| library::start(3)), test, variables)
}

/// The same, before another pool.
fn is_before<'p>(
    pool: impl FnOnce() -> &'p std::path::PathBuf,
    test: &str,
    variables: &[(&str, &str)],
) -> bool {
    if std::env::var_os(SEVERAL).is_some() {
        return true;
    }
    let pool: &Path = pool();
    let program = std::env::current_exe().expect("a test knows its own path");
    let ended = Command::new(program)
        .args(["--exact", &format!("devices::{test}"), "--nocapture"])
        .env(SEVERAL, "1")
        .env(library::GIVEN, pool)
        .envs(variables.iter().copied())
        .output()
        .expect("it runs again");
    let [text, errors] = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(
        ended.status.success() && text.contains("1 passed"),
        "{variables:?}: {text}{errors}"
    );
    false
}

/// The primary contexts of all devices.
fn contexts() -> Vec<CUcontext> {
    ok!(cuInit(0));
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    let all = (0..count).map(|device| {
        let mut context = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&mut context, device));
        context
    });
    all.collect()
}

fn device_of(at: CUdeviceptr) -> i32 {
    let mut device = -9;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    ok!(cuPointerGetAttribute(
        (&raw mut device).cast(),
        attribute,
        at
    ));
    device
}

#[test]
fn a_pool_lends_the_devices_that_it_is_told_in_their_order() {
    static POOL: OnceLock<std::path::PathBuf> = OnceLock::new();
    // The highest address of three, and the second of three UUIDs.
    let pool = || POOL.get_or_init(|| library::start_lending(3, "2+GPU-47484747"));
    let test = "a_pool_lends_the_devices_that_it_is_told_in_their_order";
    if !is_before(pool, test, &[]) {
        return;
    }
    ok!(cuInit(0));
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    let bus = |device| {
        let mut text = [0u8; 16];
        ok!(cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 16, device));
        String::from_utf8_lossy(&text)
            .trim_end_matches('\0')
            .to_owned()
    };
    let buses: Vec<_> = (0..count).map(bus).collect();
    assert_eq!(buses, ["0000:02:00.0", "0000:01:00.0"]);
}

#[test]
fn the_device_of_a_pointer_is_the_one_it_was_made_on() {
    if !has_several("the_device_of_a_pointer_is_the_one_it_was_made_on", &[]) {
        return;
    }
    let contexts = contexts();
    assert_eq!(contexts.len(), 3);
    ok!(cuCtxSetCurrent(contexts[1]));
    let (mut plain, mut pitched, mut pitch, mut managed) = (0, 0, 0, 0);
    let mut pinned: *mut c_void = null_mut();
    ok!(cuMemAlloc_v2(&mut plain, 64));
    ok!(cuMemAllocPitch_v2(&mut pitched, &mut pitch, 64, 2, 4));
    ok!(cuMemAllocManaged(&mut managed, 64, 1));
    ok!(cuMemHostAlloc(&mut pinned, 64, 0));
    let mut own = vec![0u8; 4096];
    ok!(cuMemHostRegister_v2(own.as_mut_ptr().cast(), 4096, 0));
    let (mut ordered, mut variable, mut size) = (0, 0, 0);
    ok!(cuMemAllocAsync(&mut ordered, 64, null_mut()));
    let module = module(SYMBOLS);
    ok!(cuModuleGetGlobal_v2(
        &mut variable,
        &mut size,
        module,
        c"counter".as_ptr()
    ));
    // The pool of one device gives its memory to streams of another one.
    let (mut pool, mut of_pool) = (null_mut(), 0);
    ok!(cuDeviceGetDefaultMemPool(&mut pool, 2));
    ok!(cuMemAllocFromPoolAsync(&mut of_pool, 64, pool, null_mut()));
    let (mut graph, mut node) = (null_mut(), null_mut());
    ok!(cuGraphCreate(&mut graph, 0));
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut of_graph: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    of_graph.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    of_graph.poolProps.location.r#type = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    of_graph.poolProps.location.id = 1;
    of_graph.bytesize = 64;
    ok!(cuGraphAddMemAllocNode(
        &mut node,
        graph,
        null(),
        0,
        &mut of_graph
    ));

    ok!(cuCtxSetCurrent(contexts[0]));
    let registered = own.as_ptr() as u64;
    for (at, what) in [
        (plain + 63, "plain"),
        (pitched, "pitched"),
        (managed, "managed"),
        (pinned as u64, "pinned"),
        (registered, "registered"),
        (ordered, "of the current pool"),
        (variable, "a variable"),
        (of_graph.dptr, "of a graph"),
    ] {
        assert_eq!(device_of(at), 1, "{what}");
    }
    assert_eq!(device_of(of_pool), 2);
    // Asked again, nobody needs to be asked.
    assert_eq!(device_of(of_pool), 2);
    // SAFETY: as above.
    let mut told: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    ok!(cuGraphMemAllocNodeGetParams(node, &mut told));
    assert_eq!(told.poolProps.location.id, 1);
}

#[test]
fn memory_is_given_up_only_when_no_context_uses_it() {
    if !has_several("memory_is_given_up_only_when_no_context_uses_it", &[]) {
        return;
    }
    let contexts = contexts();
    for is_registered in [true, false] {
        let mut own = vec![7u8; 8192];
        let start = own.as_mut_ptr().align_offset(4096);
        let mut memory: *mut c_void = own[start..].as_mut_ptr().cast();
        ok!(cuCtxSetCurrent(contexts[1]));
        if is_registered {
            ok!(cuMemHostRegister_v2(memory, 4096, 1));
        } else {
            ok!(cuMemHostAlloc(&mut memory, 4096, 1));
            // SAFETY: of that size.
            unsafe { memory.cast::<u8>().write_bytes(7, 4096) };
        }
        let (mut stream, mut gate, mut to) = (null_mut(), null_mut::<c_void>(), 0);
        ok!(cuStreamCreate(&mut stream, 1));
        ok!(cuMemAlloc_v2(&mut to, 4096));
        ok!(cuMemHostAlloc(&mut gate, 4, 1));
        // SAFETY: of that size, and freed at the end.
        let word = unsafe {
            gate.cast::<u32>().write(0);
            AtomicU32::from_ptr(gate.cast())
        };
        ok!(cuStreamWaitValue32_v2(stream, gate as u64, 1, 0));
        ok!(cuMemcpyHtoDAsync_v2(to, memory, 4096, stream));
        let (context, address) = (contexts[0] as u64, memory as u64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context as CUcontext));
                if is_registered {
                    ok!(cuMemHostUnregister(address as *mut c_void));
                } else {
                    ok!(cuMemFreeHost(address as *mut c_void));
                }
                assert_eq!(word.load(Ordering::SeqCst), 1, "the copy is under way");
            });
            // Time in which a call that does not wait returns.
            std::thread::sleep(std::time::Duration::from_millis(300));
            word.store(1, Ordering::SeqCst);
        });
        ok!(cuStreamSynchronize(stream));
        assert_eq!(values::<u8>(to, 4096), [7; 4096]);
        ok!(cuMemFree_v2(to));
        ok!(cuMemFreeHost(gate));
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn attributes_that_memory_does_not_have_read_as_zero() {
    let _context = crate::driver::context();
    let at = crate::driver::device(&[1u32; 16]);
    use CUpointer_attribute as A;
    let mut wanted = [
        A::CU_POINTER_ATTRIBUTE_P2P_TOKENS,
        A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
        A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE,
    ];
    let mut room = [[u64::MAX; 2]; 4];
    let mut places = room.each_mut().map(|one| one.as_mut_ptr().cast::<c_void>());
    ok!(cuPointerGetAttributes(
        4,
        wanted.as_mut_ptr(),
        places.as_mut_ptr(),
        at
    ));
    let upper = 0xffff_ffff_0000_0000;
    let rest = u64::MAX;
    assert_eq!(
        room,
        [[0, upper], [0, rest], [0, rest], [upper, rest]],
        "{room:x?}"
    );
    // What is no attribute has no size.
    wanted[2] = CUpointer_attribute_enum(99);
    let refused = cuda!(cuPointerGetAttributes(
        4,
        wanted.as_mut_ptr(),
        places.as_mut_ptr(),
        at
    ));
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(cuMemFree_v2(at));
}

#[test]
fn memory_that_is_not_known_has_no_attributes() {
    let _context = crate::driver::context();
    use CUpointer_attribute as A;
    let here = [0u64; 2];
    let unknown = here.as_ptr() as CUdeviceptr;
    let ask = |attribute, at| {
        let mut value = 7u64;
        let code = cuda!(cuPointerGetAttribute(
            (&raw mut value).cast(),
            attribute,
            at
        ));
        (code, value)
    };
    for attribute in [
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        A::CU_POINTER_ATTRIBUTE_MAPPED,
        A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
        A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
        A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
    ] {
        let none = (CUresult::CUDA_ERROR_INVALID_VALUE, 7);
        assert_eq!(ask(attribute, unknown), none, "{attribute:?}");
    }
    // Of several at a time, those that it does not have read as zero.
    let mut wanted = [
        A::CU_POINTER_ATTRIBUTE_MAPPED,
        A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
    ];
    let mut room = [7u64; 2];
    let mut places = room.each_mut().map(|one| std::ptr::from_mut(one).cast());
    ok!(cuPointerGetAttributes(
        2,
        wanted.as_mut_ptr(),
        places.as_mut_ptr(),
        unknown
    ));
    assert_eq!(room, [0, 0]);
    let mut managed = 0;
    ok!(cuMemAllocManaged(&mut managed, 4096, 1));
    let (code, value) = ask(A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, managed);
    assert_eq!((code, value as u32), (CUresult::CUDA_SUCCESS, 1));
    ok!(cuMemFree_v2(managed));
}

/// The PCI addresses of the devices that the program sees. Those of the stand-in's three are 2, 1 and 0.
fn addresses() -> Vec<String> {
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    let all = (0..count).map(|device| {
        let mut room = [0; 32];
        ok!(cuDeviceGetPCIBusId(room.as_mut_ptr(), 32, device));
        let text = room.map(|one| one.cast_unsigned() as char);
        text[5..7].iter().collect()
    });
    all.collect()
}

/// What is visible in the process that this runs in, by the variables that it was given.
#[test]
fn a_program_sees_the_devices_that_its_variables_name() {
    const SEEN: &str = "GANTRY_TEST_SEEN";
    let name = "a_program_sees_the_devices_that_its_variables_name";
    if let Ok(seen) = std::env::var(SEEN) {
        if seen.is_empty() {
            assert_eq!(cuda!(cuInit(0)), CUresult::CUDA_ERROR_NO_DEVICE);
            let mut count = 9;
            let asked = cuda!(cuDeviceGetCount(&mut count));
            assert_eq!(asked, CUresult::CUDA_ERROR_NOT_INITIALIZED);
            let profiled = cuda!(cuProfilerStart());
            assert_eq!(profiled, CUresult::CUDA_ERROR_NOT_INITIALIZED);
            return;
        }
        ok!(cuInit(0));
        let seen: Vec<&str> = seen.split(' ').collect();
        assert_eq!(addresses(), seen);
        // The worker means the same devices, and memory is theirs.
        for (ordinal, context) in contexts().into_iter().enumerate() {
            let (mut at, mut device) = (0, -1);
            ok!(cuCtxSetCurrent(context));
            ok!(cuCtxGetDevice(&mut device));
            assert_eq!(device, ordinal as i32);
            let (mut pool, mut of_pool) = (null_mut(), 0);
            ok!(cuDeviceGetDefaultMemPool(&mut pool, device));
            ok!(cuMemAlloc_v2(&mut at, 64));
            ok!(cuMemAllocFromPoolAsync(&mut of_pool, 64, pool, null_mut()));
            assert_eq!((device_of(at), device_of(of_pool)), (device, device));
        }
        let behind = seen.len() as i32;
        let mut context = null_mut();
        for ordinal in [behind, -1] {
            let refused = cuda!(cuDevicePrimaryCtxRetain(&mut context, ordinal));
            assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let mut device = -1;
        let found = cuda!(cuDeviceGetByPCIBusId(&mut device, c"0000:00:00.0".as_ptr()));
        assert_eq!(found == CUresult::CUDA_SUCCESS, seen.contains(&"00"));
        return;
    }
    let by_address = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    let visible = |wanted| ("CUDA_VISIBLE_DEVICES", wanted);
    for (seen, variables) in [
        ("02 01 00", &[][..]),
        ("00 01 02", &[by_address]),
        ("01", &[visible("1")]),
        ("00 02", &[visible("2,0")]),
        ("02 00", &[visible("2,0"), by_address]),
        ("01 02", &[visible("GPU-4748,GPU-47474747-4747")]),
        ("02", &[visible("0,7,1")]),
        ("", &[visible("")]),
        ("", &[visible("-1")]),
        ("", &[visible("GPU-47")]),
        ("", &[visible("0,0")]),
    ] {
        let variables = [variables, &[(SEEN, seen)]].concat();
        assert!(!has_several(name, &variables));
    }
}

unsafe extern "C" fn hold(_: *mut c_void) {
    std::thread::sleep(std::time::Duration::from_millis(200));
}

#[test]
fn a_copy_between_devices_keeps_the_order_of_the_work_of_both() {
    if !has_several(
        "a_copy_between_devices_keeps_the_order_of_the_work_of_both",
        &[],
    ) {
        return;
    }
    let contexts = contexts();
    let own = |place: usize| {
        let mut at = 0;
        ok!(cuCtxSetCurrent(contexts[place]));
        ok!(cuMemAlloc_v2(&mut at, 4));
        ok!(cuMemsetD32_v2(at, 1, 1));
        ok!(cuCtxSynchronize());
        at
    };
    let (other, first) = (own(1), own(0));
    let fill_late = |place: usize, at, value| {
        ok!(cuCtxSetCurrent(contexts[place]));
        ok!(cuLaunchHostFunc(null_mut(), Some(hold), null_mut()));
        ok!(cuMemsetD32Async(at, value, 1, null_mut()));
    };
    // What comes before it in the other context.
    fill_late(1, other, 7);
    ok!(cuCtxSetCurrent(contexts[0]));
    ok!(cuMemcpyPeer(first, contexts[0], other, contexts[1], 4));
    assert_eq!(values::<u32>(first, 1), [7]);
    // What comes behind it there.
    fill_late(0, first, 9);
    ok!(cuMemcpyPeer(other, contexts[1], first, contexts[0], 4));
    ok!(cuCtxSetCurrent(contexts[1]));
    assert_eq!(values::<u32>(other, 1), [9]);
    // Beside a capture, the default streams of others cannot be waited for.
    let (mut stream, mut graph) = (null_mut(), null_mut());
    ok!(cuCtxSetCurrent(contexts[2]));
    ok!(cuStreamCreate(&mut stream, 1));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    ok!(cuStreamBeginCapture_v2(stream, mode));
    ok!(cuCtxSetCurrent(contexts[0]));
    let refused = cuda!(cuMemcpyPeer(first, contexts[0], other, contexts[1], 4));
    assert_eq!(refused, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    ok!(cuCtxSetCurrent(contexts[2]));
    ok!(cuStreamEndCapture(stream, &mut graph));
}

//! The management library of a guest, over its CUDA driver.

use std::ffi::{CStr, c_char, c_int, c_uint};

use libloading::Library;

use crate::{
    driver::{context, ok},
    library::{MEMORY, beside},
};
use cuda_definition::driver::types::*;

macro_rules! nvml {
    ($library:expr, $name:ident($($argument:expr),*) as $of:ty) => {{
        // SAFETY: the signature is the API's; tests pass what it wants.
        unsafe {
            let function = $library.get::<$of>(stringify!($name).as_bytes()).expect("it is exported");
            function($($argument),*)
        }
    }};
}

#[test]
fn programs_find_the_devices_and_their_memory() {
    let _context = context();
    // SAFETY: opening it runs no code of its own.
    let library = unsafe { Library::new(beside("libgantry_nvml.so")) }.expect("it is built");
    type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
    type Plain = unsafe extern "C" fn() -> c_int;
    type Text = unsafe extern "C" fn(usize, *mut c_char, c_uint) -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut usize) -> c_int;
    type Memory = unsafe extern "C" fn(usize, *mut [u64; 3]) -> c_int;
    let mut count = 0;
    assert_eq!(
        nvml!(library, nvmlDeviceGetCount_v2(&mut count) as Count),
        1
    );
    assert_eq!(nvml!(library, nvmlInit_v2() as Plain), 0);
    assert_eq!(
        nvml!(library, nvmlDeviceGetCount_v2(&mut count) as Count),
        0
    );
    assert_eq!(count, 1);
    let mut handle = 0usize;
    type ByIndex = unsafe extern "C" fn(c_uint, *mut usize) -> c_int;
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetHandleByIndex_v2(1, &mut handle) as ByIndex
        ),
        2
    );
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetHandleByIndex_v2(0, &mut handle) as ByIndex
        ),
        0
    );
    // The same name as the driver's, and the device by its other names.
    let (mut name, mut wanted) = ([0; 96], [0; 96]);
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetName(handle, name.as_mut_ptr(), 96) as Text
        ),
        0
    );
    ok!(cuDeviceGetName(wanted.as_mut_ptr(), 96, 0));
    assert_eq!(name, wanted);
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetName(handle, name.as_mut_ptr(), 2) as Text
        ),
        7
    );
    let mut uuid = [0; 80];
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetUUID(handle, uuid.as_mut_ptr(), 80) as Text
        ),
        0
    );
    // SAFETY: a text that was written.
    let text = unsafe { CStr::from_ptr(uuid.as_ptr()) }.to_str().unwrap();
    assert!(text.starts_with("GPU-") && text.len() == 40, "{text}");
    let mut bus = [0; 32];
    ok!(cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, 0));
    let (mut by_uuid, mut by_bus) = (0, 0);
    let found = nvml!(
        library,
        nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &mut by_uuid) as Find
    );
    assert_eq!((found, by_uuid), (0, handle));
    let found = nvml!(
        library,
        nvmlDeviceGetHandleByPciBusId_v2(bus.as_ptr(), &mut by_bus) as Find
    );
    assert_eq!((found, by_bus), (0, handle));
    let none = c"GPU-none";
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetHandleByUUID(none.as_ptr(), &mut by_uuid) as Find
        ),
        6
    );
    // Each version of the structure has its size, beyond which nothing is written.
    type Pci = unsafe extern "C" fn(usize, *mut [u8; 80]) -> c_int;
    let info = |version: &str| {
        let name = format!("nvmlDeviceGetPciInfo{version}");
        // SAFETY: the signature is the API's; there is room for any version's structure.
        unsafe {
            let function = library.get::<Pci>(name.as_bytes()).expect("it is exported");
            let mut room = [0xee; 80];
            assert_eq!(function(handle, &mut room), 0);
            room
        }
    };
    for (version, size) in [("", 32), ("_v2", 36), ("_v3", 68)] {
        let room = info(version);
        assert_eq!(room[16..32], info("_v3")[16..32], "{version}");
        assert_eq!(room[size..], [0xee; 80][size..], "{version}");
        assert_ne!(room[size - 4..size], [0xee; 4], "{version}");
    }
    // The quota, and less when some is taken.
    let mut memory = [0; 3];
    let ask = |memory: &mut [u64; 3]| {
        assert_eq!(
            nvml!(library, nvmlDeviceGetMemoryInfo(handle, memory) as Memory),
            0
        );
    };
    ask(&mut memory);
    assert_eq!(memory[0], MEMORY << 20);
    assert_eq!(memory[0], memory[1] + memory[2]);
    let (before, mut at) = (memory[1], 0);
    ok!(cuMemAlloc_v2(&mut at, 64 << 20));
    ask(&mut memory);
    assert!(memory[1] + (64 << 20) <= before, "{memory:?} {before}");
    // As PyTorch does when it runs out of memory: by PCI address, with room for eight.
    type Processes = unsafe extern "C" fn(usize, *mut c_uint, *mut [u64; 24]) -> c_int;
    let own = u64::from(std::process::id());
    for (version, record) in [("", 2), ("_v2", 3), ("_v3", 3)] {
        let name = format!("nvmlDeviceGetComputeRunningProcesses{version}");
        // SAFETY: the signature is the API's; there is room for eight records of any version.
        let listed = |room: c_uint| unsafe {
            let function = library.get::<Processes>(name.as_bytes());
            let function = function.expect("it is exported");
            let (mut count, mut records) = (room, [0xee; 24]);
            let code = function(by_bus, &mut count, &mut records);
            (code, count, records)
        };
        let (code, count, records) = listed(8);
        assert_eq!((code, count), (0, 1), "{name}");
        // A process ID has four bytes, and four more that nobody reads.
        assert_eq!(records[0] & 0xffff_ffff, own, "{name}");
        assert!(records[1] >= 64 << 20, "{name}: {records:?}");
        if record == 3 {
            assert_eq!(records[2], u64::MAX, "{name}: the device has no instances");
        }
        assert_eq!(records[record..], [0xee; 24][record..], "{name}");
        let (code, count, records) = listed(0);
        assert_eq!((code, count, records), (7, 1, [0xee; 24]), "{name}");
    }
    ok!(cuMemFree_v2(at));
    // What the driver knows as well, in units of this library's.
    type Number = unsafe extern "C" fn(usize, *mut c_uint) -> c_int;
    type Clock = unsafe extern "C" fn(usize, c_uint, *mut c_uint) -> c_int;
    let attribute = |which| {
        let mut value = 0;
        ok!(cuDeviceGetAttribute(&mut value, which, 0));
        value.cast_unsigned()
    };
    let (mut width, mut mode, mut clock, mut cores) = (0, 9, 0, 0);
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetMemoryBusWidth(handle, &mut width) as Number
        ),
        0
    );
    use CUdevice_attribute as A;
    assert_eq!(
        width,
        attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
    );
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetComputeMode(handle, &mut mode) as Number
        ),
        0
    );
    assert_eq!(mode, attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE));
    for (which, of) in [
        (1, A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        (2, A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
    ] {
        assert_eq!(
            nvml!(
                library,
                nvmlDeviceGetMaxClockInfo(handle, which, &mut clock) as Clock
            ),
            0
        );
        assert_eq!(clock, attribute(of) / 1000);
    }
    for (which, code) in [(3, 3), (4, 2)] {
        assert_eq!(
            nvml!(
                library,
                nvmlDeviceGetMaxClockInfo(handle, which, &mut clock) as Clock
            ),
            code
        );
    }
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetNumGpuCores(handle, &mut cores) as Number
        ),
        0
    );
    let processors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    assert!(cores > 0 && cores % processors == 0, "{cores} {processors}");
    // What is not known says so, and what is no device.
    type Rates = unsafe extern "C" fn(usize, *mut [c_uint; 2]) -> c_int;
    let mut rates = [0; 2];
    assert_eq!(
        nvml!(
            library,
            nvmlDeviceGetUtilizationRates(handle, &mut rates) as Rates
        ),
        3
    );
    for forged in [0, handle + 1, usize::MAX] {
        assert_eq!(
            nvml!(
                library,
                nvmlDeviceGetMemoryInfo(forged, &mut memory) as Memory
            ),
            2
        );
    }
    assert_eq!(nvml!(library, nvmlShutdown() as Plain), 0);
    assert_eq!(nvml!(library, nvmlShutdown() as Plain), 1);
}

//! Measures the cost of remoting: run it alternately natively and through the driver, on the same
//! machine.
//!
//! Adds two vectors, checks the sum, and prints one figure per line: name, value, unit. The loader
//! selects the driver to measure (`OCL_ICD_VENDORS`). `--brief` runs few rounds and no copies, for
//! emulated processors; `--copies` runs nothing but copies.

use std::{
    ffi::c_void,
    os::fd::{FromRawFd, OwnedFd},
    ptr::{null, null_mut},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use device::{Device, Failed, check, cl};
use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

mod device;

const SOURCE: &std::ffi::CStr = c"
kernel void add(global const int *a, global const int *b, global int *sum, int count) {
    int i = get_global_id(0);
    if (i < count) sum[i] = a[i] + b[i];
}
kernel void nothing(int a, int b) {}
kernel void busy(global int *out, int rounds) {
    uint word = get_global_id(0) + 1;
    for (int i = 0; i < rounds; i++) {
        word ^= word << 13;
        word ^= word >> 17;
        word ^= word << 5;
    }
    out[get_global_id(0)] = word;
}
";

/// Whether a few rounds are sufficient, because the processor is emulated.
static BRIEF: AtomicBool = AtomicBool::new(false);

fn brief() -> bool {
    BRIEF.load(Ordering::Relaxed)
}

/// Runs a batch of calls repeatedly, and returns the median time of one call.
fn median(batch: u32, mut call: impl FnMut() -> Result<(), Failed>) -> Result<Duration, Failed> {
    let mut times = Vec::new();
    let (batch, time) = if brief() { (1, 50) } else { (batch, 100) };
    let until = Instant::now() + Duration::from_millis(time);
    while Instant::now() < until || times.len() < 5 {
        let start = Instant::now();
        for _ in 0..batch {
            call()?;
        }
        times.push(start.elapsed() / batch);
    }
    times.sort();
    Ok(times[times.len() / 2])
}

fn figure(name: &str, time: Duration) {
    println!("{name}\t{:.3}\tus", time.as_secs_f64() * 1e6);
}

fn rate(name: &str, bytes: usize, time: Duration) {
    println!(
        "{name}\t{:.2}\tGB/s",
        bytes as f64 / time.as_secs_f64() / 1e9
    );
}

/// Enqueues a kernel over one dimension, in groups of the driver's choice if `local` is zero.
fn enqueue(device: &Device, kernel: Handle, global: usize, local: usize) -> Result<(), Failed> {
    let group = if local == 0 { null() } else { &raw const local };
    let enqueued = cl!(
        device.api,
        clEnqueueNDRangeKernel(
            device.queue,
            kernel,
            1,
            null(),
            &raw const global,
            group,
            0,
            null(),
            null_mut()
        )
    );
    check(enqueued, "enqueuing")
}

/// Copies from memory to a buffer, or back.
fn copy(
    device: &Device,
    buffer: Handle,
    memory: *mut u8,
    (offset, size): (usize, usize),
    write: bool,
    blocking: bool,
) -> Result<(), Failed> {
    let (api, queue, blocking) = (&device.api, device.queue, u32::from(blocking));
    let memory: *mut c_void = memory.wrapping_add(offset).cast();
    if write {
        let from = memory.cast_const();
        let code = cl!(
            api,
            clEnqueueWriteBuffer(
                queue,
                buffer,
                blocking,
                offset,
                size,
                from,
                0,
                null(),
                null_mut()
            )
        );
        return check(code, "writing");
    }
    let code = cl!(
        api,
        clEnqueueReadBuffer(
            queue,
            buffer,
            blocking,
            offset,
            size,
            memory,
            0,
            null(),
            null_mut()
        )
    );
    check(code, "reading")
}

/// Memory that the driver pins when it is mapped.
fn map(device: &Device, buffer: Handle, flags: u64, size: usize) -> Result<*mut u8, Failed> {
    let mut code = 0;
    let mapped = cl!(
        device.api,
        clEnqueueMapBuffer(
            device.queue,
            buffer,
            1,
            flags,
            0,
            size,
            0,
            null(),
            null_mut(),
            &raw mut code
        )
    );
    check(code, "mapping")?;
    Ok(mapped.cast())
}

/// Shared memory that the driver knows because a buffer uses it, as a worker's window is for the
/// host's driver.
fn covered(device: &Device, size: usize) -> Result<*mut u8, String> {
    let failed = || std::io::Error::last_os_error().to_string();
    // SAFETY: plain calls; the descriptor is closed at the end of this function, once, and the
    // mapping remains.
    let memory = unsafe {
        let fd = libc::memfd_create(c"figures".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 || libc::ftruncate(fd, size as libc::off_t) != 0 {
            return Err(failed());
        }
        let _file = OwnedFd::from_raw_fd(fd);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), size, access, libc::MAP_SHARED, fd, 0)
    };
    if memory == libc::MAP_FAILED {
        return Err(failed());
    }
    device.buffer(codes::MEM_USE_HOST_PTR, size, memory)?;
    Ok(memory.cast())
}

/// Measures copies between several kinds of memory and the device, in several sizes.
fn copies(device: &Device, native: bool) -> Result<(), String> {
    const SIZES: [usize; 8] = [
        64 << 10,
        128 << 10,
        256 << 10,
        512 << 10,
        1 << 20,
        4 << 20,
        16 << 20,
        64 << 20,
    ];
    const LARGEST: usize = SIZES[SIZES.len() - 1];
    let buffer = device.buffer(0, LARGEST, null_mut())?;
    let pinned = device.buffer(codes::MEM_ALLOC_HOST_PTR, LARGEST, null_mut())?;
    let pinned = map(device, pinned, codes::MAP_READ | codes::MAP_WRITE, LARGEST)?;
    // Twice the maximum, so that reads and writes use separate memory.
    let mut ordinary: Vec<u8> = (0..2 * LARGEST).map(|index| (index % 251) as u8).collect();
    let (there, back) = ordinary.split_at_mut(LARGEST);
    let mut memories = vec![
        ("ordinary", there.as_mut_ptr(), back.as_mut_ptr()),
        ("pinned", pinned, pinned),
    ];
    if native {
        let covered = covered(device, LARGEST)?;
        memories.push(("covered", covered, covered));
    }
    for &(_, from, _) in &memories[1..] {
        // SAFETY: both have this many bytes, and nobody else uses them.
        unsafe { from.copy_from_nonoverlapping(there.as_ptr(), LARGEST) };
    }
    for (memory, from, to) in memories {
        for size in SIZES {
            let write = || copy(device, buffer, from, (0, size), true, true);
            let read = || copy(device, buffer, to, (0, size), false, true);
            let kib = size >> 10;
            rate(
                &format!("write of {kib} KiB, {memory} memory"),
                size,
                median(1, write)?,
            );
            rate(
                &format!("read of {kib} KiB, {memory} memory"),
                size,
                median(1, read)?,
            );
        }
        // As programs that measure bandwidth do: many copies in flight, and a wait for the last.
        const QUEUED: usize = 16;
        for (what, memory_at, write) in [("write", from, true), ("read", to, false)] {
            let size = 1 << 20;
            let all = || {
                for _ in 1..QUEUED {
                    copy(device, buffer, memory_at, (0, size), write, false)?;
                }
                copy(device, buffer, memory_at, (0, size), write, true)
            };
            rate(
                &format!("{what} of 1024 KiB, {QUEUED} queued, {memory} memory"),
                QUEUED * size,
                median(1, all)?,
            );
        }
        // As at the boundary of two stretches of a window that were registered with the driver
        // separately.
        for (what, memory_at, write) in [("write", from, true), ("read", to, false)] {
            let (first, rest) = (28 << 20, 36 << 20);
            let parts = || {
                copy(device, buffer, memory_at, (0, first), write, false)?;
                copy(device, buffer, memory_at, (first, rest), write, true)
            };
            rate(
                &format!("{what} of 65536 KiB in two commands, {memory} memory"),
                LARGEST,
                median(1, parts)?,
            );
        }
    }
    if there != back {
        return Err("what was read is not what was written".to_owned());
    }
    println!("# what was read is what was written");
    Ok(())
}

/// Adds vectors, with one buffer in each kind of memory.
fn sum(device: &Device, add: Handle) -> Result<(), String> {
    let count = 1usize << 20;
    let bytes = count * 4;
    let mut a: Vec<i32> = (0..).take(count).collect();
    let b: Vec<i32> = a.iter().map(|i| i * 3 + 1).collect();
    let buffers = [
        device.buffer(codes::MEM_COPY_HOST_PTR, bytes, a.as_mut_ptr().cast())?,
        device.buffer(codes::MEM_ALLOC_HOST_PTR, bytes, null_mut())?,
        device.buffer(0, bytes, null_mut())?,
    ];
    let mapped = map(device, buffers[1], codes::MAP_WRITE, bytes)?;
    // SAFETY: the mapping has `bytes` bytes, and nobody else uses it.
    unsafe { std::ptr::copy_nonoverlapping(b.as_ptr().cast(), mapped, bytes) };
    let unmapped = cl!(
        device.api,
        clEnqueueUnmapMemObject(
            device.queue,
            buffers[1],
            mapped.cast(),
            0,
            null(),
            null_mut()
        )
    );
    check(unmapped, "unmapping")?;
    for (index, buffer) in (0..).zip(buffers) {
        device.set(add, index, buffer)?;
    }
    device.set(add, 3, count as i32)?;
    enqueue(device, add, count, 0)?;
    let mut sum = vec![0i32; count];
    let to = sum.as_mut_ptr().cast();
    copy(device, buffers[2], to, (0, bytes), false, true)?;
    if let Some(index) = (0..count).find(|&index| sum[index] != a[index] + b[index]) {
        return Err(format!("the sum is wrong at {index}: {}", sum[index]));
    }
    println!("# the sum of {count} numbers is right");
    Ok(())
}

/// Measures the time of calls.
fn calls(device: &Device, nothing: Handle) -> Result<(), String> {
    let mut word = 0usize;
    let ask = || {
        let to = (&raw mut word).cast();
        let code = cl!(
            device.api,
            clGetKernelWorkGroupInfo(
                nothing,
                device.id,
                codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
                8,
                to,
                null_mut()
            )
        );
        check(code, "asking")
    };
    figure(
        "synchronous call (clGetKernelWorkGroupInfo)",
        median(1000, ask)?,
    );
    let submit = |argument: i32| {
        device.set(nothing, 0, argument)?;
        device.set(nothing, 1, argument + 1)?;
        enqueue(device, nothing, 1, 1)
    };
    let finish = || finish(device);
    // The client's time for a batch that fits into the ring, without the device's work.
    let (rounds, batch) = if brief() { (5, 10) } else { (200, 100) };
    for (what, step) in [("2 arguments", 0), ("2 new arguments", 1)] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let start = Instant::now();
            for number in 0..batch {
                submit(step * number as i32)?;
            }
            times.push(start.elapsed() / batch);
            finish()?;
        }
        times.sort();
        let name = format!("enqueue with {what}, client's time");
        figure(&name, times[times.len() / 2]);
    }
    figure(
        "enqueue with 2 arguments + finish",
        median(10, || submit(1).and_then(|()| finish()))?,
    );
    figure("finish of an idle queue", median(10, finish)?);
    Ok(())
}

fn finish(device: &Device) -> Result<(), Failed> {
    check(cl!(device.api, clFinish(device.queue)), "finishing")
}

/// Runs kernels of several lengths back to back, as a launch-bound program does.
fn back_to_back(device: &Device, busy: Handle) -> Result<(), String> {
    /// From kernels that are short compared with a launch to those that are much longer.
    const ROUNDS: [i32; 3] = [1_500, 7_000, 28_000];
    const KERNELS: u32 = 200;
    let out = device.buffer(0, 4096, null_mut())?;
    device.set(busy, 0, out)?;
    for rounds in ROUNDS {
        device.set(busy, 1, rounds)?;
        let all = || {
            for _ in 0..KERNELS {
                enqueue(device, busy, 1, 1)?;
            }
            finish(device)
        };
        let each = median(1, all)? / KERNELS;
        figure(
            &format!("kernel of {rounds} rounds, one of {KERNELS} back to back"),
            each,
        );
    }
    Ok(())
}

fn main() -> Result<(), String> {
    let option = std::env::args().nth(1).unwrap_or_default();
    BRIEF.store(option == "--brief", Ordering::Relaxed);
    let device = Device::open(None)?;
    let mut name = [0u8; 256];
    cl!(
        device.api,
        clGetPlatformInfo(
            device.platform,
            codes::PLATFORM_VERSION,
            name.len(),
            name.as_mut_ptr().cast(),
            null_mut()
        )
    );
    let name = String::from_utf8_lossy(&name);
    println!("# {}", name.trim_end_matches('\0'));
    let [add, nothing, busy] = device.kernels(SOURCE, [c"add", c"nothing", c"busy"])?;
    sum(&device, add)?;
    if option != "--copies" {
        calls(&device, nothing)?;
    }
    if brief() {
        return Ok(());
    }
    if option != "--copies" {
        back_to_back(&device, busy)?;
    }
    copies(&device, !name.contains("Gantry"))
}

//! What remoting costs: run it natively and through the driver in turn, on the same machine.
//!
//! `opencl_figures [LOADER]` adds two vectors, checks the sum, and prints one figure per line:
//! name, value, unit. Which driver is measured is the loader's choice (`OCL_ICD_VENDORS`).
//! `--brief` in the loader's place makes few rounds and no copies, for emulated processors.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use gantry_remoting::opencl::{Api, codes};

const SOURCE: &std::ffi::CStr = c"
kernel void add(global const int *a, global const int *b, global int *sum, int count) {
    int i = get_global_id(0);
    if (i < count) sum[i] = a[i] + b[i];
}
kernel void nothing(int a, int b) {}
";

/// Calls the driver.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: handles are live until the end of the program, and pointers are to locals of the
        // sizes that are passed beside them.
        unsafe { $api.$name($($arg),*) }
    };
}

fn check(code: i32, what: &str) -> Result<(), String> {
    if code == 0 {
        Ok(())
    } else {
        Err(format!("{what} failed with code {code}"))
    }
}

/// Whether a few rounds are enough: where the processor is emulated.
static BRIEF: AtomicBool = AtomicBool::new(false);

fn brief() -> bool {
    BRIEF.load(Ordering::Relaxed)
}

/// Runs it often and returns the median time of one of `batch` calls.
fn median(batch: u32, mut call: impl FnMut() -> Result<(), String>) -> Result<Duration, String> {
    let mut times = Vec::new();
    let (batch, time) = if brief() { (1, 50) } else { (batch, 200) };
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

/// Copies between ordinary and pinned memory and the device, at several sizes.
fn copies(api: &Api, context: usize, queue: usize) -> Result<(), String> {
    let sizes = [
        64usize << 10,
        256 << 10,
        1 << 20,
        4 << 20,
        16 << 20,
        64 << 20,
    ];
    let largest = sizes[sizes.len() - 1];
    let mut code = 0;
    let device = cl!(
        api,
        clCreateBuffer(context, 0, largest, null_mut(), &raw mut code)
    );
    check(code, "creating the device's buffer")?;
    let pinned = cl!(
        api,
        clCreateBuffer(
            context,
            codes::MEM_ALLOC_HOST_PTR,
            largest,
            null_mut(),
            &raw mut code
        )
    );
    check(code, "creating the pinned buffer")?;
    let flags = codes::MAP_READ | codes::MAP_WRITE;
    let mapped = cl!(
        api,
        clEnqueueMapBuffer(
            queue,
            pinned,
            1,
            flags,
            0,
            largest,
            0,
            null(),
            null_mut(),
            &raw mut code
        )
    );
    check(code, "mapping the pinned buffer")?;
    // Twice the largest: what is written and what is read lie apart.
    let mut ordinary: Vec<u8> = (0..2 * largest).map(|index| (index % 251) as u8).collect();
    let (there, back) = ordinary.split_at_mut(largest);
    // SAFETY: the mapping has so many bytes, and nobody else uses them.
    let window = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), largest) };
    window.copy_from_slice(there);
    let memories = [
        ("ordinary", there.as_mut_ptr(), back.as_mut_ptr()),
        ("pinned", window.as_mut_ptr(), window.as_mut_ptr()),
    ];
    for (memory, from, to) in memories {
        for size in sizes {
            let write = || {
                let from = from.cast_const().cast();
                let done = cl!(
                    api,
                    clEnqueueWriteBuffer(queue, device, 1, 0, size, from, 0, null(), null_mut())
                );
                check(done, "writing")
            };
            let read = || {
                let to = to.cast();
                let done = cl!(
                    api,
                    clEnqueueReadBuffer(queue, device, 1, 0, size, to, 0, null(), null_mut())
                );
                check(done, "reading")
            };
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
    }
    if there != back {
        return Err("what was read is not what was written".to_owned());
    }
    println!("# what was read is what was written");
    Ok(())
}

fn main() -> Result<(), String> {
    let mut loader = std::env::args().nth(1);
    if loader.as_deref() == Some("--brief") {
        BRIEF.store(true, Ordering::Relaxed);
        loader = None;
    }
    let api =
        Api::open(loader.as_deref().unwrap_or("libOpenCL.so.1")).map_err(|e| e.to_string())?;
    let mut code = 0;
    let mut platform = 0;
    let mut device = 0;
    let all = u64::from(u32::MAX);
    check(
        cl!(api, clGetPlatformIDs(1, &raw mut platform, null_mut())),
        "finding a platform",
    )?;
    check(
        cl!(
            api,
            clGetDeviceIDs(platform, all, 1, &raw mut device, null_mut())
        ),
        "finding a device",
    )?;
    let mut name = [0u8; 256];
    cl!(
        api,
        clGetPlatformInfo(
            platform,
            codes::PLATFORM_VERSION,
            name.len(),
            name.as_mut_ptr().cast(),
            null_mut()
        )
    );
    let name = String::from_utf8_lossy(&name);
    println!("# {}", name.trim_end_matches('\0'));
    let context = cl!(
        api,
        clCreateContext(
            null(),
            1,
            &raw const device,
            None,
            null_mut(),
            &raw mut code
        )
    );
    check(code, "creating a context")?;
    let queue = cl!(api, clCreateCommandQueue(context, device, 0, &raw mut code));
    check(code, "creating a queue")?;
    let source = SOURCE.as_ptr();
    let program = cl!(
        api,
        clCreateProgramWithSource(context, 1, &raw const source, null(), &raw mut code)
    );
    check(code, "creating a program")?;
    check(
        cl!(
            api,
            clBuildProgram(program, 0, null(), c"".as_ptr(), None, null_mut())
        ),
        "building the program",
    )?;
    let add = cl!(api, clCreateKernel(program, c"add".as_ptr(), &raw mut code));
    check(code, "creating the kernel")?;
    let nothing = cl!(
        api,
        clCreateKernel(program, c"nothing".as_ptr(), &raw mut code)
    );
    check(code, "creating the empty kernel")?;

    // The sum, with one buffer in each kind of memory.
    let count = 1usize << 20;
    let bytes = count * 4;
    let a: Vec<i32> = (0..).take(count).collect();
    let b: Vec<i32> = a.iter().map(|i| i * 3 + 1).collect();
    let mut sum = vec![0i32; count];
    let buffers = [
        cl!(
            api,
            clCreateBuffer(
                context,
                codes::MEM_COPY_HOST_PTR,
                bytes,
                a.as_ptr().cast_mut().cast(),
                &raw mut code
            )
        ),
        cl!(
            api,
            clCreateBuffer(
                context,
                codes::MEM_ALLOC_HOST_PTR,
                bytes,
                null_mut(),
                &raw mut code
            )
        ),
        cl!(
            api,
            clCreateBuffer(context, 0, bytes, null_mut(), &raw mut code)
        ),
    ];
    check(code, "creating buffers")?;
    let mapped = cl!(
        api,
        clEnqueueMapBuffer(
            queue,
            buffers[1],
            1,
            codes::MAP_WRITE,
            0,
            bytes,
            0,
            null(),
            null_mut(),
            &raw mut code
        )
    );
    check(code, "mapping a buffer")?;
    // SAFETY: the mapping has `bytes` bytes, and nobody else uses it.
    unsafe { std::ptr::copy_nonoverlapping(b.as_ptr(), mapped.cast(), count) };
    check(
        cl!(
            api,
            clEnqueueUnmapMemObject(queue, buffers[1], mapped, 0, null(), null_mut())
        ),
        "unmapping",
    )?;
    for (index, buffer) in (0..).zip(&buffers) {
        let value: *const c_void = std::ptr::from_ref(buffer).cast();
        check(
            cl!(api, clSetKernelArg(add, index, 8, value)),
            "setting an argument",
        )?;
    }
    let number = count as i32;
    check(
        cl!(api, clSetKernelArg(add, 3, 4, (&raw const number).cast())),
        "setting the count",
    )?;
    let (global, one) = (count, 1usize);
    check(
        cl!(
            api,
            clEnqueueNDRangeKernel(
                queue,
                add,
                1,
                null(),
                &raw const global,
                null(),
                0,
                null(),
                null_mut()
            )
        ),
        "enqueuing the sum",
    )?;
    let read = |sum: &mut [i32]| {
        check(
            cl!(
                api,
                clEnqueueReadBuffer(
                    queue,
                    buffers[2],
                    1,
                    0,
                    bytes,
                    sum.as_mut_ptr().cast(),
                    0,
                    null(),
                    null_mut()
                )
            ),
            "reading the sum",
        )
    };
    read(&mut sum)?;
    if let Some(index) = (0..count).find(|&index| sum[index] != a[index] + b[index]) {
        return Err(format!("the sum is wrong at {index}: {}", sum[index]));
    }
    println!("# the sum of {count} numbers is right");

    let mut word = 0usize;
    figure(
        "synchronous call (clGetKernelWorkGroupInfo)",
        median(1000, || {
            let to = (&raw mut word).cast();
            check(
                cl!(
                    api,
                    clGetKernelWorkGroupInfo(
                        nothing,
                        device,
                        codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
                        8,
                        to,
                        null_mut()
                    )
                ),
                "asking",
            )
        })?,
    );
    let arguments = [1i32, 2];
    for index in 0..2u32 {
        let value = (&raw const arguments[index as usize]).cast();
        check(
            cl!(api, clSetKernelArg(nothing, index, 4, value)),
            "setting",
        )?;
    }
    let enqueue = || {
        for index in 0..2u32 {
            let value = (&raw const arguments[index as usize]).cast();
            check(
                cl!(api, clSetKernelArg(nothing, index, 4, value)),
                "setting",
            )?;
        }
        check(
            cl!(
                api,
                clEnqueueNDRangeKernel(
                    queue,
                    nothing,
                    1,
                    null(),
                    &raw const one,
                    &raw const one,
                    0,
                    null(),
                    null_mut()
                )
            ),
            "enqueuing",
        )
    };
    let finish = || check(cl!(api, clFinish(queue)), "finishing");
    // Client's time for a batch that fits the ring, the device's work left out.
    let mut times = Vec::new();
    let (rounds, batch) = if brief() { (5, 10) } else { (200, 100) };
    for _ in 0..rounds {
        let start = Instant::now();
        for _ in 0..batch {
            enqueue()?;
        }
        times.push(start.elapsed() / batch);
        finish()?;
    }
    times.sort();
    figure(
        "enqueue with 2 arguments, client's time",
        times[times.len() / 2],
    );
    figure(
        "enqueue with 2 arguments + finish",
        median(10, || enqueue().and_then(|()| finish()))?,
    );
    figure("finish of an idle queue", median(10, finish)?);
    if brief() {
        return Ok(());
    }
    copies(&api, context, queue)
}

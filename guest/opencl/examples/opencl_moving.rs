//! Computes round after round until the file exists whose path is the argument, and compares each
//! round with its own result. Reports the number of rounds so far and the longest round since the
//! last report; at the end, reports that all were correct.
//!
//! The state that is carried from round to round is in a buffer of the device, in one in the
//! window, and in a kernel argument: the serving worker must have all three. With the further
//! argument `device`, both buffers are the device's; `window` is the default. With a number after
//! it, each has this many MiB.
//!
//! `OPENCL_MOVING_BINARY` names a file for the compiled kernel. It is written after the first round
//! if it does not exist; if it exists, nothing is compiled.

use std::{
    env,
    io::{Write, stdout},
    path::{Path, PathBuf},
    ptr::{null, null_mut},
    time::{Duration, Instant},
};

use device::{Device, check, cl};
use remoting_proto::apis::opencl::codes;

mod device;

/// The default number of words in a buffer.
const ITEMS: usize = 4096;
const SOURCE: &std::ffi::CStr = c"kernel void advance(global uint* a, global uint* b, uint key) {
    size_t i = get_global_id(0);
    a[i] = a[i] * 1664525u + b[i] + key;
    b[i] ^= a[i] >> 3;
}";
/// The number of rounds between two reports.
const TOLD: u32 = 10;

fn main() -> Result<(), String> {
    let stop = env::args().nth(1).ok_or("name a file that ends it")?;
    let second = match env::args().nth(2).as_deref() {
        None | Some("window") => codes::MEM_ALLOC_HOST_PTR,
        Some("device") => 0,
        Some(other) => return Err(format!("{other:?} is neither \"window\" nor \"device\"")),
    };
    let items = match env::args().nth(3) {
        None => ITEMS,
        Some(mib) => match mib.parse::<usize>() {
            Ok(mib @ 1..=1024) => (mib << 20) / size_of::<u32>(),
            _ => return Err(format!("{mib:?} is no number of MiB from 1 to 1024")),
        },
    };
    let binary = env::var_os("OPENCL_MOVING_BINARY").map(PathBuf::from);
    let device = Device::open(None)?;
    let [kernel] = device.kernels_kept(binary.as_deref(), SOURCE, [c"advance"])?;
    let size = items * size_of::<u32>();
    let zero = 0u32;
    let mut buffers = [0, second].into_iter().map(|place| {
        let flags = codes::MEM_READ_WRITE | place;
        let buffer = device.buffer(flags, size, null_mut())?;
        let pattern = (&raw const zero).cast();
        let (queue, none, event) = (device.queue, null(), null_mut());
        let filled = cl!(
            device.api,
            clEnqueueFillBuffer(queue, buffer, pattern, 4, 0, size, 0, none, event)
        );
        check(filled, "filling a buffer").map(|()| buffer)
    });
    let mut next = || buffers.next().ok_or("no buffer")?.map_err(String::from);
    let buffers = [next()?, next()?];
    for (index, buffer) in (0..).zip(buffers) {
        device.set(kernel, index, buffer)?;
    }
    device.set(kernel, 2, 1u32)?;
    let (mut a, mut b) = (vec![0u32; items], vec![0u32; items]);
    let mut seen = vec![0u32; items];
    let mut round = 0u32;
    let mut longest = Duration::ZERO;
    loop {
        let began = Instant::now();
        round += 1;
        // Not in each round: the argument has to survive, too.
        let key = round / 8 + 1;
        if round.is_multiple_of(8) {
            device.set(kernel, 2, key)?;
        }
        check(
            device.enqueue(device.queue, kernel, items, null_mut()),
            "running a kernel",
        )?;
        for (a, b) in a.iter_mut().zip(&mut b) {
            *a = a.wrapping_mul(1_664_525).wrapping_add(*b).wrapping_add(key);
            *b ^= *a >> 3;
        }
        for (buffer, expected) in buffers.into_iter().zip([&a, &b]) {
            let (to, none, event) = (seen.as_mut_ptr().cast(), null(), null_mut());
            let read = cl!(
                device.api,
                clEnqueueReadBuffer(device.queue, buffer, 1, 0, size, to, 0, none, event)
            );
            check(read, "reading a buffer")?;
            if seen != *expected {
                return Err(format!("round {round} is wrong"));
            }
        }
        longest = longest.max(began.elapsed());
        if round.is_multiple_of(TOLD) {
            let longest = std::mem::take(&mut longest).as_millis();
            tell(&format!("round {round}, the longest took {longest} ms"))?;
        }
        if let (1, Some(file)) = (round, &binary) {
            device.keep(file, kernel)?;
        }
        if Path::new(&stop).exists() {
            break;
        }
    }
    tell(&format!("all {round} rounds were right"))
}

fn tell(text: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| error.to_string())
}

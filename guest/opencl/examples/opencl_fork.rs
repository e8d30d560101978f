//! Children of fork: they are refused with one code, share memory that their parent has mapped, and
//! the parent computes on, whatever its other threads do meanwhile.

use std::{
    io::Error,
    ptr::{null, null_mut},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use device::{Device, check, cl};

mod device;

const ALLOC_HOST_PTR: u64 = 1 << 4;
const MAP_READ_WRITE: u64 = 3;
const LENGTH: usize = 1 << 20;
const THREADS: usize = 3;
const CHILDREN: usize = 30;
/// `CL_OUT_OF_HOST_MEMORY`
const REFUSED: i32 = -6;
/// Seconds that only a child that hangs takes.
const HANGS: u32 = 60;

/// Memory that host and device share, mapped until the program ends.
fn mapped(device: &Device) -> Result<*mut u8, String> {
    let buffer = device.buffer(ALLOC_HOST_PTR, LENGTH, null_mut())?;
    let mut code = 0;
    let (queue, none, event) = (device.queue, null(), null_mut());
    let start = cl!(
        device.api,
        clEnqueueMapBuffer(
            queue,
            buffer,
            1,
            MAP_READ_WRITE,
            0,
            LENGTH,
            0,
            none,
            event,
            &raw mut code
        )
    );
    check(code, "mapping")?;
    Ok(start.cast())
}

fn computes(device: &Device, seed: usize) -> Result<(), String> {
    let from: Vec<u8> = (0..LENGTH)
        .map(|at| (at * seed + at / 4096) as u8)
        .collect();
    let mut to = vec![0; LENGTH];
    device.there_and_back(from.as_ptr(), to.as_mut_ptr(), LENGTH)?;
    (from == to)
        .then_some(())
        .ok_or_else(|| "other bytes came back".to_owned())
}

/// Runs `child` in a child, and returns its exit status.
fn forked(child: impl FnOnce() -> i32) -> Result<i32, String> {
    // SAFETY: the child calls the driver, which must take no lock of another thread's; it ends by exit, as programs
    // do.
    let process = unsafe { libc::fork() };
    if process == 0 {
        // SAFETY: no pointers.
        unsafe {
            libc::alarm(HANGS);
            libc::exit(child());
        }
    }
    let mut status = 0;
    // SAFETY: a local.
    if unsafe { libc::waitpid(process, &raw mut status, 0) } != process {
        return Err(Error::last_os_error().to_string());
    }
    if libc::WIFSIGNALED(status) {
        return Err(format!(
            "a child ended by signal {}",
            libc::WTERMSIG(status)
        ));
    }
    Ok(libc::WEXITSTATUS(status))
}

/// Whether calls of all kinds are refused.
fn is_refused(device: &Device) -> bool {
    let api = &device.api;
    let (mut count, mut code, mut word) = (0, 0, 0usize);
    let made = cl!(
        api,
        clCreateBuffer(device.context, 0, LENGTH, null_mut(), &raw mut code)
    );
    let devices = cl!(
        api,
        clGetDeviceIDs(device.platform, !0, 0, null_mut(), &raw mut count)
    );
    let to = (&raw mut word).cast();
    let told = cl!(api, clGetDeviceInfo(device.id, 0x1000, 8, to, null_mut()));
    let codes = [
        code,
        devices,
        told,
        cl!(api, clFinish(device.queue)),
        cl!(api, clFlush(device.queue)),
        cl!(api, clReleaseCommandQueue(device.queue)),
        cl!(api, clReleaseContext(device.context)),
    ];
    made == 0 && codes == [REFUSED; 7]
}

fn main() -> Result<(), String> {
    let device = Device::open(None)?;
    let shared = mapped(&device)?;
    computes(&device, 3)?;
    // SAFETY: mapped memory of this size, here and below, to which no references exist.
    unsafe { shared.write_bytes(7, LENGTH) };
    let ended = forked(|| {
        // SAFETY: as above; the child has it, too.
        let found = unsafe { shared.add(LENGTH - 1).read_volatile() };
        // SAFETY: as above.
        unsafe { shared.write_bytes(8, LENGTH) };
        i32::from(found == 7) | i32::from(is_refused(&device)) << 1
    })?;
    // SAFETY: as above.
    let found = unsafe { shared.add(LENGTH - 1).read_volatile() };
    println!("one child: {ended}, which has written {found}");
    computes(&device, 5)?;
    let stops = AtomicBool::new(false);
    let (device, stops) = (&device, &stops);
    let refused = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn(move || {
                    while !stops.load(Ordering::Relaxed) {
                        computes(device, 7 + number)?;
                    }
                    Ok::<_, String>(())
                })
            })
            .collect();
        let children = (0..CHILDREN).map(|_| forked(|| i32::from(is_refused(device))));
        let refused = children.sum::<Result<i32, _>>();
        stops.store(true, Ordering::Relaxed);
        for thread in threads {
            thread
                .join()
                .map_err(|_| "a thread panicked".to_owned())??;
        }
        refused
    })?;
    println!(
        "{refused} of {CHILDREN} children of a program with {THREADS} busy threads are refused"
    );
    computes(device, 11)?;
    println!("the parent computes on");
    Ok(())
}

//! Ten thousand synchronous calls between two marks, for whoever counts what else happens:
//! `opencl_steady [LOADER]` says `ready` and its process id, waits for a line, says `begin`, calls,
//! and says `end`.

use std::{
    io::{Write, stdin, stdout},
    ptr::{null, null_mut},
};

use gantry_remoting::opencl::{Api, codes};

const CALLS: u32 = 10_000;

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

fn say(word: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{word}")
        .and_then(|()| out.flush())
        .map_err(|error| error.to_string())
}

fn main() -> Result<(), String> {
    let loader = std::env::args().nth(1);
    let api =
        Api::open(loader.as_deref().unwrap_or("libOpenCL.so.1")).map_err(|e| e.to_string())?;
    let (mut code, mut platform, mut device) = (0, 0, 0);
    let all = u64::from(u32::MAX);
    cl!(api, clGetPlatformIDs(1, &raw mut platform, null_mut()));
    check(
        cl!(
            api,
            clGetDeviceIDs(platform, all, 1, &raw mut device, null_mut())
        ),
        "finding a device",
    )?;
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
    let source = c"kernel void nothing(int a) {}".as_ptr();
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
    let kernel = cl!(
        api,
        clCreateKernel(program, c"nothing".as_ptr(), &raw mut code)
    );
    check(code, "creating the kernel")?;
    let mut word = 0usize;
    let mut ask = || {
        let to = (&raw mut word).cast();
        let code = cl!(
            api,
            clGetKernelWorkGroupInfo(
                kernel,
                device,
                codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
                8,
                to,
                null_mut()
            )
        );
        check(code, "asking")
    };
    for _ in 0..1000 {
        ask()?;
    }
    say(&format!("ready {}", std::process::id()))?;
    stdin()
        .read_line(&mut String::new())
        .map_err(|error| error.to_string())?;
    // What waking up has to do is done before the mark.
    for _ in 0..100 {
        ask()?;
    }
    say("begin")?;
    for _ in 0..CALLS {
        ask()?;
    }
    say("end")
}

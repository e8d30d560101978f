//! The C interface: `libgloop.so` and `include/gloop.h`.
//!
//! A handle is a pointer that the caller passes back. Functions return 0, or -1 and leave a message
//! for [`gloop_error`]. Each thread has its own message.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, OsStr, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    sync::Arc,
};

use remoting_turns::session::Session;

use crate::{
    cuda::{Args, Kernel, Module},
    job::{Grid, Job, Options, Runtime, State},
    turns::{self, Join, Member, Resumable},
};

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

fn say(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    MESSAGE.with(|message| *message.borrow_mut() = text);
}

/// Converts a result to a number.
fn outcome<E: std::error::Error>(result: Result<(), E>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            say(&chain(&error));
            -1
        }
    }
}

/// Returns a new object to the caller, or null.
fn object<T, E: std::error::Error>(result: Result<T, E>) -> *mut T {
    match result {
        Ok(value) => Box::into_raw(Box::new(value)),
        Err(error) => {
            say(&chain(&error));
            std::ptr::null_mut()
        }
    }
}

/// The message of this thread's last call that failed. Valid until the next one fails.
#[unsafe(no_mangle)]
pub extern "C" fn gloop_error() -> *const c_char {
    MESSAGE.with(|message| message.borrow().as_ptr())
}

/// Opens a GPU by its number. Returns null on failure.
#[unsafe(no_mangle)]
pub extern "C" fn gloop_open(gpu: u32) -> *mut Runtime {
    object(Runtime::new(Options {
        gpu,
        ..Options::default()
    }))
}

/// Destroys a runtime, whose jobs must have ended.
///
/// # Safety
/// It is a runtime or null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_close(runtime: *mut Runtime) {
    if !runtime.is_null() {
        // SAFETY: it was created by `gloop_open`.
        drop(unsafe { Box::from_raw(runtime) });
    }
}

/// Loads code (a cubin, a fatbin, or PTX) of `bytes` bytes. Returns null on failure.
///
/// # Safety
/// The runtime is live, and there are this many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_load(
    runtime: *const Runtime,
    image: *const u8,
    bytes: usize,
) -> *mut Module {
    // SAFETY: passed on to the caller.
    let (runtime, image) = unsafe { (&*runtime, std::slice::from_raw_parts(image, bytes)) };
    object(runtime.load(image))
}

/// Unloads code that no job uses.
///
/// # Safety
/// It is a module or null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_unload(module: *mut Module) {
    if !module.is_null() {
        // SAFETY: it was created by `gloop_load`.
        drop(unsafe { Box::from_raw(module) });
    }
}

/// The shape of a launch, as in `Grid`. 0 blocks means as many as run concurrently.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GloopGrid {
    /// The number of logical blocks along x, y and z.
    pub logical: [u32; 3],
    /// The number of threads per block.
    pub threads: u32,
    /// The number of physical blocks.
    pub blocks: u32,
    /// The size of dynamic shared memory in bytes.
    pub shared: u32,
    /// The size of a block's kept shared memory in bytes.
    pub kept: u32,
    /// The number of pages per block.
    pub pages: u32,
    /// The size of a page in bytes.
    pub page_bytes: u32,
}

/// A parameter of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GloopArg {
    /// The bytes of the parameter, which are copied.
    pub value: *const u8,
    /// The number of bytes.
    pub bytes: usize,
}

/// Prepares a kernel whose first parameter is a `gloop::Ctl`, without launching it: for
/// [`gloop_resume`], [`gloop_finish`] or [`gloop_run`]. Returns null on failure.
///
/// # Safety
/// The runtime and the module are live, the name is terminated by a zero, and there are `count`
/// parameters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_prepare(
    runtime: *const Runtime,
    module: *const Module,
    name: *const c_char,
    grid: *const GloopGrid,
    args: *const GloopArg,
    count: usize,
) -> *mut Job {
    // SAFETY: passed on to the caller.
    let (runtime, module, name, grid) =
        unsafe { (&*runtime, &*module, CStr::from_ptr(name), *grid) };
    let mut values = Args::new();
    for index in 0..count {
        // SAFETY: there are `count` parameters, each of which has this many bytes.
        let bytes = unsafe {
            let arg = *args.add(index);
            std::slice::from_raw_parts(arg.value, arg.bytes)
        };
        values = values.with_bytes(bytes);
    }
    let whole = Grid {
        logical: grid.logical,
        blocks: (grid.blocks != 0).then_some(grid.blocks),
        shared: grid.shared,
        ..Grid::logical(1)
    };
    let whole = whole
        .threads(grid.threads)
        .kept(grid.kept)
        .pages(grid.pages, grid.page_bytes);
    let kernel: Result<Kernel, _> = module.kernel(&name.to_string_lossy());
    object(
        kernel
            .map_err(crate::job::Error::from)
            .and_then(|kernel| runtime.prepare(&kernel, whole, values)),
    )
}

/// The same, but launches the kernel. Not for a job that must only run in turns.
///
/// # Safety
/// As for [`gloop_prepare`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_launch(
    runtime: *const Runtime,
    module: *const Module,
    name: *const c_char,
    grid: *const GloopGrid,
    args: *const GloopArg,
    count: usize,
) -> *mut Job {
    // SAFETY: passed on to the caller; the job is new.
    unsafe {
        let job = gloop_prepare(runtime, module, name, grid, args, count);
        if job.is_null() || gloop_resume(job) == 0 {
            return job;
        }
        gloop_drop(job);
    }
    std::ptr::null_mut()
}

/// Stops a job and waits until the GPU is free.
///
/// # Safety
/// The job is live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_suspend(job: *mut Job) -> c_int {
    // SAFETY: passed on to the caller.
    outcome(unsafe { &mut *job }.suspend().map(|_| ()))
}

/// Continues a job.
///
/// # Safety
/// As for `gloop_suspend`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_resume(job: *mut Job) -> c_int {
    // SAFETY: passed on to the caller.
    outcome(unsafe { &mut *job }.resume())
}

/// Runs a job to its end.
///
/// # Safety
/// As for `gloop_suspend`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_finish(job: *mut Job) -> c_int {
    // SAFETY: passed on to the caller.
    outcome(unsafe { &mut *job }.finish())
}

/// Returns 1 if a job is done, and 0 otherwise.
///
/// # Safety
/// As for `gloop_suspend`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_is_done(job: *const Job) -> c_int {
    // SAFETY: passed on to the caller.
    c_int::from(unsafe { &*job }.state() == State::Done)
}

/// Destroys a job, which is stopped first if it is running.
///
/// # Safety
/// It is a job or null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_drop(job: *mut Job) {
    if !job.is_null() {
        // SAFETY: it was created by `gloop_launch` or `gloop_prepare`.
        drop(unsafe { Box::from_raw(job) });
    }
}

/// Joins the arbiter at a socket, or whichever arbiter is there later, as a client of this name and
/// weight (1 to 10,000). Can be called only once in a process, which belongs to the arbiter from
/// then on until it ends. Returns null on failure.
///
/// # Safety
/// The path and the name are terminated by a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_join(
    socket: *const c_char,
    client: *const c_char,
    weight: u32,
) -> *mut Member {
    // SAFETY: passed on to the caller.
    let (socket, client) = unsafe { (CStr::from_ptr(socket), CStr::from_ptr(client)) };
    let join = Join {
        name: client.to_string_lossy().into_owned(),
        weight,
        latency: 0,
        sliced: false,
    };
    let socket = PathBuf::from(OsStr::from_bytes(socket.to_bytes()));
    object(Member::join(socket, &join))
}

/// Runs a job to its end, in turns.
///
/// # Safety
/// The member and the job are live, and no other thread uses them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_run(member: *mut Member, job: *mut Job) -> c_int {
    // SAFETY: passed on to the caller.
    let (member, job) = unsafe { (&mut *member, &mut *job) };
    outcome(member.run(job))
}

/// The number of turns so far.
///
/// # Safety
/// The member is live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_turns(member: *const Member) -> u64 {
    // SAFETY: passed on to the caller.
    unsafe { &*member }.turns()
}

/// The state of a program's own work. Other numbers mean that it has failed.
const READY: c_int = 0;
const WAITING: c_int = 1;
const RUNNING: c_int = 2;
const DONE: c_int = 3;

/// A program's own work that runs in turns, as in [`Resumable`]. Its functions get the program's
/// pointer as their first argument.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GloopResumable {
    /// Begins or continues the work, in the turn with this number. Returns nonzero on failure.
    pub resume: Option<extern "C" fn(*mut c_void, u32) -> c_int>,
    /// Returns the state immediately: `READY`, `WAITING`, `RUNNING` or `DONE`.
    pub look: Option<extern "C" fn(*mut c_void) -> c_int>,
    /// The turn is over: the work has to leave the device soon.
    pub stop: Option<extern "C" fn(*mut c_void)>,
    /// Others want the device: the work has to leave it if it only waits. Null if it never waits.
    pub contend: Option<extern "C" fn(*mut c_void)>,
    /// Returns when there is something to do. Null if the work never waits.
    pub wait: Option<extern "C" fn(*mut c_void)>,
}

/// Why a program's own work has ended.
#[derive(Debug, thiserror::Error)]
enum OwnError {
    #[error("resume, look and stop of a gloop_resumable have to be there")]
    Missing,
    #[error("the program's own function has failed: {0}")]
    Failed(c_int),
    #[error(transparent)]
    Turns(#[from] turns::Error),
}

struct Own {
    functions: GloopResumable,
    context: *mut c_void,
}

impl Resumable for Own {
    type Error = OwnError;

    fn meet(&mut self, _: &Arc<Session>) {}

    fn resume_in(&mut self, turn: u32) -> Result<(), OwnError> {
        let resume = self.functions.resume.ok_or(OwnError::Missing)?;
        match resume(self.context, turn) {
            0 => Ok(()),
            code => Err(OwnError::Failed(code)),
        }
    }

    fn look(&mut self) -> Result<State, OwnError> {
        let look = self.functions.look.ok_or(OwnError::Missing)?;
        match look(self.context) {
            READY => Ok(State::Ready),
            WAITING => Ok(State::Waiting),
            RUNNING => Ok(State::Running),
            DONE => Ok(State::Done),
            code => Err(OwnError::Failed(code)),
        }
    }

    fn stop(&self) {
        if let Some(stop) = self.functions.stop {
            stop(self.context);
        }
    }

    fn contend(&self) {
        if let Some(contend) = self.functions.contend {
            contend(self.context);
        }
    }

    fn wait_for_more(&self) {
        if let Some(wait) = self.functions.wait {
            wait(self.context);
        }
    }
}

/// Runs a program's own work to its end, in turns: kernels that were launched by other means, and
/// that stop when they are told to.
///
/// # Safety
/// The member is live, no other thread uses it, and the functions may be called with this pointer
/// until this call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gloop_run_own(
    member: *mut Member,
    functions: *const GloopResumable,
    context: *mut c_void,
) -> c_int {
    // SAFETY: passed on to the caller.
    let (member, functions) = unsafe { (&mut *member, *functions) };
    outcome(match functions.stop {
        Some(_) => member.run(&mut Own { functions, context }),
        None => Err(OwnError::Missing),
    })
}

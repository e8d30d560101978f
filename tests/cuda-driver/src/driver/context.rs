//! Contexts, and each thread's stack of them.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    io::Write,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::ThreadId,
};

use cuda_definition::driver::types::{CUresult, CUstream, cudaError_enum};

use super::{
    Answer, Owner,
    memory::memory,
    objects::{self, Object},
    stream::{Mark, Stream, Task},
};
use crate::run::kernel::Output;

/// A context.
pub struct Context {
    pub handle: u64,
    /// Its device's number.
    pub device: i32,
    pub flags: AtomicU32,
    /// Devices whose memory it may access.
    pub peers: Mutex<BTreeSet<i32>>,
    /// Output of kernels.
    pub output: Output,
    /// The first error; it ended the context's work.
    error: AtomicU32,
    /// Held while a function of the program is called: as by NVIDIA's driver, one at a time.
    pub functions: Mutex<()>,
    legacy: OnceLock<Arc<Stream>>,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    all: Vec<Weak<Stream>>,
    per_thread: HashMap<ThreadId, Arc<Stream>>,
}

static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Records that `cuInit` was called.
pub fn initialise() {
    INITIALISED.store(true, Ordering::Release);
}

/// Returns an error before `cuInit`.
pub fn initialised() -> Answer {
    match INITIALISED.load(Ordering::Acquire) {
        true => Ok(()),
        false => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The thread's current context, whatever state it is in.
pub fn peek() -> Option<Arc<Context>> {
    CURRENT.with_borrow(|stack| stack.last().cloned())
}

/// The thread's current context.
pub fn current() -> Answer<Arc<Context>> {
    initialised()?;
    let context = peek().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

/// Pushes a context on the thread's stack.
pub fn push(context: Arc<Context>) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

/// Pops a context from the thread's stack.
pub fn pop() -> Option<Arc<Context>> {
    CURRENT.with_borrow_mut(Vec::pop)
}

impl Context {
    /// Creates a context with its default stream.
    pub fn create(device: i32, flags: u32) -> Answer<Arc<Self>> {
        let handle = objects::number();
        let context = Arc::new(Self {
            handle,
            device,
            flags: AtomicU32::new(flags),
            peers: Mutex::default(),
            output: Output::default(),
            error: AtomicU32::new(0),
            functions: Mutex::default(),
            legacy: OnceLock::new(),
            streams: Mutex::default(),
        });
        let stream = Stream::start(0, &context, true, 0)?;
        let _ = context.legacy.set(stream);
        objects::insert(handle, Object::Context(Arc::clone(&context)));
        Ok(context)
    }

    /// What memory that is allocated in it is allocated for.
    pub fn owner(&self) -> Owner {
        Owner {
            context: self.handle,
            device: self.device,
        }
    }

    /// Always returns an error after a fault.
    pub fn check(&self) -> Answer {
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            error => Err(cudaError_enum(error)),
        }
    }

    /// Records a fault.
    pub fn fail(&self, error: CUresult) {
        let _ = self
            .error
            .compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn legacy(&self) -> Answer<Arc<Stream>> {
        self.legacy
            .get()
            .cloned()
            .ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
    }

    /// Adds a stream to this context.
    pub fn add(self: &Arc<Self>, blocking: bool, priority: i32) -> Answer<Arc<Stream>> {
        let stream = Stream::start(objects::number(), self, blocking, priority)?;
        let mut streams = self.streams();
        streams.all.retain(|stream| stream.strong_count() > 0);
        streams.all.push(Arc::downgrade(&stream));
        drop(streams);
        objects::insert(stream.handle, Object::Stream(Arc::clone(&stream)));
        Ok(stream)
    }

    /// The stream of a handle: 0 and 1 are the legacy stream, 2 is the thread's own.
    pub fn stream(self: &Arc<Self>, handle: CUstream) -> Answer<Arc<Stream>> {
        match handle as u64 {
            0 | 1 => self.legacy(),
            2 => {
                let thread = std::thread::current().id();
                if let Some(stream) = self.streams().per_thread.get(&thread) {
                    return Ok(Arc::clone(stream));
                }
                let stream = self.add(true, 0)?;
                self.streams()
                    .per_thread
                    .insert(thread, Arc::clone(&stream));
                Ok(stream)
            }
            _ => {
                let stream = objects::stream(handle)?;
                let own = stream
                    .context
                    .upgrade()
                    .is_some_and(|context| context.handle == self.handle);
                if own {
                    Ok(stream)
                } else {
                    Err(CUresult::CUDA_ERROR_INVALID_HANDLE)
                }
            }
        }
    }

    /// Adds work to a stream, or to the graph that the stream is captured to.
    pub fn submit(self: &Arc<Self>, stream: &Arc<Stream>, task: Task) -> Answer<Option<Mark>> {
        self.submit_after(stream, Vec::new(), task)
    }

    /// Like [`Context::submit`], but the work also waits for other work.
    pub fn submit_after(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        mut waits: Vec<Mark>,
        task: Task,
    ) -> Answer<Option<Mark>> {
        self.check()?;
        if let Some(graph) = &*stream
            .capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
        {
            graph.valid()?;
            graph.push(task);
            return Ok(None);
        }
        stream.await_room();
        // One at a time: two streams waiting for each other's last work would deadlock.
        let streams = self.streams();
        let legacy = self.legacy()?;
        if Arc::ptr_eq(stream, &legacy) {
            let blocking = streams
                .all
                .iter()
                .filter_map(Weak::upgrade)
                .filter(|stream| stream.blocking);
            waits.extend(blocking.map(|stream| stream.mark()));
        } else if stream.blocking {
            waits.push(legacy.mark());
        }
        Ok(Some(stream.push(waits, task)))
    }

    /// Waits for all work in a stream.
    pub fn wait(&self, stream: &Arc<Stream>) -> Answer {
        if stream
            .capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
        {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.mark().wait();
        self.print();
        self.check()
    }

    /// Runs work in the legacy stream, and waits for it.
    pub fn run(self: &Arc<Self>, task: Task) -> Answer {
        let stream = self.legacy()?;
        if let Some(mark) = self.submit(&stream, task)? {
            mark.wait();
        }
        self.print();
        self.check()
    }

    /// Waits for all work in the context, as the program asks. A capture of one of its streams does not allow that.
    pub fn wait_for_all(&self) -> Answer {
        let streams = self.streams();
        for stream in streams.all.iter().filter_map(Weak::upgrade) {
            let capture = stream.capture.lock();
            if let Some(graph) = &*capture.unwrap_or_else(PoisonError::into_inner) {
                return graph.refuse();
            }
        }
        drop(streams);
        self.synchronize()
    }

    /// Refuses what waits for the context's blocking streams while one of them is captured, and invalidates that capture.
    pub fn disturb_captures(&self) -> Answer {
        let streams = self.streams();
        let blocking = streams.all.iter().filter_map(Weak::upgrade);
        for stream in blocking.filter(|stream| stream.blocking) {
            let capture = stream.capture.lock();
            if let Some(graph) = &*capture.unwrap_or_else(PoisonError::into_inner) {
                let _ = graph.refuse::<()>();
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        }
        Ok(())
    }

    /// Waits for all work in the context.
    pub fn synchronize(&self) -> Answer {
        let streams: Vec<_> = self
            .streams()
            .all
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for stream in streams.iter().chain(self.legacy.get()) {
            stream.mark().wait();
        }
        self.print();
        self.check()
    }

    /// Prints the output of kernels.
    pub fn print(&self) {
        let text = self.output.take();
        if !text.is_empty() {
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(&text).and_then(|()| out.flush());
        }
    }

    /// Ends all streams after their work is done, and frees the context's memory.
    pub fn destroy(&self) {
        let streams: Vec<_> = self
            .streams()
            .all
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for stream in streams.iter().chain(self.legacy.get()) {
            stream.mark().wait();
            stream.close();
            objects::remove(stream.handle);
        }
        self.streams().per_thread.clear();
        memory().end_context(self.handle);
        self.print();
        self.fail(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
}

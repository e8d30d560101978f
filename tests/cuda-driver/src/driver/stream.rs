//! Streams. Each has its own thread, so that work that fails to wait for other work is noticed.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Instant,
};

use cuda_definition::driver::types::CUresult;

use super::{Answer, context::Context, objects};

/// How much work a stream takes that is not done yet. As with the real driver, whoever submits more waits.
const ROOM: u64 = 1024;

/// Work that a stream does once, and a graph repeatedly.
pub type Task = Arc<dyn Fn(&Arc<Context>) -> Answer + Send + Sync>;

/// A point in a stream to wait for: all work up to a number.
#[derive(Clone)]
pub struct Mark {
    stream: Arc<Stream>,
    number: u64,
}

impl Mark {
    /// Whether the work is done.
    pub fn done(&self) -> bool {
        self.stream.state().completed >= self.number
    }

    /// Waits until the work is done.
    pub fn wait(&self) {
        let mut state = self.stream.state();
        while state.completed < self.number {
            state = self
                .stream
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Vec<Mark>, Task)>,
    submitted: u64,
    completed: u64,
    closed: bool,
}

/// A stream.
pub struct Stream {
    pub handle: u64,
    pub context: Weak<Context>,
    /// Whether it waits for the legacy stream, and the legacy stream for it.
    pub blocking: bool,
    pub priority: i32,
    state: Mutex<State>,
    changed: Condvar,
    /// The graph that collects its work instead of the stream doing it, during a capture.
    pub capture: Mutex<Option<Arc<Graph>>>,
}

impl Stream {
    /// Creates a stream and its thread.
    pub fn start(
        handle: u64,
        context: &Arc<Context>,
        blocking: bool,
        priority: i32,
    ) -> Answer<Arc<Self>> {
        let stream = Arc::new(Self {
            handle,
            context: Arc::downgrade(context),
            blocking,
            priority,
            state: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        });
        let own = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name(format!("cuda stream {handle:x}"));
        thread
            .spawn(move || own.work())
            .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the queue has room.
    pub fn await_room(&self) {
        let mut state = self.state();
        while state.submitted - state.completed >= ROOM {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Appends work to the queue.
    pub fn push(self: &Arc<Self>, waits: Vec<Mark>, task: Task) -> Mark {
        let mut state = self.state();
        state.queue.push_back((waits, task));
        state.submitted += 1;
        let number = state.submitted;
        drop(state);
        self.changed.notify_all();
        Mark {
            stream: Arc::clone(self),
            number,
        }
    }

    /// A mark for all work queued so far.
    pub fn mark(self: &Arc<Self>) -> Mark {
        Mark {
            stream: Arc::clone(self),
            number: self.state().submitted,
        }
    }

    /// Ends the thread after all work is done.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        loop {
            let mut state = self.state();
            let (waits, task) = loop {
                if let Some(next) = state.queue.pop_front() {
                    break next;
                }
                if state.closed {
                    return;
                }
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            for wait in waits {
                wait.wait();
            }
            // After a fault no work is executed, but everything that waits for it continues.
            if let Some(context) = self.context.upgrade()
                && context.check().is_ok()
                && let Err(error) = task(&context)
            {
                context.fail(error);
            }
            self.state().completed += 1;
            self.changed.notify_all();
        }
    }
}

/// An event.
#[derive(Default)]
pub struct Event {
    pub timed: bool,
    recorded: Mutex<Option<(Mark, Arc<OnceLock<Instant>>)>>,
    /// The graph that it was recorded in, if it was recorded during a capture.
    pub captured: Mutex<Option<Arc<Graph>>>,
}

impl Event {
    /// An event that was never recorded, and thus counts as done.
    pub fn new(timed: bool) -> Self {
        Self {
            timed,
            ..Self::default()
        }
    }

    fn recorded(&self) -> MutexGuard<'_, Option<(Mark, Arc<OnceLock<Instant>>)>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the work that it stands for.
    pub fn record(&self, mark: Mark, time: Arc<OnceLock<Instant>>) {
        *self.recorded() = Some((mark, time));
    }

    /// The work that it stands for, if it was recorded.
    pub fn mark(&self) -> Option<Mark> {
        self.recorded().as_ref().map(|(mark, _)| mark.clone())
    }

    /// Time at which the event was reached.
    pub fn time(&self) -> Option<Instant> {
        self.recorded()
            .as_ref()
            .and_then(|(_, time)| time.get().copied())
    }
}

/// Work in topological order.
#[derive(Default)]
pub struct Graph {
    pub handle: u64,
    /// Whether its capture is global: then all threads are refused calls that may disturb the capture.
    pub is_global: bool,
    /// Whether such a call has invalidated its capture, so that no graph results.
    is_invalid: AtomicBool,
    nodes: Mutex<Vec<(u64, Task)>>,
    /// For a clone: maps the original's nodes to its own.
    cloned: HashMap<u64, u64>,
    /// Objects that live as long as a graph keeps them, by handle.
    kept: Mutex<Vec<(u64, Kept)>>,
}

/// Decides whether, or which of, a node's graphs run.
pub struct Condition {
    pub value: AtomicU32,
    /// The value at the start of each launch, if one is set.
    pub default: Option<u32>,
}

/// Something that only matters when it is dropped.
pub type Kept = Arc<dyn Any + Send + Sync>;

impl Graph {
    /// An empty graph.
    pub fn new(handle: u64) -> Self {
        Self {
            handle,
            ..Self::default()
        }
    }

    /// A graph that is being captured.
    pub fn captured(handle: u64, is_global: bool) -> Self {
        Self {
            handle,
            is_global,
            ..Self::default()
        }
    }

    /// A graph with the work and kept objects that another has so far.
    pub fn copy(handle: u64, of: &Self) -> Self {
        Self {
            handle,
            nodes: Mutex::new(of.all().clone()),
            kept: Mutex::new(of.kept().clone()),
            ..Self::default()
        }
    }

    /// A graph with the work and kept objects that another has so far, but with its own nodes.
    pub fn clone_of(handle: u64, of: &Self) -> Self {
        let mut cloned = HashMap::new();
        let nodes = of.all().clone().into_iter().map(|(node, task)| {
            let own = objects::number();
            cloned.insert(node, own);
            (own, task)
        });
        let nodes = Mutex::new(nodes.collect());
        Self {
            handle,
            nodes,
            kept: Mutex::new(of.kept().clone()),
            cloned,
            ..Self::default()
        }
    }

    /// The clone's node for a node of the original.
    pub fn in_clone(&self, node: u64) -> Option<u64> {
        self.cloned.get(&node).copied()
    }

    /// Refuses a call that a capture to this graph does not allow, and invalidates the capture.
    pub fn refuse<T>(&self) -> Answer<T> {
        self.is_invalid.store(true, Ordering::Release);
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Returns an error if the capture to this graph has been invalidated.
    pub fn valid(&self) -> Answer {
        match self.is_invalid.load(Ordering::Acquire) {
            true => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            false => Ok(()),
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<(u64, Task)>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(u64, Kept)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work, and returns the node's handle.
    pub fn push(&self, task: Task) -> u64 {
        let node = objects::number();
        self.all().push((node, task));
        node
    }

    /// Replaces a node's work. Returns whether the graph has the node.
    pub fn replace(&self, node: u64, task: Task) -> bool {
        let mut all = self.all();
        let found = all.iter_mut().find(|(one, _)| *one == node);
        found.map(|(_, work)| *work = task).is_some()
    }

    /// Takes over another graph's work in its own nodes, and keeps what that graph keeps. Returns whether the graphs
    /// have the same number of nodes.
    pub fn update(&self, of: &Self) -> bool {
        let work = of.nodes();
        let mut all = self.all();
        if all.len() != work.len() {
            return false;
        }
        let nodes = all.iter_mut().map(|(_, own)| own);
        nodes.zip(work).for_each(|(own, work)| *own = work);
        drop(all);
        let before = std::mem::replace(&mut *self.kept(), of.kept().clone());
        // Dropping it may call the program.
        drop(before);
        true
    }

    /// Handles of all nodes so far, in execution order.
    pub fn handles(&self) -> Vec<u64> {
        self.all().iter().map(|(node, _)| *node).collect()
    }

    /// Keeps an object alive.
    pub fn keep(&self, handle: u64, kept: Kept) {
        self.kept().push((handle, kept));
    }

    /// Stops keeping an object. Returns whether it was kept.
    pub fn release(&self, handle: u64) -> bool {
        let mut kept = self.kept();
        let place = kept.iter().position(|(one, _)| *one == handle);
        let gone = place.map(|place| kept.remove(place));
        // Dropping it may call the program.
        drop(kept);
        gone.is_some()
    }

    /// All work so far.
    pub fn nodes(&self) -> Vec<Task> {
        self.all()
            .iter()
            .map(|(_, task)| Arc::clone(task))
            .collect()
    }
}

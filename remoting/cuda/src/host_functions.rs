//! Client functions that are called in stream order.
//!
//! The driver's thread tells the serving thread that a function is due, and the serving thread tells the client. The
//! driver's thread continues once the client has set a word in the window, whatever the serving thread is doing
//! meanwhile.
//!
//! Graphs call a function with each of their launches. What the driver holds for it is released with the last graph
//! that uses it, by means of a user object.

use std::{
    collections::HashMap,
    ffi::c_void,
    ptr::null_mut,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind, LEGACY,
    calls::{AddHostNode, FunctionTurn, HostFunction, SetHostNode},
    codes,
};
use remoting_session::notice::{Board, Notice};
use remoting_transport::window::Window;

use super::{
    Server,
    backend::Submitted,
    driver::{Api, cu, outcome},
    user_objects,
};

/// Notices from the driver's threads about client functions.
#[derive(Clone, Copy, Debug)]
pub enum News {
    /// A function has returned.
    Returned,
    /// A graph calls the function of this number.
    Due(u64),
    /// Neither any graph nor the client refers to this function or user object any more.
    Gone(u64),
}

/// The word's value while the function has not returned.
const DUE: u32 = 0;
/// The word's value from the client when the function has returned.
pub(super) const RETURNED: u32 = 1;
/// The word's value once this side has seen the return.
pub(super) const SEEN: u32 = 2;
/// The word's value if the client is to copy at once.
pub(super) const IDLE: u32 = 3;
/// How long the word is polled before the driver's thread sleeps between polls.
const EAGER: Duration = Duration::from_micros(100);
/// How long it then sleeps between polls.
const NAP: Duration = Duration::from_micros(50);
/// Up to this many launches that may call functions are kept although they may be over.
pub(super) const FEW: usize = 64;
/// Maximum number of functions that the driver may hold at a time.
const MOST: usize = 64 << 10;

/// The number of client functions that the driver holds and that have not returned, by driver context.
#[derive(Debug, Default)]
pub(super) struct Pending(HashMap<usize, Arc<AtomicUsize>>);

impl Pending {
    /// Adds one, and returns its counter.
    fn add(&mut self, context: usize) -> Result<Arc<AtomicUsize>, i32> {
        let all = self.0.values().map(|count| count.load(Ordering::Acquire));
        if all.sum::<usize>() >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        let count = self.0.entry(context).or_default();
        count.fetch_add(1, Ordering::AcqRel);
        Ok(Arc::clone(count))
    }

    /// Forgets a destroyed context, whose remaining functions were never called because its work had failed.
    pub(super) fn forget_context(&mut self, context: usize) {
        self.0.remove(&context);
    }

    /// Whether any function will still be called: after failed work the driver calls none. May change the current
    /// context. A query of the legacy stream would invalidate captures, if there are any.
    pub(super) fn any(&mut self, api: &Api, captures: bool) -> bool {
        self.0.retain(|_, count| count.load(Ordering::Acquire) > 0);
        self.0.keys().any(|context| {
            api.enter(*context);
            if captures {
                return api.has_not_failed();
            }
            let legacy = LEGACY as usize as CUstream;
            matches!(cu!(api, cuStreamQuery(legacy)), 0 | codes::NOT_READY)
        })
    }
}

/// What the driver holds for a function.
struct Leaf {
    board: Arc<Board<News>>,
    pending: Arc<AtomicUsize>,
    number: u64,
    done: *const AtomicU32,
    /// Keeps the word mapped.
    _window: Arc<Window>,
}

/// Called by the driver, unless work has failed.
unsafe extern "C" fn due(data: *mut c_void) {
    // SAFETY: `host_function` made the data for this very call.
    unsafe { tell(data, 0) };
}

/// Called by the driver in any case.
unsafe extern "C" fn due_with(_: CUstream, status: CUresult, data: *mut c_void) {
    // SAFETY: as above.
    unsafe { tell(data, status.0.cast_signed()) };
}

/// # Safety
/// `host_function` made `data` for this very call.
unsafe fn tell(data: *mut c_void, status: i32) {
    // SAFETY: the caller's promise.
    let leaf = unsafe { Box::from_raw(data.cast::<Leaf>()) };
    leaf.board.leave(Notice::Callback(leaf.number, status));
    // SAFETY: a word of the window, which the leaf keeps mapped.
    wait_for(unsafe { &*leaf.done });
    leaf.pending.fetch_sub(1, Ordering::AcqRel);
    leaf.board.leave(Notice::Backend(News::Returned));
}

/// Waits until the client has set a word, and acknowledges it.
fn wait_for(done: &AtomicU32) {
    let start = Instant::now();
    while done.load(Ordering::Acquire) == DUE {
        if start.elapsed() < EAGER {
            std::hint::spin_loop();
        } else {
            thread::sleep(NAP);
        }
    }
    // The client may now reuse the word.
    done.store(SEEN, Ordering::Release);
}

/// What the driver holds for a function that graphs call.
struct Lasting {
    board: Arc<Board<News>>,
    all: Arc<AtomicUsize>,
    number: u64,
    done: *const AtomicU32,
    /// Serializes concurrent launches, since there is only one word.
    turn: Mutex<()>,
    /// Keeps the word mapped.
    _window: Arc<Window>,
}

impl Drop for Lasting {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::AcqRel);
        self.board.leave(Notice::Backend(News::Gone(self.number)));
    }
}

/// Called by the driver with each launch.
unsafe extern "C" fn due_again(data: *mut c_void) {
    // SAFETY: made by `lasting`, and alive for as long as a graph holds it.
    let lasting = unsafe { &*data.cast::<Lasting>() };
    let _turn = lasting.turn.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: a word of the window, which is kept mapped.
    let done = unsafe { &*lasting.done };
    done.store(DUE, Ordering::Release);
    lasting
        .board
        .leave(Notice::Backend(News::Due(lasting.number)));
    wait_for(done);
}

impl Server {
    pub(super) fn host_function(&mut self, call: &HostFunction) -> Result<(), i32> {
        let submitted = self.submit_to(call.context, call.stream)?;
        let done = self.word(call.done)?;
        // A graph calls the function repeatedly, and the client must be prepared for that.
        let captured = self.is_captured(submitted.raw);
        if captured != call.lasting {
            return Err(codes::NOT_SUPPORTED);
        }
        if captured {
            return self.capture_function(submitted.raw as CUstream, call.number, call.done);
        }
        if call.turn == FunctionTurn::Copy() && self.hold(submitted, call)? {
            return Ok(());
        }
        let pending = self.backend.pending.add(submitted.context)?;
        let leaf = Box::into_raw(Box::new(Leaf {
            board: Arc::clone(&self.board),
            pending,
            number: call.number,
            done,
            _window: Arc::clone(&self.window),
        }));
        let stream = submitted.raw as CUstream;
        let api = &self.backend.api;
        let code = match call.turn {
            FunctionTurn::Intact() => cu!(api, cuLaunchHostFunc(stream, Some(due), leaf.cast())),
            FunctionTurn::Always() | FunctionTurn::Copy() => cu!(
                api,
                cuStreamAddCallback(stream, Some(due_with), leaf.cast(), 0)
            ),
        };
        if code == 0 {
            self.expected += 1;
            self.backend.uncalled.insert(call.number, submitted.context);
        } else {
            // SAFETY: the driver has refused the data, so nobody else holds it.
            let leaf = unsafe { Box::from_raw(leaf) };
            leaf.pending.fetch_sub(1, Ordering::AcqRel);
        }
        outcome(code)
    }

    /// Looks up a word of the window.
    pub(super) fn word(&self, at: u64) -> Result<*const AtomicU32, i32> {
        let word = self.window.at(at, 4).filter(|_| at.is_multiple_of(4));
        Ok(word.ok_or(codes::INVALID_VALUE)?.cast::<AtomicU32>())
    }

    /// Makes what the driver holds for a function that graphs call.
    fn lasting(&mut self, number: u64, done: u64) -> Result<Box<Lasting>, i32> {
        let done = self.word(done)?;
        let all = Arc::clone(&self.backend.lasting);
        if all.load(Ordering::Acquire) >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        all.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(Lasting {
            board: Arc::clone(&self.board),
            all,
            number,
            done,
            turn: Mutex::new(()),
            _window: Arc::clone(&self.window),
        }))
    }

    /// Makes a graph call a function: `add` adds it to the graph. If that fails, the function is dropped.
    fn kept_by(
        &self,
        graph: CUgraph,
        lasting: Box<Lasting>,
        add: impl FnOnce(*mut c_void) -> i32,
    ) -> Result<(), i32> {
        let api = &self.backend.api;
        let (object, data) = user_objects::keep(api, graph, lasting)?;
        let added = add(data);
        if added != 0 {
            cu!(api, cuGraphReleaseUserObject(graph, object, 1));
        }
        outcome(added)
    }

    fn capture_function(&mut self, stream: CUstream, number: u64, done: u64) -> Result<(), i32> {
        let lasting = self.lasting(number, done)?;
        let api = &self.backend.api;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph = null_mut();
        outcome(cu!(
            api,
            cuStreamGetCaptureInfo_v2(
                stream,
                &raw mut status,
                null_mut(),
                &raw mut graph,
                null_mut(),
                null_mut(),
            )
        ))?;
        self.kept_by(graph, lasting, |data| {
            cu!(api, cuLaunchHostFunc(stream, Some(due_again), data))
        })
    }

    pub(super) fn add_host_node(&mut self, call: &AddHostNode) -> Result<u32, i32> {
        self.backend.objects.check_room()?;
        self.enter(call.context)?;
        let graph = self.backend.objects.get(Kind::Graph, call.graph)?.raw as CUgraph;
        let after = self.nodes(&call.after)?;
        let lasting = self.lasting(call.number, call.done)?;
        let mut node = null_mut();
        self.kept_by(graph, lasting, |data| {
            let params = CUDA_HOST_NODE_PARAMS {
                r#fn: Some(due_again),
                userData: data,
            };
            cu!(
                self.backend.api,
                cuGraphAddHostNode(
                    &raw mut node,
                    graph,
                    after.as_ptr(),
                    after.len(),
                    &raw const params,
                )
            )
        })?;
        let objects = &mut self.backend.objects;
        Ok(objects.number(Kind::Node, node as usize, 0, call.graph))
    }

    pub(super) fn set_host_node(&mut self, call: &SetHostNode) -> Result<(), i32> {
        self.enter(call.context)?;
        let objects = &self.backend.objects;
        let node = objects.get(Kind::Node, call.node)?;
        let (raw, owner) = (node.raw as CUgraphNode, node.owner);
        let params = |data| CUDA_HOST_NODE_PARAMS {
            r#fn: Some(due_again),
            userData: data,
        };
        if call.executable == 0 {
            let graph = objects.get(Kind::Graph, owner)?.raw as CUgraph;
            let lasting = self.lasting(call.number, call.done)?;
            let api = &self.backend.api;
            return self.kept_by(graph, lasting, |data| {
                let params = params(data);
                cu!(api, cuGraphHostNodeSetParams(raw, &raw const params))
            });
        }
        let executable = objects.get(Kind::Executable, call.executable)?.raw as CUgraphExec;
        // Executable graphs retain no user objects, so the data stays for as long as the session.
        let data = Box::into_raw(self.lasting(call.number, call.done)?);
        let params = params(data.cast());
        let code = cu!(
            self.backend.api,
            cuGraphExecHostNodeSetParams(executable, raw, &raw const params)
        );
        if code != 0 {
            // SAFETY: the driver has refused the data, so nobody else holds it.
            drop(unsafe { Box::from_raw(data) });
        }
        outcome(code)
    }

    /// Records a launch of a graph that may call client functions.
    pub(super) fn note_calling(&mut self, submitted: Submitted) {
        let any = self.backend.lasting.load(Ordering::Acquire) > 0;
        if !any || self.is_captured(submitted.raw) {
            return;
        }
        let backend = &mut self.backend;
        // As often as the list has doubled: nothing else may ever look.
        if backend.calling.len() >= backend.most_calling {
            backend.forget_called();
            backend.most_calling = FEW.max(2 * backend.calling.len());
            backend.api.enter(submitted.context);
        }
        if let Ok(fence) = backend.api.fence(submitted.context, submitted.raw) {
            backend.calling.push(fence);
            // Deferred requests continue only when this launch is over.
            if !backend.put_off.is_empty() {
                self.watch(fence, None);
            }
        }
    }
}

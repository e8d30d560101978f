//! What waits while a client function is due, with the stand-in for the driver.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use remoting_proto::{
    apis::cuda::{
        calls::{
            Allocate, ContextSynchronize, EventSynchronize, Free, FunctionTurn, HostFunction,
            LaunchGraph, Post, Request, Source, StreamSynchronize,
        },
        codes,
    },
    wire::{
        Flags, Wire,
        messages::{ANSWER, CALLBACK, Call},
    },
};
use remoting_session::backend::Backend;
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    port_bell::Waker,
    ring::Consumer,
    window::{self, Slice, Window},
};

use super::{
    Server,
    backend::Submitted,
    driver::Api,
    host_functions::{IDLE, RETURNED, SEEN},
    testing,
};

/// Longer than anything takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// A worker before the stand-in, with a context and a stream for a client function.
struct Worker {
    server: Server,
    taken: Receiver<Slice, Waker>,
    answers: Receiver<Slice, Futex>,
    window: Arc<Window>,
    body: Vec<u8>,
    context: u32,
    stream: u32,
    sequence: u64,
}

impl Worker {
    fn new() -> Self {
        Self::before(testing::driver())
    }

    fn before(driver: Api) -> Self {
        let (mut server, taken, window) = testing::server_of(driver, window::SMALLEST);
        let patience = Duration::from_millis(1);
        let answers = Receiver::new(Consumer::new(window.answers(), Futex { patience }));
        let context = testing::made(&mut server, 0, "cuCtxCreate_v2", &[0, 0]);
        let stream = testing::made(&mut server, context, "cuStreamCreate", &[1]);
        Self {
            server,
            taken,
            answers,
            window,
            body: Vec::new(),
            context,
            stream,
            sequence: 0,
        }
    }

    fn post_forwarded(&mut self, symbol: &str, words: &[u64]) {
        let (function, arguments) = testing::arguments(symbol, words);
        let context = self.context;
        let call = Post {
            context,
            function,
            arguments,
        };
        let header = testing::posted(Post::OPCODE);
        self.server.serve(header, Request::Post(call)).unwrap();
    }

    /// Sends a request that is to be answered; its number.
    fn ask(&mut self, opcode: u16, request: Request) -> u64 {
        self.sequence += 1;
        let mut header = testing::posted(opcode);
        (header.flags, header.sequence) = (Flags::ANSWER, self.sequence);
        self.server.serve(header, request).unwrap();
        self.sequence
    }

    fn allocate(&mut self, source: Source) -> u64 {
        let call = Allocate {
            context: self.context,
            size: 4096,
            source,
        };
        self.ask(Allocate::OPCODE, Request::Allocate(call))
    }

    /// Submits a client function, which is due until [`Self::set`].
    fn call_function(&mut self) {
        self.call(self.stream, FunctionTurn::Intact(), 0);
    }

    /// Submits a client function, which is due until [`Self::word`] has been set.
    fn call(&mut self, stream: u32, turn: FunctionTurn, word: u64) {
        self.word(word).store(0, Ordering::SeqCst);
        let call = HostFunction {
            context: self.context,
            stream,
            number: word + 1,
            done: self.window.data() + 4 * word,
            lasting: false,
            turn,
        };
        let header = testing::posted(HostFunction::OPCODE);
        let request = Request::HostFunction(call);
        self.server.serve(header, request).unwrap();
    }

    fn set(&self) {
        self.word(0).store(1, Ordering::SeqCst);
    }

    fn word(&self, index: u64) -> &AtomicU32 {
        let word = self.window.at(self.window.data() + 4 * index, 4);
        // SAFETY: an aligned word of the window, which all access atomically.
        unsafe { &*word.unwrap().cast::<AtomicU32>() }
    }

    /// Serves until the client is told that this function is due; with which status.
    fn await_due(&mut self, number: u64) -> i32 {
        loop {
            while let Some(header) = self.answers.poll(&mut self.body).unwrap() {
                let called = <(u64, i32)>::from_bytes(&self.body);
                if header.opcode == CALLBACK
                    && let Ok((called, status)) = called
                    && called == number
                {
                    return status;
                }
            }
            self.server.turn(&mut self.taken, &mut self.body).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a word has this value.
    fn await_word(&self, index: u64, value: u32) {
        while self.word(index).load(Ordering::SeqCst) != value {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The number of the next call that is answered, if one has been.
    fn answered(&mut self) -> Option<u64> {
        while let Some(header) = self.answers.poll(&mut self.body).unwrap() {
            if header.opcode == ANSWER {
                assert_eq!(self.body[..4], [0; 4], "{header:?}");
                return Some(header.sequence);
            }
        }
        None
    }

    /// Serves until this call is answered.
    fn await_answer(&mut self, sequence: u64) {
        while self.answered() != Some(sequence) {
            self.server.turn(&mut self.taken, &mut self.body).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Fails if this does not end.
fn within_patience(work: impl FnOnce() + Send + 'static) {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        work();
        let _ = tell.send(());
    });
    told.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn work_that_is_left_is_not_waited_for_while_a_function_is_due() {
    within_patience(|| {
        let mut worker = Worker::new();
        let call = Allocate {
            context: worker.context,
            size: 64,
            source: Source::Device(),
        };
        let word = worker.server.allocate(&call).unwrap();
        let context = worker.context;
        let left = testing::made(&mut worker.server, context, "cuStreamCreate", &[1]);
        worker.post_forwarded("cuStreamWaitValue32_v2", &[left.into(), word, 1, 0]);
        worker.post_forwarded("cuStreamDestroy_v2", &[left.into()]);
        assert!(worker.server.backend.left.contains(&context));
        worker.call_function();
        let request = Request::ContextSynchronize(ContextSynchronize {
            context,
            spares_captures: false,
        });
        let waits = worker.ask(ContextSynchronize::OPCODE, request);
        assert_eq!(worker.answered(), None);
        let stream = worker.stream.into();
        worker.post_forwarded("cuStreamWriteValue32_v2", &[stream, word, 1, 0]);
        worker.set();
        worker.await_answer(waits);
    });
}

#[test]
fn what_cannot_be_waited_for_is_not_said_to_be_over_before_memory_is_given_up() {
    within_patience(|| {
        let mut driver = testing::driver();
        driver.functions.cuEventCreate = None;
        let mut worker = Worker::before(driver);
        let request = Request::ContextSynchronize(ContextSynchronize {
            context: worker.context,
            spares_captures: true,
        });
        let asked = worker.ask(ContextSynchronize::OPCODE, request);
        let header = worker.answers.poll(&mut worker.body).unwrap().unwrap();
        assert_eq!((header.opcode, header.sequence), (ANSWER, asked));
        let answer = Result::<(), i32>::from_bytes(&worker.body).unwrap();
        assert_eq!(answer, Err(codes::NOT_READY));
    });
}

#[test]
fn refused_work_is_told_by_a_wait_of_the_program_alone() {
    within_patience(|| {
        let mut worker = Worker::new();
        let (context, stream) = (worker.context, worker.stream);
        let posted = testing::posted(Post::OPCODE);
        let refused = codes::INVALID_VALUE;
        worker.server.fail(posted, context, refused).unwrap();
        // A stream that is destroyed while it has work leaves the wait to the driver.
        for leaves in [false, true] {
            if leaves {
                worker.server.backend.left.insert(context);
            }
            let call = ContextSynchronize {
                context,
                spares_captures: true,
            };
            let request = Request::ContextSynchronize(call);
            let asked = worker.ask(ContextSynchronize::OPCODE, request);
            worker.await_answer(asked);
        }
        let request = Request::StreamSynchronize(StreamSynchronize { context, stream });
        let asked = worker.ask(StreamSynchronize::OPCODE, request);
        loop {
            match worker.answers.poll(&mut worker.body).unwrap() {
                Some(header) if header.sequence == asked => break,
                _ => worker.server.turn(&mut worker.taken, &mut worker.body),
            }
            .unwrap();
        }
        let answer = Result::<(), i32>::from_bytes(&worker.body).unwrap();
        assert_eq!(answer, Err(refused));
    });
}

#[test]
fn memory_in_stream_order_does_not_wait_for_functions() {
    within_patience(|| {
        let mut worker = Worker::new();
        let stream = Source::Stream(worker.stream);
        let call = Allocate {
            context: worker.context,
            size: 4096,
            source: Source::Stream(worker.stream),
        };
        let address = worker.server.allocate(&call).unwrap();
        worker.call_function();
        let allocated = worker.allocate(stream);
        assert_eq!(worker.answered(), Some(allocated));
        let free = Free {
            context: worker.context,
            address,
            stream: Some(worker.stream),
        };
        let freed = worker.ask(Free::OPCODE, Request::Free(free));
        assert_eq!(worker.answered(), Some(freed));
        // The driver may wait for all work in this.
        let waits = worker.allocate(Source::Device());
        assert_eq!(worker.answered(), None);
        worker.set();
        worker.await_answer(waits);
    });
}

#[test]
fn copies_of_the_client_do_not_wait_for_its_functions() {
    within_patience(|| {
        let mut worker = Worker::new();
        let context = worker.context;
        // It does not return until the end.
        worker.call_function();
        worker.await_due(1);
        let other = testing::made(&mut worker.server, context, "cuStreamCreate", &[1]);
        // A stream without work is not held.
        worker.call(other, FunctionTurn::Copy(), 1);
        assert_eq!(worker.word(1).load(Ordering::SeqCst), IDLE);
        worker.word(3).store(0, Ordering::SeqCst);
        let gate = std::ptr::from_ref(worker.word(3)) as u64;
        worker.post_forwarded("cuStreamWaitValue32_v2", &[other.into(), gate, 1, 0]);
        for index in [1, 2] {
            worker.call(other, FunctionTurn::Copy(), index);
        }
        worker.word(3).store(1, Ordering::SeqCst);
        for index in [1, 2] {
            assert_eq!(worker.await_due(index + 1), 0);
            worker.word(index).store(RETURNED, Ordering::SeqCst);
            worker.await_word(index, SEEN);
        }
        worker.set();
    });
}

#[test]
fn a_function_that_is_due_invalidates_no_capture() {
    within_patience(|| {
        let mut worker = Worker::new();
        let context = worker.context;
        let captured = testing::made(&mut worker.server, context, "cuStreamCreate", &[0]);
        // In relaxed mode.
        worker.post_forwarded("cuStreamBeginCapture_v2", &[captured.into(), 2]);
        worker.call_function();
        assert!(worker.server.backend.captures.is_any());
        let waits = worker.allocate(Source::Device());
        assert_eq!(worker.answered(), None);
        worker.set();
        worker.await_answer(waits);
        let mut graph = 0u64;
        let words = [captured.into(), &raw mut graph as u64];
        let (function, arguments) = testing::arguments("cuStreamEndCapture", &words);
        let ended = worker.server.forward(context, function, &arguments.0);
        assert!(ended.is_ok(), "{ended:?}");
    });
}

impl Worker {
    /// A word that [`Self::waits_for_gate`] waits for: its address.
    fn gate(&self) -> u64 {
        std::ptr::from_ref(self.word(3)) as u64
    }

    /// Adds to a stream what is done when the gate is one, and so much behind it.
    fn waits_for_gate(&mut self, stream: u32, behind: usize) {
        let gate = self.gate();
        self.post_forwarded("cuStreamWaitValue32_v2", &[stream.into(), gate, 1, 0]);
        for _ in 0..behind {
            self.writes(stream);
        }
    }

    /// Has a stream write a word that nobody reads.
    fn writes(&mut self, stream: u32) {
        let word = std::ptr::from_ref(self.word(4)) as u64;
        self.post_forwarded("cuStreamWriteValue32_v2", &[stream.into(), word, 1, 0]);
    }

    fn other(&mut self) -> u32 {
        testing::made(&mut self.server, self.context, "cuStreamCreate", &[1])
    }

    fn is_busy(&self) -> bool {
        self.server.backend.is_busy()
    }
}

#[test]
fn streams_with_room_take_what_others_wait_for() {
    within_patience(|| {
        let mut worker = Worker::new();
        worker.word(3).store(0, Ordering::SeqCst);
        worker.waits_for_gate(worker.stream, 0);
        worker.call_function();
        for _ in 0..4 {
            let other = worker.other();
            worker.waits_for_gate(other, 600);
        }
        assert!(!worker.is_busy());
        let (last, gate) = (worker.other(), worker.gate());
        worker.post_forwarded("cuStreamWriteValue32_v2", &[last.into(), gate, 1, 0]);
        worker.await_due(1);
        worker.set();
    });
}

#[test]
fn work_before_what_is_to_be_told_takes_room() {
    within_patience(|| {
        let mut worker = Worker::new();
        worker.word(3).store(0, Ordering::SeqCst);
        let full = worker.other();
        worker.waits_for_gate(full, 950);
        assert!(!worker.is_busy());
        worker.waits_for_gate(worker.stream, 0);
        worker.call_function();
        worker.writes(full);
        assert!(worker.is_busy());
        worker.word(3).store(1, Ordering::SeqCst);
        while worker.is_busy() {
            worker
                .server
                .turn(&mut worker.taken, &mut worker.body)
                .unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        worker.await_due(1);
        worker.set();
    });
}

#[test]
fn a_call_that_waits_for_room_keeps_no_other_threads_calls() {
    within_patience(|| {
        let mut worker = Worker::new();
        worker.word(3).store(0, Ordering::SeqCst);
        let full = worker.other();
        worker.waits_for_gate(full, 950);
        worker.waits_for_gate(worker.stream, 0);
        worker.call_function();
        let waits = worker.allocate(Source::Stream(full));
        assert!(worker.answered().is_none() && !worker.is_busy());
        let (last, gate) = (worker.other(), worker.gate());
        worker.post_forwarded("cuStreamWriteValue32_v2", &[last.into(), gate, 1, 0]);
        worker.await_answer(waits);
        worker.set();
    });
}

#[test]
fn functions_of_a_context_that_has_ended_are_not_expected() {
    within_patience(|| {
        let mut worker = Worker::new();
        worker.word(3).store(0, Ordering::SeqCst);
        worker.waits_for_gate(worker.stream, 0);
        worker.call_function();
        // It is called while the driver ends the context, and the client has not been told by then.
        worker.word(3).store(1, Ordering::SeqCst);
        worker.set();
        let (function, bytes) = testing::arguments("cuCtxDestroy_v2", &[worker.context.into()]);
        worker.server.forward(0, function, &bytes.0).unwrap();
        assert_eq!(worker.server.expected, 0);
        worker.await_due(1);
        assert_eq!(worker.server.expected, 0);
    });
}

/// What the only thread of a client that has made calls may wait for: all behind a word that another thread's first call
/// writes.
#[test]
fn waits_of_an_only_thread_leave_the_ring_to_the_first_call_of_another() {
    within_patience(|| {
        let mut worker = Worker::new();
        let (context, stream) = (worker.context, worker.stream);
        let allocate = Allocate {
            context,
            size: 64,
            source: Source::Device(),
        };
        let address = worker.server.allocate(&allocate).unwrap();
        let event = testing::made(&mut worker.server, context, "cuEventCreate", &[2]);
        let other = worker.other();
        let spares_captures = false;
        let waits = [
            (
                StreamSynchronize::OPCODE,
                Request::StreamSynchronize(StreamSynchronize { context, stream }),
            ),
            (
                ContextSynchronize::OPCODE,
                Request::ContextSynchronize(ContextSynchronize {
                    context,
                    spares_captures,
                }),
            ),
            (
                EventSynchronize::OPCODE,
                Request::EventSynchronize(EventSynchronize { context, event }),
            ),
            (
                Free::OPCODE,
                Request::Free(Free {
                    context,
                    address,
                    stream: None,
                }),
            ),
        ];
        for (opcode, request) in waits {
            worker.word(3).store(0, Ordering::SeqCst);
            worker.waits_for_gate(stream, 0);
            worker.post_forwarded("cuEventRecord", &[event.into(), stream.into()]);
            // As if no wait had taken long.
            worker.server.last_wait = Duration::ZERO;
            worker.sequence += 1;
            let mut header = testing::posted(opcode);
            header.flags = Flags::ANSWER.with(Flags::ALONE);
            header.sequence = worker.sequence;
            worker.server.serve(header, request).unwrap();
            assert_eq!(worker.answered(), None);
            let gate = worker.gate();
            worker.post_forwarded("cuStreamWriteValue32_v2", &[other.into(), gate, 1, 0]);
            // The stand-in frees memory when the work of all contexts is done, those of other tests included.
            if opcode != Free::OPCODE {
                worker.await_answer(header.sequence);
            }
        }
    });
}

#[test]
fn launches_that_are_over_are_forgotten_beside_functions_of_graphs() {
    within_patience(|| {
        let mut worker = Worker::new();
        let (context, stream) = (worker.context, worker.stream);
        let graph = testing::made(&mut worker.server, context, "cuGraphCreate", &[0]);
        let words = [graph.into(), 0];
        let symbol = "cuGraphInstantiateWithFlags";
        let graph = testing::made(&mut worker.server, context, symbol, &words);
        // As if some graph called a function.
        worker.server.backend.lasting.store(1, Ordering::Release);
        for _ in 0..20 {
            for _ in 0..50 {
                let launch = LaunchGraph {
                    context,
                    stream,
                    graph,
                };
                let header = testing::posted(LaunchGraph::OPCODE);
                let request = Request::LaunchGraph(launch);
                worker.server.serve(header, request).unwrap();
            }
            let call = StreamSynchronize { context, stream };
            let request = Request::StreamSynchronize(call);
            let asked = worker.ask(StreamSynchronize::OPCODE, request);
            worker.await_answer(asked);
        }
        let left = worker.server.backend.calling.len();
        assert!(left < 200, "{left}");
    });
}

#[test]
fn legacy_streams_of_two_contexts_are_two_queues_for_limits() {
    let submitted = |context, raw| Submitted {
        context,
        owner: 1,
        stream: 1,
        raw,
        refused: 0,
    };
    let (one, other) = (0x1000, 0x2000);
    for legacy in [0, 1] {
        assert_ne!(
            submitted(one, legacy).queue(),
            submitted(other, legacy).queue()
        );
        assert_eq!(submitted(one, legacy).queue(), submitted(one, 0).queue());
    }
    assert_ne!(submitted(one, 0x3000).queue(), submitted(one, 0).queue());
}

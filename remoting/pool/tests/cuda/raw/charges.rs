//! Charges for device memory: nothing that the device still has is free, and all that it has not is.

use super::*;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: u64 = 2;

#[test]
fn what_a_launch_leaves_allocated_is_charged_until_it_is_freed() {
    let mut client = Client::new();
    let context = client.context;
    let most = crate::library::MEMORY << 20;
    let graph = client.made("cuGraphCreate", &[0, 0]);
    let allocate = AddAllocNode {
        context,
        graph,
        after: Vec::new(),
        size: most / 4,
    };
    let (_, at) = client.ask(&allocate).unwrap();
    let mut place = 0u64;
    let words = [&raw mut place as u64, graph.into(), 0];
    let made = client.forward("cuGraphInstantiateWithFlags", &words);
    let (_, executable) = <(u32, u32)>::from_bytes(&made.unwrap().0).unwrap();
    let launch = LaunchGraph {
        context,
        stream: 0,
        graph: executable,
    };
    client.ask(&launch).unwrap();
    client
        .ask(&ContextSynchronize {
            context,
            spares_captures: false,
        })
        .unwrap();
    for (symbol, object) in [
        ("cuGraphExecDestroy", executable),
        ("cuGraphDestroy", graph),
    ] {
        client.forward(symbol, &[object.into()]).unwrap();
    }
    // The worker needs none of it to refuse.
    let other = Allocate {
        context,
        size: most - most / 8,
        source: Source::Device(),
    };
    assert_eq!(client.ask(&other), Err(codes::OUT_OF_MEMORY));
    let free = Free {
        context,
        address: at,
        stream: None,
    };
    assert_eq!(client.ask(&free), Ok(()));
    assert_eq!(client.ask(&free), Err(codes::INVALID_VALUE));
    client.ask(&other).unwrap();
}

/// Half of the quota, as memory of a graph that allocates and frees it: the executable graph.
fn half_by_a_graph(client: &mut Client) -> (u32, u32) {
    let context = client.context;
    let graph = client.made("cuGraphCreate", &[0, 0]);
    let allocate = AddAllocNode {
        context,
        graph,
        after: Vec::new(),
        size: crate::library::MEMORY << 19,
    };
    let (node, address) = client.ask(&allocate).unwrap();
    let free = AddFreeNode {
        context,
        graph,
        after: vec![node],
        address,
    };
    client.ask(&free).unwrap();
    let mut place = 0u64;
    let words = [&raw mut place as u64, graph.into(), 0];
    let made = client.forward("cuGraphInstantiateWithFlags", &words);
    (graph, <(u32, u32)>::from_bytes(&made.unwrap().0).unwrap().1)
}

#[test]
fn a_graph_that_is_destroyed_while_it_runs_is_charged_until_it_ends() {
    let mut client = Client::new();
    let context = client.context;
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 1);
    let (graph, executable) = half_by_a_graph(&mut client);
    client.launch(stream, spin, &parameters);
    let launch = LaunchGraph {
        context,
        stream,
        graph: executable,
    };
    client.post(&launch);
    for (symbol, object) in [
        ("cuGraphExecDestroy", executable),
        ("cuGraphDestroy", graph),
    ] {
        client.forward(symbol, &[object.into()]).unwrap();
    }
    let most = Allocate {
        context,
        size: (crate::library::MEMORY << 20) * 3 / 4,
        source: Source::Device(),
    };
    assert_eq!(client.ask(&most), Err(codes::OUT_OF_MEMORY));
    until.store(1, Ordering::SeqCst);
    client.ask(&StreamSynchronize { context, stream }).unwrap();
    client.ask(&most).unwrap();
}

#[test]
fn what_is_freed_in_the_order_of_a_stream_is_charged_until_that_gets_there() {
    let mut client = Client::new();
    let context = client.context;
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 1);
    let half = Allocate {
        context,
        size: crate::library::MEMORY << 19,
        source: Source::Stream(stream),
    };
    let address = client.ask(&half).unwrap();
    client.launch(stream, spin, &parameters);
    client.post(&Free {
        context,
        address,
        stream: Some(stream),
    });
    let most = Allocate {
        context,
        size: (crate::library::MEMORY << 20) * 3 / 4,
        source: Source::Device(),
    };
    assert_eq!(client.ask(&most), Err(codes::OUT_OF_MEMORY));
    // Who asks while the work is about to end gets it.
    let ends = thread::spawn(|| {
        thread::sleep(Duration::from_millis(100));
        until.store(1, Ordering::SeqCst);
    });
    client.ask(&most).unwrap();
    ends.join().unwrap();
}

#[test]
fn what_a_captured_stream_allocates_is_charged_with_its_graph() {
    let mut client = Client::new();
    let context = client.context;
    let stream = client.stream();
    let half = Allocate {
        context,
        size: crate::library::MEMORY << 19,
        source: Source::Stream(stream),
    };
    let address = client.ask(&half).unwrap();
    let free = |address| Free {
        context,
        address,
        stream: Some(stream),
    };
    let begin = [u64::from(stream), RELAXED];
    client.forward("cuStreamBeginCapture_v2", &begin).unwrap();
    // Memory that no graph has allocated none frees.
    assert_eq!(client.ask(&free(address)), Err(codes::INVALID_VALUE));
    let captured = client.ask(&half).unwrap();
    client.ask(&free(captured)).unwrap();
    let mut place = 0u64;
    let end = [u64::from(stream), &raw mut place as u64];
    let Blob(made) = client.forward("cuStreamEndCapture", &end).unwrap();
    let (_, graph) = <(u32, u32)>::from_bytes(&made).unwrap();
    let words = [&raw mut place as u64, graph.into(), 0];
    let made = client.forward("cuGraphInstantiateWithFlags", &words);
    let (_, executable) = <(u32, u32)>::from_bytes(&made.unwrap().0).unwrap();
    let more = Allocate {
        context,
        size: 1 << 20,
        source: Source::Device(),
    };
    assert_eq!(client.ask(&more), Err(codes::OUT_OF_MEMORY));
    client
        .forward("cuGraphExecDestroy", &[executable.into()])
        .unwrap();
    client.ask(&more).unwrap();
    assert_eq!(client.ask(&free(address)), Ok(()));
}

/// A quota's worth of memory, all but so small a part of it.
fn all_but(part: u64) -> u64 {
    let all = crate::library::MEMORY << 20;
    all - all / part
}

impl Client {
    /// Asks for device memory of the current context.
    fn allocate(&mut self, size: u64, source: Source) -> Result<u64, i32> {
        let context = self.context;
        self.ask(&Allocate {
            context,
            size,
            source,
        })
    }

    /// Frees memory in the order of a stream.
    fn free_in(&mut self, address: u64, stream: u32) -> Result<(), i32> {
        let (context, stream) = (self.context, Some(stream));
        self.ask(&Free {
            context,
            address,
            stream,
        })
    }
}

#[test]
fn memory_is_of_the_context_that_asks_whatever_another_one_has_to_give_back() {
    let mut client = Client::new();
    let stream = client.stream();
    // The driver has four times the quota.
    for round in 0..6 {
        let address = client.allocate(all_but(8), Source::Stream(stream)).unwrap();
        client.free_in(address, stream).unwrap();
        let other = client.made("cuCtxCreate_v2", &[0, 0, 0]);
        let context = std::mem::replace(&mut client.context, other);
        let allocated = client.allocate(all_but(8), Source::Device());
        assert!(allocated.is_ok(), "{allocated:?} in round {round}");
        client.context = context;
        client.forward("cuCtxDestroy_v2", &[other.into()]).unwrap();
    }
}

#[test]
fn what_is_freed_from_another_context_is_charged_until_its_stream_gets_there() {
    let mut client = Client::new();
    let stream = client.stream();
    for _ in 0..3 {
        let address = client.allocate(all_but(8), Source::Stream(stream)).unwrap();
        let other = client.made("cuCtxCreate_v2", &[0, 0, 0]);
        let context = std::mem::replace(&mut client.context, other);
        client.free_in(address, stream).unwrap();
        client.context = context;
    }
    client
        .ask(&StreamSynchronize {
            context: client.context,
            stream,
        })
        .unwrap();
    client.allocate(all_but(8), Source::Device()).unwrap();
}

#[test]
fn a_primary_context_that_is_destroyed_is_charged_for_what_runs_in_it() {
    let mut client = Client::new();
    client.context = client.made("cuDevicePrimaryCtxRetain", &[0, 0]);
    let primary = client.context;
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 1);
    let address = client.allocate(all_but(2), Source::Stream(stream)).unwrap();
    client.launch(stream, spin, &parameters);
    client.free_in(address, stream).unwrap();
    let destroyed = client.forward("cuCtxDestroy_v2", &[primary.into()]);
    assert_eq!(destroyed, Err(codes::INVALID_CONTEXT));
    let allocated = client.allocate(all_but(4), Source::Device());
    assert_eq!(allocated, Err(codes::OUT_OF_MEMORY));
    until.store(1, Ordering::SeqCst);
    client.allocate(all_but(4), Source::Device()).unwrap();
}

#[test]
fn no_capture_keeps_the_worker_from_seeing_whether_work_is_done() {
    let mut client = Client::new();
    let captured = client.stream();
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 1);
    let address = client.allocate(all_but(2), Source::Stream(stream)).unwrap();
    client.launch(stream, spin, &parameters);
    client.free_in(address, stream).unwrap();
    let begun = [0, 1].map(|mode| {
        let begin = [captured.into(), mode];
        client.forward("cuStreamBeginCapture_v2", &begin)
    });
    let allocated = client.allocate(all_but(4), Source::Device());
    assert_eq!(allocated, Err(codes::OUT_OF_MEMORY));
    let refused = || Err(codes::NOT_SUPPORTED);
    assert_eq!(begun, [refused(), refused()]);
    until.store(1, Ordering::SeqCst);
    client.allocate(all_but(4), Source::Device()).unwrap();
}

#[test]
fn the_graph_of_a_capture_that_fails_goes_with_it() {
    let mut client = Client::new();
    let (offset, length) = (client.window.data(), 64);
    for by_stream in [false, true] {
        let stream = client.stream();
        let begin = [stream.into(), RELAXED];
        client.forward("cuStreamBeginCapture_v2", &begin).unwrap();
        let address = client.allocate(4096, Source::Stream(stream)).unwrap();
        let read = Read {
            context: client.context,
            stream: 0,
            from: address,
            to: WindowRange {
                offset,
                length,
                stage: None,
            },
        };
        assert_eq!(client.ask(&read), Ok(()));
        if by_stream {
            let destroyed = client.forward("cuStreamDestroy_v2", &[stream.into()]);
            destroyed.unwrap();
        } else {
            let queried = client.forward("cuStreamQuery", &[stream.into()]);
            assert_eq!(queried, Err(codes::STREAM_CAPTURE_UNSUPPORTED));
            let mut place = 0u64;
            let end = [stream.into(), &raw mut place as u64];
            assert!(client.forward("cuStreamEndCapture", &end).is_err());
        }
        assert_eq!(client.ask(&read), Err(codes::INVALID_VALUE));
        // Nothing is being captured any more.
        let context = client.context;
        client
            .ask(&ContextSynchronize {
                context,
                spares_captures: false,
            })
            .unwrap();
        let other = client.stream();
        assert_eq!(client.signal(Some(other), 5), (5, 0));
    }
}

#[test]
fn a_pool_keeps_what_the_program_has_it_keep_as_long_as_the_quota_suffices() {
    let mut client = Client::new();
    let stream = client.stream();
    let pool = client.made("cuDeviceGetDefaultMemPool", &[0, 0]);
    const THRESHOLD: u64 = 4;
    const RESERVED: u64 = 5;
    let mut most = u64::MAX;
    let keep = [pool.into(), THRESHOLD, &raw mut most as u64];
    client.forward("cuMemPoolSetAttribute", &keep).unwrap();
    for size in std::iter::once(8 << 20).chain([1 << 20; 200]) {
        let address = client.allocate(size, Source::Stream(stream)).unwrap();
        client.free_in(address, stream).unwrap();
        let context = client.context;
        client.ask(&StreamSynchronize { context, stream }).unwrap();
    }
    let reserved = |client: &mut Client| {
        let mut place = 0u64;
        let words = [pool.into(), RESERVED, &raw mut place as u64];
        let Blob(answer) = client.forward("cuMemPoolGetAttribute", &words).unwrap();
        u64::from_le_bytes(*answer.last_chunk().unwrap())
    };
    assert_eq!(reserved(&mut client), 8 << 20);
    client.allocate(all_but(256), Source::Device()).unwrap();
    assert_eq!(reserved(&mut client), 0);
}

#[test]
fn what_no_end_of_work_makes_room_for_is_refused() {
    let mut client = Client::new();
    let context = client.context;
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 1);
    let (_, graph) = half_by_a_graph(&mut client);
    client.launch(stream, spin, &parameters);
    for _ in 0..3 {
        client.post(&LaunchGraph {
            context,
            stream,
            graph,
        });
    }
    let refused = Err(codes::OUT_OF_MEMORY);
    assert_eq!(client.allocate(all_but(4), Source::Device()), refused);
    until.store(1, Ordering::SeqCst);
    client.ask(&StreamSynchronize { context, stream }).unwrap();
    // The graph still has its memory.
    assert_eq!(client.allocate(all_but(4), Source::Device()), refused);
}

#[test]
fn variables_of_a_library_are_charged_for_each_context() {
    let mut client = Client::new();
    let (first, each) = (client.context, (crate::library::MEMORY << 20) * 3 / 8);
    let text =
        format!(".version 8.0\n.target sm_80\n.address_size 64\n.global .b8 many[{each}];\n\0");
    let load = || Load {
        context: first,
        image: Blob(text.clone().into_bytes()),
        library: true,
        options: Vec::new(),
        room: (0, 0),
    };
    let library = client.ask(&load()).unwrap();
    assert_eq!(library.code, 0);
    let mut place = 0u64;
    let words = [&raw mut place as u64, 0, 0];
    let second = client.made("cuCtxCreate_v2", &words);
    let refused = Err(codes::OUT_OF_MEMORY);
    let third = client.forward("cuCtxCreate_v2", &words);
    assert_eq!(third.map(drop), refused);
    let words = [&raw mut place as u64, 0];
    let primary = client.forward("cuDevicePrimaryCtxRetain", &words);
    assert_eq!(primary.map(drop), refused);
    assert_eq!(client.ask(&load()).map(drop), refused);
    // A context returns its own, and the library all others.
    client.forward("cuCtxDestroy_v2", &[second.into()]).unwrap();
    client.context = client.made("cuDevicePrimaryCtxRetain", &words);
    // Not again for a context that is there.
    client.made("cuDevicePrimaryCtxRetain", &words);
    let allocated = client.allocate(all_but(2), Source::Device());
    assert_eq!(allocated.map(drop), refused);
    let unload = [library.id.into()];
    client.forward("cuLibraryUnload", &unload).unwrap();
    client.allocate(all_but(8), Source::Device()).unwrap();
}

#[test]
fn what_limits_reserve_for_kernels_is_charged_as_long_as_their_context_lives() {
    const STACK: u64 = 0;
    const PRINTED: u64 = 1;
    let mut client = Client::new();
    let most = crate::library::MEMORY << 20;
    let own = client.made("cuCtxCreate_v2", &[0, 0, 0]);
    let outer = std::mem::replace(&mut client.context, own);
    let refused = Err(codes::OUT_OF_MEMORY);
    for limit in [STACK, PRINTED] {
        let set = client.forward("cuCtxSetLimit", &[limit, 2 * most]);
        assert_eq!(set.map(drop), refused, "{limit}");
    }
    let set = |client: &mut Client, bytes| {
        let set = client.forward("cuCtxSetLimit", &[PRINTED, bytes]);
        set.map(drop)
    };
    assert_eq!(set(&mut client, most / 4), Ok(()));
    assert_eq!(set(&mut client, most / 2), Ok(()));
    // As it was, and again.
    assert_eq!(set(&mut client, 1 << 20), Ok(()));
    assert_eq!(set(&mut client, most / 2), Ok(()));
    let allocate = Allocate {
        context: outer,
        size: most * 3 / 4,
        source: Source::Device(),
    };
    assert_eq!(client.ask(&allocate).map(drop), refused);
    client.forward("cuCtxDestroy_v2", &[own.into()]).unwrap();
    client.ask(&allocate).unwrap();
}

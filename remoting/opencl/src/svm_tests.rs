use std::{
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
};

use remoting_proto::{
    apis::opencl::calls::{
        ContextId, CreateBuffer, CreateContext, CreateKernel, CreateProgram, CreateQueue, KernelId,
        MemId, Order, ProgramId, ProgramOrigin, QueueId, Request, SetArgument, SvmFree, Value,
        WindowRange,
    },
    wire::{Blob, Flags},
};

use super::*;
use crate::{driver::api::MemCallback, testing};

pub(crate) const HEADER: Header = Header {
    length: 0,
    opcode: 0,
    flags: Flags::ANSWER,
    sequence: 1,
};

/// Two contexts, each with a queue of the same number, and a kernel in the first.
fn server() -> Server {
    server_before(Api::null())
}

/// The same, with another driver.
pub(crate) fn server_before(api: Api) -> Server {
    let (mut server, _, _) = testing::server_before(api);
    let device = server.offered()[0][0].id;
    for number in 0..2 {
        let call = CreateContext {
            id: ContextId(number),
            devices: vec![device],
            platform: None,
        };
        server.create_context(call).unwrap();
        let call = CreateQueue {
            id: QueueId(number),
            context: ContextId(number),
            device,
            properties: 0,
            further: Vec::new(),
        };
        server.create_queue(call).unwrap();
    }
    let call = CreateProgram {
        id: ProgramId(0),
        context: ContextId(0),
        origin: ProgramOrigin::Source(Blob::default()),
    };
    server.create_program(call).unwrap();
    let call = CreateKernel {
        id: KernelId(0),
        program: ProgramId(0),
        name: Blob::default(),
    };
    server.create_kernel(&call).unwrap();
    server
}

pub(crate) fn alloc(server: &mut Server, context: u32, size: u64) -> Result<u64, i32> {
    server.svm_alloc(&SvmAlloc {
        context: ContextId(context),
        flags: codes::MEM_READ_WRITE,
        size,
        retries: 0,
    })
}

pub(crate) fn order(queue: u32) -> Order {
    Order {
        queue: QueueId(queue),
        wait: Vec::new(),
        event: None,
    }
}

/// The error of a command that nobody waits for.
pub(crate) fn enqueue(server: &mut Server, queue: u32, request: Request) -> Result<(), i32> {
    let header = Header {
        flags: Flags::default(),
        ..HEADER
    };
    server.command(header, request).unwrap();
    match server
        .backend
        .queues
        .get_mut(queue)
        .unwrap()
        .deferred
        .take()
    {
        None => Ok(()),
        Some(code) => Err(code),
    }
}

/// Makes every call that names a memory range, and returns whether each is served.
fn served(server: &mut Server, queue: u32, address: u64, length: u64) -> Vec<bool> {
    let data = server.window.data();
    let place = || WindowRange {
        offset: data,
        length,
        stage: None,
    };
    let other = alloc(server, queue, 1 << 16).unwrap();
    let order = || order(queue);
    let requests = [
        Request::SvmRead(calls::SvmRead {
            order: order(),
            address,
            to: place(),
        }),
        Request::SvmWrite(calls::SvmWrite {
            order: order(),
            address,
            from: place(),
        }),
        Request::SvmCopy(calls::SvmCopy {
            order: order(),
            from: address,
            to: other,
            size: length,
        }),
        Request::SvmCopy(calls::SvmCopy {
            order: order(),
            from: other,
            to: address,
            size: length,
        }),
        Request::SvmFill(calls::SvmFill {
            order: order(),
            address,
            pattern: Blob(vec![7]),
            size: length,
        }),
        Request::SvmMigrate(calls::SvmMigrate {
            order: order(),
            ranges: vec![(other, 0), (address, length)],
            flags: 0,
        }),
    ];
    let served = requests.map(|request| enqueue(server, queue, request).is_ok());
    server.svm_free(other).unwrap();
    served.to_vec()
}

#[test]
fn only_what_lies_in_an_allocation_is_served() {
    let mut server = server();
    // Adjacent allocations do not extend it.
    let around = [(); 3].map(|()| alloc(&mut server, 0, 4096).unwrap());
    let start = around[1];
    for (address, length) in [
        (start, 4096),
        (start, 1),
        (start + 4095, 1),
        (start + 100, 3996),
    ] {
        assert_eq!(
            served(&mut server, 0, address, length),
            [true; 6],
            "{length}"
        );
    }
    for (address, length) in [
        (start, 4097),
        (start - 1, 2),
        (start - 1, 1),
        (start + 4096, 1),
        (start + 4095, 2),
        (start + 1, u64::MAX),
        (start, u64::MAX),
        (u64::MAX, 1),
        (0, 1),
    ] {
        assert_eq!(
            served(&mut server, 0, address, length),
            [false; 6],
            "{length} bytes at {address:#x}"
        );
    }
}

#[test]
fn an_allocation_is_found_by_what_is_of_its_context_alone() {
    let mut server = server();
    let (own, other) = (
        alloc(&mut server, 0, 4096).unwrap(),
        alloc(&mut server, 1, 4096).unwrap(),
    );
    assert_eq!(served(&mut server, 0, own, 64), [true; 6]);
    assert_eq!(served(&mut server, 1, own, 64), [false; 6]);
    let mut set = |address| {
        server.set_argument(&SetArgument {
            kernel: KernelId(0),
            index: 0,
            value: Value::Svm(address),
        })
    };
    assert_eq!(set(Some(own)), Ok(()));
    assert_eq!(set(Some(own + 4095)), Ok(()));
    assert_eq!(set(None), Ok(()));
    for address in [other, own + 4096, own - 1, 0, u64::MAX] {
        assert_eq!(set(Some(address)), Err(codes::INVALID_ARG_VALUE));
    }
    let mut uses = |addresses: &[u64]| {
        server.svm_pointers(&SvmPointers {
            kernel: KernelId(0),
            addresses: addresses.to_vec(),
        })
    };
    assert_eq!(uses(&[own, own + 8]), Ok(()));
    assert_eq!(uses(&[own, other]), Err(codes::INVALID_VALUE));
}

#[test]
fn an_allocation_is_freed_once_by_where_it_begins_and_is_gone_then() {
    let mut server = server();
    let address = alloc(&mut server, 0, 4096).unwrap();
    assert_eq!(address % PAGE, 0);
    assert!(server.svm_free(address + 1).is_err());
    assert_eq!(server.svm_free(address), Ok(()));
    assert!(server.svm_free(address).is_err());
    assert_eq!(served(&mut server, 0, address, 1), [false; 6]);
}

#[test]
fn a_copy_onto_itself_and_a_pattern_that_does_not_fit_are_refused() {
    let mut server = server();
    let address = alloc(&mut server, 0, 4096).unwrap();
    let copy = calls::SvmCopy {
        order: order(0),
        from: address,
        to: address + 63,
        size: 64,
    };
    assert_eq!(
        enqueue(&mut server, 0, Request::SvmCopy(copy)),
        Err(codes::MEM_COPY_OVERLAP)
    );
    for (offset, pattern, size, good) in [
        (0, 128, 256, true),
        (0, 0, 256, false),
        (0, 3, 96, false),
        (0, 256, 256, false),
        (2, 4, 64, false),
        (4, 4, 62, false),
    ] {
        let fill = calls::SvmFill {
            order: order(0),
            address: address + offset,
            pattern: Blob(vec![0; pattern]),
            size,
        };
        let filled = enqueue(&mut server, 0, Request::SvmFill(fill));
        assert_eq!(filled.is_ok(), good, "{pattern} at {offset}");
    }
}

#[test]
fn the_quota_counts_allocations_with_their_pages_until_they_are_free() {
    let mut server = server();
    let quota = Arc::clone(&server.quota);
    let address = alloc(&mut server, 0, 1).unwrap();
    assert_eq!(quota.used(), 2 * PAGE);
    for size in [0, u64::MAX, u64::MAX - PAGE, 1 << 40] {
        assert!(alloc(&mut server, 0, size).is_err(), "{size}");
    }
    assert_eq!(quota.used(), 2 * PAGE);
    server.svm_free(address).unwrap();
    assert_eq!(quota.used(), 0);
}

thread_local! {
    /// The callback that the driver was given for a buffer's destruction.
    static AT_END: Cell<Option<(MemCallback, *mut c_void)>> = const { Cell::new(None) };
}

/// `clSetMemObjectDestructorCallback` for buffers that stay in use.
unsafe extern "C" fn at_end(_: Handle, notify: Option<MemCallback>, data: *mut c_void) -> i32 {
    AT_END.set(notify.map(|notify| (notify, data)));
    0
}

#[test]
fn a_buffer_keeps_the_allocation_that_it_lives_in() {
    let mut server = server_before(Api::null().with_mem_callback(at_end));
    let address = alloc(&mut server, 0, 4096).unwrap();
    let mut make = |id, address, size| {
        server.create_buffer(CreateBuffer {
            id: MemId(id),
            context: ContextId(0),
            flags: 0,
            size,
            contents: None,
            lives: None,
            svm: Some(address),
        })
    };
    assert_eq!(make(1, address, 4097), Err(codes::INVALID_HOST_PTR));
    assert_eq!(make(2, address - 1, 1), Err(codes::INVALID_HOST_PTR));
    assert_eq!(make(0, address, 4096), Ok(()));
    // The buffer has no memory of its own: the allocation's is charged already.
    assert_eq!(server.quota.used(), 2 * PAGE);
    server.svm_free(address).unwrap();
    server.poll_waits().unwrap();
    assert_eq!(server.svm_free(address), Err(codes::INVALID_VALUE));
    assert_eq!(server.quota.used(), 2 * PAGE);
    let (notify, data) = AT_END.take().expect("the driver was not asked");
    // SAFETY: called once, as a driver does.
    unsafe { notify(1, data) };
    assert!(server.board.any(), "the serving thread is not told");
    server.poll_waits().unwrap();
    assert_eq!(server.quota.used(), 0);
}

#[test]
fn the_largest_that_the_driver_has_needs_no_page_more() {
    let mut server = server();
    let most = 1 << 20;
    let address = alloc(&mut server, 0, most).unwrap();
    assert_eq!(server.quota.used(), most);
    let context = server.backend.queues.get(0).unwrap().home.raw;
    let has = |address, length| server.backend.svm.at(context, address, length).is_some();
    assert!(has(address, most) && has(address + most - 1, 1));
    assert!(!has(address, most + 1) && !has(address - 1, 1));
    let full = codes::MEM_OBJECT_ALLOCATION_FAILURE;
    assert_eq!(alloc(&mut server, 0, most + 1), Err(full));
    assert_eq!(server.quota.used(), most);
    server.svm_free(address).unwrap();
    assert_eq!(server.quota.used(), 0);
}

#[test]
fn a_refused_argument_is_forgotten_with_the_next_value_whether_that_is_awaited_or_not() {
    let mut server = server();
    let address = alloc(&mut server, 0, 4096).unwrap();
    let posted = Header {
        flags: Flags::default(),
        ..HEADER
    };
    let mut set = |header, address| {
        let call = SetArgument {
            kernel: KernelId(0),
            index: 0,
            value: Value::Svm(Some(address)),
        };
        server.serve(header, Request::SetArgument(call)).unwrap();
        server.backend.kernels.get(0).unwrap().refused.len()
    };
    for header in [posted, HEADER] {
        assert_eq!(set(posted, address - 1), 1);
        assert_eq!(set(header, address), 0);
    }
    // The client hears of this refusal, and the earlier value stays.
    assert_eq!(set(HEADER, address - 1), 0);
}

#[test]
fn an_address_that_is_taken_is_followed_by_one_that_no_heap_and_no_hole_beside_it_has() {
    unsafe extern "C" fn any_size(_: Handle, _: u64, size: usize, _: u32) -> *mut c_void {
        static NEXT: AtomicUsize = AtomicUsize::new((1 << 41) + 64);
        NEXT.fetch_add(size.next_multiple_of(64), Ordering::Relaxed) as *mut c_void
    }

    let mut server = server_before(Api::null().with_allocations(any_size));
    for (retries, least) in [(0, 0), (1, 33), (2, 66), (3, 132)] {
        let call = SvmAlloc {
            context: ContextId(0),
            flags: 0,
            size: 100,
            retries,
        };
        let address = server.svm_alloc(&call).unwrap();
        let allocation = &server.backend.svm.live[&address];
        assert_eq!(allocation._charge.bytes() >> 20, least, "{retries}");
        assert_eq!(allocation.length, PAGE, "{retries}");
        server.svm_free(address).unwrap();
    }
}

#[test]
fn calls_that_name_an_allocation_are_served_by_number() {
    let mut server = server();
    let call = Request::SvmAlloc(SvmAlloc {
        context: ContextId(0),
        flags: 0,
        size: 100,
        retries: 3,
    });
    server.serve(HEADER, call).unwrap();
    let address = *server.backend.svm.live.keys().next().unwrap();
    server
        .serve(HEADER, Request::SvmFree(SvmFree { address }))
        .unwrap();
    assert!(server.backend.svm.live.is_empty() && server.backend.svm.freed.is_empty());
}

#[test]
fn a_context_with_the_number_of_one_before_lends_its_memory_to_none_of_that_ones_objects() {
    let mut server = server();
    let old = alloc(&mut server, 0, 4096).unwrap();
    server.release_context(ContextId(0)).unwrap();
    let device = server.offered()[0][0].id;
    let call = CreateContext {
        id: ContextId(0),
        devices: vec![device],
        platform: None,
    };
    server.create_context(call).unwrap();
    let new = alloc(&mut server, 0, 4096).unwrap();
    // Made by now, of a program from before.
    let call = CreateKernel {
        id: KernelId(1),
        program: ProgramId(0),
        name: Blob::default(),
    };
    server.create_kernel(&call).unwrap();
    for kernel in [KernelId(0), KernelId(1)] {
        let mut set = |address| {
            server.set_argument(&SetArgument {
                kernel,
                index: 0,
                value: Value::Svm(Some(address)),
            })
        };
        assert_eq!(set(new), Err(codes::INVALID_ARG_VALUE), "{kernel:?}");
        assert_eq!(set(old), Ok(()), "{kernel:?}");
    }
    let fill = |address| {
        Request::SvmFill(calls::SvmFill {
            order: order(0),
            address,
            pattern: Blob(vec![7]),
            size: 64,
        })
    };
    let refused = Err(codes::INVALID_VALUE);
    assert_eq!(enqueue(&mut server, 0, fill(new)), refused);
    assert_eq!(enqueue(&mut server, 0, fill(old)), Ok(()));
}

mod old {
    //! A driver that reports shared virtual memory for its device but OpenCL 1.2, so that it need
    //! not have the functions.

    use super::*;

    thread_local! {
        static CALLED: Cell<u32> = const { Cell::new(0) };
    }

    fn called() -> i32 {
        CALLED.set(CALLED.get() + 1);
        0
    }

    unsafe extern "C" fn platform(
        _: Handle,
        name: u32,
        size: usize,
        value: *mut c_void,
        _: *mut usize,
    ) -> i32 {
        let version = b"OpenCL 1.2 old\0";
        if name == codes::PLATFORM_VERSION && size >= version.len() {
            // SAFETY: the caller provides `size` bytes there.
            unsafe { version.as_ptr().copy_to(value.cast(), version.len()) };
        }
        0
    }

    unsafe extern "C" fn argument(_: Handle, _: u32, _: *const c_void) -> i32 {
        called()
    }

    unsafe extern "C" fn allocates(_: Handle, _: u64, _: usize, _: u32) -> *mut c_void {
        called();
        4096 as *mut c_void
    }

    unsafe extern "C" fn uses(_: Handle, _: u32, _: usize, _: *const c_void) -> i32 {
        called()
    }

    #[test]
    fn no_function_is_called_that_a_driver_before_2_0_has_not() {
        let api = Api::null().with_old(platform, argument, allocates, uses);
        let mut server = server_before(api);
        let refused = Err(codes::INVALID_OPERATION);
        assert_eq!(alloc(&mut server, 0, 4096), refused.map(|()| 0));
        for value in [None, Some(4096)] {
            let set = server.set_argument(&SetArgument {
                kernel: KernelId(0),
                index: 0,
                value: Value::Svm(value),
            });
            assert_eq!(set, refused);
        }
        for addresses in [vec![], vec![4096]] {
            let told = server.svm_pointers(&SvmPointers {
                kernel: KernelId(0),
                addresses,
            });
            assert_eq!(told, refused);
        }
        let data = server.window.data();
        let place = || WindowRange {
            offset: data,
            length: 8,
            stage: None,
        };
        for request in [
            Request::SvmRead(calls::SvmRead {
                order: order(0),
                address: 4096,
                to: place(),
            }),
            Request::SvmWrite(calls::SvmWrite {
                order: order(0),
                address: 4096,
                from: place(),
            }),
            Request::SvmCopy(calls::SvmCopy {
                order: order(0),
                from: 4096,
                to: 8192,
                size: 8,
            }),
            Request::SvmFill(calls::SvmFill {
                order: order(0),
                address: 4096,
                pattern: Blob(vec![7]),
                size: 8,
            }),
            Request::SvmMigrate(calls::SvmMigrate {
                order: order(0),
                ranges: vec![(4096, 8)],
                flags: 0,
            }),
        ] {
            assert_eq!(enqueue(&mut server, 0, request), refused);
        }
        assert_eq!(server.svm_free(4096), Err(codes::INVALID_VALUE));
        let asked = server.info(&calls::Info {
            of: calls::Target::Device(calls::DeviceId(0)),
            parameter: codes::DEVICE_SVM_CAPABILITIES,
        });
        assert_eq!(asked.map(|_| ()), Err(codes::INVALID_VALUE));
        assert_eq!(CALLED.get(), 0);
    }
}

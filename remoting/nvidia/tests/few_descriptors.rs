//! A worker that has no descriptors left. The limit is the whole process's: this is its only test.

use std::{thread, time::Duration};

use base::limits::Limit;
use gantry_nvidia::{
    server::{Listener, Worker},
    stand_in::StandIn,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};

#[test]
fn programs_that_find_no_descriptors_are_served_later() {
    let folder = tempfile::tempdir().expect("there is room");
    let path = folder.path().join("nvidia.sock");
    let listener = Listener::bind(&path).expect("the folder is new");
    let worker =
        Worker::new(Box::new(StandIn::default()), 8 << 20, None, None).expect("it is known");
    let serving = thread::spawn(move || worker.serve(&listener));
    let address = SocketAddrUnix::new(&path).expect("it is short");
    let [first, second] = [(); 2].map(|()| {
        socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("there are descriptors")
    });

    let limit = Limit::now().expect("it is known");
    // No number that is as small is free.
    Limit { soft: 3, ..limit }.set().expect("it is lower");
    // If the kernel has reserved a number for the next connection, the first one takes it.
    connect(&first, &address).expect("it listens");
    connect(&second, &address).expect("it listens");
    thread::sleep(Duration::from_millis(300));
    assert!(!serving.is_finished(), "the worker goes on");
    limit.set().expect("it was so");

    let hello = nvidia_abi::wire::Request {
        operation: nvidia_abi::wire::Operation::Hello,
        file: 0,
        a: nvidia_abi::wire::VERSION.into(),
        b: 0,
        length: 0,
    };
    send(&second, &hello.to_bytes(), SendFlags::NOSIGNAL).expect("it is connected");
    let mut answer = [0; 64];
    let (_, length) = recv(&second, &mut answer[..], RecvFlags::empty()).expect("it is served");
    assert!(length > 0, "it is served");
}

//! What an application may put into its call ring: frames, fragments, and the messages in them.

#![no_main]

use std::time::Duration;

use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use remoting_proto::{
    apis::{self, opencl::calls::Request},
    wire::{Header, frame::LARGEST, hello::Hello},
};
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    mapping,
    ring::{Consumer, Producer},
    window::{self, Window},
};

const RING: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let bell = Futex {
        patience: Duration::from_millis(1),
    };
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let mut producer = Producer::new(window.calls(), bell);
    let mut receiver = Receiver::new(Consumer::new(window.calls(), bell));
    let mut body = Vec::new();
    let mut input = Input::new(bytes);
    while !input.is_empty() {
        let length = usize::from(input.u8());
        // A frame that claims more lines than it has moves the consumer past the producer, which
        // then reports a broken ring. A frame that claims fewer leaves the consumer behind, and the
        // ring fills.
        let Ok(true) = producer.push(&[], input.bytes(length)) else {
            return;
        };
        loop {
            match receiver.poll(&mut body) {
                Ok(Some(Header { opcode, .. })) => {
                    assert!(body.len() <= LARGEST);
                    let _ = Request::decode(opcode, &body);
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
    // The same bytes as a call with each number, and as a hello.
    for opcode in 0..100 {
        let _ = Request::decode(opcode, bytes);
    }
    if let Some(hello) = bytes.first_chunk() {
        let _ = Hello::check(hello, &apis::ALL);
    }
});

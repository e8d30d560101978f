//! Messages of a hostile front and of a hostile mediator.

#![no_main]

use gpu_mediator::gpu::wire::{Event, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    if let Ok(request) = Request::parse(message) {
        assert_eq!(Request::parse(&request.encode()), Ok(request));
    }
    if let Ok(event) = Event::parse(message) {
        assert_eq!(Event::parse(&event.encode()), Ok(event));
    }
});

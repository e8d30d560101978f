//! Whether a worker is at work, as its client hears.

use std::time::{Duration, Instant};

use remoting_proto::{
    apis::opencl::calls::{ContextId, CreateContext, DeviceId, Request},
    wire::messages::WORKS,
};
use remoting_session::{
    image::{self, Immovable, Writer},
    work::{Making, TOLD, processor_time},
};
use remoting_transport::ring::Consumer;

use crate::testing;

#[test]
fn a_state_whose_client_has_broken_its_rings_is_not_called_damaged() {
    let (mut left, calls, _) = testing::server();
    let context = CreateContext {
        id: ContextId(0),
        devices: vec![DeviceId(0)],
        platform: None,
    };
    testing::carry_out(&mut left, Request::CreateContext(context));
    let image = image::create().unwrap();
    let writer = Writer::new(image.try_clone().unwrap());
    left.save(&calls, None, writer, false).unwrap();

    let (mut new, _, window) = testing::server();
    // More than was ever written.
    Consumer::new(window.answers(), testing::BELL).go_on(u64::from(u32::MAX / 2));
    while new.send(WORKS, 0, &[]).is_ok() {}
    while processor_time() < TOLD / 10 {}
    new.making = Some(Making {
        looked: Instant::now() - TOLD,
        had: Duration::ZERO,
    });
    let made = new.restore(image, false);
    assert!(matches!(made, Err(Immovable::Gone(_))), "{made:?}");
}

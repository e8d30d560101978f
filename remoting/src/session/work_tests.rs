//! Whether a worker is at work, as its client hears.

use remoting_proto::apis::opencl::calls::{ContextId, CreateContext, DeviceId, Request};
use remoting_transport::ring::Consumer;

use super::*;
use crate::{
    backends::opencl::testing,
    session::image::{self, Immovable, Writer},
};

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

#[test]
fn who_works_has_had_processor_time_and_who_sleeps_has_not() {
    let often = Duration::from_millis(50);
    let mut making = Making::begin();
    assert!(
        !making.has_worked(Duration::from_secs(3600)),
        "it is not time to"
    );
    // Other tests work in this process, too: this much may have been had before it is time to.
    let Making { looked, had } = making;
    while processor_time() - had < often || looked.elapsed() < often {}
    assert!(making.has_worked(often));
    // None is enough here, whatever others have.
    let mut asleep = Making {
        had: Duration::MAX,
        ..Making::begin()
    };
    std::thread::sleep(often);
    assert!(!asleep.has_worked(often));
}

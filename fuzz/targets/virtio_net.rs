//! The queues of a network card with two queue pairs. Frames of all sizes arrive, and nobody reads
//! what is sent.

#![no_main]

use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    sync::Arc,
};

use devices::{
    rate_limiter::{RateLimiterConfig, TokenBucketConfig},
    testing::simple::Guest,
    thread::Unconfined,
    virtio::net::{Net, Options, tap::Tap},
};
use gantry_fuzz::{driver::drive, input::Input};
use libfuzzer_sys::fuzz_target;

/// Number of frames that wait at each queue of the tap at the start; less than a socket's backlog.
const FRAMES: usize = 4;

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let (mut taps, mut wires) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let (near, far) = UnixDatagram::pair().expect("there are descriptors");
        far.set_nonblocking(true).expect("it is a socket");
        for _ in 0..FRAMES {
            let len = usize::from(input.u16());
            // As with a tap, a frame that does not fit is lost.
            let _ = far.send(&vec![len as u8; len]);
        }
        taps.push(Tap::substitute(OwnedFd::from(near)));
        wires.push(far);
    }
    let limit = u64::from(input.u8());
    let options = Options {
        thread_name: "_net0".to_owned(),
        tap: None,
        fds: Vec::new(),
        address: None,
        made_address: None,
        mac: Some([2, 0, 0, 0, 0, 1]),
        host_mac: None,
        mtu: None,
        num_queues: 4,
        queue_size: 16,
        offload_tso: true,
        offload_ufo: true,
        offload_csum: true,
        rate_limiter: (limit != 0).then_some(RateLimiterConfig {
            bandwidth: Some(TokenBucketConfig {
                size: limit * 64,
                one_time_burst: None,
                refill_time: 1000,
            }),
            ops: None,
        }),
    };
    let spawner = Arc::new(Unconfined);
    let mut device = Net::on_substitutes(options, taps, spawner).expect("the options are good");
    drive(&Guest::new(), &mut device, input.bytes(usize::MAX));
});

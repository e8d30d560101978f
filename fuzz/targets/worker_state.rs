//! A saved state that another worker or host may have produced. A session restores or refuses it,
//! on an OpenCL mock that checks the types of its handles. What was restored can be saved again.

#![no_main]

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use libfuzzer_sys::fuzz_target;
use remoting_opencl::{OpenClBackend, Server, driver::Api};
use remoting_session::{
    backend::Backend,
    checkpoint, image,
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_transport::{
    bell::Futex,
    mapping,
    port_bell::Waker,
    window::{self, Window},
};

const RING: u64 = 1 << 16;

static API: LazyLock<Arc<Api>> = LazyLock::new(|| Arc::new(Api::typed()));

fn server() -> Server {
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let bell = Futex {
        patience: Duration::from_millis(1),
    };
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: Waker::Futex(bell),
        quota: Quota::new(1 << 24),
    };
    let backend = OpenClBackend::new(Arc::clone(&API), &Default::default());
    Server::new(backend, window, tuning, Nudge(Box::new(|| {}))).0
}

fuzz_target!(|bytes: &[u8]| {
    let file = image::create().expect("there is memory");
    let copy = file.try_clone().expect("there are descriptors");
    checkpoint::write::<OpenClBackend>(copy, bytes).expect("there is memory");
    let mut restored = server();
    if restored.restore(file, true).is_err() {
        return;
    }
    let file = image::create().expect("there is memory");
    let mut writer = image::Writer::new(file);
    // Nested parts may be too deep to be created once more.
    let _ = OpenClBackend::checkpoint(&mut restored, None, &mut writer, false);
});

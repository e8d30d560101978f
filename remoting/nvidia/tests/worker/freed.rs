//! Memory that is made while a call of another session frees.

use std::{
    sync::{Arc, Barrier},
    thread,
};

use super::{ALLOCATE, GPU, Operation, Owner, SLICE, ask, open, serve, word, words};

const MEMORY: u32 = 7;
/// The class of system memory, and the call that makes descriptor memory, with its class.
const SYSTEM: u32 = 0x3e;
const DESCRIBE: u32 = 0xc038_4627;
const DESCRIPTOR: u32 = 0x71;

#[test]
fn a_handle_is_free_when_its_pages_are() {
    let served = serve();
    let mut one = Owner::new(&served);
    let (control, token, _end) = open(&one.socket, "/dev/nvidiactl");
    one.control = control;
    let (gpu, _, _gpu_end) = open(&one.socket, "/dev/nvidia0");
    one.call(gpu, 0xc004_46c9, &words(4, &[(0, control)]));
    one.client = word(&one.call(control, ALLOCATE, &words(48, &[(12, 0x41)])), 8);
    assert_eq!(one.allocate(one.client, GPU, 0x80, 56), 0);
    let mut two = Owner::new(&served);
    let adopted = ask(&two.socket, Operation::Adopt, 0, 0, 0, &token).expect("it answers");
    assert_eq!(adopted.0.result, 0);
    (two.control, two.client) = (adopted.0.a as u32, one.client);
    let system = || {
        let header = [
            (0, two.client),
            (4, GPU),
            (8, MEMORY),
            (12, SYSTEM),
            (16, 1),
            (48 + 64, 1 << 16),
        ];
        word(
            &two.call(two.control, ALLOCATE, &words(48 + 128, &header)),
            40,
        )
    };
    let described = || {
        let pages = ask(&two.socket, Operation::Pages, 0, 1 << 16, 0, &[]).expect("it answers");
        let block = [
            (0, two.client),
            (4, GPU),
            (8, MEMORY),
            (12, DESCRIPTOR),
            (16, 0x4000_1010),
            (24, pages.0.a as u32),
            (32, (1 << 16) - 1),
            (48, u32::MAX),
        ];
        let status = word(&two.call(two.control, DESCRIBE, &words(56, &block)), 40);
        ask(&two.socket, Operation::Return, 0, pages.0.a, 0, &[]).expect("it answers");
        status
    };
    for make in [&system as &dyn Fn() -> u32, &described] {
        assert_eq!(make(), 0);
        assert!(!two.has_whole_slice(), "of {SLICE} bytes");
        let barrier = Arc::new(Barrier::new(2));
        served
            .device
            .0
            .lock()
            .expect("no call has panicked")
            .after_free = Some(barrier.clone());
        let made = thread::scope(|scope| {
            scope.spawn(|| one.free(MEMORY));
            barrier.wait();
            let made = make();
            barrier.wait();
            made
        });
        let state = served.device.0.lock().expect("no call has panicked");
        let is_pinned = state.objects.contains_key(&(two.client, MEMORY));
        drop(state);
        assert_eq!(is_pinned, !two.has_whole_slice(), "pinned pages are taken");
        assert_eq!(made, 0x1f, "the handle is not free yet");
        assert_eq!(make(), 0, "it is now");
        one.free(MEMORY);
        assert!(two.has_whole_slice());
    }
}

//! A port with several APIs, and pools that serve one of them.

use remoting_proto::{
    apis,
    wire::{
        api::Spoken,
        hello::{Form, Hello},
    },
};

use super::{super::apis::rig_of_both, *};

/// Acts as a pool that serves these APIs, and replies to a number of questions about APIs.
fn answers(pool: &UnixListener, served: &[Spoken], questions: usize) {
    for _ in 0..questions {
        let (stream, _) = pool.accept().unwrap();
        let (bytes, files) = socket::receive_hello(&stream).unwrap();
        assert!(files.is_empty());
        let answer = Hello::check(&bytes, served).unwrap();
        assert_eq!(answer.form, Form::Asks);
        socket::send_hello(&stream, answer, &[]).unwrap();
    }
}

/// Moves a port with both APIs to a pool that serves these: returns why nothing has moved, if so, and
/// whether future applications are served there.
fn moved_to(served: &[Spoken]) -> (Vec<String>, bool) {
    let (rig, other) = (rig_of_both(), other());
    let moved = rig.start_move(None, &other.path);
    answers(&other.pool, served, 2);
    let moved = moved.recv().unwrap();
    assert!(moved.slices.is_empty());
    let pool = rig.function.lock().unwrap().handle().pool();
    (moved.reasons, pool.socket == other.path)
}

#[test]
fn a_port_does_not_go_to_a_pool_that_would_refuse_some_of_its_programs() {
    for (served, name) in [(ApiId::OpenCl, "cuda"), (ApiId::Cuda, "opencl")] {
        let (reasons, has_moved) = moved_to(&[apis::spoken(served)]);
        let [reason] = &reasons[..] else {
            panic!("{reasons:?}");
        };
        let said = format!("does not serve {name}, which programs");
        assert!(
            reason.contains(&said) && reason.contains("--api opencl,cuda"),
            "{reason}"
        );
        assert!(!has_moved);
    }
    assert_eq!(moved_to(&apis::ALL), (Vec::new(), true));
}

#[test]
fn who_does_not_say_what_it_serves_is_moved_to_as_ever_and_so_is_one_application() {
    let (rig, other) = (rig_of_both(), other());
    let old = rig.open(1);
    let goes = |slice| {
        let moved = rig.start_move(slice, &other.path);
        if slice.is_none() {
            for _ in 0..2 {
                drop(other.pool.accept().unwrap());
            }
        }
        let (new, attachment) = taken_up(&other.pool);
        assert!(attachment.takes_up);
        drop(new);
        let moved = moved.recv().unwrap();
        assert!(moved.reasons[0].contains("slice 1 stays"), "{moved:?}");
    };
    goes(None);
    goes(Some(1));
    drop(old);
}

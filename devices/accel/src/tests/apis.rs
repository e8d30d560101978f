//! A port whose applications may use one of several APIs.

use super::*;

pub(super) fn rig_of_both() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let pool = UnixListener::bind(folder.path().join("pool")).unwrap();
    let options = Options {
        apis: Apis::ALL,
        ..options(folder.path())
    };
    rig_of(folder, pool, options, None)
}

impl Rig {
    /// Opens a slice for an application with this API number; returns the worker and its
    /// attachment.
    fn opened(&self, slice: u64, api: u32) -> (UnixStream, Attachment) {
        self.write(registers::SLICE_API + 4 * slice, api);
        self.command(slice, Command::Open);
        let (mut stream, attachment, _) = self.attached();
        stream.write_all(&[READY]).unwrap();
        self.becomes(slice, State::Open);
        (stream, attachment)
    }
}

#[test]
fn each_application_gets_a_worker_for_the_api_that_it_calls() {
    let rig = rig_of_both();
    assert_eq!(rig.read(registers::VERSION), registers::SEVERAL_APIS);
    assert_eq!(rig.read(registers::API), Apis::ALL.number());
    let mut workers = Vec::new();
    for (slice, api) in [(0, ApiId::Cuda), (1, ApiId::OpenCl), (2, ApiId::Cuda)] {
        let (stream, attachment) = rig.opened(slice, api.number());
        assert_eq!(attachment.api, api);
        assert_eq!(
            attachment.version,
            remoting_proto::apis::spoken(api).version
        );
        // Too late: workers that take over the application are told the earlier API.
        rig.write(registers::SLICE_API + 4 * slice, 99);
        let port = rig.function.lock().unwrap().handle();
        assert_eq!(port.slices.claim(slice as usize).api, api.number());
        workers.push(stream);
    }
    // The next application in the slice declares its own API.
    rig.command(2, Command::Close);
    workers.pop();
    rig.becomes(2, State::Free);
    rig.command(2, Command::Open);
    let (_stream, attachment, _) = rig.attached();
    assert_eq!(attachment.api, ApiId::OpenCl);
}

#[test]
fn an_api_that_the_port_does_not_have_ends_that_slice_alone() {
    for (rig, absent) in [
        (rig(), ApiId::Cuda.number()),
        (rig_of_both(), 3),
        (rig_of_both(), u32::MAX),
    ] {
        let (other, attachment) = rig.opened(0, ApiId::OpenCl.number());
        assert_eq!(attachment.api, ApiId::OpenCl);
        rig.write(registers::SLICE_API + 4, absent);
        rig.command(1, Command::Open);
        rig.becomes(1, State::Ended);
        // No worker was requested: the next connection is for the next application.
        rig.command(1, Command::Close);
        rig.becomes(1, State::Free);
        let (_next, attachment) = rig.opened(1, ApiId::OpenCl.number());
        assert_eq!(attachment.slice, 1);
        assert_eq!(rig.state(0), State::Open);
        drop(other);
        rig.becomes(0, State::Ended);
    }
}

#[test]
fn which_api_an_application_calls_is_saved_and_absent_where_nothing_was_said() {
    let claim = |owner, api| serde_json::to_value(Claim { owner, api }).unwrap();
    assert_eq!(claim(7, 0), serde_json::json!({"owner": 7}));
    let of_both = claim(0, ApiId::Cuda.number());
    assert_eq!(of_both, serde_json::json!({"owner": 0, "api": 2}));
    for saved in [claim(7, 0), of_both] {
        let read: Claim = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), saved);
    }
}

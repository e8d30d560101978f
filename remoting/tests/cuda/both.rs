//! A pool that serves OpenCL and CUDA at one socket.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command},
    thread,
    time::Duration,
};

use gantry_remoting::{
    apis::{cuda::Cuda, opencl::OpenCl},
    link::socket,
    wire::{
        api::Spoken,
        hello::{Hello, Refused},
    },
};

use crate::library::serving_apis;

/// A pool that ends with this.
struct Pool(Child);

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_pool_serves_both_apis_also_a_build_that_disagrees_about_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut command = serving_apis(&folder.path().join("cache"), "opencl,cuda");
    let _pool = Pool(command.arg("--socket").arg(&path).spawn().unwrap());
    // What a worker answers to somebody who says this, and the files that come along.
    let answer = |hello: Hello| -> (_, Vec<OwnedFd>) {
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        socket::send_hello(&stream, hello, &[]).unwrap();
        socket::receive_hello(&stream).unwrap()
    };
    let (cuda, opencl) = (Hello::client::<Cuda>(), Hello::client::<OpenCl>());
    let mut other = opencl;
    other.version.fingerprint ^= 1;
    for _ in 0..2 {
        let (said, window) = answer(cuda);
        assert!(Hello::check_for::<Cuda>(&said).is_ok());
        assert_eq!(window.len(), 1);
        let (said, window) = answer(opencl);
        assert!(Hello::check_for::<OpenCl>(&said).is_ok());
        assert_eq!(window.len(), 1);
        // It learns which version is spoken here.
        let (said, none) = answer(other);
        let told = Hello::check(
            &said,
            &[Spoken {
                version: other.version,
                ..Spoken::of::<OpenCl>()
            }],
        );
        let theirs = opencl.version;
        assert!(matches!(told, Err(Refused::Version { theirs: told, .. }) if told == theirs));
        assert!(none.is_empty());
    }
}

#[test]
fn a_library_that_may_be_either_apis_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_gantry-accel"), "serve", "--api"])
        .args(["opencl,cuda", "--library", "libcuda.so.1", "--socket"])
        .arg(folder.path().join("socket"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("--library API=FILE"), "{text}");
}

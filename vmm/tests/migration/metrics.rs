//! The socket for metrics of a VM that is restricted to its files.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use super::{Vmm, has_kvm};

#[test]
fn a_restricted_vm_tells_metrics_alone_and_its_socket_goes_with_it() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics");
    std::fs::create_dir(&path).unwrap();
    let path = path.join("web.vm");
    let more = ["--landlock", "--metrics-socket", path.to_str().unwrap()];
    let mut vmm = Vmm::counting(dir.path(), "size=32M", &more);
    let answer = |what: &str| {
        let mut stream = UnixStream::connect(&path).unwrap();
        let request = format!("{what} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for _ in 0..3 {
        let metrics = answer("GET /api/v1/vmm.metrics");
        assert!(metrics.contains("gantry_vm_vcpus 1"), "{metrics}");
    }
    let refused = answer("PUT /api/v1/vm.pause");
    assert!(refused.starts_with("HTTP/1.1 4"), "{refused}");
    assert!(vmm.ctl(&["shutdown-vmm"]).status.success());
    let ended = vmm.process.wait().unwrap();
    assert!(ended.success(), "{ended}: {}", vmm.said());
    assert!(!path.exists());
}

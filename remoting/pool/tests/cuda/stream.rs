//! The same programs where the device is another machine's: through a stream.

use std::{
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use crate::library;

#[test]
fn programs_compute_and_print_through_a_stream_as_through_a_ring() {
    if library::is_given() {
        // This is the process that is started below.
        return;
    }
    let folder = std::env::temp_dir().join(format!("gantry-cuda-stream-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let free = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let mut pool = library::serving(&folder);
    pool.args(["--listen", &format!("tcp:{address}"), "--plain"]);
    let mut pool = pool.spawn().expect("the pool starts");
    while TcpStream::connect(&address).is_err() {
        assert!(pool.try_wait().unwrap().is_none(), "the pool has ended");
        thread::sleep(Duration::from_millis(10));
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let ended = Command::new(program)
        // What needs pinned memory is not served through a stream.
        .args(["print::", "programs::", "stream::"])
        .args(["--test-threads", "2"])
        .env(library::GIVEN, format!("tcp://{address}"))
        .output()
        .expect("it runs again");
    let (text, errors) = (&ended.stdout, &ended.stderr);
    let text = [text, errors].map(|bytes| String::from_utf8_lossy(bytes));
    pool.kill().unwrap();
    pool.wait().unwrap();
    assert!(ended.status.success(), "{}{}", text[0], text[1]);
    assert!(text[0].contains("print::"), "{}", text[0]);
}

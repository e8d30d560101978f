//! The program as it is installed: confined, over HTTP.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixListener,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use manual::{check_scarce, check_unread};

const PROGRAM: &str = env!("CARGO_BIN_EXE_gantry-exporter");

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    check_unread(
        PROGRAM,
        &["--help", "--version", "man", "completions bash", "--once"],
    );
}

#[test]
fn a_file_too_few_or_too_large_is_an_error() {
    check_scarce(PROGRAM, "--listen 0.0.0.0:0", None);
}

/// A running exporter, which is killed on drop.
struct Exporter {
    child: Child,
    address: String,
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Exporter {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["--listen", "127.0.0.1:0", "--folder"])
            .arg(folder)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let (_, rest) = line
            .split_once("http://")
            .unwrap_or_else(|| panic!("{line}"));
        let address = rest.split('/').next().unwrap().to_owned();
        thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Self { child, address }
    }

    fn ask(&self, method: &str, path: &str) -> String {
        self.ask_as("localhost", method, path)
    }

    fn ask_as(&self, host: &str, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

#[test]
fn a_confined_exporter_answers_over_http_while_others_are_silent() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("p.pool")).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let status = remoting_pool::status::Status {
                serving: 3,
                ..Default::default()
            };
            let text = serde_json::to_vec(&status).unwrap();
            stream.unwrap().write_all(&text).unwrap();
        }
    });
    let exporter = Exporter::start(folder.path());
    // More than there is room for.
    let connections = (0..100).map(|_| TcpStream::connect(&exporter.address).unwrap());
    let _silent: Vec<_> = connections.collect();
    let mut half = TcpStream::connect(&exporter.address).unwrap();
    half.write_all(b"GET /metr").unwrap();
    let answer = exporter.ask("GET", "/metrics");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(
        answer.contains("content-type: text/plain; version=0.0.4"),
        "{answer}"
    );
    for line in [
        "gantry_source_up{kind=\"pool\",source=\"p\"} 1\n",
        "gantry_pool_workers{pool=\"p\",state=\"serving\"} 3\n",
        // Of this process, which the kernel tells.
        "gantry_process_resident_bytes{kind=\"pool\",source=\"p\"} ",
    ] {
        assert!(answer.contains(line), "{line} is missing in {answer}");
    }
    assert!(exporter.ask("GET", "/healthz").ends_with("\r\n\r\nok\n"));
    assert!(exporter.ask("GET", "/other").starts_with("HTTP/1.1 404 "));
    let rebound = exporter.ask_as("evil.example", "GET", "/metrics");
    assert!(
        rebound.starts_with("HTTP/1.1 403 ") && !rebound.contains("gantry_"),
        "{rebound}"
    );
    let refused = exporter.ask("PUT", "/metrics");
    assert!(refused.starts_with("HTTP/1.1 405 ") && refused.contains("allow: GET\r\n"));
    let mut wrong = TcpStream::connect(&exporter.address).unwrap();
    wrong.write_all(b"nonsense\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = wrong.read_to_end(&mut answer);
    assert!(exporter.ask("GET", "/healthz").starts_with("HTTP/1.1 200 "));
}

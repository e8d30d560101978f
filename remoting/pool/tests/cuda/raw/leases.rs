//! The service that grants leases, with the stand-in for the driver behind the pools that it starts.

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use remoting_pool::leases::request::{Answer, Listing};

use super::*;
use crate::library::beside;

/// A service, which is killed on drop, and the pools of its leases.
struct Service {
    process: Child,
    folder: PathBuf,
}

impl Service {
    fn start(folder: &Path) -> Self {
        let driver = beside("libgantry_cuda_driver.so");
        let process = Command::new(env!("CARGO_BIN_EXE_gantry-accel"))
            .args(["leases", "--device", "0=1024", "--reserve", "24"])
            .args(["--api", "cuda", "--folder"])
            .arg(folder)
            .arg("--cache")
            .arg(folder.join("cache"))
            // The stand-in reserves addresses that count as memory.
            .args(["--", "--heap", "262144", "--library"])
            .arg(format!("cuda={}", driver.display()))
            .arg("--readable")
            .arg(driver.parent().unwrap())
            .env("GANTRY_STAND_IN_TRUSTS", "1")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let service = Self {
            process,
            folder: folder.to_owned(),
        };
        eventually(|| UnixStream::connect(folder.join("socket")).is_ok());
        service
    }

    fn connect(&self) -> Asker {
        Asker(BufReader::new(
            UnixStream::connect(self.folder.join("socket")).unwrap(),
        ))
    }

    fn ask(&self, line: &str) -> Answer {
        self.connect().ask(line)
    }

    fn list(&self) -> Listing {
        match self.ask(r#"{"list":{}}"#) {
            Answer::Leases(listing) => listing,
            other => panic!("{other:?}"),
        }
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        // Nothing is revoked.
        self.folder = PathBuf::new();
    }

    /// The process of a lease's pool, as it is written down.
    fn pool(&self, name: &str) -> i32 {
        let record = fs::read(self.folder.join("records").join(name)).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        record["process"].as_i64().unwrap().try_into().unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let records = fs::read_dir(self.folder.join("records"));
        for record in records.into_iter().flatten() {
            let name = record.unwrap().file_name();
            // SAFETY: a plain call.
            unsafe { libc::kill(self.pool(name.to_str().unwrap()), libc::SIGKILL) };
        }
    }
}

struct Asker(BufReader<UnixStream>);

impl Asker {
    fn ask(&mut self, line: &str) -> Answer {
        writeln!(self.0.get_ref(), "{line}").unwrap();
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }
}

fn eventually(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < until, "it hangs");
        thread::sleep(Duration::from_millis(5));
    }
}

fn grant(name: &str, memory: u64, until: &str) -> String {
    format!(
        r#"{{"grant":{{"name":"{name}","device":"0","weight":3,"memory":{memory},"until":"{until}","holds":["x"]}}}}"#
    )
}

fn revoke(name: &str) -> String {
    format!(r#"{{"revoke":{{"name":"{name}"}}}}"#)
}

fn socket_of(answer: Answer) -> PathBuf {
    match answer {
        Answer::Socket(path) => path,
        other => panic!("{other:?}"),
    }
}

fn allocates(client: &mut Client, mib: u64) -> Result<(), i32> {
    let allocate = Allocate {
        context: client.context,
        size: mib << 20,
        source: Source::Device(),
    };
    client.ask(&allocate).map(drop)
}

fn has_ended(client: &Client) -> bool {
    client._stream.set_nonblocking(true).unwrap();
    let read = (&client._stream).read(&mut [0]);
    !read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn leases_share_a_device_outlive_their_service_and_end_when_they_are_revoked() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(folder.path());
    let first = socket_of(service.ask(&grant("first", 600, "revoked")));
    // 624 of 1024 are gone.
    let refused = service.ask(&grant("second", 400, "revoked"));
    assert!(
        matches!(&refused, Answer::Refused(why) if why.contains("624 are granted")),
        "{refused:?}"
    );
    let second = socket_of(service.ask(&grant("second", 376, "revoked")));
    let refused = service.ask(&grant("second", 300, "revoked"));
    assert!(
        matches!(&refused, Answer::Refused(why) if why.contains("exists")),
        "{refused:?}"
    );
    assert_eq!(
        service.ask(&grant("second", 376, "revoked")),
        Answer::Socket(second.clone())
    );
    // What its programs have together is the lease's.
    let mut clients = [(); 2].map(|()| Client::at(&first));
    allocates(&mut clients[0], 500).unwrap();
    assert_eq!(allocates(&mut clients[1], 200), Err(codes::OUT_OF_MEMORY));
    allocates(&mut Client::at(&second), 200).unwrap();
    // Its programs go on while there is no service, and it is found again.
    let pool = service.pool("first");
    let line = fs::read_to_string(format!("/proc/{pool}/cmdline")).unwrap();
    for told in [
        "--weight\x003\0",
        "--name\0first\0",
        "--memory-total\x00600\0",
    ] {
        assert!(line.contains(told), "{line:?}");
    }
    service.kill();
    allocates(&mut clients[1], 10).unwrap();
    let service = Service::start(folder.path());
    let listing = service.list();
    let names: Vec<_> = listing
        .leases
        .iter()
        .map(|lease| lease.grant.name.to_string())
        .collect();
    assert_eq!(
        (names, listing.devices[0].free),
        (vec!["first".to_owned(), "second".to_owned()], 0)
    );
    assert_eq!(listing.leases[0].grant.holds, ["x"]);
    assert_eq!(service.pool("first"), pool);
    allocates(&mut clients[1], 10).unwrap();
    // A pool that is killed is started again at the same place.
    // SAFETY: a plain call.
    unsafe { libc::kill(pool, libc::SIGKILL) };
    eventually(|| clients.iter().all(has_ended));
    eventually(|| service.pool("first") != pool && base::socket::is_served(&first).is_ok());
    let client = Client::at(&first);
    let ended = service.ask(&revoke("first"));
    assert!(matches!(ended, Answer::Revoked(_)), "{ended:?}");
    assert!(has_ended(&client) && !first.exists() && !folder.path().join("cache/first").exists());
    assert_eq!(service.list().devices[0].free, 624);
}

#[test]
fn a_lease_until_the_connection_closes_ends_with_it_and_with_its_service() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(folder.path());
    let mut asker = service.connect();
    let socket = socket_of(asker.ask(&grant("short", 1000, "closed")));
    let mut client = Client::at(&socket);
    allocates(&mut client, 900).unwrap();
    drop(asker);
    eventually(|| service.list().leases.is_empty());
    assert!(has_ended(&client));
    let mut asker = service.connect();
    let socket = socket_of(asker.ask(&grant("short", 1000, "closed")));
    service.kill();
    let service = Service::start(folder.path());
    eventually(|| service.list().leases.is_empty());
    assert!(!socket.exists());
    // A connection ends what it was granted, and no other lease that has the name by then.
    let mut first = service.connect();
    socket_of(first.ask(&grant("short", 1000, "closed")));
    service.ask(&revoke("short"));
    socket_of(service.ask(&grant("short", 900, "revoked")));
    drop(first);
    thread::sleep(Duration::from_millis(100));
    let others = service.ask(&grant("short", 900, "revoked"));
    assert!(matches!(others, Answer::Socket(_)), "{others:?}");
    service.ask(&revoke("short"));
    // Invalid requests get an error, and do not affect others.
    for nonsense in [
        "x",
        "{}",
        r#"{"grant":{}}"#,
        r#"{"grant":{"name":"../../x","device":"0","memory":1}}"#,
    ] {
        let refused = asker_says(&service, nonsense);
        assert!(matches!(refused, Answer::Refused(_)), "{refused:?}");
    }
    let long = "x".repeat(1 << 17);
    assert!(matches!(asker_says(&service, &long), Answer::Refused(_)));
}

fn asker_says(service: &Service, line: &str) -> Answer {
    let stream = UnixStream::connect(service.folder.join("socket")).unwrap();
    // It may be refused before all of it is read.
    let _ = writeln!(&stream, "{line}");
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

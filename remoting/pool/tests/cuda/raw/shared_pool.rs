//! What the clients of one pool do to each other.

use std::{
    fs,
    os::unix::{fs::symlink, process::CommandExt},
    path::{Path, PathBuf},
    process::Child,
};

use remoting_proto::apis::cuda::calls::MemoryInfo;

use super::*;
use crate::library::{MEMORY, beside, serving_within};

/// A pool of a test's own.
struct Pool {
    process: Child,
    folder: tempfile::TempDir,
}

impl Pool {
    /// With this driver, in an environment that has this variable.
    fn start(driver: &Path, variable: &str) -> Self {
        Self::start_within(driver, variable, "--memory")
    }

    /// The same, with memory in the sense of this option.
    fn start_within(driver: &Path, variable: &str, memory: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = serving_within(folder.path(), "cuda", memory);
        command
            .arg("--socket")
            .arg(folder.path().join("socket"))
            .arg("--library")
            .arg(format!("cuda={}", driver.display()))
            .env(variable, "1");
        // SAFETY: an async-signal-safe call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // So that descriptors that are in flight are soon too many.
                let limit = libc::rlimit {
                    rlim_cur: 1024,
                    rlim_max: 1024,
                };
                libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
                Ok(())
            });
        }
        let process = command.spawn().unwrap();
        let mut pool = Self { process, folder };
        pool.until(|pool| UnixStream::connect(pool.socket()).is_ok());
        pool
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Waits, as long as it lives.
    fn until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let until = Instant::now() + LONG;
        while !is_so(self) {
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none(), "the pool has ended: {ended:?}");
            assert!(Instant::now() < until, "it hangs");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The number of workers that it has started, as far as their folders are still there.
    fn started(&self) -> u64 {
        let folders = fs::read_dir(self.folder.path()).unwrap();
        let own = folders.filter_map(|entry| fs::read_dir(entry.unwrap().path()).ok());
        let workers = own.flatten().filter_map(|entry| {
            let name = entry.ok()?.file_name();
            name.to_str()?.parse().ok()
        });
        workers.max().unwrap_or(0)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn driver() -> PathBuf {
    beside("libgantry_cuda_driver.so")
}

fn is_served(client: &mut Client) -> bool {
    let context = client.context;
    client.ask(&MemoryInfo { context }).is_ok()
}

#[test]
fn a_ninth_client_is_served_beside_eight_whose_workers_are_taken_over() {
    let pool = Pool::start(&driver(), "GANTRY_STAND_IN_FLOODS");
    let mut clients: Vec<_> = (0..9).map(|_| Client::at(pool.socket())).collect();
    assert!(clients.iter_mut().all(is_served));
}

#[test]
fn a_pool_that_serves_somebody_outlives_workers_that_cannot_serve() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("libcuda.so");
    symlink(driver(), &link).unwrap();
    let mut pool = Pool::start(&link, "GANTRY_STAND_IN_TRUSTS");
    let mut first = Client::at(pool.socket());
    fs::remove_file(&link).unwrap();
    // It may have a worker that has the driver already. Those behind it find none.
    let socket = pool.socket();
    let second = thread::spawn(move || is_served(&mut Client::at(socket)));
    let before = pool.started();
    pool.until(|pool| pool.started() > before + 10);
    symlink(driver(), &link).unwrap();
    assert!(second.join().unwrap());
    assert!(is_served(&mut first) && is_served(&mut Client::at(pool.socket())));
}

/// Asks for so many sixteenths of what the pool's applications may have.
fn allocates(client: &mut Client, sixteenths: u64) -> Result<(), i32> {
    let allocate = Allocate {
        context: client.context,
        size: (MEMORY << 20) / 16 * sixteenths,
        source: Source::Device(),
    };
    client.ask(&allocate).map(drop)
}

#[test]
fn two_clients_of_a_pool_with_a_total_have_it_together_until_one_has_ended() {
    let mut pool = Pool::start_within(&driver(), "GANTRY_STAND_IN_TRUSTS", "--memory-total");
    let [mut first, mut second] = [(); 2].map(|()| Client::at(pool.socket()));
    allocates(&mut first, 9).unwrap();
    assert_eq!(allocates(&mut second, 9), Err(codes::OUT_OF_MEMORY));
    allocates(&mut second, 5).unwrap();
    assert_eq!(allocates(&mut first, 5), Err(codes::OUT_OF_MEMORY));
    // Its worker is killed, and gives nothing back by itself.
    drop(first);
    let second = std::cell::RefCell::new(second);
    pool.until(|_| allocates(&mut second.borrow_mut(), 9).is_ok());
}

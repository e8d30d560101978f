//! The client as a process next to its worker.

use std::{
    os::unix::net::UnixStream,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_ring_client::{Surroundings, cuda, opencl};
use remoting_proto::{
    apis::{cuda::Cuda, opencl::OpenCl},
    wire::{Api, api::ApiId, hello::Hello},
};
use remoting_transport::{bell::Futex, socket, window::Window};

use super::{Figure, Report, now};

impl Surroundings for Report {
    fn now(&mut self) -> u64 {
        now()
    }

    fn note(&mut self, what: &str, is: &str) {
        self.notes.push((what.to_owned(), is.to_owned()));
    }

    fn time(&mut self, what: &str, median: u64, most: u64) {
        let what = what.to_owned();
        self.figures.push(Figure::Time { what, median, most });
    }

    fn copy(&mut self, what: &str, bytes: u64, median: u64) {
        let what = what.to_owned();
        self.figures.push(Figure::Copy {
            what,
            bytes,
            median,
        });
    }

    fn counted(&mut self, _begins: bool) {}
}

/// A window of the pool, and what must stay open while it is used.
struct Opened {
    window: Arc<Window>,
    _stream: UnixStream,
}

fn open<A: Api>(socket: &Path) -> Result<Opened> {
    let start = Instant::now();
    // A worker may just be starting.
    let stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) => ensure!(
                start.elapsed() < Duration::from_secs(20),
                "cannot connect to {}: {error}",
                socket.display()
            ),
        }
    };
    socket::send_hello(&stream, Hello::client::<A>(), &[]).context("cannot say hello")?;
    let (bytes, files) = socket::receive_hello(&stream).context("the worker does not answer")?;
    let hello = Hello::check_for::<A>(&bytes)?;
    let file = files.first().context("the worker sent no window")?;
    let window = Window::map(file, hello.window, hello.ring)?;
    Ok(Opened {
        window,
        _stream: stream,
    })
}

/// Connects to the pool, and measures.
pub fn run(api: ApiId, socket: &Path) -> Result<Report> {
    let bell = Futex {
        patience: Duration::from_millis(200),
    };
    let mut report = Report::default();
    match api {
        ApiId::OpenCl => opencl::run(&open::<OpenCl>(socket)?.window, bell, &mut report)?,
        ApiId::Cuda => cuda::run(&open::<Cuda>(socket)?.window, bell, &mut report)?,
        ApiId::Nvidia => bail!("native contexts have no pool: opencl or cuda"),
    }
    Ok(report)
}

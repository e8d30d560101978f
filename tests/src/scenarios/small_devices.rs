//! Entropy sources, consoles and sockets.

use std::{
    io::{Read, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::OpenOptionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::{BOOT, Guest},
};

pub const SCENARIOS: &[Entry] = &[
    ("rng: the guest gets entropy", rng),
    ("console: virtio console both ways", console),
    (
        "console: the guest follows the size of the terminal",
        console_size,
    ),
    ("console: a pseudo-terminal is named in vm.info", pty),
    ("console: the debug port is a console", debug_console),
    ("vsock: echo from host to guest, 1 MiB", vsock_to_guest),
    (
        "vsock: a slow guest gets all that a host wrote before it left",
        vsock_early_end,
    ),
    (
        "vsock: the guest reaches a socket of the host",
        vsock_to_host,
    ),
];

fn rng(context: &Context) -> Result<()> {
    let (_gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let current = guest.run("cat /sys/class/misc/hw_random/rng_current")?;
    ensure!(
        current.starts_with("virtio_rng"),
        "current source: {current}"
    );
    let bytes = guest.run("dd if=/dev/hwrng bs=64 count=4 2>/dev/null | wc -c")?;
    ensure!(bytes == "256", "{bytes} bytes");
    Ok(())
}

fn console(context: &Context) -> Result<()> {
    let socket = context.dir.join("console.sock");
    let more = json!({"console": {"mode": "Socket", "socket": socket}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("(read line < /dev/hvc0; echo got $line > /dev/hvc0) & true")?;
    let mut console = Guest::connect(&socket)?;
    console.send("hello")?;
    console.wait_for("got hello", BOOT)?;
    Ok(())
}

/// Only this scenario uses this terminal, so nobody else sends the signal.
fn console_size(context: &Context) -> Result<()> {
    let more = json!({"console": {"mode": "Pty"}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let info = gantry.info()?;
    let path = info["config"]["console"]["file"]
        .as_str()
        .context("vm.info names no terminal")?;
    let terminal = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    // A terminal keeps its size while somebody has it open, as this process does from here on.
    guest.run("exec 8</dev/hvc0; sleep 1000 & true")?;
    for (columns, rows) in [(132, 43), (80, 24)] {
        let size = libc::winsize {
            ws_col: columns,
            ws_row: rows,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the structure outlives the call, which reads it.
        let set = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        ensure!(set == 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the process is a child that has not been waited for.
        let sent = unsafe { libc::kill(gantry.pid().cast_signed(), libc::SIGWINCH) };
        ensure!(sent == 0, "{}", std::io::Error::last_os_error());
        let wanted = format!("{rows} {columns}");
        let deadline = Instant::now() + BOOT;
        loop {
            let seen = guest.run("stty size < /dev/hvc0")?;
            if seen == wanted {
                break;
            }
            ensure!(Instant::now() < deadline, "{seen} instead of {wanted}");
            thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

fn pty(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let mut config = crate::gantry::vm(&gantry.serial);
    config["serial"] = json!({"mode": "Pty"});
    gantry.put("vm.create", config)?;
    gantry.act("vm.boot")?;
    let info = gantry.info()?;
    let path = info["config"]["serial"]["file"]
        .as_str()
        .context("vm.info names no terminal")?;
    let mut terminal = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let deadline = Instant::now() + BOOT;
    let mut seen = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&seen).contains(crate::guest::READY) {
        ensure!(
            Instant::now() < deadline,
            "{}",
            String::from_utf8_lossy(&seen)
        );
        match terminal.read(&mut buffer) {
            Ok(read) => seen.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn debug_console(context: &Context) -> Result<()> {
    let file = context.dir.join("debug.txt");
    let more = json!({"debug_console": {"mode": "File", "file": file}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("agent port-write 233 from-port-e9")?;
    let text = std::fs::read_to_string(&file)?;
    ensure!(text == "from-port-e9", "debug console: {text:?}");
    Ok(())
}

fn vsock_to_guest(context: &Context) -> Result<()> {
    let socket = context.dir.join("vsock");
    let more = json!({"vsock": {"cid": 3, "socket": socket}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.start("agent vsock-echo 1234", "listening")?;
    let mut stream = vsock_client(&socket, 1234)?;
    let data: Vec<u8> = (0..1_u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut sender = stream.try_clone()?;
    let sent = data.clone();
    let sending = thread::spawn(move || sender.write_all(&sent));
    let mut back = vec![0; data.len()];
    stream.read_exact(&mut back)?;
    sending
        .join()
        .map_err(|_| anyhow::anyhow!("the sender panicked"))??;
    ensure!(back == data, "what came back is not what was sent");
    Ok(())
}

/// Opens a stream to a port of the guest.
pub(super) fn vsock_client(socket: &std::path::Path, port: u32) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    writeln!(stream, "CONNECT {port}")?;
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    ensure!(
        line.starts_with(b"OK "),
        "{}",
        String::from_utf8_lossy(&line)
    );
    Ok(stream)
}

fn vsock_early_end(context: &Context) -> Result<()> {
    let socket = context.dir.join("vsock");
    let more = json!({"vsock": {"cid": 3, "socket": socket}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.start("agent vsock-count 1234 3", "listening")?;
    let mut stream = vsock_client(&socket, 1234)?;
    // More than fits in the guest's buffer and the host's socket: the rest is written when the
    // guest begins to read, and then the host disconnects immediately.
    let bytes = 1 << 20;
    stream.write_all(&vec![7; bytes])?;
    drop(stream);
    guest.wait_for(&format!("{bytes} bytes and the end"), BOOT)?;
    Ok(())
}

fn vsock_to_host(context: &Context) -> Result<()> {
    let socket = context.dir.join("vsock");
    let listener = UnixListener::bind(context.dir.join("vsock_77"))?;
    let server = thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut buffer = [0; 64];
        let read = stream.read(&mut buffer)?;
        stream.write_all(&buffer[..read])
    });
    let more = json!({"vsock": {"cid": 42, "socket": socket}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let answer = guest.run("agent vsock-send 77 over-vsock")?;
    ensure!(answer == "over-vsock", "{answer}");
    server
        .join()
        .map_err(|_| anyhow::anyhow!("the server panicked"))??;
    Ok(())
}

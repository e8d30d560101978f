//! What runs in L2 besides busybox: sockets between guest and host, a driver in user space.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{edu, edu_vfio, exits, memory_checker, nouveau, pci, raw_gpu};

/// The host's context id.
const HOST_CID: u32 = 2;
/// Accept from anywhere.
const ANY_CID: u32 = u32::MAX;

/// Runs an agent command: `vsock-echo PORT` serves one connection, `vsock-count PORT SECONDS` takes
/// one, waits, and prints how many bytes come before it ends; `vsock-send PORT TEXT` sends a text
/// to the host and prints the answer; `port-write PORT TEXT` writes bytes to an I/O port;
/// `edu-check` tries an edu device (that at a path in sysfs), `edu-memory` and `edu-msix` what only that of
/// [`edu_server`](crate::edu_server) has, `edu-write-outside ADDRESS` has it write to an address,
/// `edu-vfio` tries one behind an IOMMU, `edu-vfio-copy` has it copy for a moment, `edu-vfio-peers`
/// has one write to the other;
/// `edu-copy` has it copy until it goes, `edu-peers PATH PATH` has one write to the other;
/// `edu-move PATH ADDRESS` moves its memory, `edu-poke PATH ADDRESS VALUE` has it write 32 bits;
/// `pci-sleep PATH` puts a device to sleep and wakes it, `pci-reset PATH` resets it; `refuse-eject SLOT STATUS` answers to the
/// next request to give a device up; `gpu-list`, `gpu-check`, `gpu-m2mf`, `gpu-compute`, `gpu-evict`, `gpu-channels COUNT`, `gpu-submit COUNT`, `gpu-load MIB SECONDS`
/// and `gpu-misuse WHAT [FILE]` use [a GPU](crate::nouveau), `gpu-attack`, `gpu-blank` and `gpu-flush COUNT` one
/// [without a driver](crate::raw_gpu); `read-blocks PATH COUNT` reads blocks of 4 KiB and prints how
/// many seconds that took; `check-memory MIB RATE [MS]` [checks](crate::memory_checker) memory, of which it writes so many
/// MiB a second, with pauses of so many milliseconds; `ask PATH LINE` writes a line to a Unix socket and prints the line
/// that is answered;
/// `tcp-send ADDRESS MIB` and `tcp-receive ADDRESS` move bytes that mean nothing, as fast as they
/// can.
pub fn run(args: &[String]) -> Result<()> {
    match args {
        [command, port] if command == "vsock-echo" => echo(port.parse()?),
        [command, port, seconds] if command == "vsock-count" => {
            count(port.parse()?, seconds.parse()?)
        }
        [command, port, text] if command == "vsock-send" => send(port.parse()?, text),
        [command, port, text] if command == "port-write" => port_write(port.parse()?, text),
        [command, path] if command == "pci-sleep" => pci::sleep(path),
        [command, path] if command == "pci-reset" => pci::reset(path),
        [command, slot, status] if command == "refuse-eject" => {
            let digits = status.trim_start_matches("0x");
            pci::refuse_eject(slot.parse()?, u32::from_str_radix(digits, 16)?)
        }
        [command, path, count] if command == "read-blocks" => {
            exits::read_blocks(path, count.parse()?)
        }
        [command, mib, rate] if command == "check-memory" => {
            memory_checker::run(mib.parse()?, rate.parse()?, Duration::ZERO)
        }
        [command, mib, rate, pause] if command == "check-memory" => {
            let pause = Duration::from_millis(pause.parse()?);
            memory_checker::run(mib.parse()?, rate.parse()?, pause)
        }
        [command] if command == "edu-copy" => edu::copy(),
        [command] if command == "edu-check" => edu::check(None),
        [command, path] if command == "edu-check" => edu::check(Some(path)),
        [command, one, other] if command == "edu-peers" => edu::peers(one, other),
        [command] if command == "edu-vfio" => edu_vfio::check(),
        [command] if command == "edu-vfio-copy" => edu_vfio::copy(),
        [command] if command == "edu-vfio-peers" => edu_vfio::peers(),
        [command, path, address] if command == "edu-move" => edu::move_to(path, number(address)?),
        [command, path, address, value] if command == "edu-poke" => {
            edu::poke(path, number(address)?, number(value)? as u32)
        }
        [command] if command == "edu-memory" => edu::memory(),
        [command] if command == "gpu-list" => nouveau::list(),
        [command] if command == "gpu-check" => nouveau::check(),
        [command] if command == "gpu-m2mf" => nouveau::m2mf(),
        [command] if command == "gpu-compute" => nouveau::compute(),
        [command] if command == "gpu-evict" => nouveau::evict(),
        [command, count] if command == "gpu-channels" => {
            nouveau::channels::copy(count.parse()?, None)
        }
        [command, count, go] if command == "gpu-channels" => {
            nouveau::channels::copy(count.parse()?, Some(go))
        }
        [command, what] if command == "gpu-misuse" => nouveau::misuse(what, None),
        [command, what, go] if command == "gpu-misuse" => nouveau::misuse(what, Some(go)),
        [command, count] if command == "gpu-submit" => nouveau::submits(count.parse()?),
        [command, size, seconds] if command == "gpu-load" => {
            nouveau::load(size.parse()?, seconds.parse()?)
        }
        [command, count] if command == "gpu-flush" => raw_gpu::flushes(count.parse()?),
        [command] if command == "gpu-attack" => raw_gpu::attack(),
        [command] if command == "gpu-blank" => raw_gpu::blank(),
        [command] if command == "edu-msix" => edu::msix(),
        [command, address] if command == "edu-write-outside" => {
            edu::write_outside(number(address)?)
        }
        [command, path, line] if command == "ask" => ask(path, line),
        [command, address, mib] if command == "tcp-send" => tcp_send(address, mib.parse()?),
        [command, address] if command == "tcp-receive" => {
            drain(&mut TcpStream::connect(address)?).map(|_| ())
        }
        _ => bail!(
            "agent commands: vsock-echo PORT, vsock-count PORT SECONDS, vsock-send PORT TEXT, \
             port-write PORT TEXT, pci-sleep PATH, pci-reset PATH, edu-move PATH ADDRESS, \
             edu-poke PATH ADDRESS VALUE, refuse-eject SLOT STATUS, read-blocks PATH COUNT, \
             edu-check [PATH], edu-copy, edu-vfio, edu-vfio-copy, edu-vfio-peers, edu-memory, edu-msix, edu-peers PATH PATH, edu-write-outside ADDRESS, \
             gpu-list, gpu-check, gpu-m2mf, gpu-compute, gpu-evict, gpu-channels COUNT [FILE], gpu-misuse WHAT [FILE], \
             gpu-submit COUNT, gpu-load MIB SECONDS, gpu-flush COUNT, gpu-attack, gpu-blank, \
             check-memory MIB RATE [MS], ask PATH LINE, tcp-send ADDRESS MIB, tcp-receive ADDRESS"
        ),
    }
}

/// A number in hexadecimal digits.
fn number(text: &str) -> Result<u64> {
    Ok(u64::from_str_radix(text.trim_start_matches("0x"), 16)?)
}

fn ask(path: &str, line: &str) -> Result<()> {
    let mut stream = UnixStream::connect(path)?;
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    print!("{answer}");
    Ok(())
}

fn tcp_send(address: &str, mib: usize) -> Result<()> {
    fill(&mut TcpStream::connect(address)?, mib)
}

/// Writes so many MiB to a stream, in pieces of 64 KiB.
pub fn fill(stream: &mut TcpStream, mib: usize) -> Result<()> {
    let piece = [0x5a; 65536];
    for _ in 0..mib * 16 {
        stream.write_all(&piece)?;
    }
    Ok(())
}

/// Reads a stream to its end, and returns how many bytes there were.
pub fn drain(stream: &mut TcpStream) -> Result<usize> {
    let mut piece = [0; 65536];
    let mut total = 0;
    loop {
        match stream.read(&mut piece)? {
            0 => return Ok(total),
            read => total += read,
        }
    }
}

fn port_write(port: u16, text: &str) -> Result<()> {
    // SAFETY: no pointers involved.
    if unsafe { libc::ioperm(port.into(), 1, 1) } != 0 {
        return Err(std::io::Error::last_os_error()).context("no access to the port");
    }
    for byte in text.bytes() {
        // SAFETY: the kernel has allowed access to this port; no memory is involved.
        unsafe {
            std::arch::asm!(
                "out dx, al",
                in("dx") port,
                in("al") byte,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
    Ok(())
}

/// Waits for a client.
fn accept(port: u32) -> Result<std::fs::File> {
    let socket = socket()?;
    let address = address(ANY_CID, port);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the address is a sockaddr_vm of the given size; the descriptor is open.
    let listening = unsafe {
        libc::bind(fd, (&raw const address).cast(), address_len()) == 0 && libc::listen(fd, 1) == 0
    };
    if !listening {
        return Err(std::io::Error::last_os_error()).context("cannot listen on vsock");
    }
    println!("listening");
    // SAFETY: accept without an address to fill in.
    let client = unsafe { libc::accept(fd, std::ptr::null_mut(), std::ptr::null_mut()) };
    if client < 0 {
        return Err(std::io::Error::last_os_error()).context("cannot accept on vsock");
    }
    // SAFETY: the descriptor was created just now.
    Ok(std::fs::File::from(unsafe { OwnedFd::from_raw_fd(client) }))
}

fn count(port: u32, seconds: u64) -> Result<()> {
    let mut client = accept(port)?;
    std::thread::sleep(std::time::Duration::from_secs(seconds));
    let bytes = std::io::copy(&mut client, &mut std::io::sink())?;
    println!("{bytes} bytes and the end");
    Ok(())
}

fn echo(port: u32) -> Result<()> {
    let mut client = accept(port)?;
    let mut buffer = [0; 65536];
    loop {
        match client.read(&mut buffer)? {
            0 => return Ok(()),
            read => client.write_all(&buffer[..read])?,
        }
    }
}

fn send(port: u32, text: &str) -> Result<()> {
    let socket = socket()?;
    let address = address(HOST_CID, port);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the address is a sockaddr_vm of the given size; the descriptor is open.
    if unsafe { libc::connect(fd, (&raw const address).cast(), address_len()) } != 0 {
        return Err(std::io::Error::last_os_error()).context("cannot connect to the host");
    }
    let mut stream = std::fs::File::from(socket);
    stream.write_all(text.as_bytes())?;
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    println!("{}", String::from_utf8_lossy(&answer));
    Ok(())
}

fn socket() -> Result<OwnedFd> {
    // SAFETY: no pointers involved.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error()).context("no vsock in this kernel");
    }
    // SAFETY: the descriptor was created just now.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all zeroes are a valid value of this plain struct.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn address_len() -> libc::socklen_t {
    size_of::<libc::sockaddr_vm>() as libc::socklen_t
}

//! Clients that were written for Cloud Hypervisor, byte by byte: what they send, and how they parse
//! the replies. The requests of libvirt (11.3, `ch` driver) were recorded while it drove Gantry.
//! Those of the command-line client `ch-remote` and of Kata Containers are derived from their
//! sources. The guest halts at once: what requests do to a real guest is tested elsewhere. One
//! client is included unmodified: the crate `cloud-hypervisor-client`.

use std::{
    ffi::OsStr,
    io::{Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::{Context, Entry, disks::image};
use crate::{gantry::Gantry, http};

pub const SCENARIOS: &[Entry] = &[
    (
        "clients: a client that others made for Cloud Hypervisor drives a guest",
        foreign_client,
    ),
    (
        "clients: a client that others made for Cloud Hypervisor moves a guest to another VMM",
        foreign_client_moves,
    ),
    (
        "clients: the requests of ch-remote get answers that it reads",
        ch_remote,
    ),
    (
        "clients: the requests of libvirt start, save and restore",
        libvirt,
    ),
    (
        "clients: the requests of Kata Containers start and stop a sandbox",
        kata_containers,
    ),
];

fn foreign_client(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let mut config = crate::gantry::vm(&gantry.serial);
    let disk = context.dir.join("disk.raw");
    image(&disk, 1 << 20)?;
    let more = json!({
        "cpus": {"max_vcpus": 2},
        "disks": [{"path": disk, "image_type": "Raw"}],
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
    });
    crate::gantry::merge(&mut config, more);
    let path = context.dir.join("config.json");
    std::fs::write(&path, config.to_string())?;
    run_foreign_client([&gantry.socket, &path, &context.dir].map(|path| path.as_os_str()))?;
    ends(gantry)
}

fn run_foreign_client<const N: usize>(arguments: [&OsStr; N]) -> Result<()> {
    let output = Command::new("/bin/ch-client").args(arguments).output()?;
    ensure!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn foreign_client_moves(context: &Context) -> Result<()> {
    let kernel = halting_kernel(context)?;
    let first = context.dir.join("first");
    let second = context.dir.join("second");
    std::fs::create_dir(&first)?;
    std::fs::create_dir(&second)?;
    let source = Gantry::start(&first, &[])?;
    source.put(
        "vm.create",
        json!({
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
            "memory": {"size": 64_u64 << 20},
            "payload": {"kernel": kernel},
            "serial": {"mode": "Null"},
            "console": {"mode": "Off"},
        }),
    )?;
    source.act("vm.boot")?;
    let destination = Gantry::start(&second, &[])?;
    let folder = context.dir.as_os_str();
    let sockets = [source.socket.as_os_str(), destination.socket.as_os_str()];
    run_foreign_client([sockets[0], sockets[1], folder, OsStr::new("migrate")])?;
    ensure!(destination.state()? == "Running");
    ends(source)
}

/// Maximum wait for a reply.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Creates an ELF kernel with a PVH entry that halts permanently.
fn halting_kernel(context: &Context) -> Result<PathBuf> {
    const AT: u32 = 0x10_0000;
    /// cli; hlt; jmp to the hlt.
    const CODE: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];
    let words = |values: &[u64]| -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    };
    // 64 bits, little-endian; an executable for x86-64; entry; program headers at 64, no sections.
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    bytes.extend(words(&[AT.into(), 64, 0]));
    bytes.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    // The code segment, and the note with its entry point: flags and type, offset, addresses,
    // sizes.
    let (code, note) = (176, 180);
    bytes.extend(words(&[1 | 5 << 32, code, AT.into(), AT.into(), 4, 4, 4]));
    bytes.extend(words(&[4 | 4 << 32, note, 0, 0, 24, 24, 4]));
    bytes.extend(CODE);
    // XEN_ELFNOTE_PHYS32_ENTRY, 18, of "Xen".
    for value in [4, 8, 18] {
        bytes.extend(u32::to_le_bytes(value));
    }
    bytes.extend(b"Xen\0");
    bytes.extend(words(&[AT.into()]));
    let path = context.dir.join("halt.elf");
    std::fs::write(&path, bytes)?;
    Ok(path)
}

fn connect(socket: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Sends `bytes` in one message with descriptors.
pub(super) fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
    let mut vector = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = [0_u64; 8];
    // SAFETY: an all-zero message header is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    let len = u32::try_from(size_of_val(fds))?;
    // SAFETY: pure arithmetic.
    let (space, len) = unsafe { (libc::CMSG_SPACE(len), libc::CMSG_LEN(len)) };
    ensure!(space as usize <= size_of_val(&control), "too many");
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = space as usize;
    // SAFETY: the buffer has room for one header and the descriptors, as checked above.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = len as usize;
        std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    ensure!(usize::try_from(sent)? == bytes.len(), "sent {sent} bytes");
    Ok(())
}

/// Opens one queue of a new tap interface, like a management tool does.
fn tap(name: &str) -> Result<OwnedFd> {
    // SAFETY: opens a file.
    let fd = unsafe { libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    ensure!(fd >= 0, "no /dev/net/tun");
    // SAFETY: just opened.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an all-zero value of this plain struct is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the request outlives the call.
    let made = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(made == 0, "cannot make a tap");
    Ok(fd)
}

/// `ch-remote`, which opens a connection for each command.
struct ChRemote<'a>(&'a Path);

impl ChRemote<'_> {
    /// Sends a command in pieces, as the client does, and reads the reply in the client's way.
    fn ask(
        &self,
        method: &str,
        command: &str,
        body: Option<&str>,
        fds: &[RawFd],
    ) -> Result<Result<Option<String>, Vec<String>>> {
        let mut stream = connect(self.0)?;
        let head =
            format!("{method} /api/v1/{command} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
        if fds.is_empty() {
            stream.write_all(head.as_bytes())?;
        } else {
            send_with_fds(&stream, head.as_bytes(), fds)?;
        }
        if let Some(body) = body {
            stream.write_all(format!("Content-Length: {}\r\n", body.len()).as_bytes())?;
        }
        stream.write_all(b"\r\n")?;
        if let Some(body) = body {
            stream.write_all(body.as_bytes())?;
        }
        let (status, body) =
            Self::read(&mut stream).with_context(|| format!("the answer to {command}"))?;
        if matches!(status, 100 | 200 | 204) {
            return Ok(Ok(body));
        }
        let body = body.context("an error without an explanation")?;
        let chain: Vec<String> = serde_json::from_str(&body)
            .with_context(|| format!("{command}: an error that is no list: {body}"))?;
        ensure!(!chain.is_empty(), "{command}: an empty error");
        Ok(Err(chain))
    }

    /// The client parses the rest of the status line as a number, accepts one spelling of
    /// Content-Length, and stops reading as soon as it can.
    fn read(stream: &mut UnixStream) -> Result<(u16, Option<String>)> {
        let mut text = String::new();
        loop {
            let mut piece = [0; 256];
            let count = stream.read(&mut piece)?;
            if count == 0 {
                break;
            }
            text.push_str(std::str::from_utf8(&piece[..count])?);
            let Some(end) = text.find("\r\n\r\n") else {
                continue;
            };
            match text.split_once("Content-Length: ") {
                None => break,
                Some((_, rest)) => {
                    let length: usize = rest.lines().next().unwrap_or_default().trim().parse()?;
                    if text.len() >= end + 4 + length {
                        break;
                    }
                }
            }
        }
        let (line, _) = text.split_once('\r').context("no status line")?;
        let status = line.strip_prefix("HTTP/1.1 ").context("no HTTP")?;
        let status = status.trim().parse().context(line.to_owned())?;
        let has_body = text.contains("Content-Length: ");
        let body = text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        Ok((status, body.filter(|_| has_body)))
    }

    /// Sends a command that must succeed, and returns its output.
    fn does(&self, method: &str, command: &str, body: Option<&str>) -> Result<Value> {
        self.does_with(method, command, body, &[])
    }

    fn does_with(
        &self,
        method: &str,
        command: &str,
        body: Option<&str>,
        fds: &[RawFd],
    ) -> Result<Value> {
        match self.ask(method, command, body, fds)? {
            Ok(None) => Ok(Value::Null),
            Ok(Some(text)) if text.is_empty() => Ok(Value::Null),
            Ok(Some(text)) => Ok(serde_json::from_str(&text)?),
            Err(chain) => bail!("{command}: {}", chain.join(": ")),
        }
    }

    /// Sends a command that must fail with a text.
    fn fails(&self, command: &str, body: Option<&str>) -> Result<String> {
        match self.ask("PUT", command, body, &[])? {
            Ok(output) => bail!("{command} succeeded: {output:?}"),
            Err(chain) => Ok(chain.join(": ")),
        }
    }
}

fn ch_remote(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let path = |name: &str| context.dir.join(name);
    for name in ["a.raw", "b.raw", "p.raw"] {
        image(&path(name), 4 << 20)?;
    }
    let client = ChRemote(&gantry.socket);
    ensure!(client.does("GET", "vmm.ping", None)?["version"].is_string());
    client.fails("vm.boot", None)?;
    // The contents of a file, unmodified.
    let config = json!({
        "payload": {"kernel": halting_kernel(context)?},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "Null"},
        "console": {"mode": "Off"},
        "balloon": {"size": 0},
        "disks": [{"path": path("a.raw"), "id": "a", "image_type": "Raw"}],
    });
    let text = format!("{config:#}\n");
    client.does("PUT", "vm.create", Some(&text))?;
    client.fails("vm.create", Some(&text))?;
    ensure!(client.does("GET", "vm.info", None)?["state"] == "Created");
    client.does("PUT", "vm.boot", None)?;
    client.does("GET", "vm.counters", None)?;
    let resize = r#"{"desired_vcpus":2,"desired_ram":null,"desired_balloon":null}"#;
    client.does("PUT", "vm.resize", Some(resize))?;
    let resize = r#"{"desired_vcpus":null,"desired_ram":null,"desired_balloon":4194304}"#;
    client.does("PUT", "vm.resize", Some(resize))?;
    let resize = r#"{"id":"a","desired_size":8388608}"#;
    client.does("PUT", "vm.resize-disk", Some(resize))?;
    client.fails("vm.resize-zone", Some(r#"{"id":"z","desired_ram":1}"#))?;
    ch_remote_devices(&client, &path)?;
    // A halted guest does not release anything; the next one does not get it.
    client.does("PUT", "vm.reboot", None)?;
    let info = client.does("GET", "vm.info", None)?;
    for id in ["b", "n", "p", "v"] {
        ensure!(
            info["device_tree"].get(id).is_none(),
            "{id} is there: {info}"
        );
    }
    ensure!(
        !crate::net::exists("ch-remote0"),
        "the tap of a card that is gone is held"
    );
    client.does("PUT", "vm.power-button", None)?;
    client.does("PUT", "vm.pause", None)?;
    let url = |name: &str| format!("file://{}", path(name).display());
    let dump = json!({"destination_url": url("core")}).to_string();
    client.does("PUT", "vm.coredump", Some(&dump))?;
    let snapshot = json!({"destination_url": url("snapshot")}).to_string();
    client.does("PUT", "vm.snapshot", Some(&snapshot))?;
    client.does("PUT", "vm.resume", None)?;
    let migration = r#"{"destination_url":"unix:/no/such/socket","local":false,"preserve_source":false,"downtime_ms":300,"timeout_s":3600,"timeout_strategy":"Cancel","connections":1,"tls_dir":null,"memory_mode":"Precopy"}"#;
    // It starts, and fails since nobody is there; the VM continues.
    client.does("PUT", "vm.send-migration", Some(migration))?;
    crate::opencl::until("the migration's end", || {
        Ok(client.does("GET", "vm.migration", None)?["phase"] == "Failed")
    })?;
    ensure!(client.does("GET", "vm.info", None)?["state"] == "Running");
    // An NMI would wake the guest, which then has nothing to do.
    client.does("PUT", "vm.pause", None)?;
    client.does("PUT", "vm.nmi", None)?;
    client.does("PUT", "vm.shutdown", None)?;
    ensure!(client.does("GET", "vm.info", None)?["state"] == "Shutdown");
    client.does("PUT", "vm.delete", None)?;
    let restore = json!({
        "source_url": url("snapshot"), "prefault": false, "memory_restore_mode": "Copy",
        "net_fds": null, "vfio_fds": null, "iommufd_fd": null, "resume": true, "zone_updates": [],
    });
    client.does("PUT", "vm.restore", Some(&restore.to_string()))?;
    ensure!(client.does("GET", "vm.info", None)?["state"] == "Running");
    client.does("PUT", "vmm.shutdown", None)?;
    ends(gantry)
}

/// Devices with all fields that the client knows, and without them.
fn ch_remote_devices(client: &ChRemote<'_>, path: &dyn Fn(&str) -> PathBuf) -> Result<()> {
    let disk = json!({
        "path": path("b.raw"), "readonly": false, "direct": false, "iommu": false,
        "num_queues": 1, "queue_size": 128, "vhost_user": false, "vhost_socket": null,
        "rate_limit_group": null, "rate_limiter_config": null, "id": "b",
        "disable_io_uring": false, "disable_aio": false, "pci_segment": 0, "serial": null,
        "queue_affinity": null, "backing_files": false, "sparse": true, "image_type": "Raw",
        "lock_granularity": "ByteRange",
    });
    let answer = client.does("PUT", "vm.add-disk", Some(&disk.to_string()))?;
    ensure!(answer["id"] == "b" && answer["bdf"].is_string(), "{answer}");
    let queue = tap("ch-remote0")?;
    let net = json!({
        "tap": null, "ip": null, "mask": null, "mac": "52:54:00:12:34:56", "host_mac": null,
        "mtu": null, "iommu": false, "num_queues": 2, "queue_size": 256, "vhost_user": false,
        "vhost_socket": null, "vhost_mode": "Client", "id": "n", "fds": null,
        "rate_limiter_config": null, "pci_segment": 0, "offload_tso": true, "offload_ufo": true,
        "offload_csum": true,
    });
    let fds = [queue.as_raw_fd()];
    client.does_with("PUT", "vm.add-net", Some(&net.to_string()), &fds)?;
    drop(queue);
    let pmem = json!({
        "file": path("p.raw"), "size": null, "iommu": false, "discard_writes": false, "id": "p",
        "pci_segment": 0,
    });
    client.does("PUT", "vm.add-pmem", Some(&pmem.to_string()))?;
    let vsock = json!({
        "cid": 3, "socket": path("vsock"), "iommu": false, "id": "v", "pci_segment": 0,
    });
    client.does("PUT", "vm.add-vsock", Some(&vsock.to_string()))?;
    let device = r#"{"path":"/no/such/device","iommu":false,"id":"g","pci_segment":0,"x_nv_gpudirect_clique":null,"x_exclude_mmap_bars":[]}"#;
    client.fails("vm.add-device", Some(device))?;
    let device = r#"{"socket":"/no/such/socket","id":"u","pci_segment":0}"#;
    client.fails("vm.add-user-device", Some(device))?;
    let shared =
        r#"{"tag":"t","socket":"/s","num_queues":1,"queue_size":1024,"id":null,"pci_segment":0}"#;
    client.fails("vm.add-fs", Some(shared))?;
    let vdpa = r#"{"path":"/no/vdpa","num_queues":1,"iommu":false,"id":null,"pci_segment":0}"#;
    client.fails("vm.add-vdpa", Some(vdpa))?;
    for id in ["b", "n", "p", "v"] {
        let body = json!({"id": id}).to_string();
        client.does("PUT", "vm.remove-device", Some(&body))?;
    }
    Ok(())
}

fn ends(mut gantry: Gantry) -> Result<()> {
    let status = gantry.wait_exit()?;
    ensure!(status.success(), "{status}\n{}", gantry.log());
    Ok(())
}

/// libvirt sends requests without descriptors on a persistent connection.
struct Libvirt<'a> {
    socket: &'a Path,
    kept: UnixStream,
}

impl<'a> Libvirt<'a> {
    fn new(socket: &'a Path) -> Result<Self> {
        let kept = connect(socket)?;
        Ok(Self { socket, kept })
    }

    fn exchange(stream: &mut UnixStream, what: &str) -> Result<Value> {
        let answer = http::read_answer(stream)?;
        ensure!(
            matches!(answer.status, 200 | 204),
            "{what}: {} {}",
            answer.status,
            answer.text
        );
        Ok(answer.body)
    }

    fn put(&mut self, path: &str, body: Option<&Value>) -> Result<()> {
        let body = body.map(ToString::to_string);
        let kind = match body {
            Some(_) => "Content-Type: application/json\r\n",
            None => "",
        };
        let body = body.unwrap_or_default();
        let request = format!(
            "PUT /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             {kind}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.kept.write_all(request.as_bytes())?;
        Self::exchange(&mut self.kept, path).map(drop)
    }

    fn info(&mut self) -> Result<Value> {
        let request = "GET /api/v1/vm.info HTTP/1.1\r\nHost: localhost\r\n\
                       Accept: application/json\r\nContent-Type: application/json\r\n\r\n";
        self.kept.write_all(request.as_bytes())?;
        Self::exchange(&mut self.kept, "vm.info")
    }

    /// Sends one message on a separate connection, with all descriptors; without any, their list is
    /// empty.
    fn put_with_fds(&self, path: &str, body: &Value, fds: &[RawFd]) -> Result<()> {
        let body = body.to_string();
        let request = format!(
            "PUT /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = connect(self.socket)?;
        send_with_fds(&stream, request.as_bytes(), fds)?;
        Self::exchange(&mut stream, path).map(drop)
    }
}

fn libvirt(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let path = context.dir.join("d.raw");
    image(&path, 4 << 20)?;
    let mut libvirt = Libvirt::new(&gantry.socket)?;
    let config = json!({
        "serial": {"mode": "Pty"},
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 64 << 20},
        "payload": {"kernel": halting_kernel(context)?, "cmdline": "console=ttyS0"},
        "disks": [{"path": path}],
    });
    libvirt.put("vm.create", Some(&config))?;
    let queue = tap("libvirt0")?;
    let card = json!({"id": "net_0", "mac": "52:54:00:11:22:33", "num_queues": 2});
    libvirt.put_with_fds("vm.add-net", &card, &[queue.as_raw_fd()])?;
    drop(queue);
    libvirt.put("vm.boot", None)?;
    // It looks for the threads as soon as it has the reply.
    let names = gantry.thread_names()?;
    for name in ["vcpu0", "vcpu1"] {
        ensure!(names.iter().any(|known| known == name), "{names:?}");
    }
    let info = libvirt.info()?;
    ensure!(info["state"] == "Running", "{info}");
    let terminal = info["config"]["serial"]["file"].as_str();
    ensure!(
        terminal.is_some_and(|path| path.starts_with("/dev/pts/")),
        "{info}"
    );
    libvirt.put("vm.pause", None)?;
    ensure!(libvirt.info()?["state"] == "Paused");
    libvirt.put("vm.resume", None)?;
    libvirt.put("vm.reboot", None)?;
    ensure!(libvirt.info()?["state"] == "Running");
    libvirt.put("vm.pause", None)?;
    let directory = context.dir.join("save");
    let url = format!("file://{}", directory.display());
    libvirt.put("vm.snapshot", Some(&json!({"destination_url": url})))?;
    libvirt.put("vmm.shutdown", None)?;
    ends(gantry)?;
    ensure!(!crate::net::exists("libvirt0"), "the tap is left behind");
    // A new process restores it, with a different tap for the card.
    let gantry = Gantry::start(&context.dir, &[])?;
    let mut libvirt = Libvirt::new(&gantry.socket)?;
    let queue = tap("libvirt1")?;
    let body = json!({"source_url": url, "net_fds": [{"id": "net_0", "num_fds": 1}]});
    libvirt.put_with_fds("vm.restore", &body, &[queue.as_raw_fd()])?;
    drop(queue);
    ensure!(libvirt.info()?["state"] == "Paused");
    libvirt.put("vm.resume", None)?;
    ensure!(libvirt.info()?["state"] == "Running");
    libvirt.put("vm.shutdown", None)?;
    ensure!(libvirt.info()?["state"] == "Shutdown");
    libvirt.put("vm.delete", None)?;
    ensure!(!crate::net::exists("libvirt1"), "the tap is held");
    // A configuration without descriptors.
    libvirt.put("vm.create", Some(&config))?;
    libvirt.put("vm.boot", None)?;
    libvirt.put("vm.pause", None)?;
    libvirt.put("vm.snapshot", Some(&json!({"destination_url": url})))?;
    libvirt.put("vm.delete", None)?;
    libvirt.put_with_fds("vm.restore", &json!({"source_url": url}), &[])?;
    libvirt.put("vmm.shutdown", None)?;
    ends(gantry)
}

fn kata_containers(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let path = context.dir.join("image.raw");
    image(&path, 4 << 20)?;
    let ask = |method: &str, path: &str, body: Option<&Value>| -> Result<Value> {
        let body = body.map(ToString::to_string);
        let kind = match &body {
            Some(body) => format!(
                "Content-Length: {}\r\nAccept: application/json\r\n\
                 Content-Type: application/json\r\n",
                body.len()
            ),
            // Go adds this to a PUT without a body.
            None if method == "PUT" => "Content-Length: 0\r\n".to_owned(),
            None => "Accept: application/json\r\n".to_owned(),
        };
        let request = format!(
            "{method} /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n\
             User-Agent: OpenAPI-Generator/1.0.0/go\r\n{kind}Accept-Encoding: gzip\r\n\r\n{}",
            body.unwrap_or_default()
        );
        let mut stream = connect(&gantry.socket)?;
        stream.write_all(request.as_bytes())?;
        Libvirt::exchange(&mut stream, path)
    };
    ensure!(ask("GET", "vmm.ping", None)?["version"].is_string());
    let config = json!({
        "payload": {"kernel": halting_kernel(context)?, "cmdline": "console=ttyS0"},
        "platform": {"num_pci_segments": 2},
        "memory": {
            "size": 268_435_456, "shared": true, "hugepages": false, "mergeable": false,
            "prefault": false, "hotplug_size": 268_435_456, "hotplug_method": "Acpi",
        },
        "cpus": {
            "boot_vcpus": 1, "max_vcpus": 2,
            "topology": {
                "threads_per_core": 1, "cores_per_die": 2, "dies_per_package": 1, "packages": 1,
            },
        },
        "rng": {"src": "/dev/urandom", "iommu": false},
        "disks": [{
            "path": path, "readonly": true, "vhost_user": false, "num_queues": 1,
            "queue_size": 128, "image_type": "Raw",
        }],
        "serial": {"mode": "Null"},
        "console": {"mode": "Off"},
        "vsock": {"cid": 3, "socket": context.dir.join("clh.sock")},
        "iommu": false,
        "watchdog": false,
    });
    ask("PUT", "vm.create", Some(&config))?;
    ensure!(ask("GET", "vm.info", None)?["state"] == "Created");
    // All cards over one connection, each with its descriptors.
    let mut raw = connect(&gantry.socket)?;
    for (name, mac) in [
        ("kata0", "02:00:ca:fe:00:01"),
        ("kata1", "02:00:ca:fe:00:02"),
    ] {
        let queue = tap(name)?;
        let body = json!({
            "ip": "192.168.249.1", "mask": "255.255.255.0", "mac": mac, "iommu": false,
            "num_queues": 2, "queue_size": 256, "vhost_user": false, "vhost_mode": "Client",
            "pci_segment": 0,
        });
        let body = body.to_string();
        let request = format!(
            "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Length: {}\r\nContent-Type: application/json\r\n\r\n{body}",
            body.len()
        );
        send_with_fds(&raw, request.as_bytes(), &[queue.as_raw_fd()])?;
        Libvirt::exchange(&mut raw, "vm.add-net")?;
    }
    ask("PUT", "vm.boot", None)?;
    let info = ask("GET", "vm.info", None)?;
    ensure!(info["state"] == "Running", "{info}");
    ensure!(info["memory_actual_size"] == 268_435_456, "{info}");
    let resize = json!({"desired_vcpus": 2, "desired_ram": 402_653_184});
    ask("PUT", "vm.resize", Some(&resize))?;
    ask("PUT", "vmm.shutdown", None)?;
    ends(gantry)
}

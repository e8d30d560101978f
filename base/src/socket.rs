//! Unix sockets: passing descriptors (`SCM_RIGHTS`), the user of the peer, and non-blocking
//! connects.

use std::{
    error::Error,
    fmt, fs,
    io::{self, Read},
    mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
            net::{UnixDatagram, UnixListener, UnixStream},
        },
    },
    path::Path,
};

/// Maximum number of files in a message.
const MOST_FILES: usize = 8;
/// Size, in 64-bit words, of the control message for [`MOST_FILES`] files.
const CONTROL: usize = 6;

/// The address of a path.
fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: an all-zero address is valid.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The kernel would take another path, or make one that belongs to no file.
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path of a socket is empty or has a zero byte",
        ));
    }
    // The path must be followed by a zero byte.
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path of a socket has at most 107 bytes",
        ));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}

/// Connects without blocking: if the listener's queue is full, the error is `WouldBlock`. The
/// connection is non-blocking, too.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    connect_with(path, |_| ())
}

/// The same, for a connection over which no files come: see [`refuse_files`].
pub fn connect_without_files(path: &Path) -> io::Result<UnixStream> {
    // Before there is a peer, which may send at once.
    connect_with(path, |socket| refuse_files(socket))
}

fn connect_with(path: &Path, prepare: impl FnOnce(&UnixStream)) -> io::Result<UnixStream> {
    let address = address(path)?;
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a call without pointers; then a new descriptor that has no other owner; then an
    // address whose size is passed with it.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, kind, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let stream = UnixStream::from_raw_fd(fd);
        prepare(&stream);
        let size = size_of_val(&address) as libc::socklen_t;
        if libc::connect(fd, (&raw const address).cast(), size) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stream)
    }
}

/// Sets whether reads and writes on a connection block.
pub fn set_blocking(stream: &UnixStream, blocking: bool) -> io::Result<()> {
    // SAFETY: plain calls on a descriptor that the caller owns. An ioctl is not used, since not
    // every confined thread may call it.
    let outcome = unsafe {
        let flags = libc::fcntl(stream.as_raw_fd(), libc::F_GETFL);
        let flags = match blocking {
            _ if flags < 0 => return Err(io::Error::last_os_error()),
            true => flags & !libc::O_NONBLOCK,
            false => flags | libc::O_NONBLOCK,
        };
        libc::fcntl(stream.as_raw_fd(), libc::F_SETFL, flags)
    };
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether a process listens for connections at this path; if not, the error says why. This does
/// not connect to it.
pub fn is_served(path: &Path) -> io::Result<()> {
    // A dead socket refuses a datagram socket with a different error, and a live one never sees it
    // as a client.
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("it takes messages, not connections")),
    }
}

/// Listens at a path; creates its directory if needed. A stale socket that nobody listens on is
/// left over from a killed process and is replaced. Anything else at the path is kept and is an
/// error. The umask decides who may connect.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    make_room(path)?;
    UnixListener::bind(path)
}

/// The same for a socket to which no user but the own one, and root, may connect.
pub fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    make_room(path)?;
    bind_privately(path)
}

/// The same for a socket to which only the own user, the group of the file, and root may connect; see
/// [`bind_for_group`].
pub fn listen_for_group(path: &Path) -> io::Result<UnixListener> {
    make_room(path)?;
    bind_for_group(path)
}

/// As [`listen_privately`], for connections that carry packets (`SOCK_SEQPACKET`).
pub fn listen_for_packets(path: &Path) -> io::Result<UnixListener> {
    make_room(path)?;
    bind(path, libc::SOCK_SEQPACKET, OWN_USER)
}

/// Listens at a path where there is no file, so that no user but the own one, and root, may connect.
///
/// # Errors
///
/// As [`UnixListener::bind`].
pub fn bind_privately(path: &Path) -> io::Result<UnixListener> {
    bind(path, libc::SOCK_STREAM, OWN_USER)
}

/// Listens at a path where there is no file, so that only the own user, the group of the file, and root may connect,
/// whatever the umask is. The group is that of the folder if the folder has the set-group-ID bit.
///
/// # Errors
///
/// As [`UnixListener::bind`].
pub fn bind_for_group(path: &Path) -> io::Result<UnixListener> {
    let listener = bind(path, libc::SOCK_STREAM, OWN_GROUP)?;
    // The umask may have taken the group's right to connect.
    fs::set_permissions(path, fs::Permissions::from_mode(OWN_GROUP))?;
    Ok(listener)
}

/// Modes of sockets.
const OWN_USER: libc::mode_t = 0o600;
const OWN_GROUP: libc::mode_t = 0o660;

fn bind(path: &Path, kind: libc::c_int, mode: libc::mode_t) -> io::Result<UnixListener> {
    /// As many waiting connections as the host allows.
    const QUEUE: libc::c_int = -1;
    let address = address(path)?;
    // SAFETY: calls without pointers; a new descriptor that has no other owner; an address whose
    // size is passed with it.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let listener = UnixListener::from_raw_fd(fd);
        let size = size_of_val(&address) as libc::socklen_t;
        // The file gets the socket's mode, less the umask. If the mode of the file were changed later, others
        // could connect in between.
        if libc::fchmod(fd, mode) < 0
            || libc::bind(fd, (&raw const address).cast(), size) < 0
            || libc::listen(fd, QUEUE) < 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(listener)
    }
}

/// Prepares a path for a listener.
fn make_room(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        // Whoever could write to it could take the socket's place.
        let mut create = fs::DirBuilder::new();
        create.recursive(true).mode(0o755).create(folder)?;
    }
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket
        && is_served(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// `SO_PASSRIGHTS` of Linux 6.16, which `libc` does not name.
const PASS_RIGHTS: libc::c_int = 83;

/// Makes the kernel refuse descriptors that are sent to a socket, because closing a descriptor from
/// an untrusted peer may hang. Connections that a listener accepts inherit the setting. Older
/// kernels still accept descriptors.
pub fn refuse_files(socket: impl AsFd) {
    let off: libc::c_int = 0;
    // SAFETY: the kernel reads as many bytes as the length says, from a local.
    unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            PASS_RIGHTS,
            (&raw const off).cast(),
            size_of_val(&off) as libc::socklen_t,
        );
    }
}

/// Two connected sockets for packets (`SOCK_SEQPACKET`).
pub fn pair_for_packets() -> io::Result<[OwnedFd; 2]> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel fills the array; then new descriptors that have no other owner.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(ends.map(|end| OwnedFd::from_raw_fd(end)))
    }
}

/// The kernel's number of a socket (`SO_COOKIE`), which is never given to another socket.
///
/// # Errors
/// The descriptor is not a socket.
pub fn cookie(socket: impl AsFd) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut size = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, to a local.
    let got = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut size,
        )
    };
    match got {
        0 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the other end of a socket has not read all that was sent to it.
pub fn has_unread(socket: impl AsFd) -> bool {
    let mut unread: libc::c_int = 0;
    // SAFETY: the kernel writes a number, to a local.
    let got = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    got == 0 && unread > 0
}

/// The user ID under which limits for each user count this one. Subordinate users (from 100000 on, subuid(5)) count as one, as
/// each login user may have thousands of them.
pub fn counted_as(user: u32) -> u32 {
    /// `SUB_UID_MIN` of login.defs(5), above the users that systemd makes for services.
    const FIRST_SUBORDINATE: u32 = 100_000;
    user.min(FIRST_SUBORDINATE)
}

/// User ID of the peer of a connection.
pub fn user(connection: impl AsFd) -> io::Result<u32> {
    peer(connection).map(|peer| peer.uid)
}

/// Process ID of the peer of a connection, as of when the connection was made.
pub fn process(connection: impl AsFd) -> io::Result<i32> {
    peer(connection).map(|peer| peer.pid)
}

fn peer(connection: impl AsFd) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, which `peer` has; both outlive the call.
    let got = unsafe {
        libc::getsockopt(
            connection.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    match got {
        0 => Ok(peer),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends bytes together with at most eight files.
pub fn send(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if files.len() > MOST_FILES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let fds: Vec<libc::c_int> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let size = size_of_val(&fds[..]) as libc::c_uint;
    let mut vector = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut space = [0u64; CONTROL];
    // SAFETY: all pointers are to locals that outlive the call, and `space` (aligned for a
    // `cmsghdr`) has room for its 16 bytes and eight descriptors.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            message.msg_control = space.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as usize;
            let control = libc::CMSG_FIRSTHDR(&raw const message);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(size) as usize;
            libc::CMSG_DATA(control).copy_from_nonoverlapping(fds.as_ptr().cast(), size as usize);
        }
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match sent {
        sent if sent == bytes.len() as isize => Ok(()),
        sent if sent >= 0 => Err(io::ErrorKind::WriteZero.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Size, in 64-bit words, of the control message for the most files that Linux allows in a message
/// (253). The kernel would close files that do not fit at once, and that close may hang.
const ALL: usize = 129;

/// Files that came with bytes were lost: this process has as many files open as it may.
#[derive(Debug)]
pub struct FilesLost {
    count: usize,
    files: Vec<OwnedFd>,
    source: io::Error,
}

impl FilesLost {
    /// What has arrived nevertheless: the number of bytes, and the files that the kernel has not
    /// closed. For a caller that needs no files, or counts them, and must not wait for their close.
    ///
    /// # Errors
    /// The error is another one.
    pub fn arrived(error: io::Error) -> io::Result<(usize, Vec<OwnedFd>)> {
        let lost = error.downcast::<Self>()?;
        Ok((lost.count, lost.files))
    }
}

impl fmt::Display for FilesLost {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("files that came with a message were lost")
    }
}

impl Error for FilesLost {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Receives bytes, at least one unless the peer has closed, and the files that came with them.
///
/// # Errors
/// Those of recvmsg(2). [`FilesLost`]: the bytes have arrived, but not all of their files.
pub fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut vector = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut space = [0u64; ALL];
    let mut files = Vec::new();
    let lost;
    // SAFETY: all pointers are to locals or to `bytes`, which outlive the call. The kernel reports
    // in the message which part of `space` it filled, and the macros stay within it.
    let got = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&space);
        let got = libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let control = libc::CMSG_FIRSTHDR(&raw const message);
        lost = message.msg_flags & libc::MSG_CTRUNC != 0;
        // A packet may consist of files alone.
        if got >= 0
            && !control.is_null()
            && (*control).cmsg_level == libc::SOL_SOCKET
            && (*control).cmsg_type == libc::SCM_RIGHTS
        {
            let bytes = (*control)
                .cmsg_len
                .saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = libc::CMSG_DATA(control).cast::<libc::c_int>();
            for at in 0..bytes / size_of::<libc::c_int>() {
                // The kernel has just created this descriptor for this process.
                files.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
            }
        }
        got
    };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    if lost {
        // `space` has room for all, so there were no descriptors for them. (A security module may
        // refuse a file, too; the kernel does not tell that apart.)
        let source = io::Error::from_raw_os_error(libc::EMFILE);
        return Err(io::Error::other(FilesLost {
            count: got,
            files,
            source,
        }));
    }
    Ok((got, files))
}

/// Receives exactly `bytes.len()` bytes, and the files that came with the first of them.
pub fn receive_exact(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let (got, files) = receive(stream, bytes)?;
    (&mut &*stream).read_exact(&mut bytes[got..])?;
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_arrive_in_their_order() {
        let (here, there) = UnixStream::pair().unwrap();
        let sizes = [4096, 8192, 12288];
        let files = sizes.map(|size| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(size).unwrap();
            file
        });
        send(
            &here,
            b"three",
            &[files[0].as_fd(), files[1].as_fd(), files[2].as_fd()],
        )
        .unwrap();
        let mut bytes = [0; 5];
        let got = receive_exact(&there, &mut bytes).unwrap();
        assert_eq!(&bytes, b"three");
        let got: Vec<_> = got
            .into_iter()
            .map(|file| std::fs::File::from(file).metadata().unwrap().len())
            .collect();
        assert_eq!(got, sizes);
    }

    #[test]
    fn a_packet_is_unread_until_the_other_end_has_read_it() {
        let [here, there] = pair_for_packets().unwrap();
        assert_ne!(cookie(&here).unwrap(), cookie(&there).unwrap());
        assert_eq!(
            cookie(&here).unwrap(),
            cookie(here.try_clone().unwrap()).unwrap()
        );
        let (here, there) = (UnixStream::from(here), UnixStream::from(there));
        assert!(!has_unread(&here));
        send(&here, b"packet", &[]).unwrap();
        assert!(has_unread(&here) && !has_unread(&there));
        // The rest of a packet is gone.
        assert_eq!(receive(&there, &mut [0; 3]).unwrap().0, 3);
        assert!(!has_unread(&here));
        let file = tempfile::tempfile().unwrap();
        assert!(!has_unread(&file));
        assert!(cookie(&file).is_err());
    }

    #[test]
    fn who_refuses_files_gets_none_and_neither_do_its_connections() {
        let folder = std::env::temp_dir().join(format!("gantry-rights-{}", std::process::id()));
        let path = folder.join("socket");
        let listener = listen(&path).unwrap();
        refuse_files(&listener);
        let client = UnixStream::connect(&path).unwrap();
        // Once before the connection is accepted, and once after.
        let early = send(&client, b"file", &[client.as_fd()]);
        let (accepted, _) = listener.accept().unwrap();
        let late = send(&client, b"file", &[client.as_fd()]);
        let careful = connect_without_files(&path).unwrap();
        let (from, _) = listener.accept().unwrap();
        let back = send(&from, b"file", &[client.as_fd()]);
        drop(careful);
        fs::remove_dir_all(folder).unwrap();
        let mut value: libc::c_int = 1;
        let mut size = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel writes at most as many bytes as the length says, to a local.
        let known = unsafe {
            libc::getsockopt(
                accepted.as_raw_fd(),
                libc::SOL_SOCKET,
                PASS_RIGHTS,
                (&raw mut value).cast(),
                &raw mut size,
            )
        };
        if known != 0 {
            eprintln!("not tested: this kernel has no SO_PASSRIGHTS");
            return;
        }
        for sent in [early, late, back] {
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        send(&client, b"word", &[]).unwrap();
    }

    #[test]
    fn who_cannot_be_reached_at_once_is_not_waited_for() {
        let folder = std::env::temp_dir().join(format!("gantry-socket-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        assert!(connect(&path).is_err());
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // SAFETY: no pointers. From here on, the listener queues at most one connection.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let waiting: Vec<_> = (0..8).map(|_| connect(&path)).collect();
        assert!(waiting[0].is_ok());
        let full = waiting[7].as_ref().unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        std::fs::remove_dir_all(folder).unwrap();
        assert!(connect(Path::new(&"x".repeat(108))).is_err());
    }

    #[test]
    fn only_a_socket_that_nobody_listens_on_makes_way() {
        let folder = std::env::temp_dir().join(format!("gantry-listen-{}", std::process::id()));
        let (file, path) = (folder.join("file"), folder.join("socket"));
        // The first call also creates the directory.
        drop(listen(&path).unwrap());
        fs::write(&file, "precious").unwrap();
        assert!(listen(&file).is_err());
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        drop(listen(&path).unwrap());
        let listener = listen(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert!(listen(&path).is_err());
        // The failed attempt did not connect a client.
        let nobody = listener.accept().unwrap_err();
        assert_eq!(nobody.kind(), io::ErrorKind::WouldBlock);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_private_socket_is_private_from_the_start() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let seen = |changes: u32| {
            // SAFETY: plain calls on a new descriptor, and a name that ends with a zero byte.
            unsafe {
                let fd = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
                assert!(fd >= 0);
                let name = std::ffi::CString::new(folder.path().as_os_str().as_bytes()).unwrap();
                assert!(libc::inotify_add_watch(fd, name.as_ptr(), changes) >= 0);
                fs::File::from_raw_fd(fd)
            }
        };
        for listen in [listen_privately, listen_for_packets] {
            let path = folder.path().join("socket");
            let (created, changed) = (seen(libc::IN_CREATE), seen(libc::IN_ATTRIB));
            let listener = listen(&path).unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let mut events = [0; 512];
            assert!((&created).read(&mut events).unwrap() > 0);
            let error = (&changed).read(&mut events).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "no later change");
            drop(listener);
        }
    }

    #[test]
    fn files_for_which_there_is_no_descriptor_are_missed() {
        use crate::limits::Limit;
        let (here, there) = UnixStream::pair().unwrap();
        send(&here, b"two", &[here.as_fd(), here.as_fd()]).unwrap();
        // In a process of its own, as the limit is for all threads.
        // SAFETY: the child makes system calls and allocates, for which glibc prepares it, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let next = there.as_raw_fd().max(here.as_raw_fd()) + 1;
            // SAFETY: plain calls: a copy with the lowest free number, and its close.
            let free = unsafe {
                let free = libc::dup(next - 1);
                libc::close(free);
                free
            };
            let hard = Limit::now().map_or(0, |limit| limit.hard);
            let soft = free as u64 + 1;
            let limited = Limit { soft, hard }.set().is_ok();
            let received = receive(&there, &mut [0; 3]);
            let arrived = received.map_err(FilesLost::arrived);
            let expected = matches!(&arrived, Err(Ok((3, files))) if files.len() == 1);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!(limited && expected))) };
        }
        let mut status = -1;
        // SAFETY: the kernel writes to a local.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(ended, child, "a child was made");
        assert_eq!(status, 0);
    }

    #[test]
    fn a_message_comes_without_files_too() {
        let (here, there) = UnixStream::pair().unwrap();
        send(&here, b"none", &[]).unwrap();
        let mut bytes = [0; 4];
        assert!(receive_exact(&there, &mut bytes).unwrap().is_empty());
    }
}

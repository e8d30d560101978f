//! What a confined process may do and what not.

use std::os::fd::AsRawFd;

use super::*;

/// What a call gives in a child process under the filters: 0 or its error.
fn under_filters(call: impl FnOnce() -> c_long) -> i32 {
    under_filters_for(ApiId::OpenCl, call)
}

/// The same under those of a worker for this API.
fn under_filters_for(api: ApiId, call: impl FnOnce() -> c_long) -> i32 {
    let filters = filters(api).expect("the table is sound");
    let apply = || {
        filters
            .iter()
            .all(|filter| seccompiler::apply_filter(filter).is_ok())
    };
    in_child(apply, call)
}

/// What a call gives in a child process after `prepare`: 0 or its error.
fn in_child(prepare: impl FnOnce() -> bool, call: impl FnOnce() -> c_long) -> i32 {
    // SAFETY: the child has this thread only, which makes system calls and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            if !prepare() {
                libc::_exit(255);
            }
            let failed = call() < 0;
            let code = io::Error::last_os_error().raw_os_error();
            libc::_exit(if failed { code.unwrap_or(254) } else { 0 });
        }
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        libc::WEXITSTATUS(status)
    }
}

fn writing(writable: &[&Path]) -> Result<RulesetCreated, RulesetError> {
    writing_for(ApiId::OpenCl, writable)
}

fn writing_for(api: ApiId, writable: &[&Path]) -> Result<RulesetCreated, RulesetError> {
    rules(Confinement {
        writable,
        readable: &[],
        memory: None,
        api,
        without: &Pieces::default(),
    })
}

fn restrict(writable: &[&Path]) -> bool {
    writing(writable).is_ok_and(|rules| rules.restrict_self().is_ok())
}

#[test]
fn of_all_owners_folders_one_is_left_when_it_is_known_whose_a_worker_is() {
    if !has_landlock() {
        eprintln!("not tested: this kernel has no Landlock");
        return;
    }
    let all = std::env::temp_dir().join(format!("gantry-owners-{}", std::process::id()));
    let (own, mine, theirs) = (all.join("own"), all.join("mine"), all.join("theirs"));
    for folder in [&own, &mine, &theirs] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let open = |path: &Path, owner: Option<&Path>| {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let prepare = || {
            let later = Later(writing(&[&own]).unwrap());
            let confine = restrict(&[&own, &all])
                && filters(ApiId::OpenCl)
                    .unwrap()
                    .iter()
                    .all(|filter| seccompiler::apply_filter(filter).is_ok());
            confine && later.enter(owner).is_ok()
        };
        let flags = libc::O_RDWR | libc::O_CREAT;
        in_child(
            prepare,
            // SAFETY: a C string.
            || i64::from(unsafe { libc::open(path.as_ptr(), flags, 0o600) }),
        )
    };
    assert_eq!(open(&mine.join("1"), Some(&mine)), 0);
    assert_eq!(open(&own.join("1"), Some(&mine)), 0);
    assert_eq!(open(&theirs.join("1"), Some(&mine)), libc::EACCES);
    assert_eq!(open(&all.join("1"), Some(&mine)), libc::EACCES);
    assert_eq!(open(&mine.join("1"), None), libc::EACCES);
    assert_eq!(open(&own.join("1"), None), 0);
    std::fs::remove_dir_all(&all).unwrap();
}

#[test]
fn what_reaches_beyond_the_worker_is_refused() {
    let parent = std::process::id() as libc::pid_t;
    let program = std::fs::File::open("/proc/self/exe").unwrap();
    // SAFETY: the calls are refused, or change the child alone.
    unsafe {
        let socket = || i64::from(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0));
        assert_eq!(under_filters(socket), libc::EPERM);
        let kill = || i64::from(libc::kill(parent, 0));
        assert_eq!(under_filters(kill), libc::EPERM);
        let signal = || libc::syscall(libc::SYS_tgkill, parent + 1, parent + 1, 0);
        assert_eq!(under_filters(signal), libc::EPERM);
        let namespace = || {
            let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
            libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0)
        };
        assert_eq!(under_filters(namespace), libc::EPERM);
        let clone3 = || libc::syscall(libc::SYS_clone3, 0, 0);
        assert_eq!(under_filters(clone3), libc::ENOSYS);
        let lease = || {
            i64::from(libc::fcntl(
                program.as_raw_fd(),
                libc::F_SETLEASE,
                libc::F_RDLCK,
            ))
        };
        assert_eq!(under_filters(lease), libc::EPERM);
        let trace = || libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, parent, 0, 0);
        assert_eq!(under_filters(trace), libc::EPERM);
    }
}

#[test]
fn files_of_the_machine_and_of_others_cannot_be_read_or_written() {
    if !has_landlock() {
        eprintln!("not tested: this kernel has no Landlock");
        return;
    }
    let cache = std::env::temp_dir().join(format!("gantry-confine-{}", std::process::id()));
    std::fs::create_dir_all(&cache).unwrap();
    let other = cache.with_extension("other");
    std::fs::write(&other, "a disk image").unwrap();
    let open = |path: &Path, flags| {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        in_child(
            || restrict(&[&cache]),
            // SAFETY: a C string.
            || i64::from(unsafe { libc::open(path.as_ptr(), flags, 0o600) }),
        )
    };
    let (read, write) = (libc::O_RDONLY, libc::O_RDWR | libc::O_CREAT);
    for secret in [
        "/etc/passwd",
        "/dev/mem",
        "/dev/kmsg",
        "/root",
        "/proc/1/stat",
    ] {
        let secret = Path::new(secret);
        if secret.exists() {
            assert_eq!(open(secret, read), libc::EACCES, "{}", secret.display());
        }
    }
    assert_eq!(open(&other, read), libc::EACCES);
    assert_eq!(open(&other, write), libc::EACCES);
    assert_eq!(open(Path::new("/usr/new"), write), libc::EACCES);
    assert_eq!(open(&cache.join("kernel.so"), write), 0);
    for needed in ["/dev/null", "/proc/self/maps", "/proc/cpuinfo", "/usr/bin"] {
        assert_eq!(open(Path::new(needed), read), 0, "{needed}");
    }
    assert_eq!(open(Path::new("/dev/null"), libc::O_RDWR), 0);
    std::fs::remove_dir_all(&cache).unwrap();
    std::fs::remove_file(&other).unwrap();
}

#[test]
fn modes_times_and_lengths_of_others_files_stay_whatever_their_paths() {
    let path = std::env::temp_dir().join(format!("gantry-modes-{}", std::process::id()));
    std::fs::write(&path, "compiled").unwrap();
    let before = std::fs::metadata(&path).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let (name, fd) = (name.as_ptr(), i64::from(file.as_raw_fd()));
    let here = libc::AT_FDCWD;
    // SAFETY: a C string, and times where they are said to be.
    unsafe {
        let call = |number, one: c_long, two: c_long, three: c_long| {
            under_filters(|| libc::syscall(number, one, two, three, 0))
        };
        let (path, here) = (name as c_long, c_long::from(here));
        assert_eq!(call(libc::SYS_chmod, path, 0o777, 0), 0);
        assert_eq!(call(libc::SYS_fchmod, fd, 0o777, 0), 0);
        assert_eq!(call(libc::SYS_fchmodat, here, path, 0o777), 0);
        assert_eq!(call(libc::SYS_fchmodat2, here, path, 0o777), 0);
        let times = [7 as libc::time_t; 4];
        let times = times.as_ptr() as c_long;
        assert_eq!(call(libc::SYS_utimensat, here, path, times), 0);
        assert_eq!(call(libc::SYS_utime, path, times, 0), 0);
        assert_eq!(call(libc::SYS_truncate, path, 0, 0), libc::EPERM);
        // FS_IOC_GETFLAGS, and clones of what is open.
        assert_eq!(call(libc::SYS_ioctl, fd, 0x8008_6601, times), libc::ENOTTY);
        assert_eq!(call(libc::SYS_ioctl, fd, 0x4004_9409, fd), libc::ENOTTY);
    }
    let after = std::fs::metadata(&path).unwrap();
    assert_eq!(after.permissions(), before.permissions());
    assert_eq!(after.modified().unwrap(), before.modified().unwrap());
    assert_eq!(after.len(), before.len());
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn root_is_a_user_like_any_other() {
    let given_up = || {
        let done = give_up_capabilities();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let none = |kind: &str| status.contains(&format!("{kind}:\t0000000000000000\n"));
        done.is_ok() && none("CapEff") && none("CapPrm") && none("CapInh")
    };
    assert_eq!(in_child(given_up, || 0), 0);
}

#[test]
fn memory_of_its_own_is_limited_for_good() {
    let map = |length: usize| {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        mapped as c_long
    };
    // What this process has already counts, such as what other tests' drivers have reserved.
    let limited = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let data = status.lines().find_map(|line| line.strip_prefix("VmData:"));
        let data = data.and_then(|data| data.trim().strip_suffix(" kB"));
        let data: u64 = data.unwrap().trim().parse().unwrap();
        limit((data << 10) + (1 << 30)).is_ok()
    };
    assert_eq!(in_child(limited, || map(64 << 20)), 0);
    assert_eq!(in_child(limited, || map(2 << 30)), libc::ENOMEM);
    let raise = |resource: libc::__rlimit_resource_t| {
        let more = [libc::RLIM_INFINITY; 2];
        // SAFETY: two numbers, as the call reads.
        unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const more, 0) }
    };
    assert_eq!(under_filters(|| raise(libc::RLIMIT_DATA)), libc::EPERM);
    assert_eq!(under_filters(|| raise(libc::RLIMIT_CORE)), 0);
}

#[test]
fn what_a_driver_needs_is_allowed() {
    // SAFETY: plain calls.
    unsafe {
        assert_eq!(under_filters(|| i64::from(libc::getppid())), 0);
        let limit = || {
            let mut limit: libc::rlimit64 = std::mem::zeroed();
            i64::from(libc::getrlimit64(libc::RLIMIT_NOFILE, &raw mut limit))
        };
        assert_eq!(under_filters(limit), 0);
        let pair = || {
            let mut pair = [0; 2];
            let (family, kind) = (libc::AF_UNIX, libc::SOCK_SEQPACKET);
            i64::from(libc::socketpair(family, kind, 0, pair.as_mut_ptr()))
        };
        assert_eq!(under_filters(pair), 0);
        assert_eq!(
            under_filters(|| i64::from(libc::fcntl(0, libc::F_GETFD))),
            0
        );
    }
}

#[test]
fn a_descriptor_that_others_share_stays_non_blocking() {
    // SAFETY: plain calls, and a number where one is read.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_NONBLOCK);
        let set = |flags: i32| under_filters(|| i64::from(libc::fcntl(fd, libc::F_SETFL, flags)));
        assert_eq!(set(0), libc::EPERM);
        assert_eq!(set(libc::O_RDWR | libc::O_APPEND), libc::EPERM);
        assert_eq!(set(libc::O_NONBLOCK | libc::O_ASYNC), libc::EPERM);
        let off = 0;
        let fionbio = || i64::from(libc::ioctl(fd, libc::FIONBIO, &raw const off));
        assert_eq!(under_filters(fionbio), libc::EPERM);
        let flags = libc::fcntl(fd, libc::F_GETFL);
        assert_ne!(flags & libc::O_NONBLOCK, 0);
        // Drivers do this to pipes of their own.
        assert_eq!(set(libc::O_RDWR | libc::O_NONBLOCK), 0);
        libc::close(fd);
    }
}

#[test]
fn a_worker_that_serves_puts_no_descriptors_in_flight() {
    use remoting_transport::socket;
    use std::os::{fd::AsFd, unix::net::UnixStream};
    let (here, there) = UnixStream::pair().unwrap();
    for api in ApiId::REMOTED {
        let (waits, serves) = (filters(api).unwrap(), no_files().unwrap());
        let sends = |serving: bool, files: &[_]| {
            let apply = || {
                let more = serving.then_some(&serves);
                let mut all = waits.iter().chain(more);
                all.all(|filter| seccompiler::apply_filter(filter).is_ok())
            };
            let send = || match socket::send(&here, &[1], files) {
                Ok(()) => 0,
                Err(_) => -1,
            };
            in_child(apply, send)
        };
        assert_eq!(sends(false, &[there.as_fd()]), 0, "{api:?}");
        assert_eq!(sends(true, &[there.as_fd()]), libc::EPERM, "{api:?}");
        assert_eq!(
            sends(true, &[]),
            libc::EPERM,
            "{api:?}: no filter sees that"
        );
        let apply = || {
            let mut all = waits.iter().chain([&serves]);
            all.all(|filter| seccompiler::apply_filter(filter).is_ok())
        };
        let nudges = || {
            // SAFETY: a byte of a constant.
            unsafe { libc::send(here.as_raw_fd(), [1u8].as_ptr().cast(), 1, 0) as c_long }
        };
        assert_eq!(in_child(apply, nudges), 0, "{api:?}");
    }
}

#[test]
fn huge_pages_are_left_to_virtual_machines() {
    let (anonymous, huge) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::MAP_HUGETLB);
    for api in ApiId::REMOTED {
        let map = |flags: i32| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            under_filters_for(api, || unsafe {
                libc::mmap(std::ptr::null_mut(), 2 << 20, access, flags, -1, 0) as c_long
            })
        };
        assert_eq!(map(anonymous), 0, "{api:?}");
        // In the size that is usual, and in pages of 1 GiB.
        for size in [0, libc::MAP_HUGE_1GB] {
            assert_eq!(map(anonymous | huge | size), libc::EPERM, "{api:?}");
        }
        let file = |flags: u32| {
            // SAFETY: a C string.
            under_filters_for(api, || unsafe {
                i64::from(libc::memfd_create(c"test".as_ptr(), flags))
            })
        };
        assert_eq!(file(libc::MFD_CLOEXEC), 0, "{api:?}");
        assert_eq!(
            file(libc::MFD_CLOEXEC | libc::MFD_HUGETLB),
            libc::EPERM,
            "{api:?}"
        );
    }
}

#[test]
fn a_worker_does_not_outlive_its_pool() {
    for api in ApiId::REMOTED {
        let control = |option: i32| {
            // SAFETY: numbers only.
            under_filters_for(api, || unsafe {
                i64::from(libc::prctl(option, 0usize, 0usize, 0usize, 0usize))
            })
        };
        assert_eq!(control(libc::PR_SET_PDEATHSIG), libc::EPERM, "{api:?}");
        assert_eq!(control(libc::PR_GET_DUMPABLE), 0, "{api:?}");
    }
}

#[test]
fn a_worker_leaves_its_pool_no_processes() {
    // SAFETY: the new process has a copy of everything and ends at once.
    let clone = |flags: i32| unsafe {
        let child = libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0);
        if child == 0 {
            libc::_exit(0);
        }
        child
    };
    assert_eq!(
        under_filters(|| clone(libc::CLONE_PARENT)),
        libc::EPERM,
        "it would be the pool's child, which knows nothing of it"
    );
    assert_eq!(under_filters(|| clone(0)), 0, "linkers");
}

#[test]
fn nothing_is_typed_or_pasted_into_a_terminal() {
    let file = std::fs::File::open("/dev/null").unwrap();
    for command in [TIOCSTI, TIOCLINUX] {
        let mut argument = 3u8;
        let done = under_filters(|| {
            // SAFETY: a byte where one is read.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), command as _, &raw mut argument) };
            done.into()
        });
        assert_eq!(done, libc::EPERM, "{command:#x}");
    }
}

#[test]
fn sockets_for_datagrams_are_refused_as_they_reach_others_unconnected() {
    for api in ApiId::REMOTED {
        // SAFETY: plain calls, and two numbers where they are written.
        let pair = |kind: i32| unsafe {
            let mut pair = [0; 2];
            i64::from(libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()))
        };
        let made = |kind| under_filters_for(api, || pair(kind));
        assert_eq!(made(libc::SOCK_DGRAM), libc::EPERM, "{api:?}");
        assert_eq!(made(libc::SOCK_STREAM | libc::SOCK_CLOEXEC), 0, "{api:?}");
        assert_eq!(made(libc::SOCK_SEQPACKET), 0, "{api:?}");
    }
}

#[test]
fn a_worker_for_cuda_makes_sockets_that_connect_to_nobody() {
    let socket = |family: i32, kind: i32| {
        // SAFETY: a plain call.
        under_filters_for(ApiId::Cuda, || unsafe {
            i64::from(libc::socket(family, kind, 0))
        })
    };
    assert_eq!(socket(libc::AF_UNIX, libc::SOCK_SEQPACKET), 0);
    for refused in [
        (libc::AF_UNIX, libc::SOCK_DGRAM),
        (libc::AF_INET, libc::SOCK_STREAM),
        (libc::AF_NETLINK, libc::SOCK_RAW),
    ] {
        assert_eq!(socket(refused.0, refused.1), libc::EPERM, "{refused:?}");
    }
    // As NVIDIA's driver does when it starts: an abstract name, options, listening; and it looks for a
    // daemon.
    let name = format!("\0gantry-test-{}", std::process::id());
    let mut address = [0u8; 110];
    address[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    address[2..2 + name.len()].copy_from_slice(name.as_bytes());
    let length = (2 + name.len()) as libc::socklen_t;
    // SAFETY: the address is as long as is said and outlives the calls, as does the option.
    unsafe {
        let made = || libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
        let at = address.as_ptr().cast::<libc::sockaddr>();
        let listens = || {
            let (socket, one) = (made(), 1i32);
            let option = (&raw const one).cast();
            let done = libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_PASSCRED, option, 4)
                | libc::bind(socket, at, length)
                | libc::listen(socket, 1);
            i64::from(done)
        };
        assert_eq!(under_filters_for(ApiId::Cuda, listens), 0);
        let connects = || i64::from(libc::connect(made(), at, length));
        assert_eq!(under_filters_for(ApiId::Cuda, connects), libc::ENOENT);
        let sends = || libc::sendto(made(), [7u8].as_ptr().cast(), 1, 0, at, length) as c_long;
        assert_eq!(under_filters_for(ApiId::Cuda, sends), libc::ENOTCONN);
        let filters_of_the_kernel = || {
            let option = [0u8; 16];
            let (at, what) = (option.as_ptr().cast(), libc::SO_ATTACH_FILTER);
            i64::from(libc::setsockopt(made(), libc::SOL_SOCKET, what, at, 16))
        };
        assert_eq!(
            under_filters_for(ApiId::Cuda, filters_of_the_kernel),
            libc::EPERM
        );
    }
}

#[test]
fn a_worker_for_cuda_takes_no_names_of_sockets_from_others() {
    if !has_own_network() {
        eprintln!("not tested: no network namespace can be made here");
        return;
    }
    let name = format!("\0gantry-test-taken-{}", std::process::id());
    let mut address = [0u8; 110];
    address[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    address[2..2 + name.len()].copy_from_slice(name.as_bytes());
    let length = (2 + name.len()) as libc::socklen_t;
    // SAFETY: the address is as long as is said and outlives the calls.
    let bound = || unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
        i64::from(libc::bind(socket, address.as_ptr().cast(), length))
    };
    assert_eq!(bound(), 0);
    assert_eq!(in_child(|| true, bound), libc::EADDRINUSE);
    // SAFETY: a plain call.
    let user = || unsafe { libc::geteuid() };
    let before = user();
    let same = || cuda::own_network().is_ok_and(|made| made) && user() == before;
    assert_eq!(in_child(same, bound), 0);
}

#[test]
fn a_worker_for_cuda_names_its_threads_and_writes_nothing_else_of_proc() {
    if !has_landlock() {
        eprintln!("not tested: this kernel has no Landlock");
        return;
    }
    let open = |api: ApiId, path: &str| {
        let path = std::ffi::CString::new(path).unwrap();
        let flags = libc::O_WRONLY | libc::O_TRUNC;
        in_child(
            || writing_for(api, &[]).is_ok_and(|rules| rules.restrict_self().is_ok()),
            // SAFETY: a C string.
            || i64::from(unsafe { libc::open(path.as_ptr(), flags) }),
        )
    };
    // The child's own: a process's first thread has its number, and the link leads there.
    let name = "/proc/thread-self/comm";
    assert_eq!(open(ApiId::Cuda, name), 0);
    assert_eq!(open(ApiId::OpenCl, name), libc::EACCES);
    let parent = format!("/proc/{0}/task/{0}/comm", std::process::id());
    for other in ["/proc/self/comm", "/proc/self/oom_score_adj", &parent] {
        assert_eq!(open(ApiId::Cuda, other), libc::EACCES, "{other}");
    }
}

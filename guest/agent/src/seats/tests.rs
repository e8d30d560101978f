use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use remoting_proto::apis::{cuda::Cuda, opencl::OpenCl};
use remoting_transport::order::ORDER;

use super::*;

const WINDOW: u64 = 64 << 20;
/// A pool that listens and serves nobody, and leaves a process behind.
const POOL: &str = "[ \"$1 $3 $4\" = '--socket --window 64' ] || exit 1\n\
                    sleep 1000 & : >\"$2\"; exec sleep 1000\n";
/// A pool on whose behalf somebody else listens.
const SILENT: &str = "exec sleep 1000\n";

/// The address of applications that are to be served elsewhere.
const ELSEWHERE: &str = "tls://gpu2.example:7070";

struct Rig {
    seats: Seats,
    /// The reason of the last outcome.
    reason: String,
    folder: tempfile::TempDir,
    /// All children of the process are waited for, so tests must not run in parallel.
    _alone: MutexGuard<'static, ()>,
}

impl Rig {
    fn new(pool: &str) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("pool.sh");
        fs::write(&script, pool).unwrap();
        let own = folder.path().join("agent.sock");
        fs::write(&own, "").unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o660)).unwrap();
        let command = format!("sh {}", script.display());
        Self {
            seats: Seats::new(&command, own),
            reason: String::new(),
            folder,
            _alone: alone,
        }
    }

    /// With a pool that serves.
    fn serving() -> Self {
        let mut rig = Self::new(POOL);
        rig.seats.start(WINDOW);
        until(|| rig.seats.serves());
        rig
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An application that the pool serves. Returns the stream for its orders.
    fn seat(&mut self) -> UnixStream {
        let (agent, application) = UnixStream::pair().unwrap();
        assert!(
            self.seats
                .seat(&agent, &Hello::client::<OpenCl>().to_bytes())
        );
        drop(agent);
        let (bytes, files) = socket::receive_hello(&application).unwrap();
        let hello = Hello::check(&bytes, &apis::ALL).unwrap();
        assert_eq!(hello.form, Form::Elsewhere);
        let (to, orders) = order::redirected(&application, files).unwrap();
        assert_eq!(to, self.path("agent.local.sock").display().to_string());
        orders
    }

    fn wish(&mut self, number: u8, by: Server) {
        self.seats.wish(Wish { number, by }, ELSEWHERE, "port");
    }

    /// Takes one step.
    fn look(&mut self, served: &[&UnixStream]) -> Option<Told> {
        self.seats.heard();
        self.seats.step(served, WINDOW, false)
    }

    fn over(&mut self, served: &[&UnixStream]) -> (OutcomeKind, u16) {
        let mut over = None;
        until(|| {
            over = self.look(served);
            over.is_some()
        });
        let Told {
            outcome,
            reason,
            port,
        } = over.unwrap();
        assert_eq!(port, "port");
        self.reason = reason;
        (outcome.kind, outcome.applications)
    }

    fn pool(&self) -> u32 {
        self.seats.pool.id().unwrap()
    }
}

fn until(mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < limit);
        thread::sleep(SOON);
    }
}

fn is_there(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

/// Receives the order that arrived on the connection of a client of the port.
fn ordered(connection: &UnixStream) -> (Order, UnixStream) {
    let mut byte = [0];
    let (_, mut files) = socket::receive(connection, &mut byte).unwrap();
    assert_eq!(byte, [ORDER]);
    let orders = UnixStream::from(files.remove(0));
    (Order::take(&orders).unwrap(), orders)
}

#[test]
fn applications_go_to_the_host_and_back_and_the_pool_ends_between() {
    let mut rig = Rig::serving();
    let pool = rig.pool();
    let local = rig.path("agent.local.sock");
    // Whoever may connect to the agent may connect to the pool.
    let mode = fs::metadata(&local).unwrap().mode();
    assert_eq!(mode & 0o777, 0o660);
    let application = rig.seat();
    // To the host: when the application reports that it has moved, the pool ends with everything
    // that it has started.
    rig.wish(1, Server::Host);
    assert!(rig.look(&[]).is_none() && !rig.seats.serves());
    let order = Order::take(&application).unwrap();
    assert_eq!(order.to, rig.path("agent.sock").display().to_string());
    assert!(rig.look(&[]).is_none() && is_there(pool));
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    assert!(!is_there(pool));
    // Back, over the connection that the port's clients have. One stays, which is reported.
    let (agent, application) = UnixStream::pair().unwrap();
    rig.wish(2, Server::Local);
    // An application on its way to the port is waited for.
    until(|| {
        assert!(rig.seats.step(&[], WINDOW, true).is_none());
        rig.seats.serves()
    });
    assert!(rig.look(&[&agent]).is_none());
    let (order, orders) = ordered(&application);
    assert_eq!(order.to, local.display().to_string());
    order::answer(&orders, &Err("it is busy".to_owned()));
    assert_eq!(rig.over(&[&agent]), (OutcomeKind::Stay, 1));
    assert_eq!(rig.reason, "it is busy");
}

#[test]
fn applications_of_pool_and_port_go_elsewhere_and_from_there_to_either() {
    let mut rig = Rig::serving();
    let pool = rig.pool();
    let seated = rig.seat();
    let (agent, application) = UnixStream::pair().unwrap();
    rig.wish(1, Server::Elsewhere);
    assert!(rig.look(&[&agent]).is_none() && !rig.seats.serves());
    let (order, from_port) = ordered(&application);
    assert_eq!(order.to, ELSEWHERE);
    assert_eq!(Order::take(&seated).unwrap().to, ELSEWHERE);
    order::answer(&seated, &Ok(()));
    order::answer(&from_port, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 2));
    assert!(!is_there(pool));
    // Asked once more, all are there.
    rig.wish(2, Server::Elsewhere);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    // One returns to the port, the other stays where it is, and can be sent on.
    rig.wish(3, Server::Host);
    assert!(rig.look(&[]).is_none());
    let own = rig.path("agent.sock").display().to_string();
    assert_eq!(Order::take(&seated).unwrap().to, own);
    assert_eq!(Order::take(&from_port).unwrap().to, own);
    order::answer(&seated, &Ok(()));
    order::answer(&from_port, &Err("it is busy".to_owned()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 1));
    assert!(!rig.seats.serves());
    rig.wish(4, Server::Local);
    until(|| {
        assert!(rig.look(&[]).is_none());
        rig.seats.serves()
    });
    assert!(rig.look(&[]).is_none());
    let local = rig.path("agent.local.sock").display().to_string();
    assert_eq!(Order::take(&from_port).unwrap().to, local);
    order::answer(&from_port, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    assert_eq!(rig.seats.led.len(), 1);
}

#[test]
fn an_agent_without_a_pool_sends_applications_elsewhere_and_nowhere_else() {
    let mut rig = Rig::new(POOL);
    rig.seats = Seats::new("", rig.path("agent.sock"));
    let (agent, application) = UnixStream::pair().unwrap();
    rig.wish(1, Server::Local);
    assert_eq!(rig.over(&[&agent]), (OutcomeKind::Cannot, 0));
    rig.seats.again(true);
    assert!(rig.seats.round.is_none());
    rig.wish(2, Server::Elsewhere);
    assert!(rig.look(&[&agent]).is_none());
    let (_, orders) = ordered(&application);
    order::answer(&orders, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
}

#[test]
fn an_application_whose_way_back_is_not_over_is_not_taken_for_one_that_has_left() {
    let mut rig = Rig::serving();
    let pool = rig.pool();
    let (agent, application) = UnixStream::pair().unwrap();
    rig.wish(1, Server::Local);
    assert!(rig.look(&[&agent]).is_none());
    let (_, orders) = ordered(&application);
    // It gets no further order until it has answered, and so is in the pool.
    rig.wish(2, Server::Host);
    assert!(rig.look(&[]).is_none());
    order::answer(&orders, &Ok(()));
    assert!(rig.look(&[]).is_none() && is_there(pool));
    let order = Order::take(&orders).unwrap();
    assert_eq!(order.to, rig.path("agent.sock").display().to_string());
    // The other way round: it is at the host, and comes back as a client of the port.
    rig.wish(3, Server::Local);
    assert!(rig.look(&[&agent]).is_none());
    order::answer(&orders, &Ok(()));
    assert!(rig.look(&[&agent]).is_none());
    let (_, orders) = ordered(&application);
    order::answer(&orders, &Ok(()));
    assert_eq!(rig.over(&[&agent]), (OutcomeKind::Done, 1));
    assert!(is_there(pool));
}

#[test]
fn who_answers_late_or_unasked_is_still_known_to_be_in_the_pool() {
    let mut rig = Rig::serving();
    let pool = rig.pool();
    let application = rig.seat();
    order::answer(&application, &Ok(()));
    rig.seats.heard();
    assert_eq!(rig.seats.led.len(), 1);
    rig.seats.limits.answer = Duration::ZERO;
    for number in 1..3 {
        rig.wish(number, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 1));
        assert!(is_there(pool));
    }
    // It was told once. What follows the answer is not an answer.
    Order::take(&application).unwrap();
    order::answer(&application, &Ok(()));
    order::answer(&application, &Ok(()));
    rig.seats.heard();
    assert!(rig.seats.led.is_empty());
    application.set_nonblocking(true).unwrap();
    assert!(Order::take(&application).is_err());
    rig.wish(3, Server::Host);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    assert!(!is_there(pool));
}

#[test]
fn a_pool_that_serves_somebody_unknown_goes_on() {
    let mut rig = Rig::new(SILENT);
    let path = rig.path("agent.local.sock");
    rig.seats.limits.end = Duration::from_millis(100);
    rig.seats.start(WINDOW);
    let listener = UnixListener::bind(&path).unwrap();
    let pool = rig.pool();
    assert_eq!(rig.seats.pool.connections(), 0);
    let waiting = UnixStream::connect(&path).unwrap();
    let (served, _) = listener.accept().unwrap();
    let other = UnixStream::connect(&path).unwrap();
    rig.wish(1, Server::Host);
    assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 2));
    assert!(is_there(pool) && rig.seats.serves());
    drop((served, waiting, listener, other));
    rig.seats.limits.end = Duration::from_secs(60);
    rig.wish(2, Server::Host);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    assert!(!is_there(pool));
}

#[test]
fn who_connects_without_an_end_and_who_has_another_api_is_not_seated() {
    let mut rig = Rig::serving();
    let (agent, _application) = UnixStream::pair().unwrap();
    let hello = Hello::client::<Cuda>().to_bytes();
    assert!(!rig.seats.seat(&agent, &hello) && !rig.seats.seat(&agent, &[0; hello::SIZE]));
    let seated: Vec<_> = (0..LED_OF_ONE_USER).map(|_| rig.seat()).collect();
    let hello = Hello::client::<OpenCl>().to_bytes();
    assert!(!rig.seats.seat(&agent, &hello));
    for led in &mut rig.seats.led {
        led.user = None;
    }
    assert!(rig.seats.seat(&agent, &hello));
    drop(seated);
    // Processes that other tests start may have the ends until they run their program.
    until(|| {
        rig.seats.heard();
        rig.seats.led.len() == 1
    });
}

#[test]
fn a_pool_that_has_ended_serves_nobody_until_a_device_comes() {
    let mut rig = Rig::serving();
    let pool = rig.pool();
    // No application would move to it.
    rig.seats.again(false);
    assert!(rig.seats.round.is_none());
    // SAFETY: a plain call on a child that was not waited for.
    unsafe { libc::kill(pool as libc::pid_t, libc::SIGKILL) };
    until(|| !rig.seats.serves());
    assert!(!rig.path("agent.local.sock").exists());
    rig.seats.again(false);
    let mut over = None;
    until(|| {
        over = rig.look(&[]);
        over.is_some()
    });
    let Told { outcome, port, .. } = over.unwrap();
    assert_eq!((outcome.kind, port.as_str()), (OutcomeKind::Done, ""));
    assert!(rig.seats.serves() && rig.pool() != pool);
}

#[test]
fn a_pool_that_does_not_start_is_tried_once() {
    let mut rig = Rig::new("echo >>\"${0%/*}/starts\"\n");
    rig.wish(1, Server::Local);
    assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
    let starts = fs::read_to_string(rig.path("starts")).unwrap();
    assert_eq!(starts.lines().count(), 1);
    rig.seats.pool = LocalPool::new("/nonexistent/gantry-accel", &rig.path("agent.sock"));
    rig.wish(2, Server::Local);
    assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
}

#[test]
fn what_does_not_end_with_the_pool_is_waited_for_and_told_of() {
    // In another process group.
    let mut rig =
        Rig::new("setsid sleep 1000 & echo $! >\"$2.left\"; : >\"$2\"; exec sleep 1000\n");
    rig.seats.limits.end = Duration::from_millis(100);
    rig.wish(1, Server::Local);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    let left = fs::read_to_string(rig.path("agent.local.sock.left")).unwrap();
    let left: libc::pid_t = left.trim().parse().unwrap();
    let group = || {
        // SAFETY: a plain call.
        unsafe { libc::getpgid(left) }
    };
    until(|| group() == left);
    rig.wish(2, Server::Host);
    assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
    // SAFETY: a plain call on a process that this test has started and not waited for.
    unsafe { libc::kill(left, libc::SIGKILL) };
    rig.seats.limits.end = Duration::from_secs(60);
    rig.wish(3, Server::Host);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
}

/// A guest's device, as the kernel shows it.
struct Gpu {
    folder: PathBuf,
}

impl Gpu {
    const ADDRESS: &str = "0000:00:09.0";

    /// Present, with a driver; applications can leave it.
    fn of(rig: &mut Rig) -> Self {
        rig.seats.pci = rig.path("devices/pci0000:00");
        let folder = rig.seats.pci.join(Self::ADDRESS);
        let gpu = Self { folder };
        gpu.plug();
        gpu.bind();
        gpu
    }

    fn plug(&self) {
        fs::create_dir_all(&self.folder).unwrap();
        for name in ["vendor", "device", "resource0"] {
            fs::write(self.folder.join(name), "").unwrap();
        }
    }

    fn bind(&self) {
        fs::create_dir(self.folder.join("driver")).unwrap();
    }

    fn unplug(&self) {
        // The old folder still exists, so that its inode number is not reused.
        fs::rename(&self.folder, self.folder.join("../../gone")).unwrap();
    }

    fn leave(rig: &mut Rig) {
        Self::asked(rig, Server::Away);
    }

    fn asked(rig: &mut Rig, by: Server) {
        let wish = Wish { number: 1, by };
        rig.seats.wish(wish, Self::ADDRESS, "port");
    }
}

#[test]
fn applications_come_back_by_themselves_when_the_device_that_has_left_has_its_driver() {
    let mut rig = Rig::serving();
    let gpu = Gpu::of(&mut rig);
    let pool = rig.pool();
    let application = rig.seat();
    Gpu::leave(&mut rig);
    assert!(rig.look(&[]).is_none() && !rig.seats.serves());
    let own = rig.path("agent.sock").display().to_string();
    assert_eq!(Order::take(&application).unwrap().to, own);
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    assert!(!is_there(pool));
    // Other devices get their drivers, and this one is still present.
    let (agent, application) = UnixStream::pair().unwrap();
    rig.seats.again(true);
    gpu.unplug();
    rig.seats.again(true);
    gpu.plug();
    rig.seats.again(true);
    assert!(rig.seats.round.is_none() && !rig.seats.serves());
    gpu.bind();
    rig.seats.again(true);
    until(|| {
        assert!(rig.look(&[&agent]).is_none());
        rig.seats.serves()
    });
    assert!(rig.look(&[&agent]).is_none());
    let (order, orders) = ordered(&application);
    let local = rig.path("agent.local.sock").display().to_string();
    assert_eq!(order.to, local);
    order::answer(&orders, &Ok(()));
    let told = rig.look(&[&agent]).unwrap();
    assert_eq!(
        (told.outcome.kind, told.outcome.applications),
        (OutcomeKind::Done, 1)
    );
    assert_eq!(told.port, "");
}

#[test]
fn applications_that_are_told_to_come_back_do_so_when_the_device_has_its_driver() {
    let mut rig = Rig::serving();
    let gpu = Gpu::of(&mut rig);
    rig.seats.limits.drivers = Duration::from_secs(60);
    Gpu::leave(&mut rig);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    gpu.unplug();
    gpu.plug();
    rig.wish(2, Server::Local);
    rig.seats.start(WINDOW);
    for _ in 0..3 {
        assert!(rig.look(&[]).is_none());
        assert!(!rig.seats.pool.is_running());
    }
    gpu.bind();
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    // A device that has no driver, and gets none.
    rig.seats.limits.drivers = Duration::ZERO;
    Gpu::leave(&mut rig);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    fs::remove_dir(gpu.folder.join("driver")).unwrap();
    rig.wish(3, Server::Local);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
}

#[test]
fn a_device_that_is_back_before_all_have_left_it_has_them_back() {
    let mut rig = Rig::serving();
    let gpu = Gpu::of(&mut rig);
    let application = rig.seat();
    Gpu::leave(&mut rig);
    assert!(rig.look(&[]).is_none());
    gpu.unplug();
    gpu.plug();
    gpu.bind();
    rig.seats.again(false);
    Order::take(&application).unwrap();
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    // No other event is needed.
    assert_eq!(rig.seats.next_look(), Some(SOON));
    until(|| {
        rig.look(&[]);
        rig.seats.serves()
    });
}

#[test]
fn nobody_leaves_a_device_that_somebody_else_uses_and_who_that_is_is_told() {
    let mut rig = Rig::serving();
    let gpu = Gpu::of(&mut rig);
    rig.seats.owner = u32::MAX;
    let (pool, application) = (rig.pool(), rig.seat());
    let file = gpu.folder.join("resource0");
    let held = fs::File::open(&file).unwrap();
    Gpu::leave(&mut rig);
    assert_eq!(rig.over(&[]), (OutcomeKind::InUse, 1));
    let named = format!("PID {} (", std::process::id());
    let open = format!(") has {} open", file.display());
    assert!(
        rig.reason.starts_with(&named) && rig.reason.ends_with(&open),
        "{}",
        rig.reason
    );
    application.set_nonblocking(true).unwrap();
    assert!(Order::take(&application).is_err() && rig.seats.serves() && is_there(pool));
    // A process that opens the device while applications leave is reported, too.
    drop(held);
    application.set_nonblocking(false).unwrap();
    Gpu::leave(&mut rig);
    assert!(rig.look(&[]).is_none());
    let held = fs::File::open(&file).unwrap();
    Order::take(&application).unwrap();
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::InUse, 1));
    drop(held);
    Gpu::leave(&mut rig);
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
}

#[test]
fn applications_of_the_pool_are_parked_until_their_device_is_back_and_the_ports_stay() {
    let mut rig = Rig::serving();
    let gpu = Gpu::of(&mut rig);
    let pool = rig.pool();
    let application = rig.seat();
    let (agent, of_port) = UnixStream::pair().unwrap();
    Gpu::asked(&mut rig, Server::Parked);
    assert!(rig.look(&[&agent]).is_none() && !rig.seats.serves());
    assert_eq!(Order::take(&application).unwrap().to, PARKED);
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[&agent]), (OutcomeKind::Done, 1));
    assert!(!is_there(pool));
    // Another model first, and then the device.
    gpu.unplug();
    rig.seats.again(true);
    assert!(rig.seats.round.is_none());
    gpu.plug();
    gpu.bind();
    rig.seats.again(true);
    until(|| {
        assert!(rig.look(&[]).is_none());
        rig.seats.serves()
    });
    assert!(rig.look(&[]).is_none());
    let local = rig.path("agent.local.sock").display().to_string();
    assert_eq!(Order::take(&application).unwrap().to, local);
    // It cannot move, and waits for the next order, which may be to the host's pool.
    order::answer(&application, &Err("it has more memory".to_owned()));
    let told = rig.look(&[]).unwrap();
    assert_eq!(told.outcome.kind, OutcomeKind::Stay);
    assert_eq!(rig.seats.led[0].at, Place::Parked);
    rig.wish(3, Server::Host);
    assert!(rig.look(&[]).is_none());
    let own = rig.path("agent.sock").display().to_string();
    assert_eq!(Order::take(&application).unwrap().to, own);
    order::answer(&application, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    of_port.set_nonblocking(true).unwrap();
    assert!(socket::receive(&of_port, &mut [0]).is_err());
}

#[test]
fn who_cannot_be_parked_keeps_the_pool_and_parked_ones_wait_for_a_wish_where_no_device_is_named() {
    let mut rig = Rig::serving();
    let (one, other) = (rig.seat(), rig.seat());
    let parked = |rig: &mut Rig, number| {
        let wish = Wish {
            number,
            by: Server::Parked,
        };
        rig.seats.wish(wish, "", "port");
        assert!(rig.look(&[]).is_none());
    };
    parked(&mut rig, 1);
    for (application, outcome) in [(&one, Ok(())), (&other, Err("it is mapped".to_owned()))] {
        assert_eq!(Order::take(application).unwrap().to, PARKED);
        order::answer(application, &outcome);
    }
    assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 1));
    assert!(rig.reason == "it is mapped" && rig.seats.serves());
    // Only the other one is asked again. Then both return.
    parked(&mut rig, 2);
    Order::take(&other).unwrap();
    order::answer(&other, &Ok(()));
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    rig.seats.again(false);
    assert!(rig.seats.round.is_none());
    rig.wish(3, Server::Local);
    until(|| {
        assert!(rig.look(&[]).is_none());
        rig.seats.serves()
    });
    assert!(rig.look(&[]).is_none());
    for application in [&one, &other] {
        Order::take(application).unwrap();
        order::answer(application, &Ok(()));
    }
    assert_eq!(rig.over(&[]), (OutcomeKind::Done, 2));
}

//! The notes and the gate before a kernel that keeps a record, with blocks at their published offsets.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use remoting_turns::slices::Slices as _;

use super::*;

const CLIENT: u32 = 0xc1d0_0001;
const DEVICE: u32 = 0x5c00_0001;
const SUBDEVICE: u32 = 0x5c00_0002;
const SPACE: u32 = 0x5c00_0003;
const OTHER_SPACE: u32 = 0x5c00_0004;
/// The number of the device's GPU.
const GPU: u32 = 3;
const FILE: c_int = 7;
/// Engines of groups.
const COMPUTE: u32 = 1;
const COPY: u32 = 9;
const ALLOCATE: c_ulong = 0xc030_462b;
const FREE: c_ulong = 0xc010_4629;
const CONTROL: c_ulong = 0xc020_462a;
const GROUP: u32 = 0xa06c;
const CHANNEL: u32 = 0xc86f;
/// No wait here takes as long.
const HANG: Duration = Duration::from_secs(60);

/// A call, as the kernel sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Allocate(u32),
    Free(u32),
    /// The group and the microseconds.
    Slice(u32, u64),
    /// Running kernels are taken off the GPU at once.
    Stop(Vec<u32>),
    /// They stay until their slice is over.
    Unschedule(Vec<u32>),
    Start(Vec<u32>),
    /// A channel's number was asked for: [`number`].
    Number(u32),
    Other(c_ulong),
}

#[derive(Debug, Default)]
struct StandIn {
    calls: Mutex<Vec<Call>>,
    /// The status of controls.
    status: AtomicU32,
    /// A channel that the driver does not find.
    gone: AtomicU32,
    /// Another one that the driver does not stop or start, with this status.
    refused: AtomicU32,
    refused_with: AtomicU32,
    /// The gate before it, and what a stop during a call that frees gives.
    gate: OnceLock<&'static Gate<Self>>,
    stop_meanwhile: Mutex<Option<String>>,
}

impl Kernel for StandIn {
    unsafe fn ioctl(&self, file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        // SAFETY: the blocks of these tests are as long as their requests say, and controls have their parameters.
        let word = |at: usize| unsafe { argument.byte_add(at).cast::<u32>().read_unaligned() };
        let call = match request {
            ALLOCATE => Call::Allocate(word(8)),
            FREE => {
                if let Some(gate) = self.gate.get() {
                    let stopped = gate.contexts().first().map(|context| gate.stop(*context));
                    let why = stopped.map(|stopped| stopped.unwrap_err().to_string());
                    *self.stop_meanwhile.lock().unwrap() = why;
                }
                Call::Free(word(8))
            }
            CONTROL => {
                assert_eq!((file, word(0)), (FILE, CLIENT));
                // SAFETY: as above.
                let answer = |status| unsafe { argument.byte_add(28).cast::<u32>().write(status) };
                answer(self.status.load(Ordering::SeqCst));
                let at = u64::from(word(16)) | u64::from(word(20)) << 32;
                let (object, command, size) = (word(4), word(8), word(24));
                // SAFETY: as above.
                let word = |offset: u64| unsafe { *((at + offset) as *const u32) };
                match command {
                    0xa06c_0103 => {
                        assert_eq!(size, 8);
                        Call::Slice(object, u64::from(word(0)) | u64::from(word(4)) << 32)
                    }
                    0x2080_110b => {
                        assert_eq!((size, object), (536, SUBDEVICE));
                        // Leaves what is enqueued.
                        assert_eq!((word(8) & !0xff, word(16), word(20)), (0, 0, 0));
                        let count = u64::from(word(4));
                        assert!((0..count).all(|index| word(24 + index * 4) == CLIENT));
                        let channels: Vec<u32> =
                            (0..count).map(|index| word(280 + index * 4)).collect();
                        if channels.contains(&self.gone.load(Ordering::SeqCst)) {
                            answer(0x57);
                        } else if channels.contains(&self.refused.load(Ordering::SeqCst)) {
                            answer(self.refused_with.load(Ordering::SeqCst));
                        }
                        match (word(0), word(8)) {
                            (1, 0) => Call::Stop(channels),
                            (1, 1) => Call::Unschedule(channels),
                            (0, 0) => Call::Start(channels),
                            other => panic!("{other:?}"),
                        }
                    }
                    0xa06f_0113 => {
                        assert_eq!(size, 4);
                        if object == self.gone.load(Ordering::SeqCst) {
                            answer(0x57);
                        }
                        // SAFETY: as above.
                        unsafe { *(at as *mut u32) = number(object) };
                        Call::Number(object)
                    }
                    0xa06f_0103 | 0xa06c_0101 | 0xa06c_0105 | 0x2080_1210 => {
                        Call::Other(command.into())
                    }
                    other => panic!("control {other:#x}"),
                }
            }
            _ => Call::Other(request),
        };
        let fails = call == Call::Other(0);
        self.calls.lock().unwrap().push(call);
        if fails {
            // SAFETY: the place of this thread's error number.
            unsafe { *libc::__errno_location() = libc::ENOTTY };
        }
        if fails { -1 } else { 0 }
    }
}

/// The number of a channel that the kernel answers.
fn number(channel: u32) -> u32 {
    channel + 500
}

impl StandIn {
    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

fn allocate_with(
    gate: &Gate<StandIn>,
    parent: u32,
    object: u32,
    class: u32,
    status: u32,
    parameters: &[u32],
) {
    allocate_by(gate, FILE, parent, object, class, status, parameters);
}

fn allocate_by(
    gate: &Gate<StandIn>,
    file: c_int,
    parent: u32,
    object: u32,
    class: u32,
    status: u32,
    parameters: &[u32],
) {
    let mut block = [0u32; 12];
    block[..4].copy_from_slice(&[CLIENT, parent, object, class]);
    if !parameters.is_empty() {
        let at = parameters.as_ptr() as u64;
        (block[4], block[5]) = (at as u32, (at >> 32) as u32);
    }
    block[10] = status;
    // SAFETY: a block of this request.
    unsafe { gate.pass_on(file, ALLOCATE, block.as_mut_ptr().cast()) };
}

fn allocate(gate: &Gate<StandIn>, parent: u32, object: u32, class: u32) {
    allocate_with(gate, parent, object, class, 0, &[]);
}

fn group(gate: &Gate<StandIn>, object: u32, space: u32, engine: u32) {
    allocate_with(gate, DEVICE, object, GROUP, 0, &[0, 0, space, engine, 0]);
}

fn free(gate: &Gate<StandIn>, object: u32) {
    free_below(gate, 0, object);
}

fn free_below(gate: &Gate<StandIn>, parent: u32, object: u32) {
    let mut block = [CLIENT, parent, object, 0];
    // SAFETY: a block of this request.
    unsafe { gate.pass_on(FILE, FREE, block.as_mut_ptr().cast()) };
}

fn context(space: u32) -> Context {
    Context {
        client: CLIENT,
        device: DEVICE,
        space,
    }
}

/// A gate as [`gate`], for programs that are not trusted.
fn guarded() -> &'static Gate<StandIn> {
    filled(Gate::guarded(StandIn::default()))
}

/// A gate whose process has a context with a compute group 10 of the channels 11 and 12, and a copy group 20 with the
/// channel 21.
fn gate() -> &'static Gate<StandIn> {
    filled(Gate::new(StandIn::default()))
}

fn filled(gate: Gate<StandIn>) -> &'static Gate<StandIn> {
    let gate = Box::leak(Box::new(gate));
    allocate(gate, 0, CLIENT, 0x41);
    allocate_with(gate, CLIENT, DEVICE, 0x80, 0, &[GPU; 14]);
    allocate(gate, DEVICE, SUBDEVICE, 0x2080);
    allocate(gate, DEVICE, SPACE, 0x90f1);
    for (object, engine, channels) in [(10, COMPUTE, &[11, 12][..]), (20, COPY, &[21])] {
        group(gate, object, SPACE, engine);
        for channel in channels {
            allocate(gate, object, *channel, CHANNEL);
        }
    }
    gate.kernel.take();
    gate
}

#[test]
fn a_context_is_stopped_and_started_with_its_compute_channels() {
    let gate = gate();
    assert_eq!(gate.contexts(), [context(SPACE)]);
    let stopped = gate.stop(context(SPACE)).unwrap();
    assert_eq!(gate.kernel.take(), [Call::Stop(vec![11, 12])]);
    assert!(matches!(gate.stop(context(SPACE)), Err(Error::Stopped)));
    assert!(stopped.renew());
    drop(stopped);
    assert_eq!(gate.kernel.take(), [Call::Start(vec![11, 12])]);
}

#[test]
fn slices_are_those_of_compute_groups() {
    let gate = gate();
    gate.set(context(SPACE), Slice::from_micros(1500).unwrap())
        .unwrap();
    assert_eq!(gate.kernel.take(), [Call::Slice(10, 1500)]);
    for micros in [0, 99, 100_001, u32::MAX] {
        assert_eq!(Slice::from_micros(micros), None);
    }
}

#[test]
fn contexts_are_told_apart_by_address_spaces() {
    let gate = gate();
    group(gate, 30, OTHER_SPACE, COMPUTE);
    // A group has no channels yet.
    assert_eq!(gate.contexts(), [context(SPACE)]);
    allocate(gate, 30, 31, 0xc56f);
    assert_eq!(gate.contexts(), [context(SPACE), context(OTHER_SPACE)]);
    gate.kernel.take();
    drop(gate.stop(context(OTHER_SPACE)).unwrap());
    assert_eq!(
        gate.kernel.take(),
        [Call::Stop(vec![31]), Call::Start(vec![31])]
    );
}

#[test]
fn what_the_driver_has_refused_to_make_is_not_noted() {
    let gate = gate();
    allocate_with(gate, 10, 13, CHANNEL, 0x1a, &[]);
    gate.kernel.take();
    drop(gate.stop(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Stop(vec![11, 12]));
}

#[test]
fn freed_channels_groups_devices_and_clients_are_forgotten() {
    let gate = gate();
    free(gate, 11);
    assert_eq!(gate.contexts(), [context(SPACE)]);
    free(gate, 10);
    assert_eq!(gate.contexts(), []);
    assert!(matches!(gate.stop(context(SPACE)), Err(Error::NoChannels)));
    let slice = Slice::from_micros(2000).unwrap();
    assert!(matches!(
        gate.set(context(SPACE), slice),
        Err(Error::NoChannels)
    ));
    for object in [DEVICE, CLIENT] {
        let gate = self::gate();
        free(gate, object);
        assert_eq!(gate.contexts(), []);
    }
}

#[test]
fn a_stopped_context_is_started_before_its_channels_are_freed() {
    for object in [11, 10, 20, SPACE, DEVICE, CLIENT] {
        let gate = gate();
        gate.kernel.gate.set(gate).unwrap();
        let stopped = gate.stop(context(SPACE)).unwrap();
        free(gate, object);
        assert_eq!(
            gate.kernel.take(),
            [
                Call::Stop(vec![11, 12]),
                Call::Start(vec![11, 12]),
                Call::Free(object)
            ]
        );
        // Nothing is stopped before the call has returned.
        let meanwhile = gate.kernel.stop_meanwhile.lock().unwrap().take();
        assert_eq!(meanwhile, Some(Error::Busy.to_string()));
        assert!(!stopped.renew());
        drop(stopped);
        assert_eq!(gate.kernel.take(), []);
    }
}

#[test]
fn what_ends_with_an_address_space_or_a_context_share_is_forgotten() {
    let gate = gate();
    free(gate, SPACE);
    assert_eq!(gate.contexts(), []);
    let gate = self::gate();
    let mut parameters = [0; 92];
    parameters[6] = 77;
    allocate_with(gate, 10, 13, CHANNEL, 0, &parameters);
    allocate(gate, 10, 77, 0x9067);
    gate.kernel.take();
    drop(gate.stop(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Stop(vec![11, 12, 13]));
    free_below(gate, 10, 77);
    gate.kernel.take();
    drop(gate.stop(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Stop(vec![11, 12]));
}

#[test]
fn whatever_an_untrusted_program_frees_may_lie_below_what_is_stopped() {
    let gate = guarded();
    allocate(gate, 11, 50, 0xcbc0);
    let stopped = gate.stop(context(SPACE)).unwrap();
    // It says that it lies elsewhere.
    let freed = std::thread::spawn(move || free_below(gate, 0, 50));
    for _ in 0..20 {
        std::thread::sleep(UNRENEWED / 40);
        assert!(stopped.renew(), "the call has ended the stop");
    }
    assert!(!freed.is_finished());
    drop(stopped);
    freed.join().unwrap();
    assert!(gate.is_needed(CLIENT, SUBDEVICE) && !gate.is_needed(CLIENT, SPACE));
    let controlled = |channel| gate.controlled_by(CLIENT, channel).is_some();
    assert!(controlled(11) && !controlled(21));
    assert!(gate.is_group(CLIENT, 20) && !gate.is_group(CLIENT, 11));
    free(gate, DEVICE);
    assert!(!gate.is_needed(CLIENT, SUBDEVICE));
}

#[test]
fn what_cannot_be_started_fails_no_calls_of_other_clients_and_what_is_gone_is_started() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    let mut other = [CLIENT + 1, 0, CLIENT + 1, 0];
    allocate_by(gate, FILE + 1, 0, CLIENT + 1, 0x41, 0, &[]);
    // SAFETY: a block of this request.
    let freed = unsafe { gate.pass_on(FILE + 1, FREE, other.as_mut_ptr().cast()) };
    assert_eq!(freed, 0);
    // The driver does not find its channels.
    gate.kernel.status.store(0x57, Ordering::SeqCst);
    drop(stopped);
    assert!(!gate.is_stopped(context(SPACE)));
}

#[test]
fn a_context_is_stopped_although_a_channel_of_it_is_gone() {
    let gate = guarded();
    gate.kernel.gone.store(11, Ordering::SeqCst);
    gate.kernel.take();
    let stopped = gate.unschedule(context(SPACE)).unwrap();
    assert!(stopped.renew());
    let each = [vec![11, 12], vec![11]].map(Call::Unschedule);
    let found = [Call::Number(11), Call::Unschedule(vec![12])];
    assert_eq!(gate.kernel.take(), [&each[..], &found].concat());
    // It is forgotten.
    drop(stopped);
    assert_eq!(gate.kernel.take(), [Call::Start(vec![12])]);
    drop(gate.unschedule(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Unschedule(vec![12]));
    // Nothing is left of the context.
    gate.kernel.gone.store(12, Ordering::SeqCst);
    let stopped = gate.unschedule(context(SPACE));
    assert!(matches!(stopped, Err(Error::NoChannels)));
    assert!(gate.contexts().is_empty() && !gate.is_stopped(context(SPACE)));
}

#[test]
fn a_context_does_not_count_as_stopped_if_one_of_its_channels_is_not() {
    // The driver misses something else that the call names, or refuses.
    for status in [0x57, 0x56] {
        let gate = guarded();
        gate.kernel.refused.store(12, Ordering::SeqCst);
        gate.kernel.refused_with.store(status, Ordering::SeqCst);
        let stopped = gate.unschedule(context(SPACE));
        assert!(matches!(stopped, Err(Error::Refused(other)) if other == status));
        assert_eq!(gate.contexts(), [context(SPACE)]);
    }
}

#[test]
fn what_ends_with_the_address_space_of_a_context_share_is_forgotten() {
    let gate = guarded();
    allocate(gate, DEVICE, OTHER_SPACE, 0x90f1);
    allocate_with(gate, 10, 77, 0x9067, 0, &[OTHER_SPACE, 0, 0]);
    let mut parameters = [0; 92];
    parameters[6] = 77;
    allocate_with(gate, 10, 13, CHANNEL, 0, &parameters);
    free(gate, OTHER_SPACE);
    gate.kernel.take();
    drop(gate.unschedule(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Unschedule(vec![11, 12]));
}

#[test]
fn a_stopped_context_is_started_before_a_channels_engine_is_freed() {
    let gate = gate();
    allocate(gate, 11, 50, 0xcbc0);
    let stopped = gate.stop(context(SPACE)).unwrap();
    free_below(gate, 11, 50);
    assert!(!stopped.renew());
}

#[test]
fn a_stopped_context_is_started_before_calls_that_wait_for_channels() {
    // Idle channels; calls on the file of unified memory.
    for request in [0xc038_4641, 0x1a, 0x1c, 0x26] {
        let gate = gate();
        let stopped = gate.stop(context(SPACE)).unwrap();
        let mut block = [0u32; 64];
        // SAFETY: a block that is long enough.
        unsafe { gate.pass_on(FILE, request, block.as_mut_ptr().cast()) };
        assert_eq!(
            gate.kernel.take()[1..],
            [Call::Start(vec![11, 12]), Call::Other(request)]
        );
        assert!(!stopped.renew());
    }
}

#[test]
fn a_channel_that_is_made_in_a_stopped_context_starts_it() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    allocate(gate, 10, 13, CHANNEL);
    assert!(!stopped.renew());
    drop(stopped);
    gate.kernel.take();
    drop(gate.stop(context(SPACE)).unwrap());
    assert_eq!(gate.kernel.take()[0], Call::Stop(vec![11, 12, 13]));
}

#[test]
fn other_objects_may_be_freed_while_a_context_is_stopped() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    allocate(gate, DEVICE, 40, 0x40);
    free_below(gate, DEVICE, 40);
    assert!(stopped.renew());
}

#[test]
fn a_context_whose_stop_nobody_renews_is_started() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    let begin = Instant::now();
    while gate.kernel.calls.lock().unwrap().len() < 2 {
        assert!(begin.elapsed() < HANG, "it is not started");
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(gate.kernel.take()[1], Call::Start(vec![11, 12]));
    assert!(!stopped.renew());
}

#[test]
fn many_channels_take_several_calls() {
    let gate = gate();
    for channel in 100..200 {
        allocate(gate, 10, channel, CHANNEL);
    }
    gate.kernel.take();
    drop(gate.stop(context(SPACE)).unwrap());
    let lengths = gate.kernel.take().into_iter().map(|call| match call {
        Call::Stop(channels) => (true, channels.len()),
        Call::Start(channels) => (false, channels.len()),
        other => panic!("{other:?}"),
    });
    let expected = [(true, 64), (true, 38), (false, 64), (false, 38)];
    assert!(lengths.eq(expected));
}

#[test]
fn a_stop_that_the_driver_refuses_is_started_again() {
    let gate = gate();
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    assert!(matches!(
        gate.stop(context(SPACE)),
        Err(Error::Refused(0x56))
    ));
    let each = |call: fn(Vec<u32>) -> Call| [vec![11, 12], vec![11], vec![12]].map(call);
    let calls = [each(Call::Stop), each(Call::Start)].concat();
    assert_eq!(gate.kernel.take(), calls);
    // What was stopped of it could not be started.
    assert!(matches!(gate.stop(context(SPACE)), Err(Error::Stopped)));
    gate.kernel.status.store(0, Ordering::SeqCst);
    gate.wait_until_started();
    assert!(gate.stop(context(SPACE)).is_ok());
}

#[test]
fn a_call_that_would_wait_for_what_cannot_be_started_fails() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    gate.kernel.take();
    let mut block = [CLIENT, 10, 11, 0];
    // SAFETY: the block of this call.
    let result = unsafe { gate.pass_on(FILE, FREE, block.as_mut_ptr().cast()) };
    let error = io::Error::last_os_error().raw_os_error();
    assert_eq!((result, error), (-1, Some(libc::EIO)));
    let each = [vec![11, 12], vec![11], vec![12]].map(Call::Start);
    assert_eq!(gate.kernel.take(), each);
    gate.kernel.status.store(0, Ordering::SeqCst);
    // SAFETY: as above.
    let result = unsafe { gate.pass_on(FILE, FREE, block.as_mut_ptr().cast()) };
    assert_eq!(result, 0);
    assert!(!stopped.renew());
}

#[test]
fn a_start_that_the_driver_refuses_is_tried_again() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    drop(stopped);
    assert!(matches!(gate.stop(context(SPACE)), Err(Error::Stopped)));
    gate.kernel.status.store(0, Ordering::SeqCst);
    gate.wait_until_started();
}

impl Gate<StandIn> {
    fn wait_until_started(&self) {
        let begin = Instant::now();
        while !self.state.lock().unwrap().stopped.is_empty() {
            assert!(begin.elapsed() < HANG, "it is not started");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn other_calls_pass_with_their_result_and_error_number() {
    let gate = gate();
    let mut block = [0u32; 12];
    // Other sizes, and another type.
    for request in [0, 0x5421, 0xc020_462b, 0xc030_472b] {
        // SAFETY: the stand-in does not look at it.
        let result = unsafe { gate.pass_on(FILE, request, block.as_mut_ptr().cast()) };
        assert_eq!(gate.kernel.take(), [Call::Other(request)]);
        if request == 0 {
            assert_eq!(result, -1);
            let error = io::Error::last_os_error().raw_os_error();
            assert_eq!(error, Some(libc::ENOTTY));
        }
    }
}

#[test]
fn only_branches_of_the_list_have_slices() {
    let text = |version: &str| {
        format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC version:  gcc 12.3.0\n"
        )
    };
    assert!(listed(&text("580.159.04")).is_ok());
    for other in ["610.43.02", "58.0", "x.y"] {
        let error = listed(&text(other)).unwrap_err();
        assert!(matches!(error, Error::Branch(_)), "{other}");
    }
}

#[test]
fn channels_keep_the_numbers_that_they_had() {
    let gate = gate();
    // Those that exist, and those that are made, however soon they are freed.
    gate.number_channels();
    gate.number_channels();
    let asked = [11, 12, 21].map(Call::Number);
    assert_eq!(gate.kernel.take(), asked);
    allocate(gate, 10, 13, CHANNEL);
    let made = gate.kernel.take();
    assert_eq!(made, [Call::Allocate(13), Call::Number(13)]);
    allocate_with(gate, 10, 14, CHANNEL, 0x1a, &[]);
    free(gate, 13);
    let numbers = BTreeSet::from([11, 12, 13, 21].map(number));
    assert_eq!(gate.numbers(), Some(numbers));
    // Far more are made and freed than are kept: those that exist are among them.
    for channel in 0..2 * MOST_NUMBERS as u32 {
        allocate(gate, 10, 10_000 + channel, CHANNEL);
        free(gate, 10_000 + channel);
    }
    let numbers = gate.numbers().unwrap();
    assert!(numbers.len() <= MOST_NUMBERS + 4);
    assert!(
        [11, 12, 21]
            .map(number)
            .iter()
            .all(|one| numbers.contains(one))
    );
    // Another process's channels may have the numbers of ended ones, when the record has nothing of these any more.
    free(gate, 21);
    for _ in 0..READ {
        assert!(gate.numbers().unwrap().contains(&number(21)));
        gate.was_read();
    }
    assert_eq!(gate.numbers(), Some(BTreeSet::from([11, 12].map(number))));
    // One that has ended uses nothing.
    gate.kernel.status.store(0x23, Ordering::SeqCst);
    allocate(gate, 10, 14, CHANNEL);
    assert_eq!(gate.numbers(), Some(BTreeSet::from([11, 12].map(number))));
    // If one is not told, none is known.
    gate.kernel.status.store(0x22, Ordering::SeqCst);
    allocate(gate, 10, 15, CHANNEL);
    assert_eq!(gate.numbers(), None);
}

#[test]
fn a_closed_file_ends_its_clients_and_what_is_stopped_is_started_first() {
    let gate = gate();
    // The client lives on its own file, by whichever file its objects were made.
    allocate_by(
        gate,
        FILE + 1,
        DEVICE,
        60,
        GROUP,
        0,
        &[0, 0, OTHER_SPACE, COMPUTE, 0],
    );
    allocate_by(gate, FILE + 1, 60, 61, CHANNEL, 0, &[]);
    gate.close(FILE + 1, || ());
    assert_eq!(gate.contexts(), [context(SPACE), context(OTHER_SPACE)]);
    free(gate, 60);
    let stopped = gate.stop(context(SPACE)).unwrap();
    gate.kernel.take();
    let mut meanwhile = None;
    gate.close(FILE, || {
        assert_eq!(gate.kernel.take(), [Call::Start(vec![11, 12])]);
        meanwhile = Some(gate.stop(context(SPACE)).unwrap_err().to_string());
    });
    assert_eq!(meanwhile, Some(Error::Busy.to_string()));
    assert_eq!(gate.contexts(), []);
    assert!(!stopped.renew());
    drop(stopped);
    assert_eq!(gate.kernel.take(), []);
}

#[test]
fn what_is_stopped_on_a_file_that_is_closed_is_not_started_again_and_again() {
    let gate = gate();
    let stopped = gate.stop(context(SPACE)).unwrap();
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    gate.close(FILE, || ());
    gate.kernel.take();
    drop(stopped);
    assert!(gate.state.lock().unwrap().stopped.is_empty());
    assert_eq!(gate.kernel.take(), []);
}

#[test]
fn a_program_keeps_the_slice_that_its_groups_have() {
    let gate = gate();
    let kept = |group| gate.keep_slice(CLIENT, group).map(Result::unwrap);
    assert_eq!(kept(10), Some(0));
    assert_eq!(gate.kernel.take(), [Call::Slice(10, 2048)]);
    gate.set(context(SPACE), Slice::from_micros(700).unwrap())
        .unwrap();
    gate.kernel.take();
    assert_eq!(kept(10), Some(0));
    assert_eq!(gate.kernel.take(), [Call::Slice(10, 700)]);
    // Groups that copy, and objects that are not groups.
    assert_eq!((kept(20), kept(11), kept(99)), (None, None, None));
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    assert_eq!(kept(10), Some(0x56));
    gate.kernel.status.store(0, Ordering::SeqCst);
    gate.kernel.take();
    // A further group of the context has its slice at once.
    group(gate, 30, SPACE, COMPUTE);
    assert_eq!(
        gate.kernel.take(),
        [Call::Allocate(30), Call::Slice(30, 700)]
    );
}

#[test]
fn a_call_that_schedules_channels_starts_what_is_stopped_first() {
    for command in [0xa06f_0103u32, 0xa06c_0101, 0xa06c_0105, 0x2080_1210] {
        let gate = gate();
        let stopped = gate.stop(context(SPACE)).unwrap();
        gate.kernel.take();
        let mut parameters = [0u32; 4];
        let at = parameters.as_mut_ptr() as u64;
        let mut block = [CLIENT, 11, command, 0, at as u32, (at >> 32) as u32, 3, 0];
        // SAFETY: a block of this request.
        unsafe { gate.pass_on(FILE, CONTROL, block.as_mut_ptr().cast()) };
        assert_eq!(
            gate.kernel.take(),
            [Call::Start(vec![11, 12]), Call::Other(command.into())]
        );
        assert!(!stopped.renew());
    }
}

#[test]
fn contexts_whose_use_cannot_be_read_take_no_part() {
    let gate = Box::leak(Box::new(Gate::new(StandIn::default())));
    let mut shared = Shared::by_record(gate);
    // There is nothing to try yet.
    assert!(shared.works());
    let gate = self::gate();
    let mut shared = Shared::by_record(gate);
    gate.kernel.take();
    assert!(!shared.works(), "this machine has the driver's record");
    let tried = [
        Call::Slice(10, 2048),
        Call::Unschedule(vec![11, 12]),
        Call::Start(vec![11, 12]),
    ];
    assert_eq!(gate.kernel.take(), tried);
    // Once.
    assert!(!shared.works());
    assert_eq!(gate.kernel.take(), []);
    let gate = self::gate();
    let mut shared = Shared::by_record(gate);
    // What the driver refuses may have just ended: that is not the last word.
    gate.kernel.status.store(0x56, Ordering::SeqCst);
    let second = |number| Moment::START + Duration::from_secs(number);
    gate.kernel.take();
    for number in 1..1000 {
        assert!(shared.works_at(second(number)));
        assert!(!gate.kernel.take().is_empty(), "it is not tried again");
        assert!(shared.works_at(second(number)));
        assert_eq!(gate.kernel.take(), [], "it is tried all the time");
    }
    gate.kernel.status.store(0, Ordering::SeqCst);
    assert!(!shared.works_at(second(1000)), "this machine has no record");
    assert!(Shared::new(gate).works());
    // What is refused for one context is not for the next one, with which all is tried.
    let gate = self::gate();
    group(gate, 30, OTHER_SPACE, COMPUTE);
    allocate(gate, 30, 31, CHANNEL);
    gate.kernel.refused.store(11, Ordering::SeqCst);
    gate.kernel.refused_with.store(0x56, Ordering::SeqCst);
    let mut shared = Shared::by_record(gate);
    assert!(!shared.works(), "this machine has the driver's record");
    let tried = [Call::Unschedule(vec![31]), Call::Start(vec![31])];
    assert!(gate.kernel.take().ends_with(&tried));
}

#[test]
fn all_contexts_of_a_worker_are_sliced_and_stopped_together() {
    let gate = gate();
    let mut shared = Shared::new(gate);
    gate.kernel.take();
    assert_eq!(shared.gpus(), 1 << GPU);
    let millis = Duration::from_millis;
    shared.set(millis(1));
    shared.set(millis(1));
    assert_eq!(gate.kernel.take(), [Call::Slice(10, 1000)]);
    group(gate, 30, OTHER_SPACE, COMPUTE);
    allocate(gate, 30, 31, CHANNEL);
    gate.kernel.take();
    // Nothing but what the new context needs.
    shared.set(millis(1));
    assert_eq!(gate.kernel.take(), [Call::Slice(30, 1000)]);
    assert!(shared.stop());
    assert!(shared.keep());
    assert_eq!(
        gate.kernel.take(),
        [Call::Unschedule(vec![11, 12]), Call::Unschedule(vec![31])]
    );
    // A call that waits for channels starts all, and that is noticed.
    free(gate, 31);
    assert!(!shared.keep());
    assert!(shared.stop());
    gate.kernel.take();
    // So is another context, which would run.
    group(gate, 40, OTHER_SPACE + 1, COMPUTE);
    allocate(gate, 40, 41, CHANNEL);
    assert!(!shared.keep());
    assert!(shared.stop());
    gate.kernel.take();
    drop(shared);
    assert_eq!(
        gate.kernel.take(),
        [Call::Start(vec![11, 12]), Call::Start(vec![41])]
    );
}

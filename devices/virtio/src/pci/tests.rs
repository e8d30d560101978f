//! The transport from the perspective of a driver, well-behaved or hostile.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use device_model::lifecycle::{ActivateError, StateError, Unanswered};
use pci::{
    BarIndex, Bdf, LifecycleError, PciError, PciFunction, Seat,
    testing::{MMIO32, MMIO64, Rig},
};
use serde_json::{Value, json};
use virtio_queue::QueueT;

use super::{
    BAR_SIZE, BarPlace, NOTIFY_OFFSET, PENDING_OFFSET, VirtioPciFunction, common,
    status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET},
};
use crate::{
    Activation, ActiveQueue, DeviceType, VirtioDevice, VirtioInterrupt,
    testing::{VirtioDriver, resources},
};

const VERSION_1: u64 = 1 << 32;
const EVENT_INDEX: u64 = 1 << 29;
const QUEUE: [u64; 3] = [0x1000, 0x2000, 0x3000];

/// The device's state as the test observes it.
#[derive(Default)]
struct Seen {
    active: Vec<ActiveQueue>,
    features: u64,
    /// The worker finds the queue broken while it is being stopped.
    breaks_when_stopped: bool,
    interrupt: Option<Arc<dyn VirtioInterrupt>>,
    activations: usize,
    resets: usize,
    /// The host does not respond.
    busy: bool,
    /// For how long it was waited for, each time.
    waits: Vec<Duration>,
}

impl Seen {
    fn interrupt(&self) -> &dyn VirtioInterrupt {
        self.interrupt.as_deref().unwrap()
    }
}

struct Device {
    seen: Arc<Mutex<Seen>>,
    state: u64,
    config: [u8; 8],
}

impl VirtioDevice for Device {
    fn device_type(&self) -> DeviceType {
        DeviceType {
            number: 4,
            name: "test device",
            class: DeviceType::UNCLASSIFIED,
        }
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 8]
    }
    fn features(&self) -> u64 {
        VERSION_1 | EVENT_INDEX | 1 << 34 | 1
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = self.config.get(at as usize).copied().unwrap_or(0);
        }
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(to) = self.config.get_mut(at as usize) {
                *to = *byte;
            }
        }
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let got = activation.queues.len();
        if got == 0 {
            return Err(ActivateError::MissingQueues { got, needed: 1 });
        }
        let mut seen = self.seen.lock().unwrap();
        seen.active = activation.queues;
        seen.features = activation.features;
        seen.interrupt = Some(activation.interrupt);
        seen.activations += 1;
        Ok(())
    }
    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let mut seen = self.seen.lock().unwrap();
        seen.waits.push(patience);
        if seen.busy {
            return Err(Unanswered {
                what: "the test's storage".to_owned(),
                requests: 3,
                patience,
            });
        }
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut seen = self.seen.lock().unwrap();
        if seen.breaks_when_stopped {
            let interrupt = Arc::clone(seen.interrupt.as_ref().unwrap());
            let worker = std::thread::spawn(move || {
                interrupt.queue(0).unwrap();
                interrupt.needs_reset();
            });
            worker.join().unwrap();
        }
        std::mem::take(&mut seen.active)
    }
    fn reset(&mut self) {
        let mut seen = self.seen.lock().unwrap();
        assert!(seen.active.is_empty(), "stopped before it is reset");
        seen.resets += 1;
    }
    fn save(&self) -> Result<Value, StateError> {
        Ok(json!(self.state))
    }
    fn restore(&mut self, state: Value) -> Result<(), StateError> {
        self.state = serde_json::from_value(state)?;
        Ok(())
    }
    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("waits", self.seen.lock().unwrap().waits.len() as u64)]
    }
}

fn function(rig: &Rig) -> (VirtioPciFunction, Arc<Mutex<Seen>>) {
    let seen = Arc::<Mutex<Seen>>::default();
    let device = Device {
        seen: Arc::clone(&seen),
        state: 7,
        config: [1, 2, 3, 4, 5, 6, 7, 8],
    };
    let function = VirtioPciFunction::new(Box::new(device), resources(rig)).unwrap();
    (function, seen)
}

fn plug(rig: &Rig) -> (Bdf, Arc<Mutex<Seen>>) {
    let (function, seen) = function(rig);
    (rig.plug(function), seen)
}

fn started<'a>(rig: &'a Rig, bdf: Bdf) -> VirtioDriver<'a> {
    let driver = VirtioDriver::new(rig, bdf);
    assert!(driver.negotiate(VERSION_1 | EVENT_INDEX));
    driver.enable_msix(3);
    driver.set(common::CONFIG_VECTOR, &[0, 0]);
    driver.enable_queue(0, 16, QUEUE);
    driver.start();
    driver
}

fn with_function<T>(rig: &Rig, bdf: Bdf, act: impl FnOnce(&mut dyn PciFunction) -> T) -> T {
    let function = rig.segment.function(bdf).unwrap();
    let mut function = function.lock().unwrap();
    act(&mut *function)
}

#[test]
fn a_driver_that_follows_the_protocol_gets_a_running_device() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    assert_eq!(
        driver.status(),
        ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK
    );
    let seen = seen.lock().unwrap();
    assert_eq!(seen.features, VERSION_1 | EVENT_INDEX);
    assert_eq!(seen.active.len(), 1, "only one queue was enabled");
    let queue = &seen.active[0].queue;
    assert!(queue.event_idx_enabled());
    assert_eq!((queue.size(), queue.used_ring()), (16, 0x3000));
}

#[test]
fn features_that_the_transport_cannot_do_are_not_offered() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = VirtioDriver::new(&rig, bdf);
    assert_eq!(driver.features(), VERSION_1 | EVENT_INDEX | 1);
}

#[test]
fn features_ok_is_refused_for_wrong_features_and_wrong_order() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = VirtioDriver::new(&rig, bdf);
    assert!(!driver.negotiate(EVENT_INDEX), "without VERSION_1");
    assert!(!driver.negotiate(VERSION_1 | 1 << 34), "not offered");
    driver.set_status(0);
    driver.set_features(VERSION_1);
    driver.set_status(FEATURES_OK);
    assert_eq!(driver.status(), 0, "before ACKNOWLEDGE");
    assert!(driver.negotiate(VERSION_1));
    driver.set_features(0);
    driver.set_status(FEATURES_OK);
    assert_eq!(
        driver.status(),
        ACKNOWLEDGE | DRIVER | FEATURES_OK,
        "bits stay"
    );
}

#[test]
fn that_there_was_a_driver_outlasts_its_reset_of_the_device() {
    let rig = Rig::new();
    let (bdf, _seen) = plug(&rig);
    let had_driver = || with_function(&rig, bdf, |function| function.had_driver());
    assert!(!had_driver());
    let driver = started(&rig, bdf);
    assert!(had_driver());
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
    assert!(had_driver());
}

#[test]
fn driver_ok_without_features_ok_starts_nothing() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = VirtioDriver::new(&rig, bdf);
    driver.set_status(ACKNOWLEDGE | DRIVER);
    driver.enable_queue(0, 16, QUEUE);
    driver.set_status(ACKNOWLEDGE | DRIVER | DRIVER_OK);
    assert_eq!(driver.status(), ACKNOWLEDGE | DRIVER);
    assert_eq!(seen.lock().unwrap().activations, 0);
}

#[test]
fn queues_outside_of_memory_or_misaligned_need_a_reset_and_never_reach_the_device() {
    let hostile = [
        (16, [0x1008, 0x2000, 0x3000]),
        (16, [0x1000, 0x2001, 0x3000]),
        (16, [0x1000, 0x2000, 0x3002]),
        (16, [0xf_fff0, 0x2000, 0x3000]),
        (16, [0x1000, 1 << 40, 0x3000]),
        (16, [0x1000, 0x2000, u64::MAX - 3]),
        (15, QUEUE),
        (0, QUEUE),
        (32, QUEUE),
    ];
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = VirtioDriver::new(&rig, bdf);
    for (size, addresses) in hostile {
        assert!(driver.negotiate(VERSION_1));
        driver.enable_queue(0, size, addresses);
        driver.start();
        assert_eq!(
            driver.status() & NEEDS_RESET,
            NEEDS_RESET,
            "{size} {addresses:x?}"
        );
    }
    assert_eq!(seen.lock().unwrap().activations, 0);
    started(&rig, bdf);
    assert_eq!(seen.lock().unwrap().activations, 1, "a reset cures it");
}

#[test]
fn a_device_that_refuses_to_start_needs_a_reset() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = VirtioDriver::new(&rig, bdf);
    assert!(driver.negotiate(VERSION_1));
    driver.start();
    assert_eq!(
        driver.status() & (DRIVER_OK | NEEDS_RESET),
        DRIVER_OK | NEEDS_RESET
    );
}

#[test]
fn a_queue_in_use_cannot_be_changed() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = started(&rig, bdf);
    driver.select(0);
    driver.set(common::QUEUE_DESC, &0x8000u64.to_le_bytes());
    driver.set(common::QUEUE_SIZE, &4u16.to_le_bytes());
    assert_eq!(driver.get(common::QUEUE_DESC), 0x1000u64.to_le_bytes());
    assert_eq!(driver.get(common::QUEUE_SIZE), 16u16.to_le_bytes());
    driver.enable_queue(1, 8, QUEUE);
    assert_eq!(driver.get(common::QUEUE_ENABLE), [0, 0], "too late");
    driver.enable_queue(9, 8, QUEUE);
    assert_eq!(driver.get(common::QUEUE_SIZE), [0, 0], "no such queue");
}

#[test]
fn a_reset_stops_the_device_and_forgets_the_queues() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
    assert!(seen.lock().unwrap().active.is_empty());
    // The driver's first step was a reset, too.
    assert_eq!(seen.lock().unwrap().resets, 2);
    assert!(rig.doorbells.addresses().is_empty());
    driver.select(0);
    assert_eq!(driver.get(common::QUEUE_ENABLE), [0, 0]);
    assert_eq!(driver.get(common::QUEUE_VECTOR), [0xff, 0xff]);
}

#[test]
fn a_pause_is_refused_while_the_host_does_not_answer_and_the_device_goes_on() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    seen.lock().unwrap().busy = true;
    let error = with_function(&rig, bdf, |function| function.pause()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the test's storage has not answered 3 requests within 20s: see to its storage, then try \
         again"
    );
    {
        let seen = seen.lock().unwrap();
        assert_eq!((seen.active.len(), seen.activations), (1, 1));
        assert_eq!(seen.active[0].kick.read().unwrap(), 1, "what it held back");
    }
    with_function(&rig, bdf, |function| function.resume().unwrap());
    assert_eq!(driver.status() & (DRIVER_OK | NEEDS_RESET), DRIVER_OK);
    seen.lock().unwrap().busy = false;
    with_function(&rig, bdf, |function| function.pause().unwrap());
    assert!(seen.lock().unwrap().active.is_empty());
}

#[test]
fn a_driver_sees_its_reset_when_the_host_has_answered() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let status = driver.status();
    seen.lock().unwrap().busy = true;
    driver.set_status(0);
    assert_eq!(driver.status(), status);
    driver.set_status(status | NEEDS_RESET);
    driver.set_status(0);
    assert_eq!(
        (driver.status(), seen.lock().unwrap().active.len()),
        (status, 1)
    );
    assert!(with_function(&rig, bdf, |function| function.pause()).is_err());
    let before = seen.lock().unwrap().resets;
    seen.lock().unwrap().busy = false;
    assert_eq!(driver.status(), 0);
    assert_eq!(seen.lock().unwrap().resets, before + 1);
    assert!(rig.doorbells.addresses().is_empty());
    // And a reset that has completed when a pause looks at it.
    let driver = started(&rig, bdf);
    seen.lock().unwrap().busy = true;
    driver.set_status(0);
    seen.lock().unwrap().busy = false;
    with_function(&rig, bdf, |function| {
        function.pause().unwrap();
        function.resume().unwrap();
    });
    assert_eq!((driver.status(), seen.lock().unwrap().activations), (0, 2));
}

#[test]
fn a_device_that_is_held_does_not_start_before_it_is_let_go() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let hold = |function: &mut dyn PciFunction| function.hold(Duration::ZERO).unwrap();
    with_function(&rig, bdf, hold);
    driver.set_status(0);
    let driver = started(&rig, bdf);
    assert_eq!(driver.status() & (DRIVER_OK | NEEDS_RESET), DRIVER_OK);
    assert_eq!(seen.lock().unwrap().activations, 1);
    with_function(&rig, bdf, hold);
    with_function(&rig, bdf, |function| function.carry_on());
    {
        let seen = seen.lock().unwrap();
        assert_eq!((seen.active.len(), seen.activations), (1, 2));
        assert_eq!(seen.active[0].kick.read().unwrap(), 1, "what it missed");
    }
    // A removal quiesces it first.
    with_function(&rig, bdf, |function| function.quiesce().unwrap());
    driver.set_status(0);
    started(&rig, bdf);
    assert_eq!(seen.lock().unwrap().activations, 2);
    with_function(&rig, bdf, |function| function.resume().unwrap());
    assert_eq!(seen.lock().unwrap().activations, 3);
    // What a pause keeps from running starts when that is over, however often it is let go meanwhile.
    with_function(&rig, bdf, |function| {
        function.pause().unwrap();
        hold(function);
        function.carry_on();
    });
    assert_eq!(seen.lock().unwrap().activations, 3);
    with_function(&rig, bdf, |function| function.resume().unwrap());
    assert_eq!(seen.lock().unwrap().activations, 4);
    // A reset forgets that it was to start.
    with_function(&rig, bdf, hold);
    driver.set_status(0);
    started(&rig, bdf).set_status(0);
    with_function(&rig, bdf, |function| function.carry_on());
    assert_eq!(seen.lock().unwrap().activations, 4);
}

#[test]
fn only_a_reset_makes_a_device_forget_its_driver() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let before = seen.lock().unwrap().resets;
    let state = with_function(&rig, bdf, |function| {
        function.pause().unwrap();
        let state = function.save().unwrap();
        function.resume().unwrap();
        state
    });
    assert_eq!(seen.lock().unwrap().resets, before, "paused and saved");
    with_function(&rig, bdf, |function| function.pause().unwrap());
    driver.set_status(0);
    assert_eq!(seen.lock().unwrap().resets, before + 1, "while paused");
    let target = Rig::new();
    let (bdf, seen) = plug(&target);
    target.segment.restore(bdf, state).unwrap();
    with_function(&target, bdf, |function| function.resume().unwrap());
    assert_eq!(seen.lock().unwrap().resets, 0, "restored");
    target.segment.unplug(bdf).unwrap();
    assert_eq!(seen.lock().unwrap().resets, 1, "unplugged");
}

#[test]
fn notifications_reach_the_device_by_doorbell_and_by_exit() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let address = driver.address(NOTIFY_OFFSET);
    assert_eq!(rig.doorbells.addresses(), [address]);
    driver.notify(0);
    rig.mmio.write(address, &[0, 0]);
    assert_eq!(seen.lock().unwrap().active[0].kick.read().unwrap(), 2);
    driver.notify(1000);
}

#[test]
fn doorbells_follow_the_bar() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = started(&rig, bdf);
    let moved = MMIO64.first + 0x100 * BAR_SIZE;
    rig.enable(bdf, false);
    assert!(rig.doorbells.addresses().is_empty());
    rig.set_bar64(bdf, BarIndex::ZERO, moved);
    rig.enable(bdf, true);
    assert_eq!(rig.doorbells.addresses(), [moved + NOTIFY_OFFSET]);
    assert_eq!(driver.status() & DRIVER_OK, DRIVER_OK);
}

#[test]
fn interrupts_arrive_on_the_vectors_that_the_driver_chose() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let seen = seen.lock().unwrap();
    seen.interrupt().queue(0).unwrap();
    assert_eq!((rig.msi.take(0), rig.msi.take(1)), (0, 1));
    let [before] = driver.get(common::GENERATION);
    seen.interrupt().config().unwrap();
    assert_eq!((rig.msi.take(0), rig.msi.take(1)), (1, 0));
    assert_ne!(driver.get(common::GENERATION), [before]);
    assert_eq!(driver.isr(), 0, "with MSI-X the ISR status is not used");
}

#[test]
fn a_masked_interrupt_is_pending_until_it_is_unmasked() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    driver.mask(1, true);
    seen.lock().unwrap().interrupt().queue(0).unwrap();
    assert_eq!(rig.msi.take(1), 0);
    let mut pending = [0; 8];
    driver.read(PENDING_OFFSET, &mut pending);
    assert_eq!(u64::from_le_bytes(pending), 1 << 1);
    driver.mask(1, false);
    assert_eq!(rig.msi.take(1), 1);
    driver.read(PENDING_OFFSET, &mut pending);
    assert_eq!(u64::from_le_bytes(pending), 0);
}

#[test]
fn without_msix_interrupts_only_show_in_the_isr_status() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    driver.set_msix_control(0);
    seen.lock().unwrap().interrupt().queue(0).unwrap();
    seen.lock().unwrap().interrupt().config().unwrap();
    assert_eq!((rig.msi.take(0), rig.msi.take(1)), (0, 0));
    assert_eq!((driver.isr(), driver.isr()), (3, 0));
}

#[test]
fn a_device_that_breaks_says_so() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    seen.lock().unwrap().interrupt().needs_reset();
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(rig.msi.take(0), 1, "a configuration change");
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
}

#[test]
fn a_worker_can_ask_for_a_reset_while_the_transport_waits_for_it() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    seen.lock().unwrap().breaks_when_stopped = true;
    with_function(&rig, bdf, |function| function.pause().unwrap());
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
    assert_eq!((rig.msi.take(0), rig.msi.take(1)), (1, 1));
}

#[test]
fn firmware_reaches_the_bar_through_configuration_space() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    // The fifth vendor capability is the window.
    let window = (0..5).fold(0, |at, _| rig.capability(bdf, 9, at).unwrap());
    let set = |offset: u32, len: u32| {
        rig.config_write(bdf, window + 4, &[0]);
        rig.config_write(bdf, window + 8, &offset.to_le_bytes());
        rig.config_write(bdf, window + 12, &len.to_le_bytes());
    };
    set(common::STATUS as u32, 1);
    rig.config_write(bdf, window + 16, &[ACKNOWLEDGE]);
    assert_eq!(rig.config_read(bdf, window + 16), u32::from(ACKNOWLEDGE));
    set(0x2000, 4);
    assert_eq!(rig.config_read(bdf, window + 16), 0x0403_0201);
    for (offset, len) in [
        (0x2001, 4),
        (0xffff_fffc, 4),
        (0, 3),
        (0, u32::MAX),
        (1 << 16, 1),
    ] {
        set(offset, len);
        rig.config_write(bdf, window + 16, &[0xff; 4]);
        rig.config_read(bdf, window + 16);
    }
}

#[test]
fn a_saved_device_goes_on_elsewhere_with_nothing_lost() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    started(&rig, bdf);
    rig.set_bar64(bdf, BarIndex::ZERO, MMIO64.first + 0x40 * BAR_SIZE);
    seen.lock().unwrap().active[0].queue.set_next_avail(5);
    let running = with_function(&rig, bdf, |function| function.save());
    assert!(matches!(running, Err(LifecycleError::WrongState(_))));
    let state = with_function(&rig, bdf, |function| {
        function.pause().unwrap();
        function.save().unwrap()
    });

    let target = Rig::new();
    let (bdf, seen) = plug(&target);
    target.segment.restore(bdf, state.clone()).unwrap();
    assert_eq!(seen.lock().unwrap().activations, 0, "paused");
    with_function(&target, bdf, |function| function.resume().unwrap());
    let driver = VirtioDriver::new(&target, bdf);
    assert_eq!(driver.address(0), MMIO64.first + 0x40 * BAR_SIZE);
    assert_eq!(
        target.doorbells.addresses(),
        [driver.address(NOTIFY_OFFSET)]
    );
    assert_eq!(driver.status() & DRIVER_OK, DRIVER_OK);
    {
        let seen = seen.lock().unwrap();
        assert_eq!(seen.active[0].queue.next_avail(), 5);
        assert_eq!(seen.active[0].kick.read().unwrap(), 1, "kicked once");
    }
    assert_eq!(target.msi.take(1), 1, "and interrupted once");
    let again = with_function(&target, bdf, |function| {
        function.pause().unwrap();
        function.save().unwrap()
    });
    assert_eq!(again, state);
}

#[test]
fn a_bar_that_firmware_reaches_stays_below_4_gib() {
    let rig = Rig::new();
    let (mut first, _) = function(&rig);
    first.place_bar(BarPlace::Below4G).unwrap();
    let bdf = rig.plug(first);
    let bar = |rig: &Rig, bdf: Bdf| rig.config_read(bdf, 0x10);
    let at = bar(&rig, bdf);
    assert!((MMIO32.first..MMIO32.last).contains(&u64::from(at)));
    assert_eq!(rig.config_read(bdf, 0x14), 0);
    rig.config_write(bdf, 0x10, &[0xff; 4]);
    assert_eq!(bar(&rig, bdf), (BAR_SIZE as u32).wrapping_neg());
    rig.config_write(bdf, 0x10, &(at - 0x2_0000).to_le_bytes());
    rig.enable(bdf, true);
    // The number of queues is 2.
    let queues = u64::from(at) - 0x2_0000 + common::NUM_QUEUES as u64;
    assert_eq!(rig.read(queues) & 0xffff, 2);
    let state = with_function(&rig, bdf, |function| function.save().unwrap());

    // Where nothing is said, as in states of older versions, the BAR has 64 bits.
    assert_eq!(state["bar"], json!("Below4G"));
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let older = with_function(&rig, bdf, |function| function.save().unwrap());
    assert_eq!(older.get("bar"), None);
    for (state, place) in [(state, BarPlace::Anywhere), (older, BarPlace::Below4G)] {
        let target = Rig::new();
        let (mut function, _) = function(&target);
        function.place_bar(place).unwrap();
        let function = Arc::new(Mutex::new(function));
        let plugged = target
            .segment
            .plug_saved(function, Seat::ANY, state.clone());
        let bdf = plugged.unwrap();
        let again = with_function(&target, bdf, |function| function.save().unwrap());
        assert_eq!(again, state);
        match place {
            BarPlace::Anywhere => assert_eq!(target.read(queues) & 0xffff, 2),
            BarPlace::Below4G => assert_eq!(bar(&target, bdf) & 0xf, 4),
        }
    }
}

#[test]
fn a_device_that_no_driver_had_started_is_not_started_by_a_restore() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let state = with_function(&rig, bdf, |function| function.save().unwrap());
    let target = Rig::new();
    let (bdf, seen) = plug(&target);
    target.segment.restore(bdf, state).unwrap();
    with_function(&target, bdf, |function| function.resume().unwrap());
    assert_eq!(seen.lock().unwrap().activations, 0);
}

#[test]
fn a_forged_state_is_refused() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    started(&rig, bdf);
    let state = with_function(&rig, bdf, |function| {
        function.pause().unwrap();
        function.save().unwrap()
    });
    for (pointer, value) in [
        ("/transport/device_type", json!(1)),
        ("/transport/queues", json!([])),
        ("/transport/status", json!(0xff)),
        ("/transport/status", json!(DRIVER_OK)),
        ("/transport/driver_features", json!(u64::MAX)),
        ("/transport/queues/0/registers/driver", json!(1u64 << 50)),
        ("/transport/queues/0/registers/size", json!(3)),
        ("/msix/entries", json!([])),
        ("/bar", json!("Below1M")),
        ("/config/registers", json!([[2, 0]])),
        ("/config/registers", json!([[4096, 0]])),
        ("/config/registers", json!([[0, 0]])),
        ("/device", json!("x")),
    ] {
        let mut forged = state.clone();
        forged["bar"] = json!("Anywhere");
        *forged.pointer_mut(pointer).unwrap() = value;
        let target = Rig::new();
        let (bdf, seen) = plug(&target);
        let result = target.segment.restore(bdf, forged);
        assert!(
            matches!(result, Err(PciError::Function { .. })),
            "{pointer}"
        );
        assert_eq!(seen.lock().unwrap().activations, 0);
    }
}

#[test]
fn an_unplugged_device_stops_and_cannot_be_started_again() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    let driver = started(&rig, bdf);
    let address = driver.address(0);
    let function = rig.segment.unplug(bdf).unwrap();
    assert!(seen.lock().unwrap().active.is_empty());
    assert!(rig.doorbells.addresses().is_empty());
    assert_eq!(rig.read(address), u32::MAX);
    assert_eq!(rig.config_read(bdf, 0), u32::MAX);
    // A vCPU whose access to the BAR was already in progress.
    let bar = function.lock().unwrap().bar_device(BarIndex::ZERO).unwrap();
    for status in [1, 3, 11, 15] {
        bar.write(common::STATUS as u64, &[status]);
    }
    assert_eq!(seen.lock().unwrap().activations, 1);
}

#[test]
fn a_driver_that_asks_again_for_a_reset_keeps_nobody_waiting() {
    let rig = Rig::new();
    let (function, seen) = function(&rig);
    let transport = function.transport();
    let bdf = rig.plug(function);
    let driver = started(&rig, bdf);
    seen.lock().unwrap().busy = true;
    driver.set_status(0);
    driver.set_status(0);
    let waits = seen.lock().unwrap().waits.clone();
    assert_eq!(waits.len(), 2);
    assert!(waits[0] > Duration::ZERO && waits[1] == Duration::ZERO);
    for _ in 0..100 {
        let before = seen.lock().unwrap().waits.len() as u64;
        let locked = transport.locked();
        std::thread::scope(|scope| {
            let control = scope.spawn(|| transport.counters());
            while !transport.is_awaited() {
                std::thread::yield_now();
            }
            drop(locked);
            driver.set_status(0);
            // It asked first, so it comes first.
            assert_eq!(control.join().unwrap(), [("waits", before)]);
        });
    }
    seen.lock().unwrap().busy = false;
    assert_eq!(driver.status(), 0);
}

#[test]
fn accesses_of_any_width_at_any_place_do_no_harm() {
    let rig = Rig::new();
    let (bdf, _) = plug(&rig);
    let driver = started(&rig, bdf);
    for base in [0, 0x1000, 0x2000, 0x3000, 0x4000, 0xc000, BAR_SIZE - 8] {
        for offset in 0..64 {
            for len in [1, 2, 4, 8] {
                let mut data = [0; 8];
                driver.read(base + offset, &mut data[..len]);
                driver.write(base + offset, &[0xff; 8][..len]);
            }
        }
    }
    assert!(driver.negotiate(VERSION_1));
}

#[test]
fn vcpus_and_the_control_thread_do_not_wait_for_each_other_in_a_circle() {
    let rig = Rig::new();
    let (bdf, seen) = plug(&rig);
    started(&rig, bdf);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for on in [false, true].repeat(200) {
                rig.enable(bdf, on);
            }
        });
        scope.spawn(|| {
            for _ in 0..100 {
                let driver = VirtioDriver::new(&rig, bdf);
                driver.negotiate(VERSION_1);
                driver.enable_queue(0, 16, QUEUE);
                driver.start();
                driver.notify(0);
            }
        });
        scope.spawn(|| {
            for _ in 0..200 {
                with_function(&rig, bdf, |function| {
                    function.pause().unwrap();
                    function.resume().unwrap();
                });
            }
        });
        scope.spawn(|| {
            let interrupt = seen.lock().unwrap().interrupt.clone().unwrap();
            for queue in 0..400 {
                interrupt.queue(queue % 3).unwrap();
            }
        });
    });
    rig.segment.unplug(bdf).unwrap();
    assert!(rig.doorbells.addresses().is_empty());
    assert!(seen.lock().unwrap().active.is_empty());
}

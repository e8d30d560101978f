//! Resets that the guest requests: of a device, or of the bus behind a root port.
//!
//! ```text
//!   vCPU ──handler──> asked ──begin──> _resets (waits for the host) ──event──> end
//!                       └──── one at a time, by the control thread ────┘
//! ```
//!
//! The host takes a tenth of a second to reset a device, and a second or more to reset a bus. Neither the vCPU nor the
//! control thread waits for that. Plugging and unplugging devices wait for a reset in progress, because the host may
//! reset several devices at once.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard, mpsc},
};

use base::Unpoisoned;
use devices::{
    pci::{Bdf, PciSegment, ResetHandler, SlowReset},
    thread::{ThreadRole, ThreadSpawner},
};

use super::events::{EventSender, MachineEvent};

type Segments = [Arc<PciSegment>];

/// Queue of requested resets, with each address at most once.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<VecDeque<Bdf>>>);

impl Asked {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Bdf>> {
        self.0.lock_unpoisoned()
    }

    fn push(&self, at: Bdf) {
        let mut asked = self.lock();
        if !asked.contains(&at) {
            asked.push_back(at);
        }
    }

    fn pop(&self) -> Option<Bdf> {
        self.lock().pop_front()
    }
}

/// The thread that waits for the host; it ends when this is dropped.
struct Helper {
    orders: mpsc::Sender<SlowReset>,
    done: mpsc::Receiver<()>,
}

impl Helper {
    fn new(spawner: &dyn ThreadSpawner, events: EventSender) -> io::Result<Self> {
        let (orders, received) = mpsc::channel::<SlowReset>();
        let (told, done) = mpsc::channel();
        let body = Box::new(move || {
            for slow in received {
                slow();
                // The machine may no longer exist.
                let _ = told.send(());
                events.send(MachineEvent::PciReset);
            }
        });
        spawner.spawn(ThreadRole::Reset, "_resets", body)?;
        Ok(Self { orders, done })
    }
}

/// The resets of a machine.
pub struct Resets {
    asked: Asked,
    events: EventSender,
    /// Started with the first reset that takes time.
    helper: Option<Helper>,
    /// The reset that the helper is carrying out.
    under_way: Option<Bdf>,
}

impl Resets {
    /// Starts without resets. `events` notifies the control loop when it has to call [`Resets::go_on`].
    pub fn new(events: EventSender) -> Self {
        Self {
            asked: Asked::default(),
            events,
            helper: None,
            under_way: None,
        }
    }

    /// Creates a handler for a segment, which records the resets that the guest requests.
    pub fn handler(&self) -> ResetHandler {
        let (asked, events) = (self.asked.clone(), self.events.clone());
        Box::new(move |at| {
            asked.push(at);
            events.send(MachineEvent::PciReset);
        })
    }

    /// Finishes a reset that is done and starts the next one, without blocking on slow ones.
    pub fn go_on(&mut self, segments: &Segments, spawner: &dyn ThreadSpawner) {
        if let (Some(at), Some(helper)) = (self.under_way, &self.helper) {
            if let Err(mpsc::TryRecvError::Empty) = helper.done.try_recv() {
                return;
            }
            self.end(at, segments);
        }
        while self.under_way.is_none()
            && let Some(at) = self.asked.pop()
        {
            self.begin(at, segments, spawner);
        }
    }

    /// Waits for the reset in progress.
    pub fn wait(&mut self, segments: &Segments) {
        if let (Some(at), Some(helper)) = (self.under_way, &self.helper) {
            // If there is no answer, the helper has ended and does nothing any more.
            let _ = helper.done.recv();
            self.end(at, segments);
        }
    }

    /// Carries out all resets that the guest, which is stopped, has requested.
    pub fn finish(&mut self, segments: &Segments, spawner: &dyn ThreadSpawner) {
        self.wait(segments);
        while let Some(at) = self.asked.pop() {
            self.begin(at, segments, spawner);
            self.wait(segments);
        }
    }

    fn begin(&mut self, at: Bdf, segments: &Segments, spawner: &dyn ThreadSpawner) {
        let segment = segments.get(usize::from(at.segment));
        match segment.and_then(|segment| segment.begin_reset(at)) {
            None => self.end(at, segments),
            Some(slow) => match self.hand_over(slow, spawner) {
                Ok(()) => self.under_way = Some(at),
                Err(slow) => {
                    slow();
                    self.end(at, segments);
                }
            },
        }
    }

    /// Passes a reset to the helper; returns it if the helper does not accept it.
    fn hand_over(&mut self, slow: SlowReset, spawner: &dyn ThreadSpawner) -> Result<(), SlowReset> {
        if self.helper.is_none() {
            self.helper = Helper::new(spawner, self.events.clone())
                .inspect_err(|error| log::warn!("resets keep the API waiting: {error}"))
                .ok();
        }
        match &self.helper {
            Some(helper) => helper.orders.send(slow).map_err(|refused| refused.0),
            None => Err(slow),
        }
    }

    fn end(&mut self, at: Bdf, segments: &Segments) {
        self.under_way = None;
        if let Some(segment) = segments.get(usize::from(at.segment)) {
            segment.end_reset(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use devices::{
        bus::Bus,
        pci::{ConfigSpace, Identity, LifecycleError, PciFunction, Seat, SegmentConfig},
        thread::Unconfined,
    };

    use super::{
        super::events::{self, EventReceiver},
        *,
    };

    /// Every write to it requests a reset, which takes as long as the host wants.
    struct Slow {
        config: ConfigSpace,
        resetting: bool,
        host: Arc<Mutex<mpsc::Receiver<()>>>,
    }

    impl PciFunction for Slow {
        fn config(&self) -> &ConfigSpace {
            &self.config
        }

        fn config_mut(&mut self) -> &mut ConfigSpace {
            &mut self.config
        }

        fn write_config(&mut self, _offset: usize, _data: &[u8]) {
            self.resetting = true;
        }

        fn is_resetting(&self) -> bool {
            self.resetting
        }

        fn begin_reset(&mut self) -> Result<Option<SlowReset>, LifecycleError> {
            let host = Arc::clone(&self.host);
            Ok(Some(Box::new(move || host.lock().unwrap().recv().unwrap())))
        }

        fn end_reset(&mut self) {
            self.resetting = false;
        }
    }

    struct Machine {
        segments: Vec<Arc<PciSegment>>,
        functions: [Arc<Mutex<Slow>>; 2],
        at: [Bdf; 2],
        resets: Resets,
        receiver: EventReceiver,
        /// Each message ends one reset.
        host: mpsc::Sender<()>,
    }

    impl Machine {
        fn new() -> Self {
            let (sender, receiver) = events::queue().unwrap();
            let resets = Resets::new(sender);
            let config = SegmentConfig {
                segment: 0,
                mmio32: None,
                mmio64: None,
                io: None,
                ports: Vec::new(),
            };
            let segment = PciSegment::new(config, Arc::default(), Arc::<Bus>::default());
            segment.on_reset(resets.handler());
            let (host, answers) = mpsc::channel();
            let answers = Arc::new(Mutex::new(answers));
            let functions = [(); 2].map(|()| {
                Arc::new(Mutex::new(Slow {
                    config: ConfigSpace::new(Identity::default()),
                    resetting: false,
                    host: Arc::clone(&answers),
                }))
            });
            let at = [0, 1].map(|index: usize| {
                let function = Arc::clone(&functions[index]);
                segment.plug(function, Seat::ANY, &[]).unwrap()
            });
            Self {
                segments: vec![segment],
                functions,
                at,
                resets,
                receiver,
                host,
            }
        }

        fn ask(&self, index: usize) {
            self.segments[0].write_config(self.at[index], 0x40, &[1]);
        }

        fn go_on(&mut self) {
            while self.receiver.next().is_some() {}
            self.resets.go_on(&self.segments, &Unconfined);
        }

        /// Makes the host finish a reset, and handles the event that follows.
        fn host_is_done(&mut self) {
            self.host.send(()).unwrap();
            while self.receiver.waiting() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.go_on();
        }

        fn resetting(&self) -> [bool; 2] {
            let is_resetting = |function: &Arc<Mutex<Slow>>| function.lock().unwrap().resetting;
            self.functions.each_ref().map(is_resetting)
        }
    }

    #[test]
    fn the_control_thread_does_not_wait_for_resets_that_the_guest_asks_for() {
        let mut machine = Machine::new();
        for _ in 0..10 {
            machine.ask(0);
            machine.ask(1);
        }
        assert_eq!(machine.receiver.waiting(), 1);
        // Would block if the resets were carried out here: the host has not answered.
        machine.go_on();
        machine.go_on();
        assert_eq!(machine.resetting(), [true; 2]);
        machine.host_is_done();
        assert_eq!(machine.resetting(), [false, true], "one after the other");
        machine.ask(0);
        machine.go_on();
        machine.host_is_done();
        assert_eq!(machine.resetting(), [true, false]);
        machine.host_is_done();
        assert_eq!(machine.resetting(), [false; 2]);
        assert!(machine.resets.under_way.is_none() && machine.resets.asked.pop().is_none());
    }

    #[test]
    fn a_device_leaves_when_no_reset_is_under_way() {
        let mut machine = Machine::new();
        machine.ask(0);
        machine.ask(1);
        machine.go_on();
        machine.host.send(()).unwrap();
        machine.resets.wait(&machine.segments);
        assert_eq!(machine.resetting(), [false, true]);
        assert!(machine.resets.under_way.is_none());
        machine.segments[0].unplug(machine.at[1]).unwrap();
        // It is the other reset's turn, which is no longer needed.
        machine.go_on();
        assert!(machine.resets.under_way.is_none());
    }

    #[test]
    fn a_machine_that_stands_still_has_no_reset_left() {
        let mut machine = Machine::new();
        machine.ask(0);
        machine.ask(1);
        machine.go_on();
        for _ in 0..2 {
            machine.host.send(()).unwrap();
        }
        machine.resets.finish(&machine.segments, &Unconfined);
        assert_eq!(machine.resetting(), [false; 2]);
    }
}

//! Serving in turns: which calls need the device, and what becomes of those whose turn it is not.
//!
//! A call that needs the device is kept until the worker may submit it, and so are those behind it,
//! up to a bound; the rest stays in the ring. What else there is to do goes on meanwhile: answers,
//! callbacks, stages, and waiting for commands that the driver has already. (Otherwise a client
//! that keeps several kernels in flight would learn of the end of one only when the last one has
//! been submitted.) Without an arbiter all this is one comparison per call.
//!
//! Where the device serves workers in time slices, no call waits for it; commands are measured nevertheless.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::Duration,
};

use remoting_proto::wire::{
    Api, Flags, Header,
    api::{Cost, RequestClass},
};
use remoting_turns::{
    Moment,
    message::Join,
    slices::Slices,
    worker::{News, Turns},
};

use super::{
    backend::{Backend, FenceOf, Fences, Progress, RequestOf},
    notice::Notice,
    server::{Error, LONG_FOR_OTHERS, Session},
};

/// The most calls that are kept: enough for what applications have in flight, as those behind are
/// not even looked at, and an application that waits for what has completed would go on waiting.
const HELD: usize = 1024;
/// The most bytes of calls that are kept.
const HELD_BYTES: usize = 1 << 20;
/// This long before the end of what the driver has, the serving thread no longer sleeps: falling
/// asleep and waking up would be time of the device that nobody has.
const SOON: Duration = Duration::from_micros(400);
/// How often commands are looked at whose client does not read its answers.
const LOOK: Duration = Duration::from_millis(1);

/// A command that the driver has.
#[derive(Debug)]
struct Submitted<F> {
    fence: F,
    /// The number of its queue.
    queue: u32,
    /// Whether the serving thread is going to be woken when it completes.
    armed: bool,
}

/// A call that waits.
#[derive(Debug)]
struct Held<R> {
    header: Header,
    request: R,
    /// Bytes, as it was sent.
    size: usize,
}

/// What a server needs for taking turns.
#[derive(Debug)]
pub struct Sharing<R, F> {
    turns: Option<Turns>,
    /// A call that waits for the device, and those behind it.
    held: VecDeque<Held<R>>,
    /// The size of all of them, as they were sent.
    held_bytes: usize,
    /// How many of them only wait for commands.
    held_waits: usize,
    /// Whether the first of them waits for contents of memory, and not for the device.
    awaits_contents: bool,
    /// The kind of the command that is about to be submitted, if it is to be measured.
    pub metered: Option<RequestClass>,
    submitted: VecDeque<Submitted<F>>,
    /// The fence of the command that completed last, if commands are measured by the device's clock.
    last: Option<F>,
    /// Whether the driver may still keep commands back.
    unflushed: bool,
}

impl<R, F> Default for Sharing<R, F> {
    fn default() -> Self {
        Self {
            turns: None,
            held: VecDeque::new(),
            held_bytes: 0,
            held_waits: 0,
            awaits_contents: false,
            metered: None,
            submitted: VecDeque::new(),
            last: None,
            unflushed: false,
        }
    }
}

impl<R, F: Copy> Sharing<R, F> {
    /// Counts a call that is kept.
    fn keep<A: Api<Request = R>>(&mut self, call: &Held<R>) {
        self.held_bytes += call.size;
        self.held_waits += usize::from(A::awaited(&call.request).is_some());
    }

    /// Counts a call that the client waits for.
    pub fn synchronous(&mut self) {
        if let Some(turns) = &mut self.turns {
            turns.synchronous();
        }
    }

    /// Counts a call that is no longer kept.
    fn forget<A: Api<Request = R>>(&mut self, call: &Held<R>) {
        self.held_bytes -= call.size;
        self.held_waits -= usize::from(A::awaited(&call.request).is_some());
    }

    /// Takes note of commands that have completed. While the client has user events without a status,
    /// of which there are so many `undecided`, older ones may wait for these: then also of those
    /// behind them.
    fn retire<D: Fences<Fence = F>>(&mut self, driver: &D, undecided: usize) {
        let mut completed = 0;
        while let Some(oldest) = self.submitted.front() {
            if !driver.poll(oldest.fence).is_over() {
                break;
            }
            let fence = oldest.fence;
            match self.turns.as_mut().filter(|turns| turns.measures()) {
                Some(turns) => {
                    let last = self.last.replace(fence);
                    turns.took(
                        last.and_then(|last| driver.span(last, fence)),
                        Moment::now(),
                    );
                    last.into_iter().for_each(|last| driver.release(last));
                }
                None => driver.release(fence),
            }
            self.submitted.pop_front();
            completed += 1;
        }
        let Some(turns) = &mut self.turns else {
            return;
        };
        turns.look();
        if completed > 0 {
            turns.completed(completed, Moment::now());
        }
        let mut older = 0;
        while undecided > 0 && older < self.submitted.len() {
            let fence = self.submitted[older].fence;
            if !driver.poll(fence).is_over() {
                older += 1;
                continue;
            }
            driver.release(fence);
            self.submitted.remove(older);
            turns.completed_behind(older, Moment::now());
        }
    }

    /// Whether what the driver has cannot complete before the client does something: commands
    /// wait for its user events, of which so many are undecided, and none is running.
    fn stuck<D: Fences<Fence = F>>(&self, driver: &D, undecided: usize) -> bool {
        undecided > 0
            && !self.submitted.is_empty()
            && self
                .submitted
                .iter()
                .all(|command| driver.poll(command.fence) == Progress::Waiting)
    }

    /// Has the driver begin what it may have kept back: it is waited for.
    fn flush_submitted(&mut self, backend: &impl Backend) {
        if !std::mem::take(&mut self.unflushed) {
            return;
        }
        for command in &self.submitted {
            // Releasing a queue has flushed it.
            backend.flush(command.queue);
        }
    }

    /// Lets go of the device as soon as what the driver has is done: the client does not read its
    /// answers, and nobody else is to wait for that.
    pub(crate) fn let_go<B: Backend>(&mut self, backend: &B, undecided: usize)
    where
        B::Driver: Fences<Fence = F>,
    {
        if self.turns.is_none() {
            return;
        }
        self.flush_submitted(backend);
        let stuck = loop {
            self.retire(&**backend.driver(), undecided);
            let stuck = self.stuck(&**backend.driver(), undecided);
            if stuck || self.submitted.is_empty() {
                break stuck;
            }
            thread::sleep(LOOK);
        };
        if let Some(turns) = &mut self.turns {
            turns.idle(stuck);
        }
    }
}

impl<B: Backend> Session<B> {
    /// Shares the device with others: `control` is the socket to the pool.
    ///
    /// With `slices`, the device may serve workers in time slices.
    pub fn share(
        &mut self,
        control: UnixStream,
        join: &Join,
        slices: Option<Box<dyn Slices>>,
    ) -> io::Result<()> {
        if slices.is_some() {
            self.backend.driver().time();
        }
        let board = Arc::clone(&self.board);
        let tell = move |news| {
            board.leave(match news {
                News::Look => Notice::Wake,
                News::Apart(other) => Notice::Apart(other),
                News::HangsUp(why) => return base::note!("gantry-accel: {why}"),
            });
        };
        self.sharing.turns = Some(Turns::start(control, join, slices, tell)?);
        self.patience = LONG_FOR_OTHERS;
        Ok(())
    }

    /// Whether the device is shared with others.
    pub fn is_shared(&self) -> bool {
        self.sharing.turns.is_some()
    }

    /// Whether no call waits for the device.
    pub fn holds_nothing(&self) -> bool {
        self.sharing.held.is_empty()
    }

    /// Whether so many calls wait for the device that no other is to be taken.
    pub(crate) fn is_full(&self) -> bool {
        self.sharing.held.len() >= HELD || self.sharing.held_bytes >= HELD_BYTES
    }

    /// Carries out the calls that wait for the device, as far as they may be by now. Whether there
    /// was one.
    pub fn serve_held(&mut self) -> Result<bool, Error> {
        self.sharing
            .retire(&**self.backend.driver(), self.undecided);
        let mut served = false;
        while !self.has_all()
            && !self.backend.is_busy()
            && let Some(call) = self.sharing.held.pop_front()
        {
            self.sharing.forget::<B::Api>(&call);
            if let Some(kept) = self.try_serve(call)? {
                self.sharing.keep::<B::Api>(&kept);
                self.sharing.held.push_front(kept);
                break;
            }
            served = true;
        }
        if served {
            self.serve_waits()?;
        }
        Ok(served)
    }

    /// Carries out those of the calls that are kept that wait for what the driver has by now.
    fn serve_waits(&mut self) -> Result<(), Error> {
        if self.sharing.held_waits == 0 {
            return Ok(());
        }
        let mut released = HashSet::new();
        let mut ready = Vec::new();
        for (place, call) in self.sharing.held.iter().enumerate() {
            if let Some(id) = B::Api::released(&call.request) {
                released.insert(id);
            } else if let Some(events) = B::Api::awaited(&call.request)
                && events
                    .iter()
                    .all(|id| !released.contains(id) && self.backend.has_event(*id))
            {
                ready.push(place);
            }
        }
        // Each is one place nearer to the front for each that was taken out before.
        for (taken, place) in ready.into_iter().enumerate() {
            if let Some(call) = self.sharing.held.remove(place - taken) {
                self.sharing.forget::<B::Api>(&call);
                // Such calls need no device: none is given back.
                self.try_serve(call)?;
            }
        }
        Ok(())
    }

    /// Carries out a call, or keeps it until the device is free for it and for those before it.
    /// It was sent in `size` bytes.
    pub fn serve_in_turn(
        &mut self,
        header: Header,
        request: RequestOf<B>,
        size: usize,
    ) -> Result<(), Error> {
        let call = Held {
            header,
            request,
            size,
        };
        let kept = if self.sharing.held.is_empty() || self.may_overtake(&call.request) {
            self.try_serve(call)?
        } else {
            Some(call)
        };
        if let Some(kept) = kept {
            self.sharing.keep::<B::Api>(&kept);
            self.sharing.held.push_back(kept);
        }
        Ok(())
    }

    /// Carries out a call that the backend has put off, or keeps it before all others until the device is free for it.
    pub fn serve_again(&mut self, header: Header, request: RequestOf<B>) -> Result<(), Error> {
        let call = Held {
            header,
            request,
            size: 0,
        };
        if let Some(kept) = self.try_serve(call)? {
            self.sharing.keep::<B::Api>(&kept);
            self.sharing.held.push_front(kept);
        }
        Ok(())
    }

    /// Whether a call may be carried out before those that are kept: if it waits for commands that
    /// the driver has, or asks about one, under numbers that are still theirs then.
    fn may_overtake(&self, request: &RequestOf<B>) -> bool {
        B::Api::awaited(request).is_some_and(|events| {
            events.iter().all(|id| {
                let released =
                    |held: &Held<RequestOf<B>>| B::Api::released(&held.request) == Some(*id);
                self.backend.has_event(*id) && !self.sharing.held.iter().any(released)
            })
        })
    }

    /// Carries out a call, or gives it back if the device is not free for it, or what it needs is not here.
    fn try_serve(&mut self, call: Held<RequestOf<B>>) -> Result<Option<Held<RequestOf<B>>>, Error> {
        let header = call.header;
        self.sharing.awaits_contents = !B::has_come(self, header.opcode, &call.request)?;
        if self.sharing.awaits_contents {
            return Ok(Some(call));
        }
        if self.sharing.turns.is_some()
            && let Cost::Work(kind) = B::Api::cost(header.opcode, &call.request)
        {
            if !self.may_submit(kind) {
                self.sharing.flush_submitted(&self.backend);
                return Ok(Some(call));
            }
            self.sharing.metered = Some(kind);
        }
        if header.flags.has(Flags::ANSWER) {
            self.sharing.synchronous();
        }
        let asked = self.sharing.metered.is_some();
        let served = self.serve(header, call.request);
        // Not every call that needs the device submits a command, and not every one succeeds.
        self.sharing.metered = None;
        if let Some(turns) = self.sharing.turns.as_mut().filter(|_| asked) {
            turns.carried_out(Moment::now());
        }
        self.tell_memory();
        served.map(|()| None)
    }

    /// Tells the arbiter how much device memory the client has, if that has changed.
    fn tell_memory(&mut self) {
        if let Some(turns) = &mut self.sharing.turns {
            turns.memory(self.quota.used());
        }
    }

    fn may_submit(&mut self, kind: RequestClass) -> bool {
        self.sharing
            .retire(&**self.backend.driver(), self.undecided);
        let stuck = self.sharing.stuck(&**self.backend.driver(), self.undecided);
        let Some(turns) = &mut self.sharing.turns else {
            return true;
        };
        let may = turns.may_submit(kind, stuck, Moment::now());
        if turns.coschedule() {
            self.rouse_client();
        }
        may
    }

    /// Keeps account of a command that the driver has, by its fence, a reference to which this
    /// takes; `queue` is the number of its queue.
    pub fn meter(&mut self, kind: RequestClass, queue: u32, fence: FenceOf<B>) {
        let Some(turns) = &mut self.sharing.turns else {
            return;
        };
        turns.submitted(kind, Moment::now());
        self.backend.driver().retain(fence);
        self.sharing.unflushed = true;
        self.sharing.submitted.push_back(Submitted {
            fence,
            queue,
            armed: false,
        });
    }

    /// Keeps account of a command that was submitted at `start` and has completed, and so have all
    /// before it in its queue. While commands of other queues are under way, its time is theirs.
    pub fn meter_done(&mut self, kind: RequestClass, start: Moment) {
        self.sharing
            .retire(&**self.backend.driver(), self.undecided);
        let Some(turns) = &mut self.sharing.turns else {
            return;
        };
        if !self.sharing.submitted.is_empty() {
            return;
        }
        turns.submitted(kind, start);
        turns.completed(1, Moment::now());
    }

    /// Now, if the current request is to be measured. The clock is not read otherwise: a handler behind the gate, which is
    /// never measured, cannot.
    pub fn metered_since(&self) -> Option<Moment> {
        self.sharing.metered.map(|_| Moment::now())
    }

    /// The same of the current request, if it is to be measured.
    pub fn meter_request(&mut self, start: Option<Moment>) {
        if let (Some(kind), Some(start)) = (self.sharing.metered.take(), start) {
            self.meter_done(kind, start);
        }
    }

    /// Whether the serving thread is better not put to sleep: others wait for the device, and what
    /// this client has submitted in its turn is about to end. So one processor is busy for each device,
    /// at most: only one client has it.
    pub(crate) fn ends_soon(&self) -> bool {
        let turns = self.sharing.turns.as_ref();
        turns.is_some_and(|turns| turns.ends_within(SOON, Moment::now()))
    }

    /// After a while of calls that did not need the device: who waits for it gets it, however long
    /// the client goes on with them.
    pub(crate) fn give_way(&mut self) {
        if let Some(turns) = &mut self.sharing.turns {
            turns.give_way(Moment::now());
        }
    }

    /// While a call waits in this thread for what the driver has: who waits for the device gets it when the
    /// turn is over. Fences are looked at.
    pub fn give_way_while_waiting(&mut self) {
        if self.sharing.turns.is_some() {
            self.sharing
                .retire(&**self.backend.driver(), self.undecided);
            self.give_way();
        }
    }

    /// Before the serving thread sleeps: lets go of a device that is not used, and has the thread
    /// woken when what is waited for completes.
    pub fn before_sleep(&mut self) {
        if self.sharing.turns.is_none() {
            return;
        }
        // Commands may have kept what was released before, and an arbiter may be new.
        self.tell_memory();
        self.sharing.flush_submitted(&self.backend);
        let stuck = self.sharing.stuck(&**self.backend.driver(), self.undecided);
        if (self.sharing.held.is_empty() || self.sharing.awaits_contents)
            && let Some(turns) = &mut self.sharing.turns
        {
            turns.idle(stuck);
        }
        let turns = self.sharing.turns.as_ref();
        let end = turns.and_then(|turns| turns.expected_end(Moment::now()));
        let after = end.map(|end| end.saturating_sub(SOON));
        let submitted = &mut self.sharing.submitted;
        let last = submitted.len().saturating_sub(1);
        // Who waits for the device waits for the oldest; else the last one ends the turn. Where one
        // may wait for the client, it may be any.
        let reports_after = turns.and_then(Turns::reports_after);
        let (first, count) = match (self.undecided, reports_after) {
            (0, Some(place)) if self.sharing.held.is_empty() => (place.min(last), 1),
            (0, None) if self.sharing.held.is_empty() => (last, 1),
            (0, _) => (0, 1),
            _ => (0, submitted.len()),
        };
        let mut fences = Vec::new();
        for next in submitted.iter_mut().skip(first).take(count) {
            if !std::mem::replace(&mut next.armed, true) {
                fences.push(next.fence);
            }
        }
        for fence in fences {
            self.watch(fence, after);
        }
    }
}

//! The physical GPU. The mediator is the only client of its server.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant},
};

use gf100::{
    format::{PAGE, userd},
    registers::{ENGINES_ON, Engine, KICK, TRANSLATED, TRANSLATIONS},
};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_MSI_IRQ_INDEX, VFIO_REGION_INFO_FLAG_MMAP,
};
use vfio_client::{
    Connection, Deadline,
    connection::connect,
    wire::{self, RegionInfo},
};
use vfio_user::{Command, DmaMapFlags};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory::{DmaPage, PhysPage};

/// Memory that is lent at or above this address backs VRAM from offset 0 on. This is part of the
/// interface of `gantry-gf100` that does not exist in hardware.
const VRAM_ADDRESS: u64 = 1 << 63;
/// Maximum size of a reply without data.
const SHORT: usize = 256;
/// Time limit for a reply of the server.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for the GPU to finish a request: that of nouveau.
const LIMIT: Duration = Duration::from_secs(2);
/// Interval at which it is asked, if the first answer is no.
const INTERVAL: Duration = Duration::from_micros(50);

const BAR0: u32 = 0;
const BAR1: u32 = 1;
/// Offset of the MSI capability's control field in configuration space.
const MSI_CONTROL: u64 = 0x6a;
/// Vendor and device ID of the GF100.
const IDENTITY: u32 = 0x06d8_10de;

/// Why a request to the GPU failed. Unless it [is a refusal](Self::is_refusal), the GPU is lost.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Its server failed.
    #[error(transparent)]
    Server(#[from] vfio_client::Failure),
    /// It does not finish what its registers were told to do.
    #[error("it has not finished {0} within {limit} s: it hangs", limit = LIMIT.as_secs())]
    Hangs(&'static str),
}

impl Failure {
    /// Whether its server has only refused the request.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Server(failure) if failure.is_refusal())
    }
}

/// Why the GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It fails.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// It is a different device.
    #[error("it is device {0:#010x}, and only GF100 (0x06d810de) is known")]
    Device(u32),
    /// Its server lets clients map BARs.
    #[error("its server shows VRAM in files of its own: start gantry-gf100 with --trap")]
    Mapped,
    /// A resource of the host is exhausted.
    #[error("cannot make an eventfd")]
    Eventfd(#[source] io::Error),
}

fn lie(command: Command, source: wire::Lie) -> Failure {
    vfio_client::Failure::Lie { command, source }.into()
}

/// The GPU.
pub struct Physical {
    connection: Connection,
    interrupt: EventFd,
    vram: u64,
    /// Channels that are to leave the engines. The first one is being kicked.
    leaving: VecDeque<u8>,
    /// Since when it is.
    kicked: Instant,
    /// Number of requests sent so far.
    pub questions: u64,
}

impl Physical {
    /// Connects to the GPU's server and sets up bus mastering and interrupts.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let stream =
            connect(path).map_err(|error| Failure::from(vfio_client::Failure::Connect(error)))?;
        let connection =
            Connection::new(stream, Deadline::after(PATIENCE)).map_err(Failure::from)?;
        let interrupt = EventFd::new(EFD_NONBLOCK).map_err(Error::Eventfd)?;
        let mut gpu = Self {
            connection,
            interrupt,
            vram: 0,
            leaving: VecDeque::new(),
            kicked: Instant::now(),
            questions: 0,
        };
        let command = Command::DeviceGetRegionInfo;
        let max = wire::MAX_REGION_INFO as usize;
        let body = wire::region_info(BAR0);
        let deadline = Deadline::after(PATIENCE);
        let answer = gpu.connection.ask(command, &[&body], &[], max, deadline);
        let answer = answer.map_err(Failure::from)?;
        let info = RegionInfo::parse(&answer.body, BAR0).map_err(|source| lie(command, source))?;
        let mut identity = [0; 4];
        gpu.read(VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut identity)?;
        match u32::from_le_bytes(identity) {
            IDENTITY => {}
            other => return Err(Error::Device(other)),
        }
        if info.flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
            return Err(Error::Mapped);
        }
        gpu.vram = u64::from(gpu.register(0x11_020c)?) << 20;
        gpu.start()?;
        Ok(gpu)
    }

    fn start(&mut self) -> Result<(), Failure> {
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
        let body = wire::set_irqs(VFIO_PCI_MSI_IRQ_INDEX, flags, 0, 1);
        // SAFETY: the eventfd is open as long as `self`, which outlives the call.
        let fd = unsafe { BorrowedFd::borrow_raw(self.interrupt.as_raw_fd()) };
        let deadline = Deadline::after(PATIENCE);
        self.questions += 1;
        self.connection
            .ask(Command::SetIrqs, &[&body], &[fd], SHORT, deadline)?;
        let config = VFIO_PCI_CONFIG_REGION_INDEX;
        // Enable memory space and bus mastering; then MSI.
        self.write(config, 4, &[6, 0])?;
        self.write(config, MSI_CONTROL, &[1, 0])?;
        // Enable all interrupts of PFIFO and the command units, and the summary.
        for at in [0x00_2140, 0x00_2628, 0x04_010c, 0x04_210c, 0x04_410c] {
            self.set(at, u32::MAX)?;
        }
        self.set(0x00_0140, 1)?;
        // The submission pages are at the start of BAR 1.
        self.set(0x00_2254, userd::Window { start: 0 }.encode())
    }

    /// Size of VRAM in bytes.
    pub fn vram(&self) -> u64 {
        self.vram
    }

    /// Becomes readable on an interrupt.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// The socket, to notice when the server disconnects.
    pub fn stream(&self) -> BorrowedFd<'_> {
        self.connection.stream().as_fd()
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Failure> {
        let command = Command::RegionRead;
        let count = data.len() as u32;
        let body = wire::access(region, offset, count);
        let max = wire::ACCESS + data.len();
        let deadline = Deadline::after(PATIENCE);
        self.questions += 1;
        let answer = self.connection.ask(command, &[&body], &[], max, deadline)?;
        let read = wire::parse_read(&answer.body, region, offset, count);
        data.copy_from_slice(read.map_err(|source| lie(command, source))?);
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Failure> {
        let command = Command::RegionWrite;
        let count = data.len() as u32;
        let body = wire::access(region, offset, count);
        let deadline = Deadline::after(PATIENCE);
        self.questions += 1;
        let answer =
            self.connection
                .ask(command, &[&body, data], &[], wire::ACCESS + 8, deadline)?;
        wire::parse_write(&answer.body, region, offset, count)
            .map_err(|source| lie(command, source))
    }

    /// Reads a register.
    pub fn register(&mut self, at: u32) -> Result<u32, Failure> {
        let mut word = [0; 4];
        self.read(BAR0, at.into(), &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Writes a register.
    pub fn set(&mut self, at: u32, value: u32) -> Result<(), Failure> {
        self.write(BAR0, at.into(), &value.to_le_bytes())
    }

    /// Writes without waiting until the write is done. It is done before any later access.
    fn post(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Failure> {
        let body = wire::access(region, offset, data.len() as u32);
        let deadline = Deadline::after(PATIENCE);
        self.questions += 1;
        let command = Command::RegionWrite;
        self.connection
            .post(command, &[&body, data], wire::ACCESS + 8, deadline)?;
        Ok(())
    }

    /// Clears interrupt reasons, without waiting.
    pub fn acknowledge(&mut self, at: u32) -> Result<(), Failure> {
        self.post(BAR0, at.into(), &u32::MAX.to_le_bytes())
    }

    /// Re-arms the MSI, so that another message is sent if there is still a reason. Does not wait.
    pub fn rearm(&mut self) -> Result<(), Failure> {
        self.post(BAR0, 0x08_8704, &[0xff])
    }

    /// Tells a channel that its ring has entries up to `put`, without waiting.
    pub fn doorbell(&mut self, channel: u8, put: u32) -> Result<(), Failure> {
        let at = u64::from(channel) * userd::STRIDE + userd::GP_PUT;
        self.post(BAR1, at, &put.to_le_bytes())
    }

    /// Waits until a register has the value of a finished request.
    fn wait(
        &mut self,
        what: &'static str,
        at: u32,
        is_done: impl Fn(u32) -> bool,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            // A server that has been stalled may take the request and this question together: only the answer to a late
            // question counts.
            let is_late = start.elapsed() > LIMIT;
            if is_done(self.register(at)?) {
                return Ok(());
            }
            if is_late {
                return Err(Failure::Hangs(what));
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Invalidates the translations of all spaces. When this returns, none is used any more.
    pub fn flush(&mut self) -> Result<(), Failure> {
        // There is room for it, since each request is waited for.
        let request: u32 = 1 << 31 | 3;
        self.post(BAR0, 0x10_0cbc, &request.to_le_bytes())?;
        self.wait("a flush of its translations", TRANSLATIONS, |status| {
            status & TRANSLATED != 0
        })
    }

    /// Sets an entry of the channel table: the instance block, and whether the channel may run.
    pub fn channel(
        &mut self,
        channel: u8,
        instance: Option<PhysPage>,
        runs: bool,
    ) -> Result<(), Failure> {
        let at = 0x00_3000 + u32::from(channel) * 8;
        let entry = instance.map_or(0, |page| 0xc000_0000 | page.0);
        if runs {
            self.set(at, entry)?;
        }
        self.set(at + 4, 0x001f_0000 | u32::from(runs))?;
        if instance.is_none() {
            self.set(at, 0)?;
        }
        Ok(())
    }

    /// Makes a channel leave the engines, when its current command is over. Its work is kept.
    /// Until it [has left](Self::is_leaving), it may write to its space, and must not be changed.
    pub fn stop(&mut self, channel: u8) -> Result<(), Failure> {
        let off: u32 = 0x001f_0000;
        let entry = 0x00_3004 + u64::from(channel) * 8;
        self.post(BAR0, entry, &off.to_le_bytes())?;
        self.leaving.push_back(channel);
        match self.leaving.len() {
            1 => self.kick(channel),
            _ => Ok(()),
        }
    }

    /// One at a time: this is a register, and not a queue.
    fn kick(&mut self, channel: u8) -> Result<(), Failure> {
        self.kicked = Instant::now();
        self.post(BAR0, KICK.into(), &u32::from(channel).to_le_bytes())
    }

    /// Kicks one channel after another, as far as this takes no time. Returns the one that is
    /// inside a command, and for how long it has been kicked.
    pub fn leaving(&mut self) -> Result<Option<(u8, Duration)>, Failure> {
        while let Some(&channel) = self.leaving.front() {
            if self.register(KICK)? != u32::from(channel) {
                return Ok(Some((channel, self.kicked.elapsed())));
            }
            self.leaving.pop_front();
            if let Some(&next) = self.leaving.front() {
                self.kick(next)?;
            }
        }
        Ok(None)
    }

    /// Whether a channel has been stopped, and has not left the engines.
    pub fn is_leaving(&self, channel: u8) -> bool {
        self.leaving.contains(&channel)
    }

    /// Whether any channel is.
    pub fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Resets the engine that executes a channel's command, which is lost.
    pub fn reset_engine_of(&mut self, channel: u8) -> Result<(), Failure> {
        for engine in Engine::ALL {
            let status = self.register(engine.status())?;
            if Engine::channel(status) == Some(channel) {
                self.set(ENGINES_ON, !engine.bit())?;
                self.set(ENGINES_ON, u32::MAX)?;
            }
        }
        Ok(())
    }

    /// Waits until a channel that was stopped has left the engines. Returns the channels whose
    /// commands had to be aborted for that, because they were not over within `patience`.
    pub fn wait_for_leaving(
        &mut self,
        channel: u8,
        patience: Duration,
    ) -> Result<Vec<u8>, Failure> {
        let start = Instant::now();
        let mut lost = Vec::new();
        while let Some((first, _)) = self.leaving()? {
            if !self.is_leaving(channel) {
                break;
            }
            if start.elapsed() > LIMIT {
                return Err(Failure::Hangs("a kick"));
            }
            if start.elapsed() > patience {
                self.reset_engine_of(first)?;
                lost.push(first);
            } else {
                std::thread::sleep(INTERVAL);
            }
        }
        Ok(lost)
    }

    /// Sets a new run list, and waits until it has taken effect. Its memory may be written again then.
    pub fn run_list(&mut self, at: PhysPage, count: u32) -> Result<(), Failure> {
        self.post(BAR0, 0x00_2270, &at.0.to_le_bytes())?;
        let count = 0x01f0_0000 | count & 0xfff;
        self.post(BAR0, 0x00_2274, &count.to_le_bytes())?;
        self.wait("a change of its run list", 0x00_227c, |status| {
            status & 1 << 20 == 0
        })
    }

    fn map(&mut self, file: &File, offset: u64, address: u64, len: u64) -> Result<(), Failure> {
        let body = wire::dma_map(DmaMapFlags::READ_WRITE.bits(), offset, address, len);
        let deadline = Deadline::after(PATIENCE);
        let fd = [file.as_fd()];
        self.questions += 1;
        self.connection
            .ask(Command::DmaMap, &[&body], &fd, SHORT, deadline)?;
        Ok(())
    }

    fn unmap(&mut self, address: u64, len: u64) -> Result<(), Failure> {
        let body = wire::dma_unmap(address, len);
        let deadline = Deadline::after(PATIENCE);
        self.questions += 1;
        self.connection
            .ask(Command::DmaUnmap, &[&body], &[], SHORT, deadline)?;
        Ok(())
    }

    /// Backs a range of VRAM by the first bytes of a file.
    pub fn back(&mut self, range: Range<u64>, file: &File) -> Result<(), Failure> {
        self.map(file, 0, VRAM_ADDRESS + range.start, range.end - range.start)
    }

    /// Backs a range of VRAM by new memory that belongs to nobody.
    pub fn unback(&mut self, range: Range<u64>) -> Result<(), Failure> {
        self.unmap(VRAM_ADDRESS + range.start, range.end - range.start)
    }

    /// Lends pages of RAM to the GPU.
    pub fn lend(
        &mut self,
        first: DmaPage,
        count: u32,
        file: &File,
        offset: u64,
    ) -> Result<(), Failure> {
        let address = u64::from(first.0) * PAGE;
        self.map(file, offset, address, u64::from(count) * PAGE)
    }

    /// Takes lent pages back.
    pub fn take_back(&mut self, first: DmaPage, count: u32) -> Result<(), Failure> {
        self.unmap(u64::from(first.0) * PAGE, u64::from(count) * PAGE)
    }
}

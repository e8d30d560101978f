//! The blocks of the calls that are read and made, as published in NVIDIA's open kernel modules (`nvos.h`,
//! `ctrla06c.h`, `ctrl2080fifo.h`, `nv_uvm_ioctl.h`). They are the same in all listed branches.

use std::ffi::{c_int, c_ulong, c_void};

/// The type of the driver's calls.
const TYPE: c_ulong = b'F' as c_ulong;
const FREE: c_ulong = 0x29;
const CONTROL: c_ulong = 0x2a;
const ALLOCATE: c_ulong = 0x2b;
const IDLE_CHANNELS: c_ulong = 0x41;
/// Sizes of the blocks.
const FREE_SIZE: c_ulong = 16;
const CONTROL_SIZE: c_ulong = 32;
const ALLOCATE_SIZE: c_ulong = 48;
/// Calls on the file of unified memory that stop channels: UNREGISTER_GPU_VASPACE, UNREGISTER_CHANNEL. They are
/// numbers without type and size. Files of other drivers may know them, too.
const UNREGISTER: [c_ulong; 2] = [0x1a, 0x1c];

/// Controls.
const SET_TIMESLICE: u32 = 0xa06c_0103;
const DISABLE_CHANNELS: u32 = 0x2080_110b;
/// The most channels of one call.
const MOST_CHANNELS: usize = 64;

/// The class of channel groups.
const GROUP: u32 = 0xa06c;
/// The class of GPUs.
pub const DEVICE: u32 = 0x80;

/// What a call is about, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// An object is made.
    Allocate {
        client: u32,
        parent: u32,
        object: u32,
        class: u32,
        /// For a group: its address space and engine.
        group: Option<(u32, u32)>,
        /// For a device: the number of its GPU.
        gpu: Option<u32>,
        status: u32,
    },
    /// An object is freed, and what lies below it.
    Free {
        client: u32,
        parent: u32,
        object: u32,
        status: u32,
    },
    /// Another call that waits for channels.
    Waits,
}

impl Request {
    /// Reads a call; `None`: it does not matter.
    ///
    /// # Safety
    /// `argument` is what the driver expects for `request`, if the file is one of NVIDIA's driver's.
    pub unsafe fn read(request: c_ulong, argument: *const c_void) -> Option<Self> {
        if UNREGISTER.contains(&request) {
            return Some(Self::Waits);
        }
        // Some programs pass the number with its sign extended.
        let request = request & 0xffff_ffff;
        let size = request >> 16 & 0x3fff;
        if request >> 8 & 0xff != TYPE || argument.is_null() {
            return None;
        }
        // SAFETY: the size of the block is a part of the request.
        let word = |at: usize| unsafe { argument.byte_add(at).cast::<u32>().read_unaligned() };
        match (request & 0xff, size) {
            (FREE, FREE_SIZE) => Some(Self::Free {
                client: word(0),
                parent: word(4),
                object: word(8),
                status: word(12),
            }),
            (ALLOCATE, ALLOCATE_SIZE) => {
                let class = word(12);
                // SAFETY: as for words.
                let parameters = unsafe { argument.byte_add(16).cast::<u64>().read_unaligned() };
                let parameters = parameters as *const c_void;
                // SAFETY: the parameters of a group are 20 bytes, and those of a device 56, which the driver reads.
                let parameter =
                    |at| unsafe { parameters.byte_add(at).cast::<u32>().read_unaligned() };
                let is = |wanted| class == wanted && !parameters.is_null();
                let group = is(GROUP).then(|| (parameter(8), parameter(12)));
                let gpu = is(DEVICE).then(|| parameter(0));
                Some(Self::Allocate {
                    client: word(0),
                    parent: word(4),
                    object: word(8),
                    class,
                    group,
                    gpu,
                    status: word(40),
                })
            }
            (IDLE_CHANNELS, _) => Some(Self::Waits),
            _ => None,
        }
    }
}

/// Channels of one client on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channels {
    /// The control file of the client.
    pub file: c_int,
    pub client: u32,
    /// The part of the GPU that controls them.
    pub subdevice: u32,
    pub channels: Vec<u32>,
}

impl Channels {
    /// The calls that stop or start them.
    pub fn controls(&self, stop: bool) -> impl Iterator<Item = Control> {
        let parts = self.channels.chunks(MOST_CHANNELS);
        parts.map(move |channels| Control::channels(self.client, self.subdevice, channels, stop))
    }
}

/// The parameters of a control call.
#[repr(C, align(8))]
union Parameters {
    /// SET_TIMESLICE.
    micros: u64,
    channels: DisableChannels,
}

/// FIFO_DISABLE_CHANNELS.
#[derive(Clone, Copy)]
#[repr(C)]
struct DisableChannels {
    disable: u8,
    _padding: [u8; 3],
    count: u32,
    /// Only keep them from being scheduled. A running kernel then stays for as long as nobody else has work.
    only_scheduling: u8,
    rewind: u8,
    _more_padding: [u8; 6],
    event: u64,
    clients: [u32; MOST_CHANNELS],
    channels: [u32; MOST_CHANNELS],
}

const _: () = assert!(size_of::<DisableChannels>() == 536);

/// A control call.
pub struct Control {
    block: Block,
    parameters: Box<Parameters>,
}

#[repr(C)]
struct Block {
    client: u32,
    object: u32,
    command: u32,
    flags: u32,
    parameters: u64,
    size: u32,
    status: u32,
}

const _: () = assert!(size_of::<Block>() as c_ulong == CONTROL_SIZE);

impl Control {
    /// The number of the call: read and write, the size, the type and the number.
    pub const REQUEST: c_ulong = 3 << 30 | CONTROL_SIZE << 16 | TYPE << 8 | CONTROL;

    /// Sets the slice of a group, in microseconds.
    pub fn slice(client: u32, group: u32, micros: u32) -> Self {
        let parameters = Parameters {
            micros: micros.into(),
        };
        Self::new(client, group, SET_TIMESLICE, parameters, size_of::<u64>())
    }

    /// Stops or starts at most [`MOST_CHANNELS`] channels.
    fn channels(client: u32, subdevice: u32, channels: &[u32], stop: bool) -> Self {
        let mut parameters = DisableChannels {
            disable: stop.into(),
            _padding: [0; 3],
            count: channels.len().min(MOST_CHANNELS) as u32,
            only_scheduling: 0,
            rewind: 0,
            _more_padding: [0; 6],
            event: 0,
            clients: [0; MOST_CHANNELS],
            channels: [0; MOST_CHANNELS],
        };
        let lists = parameters.clients.iter_mut().zip(&mut parameters.channels);
        for ((its_client, its_channel), channel) in lists.zip(channels) {
            (*its_client, *its_channel) = (client, *channel);
        }
        let size = size_of::<DisableChannels>();
        let parameters = Parameters {
            channels: parameters,
        };
        Self::new(client, subdevice, DISABLE_CHANNELS, parameters, size)
    }

    fn new(client: u32, object: u32, command: u32, parameters: Parameters, size: usize) -> Self {
        Self {
            block: Block {
                client,
                object,
                command,
                flags: 0,
                parameters: 0,
                size: size as u32,
                status: 0,
            },
            parameters: Box::new(parameters),
        }
    }

    /// The argument of the call. It is valid for as long as this is neither moved nor dropped.
    pub fn block(&mut self) -> *mut c_void {
        self.block.parameters = (&raw mut *self.parameters) as u64;
        (&raw mut self.block).cast()
    }

    /// The driver's answer. 0 is success.
    pub fn status(&self) -> u32 {
        self.block.status
    }
}

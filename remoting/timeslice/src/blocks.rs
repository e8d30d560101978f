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
/// Calls on the file of unified memory that stop channels: UNREGISTER_GPU_VASPACE, UNREGISTER_CHANNEL, UNREGISTER_GPU. They are
/// numbers without type and size. Files of other drivers may know them, too.
const UNREGISTER: [c_ulong; 3] = [0x1a, 0x1c, 0x26];

const MAP_MEMORY: c_ulong = 0x4e;
const MAP_MEMORY_SIZE: c_ulong = 56;

/// Controls.
const SET_TIMESLICE: u32 = 0xa06c_0103;
const DISABLE_CHANNELS: u32 = 0x2080_110b;
/// The number of a channel, unique on the machine.
const GET_CONTEXT_ID: u32 = 0xa06f_0113;
/// Controls that change whether and how channels are scheduled, or wait until they are not on the GPU: GPFIFO_SCHEDULE of a
/// channel and of a group, PREEMPT of a group, and GR_SET_CTXSW_PREEMPTION_MODE.
const SCHEDULING: [u32; 4] = [0xa06f_0103, 0xa06c_0101, 0xa06c_0105, 0x2080_1210];
/// Records of context switches: which, whether they are written, and that they are written now.
const BIND_SWITCHES: u32 = 0x2080_1238;
const ENABLE_EVENTS: u32 = 0x90cd_0101;
const FLUSH_EVENTS: u32 = 0x90cd_0104;
/// The most channels of one call.
const MOST_CHANNELS: usize = 64;

/// The class of channel groups, and that of what channels of a group share.
const GROUP: u32 = 0xa06c;
const SHARE: u32 = 0x9067;
/// Classes of channels, of each generation since Volta.
const CHANNEL: u32 = 0xc06f;
const CHANNEL_MASK: u32 = 0xf0ff;
/// The class of address spaces.
const ADDRESS_SPACE: u32 = 0x90f1;
/// Classes of clients.
const CLIENTS: [u32; 3] = [0, 1, CLIENT];
/// The class of GPUs.
const DEVICE: u32 = 0x80;
/// The class of a GPU's parts.
const SUBDEVICE: u32 = 0x2080;
/// Classes of clients, of the machine's memory, and of buffers of events.
const CLIENT: u32 = 0x41;
const MEMORY: u32 = 0x90ce;
const EVENT_BUFFER: u32 = 0x90cd;
/// Attributes of memory: cached, in the machine; and only the driver writes it.
const CACHED: u32 = 1 << 29 | 1 << 25;
const READ_ONLY: u32 = 1 << 22;
/// Bytes of a record, and what happens when there is no room: the newest are kept.
const RECORD: u32 = 32;
const KEEP_NEWEST: u32 = 2;

/// An object that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A root of objects.
    Client,
    /// This GPU.
    Device(u32),
    Subdevice,
    AddressSpace,
    /// A channel group in this address space, on this engine.
    Group {
        space: u32,
        engine: u32,
    },
    /// What channels of a group share, with an address space of its own; zero: the group's.
    Share {
        space: u32,
    },
    /// A channel with this context share; zero: none.
    Channel {
        share: u32,
    },
}

impl Kind {
    /// An object of this class that is made with these parameters, words at offsets; `None`: it does not matter.
    pub fn of(class: u32, parameter: impl Fn(usize) -> u32) -> Option<Self> {
        Some(match class {
            class if CLIENTS.contains(&class) => Self::Client,
            DEVICE => Self::Device(parameter(0)),
            SUBDEVICE => Self::Subdevice,
            ADDRESS_SPACE => Self::AddressSpace,
            GROUP => Self::Group {
                space: parameter(8),
                engine: parameter(12),
            },
            SHARE => Self::Share {
                space: parameter(0),
            },
            class if class & CHANNEL_MASK == CHANNEL => Self::Channel {
                share: parameter(24),
            },
            _ => return None,
        })
    }
}

/// What a call is about, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// An object is made.
    Allocate {
        client: u32,
        parent: u32,
        object: u32,
        /// `None`: it does not matter.
        kind: Option<Kind>,
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
    /// The client whose objects it is about; `None`: that is not known.
    pub fn client(&self) -> Option<u32> {
        match *self {
            Self::Allocate { client, .. } | Self::Free { client, .. } => Some(client),
            Self::Waits => None,
        }
    }

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
                let parameter = |at| match parameters.is_null() {
                    true => 0,
                    // SAFETY: the parameters of a device are 56 bytes, those of a group 20, of a context share 12, and those of
                    // a channel more than these, which the driver reads.
                    false => unsafe { parameters.byte_add(at).cast::<u32>().read_unaligned() },
                };
                let kind = Kind::of(class, parameter);
                Some(Self::Allocate {
                    client: word(0),
                    parent: word(4),
                    object: word(8),
                    kind,
                    status: word(40),
                })
            }
            (IDLE_CHANNELS, _) => Some(Self::Waits),
            (CONTROL, CONTROL_SIZE) if SCHEDULING.contains(&word(8)) => Some(Self::Waits),
            _ => None,
        }
    }
}

/// What is done to channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switching {
    /// Their kernels are taken off the GPU at once.
    Off,
    /// They get no further slice. A running kernel stays until the end of its slice, and as long as nobody else has work.
    Unscheduled,
    /// They continue.
    On,
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
    pub fn controls(&self, to: Switching) -> impl Iterator<Item = Control> {
        let parts = self.channels.chunks(MOST_CHANNELS);
        parts.map(move |channels| Control::channels(self.client, self.subdevice, channels, to))
    }
}

/// The parameters of a control call.
#[repr(C, align(8))]
union Parameters {
    /// SET_TIMESLICE.
    micros: u64,
    channels: DisableChannels,
    /// GET_CONTEXT_ID.
    number: u32,
    /// BIND_SWITCHES: the buffer, the size of records, which switches, a filter, whether those of all users, and why not.
    switches: [u32; 6],
    /// ENABLE_EVENTS: whether, and how.
    events: [u32; 2],
}

/// FIFO_DISABLE_CHANNELS.
#[derive(Clone, Copy)]
#[repr(C)]
struct DisableChannels {
    disable: u8,
    _padding: [u8; 3],
    count: u32,
    /// See [`Switching::Unscheduled`].
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
    fn channels(client: u32, subdevice: u32, channels: &[u32], to: Switching) -> Self {
        let mut parameters = DisableChannels {
            disable: (to != Switching::On).into(),
            _padding: [0; 3],
            count: channels.len().min(MOST_CHANNELS) as u32,
            only_scheduling: (to == Switching::Unscheduled).into(),
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

    /// Asks for a channel's number: [`Self::number`] afterwards.
    pub fn ask_number(client: u32, channel: u32) -> Self {
        let parameters = Parameters { number: 0 };
        Self::new(
            client,
            channel,
            GET_CONTEXT_ID,
            parameters,
            size_of::<u32>(),
        )
    }

    /// The answer to [`Self::ask_number`].
    pub fn number(&self) -> u32 {
        // SAFETY: any bytes are a number, and all parameters begin with four.
        unsafe { self.parameters.number }
    }

    /// The user's context switches on this GPU go to this buffer.
    pub fn bind_switches(client: u32, subdevice: u32, buffer: u32) -> Self {
        let parameters = Parameters {
            switches: [buffer, RECORD, 1, 0, 0, 0],
        };
        let size = size_of::<[u32; 6]>();
        Self::new(client, subdevice, BIND_SWITCHES, parameters, size)
    }

    /// The buffer takes what is bound to it.
    pub fn enable_events(client: u32, buffer: u32) -> Self {
        let parameters = Parameters {
            events: [1, KEEP_NEWEST],
        };
        let size = size_of::<[u32; 2]>();
        Self::new(client, buffer, ENABLE_EVENTS, parameters, size)
    }

    /// What has happened is written into the buffer now.
    pub fn flush_events(client: u32, buffer: u32) -> Self {
        Self::new(client, buffer, FLUSH_EVENTS, Parameters { micros: 0 }, 0)
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
        self.block.parameters = match self.block.size {
            0 => 0,
            _ => (&raw mut *self.parameters) as u64,
        };
        (&raw mut self.block).cast()
    }

    /// The driver's answer. 0 is success.
    pub fn status(&self) -> u32 {
        self.block.status
    }
}

/// Parameters of objects that are made.
#[repr(C, align(8))]
union Made {
    none: u64,
    /// The number of the GPU first.
    device: [u32; 14],
    memory: MachineMemory,
    buffer: EventBuffer,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MachineMemory {
    _before: [u32; 6],
    attributes: u32,
    more_attributes: u32,
    _between: [u32; 4],
    _range: [u64; 2],
    size: u64,
    _after: [u64; 7],
}

const _: () = assert!(size_of::<MachineMemory>() == 128);

#[derive(Clone, Copy)]
#[repr(C)]
struct EventBuffer {
    _addresses: [u64; 2],
    record_size: u32,
    record_count: u32,
    _variable: u64,
    _variable_size: u32,
    _records_free: u32,
    _notification: u64,
    _variable_free: u32,
    subdevice: u32,
    _flags: u32,
    header: u32,
    records: u32,
    _variable_memory: u32,
}

const _: () = assert!(size_of::<EventBuffer>() == 72);

/// A buffer of context switches: the objects that it is made of.
#[derive(Clone, Copy, Debug)]
pub struct SwitchBuffer {
    pub client: u32,
    pub subdevice: u32,
    /// Memory of its places of writing and reading.
    pub header: u32,
    /// Memory of its records, and their number.
    pub records: u32,
    pub count: u32,
}

#[repr(C)]
struct AllocationBlock {
    client: u32,
    parent: u32,
    object: u32,
    class: u32,
    parameters: u64,
    rights: u64,
    size: u32,
    flags: u32,
    status: u32,
    _padding: u32,
}

const _: () = assert!(size_of::<AllocationBlock>() as c_ulong == ALLOCATE_SIZE);

/// A call that makes an object.
pub struct Allocation {
    block: AllocationBlock,
    parameters: Box<Made>,
}

impl Allocation {
    /// The number of the call.
    pub const REQUEST: c_ulong = 3 << 30 | ALLOCATE_SIZE << 16 | TYPE << 8 | ALLOCATE;

    /// A client, which the driver names.
    pub fn client() -> Self {
        Self::new(0, 0, 0, CLIENT, Made { none: 0 }, 0)
    }

    /// The GPU with this number.
    pub fn device(client: u32, object: u32, gpu: u32) -> Self {
        let mut device = [0; 14];
        device[0] = gpu;
        let size = size_of_val(&device);
        Self::new(client, client, object, DEVICE, Made { device }, size)
    }

    /// Its first part.
    pub fn subdevice(client: u32, device: u32, object: u32) -> Self {
        let size = size_of::<u32>();
        Self::new(client, device, object, SUBDEVICE, Made { none: 0 }, size)
    }

    /// Memory of the machine, which only the driver writes.
    pub fn memory(client: u32, object: u32, bytes: u64) -> Self {
        let memory = MachineMemory {
            _before: [0; 6],
            attributes: CACHED,
            more_attributes: READ_ONLY,
            _between: [0; 4],
            _range: [0; 2],
            size: bytes,
            _after: [0; 7],
        };
        let size = size_of_val(&memory);
        Self::new(client, client, object, MEMORY, Made { memory }, size)
    }

    /// A buffer of context switches.
    pub fn switch_buffer(object: u32, of: &SwitchBuffer) -> Self {
        let buffer = EventBuffer {
            _addresses: [0; 2],
            record_size: RECORD,
            record_count: of.count,
            _variable: 0,
            _variable_size: 0,
            _records_free: 0,
            _notification: 0,
            _variable_free: 0,
            subdevice: of.subdevice,
            _flags: 0,
            header: of.header,
            records: of.records,
            _variable_memory: 0,
        };
        let size = size_of_val(&buffer);
        let made = Made { buffer };
        Self::new(of.client, of.client, object, EVENT_BUFFER, made, size)
    }

    fn new(
        client: u32,
        parent: u32,
        object: u32,
        class: u32,
        parameters: Made,
        size: usize,
    ) -> Self {
        Self {
            block: AllocationBlock {
                client,
                parent,
                object,
                class,
                parameters: 0,
                rights: 0,
                size: size as u32,
                flags: 0,
                status: 0,
                _padding: 0,
            },
            parameters: Box::new(parameters),
        }
    }

    /// The argument of the call. It is valid for as long as this is neither moved nor dropped.
    pub fn block(&mut self) -> *mut c_void {
        self.block.parameters = match self.block.size {
            0 => 0,
            _ => (&raw mut *self.parameters) as u64,
        };
        (&raw mut self.block).cast()
    }

    /// The driver's answer. 0 is success.
    pub fn status(&self) -> u32 {
        self.block.status
    }

    /// The name of the object.
    pub fn object(&self) -> u32 {
        self.block.object
    }
}

/// A call that has the next `mmap` of a file map memory of the machine for reading.
#[derive(Debug)]
#[repr(C)]
pub struct MapMemory {
    client: u32,
    device: u32,
    memory: u32,
    _padding: u32,
    offset: u64,
    length: u64,
    address: u64,
    status: u32,
    flags: u32,
    file: c_int,
    _more_padding: u32,
}

const _: () = assert!(size_of::<MapMemory>() as c_ulong == MAP_MEMORY_SIZE);

impl MapMemory {
    /// The number of the call.
    pub const REQUEST: c_ulong = 3 << 30 | MAP_MEMORY_SIZE << 16 | TYPE << 8 | MAP_MEMORY;

    /// Memory of `length` bytes that belongs to no device; `file` is another control file.
    pub fn new(client: u32, memory: u32, length: u64, file: c_int) -> Self {
        Self {
            client,
            device: client,
            memory,
            _padding: 0,
            offset: 0,
            length,
            address: 0,
            status: 0,
            // Read only.
            flags: 1,
            file,
            _more_padding: 0,
        }
    }

    /// The argument of the call. It is valid for as long as this is neither moved nor dropped.
    pub fn block(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }

    /// The driver's answer. 0 is success.
    pub fn status(&self) -> u32 {
        self.status
    }
}

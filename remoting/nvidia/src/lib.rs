//! Makes calls on NVIDIA's device files for programs that have none.
//!
//! A program's CUDA libraries open device files and call `ioctl` on them. `guest/native` takes these calls and sends
//! what they carry; here they are made, by a process without any code of NVIDIA's.
//!
//! | module | what |
//! |---|---|
//! | [`server`], `session` | connections of programs, one thread each |
//! | [`machine`], [`pool`] | programs of virtual machines: a process for each machine |
//! | `bar` | pages of device files that the programs of a virtual machine reach |
//! | `files` | open device files: a program holds the other end of a socket pair instead |
//! | `call`, `check` | a call: the walk, the checks, the call itself, what is remembered and restored |
//! | `objects` | clients and objects that programs created, and what memory they use |
//! | `duplicate` | objects that several clients have |
//! | `closing` | files whose last copies are closed |
//! | `convert` | memory of the driver that a program maps comes from the program's slice |
//! | `unified` | ranges of unified memory over pages of the slice |
//! | `lent` | files of shared memory that a program lends |
//! | `slice` | memory that a program shares with its devices |
//! | `events` | hang-ups and events of files |
//! | `external` | video memory that GPUs map by unified memory |
//! | [`sharing`] | time slices and stops, as an arbiter says |
//! | [`device`] | the device files themselves |
//! | [`gpus`] | which GPUs programs see |
//! | [`driver_image`] | the driver's libraries, for guests |
//! | [`confine`] | the system calls and files that remain |
//! | [`record`] | the structure of calls, without contents |
//!
//! Nothing that a program says is believed: sizes come from the tables of `nvidia-abi`, a file or client counts only
//! where the program has its file, an address is an offset in its own slice.

mod bar;
mod call;
mod check;
mod closing;
pub mod confine;
mod convert;
pub mod device;
pub mod driver_image;
mod duplicate;
mod events;
mod external;
mod files;
pub mod gpus;
mod lent;
pub mod machine;
mod objects;
pub mod pool;
mod quota;
pub mod record;
pub mod server;
mod session;
pub mod sharing;
mod slice;
#[cfg(feature = "test-support")]
pub mod stand_in;
mod unified;

//! A device with a context, a queue and kernels.

use alloc::{vec, vec::Vec};

use remoting_proto::{
    apis::opencl::calls::{
        BuildProgram, ContextId, CreateContext, CreateKernel, CreateProgram, CreateQueue, DeviceId,
        KernelId, Order, Platforms, ProgramId, ProgramOrigin, QueueId,
    },
    wire::Blob,
};
use remoting_transport::bell::Bell;

use crate::{Connection, Failure};

pub const CONTEXT: ContextId = ContextId(0);
pub const QUEUE: QueueId = QueueId(0);
const PROGRAM: ProgramId = ProgramId(0);

/// A command without a wait list.
pub fn order() -> Order {
    Order {
        queue: QUEUE,
        wait: Vec::new(),
        event: None,
    }
}

/// Opens the first device with these kernels of a program.
pub fn open<B: Bell + Clone>(
    link: &mut Connection<B>,
    source: &str,
    kernels: [(KernelId, &str); 2],
) -> Result<DeviceId, Failure> {
    let platforms = link.ask(&Platforms {})?;
    let device = platforms.iter().flatten().next().map(|offered| offered.id);
    let device = device.ok_or(Failure::NoDevice)?;
    link.ask(&CreateContext {
        id: CONTEXT,
        devices: vec![device],
        platform: None,
    })?;
    link.ask(&CreateQueue {
        id: QUEUE,
        context: CONTEXT,
        device,
        properties: 0,
        further: Vec::new(),
    })?;
    link.ask(&CreateProgram {
        id: PROGRAM,
        context: CONTEXT,
        origin: ProgramOrigin::Source(Blob(source.as_bytes().to_vec())),
    })?;
    link.ask(&BuildProgram {
        id: PROGRAM,
        devices: Vec::new(),
        options: Blob(Vec::new()),
        folders: 0,
        included: Vec::new(),
    })?;
    for (id, name) in kernels {
        link.ask(&CreateKernel {
            id,
            program: PROGRAM,
            name: Blob(name.as_bytes().to_vec()),
        })?;
    }
    Ok(device)
}

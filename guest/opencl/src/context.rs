//! Contexts and queues.

use std::{ffi::c_void, ptr::null_mut, sync::Mutex};

use base::Unpoisoned;
use gantry_client::progress::Progress;
use remoting_proto::apis::opencl::{
    calls::{ContextId, CreateContext, CreateQueue, Finish, Flush, QueueId, Target},
    codes,
};

use crate::{
    abi::{Outcome, bytes, entry_points, give, handle, list, properties},
    link::{self, Notify},
    object::{
        self, Context, ContextDestructor, Device, Handle, Object, Platform, Queue, get, keep_all,
    },
    platform::{self, ask},
};

fn create(
    list: *const isize,
    devices: &[Handle<Device>],
    notify: Option<Notify>,
    data: *mut c_void,
) -> Outcome<Handle<Context>> {
    let link = link::connected()?;
    let properties = properties(list);
    let mut platform = None;
    let pairs = properties.as_chunks::<2>().0;
    for (index, pair) in pairs.iter().enumerate() {
        if pairs[..index].iter().any(|before| before[0] == pair[0]) {
            return Err(codes::INVALID_PROPERTY);
        }
        match u32::try_from(pair[0]) {
            Ok(codes::CONTEXT_PLATFORM) => {
                platform = Some(get(pair[1] as Handle<Platform>)?.it.id);
            }
            Ok(codes::CONTEXT_INTEROP_USER_SYNC) => {}
            _ => return Err(codes::INVALID_PROPERTY),
        }
    }
    let devices = keep_all(devices)?;
    let id = ContextId(link.state.ids.contexts.take());
    if let Some(notify) = notify {
        link::notify(link, id, Some((notify, data as usize)));
    }
    let asked = link.ask(&CreateContext {
        id,
        devices: devices.iter().map(|device| device.it.id).collect(),
        platform,
    });
    let context = Object::handle(Context {
        id,
        devices,
        properties: if list.is_null() {
            Vec::new()
        } else {
            properties.into_iter().chain([0]).collect()
        },
        destructors: Mutex::default(),
    });
    if let Err(code) = asked {
        object::release(context)?;
        return Err(code);
    }
    Ok(context)
}

entry_points! {
    fn clCreateContext(
        properties: *const isize, count: u32, devices: *const Handle<Device>, notify: Option<Notify>,
        data: *mut c_void
    ) -> Handle<Context> {
        if count == 0 || devices.is_null() || notify.is_none() && !data.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        create(
            properties,
            &list(devices, count, codes::INVALID_VALUE)?,
            notify,
            data,
        )
    }

    fn clCreateContextFromType(
        list: *const isize, kind: u64, notify: Option<Notify>, data: *mut c_void
    ) -> Handle<Context> {
        if notify.is_none() && !data.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let named = properties(list)
            .as_chunks::<2>()
            .0
            .iter()
            .find(|pair| pair[0] == codes::CONTEXT_PLATFORM as isize)
            .map(|pair| pair[1] as Handle<Platform>);
        let first = platform::all().first().map(|platform| platform.pointer());
        let platform = named.or(first).ok_or(codes::INVALID_PLATFORM)?;
        let mut devices = vec![null_mut(); get(platform)?.it.devices.len()];
        let mut count = 0;
        let code = platform::clGetDeviceIDs(
            platform,
            kind,
            devices.len() as u32,
            devices.as_mut_ptr(),
            &raw mut count,
        );
        if code != 0 {
            return Err(code);
        }
        devices.truncate(count as usize);
        create(list, &devices, notify, data)
    }

    fn clRetainContext(context: Handle<Context>) {
        object::retain(context)
    }

    fn clReleaseContext(context: Handle<Context>) {
        object::release(context)
    }

    fn clGetContextInfo(
        context: Handle<Context>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let context = get(context)?;
        let devices = &context.it.devices;
        let answer = match name {
            codes::CONTEXT_REFERENCE_COUNT => bytes(&[context.count()]),
            codes::CONTEXT_NUM_DEVICES => bytes(&[devices.len() as u32]),
            codes::CONTEXT_DEVICES => bytes(
                &devices
                    .iter()
                    .map(|device| device.pointer())
                    .collect::<Vec<_>>(),
            ),
            codes::CONTEXT_PROPERTIES => bytes(&context.it.properties),
            _ => ask(Target::Context(context.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clSetContextDestructorCallback(
        context: Handle<Context>, notify: Option<extern "C" fn(Handle<Context>, *mut c_void)>,
        data: *mut c_void
    ) {
        let context = get(context)?;
        let entry: ContextDestructor = (notify.ok_or(codes::INVALID_VALUE)?, data as usize);
        let mut destructors = context.it.destructors.lock_unpoisoned();
        destructors.push(entry);
        Ok(())
    }
}

fn queue(
    context: Handle<Context>,
    device: Handle<Device>,
    properties: u64,
    further: Vec<u64>,
    array: Vec<u64>,
) -> Outcome<Handle<Queue>> {
    let (context, device) = (get(context)?, get(device)?);
    if !context
        .it
        .devices
        .iter()
        .any(|one| one.it.id == device.it.id)
    {
        return Err(codes::INVALID_DEVICE);
    }
    let known = codes::QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE
        | codes::QUEUE_PROFILING_ENABLE
        | codes::QUEUE_ON_DEVICE
        | codes::QUEUE_ON_DEVICE_DEFAULT;
    if properties & !known != 0 {
        return Err(codes::INVALID_VALUE);
    }
    if properties & codes::QUEUE_ON_DEVICE != 0 {
        return Err(codes::INVALID_QUEUE_PROPERTIES);
    }
    let link = link::connected()?;
    let id = QueueId(link.state.ids.queues.take());
    let asked = link.ask(&CreateQueue {
        id,
        context: context.it.id,
        device: device.it.id,
        properties,
        further,
    });
    let queue = Object::handle(Queue {
        id,
        context: context.keep(),
        device: device.keep(),
        properties,
        array,
        progress: Progress::default(),
    });
    if let Err(code) = asked {
        object::release(queue)?;
        return Err(code);
    }
    Ok(queue)
}

entry_points! {
    fn clCreateCommandQueue(
        context: Handle<Context>, device: Handle<Device>, properties: u64
    ) -> Handle<Queue> {
        queue(context, device, properties, Vec::new(), Vec::new())
    }
}

pub extern "C" fn clCreateCommandQueueWithProperties(
    context: Handle<Context>,
    device: Handle<Device>,
    list: *const isize,
    errcode_ret: *mut i32,
) -> Handle<Queue> {
    let all: Vec<u64> = properties(list).into_iter().map(|p| p as u64).collect();
    let (mut own, mut further) = (0, Vec::new());
    for pair in all.as_chunks::<2>().0 {
        if pair[0] == u64::from(codes::QUEUE_PROPERTIES) {
            own = pair[1];
        } else {
            further.extend(pair);
        }
    }
    let array = if list.is_null() {
        Vec::new()
    } else {
        all.into_iter().chain([0]).collect()
    };
    handle(|| queue(context, device, own, further, array), errcode_ret)
}

entry_points! {
    fn clRetainCommandQueue(queue: Handle<Queue>) {
        object::retain(queue)
    }

    fn clReleaseCommandQueue(queue: Handle<Queue>) {
        flush(&get(queue)?.it)?;
        object::release(queue)
    }

    fn clGetCommandQueueInfo(
        queue: Handle<Queue>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let queue = get(queue)?;
        let answer = match name {
            codes::QUEUE_CONTEXT => bytes(&[queue.it.context.pointer()]),
            codes::QUEUE_DEVICE => bytes(&[queue.it.device.pointer()]),
            codes::QUEUE_REFERENCE_COUNT => bytes(&[queue.count()]),
            codes::QUEUE_PROPERTIES => bytes(&[queue.it.properties]),
            codes::QUEUE_PROPERTIES_ARRAY => bytes(&queue.it.array),
            codes::QUEUE_SIZE => return Err(codes::INVALID_COMMAND_QUEUE),
            codes::QUEUE_DEVICE_DEFAULT => bytes(&[0usize]),
            _ => ask(Target::Queue(queue.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }
}

/// Submits the queue's pending commands to the device.
fn flush(queue: &Queue) -> Outcome {
    if queue.progress.is_flushed() {
        return Ok(());
    }
    let mark = queue.progress.mark();
    link::connected()?.post(&Flush { queue: queue.id })?;
    queue.progress.flushed(mark);
    Ok(())
}

entry_points! {
    fn clFlush(queue: Handle<Queue>) {
        get(queue).and_then(|queue| flush(&queue.it))
    }

    fn clFinish(queue: Handle<Queue>) {
        let queue = &get(queue)?.it;
        if queue.progress.is_idle() {
            return Ok(());
        }
        let mark = queue.progress.mark();
        link::connected()?.ask(&Finish { queue: queue.id })?;
        queue.progress.done(mark);
        Ok(())
    }
}

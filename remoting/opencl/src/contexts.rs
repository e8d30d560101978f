//! Devices, contexts and queues.

use std::{ptr::null_mut, sync::Arc};

use remoting_proto::apis::opencl::{
    calls::{ContextId, CreateContext, CreateQueue, CreateSubDevices, DeviceId, Offered, QueueId},
    codes,
};

use super::{
    Server,
    callbacks::{self, Reporter},
    driver::{api::Handle, cl, outcome},
    freed::End,
    objects::{Context, Device, Queue, keep, made},
    provenance::{ContextRecord, DeviceRecord},
};

impl Server {
    pub(crate) fn offered(&self) -> Vec<Vec<Offered>> {
        self.backend
            .platforms
            .iter()
            .map(|platform| platform.devices.clone())
            .collect()
    }

    pub(crate) fn raw_devices(&self, ids: &[DeviceId]) -> Result<Vec<Handle>, i32> {
        ids.iter()
            .map(|id| self.backend.devices.get(id.0).map(|device| device.raw))
            .collect()
    }

    pub(crate) fn device_records(&self, ids: &[DeviceId]) -> Result<Vec<Arc<DeviceRecord>>, i32> {
        ids.iter()
            .map(|id| {
                self.backend
                    .devices
                    .get(id.0)
                    .map(|device| Arc::clone(&device.record))
            })
            .collect()
    }

    pub(crate) fn platform_version(&self, index: usize) -> u32 {
        self.backend
            .platforms
            .get(index)
            .map_or(10, |platform| platform.version)
    }

    pub(crate) fn create_sub_devices(&mut self, call: &CreateSubDevices) -> Result<u32, i32> {
        for id in &call.ids {
            self.backend.devices.check(id.0)?;
        }
        let device = self.backend.devices.get(call.device.0)?;
        let (platform, svm, of) = (device.platform, device.svm, Arc::clone(&device.record));
        let mut properties: Vec<isize> = call.properties.iter().map(|p| *p as isize).collect();
        properties.push(0);
        let mut count = 0;
        let mut raws = vec![0; call.ids.len()];
        let pointer = if raws.is_empty() {
            null_mut()
        } else {
            raws.as_mut_ptr()
        };
        outcome(cl!(
            self.backend.api,
            clCreateSubDevices(
                device.raw,
                properties.as_ptr(),
                raws.len() as u32,
                pointer,
                &raw mut count,
            )
        ))?;
        let call = Arc::new(call.clone());
        let made = call.ids.iter().zip(raws).take(count as usize);
        for (place, (id, raw)) in made.enumerate() {
            let device = Device {
                raw,
                platform,
                svm,
                record: Arc::new(DeviceRecord::part(&of, &call, place)),
                pinned: false,
            };
            self.backend.devices.put(id.0, Ok(device));
        }
        Ok(count)
    }

    pub(crate) fn release_device(&mut self, id: DeviceId) -> Result<(), i32> {
        let device = self.backend.devices.get(id.0)?;
        if matches!(*device.record, DeviceRecord::Offered(_)) {
            return Ok(());
        }
        let device = self
            .backend
            .devices
            .take(id.0)
            .ok_or(codes::INVALID_DEVICE)?;
        outcome(cl!(self.backend.api, clReleaseDevice(device.raw)))
    }

    pub(crate) fn create_context(&mut self, call: CreateContext) -> Result<(), i32> {
        self.backend.contexts.check(call.id.0)?;
        let id = call.id;
        keep!(self.backend.contexts, id, self.make_context(call))
    }

    fn make_context(&mut self, call: CreateContext) -> Result<Context, i32> {
        // The driver may use the reporter as long as the context lives, possibly longer than the
        // context's number is in use. It is therefore kept for the next context with this number.
        let (backend, board) = (&mut self.session.backend, &self.session.board);
        let reporter = backend
            .reporters
            .entry(call.id)
            .or_insert_with(|| Reporter::new(board, call.id));
        let reporter: *mut Reporter = &raw mut **reporter;
        let devices = self.raw_devices(&call.devices)?;
        let first = call.devices.first().ok_or(codes::INVALID_VALUE)?;
        let platform = self.backend.devices.get(first.0)?.platform;
        for id in &call.devices {
            // Drivers of different platforms know nothing of each other.
            if self.backend.devices.get(id.0)?.platform != platform {
                return Err(codes::INVALID_DEVICE);
            }
        }
        let mut properties = [0isize; 3];
        if let Some(id) = call.platform {
            let named = self
                .backend
                .platforms
                .get(id.0 as usize)
                .ok_or(codes::INVALID_PLATFORM)?;
            properties = [codes::CONTEXT_PLATFORM as isize, named.raw as isize, 0];
        }
        let mut code = 0;
        let raw = cl!(
            self.backend.api,
            clCreateContext(
                properties.as_ptr(),
                devices.len() as u32,
                devices.as_ptr(),
                Some(callbacks::report),
                reporter.cast(),
                &raw mut code,
            )
        );
        let raw = made(raw, code)?;
        for id in &call.devices {
            self.session
                .backend
                .devices
                .get_mut(id.0)?
                .pin(&self.session.backend.api);
        }
        let svm = |id: &DeviceId| {
            self.backend
                .devices
                .get(id.0)
                .is_ok_and(|device| device.svm)
        };
        Ok(Context {
            raw,
            svm: call.devices.iter().any(svm),
            record: Arc::new(ContextRecord {
                devices: self.device_records(&call.devices)?,
                call,
            }),
            platform,
        })
    }

    pub(crate) fn release_context(&mut self, id: ContextId) -> Result<(), i32> {
        match self.backend.contexts.take(id.0) {
            Some(context) => outcome(cl!(self.backend.api, clReleaseContext(context.raw))),
            None => Ok(()),
        }
    }

    pub(crate) fn create_queue(&mut self, call: CreateQueue) -> Result<(), i32> {
        self.backend.queues.check(call.id.0)?;
        let id = call.id;
        keep!(self.backend.queues, id, self.make_queue(call))
    }

    fn make_queue(&self, call: CreateQueue) -> Result<Queue, i32> {
        // Pairs of names and values. A second value for the queue's execution mode is refused.
        let (pairs, rest) = call.further.as_chunks();
        let wrong = |[name, _]: &[u64; 2]| [0, codes::QUEUE_PROPERTIES.into()].contains(name);
        if !rest.is_empty() || pairs.iter().any(wrong) {
            return Err(codes::INVALID_VALUE);
        }
        let context = self.backend.contexts.get(call.context.0)?;
        let (home, in_context) = (context.home(), Arc::clone(&context.record));
        let context = home.raw;
        let &Device {
            raw: device,
            platform,
            svm,
            record: ref on_device,
            ..
        } = self.backend.devices.get(call.device.0)?;
        if platform != home.platform {
            return Err(codes::INVALID_DEVICE);
        }
        if !call.further.is_empty() && self.platform_version(platform) < 20 {
            return Err(codes::INVALID_QUEUE_PROPERTIES);
        }
        let mut code = 0;
        let raw = if call.further.is_empty() {
            cl!(
                self.backend.api,
                clCreateCommandQueue(context, device, call.properties, &raw mut code)
            )
        } else {
            let mut properties = vec![u64::from(codes::QUEUE_PROPERTIES), call.properties];
            properties.extend(&call.further);
            properties.push(0);
            cl!(
                self.backend.api,
                clCreateCommandQueueWithProperties(
                    context,
                    device,
                    properties.as_ptr(),
                    &raw mut code,
                )
            )
        };
        Ok(Queue {
            raw: made(raw, code)?,
            home,
            svm,
            made: call,
            context: in_context,
            device: Arc::clone(on_device),
            end: End::default(),
            deferred: None,
        })
    }

    pub(crate) fn release_queue(&mut self, id: QueueId) -> Result<(), i32> {
        for (stage, queue) in std::mem::take(&mut self.backend.unmarked) {
            self.stage_behind(stage, queue);
        }
        // Nothing will tell when what is left of this queue's commands ends: their stages stay in use.
        self.backend.unmarked.retain(|(_, queue)| *queue != id);
        match self.backend.queues.take(id.0) {
            Some(mut queue) => {
                self.part(&mut queue);
                outcome(cl!(self.backend.api, clReleaseCommandQueue(queue.raw)))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::{Cell, RefCell},
        slice,
    };

    use super::*;
    use crate::{driver::Api, testing};

    const PROPERTIES: u64 = codes::QUEUE_PROPERTIES as u64;
    /// A property that only the driver knows, and its value.
    const FURTHER: [u64; 2] = [0x1094, 7];

    thread_local! {
        static TOLD: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    }

    /// Records the properties passed for a queue.
    unsafe extern "C" fn create(
        _: Handle,
        _: Handle,
        properties: *const u64,
        code: *mut i32,
    ) -> Handle {
        // SAFETY: the worker passes pairs and a terminating zero, and space for the code.
        unsafe {
            let pairs = (0..).step_by(2).find(|at| *properties.add(*at) == 0);
            let told = slice::from_raw_parts(properties, pairs.unwrap());
            TOLD.replace(told.to_vec());
            code.write(0);
        }
        1
    }

    /// Makes a worker create a queue. Returns its answer, and the properties that the driver
    /// received.
    fn queue(further: &[u64]) -> (Result<(), i32>, Vec<u64>) {
        let (mut server, ..) = testing::server_before(Api::null().with_queues(create));
        let (context, device) = (ContextId(0), DeviceId(0));
        server
            .create_context(CreateContext {
                id: context,
                devices: vec![device],
                platform: None,
            })
            .unwrap();
        let made = server.create_queue(CreateQueue {
            id: QueueId(0),
            context,
            device,
            properties: 2,
            further: further.to_vec(),
        });
        (made, TOLD.take())
    }

    thread_local! {
        /// References to sub-devices that the worker has taken, minus those that it has returned.
        static TAKEN: Cell<i32> = const { Cell::new(0) };
    }

    unsafe extern "C" fn retain_part(_: Handle) -> i32 {
        TAKEN.set(TAKEN.get() + 1);
        0
    }

    unsafe extern "C" fn release_part(_: Handle) -> i32 {
        TAKEN.set(TAKEN.get() - 1);
        0
    }

    /// What remains of the driver's one reference to a sub-device after the application has
    /// released it, with the given number of contexts created on it.
    fn left_of_part(contexts: u32) -> i32 {
        let api = Api::null().with_parts(retain_part, release_part);
        let (mut server, ..) = testing::server_before(api);
        let part = DeviceId(1);
        let call = CreateSubDevices {
            device: DeviceId(0),
            properties: vec![0x1086, 1],
            ids: vec![part],
        };
        server.create_sub_devices(&call).unwrap();
        for id in (0..contexts).map(ContextId) {
            let call = CreateContext {
                id,
                devices: vec![part],
                platform: None,
            };
            server.create_context(call).unwrap();
            server.release_context(id).unwrap();
        }
        server.release_device(part).unwrap();
        1 + TAKEN.replace(0)
    }

    #[test]
    fn a_part_of_a_device_outlives_the_contexts_that_were_made_on_it() {
        assert_eq!(left_of_part(1), 1);
        assert_eq!(left_of_part(5), 1);
        // Nothing uses this one.
        assert_eq!(left_of_part(0), 0);
    }

    #[test]
    fn further_properties_of_a_queue_are_passed_on_behind_whether_it_is_in_order() {
        let told = vec![PROPERTIES, 2, FURTHER[0], FURTHER[1]];
        assert_eq!(queue(&FURTHER), (Ok(()), told));
    }

    #[test]
    fn a_context_has_devices_of_one_platform_and_so_have_its_queues() {
        let (mut server, ..) = testing::server();
        let foreign = Device {
            raw: 99,
            platform: 1,
            svm: true,
            record: Arc::new(DeviceRecord::Offered(DeviceId(1))),
            pinned: false,
        };
        server.backend.devices.put(1, Ok(foreign));
        let mut make = |id, devices: &[u32]| {
            server.create_context(CreateContext {
                id: ContextId(id),
                devices: devices.iter().copied().map(DeviceId).collect(),
                platform: None,
            })
        };
        assert_eq!(make(0, &[0, 1]), Err(codes::INVALID_DEVICE));
        assert_eq!(make(1, &[0]), Ok(()));
        let queue = server.create_queue(CreateQueue {
            id: QueueId(0),
            context: ContextId(1),
            device: DeviceId(1),
            properties: 0,
            further: Vec::new(),
        });
        assert_eq!(queue, Err(codes::INVALID_DEVICE));
    }

    #[test]
    fn a_queue_is_not_told_twice_whether_it_is_in_order_nor_half_a_pair() {
        for wrong in [
            &[PROPERTIES, 1][..],
            &[FURTHER[0], FURTHER[1], PROPERTIES, 0],
            &FURTHER[..1],
            // A terminator that is not the last word.
            &[0, 0, PROPERTIES, 1],
        ] {
            let refused = (Err(codes::INVALID_VALUE), Vec::new());
            assert_eq!(queue(wrong), refused, "{wrong:x?}");
        }
    }
}

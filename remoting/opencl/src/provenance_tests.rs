//! Tests of what a worker records about devices, contexts, buffers and images.

use remoting_proto::{
    apis::opencl::calls::{
        BuildProgram, ContextId, CreateBuffer, CreateImage, CreateProgram, CreateQueue,
        CreateSampler, CreateSubBuffer, ImageShape, MemId, ProgramId, ProgramOrigin, QueueId,
        ReleaseMem, SamplerId,
    },
    wire::{Blob, Header},
};

use super::*;
use crate::{Server, records::Origin, testing};

/// The property by which a test tells sub-devices apart.
const BY: u64 = 0x1086;

fn part(server: &mut Server, of: u32, id: u32, property: u64) {
    let call = CreateSubDevices {
        device: DeviceId(of),
        properties: vec![BY, property],
        ids: vec![DeviceId(id)],
    };
    assert_eq!(server.create_sub_devices(&call), Ok(1));
}

fn context(server: &mut Server, device: u32) {
    server
        .create_context(CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(device)],
            platform: None,
        })
        .unwrap();
}

fn buffer(server: &mut Server, id: u32, size: u64) {
    server
        .create_buffer(CreateBuffer {
            id: MemId(id),
            context: ContextId(0),
            flags: 0,
            size,
            contents: None,
            lives: None,
            svm: None,
        })
        .unwrap();
}

fn release(server: &mut Server, id: u32) {
    let release = ReleaseMem {
        id: MemId(id),
        callback: None,
    };
    server.release_mem(&release).unwrap();
}

/// The property of a sub-device.
fn property(device: &DeviceRecord) -> Option<u64> {
    match device {
        DeviceRecord::Offered(_) => None,
        DeviceRecord::Part(part) => Some(part.call.properties[1]),
    }
}

#[test]
fn objects_keep_their_context_and_its_devices_when_others_get_the_numbers() {
    let (mut server, ..) = testing::server();
    let (device, id) = (DeviceId(1), ContextId(0));
    part(&mut server, 0, 1, 7);
    context(&mut server, 1);
    buffer(&mut server, 0, 64);
    server
        .create_queue(CreateQueue {
            id: QueueId(0),
            context: id,
            device,
            properties: 0,
            further: Vec::new(),
        })
        .unwrap();
    server
        .create_sampler(CreateSampler {
            id: SamplerId(0),
            context: id,
            normalized: true,
            addressing: 0,
            filter: 0,
        })
        .unwrap();
    server
        .create_program(CreateProgram {
            id: ProgramId(0),
            context: id,
            origin: ProgramOrigin::BuiltIn(vec![device], Blob(b"k".to_vec())),
        })
        .unwrap();
    let header = Header {
        length: 0,
        opcode: 0,
        flags: Default::default(),
        sequence: 0,
    };
    let build = BuildProgram {
        id: ProgramId(0),
        devices: vec![device],
        options: Blob(Vec::new()),
        folders: 0,
        included: Vec::new(),
    };
    server.build_program(header, &build).unwrap();
    while server.backend.building > 0 {
        server.notices().unwrap();
    }
    server.release_context(id).unwrap();
    server.release_device(device).unwrap();
    part(&mut server, 0, 1, 8);
    context(&mut server, 1);

    let program = &server.backend.programs.get(0).unwrap().record;
    let queue = server.backend.queues.get(0).unwrap();
    let contexts = [
        &server.backend.mems.get(0).unwrap().record.context,
        &server.backend.samplers.get(0).unwrap().context,
        &queue.context,
        &program.context,
    ];
    let Origin::Created(_, for_devices) = &*program.origin else {
        panic!("it is {program:?}");
    };
    let built = program.built.as_deref().unwrap();
    for device in [&queue.device, &for_devices[0], &built.devices[0]] {
        assert_eq!(property(device), Some(7));
        assert!(Arc::ptr_eq(device, &contexts[0].devices[0]));
    }
    for context in contexts {
        assert!(Arc::ptr_eq(context, contexts[0]));
    }
    let now = &server.backend.contexts.get(0).unwrap().record;
    assert_eq!(property(&now.devices[0]), Some(8));
}

#[test]
fn parts_and_images_of_a_buffer_keep_it_when_another_one_gets_the_number() {
    let (mut server, ..) = testing::server();
    context(&mut server, 0);
    buffer(&mut server, 0, 4096);
    let sub = |id, origin| CreateSubBuffer {
        id: MemId(id),
        of: MemId(0),
        flags: 0,
        origin,
        size: 1024,
    };
    server.create_sub_buffer(sub(1, 0)).unwrap();
    server.create_sub_buffer(sub(2, 1024)).unwrap();
    server
        .create_image(CreateImage {
            id: MemId(3),
            context: ContextId(0),
            flags: 0,
            shape: ImageShape {
                order: 0x10B5,
                data: 0x10D7,
                kind: 0x10F6,
                extent: [64, 0, 0],
                layers: 0,
                of: Some(MemId(0)),
            },
            contents: None,
        })
        .unwrap();
    release(&mut server, 0);
    buffer(&mut server, 0, 1 << 20);
    let of = |id| {
        server
            .backend
            .mems
            .get(id)
            .unwrap()
            .record
            .of
            .clone()
            .unwrap()
    };
    let MadeMem::Buffer(call) = &of(1).call else {
        panic!("it is {:?}", of(1));
    };
    assert_eq!(call.size, 4096);
    assert!(Arc::ptr_eq(&of(1), &of(2)) && Arc::ptr_eq(&of(1), &of(3)));
    assert!(server.backend.mems.get(0).unwrap().record.of.is_none());
}

#[test]
fn parts_of_parts_are_lost_where_they_are_too_deep() {
    let call = Arc::new(CreateSubDevices {
        device: DeviceId(0),
        properties: Vec::new(),
        ids: Vec::new(),
    });
    let mut device = Arc::new(DeviceRecord::Offered(DeviceId(0)));
    let mut lost = 0;
    for _ in 0..2 * DEEPEST + 1 {
        device = Arc::new(DeviceRecord::part(&device, &call, 0));
        let DeviceRecord::Part(part) = &*device else {
            panic!("it is {device:?}");
        };
        lost += usize::from(part.of.is_none());
        assert!(device.depth() <= DEEPEST);
    }
    assert_eq!(lost, 2);
}

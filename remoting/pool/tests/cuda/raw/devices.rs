//! Requests about devices and the devices of addresses.

use remoting_proto::apis::cuda::{
    calls::{Allocate, PointerDevice, Select, Source},
    codes,
};

use super::Client;

#[test]
fn devices_that_were_not_offered_or_are_in_use_are_not_chosen() {
    let _turn = crate::library::turn();
    let mut client = Client::new();
    let context = client.context;
    // It has a context.
    let mut select = |devices: &[u32]| {
        let devices = devices.to_vec();
        client.ask(&Select { devices })
    };
    for devices in [&[0][..], &[], &[1], &[0, 0], &[u32::MAX]] {
        assert_eq!(select(devices), Err(codes::INVALID_VALUE), "{devices:?}");
    }
    client
        .forward("cuCtxDestroy_v2", &[context.into()])
        .unwrap();
    let mut select = |devices: &[u32]| {
        let devices = devices.to_vec();
        client.ask(&Select { devices })
    };
    for devices in [&[][..], &[1], &[0, 0], &[u32::MAX]] {
        assert_eq!(select(devices), Err(codes::INVALID_VALUE), "{devices:?}");
    }
    assert_eq!(select(&[0]), Ok(()));
}

#[test]
fn the_device_of_an_address_that_is_not_the_client_s_is_not_told() {
    let _turn = crate::library::turn();
    let mut client = Client::new();
    let at = client
        .ask(&Allocate {
            context: client.context,
            size: 64,
            source: Source::Device(),
        })
        .unwrap();
    let own = &raw const at as u64;
    for (address, told) in [
        (at, Ok(0)),
        (at + 63, Ok(0)),
        (at + 64, Err(codes::INVALID_VALUE)),
        (own, Err(codes::INVALID_VALUE)),
        (0, Err(codes::INVALID_VALUE)),
        (u64::MAX, Err(codes::INVALID_VALUE)),
    ] {
        assert_eq!(client.ask(&PointerDevice { address }), told, "{address:x}");
    }
}

//! What a client sends: request heads, paths and bodies.

#![no_main]

use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use vmm_api::{MAX_BODY, MAX_HEAD, PREFIX, parse_head, route, routes};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some(head)) = parse_head(bytes) {
        assert!(head.len <= bytes.len() && head.len <= MAX_HEAD && head.body <= MAX_BODY);
        let rest = &bytes[head.len..];
        let body = &rest[..head.body.min(rest.len())];
        let _ = route(&head.method, &head.path, body, Vec::new());
    }
    // The same bytes as the body of one of the existing requests.
    let mut input = Input::new(bytes);
    let which = usize::from(input.u8()) % routes().count();
    let Some(route_to) = routes().nth(which) else {
        return;
    };
    let path = format!("{PREFIX}{}", route_to.path);
    let body = input.bytes(bytes.len());
    let _ = route(route_to.method, &path, body, Vec::new());
});

//! What an application may send as CUDA's requests: each of them, and the parameters of each entry point
//! that travel by the API's definition.

#![no_main]

use gantry_remoting::{
    apis::cuda::{
        Cuda,
        calls::Request,
        forwarded::ALL,
        plan::{Argument, LARGEST, Parameter, Plan},
    },
    wire::Api,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for opcode in 0..64 {
        if let Ok(request) = Request::decode(opcode, bytes) {
            let _ = Cuda::window_use(&request);
            let _ = Cuda::cost(opcode, &request);
        }
    }
    let Some((number, bytes)) = bytes.split_first() else {
        return;
    };
    let number = u16::from(*number) % ALL.len() as u16;
    let Some(plan) = Plan::of(number) else {
        panic!("{} has no plan", ALL[usize::from(number)].symbol);
    };
    let Ok(arguments) = plan.decode(bytes) else {
        return;
    };
    assert_eq!(arguments.len(), plan.parameters.len());
    for (parameter, argument) in plan.parameters.iter().zip(&arguments) {
        if let (Parameter::Array { element, .. }, Argument::Memory { words, elements }) =
            (parameter, argument)
        {
            // The driver finds all that it will take to be there.
            assert!(elements * element.size <= words.len() * 8);
            assert!(elements * element.size <= LARGEST);
        }
    }
});

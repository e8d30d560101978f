//! What an application may send as CUDA requests: every request, and the parameters of every entry
//! point that are transferred according to the API's definition.

#![no_main]

use libfuzzer_sys::fuzz_target;
use remoting_proto::{
    apis::cuda::{
        Cuda,
        attributes::{LAYOUT, OPERATION, PREFERENCE, read},
        calls::Request,
        forwarded::ALL,
        libraries::{Heuristic, Library, Matmul},
        plan::{Argument, LARGEST, Parameter, Plan, SCALAR},
    },
    wire::{Api, Wire},
};

fuzz_target!(|bytes: &[u8]| {
    for opcode in 0..64 {
        if let Ok(request) = Request::decode(opcode, bytes) {
            let _ = Cuda::window_use(&request);
            let _ = Cuda::cost(opcode, &request);
        }
    }
    for table in [OPERATION, LAYOUT, PREFERENCE] {
        for (_, value) in read(table, bytes).unwrap_or_default() {
            assert!(value.len() <= 8);
        }
    }
    let _ = (Matmul::from_bytes(bytes), Heuristic::from_bytes(bytes));
    let Some((&[choice, low, high], bytes)) = bytes.split_first_chunk::<3>() else {
        return;
    };
    let number = u16::from_le_bytes([low, high]);
    let plan = match choice % 3 {
        2 => {
            let number = number % ALL.len() as u16;
            let plan = Plan::of(number);
            assert!(
                plan.is_some(),
                "{} has no plan",
                ALL[usize::from(number)].symbol
            );
            plan
        }
        library => Library::numbered(library).and_then(|library| Plan::of_library(library, number)),
    };
    let Some(plan) = plan else {
        return;
    };
    plan.likeness(bytes);
    let Ok(arguments) = plan.decode(bytes) else {
        return;
    };
    assert_eq!(arguments.len(), plan.parameters.len());
    for (parameter, argument) in plan.parameters.iter().zip(&arguments) {
        if let (Parameter::Array { element, .. }, Argument::Memory { words, elements }) =
            (parameter, argument)
        {
            // All memory that the driver will read is there.
            assert!(elements * element.size <= words.len() * 8);
            assert!(elements * element.size <= LARGEST);
        }
        if let (Parameter::Scalar { .. }, Argument::Memory { words, elements }) =
            (parameter, argument)
        {
            // This is the maximum that any library reads or writes.
            assert!(words.len() * 8 >= SCALAR && *elements <= SCALAR);
        }
    }
});

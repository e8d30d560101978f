//! A job that runs in turns and whose kernel is a host thread, for a machine without a GPU.
//!
//! `host_kernel SOCKET CLIENT WEIGHT STEPS [stubborn]` joins the arbiter at the socket, computes
//! this many steps of 20 us in its turns, and prints the number of turns. A stubborn job does not
//! stop when it is told to.

#[path = "../src/turns/host_kernel.rs"]
mod host_kernel;

use std::{error::Error, sync::atomic::Ordering};

use gloop::{
    state,
    turns::{self, Join, Member},
};

use crate::host_kernel::HostKernel;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, name, weight, steps, how @ ..] = words.as_slice() else {
        return Err("usage: host_kernel SOCKET CLIENT WEIGHT STEPS [stubborn]".into());
    };
    let join = Join {
        name: name.clone(),
        weight: weight.parse()?,
        latency: 0,
        sliced: false,
    };
    let steps = steps.parse()?;
    let mut member = Member::join(socket.into(), &join)?;
    let mut kernel = HostKernel::new(steps, steps, true);
    if how.iter().any(|word| word == "stubborn") {
        kernel = kernel.stubborn();
    }
    member.run(&mut kernel)?;
    let done = kernel.memory.done.load(Ordering::Relaxed);
    println!("{name}: {done} steps in {} turns", member.turns());
    Ok(())
}

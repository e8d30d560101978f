//! Gantry's development commands.
fn main() {}

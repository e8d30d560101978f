//! What the process may do: [`seccomp`] for its system calls, [`landlock`] for its files; [`open_files`]: its limit of
//! open file descriptors.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod landlock;
pub mod open_files;
pub mod seccomp;

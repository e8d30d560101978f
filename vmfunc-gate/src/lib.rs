//! A vCPU steps into a server VM, executes one of its handlers, and steps back, without a VM exit.
//!
//! Intel CPUs let a guest exchange its extended page table (EPT) for another one of a list with
//! the instruction VMFUNC (SDM volume 3, 26.5.6). Wormhole (Li et al., Journal of Software 31(10),
//! 2020) builds delegation between VMs on that. This crate has the parts that need no host kernel,
//! and is `no_std`, so that a program without an operating system drives the same code:
//!
//! - [`ept`]: builds the *server view*, the EPT that a client's vCPU uses inside a server, and
//!   the list of the EPTs that it may choose from;
//! - [`window`]: which pages lie where in both address spaces;
//! - [`trampoline`]: the code that changes sides.
//!
//! `bare/` beside this crate is a program that runs in VMX root operation and tries all of it.
//! What arms VMFUNC under KVM is not part of this crate.
//!
//! # Safety: who can do what
//!
//! Trusted are the hypervisor, which builds the views, and, by its clients, the server: a client
//! hands its vCPU over, and gets it back when the handler returns. A client is hostile.
//!
//! - **Addresses of other VMs.** The list has two valid entries, the client's own EPT and the
//!   server view. Any other index causes a VM exit (reason 59).
//! - **The handler table** and the trampoline cannot be written by either side, the trampoline
//!   cannot be read: EPT permissions, thus independent of both sides' own page tables. An attempt
//!   causes a VM exit (reason 48).
//! - **Entering elsewhere.** A client may execute VMFUNC in code of its own, in any ring, and at
//!   any address. Execution then goes on at the next address *of the server view*. Where nothing
//!   executable is mapped, that ends with a page fault (which the hypervisor has to intercept in
//!   the server view) or a VM exit, so map as executable the trampoline and the handlers' code,
//!   nothing else. **Within those pages a client
//!   chooses where it arrives, and all general registers.** Wormhole has this gap too; no
//!   setting of the CPU closes it. Thus a server view holds nothing that this one client must not
//!   read or change: one server process per client, as Wormhole forks them.
//! - **Entering by the trampoline's own instructions.** Everything after the first VMFUNC comes
//!   from the read-only table (stack, segment bases, MXCSR, PKRU, flags), nothing from the
//!   client's registers but the three arguments. The second VMFUNC, jumped to by a client that
//!   asks for the server view, would reach the code that restores the client's registers: it
//!   first reads which side it is on, from a page that differs, and stops with UD2.
//! - **The stack** of handlers is not mapped in the client's EPT, so that other vCPUs of the client cannot
//!   change return addresses. A server view with its stack belongs to one vCPU.
//! - **Arguments.** A client can call every handler with any arguments, and change shared memory
//!   while the handler runs. A handler reads each value once, then checks it.
//! - **What is left in registers** is cleared in both directions: general registers, and vector
//!   registers 0 to 15. Registers ZMM16 to ZMM31, the upper halves of ZMM0 to ZMM15 without AVX
//!   enabled, and x87 register contents are not; neither side should leave secrets there.

#![no_std]
#![deny(missing_docs)]

pub mod ept;
pub mod trampoline;
pub mod window;

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
//! - [`trampoline`]: the code that changes sides;
//! - [`client`]: what a client's program calls;
//! - `host` (feature `std`): what the processes of VMs ask of the kernel module.
//! - [`port`]: registers by which a guest's process asks its machine for the gate; `guest` (feature
//!   `guest`): the library of such processes, for Linux.
//!
//! Beside this crate: `module/` is the kernel module for Linux 6.1 and 6.12, which arms VMFUNC
//! under a KVM that is not changed. `bare/` is a program that runs in VMX root operation and tries
//! the views and the trampoline. `rig/` tries the module under KVM with small guests, and `gantry`
//! with Linux guests.
//! `cargo xtask test gate:` runs both in Bochs; `gate:bare`, `gate:6.1` and `gate:6.12` are its
//! parts.
//!
//! # How the module works
//!
//! - **Two probes of `kvm_intel`.** Before each VM entry of a client's vCPU, entry 0 of its list of
//!   EPTPs gets the root that KVM uses then, and VMFUNC is armed. After each VM exit, the VMCS
//!   field EPT pointer says whether the vCPU is in the server; exits from there are the module's.
//! - **The server view** is a page table of the module's own, from the server's memory slots with
//!   the pages pinned. KVM's roots are never lent out: KVM flushes the server's vCPUs only when it
//!   takes pages away. The server's process may change its memory (balloon, unmapping, fork): an
//!   MMU notifier takes the pages out of all views before the change, with INVEPT on all CPUs, and
//!   what is used again is found again in the process's memory. Slots that the VMM removes, though,
//!   are in the view until the server is registered anew. Writes by handlers are not in the
//!   server's dirty log: a server is not to be migrated or saved while it is paired. Memory that
//!   consists of 2 MiB pages of the host is pinned and mapped as such.
//! - **CR3** stays the client's, as VMFUNC does not change it: in the server view, its
//!   guest-physical address leads to the top page table of the server's process. Two guests of one
//!   kind both have memory there. Then the server's page is hidden, provided that ring 3 of the
//!   server's process does not use it; else the pair is refused, and another process of the client
//!   may have more luck. What is mapped is a read-only copy of the table's half for ring 3: the
//!   server's kernel does not exist in such a view.
//! - **Interrupts** that KVM would inject while the vCPU is in the server park the delegation: the
//!   client's kernel takes them in its own address space, as if they had come at an instruction of
//!   the trampoline that asks for the rest of the delegation (VMCALL). KVM's APICv is inhibited for
//!   clients, as the CPU would deliver interrupts in the server by itself.
//! - **Doorbells**: a handler's write to where the server's VM has an eventfd of KVM's (ioeventfd)
//!   and no memory rings it. That is the one exit of a driver whose device has its registers in
//!   memory that both share. The instruction has to be a plain MOV.
//! - **What cannot go on** ends the delegation, and its caller gets a reason: memory that the
//!   server does not have, exceptions, instructions that exit, a server that is gone.
//! - **Nobody waits for another VM's process.** What a process of one VM can delay, pinning its
//!   memory above all, happens under locks of its own pairs only, and can be interrupted by a
//!   signal that kills the waiting process.
//!
//! To install it: copy `module/` to `/usr/src/gantry-gate-0.1.0`, `dkms install gantry-gate/0.1.0`,
//! `modprobe gantry_gate`. It names what a host lacks in the kernel's log, and other kernels than
//! those above are refused when it is built. `gantry doctor` looks at the same things. The tests
//! have DKMS install it in folders of their own, for both kernels, and load what that made.
//!
//! # System calls of handlers
//!
//! Handlers are in the client's ring. What the CPU does at a system call or an exception comes from
//! the client's vCPU: the entry point (LSTAR), the exception table, the per-CPU data (GS base of
//! the kernel), the task state segment. These are virtual addresses, and in the server view they
//! lead to the server's memory. So the server's kernel works there, on the client's vCPU, as the
//! process that registered the handlers, if both kernels have the same addresses: two Linux guests
//! of one kernel image with the same end of RAM, one vCPU each, without KASLR and page-table
//! isolation. Two more conditions are enforced, otherwise the server's kernel is not in the view
//! and a system call or an exception ends the delegation: the client's page table hides no memory
//! of the server (a hole in the server's RAM is where the client's page table should be), and no
//! guest has PCIDs.
//!
//! A system call that waits does not come back: the server's kernel would choose another process,
//! or halt. Whatever ends a delegation in the server's kernel ends the server, too, as nobody gives
//! back what that kernel holds: an end of the client, an unpairing, a delegation that exits.
//! `cargo xtask test gate:linux` has two processes of `gantry` with stock guests of Debian's kernel.
//!
//! # Slow work
//!
//! The server's machine can let the server's own vCPUs run in between: the module takes the view
//! out of the list of EPTPs, waits until nobody is inside (some milliseconds, or it does nothing),
//! and puts it back when they have stopped. Delegations get [`client::Failure::Awake`] meanwhile.
//!
//! # Limits
//!
//! - The copy of a page table's half that is made where CR3 hides a page is as old as the pair:
//!   512 GiB of the server's address space that its process starts to use later are not in it.
//! - A thread that delegates is pinned to its vCPU. If the client's kernel moves it while it is
//!   parked, the delegation ends with [`client::Failure::Lost`].
//! - No nested guests in clients, no system-management mode.
//! - The module does not keep a server's vCPUs from running: its VMM has to stop them before it
//!   registers it, as `gantry` does. Neither VM is to be saved or migrated during a delegation.
//! - While parked, the client's kernel sees what the handler left in vector registers.
//!
//! # Safety: who can do what
//!
//! Trusted are the host's kernel with the module, the VMMs, and, by its clients, the server: a
//! client hands its vCPU over, with its system registers where the server's kernel is in the view,
//! and gets it back when the handler returns. A client is hostile. Its
//! VMM is trusted not to touch the vCPU's registers during a delegation; if it does, its own VM is
//! what breaks, inside of what the client may do anyway. Access to `/dev/gantry-gate` is root's; a
//! descriptor of a server is a permission to use that server, and is passed like any other.
//!
//! - **Addresses of other VMs.** The list has two valid entries, the client's own EPT and the
//!   server view. Any other index causes a VM exit (reason 59), is logged, and the client gets #UD.
//! - **The handler table** and the trampoline cannot be written by either side, the trampoline
//!   cannot be read in the server view: EPT permissions, thus independent of both sides' own page
//!   tables. A handler that tries is ended; a client that tries gets #GP, and it is logged. KVM
//!   maps the trampoline readable for the client, where it is no secret.
//! - **Entering elsewhere.** A client may execute VMFUNC in code of its own, in any ring, and at
//!   any address. Execution then goes on at the next address *of the server view*. Where nothing
//!   executable is mapped, that ends with a page fault in the server view, which no code there
//!   handles: the module turns the triple fault into #GP for the client. Map as executable
//!   the trampoline and the handlers' code, nothing else. **Within those pages a client
//!   chooses where it arrives, and all general registers.** Wormhole has this gap too; no
//!   setting of the CPU closes it. Thus a server view holds nothing that this one client must not
//!   read or change: one server process per client, as Wormhole forks them. The same is true for a
//!   client's kernel: in ring 0 it may also load another CR3 or IDTR first. All that is reached is
//!   what the view maps, the server's memory.
//! - **Entering by the trampoline's own instructions.** Everything after the first VMFUNC comes
//!   from the read-only table (stack, segment bases, MXCSR, PKRU, flags), nothing from the
//!   client's registers but the three arguments. The second VMFUNC, jumped to by a client that
//!   asks for the server view, would reach the code that restores the client's registers: it
//!   first reads which side it is on, from a page that differs, and stops with UD2.
//! - **The stack** of handlers is not mapped in the client's EPT, so that other vCPUs of the client
//!   cannot change return addresses. A server view with its stack belongs to one vCPU.
//! - **Arguments.** A client can call every handler with any arguments, and change shared memory
//!   while the handler runs. A handler reads each value once, then checks it.
//! - **What is left in registers** is cleared in both directions: general registers, and vector
//!   registers 0 to 15. Registers ZMM16 to ZMM31, the upper halves of ZMM0 to ZMM15 without AVX
//!   enabled, and x87 register contents are not; neither side should leave secrets there.
//! - **Side channels.** Nothing is flushed between the sides: what speculation can reach counts as
//!   reached. All of the server's memory is executable as far as the view is concerned; the
//!   server's page tables say what is.
//! - **Time.** A handler that never returns keeps the client's vCPU, not the host: interrupts of
//!   the host and of the client are taken. Unpairing, and the end of either process, end it.
//! - **Attacks that are tried by the tests:** indexes and functions that are not allowed, writes to
//!   table and trampoline from both sides, reads of the trampoline, VMFUNC at an address of the
//!   client's own, the second VMFUNC used to enter, handlers that use memory without backing,
//!   fault, or call the hypervisor; either process killed during a delegation; the module unloaded
//!   while in use; each call of the device with random arguments, by root and by another user.

#![no_std]
#![deny(missing_docs)]

#[cfg(any(feature = "std", test))]
extern crate std;

pub mod client;
pub mod ept;
#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "std")]
pub mod host;
pub mod port;
pub mod trampoline;
pub mod window;

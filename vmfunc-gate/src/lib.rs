//! A vCPU enters a server VM, executes one of its handlers, and returns, without a VM exit.
//!
//! Intel CPUs let a guest switch to another extended page table (EPT) from a list with the VMFUNC
//! instruction (SDM volume 3, 26.5.6). Wormhole (Li et al., Journal of Software 31(10), 2020)
//! builds delegation between VMs on that. This crate contains the parts that need no host kernel,
//! and is `no_std`, so that a program without an operating system can run the same code:
//!
//! - [`ept`]: builds the *server view*, the EPT that a client's vCPU uses inside a server, and the
//!   list of the EPTs that the vCPU may select from;
//! - [`window`]: the layout of pages in both address spaces;
//! - [`trampoline`]: the code that switches between the sides;
//! - [`client`]: what a client's program calls;
//! - `host` (feature `std`): what VMM processes request from the kernel module;
//! - [`port`]: the registers through which a guest's process requests the gate from its machine;
//!   `guest` (feature `guest`): the library for such processes, on Linux.
//!
//! Beside this crate: `module/` is the kernel module for Linux 6.1 and 6.12, which arms VMFUNC
//! under an unmodified KVM. `bare/` is a program that runs in VMX root operation and tests the
//! views and the trampoline. `rig/` tests the module under KVM with small guests, and `gantry` with
//! Linux guests. `cargo xtask test gate:` runs both in Bochs; `gate:bare`, `gate:6.1` and
//! `gate:6.12` are its parts.
//!
//! # How the module works
//!
//! - **Two probes of `kvm_intel`.** Before each VM entry of a client's vCPU, entry 0 of its EPTP
//!   list is set to the root that KVM uses at that time, and VMFUNC is armed. After each VM exit,
//!   the VMCS field EPT pointer tells whether the vCPU is in the server. Exits from there are
//!   handled by the module.
//! - **The server view** is a page table of the module's own, built from the server's memory slots
//!   with the pages pinned. KVM's roots are never lent out: KVM flushes only the server's vCPUs
//!   when it removes pages. The server's process may change its memory (balloon, unmapping, fork):
//!   an MMU notifier removes the pages from all views before the change, with INVEPT on all CPUs,
//!   and pages that are used again are looked up again in the process's memory. Slots that the VMM
//!   removes, however, remain in the view until the server is registered anew. Writes by handlers
//!   are not in the server's dirty log: a server must not be migrated or saved while it is paired.
//!   Memory that consists of 2 MiB pages of the host is pinned and mapped in such pages.
//! - **CR3** stays the client's, since VMFUNC does not change it: in the server view, its
//!   guest-physical address leads to the top-level page table of the server's process. Two guests
//!   of one kind both have memory at that address. The server's page is then hidden, provided that
//!   ring 3 of the server's process does not use it. Otherwise the pair is refused, and another
//!   process of the client may succeed. What is mapped is a read-only copy of the half of the table
//!   for ring 3: the server's kernel does not exist in such a view.
//! - **Interrupts** that KVM would inject while the vCPU is in the server park the delegation: the
//!   client's kernel takes them in its own address space, as if they had occurred at an instruction
//!   of the trampoline that asks for the rest of the delegation (VMCALL). KVM's APICv is inhibited
//!   for clients, since the CPU would otherwise deliver interrupts in the server by itself.
//! - **Doorbells**: a handler's write to an address where the server's VM has a KVM eventfd
//!   (ioeventfd) and no memory rings that eventfd. This is the only exit of a driver whose device
//!   has its registers in memory that both share. The instruction must be a plain MOV.
//! - **Whatever cannot continue** ends the delegation, and its caller gets a reason: memory that
//!   the server does not have, exceptions, instructions that exit, a server that is gone.
//! - **Nobody waits for another VM's process.** Anything that a process of one VM can delay, above
//!   all pinning its memory, happens under locks of its own pairs only, and can be interrupted by a
//!   signal that kills the waiting process.
//!
//! To install it: copy `module/` to `/usr/src/gantry-gate-0.1.0`, `dkms install gantry-gate/0.1.0`,
//! `modprobe gantry_gate`. The module logs what a host lacks to the kernel's log, and refuses to be
//! built for kernels other than those above. `gantry doctor` checks the same conditions. The tests
//! have DKMS install the module in folders of their own, for both kernels, and load the result.
//!
//! # System calls of handlers
//!
//! Handlers run in the client's ring. What the CPU does on a system call or an exception is
//! determined by the client's vCPU: the entry point (LSTAR), the exception table, the per-CPU data
//! (the kernel's GS base), the task state segment. These are virtual addresses, and in the server
//! view they lead to the server's memory. So the server's kernel runs there, on the client's vCPU,
//! as the process that registered the handlers, if both kernels have the same addresses: two Linux
//! guests of one kernel image with the same end of RAM, one vCPU each, without KASLR and page-table
//! isolation. Two more conditions are enforced; otherwise the server's kernel is not in the view,
//! and a system call or an exception ends the delegation: the client's page table must hide no
//! memory of the server (the server's RAM has a hole where the client's page table should be), and
//! no guest may have PCIDs.
//!
//! A system call that blocks does not return: the server's kernel would switch to another process,
//! or halt. Anything that ends a delegation in the server's kernel ends the server, too, since
//! nobody releases what that kernel holds: the end of the client, an unpairing, a delegation that
//! exits. `cargo xtask test gate:linux` runs two `gantry` processes with stock guests of Debian's
//! kernel.
//!
//! # Slow work
//!
//! The server's machine can let the server's own vCPUs run in between: the module removes the view
//! from the EPTP list, waits until nobody is inside (for some milliseconds; otherwise nothing
//! changes), and puts it back when the vCPUs have stopped. Meanwhile delegations get
//! [`client::Failure::Awake`].
//!
//! # Limits
//!
//! - The copy of half of a page table that is made where CR3 hides a page is as old as the pair: if
//!   the server's process later starts to use another 512 GiB of its address space, the copy does
//!   not contain that.
//! - A thread that delegates is pinned to its vCPU. If the client's kernel moves it while it is
//!   parked, the delegation ends with [`client::Failure::Lost`].
//! - No nested guests in clients, no system-management mode.
//! - The module does not prevent a server's vCPUs from running: its VMM has to stop them before it
//!   registers the server, as `gantry` does. Neither VM may be saved or migrated during a
//!   delegation.
//! - While parked, the client's kernel sees what the handler left in vector registers.
//!
//! # Safety: who can do what
//!
//! Trusted are the host's kernel with the module, the VMMs, and, by its clients, the server: a
//! client hands over its vCPU, with its system registers if the server's kernel is in the view, and
//! gets it back when the handler returns. A client is hostile. Its VMM is trusted not to change the
//! vCPU's registers during a delegation. If it does, only its own VM breaks, within what the client
//! may do anyway. Access to `/dev/gantry-gate` is root's. A descriptor of a server is a permission
//! to use that server, and is passed like any other descriptor.
//!
//! - **Addresses of other VMs.** The list has two valid entries, the client's own EPT and the
//!   server view. Any other index causes a VM exit (reason 59), is logged, and the client gets #UD.
//! - **The handler table** and the trampoline cannot be written by either side, and the trampoline
//!   cannot be read in the server view. This is enforced by EPT permissions, and thus independent
//!   of both sides' own page tables. A handler that tries is ended. A client that tries gets #GP,
//!   which is logged. KVM maps the trampoline readable for the client, where it is no secret.
//! - **Entering elsewhere.** A client may execute VMFUNC in code of its own, in any ring, and at
//!   any address. Execution then continues at the next address *of the server view*. If nothing
//!   executable is mapped there, this ends with a page fault in the server view, which no code
//!   there handles: the module turns the triple fault into #GP for the client. Map only the
//!   trampoline and the handlers' code as executable. **Within those pages a client chooses where
//!   it arrives, and all general registers.** Wormhole has this gap, too; no setting of the CPU
//!   closes it. So a server view contains nothing that this one client must not read or change: one
//!   server process per client, as Wormhole forks them. The same is true for a client's kernel: in
//!   ring 0 it may also load another CR3 or IDTR first. All that it can reach is what the view
//!   maps, the server's memory.
//! - **Entering through the trampoline's own instructions.** Everything after the first VMFUNC
//!   comes from the read-only table (stack, segment bases, MXCSR, PKRU, flags), and nothing from
//!   the client's registers except the three arguments. The second VMFUNC, if a client jumps to it
//!   and asks for the server view, would reach the code that restores the client's registers. That
//!   code first reads which side it is on, from a page that differs, and stops with UD2.
//! - **The stack** of handlers is not mapped in the client's EPT, so that other vCPUs of the client
//!   cannot change return addresses. A server view with its stack belongs to one vCPU.
//! - **Arguments.** A client can call every handler with any arguments, and change shared memory
//!   while the handler runs. A handler reads each value once, then checks it.
//! - **Registers** are cleared in both directions: general registers, and vector registers 0 to 15.
//!   Registers ZMM16 to ZMM31, the upper halves of ZMM0 to ZMM15 without AVX enabled, and x87
//!   register contents are not. Neither side should leave secrets there.
//! - **Side channels.** Nothing is flushed between the sides: whatever speculation can reach counts
//!   as reached. As far as the view is concerned, all of the server's memory is executable; the
//!   server's page tables determine what actually is.
//! - **Time.** A handler that never returns occupies the client's vCPU, but not the host:
//!   interrupts of the host and of the client are taken. Unpairing, or the end of either process,
//!   ends it.
//! - **Attacks that the tests try:** indexes and functions that are not allowed, writes to table
//!   and trampoline from both sides, reads of the trampoline, VMFUNC at an address of the client's
//!   own, the second VMFUNC used to enter, handlers that use memory without backing, fault, or call
//!   the hypervisor; either process killed during a delegation; the module unloaded while in use;
//!   each call of the device with random arguments, by root and by another user.

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

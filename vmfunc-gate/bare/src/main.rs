//! Tests the gate in VMX root operation: one client and one server, each with its own memory and
//! page tables, and the trampoline between them. Prints one line per check.

#![no_std]
#![no_main]

mod vmx;

use core::{
    arch::{asm, global_asm},
    fmt::{self, Write},
    ptr::NonNull,
};

use vmfunc_gate::{
    ept::{Access, Entries, Ept, EptpList, Frames, Gpa, Hpa, Size},
    trampoline,
    window::{self, PAGE, Private, Table},
};
use vmx::{Exit, Start, Vcpu};

global_asm!(include_str!("boot.s"), options(att_syntax));
global_asm!(
    include_str!("../../rig/src/round_trips.s"),
    include_str!("guest.s")
);

/// Reads a control register.
macro_rules! cr {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: ring 0.
        #[allow(unused_unsafe)] // Also used inside of unsafe blocks.
        unsafe { core::arch::asm!(concat!("mov {}, ", $name), out(reg) value) };
        value
    }};
}
pub(crate) use cr;

mod at {
    //! The addresses of the guests' code.

    macro_rules! addresses {
        ($($name:ident)*) => {
            mod symbols { unsafe extern "C" { $(pub static $name: u8;)* } }
            $(pub fn $name() -> u64 { &raw const symbols::$name as u64 })*
        };
    }
    addresses!(
        client_start client_end server_start server_end
        client_round_trips client_call client_state client_write_table client_read_trampoline
        client_wrong_index client_wrong_function client_wrong_entry client_leave_inwards
        handler_add handler_read handler_state handler_write_table handler_reach_client
    );
}

/// The address of the window in both address spaces.
const WINDOW: u64 = 0x40_0000_0000;
/// The address of a page that each side has, with different contents.
const DATA: u64 = 0x5000_0000;
/// The client's stack.
const CLIENT_STACK: u64 = 0x6000_0000;
/// The client's page table, in its guest-physical memory.
const CLIENT_CR3: u64 = 0x1000_0000;
/// The server's page table, in its guest-physical memory.
const SERVER_CR3: u64 = 0x1100_0000;
/// The index of a handler that the server does not have, which is also the number of handlers.
const HANDLERS: u64 = 5;

/// Memory above 16 MiB, allocated page by page. Identity-mapped.
pub struct Memory {
    next: u64,
}

impl Memory {
    /// Allocates a zeroed page.
    pub fn page(&mut self) -> u64 {
        let page = self.next;
        self.next += PAGE;
        // SAFETY: the machine has this memory, and nothing else uses it.
        unsafe { core::ptr::write_bytes(page as *mut u8, 0, PAGE as usize) };
        page
    }
}

/// Page tables are allocated from memory far away from the rest.
struct Tables(Memory);

// SAFETY: pages of `Memory` are zeroed, allocated only once, and identity-mapped.
unsafe impl Frames for Tables {
    fn allocate(&mut self) -> Option<Hpa> {
        Some(Hpa(self.0.page()))
    }

    fn free(&mut self, _: Hpa) {}

    fn entries(&self, frame: Hpa) -> NonNull<Entries> {
        NonNull::new(frame.0 as *mut Entries).unwrap_or(NonNull::dangling())
    }
}

/// One side: its EPT, and its guest page table.
struct Side<'m> {
    memory: &'m mut Memory,
    ept: Ept<Tables>,
    cr3: u64,
    next_table: u64,
    next_page: u64,
}

impl<'m> Side<'m> {
    fn new(memory: &'m mut Memory, tables: u64, cr3: u64) -> Self {
        let ept = Ept::new(Tables(Memory { next: tables })).expect("memory for an EPT");
        let mut side = Self {
            memory,
            ept,
            cr3,
            next_table: cr3,
            // Both sides have pages at the same guest-physical addresses.
            next_page: 0x2000_0000,
        };
        side.table();
        side
    }

    /// Allocates a page for a page table. The CPU need not write it, since the accessed flags are
    /// set already.
    fn table(&mut self) -> u64 {
        let gpa = self.next_table;
        self.next_table += PAGE;
        let page = self.memory.page();
        self.back(gpa, page, Access::READ);
        gpa
    }

    fn back(&mut self, gpa: u64, hpa: u64, access: Access) {
        let mapped = self.ept.map(Gpa(gpa), Hpa(hpa), Size::Small, access);
        mapped.expect("the address is free");
    }

    /// Maps a host page at a guest-virtual address.
    fn map(&mut self, gva: u64, hpa: u64, access: Access) {
        let gpa = self.next_page;
        self.next_page += PAGE;
        self.back(gpa, hpa, access);
        let mut table = self.cr3;
        for level in (0..4).rev() {
            let (at, _) = self.ept.translate(Gpa(table)).expect("a table of ours");
            let entry = (at.0 + (gva >> (12 + 9 * level) & 511) * 8) as *mut u64;
            // SAFETY: an entry of a page of `Memory`.
            unsafe {
                if level == 0 {
                    *entry = gpa | 0x67;
                } else {
                    if *entry == 0 {
                        *entry = self.table() | 0x67;
                    }
                    table = *entry & !0xfff;
                }
            }
        }
    }

    /// Maps a new page with a word at its start. Returns its host address.
    fn add(&mut self, gva: u64, word: u64, access: Access) -> u64 {
        let page = self.memory.page();
        // SAFETY: a page of ours.
        unsafe { (page as *mut u64).write(word) };
        self.map(gva, page, access);
        page
    }

    fn code(&mut self, start: u64, end: u64) {
        for page in (start..end).step_by(PAGE as usize) {
            self.map(page, page, Access::CODE);
        }
    }
}

/// A client and a server that are paired.
struct Pair {
    client: u64,
    server: u64,
    list: u64,
    features: u64,
    /// The client's own page of the window.
    private: *mut Private,
}

impl Pair {
    fn new(memory: &mut Memory, table_access: Access, features: u64) -> Self {
        let table = memory.page();
        // SAFETY: a page of ours, of the type's size; zeroes are valid.
        let contents = unsafe { &mut *(table as *mut Table) };
        contents.fs_base = 0x7770;
        contents.gs_base = 0x8880;
        contents.stack = WINDOW + window::STACK_END;
        contents.mxcsr = window::MXCSR;
        contents.features = features;
        contents.count = HANDLERS;
        contents.handlers[..HANDLERS as usize].copy_from_slice(&[
            at::handler_add(),
            at::handler_read(),
            at::handler_state(),
            at::handler_write_table(),
            at::handler_reach_client(),
        ]);
        let code = memory.page();
        let bytes = trampoline::code();
        // SAFETY: a page of ours, which the code fits into.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), code as *mut u8, bytes.len()) };
        let shared = [
            (window::TRAMPOLINE, code, Access::EXECUTE),
            (window::TABLE, table, table_access),
            (window::SHARED, memory.page(), Access::WRITE),
        ];
        let (tables, more) = (memory.next + (8 << 20), memory.next + (12 << 20));

        let mut client = Side::new(memory, tables, CLIENT_CR3);
        client.code(at::client_start(), at::client_end());
        let private = client.add(WINDOW + window::PRIVATE, window::CLIENT, Access::WRITE);
        client.add(DATA, 0x11, Access::WRITE);
        client.add(CLIENT_STACK, 0, Access::WRITE);
        for (offset, page, access) in shared {
            client.map(WINDOW + offset, page, access);
        }
        let client = client.ept;

        let mut server = Side::new(memory, more, SERVER_CR3);
        server.code(at::server_start(), at::server_end());
        server.add(WINDOW + window::PRIVATE, window::SERVER, Access::READ);
        server.add(DATA, 0x22, Access::WRITE);
        for page in (window::STACK..window::STACK_END).step_by(PAGE as usize) {
            server.add(WINDOW + page, 0, Access::WRITE);
        }
        for (offset, page, access) in shared {
            server.map(WINDOW + offset, page, access);
        }
        // The client's CR3 leads to the server's page table.
        let (top, _) = server
            .ept
            .translate(Gpa(SERVER_CR3))
            .expect("mapped at first");
        server.back(CLIENT_CR3, top.0, Access::READ);
        let server = server.ept;

        let list = memory.page();
        let (client_view, server_view) = (client.pointer(), server.pointer());
        // SAFETY: a page of ours, of the type's size.
        unsafe { (list as *mut EptpList).write(EptpList::new(client_view, server_view)) };
        memory.next += 16 << 20;
        // The views are in use for as long as the machine runs.
        core::mem::forget((client, server));
        Self {
            client: client_view,
            server: server_view,
            list,
            features,
            private: private as *mut Private,
        }
    }

    fn run(&self, vcpu: &mut Vcpu, rip: u64, argument: u64) -> Exit {
        // A delegation that was cut off before does not come back.
        // SAFETY: a page of ours, which the guest uses only while it runs.
        unsafe { (*self.private).busy = 0 };
        vcpu.run(&Start {
            rip,
            stack: CLIENT_STACK + PAGE,
            cr3: CLIENT_CR3,
            view: self.client,
            list: self.list,
            argument,
            protection_keys: self.features & window::FEATURE_PKU != 0,
        })
    }
}

const VMCALL: u64 = 18;
const EPT_VIOLATION: u64 = 48;
const VMFUNC: u64 = 59;
const EXCEPTION: u64 = 0;

/// The first serial port.
struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // Waits until the previous byte is sent.
            while inb(0x3fd) & 0x20 == 0 {}
            outb(0x3f8, byte);
        }
        Ok(())
    }
}

/// Reads from a port.
fn inb(port: u16) -> u8 {
    let value;
    // SAFETY: as for `outb`.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value) };
    value
}

/// Writes to a port.
fn outb(port: u16, value: u8) {
    // SAFETY: the serial port's and the emulator's ports have no effect on memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value) };
}

fn check(name: &str, good: bool, found: &dyn fmt::Debug) {
    let _ = match good {
        true => writeln!(Serial, "check {name} ... ok"),
        false => writeln!(Serial, "check {name} ... FAILED: {found:x?}"),
    };
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    // Serial port: 8 bits, 1 stop bit.
    outb(0x3fb, 3);
    let mut memory = Memory { next: 16 << 20 };
    let mut vcpu = Vcpu::new(&mut memory);
    for (features, name) in [
        (0, "SSE"),
        (
            window::FEATURE_AVX | window::FEATURE_PKU,
            "AVX and protection keys",
        ),
    ] {
        let pair = Pair::new(&mut memory, Access::READ, features);
        delegations(&mut vcpu, &pair, name);
    }
    let pair = Pair::new(&mut memory, Access::READ, 0);
    attacks(&mut vcpu, &pair);
    // Without the permission under test, the attack must succeed.
    let open = Pair::new(&mut memory, Access::WRITE, 0);
    let exit = open.run(&mut vcpu, at::client_write_table(), 0);
    check(
        "a handler table mapped writable is seen to be writable",
        exit.reason == VMCALL,
        &exit,
    );
    let _ = writeln!(Serial, "end");
    // Waits until the last byte is sent, too.
    while inb(0x3fd) & 0x40 == 0 {}
    vmx::shut_down()
}

fn delegations(vcpu: &mut Vcpu, pair: &Pair, name: &str) {
    const TRIPS: u64 = 1000;
    /// The instructions of the loop around the call.
    const LOOP: u64 = 10;
    let exit = pair.run(vcpu, at::client_round_trips(), TRIPS);
    let _ = writeln!(
        Serial,
        "figure {name}: instructions per round trip {}",
        exit.rax / TRIPS - LOOP
    );
    let good = exit.reason == VMCALL && exit.rbx == 0 && exit.view == pair.client;
    check_with(name, "1000 round trips, no exit", good, &exit);
    check_with(
        name,
        "at most 150 instructions each",
        exit.rax / TRIPS - LOOP <= 150,
        &exit,
    );
    let exit = pair.run(vcpu, at::client_state(), 0);
    let good = exit.reason == VMCALL && exit.rax == 0 && exit.rbx == 0;
    check_with(
        name,
        "each side has its own registers, stack and segment bases",
        good,
        &exit,
    );
    let exit = pair.run(vcpu, at::client_call(), 1);
    let good = exit.reason == VMCALL && exit.rax == 0x22 && exit.rbx == trampoline::DONE;
    check_with(
        name,
        "the client's CR3 finds the server's page table",
        good,
        &exit,
    );
    let exit = pair.run(vcpu, at::client_call(), HANDLERS);
    let good = exit.reason == VMCALL && exit.rax == 0 && exit.rbx == trampoline::NO_HANDLER;
    check_with(
        name,
        "a handler that does not exist is refused without an exit",
        good,
        &exit,
    );
}

fn check_with(name: &str, what: &str, good: bool, exit: &Exit) {
    let _ = match good {
        true => writeln!(Serial, "check {what} ({name}) ... ok"),
        false => writeln!(Serial, "check {what} ({name}) ... FAILED: {exit:x?}"),
    };
}

fn attacks(vcpu: &mut Vcpu, pair: &Pair) {
    let exit = pair.run(vcpu, at::client_write_table(), 0);
    let good =
        exit.reason == EPT_VIOLATION && exit.qualification & 2 != 0 && exit.view == pair.client;
    check("the client cannot write the handler table", good, &exit);
    let exit = pair.run(vcpu, at::client_call(), 3);
    let good =
        exit.reason == EPT_VIOLATION && exit.qualification & 2 != 0 && exit.view == pair.server;
    check(
        "the server's code cannot write the handler table",
        good,
        &exit,
    );
    let exit = pair.run(vcpu, at::client_read_trampoline(), 0);
    let good = exit.reason == EPT_VIOLATION && exit.qualification & 1 != 0;
    check("the trampoline is executed, never read", good, &exit);
    for (code, name) in [
        (at::client_wrong_index(), "an index above 1 exits"),
        (at::client_wrong_function(), "a VM function above 0 exits"),
    ] {
        let exit = pair.run(vcpu, code, 0);
        check(
            name,
            exit.reason == VMFUNC && exit.view == pair.client,
            &exit,
        );
    }
    let exit = pair.run(vcpu, at::client_wrong_entry(), 0);
    let page_fault = exit.reason == EXCEPTION && exit.interruption & 0xff == 14;
    check(
        "VMFUNC at a client's own address ends in the server view",
        page_fault && exit.view == pair.server,
        &exit,
    );
    let leave = WINDOW + trampoline::leave_offset();
    let exit = pair.run(vcpu, at::client_leave_inwards(), leave);
    let undefined = exit.reason == EXCEPTION && exit.interruption & 0xff == 6;
    check(
        "the leaving VMFUNC used to enter stops before a client's stack is used",
        undefined && exit.view == pair.server,
        &exit,
    );
    let exit = pair.run(vcpu, at::client_call(), 4);
    let page_fault = exit.reason == EXCEPTION && exit.interruption & 0xff == 14;
    check(
        "a handler does not reach the client's memory",
        page_fault && exit.view == pair.server,
        &exit,
    );
    // After all of that, the pair still works.
    let exit = pair.run(vcpu, at::client_round_trips(), 10);
    check(
        "delegations go on after attacks",
        exit.reason == VMCALL && exit.rbx == 0,
        &exit,
    );
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    let _ = writeln!(
        Serial,
        "check the program runs to its end ... FAILED: {info}"
    );
    vmx::shut_down()
}

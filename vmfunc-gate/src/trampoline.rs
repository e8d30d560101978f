//! The code that changes sides.
//!
//! It is copied into a page of its own and runs at [`window::TRAMPOLINE`], position-independent:
//! it finds the other pages of the [`window`] relative to itself. Calling convention: System V.
//! It needs FSGSBASE enabled (CR4 bit 16), as Linux has it since 5.9 on CPUs that have it.
//!
//! One round trip executes fewer than 150 instructions; `bare/` counts them.

use core::{arch::global_asm, mem::offset_of, slice};

use crate::window::{self, Private, Table};

/// What a delegation returned.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What the handler returned; 0 if there is no such handler.
    pub value: u64,
    /// [`DONE`] or [`NO_HANDLER`].
    pub status: u64,
}

/// [`Reply::status`]: the handler ran.
pub const DONE: u64 = 0;

/// [`Reply::status`]: the server has no handler of that index.
pub const NO_HANDLER: u64 = 1;

/// The trampoline as a function: index of the handler, and its two arguments.
pub type Delegate = unsafe extern "C" fn(handler: u64, first: u64, second: u64) -> Reply;

/// A handler: runs on the server's side, in the client's ring.
pub type Handler = extern "C" fn(first: u64, second: u64) -> u64;

global_asm!(
    ".pushsection .text.vmfunc_gate, \"ax\", @progbits",
    ".balign 4096",
    ".globl vmfunc_gate_start",
    "vmfunc_gate_start:",
    "endbr64",
    // Everything that the ABI says survives a call goes to the client's own stack.
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "pushfq",
    "sub rsp, 16",
    "stmxcsr [rsp]",
    "fnstcw [rsp + 4]",
    "mov r8, [rip + vmfunc_gate_start + {table} + {features}]",
    "test r8, {pku}",
    "jz 2f",
    "mov r9, rdx",
    "xor ecx, ecx",
    "rdpkru",
    "mov [rsp + 8], eax",
    "mov rdx, r9",
    "2:",
    "rdfsbase rax",
    "push rax",
    "rdgsbase rax",
    "push rax",
    "mov [rip + vmfunc_gate_start + {private} + {saved}], rsp",
    // The server's code sees the arguments, and nothing else of the client.
    "xor ebx, ebx",
    "xor ebp, ebp",
    "xor r9d, r9d",
    "xor r10d, r10d",
    "xor r11d, r11d",
    "xor r12d, r12d",
    "xor r13d, r13d",
    "xor r14d, r14d",
    "xor r15d, r15d",
    "test r8, {avx}",
    "jz 3f",
    "vzeroall",
    "jmp 4f",
    "3:",
    "pxor xmm0, xmm0",
    "pxor xmm1, xmm1",
    "pxor xmm2, xmm2",
    "pxor xmm3, xmm3",
    "pxor xmm4, xmm4",
    "pxor xmm5, xmm5",
    "pxor xmm6, xmm6",
    "pxor xmm7, xmm7",
    "pxor xmm8, xmm8",
    "pxor xmm9, xmm9",
    "pxor xmm10, xmm10",
    "pxor xmm11, xmm11",
    "pxor xmm12, xmm12",
    "pxor xmm13, xmm13",
    "pxor xmm14, xmm14",
    "pxor xmm15, xmm15",
    "4:",
    "xor eax, eax",
    "mov ecx, 1",
    "vmfunc",
    // The server view, or a client that jumped here: no register but rdi, rsi, rdx is used, and
    // those are arguments.
    "cmp qword ptr [rip + vmfunc_gate_start + {private} + {side}], {server}",
    "jne 9f",
    "mov rsp, [rip + vmfunc_gate_start + {table} + {stack}]",
    // No trap, alignment check or backward strings in the server.
    "push 0x202",
    "popfq",
    "fninit",
    "ldmxcsr [rip + vmfunc_gate_start + {table} + {mxcsr}]",
    "mov rax, [rip + vmfunc_gate_start + {table} + {fs}]",
    "wrfsbase rax",
    "mov rax, [rip + vmfunc_gate_start + {table} + {gs}]",
    "wrgsbase rax",
    "mov r8, [rip + vmfunc_gate_start + {table} + {features}]",
    "test r8, {pku}",
    "jz 5f",
    "mov r9, rdx",
    "xor ecx, ecx",
    "xor edx, edx",
    "mov eax, [rip + vmfunc_gate_start + {table} + {pkru}]",
    "wrpkru",
    "mov rdx, r9",
    "5:",
    "cmp rdi, [rip + vmfunc_gate_start + {table} + {count}]",
    // All ones if the index is valid. As data, so that a mispredicted branch reads entry 0.
    "sbb rax, rax",
    "and rdi, rax",
    "test rax, rax",
    "jz 6f",
    "lea r11, [rip + vmfunc_gate_start + {table} + {handlers}]",
    "mov rax, [r11 + rdi * 8]",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "call rax",
    "mov rbx, rax",
    "xor ebp, ebp",
    "jmp 7f",
    "6:",
    "xor ebx, ebx",
    "mov ebp, {no_handler}",
    "7:",
    "mov r8, [rip + vmfunc_gate_start + {table} + {features}]",
    "test r8, {avx}",
    "jz 3f",
    "vzeroall",
    "jmp 4f",
    "3:",
    "pxor xmm0, xmm0",
    "pxor xmm1, xmm1",
    "pxor xmm2, xmm2",
    "pxor xmm3, xmm3",
    "pxor xmm4, xmm4",
    "pxor xmm5, xmm5",
    "pxor xmm6, xmm6",
    "pxor xmm7, xmm7",
    "pxor xmm8, xmm8",
    "pxor xmm9, xmm9",
    "pxor xmm10, xmm10",
    "pxor xmm11, xmm11",
    "pxor xmm12, xmm12",
    "pxor xmm13, xmm13",
    "pxor xmm14, xmm14",
    "pxor xmm15, xmm15",
    "4:",
    "xor eax, eax",
    "xor ecx, ecx",
    ".globl vmfunc_gate_leave",
    "vmfunc_gate_leave:",
    "vmfunc",
    // The client's side, unless a client jumped to that VMFUNC with 1 in ecx.
    "cmp qword ptr [rip + vmfunc_gate_start + {private} + {side}], {client}",
    "jne 9f",
    "mov rsp, [rip + vmfunc_gate_start + {private} + {saved}]",
    "pop rax",
    "wrgsbase rax",
    "pop rax",
    "wrfsbase rax",
    "mov r8, [rip + vmfunc_gate_start + {table} + {features}]",
    "test r8, {pku}",
    "jz 8f",
    "mov eax, [rsp + 8]",
    "xor ecx, ecx",
    "xor edx, edx",
    "wrpkru",
    "8:",
    "fninit",
    "fldcw [rsp + 4]",
    "ldmxcsr [rsp]",
    "add rsp, 16",
    "popfq",
    "mov rax, rbx",
    "mov rdx, rbp",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    // What the handler left.
    "xor ecx, ecx",
    "xor esi, esi",
    "xor edi, edi",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "xor r10d, r10d",
    "xor r11d, r11d",
    "ret",
    "9:",
    "ud2",
    ".globl vmfunc_gate_end",
    "vmfunc_gate_end:",
    // Going back is an error, which a trampoline of more than a page would need.
    ".org vmfunc_gate_start + 4096",
    ".popsection",
    table = const window::TABLE,
    private = const window::PRIVATE,
    features = const offset_of!(Table, features),
    stack = const offset_of!(Table, stack),
    mxcsr = const offset_of!(Table, mxcsr),
    pkru = const offset_of!(Table, pkru),
    fs = const offset_of!(Table, fs_base),
    gs = const offset_of!(Table, gs_base),
    count = const offset_of!(Table, count),
    handlers = const offset_of!(Table, handlers),
    side = const offset_of!(Private, side),
    saved = const offset_of!(Private, stack),
    client = const window::CLIENT,
    server = const window::SERVER,
    avx = const window::FEATURE_AVX,
    pku = const window::FEATURE_PKU,
    no_handler = const NO_HANDLER,
);

unsafe extern "C" {
    static vmfunc_gate_start: u8;
    static vmfunc_gate_leave: u8;
    static vmfunc_gate_end: u8;
}

/// The trampoline's machine code, to be copied to the start of a page.
#[must_use]
pub fn code() -> &'static [u8] {
    let start = &raw const vmfunc_gate_start;
    let length = &raw const vmfunc_gate_end as usize - start as usize;
    // SAFETY: the symbols enclose the code above, which nothing writes.
    unsafe { slice::from_raw_parts(start, length) }
}

/// Offset of the VMFUNC instruction that leaves the server. Tests attack it.
#[must_use]
pub fn leave_offset() -> u64 {
    (&raw const vmfunc_gate_leave as usize - &raw const vmfunc_gate_start as usize) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fits_into_a_page_and_leaves_with_vmfunc() {
        let leave = leave_offset() as usize;
        assert!(code().len() <= window::PAGE as usize);
        assert_eq!(code()[leave..leave + 3], [0x0f, 0x01, 0xd4]);
    }

    #[test]
    fn has_exactly_two_vmfunc_instructions() {
        let found = code()
            .windows(3)
            .filter(|bytes| *bytes == [0x0f, 0x01, 0xd4]);
        assert_eq!(found.count(), 2);
    }
}

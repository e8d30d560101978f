/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The code that changes sides; see src/trampoline.rs, which describes it and its constants.
 *
 * Whoever includes it chooses the section and Intel syntax, and replaces the names of gate.h.
 */

.balign 4096
.globl vmfunc_gate_start
vmfunc_gate_start:
    endbr64
    /*
     * One delegation at a time: the saved state below and the server's stack exist once. A thread
     * that was interrupted in the server keeps them.
     */
    mov eax, 1
    xchg [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_BUSY], rax
    test eax, eax
    jnz 12f
    /* Everything that the ABI says survives a call goes to the client's own stack. */
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    pushfq
    sub rsp, 8
    stmxcsr [rsp]
    fnstcw [rsp + 4]
    mov r8, [rip + vmfunc_gate_start + GATE_TABLE + GATE_FEATURES]
    test r8, GATE_FEATURE_PKU
    jz 2f
    mov r9, rdx
    xor ecx, ecx
    rdpkru
    mov [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_PKRU], rax
    mov rdx, r9
2:
    /* Where the hypervisor finds them, if it has to bring the client back. */
    rdfsbase rax
    mov [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_FS], rax
    rdgsbase rax
    mov [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_GS], rax
    mov [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_STACK], rsp
    /* The server's code sees the arguments, and nothing else of the client. */
    xor ebx, ebx
    xor ebp, ebp
    xor r9d, r9d
    xor r10d, r10d
    xor r11d, r11d
    xor r12d, r12d
    xor r13d, r13d
    xor r14d, r14d
    xor r15d, r15d
    test r8, GATE_FEATURE_AVX
    jz 3f
    vzeroall
    jmp 4f
3:
    pxor xmm0, xmm0
    pxor xmm1, xmm1
    pxor xmm2, xmm2
    pxor xmm3, xmm3
    pxor xmm4, xmm4
    pxor xmm5, xmm5
    pxor xmm6, xmm6
    pxor xmm7, xmm7
    pxor xmm8, xmm8
    pxor xmm9, xmm9
    pxor xmm10, xmm10
    pxor xmm11, xmm11
    pxor xmm12, xmm12
    pxor xmm13, xmm13
    pxor xmm14, xmm14
    pxor xmm15, xmm15
4:
    xor eax, eax
    mov ecx, 1
    vmfunc
    /*
     * The server view, or a client that jumped here: no register but rdi, rsi, rdx is used, and
     * those are arguments.
     */
    cmp qword ptr [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SIDE], GATE_SERVER
    jne 9f
    mov rsp, [rip + vmfunc_gate_start + GATE_TABLE + GATE_STACK_TOP]
    /* No trap, alignment check or backward strings in the server. */
    push 0x202
    popfq
    fninit
    ldmxcsr [rip + vmfunc_gate_start + GATE_TABLE + GATE_MXCSR]
    mov rax, [rip + vmfunc_gate_start + GATE_TABLE + GATE_FS]
    wrfsbase rax
    mov rax, [rip + vmfunc_gate_start + GATE_TABLE + GATE_GS]
    wrgsbase rax
    mov r8, [rip + vmfunc_gate_start + GATE_TABLE + GATE_FEATURES]
    test r8, GATE_FEATURE_PKU
    jz 5f
    mov r9, rdx
    xor ecx, ecx
    xor edx, edx
    mov eax, [rip + vmfunc_gate_start + GATE_TABLE + GATE_PKRU]
    wrpkru
    mov rdx, r9
5:
    cmp rdi, [rip + vmfunc_gate_start + GATE_TABLE + GATE_COUNT]
    /* All ones if the index is valid. As data, so that a mispredicted branch reads entry 0. */
    sbb rax, rax
    and rdi, rax
    test rax, rax
    jz 6f
    lea r11, [rip + vmfunc_gate_start + GATE_TABLE + GATE_HANDLERS]
    mov rax, [r11 + rdi * 8]
    mov rdi, rsi
    mov rsi, rdx
    call rax
    mov rbx, rax
    xor ebp, ebp
    jmp 7f
6:
    xor ebx, ebx
    mov ebp, GATE_NO_HANDLER
7:
    mov r8, [rip + vmfunc_gate_start + GATE_TABLE + GATE_FEATURES]
    test r8, GATE_FEATURE_AVX
    jz 3f
    vzeroall
    jmp 4f
3:
    pxor xmm0, xmm0
    pxor xmm1, xmm1
    pxor xmm2, xmm2
    pxor xmm3, xmm3
    pxor xmm4, xmm4
    pxor xmm5, xmm5
    pxor xmm6, xmm6
    pxor xmm7, xmm7
    pxor xmm8, xmm8
    pxor xmm9, xmm9
    pxor xmm10, xmm10
    pxor xmm11, xmm11
    pxor xmm12, xmm12
    pxor xmm13, xmm13
    pxor xmm14, xmm14
    pxor xmm15, xmm15
4:
    xor eax, eax
    xor ecx, ecx
.globl vmfunc_gate_leave
vmfunc_gate_leave:
    vmfunc
    /* The client's side, unless a client jumped to that VMFUNC with 1 in ecx. */
11:
    cmp qword ptr [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SIDE], GATE_CLIENT
    jne 9f
    mov rsp, [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_STACK]
    mov rax, [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_GS]
    wrgsbase rax
    mov rax, [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_FS]
    wrfsbase rax
    mov r8, [rip + vmfunc_gate_start + GATE_TABLE + GATE_FEATURES]
    test r8, GATE_FEATURE_PKU
    jz 8f
    mov rax, [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_SAVED_PKRU]
    xor ecx, ecx
    xor edx, edx
    wrpkru
8:
    mov qword ptr [rip + vmfunc_gate_start + GATE_PRIVATE + GATE_BUSY], 0
    fninit
    fldcw [rsp + 4]
    ldmxcsr [rsp]
    add rsp, 8
    popfq
    mov rax, rbx
    mov rdx, rbp
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    /* What the handler left. */
    xor ecx, ecx
    xor esi, esi
    xor edi, edi
    xor r8d, r8d
    xor r9d, r9d
    xor r10d, r10d
    xor r11d, r11d
    ret
9:
    ud2
12:
    xor eax, eax
    mov edx, GATE_BUSY_REPLY
    ret
/*
 * The hypervisor lets the client go on here, on the client's side, with the delegation parked:
 * an interrupt is taken before the first instruction, which asks for the rest of the delegation.
 * Refused (another vCPU, or the server is gone), the delegation ends.
 */
.globl vmfunc_gate_parked
vmfunc_gate_parked:
    vmcall
    mov ebx, GATE_LOST
/*
 * The hypervisor lets the client go on here, on the client's side, when it ended the delegation.
 * The reason is in rbx.
 */
.globl vmfunc_gate_aborted
vmfunc_gate_aborted:
    mov ebp, GATE_ABORTED
    jmp 11b
.globl vmfunc_gate_end
vmfunc_gate_end:
    /* Going back is an error, which a trampoline of more than a page would need. */
    .org vmfunc_gate_start + 4096

# Code of the client: ring 3, mapped in the client's EPT only. Each entry point ends with VMCALL;
# its results are in rax and rbx. Its only argument is in rdi. The window is at 0x4000000000.
.section .client, "ax"
.macro vmfunc_as function, index
    mov eax, \function
    mov ecx, \index
    vmfunc
.endm

# rdi round trips: rax = instructions, rbx = wrong replies.
.globl client_round_trips
client_round_trips:
    mov r12, rdi
    xor r14d, r14d
    movabs rbp, 0x4000000000
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov r13, rax
    round_trips
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, r13
    mov rbx, r14
    vmcall

# Calls handler rdi with 7 and 8: rax = value, rbx = status.
.globl client_call
client_call:
    mov esi, 7
    mov edx, 8
    movabs rbp, 0x4000000000
    call rbp
    mov rbx, rdx
    vmcall

# Checks what has to survive: rax = bits of what did not, rbx = what the handler found to be wrong.
.globl client_state
client_state:
    mov eax, 0x1110
    wrfsbase rax
    mov eax, 0x2220
    wrgsbase rax
    sub rsp, 16
    mov dword ptr [rsp], 0x3f80
    ldmxcsr [rsp]
    mov word ptr [rsp], 0x77f
    fldcw [rsp]
    mov rax, -1
    movq xmm5, rax
    mov ebx, 1
    mov r12d, 3
    mov r13d, 4
    mov r14d, 5
    mov r15d, 6
    mov edi, 2
    movabs rbp, 0x4000000000
    std
    call rbp
    pushfq
    cld
    xor ecx, ecx
    pop rdx
    and edx, 0x400
    cmp edx, 0x400
    setne cl
    cmp ebx, 1
    setne dl
    or cl, dl
    cmp r12d, 3
    setne dl
    or cl, dl
    cmp r13d, 4
    setne dl
    or cl, dl
    cmp r14d, 5
    setne dl
    or cl, dl
    cmp r15d, 6
    setne dl
    or cl, dl
    movabs rsi, 0x4000000000
    cmp rbp, rsi
    setne dl
    or cl, dl
    mov rbx, rax
    rdfsbase rax
    cmp rax, 0x1110
    setne dl
    or cl, dl
    rdgsbase rax
    cmp rax, 0x2220
    setne dl
    or cl, dl
    stmxcsr [rsp]
    cmp dword ptr [rsp], 0x3f80
    setne dl
    or cl, dl
    fnstcw [rsp]
    cmp word ptr [rsp], 0x77f
    setne dl
    or cl, dl
    movzx eax, cl
    vmcall

.globl client_write_table
client_write_table:
    movabs rdx, 0x4000001000
    mov [rdx + 64], rdx
    vmcall

.globl client_read_trampoline
client_read_trampoline:
    movabs rdx, 0x4000000000
    mov rax, [rdx]
    vmcall

.globl client_wrong_index
client_wrong_index:
    vmfunc_as 0, 2
    vmcall

.globl client_wrong_function
client_wrong_function:
    vmfunc_as 1, 1
    vmcall

# VMFUNC at an address where the server view has no executable page.
.globl client_wrong_entry
client_wrong_entry:
    vmfunc_as 0, 1
    vmcall

# Makes the leaving VMFUNC (rdi) enter instead; the stack is the client's choice.
.globl client_leave_inwards
client_leave_inwards:
    xor eax, eax
    mov ecx, 1
    jmp rdi

# Code of the server: mapped in the server view only.
.section .server, "ax"
.globl handler_add
handler_add:
    lea rax, [rdi + rdi * 2]
    add rax, rsi
    ret

# Returns the word at an address that both sides have, with different contents.
.globl handler_read
handler_read:
    mov eax, 0x50000000
    mov rax, [rax]
    ret

# Returns 0 if segment bases, MXCSR, flags, stack, and cleared registers are as specified.
.globl handler_state
handler_state:
    xor edx, edx
    rdfsbase rax
    cmp rax, 0x7770
    setne dl
    rdgsbase rax
    cmp rax, 0x8880
    setne cl
    or dl, cl
    sub rsp, 8
    stmxcsr [rsp]
    cmp dword ptr [rsp], 0x1f80
    setne cl
    or dl, cl
    add rsp, 8
    pushfq
    pop rax
    test eax, 0x400
    setne cl
    or dl, cl
    mov rax, rbx
    or rax, rbp
    or rax, r12
    or rax, r13
    or rax, r14
    or rax, r15
    setne cl
    or dl, cl
    movq rax, xmm5
    test rax, rax
    setne cl
    or dl, cl
    lea rax, [rsp + 8]
    movabs rcx, 0x4000008000
    cmp rax, rcx
    setne cl
    or dl, cl
    movzx eax, dl
    ret

.globl handler_write_table
handler_write_table:
    movabs rdx, 0x4000001000
    mov [rdx + 64], rdx
    ret

# The client's stack.
.globl handler_reach_client
handler_reach_client:
    mov eax, 0x60000000
    mov rax, [rax]
    ret

# Code of the guests, copied into their memory: position-independent. The window is at 0x4000000000.
# Results are written to 0x40000. A write to 0x500000 ends the client's run.

.pushsection .rodata.rig, "a"

# ---- The client. rdi, rsi, rdx, rcx are arguments.
.globl rig_client
rig_client:
# Calls handler rdi with rsi, rdx once.
.globl rig_call
rig_call:
    movabs rbp, 0x4000000000
    call rbp
    mov rdi, rax
    mov rsi, rdx
# The results are in rdi and rsi.
rig_end:
    mov [0x40000], rdi
    mov [0x40008], rsi
    mov [0x500000], eax
1:  pause
    jmp 1b

# Calls handler 0 rdi times. Returns the number of wrong results.
.globl rig_many
rig_many:
    mov r12, rdi
    xor r14d, r14d
    movabs rbp, 0x4000000000
    round_trips
    mov rdi, r14
    xor esi, esi
    jmp rig_end

# Fills rdi bytes of shared memory from a seed in rsi, and has them summed and inverted by handler
# 1. Returns 0 if the sum is right, and the number of words that were not inverted.
.globl rig_transfer
rig_transfer:
    mov r12, rdi
    movabs rbx, 0x4000010000
    mov rax, rsi
    movabs rdx, 0x5851f42d4c957f2d
    xor ecx, ecx
    xor r13d, r13d
1:  imul rax, rdx
    add rax, 11
    mov [rbx + rcx], rax
    rol r13, 5
    xor r13, rax
    add rcx, 8
    cmp rcx, r12
    jb 1b
    mov r15, rsi
    mov edi, 1
    mov rsi, rbx
    mov rdx, r12
    movabs rbp, 0x4000000000
    call rbp
    sub rax, r13
    or rax, rdx
    mov rdi, rax
    mov rax, r15
    movabs rdx, 0x5851f42d4c957f2d
    xor ecx, ecx
    xor esi, esi
1:  imul rax, rdx
    add rax, 11
    mov r8, rax
    not r8
    cmp [rbx + rcx], r8
    je 2f
    inc rsi
2:  add rcx, 8
    cmp rcx, r12
    jb 1b
    jmp rig_end

# The same computation rsi times, with rdi steps each, once here and then in handler 2. Returns the
# number of results that differ, and bits of what did not survive.
rig_compute:
    mov r12, rdi
    mov r13, rsi
    mov esi, 77
    call rig_computation
    mov r14, rax
    xor ebx, ebx
    xor r15d, r15d
1:  mov edi, 2
    mov rsi, r12
    mov edx, 77
    movabs rbp, 0x4000000000
    mov rax, r14
    shr rax, 17
    wrfsbase rax
    call rbp
    cmp rax, r14
    je 2f
    inc rbx
2:  or r15, rdx
    rdfsbase rax
    mov rcx, r14
    shr rcx, 17
    xor rax, rcx
    or r15, rax
    dec r13
    jnz 1b
    mov rdi, rbx
    mov rsi, r15
    jmp rig_end

# Calls handler 8 with rdi steps, rsi times, whose system call returns the address of the kernel's
# data. Returns how often it was different, and bits of what did not survive.
rig_kernel_calls:
    mov r12, rdi
    mov r13, rsi
    xor ebx, ebx
    xor r15d, r15d
    movabs r14, 0xffff800012340000
1:  mov edi, 8
    xor esi, esi
    mov rdx, r12
    movabs rbp, 0x4000000000
    call rbp
    cmp rax, r14
    je 2f
    inc rbx
2:  or r15, rdx
    dec r13
    jnz 1b
    mov rdi, rbx
    mov rsi, r15
    jmp rig_end

# Ring 0: starts a periodic timer of rdi ns, and then runs in ring 3, with rsi steps, rdx times:
# rig_compute ...
.globl rig_timer
rig_timer:
    lea r11, [rip + rig_compute]
    jmp 1f
# ... or rig_kernel_calls.
.globl rig_timer_kernel
rig_timer_kernel:
    lea r11, [rip + rig_kernel_calls]
1:
    mov r8, rdi
    mov r9, rsi
    mov r10, rdx
    xor edx, edx
    mov eax, 0x1ff
    mov ecx, 0x80f
    wrmsr
    mov eax, 11
    mov ecx, 0x83e
    wrmsr
    mov eax, 0x20020
    mov ecx, 0x832
    wrmsr
    mov rax, r8
    mov ecx, 0x838
    wrmsr
    mov rdi, r9
    mov rsi, r10
    push 0x1b
    push 0x38000
    push 0x202
    push 0x23
    push r11
    iretq

# Ring 0: a timer of rdi ns, then handler 5 in ring 3.
.globl rig_timer_spin
rig_timer_spin:
    lea r11, [rip + rig_spin_call]
    jmp 1b
rig_spin_call:
    mov edi, 5
    jmp rig_call

# The timer's interrupt: counts. Stops in the middle of the first one, if requested.
.globl rig_tick
rig_tick:
    push rax
    push rcx
    push rdx
    inc qword ptr [0x41000]
    cmp qword ptr [0x41008], 0
    je 1f
    mov qword ptr [0x41008], 0
    mov [0x500000], eax
1:
    xor eax, eax
    xor edx, edx
    mov ecx, 0x80b
    wrmsr
    pop rdx
    pop rcx
    pop rax
    iretq

# Exceptions: reports which one, and where.
.globl rig_undefined
rig_undefined:
    mov edi, 6
    jmp 1f
.globl rig_protection
rig_protection:
    pop rax
    mov edi, 13
    jmp 1f
.globl rig_page
rig_page:
    pop rax
    mov edi, 14
1:  add edi, 0x1000
    pop rsi
    jmp rig_end

# Attacks.
.globl rig_wrong_index
rig_wrong_index:
    xor eax, eax
    mov ecx, 2
    vmfunc
    jmp rig_end
.globl rig_wrong_entry
rig_wrong_entry:
    xor eax, eax
    mov ecx, 1
    vmfunc
    jmp rig_end
.globl rig_write_table
rig_write_table:
    movabs rbx, 0x4000001000
    mov [rbx + 64], rbx
    jmp rig_end
.globl rig_write_trampoline
rig_write_trampoline:
    movabs rbx, 0x4000000000
    mov [rbx], rbx
    jmp rig_end
# Asks for the rest of a delegation that was never parked, at the trampoline's address in rdi. The
# library's own thread would have left its stack there.
.globl rig_false_resume
rig_false_resume:
    jmp rdi

# ---- Both.
# rdi steps from a seed in rsi, in general and vector registers and on the stack.
rig_computation:
    mov rax, rsi
    movabs rdx, 0x5851f42d4c957f2d
    pxor xmm3, xmm3
1:  imul rax, rdx
    add rax, 11
    movq xmm2, rax
    paddq xmm3, xmm2
    push rax
    pop rcx
    xor rax, rcx
    add rax, rcx
    dec rdi
    jnz 1b
    movq rcx, xmm3
    xor rax, rcx
    ret

# ---- The server's handlers.
.globl rig_add
rig_add:
    lea rax, [rdi + rdi * 2]
    add rax, rsi
    ret

# Sums and inverts rsi bytes at rdi.
.globl rig_sum
rig_sum:
    xor eax, eax
    add rsi, rdi
1:  rol rax, 5
    xor rax, [rdi]
    not qword ptr [rdi]
    add rdi, 8
    cmp rdi, rsi
    jb 1b
    ret

.globl rig_handler_compute
rig_handler_compute:
    jmp rig_computation

.globl rig_read
rig_read:
    mov rax, [rdi]
    ret

.globl rig_write
rig_write:
    mov [rdi], rsi
    ret

# Runs until the first word of shared memory is not 0.
.globl rig_spin
rig_spin:
    movabs rbx, 0x4000010000
    mov qword ptr [rbx + 8], 1
1:  pause
    cmp qword ptr [rbx], 0
    je 1b
    ret

.globl rig_fail
rig_fail:
    ud2

.globl rig_hypercall
rig_hypercall:
    vmcall
    ret

# The server's kernel. If rdi is 0, runs for rsi steps with interrupts, and returns the address of
# its data. If rdi is 2, switches to another process, whose page table is at rsi. Otherwise halts.
.globl rig_kernel
rig_kernel:
    swapgs
    mov r8, rcx
    mov r9, r11
    test edi, edi
    jnz 2f
    sti
1:  dec rsi
    jnz 1b
    cli
    rdgsbase rax
    mov rcx, r8
    mov r11, r9
    swapgs
    sysretq
2:  cmp edi, 2
    jne 4f
    mov cr3, rsi
    lea rcx, [rip + 3f]
    swapgs
    sysretq
3:  pause
    jmp 3b
4:  hlt
    jmp 4b

.globl rig_system_call
rig_system_call:
    syscall
    ret

# A driver: returns the factorial of rdi, from the device whose registers are at rsi. The device's
# doorbell is in pages without memory. Alternates between the two ways to write to it.
.globl rig_driver
rig_driver:
    mov [rsi], rdi
    mov qword ptr [rsi + 8], 0
    mov eax, 0x60200000
    test edi, 1
    jz 1f
    mov dword ptr [rax], 0x5a
    jmp 2f
1:  mov ecx, 2
    movabs r9, 0x1122334455667788
    mov [rax + rcx * 8 + 0x10], r9
2:  pause
    cmp qword ptr [rsi + 8], 0
    je 2b
    mov rax, [rsi + 8]
    ret

.globl rig_server_end
rig_server_end:
.popsection

# Used by both test programs' clients: calls the trampoline at rbp r12 times, with handler 0, which
# adds its second argument to three times its first one. Counts wrong replies in r14.
.macro round_trips
1:  xor edi, edi
    mov rsi, r12
    mov edx, 5
    call rbp
    lea rcx, [r12 + r12 * 2 + 5]
    cmp rax, rcx
    je 2f
    inc r14
2:  test rdx, rdx
    jz 3f
    inc r14
3:  dec r12
    jnz 1b
.endm

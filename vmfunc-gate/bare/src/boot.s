# Boot sector: loads the program, and switches the CPU from real mode to long mode.
.section .boot, "ax"
.code16
    cli
    ljmp $0, $1f
1:  xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $0x7c00, %sp
    movw $16, %bp
2:  movw $packet, %si
    movb $0x42, %ah
    movb $0x80, %dl
    int $0x13
    jc 3f
    addw $0x400, segment
    addl $32, sector
    decw %bp
    jnz 2b
    movb $2, %al
    outb %al, $0x92
    lgdtl gdt_pointer
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $0x18, $start32
3:  hlt
    jmp 3b
.balign 4
packet:
    .byte 16, 0
    .word 32, 0
segment:
    .word 0x7e0
sector:
    .quad 1
.balign 8
.globl gdt
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00cf9b000000ffff
    # The task state segment. The program fills in its base.
    .quad 0x0000890000000067
    .quad 0
gdt_pointer:
    .word 47
    .long gdt
.org 510
    .word 0xaa55

.section .boot.text, "ax"
.code32
start32:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw %ax, %fs
    movw %ax, %gs
    movl $bss_start, %edi
    movl $bss_end, %ecx
    subl %edi, %ecx
    xorl %eax, %eax
    rep stosb
    # Identity mapping: 1 GiB in pages of 2 MiB.
    movl $pdpt + 3, pml4
    movl $pd + 3, pdpt
    movl $pd, %edi
    movl $0x83, %eax
4:  movl %eax, (%edi)
    addl $0x200000, %eax
    addl $8, %edi
    cmpl $pd + 4096, %edi
    jb 4b
    # PAE, SSE, XSAVE.
    movl $0x40620, %eax
    movl %eax, %cr4
    movl $pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    andl $~4, %eax
    orl $0x80000022, %eax
    movl %eax, %cr0
    ljmp $8, $start64
.code64
start64:
    # x87, SSE, AVX and PKRU.
    xorl %ecx, %ecx
    xorl %edx, %edx
    movl $7, %eax
    xsetbv
    leaq stack_end(%rip), %rsp
    call main

# The C library functions that compiled code expects.
.globl memset
memset:
    movq %rdi, %r8
    movl %esi, %eax
    movq %rdx, %rcx
    rep stosb
    movq %r8, %rax
    ret
.globl memcpy
memcpy:
    movq %rdi, %rax
    movq %rdx, %rcx
    rep movsb
    ret

.section .bss
.balign 4096
.globl pml4
pml4: .skip 4096
pdpt: .skip 4096
pd: .skip 4096
    .skip 65536
stack_end:

# The way to ring 3. Ring 0 does nothing else: on hosts without hardware virtualization KVM emulates
# it, and port I/O, interrupts and system calls of the guest with it.
.section .note.pvh, "a", @note
.balign 4
    .long 4, 4, 18
    .asciz "Xen"
    .long start32

.section .boot.text, "ax"
.code32
.globl start32
start32:
    cli
    movl $stack_end, %esp
    # The address of hvm_start_info, for the program.
    movl %ebx, %ebp
    # One to one: 4 GiB in pages of 2 MiB, for ring 3, too.
    movl $pdpt + 7, tables
    movl $pdpt, %edi
    movl $pd + 7, %eax
    movl $4, %ecx
1:  movl %eax, (%edi)
    addl $4096, %eax
    addl $8, %edi
    loop 1b
    movl $pd, %edi
    movl $0x87, %eax
2:  movl %eax, (%edi)
    addl $0x200000, %eax
    addl $8, %edi
    cmpl $pd + 0x4000, %edi
    jb 2b
    # PAE and SSE.
    movl $0x620, %eax
    movl %eax, %cr4
    movl $tables, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    # The page attributes as Linux has them: write-back, write-combining, uncached.
    movl $0x277, %ecx
    movl $0x00070106, %eax
    movl $0x00070106, %edx
    wrmsr
    lgdt pointer
    movl %cr0, %eax
    andl $~4, %eax
    orl $0x80000023, %eax
    movl %eax, %cr0
    ljmp $8, $3f
.code64
3:  movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl %ebp, %edi
    pushq $0x1b
    pushq $stack_end - 8
    pushq $2
    pushq $0x23
    pushq $main
    iretq

.balign 8
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00cff3000000ffff
    .quad 0x00affb000000ffff
pointer:
    .word 39
    .long gdt

# What compiled code expects of a C library.
.globl memcpy
memcpy:
    movq %rdi, %rax
    cmpq $16, %rdx
    jb 1f
    cmpq $256, %rdx
    ja 3f
    # The last 16 bytes first, then the others from the start.
    movups -16(%rsi,%rdx), %xmm1
    leaq -16(%rdi,%rdx), %r8
0:  movups (%rsi), %xmm0
    movups %xmm0, (%rdi)
    addq $16, %rsi
    addq $16, %rdi
    cmpq %r8, %rdi
    jb 0b
    movups %xmm1, (%r8)
    ret
1:  cmpq $8, %rdx
    jb 2f
    movq (%rsi), %rcx
    movq -8(%rsi,%rdx), %r8
    movq %rcx, (%rdi)
    movq %r8, -8(%rdi,%rdx)
    ret
2:  cmpq $4, %rdx
    jb 3f
    movl (%rsi), %ecx
    movl -4(%rsi,%rdx), %r8d
    movl %ecx, (%rdi)
    movl %r8d, -4(%rdi,%rdx)
    ret
3:  movq %rdx, %rcx
    rep movsb
    ret
.globl memmove
memmove:
    movq %rdi, %rax
    subq %rsi, %rax
    cmpq %rdx, %rax
    jae memcpy
    movq %rdi, %rax
    movq %rdx, %rcx
    leaq -1(%rsi,%rdx), %rsi
    leaq -1(%rdi,%rdx), %rdi
    std
    rep movsb
    cld
    ret
.globl memset
memset:
    movq %rdi, %r8
    movl %esi, %eax
    movq %rdx, %rcx
    rep stosb
    movq %r8, %rax
    ret
.globl memcmp, bcmp
memcmp:
bcmp:
    xorl %eax, %eax
    testq %rdx, %rdx
    jz 2f
1:  movzbl (%rdi), %eax
    movzbl (%rsi), %ecx
    subl %ecx, %eax
    jne 2f
    incq %rdi
    incq %rsi
    decq %rdx
    jnz 1b
2:  ret

.section .bss
.balign 4096
.globl tables, spare, spare_end
tables: .skip 4096
pdpt: .skip 4096
pd: .skip 16384
# For what is above 4 GiB.
spare: .skip 65536
spare_end:
    .skip 262144
.balign 16
stack_end:

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The trampoline as data of the module, which it never executes: it is copied into a page that
 * guests execute. .rodata, so that objtool does not take it for code of the kernel.
 */
#include "gate.h"

	.section .rodata, "a"
	.intel_syntax noprefix
#include "trampoline.inc"
	.att_syntax prefix
	.section .note.GNU-stack, "", @progbits

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The trampoline as data of the module, which never executes it: it is copied into a page that
 * guests execute. In .rodata, so that objtool does not treat it as kernel code.
 */
#include "gate.h"

	.section .rodata, "a"
	.intel_syntax noprefix
#include "trampoline.inc"
	.att_syntax prefix
	.section .note.GNU-stack, "", @progbits

/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface between user space and the module. The crate vmfunc-gate has the same in Rust, and
 * a test that compares both.
 */
#ifndef GANTRY_GATE_H
#define GANTRY_GATE_H

/* The window: offsets in bytes of what is at the same virtual address in both address spaces. */
#define GATE_TRAMPOLINE 0x0
#define GATE_TABLE 0x1000
#define GATE_PRIVATE 0x2000
/* Only in the server view. */
#define GATE_STACK 0x4000
#define GATE_STACK_END 0x8000
/* The number of bytes at its end that are not used. */
#define GATE_STACK_SPARE 64
#define GATE_SHARED 0x10000
/* The maximum number of pages of shared memory: 16 MiB. */
#define GATE_SHARED_PAGES 4096

#define GATE_MAX_HANDLERS 504

/* struct gate_table. */
#define GATE_FS 0
#define GATE_GS 8
#define GATE_STACK_TOP 16
#define GATE_MXCSR 24
#define GATE_PKRU 28
#define GATE_FEATURES 32
#define GATE_COUNT 40
/* The size of the shared memory in bytes. */
#define GATE_SHARED_BYTES 48
#define GATE_HANDLERS 64

/* struct gate_private. */
#define GATE_SIDE 0
#define GATE_SAVED_STACK 8
#define GATE_BUSY 16
#define GATE_SAVED_FS 24
#define GATE_SAVED_GS 32
#define GATE_SAVED_PKRU 40

#define GATE_CLIENT 1
#define GATE_SERVER 2

/* gate_client.features. */
#define GATE_FEATURE_AVX 1
#define GATE_FEATURE_PKU 2
/* The server's kernel must not be in the view. */
#define GATE_USER_ONLY 4

/* How a delegation ended. */
#define GATE_DONE 0
#define GATE_NO_HANDLER 1
#define GATE_ABORTED 2
#define GATE_BUSY_REPLY 3

/* Why it was aborted. */
#define GATE_SERVER_GONE 1
#define GATE_VIOLATION 2
#define GATE_EXCEPTION 3
#define GATE_EXIT 4
#define GATE_LOST 5
#define GATE_AWAKE 6

#ifndef __ASSEMBLY__
#include <linux/ioctl.h>
#include <linux/types.h>

/* Makes the file a server. The caller must be the process that created the VM. */
struct gate_server_args {
	__s32 vcpu;		/* file descriptor of one of the VM's vCPUs */
	__u32 count;		/* number of handlers: 1 to GATE_MAX_HANDLERS */
	__u64 handlers;		/* pointer to that many virtual addresses in the server */
	__u64 cr3;		/* guest-physical address of the server process's page table */
	__u64 fs_base;		/* for handlers */
	__u64 gs_base;
	__u64 window;		/* virtual address of the window */
	__u64 window_gpa;	/* where the server's page table maps it; no memory there */
	__u32 mxcsr;
	__u32 pkru;
};

/* Makes the file a client. The caller must be the process that created the VM. */
struct gate_client_args {
	__s32 vcpu;		/* file descriptor of the vCPU that delegates */
	__u32 shared_pages;	/* 1 to GATE_SHARED_PAGES */
	__u64 cr3;		/* CR3 of the client process */
	__u64 window;		/* virtual address of the window */
	__u64 window_gpa;	/* where the client has mapped this file's pages */
	__u64 features;		/* sum of GATE_FEATURE_ and GATE_USER_ONLY */
};

struct gate_status {
	/* For a client; otherwise 0. */
	__u64 exits;		/* VM exits of its vCPU since it was registered */
	__u64 exits_inside;	/* of exits: in the server view */
	__u64 interrupts;	/* of exits: host interrupts and timers */
	__u64 interrupts_inside; /* of exits_inside: host interrupts and timers */
	__u64 violations;	/* pages that were missing in the server view, and were found */
	__u64 doorbells;	/* writes of handlers to an eventfd of the server's VM */
	__u64 aborted;		/* delegations that were aborted */
	__u64 parked;		/* delegations that were interrupted by an event of the client */
	__u64 resumed;		/* of parked: those that were resumed */
	__u64 refused;		/* faults injected into the client for what it tried at the gate */
	__u64 tables;		/* size of its server view's page tables in bytes */
	__u64 user_only;	/* 1 if its server's kernel is not in the view, otherwise 0 */
	/* For the module. */
	__u64 servers;
	__u64 clients;
	__u64 pages;		/* allocated by the module */
	__u64 pinned;		/* pages of servers that are pinned */
};

#define GATE_REGISTER_SERVER _IOW(0xb7, 0, struct gate_server_args)
#define GATE_REGISTER_CLIENT _IOW(0xb7, 1, struct gate_client_args)
/* Pairs this client with the server of a file descriptor. */
#define GATE_PAIR _IOW(0xb7, 2, __s32)
#define GATE_UNPAIR _IO(0xb7, 3)
#define GATE_STATUS _IOR(0xb7, 4, struct gate_status)
/*
 * For a server, called by the process that registered it: its vCPUs are about to run, and clients
 * get GATE_AWAKE from here on. -EBUSY if a client stays in the server; then nothing has changed.
 */
#define GATE_WAKE _IO(0xb7, 5)
/* The vCPUs no longer run: clients may enter again. */
#define GATE_SLEEP _IO(0xb7, 6)
/*
 * Gives the server up, even if others have the file open. Returns -EOWNERDEAD, once that is done,
 * if a client was removed from its kernel: what that kernel holds for the client is never released.
 */
#define GATE_RETIRE _IO(0xb7, 7)
#endif
#endif

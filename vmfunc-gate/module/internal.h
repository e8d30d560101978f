/* SPDX-License-Identifier: GPL-2.0 */
#ifndef GANTRY_GATE_INTERNAL_H
#define GANTRY_GATE_INTERNAL_H

#include <linux/fs.h>
#include <linux/kvm_host.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/version.h>
#include <linux/workqueue.h>

#include "gate.h"

/*
 * The module reads and writes fields of struct kvm_vcpu and of the VMCS, and probes functions of
 * kvm_intel by name. This was only verified for these kernels.
 */
#define KERNEL_IS(major, minor) \
	(LINUX_VERSION_CODE >= KERNEL_VERSION(major, minor, 0) && \
	 LINUX_VERSION_CODE < KERNEL_VERSION(major, minor + 1, 0))
#if !KERNEL_IS(6, 1) && !KERNEL_IS(6, 12)
#error "gantry_gate is made for Linux 6.1 and 6.12: install one of these, or use the ring transport"
#endif

#define GATE_NAME "gantry_gate"
#define gate_log(format, ...) pr_warn_ratelimited(GATE_NAME ": " format "\n", ##__VA_ARGS__)

/* Read by the trampoline. */
struct gate_table {
	u64 fs_base;
	u64 gs_base;
	u64 stack;
	u32 mxcsr;
	u32 pkru;
	u64 features;
	u64 count;
	u64 shared;
	u64 reserved;
	u64 handlers[GATE_MAX_HANDLERS];
};

static inline size_t table_bytes(u64 handlers)
{
	return offsetof(struct gate_table, handlers) + handlers * sizeof(u64);
}

/* The page that differs between the sides. The client's one is written by the client. */
struct gate_private {
	u64 side;
	u64 stack;
	u64 busy;
	u64 fs_base;
	u64 gs_base;
	u64 pkru;
};

/* An extended page table. Its users serialize all calls with a lock of their own. */
struct gate_view {
	u64 *root;
	unsigned int tables;
};

#define EPT_READ 1ull
#define EPT_WRITE 2ull
#define EPT_EXEC 4ull

int view_init(struct gate_view *view);
void view_free(struct gate_view *view);
u64 view_pointer(const struct gate_view *view);
int view_map(struct gate_view *view, u64 gpa, struct page *page, u64 access, bool large);
bool view_is_mapped(const struct gate_view *view, u64 gpa);
bool view_has_small(struct gate_view *view, u64 gpa);
void view_zap(struct gate_view *view, u64 gpa, unsigned long pages);
void view_zap_all(struct gate_view *view);
void view_free_tables(struct gate_view *view);

/* A memory slot of a server. */
struct gate_slot {
	gfn_t first;
	unsigned long pages;
	unsigned long hva;
	bool readonly;
	unsigned long *chunk;	/* what is pinned, for each 2 MiB; see server.c */
	unsigned long *ended;	/* one bit for each chunk with a page that was unmapped */
};

struct gate_server {
	struct kref ref;
	struct file *vcpu;
	struct mm_struct *mm;
	struct mmu_notifier notifier;
	unsigned long locked;	/* pages that are counted as locked by the process */
	u64 cr3;
	u64 window;
	u64 window_gpa;
	bool pcid;
	struct gate_table *table;	/* as long as its handlers */
	unsigned int slots;
	struct gate_slot *slot;
	u64 generation;		/* of the VM's memory layout, of which the slots are a copy */

	/*
	 * Protects everything below, the slots' pages, and the clients' views. Never taken with
	 * IRQs off.
	 */
	spinlock_t lock;
	bool dead;
	bool lost;		/* a client was removed from its kernel, which cannot be repaired */
	bool awake;		/* its vCPUs run: no client enters */
	unsigned int invalidating;
	u64 changes;
	struct list_head clients;
};

struct gate_client;

struct gate_server *server_register(const struct gate_server_args *args);
void server_put(struct gate_server *server);
void server_die(struct gate_server *server);
void server_lose(struct gate_server *server);
int server_retire(struct gate_server *server);
int server_wake(struct gate_server *server);
int server_sleep(struct gate_server *server);
struct gate_slot *server_slot(struct gate_server *server, gfn_t gfn);
int server_read(struct gate_server *server, u64 gpa, void *to, unsigned int bytes);
int server_map_all(struct gate_server *server, struct gate_client *client);
int server_fault(struct gate_server *server, struct gate_client *client, u64 gpa);

/* The number of VMCS fields that describe CS and SS. */
#define GATE_SEGMENT_FIELDS 8

/* The state of a vCPU in the server when an event of the client arrived. */
struct gate_parked {
	unsigned long regs[NR_VCPU_REGS];
	unsigned long rflags;
	u64 fs_base;
	u64 gs_base;
	u64 kernel_gs;
	u64 cr3;
	u64 segments[GATE_SEGMENT_FIELDS];
	u32 pkru;
	bool in_kernel;
};

struct gate_client {
	struct hlist_node node;
	struct delayed_work reap;
	struct work_struct lose;	/* gives its server up */
	struct file *vcpu_file;
	struct kvm_vcpu *vcpu;
	u64 cr3;
	u64 window;
	u64 window_gpa;
	u64 features;
	bool pcid;
	u64 *list;		/* the EPTPs that VMFUNC selects from */
	struct gate_view view;
	u64 *top;		/* where CR3 leads, unless to the server's own table; see alias.c */
	u64 eptp;		/* of the view; constant for the client's lifetime */
	struct gate_table *table;
	struct gate_private *private;
	struct page *stack[(GATE_STACK_END - GATE_STACK) / PAGE_SIZE];
	unsigned int shared_pages;
	struct page **shared;

	/* Serializes pairing and unpairing. */
	struct mutex mutex;
	/*
	 * Written under the mutex, the server's lock and the lock of all clients. Any one of them
	 * is sufficient for reading.
	 */
	struct gate_server *server;
	/* In the server's list, under its lock. */
	struct list_head peer;

	/* Set by others, processed by the vCPU's thread. */
	atomic_t abort;
	bool closing;
	bool disarmed;

	/* Belongs to the vCPU's thread, or to the holder of its mutex. */
	bool armed;
	bool added_control;
	bool entered;		/* in the guest, or an exit that was not recorded yet */
	bool inside;
	bool in_kernel;		/* with inside: in ring 0 */
	bool left_kernel;	/* removed from the server's kernel; until it is paired again */
	int park_ended;		/* why what was parked has ended, until its thread asks */
	int ending;		/* why the delegation ends before the next entry, or 0 */
	bool resuming;		/* what is parked continues at the next entry */
	u64 kernel_gs;		/* its MSR_KERNEL_GS_BASE in ring 3 */
	bool parked;
	struct gate_parked park;
	struct gate_status counts;
};

struct gate_client *client_register(const struct gate_client_args *args);
int client_pair(struct gate_client *client, struct gate_server *server);
int client_unpair(struct gate_client *client);
void client_revoke(struct gate_client *client, int reason);
void client_close(struct gate_client *client);
int client_place(struct gate_client *client);
struct gate_client *client_of(struct kvm_vcpu *vcpu);
struct gate_server *client_server(struct gate_client *client);
struct page *client_page(struct gate_client *client, unsigned long index, bool *writable);

bool alias_hides(struct gate_server *server, struct gate_client *client);
int alias_check(struct gate_server *server, struct gate_client *client);
int alias_map(struct gate_client *client, struct page *top);

int doorbell(struct gate_server *server, struct gate_client *client, u64 gpa);
u64 get_register(struct kvm_vcpu *vcpu, int reg);
void skip_instruction(struct kvm_vcpu *vcpu, u64 next);

int hooks_init(void);
void hooks_exit(void);
bool hooks_alive(void);
struct file *vcpu_file(int fd);
void flush_views(void);
void gate_disarm(struct gate_client *client);

extern struct workqueue_struct *gate_work;
extern atomic64_t gate_pages, gate_pinned, gate_servers, gate_clients;
extern struct gate_private *server_private;
extern void *trampoline_page;
extern const char vmfunc_gate_start[], vmfunc_gate_end[], vmfunc_gate_enter[],
	vmfunc_gate_parked[], vmfunc_gate_aborted[];

/* VM entry fails with a non-canonical address. Five-level paging allows more; the gate does not. */
static inline bool canonical(u64 address)
{
	return (s64)(address << 16) >> 16 == (s64)address;
}

/* The size of the address range from a window's start to the end of the largest window. */
#define WINDOW_BYTES (GATE_SHARED + (u64)GATE_SHARED_PAGES * PAGE_SIZE)

/* Bits of ECX of CPUID leaf 1: nested guests, and tagged translations. */
#define CPUID_VMX BIT(5)
#define CPUID_PCID BIT(17)

int vcpu_has(struct kvm_vcpu *vcpu, u32 bit);

void *gate_page(gfp_t flags);
void gate_free_page(void *page);

#endif

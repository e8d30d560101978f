// SPDX-License-Identifier: GPL-2.0
/* Servers: their memory, pinned, and what happens when it changes. */
#include <linux/sched/mm.h>

#include "internal.h"

/* How often pinning is tried again because the memory changed meanwhile. */
#define TRIES 100

static bool overlaps(u64 a, u64 a_bytes, u64 b, u64 b_bytes)
{
	return a < b + b_bytes && b < a + a_bytes;
}

struct gate_slot *server_slot(struct gate_server *server, gfn_t gfn)
{
	unsigned int at;

	for (at = 0; at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];

		if (gfn >= slot->first && gfn - slot->first < slot->pages)
			return slot;
	}
	return NULL;
}

/* Under the lock. Pages are only taken out after no view has them. */
static void unpin(struct page **page)
{
	if (!*page)
		return;
	/* Guests wrote to it without the kernel's knowledge. */
	set_page_dirty(*page);
	unpin_user_page(*page);
	*page = NULL;
	atomic64_dec(&gate_pinned);
}

static void unpin_all(struct gate_server *server)
{
	unsigned int at;
	unsigned long page;

	for (at = 0; at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];

		for (page = 0; page < slot->pages; page++)
			unpin(&slot->page[page]);
	}
}

/*
 * The process's mappings change: its views follow at once. What is accessed again is looked up
 * again.
 */
static int invalidate_start(struct mmu_notifier *notifier, const struct mmu_notifier_range *range)
{
	struct gate_server *server = container_of(notifier, struct gate_server, notifier);
	struct gate_client *client;
	bool changed = false;
	unsigned int at;

	spin_lock(&server->lock);
	server->invalidating++;
	server->changes++;
	for (at = 0; at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];
		unsigned long start = max(range->start, slot->hva);
		unsigned long end = min(range->end, slot->hva + slot->pages * PAGE_SIZE);
		u64 gpa;

		if (start >= end)
			continue;
		changed = true;
		gpa = gfn_to_gpa(slot->first) + (start - slot->hva);
		list_for_each_entry(client, &server->clients, peer) {
			view_zap(&client->view, gpa, (end - start) >> PAGE_SHIFT);
			/* The page table may be among them, under its other address. */
			if (server->cr3 >= gpa && server->cr3 - gpa < end - start)
				view_zap(&client->view, client->cr3, 1);
		}
	}
	if (changed && !list_empty(&server->clients))
		flush_views();
	for (at = 0; changed && at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];
		unsigned long start = max(range->start, slot->hva);
		unsigned long end = min(range->end, slot->hva + slot->pages * PAGE_SIZE);

		for (; start < end; start += PAGE_SIZE)
			unpin(&slot->page[(start - slot->hva) >> PAGE_SHIFT]);
	}
	spin_unlock(&server->lock);
	return 0;
}

static void invalidate_end(struct mmu_notifier *notifier, const struct mmu_notifier_range *range)
{
	struct gate_server *server = container_of(notifier, struct gate_server, notifier);

	spin_lock(&server->lock);
	server->invalidating--;
	server->changes++;
	spin_unlock(&server->lock);
}

/* The server's process ends, or gave the server up. */
void server_die(struct gate_server *server)
{
	struct gate_client *client;

	spin_lock(&server->lock);
	if (!server->dead) {
		server->dead = true;
		list_for_each_entry(client, &server->clients, peer)
			client_revoke(client, GATE_SERVER_GONE);
		flush_views();
		unpin_all(server);
	}
	spin_unlock(&server->lock);
}

static void release(struct mmu_notifier *notifier, struct mm_struct *mm)
{
	server_die(container_of(notifier, struct gate_server, notifier));
}

static const struct mmu_notifier_ops notifier_ops = {
	.release = release,
	.invalidate_range_start = invalidate_start,
	.invalidate_range_end = invalidate_end,
};

/* Takes pinned pages over, unless the memory changed since `changes` was read. */
static bool keep(struct gate_server *server, struct page **to, struct page **pages, long count,
		 u64 changes)
{
	long at;

	spin_lock(&server->lock);
	if (server->dead || server->invalidating || server->changes != changes) {
		spin_unlock(&server->lock);
		unpin_user_pages(pages, count);
		return false;
	}
	for (at = 0; at < count; at++) {
		if (to[at]) {
			unpin_user_page(pages[at]);
			continue;
		}
		to[at] = pages[at];
		atomic64_inc(&gate_pinned);
	}
	spin_unlock(&server->lock);
	return true;
}

/* Pins pages of a slot; how many. The caller is the server's process if `own`. */
static long pin(struct gate_server *server, struct gate_slot *slot, unsigned long first, long count,
		bool own)
{
	unsigned int flags = FOLL_LONGTERM | (slot->readonly ? 0 : FOLL_WRITE);
	unsigned long hva = slot->hva + first * PAGE_SIZE;
	struct page *pages[64];
	int tries;

	count = min_t(long, count, ARRAY_SIZE(pages));
	for (tries = 0; tries < TRIES; tries++) {
		u64 changes;
		long pinned;

		spin_lock(&server->lock);
		changes = server->changes;
		spin_unlock(&server->lock);
		if (own) {
			pinned = pin_user_pages_fast(hva, count, flags, pages);
		} else {
			/* FOLL_LONGTERM wants the lock to be held all the time. */
			mmap_read_lock(server->mm);
#if KERNEL_IS(6, 1)
			pinned = pin_user_pages_remote(server->mm, hva, count, flags, pages, NULL,
						       NULL);
#else
			pinned = pin_user_pages_remote(server->mm, hva, count, flags, pages, NULL);
#endif
			mmap_read_unlock(server->mm);
		}
		if (pinned <= 0)
			return pinned ? pinned : -EFAULT;
		if (keep(server, &slot->page[first], pages, pinned, changes))
			return pinned;
		if (READ_ONCE(server->dead) || fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return -EAGAIN;
}

static int pin_slot(struct gate_server *server, struct gate_slot *slot)
{
	unsigned long at = 0;

	while (at < slot->pages) {
		long pinned = pin(server, slot, at, slot->pages - at, true);

		if (pinned < 0)
			return pinned;
		at += pinned;
		cond_resched();
	}
	return 0;
}

static u64 access_of(const struct gate_slot *slot)
{
	return EPT_READ | EPT_EXEC | (slot->readonly ? 0 : EPT_WRITE);
}

/* The 2 MiB around a page of a slot, if they are contiguous in the host: their first page. */
static struct page *large(const struct gate_slot *slot, unsigned long at, gfn_t gfn)
{
	unsigned long first, other;
	struct page *page;

	if ((gfn & ~511ull) < slot->first)
		return NULL;
	first = at - (gfn & 511);
	if (slot->pages - first < 512)
		return NULL;
	page = slot->page[first];
	if (!page || page_to_pfn(page) & 511)
		return NULL;
	for (other = 1; other < 512; other++)
		if (!slot->page[first + other] ||
		    page_to_pfn(slot->page[first + other]) != page_to_pfn(page) + other)
			return NULL;
	return page;
}

/*
 * Under the lock: maps a pinned page of the server into a view, with the 2 MiB around it if they
 * are contiguous. -ENOENT if it is not pinned.
 */
static int map(struct gate_server *server, struct gate_view *view, gfn_t gfn)
{
	struct gate_slot *slot = server_slot(server, gfn);
	unsigned long at = slot ? gfn - slot->first : 0;
	struct page *whole;

	if (!slot || !slot->page[at])
		return -ENOENT;
	if (view_is_mapped(view, gfn_to_gpa(gfn)))
		return 0;
	whole = view_has_small(view, gfn_to_gpa(gfn)) ? NULL : large(slot, at, gfn);
	if (whole)
		return view_map(view, gfn_to_gpa(gfn & ~511ull), whole, access_of(slot), true);
	return view_map(view, gfn_to_gpa(gfn), slot->page[at], access_of(slot), false);
}

/* Under the lock: where the client's CR3 leads to in its view, the server's page table. */
static int map_alias(struct gate_server *server, struct gate_client *client)
{
	struct gate_slot *slot = server_slot(server, gpa_to_gfn(server->cr3));
	struct page *top = slot ? slot->page[gpa_to_gfn(server->cr3) - slot->first] : NULL;

	if (!top)
		return -ENOENT;
	if (view_is_mapped(&client->view, client->cr3 & PAGE_MASK))
		return 0;
	return view_map(&client->view, client->cr3 & PAGE_MASK, top, EPT_READ | EPT_WRITE, false);
}

/* Maps all pinned memory into the view of a client that is on the server's list. */
int server_map_all(struct gate_server *server, struct gate_client *client)
{
	int error = 0;
	unsigned int at;

	for (at = 0; !error && at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];
		gfn_t gfn = slot->first, end = slot->first + slot->pages;

		while (!error && gfn < end) {
			/* The lock is held for at most 2 MiB at a time. */
			gfn_t stop = min(end, (gfn | 511) + 1);
			struct page **page = &slot->page[gfn - slot->first];
			struct page *whole;

			spin_lock(&server->lock);
			whole = view_has_small(&client->view, gfn_to_gpa(gfn)) ?
					NULL : large(slot, gfn - slot->first, gfn);
			if (server->dead)
				error = -ESRCH;
			else if (whole)
				error = view_map(&client->view, gfn_to_gpa(gfn), whole,
						 access_of(slot), true);
			else
				error = view_map_small(&client->view, gfn_to_gpa(gfn), page,
						       stop - gfn, access_of(slot));
			spin_unlock(&server->lock);
			gfn = stop;
			cond_resched();
		}
	}
	return error;
}

/*
 * Finds what is missing in the view of a client that is on the server's list. May sleep.
 * -EFAULT if the server has no memory there.
 */
int server_fault(struct gate_server *server, struct gate_client *client, u64 gpa)
{
	bool alias = (gpa & PAGE_MASK) == (client->cr3 & PAGE_MASK);
	gfn_t gfn = gpa_to_gfn(alias ? server->cr3 : gpa);
	struct gate_slot *slot = server_slot(server, gfn);
	int error = -ENOENT, tries;

	if (!slot)
		return -EFAULT;
	for (tries = 0; tries < TRIES && error == -ENOENT; tries++) {
		long pinned = -ESRCH;

		spin_lock(&server->lock);
		if (server->dead)
			error = -ESRCH;
		else
			error = alias ? map_alias(server, client) :
					map(server, &client->view, gfn);
		spin_unlock(&server->lock);
		if (error != -ENOENT)
			break;
		if (mmget_not_zero(server->mm)) {
			pinned = pin(server, slot, gfn - slot->first, 1, false);
			/* Not the last step of the process's end, here. */
			mmput_async(server->mm);
		}
		if (pinned < 0)
			return pinned;
	}
	return error;
}

static void server_free(struct kref *ref)
{
	struct gate_server *server = container_of(ref, struct gate_server, ref);
	unsigned int at;

	if (server->notifier.ops) {
		server_die(server);
		mmu_notifier_unregister(&server->notifier, server->mm);
	}
	if (server->slot)
		for (at = 0; at < server->slots; at++)
			kvfree(server->slot[at].page);
	kvfree(server->slot);
	if (server->mm) {
		if (server->locked)
			account_locked_vm(server->mm, server->locked, false);
		mmdrop(server->mm);
	}
	gate_free_page(server->table);
	if (server->vcpu)
		fput(server->vcpu);
	kfree(server);
	atomic64_dec(&gate_servers);
}

void server_put(struct gate_server *server)
{
	kref_put(&server->ref, server_free);
}

/* Copies the layout of the VM's memory. */
static int read_slots(struct gate_server *server, struct kvm *kvm)
{
	struct kvm_memory_slot *memory;
	unsigned long pages = 0;
	unsigned int count = 0;
	struct kvm_memslots *slots;
	int error = 0, srcu, bucket;

	/* The layout is small, and allocating under SRCU is allowed. */
	srcu = srcu_read_lock(&kvm->srcu);
	slots = kvm_memslots(kvm);
	kvm_for_each_memslot(memory, bucket, slots)
		count++;
	server->slot = kvcalloc(max(count, 1u), sizeof(*server->slot), GFP_KERNEL_ACCOUNT);
	if (!server->slot)
		error = -ENOMEM;
	kvm_for_each_memslot(memory, bucket, slots) {
		struct gate_slot *slot = server->slot ? &server->slot[server->slots] : NULL;

		if (error || memory->id >= KVM_USER_MEM_SLOTS || !memory->npages)
			continue;
		slot->first = memory->base_gfn;
		slot->pages = memory->npages;
		slot->hva = memory->userspace_addr;
		slot->readonly = memory->flags & KVM_MEM_READONLY;
		slot->page = kvcalloc(slot->pages, sizeof(*slot->page), GFP_KERNEL_ACCOUNT);
		if (!slot->page)
			error = -ENOMEM;
		server->slots++;
		pages += slot->pages;
	}
	srcu_read_unlock(&kvm->srcu, srcu);
	if (error)
		return error;
	error = account_locked_vm(server->mm, pages, true);
	if (!error)
		server->locked = pages;
	return error;
}

static int fill_table(struct gate_server *server, const struct gate_server_args *args)
{
	struct gate_table *table = server->table;

	table->fs_base = args->fs_base;
	table->gs_base = args->gs_base;
	table->stack = args->window + GATE_STACK_END;
	/* Reserved bits would be an exception in each delegation. */
	table->mxcsr = args->mxcsr & 0xffff;
	table->pkru = args->pkru;
	table->count = args->count;
	if (copy_from_user(table->handlers, u64_to_user_ptr(args->handlers),
			   args->count * sizeof(u64)))
		return -EFAULT;
	return 0;
}

/* May sleep, and takes as long as pinning the server's memory takes. */
struct gate_server *server_register(const struct gate_server_args *args)
{
	struct gate_server *server;
	struct kvm_vcpu *vcpu;
	unsigned int at;
	int error;

	if (!args->count || args->count > GATE_MAX_HANDLERS || args->cr3 & ~PAGE_MASK ||
	    args->window & ~PAGE_MASK || args->window_gpa & ~PAGE_MASK ||
	    !canonical(args->window) || !canonical(args->window + WINDOW_BYTES) ||
	    !canonical(args->fs_base) || !canonical(args->gs_base) ||
	    args->window_gpa >= 1ull << 46 || args->cr3 >= 1ull << 46)
		return ERR_PTR(-EINVAL);
	server = kzalloc(sizeof(*server), GFP_KERNEL_ACCOUNT);
	if (!server)
		return ERR_PTR(-ENOMEM);
	atomic64_inc(&gate_servers);
	kref_init(&server->ref);
	spin_lock_init(&server->lock);
	INIT_LIST_HEAD(&server->clients);
	server->cr3 = args->cr3;
	server->window = args->window;
	server->window_gpa = args->window_gpa;
	server->vcpu = vcpu_file(args->vcpu);
	if (IS_ERR(server->vcpu)) {
		error = PTR_ERR(server->vcpu);
		server->vcpu = NULL;
		goto fail;
	}
	vcpu = server->vcpu->private_data;
	error = -ENOMEM;
	server->table = gate_page(GFP_KERNEL_ACCOUNT);
	if (!server->table)
		goto fail;
	mmgrab(current->mm);
	server->mm = current->mm;
	error = fill_table(server, args);
	if (!error)
		error = read_slots(server, vcpu->kvm);
	if (error)
		goto fail;
	error = -EADDRINUSE;
	for (at = 0; at < server->slots; at++)
		if (overlaps(gfn_to_gpa(server->slot[at].first),
			     (u64)server->slot[at].pages << PAGE_SHIFT, args->window_gpa,
			     WINDOW_BYTES))
			goto fail;
	error = -EFAULT;
	if (!server_slot(server, gpa_to_gfn(args->cr3)))
		goto fail;
	/* From here on, changes are seen. */
	server->notifier.ops = &notifier_ops;
	error = mmu_notifier_register(&server->notifier, server->mm);
	if (error) {
		server->notifier.ops = NULL;
		goto fail;
	}
	for (at = 0; at < server->slots; at++) {
		error = pin_slot(server, &server->slot[at]);
		if (error == -EFAULT)
			/* Registers of devices, say. */
			gate_log("memory at %#llx of a server cannot be pinned and stays out of reach",
				 gfn_to_gpa(server->slot[at].first));
		else if (error)
			goto fail;
	}
	return server;
fail:
	server_put(server);
	return ERR_PTR(error);
}

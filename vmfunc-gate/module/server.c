// SPDX-License-Identifier: GPL-2.0
/* Servers: their pinned memory, and how changes of it are handled. */
#include <linux/delay.h>
#include <linux/sched/mm.h>

#include "internal.h"

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

/*
 * A chunk is 2 MiB of guest-physical memory, as far as it is in one slot. It is represented by one
 * word: 0 while nothing is pinned; the first page, if the chunk is entirely in one folio of the
 * host, which is held by one pin; or, with CHUNK_ARRAY, an array of 512 pages, each NULL or pinned.
 */
#define CHUNK_PAGES 512ul
#define CHUNK_ARRAY 1ul

static unsigned long chunk_count(const struct gate_slot *slot)
{
	return ((slot->first + slot->pages - 1) / CHUNK_PAGES) - slot->first / CHUNK_PAGES + 1;
}

/* The size of the words and the bits of a slot in pages. */
static unsigned long chunk_pages(const struct gate_slot *slot)
{
	return DIV_ROUND_UP(chunk_count(slot) * sizeof(*slot->chunk), PAGE_SIZE) +
	       DIV_ROUND_UP(BITS_TO_LONGS(chunk_count(slot)) * sizeof(*slot->ended), PAGE_SIZE);
}

static unsigned long chunk_index(const struct gate_slot *slot, gfn_t gfn)
{
	return gfn / CHUNK_PAGES - slot->first / CHUNK_PAGES;
}

static unsigned long *chunk_at(const struct gate_slot *slot, gfn_t gfn)
{
	return &slot->chunk[chunk_index(slot, gfn)];
}

static struct page **array_of(unsigned long chunk)
{
	return chunk & CHUNK_ARRAY ? (struct page **)(chunk & ~CHUNK_ARRAY) : NULL;
}

/* Under the lock: the first page of a chunk that is one folio. */
static struct page *whole(const struct gate_slot *slot, gfn_t gfn)
{
	unsigned long chunk = *chunk_at(slot, gfn);

	return chunk & CHUNK_ARRAY ? NULL : (struct page *)chunk;
}

/* Under the lock: a pinned page. */
static struct page *pinned_page(const struct gate_slot *slot, gfn_t gfn)
{
	struct page **array = array_of(*chunk_at(slot, gfn)), *first = whole(slot, gfn);

	if (array)
		return array[gfn % CHUNK_PAGES];
	return first ? first + gfn % CHUNK_PAGES : NULL;
}

/*
 * Under the lock, after the page was removed from all views. Guests wrote to it without the
 * kernel's knowledge. Like KVM, this only sets the flag: the additional work of a file system might
 * sleep.
 */
static void unpin(const struct gate_slot *slot, struct page *page, long pages)
{
	if (!slot->readonly)
		SetPageDirty(page);
	unpin_user_page(page);
	atomic64_sub(pages, &gate_pinned);
}

/* Under the lock: unpins a range of pages of one chunk. */
static void unpin_range(const struct gate_slot *slot, gfn_t gfn, gfn_t end)
{
	struct page **array = array_of(*chunk_at(slot, gfn)), *first = whole(slot, gfn);

	if (first) {
		*chunk_at(slot, gfn) = 0;
		unpin(slot, first, CHUNK_PAGES);
	}
	for (; array && gfn < end; gfn++) {
		struct page *page = array[gfn % CHUNK_PAGES];

		array[gfn % CHUNK_PAGES] = NULL;
		if (page)
			unpin(slot, page, 1);
	}
}

/* Unpins pages of a slot. The lock is held for one chunk at a time. */
static void unpin_slot(struct gate_server *server, const struct gate_slot *slot, gfn_t gfn,
		       gfn_t end)
{
	while (gfn < end) {
		gfn_t stop = min_t(gfn_t, end, (gfn / CHUNK_PAGES + 1) * CHUNK_PAGES);

		spin_lock(&server->lock);
		unpin_range(slot, gfn, stop);
		spin_unlock(&server->lock);
		gfn = stop;
	}
}

/*
 * The part of a slot that a range of the process's addresses backs. Returns whether there is one.
 */
static bool backed(const struct gate_slot *slot, const struct mmu_notifier_range *range,
		   gfn_t *first, gfn_t *end)
{
	unsigned long from = max(range->start, slot->hva);
	unsigned long to = min(range->end, slot->hva + slot->pages * PAGE_SIZE);

	*first = slot->first + ((from - slot->hva) >> PAGE_SHIFT);
	*end = slot->first + ((to - slot->hva) >> PAGE_SHIFT);
	return from < to;
}

static void end_chunks(struct gate_slot *slot, gfn_t first, gfn_t end)
{
	unsigned long from = chunk_index(slot, first);

	bitmap_set(slot->ended, from, chunk_index(slot, end - 1) - from + 1);
}

/*
 * The process's mappings change, and the views follow immediately. Memory that is accessed again is
 * looked up again, after the change. Until then, nothing is mapped or pinned.
 *
 * Memory that the process unmaps is permanently no longer memory of the VM: what it maps at the
 * same address later may be its heap. This applies to all of a chunk of which a page was unmapped.
 * (Linux 6.1 also reports an unmapping when a hole is punched into a file of large pages: clients
 * cannot access what is put there later.)
 */
static int invalidate_start(struct mmu_notifier *notifier, const struct mmu_notifier_range *range)
{
	struct gate_server *server = container_of(notifier, struct gate_server, notifier);
	gfn_t top = gpa_to_gfn(server->cr3), first, end;
	struct gate_client *client;
	bool changed = false;
	unsigned int at;

	spin_lock(&server->lock);
	server->invalidating++;
	server->changes++;
	for (at = 0; at < server->slots; at++) {
		if (!backed(&server->slot[at], range, &first, &end))
			continue;
		changed = true;
		if (range->event == MMU_NOTIFY_UNMAP)
			end_chunks(&server->slot[at], first, end);
		list_for_each_entry(client, &server->clients, peer) {
			view_zap(&client->view, gfn_to_gpa(first), end - first);
			/* The page table may be among them, at its other address. */
			if (top >= first && top < end)
				view_zap(&client->view, client->cr3 & PAGE_MASK, 1);
		}
	}
	if (changed && !list_empty(&server->clients))
		flush_views();
	spin_unlock(&server->lock);
	for (at = 0; changed && at < server->slots; at++)
		if (backed(&server->slot[at], range, &first, &end))
			unpin_slot(server, &server->slot[at], first, end);
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
	unsigned int at;

	spin_lock(&server->lock);
	if (!server->dead) {
		server->dead = true;
		list_for_each_entry(client, &server->clients, peer)
			client_revoke(client, GATE_SERVER_GONE);
		flush_views();
	}
	spin_unlock(&server->lock);
	for (at = 0; at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];

		unpin_slot(server, slot, slot->first, slot->first + slot->pages);
	}
}

/* How often to check whether clients have left, half a millisecond apart. */
#define WAKE_LOOKS 100

/* Whether a client is in the server. Kicks those whose place is unknown. Under the lock. */
static bool anybody_inside(struct gate_server *server)
{
	struct gate_client *client;
	bool anybody = false;

	list_for_each_entry(client, &server->clients, peer) {
		int place = client_place(client);

		if (place == -EAGAIN)
			kvm_vcpu_kick(client->vcpu);
		anybody |= !!place;
	}
	return anybody;
}

static void set_entries(struct gate_server *server, bool valid)
{
	struct gate_client *client;

	list_for_each_entry(client, &server->clients, peer)
		WRITE_ONCE(client->list[1], valid ? client->eptp : 0);
}

/* Blocks entries, and waits for a while until those who are inside have left. */
static int close_entries(struct gate_server *server)
{
	int looks, error = -EBUSY;

	spin_lock(&server->lock);
	server->awake = true;
	set_entries(server, false);
	spin_unlock(&server->lock);
	for (looks = 0; looks < WAKE_LOOKS && error == -EBUSY; looks++) {
		if (looks)
			usleep_range(500, 1000);
		/* Whoever enters the guest from here on sees that entries are blocked. */
		smp_mb();
		spin_lock(&server->lock);
		if (server->dead)
			error = -ESRCH;
		else if (!anybody_inside(server))
			error = 0;
		spin_unlock(&server->lock);
	}
	return error;
}

/* The server's vCPUs are about to run. */
int server_wake(struct gate_server *server)
{
	int error = close_entries(server);

	if (error == -EBUSY)
		server_sleep(server);
	return error;
}

/* The server's vCPUs no longer run. */
int server_sleep(struct gate_server *server)
{
	int error = 0;

	spin_lock(&server->lock);
	server->awake = false;
	if (server->dead)
		error = -ESRCH;
	else
		set_entries(server, true);
	spin_unlock(&server->lock);
	return error;
}

/* Gives the server up because of what a client did, or did not finish, in its kernel. */
void server_lose(struct gate_server *server)
{
	spin_lock(&server->lock);
	server->lost = true;
	spin_unlock(&server->lock);
	server_die(server);
}

/* Gives the server up. Clients inside get a while to finish. */
int server_retire(struct gate_server *server)
{
	struct gate_client *client;

	if (close_entries(server) == -EBUSY) {
		spin_lock(&server->lock);
		list_for_each_entry(client, &server->clients, peer) {
			int place = client_place(client);

			/* A client whose place is unknown counts as being where it was last. */
			if (place == 2 || (place == -EAGAIN && !client->top))
				server->lost = true;
		}
		spin_unlock(&server->lock);
	}
	server_die(server);
	return server->lost ? -EOWNERDEAD : 0;
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

/* Whether an array has all pages of a chunk, and they are one aligned part of a folio. */
static bool is_whole(struct page **array)
{
	unsigned long at;

	if (!array[0] || page_to_pfn(array[0]) % CHUNK_PAGES)
		return false;
	for (at = 1; at < CHUNK_PAGES; at++)
		if (array[at] != array[0] + at || page_folio(array[at]) != page_folio(array[0]))
			return false;
	return true;
}

/*
 * Takes over pinned pages of a chunk, unless the memory has changed since `changes` was read. The
 * caller has to unpin what the array contains afterwards. It is NULL if all of it was taken over.
 */
static int keep(struct gate_server *server, struct gate_slot *slot, gfn_t gfn,
		struct page ***pages, long count, u64 changes)
{
	unsigned long *chunk = chunk_at(slot, gfn), at;
	struct page **from = *pages, **to;
	int error = 0;

	spin_lock(&server->lock);
	to = array_of(*chunk);
	if (server->dead) {
		error = -ESRCH;
	} else if (server->invalidating || server->changes != changes) {
		error = -EAGAIN;
	} else if (!*chunk && is_whole(from)) {
		*chunk = (unsigned long)from[0];
		from[0] = NULL;
		atomic64_add(CHUNK_PAGES, &gate_pinned);
	} else if (!*chunk) {
		*chunk = (unsigned long)from | CHUNK_ARRAY;
		*pages = NULL;
		atomic64_add(count, &gate_pinned);
	} else {
		for (at = 0; to && at < CHUNK_PAGES; at++) {
			if (to[at] || !from[at])
				continue;
			swap(to[at], from[at]);
			atomic64_inc(&gate_pinned);
		}
	}
	spin_unlock(&server->lock);
	return error;
}

/*
 * Pins pages of a slot, at most up to the end of the chunk. Returns how many are pinned now.
 * -EFAULT if there is no memory or it was unmapped, -EAGAIN while the memory changes. `own`: the
 * caller is the server's process.
 */
static long pin(struct gate_server *server, struct gate_slot *slot, gfn_t gfn, long count, bool own)
{
	unsigned int flags = FOLL_LONGTERM | (slot->readonly ? 0 : FOLL_WRITE);
	unsigned long hva = slot->hva + (gfn - slot->first) * PAGE_SIZE, at;
	struct page **pages = gate_page(GFP_KERNEL_ACCOUNT), **start;
	bool ended;
	long pinned;
	u64 changes;
	int error;

	if (!pages)
		return -ENOMEM;
	start = pages + gfn % CHUNK_PAGES;
	count = min_t(long, count, CHUNK_PAGES - gfn % CHUNK_PAGES);
	spin_lock(&server->lock);
	changes = server->changes;
	/* What is unmapped from here on counts as a change. */
	ended = test_bit(chunk_index(slot, gfn), slot->ended);
	spin_unlock(&server->lock);
	if (ended) {
		pinned = -EFAULT;
	} else if (own) {
		pinned = pin_user_pages_fast(hva, count, flags, start);
	} else if (mmap_read_lock_killable(server->mm)) {
		pinned = -EINTR;
	} else {
		/* FOLL_LONGTERM requires the lock to be held all the time. */
#if KERNEL_IS(6, 1)
		pinned = pin_user_pages_remote(server->mm, hva, count, flags, start, NULL, NULL);
#else
		pinned = pin_user_pages_remote(server->mm, hva, count, flags, start, NULL);
#endif
		mmap_read_unlock(server->mm);
	}
	error = pinned > 0 ? keep(server, slot, gfn, &pages, pinned, changes) :
		pinned ? pinned : -EFAULT;
	for (at = 0; pages && at < CHUNK_PAGES; at++)
		if (pages[at])
			unpin_user_page(pages[at]);
	gate_free_page(pages);
	return error ? error : pinned;
}

/*
 * Pins everything that can be pinned. Other pages of a slot are looked up again when they are used.
 */
static int pin_slot(struct gate_server *server, struct gate_slot *slot)
{
	gfn_t gfn = slot->first, end = slot->first + slot->pages;
	bool all = true;

	while (gfn < end) {
		long pinned = pin(server, slot, gfn, end - gfn, true);

		if (pinned == -EFAULT) {
			all = false;
			pinned = CHUNK_PAGES - gfn % CHUNK_PAGES;
		} else if (pinned == -EAGAIN) {
			/* Other threads of this process are changing its memory. */
			schedule_timeout_killable(1);
			pinned = 0;
		} else if (pinned < 0) {
			return pinned;
		}
		if (fatal_signal_pending(current))
			return -EINTR;
		gfn += pinned;
		cond_resched();
	}
	if (!all)
		/* For instance, registers of devices. */
		gate_log("memory at %#llx of a server cannot all be pinned",
			 gfn_to_gpa(slot->first));
	return 0;
}

static u64 access_of(const struct gate_slot *slot)
{
	return EPT_READ | EPT_EXEC | (slot->readonly ? 0 : EPT_WRITE);
}

/* Under the lock: maps a range of the pinned pages of a chunk into a view. */
static int map_chunk(struct gate_slot *slot, struct gate_client *client, gfn_t gfn, gfn_t end)
{
	gfn_t start = gfn / CHUNK_PAGES * CHUNK_PAGES, alias = gpa_to_gfn(client->cr3);
	struct gate_view *view = &client->view;
	struct page *first = whole(slot, gfn);
	int error = 0;

	if (first && (alias < start || alias >= start + CHUNK_PAGES) &&
	    !view_has_small(view, gfn_to_gpa(gfn)))
		return view_is_mapped(view, gfn_to_gpa(gfn)) ? 0 :
			view_map(view, gfn_to_gpa(start), first, access_of(slot), true);
	for (; !error && gfn < end; gfn++) {
		struct page *page = pinned_page(slot, gfn);

		if (page && gfn != alias && !view_is_mapped(view, gfn_to_gpa(gfn)))
			error = view_map(view, gfn_to_gpa(gfn), page, access_of(slot), false);
	}
	return error;
}

/*
 * Maps all pinned memory into the view of a client that is on the server's list. Memory that
 * changes meanwhile is looked up when it is used.
 */
int server_map_all(struct gate_server *server, struct gate_client *client)
{
	int error = 0;
	unsigned int at;

	for (at = 0; !error && at < server->slots; at++) {
		struct gate_slot *slot = &server->slot[at];
		gfn_t gfn = slot->first, end = slot->first + slot->pages;

		while (!error && gfn < end) {
			gfn_t stop = min_t(gfn_t, end, (gfn / CHUNK_PAGES + 1) * CHUNK_PAGES);

			spin_lock(&server->lock);
			if (server->dead)
				error = -ESRCH;
			else if (!server->invalidating)
				error = map_chunk(slot, client, gfn, stop);
			spin_unlock(&server->lock);
			gfn = stop;
			cond_resched();
		}
	}
	return error;
}

/* -ENOENT if the page is not pinned, -EAGAIN while the memory changes. */
static int try_map(struct gate_server *server, struct gate_client *client, struct gate_slot *slot,
		   gfn_t gfn, bool alias)
{
	int error = -ENOENT;

	spin_lock(&server->lock);
	if (server->dead || client->server != server)
		error = -ESRCH;
	else if (server->invalidating)
		error = -EAGAIN;
	else if (!pinned_page(slot, gfn))
		error = -ENOENT;
	else if (alias)
		error = alias_map(client, pinned_page(slot, gfn));
	else
		error = map_chunk(slot, client, gfn, gfn + 1);
	spin_unlock(&server->lock);
	return error;
}

/* Pins a page that is not pinned. For processes other than the server's. */
static int find(struct gate_server *server, struct gate_slot *slot, gfn_t gfn)
{
	long pinned;

	if (!mmget_not_zero(server->mm))
		return -ESRCH;
	pinned = pin(server, slot, gfn, 1, false);
	/* The last step of the process's end must not happen here. */
	mmput_async(server->mm);
	return pinned < 0 ? pinned : 0;
}

/*
 * Maps what is missing in a view. May sleep for as long as the server's process likes. -EFAULT if
 * the server has no memory there, -EAGAIN if it has changed meanwhile.
 */
int server_fault(struct gate_server *server, struct gate_client *client, u64 gpa)
{
	bool alias = (gpa & PAGE_MASK) == (client->cr3 & PAGE_MASK);
	gfn_t gfn = gpa_to_gfn(alias ? server->cr3 : gpa);
	struct gate_slot *slot = server_slot(server, gfn);
	int error;

	if (!slot)
		return -EFAULT;
	error = try_map(server, client, slot, gfn, alias);
	if (error != -ENOENT)
		return error;
	error = find(server, slot, gfn);
	if (!error)
		error = try_map(server, client, slot, gfn, alias);
	return error == -ENOENT ? -EAGAIN : error;
}

/*
 * Copies a part of one page of the server's memory. May sleep for as long as the server's process
 * likes. -EFAULT if there is none.
 */
int server_read(struct gate_server *server, u64 gpa, void *to, unsigned int bytes)
{
	gfn_t gfn = gpa_to_gfn(gpa);
	struct gate_slot *slot = server_slot(server, gfn);
	int error = slot ? 0 : -EFAULT;

	while (!error) {
		struct page *page;

		spin_lock(&server->lock);
		page = server->dead ? NULL : pinned_page(slot, gfn);
		if (page)
			memcpy(to, page_address(page) + offset_in_page(gpa), bytes);
		spin_unlock(&server->lock);
		if (page)
			break;
		error = find(server, slot, gfn);
	}
	return error;
}

/* Called after all pages were unpinned. */
static void free_chunks(struct gate_slot *slot)
{
	unsigned long at;

	for (at = 0; slot->chunk && at < chunk_count(slot); at++)
		gate_free_page(array_of(slot->chunk[at]));
	if (slot->chunk && slot->ended)
		atomic64_sub(chunk_pages(slot), &gate_pages);
	kvfree(slot->chunk);
	kvfree(slot->ended);
}

static void server_free(struct kref *ref)
{
	struct gate_server *server = container_of(ref, struct gate_server, ref);
	unsigned int at;

	if (server->notifier.ops) {
		server_die(server);
		mmu_notifier_unregister(&server->notifier, server->mm);
	}
	for (at = 0; at < server->slots; at++)
		free_chunks(&server->slot[at]);
	kvfree(server->slot);
	if (server->mm) {
		if (server->locked)
			account_locked_vm(server->mm, server->locked, false);
		mmdrop(server->mm);
	}
	kfree(server->table);
	if (server->vcpu)
		fput(server->vcpu);
	kfree(server);
	atomic64_dec(&gate_servers);
}

void server_put(struct gate_server *server)
{
	kref_put(&server->ref, server_free);
}

/* Copies the layout of the VM's memory, and accounts for it as locked by the process. */
static int read_slots(struct gate_server *server, struct kvm *kvm)
{
	struct kvm_memory_slot *memory;
	unsigned long pages = 0;
	unsigned int count = 0;
	struct kvm_memslots *slots;
	int error, srcu, bucket;

	/* Sleeping under SRCU is allowed. */
	srcu = srcu_read_lock(&kvm->srcu);
	slots = kvm_memslots(kvm);
	server->generation = slots->generation;
	kvm_for_each_memslot(memory, bucket, slots) {
		if (memory->id >= KVM_USER_MEM_SLOTS)
			continue;
		pages += memory->npages;
		count++;
	}
	error = account_locked_vm(server->mm, pages, true);
	if (error)
		goto out;
	server->locked = pages;
	error = -ENOMEM;
	server->slot = kvcalloc(max(count, 1u), sizeof(*server->slot), GFP_KERNEL_ACCOUNT);
	if (!server->slot)
		goto out;
	kvm_for_each_memslot(memory, bucket, slots) {
		struct gate_slot *slot = &server->slot[server->slots];

		if (memory->id >= KVM_USER_MEM_SLOTS || !memory->npages)
			continue;
		slot->first = memory->base_gfn;
		slot->pages = memory->npages;
		slot->hva = memory->userspace_addr;
		slot->readonly = memory->flags & KVM_MEM_READONLY;
		slot->chunk = kvcalloc(chunk_count(slot), sizeof(*slot->chunk),
				       GFP_KERNEL_ACCOUNT);
		slot->ended = kvcalloc(BITS_TO_LONGS(chunk_count(slot)), sizeof(*slot->ended),
				       GFP_KERNEL_ACCOUNT);
		/* It is freed together with the others. */
		server->slots++;
		if (!slot->chunk || !slot->ended)
			goto out;
		atomic64_add(chunk_pages(slot), &gate_pages);
	}
	error = 0;
out:
	srcu_read_unlock(&kvm->srcu, srcu);
	return error;
}

/* Whether the VM's memory layout is still the one that was copied. */
static bool is_current(struct gate_server *server, struct kvm *kvm)
{
	int srcu = srcu_read_lock(&kvm->srcu);
	bool current_one = kvm_memslots(kvm)->generation == server->generation;

	srcu_read_unlock(&kvm->srcu, srcu);
	return current_one;
}

static int fill_table(struct gate_server *server, const struct gate_server_args *args)
{
	struct gate_table *table = server->table;

	table->fs_base = args->fs_base;
	table->gs_base = args->gs_base;
	/* Functions that pass arguments on may read some above their frame that were not passed. */
	table->stack = args->window + GATE_STACK_END - GATE_STACK_SPARE;
	/* Reserved bits would cause an exception in each delegation. */
	table->mxcsr = args->mxcsr & 0xffff;
	table->pkru = args->pkru;
	table->count = args->count;
	if (copy_from_user(table->handlers, u64_to_user_ptr(args->handlers),
			   args->count * sizeof(u64)))
		return -EFAULT;
	return 0;
}

/* May sleep, for as long as pinning the server's memory takes. */
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
	error = vcpu_has(vcpu, CPUID_PCID);
	if (error < 0)
		goto fail;
	server->pcid = error;
	error = -ENOMEM;
	server->table = kzalloc(table_bytes(args->count), GFP_KERNEL_ACCOUNT);
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
	/* From here on, changes are noticed. */
	server->notifier.ops = &notifier_ops;
	error = mmu_notifier_register(&server->notifier, server->mm);
	if (error) {
		server->notifier.ops = NULL;
		goto fail;
	}
	/* So memory that was removed and unmapped before is not among the slots. */
	error = -EAGAIN;
	if (!is_current(server, vcpu->kvm))
		goto fail;
	for (at = 0; at < server->slots; at++) {
		error = pin_slot(server, &server->slot[at]);
		if (error)
			goto fail;
	}
	return server;
fail:
	server_put(server);
	return ERR_PTR(error);
}

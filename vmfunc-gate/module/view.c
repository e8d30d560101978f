// SPDX-License-Identifier: GPL-2.0
/* Extended page tables (SDM volume 3, 29.3). The rules are the same as in the crate's ept.rs. */
#include "internal.h"

#define ADDRESS 0x000ffffffffff000ull
#define PRESENT 7ull
/* Write-back, regardless of the guest: the host has the same pages mapped as write-back. */
#define WRITE_BACK (6ull << 3 | 1 << 6)
#define LARGE (1ull << 7)
/*
 * Write-back, four levels, no accessed and dirty flags: page-modification logging must not log
 * addresses of the server as the client's.
 */
#define EPTP (6ull | 3 << 3)

static unsigned int index_of(u64 gpa, int level)
{
	return gpa >> (12 + 9 * level) & 511;
}

int view_init(struct gate_view *view)
{
	view->root = gate_page(GFP_KERNEL_ACCOUNT);
	view->tables = 1;
	return view->root ? 0 : -ENOMEM;
}

u64 view_pointer(const struct gate_view *view)
{
	return __pa(view->root) | EPTP;
}

/* The table of a level (0: for 4 KiB pages), or NULL. */
static u64 *table(struct gate_view *view, u64 gpa, int level, bool add)
{
	u64 *table = view->root;
	int at;

	for (at = 3; at > level; at--) {
		u64 *entry = &table[index_of(gpa, at)];

		if (!(*entry & PRESENT)) {
			u64 *next = add ? gate_page(GFP_ATOMIC | __GFP_ACCOUNT | __GFP_NOWARN) : NULL;

			if (!next)
				return NULL;
			view->tables++;
			WRITE_ONCE(*entry, __pa(next) | PRESENT);
		} else if (*entry & LARGE) {
			return NULL;
		}
		table = __va(*entry & ADDRESS);
	}
	return table;
}

static u64 *leaf(const struct gate_view *view, u64 gpa)
{
	u64 *table = view->root;
	int at;

	for (at = 3; at >= 0; at--) {
		u64 *entry = &table[index_of(gpa, at)];

		if (!(*entry & PRESENT))
			return NULL;
		if (at == 0 || *entry & LARGE)
			return entry;
		table = __va(*entry & ADDRESS);
	}
	return NULL;
}

bool view_is_mapped(const struct gate_view *view, u64 gpa)
{
	return leaf(view, gpa);
}

/* Whether there is a table for 4 KiB pages at an address. */
bool view_has_small(struct gate_view *view, u64 gpa)
{
	return table(view, gpa, 0, false);
}

/* Maps a page, or the 2 MiB that start with it, where nothing is mapped. */
int view_map(struct gate_view *view, u64 gpa, struct page *page, u64 access, bool large)
{
	u64 *entries = table(view, gpa, large ? 1 : 0, true);
	u64 *entry;

	if (!entries)
		return view_is_mapped(view, gpa) ? -EEXIST : -ENOMEM;
	entry = &entries[index_of(gpa, large ? 1 : 0)];
	if (*entry & PRESENT)
		return -EEXIST;
	WRITE_ONCE(*entry, page_to_phys(page) | access | WRITE_BACK | (large ? LARGE : 0));
	return 0;
}

/*
 * Unmaps pages, large ones as a whole. INVEPT must be executed on all CPUs before the pages are
 * used for anything else.
 */
void view_zap(struct gate_view *view, u64 gpa, unsigned long pages)
{
	u64 end = gpa + ((u64)pages << PAGE_SHIFT);

	while (gpa < end) {
		u64 *entry = leaf(view, gpa);

		if (entry)
			WRITE_ONCE(*entry, 0);
		/* The next page of a table that exists, or the next table. */
		if (view_has_small(view, gpa))
			gpa += PAGE_SIZE;
		else
			gpa = (gpa | (PMD_SIZE - 1)) + 1;
	}
}

static void free_below(struct gate_view *view, u64 *table, int level)
{
	int at;

	for (at = 0; at < 512; at++) {
		u64 entry = table[at];

		if (!(entry & PRESENT) || (entry & LARGE && level == 1))
			continue;
		if (level > 1)
			free_below(view, __va(entry & ADDRESS), level - 1);
		gate_free_page(__va(entry & ADDRESS));
		view->tables--;
	}
}

/*
 * Makes everything inaccessible. The tables are kept, since CPUs may be walking them until INVEPT.
 */
void view_zap_all(struct gate_view *view)
{
	int at;

	for (at = 0; at < 512; at++)
		WRITE_ONCE(view->root[at], view->root[at] & ~PRESENT);
}

/* Resets the view to its initial state, after view_zap_all and INVEPT on all CPUs. */
void view_free_tables(struct gate_view *view)
{
	int at;

	for (at = 0; at < 512; at++) {
		u64 entry = view->root[at];

		if (!(entry & ADDRESS))
			continue;
		free_below(view, __va(entry & ADDRESS), 2);
		gate_free_page(__va(entry & ADDRESS));
		view->tables--;
		view->root[at] = 0;
	}
}

void view_free(struct gate_view *view)
{
	if (!view->root)
		return;
	view_zap_all(view);
	view_free_tables(view);
	gate_free_page(view->root);
	view->root = NULL;
}

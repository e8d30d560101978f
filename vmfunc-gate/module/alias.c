// SPDX-License-Identifier: GPL-2.0
/*
 * Where a client's CR3 leads in its server view: to the top-level page table of the server's
 * process.
 *
 * If the server has no memory at that guest-physical address, the page table itself is mapped
 * there. Two guests of the same kind both have memory there: the server's page at that address is
 * then hidden in the view. The pair is made only if no code of the server's process in ring 3 can
 * reach that page, as a table or as memory. What is then mapped is a copy of the half of the
 * top-level table that is for ring 3, without the rest: the server's kernel, which might need the
 * page, does not exist in the view, and system calls and exceptions end the delegation. The copy is
 * read-only, so that even a server that maps the page later cannot change it.
 */
#include "internal.h"

#define PAGE_TABLES 4
#define USER_ENTRIES 256
/* More means over 256 MiB of page tables, or tables that lead to themselves. */
#define MOST_TABLES 65536

struct walk {
	struct gate_server *server;
	gfn_t hidden;
	unsigned long tables;
	u64 (*table)[512];	/* one per level */
};

/* Whether the alias hides a page of the server's memory. */
bool alias_hides(struct gate_server *server, struct gate_client *client)
{
	u64 top = client->cr3 & PAGE_MASK;

	return top != server->cr3 && server_slot(server, gpa_to_gfn(top));
}

/* Level 0 has entries for 4 KiB pages. */
static int walk_tables(struct walk *walk, gfn_t gfn, int level)
{
	int entries = level == PAGE_TABLES - 1 ? USER_ENTRIES : 512, at, error;
	u64 *table = walk->table[level];

	if (gfn == walk->hidden)
		return -EADDRINUSE;
	if (++walk->tables > MOST_TABLES)
		return -E2BIG;
	if (fatal_signal_pending(current))
		return -EINTR;
	cond_resched();
	error = server_read(walk->server, gfn_to_gpa(gfn), table, PAGE_SIZE);
	/* The CPU finds nothing there, either. */
	if (error == -EFAULT)
		return 0;
	for (at = 0; !error && at < entries; at++) {
		u64 entry = table[at];
		gfn_t first = (entry & PTE_PFN_MASK) >> PAGE_SHIFT;

		if (~entry & (_PAGE_PRESENT | _PAGE_USER))
			continue;
		if (level == 0 || (entry & _PAGE_PSE && level < PAGE_TABLES - 1)) {
			gfn_t pages = 1ull << 9 * level;

			if ((walk->hidden & ~(pages - 1)) == (first & ~(pages - 1)))
				return -EADDRINUSE;
		} else {
			error = walk_tables(walk, first, level - 1);
		}
	}
	return error;
}

/* Whether the page that the alias hides is needed by ring 3 of the server's process. */
int alias_check(struct gate_server *server, struct gate_client *client)
{
	struct walk walking = { .server = server, .hidden = gpa_to_gfn(client->cr3) };
	int error;

	walking.table = kvcalloc(PAGE_TABLES, PAGE_SIZE, GFP_KERNEL_ACCOUNT);
	if (!walking.table)
		return -ENOMEM;
	error = walk_tables(&walking, gpa_to_gfn(server->cr3), PAGE_TABLES - 1);
	kvfree(walking.table);
	return error;
}

/* Under the server's lock, with the page of its top-level table. */
int alias_map(struct gate_client *client, struct page *top)
{
	u64 at_gpa = client->cr3 & PAGE_MASK, *from = page_address(top);
	int at;

	if (view_is_mapped(&client->view, at_gpa))
		return 0;
	if (!client->top)
		return view_map(&client->view, at_gpa, top, EPT_READ | EPT_WRITE, false);
	for (at = 0; at < USER_ENTRIES; at++) {
		u64 entry = READ_ONCE(from[at]);

		/* The CPU cannot set the flag in a read-only page. */
		client->top[at] = ~entry & (_PAGE_PRESENT | _PAGE_USER) ? 0 : entry | _PAGE_ACCESSED;
	}
	return view_map(&client->view, at_gpa, virt_to_page(client->top), EPT_READ, false);
}

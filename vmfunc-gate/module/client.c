// SPDX-License-Identifier: GPL-2.0
/* Clients: one vCPU each, its EPTP list, its server view, and the pages of its window. */
#include <linux/delay.h>
#include <linux/hashtable.h>
#include <linux/rculist.h>

#include "internal.h"

/* All clients by vCPU, for the probes. */
static DEFINE_HASHTABLE(clients, 6);
static DEFINE_SPINLOCK(clients_lock);
/* Held while the clients of a VM are examined and the VM is informed accordingly. */
static DEFINE_MUTEX(inhibit_mutex);

/*
 * Under RCU or the lock. A client is not freed on its vCPU's thread, so it may be used there
 * afterwards.
 */
struct gate_client *client_of(struct kvm_vcpu *vcpu)
{
	struct gate_client *client;

	hash_for_each_possible_rcu_notrace(clients, client, node, (unsigned long)vcpu)
		if (client->vcpu == vcpu)
			return client;
	return NULL;
}

/* The server with which it is paired, or NULL. The caller must put it. */
struct gate_server *client_server(struct gate_client *client)
{
	struct gate_server *server;

	spin_lock(&clients_lock);
	server = client->server;
	if (server)
		kref_get(&server->ref);
	spin_unlock(&clients_lock);
	return server;
}

/* Adds a client, unless the vCPU has one. */
static int add(struct gate_client *client)
{
	int error = -EBUSY;

	mutex_lock(&inhibit_mutex);
	spin_lock(&clients_lock);
	if (!client_of(client->vcpu)) {
		hash_add_rcu(clients, &client->node, (unsigned long)client->vcpu);
		error = 0;
	}
	spin_unlock(&clients_lock);
	/*
	 * Interrupts that the CPU delivers by itself would be taken in the server's address space.
	 * The reason is the one used when a debugger asks for interrupts to be blocked.
	 */
	if (!error)
		kvm_set_apicv_inhibit(client->vcpu->kvm, APICV_INHIBIT_REASON_BLOCKIRQ);
	mutex_unlock(&inhibit_mutex);
	return error;
}

static void forget(struct gate_client *client)
{
	struct kvm *kvm = client->vcpu->kvm;
	struct gate_client *other;
	bool last = true;
	int bucket;

	mutex_lock(&inhibit_mutex);
	spin_lock(&clients_lock);
	hash_del_rcu(&client->node);
	hash_for_each(clients, bucket, other, node)
		last &= other->vcpu->kvm != kvm;
	spin_unlock(&clients_lock);
	/* There is one bit for all vCPUs of the VM. */
	if (last)
		kvm_clear_apicv_inhibit(kvm, APICV_INHIBIT_REASON_BLOCKIRQ);
	mutex_unlock(&inhibit_mutex);
}

static struct page *shared_page(gfp_t flags)
{
	struct page *page = alloc_page(flags | __GFP_ZERO);

	if (page)
		atomic64_inc(&gate_pages);
	return page;
}

static void put_shared_page(struct page *page)
{
	if (!page)
		return;
	/* A process may have it mapped for longer. */
	__free_page(page);
	atomic64_dec(&gate_pages);
}

static void client_free(struct gate_client *client)
{
	unsigned int at;

	view_free(&client->view);
	gate_free_page(client->list);
	gate_free_page(client->table);
	gate_free_page(client->private);
	for (at = 0; at < ARRAY_SIZE(client->stack); at++)
		put_shared_page(client->stack[at]);
	for (at = 0; client->shared && at < client->shared_pages; at++)
		put_shared_page(client->shared[at]);
	kvfree(client->shared);
	kfree(client);
	atomic64_dec(&gate_clients);
	module_put(THIS_MODULE);
}

/* For probes, which cannot wait. */
static void lose(struct work_struct *work)
{
	struct gate_server *server =
		client_server(container_of(work, struct gate_client, lose));

	if (!server)
		return;
	gate_log("a server's kernel chose another process during a delegation: that server is lost");
	server_lose(server);
	server_put(server);
}

/* Disarms the vCPU as soon as possible, and then frees the client. */
static void reap(struct work_struct *work)
{
	struct gate_client *client = container_of(to_delayed_work(work), struct gate_client, reap);
	struct kvm_vcpu *vcpu = client->vcpu;

	if (!smp_load_acquire(&client->disarmed)) {
		bool idle = mutex_trylock(&vcpu->mutex);

		/*
		 * In KVM_RUN, its own thread does this before the guest continues. This is also the
		 * case if the vCPU was interrupted in the server, unless nobody can run it any
		 * more.
		 */
		if (!idle || (client->inside && file_count(client->vcpu_file) > 1)) {
			if (idle)
				mutex_unlock(&vcpu->mutex);
			kvm_vcpu_kick(vcpu);
			queue_delayed_work(gate_work, &client->reap, msecs_to_jiffies(10));
			return;
		}
		vcpu_load(vcpu);
		gate_disarm(client);
		vcpu_put(vcpu);
		mutex_unlock(&vcpu->mutex);
	}
	cancel_work_sync(&client->lose);
	forget(client);
	fput(client->vcpu_file);
	/* Probes may still be accessing it. */
	synchronize_rcu();
	client_free(client);
}

static int allocate(struct gate_client *client)
{
	unsigned int at;

	if (view_init(&client->view))
		return -ENOMEM;
	client->eptp = view_pointer(&client->view);
	client->list = gate_page(GFP_KERNEL_ACCOUNT);
	client->table = gate_page(GFP_KERNEL_ACCOUNT);
	client->private = gate_page(GFP_KERNEL_ACCOUNT);
	client->shared = kvcalloc(client->shared_pages, sizeof(*client->shared),
				  GFP_KERNEL_ACCOUNT);
	if (!client->list || !client->table || !client->private || !client->shared)
		return -ENOMEM;
	client->private->side = GATE_CLIENT;
	for (at = 0; at < ARRAY_SIZE(client->stack); at++) {
		client->stack[at] = shared_page(GFP_KERNEL_ACCOUNT);
		if (!client->stack[at])
			return -ENOMEM;
	}
	for (at = 0; at < client->shared_pages; at++) {
		client->shared[at] = shared_page(GFP_KERNEL_ACCOUNT);
		if (!client->shared[at])
			return -ENOMEM;
	}
	return 0;
}

struct gate_client *client_register(const struct gate_client_args *args)
{
	struct gate_client *client;
	struct file *file;
	int error, pcid;

	if (!args->shared_pages || args->shared_pages > GATE_SHARED_PAGES ||
	    args->window & ~PAGE_MASK || args->window_gpa & ~PAGE_MASK ||
	    !canonical(args->window) || !canonical(args->window + WINDOW_BYTES) ||
	    args->features & ~(u64)(GATE_FEATURE_AVX | GATE_FEATURE_PKU | GATE_USER_ONLY) ||
	    args->window_gpa >= 1ull << 46 || args->cr3 >= 1ull << 46)
		return ERR_PTR(-EINVAL);
	if (!hooks_alive())
		return ERR_PTR(-ENODEV);
	file = vcpu_file(args->vcpu);
	if (IS_ERR(file))
		return ERR_CAST(file);
	/* With a nested guest, another VMCS would be loaded when a probe runs. */
	error = vcpu_has(file->private_data, CPUID_VMX);
	if (error > 0)
		error = -EOPNOTSUPP;
	if (!error)
		error = pcid = vcpu_has(file->private_data, CPUID_PCID);
	if (error < 0)
		goto fail;
	error = -ENOMEM;
	client = kzalloc(sizeof(*client), GFP_KERNEL_ACCOUNT);
	if (!client)
		goto fail;
	__module_get(THIS_MODULE);
	atomic64_inc(&gate_clients);
	INIT_DELAYED_WORK(&client->reap, reap);
	INIT_WORK(&client->lose, lose);
	INIT_LIST_HEAD(&client->peer);
	mutex_init(&client->mutex);
	client->vcpu_file = file;
	client->vcpu = file->private_data;
	client->cr3 = args->cr3;
	client->window = args->window;
	client->window_gpa = args->window_gpa;
	client->features = args->features;
	client->pcid = pcid;
	client->shared_pages = args->shared_pages;
	error = allocate(client);
	if (error)
		goto free;
	error = add(client);
	if (error)
		goto free;
	return client;
free:
	client_free(client);
fail:
	fput(file);
	return ERR_PTR(error);
}

/* What every server view contains in addition to the server's memory. Under the server's lock. */
static int map_window(struct gate_client *client, struct gate_server *server)
{
	struct gate_view *view = &client->view;
	u64 gpa = server->window_gpa;
	unsigned int at;
	int error;

	error = view_map(view, gpa + GATE_TRAMPOLINE, virt_to_page(trampoline_page), EPT_EXEC,
			 false);
	if (!error)
		error = view_map(view, gpa + GATE_TABLE, virt_to_page(client->table), EPT_READ,
				 false);
	if (!error)
		error = view_map(view, gpa + GATE_PRIVATE, virt_to_page(server_private), EPT_READ,
				 false);
	for (at = 0; !error && at < ARRAY_SIZE(client->stack); at++)
		error = view_map(view, gpa + GATE_STACK + at * PAGE_SIZE, client->stack[at],
				 EPT_READ | EPT_WRITE, false);
	for (at = 0; !error && at < client->shared_pages; at++)
		error = view_map(view, gpa + GATE_SHARED + at * PAGE_SIZE, client->shared[at],
				 EPT_READ | EPT_WRITE, false);
	return error;
}

/* Under the server's lock, and the client's mutex. */
static void set_server(struct gate_client *client, struct gate_server *server)
{
	spin_lock(&clients_lock);
	client->server = server;
	spin_unlock(&clients_lock);
}

/*
 * Revokes the view. A delegation ends with a reason. The caller flushes the views: afterwards no
 * vCPU executes in the server. Under the server's lock.
 */
void client_revoke(struct gate_client *client, int reason)
{
	WRITE_ONCE(client->list[1], 0);
	view_zap_all(&client->view);
	atomic_set(&client->abort, reason);
}

/* Called after all of the view was unmapped. */
static void free_view(struct gate_client *client)
{
	view_free_tables(&client->view);
	gate_free_page(client->top);
	client->top = NULL;
}

/*
 * Where the vCPU of a client is: 0 on the client's side, 1 in its server (perhaps interrupted
 * there), 2 in its server's kernel, -EAGAIN if it is in the guest or has just left it.
 */
int client_place(struct gate_client *client)
{
	if (smp_load_acquire(&client->entered))
		return -EAGAIN;
	/* As recorded by park() and after_exit(). */
	if (READ_ONCE(client->parked))
		return READ_ONCE(client->park.in_kernel) ? 2 : 1;
	return READ_ONCE(client->inside) ? 1 + READ_ONCE(client->in_kernel) : 0;
}

/* The maximum time between an exit and the probe after it, in polls of at least 100 us. */
#define LEAVE_LOOKS 10000

/* After client_revoke() and a flush: whether that has removed the vCPU from the server's kernel. */
static bool left_kernel(struct gate_client *client)
{
	int looks, place;

	for (looks = 0; looks < LEAVE_LOOKS; looks++) {
		place = client_place(client);
		/* Set before the vCPU's thread forgets where it was. */
		smp_rmb();
		if (place == 2 || READ_ONCE(client->left_kernel))
			return true;
		if (place >= 0)
			return false;
		kvm_vcpu_kick(client->vcpu);
		usleep_range(100, 200);
	}
	/* Its thread does not get a CPU. */
	return true;
}

static int unpair(struct gate_client *client)
{
	struct gate_server *server = client->server;

	if (!server)
		return -ENOTCONN;
	spin_lock(&server->lock);
	client_revoke(client, GATE_SERVER_GONE);
	flush_views();
	list_del_init(&client->peer);
	set_server(client, NULL);
	client->table->count = 0;
	spin_unlock(&server->lock);
	/* A server's kernel that is not in the view cannot have done anything. */
	if (!client->top && left_kernel(client)) {
		gate_log("a client was unpaired in its server's kernel: that server is lost");
		/* What it holds is never released. */
		server_lose(server);
	}
	free_view(client);
	server_put(server);
	return 0;
}

static int pair(struct gate_client *client, struct gate_server *server)
{
	u64 window_end = server->window_gpa + GATE_SHARED +
			 (u64)client->shared_pages * PAGE_SIZE;
	u64 top = client->cr3 & PAGE_MASK;
	int error;

	if (client->server)
		return -EBUSY;
	if (client->window != server->window)
		return -EINVAL;
	if (top >= server->window_gpa && top < window_end)
		return -EADDRINUSE;
	if (alias_hides(server, client)) {
		error = alias_check(server, client);
		if (error)
			return error;
	}
	if (alias_hides(server, client) || client->pcid || server->pcid ||
	    client->features & GATE_USER_ONLY) {
		client->top = gate_page(GFP_KERNEL_ACCOUNT);
		if (!client->top)
			return -ENOMEM;
	}
	memcpy(client->table, server->table, table_bytes(server->table->count));
	client->table->features = client->features;
	client->table->shared = (u64)client->shared_pages * PAGE_SIZE;
	WRITE_ONCE(client->left_kernel, false);

	spin_lock(&server->lock);
	error = server->dead ? -ESRCH : map_window(client, server);
	if (!error) {
		kref_get(&server->ref);
		set_server(client, server);
		/* From here on, the view follows changes of the server's memory. */
		list_add(&client->peer, &server->clients);
	}
	spin_unlock(&server->lock);
	if (error) {
		/* No CPU has used it. */
		view_zap_all(&client->view);
		free_view(client);
		return error;
	}
	error = server_map_all(server, client);
	spin_lock(&server->lock);
	if (server->dead)
		error = -ESRCH;
	if (!error && !server->awake)
		WRITE_ONCE(client->list[1], client->eptp);
	spin_unlock(&server->lock);
	client->counts.tables = client->view.tables * PAGE_SIZE;
	client->counts.user_only = !!client->top;
	if (error)
		unpair(client);
	return error;
}

int client_pair(struct gate_client *client, struct gate_server *server)
{
	int error;

	if (mutex_lock_killable(&client->mutex))
		return -EINTR;
	error = pair(client, server);
	mutex_unlock(&client->mutex);
	return error;
}

int client_unpair(struct gate_client *client)
{
	int error;

	mutex_lock(&client->mutex);
	error = unpair(client);
	mutex_unlock(&client->mutex);
	return error;
}

/* Afterwards the client belongs to its own work item. */
void client_close(struct gate_client *client)
{
	client_unpair(client);
	/* From here on, all entries of the list are invalid. */
	WRITE_ONCE(client->closing, true);
	queue_delayed_work(gate_work, &client->reap, 0);
}

/* A page of the window that the client's process may map. */
struct page *client_page(struct gate_client *client, unsigned long index, bool *writable)
{
	*writable = false;
	if (index == GATE_TRAMPOLINE / PAGE_SIZE)
		return virt_to_page(trampoline_page);
	if (index == GATE_TABLE / PAGE_SIZE)
		return virt_to_page(client->table);
	*writable = true;
	if (index == GATE_PRIVATE / PAGE_SIZE)
		return virt_to_page(client->private);
	if (index < GATE_SHARED / PAGE_SIZE)
		return NULL;
	index -= GATE_SHARED / PAGE_SIZE;
	return index < client->shared_pages ? client->shared[index] : NULL;
}

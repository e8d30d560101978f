// SPDX-License-Identifier: GPL-2.0
/*
 * gantry_gate: lets a vCPU of a client VM enter a server VM and return with VMFUNC, under an
 * unmodified KVM. This file contains the device's calls; gate.h describes them.
 */
#include <asm/vmx.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/uaccess.h>

#include "internal.h"

atomic64_t gate_pages, gate_pinned, gate_servers, gate_clients;
struct gate_private *server_private;
void *trampoline_page;
struct workqueue_struct *gate_work;

static_assert(sizeof(struct gate_table) == PAGE_SIZE);
static_assert(offsetof(struct gate_table, gs_base) == GATE_GS);
static_assert(offsetof(struct gate_table, stack) == GATE_STACK_TOP);
static_assert(offsetof(struct gate_table, mxcsr) == GATE_MXCSR);
static_assert(offsetof(struct gate_table, pkru) == GATE_PKRU);
static_assert(offsetof(struct gate_table, features) == GATE_FEATURES);
static_assert(offsetof(struct gate_table, count) == GATE_COUNT);
static_assert(offsetof(struct gate_table, shared) == GATE_SHARED_BYTES);
static_assert(offsetof(struct gate_table, handlers) == GATE_HANDLERS);
static_assert(offsetof(struct gate_private, stack) == GATE_SAVED_STACK);
static_assert(offsetof(struct gate_private, busy) == GATE_BUSY);
static_assert(offsetof(struct gate_private, fs_base) == GATE_SAVED_FS);
static_assert(offsetof(struct gate_private, gs_base) == GATE_SAVED_GS);
static_assert(offsetof(struct gate_private, pkru) == GATE_SAVED_PKRU);

void *gate_page(gfp_t flags)
{
	void *page = (void *)get_zeroed_page(flags);

	if (page)
		atomic64_inc(&gate_pages);
	return page;
}

void gate_free_page(void *page)
{
	if (!page)
		return;
	free_page((unsigned long)page);
	atomic64_dec(&gate_pages);
}

/* What an open file is. It becomes a server or a client once. */
struct gate_file {
	/* Held while it becomes a server or a client, which may take long. */
	struct mutex mutex;
	struct gate_server *server;
	struct gate_client *client;
};

static const struct file_operations operations;

static int gate_open(struct inode *inode, struct file *file)
{
	struct gate_file *gate = kzalloc(sizeof(*gate), GFP_KERNEL_ACCOUNT);

	if (!gate)
		return -ENOMEM;
	mutex_init(&gate->mutex);
	file->private_data = gate;
	return 0;
}

static int gate_release(struct inode *inode, struct file *file)
{
	struct gate_file *gate = file->private_data;

	if (gate->client)
		client_close(gate->client);
	if (gate->server) {
		server_die(gate->server);
		server_put(gate->server);
	}
	kfree(gate);
	return 0;
}

static long register_server(struct gate_file *gate, void __user *user)
{
	struct gate_server_args args;
	struct gate_server *server;

	if (copy_from_user(&args, user, sizeof(args)))
		return -EFAULT;
	if (gate->server || gate->client)
		return -EBUSY;
	server = server_register(&args);
	if (IS_ERR(server))
		return PTR_ERR(server);
	smp_store_release(&gate->server, server);
	return 0;
}

static long register_client(struct gate_file *gate, void __user *user)
{
	struct gate_client_args args;
	struct gate_client *client;

	if (copy_from_user(&args, user, sizeof(args)))
		return -EFAULT;
	if (gate->server || gate->client)
		return -EBUSY;
	client = client_register(&args);
	if (IS_ERR(client))
		return PTR_ERR(client);
	smp_store_release(&gate->client, client);
	return 0;
}

static long pair(struct gate_client *client, int __user *user)
{
	struct gate_server *server;
	struct file *file;
	long error;
	int fd;

	if (get_user(fd, user))
		return -EFAULT;
	file = fget(fd);
	if (!file)
		return -EBADF;
	error = -ENOTTY;
	if (file->f_op == &operations) {
		server = smp_load_acquire(&((struct gate_file *)file->private_data)->server);
		error = -EINVAL;
		if (server)
			error = client_pair(client, server);
	}
	fput(file);
	return error;
}

static long status(struct gate_client *client, void __user *user)
{
	struct gate_status status = {};

	if (client)
		status = client->counts;
	status.servers = atomic64_read(&gate_servers);
	status.clients = atomic64_read(&gate_clients);
	status.pages = atomic64_read(&gate_pages);
	status.pinned = atomic64_read(&gate_pinned);
	return copy_to_user(user, &status, sizeof(status)) ? -EFAULT : 0;
}

static long gate_ioctl(struct file *file, unsigned int call, unsigned long argument)
{
	struct gate_file *gate = file->private_data;
	struct gate_client *client = smp_load_acquire(&gate->client);
	void __user *user = (void __user *)argument;
	struct gate_server *server;
	long result;

	switch (call) {
	case GATE_REGISTER_SERVER:
	case GATE_REGISTER_CLIENT:
		if (mutex_lock_killable(&gate->mutex))
			return -EINTR;
		result = call == GATE_REGISTER_SERVER ? register_server(gate, user) :
							register_client(gate, user);
		mutex_unlock(&gate->mutex);
		return result;
	case GATE_PAIR:
		return client ? pair(client, user) : -EINVAL;
	case GATE_UNPAIR:
		if (!client)
			return -EINVAL;
		return client_unpair(client);
	case GATE_STATUS:
		return status(client, user);
	case GATE_WAKE:
	case GATE_SLEEP:
	case GATE_RETIRE:
		server = smp_load_acquire(&gate->server);
		if (!server)
			return -EINVAL;
		/* Clients have the file, too. */
		if (server->mm != current->mm)
			return -EPERM;
		if (call == GATE_WAKE)
			return server_wake(server);
		if (call == GATE_SLEEP)
			return server_sleep(server);
		return server_retire(server);
	default:
		return -ENOTTY;
	}
}

/* The window's pages, except the stack, which the client does not have. */
static int gate_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct gate_file *gate = file->private_data;
	struct gate_client *client = smp_load_acquire(&gate->client);
	unsigned long at;
	int error = 0;

	if (!client)
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	for (at = 0; at < vma_pages(vma) && !error; at++) {
		bool writable;
		struct page *page;

		if (vma->vm_pgoff + at < at)
			return -EINVAL;
		page = client_page(client, vma->vm_pgoff + at, &writable);
		if (!page)
			return -ENXIO;
		if (!writable) {
			if (vma->vm_flags & VM_WRITE)
				return -EACCES;
#if KERNEL_IS(6, 1)
			vma->vm_flags &= ~VM_MAYWRITE;
#else
			vm_flags_clear(vma, VM_MAYWRITE);
#endif
		}
		error = vm_insert_page(vma, vma->vm_start + at * PAGE_SIZE, page);
	}
	return error;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = gate_open,
	.release = gate_release,
	.unlocked_ioctl = gate_ioctl,
	.mmap = gate_mmap,
	.llseek = noop_llseek,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "gantry-gate",
	.fops = &operations,
	.mode = 0600,
};

/* The CPU features that are required, with a message for each. */
static int check_cpu(void)
{
	u64 secondary, ept;

	if (!boot_cpu_has(X86_FEATURE_VMX)) {
		pr_err(GATE_NAME ": this CPU has no VT-x, or the firmware has switched it off\n");
		return -ENODEV;
	}
	rdmsrl(MSR_IA32_VMX_PROCBASED_CTLS2, secondary);
	if (!(secondary >> 32 & SECONDARY_EXEC_ENABLE_VMFUNC)) {
		pr_err(GATE_NAME ": this CPU has no VMFUNC (Intel CPUs since 2013 have it)\n");
		return -ENODEV;
	}
	rdmsrl(MSR_IA32_VMX_VMFUNC, secondary);
	if (!(secondary & VMX_VMFUNC_EPTP_SWITCHING)) {
		pr_err(GATE_NAME ": this CPU's VMFUNC cannot switch EPTs\n");
		return -ENODEV;
	}
	rdmsrl(MSR_IA32_VMX_EPT_VPID_CAP, ept);
	if (!(ept & VMX_EPT_EXECUTE_ONLY_BIT) || !(ept & VMX_EPT_EXTENT_GLOBAL_BIT) ||
	    !(ept & VMX_EPT_2MB_PAGE_BIT)) {
		pr_err(GATE_NAME ": this CPU's EPT lacks execute-only or 2 MiB pages, or INVEPT\n");
		return -ENODEV;
	}
	if (!boot_cpu_has(X86_FEATURE_FSGSBASE)) {
		pr_err(GATE_NAME ": this CPU has no FSGSBASE\n");
		return -ENODEV;
	}
	return 0;
}

static int __init gate_init(void)
{
	int error = check_cpu();

	if (error)
		return error;
	error = -ENOMEM;
	trampoline_page = gate_page(GFP_KERNEL);
	server_private = gate_page(GFP_KERNEL);
	gate_work = alloc_workqueue(GATE_NAME, 0, 0);
	if (!trampoline_page || !server_private || !gate_work)
		goto fail;
	memcpy(trampoline_page, vmfunc_gate_start, vmfunc_gate_end - vmfunc_gate_start);
	server_private->side = GATE_SERVER;
	error = hooks_init();
	if (error)
		goto fail;
	error = misc_register(&device);
	if (error) {
		hooks_exit();
		goto fail;
	}
	return 0;
fail:
	if (gate_work)
		destroy_workqueue(gate_work);
	gate_free_page(trampoline_page);
	gate_free_page(server_private);
	return error;
}

/* No file is open, and no client is left: each of them holds a reference to the module. */
static void __exit gate_exit(void)
{
	misc_deregister(&device);
	destroy_workqueue(gate_work);
	hooks_exit();
	gate_free_page(trampoline_page);
	gate_free_page(server_private);
}

module_init(gate_init);
module_exit(gate_exit);
MODULE_DESCRIPTION("Exitless calls from a VM into another one, for Gantry");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
MODULE_SOFTDEP("pre: kvm_intel");

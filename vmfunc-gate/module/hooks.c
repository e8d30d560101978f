// SPDX-License-Identifier: GPL-2.0
/*
 * Intercepts KVM's guest entries and exits: two probes at functions of kvm_intel.
 *
 * Before each entry, entry 0 of a client's EPTP list is set to the root that KVM uses at that time;
 * KVM kicks vCPUs out of the guest before it frees a root. An event that would be injected while
 * the vCPU is in the server view parks the delegation first. After each exit, the VMCS field
 * EPT_POINTER tells whether the vCPU is in the server view. Exits from there that concern the
 * server are handled here instead of by KVM, which would mistake the server's addresses for the
 * client's.
 */
#include <asm/vmx.h>
#include <linux/kprobes.h>
#include <linux/rcupdate.h>
#include <linux/smp.h>

#include "internal.h"

#define VM_FUNCTION_EPTP_SWITCHING 1
/* With these, KVM never emulates a guest's instructions instead of entering it. */
#define NEEDED_CONTROLS (SECONDARY_EXEC_ENABLE_EPT | SECONDARY_EXEC_UNRESTRICTED_GUEST)
#define INTR_TYPE(info) ((info) & INTR_INFO_INTR_TYPE_MASK)

static u64 vmcs_read(unsigned long field)
{
	u64 value;

	asm volatile("vmread %1, %0" : "=rm"(value) : "r"(field) : "cc");
	return value;
}

static void vmcs_write(unsigned long field, u64 value)
{
	asm volatile("vmwrite %1, %0" : : "r"(field), "rm"(value) : "cc");
}

static void invept_all(void *unused)
{
	struct { u64 eptp, reserved; } operand = {};

	/*
	 * The CPU is in VMX operation, since a VM exists. A CPU that has just come online may not
	 * be yet.
	 */
	asm volatile("1: invept %0, %1\n2:\n" _ASM_EXTABLE(1b, 2b)
		     : : "m"(operand), "r"(2ul) : "memory", "cc");
}

/*
 * Afterwards, no CPU has translations of views that were unmapped, and each CPU has left the guest
 * and passes before_entry() before it enters one.
 */
void flush_views(void)
{
	on_each_cpu(invept_all, NULL, 1);
}

u64 get_register(struct kvm_vcpu *vcpu, int reg)
{
	if (!test_bit(reg, (unsigned long *)&vcpu->arch.regs_avail)) {
		vcpu->arch.regs[reg] = vmcs_read(reg == VCPU_REGS_RSP ? GUEST_RSP : GUEST_RIP);
		vcpu->arch.regs_avail |= 1u << reg;
	}
	return vcpu->arch.regs[reg];
}

static void set_register(struct kvm_vcpu *vcpu, int reg, unsigned long value)
{
	vcpu->arch.regs[reg] = value;
	vcpu->arch.regs_avail |= 1u << reg;
	vcpu->arch.regs_dirty |= 1u << reg;
}

static void set_rflags(struct kvm_vcpu *vcpu, unsigned long value)
{
	vmcs_write(GUEST_RFLAGS, value);
	/* KVM's copy is no longer valid. */
	vcpu->arch.regs_avail &= ~(1u << VCPU_EXREG_RFLAGS);
}

/* The vCPU continues after the instruction that exited. */
void skip_instruction(struct kvm_vcpu *vcpu, u64 next)
{
	set_register(vcpu, VCPU_REGS_RIP, next);
	vmcs_write(GUEST_INTERRUPTIBILITY_INFO, vmcs_read(GUEST_INTERRUPTIBILITY_INFO) &
			~(u64)(GUEST_INTR_STATE_STI | GUEST_INTR_STATE_MOV_SS));
}

/* A base that a guest has chosen. VM entry fails with a non-canonical one. */
static u64 base(u64 value)
{
	return canonical(value) ? value : 0;
}

static const unsigned long segment_fields[GATE_SEGMENT_FIELDS] = {
	GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_AR_BYTES,
	GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_AR_BYTES,
};

static void set_segments(struct kvm_vcpu *vcpu, const u64 *values)
{
	int at;

	for (at = 0; at < GATE_SEGMENT_FIELDS; at++)
		vmcs_write(segment_fields[at], values[at]);
	/* KVM's copies are no longer valid. */
	vcpu->arch.regs_avail &= ~(1u << VCPU_EXREG_SEGMENTS);
}

static void set_cr3(struct kvm_vcpu *vcpu, u64 value)
{
	vmcs_write(GUEST_CR3, value);
	vcpu->arch.cr3 = value;
}

/* Ring 0: a handler's system call, or an exception that the server's kernel handles. */
static bool in_kernel(void)
{
	return !(vmcs_read(GUEST_SS_AR_BYTES) & 3 << 5);
}

/* With paging and not in system-management mode: the vCPU was not reset. */
static bool is_paged(struct gate_client *client)
{
	return vmcs_read(GUEST_CR0) & X86_CR0_PG && !(client->vcpu->arch.hflags & HF_SMM_MASK);
}

/* With the page table of the client's process or, in the server, of the process that serves. */
static bool is_clients(struct gate_client *client)
{
	u64 cr3 = vmcs_read(GUEST_CR3);

	return is_paged(client) && !((cr3 ^ client->cr3) & PAGE_MASK & ~BIT_ULL(63));
}

/*
 * Restores what the server's kernel changes to its state when the client was in ring 3. Before VM
 * entry, with interrupts off: the MSR belongs to the host's user as soon as this thread is
 * preempted.
 */
static void leave_kernel(struct gate_client *client)
{
	/* As SYSRET sets them. */
	u64 star = __rdmsr(MSR_STAR) >> 48;
	u64 user[GATE_SEGMENT_FIELDS] = {
		(star + 16) | 3, 0, 0xffffffff, 0xa0fb,
		(star + 8) | 3, 0, 0xffffffff, 0xc0f3,
	};

	set_segments(client->vcpu, user);
	set_cr3(client->vcpu, client->cr3);
	/* If the value is unknown, it is in use. */
	native_wrmsrl(MSR_KERNEL_GS_BASE, client->kernel_gs ?: vmcs_read(GUEST_GS_BASE));
	set_rflags(client->vcpu, X86_EFLAGS_IF | X86_EFLAGS_FIXED);
}

/*
 * Switches to the client's side, at an address of the trampoline, with the client's stack and
 * nothing else. Before VM entry, or in ring 3 of the client's process.
 */
static void to_client(struct gate_client *client, const char *at)
{
	struct kvm_vcpu *vcpu = client->vcpu;
	/* The client may change the page at any time. */
	u64 stack = READ_ONCE(client->private->stack);
	u64 fs_base = READ_ONCE(client->private->fs_base);
	u64 gs_base = READ_ONCE(client->private->gs_base);
	u32 pkru = READ_ONCE(client->private->pkru);
	int reg;

	for (reg = 0; reg < VCPU_REGS_RIP; reg++)
		set_register(vcpu, reg, reg == VCPU_REGS_RSP ? stack : 0);
	set_register(vcpu, VCPU_REGS_RIP, client->window + (at - vmfunc_gate_start));
	if (in_kernel() || !is_clients(client))
		leave_kernel(client);
	else
		/* IF and IOPL are unchanged: code in ring 3 cannot change them. */
		set_rflags(vcpu, (vmcs_read(GUEST_RFLAGS) & (X86_EFLAGS_IF | X86_EFLAGS_IOPL)) |
					 X86_EFLAGS_FIXED);
	vmcs_write(GUEST_FS_BASE, base(fs_base));
	vmcs_write(GUEST_GS_BASE, base(gs_base));
	if (client->features & GATE_FEATURE_PKU)
		vcpu->arch.pkru = pkru;
	vmcs_write(GUEST_INTERRUPTIBILITY_INFO, vmcs_read(GUEST_INTERRUPTIBILITY_INFO) &
			~(u64)(GUEST_INTR_STATE_STI | GUEST_INTR_STATE_MOV_SS));
	vmcs_write(GUEST_PENDING_DBG_EXCEPTIONS, 0);
	vmcs_write(EPT_POINTER, client->list[0]);
	client->inside = false;
}

/* Aborts a delegation. Its caller gets the reason. Before VM entry. */
static void abort_delegation(struct gate_client *client, int reason)
{
	struct kvm_vcpu *vcpu = client->vcpu;

	client->counts.aborted++;
	client->parked = false;
	if (READ_ONCE(client->private->busy)) {
		to_client(client, vmfunc_gate_aborted);
		set_register(vcpu, VCPU_REGS_RBX, reason);
		return;
	}
	/* It did not come through the trampoline: whatever goes wrong is the client's own fault. */
	client->counts.refused++;
	vmcs_write(EPT_POINTER, client->list[0]);
	client->inside = false;
	if (vmcs_read(VM_ENTRY_INTR_INFO_FIELD) & INTR_INFO_VALID_MASK) {
		kvm_queue_exception_e(vcpu, GP_VECTOR, 0);
	} else {
		vmcs_write(VM_ENTRY_EXCEPTION_ERROR_CODE, 0);
		vmcs_write(VM_ENTRY_INTR_INFO_FIELD, GP_VECTOR | INTR_TYPE_HARD_EXCEPTION |
				INTR_INFO_DELIVER_CODE_MASK | INTR_INFO_VALID_MASK);
	}
}

static void park(struct gate_client *client)
{
	struct kvm_vcpu *vcpu = client->vcpu;
	struct gate_parked *to = &client->park;
	int at;

	get_register(vcpu, VCPU_REGS_RSP);
	get_register(vcpu, VCPU_REGS_RIP);
	memcpy(to->regs, vcpu->arch.regs, sizeof(to->regs));
	to->rflags = vmcs_read(GUEST_RFLAGS);
	to->fs_base = vmcs_read(GUEST_FS_BASE);
	to->gs_base = vmcs_read(GUEST_GS_BASE);
	to->kernel_gs = __rdmsr(MSR_KERNEL_GS_BASE);
	to->cr3 = vmcs_read(GUEST_CR3);
	for (at = 0; at < GATE_SEGMENT_FIELDS; at++)
		to->segments[at] = vmcs_read(segment_fields[at]);
	to->pkru = vcpu->arch.pkru;
	to->in_kernel = in_kernel();
	to_client(client, vmfunc_gate_parked);
	client->parked = true;
	client->park_ended = 0;
	client->counts.parked++;
}

static void resume(struct gate_client *client)
{
	struct kvm_vcpu *vcpu = client->vcpu;
	struct gate_parked *from = &client->park;
	int reg;

	client->parked = false;
	for (reg = 0; reg <= VCPU_REGS_RIP; reg++)
		set_register(vcpu, reg, from->regs[reg]);
	set_rflags(vcpu, from->rflags);
	set_segments(vcpu, from->segments);
	set_cr3(vcpu, from->cr3);
	vmcs_write(GUEST_FS_BASE, from->fs_base);
	vmcs_write(GUEST_GS_BASE, from->gs_base);
	native_wrmsrl(MSR_KERNEL_GS_BASE, from->kernel_gs);
	if (client->features & GATE_FEATURE_PKU)
		vcpu->arch.pkru = from->pkru;
	vmcs_write(EPT_POINTER, client->eptp);
	client->counts.resumed++;
}

/* Called with the vCPU's VMCS loaded, by its thread or the holder of its mutex. */
void gate_disarm(struct gate_client *client)
{
	client->parked = client->inside = false;
	if (client->armed) {
		/* Only for a vCPU that nobody can run any more. */
		if (vmcs_read(EPT_POINTER) == client->eptp)
			vmcs_write(EPT_POINTER, client->list[0]);
		vmcs_write(VM_FUNCTION_CONTROL, 0);
		vmcs_write(EPTP_LIST_ADDRESS, 0);
		if (client->added_control)
			vmcs_write(SECONDARY_VM_EXEC_CONTROL,
				   vmcs_read(SECONDARY_VM_EXEC_CONTROL) &
					   ~(u64)SECONDARY_EXEC_ENABLE_VMFUNC);
		client->armed = false;
	}
	/* Probes access nothing of the client from here on. */
	smp_store_release(&client->disarmed, true);
}

/* Called by the vCPU's thread, or by the holder of its mutex. */
static bool cpuid_has(struct kvm_vcpu *vcpu, u32 bit)
{
	int at;

	for (at = 0; at < vcpu->arch.cpuid_nent; at++)
		if (vcpu->arch.cpuid_entries[at].function == 1)
			return vcpu->arch.cpuid_entries[at].ecx & bit;
	return false;
}

/* Whether the guest has a CPU feature; -EBUSY if the vCPU is running. */
int vcpu_has(struct kvm_vcpu *vcpu, u32 bit)
{
	bool has;

	if (!mutex_trylock(&vcpu->mutex))
		return -EBUSY;
	has = cpuid_has(vcpu, bit);
	mutex_unlock(&vcpu->mutex);
	return has;
}

static void arm(struct gate_client *client)
{
	u64 controls;

	controls = vmcs_read(SECONDARY_VM_EXEC_CONTROL);
	if (!client->armed && (cpuid_has(client->vcpu, CPUID_VMX) || ~controls & NEEDED_CONTROLS)) {
		gate_log("vCPU %d of process %d cannot delegate: guests of its own, or no EPT",
			 client->vcpu->vcpu_id, current->tgid);
		return;
	}
	/* 6.12 does not set this control, and clears it when it switches other controls. */
	if (!(controls & SECONDARY_EXEC_ENABLE_VMFUNC)) {
		vmcs_write(SECONDARY_VM_EXEC_CONTROL, controls | SECONDARY_EXEC_ENABLE_VMFUNC);
		client->added_control = true;
	}
	if (client->armed)
		return;
	vmcs_write(EPTP_LIST_ADDRESS, __pa(client->list));
	vmcs_write(VM_FUNCTION_CONTROL, VM_FUNCTION_EPTP_SWITCHING);
	client->armed = true;
}

/* Interrupts are off, and nothing but VM entry follows. The guest's MSRs are loaded. */
static void before_entry(struct gate_client *client)
{
	u64 view = vmcs_read(EPT_POINTER);
	u32 event = vmcs_read(VM_ENTRY_INTR_INFO_FIELD);
	bool inside = client->inside || view == client->eptp;
	bool resuming = client->resuming && !inside && client->parked;
	bool closing = READ_ONCE(client->closing);
	int reason = client->ending, gone;

	/*
	 * Before checking whether the server may be entered, and before forgetting where the vCPU
	 * was.
	 */
	smp_store_mb(client->entered, client->armed && !closing);
	gone = atomic_xchg(&client->abort, 0);
	if ((gone || closing) &&
	    (client->parked ? client->park.in_kernel : inside && in_kernel())) {
		WRITE_ONCE(client->left_kernel, true);
		smp_wmb();
	}
	client->inside = false;
	client->resuming = false;
	client->ending = 0;
	if (view != client->eptp)
		WRITE_ONCE(client->list[0], view);
	if (inside && !is_paged(client)) {
		/* Reset: there is nobody to tell. */
		vmcs_write(EPT_POINTER, client->list[0]);
		client->counts.aborted++;
		inside = false;
	} else if (inside && !in_kernel() && !is_clients(client)) {
		/* The server's kernel has switched to another of its processes. */
		reason = reason ?: GATE_EXIT;
		queue_work(gate_work, &client->lose);
	}
	if (gone || closing) {
		if (client->parked)
			client->park_ended = gone ?: GATE_SERVER_GONE;
		client->parked = resuming = false;
		reason = reason ?: gone ?: GATE_SERVER_GONE;
	}
	if (inside) {
		bool taken = event & INTR_INFO_VALID_MASK &&
			(INTR_TYPE(event) == INTR_TYPE_EXT_INTR ||
			 INTR_TYPE(event) == INTR_TYPE_NMI_INTR);

		/* An exception of the server must not reach the client. */
		if (event & INTR_INFO_VALID_MASK && !taken) {
			vmcs_write(VM_ENTRY_INTR_INFO_FIELD, 0);
			reason = reason ?: GATE_EXCEPTION;
		}
		if (reason)
			abort_delegation(client, reason);
		else if (taken)
			park(client);
		else if (view != client->eptp)
			vmcs_write(EPT_POINTER, client->eptp);
	} else if (resuming && !(event & INTR_INFO_VALID_MASK)) {
		/* Otherwise the client takes the event, and asks again afterwards. */
		resume(client);
	} else if (!in_kernel()) {
		client->kernel_gs = __rdmsr(MSR_KERNEL_GS_BASE);
	}
	if (closing)
		gate_disarm(client);
	else
		arm(client);
	WRITE_ONCE(client->entered, client->armed);
}

/* Exits that concern the host, or time, whatever the guest was doing. */
static bool is_hosts(u32 reason, u32 event)
{
	switch (reason) {
	case EXIT_REASON_EXTERNAL_INTERRUPT:
	case EXIT_REASON_INTERRUPT_WINDOW:
	case EXIT_REASON_NMI_WINDOW:
	case EXIT_REASON_PREEMPTION_TIMER:
	case EXIT_REASON_MCE_DURING_VMENTRY:
		return true;
	case EXIT_REASON_EXCEPTION_NMI:
		return INTR_TYPE(event) == INTR_TYPE_NMI_INTR ||
		       (event & INTR_INFO_VECTOR_MASK) == MC_VECTOR;
	default:
		return false;
	}
}

/* Exits that KVM may handle as usual while the vCPU is in the server view. */
static bool is_harmless(u32 reason, u32 event)
{
	return is_hosts(reason, event) || reason == EXIT_REASON_CPUID ||
	       reason == EXIT_REASON_PAUSE_INSTRUCTION || reason == EXIT_REASON_TPR_BELOW_THRESHOLD;
}

/* A write by the client to memory that it may only read. */
static bool is_forbidden_write(struct gate_client *client, u32 reason)
{
	u64 gpa;

	if (reason != EXIT_REASON_EPT_VIOLATION ||
	    !(vmcs_read(EXIT_QUALIFICATION) & EPT_VIOLATION_ACC_WRITE))
		return false;
	gpa = vmcs_read(GUEST_PHYSICAL_ADDRESS);
	return gpa >= client->window_gpa && gpa < client->window_gpa + GATE_PRIVATE;
}

/*
 * The trampoline's call, in ring 3 as it always is. In ring 0, the following steps would remove the
 * client from its kernel, which writes MSRs and is only allowed before VM entry, with interrupts
 * off.
 */
static bool is_resume(struct gate_client *client, u32 reason)
{
	return reason == EXIT_REASON_VMCALL && (client->parked || client->park_ended) &&
	       !in_kernel() && is_clients(client) &&
	       get_register(client->vcpu, VCPU_REGS_RIP) ==
		       client->window + (vmfunc_gate_parked - vmfunc_gate_start);
}

static int handle_violation(struct gate_client *client)
{
	u64 gpa = vmcs_read(GUEST_PHYSICAL_ADDRESS);
	u64 wanted = vmcs_read(EXIT_QUALIFICATION) & 7;
	u64 allowed = vmcs_read(EXIT_QUALIFICATION) >> 3 & 7;
	struct gate_server *server = client_server(client);
	bool rung = false;
	int error = -EFAULT;

	/* A page that is mapped and forbids the access remains so. */
	if (server && !(allowed && wanted & ~allowed))
		error = server_fault(server, client, gpa);
	if (server && error == -EFAULT && wanted == EPT_WRITE) {
		error = doorbell(server, client, gpa);
		rung = !error;
	}
	if (server)
		server_put(server);
	/* The guest tries again: signals and other requests for the vCPU are processed first. */
	if (error == -EAGAIN)
		return 0;
	if (error)
		gate_log("vCPU %d of process %d: access %llu to %#llx of its server refused (%d)",
			 client->vcpu->vcpu_id, current->tgid, wanted, gpa, error);
	else if (rung)
		client->counts.doorbells++;
	else
		client->counts.violations++;
	return error;
}

/* Ends the delegation before the next entry. In process context, with the vCPU in the server. */
static void end(struct gate_client *client, int reason)
{
	struct kvm_vcpu *vcpu = client->vcpu;

	client->ending = reason;
	/* An exception of the server must not reach the client. */
	vcpu->arch.exception.pending = false;
	vcpu->arch.exception.injected = false;
	/* 6.12 makes a vCPU that executed HLT wait before anyone is asked. */
	if (vcpu->arch.mp_state == KVM_MP_STATE_HALTED)
		vcpu->arch.mp_state = KVM_MP_STATE_RUNNABLE;
	/* A server's kernel that is not in the view cannot have done anything. */
	if (in_kernel() && !READ_ONCE(client->top) && READ_ONCE(client->private->busy)) {
		struct gate_server *server = client_server(client);

		if (!server)
			return;
		gate_log("vCPU %d of process %d was in its server's kernel: that server is lost",
			 vcpu->vcpu_id, current->tgid);
		/* What that kernel holds is never released. */
		server_lose(server);
		server_put(server);
	}
}

/* The trampoline's entry into a server. */
static bool is_gate_call(struct gate_client *client)
{
	struct kvm_vcpu *vcpu = client->vcpu;

	return vcpu->arch.regs[VCPU_REGS_RAX] == 0 && vcpu->arch.regs[VCPU_REGS_RCX] == 1 &&
	       READ_ONCE(client->private->busy) && !in_kernel() && is_clients(client) &&
	       get_register(vcpu, VCPU_REGS_RIP) ==
		       client->window + (vmfunc_gate_enter - vmfunc_gate_start);
}

/* Why the server cannot be entered. */
static int why_not(struct gate_client *client)
{
	struct gate_server *server = client_server(client);
	bool awake = server && READ_ONCE(server->awake) && !READ_ONCE(server->dead);

	if (server)
		server_put(server);
	return awake ? GATE_AWAKE : GATE_SERVER_GONE;
}

/* Replaces KVM's function, with its arguments and result. In process context. */
static int handle_exit(struct kvm_vcpu *vcpu, int fastpath)
{
	u32 reason = (u16)vmcs_read(VM_EXIT_REASON);
	struct gate_client *client;

	/*
	 * This client exists as long as its vCPU's thread is here; others that are visited may be
	 * freed.
	 */
	rcu_read_lock();
	client = client_of(vcpu);
	rcu_read_unlock();
	if (!client->inside) {
		if (is_resume(client, reason) && client->parked) {
			client->resuming = true;
		} else if (is_resume(client, reason)) {
			client->counts.aborted++;
			to_client(client, vmfunc_gate_aborted);
			set_register(vcpu, VCPU_REGS_RBX, client->park_ended);
			client->park_ended = 0;
		} else if (reason == EXIT_REASON_VMFUNC && is_gate_call(client)) {
			/* The view is available again: the instruction is retried. */
			if (READ_ONCE(client->list[1]))
				return 1;
			client->counts.aborted++;
			to_client(client, vmfunc_gate_aborted);
			set_register(vcpu, VCPU_REGS_RBX, why_not(client));
		} else if (reason == EXIT_REASON_VMFUNC) {
			client->counts.refused++;
			gate_log("vCPU %d of process %d: VMFUNC that is not in its list",
				 vcpu->vcpu_id, current->tgid);
			kvm_queue_exception(vcpu, UD_VECTOR);
		} else {
			client->counts.refused++;
			gate_log("vCPU %d of process %d wrote to its gate's read-only pages",
				 vcpu->vcpu_id, current->tgid);
			kvm_queue_exception_e(vcpu, GP_VECTOR, 0);
		}
		return 1;
	}
	if (reason == EXIT_REASON_EPT_VIOLATION) {
		bool delivering = vmcs_read(IDT_VECTORING_INFO_FIELD) & VECTORING_INFO_VALID_MASK;

		if (delivering)
			/*
			 * During delivery of the handler's exception: the server has no code for it
			 * here.
			 */
			end(client, GATE_EXCEPTION);
		else if (handle_violation(client))
			end(client, GATE_VIOLATION);
	} else if (reason == EXIT_REASON_EXCEPTION_NMI || reason == EXIT_REASON_TRIPLE_FAULT) {
		gate_log("vCPU %d of process %d: an exception in its server at %#llx",
			 vcpu->vcpu_id, current->tgid,
			 get_register(vcpu, VCPU_REGS_RIP));
		end(client, GATE_EXCEPTION);
	} else {
		gate_log("vCPU %d of process %d: exit %u in its server", vcpu->vcpu_id,
			 current->tgid, reason);
		end(client, GATE_EXIT);
	}
	return 1;
}

/* Whether handle_exit() has to take over. Called in the probe, which cannot sleep. */
static bool after_exit(struct gate_client *client)
{
	u32 full = vmcs_read(VM_EXIT_REASON), reason = (u16)full;
	u32 event = vmcs_read(VM_EXIT_INTR_INFO);

	if (full & VMX_EXIT_REASONS_FAILED_VMENTRY)
		return false;
	client->counts.exits++;
	if (is_hosts(reason, event))
		client->counts.interrupts++;
	client->inside = vmcs_read(EPT_POINTER) == client->eptp;
	client->in_kernel = client->inside && in_kernel();
	if (client->inside) {
		client->counts.exits_inside++;
		client->counts.interrupts_inside += is_hosts(reason, event);
		/* What was parked was given up: its thread has delegated anew. */
		client->parked = false;
		return !is_harmless(reason, event);
	}
	/* 6.12 warns about this exit, since it never armed VMFUNC. */
	return reason == EXIT_REASON_VMFUNC || is_resume(client, reason) ||
	       is_forbidden_write(client, reason);
}

/* Ignores disarmed clients, vCPUs of other VMs, and nested guests. */
static struct gate_client *probed(struct pt_regs *regs)
{
	struct kvm_vcpu *vcpu = (struct kvm_vcpu *)regs_get_kernel_argument(regs, 0);
	struct gate_client *client = client_of(vcpu);

	if (!client || smp_load_acquire(&client->disarmed) || vcpu->arch.hflags & HF_GUEST_MASK)
		return NULL;
	return client;
}

static int entry_probe(struct kprobe *probe, struct pt_regs *regs)
{
	struct gate_client *client = probed(regs);

	if (client)
		before_entry(client);
	return 0;
}

static int exit_probe(struct kprobe *probe, struct pt_regs *regs)
{
	struct gate_client *client = probed(regs);
	bool ours;

	if (!client || !client->armed)
		return 0;
	ours = after_exit(client);
	/* From here on, others may check where it is. */
	smp_store_release(&client->entered, false);
	if (!ours)
		return 0;
	regs->ip = (unsigned long)handle_exit;
	return 1;
}

/*
 * A probe with a post-handler is not optimized to a jump, which could not change where execution
 * continues.
 */
static void no_jump(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

static struct kprobe probes[] = {
	{ .symbol_name = "vmx_vcpu_run", .pre_handler = entry_probe },
	{ .symbol_name = "vmx_handle_exit", .pre_handler = exit_probe, .post_handler = no_jump },
	/* Identifies vCPU files by this function's address; switched off immediately. */
	{ .symbol_name = "kvm_vcpu_ioctl" },
};

/* A function's address as in pointers to it: the probe is after ENDBR. */
static unsigned long address(struct kprobe *probe)
{
	unsigned long at = (unsigned long)probe->addr;
	static const u8 endbr[] = { 0xf3, 0x0f, 0x1e, 0xfa };

#ifdef CONFIG_X86_KERNEL_IBT
	if (!memcmp((void *)(at - sizeof(endbr)), endbr, sizeof(endbr)))
		at -= sizeof(endbr);
#else
	(void)endbr;
#endif
	return at;
}

static unsigned long vcpu_ioctl;

/* The file of a vCPU of a VM that this process has created. */
struct file *vcpu_file(int fd)
{
	struct file *file = fget(fd);
	struct kvm_vcpu *vcpu;

	if (!file)
		return ERR_PTR(-EBADF);
	if ((unsigned long)file->f_op->unlocked_ioctl != vcpu_ioctl) {
		fput(file);
		return ERR_PTR(-ENOTTY);
	}
	vcpu = file->private_data;
	if (vcpu->kvm->mm != current->mm) {
		fput(file);
		return ERR_PTR(-EPERM);
	}
	return file;
}

/* Whether KVM's functions still exist: kvm_intel was not reloaded under us. */
bool hooks_alive(void)
{
	return !kprobe_gone(&probes[0]) && !kprobe_gone(&probes[1]);
}

int hooks_init(void)
{
	int at, error;

	for (at = 0; at < ARRAY_SIZE(probes); at++) {
		error = register_kprobe(&probes[at]);
		if (error) {
			pr_err(GATE_NAME ": no function %s to probe (%d): load kvm_intel first\n",
			       probes[at].symbol_name, error);
			while (at--)
				unregister_kprobe(&probes[at]);
			return error == -ENOENT ? -ENODEV : error;
		}
	}
	vcpu_ioctl = address(&probes[2]);
	unregister_kprobe(&probes[2]);
	return 0;
}

void hooks_exit(void)
{
	unregister_kprobe(&probes[1]);
	unregister_kprobe(&probes[0]);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Doorbells: writes of a handler to an address where the server's VM has no memory, but an eventfd
 * of KVM's (ioeventfd) or another device of the kernel's. KVM would look for it among the client's
 * devices.
 *
 * The CPU reports neither the length of the instruction nor what it writes, so the instruction is
 * read from the server's memory and decoded. Only moves of registers and constants are supported,
 * which drivers use to access devices.
 */
#include "internal.h"

#define MOST_BYTES 15

struct move {
	unsigned int bytes;	/* length of the instruction */
	unsigned int size;	/* size of what is written: 1, 2, 4 or 8 */
	u64 value;
};

/* Translates a virtual address of the server's process with the server's page table. */
static int translate(struct gate_server *server, u64 address, u64 *gpa)
{
	u64 table = server->cr3, entry;
	int level, error;

	for (level = 3; level >= 0; level--) {
		u64 offset = (1ull << (12 + 9 * level)) - 1;

		error = server_read(server, table | (address >> (12 + 9 * level) & 511) << 3,
				    &entry, sizeof(entry));
		if (error)
			return error;
		if (!(entry & _PAGE_PRESENT))
			return -EFAULT;
		table = entry & PTE_PFN_MASK;
		if (!level || (level < 3 && entry & _PAGE_PSE)) {
			*gpa = (table & ~offset) | (address & offset);
			return 0;
		}
	}
	return -EFAULT;
}

/* Reads up to MOST_BYTES of the server's code. Returns how many. */
static int fetch(struct gate_server *server, u64 address, u8 *code)
{
	int found = 0, error = 0;

	while (!error && found < MOST_BYTES) {
		int part = min_t(u64, MOST_BYTES - found,
				 PAGE_SIZE - offset_in_page(address + found));
		u64 gpa;

		error = translate(server, address + found, &gpa);
		if (!error)
			error = server_read(server, gpa, code + found, part);
		if (!error)
			found += part;
	}
	return found ?: error;
}

/* MOV to memory: 88, 89, C6 /0 and C7 /0 (SDM volume 2, 2.1 and MOV). */
static int decode(struct kvm_vcpu *vcpu, const u8 *code, unsigned int length, struct move *move)
{
	unsigned int at = 0, size, displacement = 0, constant = 0, from;
	u8 opcode, modrm, rex = 0;
	bool word = false;

	while (at < length && code[at] == 0x66) {
		word = true;
		at++;
	}
	if (at < length && (code[at] & 0xf0) == 0x40)
		rex = code[at++];
	if (at + 2 > length)
		return -EINVAL;
	opcode = code[at++];
	modrm = code[at++];
	size = opcode & 1 ? (rex & 8 ? 8 : word ? 2 : 4) : 1;
	if ((opcode & 0xfe) == 0xc6 && !(modrm >> 3 & 7))
		constant = min(size, 4u);
	else if ((opcode & 0xfe) != 0x88)
		return -EINVAL;
	if (modrm >> 6 == 3)
		return -EINVAL;
	if (modrm >> 6 == 1)
		displacement = 1;
	else if (modrm >> 6 == 2 || (modrm & 7) == 5)
		displacement = 4;
	if ((modrm & 7) == 4) {
		if (at >= length)
			return -EINVAL;
		if (!(modrm >> 6) && (code[at] & 7) == 5)
			displacement = 4;
		at++;
	}
	at += displacement;
	if (at + constant > length)
		return -EINVAL;
	move->size = size;
	move->bytes = at + constant;
	if (constant) {
		s32 value = 0;

		memcpy(&value, code + at, constant);
		/* For 8 bytes, the constant contains the lower 4, which are sign-extended. */
		move->value = (s64)value;
		return 0;
	}
	from = (modrm >> 3 & 7) | (rex & 4) << 1;
	if (size == 1 && !rex && from >= 4)
		move->value = get_register(vcpu, from - 4) >> 8;
	else
		move->value = get_register(vcpu, from);
	return 0;
}

/*
 * Delivers a write that the vCPU could not execute. -EFAULT if there is nothing to deliver it to.
 */
int doorbell(struct gate_server *server, struct gate_client *client, u64 gpa)
{
	struct kvm_vcpu *vcpu = client->vcpu, *owner = server->vcpu->private_data;
	u64 at = get_register(vcpu, VCPU_REGS_RIP);
	u8 code[MOST_BYTES];
	struct move move;
	int length, error, srcu;

	length = fetch(server, at, code);
	if (length < 0)
		return length;
	error = decode(vcpu, code, length, &move);
	if (error)
		return error;
	srcu = srcu_read_lock(&owner->kvm->srcu);
	error = kvm_io_bus_write(owner, KVM_MMIO_BUS, gpa, move.size, &move.value);
	srcu_read_unlock(&owner->kvm->srcu, srcu);
	if (error)
		return -EFAULT;
	skip_instruction(vcpu, at + move.bytes);
	return 0;
}

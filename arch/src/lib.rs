//! The x86-64 machine as a guest finds it at power-on: its physical address space, how a kernel is
//! entered, and the contents of CPUID, MSRs, ACPI and SMBIOS.
//!
//! Nothing here calls KVM. Functions take plain values, write guest memory, and return the
//! `kvm-bindings` structures that the caller passes to a vCPU. All of it therefore runs in unit
//! tests and fuzzers without a virtual machine.
//!
//! ```text
//!   configuration ──> AddressMap ──> guest RAM (by the caller)
//!                         │
//!   kernel, initramfs ──> boot::load ──> LoadedGuest ──> boot::write_boot_data ──> EntryPoint
//!                                                            ▲                        │
//!   devices' AML ──────> acpi::write_tables ──> RSDP ────────┘     registers::{regs, sregs, fpu}
//!   platform strings ──> smbios::write                             cpuid::for_vcpu, msrs::boot
//! ```
//!
//! Kernel images and initramfs come from the operator, but their headers are parsed as hostile
//! input: no overflow, no panic, no write outside guest RAM.

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod msrs;
pub mod registers;
pub mod smbios;
pub mod topology;

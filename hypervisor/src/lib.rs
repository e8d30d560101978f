//! hypervisor

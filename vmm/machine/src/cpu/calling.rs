//! The vCPU that makes an access, for devices that act on behalf of the process that the vCPU
//! executes.

use std::{io, os::fd::BorrowedFd};

use devices::gate::{Caller, CallingVcpu};
use hypervisor::CurrentVcpu;

use super::thread::freeze_current;

// Where SYSCALL goes, and what it loads (SDM volume 4, table 2-2).
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const SYSCALL_MASK: u32 = 0xc000_0084;
/// GS base of the kernel, as long as the vCPU is in ring 3.
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// The vCPU of the calling thread.
pub struct Calling;

fn current() -> io::Result<CurrentVcpu> {
    hypervisor::current_vcpu().ok_or_else(|| io::Error::other("this is no vCPU's thread"))
}

impl CallingVcpu for Calling {
    fn caller(&self) -> io::Result<Caller> {
        let vcpu = current()?;
        let sregs = vcpu.sregs().map_err(io::Error::other)?;
        let msrs = vcpu.msrs([STAR, LSTAR, SYSCALL_MASK, KERNEL_GS_BASE]);
        let [star, lstar, mask, data] = msrs.map_err(io::Error::other)?;
        Ok(Caller {
            cr3: sregs.cr3,
            fs_base: sregs.fs.base,
            gs_base: sregs.gs.base,
            ring: sregs.ss.dpl,
            kernel: [
                sregs.cr0,
                sregs.cr4,
                sregs.efer,
                sregs.idt.base,
                sregs.gdt.base,
                sregs.tr.base,
                star,
                lstar,
                mask,
                data,
            ],
        })
    }

    fn with_fd(&self, work: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()> {
        work(current()?.fd());
        Ok(())
    }

    fn freeze(&self, frozen: bool) -> io::Result<()> {
        if freeze_current(frozen) {
            Ok(())
        } else {
            Err(io::Error::other("this is no vCPU's thread"))
        }
    }
}

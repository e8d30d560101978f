//! Runs a few bytes of guest code on the host's own KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

use std::{
    sync::{Mutex, mpsc},
    thread,
    time::Instant,
};

use hypervisor::{Exit, Exits, Kvm, MemorySlot, Vcpu, Vm, install_kick_handler};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const CODE: u64 = 0x1000;

/// Allocates memory that is never unmapped, so it outlives every VM.
fn memory(bytes: usize) -> *mut u8 {
    // SAFETY: a fresh anonymous mapping.
    let host = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(host, libc::MAP_FAILED);
    host.cast()
}

/// Creates a guest that will run real-mode `code` at [`CODE`], in a page of its own. Returns `None`
/// and prints why if there is no KVM.
fn guest(code: &[u8]) -> Option<(Vm, Vcpu)> {
    let kvm = match Kvm::open() {
        Ok(kvm) => kvm,
        Err(error) => {
            eprintln!("skipped: {error}");
            return None;
        }
    };
    install_kick_handler().unwrap();
    let vm = kvm.create_vm(0xfffb_d000, 0xfffb_c000).unwrap();
    let host = memory(0x1000);
    // SAFETY: the page is large enough for the code and not shared yet.
    unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), host, code.len()) };
    let slot = MemorySlot {
        guest: CODE,
        len: 0x1000,
        host,
        read_only: false,
    };
    // SAFETY: the memory is never unmapped.
    unsafe { vm.map(slot) }.unwrap();
    let vcpu = vm.create_vcpu(0, 0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.regs().unwrap();
    regs.rip = CODE;
    regs.rflags = 2;
    regs.rsi = CODE;
    regs.rcx = 3;
    regs.rdx = 0xe9;
    vcpu.set_regs(&regs).unwrap();
    Some((vm, vcpu))
}

#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

impl Exits for Recorder {
    fn pio_read(&self, _port: u16, data: &mut [u8]) {
        data.fill(0x5a);
    }
    fn pio_write(&self, port: u16, data: &[u8]) {
        self.0.lock().unwrap().push((port.into(), data.to_vec()));
    }
    fn mmio_read(&self, _address: u64, data: &mut [u8]) {
        data.fill(0xa5);
    }
    fn mmio_write(&self, address: u64, data: &[u8]) {
        self.0.lock().unwrap().push((address, data.to_vec()));
    }
}

impl Recorder {
    fn run_until(&self, vcpu: &mut Vcpu, writes: usize) -> Vec<(u64, Vec<u8>)> {
        while self.0.lock().unwrap().len() < writes {
            assert_eq!(vcpu.run(self).unwrap(), Exit::Handled);
        }
        self.0.lock().unwrap().clone()
    }
}

#[test]
fn accesses_arrive_with_their_width_and_reads_get_their_answer() {
    // in al, 0x10; out 0x80, al; mov [0x8000], ax; jmp $
    let code = [0xe4, 0x10, 0xe6, 0x80, 0xa3, 0x00, 0x80, 0xeb, 0xfe];
    let Some((_vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let writes = Recorder::default().run_until(&mut vcpu, 2);
    assert_eq!(writes, [(0x80, vec![0x5a]), (0x8000, vec![0x5a, 0])]);
}

#[test]
fn a_string_write_arrives_item_by_item() {
    // rep outsb; jmp $
    let code = [0xf3, 0x6e, 0xeb, 0xfe];
    let Some((_vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let writes = Recorder::default().run_until(&mut vcpu, 3);
    assert_eq!(
        writes,
        [(0xe9, vec![0xf3]), (0xe9, vec![0x6e]), (0xe9, vec![0xeb])]
    );
}

#[test]
fn an_instruction_that_kvm_lacks_is_named_with_what_avoids_it() {
    // popcnt ax, cx; out 0x80, al; jmp $
    let code = [0xf3, 0x0f, 0xb8, 0xc1, 0xe6, 0x80, 0xeb, 0xfe];
    let Some((_vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let recorder = Recorder::default();
    match vcpu.run(&recorder) {
        // The processor runs it, or this KVM emulates it: two bits of 3.
        Ok(exit) => {
            assert_eq!(exit, Exit::Handled);
            assert_eq!(*recorder.0.lock().unwrap(), [(0x80, vec![2])]);
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("at 0x1000, f3 0f b8 c1"), "{text}");
            let end = "(popcnt): add clearcpuid=popcnt to the guest kernel's command line";
            assert!(text.contains(end), "{text}");
        }
    }
}

#[test]
fn exits_are_counted_where_kvm_counts() {
    // out 0x80, al; jmp to it
    let code = [0xe6, 0x80, 0xeb, 0xfc];
    let Some((_vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let Some(stats) = vcpu.stats() else {
        return;
    };
    let exits = || stats.read().into_iter().find(|(name, _)| *name == "exits");
    let (_, before) = exits().expect("every KVM counts exits");
    Recorder::default().run_until(&mut vcpu, 50);
    let (_, after) = exits().unwrap();
    assert!(after >= before + 49, "{before} and {after}");
}

#[test]
fn a_kick_ends_a_run_that_never_exits_by_itself() {
    // out 0x80, al; jmp $
    let code = [0xe6, 0x80, 0xeb, 0xfe];
    let Some((_vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let kicker = vcpu.kicker();
    let (sender, running) = mpsc::channel();
    let thread = thread::spawn(move || {
        vcpu.enter_thread();
        Recorder::default().run_until(&mut vcpu, 1);
        sender.send(()).unwrap();
        vcpu.run(&Recorder::default()).unwrap()
    });
    running.recv().unwrap();
    kicker.kick();
    assert_eq!(thread.join().unwrap(), Exit::Interrupted);
    // The vCPU has been dropped, so a late kick has no effect.
    kicker.kick();
}

#[test]
fn a_saved_vcpu_goes_on_in_another_vm() {
    // out 0x80, al; out 0x81, al; jmp $
    let code = [0xe6, 0x80, 0xe6, 0x81, 0xeb, 0xfe];
    let Some((vm, mut vcpu)) = guest(&code) else {
        return;
    };
    Recorder::default().run_until(&mut vcpu, 1);
    vcpu.complete_access(&Recorder::default()).unwrap();
    let msrs = Kvm::open().unwrap().msr_indices().unwrap();
    let json = serde_json::to_string(&(vm.save().unwrap(), vcpu.save(&msrs).unwrap())).unwrap();
    drop((vm, vcpu));

    let (vm, mut vcpu) = guest(&code).unwrap();
    let (vm_state, vcpu_state) = serde_json::from_str(&json).unwrap();
    vcpu.restore(&vcpu_state).unwrap();
    vm.restore(&vm_state).unwrap();
    let writes = Recorder::default().run_until(&mut vcpu, 1);
    assert_eq!(writes[0].0, 0x81);
}

#[test]
fn a_vcpu_that_has_waited_for_its_state_gets_the_time_stamp_counter_in_it() {
    let code = [0xeb, 0xfe];
    let Some((_vm, vcpu)) = guest(&code) else {
        return;
    };
    let msrs = [0x10];
    let tsc = |state: &hypervisor::VcpuState| state.msrs[0].data;
    vcpu.set_tsc(1 << 62).unwrap();
    // The counter of a vCPU that was never set ahead would have about this value, less than a
    // second later.
    let mut state = vcpu.save(&msrs).unwrap();
    let ahead = u64::from(vcpu.tsc_khz().unwrap()) * 500;
    state.msrs[0].data = ahead;
    vcpu.restore(&state).unwrap();
    let after = tsc(&vcpu.save(&msrs).unwrap());
    assert!((ahead..1 << 61).contains(&after), "{after} after {ahead}");
    // 0 is what a newly created vCPU is set to: KVM synchronizes it with the others.
    vcpu.set_tsc(0).unwrap();
    assert!(tsc(&vcpu.save(&msrs).unwrap()) >= after);
}

/// Pages of the slot that are marked as written.
fn marked(log: &hypervisor::DirtyLog) -> Vec<usize> {
    let words = log.read().unwrap();
    let pages = usize::try_from(log.pages()).unwrap();
    let is_marked = |page: &usize| words[page / 64] >> (page % 64) & 1 == 1;
    (0..pages).filter(is_marked).collect()
}

#[test]
fn the_log_names_the_pages_that_were_written_since_they_were_armed() {
    // mov [0x3000], ax; out 0x80, al; mov [0x5000], ax; out 0x80, al; jmp $
    let code = [
        0xa3, 0x00, 0x30, 0xe6, 0x80, 0xa3, 0x00, 0x50, 0xe6, 0x80, 0xeb, 0xfe,
    ];
    let Some((vm, mut vcpu)) = guest(&code) else {
        return;
    };
    let vm = std::sync::Arc::new(vm);
    let host = memory(0x7000);
    let slot = MemorySlot {
        guest: 0x2000,
        len: 0x7000,
        host,
        read_only: false,
    };
    // SAFETY: the memory is never unmapped.
    let slot = unsafe { vm.map(slot) }.unwrap();
    let log = match vm.watch(slot) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("skipped: {error}");
            return;
        }
    };
    assert!(vm.watch(slot).is_err(), "one owner at a time");
    assert_eq!(marked(&log), [0, 1, 2, 3, 4, 5, 6], "nothing is armed yet");
    assert_eq!(marked(&log).len(), 7, "to read arms nothing");
    log.arm(0, &mut [u64::MAX]).unwrap();
    assert!(marked(&log).is_empty());
    let recorder = Recorder::default();
    recorder.run_until(&mut vcpu, 1);
    assert_eq!(marked(&log), [1]);
    recorder.run_until(&mut vcpu, 2);
    assert_eq!(marked(&log), [1, 3]);
    // Only the requested pages are armed.
    log.arm(0, &mut [0b10]).unwrap();
    assert_eq!(marked(&log), [3]);
    log.arm(1, &mut [u64::MAX]).unwrap();
    drop(log);
    let log = vm.watch(slot).unwrap();
    assert_eq!(marked(&log).len(), 7, "a new log knows nothing");
    vm.unmap(slot).unwrap();
    assert!(log.read().is_err() && log.arm(0, &mut [1]).is_err());
}

/// Measures mechanisms that could save a virtual GPU's guest the exit of every second doorbell.
/// None of them pays off.
#[test]
#[ignore = "a measurement: cargo test --release -p hypervisor changed -- --ignored --nocapture"]
fn what_it_costs_that_a_write_arrives_in_a_changed_way() {
    const TIMES: usize = 200;
    // out 0x80, al; jmp to it
    let Some((vm, mut vcpu)) = guest(&[0xe6, 0x80, 0xeb, 0xfc]) else {
        return;
    };
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let host = memory(0x1000);
    let page = |read_only| MemorySlot {
        guest: 0x10_0000,
        len: 0x1000,
        host,
        read_only,
    };
    let mut times: [Vec<f64>; 4] = Default::default();
    let timed = |of: &mut Vec<f64>, work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        of.push(start.elapsed().as_secs_f64() * 1e6);
    };
    // SAFETY: the memory is never unmapped.
    let mut slot = unsafe { vm.map(page(true)) }.unwrap();
    for nth in 0..TIMES {
        let address = 0xe000_0000 + nth as u64 * 4;
        let [exit, register, unregister, replace] = &mut times;
        timed(exit, &mut || {
            vcpu.run(&Recorder::default()).unwrap();
        });
        timed(register, &mut || {
            vm.register_doorbell(&event, address).unwrap();
        });
        timed(unregister, &mut || {
            vm.unregister_doorbell(&event, address).unwrap();
        });
        timed(replace, &mut || {
            vm.unmap(slot).unwrap();
            // SAFETY: as above.
            slot = unsafe { vm.map(page(nth % 2 == 0)) }.unwrap();
        });
    }
    let [exit, register, unregister, replace] = times.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    });
    println!(
        "us, medians of {TIMES}: an exit {exit:.1}; an eventfd for writes to an address: attached \
         {register:.1}, detached {unregister:.1}; a page becomes memory or read-only {replace:.1}"
    );
}

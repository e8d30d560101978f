extern crate std;

use std::{boxed::Box, cell::Cell, collections::BTreeMap, rc::Rc};

use super::*;

/// Pages in a map. Counts those in use, and allocates no more than a limit.
struct Pages {
    pages: BTreeMap<u64, Box<Entries>>,
    next: u64,
    limit: usize,
    used: Rc<Cell<usize>>,
}

impl Pages {
    fn new(limit: usize) -> (Self, Rc<Cell<usize>>) {
        let used = Rc::new(Cell::new(0));
        let pages = Self {
            pages: BTreeMap::new(),
            next: 0x7_0000_0000,
            limit,
            used: used.clone(),
        };
        (pages, used)
    }
}

// SAFETY: boxes are distinct, zeroed, and stay where they are until freed.
unsafe impl Frames for Pages {
    fn allocate(&mut self) -> Option<Hpa> {
        if self.pages.len() == self.limit {
            return None;
        }
        self.next += PAGE;
        self.pages.insert(self.next, Box::new([0; 512]));
        self.used.set(self.pages.len());
        Some(Hpa(self.next))
    }

    fn free(&mut self, frame: Hpa) {
        assert!(self.pages.remove(&frame.0).is_some());
        self.used.set(self.pages.len());
    }

    fn entries(&self, frame: Hpa) -> NonNull<Entries> {
        NonNull::from(self.pages[&frame.0].as_ref())
    }
}

fn ept() -> Ept<Pages> {
    Ept::new(Pages::new(1000).0).expect("there is memory")
}

#[test]
fn small_and_large_pages_are_found_with_their_offsets() {
    let mut ept = ept();
    ept.map(Gpa(0x1000), Hpa(0x9000), Size::Small, Access::READ)
        .unwrap();
    ept.map(Gpa(0x40_0000), Hpa(0x8020_0000), Size::Large, Access::WRITE)
        .unwrap();
    assert_eq!(
        ept.translate(Gpa(0x1abc)),
        Some((Hpa(0x9abc), Access::READ))
    );
    assert_eq!(
        ept.translate(Gpa(0x41_2345)),
        Some((Hpa(0x8021_2345), Access::WRITE))
    );
    assert_eq!(ept.translate(Gpa(0x2000)), None);
    assert_eq!(ept.translate(Gpa(1 << 48)), None);
}

#[test]
fn a_page_is_never_mapped_over_another() {
    let mut ept = ept();
    ept.map(Gpa(0x20_0000), Hpa(0), Size::Large, Access::READ)
        .unwrap();
    ept.map(Gpa(0x1000), Hpa(0x1000), Size::Small, Access::READ)
        .unwrap();
    for (gpa, size) in [
        (0x20_0000, Size::Large),
        (0x20_1000, Size::Small),
        (0x1000, Size::Small),
        (0, Size::Large),
    ] {
        let result = ept.map(Gpa(gpa), Hpa(0), size, Access::WRITE);
        assert_eq!(result, Err(Error::Occupied { gpa }));
    }
}

#[test]
fn misaligned_and_unreachable_addresses_are_refused() {
    let mut ept = ept();
    for (gpa, hpa, size) in [
        (1, 0, Size::Small),
        (0, 1, Size::Small),
        (0x1000, 0, Size::Large),
    ] {
        let result = ept.map(Gpa(gpa), Hpa(hpa), size, Access::READ);
        assert!(matches!(result, Err(Error::Misaligned { .. })));
    }
    for (gpa, hpa) in [(1 << 48, 0), (0, 1 << 52)] {
        let result = ept.map(Gpa(gpa), Hpa(hpa), Size::Small, Access::READ);
        assert_eq!(result, Err(Error::TooHigh { gpa, hpa }));
    }
}

#[test]
fn unmapped_pages_are_gone_and_can_be_mapped_again() {
    let mut ept = ept();
    ept.map(Gpa(0x1000), Hpa(0x9000), Size::Small, Access::READ)
        .unwrap();
    assert!(ept.unmap(Gpa(0x1000)));
    assert!(!ept.unmap(Gpa(0x1000)));
    assert_eq!(ept.translate(Gpa(0x1000)), None);
    ept.map(Gpa(0x1000), Hpa(0xa000), Size::Small, Access::CODE)
        .unwrap();
}

#[test]
fn running_out_of_memory_is_an_error_and_everything_is_freed() {
    let (pages, used) = Pages::new(3);
    let mut ept = Ept::new(pages).expect("the root fits");
    let result = ept.map(Gpa(0), Hpa(0), Size::Small, Access::READ);
    assert_eq!(result, Err(Error::NoMemory));
    drop(ept);
    assert_eq!(used.get(), 0);
}

#[test]
fn a_view_of_a_gibibyte_takes_less_than_64_kib() {
    let (pages, used) = Pages::new(1000);
    let mut ept = Ept::new(pages).expect("there is memory");
    for page in 1..512 {
        let at = page * Size::Large.bytes();
        ept.map(Gpa(at), Hpa(at), Size::Large, Access::WRITE)
            .unwrap();
    }
    // The first 2 MiB as small pages, which contain CR3's alias, and the window at a high address.
    for page in 0..512 {
        ept.map(
            Gpa(page * PAGE),
            Hpa(page * PAGE),
            Size::Small,
            Access::WRITE,
        )
        .unwrap();
    }
    for page in 0..4 {
        let gpa = Gpa((1 << 40) + page * PAGE);
        ept.map(gpa, Hpa(page * PAGE), Size::Small, Access::READ)
            .unwrap();
    }
    // One more page for the EPTP list, and the four of the window.
    assert!(
        (ept.tables() + 5) * PAGE as usize <= 64 * 1024,
        "{}",
        ept.tables()
    );
    assert_eq!(used.get(), ept.tables());
    drop(ept);
    assert_eq!(used.get(), 0);
}

#[test]
fn the_list_has_two_valid_entries() {
    let list = EptpList::new(0x101e, 0x201e);
    assert_eq!(list.entries()[..2], [0x101e, 0x201e]);
    assert!(list.entries()[2..].iter().all(|entry| *entry == 0));
}

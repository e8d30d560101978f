//! Tests the RAM that guests lend to the GPU.

use super::*;

// The maximum number of fronts can each lend the maximum number of ranges.
const _: () =
    assert!(server::MOST_FRONTS * partition::MOST_RANGES <= gf100::device::ram::MAX_RANGES);

#[test]
fn ram_that_can_vanish_is_refused() {
    let mut mediator = gpu("ram", Name::Fair, LONG);
    let guest = Guest::bare(&mut mediator);
    let mut give = |first, file: File| {
        let request = Request::Ram {
            first: Gfn(first),
            count: 16,
            offset: 0,
        };
        let files = vec![OwnedFd::from(file)];
        mediator.request(guest.id, request, files, Moment::now())
    };
    let unsealed = tempfile::tempfile().expect("a file");
    unsealed.set_len(MIB).expect("there is room");
    assert!(give(0x1000, unsealed).is_err());
    let sealed = || memfd::sealed(c"ram", 16 * PAGE).expect("there is room");
    assert!(give(0x1ff, sealed()).is_err(), "it overlaps");
    assert!(
        give(0x1000, memfd::sealed(c"ram", PAGE).expect("room")).is_err(),
        "too short"
    );
    assert!(give(0x1000, sealed()).is_ok());
}

#[test]
fn memory_of_huge_pages_is_refused_and_harms_nobody() {
    let mut mediator = gpu("huge", Name::Fair, LONG);
    let good = Guest::new(&mut mediator);
    let bad = Guest::bare(&mut mediator);
    let request = Request::Ram {
        first: Gfn(0x1000),
        count: (2 * MIB / PAGE) as u32,
        offset: 0,
    };
    let files = vec![OwnedFd::from(memory::tests::huge(2 * MIB))];
    let given = mediator.request(bad.id, request, files, Moment::now());
    assert!(matches!(given, Err(Error::Ram(_))), "{given:?}");
    let kept = Some(memory::tests::huge(VRAM));
    let joined = mediator.join(VRAM, 128, 1, kept, Moment::now());
    assert!(matches!(joined, Err(Error::Memory(_))), "{joined:?}");
    good.submit(&mut mediator, 1, 0, &release(RAM_VA, 5));
    done(&mut mediator, &good, 1);
}

#[test]
fn who_has_as_much_ram_as_the_gpu_addresses_takes_nobody_elses() {
    let mut mediator = gpu("window", Name::Fair, LONG);
    let greedy = Guest::bare(&mut mediator);
    // This allocates no memory.
    let file = memfd::sealed(c"ram", 1 << 40).expect("there is room");
    let mut give = |first, count| {
        let request = Request::Ram {
            first: Gfn(first),
            count,
            offset: 0,
        };
        let files = vec![OwnedFd::from(file.try_clone().expect("there is room"))];
        mediator.request(greedy.id, request, files, Moment::now())
    };
    let all = 1 << 28;
    let refused = give(0x1000, all - 0x1000);
    assert!(matches!(refused, Err(Error::Window { .. })), "{refused:?}");
    // In pieces, as long as there is room.
    let given = (1..32).map(|nth| give(nth << 23, 1 << 23).is_ok());
    let given = given.filter(|is_given| *is_given).count();
    assert!(
        (8..10).contains(&given),
        "{given} of 32: two of seven parts"
    );
    let good = Guest::new(&mut mediator);
    good.submit(&mut mediator, 1, 0, &release(RAM_VA, 5));
    done(&mut mediator, &good, 1);
}

#[test]
fn ranges_of_those_who_have_gone_leave_no_gaps_that_are_too_short_for_others() {
    let mut mediator = gpu("gaps", Name::Fair, LONG);
    // This allocates no memory.
    let file = memfd::sealed(c"ram", 1 << 40).expect("there is room");
    let give = |mediator: &mut Mediator, guest: &Guest, first, count| {
        let request = Request::Ram {
            first: Gfn(first),
            count,
            offset: 0,
        };
        let files = vec![OwnedFd::from(file.try_clone().expect("there is room"))];
        let given = mediator.request(guest.id, request, files, Moment::now());
        given.expect("it is within its part");
    };
    let (gone, stays) = (Guest::bare(&mut mediator), Guest::bare(&mut mediator));
    // Half of all addresses, alternating between both guests.
    for nth in 1..33 {
        for guest in [&gone, &stays] {
            give(&mut mediator, guest, nth << 21, 1 << 21);
        }
    }
    mediator
        .leave(gone.id, Moment::now())
        .expect("the GPU is there");
    // The share of each guest is more than 36 of 128.
    for _ in 0..2 {
        let guest = Guest::bare(&mut mediator);
        give(&mut mediator, &guest, 1 << 21, 36 << 21);
    }
}

//! Objects of one program that another one duplicates.

use super::{ALLOCATE, GPU, Owner, Served, serve, word, words};

const DUPLICATE: u32 = 0xc01c_4634;
const SHARE: u32 = 0xc018_4635;
const VIDEO: u32 = 7;
const DEVICE_PART: u32 = 8;
const OF_FABRIC: u32 = 9;
const REVOKE: u32 = 1 << 16;

/// A program with 64 KiB of video memory and a part of the GPU.
fn exporter(served: &Served) -> Owner {
    let owner = Owner::new(served);
    let header = [
        (0, owner.client),
        (4, GPU),
        (8, VIDEO),
        (12, 0x40),
        (16, 1),
        (48 + 64, 1 << 16),
    ];
    let allocated = owner.call(owner.control, ALLOCATE, &words(48 + 128, &header));
    assert_eq!(word(&allocated, 40), 0);
    assert_eq!(owner.allocate(GPU, DEVICE_PART, 0x2080, 4), 0);
    assert_eq!(owner.allocate(GPU, OF_FABRIC, 0xf8, 48), 0);
    owner
}

/// Shares an object by a policy of this type and action. Answers the status.
fn share(owner: &Owner, handle: u32, policy: u32) -> u32 {
    let block = [(0, owner.client), (4, handle), (12, 1), (16, policy)];
    let answer = owner.call(owner.control, SHARE, &words(24, &block));
    assert_eq!(word(&answer, 16), policy, "the program's own policy");
    word(&answer, 20)
}

/// Duplicates an object under the handle 100. Answers the status.
fn duplicate(owner: &Owner, (client, handle): (u32, u32)) -> u32 {
    let block = [
        (0, owner.client),
        (4, GPU),
        (8, 100),
        (12, client),
        (16, handle),
    ];
    word(
        &owner.call(owner.control, DUPLICATE, &words(28, &block)),
        24,
    )
}

#[test]
fn only_video_memory_that_is_shared_is_duplicated_by_others() {
    let served = serve();
    let (one, two) = (exporter(&served), Owner::new(&served));
    let (memory, part) = ((one.client, VIDEO), (one.client, DEVICE_PART));
    assert_eq!(duplicate(&two, memory), 0x1b, "it is not shared");
    let fresh = exporter(&served);
    let (of_fresh, _, _its_end) = super::open(&fresh.socket, "/dev/nvidia0");
    assert_eq!(duplicate(&two, (fresh.client, VIDEO)), 0x1b);
    let mapped = fresh.map(VIDEO, 4096, of_fresh).0;
    assert_eq!(mapped, 0, "a refused duplicate leaves it as it was");
    assert_eq!(duplicate(&two, (one.client, 99)), 0x31);
    assert_eq!(duplicate(&two, (one.client + 99, VIDEO)), 0x23);
    // With nobody, with one client, with another process.
    for share_type in [0, 3, 4] {
        assert_eq!(share(&one, VIDEO, share_type), 0);
        assert_eq!(duplicate(&two, memory), 0x1b, "type {share_type}");
    }
    for share_type in [1, 2] {
        assert_eq!(share(&one, VIDEO, share_type), 0);
        assert_eq!(duplicate(&two, memory), 0, "type {share_type}");
        assert_eq!(share(&one, VIDEO, share_type | REVOKE), 0);
        assert_eq!(duplicate(&two, memory), 0x1b, "it was taken back");
    }
    let of_fabric = (one.client, OF_FABRIC);
    assert_eq!(duplicate(&two, of_fabric), 0x1b);
    assert_eq!(share(&one, OF_FABRIC, 2), 0);
    assert_eq!(duplicate(&two, of_fabric), 0);
    assert_eq!(share(&one, DEVICE_PART, 2), 0);
    assert_eq!(duplicate(&two, part), 0x1b, "no memory");
    assert_eq!(duplicate(&one, part), 0, "its own");
    let state = served.device.0.lock().expect("no call has panicked");
    assert_eq!(state.objects.get(&(two.client, 100)), Some(&0xf8));
    assert!(state.share_types.iter().all(|of| [0, 4].contains(of)));
}

#[test]
fn what_was_duplicated_is_not_replaced_by_pages_of_a_slice() {
    let served = serve();
    let (one, two) = (exporter(&served), Owner::new(&served));
    assert_eq!(share(&one, VIDEO, 2), 0);
    assert_eq!(duplicate(&two, (one.client, VIDEO)), 0);
    for (owner, handle) in [(&one, VIDEO), (&two, 100)] {
        let (file, _, _end) = super::open(&owner.socket, "/dev/nvidia0");
        assert_eq!(owner.map(handle, 4096, file).0, 0x56);
    }
}

#[test]
fn pages_stay_taken_until_the_last_duplicate_is_gone() {
    let served = serve();
    let owner = Owner::new(&served);
    let header = [
        (0, owner.client),
        (4, GPU),
        (8, 7),
        (12, 0x3e),
        (16, 1),
        (48 + 64, 1 << 16),
    ];
    let allocated = owner.call(owner.control, ALLOCATE, &words(48 + 128, &header));
    assert_eq!(word(&allocated, 40), 0);
    assert_ne!(duplicate(&owner, (owner.client, 8)), 0);
    assert_eq!(duplicate(&owner, (owner.client, 7)), 0);
    owner.free(7);
    assert!(!owner.has_whole_slice(), "the duplicate has them");
    owner.free(100);
    assert!(owner.has_whole_slice());
}

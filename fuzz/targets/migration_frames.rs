//! What the source of a migration may send, up to a VM that runs.

#![no_main]

use std::{fs::File, io::Write, net::Shutdown, os::unix::net::UnixStream, time::Duration};

use base::Cancel;
use devices::accel::{
    Claim,
    rounds::CopiedPort,
    saved::{Piece, SavedSlice, check_pieces, image},
};
use libfuzzer_sys::fuzz_target;
use vmm_config::{AccelConfig, VmConfig};
use vmm_machine::save::SavedMachine;
use vmm_migration::{
    PROTOCOL,
    connection::Connection,
    destination::{Destination, Host},
    files::GivenFile,
    frame::{Header, Kind},
    gpu_driver::GpuDriver,
    lanes::Body,
    offer::{CopyOf, HostId, Moment, Offer, OfferedRegion},
    pages::Region,
    progress::{Direction, Progress},
};
use vmm_snapshot::state_file;

const REGION: u64 = 1 << 20;

/// A host that accepts everything.
struct Anything;

impl Host for Anything {
    fn examine(&mut self, offer: &Offer, _cancel: &Cancel) -> Vec<String> {
        let _ = offer.config.validate();
        Vec::new()
    }

    fn is_here(&self, _host: &HostId) -> bool {
        true
    }

    fn prepare(
        &mut self,
        _offer: Offer,
        _files: Vec<GivenFile>,
        _cancel: Cancel,
    ) -> Result<Vec<Region>, String> {
        [0, 1 << 32]
            .map(|guest| Region::unused(guest, REGION).map_err(|error| error.to_string()))
            .into_iter()
            .collect()
    }

    fn copy(
        &mut self,
        ports: Vec<CopiedPort>,
        archive: File,
        _cancel: Cancel,
    ) -> Result<(), String> {
        let words = |error: std::io::Error| error.to_string();
        let slices = ports.iter().flat_map(|port| &port.slices);
        check_pieces(slices.clone()).map_err(words)?;
        let size = archive.metadata().map_err(words)?.len();
        let mut lengths = 0;
        for slice in slices {
            let to = image().map_err(words)?;
            let _ = slice.window.read_changed(&archive, &to, &slice.kept);
            if let Some(piece) = &slice.image
                && piece.read(&archive, &image().map_err(words)?).is_ok()
            {
                lengths += piece.length;
            }
        }
        assert!(lengths <= size, "more was taken than has come");
        Ok(())
    }

    fn restore(
        &mut self,
        state: Vec<u8>,
        saved_at: Option<Moment>,
        _archive: Option<File>,
        _cancel: Cancel,
    ) -> Result<(), String> {
        let _ = saved_at.map(Moment::ago);
        let _ = state_file::decode::<SavedMachine>(&state);
        Ok(())
    }

    fn start(&mut self, _body: Body) -> Result<(), String> {
        Ok(())
    }

    fn take_locks(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn run(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn has_moved(&mut self, _fixed: Duration) {}
}

fn offer() -> Vec<u8> {
    let region = |guest| OfferedRegion {
        guest,
        len: REGION,
        hotplugged: false,
    };
    let offer = Offer {
        protocol: PROTOCOL,
        state_version: state_file::VERSION,
        gantry: "fuzz".to_owned(),
        config: Box::new(VmConfig {
            accels: Some(vec![AccelConfig::default()]),
            ..VmConfig::default()
        }),
        regions: vec![region(0), region(1 << 32)],
        verify: false,
        dry_run: false,
        paused: false,
        cpu: None,
        local: false,
        files: 0,
        lanes: 0,
        host: HostId::read(),
        copies: true,
        postcopy: false,
        gpu_driver: Some(GpuDriver {
            version: "580.159.04".to_owned(),
            models: vec!["NVIDIA H200".to_owned()],
            is_used: true,
        }),
        tap_descriptors: Vec::new(),
    };
    serde_json::to_vec(&offer).expect("an offer can be written")
}

/// A copy with some numbers chosen by the fuzzer.
fn copy(bytes: &[u8]) -> Vec<u8> {
    let number = |at: usize| u64::from(bytes.get(at).copied().unwrap_or_default());
    let piece = |at| Piece {
        at: number(at) << 12,
        length: number(at + 1) << 14,
        crc32: number(at + 2) as u32,
    };
    let slice = |first| SavedSlice {
        slice: number(0) as u32,
        state: number(1) as u32,
        claim: Claim::default(),
        window: piece(first),
        kept: (6..bytes.len().min(16))
            .map(|at| (number(at), number(at + 1)))
            .collect(),
        image: Some(piece(first + 1)),
        rounds: number(5) as u32,
    };
    let copy = CopyOf {
        archive: number(4) << 12,
        ports: vec![CopiedPort {
            id: "a".to_owned(),
            slices: vec![slice(2), slice(16)],
        }],
    };
    serde_json::to_vec(&copy).expect("a copy can be written")
}

/// Frames with correct checksums, which no fuzzer guesses. They are built from bytes: type, flags,
/// two bytes of length, contents. Flag 1: the bytes as they are. Flag 2: one bit of the header is
/// wrong. Flag 4: a valid offer, pages, or a copy of an application, instead of the contents.
fn frames(mut bytes: &[u8]) -> Vec<u8> {
    const KINDS: [Kind; 17] = [
        Kind::Offer,
        Kind::Pages,
        Kind::Barrier,
        Kind::State,
        Kind::Go,
        Kind::Failed,
        Kind::File,
        Kind::Prepared,
        Kind::Ready,
        Kind::Running,
        Kind::Denied,
        Kind::Join,
        Kind::Archive,
        Kind::Copy,
        Kind::Fetch,
        Kind::Fetched,
        Kind::Drained,
    ];
    let mut all = Vec::new();
    while let Some((&[kind, flags, low, high], rest)) = bytes.split_first_chunk::<4>() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
        let (given, rest) = rest.split_at(len);
        bytes = rest;
        if flags & 1 != 0 {
            all.extend_from_slice(given);
            continue;
        }
        let kind = KINDS[usize::from(kind) % KINDS.len()];
        let contents = match kind {
            Kind::Offer if flags & 4 != 0 => offer(),
            // The runs come from the fuzzer, their pages do not.
            Kind::Pages if flags & 4 != 0 => {
                let mut contents = given.to_vec();
                contents.resize(contents.len() + 4096 * usize::from(flags >> 4), flags);
                contents
            }
            Kind::Copy if flags & 4 != 0 => copy(given),
            _ => given.to_vec(),
        };
        let mut header = Header::of(kind, u32::from(flags), &contents, flags & 8 == 0).encode();
        if flags & 2 != 0 {
            header[usize::from(low) % header.len()] ^= 1 << (high % 8);
        }
        all.extend_from_slice(&header);
        all.extend_from_slice(&contents);
    }
    all
}

fuzz_target!(|bytes: &[u8]| {
    let Ok((here, mut there)) = UnixStream::pair() else {
        return;
    };
    // What the socket does not accept is cut off.
    let _ = there.set_nonblocking(true);
    let _ = there.write_all(&frames(bytes));
    let _ = there.shutdown(Shutdown::Write);
    let progress = Progress::new(Direction::Incoming, "fuzz");
    if let Ok(connection) = Connection::of_unix(here, progress.clone()) {
        let _ = Destination::new(connection, &mut Anything, progress).run();
    }
});

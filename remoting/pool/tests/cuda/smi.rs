//! What a guest's user sees of its devices by `gantry-smi`.

use std::{os::unix::fs::symlink, path::PathBuf, sync::OnceLock, thread};

use clap::Parser;
use cuda_definition::driver::types::*;
use gantry_smi::{Arguments, Error};

use crate::{
    driver::{context, ok},
    library::{MEMORY, beside},
};

/// A folder with the guest's driver by the name that programs know.
fn libraries() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("smi");
        std::fs::create_dir_all(&folder).expect("there is room for files");
        let link = folder.join("libcuda.so.1");
        let _ = std::fs::remove_file(&link);
        symlink(beside("libgantry_cuda.so"), link).expect("it is new");
        folder
    });
    folder.clone()
}

fn shown(line: &[&str]) -> Result<String, Error> {
    let folder = libraries();
    let folder = [
        "gantry-smi".as_ref(),
        "--libraries".as_ref(),
        folder.as_os_str(),
    ];
    let words = folder.into_iter().chain(line.iter().map(AsRef::as_ref));
    let mut out = Vec::new();
    Arguments::try_parse_from(words).unwrap().run(&mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

/// Fields of the only device.
fn fields(names: &str) -> Vec<String> {
    let query = format!("--query-gpu={names}");
    let line = shown(&[&query, "--format=csv,noheader,nounits"]).unwrap();
    line.trim_end().split(", ").map(str::to_owned).collect()
}

/// The device's name, as the driver has it.
fn name() -> String {
    let mut room = [0; 96];
    ok!(cuDeviceGetName(room.as_mut_ptr(), 96, 0));
    let bytes: Vec<u8> = room.iter().map(|one| one.cast_unsigned()).collect();
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(text.to_vec()).unwrap()
}

#[test]
fn a_user_sees_the_devices_and_scripts_what_they_ask_of_them() {
    let _context = context();
    let all = fields("index,count,name,uuid,compute_cap,driver_version,pci.bus_id");
    let [index, count, of, uuid, capability, version, bus] = &all[..] else {
        panic!("{all:?}");
    };
    assert_eq!(
        (index.as_str(), count.as_str(), version.as_str()),
        ("0", "1", "[N/A]")
    );
    assert_eq!(*of, name());
    let (mut major, mut minor) = (0, 0);
    ok!(cuDeviceComputeCapability(&mut major, &mut minor, 0));
    assert_eq!(*capability, format!("{major}.{minor}"));
    let mut address = [0; 32];
    ok!(cuDeviceGetPCIBusId(address.as_mut_ptr(), 32, 0));
    let address: String = address
        .iter()
        .take_while(|one| **one != 0)
        .map(|one| one.cast_unsigned() as char)
        .collect();
    assert_eq!(*bus, format!("0000{}", address.to_uppercase()));
    assert_eq!(
        shown(&["-L"]).unwrap(),
        format!("GPU 0: {of} (UUID: {uuid})\n")
    );
    let table = shown(&[]).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.lines().all(|line| line.len() <= 80), "{table}");
    assert!(
        table.contains(&uuid[..12]) && table.contains(&address.to_lowercase()),
        "{table}"
    );
    // By each of its names, and by none.
    for id in ["0", &uuid[..12], bus, &address] {
        assert_eq!(shown(&["-L", "-i", id]).unwrap().lines().count(), 1, "{id}");
    }
    for id in ["1", "GPU-ffffffff", "ffff:ff:1f.0"] {
        let refused = shown(&["-L", "-i", id]).unwrap_err();
        assert!(matches!(refused, Error::NoDevice(_)), "{id}: {refused}");
        assert_eq!(refused.status(), 6);
    }
}

#[test]
fn a_user_sees_how_much_of_the_quota_is_used() {
    let _alone = crate::driver::alone();
    let _context = context();
    // In a thread without a context, as in a program of its own.
    let asked = || fields("memory.total,memory.used,memory.free");
    let memory = || -> Vec<u64> {
        let all = thread::scope(|scope| scope.spawn(asked).join()).unwrap();
        all.iter().map(|one| one.parse().unwrap()).collect()
    };
    let before = memory();
    assert_eq!(before[0], MEMORY);
    assert_eq!(before[0], before[1] + before[2]);
    let mut at = 0;
    ok!(cuMemAlloc_v2(&mut at, 64 << 20));
    let after = memory();
    ok!(cuMemFree_v2(at));
    assert!(after[1] >= before[1] + 64, "{before:?} {after:?}");
    assert_eq!(after[0], before[0]);
    // It leaves no context of its own behind.
    let (mut flags, mut active) = (0, 1);
    ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 0);
    let answer = shown(&["--query-gpu=memory.total", "--format=csv"]).unwrap();
    assert_eq!(answer, format!("memory.total [MiB]\n{MEMORY} MiB\n"));
}

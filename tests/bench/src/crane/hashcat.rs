//! Runs hashcat, which searches for the passwords of given hashes, while it is moved to another worker and to another
//! pool, again 50 to 500 ms after each move. It must find all of them; otherwise a move has lost results.

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};
use gantry_host_tests::shared_device::Programs;
use gantry_tests::rig::packages;

use super::{
    Movable,
    foreign::{LONGEST, Way, moved},
    row,
};
use crate::sharing::hashcat;

/// Length of the passwords in bytes.
const LENGTH: u32 = 5;
/// Number of passwords, spread over those that are tried.
const PASSWORDS: usize = 64;
/// Native time in seconds for trying all passwords, if a byte has enough values for that.
const SECONDS: f64 = 15.0;

/// What is searched for, and in which set.
struct Search {
    /// The values that a byte of a password may have, in hexadecimal.
    values: String,
    /// Hashes and passwords in the format in which hashcat prints what it has found.
    found: BTreeSet<String>,
}

impl Search {
    /// Creates passwords for a device that tries `rate` of them per second.
    fn new(rate: f64, folder: &Path) -> Result<Self> {
        let values = (rate * SECONDS).powf(1.0 / f64::from(LENGTH)) as u64;
        let values = values.clamp(8, 256);
        let mut random: u64 = 7;
        let mut next = || {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (random >> 33) % values
        };
        let mut found = BTreeSet::new();
        let file = folder.join("password");
        for _ in 0..PASSWORDS {
            let password: Vec<u8> = (0..LENGTH).map(|_| next() as u8).collect();
            fs::write(&file, &password)?;
            let sum = packages::output(Command::new("md5sum").arg(&file))?;
            let hash = sum.split(' ').next().unwrap_or_default().to_owned();
            let digits: String = password.iter().map(|byte| format!("{byte:02x}")).collect();
            found.insert(format!("{hash}:{digits}"));
        }
        let hashes: Vec<_> = found
            .iter()
            .filter_map(|line| Some(line.split_once(':')?.0.to_owned()))
            .collect();
        fs::write(folder.join("hashes"), hashes.join("\n") + "\n")?;
        let values = (0..values).map(|value| format!("{value:02x}")).collect();
        Ok(Self { values, found })
    }

    /// Returns how many seconds it takes to find all of them.
    fn run(&self, mut command: Command, program: &Path, folder: &Path) -> Result<f64> {
        let output = folder.join("found");
        let _ = fs::remove_file(&output);
        hashcat::prepare(&mut command, program)?;
        command
            // Natively, there may be more devices.
            .args(["-d", "1"])
            .args(["--hex-charset", "-1", &self.values])
            // A line consists of a hash and the password in hexadecimal.
            .args(["--outfile-format", "1,3", "--outfile"])
            .arg(&output)
            .arg(folder.join("hashes"))
            .arg("?1".repeat(LENGTH as usize));
        let begun = Instant::now();
        let status = command.output()?.status;
        // 1 means that it has tried all, but not found all.
        ensure!(
            matches!(status.code(), Some(0 | 1)),
            "hashcat has ended with {status}"
        );
        let took = begun.elapsed().as_secs_f64();
        let found = fs::read_to_string(&output).context("hashcat has found nothing")?;
        let found: BTreeSet<_> = found.lines().map(str::to_owned).collect();
        ensure!(
            found == self.found,
            "hashcat has found {} passwords of {PASSWORDS}",
            found.intersection(&self.found).count()
        );
        Ok(took)
    }
}

/// Measures the seconds natively, with workers, and while these are moved.
pub fn passwords(pools: &[Movable; 2]) -> Result<()> {
    let pool = &pools[0].pool;
    let Some(program) = hashcat::find(&pool.release) else {
        row("hashcat", "", "left out: it is not there");
        return Ok(());
    };
    let programs = Programs {
        built: &pool.release,
        vendors: &pool.vendors,
    };
    let folder = pool.folder("passwords")?;
    let search = Search::new(hashcat::alone(programs, &program, 3)?, &folder)?;
    let native = search.run(pool.native_for(LONGEST, &program), &program, &folder)?;
    let served = || search.run(pool.remoted_for(LONGEST, &program), &program, &folder);
    let remoted = served()?;
    let (amid, moves) = moved(pools, Way::Both, served)?;
    row(
        &format!(
            "hashcat, {PASSWORDS} passwords among {}^{LENGTH}, moved {moves} times within its pool and to another one",
            search.values.len() / 2
        ),
        "",
        &format!(
            "all found, in {amid:.1} s ({remoted:.1} s without moves, {native:.1} s natively)"
        ),
    );
    Ok(())
}

//! Runs scenarios in L1, and is the agent in L2.

use std::{
    fs,
    io::Write,
    panic,
    path::Path,
    sync::{Arc, Mutex},
    time::Instant,
};

use gantry_tests::{
    agent,
    report::{BENCH, DEMO, Outcome, Report},
    scenarios::{self, Context, Scenario},
};

/// Longest log that is sent to the host, in lines from the end.
const LOG_LINES: usize = 400;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args.first().is_some_and(|name| name.ends_with("agent")) {
        return agent::run(&args[1..]);
    }
    // `runner PORT FILE`: reports go to PORT; the scenarios that FILE names run, a line each.
    let port = args.get(1).map_or("/dev/stdout", String::as_str);
    let names = match args.get(2) {
        Some(file) => fs::read_to_string(file)?,
        None => String::new(),
    };
    let names: Vec<&str> = names.lines().collect();
    let out = Arc::new(Mutex::new(fs::File::options().write(true).open(port)?));
    let report = |report: &Report| {
        let mut out = out
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // Without a host there is nobody to complain to.
        let _ = writeln!(out, "{}", report.to_line());
    };
    report(&Report::Ready);
    if names == [DEMO] || names == [BENCH] {
        let result = if names == [DEMO] {
            demo(&report)
        } else {
            bench(&report)
        };
        let outcome = match result {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(error.chain().map(ToString::to_string).collect()),
        };
        report(&Report::Finished {
            name: DEMO.to_owned(),
            outcome,
            seconds: 0.0,
        });
        report(&Report::Done);
        return Ok(());
    }
    for scenario in scenarios::all() {
        if names.is_empty() || names.contains(&scenario.name) {
            run(&scenario, &report);
        }
    }
    report(&Report::Done);
    Ok(())
}

fn bench(report: &dyn Fn(&Report)) -> anyhow::Result<()> {
    gantry_tests::bench::run(|what, figure| report(&Report::Note(format!("| {what} | {figure} |"))))
}

fn demo(report: &dyn Fn(&Report)) -> anyhow::Result<()> {
    let disk = Path::new("/tmp/demo.raw");
    fs::File::create(disk)?.set_len(64 << 20)?;
    let parts = gantry_tests::demo::Parts {
        gantry: Path::new(gantry_tests::gantry::GANTRY),
        kernel: Path::new(gantry_tests::gantry::BZIMAGE),
        initramfs: Path::new(gantry_tests::gantry::INITRAMFS),
        disk,
    };
    let proven = gantry_tests::demo::run(&parts, |line| report(&Report::Note(line.to_owned())))?;
    report(&Report::Note(proven));
    Ok(())
}

fn run(scenario: &Scenario, report: &dyn Fn(&Report)) {
    let name = scenario.name.to_owned();
    report(&Report::Started { name: name.clone() });
    let dir = Path::new("/tmp/scenario");
    // Left over only if an earlier removal failed.
    let _ = fs::remove_dir_all(dir);
    let start = Instant::now();
    let outcome = match fs::create_dir_all(dir) {
        Err(error) => Outcome::Failed(vec![format!("cannot create {}: {error}", dir.display())]),
        Ok(()) => {
            let context = Context {
                dir: dir.to_owned(),
            };
            let result = panic::catch_unwind(panic::AssertUnwindSafe(|| (scenario.run)(&context)));
            match result {
                Ok(Ok(())) => Outcome::Passed,
                Ok(Err(error)) => Outcome::Failed(error.chain().map(ToString::to_string).collect()),
                Err(_) => Outcome::Failed(vec!["the scenario panicked".to_owned()]),
            }
        }
    };
    if matches!(outcome, Outcome::Failed(_)) {
        send_logs(dir, report);
    }
    let seconds = start.elapsed().as_secs_f64();
    report(&Report::Finished {
        name,
        outcome,
        seconds,
    });
    // Mounts of a scenario go first.
    let _ = std::process::Command::new("/bin/sh")
        .args(["-c", "umount /tmp/scenario/* 2>/dev/null"])
        .status();
    let _ = fs::remove_dir_all(dir);
}

fn send_logs(dir: &Path, report: &dyn Fn(&Report)) {
    let mut logs = vec![dir.join("gantry.log")];
    logs.extend(["restored", "second", "again"].map(|sub| dir.join(sub).join("gantry.log")));
    for path in logs {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        let lines: Vec<_> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            report(&Report::Log {
                file: path.display().to_string(),
                line: (*line).to_owned(),
            });
        }
    }
    let dmesg = gantry_tests::net::sh("dmesg | tail -n 15").unwrap_or_default();
    for line in dmesg.lines() {
        report(&Report::Log {
            file: "L1 kernel".to_owned(),
            line: line.to_owned(),
        });
    }
}

//! The program with libraries in place of the driver's: the order of its calls, and what it undoes.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    time::{Duration, Instant},
};

const GPU: &str = "GPU-00000000-0000-0000-0000-00000000000a";
const OTHER: &str = "GPU-00000000-0000-0000-0000-00000000000b";
const GIB: u64 = 1 << 30;

/// The libraries, and programs that have the first of them loaded.
struct Rig {
    folder: tempfile::TempDir,
    programs: Vec<Child>,
}

fn compile(arguments: &[&str], source: &Path, to: &Path) {
    let mut compiler = Command::new("cc");
    let done = compiler
        .args(["-O1", "-w", "-o"])
        .arg(to)
        .arg(source)
        .args(arguments)
        .status();
    assert!(done.unwrap().success());
}

impl Rig {
    fn new(programs: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let library = folder.path().join("libcuda.so.1");
        compile(&["-shared", "-fPIC"], &tests.join("libcuda.c"), &library);
        let nvml = folder.path().join("libnvidia-ml.so.1");
        compile(&["-shared", "-fPIC"], &tests.join("libnvidia-ml.c"), &nvml);
        let program = folder.path().join("program.c");
        fs::write(
            &program,
            "int cuInit(unsigned); int main() { cuInit(0); pause(); }",
        )
        .unwrap();
        let binary = folder.path().join("program");
        compile(&[library.to_str().unwrap()], &program, &binary);
        let mut rig = Self {
            folder,
            programs: Vec::new(),
        };
        for _ in 0..programs {
            let program = Command::new(&binary)
                .env("LD_LIBRARY_PATH", rig.folder.path())
                .spawn();
            let program = program.unwrap();
            let maps = format!("/proc/{}/maps", program.id());
            let begin = Instant::now();
            while !fs::read_to_string(&maps).unwrap().contains("libcuda.so.1") {
                assert!(
                    begin.elapsed() < Duration::from_secs(60),
                    "the program does not start"
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            rig.programs.push(program);
        }
        rig.gpu(GPU, 100 * GIB, &vec![GIB / 8; programs]);
        rig
    }

    /// The device, with so many bytes of each program.
    fn gpu(&self, uuid: &str, free: u64, bytes: &[u64]) {
        let used: u64 = bytes.iter().sum();
        let programs = self.programs.iter().zip(bytes);
        let programs = programs.map(|(program, bytes)| format!("{} {bytes}\n", program.id()));
        let text = format!("{uuid} {free} {used}\n{}", programs.collect::<String>());
        fs::write(self.path("gpu"), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn id(&self, program: usize) -> String {
        self.programs[program].id().to_string()
    }

    fn fail(&self, function: &str, program: usize, code: i32) {
        let name = format!("fail-{function}-{}", self.id(program));
        fs::write(self.path(&name), code.to_string()).unwrap();
    }

    fn heal(&self, function: &str, program: usize) {
        let name = format!("fail-{function}-{}", self.id(program));
        fs::remove_file(self.path(&name)).unwrap();
    }

    fn state(&self, program: usize) -> String {
        let name = format!("state-{}", self.id(program));
        fs::read_to_string(self.path(&name)).unwrap_or_else(|_| "0".to_owned())
    }

    /// The calls since the last time, with the positions of the programs.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        let _ = fs::remove_file(self.path("calls"));
        let name = |call: &str| {
            let (function, process) = call.split_once(' ').unwrap();
            let at = (0..self.programs.len()).find(|at| self.id(*at) == process);
            format!("{function} {}", at.unwrap())
        };
        calls.lines().map(name).collect()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut program = Command::new(env!("CARGO_BIN_EXE_gantry-checkpoint"));
        program
            .args(arguments)
            .arg("--journal")
            .arg(self.path("journal"))
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("STAND_IN", self.folder.path());
        program
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs it, and answers what it printed.
    fn done(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs it, and answers its exit status and its error.
    fn failed(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    }

    fn data_limit(&self, program: usize) -> String {
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.id(program))).unwrap();
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max data size"));
        line.unwrap().to_owned()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

#[test]
fn all_programs_are_locked_before_one_is_suspended() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    let said = rig.done(&["suspend", &first, &second]);
    assert!(
        said.contains(&format!("PID {first} (program) suspended in ")),
        "{said}"
    );
    assert!(said.contains("128 MiB"), "{said}");
    assert_eq!(
        rig.calls(),
        ["lock 0", "lock 1", "checkpoint 0", "checkpoint 1"]
    );
    let listed = rig.done(&["list"]);
    assert!(
        listed.contains(&format!("{first}  suspended     128 MiB  program")),
        "{listed}"
    );
    assert!(
        rig.done(&["suspend", &first])
            .contains("is suspended already")
    );
    let said = rig.done(&["resume", "--all"]);
    assert!(
        said.contains(&format!("PID {second} (program) resumed in ")),
        "{said}"
    );
    let mut calls = rig.calls();
    calls.sort();
    assert_eq!(calls, ["restore 0", "restore 1", "unlock 0", "unlock 1"]);
    assert_eq!(
        (rig.state(0), rig.state(1)),
        ("0".to_owned(), "0".to_owned())
    );
    assert!(
        rig.done(&["resume", "--all"])
            .contains("no program is suspended")
    );
}

#[test]
fn if_one_program_cannot_be_suspended_all_go_on() {
    let rig = Rig::new(3);
    let ids = [rig.id(0), rig.id(1), rig.id(2)];
    let arguments = ["suspend", &ids[0], &ids[1], &ids[2]];
    rig.fail("lock", 2, 600);
    let (status, error) = rig.failed(&arguments);
    assert_eq!(status, 1);
    assert!(
        error.contains("did not end within 10 s: error 600 (not ready); all programs go on"),
        "{error}"
    );
    assert_eq!(
        rig.calls(),
        ["lock 0", "lock 1", "lock 2", "unlock 1", "unlock 0"]
    );
    fs::remove_file(rig.path(&format!("fail-lock-{}", ids[2]))).unwrap();
    rig.fail("checkpoint", 1, 801);
    let (status, error) = rig.failed(&arguments);
    assert_eq!(status, 1);
    assert!(
        error.contains("error 801 (not supported); all programs go on"),
        "{error}"
    );
    let undone = ["unlock 2", "unlock 1", "restore 0", "unlock 0"];
    assert_eq!(rig.calls()[5..], undone);
    assert!(
        rig.done(&["resume", "--all"])
            .contains("no program is suspended")
    );
}

#[test]
fn whether_programs_could_be_suspended_is_told_without_touching_them() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    let said = rig.done(&["suspend", "--check", &first, &second]);
    let line = format!("PID {second} (program) can be suspended, at most 128 MiB");
    assert!(said.contains(&line), "{said}");
    assert_eq!(rig.calls(), [""; 0]);
    assert!(!rig.path("journal").join(&first).exists());
    rig.gpu(GPU, GIB, &[1 << 50, 0]);
    let (status, error) = rig.failed(&["suspend", "--check", &first]);
    assert_eq!(status, 1);
    assert!(error.contains("nothing was changed"), "{error}");
}

#[test]
fn a_program_that_has_ended_keeps_no_other_from_being_suspended() {
    let mut rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    // Its parent has not taken note of it.
    rig.programs[0].kill().unwrap();
    let stat = format!("/proc/{first}/stat");
    while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let said = rig.done(&["suspend", "--released", &first, &second]);
    assert!(said.contains(&second) && !said.contains(&first), "{said}");
    assert_eq!(rig.state(1), "2");
    assert_eq!(rig.failed(&["suspend", &first]).0, 1);
}

#[test]
fn a_program_that_ends_is_left_out_unless_its_suspension_may_have_ended_it() {
    for (function, left_out) in [("state", true), ("lock", true), ("checkpoint", false)] {
        let rig = Rig::new(2);
        let (first, second) = (rig.id(0), rig.id(1));
        rig.fail(function, 1, 2000);
        let words = ["suspend", "--released", &first, &second];
        if left_out {
            let said = rig.done(&words);
            assert!(said.contains(&first) && !said.contains(&second), "{said}");
            assert_eq!(rig.state(0), "2");
        } else {
            let (status, error) = rig.failed(&words);
            assert_eq!(status, 1);
            assert!(error.contains(&second), "{error}");
            assert_eq!(rig.state(0), "0");
        }
    }
}

#[test]
fn what_is_undone_waits_for_room_on_the_device() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    rig.gpu(GPU, 0, &[GIB / 8, GIB / 8]);
    rig.fail("checkpoint", 1, 801);
    let (status, error) = rig.failed(&["suspend", &first, &second]);
    assert_eq!(status, 1);
    assert!(error.contains("nothing was tried"), "{error}");
    assert_eq!([rig.state(0), rig.state(1)], ["2", "0"]);
    rig.gpu(GPU, GIB, &[0, GIB / 8]);
    rig.done(&["resume", "--all"]);
    assert_eq!(rig.state(0), "0");
}

#[test]
fn what_cannot_be_looked_at_stays_suspended_when_all_is_undone() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    // NVML fails from then on.
    fs::write(rig.path("gpu-then"), "").unwrap();
    rig.fail("checkpoint", 1, 801);
    let (status, said) = rig.failed(&["suspend", &first, &second]);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("stays suspended"), "{said}");
    assert_eq!([rig.state(0), rig.state(1)], ["2", "0"]);
    rig.gpu(GPU, GIB, &[0, GIB / 8]);
    rig.done(&["resume", "--all"]);
    assert_eq!(rig.state(0), "0");
}

#[test]
fn a_program_is_resumed_by_who_sees_no_devices() {
    let rig = Rig::new(1);
    rig.done(&["suspend", &rig.id(0)]);
    let mut resume = rig.command(&["resume", "--all"]);
    let output = resume.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(rig.state(0), "0");
}

#[test]
fn no_program_is_lost_where_the_driver_does_not_start() {
    let rig = Rig::new(2);
    let both = [0, 1];
    rig.done(&["suspend", &rig.id(0), &rig.id(1)]);
    fs::write(rig.path("fail-init-0"), "802").unwrap();
    both.iter()
        .for_each(|program| rig.fail("restore", *program, 999));
    let (status, said) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 1, "{said}");
    assert_eq!(
        said.matches("cuInit answers error 802").count(),
        2,
        "{said}"
    );
    assert_eq!(both.map(|program| rig.state(program)), ["2", "2"]);
    fs::remove_file(rig.path("fail-init-0")).unwrap();
    both.iter()
        .for_each(|program| rig.heal("restore", *program));
    rig.done(&["resume", "--all"]);
    assert_eq!(both.map(|program| rig.state(program)), ["0", "0"]);
}

#[test]
fn what_is_forced_is_undone_without_a_look_at_the_device() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    fs::write(rig.path("gpu-then"), format!("{GPU} 0 0\n")).unwrap();
    rig.fail("checkpoint", 1, 801);
    let (status, said) = rig.failed(&["suspend", "--force", &first, &second]);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("all programs go on"), "{said}");
    assert_eq!(rig.state(0), "0");
}

#[test]
fn what_others_give_back_meanwhile_is_not_needed_to_resume() {
    let rig = Rig::new(1);
    // A device that lists no programs: 60 GiB become free.
    let device = |free: u64, used: u64| format!("{GPU} {} {}\n", free * GIB, used * GIB);
    fs::write(rig.path("gpu"), device(10, 60)).unwrap();
    fs::write(rig.path("gpu-then"), device(70, 0)).unwrap();
    rig.done(&["suspend", "--force", &rig.id(0)]);
    fs::write(rig.path("gpu"), device(20, 0)).unwrap();
    rig.done(&["resume", "--all"]);
    assert_eq!(rig.state(0), "0");
}

#[test]
fn the_library_is_initialized_where_its_functions_want_that() {
    let rig = Rig::new(1);
    fs::write(rig.path("uninitialized"), "").unwrap();
    rig.done(&["suspend", &rig.id(0)]);
    assert_eq!(rig.state(0), "2");
    rig.done(&["resume", "--all"]);
    assert_eq!(rig.state(0), "0");
}

#[test]
fn one_that_stays_suspended_beside_one_that_is_lost_can_be_resumed_later() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    rig.gpu(GPU, 100 * GIB, &[0, GIB]);
    rig.done(&["suspend", &first, &second]);
    rig.fail("restore", 0, 2);
    rig.gpu(GPU, GIB / 2, &[0, 0]);
    let (status, error) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 1);
    assert!(
        error.contains("(lost)") && error.contains(&second),
        "{error}"
    );
    rig.gpu(GPU, 100 * GIB, &[0, 0]);
    assert_eq!(rig.failed(&["resume", "--all"]).0, 3);
    assert_eq!(rig.state(1), "0");
}

#[test]
fn what_stays_beside_one_that_is_lost_when_all_is_undone_can_be_resumed_later() {
    let rig = Rig::new(3);
    let programs = [rig.id(0), rig.id(1), rig.id(2)];
    rig.fail("checkpoint", 2, 801);
    rig.fail("restore", 1, 999);
    rig.fail("unlock", 0, 999);
    let mut words = vec!["suspend"];
    words.extend(programs.iter().map(String::as_str));
    let (status, said) = rig.failed(&words);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("(lost)"), "{said}");
    rig.heal("unlock", 0);
    let (status, _) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 3, "only the lost one is left");
    assert_eq!(rig.state(0), "0");
}

#[test]
fn a_program_that_fails_to_resume_is_not_tried_again() {
    let rig = Rig::new(1);
    let id = rig.id(0);
    rig.done(&["suspend", &id]);
    rig.fail("restore", 0, 2);
    let (status, error) = rig.failed(&["resume", &id]);
    assert_eq!(status, 3);
    assert!(error.contains("error 2 (out of memory)"), "{error}");
    rig.calls();
    let (status, error) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 3);
    assert!(error.contains("failed to resume before"), "{error}");
    assert_eq!(rig.calls(), [""; 0]);
    assert!(rig.done(&["list"]).contains("lost"));
    let (status, error) = rig.failed(&["suspend", &id]);
    assert_eq!(status, 1);
    assert!(error.contains("is lost already"), "{error}");
}

#[test]
fn a_lost_program_is_known_that_another_journal_had() {
    let rig = Rig::new(1);
    rig.done(&["suspend", &rig.id(0)]);
    fs::remove_dir_all(rig.path("journal")).unwrap();
    rig.fail("restore", 0, 2);
    assert_eq!(rig.failed(&["resume", &rig.id(0)]).0, 3);
    rig.heal("restore", 0);
    rig.calls();
    assert_eq!(rig.failed(&["resume", &rig.id(0)]).0, 3);
    assert_eq!(rig.calls(), [""; 0]);
}

#[test]
fn an_interrupted_resumption_is_no_success_later() {
    let rig = Rig::new(1);
    let id = rig.id(0);
    rig.done(&["suspend", &id]);
    rig.fail("restore", 0, -9);
    assert_eq!(rig.run(&["resume", &id]).status.code(), None);
    rig.heal("restore", 0);
    rig.calls();
    let (status, error) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 3);
    assert!(error.contains("a resumption was interrupted"), "{error}");
    assert_eq!(rig.failed(&["suspend", &id]).0, 1);
    assert_eq!(rig.calls(), [""; 0]);
    rig.done(&["resume", "--all", "--force"]);
}

#[test]
fn a_program_that_stays_locked_is_not_lost() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    rig.done(&["suspend", &first]);
    rig.fail("unlock", 0, 999);
    let (status, error) = rig.failed(&["resume", &first]);
    assert_eq!(status, 1);
    assert!(error.contains("cannot be unlocked: error 999"), "{error}");
    rig.heal("unlock", 0);
    rig.done(&["resume", "--all"]);
    rig.fail("unlock", 0, 999);
    rig.fail("lock", 1, 600);
    let (status, error) = rig.failed(&["suspend", &first, &second]);
    assert_eq!(status, 1);
    assert!(error.contains("cannot be unlocked: error 999"), "{error}");
    rig.heal("unlock", 0);
    rig.done(&["resume", "--all"]);
    assert_eq!([rig.state(0), rig.state(1)], ["0", "0"]);
}

#[test]
fn a_step_that_failed_after_its_work_is_undone() {
    let rig = Rig::new(1);
    rig.fail("lock", 0, 1600);
    let (status, error) = rig.failed(&["suspend", &rig.id(0)]);
    assert_eq!(status, 1);
    assert!(error.contains("error 600"), "{error}");
    assert_eq!(rig.state(0), "0", "it is not locked");
}

#[test]
fn an_entry_that_cannot_be_read_keeps_no_other_program_suspended() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    rig.done(&["suspend", &first, &second]);
    fs::write(rig.path("journal").join(&first), "{").unwrap();
    let (status, error) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 1);
    assert!(error.contains(&first), "{error}");
    assert_eq!([rig.state(0), rig.state(1)], ["2", "0"]);
    assert!(rig.done(&["list"]).contains(&first));
}

#[test]
fn a_program_that_does_not_fit_into_memory_is_not_touched() {
    let rig = Rig::new(1);
    rig.gpu(GPU, 0, &[1 << 50]);
    let (status, error) = rig.failed(&["suspend", "--limit", "3", &rig.id(0)]);
    assert_eq!(status, 1);
    assert!(error.contains("of memory are needed"), "{error}");
    assert_eq!(rig.calls(), [""; 0]);
}

#[test]
fn a_device_without_room_is_not_tried() {
    let rig = Rig::new(1);
    rig.done(&["suspend", &rig.id(0)]);
    rig.calls();
    rig.gpu(GPU, GIB / 16, &[]);
    let (status, error) = rig.failed(&["resume", "--all"]);
    assert_eq!(status, 1);
    assert!(
        error.contains("has 64 MiB free, 128 MiB are needed; nothing was tried"),
        "{error}"
    );
    assert_eq!(rig.calls(), [""; 0]);
    rig.done(&["resume", "--all", "--force"]);
    assert_eq!(rig.state(0), "0");
}

#[test]
fn a_program_resumes_on_another_device_that_takes_the_place() {
    let rig = Rig::new(1);
    rig.done(&["suspend", &rig.id(0)]);
    rig.gpu(OTHER, GIB, &[]);
    rig.done(&["resume", "--all", "--gpu", &format!("{GPU}={OTHER}")]);
    let pairs = fs::read_to_string(rig.path(&format!("pairs-{}", rig.id(0)))).unwrap();
    assert_eq!(pairs, "a=b ");
}

#[test]
fn a_device_of_another_type_is_not_tried() {
    let rig = Rig::new(1);
    rig.done(&["suspend", &rig.id(0)]);
    rig.gpu(OTHER, GIB, &[]);
    rig.calls();
    let output = rig
        .command(&["resume", "--all"])
        .env("STAND_IN_MODEL", "NVIDIA L4")
        .output();
    let output = output.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.contains("is of type NVIDIA L4, GPU-00000000-0000-0000-0000-00000000000a was of"),
        "{error}"
    );
    assert_eq!(rig.calls(), [""; 0]);
    rig.done(&["resume", "--all"]);
}

#[test]
fn a_limit_of_data_memory_is_raised_while_a_program_is_suspended() {
    let rig = Rig::new(1);
    let id = rig.id(0);
    let limited = Command::new("prlimit")
        .args(["--data=67108864:unlimited", "--pid", &id])
        .status();
    assert!(limited.unwrap().success());
    let before = rig.data_limit(0);
    rig.done(&["suspend", &id]);
    assert_ne!(rig.data_limit(0), before);
    rig.done(&["resume", &id]);
    assert_eq!(rig.data_limit(0), before);
    // A call that is killed has raised it already.
    rig.fail("lock", 0, -9);
    assert_eq!(rig.run(&["suspend", &id]).status.code(), None);
    rig.heal("lock", 0);
    rig.done(&["suspend", &id]);
    assert_ne!(rig.data_limit(0), before);
    rig.done(&["resume", &id]);
    assert_eq!(rig.data_limit(0), before);
}

#[test]
fn a_call_that_was_killed_between_steps_is_made_up_for() {
    let rig = Rig::new(2);
    let (first, second) = (rig.id(0), rig.id(1));
    rig.done(&["suspend", &first]);
    rig.calls();
    // Locked by a call that does not live any longer.
    fs::write(rig.path(&format!("state-{second}")), "1").unwrap();
    rig.done(&["suspend", &second]);
    assert_eq!(rig.calls(), ["unlock 1", "lock 1", "checkpoint 1"]);
    fs::write(rig.path(&format!("state-{second}")), "1").unwrap();
    rig.done(&["resume", &second]);
    assert_eq!(rig.calls(), ["unlock 1"]);
}

#[test]
fn a_named_program_whose_state_is_unknown_stops_all() {
    let rig = Rig::new(2);
    rig.fail("state", 1, 304);
    let (status, error) = rig.failed(&["suspend", &rig.id(0), &rig.id(1)]);
    assert_eq!(status, 1);
    assert!(
        error.contains("its state is not known: error 304"),
        "{error}"
    );
    assert_eq!(rig.calls(), [""; 0]);
}

#[test]
fn a_program_without_the_driver_and_a_missing_one_are_refused() {
    let rig = Rig::new(0);
    let own = std::process::id().to_string();
    let (status, error) = rig.failed(&["suspend", &own]);
    assert_eq!(status, 1);
    assert!(error.contains("does not use the driver"), "{error}");
    let (status, error) = rig.failed(&["suspend", "4194304"]);
    assert_eq!(status, 1);
    assert!(error.contains("PID 4194304"), "{error}");
}

#[test]
fn drivers_that_are_known_to_fail_are_refused_unless_forced() {
    let rig = Rig::new(1);
    let run = |arguments: &[&str]| {
        let mut command = rig.command(arguments);
        command
            .env("STAND_IN_VERSION", "570.133.07")
            .output()
            .unwrap()
    };
    let id = rig.id(0);
    assert_eq!(run(&["suspend", &id]).status.code(), Some(1));
    assert_eq!(run(&["suspend", &id, "--force"]).status.code(), Some(0));
}

#[test]
fn output_that_nobody_reads_is_no_error() {
    manual::check_unread(
        env!("CARGO_BIN_EXE_gantry-checkpoint"),
        &["--help", "--version", "man", "completions bash"],
    );
}

#[test]
fn a_file_that_is_too_large_is_an_error() {
    let program = env!("CARGO_BIN_EXE_gantry-checkpoint");
    // No process has this number.
    manual::check_scarce(program, "suspend 4194305", None);
}

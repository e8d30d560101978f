//! A recording as steps for the guest.

use anyhow::{Result, ensure};
use gantry_gpu_replay::{DESK, LOG, STEPS, Step, kind};
use gf100::{
    format::userd::{self, Window},
    recording::{Place, Record, Run},
    registers::{BAR0_BYTES, CHANNELS},
};

use super::super::record::Recorded;

/// Sizes of BAR 1 and BAR 3 in bytes.
const BAR1_BYTES: u64 = 128 << 20;
const BAR3_BYTES: u64 = 64 << 20;
/// Number of accesses to an unused address, which measure the cost of an exit by itself.
const NOTHING: u64 = 2000;
/// Name of the part with these accesses.
pub const EXITS: &str = "exits";

/// Registers: the location of the submission pages, a TLB flush request, and the window into VRAM.
const USER_WINDOW: u64 = 0x00_2254;
const FLUSH: u64 = 0x10_0cbc;

/// The class of an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Class {
    /// To an unused address.
    Nothing = 0,
    /// A register read.
    Read = 1,
    /// A register write.
    Write = 2,
    /// A TLB flush.
    Flush = 3,
    /// A write of a put pointer.
    Doorbell = 4,
    /// A read of BAR 1 or BAR 3.
    BarRead = 5,
    /// A write of BAR 1 or BAR 3.
    BarWrite = 6,
}

/// Number of classes.
pub const CLASSES: usize = 7;

/// The steps to execute.
pub struct Plan {
    /// Size of VRAM in bytes.
    pub vram: u64,
    /// Names of the parts in order.
    pub parts: Vec<String>,
    /// The steps.
    pub steps: Vec<Step>,
    /// The bytes that the steps put into RAM; they follow the steps.
    pub bytes: Vec<u8>,
}

fn step(kind: u32) -> Step {
    Step {
        kind,
        class: 0,
        bar: 0,
        size: 0,
        offset: 0,
        count: 0,
        stride: 0,
        value: 0,
        step: 0,
    }
}

/// Converts records to steps.
struct Builder {
    plan: Plan,
    window: Window,
    /// Number of accesses so far.
    done: u64,
    /// Ends of the remaining parts, the next one last.
    ends: Vec<(u64, String)>,
}

impl Plan {
    /// Converts a recording to steps, after some accesses that only cause exits.
    pub fn new(recorded: &Recorded) -> Result<Self> {
        let recording = recorded.recording()?;
        let ends = recorded.parts.iter().rev();
        let mut builder = Builder {
            plan: Self {
                vram: recording.vram,
                parts: vec![EXITS.to_owned()],
                steps: vec![
                    Step {
                        class: Class::Nothing as u32,
                        size: 2,
                        offset: BAR0_BYTES.into(),
                        count: NOTHING,
                        ..step(kind::READ)
                    },
                    step(kind::PART),
                ],
                bytes: Vec::new(),
            },
            window: Window { start: 0 },
            done: 0,
            ends: ends.map(|part| (part.end, part.name.clone())).collect(),
        };
        for record in recording.records {
            builder.take(record)?;
        }
        builder.part();
        let mut plan = builder.plan;
        plan.steps.push(step(kind::END));
        // Now the location of the bytes is known.
        let first = STEPS + (plan.steps.len() * size_of::<Step>()) as u64;
        for step in plan.steps.iter_mut().filter(|step| step.kind == kind::RAM) {
            step.value += first;
        }
        ensure!(
            first + plan.bytes.len() as u64 <= LOG,
            "the recording is too long for the guest's memory"
        );
        Ok(plan)
    }

    /// Returns the same plan up to the end of a part.
    pub fn up_to(&self, part: &str) -> Self {
        let parts = self.parts.iter().take_while(|its| *its != part).count() + 1;
        let mut steps = self.steps.clone();
        let ends = steps.iter().enumerate();
        let mut ends = ends.filter(|(_, step)| step.kind == kind::PART);
        // The other steps keep their places, as does what they put into RAM.
        if let Some((at, _)) = ends.nth(parts - 1) {
            steps[at + 1] = step(kind::END);
        }
        Self {
            vram: self.vram,
            parts: self.parts[..parts.min(self.parts.len())].to_vec(),
            steps,
            bytes: self.bytes.clone(),
        }
    }
}

impl Builder {
    /// Ends the parts whose end is reached.
    fn part(&mut self) {
        while let Some((end, _)) = self.ends.last()
            && *end <= self.done
        {
            self.plan.steps.push(step(kind::PART));
            self.plan
                .parts
                .extend(self.ends.pop().map(|(_, name)| name));
        }
    }

    fn take(&mut self, record: Record) -> Result<()> {
        match record {
            Record::Access(run) => self.run(run)?,
            Record::Ram { at, bytes } => {
                let end = at.checked_add(bytes.len() as u64);
                ensure!(
                    end.is_some_and(|end| end <= DESK),
                    "the recorded guest had more than {} MiB of RAM",
                    DESK >> 20
                );
                self.plan.steps.push(Step {
                    offset: at,
                    count: bytes.len() as u64,
                    value: self.plan.bytes.len() as u64,
                    ..step(kind::RAM)
                });
                self.plan.bytes.extend(bytes);
            }
            Record::Done {
                channel,
                get,
                entries,
            } => self.plan.steps.push(Step {
                bar: 1,
                offset: self.window.start + u64::from(channel) * userd::STRIDE + userd::GP_GET,
                count: entries.into(),
                value: get.into(),
                ..step(kind::WAIT)
            }),
        }
        Ok(())
    }

    /// Adds accesses, which may belong to several parts.
    fn run(&mut self, mut run: Run) -> Result<()> {
        let (bar, len) = match run.place {
            Place::Registers => (0, u64::from(BAR0_BYTES)),
            Place::Bar1 => (1, BAR1_BYTES),
            Place::Bar3 => (2, BAR3_BYTES),
        };
        let size = 1 << run.size;
        let inside =
            |(offset, _): (u64, u64)| offset.checked_add(size).is_some_and(|end| end <= len);
        ensure!(run.accesses().all(inside), "{run:?} is not within a BAR");
        while run.count > 0 {
            self.part();
            let left = self
                .ends
                .last()
                .map_or(run.count, |(end, _)| end - self.done);
            let count = run.count.min(left);
            // A doorbell is a single access, or one of several to the same address.
            let class = self.class(&run);
            self.plan.steps.push(Step {
                kind: match run.write {
                    true => kind::WRITE,
                    false => kind::READ,
                },
                class: class as u32,
                bar,
                size: run.size.into(),
                offset: run.offset,
                count,
                stride: run.stride,
                value: run.value,
                step: run.step,
            });
            self.done += count;
            run.count -= count;
            run.offset = run.offset.wrapping_add(count.wrapping_mul(run.stride));
            run.value = run.value.wrapping_add(count.wrapping_mul(run.step));
        }
        Ok(())
    }

    fn class(&mut self, run: &Run) -> Class {
        let value = run.value.to_le_bytes();
        let data = &value[..1 << run.size];
        match (run.place, run.write) {
            (Place::Registers, false) => Class::Read,
            (Place::Registers, true) => {
                for (offset, value) in run.accesses() {
                    if offset == USER_WINDOW
                        && let Some(window) = Window::parse(value as u32)
                    {
                        self.window = window;
                    }
                }
                match run.offset {
                    FLUSH => Class::Flush,
                    _ => Class::Write,
                }
            }
            (Place::Bar1, true) if self.window.doorbell(run.offset, data, CHANNELS).is_some() => {
                Class::Doorbell
            }
            (_, false) => Class::BarRead,
            (_, true) => Class::BarWrite,
        }
    }
}

#[cfg(test)]
mod tests {
    use gf100::recording::{Access, Encoder};

    use super::*;
    use crate::gpuvm::record::Part;

    fn plan(parts: &[(&str, u64)], record: impl FnOnce(&mut Encoder)) -> Result<Plan> {
        let mut encoder = Encoder::new(64 << 20);
        record(&mut encoder);
        let part = |(name, end): &(&str, u64)| Part {
            name: (*name).to_owned(),
            end: *end,
        };
        Plan::new(&Recorded {
            parts: parts.iter().map(part).collect(),
            bytes: encoder.take(true),
        })
    }

    #[test]
    fn a_recording_is_done_in_its_order_and_parts() {
        let plan = plan(&[("a", 3), ("b", 6)], |encoder| {
            let window = Window { start: 0x10_0000 }.encode();
            encoder.access(
                Place::Registers,
                USER_WINDOW,
                Access::Write(&window.to_le_bytes()),
            );
            for at in [0x40, 0x44, 0x48, 0x4c] {
                encoder.access(Place::Bar3, at, Access::Write(&[0; 4]));
            }
            encoder.ram(0x1000, &[1, 2, 3]);
            let bell = 0x10_0000 + 2 * userd::STRIDE + userd::GP_PUT;
            encoder.access(Place::Bar1, bell, Access::Write(&[7, 0, 0, 0]));
            encoder.done(2, 7, 512);
        })
        .unwrap();
        assert_eq!(plan.parts, [EXITS, "a", "b"]);
        let kinds: Vec<_> = plan
            .steps
            .iter()
            .map(|step| (step.kind, step.count))
            .collect();
        assert_eq!(
            kinds,
            [
                (kind::READ, NOTHING),
                (kind::PART, 0),
                (kind::WRITE, 1),
                (kind::WRITE, 2),
                (kind::PART, 0),
                (kind::WRITE, 2),
                (kind::RAM, 3),
                (kind::WRITE, 1),
                (kind::WAIT, 512),
                (kind::PART, 0),
                (kind::END, 0),
            ]
        );
        assert_eq!(plan.steps[5].offset, 0x48);
        assert_eq!(plan.steps[7].class, Class::Doorbell as u32);
        assert_eq!(plan.steps[8].offset, 0x10_2000 + userd::GP_GET);
        assert_eq!(plan.bytes, [1, 2, 3]);
        let first = STEPS + (plan.steps.len() * size_of::<Step>()) as u64;
        assert_eq!(plan.steps[6].value, first);
        let less = plan.up_to("a");
        assert_eq!(less.parts, [EXITS, "a"]);
        assert_eq!(
            (less.steps[4].kind, less.steps[5].kind),
            (kind::PART, kind::END)
        );
        assert_eq!(less.steps.len(), plan.steps.len());
    }

    #[test]
    fn what_is_outside_is_not_done() {
        let outside = plan(&[("a", 1)], |encoder| {
            encoder.access(Place::Bar3, BAR3_BYTES - 2, Access::Read(4));
        });
        assert!(outside.is_err());
        let program = plan(&[("a", 1)], |encoder| {
            encoder.access(Place::Bar3, 0, Access::Read(4));
            encoder.ram(DESK - 1, &[0; 2]);
        });
        assert!(program.is_err());
        assert!(
            plan(&[("a", 2)], |encoder| encoder.access(
                Place::Bar3,
                0,
                Access::Read(4)
            ))
            .is_err()
        );
    }
}

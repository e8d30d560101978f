//! Blocks: threads that wait for each other.

use super::{
    Fault, FaultKind, arith,
    kernel::Launch,
    memory::{Bytes, modify},
    program::{BarrierResult, Instruction, Op, Shuffle, Together, Vote},
    thread::{Around, State, Thread},
};

/// Number of instructions that a thread executes before others get their turn, so that a spinning
/// thread sees what others do.
const TURN: u32 = 4096;

/// Executes a kernel.
///
/// # Errors
/// The kernel's fault.
pub fn launch(launch: &Launch<'_>) -> Result<(), Fault> {
    let [x, y, z] = launch.grid;
    let places = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
    if launch.cooperative {
        let mut blocks: Vec<_> = places.map(|place| Block::new(launch, place)).collect();
        while blocks.iter().any(|block| !block.done()) {
            let mut moved = false;
            for block in &mut blocks {
                moved |= block.turn()?;
            }
            if !moved {
                return Err(stuck());
            }
        }
        return Ok(());
    }
    for place in places {
        let mut block = Block::new(launch, place);
        while !block.done() {
            if !block.turn()? {
                return Err(stuck());
            }
        }
    }
    Ok(())
}

fn stuck() -> Fault {
    Fault::new(
        FaultKind::Failed,
        "threads wait at barriers or for lanes that never come",
    )
}

struct Block<'a> {
    launch: &'a Launch<'a>,
    place: [u32; 3],
    shared: Bytes,
    threads: Vec<Thread>,
}

impl<'a> Block<'a> {
    fn new(launch: &'a Launch<'a>, place: [u32; 3]) -> Self {
        let [x, y, z] = launch.block;
        let all = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
        let kernel = &launch.program.functions[0];
        let bytes = usize::try_from(launch.program.shared + launch.dynamic).unwrap_or(0);
        Self {
            launch,
            place,
            shared: Bytes(vec![0; bytes]),
            threads: (0..)
                .zip(all)
                .map(|(number, at)| Thread::new(at, number, kernel))
                .collect(),
        }
    }

    fn done(&self) -> bool {
        self.threads
            .iter()
            .all(|thread| thread.state == State::Done)
    }

    /// Runs each thread for a while. Returns false if none could run.
    fn turn(&mut self) -> Result<bool, Fault> {
        let mut moved = false;
        for number in 0..self.threads.len() {
            if self.threads[number].state == State::Ready {
                moved = true;
                let active = self.active(number / 32);
                let mut around = Around {
                    launch: self.launch,
                    block: self.place,
                    shared: &mut self.shared,
                    active,
                };
                self.threads[number].run(&mut around, TURN)?;
            }
        }
        for warp in 0..self.threads.len().div_ceil(32) {
            moved |= self.warp(warp)?;
        }
        moved |= self.barriers()?;
        Ok(moved)
    }

    /// Lanes of a warp that are not done.
    fn active(&self, warp: usize) -> u32 {
        let lanes = self.threads.iter().skip(warp * 32).take(32).enumerate();
        let active = lanes.filter(|(_, thread)| thread.state != State::Done);
        active.fold(0, |mask, (lane, _)| mask | 1 << lane)
    }

    /// Reads an operand for a thread.
    fn get(&mut self, number: usize, source: super::program::Src) -> u64 {
        let around = Around {
            launch: self.launch,
            block: self.place,
            shared: &mut self.shared,
            active: 0,
        };
        self.threads[number].get(source, &around)
    }

    fn instruction(&self, number: usize) -> Option<(&'a Instruction, (usize, usize))> {
        self.threads[number].waiting_at(self.launch)
    }

    /// Resumes lanes once all of those they wait for have arrived.
    fn warp(&mut self, warp: usize) -> Result<bool, Fault> {
        let active = self.active(warp);
        let mut moved = false;
        for lane in 0..32 {
            let number = warp * 32 + lane;
            let Some(State::Warp { mask }) = self.threads.get(number).map(|thread| thread.state)
            else {
                continue;
            };
            let Some((instruction, place)) = self.instruction(number) else {
                continue;
            };
            let Op::Together { what, .. } = &instruction.op else {
                continue;
            };
            let members: Vec<_> = (0..32usize)
                .filter(|lane| mask & active & 1 << lane != 0)
                .map(|lane| warp * 32 + lane)
                .collect();
            let barrier = matches!(what, Together::Barrier);
            let there = |number: &usize| {
                self.threads[*number].state == State::Warp { mask }
                    && (self.instruction(*number).map(|(_, own)| own) == Some(place)
                        || barrier && self.at_warp_barrier(*number))
            };
            if members.iter().all(there) {
                self.together(what, &members)?;
                for number in members {
                    self.threads[number].resume();
                }
                moved = true;
            }
        }
        Ok(moved)
    }

    fn at_warp_barrier(&self, number: usize) -> bool {
        let op = self
            .instruction(number)
            .map(|(instruction, _)| &instruction.op);
        matches!(
            op,
            Some(Op::Together {
                what: Together::Barrier,
                ..
            })
        )
    }

    fn together(&mut self, what: &Together, members: &[usize]) -> Result<(), Fault> {
        match *what {
            Together::Barrier => {}
            Together::Shuffle { how, d, p, a, b, c } => {
                let mut values = [None; 32];
                for number in members {
                    values[number % 32] = Some(self.get(*number, a) & arith::mask(4));
                }
                for number in members {
                    let (b, c) = (self.get(*number, b), self.get(*number, c));
                    let own = number % 32;
                    let (from, inside) = source_lane(how, own as u64, b & 0x1f, c);
                    let from = usize::try_from(from).unwrap_or(own);
                    // Reading a missing lane is undefined: here, it reads the own one.
                    let value = values
                        .get(from)
                        .copied()
                        .flatten()
                        .or(values[own])
                        .unwrap_or(0);
                    self.threads[*number].set(d, value);
                    if let Some(p) = p {
                        self.threads[*number].set(p, u64::from(inside));
                    }
                }
            }
            Together::Vote { how, d, p, negated } => {
                let mut votes = 0u32;
                for number in members {
                    let vote = (self.get(*number, p) & 1 == 1) != negated;
                    votes |= u32::from(vote) << (number % 32);
                }
                let all = votes.count_ones() as usize == members.len();
                let value = match how {
                    Vote::All => u64::from(all),
                    Vote::Any => u64::from(votes != 0),
                    Vote::Uniform => u64::from(all || votes == 0),
                    Vote::Ballot => u64::from(votes),
                };
                for number in members {
                    self.threads[*number].set(d, value);
                }
            }
            Together::Match { all, size, d, p, a } => {
                let values: Vec<_> = members
                    .iter()
                    .map(|n| (*n, self.get(*n, a) & arith::mask(size)))
                    .collect();
                for (number, value) in &values {
                    let equal = values.iter().filter(|(_, other)| other == value);
                    let lanes = equal.fold(0u32, |lanes, (number, _)| lanes | 1 << (number % 32));
                    let same = lanes.count_ones() as usize == values.len();
                    let lanes = if all && !same { 0 } else { lanes };
                    self.threads[*number].set(d, u64::from(lanes));
                    if let Some(p) = p {
                        self.threads[*number].set(p, u64::from(same));
                    }
                }
            }
            Together::Reduce { how, of, d, a } => {
                let values: Vec<_> = members.iter().map(|number| self.get(*number, a)).collect();
                let all = values
                    .into_iter()
                    .reduce(|x, y| modify(of, how, x, y, 0))
                    .unwrap_or(0);
                for number in members {
                    self.threads[*number].set(d, arith::masked(of, all));
                }
            }
        }
        Ok(())
    }

    /// Resumes threads once all have arrived at a barrier.
    fn barriers(&mut self) -> Result<bool, Fault> {
        let mut moved = false;
        for wanted in 0..16 {
            let mut threads = 0;
            let waiting: Vec<usize> = (0..self.threads.len())
                .filter(|number| match self.threads[*number].state {
                    State::Barrier { id, threads: count } if id == wanted => {
                        threads = count;
                        true
                    }
                    _ => false,
                })
                .collect();
            let alive = || {
                self.threads
                    .iter()
                    .filter(|thread| thread.state != State::Done)
                    .count()
            };
            let enough = match threads {
                0 => waiting.len() == alive(),
                // Whole warps are counted, even if their last lanes do not exist.
                count => waiting.len() >= (count as usize).min(alive()),
            };
            if waiting.is_empty() || !enough {
                continue;
            }
            self.reduce(&waiting)?;
            for number in waiting {
                self.threads[number].resume();
            }
            moved = true;
        }
        Ok(moved)
    }

    fn reduce(&mut self, waiting: &[usize]) -> Result<(), Fault> {
        let mut votes = 0;
        let mut results = Vec::new();
        for number in waiting {
            if let Some((
                Instruction {
                    op:
                        Op::Barrier {
                            result: Some((result, p, negated)),
                            ..
                        },
                    ..
                },
                _,
            )) = self.instruction(*number)
            {
                votes += u64::from((self.get(*number, *p) & 1 == 1) != *negated);
                results.push((*number, *result));
            }
        }
        let all = votes == results.len() as u64;
        for (number, result) in results {
            let (d, value) = match result {
                BarrierResult::Count(d) => (d, votes),
                BarrierResult::And(d) => (d, u64::from(all)),
                BarrierResult::Or(d) => (d, u64::from(votes > 0)),
            };
            self.threads[number].set(d, value);
        }
        Ok(())
    }
}

/// The lane that a shuffle reads, and whether it is inside the segment (PTX ISA 9.0, 9.7.9.6).
fn source_lane(how: Shuffle, lane: u64, b: u64, c: u64) -> (u64, bool) {
    let (clamp, segment) = (c & 0x1f, c >> 8 & 0x1f);
    let most = lane & segment | clamp & !segment;
    let least = lane & segment;
    let (from, inside) = match how {
        Shuffle::Up => (lane.wrapping_sub(b), lane >= b && lane - b >= most),
        Shuffle::Down => (lane + b, lane + b <= most),
        Shuffle::Butterfly => (lane ^ b, lane ^ b <= most),
        Shuffle::Index => {
            let from = least | b & !segment;
            (from, from <= most)
        }
    };
    if inside { (from, true) } else { (lane, false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_in_their_segment() {
        // Width 32: the last lane is the clamp of downward shuffles, 0 that of upward ones.
        assert_eq!(source_lane(Shuffle::Down, 30, 1, 0x1f), (31, true));
        assert_eq!(source_lane(Shuffle::Down, 31, 1, 0x1f), (31, false));
        assert_eq!(source_lane(Shuffle::Up, 0, 1, 0), (0, false));
        assert_eq!(source_lane(Shuffle::Up, 5, 2, 0), (3, true));
        // Width 8: c is 0x181f.
        assert_eq!(source_lane(Shuffle::Butterfly, 9, 4, 0x181f), (13, true));
        assert_eq!(source_lane(Shuffle::Down, 15, 1, 0x181f), (15, false));
        assert_eq!(source_lane(Shuffle::Index, 12, 3, 0x181f), (11, true));
    }
}

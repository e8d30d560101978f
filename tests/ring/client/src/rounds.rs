//! An application that computes round after round while its machine is migrated.

use alloc::sync::Arc;

use remoting_proto::{
    apis::opencl::{
        calls::{
            CreateBuffer, Finish, Grid, KernelId, MemId, NdRange, ReadBuffer, SetArgument, Value,
            WindowRange,
        },
        codes,
    },
    wire::Blob,
};
use remoting_transport::{bell::Bell, window::Window};

use crate::{
    Connection, Failure,
    opened::{CONTEXT, QUEUE, open, order},
};

/// Words in each buffer. There are several buffers, as in most programs.
const WORDS: u32 = 1 << 20;
const BYTES: u64 = WORDS as u64 * 4;
/// Number of words of the first buffer that change in a round: 1 MiB.
const CHANGED: u32 = 1 << 18;

const SOURCE: &str = "
kernel void fill(global uint *a, uint first) {
    size_t i = get_global_id(0);
    a[i] = (first + (uint)i) * 2654435761u;
}
kernel void advance(global uint *a, uint step) {
    a[get_global_id(0)] += step;
}
";
const FILL: KernelId = KernelId(0);
const ADVANCE: KernelId = KernelId(1);

/// Whoever controls the rounds.
pub trait Told {
    /// All of the application's state exists.
    fn begins(&mut self);
    /// A round is over. Returns whether to run another one.
    fn goes_on(&mut self) -> bool;
}

struct Work<B> {
    link: Connection<B>,
    buffers: u32,
    rounds: u32,
}

impl<B: Bell + Clone> Work<B> {
    fn launch(
        &mut self,
        kernel: KernelId,
        mem: u32,
        number: u32,
        words: u32,
    ) -> Result<(), Failure> {
        let number = Value::Bytes(Blob(number.to_le_bytes().to_vec()));
        let values = [Value::Mem(Some(MemId(mem))), number];
        for (index, value) in (0..).zip(values) {
            self.link.post_with_next(&SetArgument {
                kernel,
                index,
                value,
            })?;
        }
        self.link.post(&NdRange {
            order: order(),
            kernel,
            grid: Grid::line(words.into()),
        })
    }

    fn finish(&mut self) -> Result<(), Failure> {
        self.link.ask(&Finish { queue: QUEUE })
    }

    /// Checks, through the window, that all of the memory has the right contents.
    fn check(&mut self, window: &Window) -> Result<(), Failure> {
        let sum = (1..=self.rounds).fold(0, u32::wrapping_add);
        let offset = window.data();
        let seen = window.at(offset, BYTES).ok_or(Failure::NoDevice)?;
        for mem in 0..self.buffers {
            self.link.ask(&ReadBuffer {
                order: order(),
                mem: MemId(mem),
                offset: 0,
                to: WindowRange {
                    offset,
                    length: BYTES,
                    stage: None,
                },
            })?;
            for at in 0..WORDS {
                // SAFETY: within the window's data, which the worker no longer writes.
                let word = unsafe { seen.cast::<u32>().add(at as usize).read_volatile() };
                let changes = mem == 0 && at < CHANGED;
                let first = (mem * WORDS + at).wrapping_mul(2_654_435_761);
                if word != first.wrapping_add(if changes { sum } else { 0 }) {
                    let at = (mem * WORDS + at) as usize;
                    return Err(Failure::Wrong { at });
                }
            }
        }
        Ok(())
    }
}

/// Computes on `size` MiB of the device's memory until told to stop, and checks all of it.
pub fn rounds<B: Bell + Clone>(
    window: &Arc<Window>,
    bell: B,
    size: u32,
    told: &mut impl Told,
) -> Result<(), Failure> {
    let mut link = Connection::new(window, bell);
    open(&mut link, SOURCE, [(FILL, "fill"), (ADVANCE, "advance")])?;
    let buffers = (size >> 2).clamp(1, 1024);
    let mut work = Work {
        link,
        buffers,
        rounds: 0,
    };
    for mem in 0..buffers {
        work.link.ask(&CreateBuffer {
            id: MemId(mem),
            context: CONTEXT,
            flags: codes::MEM_READ_WRITE,
            size: BYTES,
            contents: None,
            lives: None,
            svm: None,
        })?;
        work.launch(FILL, mem, mem * WORDS, WORDS)?;
        work.finish()?;
    }
    told.begins();
    loop {
        work.rounds += 1;
        work.launch(ADVANCE, 0, work.rounds, CHANGED)?;
        work.finish()?;
        if !told.goes_on() {
            return work.check(window);
        }
    }
}

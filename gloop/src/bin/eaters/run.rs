//! Runs a program's loop, alone or in turns with other processes.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use gloop::{
    cuda::Args,
    job::{Grid, Job, State},
    turns::{Join, Member},
};

use crate::{
    bed::Bed,
    files::Grep,
    images::Images,
    servers::Matmul,
    single::{LavaMd, Steps, Tpacf},
};

/// How the GPU is shared, and as which client.
#[derive(clap::Args)]
pub struct Sharing {
    /// The socket of gantry-arbiter (default: do not take turns).
    #[arg(long, value_name = "SOCKET", requires = "client")]
    arbiter: Option<PathBuf>,
    /// The name of the client that uses the GPU: processes of the same name share its turns.
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// The client's weight relative to others, 1 to 10,000.
    #[arg(long, value_name = "N", default_value_t = 1)]
    weight: u32,
}

/// Runs jobs to their end.
pub struct Runner(Option<Member>);

impl Runner {
    pub fn new(sharing: Sharing) -> Result<Self> {
        let (Some(arbiter), Some(name)) = (sharing.arbiter, sharing.client) else {
            return Ok(Self(None));
        };
        let weight = sharing.weight;
        Ok(Self(Some(Member::join(
            arbiter,
            &Join {
                name,
                weight,
                latency: 0,
                sliced: false,
            },
        )?)))
    }

    pub fn finish(&mut self, job: &mut Job) -> Result<()> {
        match &mut self.0 {
            Some(member) => member.run(job)?,
            None => {
                job.resume()?;
                job.finish()?;
            }
        }
        Ok(())
    }

    fn turns(&self) -> u64 {
        self.0.as_ref().map_or(0, Member::turns)
    }
}

/// A program whose loop can be run repeatedly.
enum Program<'a> {
    /// Its memory outlives it.
    Loop {
        job: Box<Job>,
        _memory: Box<dyn std::any::Any>,
    },
    Server(Box<Matmul<'a>>),
}

/// The number of throttle's steps, of 10 us each.
const STEPS: u32 = 40_000;

fn program<'a>(bed: &'a Bed, name: &str) -> Result<Program<'a>> {
    let of = |job, memory| Program::Loop {
        job: Box::new(job),
        _memory: memory,
    };
    Ok(match name {
        "throttle" => {
            let out = bed.runtime.gpu().allocate(528 * 4)?;
            let steps = Steps {
                out: out.at(),
                count: STEPS,
                cycles: bed.runtime.gpu().clock / 100,
            };
            let grid = Grid::logical(528).threads(256).blocks(528);
            let kernel = bed.kernel("throttle", "checked")?;
            let job = bed
                .runtime
                .prepare(&kernel, grid, Args::new().with(steps))?;
            of(job, Box::new(out))
        }
        "lavamd" => {
            let program = LavaMd::new(bed, 50)?;
            of(program.repeated(bed, 20)?, Box::new(program))
        }
        "tpacf" => {
            let program = Tpacf::new(bed, 2112)?;
            of(program.job(bed)?, Box::new(program))
        }
        "grep" => {
            let program = Grep::new(528, 1 << 20, 32)?;
            let (job, memory) = program.job(bed)?;
            of(job, Box::new((program, memory)))
        }
        "img" => {
            let program = Images::new(528, 3, 4000)?;
            let (job, memory) = program.job(bed)?;
            of(job, Box::new((program, memory)))
        }
        "matmul" => Program::Server(Box::new(Matmul::new(bed, 4)?)),
        other => bail!("there is no program {other}: throttle, lavamd, tpacf, grep, img or matmul"),
    })
}

/// Runs a program in rounds for this many seconds, and reports the results.
pub fn run(
    bed: &Bed,
    name: &str,
    seconds: u64,
    think: Duration,
    runner: &mut Runner,
) -> Result<()> {
    let mut program = program(bed, name)?;
    if let Program::Server(server) = &mut program {
        server.think = think;
    }
    let begun = Instant::now();
    let (mut rounds, mut requests) = (0u64, Vec::new());
    while begun.elapsed() < Duration::from_secs(seconds) {
        match &mut program {
            Program::Loop { job, .. } => {
                runner.finish(job)?;
                debug_assert_eq!(job.state(), State::Done);
                job.rewind()?;
            }
            Program::Server(server) => {
                requests.extend(server.round(100, |job| runner.finish(job))?);
            }
        }
        rounds += 1;
    }
    let took = begun.elapsed().as_secs_f64();
    let turns = runner.turns();
    println!(
        "{name}: {rounds} rounds in {took:.3} s, {:.4} s each, {turns} turns",
        took / rounds as f64
    );
    if let Program::Server(server) = &program {
        requests.sort();
        let at = |part: f64| {
            let index = (requests.len() as f64 * part) as usize;
            requests
                .get(index)
                .or(requests.last())
                .map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        println!(
            "{name}: {} requests (ms): median {:.2}, P99 {:.2}, longest {:.2}",
            requests.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
        server.close()?;
    }
    Ok(())
}

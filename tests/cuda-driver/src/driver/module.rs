//! Modules: loaded PTX with its variables and kernels.

use std::{
    collections::{HashMap, HashSet},
    ffi::CString,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use cuda_definition::driver::types::CUresult;

use super::{
    ARCHITECTURE, Answer, Owner, SHARED, SHARED_OPT_IN,
    context::Context,
    memory::{Kind, memory},
    objects::{self, Object},
    stream::Task,
};
use crate::{
    ptx::{self, Initial, Space},
    run::{
        self, FaultKind,
        lower::{self, Globals},
        memory::{Bytes, View},
        program::Program,
    },
};

/// A module.
pub struct Module {
    pub handle: u64,
    /// Variables by name: address and size in bytes.
    pub variables: HashMap<String, (u64, u64)>,
    /// Names of the variables that the host can access directly.
    pub managed: HashSet<String>,
    /// Kernels by name, with their handles.
    pub kernels: Vec<Arc<Kernel>>,
}

/// A kernel.
pub struct Kernel {
    pub handle: u64,
    pub module: u64,
    pub name: CString,
    pub program: Arc<Program>,
    /// Maximum size in bytes of dynamic shared memory, as set by the program.
    pub dynamic_limit: Mutex<u64>,
}

impl Module {
    /// Loads PTX.
    ///
    /// # Errors
    /// The driver's error code, and an explanation.
    pub fn load(text: &str, owner: Owner) -> Result<Arc<Self>, (CUresult, String)> {
        let invalid = |error: ptx::Error| (CUresult::CUDA_ERROR_INVALID_PTX, error.to_string());
        let tree = ptx::parse(text).map_err(invalid)?;
        if tree.target > ARCHITECTURE {
            let what = format!(
                "sm_{} is newer than this device, sm_{ARCHITECTURE}",
                tree.target
            );
            return Err((CUresult::CUDA_ERROR_INVALID_PTX, what));
        }
        let handle = objects::number();
        let variables =
            place(&tree, owner).map_err(|error| (error, "no memory for variables".to_owned()))?;
        let mut module = Self {
            handle,
            variables,
            managed: tree
                .variables
                .iter()
                .filter(|variable| variable.managed)
                .map(|variable| variable.name.clone())
                .collect(),
            kernels: Vec::new(),
        };
        let globals: Globals = module
            .variables
            .iter()
            .map(|(name, (at, _))| (name.clone(), *at))
            .collect();
        fill(&tree, &globals).map_err(invalid)?;
        for kernel in tree
            .functions
            .iter()
            .filter(|function| function.entry && function.body.is_some())
        {
            let program = lower::lower(&tree, kernel, &globals).map_err(invalid)?;
            module.kernels.push(Arc::new(Kernel {
                handle: objects::number(),
                module: handle,
                name: CString::new(kernel.name.clone()).unwrap_or_default(),
                program: Arc::new(program),
                dynamic_limit: Mutex::new(SHARED),
            }));
        }
        let module = Arc::new(module);
        for kernel in &module.kernels {
            objects::insert(kernel.handle, Object::Kernel(Arc::clone(kernel)));
        }
        objects::insert(handle, Object::Module(Arc::clone(&module)));
        Ok(module)
    }

    /// Removes the module's kernels and variables.
    pub fn unload(&self) {
        for kernel in &self.kernels {
            objects::remove(kernel.handle);
        }
        objects::remove(self.handle);
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for (at, _) in self.variables.values() {
            let _ = memory().free(*at, &[Kind::Module, Kind::Managed]);
        }
    }
}

fn place(tree: &ptx::Module, owner: Owner) -> Answer<HashMap<String, (u64, u64)>> {
    let mut all = HashMap::new();
    let placed = tree.variables.iter().filter(|variable| {
        matches!(variable.space, Space::Global | Space::Const) && !variable.external
    });
    for variable in placed {
        let kind = if variable.managed {
            Kind::Managed
        } else {
            Kind::Module
        };
        match memory().allocate(variable.size.max(1), kind, 0, owner) {
            Ok(at) => {
                all.insert(variable.name.clone(), (at, variable.size));
            }
            Err(error) => {
                for (at, _) in all.values() {
                    let _ = memory().free(*at, &[Kind::Module, Kind::Managed]);
                }
                return Err(error);
            }
        }
    }
    Ok(all)
}

fn fill(tree: &ptx::Module, globals: &Globals) -> Result<(), ptx::Error> {
    // SAFETY: the variables were allocated just now.
    let view = unsafe { View::new(memory().ranges()) };
    for variable in &tree.variables {
        let Some(start) = globals.get(&variable.name) else {
            continue;
        };
        let size = variable.of.size();
        let bytes = Bytes(vec![0; usize::try_from(variable.size).unwrap_or(0)]);
        let mut at = *start;
        // Reused memory is not zero.
        for offset in 0..bytes.0.len() as u64 {
            let _ = view.store(start + offset, 1, 0);
        }
        for value in &variable.initial {
            let bits = match value {
                Initial::Bits(bits) => *bits,
                Initial::Address(name, offset) => match globals.get(name) {
                    Some(address) => address.wrapping_add(*offset),
                    None => {
                        let what = format!(
                            "{} is initialised by {name}, which nobody declares",
                            variable.name
                        );
                        return Err(ptx::Error::new(0, what));
                    }
                },
            };
            let _ = view.store(at, size, bits);
            at += u64::from(size);
        }
    }
    Ok(())
}

/// The shape of a launch.
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic: u64,
    pub cooperative: bool,
}

impl Kernel {
    /// Returns the work of a launch.
    ///
    /// # Errors
    /// The launch is obviously invalid.
    pub fn launch(self: &Arc<Self>, shape: Shape, parameters: Vec<u8>) -> Answer<Task> {
        static LAUNCHES: AtomicU64 = AtomicU64::new(1);
        let [x, y, z] = shape.block;
        let threads = u64::from(x) * u64::from(y) * u64::from(z);
        let [gx, gy, gz] = shape.grid;
        let blocks = u64::from(gx)
            .saturating_mul(u64::from(gy))
            .saturating_mul(u64::from(gz));
        let fits = threads > 0 && x <= 1024 && y <= 1024 && z <= 64 && blocks > 0;
        if !fits || gx > 0x7fff_ffff || gy > 0xffff || gz > 0xffff {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if threads > u64::from(self.program.max_threads) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let limit = *self
            .dynamic_limit
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if shape.dynamic > limit || shape.dynamic + self.program.shared > SHARED_OPT_IN {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if shape.cooperative
            && blocks > u64::from(super::MULTIPROCESSORS * super::THREADS) / threads
        {
            return Err(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        let kernel = Arc::clone(self);
        Ok(Arc::new(move |context: &Arc<Context>| {
            kernel.execute(&shape, &parameters, context, &LAUNCHES)
        }))
    }

    fn execute(
        &self,
        shape: &Shape,
        parameters: &[u8],
        context: &Context,
        launches: &AtomicU64,
    ) -> Answer {
        let launch = run::Launch {
            program: &self.program,
            grid: shape.grid,
            block: shape.block,
            dynamic: shape.dynamic,
            parameters: Bytes(parameters.to_vec()),
            // SAFETY: the arena's memory stays mapped, and registered memory is unregistered only
            // after all work is done.
            memory: unsafe { View::new(memory().ranges()) },
            output: &context.output,
            id: launches.fetch_add(1, Ordering::Relaxed),
            started: Instant::now(),
            cooperative: shape.cooperative,
        };
        run::launch(&launch).map_err(|fault| {
            eprintln!("stand-in CUDA driver: {}", fault.what);
            match fault.kind {
                FaultKind::IllegalAddress => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                FaultKind::Misaligned => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
                FaultKind::IllegalInstruction => CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
                FaultKind::Assert => CUresult::CUDA_ERROR_ASSERT,
                FaultKind::Failed => CUresult::CUDA_ERROR_LAUNCH_FAILED,
            }
        })
    }
}

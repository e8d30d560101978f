//! What the variables of libraries take: each context has its own. The driver may make them when the library is loaded,
//! when the context is created, or later; they are charged when both are there.

use std::{collections::HashMap, sync::Arc};

use remoting_proto::apis::cuda::Kind;
use remoting_session::quota::Charge;

use super::Server;

/// The variables of all libraries.
#[derive(Debug, Default)]
pub(super) struct Instances {
    /// The bytes that variables of a library take in each context.
    sizes: HashMap<u32, u64>,
    /// The charges, by library and context.
    charges: HashMap<(u32, u32), Charge>,
}

impl Instances {
    /// Adds the instances of a library in these contexts, which are charged together.
    fn add_library(&mut self, library: u32, size: u64, contexts: &[u32], mut charge: Charge) {
        self.sizes.insert(library, size);
        for context in contexts {
            self.charges.insert((library, *context), charge.split(size));
        }
    }

    /// Adds the instances of all libraries in a context, which are charged together.
    fn add_context(&mut self, context: u32, mut charge: Charge) {
        for (library, size) in &self.sizes {
            self.charges
                .insert((*library, context), charge.split(*size));
        }
    }

    /// Returns the charges for a library that has been unloaded.
    pub(super) fn forget_library(&mut self, library: u32) {
        self.sizes.remove(&library);
        self.charges.retain(|(of, _), _| *of != library);
    }

    /// Returns the charges for a context that has been destroyed.
    pub(super) fn forget_context(&mut self, context: u32) {
        self.charges.retain(|(_, of), _| *of != context);
    }
}

impl Server {
    fn contexts(&self) -> Vec<u32> {
        let all = self.backend.objects.iter();
        let contexts = all.filter(|(_, object)| object.kind == Kind::Context);
        contexts.map(|(id, _)| id).collect()
    }

    /// Charges the variables of a library that is about to be loaded, in all contexts.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge_library(&mut self, size: u64) -> Result<Arc<Charge>, i32> {
        let contexts = self.contexts().len() as u64;
        self.charge(size.saturating_mul(contexts))
    }

    /// Keeps the charge for a library's variables.
    pub(super) fn library_loaded(&mut self, library: u32, size: u64, charge: Arc<Charge>) {
        let contexts = self.contexts();
        if let Some(charge) = Arc::into_inner(charge) {
            let instances = &mut self.backend.instances;
            instances.add_library(library, size, &contexts, charge);
        }
    }

    /// Charges the variables of all libraries in a context that is about to be created.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge_context(&mut self) -> Result<Option<Arc<Charge>>, i32> {
        let sizes = self.backend.instances.sizes.values();
        match sizes.fold(0u64, |all, size| all.saturating_add(*size)) {
            0 => Ok(None),
            all => self.charge(all).map(Some),
        }
    }

    /// Keeps the charge for libraries' variables in a new context.
    pub(super) fn context_created(&mut self, context: u32, charge: Option<Arc<Charge>>) {
        if let Some(charge) = charge.and_then(Arc::into_inner) {
            self.backend.instances.add_context(context, charge);
        }
    }
}

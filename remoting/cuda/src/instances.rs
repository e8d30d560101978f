//! What images take, and what libraries do: each context has its own variables and code of them. The driver may make them
//! when the library is loaded, when the context is created, or later; they are charged when both are there.

use std::{collections::HashMap, sync::Arc};

use remoting_proto::apis::cuda::Kind;
use remoting_session::quota::{Charge, Uncharged};

use super::{Server, variables::Size};

/// What all libraries take.
#[derive(Debug, Default)]
pub(super) struct Instances {
    /// What a library takes in each context.
    sizes: HashMap<u32, Size>,
    /// The costs, by library and context.
    costs: HashMap<(u32, u32), Instance>,
}

/// What an image costs: in one context, or in several.
#[derive(Debug, Default)]
pub(super) struct Cost {
    pub(super) charge: Option<Arc<Charge>>,
    pub(super) uncharged: Option<Uncharged>,
}

/// What a library costs in a context.
#[derive(Debug)]
struct Instance {
    _charge: Option<Charge>,
    _uncharged: Option<Uncharged>,
}

impl Instances {
    /// Adds instances of libraries in contexts, which cost this together. Nothing is added if they are there already.
    fn add(&mut self, all: &[(u32, u32)], cost: Cost) {
        if cost.charge.is_none() && cost.uncharged.is_none() {
            return;
        }
        let mut charge = cost.charge.and_then(Arc::into_inner);
        let mut uncharged = cost.uncharged;
        for (library, context) in all {
            let size = self.sizes.get(library).copied().unwrap_or_default();
            let charged = match uncharged {
                Some(_) => size.variables,
                None => size.variables.saturating_add(size.code),
            };
            let instance = Instance {
                _charge: charge.as_mut().map(|charge| charge.split(charged)),
                _uncharged: uncharged.as_mut().map(|all| all.split(size.code)),
            };
            self.costs.insert((*library, *context), instance);
        }
    }

    /// Returns the charges for a library that has been unloaded.
    pub(super) fn forget_library(&mut self, library: u32) {
        self.sizes.remove(&library);
        self.costs.retain(|(of, _), _| *of != library);
    }

    /// Returns the charges for a context that has been destroyed.
    pub(super) fn forget_context(&mut self, context: u32) {
        self.costs.retain(|(_, of), _| *of != context);
    }
}

impl Server {
    fn contexts(&self) -> Vec<u32> {
        let all = self.backend.objects.iter();
        let contexts = all.filter(|(_, object)| object.kind == Kind::Context);
        contexts.map(|(id, _)| id).collect()
    }

    /// Charges an image that is about to be loaded so many times. Its code is charged once there is no room for it among what
    /// needs no charge.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge_image(&mut self, size: Size, times: u64) -> Result<Cost, i32> {
        let code = size.code.saturating_mul(times);
        let mut bytes = size.variables.saturating_mul(times);
        let most = self.backend.uncharged_code;
        let uncharged = self.quota.uncharge(code, most);
        if uncharged.is_none() {
            bytes = bytes.saturating_add(code);
        }
        let charge = (bytes > 0).then(|| self.charge(bytes)).transpose()?;
        Ok(Cost { charge, uncharged })
    }

    /// Charges a library that is about to be loaded, in all contexts.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge_library(&mut self, size: Size) -> Result<Cost, i32> {
        let contexts = self.contexts().len() as u64;
        self.charge_image(size, contexts)
    }

    /// Keeps what a library costs.
    pub(super) fn library_loaded(&mut self, library: u32, size: Size, cost: Cost) {
        let contexts = self.contexts().into_iter();
        let all: Vec<_> = contexts.map(|context| (library, context)).collect();
        let instances = &mut self.backend.instances;
        instances.sizes.insert(library, size);
        instances.add(&all, cost);
    }

    /// Charges all libraries in a context that is about to be created.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge_context(&mut self) -> Result<Cost, i32> {
        let sizes = self.backend.instances.sizes.values();
        let all = sizes.fold(Size::default(), |all, size| Size {
            variables: all.variables.saturating_add(size.variables),
            code: all.code.saturating_add(size.code),
        });
        self.charge_image(all, 1)
    }

    /// Keeps what libraries cost in a new context.
    pub(super) fn context_created(&mut self, context: u32, cost: Cost) {
        let libraries = self.backend.instances.sizes.keys();
        let all: Vec<_> = libraries.map(|library| (*library, context)).collect();
        self.backend.instances.add(&all, cost);
    }
}

//! What is said, for each accelerator API: a schema that drivers in guests and workers are built
//! from.

pub mod cuda;
pub mod nvidia;
pub mod opencl;
mod schema;

use crate::wire::{
    api::{ApiId, Spoken},
    hello::{self, Hello},
};

/// The APIs that this build's pools speak.
pub const ALL: [Spoken; 2] = [spoken(ApiId::OpenCl), spoken(ApiId::Cuda)];

/// An API as this build speaks it.
pub const fn spoken(api: ApiId) -> Spoken {
    match api {
        ApiId::OpenCl => Spoken::of::<opencl::OpenCl>(),
        ApiId::Cuda => Spoken::of::<cuda::Cuda>(),
        ApiId::Nvidia => nvidia::SPOKEN,
    }
}

/// What this build speaks of the API that a peer's hello is about, for the answer; of one that it
/// does not know, another one, so that the peer can name both.
pub fn answering(theirs: &[u8; hello::SIZE]) -> Spoken {
    spoken(Hello::api(theirs).unwrap_or_default())
}

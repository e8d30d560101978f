//! The arbiter's grant page, which kernels read by themselves: no processor of this machine is
//! involved between the arbiter's store and the GPU.

use std::{ffi::c_uint, sync::Arc};

use remoting_turns::{page::Grant, session::Session};

use super::{Address, Error, Gpu};

/// The size of the page in bytes.
const PAGE: usize = 4096;

/// An arbiter's page, registered with the GPU read-only, as it is mapped.
#[derive(Debug)]
pub struct GrantPage {
    gpu: Arc<Gpu>,
    session: Arc<Session>,
    device: Address,
}

impl GrantPage {
    /// Allows the GPU to read this session's page.
    ///
    /// # Errors
    /// The driver refuses: not every GPU can read memory that this process cannot write.
    pub fn register(gpu: &Arc<Gpu>, session: &Arc<Session>) -> Result<Self, Error> {
        // Portable, mapped for the device, and read-only.
        const FLAGS: c_uint = 1 | 2 | 8;
        let grant: &Grant = session.grant();
        let at = (&raw const *grant).cast_mut().cast();
        let mut device = 0;
        let api = gpu.api()?;
        // SAFETY: a whole page is mapped there as long as the session lives, which the result keeps
        // alive.
        unsafe { api.register(at, PAGE, FLAGS) }?;
        let mut page = Self {
            gpu: Arc::clone(gpu),
            session: Arc::clone(session),
            device: 0,
        };
        // SAFETY: it was just registered.
        unsafe { api.device_pointer(&mut device, at, 0) }?;
        page.device = device;
        Ok(page)
    }

    /// Whether it is this session's page.
    pub fn is_of(&self, session: &Arc<Session>) -> bool {
        Arc::ptr_eq(&self.session, session)
    }

    /// The GPU's address of the number of the turn that is over, which is followed by whether
    /// others wait.
    pub fn stop(&self) -> Address {
        self.device + std::mem::offset_of!(Grant, stop) as Address
    }
}

impl Drop for GrantPage {
    fn drop(&mut self) {
        if let Ok(api) = self.gpu.api() {
            let grant: &Grant = self.session.grant();
            // SAFETY: it was registered, and is still mapped.
            let _ = unsafe { api.unregister((&raw const *grant).cast_mut().cast()) };
        }
    }
}

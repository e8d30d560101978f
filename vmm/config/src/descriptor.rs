//! Descriptors of open files that are given to a VM instead of a path.

use std::{
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::Arc,
};

/// A descriptor of an open file.
#[derive(Clone, Debug)]
pub enum Descriptor {
    /// It was open when the process started (command line) and stays open until the process ends.
    Inherited(RawFd),
    /// It came with a request and is closed when no configuration refers to it any more.
    Received(Arc<OwnedFd>),
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Inherited(fd) => *fd,
            Self::Received(fd) => fd.as_raw_fd(),
        }
    }
}

impl Descriptor {
    /// Duplicates it for one machine: the configured one stays open for the next boot.
    ///
    /// # Errors
    /// It is not open.
    pub fn duplicate(&self) -> std::io::Result<OwnedFd> {
        // SAFETY: a descriptor that came with a request is owned by `self`; an inherited one
        // belongs to the VM until the process ends.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.as_raw_fd()) };
        borrowed.try_clone_to_owned()
    }
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self::Received(Arc::new(fd))
    }
}

impl PartialEq for Descriptor {
    fn eq(&self, other: &Self) -> bool {
        self.as_raw_fd() == other.as_raw_fd()
    }
}

impl Eq for Descriptor {}

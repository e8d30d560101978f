//! Errors in the form that clients get.

use std::{error::Error, fmt};

use base::Chain;
use vmm_confinement::{landlock, open_files};

/// Kind of failure, expressed as an HTTP status.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// 400: the request itself is invalid.
    BadRequest,
    /// 404: there is no VM, no such device or no such path.
    NotFound,
    /// 405: the state of the VM does not permit this, or the method is wrong.
    MethodNotAllowed,
    /// 408: the request did not arrive in time.
    RequestTimeout,
    /// 409: a device with this name or path already exists.
    Conflict,
    /// 411: a body without a length.
    LengthRequired,
    /// 413: the body is too long.
    PayloadTooLarge,
    /// 417: an unknown expectation.
    ExpectationFailed,
    /// 429: an earlier request of this kind is still in progress.
    TooManyRequests,
    /// 431: the head of the request is too long.
    HeadersTooLarge,
    /// 500: the operation was attempted and failed.
    Internal,
    /// 501: a transfer encoding that the server does not support.
    NotImplemented,
    /// 503: too many connections.
    Unavailable,
    /// 505: not HTTP/1.x.
    VersionNotSupported,
}

impl Status {
    /// The numeric status code.
    pub fn code(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::RequestTimeout => 408,
            Self::Conflict => 409,
            Self::LengthRequired => 411,
            Self::PayloadTooLarge => 413,
            Self::ExpectationFailed => 417,
            Self::TooManyRequests => 429,
            Self::HeadersTooLarge => 431,
            Self::Internal => 500,
            Self::NotImplemented => 501,
            Self::Unavailable => 503,
            Self::VersionNotSupported => 505,
        }
    }
}

/// A failed request. Sent to the client as a JSON array of the chain of causes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ApiError {
    status: Status,
    chain: Vec<String>,
}

impl ApiError {
    /// Creates an error from another one and all its causes. Names Landlock if it may be the cause.
    pub fn new(status: Status, error: &dyn Error) -> Self {
        let causes: Vec<_> = base::causes(error).collect();
        let advice = landlock::advice(&causes).or_else(|| open_files::advice(&causes));
        let mut chain = Chain(error).texts();
        chain.extend(advice.map(str::to_owned));
        Self { status, chain }
    }

    /// Creates an error with a single message.
    pub fn message(status: Status, message: impl Into<String>) -> Self {
        Self {
            status,
            chain: vec![message.into()],
        }
    }

    /// 404: there is no VM.
    pub fn not_created() -> Self {
        Self::message(
            Status::NotFound,
            "no VM has been created: use vm.create (gantry ctl create FILE)",
        )
    }

    /// 405: the state of the VM does not permit this.
    pub fn wrong_state(message: impl Into<String>) -> Self {
        Self::message(Status::MethodNotAllowed, message)
    }

    /// 500: the operation was attempted and failed.
    pub fn internal(error: &dyn Error) -> Self {
        Self::new(Status::Internal, error)
    }

    /// Adds `message` as the outermost error, with this error as its cause.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        self.chain.insert(0, message.into());
        self
    }

    /// Kind of failure.
    pub fn status(&self) -> Status {
        self.status
    }

    /// What happened and why, outermost first; at least one message.
    pub fn chain(&self) -> &[String] {
        &self.chain
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.chain.join(": "))
    }
}

impl Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn the_chain_starts_with_what_was_tried() {
        let error = Outer(std::io::Error::other("inner"));
        let error = ApiError::internal(&error).context("cannot boot");
        assert_eq!(error.chain(), ["cannot boot", "outer", "inner"]);
        assert_eq!(error.to_string(), "cannot boot: outer: inner");
    }
}

//! The first exchange on a connection, in a form that never changes.

use core::fmt;

use super::{
    calls::FINGERPRINT,
    wire::{Malformed, Reader, Wire},
};

/// The first bytes of every hello.
pub const MAGIC: [u8; 8] = *b"GANTRYRM";
/// The size of every hello in bytes.
pub const SIZE: usize = 48;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Raised when the meaning of messages, or how rings hold them, changes.
    pub number: u32,
    /// Hash of the definition of all calls and of what they carry.
    pub fingerprint: u64,
}

/// The version of this build.
pub const VERSION: Version = Version {
    number: 10,
    fingerprint: FINGERPRINT,
};

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:016x}", self.number, self.fingerprint)
    }
}

/// Why a peer is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It speaks something else.
    #[error("the peer does not speak Gantry's remoting protocol")]
    NotGantry,
    /// It was built from another definition.
    #[error(
        "this side speaks version {ours} of the remoting protocol and the peer {theirs}: \
         install the driver that belongs to the host's worker"
    )]
    Version {
        /// This build's version.
        ours: Version,
        /// The peer's version.
        theirs: Version,
    },
}

/// How a client comes to its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The window is the whole of the file that comes with the hello; sleepers are woken by
    /// futexes.
    #[default]
    File,
    /// The window is a slice of an accelerator port: a [`Place`](crate::port::Place) and the
    /// files of window and doorbells follow.
    Port,
    /// Each side has a window of its own, and frames and data follow.
    Stream,
    /// There is no window: the client's user has as many workers as one may have.
    Full,
}

/// What both sides send first. The worker's carries the window's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's version.
    pub version: Version,
    /// How the client comes to the window.
    pub form: Form,
    /// Size of the window in bytes; zero from a client.
    pub window: u64,
    /// Size of each ring's data in bytes, a power of two; zero from a client.
    pub ring: u64,
}

impl Hello {
    /// A client's hello.
    pub fn client() -> Self {
        Self {
            version: VERSION,
            form: Form::File,
            window: 0,
            ring: 0,
        }
    }

    /// The hello as bytes.
    pub fn to_bytes(self) -> [u8; SIZE] {
        let mut out = MAGIC.to_vec();
        self.version.number.put(&mut out);
        let form: u32 = match self.form {
            Form::File => 0,
            Form::Port => 1,
            Form::Stream => 2,
            Form::Full => 3,
        };
        form.put(&mut out);
        self.version.fingerprint.put(&mut out);
        self.window.put(&mut out);
        self.ring.put(&mut out);
        let mut bytes = [0; SIZE];
        bytes[..out.len()].copy_from_slice(&out);
        bytes
    }

    /// Reads a peer's hello and checks that both sides are of one version.
    pub fn check(bytes: &[u8; SIZE]) -> Result<Self, Refused> {
        let Some(rest) = bytes.strip_prefix(&MAGIC) else {
            return Err(Refused::NotGantry);
        };
        let mut reader = Reader::new(rest);
        let read = |reader: &mut Reader<'_>| -> Result<Self, Malformed> {
            let number = u32::take(reader)?;
            let form = match u32::take(reader)? {
                0 => Form::File,
                2 => Form::Stream,
                3 => Form::Full,
                _ => Form::Port,
            };
            Ok(Self {
                version: Version {
                    number,
                    fingerprint: u64::take(reader)?,
                },
                form,
                window: u64::take(reader)?,
                ring: u64::take(reader)?,
            })
        };
        let hello = read(&mut reader).map_err(|_| Refused::NotGantry)?;
        if hello.version != VERSION {
            return Err(Refused::Version {
                ours: VERSION,
                theirs: hello.version,
            });
        }
        Ok(hello)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_of_another_build_is_refused_by_a_message_that_names_both_versions() {
        let mut theirs = Hello::client();
        theirs.version.number += 1;
        let refused = Hello::check(&theirs.to_bytes()).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains(&VERSION.to_string()), "{text}");
        assert!(text.contains(&theirs.version.to_string()), "{text}");
    }

    #[test]
    fn a_peer_that_speaks_something_else_is_refused() {
        let mut bytes = [0; SIZE];
        bytes[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Hello::check(&bytes), Err(Refused::NotGantry));
    }

    #[test]
    fn a_hello_survives_the_way_through_bytes() {
        for form in [Form::File, Form::Port, Form::Stream, Form::Full] {
            let hello = Hello {
                version: VERSION,
                form,
                window: 1 << 28,
                ring: 1 << 20,
            };
            assert_eq!(Hello::check(&hello.to_bytes()), Ok(hello));
        }
    }
}

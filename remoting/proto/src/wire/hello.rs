//! The handshake: the first exchange on a connection, in a format that never changes.

use core::fmt;

pub use super::version::{NUMBER, Version};
use super::{
    api::{Api, ApiId, Spoken},
    codec::{Malformed, Reader, Wire},
};

/// The first bytes of every hello.
pub const MAGIC: [u8; 8] = *b"GANTRYRM";
/// The size of every hello in bytes.
pub const SIZE: usize = 48;

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:016x}", self.number, self.fingerprint)
    }
}

/// Why a peer is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The peer does not speak this protocol.
    #[error("the peer does not speak Gantry's remoting protocol")]
    NotGantry,
    /// The peer was built from another definition.
    #[error(
        "this side speaks version {ours} of the remoting protocol for {api} and the peer {theirs}: \
         install the driver that belongs to the host's worker"
    )]
    Version {
        /// The API, as far as it is known.
        api: ApiId,
        /// This build's version.
        ours: Version,
        /// The peer's version.
        theirs: Version,
    },
    /// The peer speaks another API.
    #[error(
        "the peer speaks the accelerator API {} and this side {ours}: name another worker pool or \
         accelerator port",
        named(*.theirs)
    )]
    Api {
        /// The API that this side speaks, or the first of several.
        ours: ApiId,
        /// The number of the API that the peer speaks.
        theirs: u32,
    },
    /// The peer asks for a form of window that this side does not know.
    #[error("the peer wants a window of form {0}, which this side does not know")]
    Form(u32),
}

/// The name of an API, or its number if this build does not know it.
fn named(number: u32) -> alloc::string::String {
    let known = ApiId::from_number(number).map(ApiId::name);
    known.map_or_else(|| alloc::format!("number {number}"), Into::into)
}

/// How a client gets its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The window is the whole file that comes with the hello; futexes wake sleepers.
    #[default]
    File,
    /// The window is a slice of an accelerator port: a [`SliceOffsets`](crate::port::SliceOffsets) and the files of the
    /// window and the doorbells follow.
    Port,
    /// Each side has its own window; frames and data follow on the connection.
    Stream,
    /// There is no window here: the client is served at an address, which follows as a length of two bytes and a text.
    /// The client keeps this connection, over which it is later told where to go ([`order`](remoting_transport::order)). This
    /// hello concerns no API.
    Elsewhere,
    /// There is no window: the client's user already has the maximum number of workers. This hello concerns no API.
    Full,
    /// The client wants no window: it asks whether an API is served here, in any version. The answer has this form too.
    /// It names that API if it is served, and another one if not.
    Asks,
}

impl Form {
    const fn number(self) -> u32 {
        match self {
            Self::File => 0,
            Self::Port => 1,
            Self::Stream => 2,
            Self::Full => 3,
            Self::Elsewhere => 4,
            Self::Asks => 5,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [
            Self::File,
            Self::Port,
            Self::Stream,
            Self::Full,
            Self::Elsewhere,
            Self::Asks,
        ]
        .into_iter()
        .find(|form| form.number() == number)
    }
}

/// Offset of the API's number.
const API: usize = 40;
/// Offset of the window's size.
const WINDOW: usize = 24;

/// The first message of both sides. The worker's carries the window's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The API that the application calls.
    pub api: ApiId,
    /// The sender's version of that API.
    pub version: Version,
    /// How the client gets the window.
    pub form: Form,
    /// Size of the window in bytes. From a client, zero, or the size of the window that another worker serves until
    /// this one does.
    pub window: u64,
    /// Size of each ring's data in bytes, a power of two; zero from a client.
    pub ring: u64,
}

impl Hello {
    /// A client's hello.
    pub fn client<A: Api>() -> Self {
        Self::answer(Spoken::of::<A>(), Form::File, (0, 0))
    }

    /// A client's hello when another worker serves its window, of this many bytes, until the new one does.
    pub fn from_another<A: Api>(window: u64) -> Self {
        Self::answer(Spoken::of::<A>(), Form::File, (window, 0))
    }

    /// A client's hello that asks whether an API is served.
    pub fn asks(spoken: Spoken) -> Self {
        Self::answer(spoken, Form::Asks, (0, 0))
    }

    /// Whether a client's hello says that another worker serves it. Checks only the magic and the window's size.
    pub fn is_from_another(bytes: &[u8; SIZE]) -> bool {
        let window = u64::take(&mut Reader::new(&bytes[WINDOW..]));
        bytes.starts_with(&MAGIC) && window.is_ok_and(|window| window > 0)
    }

    /// A worker's hello, with the sizes of the window and of each ring in bytes.
    pub fn answer(spoken: Spoken, form: Form, (window, ring): (u64, u64)) -> Self {
        Self {
            api: spoken.api,
            version: spoken.version,
            form,
            window,
            ring,
        }
    }

    /// The hello as bytes: magic, protocol number, form, the API's fingerprint, window, ring, the API's number.
    pub fn to_bytes(self) -> [u8; SIZE] {
        let mut out = MAGIC.to_vec();
        self.version.number.put(&mut out);
        self.form.number().put(&mut out);
        self.version.fingerprint.put(&mut out);
        self.window.put(&mut out);
        self.ring.put(&mut out);
        self.api.number().put(&mut out);
        let mut bytes = [0; SIZE];
        bytes[..out.len()].copy_from_slice(&out);
        bytes
    }

    /// The API that a peer's hello names, if this build knows it. Nothing else is checked.
    pub fn api(bytes: &[u8; SIZE]) -> Option<ApiId> {
        ApiId::from_number(Self::api_number(bytes))
    }

    /// The number of the API that a peer's hello names; zero if it names none. Nothing is checked.
    pub fn api_number(bytes: &[u8; SIZE]) -> u32 {
        u32::take(&mut Reader::new(&bytes[API..])).unwrap_or(0)
    }

    /// Decodes a client's hello and checks that it names one of these APIs, in the same version.
    ///
    /// # Errors
    /// Why the peer is to be refused.
    pub fn check(bytes: &[u8; SIZE], spoken: &[Spoken]) -> Result<Self, Refused> {
        let Some(rest) = bytes.strip_prefix(&MAGIC) else {
            return Err(Refused::NotGantry);
        };
        let mut reader = Reader::new(rest);
        let mut read = || -> Result<_, Malformed> {
            let (number, form) = (u32::take(&mut reader)?, u32::take(&mut reader)?);
            let fingerprint = u64::take(&mut reader)?;
            let (window, ring) = (u64::take(&mut reader)?, u64::take(&mut reader)?);
            let version = Version {
                number,
                fingerprint,
            };
            Ok((version, form, (window, ring), u32::take(&mut reader)?))
        };
        let (version, form, sizes, api) = read().map_err(|_| Refused::NotGantry)?;
        let find = |ours: &&Spoken| ours.api.number() == api;
        let wanted = spoken.iter().find(find);
        let first = wanted.or(spoken.first()).ok_or(Refused::NotGantry)?;
        let other = Refused::Version {
            api: first.api,
            ours: first.version,
            theirs: version,
        };
        // Another version of the protocol may give everything that follows another meaning.
        if version.number != NUMBER {
            return Err(other);
        }
        let form = Form::from_number(form).ok_or(Refused::Form(form))?;
        if matches!(form, Form::Full | Form::Elsewhere | Form::Asks) {
            return Ok(Self::answer(*first, form, sizes));
        }
        let Some(ours) = wanted else {
            return Err(Refused::Api {
                ours: first.api,
                theirs: api,
            });
        };
        if version != ours.version {
            return Err(other);
        }
        Ok(Self::answer(*ours, form, sizes))
    }

    /// Decodes a worker's hello, as a client that calls one API.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn check_for<A: Api>(bytes: &[u8; SIZE]) -> Result<Self, Refused> {
        Self::check(bytes, &[Spoken::of::<A>()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apis::opencl::OpenCl;

    fn client() -> Hello {
        Hello::client::<OpenCl>()
    }

    fn check(bytes: &[u8; SIZE]) -> Result<Hello, Refused> {
        Hello::check_for::<OpenCl>(bytes)
    }

    #[test]
    fn a_peer_of_another_build_is_refused_by_a_message_that_names_both_versions() {
        for change in [(1, 0), (0, 1)] {
            let mut theirs = client();
            theirs.version.number += change.0;
            theirs.version.fingerprint ^= change.1;
            let text = check(&theirs.to_bytes()).unwrap_err().to_string();
            assert!(text.contains(&OpenCl::VERSION.to_string()), "{text}");
            assert!(text.contains(&theirs.version.to_string()), "{text}");
        }
    }

    #[test]
    fn a_peer_that_speaks_something_else_is_refused() {
        let mut bytes = [0; SIZE];
        bytes[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(check(&bytes), Err(Refused::NotGantry));
    }

    #[test]
    fn an_api_that_nobody_speaks_here_is_refused_by_its_number() {
        let mut bytes = client().to_bytes();
        bytes[API] = 77;
        let refused = check(&bytes).unwrap_err();
        let ours = ApiId::OpenCl;
        assert_eq!(refused, Refused::Api { ours, theirs: 77 });
        assert!(refused.to_string().contains("number 77"), "{refused}");
        assert_eq!(Hello::api(&bytes), None);
    }

    #[test]
    fn who_asks_for_an_api_hears_of_it_in_whatever_version_or_of_another_one() {
        let mut asks = Hello::asks(Spoken::of::<OpenCl>());
        asks.version.fingerprint ^= 1;
        let heard = check(&asks.to_bytes()).unwrap();
        assert_eq!((heard.form, heard.api), (Form::Asks, ApiId::OpenCl));
        let asks = Hello::asks(Spoken::of::<crate::apis::cuda::Cuda>());
        let heard = check(&asks.to_bytes()).unwrap();
        assert_eq!((heard.form, heard.api), (Form::Asks, ApiId::OpenCl));
    }

    #[test]
    fn a_form_that_is_not_known_is_refused() {
        let mut bytes = client().to_bytes();
        bytes[12] = 9;
        assert_eq!(check(&bytes), Err(Refused::Form(9)));
    }

    #[test]
    fn a_hello_survives_the_way_through_bytes() {
        let all = [Form::File, Form::Port, Form::Stream];
        for form in all
            .into_iter()
            .chain([Form::Full, Form::Elsewhere, Form::Asks])
        {
            let hello = Hello::answer(Spoken::of::<OpenCl>(), form, (1 << 28, 1 << 20));
            assert_eq!(check(&hello.to_bytes()), Ok(hello));
            assert_eq!(Hello::api(&hello.to_bytes()), Some(ApiId::OpenCl));
        }
    }

    #[test]
    fn a_client_s_hello_says_whether_another_worker_serves_it() {
        let from_another = |hello: Hello| Hello::is_from_another(&hello.to_bytes());
        assert!(from_another(Hello::from_another::<OpenCl>(1 << 28)));
        assert!(!from_another(client()));
        assert!(!Hello::is_from_another(&[1; SIZE]), "a machine's");
    }

    #[test]
    fn apis_have_numbers_and_names_of_their_own() {
        for (at, api) in ApiId::ALL.into_iter().enumerate() {
            assert_ne!(api.number(), 0);
            assert_eq!(ApiId::from_number(api.number()), Some(api));
            for other in &ApiId::ALL[..at] {
                assert_ne!(api.name(), other.name());
            }
        }
    }
}

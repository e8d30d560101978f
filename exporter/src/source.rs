//! The sockets of VMs, arbiters and pools: how they are found, and what they answer. Answers are hostile: their size,
//! and the time for them, are bounded. So are the names: whoever may create files in a folder may create any number.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    str::{self, FromStr},
    time::{Duration, Instant},
};

use base::{poll, socket};

use crate::{arbiter, kind::Kind, pool, process::Processes, series::Series, vm};

/// Maximum size of an answer in bytes: that of a VM with hundreds of devices, or of an arbiter with a thousand clients.
const MAX_ANSWER: usize = 1 << 20;
/// Maximum number of files that are looked at in a folder.
const MOST_FILES: usize = 100_000;
/// Maximum length of a source's name in bytes.
const LONGEST_NAME: usize = 64;
/// Maximum number of header lines in an answer.
const MAX_HEADERS: usize = 32;
/// The request for a VM's metrics.
const REQUEST: &[u8] =
    b"GET /api/v1/vmm.metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// A socket that is asked for metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// What is behind it.
    pub kind: Kind,
    /// The socket's name without its extension; the whole path if another source has that name, too.
    pub name: String,
    /// The socket.
    pub path: PathBuf,
}

impl FromStr for Source {
    type Err = String;

    /// Parses `KIND=PATH`.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').filter(|(_, path)| !path.is_empty());
        let (kind, path) = parts.ok_or("use KIND=PATH, such as vm=/run/one.sock")?;
        let kind = Kind::named(kind)
            .ok_or_else(|| format!("unknown kind '{kind}': use vm, arbiter or pool"))?;
        let path = PathBuf::from(path);
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let name = stem.ok_or_else(|| format!("no file name in '{}'", path.display()))?;
        Ok(Self {
            kind,
            name: name.to_owned(),
            path,
        })
    }
}

/// Whose sources they are. Those of one owner neither delay nor hide those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Those that were named one by one.
    Named,
    /// The user whose sockets' files they are.
    User(u32),
}

/// The sources in a folder: sockets called `NAME.vm`, `NAME.arbiter` and `NAME.pool`.
#[derive(Debug, Default)]
pub struct Found {
    /// The sources, and whose they are.
    pub sources: BTreeSet<(Owner, Source)>,
    /// Whether there are more files than are looked at.
    pub is_cut: bool,
}

/// Finds the sources in a folder.
///
/// # Errors
/// The folder cannot be listed.
pub fn in_folder(folder: &Path) -> io::Result<Found> {
    let mut files = fs::read_dir(folder)?;
    let looked_at = files.by_ref().take(MOST_FILES).flatten();
    let sources = looked_at.filter_map(|file| of_file(&file)).collect();
    let is_cut = files.next().is_some();
    Ok(Found { sources, is_cut })
}

fn of_file(file: &fs::DirEntry) -> Option<(Owner, Source)> {
    let path = file.path();
    let kind = Kind::named(path.extension()?.to_str()?)?;
    let name = path.file_stem()?.to_str()?.to_owned();
    let is_usual = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let is_name = name.len() <= LONGEST_NAME && name.bytes().all(is_usual);
    let is_socket = file.file_type().is_ok_and(|kind| kind.is_socket());
    if !is_name || !is_socket {
        return None;
    }
    let owner = Owner::User(base::socket::counted_as(file.metadata().ok()?.uid()));
    Some((owner, Source { kind, name, path }))
}

/// Takes at most `most` sources, of each owner as many as of any other that has as many. Returns how many it has left out.
pub fn fair_part<T>(sources: &mut Vec<T>, most: usize, owner: impl Fn(&T) -> Owner) -> usize {
    let mut counts = BTreeMap::new();
    let mut ranked: Vec<(usize, T)> = { sources.drain(..) }
        .map(|source| {
            let count: &mut usize = counts.entry(owner(&source)).or_default();
            *count += 1;
            (*count, source)
        })
        .collect();
    let left_out = ranked.len().saturating_sub(most);
    // Stable: owners keep their order.
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.truncate(most);
    sources.extend(ranked.into_iter().map(|(_, source)| source));
    left_out
}

/// Names sources so that no two of a kind have the same name, and leaves out those that are there already.
pub fn unambiguous(sources: &mut Vec<(Owner, Source)>) {
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    sources.retain_mut(|(_, source)| {
        if !paths.insert(source.path.clone()) {
            return false;
        }
        if !names.insert((source.kind, source.name.clone())) {
            source.name = source.path.display().to_string();
            names.insert((source.kind, source.name.clone()));
        }
        true
    });
}

/// Why a source has not answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens at the socket, or the connection broke.
    #[error("cannot talk to it")]
    Connection(#[from] io::Error),
    /// There is no complete answer in time.
    #[error("it has not answered within {0:?}")]
    Silent(Duration),
    /// The answer is too long.
    #[error("it has sent more than {MAX_ANSWER} bytes")]
    Long,
    /// The answer is not an HTTP response with status 200, or is incomplete.
    #[error("it has not sent a complete HTTP response with status 200")]
    NotHttp,
    /// The answer is not UTF-8.
    #[error("its answer is not UTF-8 text")]
    NotText(#[from] str::Utf8Error),
    /// The answer is not a VM's.
    #[error("it has not answered as a VM does")]
    NotVm(#[from] vm::Wrong),
    /// The answer is not a status.
    #[error("it has not sent a status")]
    NotStatus(#[from] serde_json::Error),
}

/// Asks a source for its metrics. Returns when `patience` is over, but for one case: on kernels before 6.16, a source can
/// send a descriptor whose close hangs.
///
/// # Errors
/// It cannot be reached, or its answer is not of its kind.
pub fn ask(source: &Source, processes: &Processes, patience: Duration) -> Result<Series, Error> {
    let until = Instant::now() + patience;
    let mut stream = socket::connect_without_files(&source.path)?;
    let pid = socket::process(&stream)?;
    if source.kind == Kind::Vm {
        // Fits into the connection's buffer.
        stream.write_all(REQUEST)?;
    }
    let answer = receive(&mut stream, until)?.ok_or(Error::Silent(patience))?;
    let name = &source.name;
    let mut series = match source.kind {
        Kind::Vm => vm::series(name, pid, str::from_utf8(body(&answer)?)?)?,
        Kind::Arbiter => arbiter::series(name, &serde_json::from_slice(&answer)?),
        Kind::Pool => pool::series(name, &serde_json::from_slice(&answer)?),
    };
    series.extend(processes.series(source.kind, name, pid, until));
    Ok(series)
}

/// Receives everything until the other end closes a non-blocking connection; `None` if it does not in time.
fn receive(stream: &mut UnixStream, until: Instant) -> Result<Option<Vec<u8>>, Error> {
    let mut answer = Vec::new();
    let mut chunk = [0; 16 << 10];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let mut entry = [libc::pollfd {
            fd: stream.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        if poll::poll(&mut entry, Some(left))? == 0 {
            continue;
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(Some(answer)),
            Ok(count) => answer.extend_from_slice(&chunk[..count]),
            Err(error)
                if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
        if answer.len() > MAX_ANSWER {
            return Err(Error::Long);
        }
    }
}

/// The body of a response with status 200.
fn body(answer: &[u8]) -> Result<&[u8], Error> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let Ok(httparse::Status::Complete(head)) = response.parse(answer) else {
        return Err(Error::NotHttp);
    };
    let body = &answer[head..];
    let mut headers = response.headers.iter();
    let length = headers.find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length: Option<usize> =
        length.and_then(|length| str::from_utf8(length.value).ok()?.parse().ok());
    match (response.code, length) {
        (Some(200), Some(length)) if body.len() == length => Ok(body),
        _ => Err(Error::NotHttp),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_are_found_by_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let names = ["a.vm", "b-1.x.pool", "c.arbiter", "d.sock", "e f.vm", "g"];
        let _open = names.map(|name| UnixListener::bind(at(name)).unwrap());
        fs::write(at("file.vm"), "").unwrap();
        let found = in_folder(folder.path()).unwrap();
        assert!(!found.is_cut);
        let user = fs::metadata(folder.path()).unwrap().uid();
        let named: Vec<_> = { found.sources.iter() }
            .map(|(owner, one)| {
                assert_eq!(*owner, Owner::User(user));
                (one.kind, &*one.name)
            })
            .collect();
        assert_eq!(
            named,
            [(Kind::Vm, "a"), (Kind::Arbiter, "c"), (Kind::Pool, "b-1.x")]
        );
        assert!(in_folder(&at("missing")).is_err());
    }

    #[test]
    fn sources_with_the_same_name_are_told_apart_and_asked_once() {
        let of = |text: &str| text.parse::<Source>().unwrap();
        let all = ["vm=/a/v.vm", "vm=/b/v.vm", "pool=/a/v.pool", "vm=/a/v.vm"];
        let mut all = all.map(|text| (Owner::Named, of(text))).to_vec();
        unambiguous(&mut all);
        let names = all.into_iter().map(|(_, one)| one.name);
        assert_eq!(names.collect::<Vec<_>>(), ["v", "/b/v.vm", "v"]);
        for wrong in ["", "vm", "vm=", "vm=/", "disk=/x"] {
            assert!(wrong.parse::<Source>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn who_has_many_sources_hides_those_of_nobody_else() {
        let (many, few, named) = (Owner::User(1), Owner::User(2), Owner::Named);
        let mut sources = [vec![named], vec![many; 1000], vec![few; 3]].concat();
        assert_eq!(fair_part(&mut sources, 20, |owner| *owner), 984);
        let count = |owner| sources.iter().filter(|other| **other == owner).count();
        assert_eq!([count(many), count(few), count(named)], [16, 3, 1]);
        assert_eq!(fair_part(&mut sources, 20, |owner| *owner), 0);
    }

    #[test]
    fn only_a_complete_answer_with_status_200_has_a_body() {
        let answer = |status: &str, length: &str, rest: &str| {
            format!("HTTP/1.1 {status}\r\n{length}\r\n{rest}").into_bytes()
        };
        let right = answer("200 OK", "Content-Length: 2\r\n", "ab");
        assert_eq!(body(&right).unwrap(), b"ab");
        for wrong in [
            answer("404 No", "Content-Length: 2\r\n", "ab"),
            answer("200 OK", "Content-Length: 3\r\n", "ab"),
            answer("200 OK", "", "ab"),
            answer("200 OK", "Content-Length: -2\r\n", "ab"),
            b"HTTP/1.1 200 OK\r\n".to_vec(),
            b"{}".to_vec(),
        ] {
            assert!(body(&wrong).is_err());
        }
    }
}

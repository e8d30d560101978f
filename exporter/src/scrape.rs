//! Asks all sources. What is silent, or answers nonsense, is down. It neither delays nor disturbs the others of its owner,
//! unless there are more than are asked at a time; and never those of another owner.

use std::{
    collections::{BTreeMap, BTreeSet},
    error::Error as StdError,
    io,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use base::{Chain, Unpoisoned, note::Seldom};
use hyper::body::Bytes;
use tokio::{
    sync::Semaphore,
    task::{JoinSet, spawn_blocking},
    time::{Instant, timeout_at},
};

use crate::{
    metrics,
    process::Processes,
    series::Series,
    source::{self, Found, Owner, Source},
};

/// Time limit for a source.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time limit for all of them; below Prometheus' default of 10 s.
const ALL: Duration = Duration::from_secs(5);
/// Maximum number of sources that are asked.
const MOST: usize = 1000;
/// Number of an owner's sources that are asked at the same time, each by a thread.
const AT_ONCE: usize = 32;
/// For how long an answer is given again: whoever reads metrics must not keep sources busy.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of bytes of an exposition, and of an owner's part of it. What further sources tell is left out.
const LARGEST: usize = 64 << 20;
const LARGEST_OF_OWNER: usize = 16 << 20;
/// Maximum number of characters of an error that are logged. It may quote its source.
const LONGEST_ERROR: usize = 200;

/// What is to be asked.
#[derive(Debug)]
pub struct Scraper {
    folders: Vec<PathBuf>,
    named: Vec<Source>,
    processes: Processes,
    /// Sources that are known to be down, each of which has been logged.
    down: Mutex<BTreeSet<Source>>,
    owners: Mutex<BTreeMap<Owner, Arc<Limits>>>,
    last: tokio::sync::Mutex<Option<(Instant, Bytes)>>,
}

/// What an owner's sources have together.
#[derive(Debug)]
struct Limits {
    /// Held by each thread that asks a source, however long that takes.
    permits: Arc<Semaphore>,
    log: Mutex<Seldom>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(AT_ONCE)),
            log: Mutex::default(),
        }
    }
}

/// Why there are no figures of a source.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// It has not answered as it should.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// It hangs, or was not asked since others of its owner hang.
    #[error("it has not answered in time, or {AT_ONCE} others of its owner have not")]
    Late,
}

/// An answer, and how long it took.
type Answer = (Duration, Result<Series, Failure>);

impl Scraper {
    /// Asks the sockets in these folders, and these sources.
    pub fn new(folders: Vec<PathBuf>, named: Vec<Source>, processes: Processes) -> Self {
        Self {
            folders,
            named,
            processes,
            down: Mutex::default(),
            owners: Mutex::default(),
            last: tokio::sync::Mutex::default(),
        }
    }

    /// The text for Prometheus, at most a second old. What is begun goes on if the client that asked leaves: the next one
    /// gets it.
    pub async fn text(self: &Arc<Self>) -> Bytes {
        let scraper = Arc::clone(self);
        let text = tokio::spawn(async move {
            let mut last = scraper.last.lock().await;
            match &*last {
                Some((time, text)) if time.elapsed() < FRESH => text.clone(),
                _ => {
                    let text = Bytes::from(scraper.scrape().await);
                    *last = Some((Instant::now(), text.clone()));
                    text
                }
            }
        });
        // Empty if it has panicked: Prometheus takes that for a failure.
        text.await.unwrap_or_default()
    }

    async fn scrape(&self) -> String {
        let mut series = Series::default();
        let version = env!("CARGO_PKG_VERSION");
        series.set(metrics::EXPORTER_INFO, [version], 1.0);
        let (sources, mut left_out) = self.sources(&mut series).await;
        for (_, source) in &sources {
            let labels = [source.kind.name(), &*source.name];
            series.set(metrics::SOURCE_UP, labels, 0.0);
        }
        // Those of an owner whose threads hang stay, with the permits that these hold.
        self.owners.lock_unpoisoned().retain(|owner, limits| {
            Arc::strong_count(&limits.permits) > 1 || sources.iter().any(|(one, _)| one == owner)
        });
        let processes = self.processes.refreshed();
        let end = Instant::now() + ALL;
        let mut asked = JoinSet::new();
        for (owner, source) in sources.iter().cloned() {
            let (limits, processes) = (self.limits(owner), processes.clone());
            asked.spawn(async move {
                let answer = answer_of(&source, processes, &limits, end).await;
                (owner, source, answer)
            });
        }
        let mut answers = Vec::new();
        let mut sizes: BTreeMap<Owner, usize> = BTreeMap::new();
        while let Some(done) = asked.join_next().await {
            // A task that panicked has no result: its source stays down.
            let Ok((owner, source, (took, answer))) = done else {
                continue;
            };
            let labels = [source.kind.name(), &*source.name];
            self.log(owner, &source, answer.as_ref().err());
            if let Ok(answer) = answer {
                series.set(metrics::SOURCE_UP, labels, 1.0);
                series.set(metrics::SOURCE_ANSWER, labels, took.as_secs_f64());
                let size = sizes.entry(owner).or_default();
                *size += answer.bytes();
                match *size <= LARGEST_OF_OWNER {
                    true => answers.push((owner, answer)),
                    false => left_out += 1,
                }
            }
        }
        answers.sort_by_key(|(owner, _)| *owner);
        let mut bytes = 0;
        for (_, answer) in answers {
            bytes += answer.bytes();
            match bytes <= LARGEST {
                true => series.extend(answer),
                false => left_out += 1,
            }
        }
        let sources: BTreeSet<_> = sources.iter().map(|(_, source)| source).collect();
        let mut down = self.down.lock_unpoisoned();
        down.retain(|source| sources.contains(source));
        series.set(metrics::SOURCES_LEFT_OUT, [], left_out as f64);
        series.text()
    }

    fn limits(&self, owner: Owner) -> Arc<Limits> {
        let mut owners = self.owners.lock_unpoisoned();
        Arc::clone(owners.entry(owner).or_default())
    }

    /// The sources that there are now, and how many there are besides.
    async fn sources(&self, series: &mut Series) -> (Vec<(Owner, Source)>, usize) {
        let named = self.named.iter().cloned();
        let mut all: Vec<_> = named.map(|source| (Owner::Named, source)).collect();
        let mut left_out = 0;
        for folder in &self.folders {
            let path = folder.clone();
            let found = spawn_blocking(move || source::in_folder(&path)).await;
            let found: io::Result<Found> =
                found.unwrap_or_else(|error| Err(io::Error::other(error)));
            let is_up = f64::from(u8::from(found.is_ok()));
            let name = folder.display().to_string();
            series.set(metrics::FOLDER_UP, [&name], is_up);
            let found = found.unwrap_or_default();
            left_out += usize::from(found.is_cut);
            all.extend(found.sources);
        }
        left_out += source::fair_part(&mut all, MOST, |(owner, _)| *owner);
        source::unambiguous(&mut all);
        (all, left_out)
    }

    /// Logs that a source is down, or is up again; once, and seldom for all of an owner.
    fn log(&self, owner: Owner, source: &Source, error: Option<&Failure>) {
        let mut down = self.down.lock_unpoisoned();
        let is_news = match error {
            Some(_) => down.insert(source.clone()),
            None => down.remove(source),
        };
        let limits = self.limits(owner);
        let mut log = limits.log.lock_unpoisoned();
        if is_news && let Some(unsaid) = log.due() {
            let (kind, path) = (source.kind.name(), source.path.display());
            let what = error.map_or("is up again".to_owned(), |error| said(error));
            base::note!("gantry-exporter: {kind} {path} {what}{unsaid}");
        }
    }
}

/// What is logged of an error.
fn said(error: &(dyn StdError + 'static)) -> String {
    let text = format!("is down: {}", Chain(error));
    match text.char_indices().nth(LONGEST_ERROR) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text,
    }
}

async fn answer_of(source: &Source, processes: Processes, limits: &Limits, end: Instant) -> Answer {
    let permit = timeout_at(end, Arc::clone(&limits.permits).acquire_owned()).await;
    let Ok(permit) = permit else {
        return (ALL, Err(Failure::Late));
    };
    let (start, source) = (Instant::now(), source.clone());
    let thread = spawn_blocking(move || {
        let _permit = permit;
        source::ask(&source, &processes, PATIENCE)
    });
    // It ends by itself unless it hangs; then it keeps its permit.
    let answer = match timeout_at(end.min(start + PATIENCE * 2), thread).await {
        Ok(Ok(answer)) => answer.map_err(Failure::from),
        Ok(Err(_)) | Err(_) => Err(Failure::Late),
    };
    (start.elapsed(), answer)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::net::{UnixListener, UnixStream},
        path::Path,
        thread,
    };

    use super::*;

    const STATUS: &[u8] =
        br#"{"uptime":1000000000,"waiting":2,"serving":0,"machines":0,"most":9,"windows":0,
        "started":2,"served":0,"failed":0,"lost":0,"refused":0}"#;

    fn text_of(folder: &Path) -> String {
        let processes = Processes::open().unwrap();
        let scraper = Scraper::new(vec![folder.to_owned()], Vec::new(), processes);
        text_of_scraper(&Arc::new(scraper))
    }

    fn text_of_scraper(scraper: &Arc<Scraper>) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        let text = runtime.block_on(scraper.text());
        runtime.shutdown_background();
        String::from_utf8(text.to_vec()).unwrap()
    }

    /// Serves one connection.
    fn serves(path: &Path, serve: impl FnOnce(UnixStream) + Send + 'static) {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || serve(listener.accept().unwrap().0));
    }

    #[test]
    fn sources_that_are_silent_gone_or_hostile_are_down_and_the_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        serves(&at("good.pool"), |mut stream| {
            stream.write_all(STATUS).unwrap()
        });
        let _silent = UnixListener::bind(at("silent.arbiter")).unwrap();
        drop(UnixListener::bind(at("gone.vm")).unwrap());
        serves(&at("endless.pool"), |mut stream| {
            while stream.write_all(&[b'1'; 4096]).is_ok() {}
        });
        serves(&at("wrong.arbiter"), |mut stream| {
            let _ = stream.write_all(b"{\"policy\":7}");
        });
        serves(&at("slow.vm"), |mut stream| {
            let mut byte = [0];
            while stream.read(&mut byte).is_ok_and(|read| read > 0) {}
        });
        let text = text_of(folder.path());
        for (kind, name, is_up) in [
            ("pool", "good", 1),
            ("arbiter", "silent", 0),
            ("vm", "gone", 0),
            ("pool", "endless", 0),
            ("arbiter", "wrong", 0),
            ("vm", "slow", 0),
        ] {
            let line = format!("gantry_source_up{{kind=\"{kind}\",source=\"{name}\"}} {is_up}\n");
            assert!(text.contains(&line), "{line} is missing in {text}");
        }
        assert!(text.contains("gantry_pool_uptime_seconds{pool=\"good\"} 1\n"));
        assert!(text.contains("gantry_exporter_sources_left_out 0\n"));
    }

    #[test]
    fn silent_sources_of_one_owner_do_not_delay_those_of_another() {
        let folder = tempfile::tempdir().unwrap();
        serves(&folder.path().join("good.pool"), |mut stream| {
            stream.write_all(STATUS).unwrap();
        });
        let processes = Processes::open().unwrap();
        let scraper = Arc::new(Scraper::new(
            vec![folder.path().to_owned()],
            Vec::new(),
            processes,
        ));
        // As many threads as there may be ask sources of another owner, and hang.
        let hanging = Arc::clone(&scraper.limits(Owner::Named).permits);
        let _hanging = { hanging }.try_acquire_many_owned(AT_ONCE as u32).unwrap();
        let text = text_of_scraper(&scraper);
        let up = "gantry_source_up{kind=\"pool\",source=\"good\"} 1\n";
        assert!(text.contains(up), "{text}");
        assert_eq!(scraper.limits(Owner::Named).permits.available_permits(), 0);
    }

    #[test]
    fn a_scrape_goes_on_though_the_client_that_asked_has_left() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("silent.arbiter")).unwrap();
        let processes = Processes::open().unwrap();
        let folders = vec![folder.path().to_owned()];
        let scraper = Arc::new(Scraper::new(folders, Vec::new(), processes));
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(async {
            let left = tokio::time::timeout(PATIENCE / 10, scraper.text()).await;
            left.unwrap_err();
            assert!(!scraper.text().await.is_empty());
        });
        runtime.shutdown_background();
        listener.set_nonblocking(true).unwrap();
        listener.accept().unwrap();
        listener.accept().unwrap_err();
    }

    #[test]
    fn what_is_logged_of_an_error_is_short() {
        let wrong = format!("\"{}\"", "é".repeat(100_000));
        let error = serde_json::from_str::<u64>(&wrong).unwrap_err();
        let said = said(&Failure::Source(error.into()));
        assert!(said.starts_with("is down: it has not sent a status") && said.len() < 500);
    }

    #[test]
    fn a_folder_that_is_missing_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub");
        let line = |is_up: u8| {
            let path = path.display();
            format!("gantry_exporter_folder_up{{folder=\"{path}\"}} {is_up}\n")
        };
        assert!(text_of(&path).contains(&line(0)));
        fs::create_dir(&path).unwrap();
        assert!(text_of(&path).contains(&line(1)));
    }
}

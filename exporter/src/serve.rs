//! Answers Prometheus over HTTP. Any user of the machine may connect, and none keeps Prometheus out by silence.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HOST, HeaderMap, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use crate::{scrape::Scraper, series};

/// Maximum number of connections. Another one takes the place of one that has not asked, or is slow to read.
const MOST: usize = 64;
/// Time limit for the head of a request.
const HEAD: Duration = Duration::from_secs(2);
/// Time limit for a connection: one request and its answer.
const WHOLE: Duration = Duration::from_secs(20);
/// Time after which a connection has to make room for others: more than a scrape takes.
const SLOW: Duration = Duration::from_secs(6);
/// Maximum size of what is kept of a request's head in bytes.
const BUFFER: usize = 16 << 10;
/// Pause after a connection could not be accepted, since the next attempt would fail at once.
const PAUSE: Duration = Duration::from_millis(100);

const INDEX: &str =
    "gantry-exporter: /metrics is for Prometheus, /healthz says whether this runs\n";

/// Who may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Clients that name this machine by an IP address or as `localhost`. A page in a browser cannot: it has a name of
    /// its own, which it may let stand for this machine.
    Local,
    /// All.
    Any,
}

/// A connection.
#[derive(Debug)]
struct Client {
    task: AbortHandle,
    since: Instant,
    has_asked: Arc<AtomicBool>,
}

/// Serves until the process ends.
pub async fn run(listener: TcpListener, scraper: Arc<Scraper>, hosts: Hosts) {
    let mut clients = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => {
                base::note!("gantry-exporter: cannot accept a connection: {error}");
                sleep(PAUSE).await;
                continue;
            }
        };
        while !has_room(&mut clients) {
            sleep(PAUSE).await;
        }
        let scraper = Arc::clone(&scraper);
        let has_asked = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&has_asked);
        let task = tokio::spawn(async move {
            // Clients that are slow, have gone or do not speak HTTP miss their answer.
            let _ = timeout(WHOLE, connection(stream, &scraper, hosts, &asked)).await;
        });
        clients.push_back(Client {
            task: task.abort_handle(),
            since: Instant::now(),
            has_asked,
        });
    }
}

/// Whether there is room for a connection, for which another one may be ended. They are in the order of their age.
fn has_room(clients: &mut VecDeque<Client>) -> bool {
    clients.retain(|client| !client.task.is_finished());
    if clients.len() < MOST {
        return true;
    }
    let silent = |client: &Client| !client.has_asked.load(Relaxed);
    let slow = |client: &Client| client.since.elapsed() > SLOW;
    let worst = clients.iter().position(silent);
    let worst = worst.or_else(|| clients.iter().position(slow));
    let ended = worst.and_then(|worst| clients.remove(worst));
    ended.inspect(|client| client.task.abort()).is_some()
}

async fn connection(
    stream: TcpStream,
    scraper: &Arc<Scraper>,
    hosts: Hosts,
    has_asked: &AtomicBool,
) -> hyper::Result<()> {
    let service = service_fn(|request| async move {
        has_asked.store(true, Relaxed);
        Ok::<_, Infallible>(answer(&request, scraper, hosts).await)
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// Whether a request names this machine by an address, or as `localhost`.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else {
        // No browser leaves it out.
        return true;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    };
    let address = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    port.bytes().all(|byte| byte.is_ascii_digit())
        && (name.eq_ignore_ascii_case("localhost")
            || address.unwrap_or(name).parse::<IpAddr>().is_ok())
}

async fn answer(
    request: &Request<Incoming>,
    scraper: &Arc<Scraper>,
    hosts: Hosts,
) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        _ if hosts == Hosts::Local && !is_local(request.headers()) => {
            let text = b"name this machine by its IP address, or as localhost\n";
            (StatusCode::FORBIDDEN, TEXT, Bytes::from_static(text))
        }
        (&Method::GET, "/metrics") => (StatusCode::OK, series::CONTENT_TYPE, scraper.text().await),
        (&Method::GET, "/healthz") => (StatusCode::OK, TEXT, Bytes::from_static(b"ok\n")),
        (&Method::GET, "/") => (StatusCode::OK, TEXT, Bytes::from_static(INDEX.as_bytes())),
        (&Method::GET, _) => {
            let text = Bytes::from_static(INDEX.as_bytes());
            (StatusCode::NOT_FOUND, TEXT, text)
        }
        _ => {
            let text = Bytes::from_static(b"only GET is allowed\n");
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, text)
        }
    };
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_has_made_its_name_stand_for_this_machine_is_refused() {
        let is_local = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, host.parse().unwrap());
            is_local(&headers)
        };
        for host in [
            "localhost",
            "LOCALHOST:9470",
            "127.0.0.1:9470",
            "[::1]:9470",
            "[::1]",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9470",
            "localhost.evil:1",
            "127.0.0.1.evil",
            "",
            "[::1]x",
        ] {
            assert!(!is_local(host), "{host}");
        }
        assert!(super::is_local(&HeaderMap::new()));
    }

    #[test]
    fn who_has_not_asked_makes_room_and_who_has_does_not() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        { runtime }.build().unwrap().block_on(make_room());
    }

    async fn make_room() {
        let mut clients = VecDeque::new();
        let mut tasks = Vec::new();
        for number in 0..MOST {
            let task = tokio::spawn(std::future::pending::<()>());
            clients.push_back(Client {
                task: task.abort_handle(),
                since: Instant::now(),
                has_asked: Arc::new(AtomicBool::new(number != 7)),
            });
            tasks.push(task);
        }
        assert!(has_room(&mut clients));
        assert!(tasks.remove(7).await.unwrap_err().is_cancelled());
        let task = tokio::spawn(std::future::pending::<()>());
        clients.push_back(Client {
            task: task.abort_handle(),
            since: Instant::now(),
            has_asked: Arc::new(AtomicBool::new(true)),
        });
        assert!(!has_room(&mut clients));
        clients[0].since = Instant::now().checked_sub(SLOW * 2).unwrap();
        assert!(has_room(&mut clients));
        assert!(tasks.remove(0).await.unwrap_err().is_cancelled());
    }
}

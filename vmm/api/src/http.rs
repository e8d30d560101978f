//! The subset of HTTP/1.1 that the API needs: parses request heads and encodes responses.

use super::{ApiError, Response, Status};

/// Maximum size of a request's head in bytes.
pub const MAX_HEAD: usize = 8 << 10;

/// Maximum size of a body in bytes: ten times a configuration with hundreds of devices.
pub const MAX_BODY: usize = 1 << 20;

/// Maximum number of header lines in a request.
const MAX_HEADERS: usize = 64;

/// The head of a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Head {
    /// `GET`, `PUT` ...
    pub method: String,
    /// The path, without the query (from `?`).
    pub path: String,
    /// Size of the head itself in bytes.
    pub len: usize,
    /// Size of the body in bytes, at most [`MAX_BODY`].
    pub body: usize,
    /// The client wants to keep the connection open.
    pub keep_alive: bool,
    /// The client waits for an interim response before it sends the body.
    pub expects_continue: bool,
}

/// Parses a head; `None` if it is incomplete. After an error the connection is unusable.
pub fn parse_head(bytes: &[u8]) -> Result<Option<Head>, ApiError> {
    let refuse = |status, message: &str| Err(ApiError::message(status, message));
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let window = &bytes[..bytes.len().min(MAX_HEAD)];
    let len = match request.parse(window) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => return Ok(None),
        Ok(httparse::Status::Partial) => {
            let message = format!("the head of the request is longer than {MAX_HEAD} bytes");
            return refuse(Status::HeadersTooLarge, &message);
        }
        Err(httparse::Error::TooManyHeaders) => {
            let message = format!("the request has more than {MAX_HEADERS} header lines");
            return refuse(Status::HeadersTooLarge, &message);
        }
        Err(httparse::Error::Version) => {
            return refuse(Status::VersionNotSupported, "the server speaks HTTP/1.1");
        }
        Err(error) => {
            return Err(ApiError::new(Status::BadRequest, &error).context("this is not HTTP/1.1"));
        }
    };
    let path = request.path.unwrap_or_default();
    let mut head = Head {
        method: request.method.unwrap_or_default().to_owned(),
        path: path.split('?').next().unwrap_or_default().to_owned(),
        len,
        body: 0,
        keep_alive: request.version == Some(1),
        expects_continue: false,
    };
    let mut length = None;
    for header in request.headers.iter() {
        let value = String::from_utf8_lossy(header.value);
        let value = value.trim();
        if header.name.eq_ignore_ascii_case("content-length") {
            // Digits only: "+1" would mean different things to different parsers.
            let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            if !digits || length.is_some_and(|known: String| known != value) {
                return refuse(Status::BadRequest, "Content-Length is not one number");
            }
            length = Some(value.to_owned());
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            let message = "Transfer-Encoding is not supported; send Content-Length";
            return refuse(Status::NotImplemented, message);
        } else if header.name.eq_ignore_ascii_case("connection") {
            for option in value.split(',').map(str::trim) {
                if option.eq_ignore_ascii_case("close") {
                    head.keep_alive = false;
                } else if option.eq_ignore_ascii_case("keep-alive") {
                    head.keep_alive = true;
                }
            }
        } else if header.name.eq_ignore_ascii_case("expect") {
            if !value.eq_ignore_ascii_case("100-continue") {
                let message = "the only expectation that can be met is 100-continue";
                return refuse(Status::ExpectationFailed, message);
            }
            head.expects_continue = true;
        }
    }
    if let Some(length) = length {
        head.body = match length.parse::<usize>() {
            Ok(length) if length <= MAX_BODY => length,
            _ => {
                let message =
                    format!("a body of {length} bytes is longer than the {MAX_BODY} allowed");
                return refuse(Status::PayloadTooLarge, &message);
            }
        };
    }
    Ok(Some(head))
}

/// The interim response for a client that expects one before it sends the body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 \r\n\r\n";

/// A response that is ready to be sent.
#[derive(Debug)]
pub struct Message {
    code: u16,
    content_type: &'static str,
    body: Option<Vec<u8>>,
    allow: Option<&'static str>,
}

const JSON: &str = "application/json";

impl Message {
    /// The response to a successful request.
    pub fn success(response: &Response) -> Self {
        let json = match response {
            Response::Empty => {
                return Self {
                    code: 204,
                    content_type: JSON,
                    body: None,
                    allow: None,
                };
            }
            Response::Metrics(metrics) => {
                return Self {
                    code: 200,
                    content_type: crate::metrics::CONTENT_TYPE,
                    body: Some(metrics.render().into_bytes()),
                    allow: None,
                };
            }
            Response::Ping(ping) => serde_json::to_vec(ping),
            Response::Info(info) => serde_json::to_vec(info),
            Response::Counters(counters) => serde_json::to_vec(counters),
            Response::Device(device) => serde_json::to_vec(device),
            Response::MovedAccel(moved) => serde_json::to_vec(moved),
            Response::Migration(info) => serde_json::to_vec(info),
        };
        match json {
            Ok(body) => Self {
                code: 200,
                content_type: JSON,
                body: Some(body),
                allow: None,
            },
            Err(error) => Self::error(&ApiError::internal(&error)),
        }
    }

    /// A 200 response without a body.
    pub fn ok() -> Self {
        Self {
            code: 200,
            content_type: JSON,
            body: Some(Vec::new()),
            allow: None,
        }
    }

    /// The response to a failed request: a JSON array of the chain of causes.
    pub fn error(error: &ApiError) -> Self {
        Self {
            code: error.status().code(),
            content_type: JSON,
            // Serializing a list of strings cannot fail.
            body: Some(serde_json::to_vec(error.chain()).unwrap_or_default()),
            allow: None,
        }
    }

    /// Adds the method that the path supports.
    #[must_use]
    pub fn allow(mut self, method: &'static str) -> Self {
        self.allow = Some(method);
        self
    }

    /// Encodes the response. There is no reason phrase after the status, because Cloud Hypervisor's
    /// command-line client parses everything after the version as the number.
    pub fn encode(&self, keep_alive: bool) -> Vec<u8> {
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let mut head = format!(
            "HTTP/1.1 {} \r\nServer: Gantry\r\nConnection: {connection}\r\n",
            self.code
        );
        if let Some(method) = self.allow {
            head += &format!("Allow: {method}\r\n");
        }
        if let Some(body) = &self.body {
            if !body.is_empty() {
                head += &format!("Content-Type: {}\r\n", self.content_type);
            }
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        head += "\r\n";
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(self.body.as_deref().unwrap_or_default());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str) -> u16 {
        parse_head(text.as_bytes()).unwrap_err().status().code()
    }

    #[test]
    fn a_head_is_read_when_it_is_complete() {
        let text = "PUT /api/v1/vm.create?x=1 HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\
                    Content-Length: 7\r\nExpect: 100-continue\r\n\r\n{\"a\":1}";
        for end in 0..text.len() - 7 {
            assert_eq!(parse_head(&text.as_bytes()[..end]), Ok(None), "{end}");
        }
        let head = parse_head(text.as_bytes()).unwrap().unwrap();
        assert_eq!(
            (head.method.as_str(), head.path.as_str()),
            ("PUT", "/api/v1/vm.create")
        );
        assert_eq!((head.len, head.body), (text.len() - 7, 7));
        assert!(head.keep_alive && head.expects_continue);
    }

    #[test]
    fn a_connection_is_kept_as_the_client_wants() {
        let keep = |text: &str| parse_head(text.as_bytes()).unwrap().unwrap().keep_alive;
        assert!(keep("GET / HTTP/1.1\r\n\r\n"));
        assert!(!keep("GET / HTTP/1.1\r\nConnection: close\r\n\r\n"));
        assert!(!keep("GET / HTTP/1.0\r\n\r\n"));
        assert!(keep("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"));
    }

    #[test]
    fn what_cannot_be_handled_is_refused_with_its_status() {
        assert_eq!(refused("hello\r\n\r\n"), 400);
        assert_eq!(refused("GET / HTTP/2.0\r\n\r\n"), 505);
        let with = |header: &str| refused(&format!("PUT / HTTP/1.1\r\n{header}\r\n\r\n"));
        assert_eq!(with("Content-Length: 104857600"), 413);
        assert_eq!(with("Content-Length: 99999999999999999999999"), 413);
        assert_eq!(with("Content-Length: -1"), 400);
        assert_eq!(with("Content-Length: +1"), 400);
        assert_eq!(with("Content-Length: 1\r\nContent-Length: 2"), 400);
        assert_eq!(with("Transfer-Encoding: chunked"), 501);
        assert_eq!(with("Expect: cake"), 417);
        assert_eq!(
            refused(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(MAX_HEAD))),
            431
        );
        let lines = "A: b\r\n".repeat(MAX_HEADERS + 1);
        assert_eq!(refused(&format!("GET / HTTP/1.1\r\n{lines}\r\n")), 431);
    }

    #[test]
    fn errors_are_an_array_of_the_chain_of_causes() {
        let error = ApiError::message(Status::NotFound, "inner").context("outer");
        let bytes = Message::error(&error).encode(true);
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with("HTTP/1.1 404 \r\n"));
        assert!(text.contains("\r\nContent-Type: application/json\r\nContent-Length: 17\r\n"));
        assert!(text.ends_with("\r\n\r\n[\"outer\",\"inner\"]"));
    }

    proptest! {
        #[test]
        fn no_input_makes_the_parser_panic(bytes: Vec<u8>) {
            let _ = parse_head(&bytes);
        }
    }
}

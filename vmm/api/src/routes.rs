//! The paths of the API, and the request that each one stands for.

use std::os::fd::OwnedFd;

use serde::{Serialize, de::DeserializeOwned};
use vmm_config::{GenericVhostUserConfig, Invalid, Kind, Refused, VdpaConfig, VmConfig};

use super::{ApiError, Request, RestoreConfig, Status, body};

/// Common prefix of all paths.
pub const PREFIX: &str = "/api/v1/";

type Outcome = Result<Request, ApiError>;

/// How a path is converted to a request.
#[derive(Clone, Copy)]
enum Action {
    /// Without a body.
    Plain(fn() -> Request),
    /// With a body.
    Body(fn(&str, &[u8]) -> Outcome),
    /// With a device of a kind as its body.
    Add(&'static Kind),
    /// With a body and descriptors.
    Descriptors(fn(&str, &[u8], Vec<OwnedFd>) -> Outcome),
    /// Not supported by Gantry: the body is validated, then the request is refused.
    Unsupported(
        Status,
        fn(&str, &[u8]) -> Result<(), ApiError>,
        &'static str,
    ),
}

/// A path of the API.
#[derive(Clone, Copy)]
pub struct Route {
    /// `GET` or `PUT`.
    pub method: &'static str,
    /// The path after [`PREFIX`].
    pub path: &'static str,
    action: Action,
}

const fn get(path: &'static str, request: fn() -> Request) -> Route {
    let method = "GET";
    let action = Action::Plain(request);
    Route {
        method,
        path,
        action,
    }
}

const fn put(path: &'static str, action: Action) -> Route {
    let method = "PUT";
    Route {
        method,
        path,
        action,
    }
}

/// All paths.
pub fn routes() -> impl Iterator<Item = Route> {
    let kinds = VmConfig::KINDS.iter();
    let added = kinds.filter(|kind| kind.hot_plug.is_some());
    ROUTES
        .iter()
        .copied()
        .chain(added.map(|kind| put(kind.path, Action::Add(kind))))
}

/// All paths except those that add devices.
const ROUTES: &[Route] = &[
    get("vmm.ping", || Request::VmmPing),
    get("vmm.metrics", || Request::VmmMetrics),
    put("vmm.shutdown", Action::Plain(|| Request::VmmShutdown)),
    get("vm.info", || Request::VmInfo),
    get("vm.counters", || Request::VmCounters),
    put("vm.create", Action::Body(create)),
    put("vm.delete", Action::Plain(|| Request::VmDelete)),
    put("vm.boot", Action::Plain(|| Request::VmBoot)),
    put("vm.pause", Action::Plain(|| Request::VmPause)),
    put("vm.resume", Action::Plain(|| Request::VmResume)),
    put("vm.shutdown", Action::Plain(|| Request::VmShutdown)),
    put("vm.reboot", Action::Plain(|| Request::VmReboot)),
    put("vm.power-button", Action::Plain(|| Request::VmPowerButton)),
    put("vm.nmi", Action::Plain(|| Request::VmNmi)),
    put(
        "vm.resize",
        Action::Body(|p, b| plain(p, b, Request::VmResize)),
    ),
    put(
        "vm.resize-disk",
        Action::Body(|p, b| plain(p, b, Request::VmResizeDisk)),
    ),
    put(
        "vm.resize-zone",
        Action::Body(|p, b| plain(p, b, Request::VmResizeZone)),
    ),
    put(
        "vm.remove-device",
        Action::Body(|p, b| plain(p, b, Request::VmRemoveDevice)),
    ),
    put(
        "vm.swap-device",
        Action::Body(|p, b| plain(p, b, Request::VmSwapDevice)),
    ),
    put(
        "vm.move-accel",
        Action::Body(|p, b| plain(p, b, Request::VmMoveAccel)),
    ),
    put(
        "vm.snapshot",
        Action::Body(|p, b| plain(p, b, Request::VmSnapshot)),
    ),
    put("vm.restore", Action::Descriptors(restore)),
    put(
        "vm.coredump",
        Action::Body(|p, b| plain(p, b, Request::VmCoredump)),
    ),
    unsupported::<GenericVhostUserConfig>(
        "vm.add-generic-vhost-user",
        "devices of other processes (vhost-user)",
    ),
    unsupported::<VdpaConfig>("vm.add-vdpa", "vDPA devices"),
    put(
        "vm.send-migration",
        Action::Body(|p, b| plain(p, b, Request::VmSendMigration)),
    ),
    put(
        "vm.receive-migration",
        Action::Body(|p, b| plain(p, b, Request::VmReceiveMigration)),
    ),
    get("vm.migration", || Request::VmMigration),
    put(
        "vm.cancel-migration",
        Action::Plain(|| Request::VmCancelMigration),
    ),
    put(
        "vm.resolve-migration",
        Action::Body(|p, b| plain(p, b, Request::VmResolveMigration)),
    ),
];

const fn unsupported<T: DeserializeOwned + Serialize>(
    path: &'static str,
    what: &'static str,
) -> Route {
    let check = |path: &str, body: &[u8]| body::parse::<T>(path, body).map(drop);
    put(path, Action::Unsupported(Status::BadRequest, check, what))
}

/// Why a client's input cannot be converted to a request.
#[derive(Debug)]
pub struct Refusal {
    /// The error to send.
    pub error: ApiError,
    /// The method that the path supports, if the method was wrong.
    pub allow: Option<&'static str>,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self { error, allow: None }
    }
}

/// Converts a client's input to a request.
pub fn route(method: &str, path: &str, body: &[u8], fds: Vec<OwnedFd>) -> Result<Request, Refusal> {
    let name = path.strip_prefix(PREFIX);
    let Some(route) = routes().find(|route| Some(route.path) == name) else {
        let message = format!("there is no '{path}'; paths start with {PREFIX}");
        return Err(ApiError::message(Status::NotFound, message).into());
    };
    if route.method != method {
        let message = format!("{} is asked for with {}", route.path, route.method);
        return Err(Refusal {
            error: ApiError::message(Status::MethodNotAllowed, message),
            allow: Some(route.method),
        });
    }
    match route.action {
        Action::Descriptors(request) => return Ok(request(route.path, body, fds)?),
        Action::Add(kind) => return Ok(add(kind, body, fds)?),
        _ => {}
    }
    if !fds.is_empty() {
        let message = format!(
            "{} takes no descriptors; vm.add-net and vm.add-device do",
            route.path
        );
        return Err(ApiError::message(Status::BadRequest, message).into());
    }
    match route.action {
        Action::Plain(request) => Ok(request()),
        Action::Body(request) => Ok(request(route.path, body)?),
        Action::Add(kind) => Ok(add(kind, body, fds)?),
        Action::Descriptors(request) => Ok(request(route.path, body, fds)?),
        Action::Unsupported(status, check, what) => {
            check(route.path, body)?;
            let message = format!("not supported by Gantry: {what}");
            Err(ApiError::message(status, message).into())
        }
    }
}

fn plain<T: DeserializeOwned + Serialize>(
    path: &str,
    body: &[u8],
    request: fn(T) -> Request,
) -> Outcome {
    body::parse(path, body).map(request)
}

fn invalid(error: &Invalid) -> ApiError {
    ApiError::new(Status::BadRequest, error).context("the configuration is not valid")
}

fn create(path: &str, body: &[u8]) -> Outcome {
    let mut config: Box<VmConfig> = body::parse(path, body)?;
    config.normalize();
    config.validate().map_err(|error| invalid(&error))?;
    Ok(Request::VmCreate(config))
}

fn add(kind: &Kind, body: &[u8], fds: Vec<OwnedFd>) -> Outcome {
    let mut device = body::parse_with(kind.path, body, kind.from_json, |device| device.to_json())?;
    device.validate().map_err(|error| invalid(&error))?;
    if !fds.is_empty() {
        device
            .take_descriptors(fds)
            .map_err(|Refused(why)| ApiError::message(Status::BadRequest, why))?;
    }
    Ok(Request::VmAdd(device))
}

fn restore(path: &str, body: &[u8], fds: Vec<OwnedFd>) -> Outcome {
    let config: RestoreConfig = body::parse(path, body)?;
    let named = config
        .net_fds
        .iter()
        .flatten()
        .try_fold(0_usize, |sum, net| sum.checked_add(net.num_fds));
    if named != Some(fds.len()) {
        let message = format!(
            "{} descriptors came with the request, but net_fds is about {}",
            fds.len(),
            named.unwrap_or(usize::MAX)
        );
        return Err(ApiError::message(Status::BadRequest, message));
    }
    Ok(Request::VmRestore(config, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(method: &str, path: &str, body: &str) -> (u16, String) {
        let refusal = route(method, path, body.as_bytes(), Vec::new()).unwrap_err();
        (refusal.error.status().code(), refusal.error.to_string())
    }

    #[test]
    fn a_path_with_its_method_and_body_is_a_request() {
        let route = |method, path, body: &str| route(method, path, body.as_bytes(), Vec::new());
        assert!(matches!(
            route("GET", "/api/v1/vm.info", ""),
            Ok(Request::VmInfo)
        ));
        let body = r#"{"desired_vcpus":4,"desired_ram":2147483648,"desired_balloon":null}"#;
        let Ok(Request::VmResize(resize)) = route("PUT", "/api/v1/vm.resize", body) else {
            panic!("no resize");
        };
        assert_eq!(resize.desired_vcpus, Some(4));
        let body = r#"{"payload":{"kernel":"/k"}}"#;
        assert!(matches!(
            route("PUT", "/api/v1/vm.create", body),
            Ok(Request::VmCreate(_))
        ));
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_status() {
        assert_eq!(refused("GET", "/api/v1/vm.dance", "").0, 404);
        assert_eq!(refused("GET", "/vm.info", "").0, 404);
        assert_eq!(refused("PUT", "/api/v1/vm.info", "").0, 405);
        assert_eq!(refused("GET", "/api/v1/vm.boot", "").0, 405);
        assert_eq!(refused("PUT", "/api/v1/vm.resize", "").0, 400);
        assert_eq!(refused("PUT", "/api/v1/vm.create", "{}").0, 400);
        let (status, message) = refused("PUT", "/api/v1/vm.add-disk", "{}");
        assert_eq!(status, 400);
        assert!(message.contains("path: is missing"), "{message}");
    }

    #[test]
    fn what_gantry_does_not_do_is_refused_after_the_body_was_understood() {
        let (status, message) = refused("PUT", "/api/v1/vm.add-vdpa", "{}");
        assert_eq!(status, 400);
        assert!(message.contains("missing field `path`"), "{message}");
        let body = r#"{"path":"/v"}"#;
        let (status, message) = refused("PUT", "/api/v1/vm.add-vdpa", body);
        assert_eq!(status, 400);
        assert!(message.contains("not supported by Gantry"), "{message}");
    }

    #[test]
    fn descriptors_have_to_be_expected_and_as_many_as_expected() {
        let fd = || vec![OwnedFd::from(std::fs::File::open("/dev/null").unwrap())];
        let ping = route("GET", "/api/v1/vmm.ping", b"", fd()).unwrap_err();
        assert_eq!(ping.error.status(), Status::BadRequest);
        let request = route("PUT", "/api/v1/vm.add-net", b"{}", fd()).unwrap();
        assert!(matches!(request, Request::VmAdd(net) if net.descriptors().len() == 1));
        let vsock = br#"{"cid":3,"socket":"/s"}"#;
        let refusal = route("PUT", "/api/v1/vm.add-vsock", vsock, fd()).unwrap_err();
        assert_eq!(refusal.error.status(), Status::BadRequest);
        let body = br#"{"num_queues":4}"#;
        let refusal = route("PUT", "/api/v1/vm.add-net", body, fd()).unwrap_err();
        assert_eq!(refusal.error.status(), Status::BadRequest);
        let body = br#"{"source_url":"file:///s","net_fds":[{"id":"n","num_fds":1}]}"#;
        assert!(route("PUT", "/api/v1/vm.restore", body, fd()).is_ok());
        assert!(route("PUT", "/api/v1/vm.restore", body, Vec::new()).is_err());
    }
}

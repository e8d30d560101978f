//! The program before a kubelet and a service for leases. The service is the real one; pools are programs that only listen.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use gantry_kube::{
    leases::Service,
    proto::{
        v1::{
            ContainerDevices, ContainerResources, ListPodResourcesRequest,
            ListPodResourcesResponse, PodResources,
            pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
        },
        v1beta1::{
            AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
            ContainerPreferredAllocationRequest, Empty, ListAndWatchResponse,
            PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest,
            device_plugin_client::DevicePluginClient,
            registration_server::{Registration, RegistrationServer},
        },
    },
    share,
};
use hyper_util::rt::TokioIo;
use remoting_pool::leases;
use tokio::{
    net::{UnixListener, UnixStream},
    runtime::Runtime,
    sync::mpsc,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Endpoint, Server},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_gantry-kube");
const LONG: Duration = Duration::from_secs(60);

/// What the service starts in place of gantry-accel: it listens as a pool does, and serves nobody.
const POOL: &str = r#"#!/usr/bin/env python3
import socket, sys, time
sys.stdin.buffer.read(1)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--socket") + 1])
listener.listen()
time.sleep(600)
"#;

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    manual::check_unread(PROGRAM, &["--help", "--version", "man", "completions bash"]);
}

/// A kubelet, as far as plugins see it.
struct Kubelet {
    runtime: Runtime,
    registered: mpsc::Receiver<RegisterRequest>,
}

struct Registers(mpsc::Sender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Registers {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0
            .send(request.into_inner())
            .await
            .map_err(|_| Status::aborted("it ends"))?;
        Ok(Response::new(Empty {}))
    }
}

#[derive(Clone, Default)]
struct Pods(Arc<Mutex<ListPodResourcesResponse>>);

#[tonic::async_trait]
impl PodResourcesLister for Pods {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.0.lock().unwrap().clone()))
    }
}

impl Kubelet {
    /// Starts as kubelet does: all sockets in the folder are removed.
    fn start(folder: &Path, pods: &Pods) -> Self {
        for entry in fs::read_dir(folder).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let runtime = Runtime::new().unwrap();
        let (told, registered) = mpsc::channel(8);
        let entered = runtime.enter();
        let incoming =
            |name: &str| UnixListenerStream::new(UnixListener::bind(folder.join(name)).unwrap());
        let registration = Server::builder()
            .add_service(RegistrationServer::new(Registers(told)))
            .serve_with_incoming(incoming("kubelet.sock"));
        let resources = Server::builder()
            .add_service(PodResourcesListerServer::new(pods.clone()))
            .serve_with_incoming(incoming("pods.sock"));
        runtime.spawn(registration);
        runtime.spawn(resources);
        drop(entered);
        Self {
            runtime,
            registered,
        }
    }

    /// The plugin, once it is registered.
    fn plugin(&mut self, folder: &Path) -> DevicePluginClient<Channel> {
        let Self {
            runtime,
            registered,
        } = self;
        let within = async { tokio::time::timeout(LONG, registered.recv()).await };
        let request = runtime.block_on(within).unwrap().unwrap();
        assert_eq!(
            (request.version.as_str(), request.resource_name.as_str()),
            ("v1beta1", "gantry.dev/accel")
        );
        assert!(request.options.unwrap().get_preferred_allocation_available);
        let path = folder.join(request.endpoint);
        let connector = tower::service_fn(move |_: tonic::transport::Uri| {
            let path = path.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = endpoint.connect_with_connector(connector);
        DevicePluginClient::new(runtime.block_on(channel).unwrap())
    }

    fn next(&self, stream: &mut Streaming<ListAndWatchResponse>) -> ListAndWatchResponse {
        self.runtime.block_on(stream.message()).unwrap().unwrap()
    }

    fn allocate(
        &self,
        plugin: &mut DevicePluginClient<Channel>,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Status> {
        let one = ContainerAllocateRequest {
            devices_i_ds: ids.to_vec(),
        };
        let request = AllocateRequest {
            container_requests: vec![one],
        };
        let answer = self.runtime.block_on(plugin.allocate(request))?;
        Ok(answer.into_inner().container_responses.remove(0))
    }
}

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn plugin_process(leases: &Path, folder: &Path) -> Killed {
    let mut command = Command::new(PROGRAM);
    command.args(["--reserve", "100", "--mount", "/usr/lib/x"]);
    command
        .arg("--leases")
        .arg(leases)
        .arg("--plugins")
        .arg(folder);
    command.arg("--pod-resources").arg(folder.join("pods.sock"));
    Killed(command.spawn().unwrap())
}

#[derive(Parser)]
struct Leases {
    #[command(flatten)]
    options: leases::Options,
}

/// The service, as long as this process lives.
fn leases(folder: &Path) -> (PathBuf, Service) {
    let program = folder.join("pool");
    fs::write(&program, POOL).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let place = folder.join("leases");
    let words: [PathBuf; 6] =
        ["", "--device", "0=10000", "--device", "1=10000", "--folder"].map(Into::into);
    let words = words
        .into_iter()
        .chain([place.clone(), "--cache".into(), folder.join("cache")]);
    let Leases { options } = Leases::parse_from(words);
    thread::spawn(move || leases::run(options, &program));
    let service = Service {
        socket: place.join("socket"),
    };
    eventually(|| service.list().is_ok());
    (place, service)
}

fn eventually(is_so: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < until, "it hangs");
        thread::sleep(Duration::from_millis(10));
    }
}

fn ids(device: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
    share::all(device, 100)
        .skip(numbers.start)
        .take(numbers.len())
        .collect()
}

#[test]
fn containers_get_leases_for_their_shares_whatever_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let plugins = folder.path().join("plugins");
    fs::create_dir(&plugins).unwrap();
    let (place, service) = leases(folder.path());
    let pods = Pods::default();
    let mut kubelet = Kubelet::start(&plugins, &pods);
    let process = plugin_process(&place, &plugins);
    let mut plugin = kubelet.plugin(&plugins);
    let mut watched = kubelet
        .runtime
        .block_on(plugin.list_and_watch(Empty {}))
        .unwrap()
        .into_inner();
    let devices = kubelet.next(&mut watched).devices;
    assert!(devices.len() == 200 && devices.iter().all(|one| one.health == "Healthy"));
    // One device is preferred.
    let free = [ids("0", 90..100), ids("1", 0..20)].concat();
    let preferred = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_i_ds: free,
            must_include_device_i_ds: Vec::new(),
            allocation_size: 15,
        }],
    };
    let answer = kubelet
        .runtime
        .block_on(plugin.get_preferred_allocation(preferred))
        .unwrap();
    let preferred = &answer.into_inner().container_responses[0].device_i_ds;
    assert_eq!(*preferred, ids("1", 0..15));
    // 25 and 75 of 100.
    let quarter = kubelet.allocate(&mut plugin, &ids("0", 0..25)).unwrap();
    kubelet.allocate(&mut plugin, &ids("0", 25..100)).unwrap();
    let granted: Vec<_> = service.list().unwrap().leases;
    let told: Vec<_> = granted
        .iter()
        .map(|lease| {
            (
                lease.grant.name.to_string(),
                lease.grant.weight,
                lease.grant.memory,
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("kube-0-0".to_owned(), 25, 2400),
            ("kube-0-25".to_owned(), 75, 7400)
        ]
    );
    assert_eq!(quarter.envs["GANTRY_CUDA"], "/run/gantry/pool.sock");
    assert_eq!(quarter.envs["GANTRY_SHARE"], "25");
    let mount = &quarter.mounts[0];
    assert!(mount.read_only && mount.container_path == "/run/gantry");
    assert_eq!(
        Path::new(&mount.host_path),
        granted[0].socket.parent().unwrap()
    );
    assert_eq!(quarter.mounts[1].host_path, "/usr/lib/x");
    // Of two devices, and less than what is set aside.
    let two = [ids("0", 0..1), ids("1", 0..1)].concat();
    assert!(
        kubelet
            .allocate(&mut plugin, &two)
            .unwrap_err()
            .message()
            .contains("one device")
    );
    let little = kubelet.allocate(&mut plugin, &ids("1", 0..1)).unwrap_err();
    assert!(little.message().contains("more shares"), "{little}");
    // The container that had these shares has ended.
    kubelet.allocate(&mut plugin, &ids("0", 20..30)).unwrap();
    let names = |service: &Service| -> Vec<String> {
        let leases = service.list().unwrap().leases;
        leases
            .iter()
            .map(|lease| lease.grant.name.to_string())
            .collect()
    };
    assert_eq!(names(&service), ["kube-0-20"]);
    // A lease that is lost is there again, at the same place, before its container starts; one that is there stays.
    let before = service.list().unwrap().leases.remove(0);
    service.revoke(before.grant.name.clone()).unwrap();
    for _ in 0..2 {
        let mut ids = ids("0", 20..30);
        ids.reverse();
        let request = PreStartContainerRequest { devices_i_ds: ids };
        let started = plugin.pre_start_container(request);
        kubelet.runtime.block_on(started).unwrap();
        assert_eq!(
            service.list().unwrap().leases,
            std::slice::from_ref(&before)
        );
    }
    pods.0.lock().unwrap().pod_resources.push(PodResources {
        containers: vec![ContainerResources {
            devices: vec![ContainerDevices {
                resource_name: "gantry.dev/accel".to_owned(),
                device_ids: ids("0", 20..30),
            }],
            ..ContainerResources::default()
        }],
        ..PodResources::default()
    });
    // A kubelet that is started again is registered with again, and a plugin registers again.
    drop(kubelet);
    let mut kubelet = Kubelet::start(&plugins, &pods);
    kubelet.plugin(&plugins);
    drop(process);
    assert_eq!(names(&service), ["kube-0-20"]);
    let _process = plugin_process(&place, &plugins);
    let mut plugin = kubelet.plugin(&plugins);
    kubelet.allocate(&mut plugin, &ids("1", 0..50)).unwrap();
    assert_eq!(names(&service), ["kube-0-20", "kube-1-0"]);
    for lease in service.list().unwrap().leases {
        service.revoke(lease.grant.name).unwrap();
    }
}

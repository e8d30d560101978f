//! Kubelet: the plugin is registered with it, also with one that was started again, and asks it what pods have.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base::{Chain, socket};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
    time::sleep,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};

use crate::{
    leases::Service,
    plugin::{Plugin, Seen, seen},
    proto::{
        v1::{ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient},
        v1beta1::{
            RegisterRequest, device_plugin_server::DevicePluginServer,
            registration_client::RegistrationClient,
        },
    },
    reclaim::{Unused, in_use},
};

/// The version of the interface.
const VERSION: &str = "v1beta1";
/// The name of the plugin's socket, beside kubelet's.
pub const SOCKET: &str = "gantry-accel.sock";
/// How often is looked whether kubelet was started again, and whether devices have changed.
const LOOK: Duration = Duration::from_secs(1);
/// How often kubelet is asked what pods have.
const RECLAIM: Duration = Duration::from_secs(10);
/// How long kubelet may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Where kubelet is.
#[derive(Clone, Debug)]
pub struct Kubelet {
    /// The folder of its socket for plugins, and of theirs.
    pub plugins: PathBuf,
    /// The socket at which it tells what pods have.
    pub pod_resources: PathBuf,
    /// The name of the resource.
    pub resource: String,
}

/// Why the plugin is not registered.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot listen in {}: is it kubelet's folder, and may this user write to it?", .0.display())]
    Listen(PathBuf, #[source] io::Error),
    #[error("no kubelet listens at {}", .0.display())]
    Absent(PathBuf, #[source] tonic::transport::Error),
    #[error("kubelet refuses")]
    Refused(#[source] Box<tonic::Status>),
}

/// A file, as another one in its place is told from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(u64, u64, i64, i64);

fn identity(path: &Path) -> Option<Identity> {
    let data = fs::symlink_metadata(path).ok()?;
    Some(Identity(
        data.dev(),
        data.ino(),
        data.ctime(),
        data.ctime_nsec(),
    ))
}

/// A connection to a socket.
async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = path.to_owned();
    // The address is not used, and must be one.
    let endpoint = Endpoint::from_static("http://localhost")
        .timeout(PATIENCE)
        .connect_timeout(CONNECT);
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    endpoint.connect_with_connector(connector).await
}

impl Kubelet {
    /// Serves the plugin and keeps it registered, for ever.
    pub async fn serve(&self, plugin: Plugin) {
        let (own, theirs) = (self.plugins.join(SOCKET), self.plugins.join("kubelet.sock"));
        let mut said = None;
        loop {
            let outcome = self
                .serve_once(plugin.clone(), (&own, &theirs), &mut said)
                .await;
            if let Err(error) = outcome {
                // Once: it may last.
                let why = Chain(&error).to_string();
                if said.as_ref() != Some(&why) {
                    base::note!("gantry-kube: waiting for kubelet: {why}");
                    said = Some(why);
                }
            }
            sleep(LOOK).await;
        }
    }

    /// The same, until there is another kubelet, or the plugin's socket is gone: kubelet removes it when it starts.
    async fn serve_once(
        &self,
        plugin: Plugin,
        (own, theirs): (&Path, &Path),
        said: &mut Option<String>,
    ) -> Result<(), Error> {
        let kubelet = identity(theirs);
        let listener = socket::listen_privately(own).and_then(|listener| {
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        });
        let listener = listener.map_err(|error| Error::Listen(self.plugins.clone(), error))?;
        let here = identity(own);
        let incoming = UnixListenerStream::new(listener);
        let service = DevicePluginServer::new(plugin);
        let server = Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming);
        let server = Aborted(tokio::spawn(server));
        let channel = connect(theirs)
            .await
            .map_err(|error| Error::Absent(theirs.to_owned(), error))?;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: SOCKET.to_owned(),
            resource_name: self.resource.clone(),
            options: Some(Plugin::options()),
        };
        let registered = RegistrationClient::new(channel).register(request).await;
        registered.map_err(|status| Error::Refused(Box::new(status)))?;
        base::note!("gantry-kube: {} is registered with kubelet", self.resource);
        *said = None;
        while identity(theirs) == kubelet && identity(own) == here && !server.0.is_finished() {
            sleep(LOOK).await;
        }
        Ok(())
    }

    /// Ends leases that no pod has, for ever.
    pub async fn reclaim(&self, service: Service) {
        let mut unused = Unused::default();
        let mut kubelet = identity(&self.pod_resources);
        loop {
            sleep(RECLAIM).await;
            let now = identity(&self.pod_resources);
            if now != kubelet {
                kubelet = now;
                unused.forget();
            }
            // A kubelet that does not answer may answer again; what it has listed before stays so.
            let _ = self.reclaim_once(&service, &mut unused).await;
        }
    }

    /// None if it is not known what there is.
    async fn reclaim_once(&self, service: &Service, unused: &mut Unused) -> Option<()> {
        // Before pods: a lease that is new by then is not looked at.
        let listing = ask(service, Service::list).await?;
        let channel = connect(&self.pod_resources).await.ok()?;
        let mut client = PodResourcesListerClient::new(channel);
        let listed = client
            .list(ListPodResourcesRequest {})
            .await
            .ok()?
            .into_inner();
        let used = in_use(&listed, &self.resource);
        for name in unused.due(&listing.leases, &used, Instant::now()) {
            base::note!("gantry-kube: lease {name} is ended: no pod has it");
            ask(service, move |service| service.revoke(name)).await?;
        }
        Some(())
    }
}

/// Keeps what is known of the devices up to date, for ever.
pub async fn watch(service: Service, devices: watch::Sender<Vec<Seen>>) {
    loop {
        let listed = ask(&service, Service::list).await;
        devices.send_if_modified(|devices| {
            let now = seen(devices, listed.as_ref());
            let has_changed = now != *devices;
            *devices = now;
            has_changed
        });
        sleep(LOOK).await;
    }
}

/// Asks the service, aside.
async fn ask<T: Send + 'static>(
    service: &Service,
    ask: impl FnOnce(&Service) -> Result<T, crate::leases::Error> + Send + 'static,
) -> Option<T> {
    let service = service.clone();
    let answer = tokio::task::spawn_blocking(move || ask(&service));
    answer.await.ok()?.ok()
}

/// A task that ends with this.
struct Aborted<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Aborted<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

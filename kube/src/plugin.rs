//! What kubelet calls: which shares there are, and what a container with some of them gets.

use std::{collections::HashMap, path::PathBuf, str::FromStr, sync::Arc};

use base::Chain;
use remoting_pool::leases::request::{Api, Grant, Listing, Name, Until};
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt, wrappers::WatchStream};
use tonic::{Request, Response, Status};

use crate::{
    leases::{self, Service},
    proto::v1beta1::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse,
        ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty,
        ListAndWatchResponse, Mount, PreStartContainerRequest, PreStartContainerResponse,
        PreferredAllocationRequest, PreferredAllocationResponse,
        device_plugin_server::DevicePlugin,
    },
    share::{self, NoPart, Part},
};

/// Folder of the lease's socket in a container.
const FOLDER: &str = "/run/gantry";
/// Folder of Gantry's CUDA libraries in a container.
const CUDA_LIBRARIES: &str = "/usr/lib/gantry-cuda";

/// What is mounted from the host into each container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FromHost {
    /// Where it is on the host.
    pub host: PathBuf,
    /// Where the container has it.
    pub container: PathBuf,
}

impl FromStr for FromHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, container) = text.split_once(':').unwrap_or((text, text));
        match host.starts_with('/') && container.starts_with('/') {
            true => Ok(Self {
                host: host.into(),
                container: container.into(),
            }),
            false => Err("use PATH or HOST-PATH:CONTAINER-PATH, both absolute".to_owned()),
        }
    }
}

/// How shares are given.
#[derive(Clone, Debug)]
pub struct Terms {
    /// How many shares a device is, 1 to 100.
    pub shares: u32,
    /// MiB of a lease's part that are set aside for what is not counted.
    pub reserve: u64,
    /// The APIs.
    pub api: Vec<Api>,
    /// What containers get of the host.
    pub mounts: Vec<FromHost>,
}

/// The plugin.
#[derive(Clone, Debug)]
pub struct Plugin {
    service: Service,
    terms: Arc<Terms>,
    /// The devices, as they were seen last.
    devices: watch::Receiver<Vec<Seen>>,
}

/// A device, as it was seen last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its name.
    pub name: String,
    /// Whether it can be used.
    pub is_healthy: bool,
}

/// Devices as a service lists them; of one that does not answer, those that were seen before, which cannot be used.
pub fn seen(before: &[Seen], listed: Option<&Listing>) -> Vec<Seen> {
    match listed {
        Some(listed) => listed
            .devices
            .iter()
            .map(|device| Seen {
                name: device.name.clone(),
                is_healthy: device.problem.is_none(),
            })
            .collect(),
        None => before
            .iter()
            .map(|device| Seen {
                is_healthy: false,
                ..device.clone()
            })
            .collect(),
    }
}

/// Why a container gets nothing.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Part(#[from] NoPart),
    #[error("there is no device {0} any more")]
    Device(String),
    #[error(
        "{shares} of {all} shares of device {device} are {part} MiB, of which {reserve} are set aside for what is not \
         counted: ask for more shares, or start gantry-kube with a smaller --reserve"
    )]
    Small {
        device: String,
        shares: u32,
        all: u32,
        part: u64,
        reserve: u64,
    },
    #[error(transparent)]
    Name(#[from] remoting_pool::leases::request::InvalidName),
    #[error(transparent)]
    Service(#[from] leases::Error),
}

impl Plugin {
    /// A plugin for the devices of this service.
    pub fn new(service: Service, terms: Terms, devices: watch::Receiver<Vec<Seen>>) -> Self {
        Self {
            service,
            terms: Arc::new(terms),
            devices,
        }
    }

    /// What kubelet is told of it.
    pub fn options() -> DevicePluginOptions {
        DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }
    }

    /// Grants a lease for the shares that kubelet has chosen for a container, whoever had some of them before. `keeps` says
    /// whether a lease with the same terms is this container's.
    fn allocate_one(
        &self,
        ids: &[String],
        keeps: bool,
    ) -> Result<ContainerAllocateResponse, Error> {
        let part = Part::of(ids)?;
        let listing = self.service.list()?;
        let grant = self.terms_of(&part, ids, &listing)?;
        // Kubelet gives shares away once: whoever had one of these is gone, or waits for its own container to start.
        let gone = listing.leases.iter().filter(|lease| {
            let is_ours = String::from(lease.grant.name.clone()).starts_with(share::PREFIX);
            let overlaps = lease.grant.holds.iter().any(|id| ids.contains(id));
            let is_kept = keeps && lease.grant == grant;
            !is_kept && (lease.grant.name == grant.name || is_ours && overlaps)
        });
        for lease in gone {
            self.service.revoke(lease.grant.name.clone())?;
        }
        let socket = self.service.grant(grant)?;
        Ok(self.given(&socket, &part))
    }

    /// What the shares are of their device.
    fn terms_of(&self, part: &Part, ids: &[String], listing: &Listing) -> Result<Grant, Error> {
        let device = listing.devices.iter().find(|one| one.name == part.device());
        let device = device.ok_or_else(|| Error::Device(part.device().to_owned()))?;
        let (shares, all, reserve) = (part.shares(), self.terms.shares, self.terms.reserve);
        let of_device = u128::from(device.memory) * u128::from(shares) / u128::from(all);
        let of_device = u64::try_from(of_device).unwrap_or(u64::MAX);
        let memory = of_device.checked_sub(reserve).filter(|memory| *memory > 0);
        let memory = memory.ok_or_else(|| Error::Small {
            device: part.device().to_owned(),
            shares,
            all,
            part: of_device,
            reserve,
        })?;
        // Kubelet names them in any order.
        let mut holds = ids.to_vec();
        holds.sort_unstable();
        Ok(Grant {
            name: Name::try_from(part.name())?,
            device: part.device().to_owned(),
            weight: shares,
            memory,
            reserve: Some(reserve),
            api: self.terms.api.clone(),
            until: Until::Revoked,
            holds,
        })
    }

    /// The same for several containers, aside: the service is waited for.
    async fn allocate_all(
        &self,
        containers: Vec<Vec<String>>,
        keeps: bool,
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let plugin = self.clone();
        let granted = tokio::task::spawn_blocking(move || {
            let one = |ids: &Vec<String>| plugin.allocate_one(ids, keeps);
            containers.iter().map(one).collect::<Result<Vec<_>, _>>()
        });
        let granted = granted.await;
        let granted = granted.map_err(|error| Status::internal(error.to_string()))?;
        granted.map_err(|error| {
            let why = Chain(&error).to_string();
            base::note!("gantry-kube: a container gets nothing: {why}");
            Status::failed_precondition(why)
        })
    }

    /// What a container gets with a lease's socket.
    fn given(&self, socket: &std::path::Path, part: &Part) -> ContainerAllocateResponse {
        let folder = socket.parent().unwrap_or(socket);
        let file = socket.file_name().unwrap_or_default().to_string_lossy();
        let inside = format!("{FOLDER}/{file}");
        let mut envs = HashMap::from([("GANTRY_SHARE".to_owned(), part.shares().to_string())]);
        let mut set = |name: &str, value: String| envs.insert(name.to_owned(), value);
        for api in &self.terms.api {
            match api {
                Api::OpenCl => set("GANTRY_OPENCL", inside.clone()),
                Api::Cuda => {
                    set("GANTRY_CUDA", inside.clone());
                    set("GANTRY_CUDA_LIBRARIES", CUDA_LIBRARIES.to_owned());
                    let auditor = format!("{CUDA_LIBRARIES}/libgantry_cuda_audit.so");
                    set("LD_AUDIT", auditor);
                    set("LD_LIBRARY_PATH", CUDA_LIBRARIES.to_owned())
                }
            };
        }
        let mount = |host: &std::path::Path, container: &std::path::Path| Mount {
            container_path: container.display().to_string(),
            host_path: host.display().to_string(),
            read_only: true,
        };
        let own = mount(folder, FOLDER.as_ref());
        let others = self.terms.mounts.iter();
        let others = others.map(|one| mount(&one.host, &one.container));
        ContainerAllocateResponse {
            envs,
            mounts: [own].into_iter().chain(others).collect(),
        }
    }

    fn devices(&self, seen: &[Seen]) -> ListAndWatchResponse {
        let devices = seen.iter().flat_map(|device| {
            let health = match device.is_healthy {
                true => "Healthy",
                false => "Unhealthy",
            };
            share::all(&device.name, self.terms.shares).map(move |id| Device {
                id,
                health: health.to_owned(),
            })
        });
        ListAndWatchResponse {
            devices: devices.collect(),
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(Self::options()))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let plugin = self.clone();
        // Before the service has answered, there is nothing to tell: an empty list would mean that there are no devices.
        let all = WatchStream::new(self.devices.clone()).filter(|seen| !seen.is_empty());
        let all = all.map(move |seen| Ok(plugin.devices(&seen)));
        Ok(Response::new(Box::pin(all)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let containers = request.into_inner().container_requests.into_iter();
        let container_responses = containers.map(|one| ContainerPreferredAllocationResponse {
            device_i_ds: share::preferred(
                &one.available_device_i_ds,
                &one.must_include_device_i_ds,
                usize::try_from(one.allocation_size).unwrap_or(0),
            ),
        });
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: container_responses.collect(),
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let containers = containers.into_iter().map(|one| one.devices_i_ds).collect();
        let container_responses = self.allocate_all(containers, false).await?;
        Ok(Response::new(AllocateResponse {
            container_responses,
        }))
    }

    /// Called before each start of a container, also of one whose shares kubelet has remembered while leases were lost, as
    /// when the machine has started again: it finds the same socket.
    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let containers = vec![request.into_inner().devices_i_ds];
        self.allocate_all(containers, true).await?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_host_are_named_once_or_twice() {
        let both: FromHost = "/opt/a:/usr/lib/a".parse().unwrap();
        assert_eq!(
            (both.host, both.container),
            ("/opt/a".into(), "/usr/lib/a".into())
        );
        let same: FromHost = "/usr/lib/a".parse().unwrap();
        assert_eq!(same.host, same.container);
        assert!("a:/b".parse::<FromHost>().is_err() && "/a:b".parse::<FromHost>().is_err());
    }

    #[test]
    fn devices_of_a_service_that_does_not_answer_cannot_be_used() {
        let listing =
            r#"{"devices":[{"name":"0","memory":9,"free":9,"problem":null}],"leases":[]}"#;
        let listing = serde_json::from_str(listing).unwrap();
        let first = seen(&[], Some(&listing));
        assert!(first[0].is_healthy && first[0].name == "0");
        let then = seen(&first, None);
        assert!(!then[0].is_healthy && then[0].name == "0");
    }
}

//! Ends leases whose containers are gone. Kubelet tells no plugin when a container has ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use remoting_pool::leases::request::{Lease, Name};

use crate::{proto::v1::ListPodResourcesResponse, share::PREFIX};

/// How long no pod may have the shares of a lease before it is ended: kubelet lists a pod some time after it has had them
/// allocated.
pub const GRACE: Duration = Duration::from_secs(30);

/// The IDs of a resource that pods have.
pub fn in_use(listed: &ListPodResourcesResponse, resource: &str) -> BTreeSet<String> {
    let containers = listed.pod_resources.iter().flat_map(|pod| &pod.containers);
    let devices = containers.flat_map(|container| &container.devices);
    let ours = devices.filter(|devices| devices.resource_name == resource);
    ours.flat_map(|devices| devices.device_ids.iter().cloned())
        .collect()
}

/// Leases that pods have had, as far as one kubelet has listed them, and those of them that no pod has any more.
///
/// What was never listed may be a pod's that kubelet has yet to hear of from the API server. It stays: its shares have no
/// other lease, and whoever gets them next has it ended.
#[derive(Debug, Default)]
pub struct Unused {
    listed: BTreeSet<Name>,
    since: BTreeMap<Name, Instant>,
}

impl Unused {
    /// The leases to end at `now`, when pods have these IDs.
    pub fn due(&mut self, leases: &[Lease], used: &BTreeSet<String>, now: Instant) -> Vec<Name> {
        let names: BTreeSet<_> = leases.iter().map(|lease| &lease.grant.name).collect();
        self.listed.retain(|name| names.contains(name));
        self.since.retain(|name, _| names.contains(name));
        for grant in leases.iter().map(|lease| &lease.grant) {
            let is_ours = String::from(grant.name.clone()).starts_with(PREFIX);
            if is_ours && grant.holds.iter().any(|id| used.contains(id)) {
                self.listed.insert(grant.name.clone());
                self.since.remove(&grant.name);
            } else if self.listed.contains(&grant.name) {
                self.since.entry(grant.name.clone()).or_insert(now);
            }
        }
        let late = self.since.iter();
        let late = late.filter(|(_, since)| now.duration_since(**since) >= GRACE);
        late.map(|(name, _)| name.clone()).collect()
    }

    /// There is another kubelet, or it is not known what pods have.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::v1::{ContainerDevices, ContainerResources, PodResources};

    fn lease(name: &str, holds: &str) -> Lease {
        let text = format!(
            r#"{{"name":"{name}","device":"0","memory":1,"user":0,"socket":"/s","holds":["{holds}"]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_lease_ends_when_no_pod_has_had_it_for_a_while() {
        let (mut unused, start) = (Unused::default(), Instant::now());
        let leases = [
            lease("kube-0-0", "0-0"),
            lease("kube-0-1", "0-1"),
            lease("job", "0-2"),
        ];
        let none = BTreeSet::new();
        let all = ["0-0", "0-1", "0-2"].map(str::to_owned);
        let all = BTreeSet::from(all);
        // Kubelet has not heard of any pod yet.
        assert!(unused.due(&leases, &none, start).is_empty());
        assert!(unused.due(&leases, &none, start + 9 * GRACE).is_empty());
        let start = start + 9 * GRACE;
        assert!(unused.due(&leases, &all, start).is_empty());
        let used = BTreeSet::from(["0-1".to_owned()]);
        assert!(unused.due(&leases, &used, start).is_empty());
        assert!(unused.due(&leases, &used, start + GRACE / 2).is_empty());
        let due = unused.due(&leases, &used, start + GRACE);
        let due: Vec<_> = due.iter().map(ToString::to_string).collect();
        assert_eq!(due, ["kube-0-0"]);
        // In use again.
        assert!(unused.due(&leases, &all, start + GRACE).is_empty());
        unused.forget();
        assert!(unused.due(&leases, &none, start + 2 * GRACE).is_empty());
        assert!(unused.due(&leases, &none, start + 9 * GRACE).is_empty());
    }

    #[test]
    fn only_what_pods_have_of_the_resource_counts() {
        let devices = |resource: &str, id: &str| ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids: vec![id.to_owned()],
        };
        let listed = ListPodResourcesResponse {
            pod_resources: vec![PodResources {
                containers: vec![ContainerResources {
                    devices: vec![
                        devices("gantry.dev/accel", "0-1"),
                        devices("other/x", "0-2"),
                    ],
                    ..ContainerResources::default()
                }],
                ..PodResources::default()
            }],
        };
        assert_eq!(
            in_use(&listed, "gantry.dev/accel"),
            BTreeSet::from(["0-1".to_owned()])
        );
    }
}

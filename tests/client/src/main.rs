//! Controls a VM by a third-party client for Cloud Hypervisor, the crate `cloud-hypervisor-client`:
//! `ch-client SOCKET CONFIGURATION FOLDER`. With `ch-client SOCKET OTHER FOLDER migrate` it
//! migrates a VM to the Gantry whose API is at `OTHER`. The crate's types, generated from Cloud
//! Hypervisor's interface, check the form of the answers.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use cloud_hypervisor_client::{
    SocketBasedApiClient,
    apis::{DefaultApi, Error},
    models::{
        DiskConfig, ReceiveMigrationData, RestoreConfig, SendMigrationData, TimeoutStrategy,
        VmConfig, VmRemoveDevice, VmResize, VmSnapshotConfig, VmState,
    },
    socket_based_api_client,
};

/// Prints the name of the call, and names the call if it fails.
macro_rules! call {
    ($client:ident . $name:ident ( $($argument:expr),* )) => {{
        println!("{}", stringify!($name));
        $client.$name($($argument),*).await.context(stringify!($name))?
    }};
}

async fn expect(client: &SocketBasedApiClient, state: VmState) -> Result<()> {
    let info = call!(client.vm_info_get());
    ensure!(info.state == state, "the VM is {}, not {state}", info.state);
    Ok(())
}

async fn drive(client: &SocketBasedApiClient, config: VmConfig, folder: &Path) -> Result<()> {
    let ping = call!(client.vmm_ping_get());
    ensure!(!ping.version.is_empty(), "no version");
    call!(client.create_vm(config.clone()));
    expect(client, VmState::Created).await?;
    call!(client.boot_vm());
    expect(client, VmState::Running).await?;
    let counters = call!(client.vm_counters_get());
    ensure!(!counters.is_empty(), "no counters");
    call!(client.pause_vm());
    expect(client, VmState::Paused).await?;
    let snapshot = folder.join("snapshot");
    fs::create_dir_all(&snapshot)?;
    let url = format!("file://{}", snapshot.display());
    let mut to = VmSnapshotConfig::new();
    to.destination_url = Some(url.clone());
    call!(client.vm_snapshot_put(to));
    call!(client.resume_vm());
    let disk = folder.join("hot.raw");
    fs::File::create(&disk)?.set_len(1 << 20)?;
    let mut more = DiskConfig::new();
    more.path = Some(disk.display().to_string());
    more.id = Some("hot".to_owned());
    let place = call!(client.vm_add_disk_put(more));
    ensure!(place.id == "hot" && !place.bdf.is_empty(), "{place:?}");
    let mut wish = VmResize::new();
    wish.desired_vcpus = Some(2);
    call!(client.vm_resize_put(wish));
    let info = call!(client.vm_info_get());
    let disks = info.config.disks.context("the VM has no disks")?;
    ensure!(
        disks.iter().any(|disk| disk.id.as_deref() == Some("hot")),
        "{disks:?}"
    );
    let mut nobody = VmRemoveDevice::new();
    nobody.id = Some("nobody".to_owned());
    println!("vm_remove_device_put of what is not there");
    match client.vm_remove_device_put(nobody).await {
        Err(Error::Api(error)) => ensure!(error.body.contains("nobody"), "{error:?}"),
        other => bail!("it gave {other:?}"),
    }
    call!(client.reboot_vm());
    expect(client, VmState::Running).await?;
    call!(client.shutdown_vm());
    expect(client, VmState::Shutdown).await?;
    call!(client.delete_vm());
    call!(client.vm_restore_put(RestoreConfig::new(url)));
    expect(client, VmState::Paused).await?;
    call!(client.resume_vm());
    call!(client.power_button_vm());
    call!(client.delete_vm());
    call!(client.shutdown_vmm());
    Ok(())
}

/// Migrates a VM as with Cloud Hypervisor: the source's VMM ends after the VM has left it.
async fn migrate(
    source: &SocketBasedApiClient,
    destination: &SocketBasedApiClient,
    folder: &Path,
) -> Result<()> {
    let path = folder.join("migration.sock");
    let url = format!("unix:{}", path.display());
    let wait = ReceiveMigrationData::new(url.clone());
    let receiving = tokio::spawn(destination.vm_receive_migration_put(wait));
    while !path.exists() {
        ensure!(!receiving.is_finished(), "nobody waits");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut data = SendMigrationData::new(url);
    data.downtime_ms = Some(1000);
    data.timeout_s = Some(100);
    data.timeout_strategy = Some(TimeoutStrategy::Cancel);
    call!(source.vm_send_migration_put(data));
    receiving.await?.context("vm_receive_migration_put")?;
    expect(destination, VmState::Running).await
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    match &arguments[..] {
        [socket, config, folder] => {
            let config: VmConfig = serde_json::from_slice(&fs::read(config)?)?;
            let client = socket_based_api_client(socket);
            runtime.block_on(drive(&client, config, Path::new(folder)))
        }
        [socket, other, folder, migrate_it] if migrate_it == "migrate" => {
            let (source, destination) = (
                socket_based_api_client(socket),
                socket_based_api_client(other),
            );
            runtime.block_on(migrate(&source, &destination, Path::new(folder)))
        }
        _ => bail!(
            "usage: ch-client SOCKET CONFIGURATION FOLDER, or ch-client SOCKET OTHER FOLDER migrate"
        ),
    }
}

//! Network cards on tap interfaces.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::{GUEST, HOST, exists, sh},
    opencl::until,
};

pub const SCENARIOS: &[Entry] = &[
    ("net: ping and 10 MiB each way over tap", transfer),
    ("net: several queues", queues),
    ("net: a missing tap is made and goes with the VM", made),
];

/// Configures the guest's first card and pings the host.
pub fn set_up(guest: &mut Guest, interface: &str) -> Result<()> {
    guest.run(&format!(
        "ifconfig {interface} {GUEST} netmask 255.255.255.0 up"
    ))?;
    reaches(guest, HOST)
}

/// Waits until an address replies.
pub fn reaches(guest: &mut Guest, address: &str) -> Result<()> {
    guest.eventually(&format!("ping -c 1 -W 2 {address}"), |said| {
        said.contains(" 0% packet loss")
    })?;
    Ok(())
}

fn transfer(context: &Context) -> Result<()> {
    const LISTENERS: &str = "netstat -ltn";
    let net = json!({"tap": "tap-t", "ip": HOST, "mask": "255.255.255.0",
        "mac": "12:34:56:78:9a:bc"});
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({"net": [net]}))?;
    ensure!(guest.run("cat /sys/class/net/eth0/address")? == "12:34:56:78:9a:bc");
    set_up(&mut guest, "eth0")?;
    let file = context.dir.join("data");
    sh(&format!(
        "dd if=/dev/urandom of={} bs=1M count=10 2>/dev/null",
        file.display()
    ))?;
    let sum = sh(&format!("md5sum < {}", file.display()))?;
    // To the guest.
    // busybox's nc ends when its input ends: a FIFO without a writer never does.
    guest.run("mkfifo /tmp/hold; nc -l -p 5000 <>/tmp/hold > /tmp/data & true")?;
    guest.eventually(LISTENERS, |text| text.contains(":5000 "))?;
    sh(&format!("nc -w 60 {GUEST} 5000 < {}", file.display()))?;
    guest.eventually("wc -c < /tmp/data", |text| text == "10485760")?;
    ensure!(
        guest.run("md5sum < /tmp/data")? == sum.trim(),
        "data was damaged on its way"
    );
    // And back.
    let back = context.dir.join("back");
    let hold = context.dir.join("hold");
    let listener = format!(
        "mkfifo {0}; nc -l -p 5001 <>{0} > {1}",
        hold.display(),
        back.display()
    );
    let receiver = std::thread::spawn(move || sh(&listener));
    until("the host listens", || Ok(sh(LISTENERS)?.contains(":5001 ")))?;
    guest.run(&format!("nc -w 60 {HOST} 5001 < /tmp/data"))?;
    receiver
        .join()
        .map_err(|_| anyhow::anyhow!("the receiver panicked"))??;
    ensure!(sh(&format!("md5sum < {}", back.display()))? == sum);
    let counters = gantry.ok("GET", "vm.counters", None)?;
    let received = counters["_net0"]["rx_bytes"].as_u64().unwrap_or(0);
    ensure!(received >= 10 << 20, "counters: {counters}");
    Ok(())
}

fn queues(context: &Context) -> Result<()> {
    let net = json!({"tap": "tap-q", "ip": HOST, "mask": "255.255.255.0", "num_queues": 4});
    let more = json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}, "net": [net]});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    set_up(&mut guest, "eth0")?;
    ensure!(guest.run("ls -d /sys/class/net/eth0/queues/rx-* | wc -l")? == "2");
    Ok(())
}

fn made(context: &Context) -> Result<()> {
    let net = json!({"tap": "tap-m"});
    let (mut gantry, _guest) = Gantry::boot(&context.dir, json!({"net": [net.clone()]}))?;
    ensure!(exists("tap-m"));
    gantry.kill()?;
    ensure!(!exists("tap-m"), "the tap outlives a killed VM");
    let dir = context.dir.join("again");
    std::fs::create_dir(&dir)?;
    let (_gantry, mut guest) = Gantry::boot(&dir, json!({"net": [net]}))?;
    // The host has the API's default address.
    guest.run("ifconfig eth0 192.168.249.2 netmask 255.255.255.0 up")?;
    reaches(&mut guest, "192.168.249.1")
}

//! `gantry-kube`: gives containers of Kubernetes shares of this machine's accelerators.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{io, path::PathBuf, process::ExitCode};

use base::{Output, limits::file_size_is_an_error, paths::LEASES};
use clap::{CommandFactory, Parser};
use gantry_kube::{
    kubelet::{self, Kubelet},
    leases::Service,
    plugin::{FromHost, Plugin, Terms},
};
use manual::Manual;
use remoting_pool::leases::request::Api;
use tokio::sync::watch;

/// Device plugin for Kubernetes: containers ask for shares of this machine's accelerators.
#[derive(Parser)]
#[command(
    name = "gantry-kube",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Folder of the service that grants leases (gantry-accel leases --folder).
    #[arg(long, value_name = "FOLDER", default_value = LEASES)]
    leases: PathBuf,
    /// How many shares a device is.
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    shares: u32,
    /// MiB of a container's part that are set aside for what is not counted, such as contexts of CUDA.
    #[arg(long, value_name = "MIB", default_value_t = 600)]
    reserve: u64,
    /// The APIs that containers get: opencl, cuda, or opencl,cuda.
    #[arg(
        long,
        value_name = "API",
        value_delimiter = ',',
        default_value = "opencl,cuda"
    )]
    api: Vec<Api>,
    /// A path of this machine that containers get, read-only: PATH, or HOST-PATH:CONTAINER-PATH. Can be repeated. By
    /// default Gantry's libraries and the file that names the OpenCL driver, as packages have them.
    #[arg(
        long,
        value_name = "PATH",
        default_values = ["/usr/lib/gantry-cuda", "/usr/lib/gantry", "/etc/OpenCL/vendors/gantry.icd"]
    )]
    mount: Vec<FromHost>,
    /// The name of the resource that containers ask for.
    #[arg(long, value_name = "NAME", default_value = "gantry.dev/accel")]
    resource: String,
    /// Kubelet's folder for device plugins.
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    plugins: PathBuf,
    /// Kubelet's socket that tells what pods have.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pod_resources: PathBuf,
}

fn run(arguments: Arguments) -> io::Result<()> {
    if let Some(manual) = arguments.manual {
        return manual.write(Arguments::command(), &mut Output::standard());
    }
    let service = Service {
        socket: arguments.leases.join("socket"),
    };
    let kubelet = Kubelet {
        plugins: arguments.plugins,
        pod_resources: arguments.pod_resources,
        resource: arguments.resource,
    };
    let terms = Terms {
        shares: arguments.shares,
        reserve: arguments.reserve,
        api: arguments.api,
        mounts: arguments.mount,
    };
    let (devices, seen) = watch::channel(Vec::new());
    let plugin = Plugin::new(service.clone(), terms, seen);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::spawn(kubelet::watch(service.clone(), devices));
        let reclaimed = kubelet.clone();
        tokio::spawn(async move { reclaimed.reclaim(service).await });
        kubelet.serve(plugin).await;
    });
    Ok(())
}

fn main() -> ExitCode {
    file_size_is_an_error();
    base::note::end("gantry-kube", run(Arguments::parse()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "",
                "--leases /l --shares 10 --reserve 0 --api opencl --mount /a --mount /b:/c --resource x/y",
                "--plugins /p --pod-resources /s",
                "man",
                "man /pages",
                "completions zsh",
            ],
            &[
                "--shares 0",
                "--shares 101",
                "--api vulkan",
                "--mount a",
                "--shares 2 man",
                "completions",
            ],
        );
    }
}

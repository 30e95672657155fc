//! `longsplice-bench shell`: a network to try things in.

use crate::{bench::network::Pins, watch_interrupts};
use longsplice::Outcome;
use longsplice_lab::{Lab, Shape, topology};
use std::{env, io::Write, process::ExitCode, sync::atomic::Ordering::Relaxed, thread, time::Duration};

/// Time between two looks whether the shell has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Makes a lab, starts a shell in its client, and removes the lab with all programs in it when the shell ends.
pub fn shell() -> Outcome {
    let interrupted = watch_interrupts()?;
    let lab = Lab::simple(Shape::TwoDevices)?;
    let _pins = Pins::at(&lab.forwarder)?;
    let enter = |n: &longsplice_lab::Namespace| format!("nsenter --net={}", n.path().display());
    let mut out = std::io::stdout().lock();
    writeln!(out, "client  c0 ──── f0  forwarder  f1 ──── s0  server\n")?;
    for (name, namespace, device, address) in [
        ("client", &lab.client, "c0", topology::CLIENT),
        ("forwarder", &lab.forwarder, "f0", topology::FORWARDER_TO_CLIENT),
        ("", &lab.forwarder, "f1", topology::FORWARDER_TO_SERVER),
        ("server", &lab.server, "s0", topology::SERVER),
    ] {
        let enter = if name.is_empty() { String::new() } else { enter(namespace) };
        writeln!(out, "{name:<10} {device}  {:<11} {:<11} {enter}", address.v4.to_string(), address.v6.to_string())?;
    }
    let (server, forwarder) = (enter(&lab.server), enter(&lab.forwarder));
    let (program, proxy) = (crate::program()?, topology::FORWARDER_TO_CLIENT.v4);
    writeln!(
        out,
        "\nThis shell is the client. Try:\n  {server} python3 -m http.server 80 &\n  {forwarder} {} run --socks5 \
         {proxy}:1080 --splice at-once &\n  curl --socks5-hostname {proxy}:1080 http://{}/\nThe lab goes when the shell ends.",
        program.display(),
        topology::SERVER.v4,
    )?;
    drop(out);
    let shell = env::var("SHELL").unwrap_or_else(|_| "/bin/bash".into());
    let mut shell = lab.client.command(&shell).spawn()?;
    let status = loop {
        if interrupted.load(Relaxed) {
            shell.kill()?;
        }
        match shell.try_wait()? {
            Some(status) => break status,
            None => thread::sleep(LOOK),
        }
    };
    lab.end_programs();
    Ok(status.code().map_or(ExitCode::FAILURE, |c| ExitCode::from(c.clamp(0, 255) as u8)))
}

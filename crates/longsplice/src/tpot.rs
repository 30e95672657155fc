//! `longsplice tpot`: translucent proxying on a host, and the connections in tunnels of this machine.

use crate::{
    Outcome,
    args::{TpotArgs, TpotCommand, TpotHostArgs, TpotLsArgs},
};
use longsplice_datapath::{Destinations, TPOT_RULES, Tpot, TpotOptions, TpotRole, tpot_tunnels};
use longsplice_proxy::access::{PortRange, Prefix};
use serde_json::json;
use std::{
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

/// Time between two looks for ended connections and new addresses.
const TEND_EVERY: Duration = Duration::from_secs(10);

/// `longsplice tpot`.
pub fn tpot(args: &TpotArgs, verbose: u8) -> Outcome {
    match &args.command {
        TpotCommand::Host(host) => {
            crate::run::start_log(verbose, false);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(run(host))
        }
        TpotCommand::Ls(ls) => list(ls),
    }
}

async fn run(args: &TpotHostArgs) -> Outcome {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let options = TpotOptions {
        devices: args.device.clone(),
        exid: args.exid,
        hops: args.hops,
        cgroup: args.cgroup.clone(),
        ..TpotOptions::default()
    };
    let tpot = Tpot::open(&options)?;
    let full =
        |e: io::Error| format!("{e}: each --to with each --port, and each --proxy, is a rule ({TPOT_RULES} at most)");
    for proxies in &args.proxy {
        tpot.trust(&destinations(*proxies, PortRange { first: 0, last: u16::MAX })).map_err(full)?;
    }
    let everywhere = ["0.0.0.0/0", "::/0"].map(|all| all.parse().expect("a prefix"));
    for to in if args.to.is_empty() { &everywhere[..] } else { &args.to } {
        for ports in &args.port {
            tpot.ask(&destinations(*to, *ports)).map_err(full)?;
        }
    }
    tracing::info!("asking for proxies");
    let tend = async {
        loop {
            tpot.sweep();
            if let Err(error) = tpot.learn_addresses() {
                tracing::warn!(%error, "the addresses of this host cannot be read");
            }
            sleep(TEND_EVERY).await;
        }
    };
    tokio::select! {
        () = tend => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    for (what, packets) in tpot.verdicts()?.into_iter().filter(|v| v.1 > 0) {
        tracing::info!("{what}: {packets}");
    }
    match tpot.close()? {
        0 => tracing::info!("stopped"),
        left => tracing::info!("stopped; {left} connections stay in their tunnels, which the next start takes over"),
    }
    Ok(ExitCode::SUCCESS)
}

fn destinations(net: Prefix, ports: PortRange) -> Destinations {
    Destinations { net: net.0.addr(), prefix: net.0.prefix_len(), ports: ports.first..=ports.last }
}

/// `longsplice tpot ls`: reads the pinned table, so that it needs no running process.
fn list(args: &TpotLsArgs) -> Outcome {
    let mut out = io::stdout().lock();
    for (t, tunnel) in tpot_tunnels()? {
        let role = match tunnel.role {
            TpotRole::Asker => "asker",
            TpotRole::Taker => "taker",
        };
        if args.json {
            let line = json!({
                "role": role, "remote": t.remote, "local": t.local, "peer": tunnel.peer, "own": tunnel.own,
                "over": tunnel.over, "silent_ms": tunnel.silent.as_millis() as u64,
            });
            writeln!(out, "{line}")?;
        } else {
            let over = if tunnel.over { " over" } else { "" };
            let silent = tunnel.silent.as_secs();
            let way = format!("{} -> {}", tunnel.own, tunnel.peer);
            writeln!(out, "{role}  {} -> {}  tunnel {way}  silent {silent} s{over}", t.local, t.remote)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

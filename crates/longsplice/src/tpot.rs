//! `longsplice tpot`: translucent proxying on a host, and the connections in tunnels of this machine.

use crate::{
    Outcome,
    args::{TpotArgs, TpotCommand, TpotHostArgs, TpotLsArgs},
    farm,
};
use longsplice_datapath::{Tpot, TpotKnown, TpotOptions, TpotRole, tpot_flush, tpot_known, tpot_tunnels};
use longsplice_proxy::{config::Asking, secrets::keys::read_keys, tpot::tend};
use serde_json::json;
use std::{
    io::{self, Write},
    process::ExitCode,
    sync::Arc,
};
use tokio::signal::unix::{SignalKind, signal};

/// `longsplice tpot`.
pub fn tpot(args: &TpotArgs, verbose: u8) -> Outcome {
    let foreground = || {
        crate::run::start_log(verbose, false);
        crate::run::remove_leftovers(); // another namespace of the same number may have had tunnels
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    };
    match &args.command {
        TpotCommand::Host(host) => foreground()?.block_on(run(host)),
        TpotCommand::Router(router) => foreground()?.block_on(farm::router(router)),
        TpotCommand::Farm(args) => farm::list(args),
        TpotCommand::Ls(ls) => list(ls),
        TpotCommand::Flush => {
            writeln!(io::stdout(), "{} destinations", tpot_flush().map_err(no_tables)?)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn run(args: &TpotHostArgs) -> Outcome {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let TpotHostArgs { proxy, key_file, port, to, hops, exid, udp, cgroup, device } = args;
    let (hops, exid, udp) = (*hops, *exid, *udp);
    let keys = key_file.as_deref().map_or(Ok(Vec::new()), read_keys)?;
    let options = TpotOptions {
        devices: device.clone(),
        exid,
        hops,
        udp,
        cgroup: cgroup.clone(),
        keys: keys.clone(),
        ..TpotOptions::default()
    };
    let asking = Asking { proxies: proxy.clone(), keys, ports: port.clone(), to: to.clone(), hops, exid, udp };
    let tpot = Arc::new(Tpot::open(&options)?);
    let each = "every --proxy is a rule, and so is every --to with every --port";
    asking.begin(&tpot).map_err(|e| format!("{e}; {each}"))?;
    tracing::info!("asking for proxies");
    tokio::select! {
        () = tend(Arc::downgrade(&tpot), None) => {}
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

/// `longsplice tpot ls`: reads the pinned table, so that it needs no running process.
fn list(args: &TpotLsArgs) -> Outcome {
    let mut out = io::stdout().lock();
    for (t, tunnel) in tpot_tunnels().map_err(no_tables)? {
        let role = match tunnel.role {
            TpotRole::Asker => "asker",
            TpotRole::Taker => "taker",
        };
        if args.json {
            let line = json!({
                "role": role, "remote": t.remote, "local": t.local, "peer": tunnel.peer, "own": tunnel.own,
                "udp": tunnel.in_udp, "over": tunnel.over, "silent_ms": tunnel.silent.as_millis() as u64,
            });
            writeln!(out, "{line}")?;
        } else {
            let over = if tunnel.over { " over" } else { "" };
            let silent = tunnel.silent.as_secs();
            let way = format!("{} -> {}{}", tunnel.own, tunnel.peer, if tunnel.in_udp { " in UDP" } else { "" });
            writeln!(out, "{role}  {} -> {}  tunnel {way}  silent {silent} s{over}", t.local, t.remote)?;
        }
    }
    for TpotKnown { address, in_udp, ago, lasts } in tpot_known().map_err(no_tables)? {
        if args.json {
            let what = if in_udp { "udp" } else { "avoided" };
            writeln!(
                out,
                "{}",
                json!({ what: address, "since_ms": ago.as_millis() as u64, "for_ms": lasts.as_millis() as u64 })
            )?;
        } else {
            let what = if in_udp { "in UDP" } else { "avoided" };
            writeln!(out, "{what}  {address}  since {} s, for {} s", ago.as_secs(), lasts.as_secs())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn no_tables(e: io::Error) -> String {
    let cure = "start `longsplice tpot host`, or `longsplice run` with a listener of protocol = \"tpot\"";
    match e.kind() {
        io::ErrorKind::NotFound => format!("translucent proxying has not been used in this network namespace: {cure}"),
        _ => e.to_string(),
    }
}

//! `longsplice doctor`: checks whether this machine meets the requirements.
//!
//! The machine is inspected first (`facts`), then the decisive test runs (`attach`): programs are loaded, attached and
//! removed again, in a network namespace of their own.

mod attach;
mod config;
mod facts;

use crate::{Outcome, args::DoctorArgs};
pub use config::memory_limit;
pub use facts::warn_of_shared_ports;
use longsplice_datapath::{TPOT_UDP_PORT, tpot_probe};
use serde::Serialize;
use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    process::ExitCode,
};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    /// Requirement met.
    Ok,
    /// Without it, splicing is impossible or will never happen.
    Missing,
    /// Splicing is possible, but something should be corrected.
    Warning,
    /// For information only.
    Note,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    /// The state found.
    found: String,
    /// How to correct it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cure: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: State, found: impl Into<String>) -> Check {
        Check { name, state, found: found.into(), cure: None }
    }

    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check::new(name, State::Ok, found)
    }

    fn missing(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { cure: Some(cure.into()), ..Check::new(name, State::Missing, found) }
    }

    fn warning(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { cure: Some(cure.into()), ..Check::new(name, State::Warning, found) }
    }
}

#[derive(Serialize)]
struct Report {
    splicing: bool,
    checks: Vec<Check>,
}

/// `longsplice doctor`.
pub fn doctor(args: &DoctorArgs) -> Outcome {
    let mut checks = facts::all(args.config.is_some());
    let configured = args.config.as_deref().map(config::all).unwrap_or_default();
    // If one of these is missing, the test would fail for a reason already reported.
    let pointless = checks
        .iter()
        .any(|c| c.state == State::Missing && ["kernel", "capabilities", "bpffs", "data path"].contains(&c.name));
    checks.push(if pointless { attach::not_tried() } else { attach::attach() });
    checks.extend(configured);
    checks.push(Check::ok("copying", "always possible: connections that cannot be spliced are copied"));
    checks.extend(args.tunnel.iter().flat_map(|(proxy, server)| tunnels(*proxy, *server)));
    let splicing = checks.iter().all(|c| c.state != State::Missing);
    let report = Report { splicing, checks };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        out.write_all(text(&report).as_bytes())?;
    }
    Ok(if splicing { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The way to a translucent proxy and back, by IP in IP and in UDP.
fn tunnels(proxy: IpAddr, server: SocketAddr) -> Vec<Check> {
    const NAME: &str = "tunnel";
    let protocol = if proxy.is_ipv4() { "IP protocol 4" } else { "IP protocol 41" };
    let udp = format!("UDP to port {TPOT_UDP_PORT}");
    let both = tpot_probe(proxy, server, false).and_then(|ip| Ok((ip, tpot_probe(proxy, server, true)?)));
    let (ip, in_udp) = match both {
        Ok(both) => both,
        Err(e) => {
            return vec![Check::warning(NAME, format!("{proxy}: {e}"), "needs a route to the proxy, and CAP_NET_RAW")];
        }
    };
    let passes = |what: &str| Check::ok(NAME, format!("packets of {what} to {proxy} and back pass"));
    let no_answer = |what: &str| format!("no answer from {proxy} to {what}");
    let late = format!("{}: a connection that it intercepts opens late", no_answer(protocol));
    match (ip, in_udp) {
        (true, true) => vec![passes(protocol), passes(&udp)],
        (true, false) => {
            vec![passes(protocol), Check::new(NAME, State::Note, format!("{}: do not set `udp`", no_answer(&udp)))]
        }
        (false, true) => {
            let cure =
                format!("let {protocol} pass both ways, or set --udp fallback here and udp = \"fallback\" there");
            vec![Check::warning(NAME, late, cure), passes(&udp)]
        }
        (false, false) => {
            let cure =
                format!("let {protocol} or {udp} pass both ways, and have {proxy} intercept connections to {server}");
            vec![Check::warning(NAME, late, cure)]
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for c in &report.checks {
        let state = match c.state {
            State::Ok => "ok",
            State::Missing => "MISSING",
            State::Warning => "warning",
            State::Note => "note",
        };
        text += &format!("{state:<8} {:<15} {}\n", c.name, c.found);
        if let Some(cure) = &c.cure {
            text += &format!("{:<24} -> {cure}\n", "");
        }
    }
    text += match report.splicing {
        true => "\nThis machine can splice.\n",
        false => "\nThis machine cannot splice; longsplice copies on it.\n",
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_thing_comes_with_its_cure() {
        let checks = vec![Check::ok("kernel", "6.6.0"), Check::missing("bpffs", "not mounted", "mount it")];
        let text = text(&Report { splicing: false, checks });
        assert!(text.contains("MISSING  bpffs           not mounted\n"), "{text}");
        assert!(text.contains("-> mount it\n") && text.contains("cannot splice"), "{text}");
    }

    #[test]
    fn every_check_gives_an_answer_whoever_asks() {
        let names: Vec<&str> = facts::all(false).iter().map(|c| c.name).collect();
        assert!(names.contains(&"kernel") && names.contains(&"capabilities"), "{names:?}");
    }
}

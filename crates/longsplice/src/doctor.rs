//! `longsplice doctor`: checks whether this machine meets the requirements.
//!
//! The machine is inspected first (`facts`), then the decisive test runs (`attach`): programs are loaded, attached and
//! removed again, in a network namespace of their own.

mod attach;
mod config;
mod facts;
mod routed;

use crate::{Outcome, args::DoctorArgs};
pub use config::memory_limit;
pub use facts::warn_of_shared_ports;
use longsplice_datapath::{TPOT_UDP_PORT, TpotAnswer, TpotPassage, tpot_ask, tpot_probe};
use serde::Serialize;
use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    process::ExitCode,
};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CheckResult {
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
    state: CheckResult,
    /// The state found.
    found: String,
    /// How to correct it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cure: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: CheckResult, found: impl Into<String>) -> Check {
        Check { name, state, found: found.into(), cure: None }
    }

    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check::new(name, CheckResult::Ok, found)
    }

    fn missing(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { cure: Some(cure.into()), ..Check::new(name, CheckResult::Missing, found) }
    }

    fn warning(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { cure: Some(cure.into()), ..Check::new(name, CheckResult::Warning, found) }
    }
}

#[derive(Serialize)]
struct Report {
    splicing: bool,
    checks: Vec<Check>,
}

/// Loads and attaches the programs as doctor does. Fails if the kernel does not take them.
pub fn attach_for_trial() -> Result<(), String> {
    let Check { state, found, .. } = attach::attach();
    if state == CheckResult::Missing { Err(found) } else { Ok(()) }
}

/// `longsplice doctor`.
pub fn doctor(args: &DoctorArgs) -> Outcome {
    let mut checks = facts::all(args.config.is_some());
    let configured = args.config.as_deref().map(config::all).unwrap_or_default();
    // If one of these is missing, the test would fail for a reason already reported.
    let pointless = checks
        .iter()
        .any(|c| c.state == CheckResult::Missing && ["kernel", "capabilities", "bpffs", "data path"].contains(&c.name));
    checks.push(if pointless { attach::not_tried() } else { attach::attach() });
    checks.extend(configured);
    checks.push(Check::ok("copying", "always possible: connections that cannot be spliced are copied"));
    checks.extend(args.tunnel.iter().flat_map(|(proxy, server)| tunnels(*proxy, *server)));
    let splicing = checks.iter().all(|c| c.state != CheckResult::Missing);
    let report = Report { splicing, checks };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        out.write_all(text(&report).as_bytes())?;
    }
    Ok(if splicing { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The way to a translucent proxy and back: of SYNs that ask, by IP in IP, and in UDP.
fn tunnels(proxy: IpAddr, server: SocketAddr) -> Vec<Check> {
    const NAME: &str = "tunnel";
    let all = tpot_ask(proxy, server).and_then(|answer| {
        let passage = |in_udp| tpot_probe(proxy, server, in_udp);
        Ok((answer, passage(false)?, passage(true)?))
    });
    let (answer, ip, in_udp) = match all {
        Ok(all) => all,
        Err(e) => {
            let cure = "needs a route to the proxy and to the server, and CAP_NET_RAW";
            return vec![Check::warning(NAME, format!("{proxy}: {e}"), cure)];
        }
    };
    let mut checks = vec![asking(proxy, server, answer)];
    let protocol = if proxy.is_ipv4() { "IP protocol 4" } else { "IP protocol 41" };
    let udp = format!("UDP to port {TPOT_UDP_PORT}");
    let passes = |what: &str| Check::ok(NAME, format!("packets of {what} to {proxy} and back pass"));
    let no_answer = |what: &str| format!("no answer from {proxy} to {what}");
    let unsent = |what: &str| {
        let found = format!("a rule of this host keeps {what} from being tested; connections bypass it");
        Check::new(NAME, CheckResult::Note, found)
    };
    let late = format!("{}: a connection that it intercepts opens late", no_answer(protocol));
    use TpotPassage::{Lost, Passes, Unsent};
    match (ip, in_udp) {
        (Passes, Passes) => checks.extend([passes(protocol), passes(&udp)]),
        (Passes, Lost) => {
            let note = format!("{}: do not set `udp`", no_answer(&udp));
            checks.extend([passes(protocol), Check::new(NAME, CheckResult::Note, note)]);
        }
        (Lost, Passes) => {
            let cure =
                format!("let {protocol} pass both ways, or set --udp fallback here and udp = \"fallback\" there");
            checks.extend([Check::warning(NAME, late, cure), passes(&udp)]);
        }
        (Lost, Lost) => {
            let cure =
                format!("let {protocol} or {udp} pass both ways, and have {proxy} intercept connections to {server}");
            checks.push(Check::warning(NAME, late, cure));
        }
        (Unsent, Passes) => checks.extend([unsent(protocol), passes(&udp)]),
        (Passes, Unsent) => checks.extend([passes(protocol), unsent(&udp)]),
        (Unsent, Unsent) => checks.extend([unsent(protocol), unsent(&udp)]),
        (Unsent, Lost) => checks.extend([unsent(protocol), Check::new(NAME, CheckResult::Note, no_answer(&udp))]),
        (Lost, Unsent) => checks.extend([Check::new(NAME, CheckResult::Note, no_answer(protocol)), unsent(&udp)]),
    }
    checks
}

/// What becomes of a SYN that asks. It takes another way through the firewall of the proxy than packets in a tunnel.
fn asking(proxy: IpAddr, server: SocketAddr, answer: TpotAnswer) -> Check {
    const NAME: &str = "asking";
    let cure = || {
        let port = server.port();
        format!(
            "the route to {server} has to pass {proxy}, whose firewall has to accept it on input (tcp dport {port} accept), \
             whatever the destination, and whose listener has to intercept it"
        )
    };
    match answer {
        TpotAnswer::Proxy => Check::ok(NAME, format!("{proxy} answers a SYN to {server} that asks for a proxy")),
        TpotAnswer::Server => {
            let found = format!("{server} itself answers a SYN that asks for a proxy: connections have none");
            Check::warning(NAME, found, cure())
        }
        TpotAnswer::Nobody => {
            let found = format!(
                "nobody answers a SYN to {server} that asks for a proxy: a connection opens late, and without one"
            );
            Check::warning(NAME, found, cure())
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for c in &report.checks {
        let state = match c.state {
            CheckResult::Ok => "ok",
            CheckResult::Missing => "MISSING",
            CheckResult::Warning => "warning",
            CheckResult::Note => "note",
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

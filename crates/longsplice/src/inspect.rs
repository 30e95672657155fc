//! `longsplice inspect`: all details of one flow, for people.

use crate::{
    Outcome,
    args::InspectArgs,
    client::Client,
    control::Ask,
    ls::{age, bytes, printable},
};
use longsplice_engine::PathFinding;
use serde::Deserialize;
use serde_json::Value;
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

/// `longsplice inspect`.
pub fn inspect(control: Option<&Path>, args: &InspectArgs) -> Outcome {
    let answer = Client::connect(control)?.ask(Ask::Inspect { id: args.id })?;
    let flow = answer.get("flow").ok_or("the answer has no flow")?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{flow}")?;
    } else {
        out.write_all(report(flow).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Rows of a name, a value and its meaning.
#[derive(Default)]
struct Page(String);

impl Page {
    fn title(&mut self, text: &str) {
        self.0 += &format!("\n{text}\n");
    }

    fn line(&mut self, name: &str, text: &str) {
        self.0 += format!("  {name:<16} {text}").trim_end();
        self.0.push('\n');
    }

    /// Adds a right-aligned number, such as a sequence number.
    fn number(&mut self, name: &str, n: &Value, meaning: &str) {
        self.0 +=
            format!("      {name:<12} {:>10}  {meaning}", n.as_i64().map_or("-".into(), |n| n.to_string())).trim_end();
        self.0.push('\n');
    }
}

fn report(flow: &Value) -> String {
    let mut page = Page(format!(
        "flow {}: {}, {}, {} old\n",
        n(flow, "id"),
        text(flow, "protocol"),
        text(flow, "state"),
        age(n(flow, "age_ms") as u64)
    ));
    page.line("client", &text(flow, "client"));
    page.line("server", &text(flow, "server"));
    page.line("target", &text(flow, "target"));
    if flow["user"].is_string() {
        page.line("user", &text(flow, "user"));
    }
    let count = |key| exactly(n(flow, key) as u64);
    page.line("bytes", &format!("{} from the client, {} from the server", count("bytes_up"), count("bytes_down")));
    page.line(
        "splices",
        &flow["splices"].as_u64().map_or("not known: of an earlier process".into(), |n| n.to_string()),
    );
    if let Some(processes) = flow["processes"].as_u64().filter(|n| *n > 1) {
        page.line("processes", &format!("{processes}, with this one"));
    }
    page.line("refusal", &if flow["refusal"].is_string() { text(flow, "refusal") } else { "none".into() });
    if let Ok(path) = PathFinding::deserialize(&flow["path"]) {
        page.line("measured", &path.to_string());
    }
    page.line("stages", &list(&flow["stages"], " > "));
    page.line("looked after", &format!("by {}", text(flow, "place")));
    for (side, key) in [("client", "client_leg"), ("server", "server_leg")] {
        leg(&mut page, side, &flow[key]);
    }
    page.0
}

fn leg(page: &mut Page, side: &str, leg: &Value) {
    page.title(&format!("{side}'s leg: {} (the {side}) <-> {} (here)", text(leg, "remote"), text(leg, "local")));
    page.line("from the host", &phase(&leg["phase_in"], "bound_in"));
    page.line("to the host", &phase(&leg["phase_out"], "bound_out"));
    if let Some(received) = leg["received"].as_u64() {
        page.line("received", &format!("{} since its SYN", exactly(received)));
    }
    record(page, &leg["record"]);
    path(page, &leg["path"]);
    socket(page, &leg["socket"]);
}

fn phase(phase: &Value, bound: &str) -> String {
    match phase.as_str() {
        Some("local") => "local: the proxy copies".into(),
        Some("to-forwarding") => {
            format!("to-forwarding: below {bound} the proxy, which drains; from there on the data path")
        }
        Some("forwarding") => "forwarding: the data path".into(),
        Some("to-local") => {
            format!("to-local: below {bound} the data path, until it is acknowledged; from there on the proxy")
        }
        _ => "not tracked by the data path".into(),
    }
}

fn record(page: &mut Page, r: &Value) {
    if r.is_null() {
        return page.line("record", "none: not tracked, or released");
    }
    let stale = r["is_stale"] == true;
    page.line("record", if stale { "as it was at the commit: the paths are what counts" } else { "in force" });
    page.line("  flags", &list(&r["flags"], " "));
    page.line("  MSS", &format!("{} announced by the host, {} by us", n(r, "mss_in"), n(r, "mss_out")));
    page.line("  scales", &format!("{} announced by the host, {} by us", n(r, "wscale_in"), n(r, "wscale_out")));
    page.line("  last seen", &format!("{} ago", age(n(r, "seen_ms") as u64)));
    page.line("  next hop", &hop(&r["hop"]));
    page.line("  bytes from the host", "");
    page.number(
        "max_in",
        &r["max_in"],
        &format!("has come up to here; {} not acknowledged to it", unit(r, "unacked_in")),
    );
    page.number(
        "ack_out",
        &r["ack_out"],
        &format!("acknowledged to it by anyone, with a window of {}", unit(r, "win_out")),
    );
    page.number("edge_out", &r["edge_out"], &format!("it may send up to here: {} more", unit(r, "room_in")));
    let last = format!("the socket's last acknowledgement, with a window of {}", unit(r, "win_local"));
    page.number("ack_local", &r["ack_local"], &last);
    if r["peer"].is_string() {
        page.number("bound_in", &r["bound_in"], "of the last switch");
    }
    if r["limit_in"].is_u64() {
        page.number("limit_in", &r["limit_in"], "may be forwarded up to here");
    }
    if n(r, "held") > 0 {
        page.number("held_in", &r["held_in"], &format!("was held up to here: {} since the freeze", unit(r, "held")));
    }
    page.line("  bytes to the host", "");
    let unacked = format!("was sent up to here; {} not acknowledged by it", unit(r, "unacked_out"));
    page.number("max_out", &r["max_out"], &unacked);
    page.number("local_out", &r["local_out"], "sent by the socket up to here");
    page.number("ack_in", &r["ack_in"], "acknowledged by it");
    page.number("edge_in", &r["edge_in"], &format!("it has room up to here: {} more", unit(r, "room_out")));
    if r["peer"].is_string() {
        let drains = r["undrained"].as_u64();
        let drains = drains.map(|n| format!("of the switch under way: {n} bytes to be acknowledged before"));
        page.number("bound_out", &r["bound_out"], drains.as_deref().unwrap_or("of the last switch"));
    }
    page.line("  numbers", "");
    page.number("irs", &r["irs"], "the host's first");
    page.number("iss", &r["iss"], "our first");
    page.number("tsval_in", &r["tsval_in"], "the host's last timestamp");
    page.number("tsval_out", &r["tsval_out"], "the last timestamp sent to it");
    page.number("shim_in", &r["shim_in"], "wire = socket + shim: the host's bytes");
    page.number("shim_out", &r["shim_out"], "bytes to the host");
    page.number("shim_ts", &r["shim_ts"], "our timestamps");
    page.number("seq_off", &r["seq_off"], "from the host's bytes to those at the other leg");
    page.number("ts_from_peer", &r["ts_from_peer"], "from the other host's timestamps to ours");
}

fn path(page: &mut Page, p: &Value) {
    if p.is_null() {
        return page.line("path", "none");
    }
    if p["via"].is_null() {
        return page.line("path", "never in forwarding mode: packets from the host are for the socket");
    }
    let is_forwarding = p["flags"].as_array().is_some_and(|flags| flags.contains(&"spliced".into()));
    let now = if is_forwarding { "packets from the host are forwarded" } else { "not in force any more" };
    page.line("path", &format!("{now}: {} -> {}", text(p, "from"), text(p, "to")));
    let tap = if p["is_tapped"] == true { ", copied for a tap" } else { "" };
    page.line("  flags", &format!("{}{tap}", list(&p["flags"], " ")));
    let silent = n(p, "seen_least_ms") as u64;
    let seen = if silent == 0 { "less than 18 s ago".into() } else { format!("at least {} ago", age(silent)) };
    page.line("  last packet", &format!("{seen}, modulo 37 minutes"));
    let via = &p["via"];
    page.line("  next hop", &format!("number {}: {}", n(via, "index"), hop(via)));
    let flags = list(&via["flags"], " ");
    let can = if flags.is_empty() { String::new() } else { format!("; {flags}") };
    let mtu = format!("{} bytes, at most {} for the hosts behind it{can}", n(via, "mtu"), n(via, "most"));
    page.line("  MTU", &mtu);
    page.number("end", &p["end"], &format!("forwarded up to here, wraps {}", n(p, "wraps")));
    let unacked = match p["unacked"].as_u64() {
        Some(n) => format!("the same as the other host has it; {n} bytes not acknowledged by it"),
        None => "the same as the other host has it".into(),
    };
    page.number("sent", &p["sent"], &unacked);
    let window = match (n(p, "window_least"), n(p, "window_most")) {
        (_, 0) => "0 bytes".to_owned(),
        (least, most) => format!("{least} to {most} bytes"),
    };
    let window = format!("acknowledged by the host, with a window of {window}");
    page.number("max_ack", &p["max_ack"], &window);
    page.number("seq_add", &p["seq_add"], "added to sequence numbers");
    page.number("ack_add", &p["ack_add"], "added to acknowledgements");
    page.number("tsval_add", &p["tsval_add"], "added to TSval");
    page.number("tsecr_add", &p["tsecr_add"], "added to TSecr");
    page.line(
        "  scales",
        &format!("{} of windows from the host, {} to the other", n(p, "scale_in"), n(p, "scale_out")),
    );
}

fn socket(page: &mut Page, s: &Value) {
    if s.is_null() {
        return page.line("socket", "none");
    }
    let held = if s["is_held"] == true { "" } else { ", held by no process" };
    page.line("socket", &format!("{}{held}", text(s, "state")));
    page.line("  queues", &format!("{} not read, {} not acknowledged", unit(s, "unread"), unit(s, "unacked")));
    let timer = match s["timer"].as_str() {
        Some(timer) => format!("{timer} in {} ms", n(s, "timer_ms")),
        None => "none".into(),
    };
    page.line("  timer", &timer);
    let i = &s["info"];
    if i.is_null() {
        return;
    }
    let ms = |key| format!("{:.1} ms", n(i, key) as f64 / 1000.0);
    page.line("  round trip", &format!("{}, timeout {}", ms("rtt_us"), ms("rto_us")));
    let again = format!(
        "{} segments, {} for lost; {} timeouts in a row, {} probes; {} sent again in all",
        n(i, "unacked"),
        n(i, "lost"),
        n(i, "retransmits"),
        n(i, "probes"),
        n(i, "total_retrans")
    );
    page.line("  in flight", &again);
    let window = i["snd_wnd"].as_u64().map_or(String::new(), |n| format!(", window of the host {n} bytes"));
    let sending = format!("MSS {} bytes, congestion window {} segments{window}", n(i, "snd_mss"), n(i, "snd_cwnd"));
    page.line("  sending", &sending);
    let ago = |key| age(n(i, key) as u64);
    let last = format!(
        "data sent {} ago, data received {} ago, acknowledgement received {} ago",
        ago("last_data_sent_ms"),
        ago("last_data_recv_ms"),
        ago("last_ack_recv_ms")
    );
    page.line("  last", &last);
}

fn hop(hop: &Value) -> String {
    match n(hop, "ifindex") {
        0 => "not known yet".into(),
        index => {
            let device = hop["device"].as_str().unwrap_or("a device that is gone");
            let mark = n(hop, "mark");
            format!("{device} ({index}), to {}, from {}, mark {mark:#x}", text(hop, "dmac"), text(hop, "smac"))
        }
    }
}

/// Formats an exact number of bytes, with the short form in parentheses.
fn exactly(n: u64) -> String {
    if n < 1000 { bytes(n) } else { format!("{n} B ({})", bytes(n)) }
}

fn n(of: &Value, key: &str) -> i64 {
    of[key].as_i64().unwrap_or(0)
}

fn unit(of: &Value, key: &str) -> String {
    match n(of, key) {
        1 => "1 byte".into(),
        n => format!("{n} bytes"),
    }
}

fn text(of: &Value, key: &str) -> String {
    of[key].as_str().map_or("-".into(), printable)
}

fn list(all: &Value, between: &str) -> String {
    let all = all.as_array().into_iter().flatten().filter_map(Value::as_str);
    all.collect::<Vec<_>>().join(between)
}

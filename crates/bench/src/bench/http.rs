//! HTTP through reverse proxies, over connections that persist: requests per second and processor time per request, by the
//! size of the reply; and the size from which on splicing a body pays, found as the [`threshold`] of connections is.

use super::{
    Bench, Result, requests,
    results::{Case, Run},
    segment::on_one_cpu,
    site::{Files, Site, VARIANTS, config, origin_config},
    subject::Subject,
    threshold,
    variant::Variant,
};
use std::{path::Path, time::Duration};

/// Sizes of replies, and how many connections ask for them: two fill the machine with large ones.
const SIZES: [(u64, usize); 4] = [(1 << 10, 16), (64 << 10, 16), (1 << 20, 8), (100 << 20, 2)];
/// Sizes among which splicing begins to pay.
pub const BODIES: [u64; 9] = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// Of the length of a transfer: for one size, one variant, one round.
const SHARE: f64 = 0.6;
const BODIES_SHARE: f64 = 0.2;
/// For each round that was asked for.
const ROUNDS: usize = 3;
/// More than any body of the bench: what is too short for a splice is copied so, by a proxy that may splice others.
const FAR: &str = "1125899906842624";

/// What longsplice is told.
fn arguments(variant: Variant) -> &'static [&'static str] {
    match variant {
        Variant::Spliced => &["--splice", "at-once"],
        Variant::Copy => &["--splice", "never"],
        _ => &[],
    }
}

/// All sizes, all variants.
pub fn measure(bench: &Bench) -> Result<Vec<Case>> {
    if !bench.has(Variant::Nginx) || !bench.has(Variant::Haproxy) {
        bench.leave_out("HTTP: nginx is the server, and HAProxy what all is compared with".into());
        return Ok(Vec::new());
    }
    let files = Files::make(&SIZES.map(|(bytes, _)| bytes))?;
    let sites = VARIANTS.iter().map(|v| Site::set(*v, arguments(*v), &files)).collect::<Result<Vec<_>>>()?;
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    let case = |(bytes, connections)| {
        bench.rounds(Subject::Http { bytes }, &VARIANTS, |variant| {
            let site = sites.iter().find(|s| s.variant == variant).ok_or("no site was set")?;
            let (count, cost) = requests::ask(site, bytes, connections, length)?;
            let (rate, cpu) = (count / cost.seconds, cost.cpu * 1e6 / count);
            Ok(Run::new(variant, cost, count, rate, cpu))
        })
    };
    SIZES.into_iter().map(case).collect()
}

/// Bodies spliced at once, and copied, everything on one CPU.
pub fn bodies(bench: &Bench) -> Result<Vec<Case>> {
    if !bench.has(Variant::Nginx) {
        return Ok(Vec::new());
    }
    let files = Files::make(&BODIES)?;
    on_one_cpu(|| {
        let sites = [(Variant::Copy, FAR), (Variant::Spliced, "at-once")];
        let sites =
            sites.into_iter().map(|(v, when)| Site::set(v, &["--splice", when], &files)).collect::<Result<Vec<_>>>()?;
        let length = Duration::from_secs_f64(bench.seconds * BODIES_SHARE);
        let case = |bytes| {
            bench.rounds_of(bench.rounds * ROUNDS, Subject::Body { bytes }, &threshold::VARIANTS, |variant| {
                let site = sites.iter().find(|s| s.variant == variant).ok_or("no site was set")?;
                let (count, cost) = requests::ask(site, bytes, 1, length)?;
                let micros = cost.seconds * 1e6 / count;
                let cpu = micros * cost.first_busy;
                Ok(Run::new(variant, cost, count, micros, cpu))
            })
        };
        BODIES.into_iter().map(case).collect()
    })
}

/// What was run, for the set-up.
pub fn setup() -> Vec<String> {
    let line = |v: &Variant| {
        let what = match v.peer() {
            Some(_) => "Debian's, HTTP mode; no access log".into(),
            None if v.routed() => "the client asks both addresses of the server itself".into(),
            None => format!("longsplice, no access log {}", arguments(*v).join(" ")),
        };
        format!("HTTP, {v}: {what}")
    };
    let more = "HTTP, bodies copied or spliced: longsplice, --splice at-once, and so large that no body is";
    VARIANTS.iter().map(line).chain([more.to_owned()]).collect()
}

/// Whose configuration, and its text.
pub fn configurations() -> Vec<(String, String)> {
    let named = |v: &Variant| (format!("{v}, HTTP"), config(*v));
    let ours = ("longsplice, HTTP".to_owned(), config(Variant::Default));
    let origin = ("the HTTP server".to_owned(), origin_config(Path::new("FILES"), Path::new("DIR")));
    [Variant::Haproxy, Variant::Nginx].iter().map(named).chain([ours, origin]).collect()
}

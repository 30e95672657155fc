//! HTTP through reverse proxies over persistent connections: requests per second and processor time per request, by reply
//! size; and the body size from which splicing pays, found in the same way as the [`threshold`] of connections.

use super::{
    Bench, Result,
    counters::Flows,
    ends::Client,
    machine::{Cost, together},
    results::{Figure, Run, Section, size},
    segment::on_one_cpu,
    site::{Files, Site, VARIANTS, config, origin_config},
    threshold,
    variant::Variant,
};
use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

/// Reply sizes, and the number of connections for each: with large replies two keep the machine busy.
const SIZES: [(u64, usize); 4] = [(1 << 10, 16), (64 << 10, 16), (1 << 20, 8), (100 << 20, 2)];
/// Sizes at which splicing may start to pay.
const BODIES: [u64; 9] = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// Length of one run, as a fraction of a transfer: one size, one variant, one round.
const SHARE: f64 = 0.6;
const BODIES_SHARE: f64 = 0.2;
/// Larger than any body of the bench: bodies below this are copied by a proxy that may splice others.
const FAR: &str = "1125899906842624";

/// Arguments of longsplice.
fn arguments(variant: Variant) -> &'static [&'static str] {
    match variant {
        Variant::Spliced => &["--splice", "at-once"],
        Variant::Copy => &["--splice", "never"],
        _ => &[],
    }
}

/// Measures all sizes and variants.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    if !bench.has(Variant::Nginx) || !bench.has(Variant::Haproxy) {
        bench.leave_out("HTTP: nginx is the server, and HAProxy what all is compared with".into());
        return Ok(());
    }
    let files = Files::make(&SIZES.map(|(bytes, _)| bytes))?;
    let sites = bench.venues(&VARIANTS, |v| Site::set(v, arguments(v), &files))?;
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    let case = |(bytes, connections)| {
        bench.rounds(Section::Http, &size(bytes), &VARIANTS, |v| {
            run(sites.of(v)?, bytes, connections, length, |count, cost| Run::rate(v, cost, count))
        })
    };
    SIZES.into_iter().try_for_each(case)
}

/// Measures bodies spliced at once and copied, with everything on one CPU.
pub fn bodies(bench: &Bench<'_>) -> Result<()> {
    if !bench.has(Variant::Nginx) {
        return Ok(());
    }
    let files = Files::make(&BODIES)?;
    on_one_cpu(|| {
        let when = |v: Variant| if v == Variant::Copy { FAR } else { "at-once" };
        let sites = bench.venues(&threshold::VARIANTS, |v| Site::set(v, &["--splice", when(v)], &files))?;
        let length = Duration::from_secs_f64(bench.seconds * BODIES_SHARE);
        let case = |bytes| {
            threshold::rounds(bench, Section::Body, bytes, |v| {
                run(sites.of(v)?, bytes, 1, length, |count, cost| Run::each(v, cost, count))
            })
        };
        BODIES.into_iter().try_for_each(case)
    })?;
    threshold::say(bench, Section::Body, "Splicing a body", "splice bodies from", &BODIES);
    Ok(())
}

fn run(
    site: &Site,
    bytes: u64,
    connections: usize,
    length: Duration,
    summary: impl FnOnce(f64, Cost) -> Run,
) -> Result<Run> {
    let before = Flows::of(site)?;
    let (count, cost) = ask(site, bytes, connections, length)?;
    Ok(summary(count, cost).with(Figure::Spliced, Flows::of(site)?.share_since(before)))
}

/// Requests over persistent connections, each of which sends the next request once the last reply is complete. The length of
/// every reply is checked, and some bytes of each read; the first reply of each connection, which does not count, is checked
/// completely. Returns the number of answered requests, and their cost.
fn ask(site: &Site, bytes: u64, connections: usize, length: Duration) -> Result<(f64, Cost)> {
    let to: Vec<SocketAddr> = (0..connections).map(|number| site.address(number)).collect();
    let first = move |number: usize| {
        let mut client = Client::near(to[number])?;
        client.get(bytes)?;
        client.quickly();
        Ok(client)
    };
    let all = move |mut client: Client| {
        let (end, mut count) = (Instant::now() + length, 0);
        while count == 0 || Instant::now() < end {
            client.get(bytes)?;
            count += 1;
        }
        Ok(count)
    };
    let (counts, cost) = together(&site.lab.client, connections, first, all)?;
    Ok((f64::from(counts.iter().sum::<u32>()), cost))
}

/// Description of the programs, for the set-up.
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

/// Names and texts of the configurations.
pub fn configurations() -> Vec<(String, String)> {
    let named = |v: &Variant| (format!("{v}, HTTP"), config(*v));
    let ours = ("longsplice, HTTP".to_owned(), config(Variant::Default));
    let origin = ("the HTTP server".to_owned(), origin_config(Path::new("FILES"), Path::new("DIR")));
    [Variant::Haproxy, Variant::Nginx].iter().map(named).chain([ours, origin]).collect()
}

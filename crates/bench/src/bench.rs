//! The bench: measures what splicing saves, in the [lab](longsplice_lab),
//! compared with IP forwarding, copying and other proxies.
//!
//! Only figures of the same run are compared: each round measures every variant once, in rotated order, and
//! the result is the median of the ratios within rounds ([`rounds`]). [`variant`] and [`subject`] define what
//! is compared and what is measured. A [`venue`] is where: a [`network`], and in it longsplice or one of its [`peers`], or, for
//! HTTP, a [`site`], or long links ([`far`]). [`segment`], [`ratio`], [`bulk`], [`rate`] (of [`objects`]), [`threshold`],
//! [`http`], [`switch`] (by [`driver`] and [`release`]), [`memory`], [`flood`] (with room from [`conntrack`]),
//! [`datagrams`], [`million`] and [`wan`] (both between [`ends`]) are the measurements. [`machine`] measures the cost and detects
//! disturbances, [`counters`] packet sizes; [`results`] keeps everything, [`trace`] and [`plots`] draw, [`report`] formats
//! tables, and [`readme`] writes them into the documents.

mod bulk;
mod conntrack;
mod counters;
mod datagrams;
mod driver;
pub(crate) mod ends;
mod far;
mod flood;
mod http;
pub(crate) mod machine;
mod memory;
mod million;
pub(crate) mod network;
mod objects;
pub(crate) mod peers;
mod plots;
mod rate;
mod ratio;
mod readme;
mod release;
mod report;
mod results;
mod rounds;
mod segment;
pub(crate) mod site;
mod stats;
mod subject;
mod switch;
mod threshold;
mod trace;
pub(crate) mod variant;
pub(crate) mod venue;
mod wan;

use crate::{
    args::{BenchArgs, Measurement},
    watch_interrupts,
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use longsplice::Outcome;
use machine::Machine;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use peers::Peer;
use results::{Case, Part, Results};
use std::{
    error::Error,
    io::IsTerminal,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};
use subject::Kind;
use variant::Variant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Number of rounds, unless the command line says another.
const ROUNDS: usize = 5;
/// Measurements that run only if they are named, and have files of their own.
const ALONE: [Measurement; 3] = [Measurement::Million, Measurement::Wan, Measurement::Tpot];
/// Directory of the results.
const RESULTS: &str = "bench/results";

/// Measures, or writes existing results into the documents.
pub fn bench(args: &BenchArgs) -> Outcome {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(RESULTS));
    if args.readme {
        for file in readme::update(&out, Path::new("."))? {
            println!("{}: figures of the latest results", file.display());
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !nix::unistd::Uid::effective().is_root() {
        return Err("the bench makes network namespaces: run it as root".into());
    }
    let bench = Bench::new(args)?;
    let dir = out.join(bench.machine.slug());
    let wanted = |what| args.what.contains(&what);
    let keep = |results: &Results, cases: &[Case], wanted: bool| -> Result<()> {
        print!("{}", report::full(results));
        if wanted || args.out.is_some() {
            let file = results.write(&dir, cases).map_err(|e| format!("{}: {e}", dir.display()))?;
            println!("kept in {}", file.display());
        }
        Ok(())
    };
    if args.what.is_empty() || args.what.iter().any(|w| !ALONE.contains(w)) {
        let (results, cases) = bench.measure(args)?;
        keep(&results, &cases, args.what.is_empty())?;
        if args.what.is_empty() || args.out.is_some() {
            plots::draw(&dir, &results)?;
            if bench.wanted(args, &[Measurement::Trace]) {
                trace::draw(&bench, &dir.join("trace.svg"))?;
            }
        }
    }
    if wanted(Measurement::Million) {
        let line = million::measure(&bench, args.connections)?;
        keep(&Results { lines: vec![line], ..bench.results(Part::Million, &[]) }, &[], true)?;
    }
    if wanted(Measurement::Wan) {
        let (results, cases) = wan::measure(&bench, &args.wan)?;
        keep(&results, &cases, args.wan.is_default())?;
    }
    if wanted(Measurement::Tpot) {
        for (results, cases) in wan::translucent(&bench, &args.wan)? {
            keep(&results, &cases, args.wan.is_default())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// State shared by all measurements.
pub struct Bench {
    rounds: usize,
    seconds: f64,
    machine: Machine,
    began: Instant,
    interrupted: Arc<AtomicBool>,
    /// Variants unavailable here, and why.
    lacking: Vec<(Variant, String)>,
    /// Measurements that failed.
    left_out: Mutex<Vec<String>>,
    /// None without a terminal.
    bars: Option<MultiProgress>,
}

impl Bench {
    fn new(args: &BenchArgs) -> Result<Bench> {
        // Both ends of thousands of connections are ours, and the peers inherit the limit.
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        let far = [Measurement::Wan, Measurement::Tpot];
        let far_only = !args.what.is_empty() && args.what.iter().all(|what| far.contains(what));
        Ok(Bench {
            rounds: args.rounds.map_or(if far_only { wan::ROUNDS } else { ROUNDS }, |n| n as usize),
            seconds: args.seconds,
            machine: Machine::here(),
            began: Instant::now(),
            interrupted: watch_interrupts()?,
            lacking: Variant::all().filter_map(|v| Some((v, venue::lacks(v)?))).collect(),
            left_out: Mutex::default(),
            bars: std::io::stderr().is_terminal().then(MultiProgress::new),
        })
    }

    fn measure(&self, args: &BenchArgs) -> Result<(Results, Vec<Case>)> {
        let wanted = |any: &[Measurement]| self.wanted(args, any);
        let mut cases = Vec::new();
        // Results derived from the cost of a segment need it.
        if wanted(&[Measurement::Segment, Measurement::Ratio, Measurement::Switch]) {
            cases.extend(segment::measure(self)?);
        }
        if wanted(&[Measurement::Ratio]) {
            cases.extend(ratio::measure(self)?);
        }
        if wanted(&[Measurement::Bulk, Measurement::Cpu]) {
            cases.extend(bulk::measure(self)?);
        }
        if wanted(&[Measurement::Response]) {
            cases.extend(rate::responses(self)?);
        }
        if wanted(&[Measurement::Rate]) {
            cases.extend(rate::measure(self)?);
        }
        let mut thresholds = Vec::new();
        if wanted(&[Measurement::Threshold]) {
            let short = rate::short(self)?;
            thresholds.push((Kind::Short, threshold::of(&threshold::SIZES, &short)));
            cases.extend(short);
        }
        if wanted(&[Measurement::Http]) {
            cases.extend(http::measure(self)?);
            let bodies = http::bodies(self)?;
            if !bodies.is_empty() {
                thresholds.push((Kind::Body, threshold::of(&http::BODIES, &bodies)));
            }
            cases.extend(bodies);
        }
        let switches = if wanted(&[Measurement::Switch]) { switch::measure(self)? } else { Vec::new() };
        let mut tables = Vec::new();
        if wanted(&[Measurement::Memory]) {
            let (case, lines) = memory::measure(self)?;
            cases.push(case);
            tables = lines;
        }
        if wanted(&[Measurement::Flood]) {
            cases.extend(flood::measure(self, &args.flows)?);
        }
        if wanted(&[Measurement::Datagrams]) {
            cases.extend(datagrams::measure(self)?);
        }
        let mut results = self.results(Part::Results, &cases);
        results.thresholds = thresholds;
        (results.setup, results.configurations) = self.setup();
        results.lines.extend(switches.into_iter().chain(tables));
        Ok((results, cases))
    }

    /// The results of a part, with what is missing in them.
    fn results(&self, part: Part, cases: &[Case]) -> Results {
        let left_out = std::mem::take(&mut *self.left_out.lock().expect("no panic under this lock"));
        let matters = |v: &Variant| part == Part::Results || (part == Part::Wan && Variant::WAN.contains(v));
        let lacking = self.lacking.iter().filter(|(v, _)| matters(v)).map(|(_, why)| why.clone());
        let skipped = lacking.chain(left_out).collect();
        Results { rounds: self.rounds, seconds: self.seconds, skipped, ..Results::of(part, cases) }
    }

    fn wanted(&self, args: &BenchArgs, any: &[Measurement]) -> bool {
        args.what.is_empty() || args.what.iter().any(|w| any.contains(w))
    }

    /// Network, rules and variants, a sentence each; and the configurations.
    fn setup(&self) -> (Vec<String>, Vec<(String, String)>) {
        const NETWORK: &str = "client, forwarder and server are network namespaces joined by veth, MTU 1500, Reno, a lab for \
                               each variant; sender and receiver are threads with blocks of 256 KB";
        const DISTURBED: &str = "a round is left out, and up to three are measured again, when more than 2 % of the time was \
                                 stolen by the hypervisor or more than 5 % used by other programs";
        let variants = Variant::all().filter(|v| self.has(*v));
        let variants = variants.filter_map(|v| Some(format!("{v}: {}", v.does()?))).chain(http::setup());
        let of_peer = |peer: Peer| Some((peer.name().to_owned(), peer.config()?));
        let ours = ("longsplice".to_owned(), venue::longsplice_config(Variant::Spliced, None));
        let rules = [Variant::Filter, Variant::Nat].map(|v| Some((v.title().to_owned(), venue::ruleset(v)?)));
        let flood = Some((format!("{} in the flood", Variant::Nat), flood::translation()));
        let peers = Peer::ALL.into_iter().map(of_peer).chain(rules).chain([flood]).flatten();
        (
            [NETWORK, DISTURBED].map(str::to_owned).into_iter().chain(variants).collect(),
            std::iter::once(ours).chain(peers).chain(http::configurations()).collect(),
        )
    }

    /// Sets up a venue for each variant that is available here.
    fn venues<V>(&self, variants: &[Variant], set: impl Fn(Variant) -> Result<V>) -> Result<Venues<V>> {
        let has = variants.iter().copied().filter(|v| self.has(*v));
        let set = |v: Variant| {
            self.check()?;
            match set(v) {
                Err(e) if v.peer().is_none() => Err(format!("{v}: {e}").into()),
                other => Ok((v, other.map_err(|e| e.to_string()))),
            }
        };
        Ok(Venues(has.map(set).collect::<Result<_>>()?))
    }

    fn has(&self, variant: Variant) -> bool {
        self.lacking.iter().all(|(v, _)| *v != variant)
    }

    /// Records a failure. The bench continues, and the results mention it.
    fn leave_out(&self, what: String) {
        self.say(&format!("left out: {what}"));
        self.left_out.lock().expect("no panic under this lock").push(what);
    }

    /// Prints progress.
    fn say(&self, text: &str) {
        let line = format!("{:6.1} s  {text}", self.began.elapsed().as_secs_f64());
        match &self.bars {
            // Ignore errors: the terminal may have gone.
            Some(bars) => drop(bars.println(line)),
            None => eprintln!("{line}"),
        }
    }

    /// A progress bar with this many steps, if there is a terminal.
    fn bar(&self, what: &str, steps: usize) -> ProgressBar {
        let Some(bars) = &self.bars else { return ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {eta} left").expect("it is constant");
        bars.add(ProgressBar::new(steps as u64).with_style(style).with_message(what.to_owned()))
    }

    /// Checks for an interrupt, which ends the bench and cleans up. To be called often.
    fn check(&self) -> Result<()> {
        if self.interrupted.load(Relaxed) { Err("interrupted".into()) } else { Ok(()) }
    }
}

/// The venues of one measurement, or why a peer did not start.
struct Venues<V>(Vec<(Variant, std::result::Result<V, String>)>);

impl<V> Venues<V> {
    fn of(&self, variant: Variant) -> Result<&V> {
        let (_, venue) = self.0.iter().find(|(v, _)| *v == variant).ok_or("no venue was set")?;
        venue.as_ref().map_err(|e| e.clone().into())
    }

    fn of_mut(&mut self, variant: Variant) -> Result<&mut V> {
        let (_, venue) = self.0.iter_mut().find(|(v, _)| *v == variant).ok_or("no venue was set")?;
        venue.as_mut().map_err(|e| e.clone().into())
    }

    fn all(&self) -> impl Iterator<Item = &V> {
        self.0.iter().filter_map(|(_, venue)| venue.as_ref().ok())
    }

    fn variants(&self) -> impl Iterator<Item = Variant> {
        self.0.iter().map(|(variant, _)| *variant)
    }
}

//! The bench: measures what splicing saves, in the [lab](longsplice_lab),
//! compared with IP forwarding, copying and other proxies.
//!
//! Only figures of the same run are compared: each round measures every variant once, in rotated order, and the result is the
//! median of the ratios within rounds ([`Bench::rounds`]). [`variant`] defines what is compared. A [`venue`] is where: a
//! [`network`], and in it longsplice or one of its [`peers`], or, for HTTP, a [`site`], or long links ([`far`]).
//! [`MEASUREMENTS`] lists the measurements. [`machine`] measures the cost and detects disturbances, [`counters`] packet sizes;
//! [`results`] keeps everything, [`report`] formats it as tables, and [`readme`] writes them into the documents.

mod bulk;
mod counters;
mod datagrams;
mod driver;
pub(crate) mod ends;
mod far;
mod flood;
pub(crate) mod gate;
mod http;
mod limits;
pub(crate) mod machine;
mod memory;
mod million;
pub(crate) mod network;
mod objects;
pub(crate) mod peers;
mod rate;
mod ratio;
mod readme;
mod release;
pub(crate) mod reloads;
mod report;
mod results;
mod segment;
pub(crate) mod site;
mod stats;
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
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use peers::Peer;
use results::{Case, Part, Results, Run, Section};
use std::{
    error::Error,
    fs,
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};
use variant::Variant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Measures, and adds to the results.
type Measure = fn(&Bench<'_>) -> Result<()>;

/// Number of rounds, unless the command line says another, and for long paths.
const ROUNDS: [usize; 2] = [5, 3];
/// Maximum number of disturbed rounds that are repeated, and never more than
/// the rounds requested. With more, the bench would just wait for a quiet hour.
const EXTRA: usize = 3;

/// What there is to measure, the files it is kept in, and how. The results that are derived from others follow them.
const MEASUREMENTS: [(Measurement, Part, Measure); 18] = [
    (Measurement::Segment, Part::Results, segment::measure),
    (Measurement::Ratio, Part::Results, ratio::measure),
    (Measurement::Bulk, Part::Results, bulk::measure),
    (Measurement::Response, Part::Results, rate::responses),
    (Measurement::Rate, Part::Results, rate::measure),
    (Measurement::Threshold, Part::Results, rate::short),
    (Measurement::Http, Part::Results, http::measure),
    (Measurement::Body, Part::Results, http::bodies),
    (Measurement::Switch, Part::Results, switch::measure),
    (Measurement::Memory, Part::Results, memory::measure),
    (Measurement::Flood, Part::Results, flood::measure),
    (Measurement::Datagrams, Part::Results, datagrams::measure),
    (Measurement::Million, Part::Million, million::measure),
    (Measurement::Wan, Part::Wan, wan::paths),
    (Measurement::Readers, Part::Wan, wan::readers),
    (Measurement::Unsplice, Part::Wan, wan::unsplices),
    (Measurement::Tpot, Part::Tpot, wan::translucent),
    (Measurement::TpotCosts, Part::TpotCosts, wan::costs),
];

/// Measures, or writes existing results into the documents.
pub fn bench(args: &BenchArgs) -> Outcome {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from("bench/results"));
    if args.readme {
        for file in readme::update(&out, Path::new("."))? {
            println!("{}: figures of the latest results", file.display());
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.what.contains(&Measurement::Trace) && args.out.is_none() {
        return Err("trace draws a file, and needs --out DIR".into());
    }
    if !args.path.is_empty() && !args.what.iter().any(|what| matches!(what, Measurement::Wan | Measurement::Tpot)) {
        return Err("--path chooses rows of wan and tpot, which are not to be measured".into());
    }
    let bench = Bench::new(args)?;
    for part in Part::ALL {
        let of_part = || MEASUREMENTS.iter().filter(move |(_, of, _)| *of == part);
        let wanted = of_part().filter(|(what, ..)| bench.wants(*what));
        let whole = args.path.is_empty() && args.variants.is_empty() && of_part().all(|(what, ..)| bench.wants(*what));
        *bench.results() = Results::new(part, bench.rounds_of(part));
        let mut any = false;
        for (_, _, measure) in wanted {
            measure(&bench)?;
            any = true;
        }
        if any {
            let mut results = bench.results();
            bench.describe(&mut results);
            let mut text = report::full(&results);
            if results.lines.is_empty() {
                return Err(format!("nothing was measured:\n{text}").into());
            }
            if whole || args.out.is_some() {
                let dir = out.join(results.machine.slug());
                let file = results.write(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
                text += &format!("kept in {}\n", file.display());
            }
            std::io::stdout().write_all(text.as_bytes())?;
        }
    }
    if bench.wants(Measurement::Trace) && (args.variants.is_empty() || args.out.is_some()) {
        let dir = out.join(bench.results().machine.slug());
        fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        trace::draw(&bench, &dir.join("trace.svg"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// State shared by all measurements.
pub struct Bench<'a> {
    args: &'a BenchArgs,
    /// Length of one transfer.
    seconds: f64,
    began: Instant,
    interrupted: Arc<AtomicBool>,
    /// The variants to compare; all if there are none.
    chosen: Vec<Variant>,
    /// Variants unavailable here, and why.
    lacking: Vec<(Variant, String)>,
    /// Those of the part that is measured.
    results: Mutex<Results>,
    /// None without a terminal.
    bars: Option<MultiProgress>,
}

impl Bench<'_> {
    fn new(args: &BenchArgs) -> Result<Bench<'_>> {
        // Both ends of thousands of connections are ours, and the peers inherit the limit.
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        Ok(Bench {
            args,
            chosen: args.variants.iter().map(|name| variant::named(name)).collect::<std::result::Result<_, _>>()?,
            seconds: args.seconds,
            began: Instant::now(),
            interrupted: watch_interrupts()?,
            lacking: Variant::all().filter_map(|v| Some((v, venue::lacks(v)?))).collect(),
            results: Mutex::new(Results::new(Part::Results, 0)),
            bars: std::io::stderr().is_terminal().then(MultiProgress::new),
        })
    }

    /// Whether this is measured. Figures derived from the cost of a segment need it.
    fn wants(&self, what: Measurement) -> bool {
        let wanted = |what| self.args.what.contains(&what);
        let needed = what == Measurement::Segment && (wanted(Measurement::Ratio) || wanted(Measurement::Switch));
        let part = |(of, part, _): &(Measurement, Part, _)| *of != what || *part == Part::Results;
        wanted(what) || needed || (self.args.what.is_empty() && MEASUREMENTS.iter().all(part))
    }

    fn rounds_of(&self, part: Part) -> usize {
        let far = matches!(part, Part::Wan | Part::Tpot);
        self.args.rounds.map_or(ROUNDS[usize::from(far)], |n| n as usize)
    }

    /// The results so far.
    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().expect("no panic under this lock")
    }

    /// Adds what was used, and what is missing: network, rules and variants, a sentence each; and the configurations.
    fn describe(&self, results: &mut Results) {
        const NETWORK: &str = "client, forwarder and server are network namespaces joined by veth, MTU 1500, Reno, a lab for \
                               each variant; sender and receiver are threads with blocks of 256 KB";
        const DISTURBED: &str = "a round is left out, and up to three are measured again, when more than 2 % of the time was \
                                 stolen by the hypervisor or more than 5 % used by other programs";
        let part = results.part;
        let matters = |v: Variant| part == Part::Results || (part == Part::Wan && wan::VARIANTS.contains(&v));
        let lacking = self.lacking.iter().filter(|(v, _)| matters(*v)).map(|(_, why)| why.clone());
        results.skipped.splice(..0, lacking);
        if part != Part::Results {
            return;
        }
        let variants = Variant::all().filter(|v| self.has(*v));
        let variants = variants.filter_map(|v| Some(format!("{v}: {}", v.does()?))).chain(http::setup());
        let of_peer = |peer: Peer| Some((peer.name().to_owned(), peer.config()?));
        let ours = ("longsplice".to_owned(), venue::longsplice_config(Variant::Spliced, None));
        let rules = [Variant::Filter, Variant::Nat].map(|v| Some((v.title().to_owned(), venue::ruleset(v)?)));
        let flood = Some((format!("{} in the flood", Variant::Nat), flood::translation()));
        let peers = Peer::ALL.into_iter().map(of_peer).chain(rules).chain([flood]).flatten();
        results.setup = [NETWORK, DISTURBED].map(str::to_owned).into_iter().chain(variants).collect();
        results.configurations = std::iter::once(ours).chain(peers).chain(http::configurations()).collect();
    }

    /// Measures until there are enough quiet rounds, or [`EXTRA`] more have not helped. A peer that fails is left out from
    /// then on and reported; longsplice must not fail.
    fn rounds(
        &self,
        section: Section,
        row: &str,
        variants: &[Variant],
        run: impl FnMut(Variant) -> Result<Run>,
    ) -> Result<()> {
        let count = self.results().rounds;
        self.some_rounds(count, section, row, variants, run)
    }

    /// The same with `count` rounds instead of the requested number.
    fn some_rounds(
        &self,
        count: usize,
        section: Section,
        row: &str,
        variants: &[Variant],
        mut run: impl FnMut(Variant) -> Result<Run>,
    ) -> Result<()> {
        let name = section.row(row);
        let mut variants: Vec<Variant> = variants.iter().copied().filter(|v| self.has(*v)).collect();
        let mut rounds: Vec<Vec<Run>> = Vec::new();
        let most = count + EXTRA.min(count);
        let bar = self.bar(&name, count * variants.len());
        while rounds.iter().filter(|round| results::is_quiet(round)).count() < count && rounds.len() < most {
            let n = rounds.len();
            if n >= count {
                bar.inc_length(variants.len() as u64);
            }
            let mut runs = Vec::new();
            for i in 0..variants.len() {
                self.check()?;
                let variant = variants[(i + n) % variants.len()];
                match run(variant) {
                    Ok(run) => runs.push(run),
                    Err(e) if variant.peer().is_some() => self.leave_out(format!("{name}: {variant}: {e}")),
                    Err(e) => return Err(format!("{name}: {variant}: {e}").into()),
                }
                bar.inc(1);
            }
            variants.retain(|v| runs.iter().any(|r| r.variant == *v));
            runs.sort_by_key(|run| variants.iter().position(|v| *v == run.variant));
            self.say(&format!("{name}: {}", words(section, &runs)));
            rounds.push(runs);
        }
        bar.finish_and_clear();
        self.results().add(Case { section, row: row.to_owned(), rounds });
        Ok(())
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
        let chosen = self.chosen.is_empty() || self.chosen.contains(&variant);
        chosen && self.lacking.iter().all(|(v, _)| *v != variant)
    }

    /// Records a failure. The bench continues, and the results mention it.
    fn leave_out(&self, what: String) {
        self.say(&format!("left out: {what}"));
        self.results().skipped.push(what);
    }

    /// Prints progress.
    fn say(&self, text: &str) {
        let line = format!("{:6.1} s  {text}", self.began.elapsed().as_secs_f64());
        match &self.bars {
            // Ignore errors: the terminal may have gone.
            Some(bars) => drop(bars.println(line)),
            None => {
                // If nobody reads it any more, nobody waits for the results.
                if writeln!(std::io::stderr(), "{line}").is_err() {
                    self.interrupted.store(true, Relaxed);
                }
            }
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

/// A round in words.
fn words(section: Section, runs: &[Run]) -> String {
    let one = |run: &Run| {
        let notes: String = run.notes.iter().map(|note| format!(" ({note})")).collect();
        format!("{} {}{notes}", section.title(run.variant), section.number(run.value()))
    };
    let disturbed = if results::is_quiet(runs) { "" } else { " (disturbed)" };
    format!("{} {}{disturbed}", runs.iter().map(one).collect::<Vec<_>>().join(", "), section.unit())
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
}

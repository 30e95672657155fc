//! `longsplice bench`: what splicing saves, measured in the [lab](longsplice_lab) against IP forwarding, copying and HAProxy.
//!
//! Figures of one run are compared with each other only: each round measures every variant once, in rotated order, and
//! what counts is the median of the ratios within rounds. [`venue`] sets up a variant, [`bulk`], [`rtt`], [`switch`],
//! [`memory`], [`million`] and [`threshold`] measure, [`machine`] says what it cost and who disturbed it, [`results`] keeps everything,
//! [`report`] makes tables of it, and [`readme`] puts them where people look.

mod bulk;
mod machine;
mod memory;
mod million;
mod readme;
mod report;
mod results;
mod rtt;
mod stats;
mod switch;
mod threshold;
mod venue;

use crate::{
    Outcome,
    args::{BenchArgs, What},
};
use machine::Machine;
use results::{FORMAT, Results, Setup, Summary};
use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};
use venue::{Packets, Variant, Venue};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Where results are kept.
const RESULTS: &str = "bench/results";

/// `longsplice bench`.
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
    let results = bench.measure(args)?;
    let full = report::full(&results);
    print!("{full}");
    if args.what.is_empty() || args.out.is_some() {
        let dir = write(&out, &results, &full).map_err(|e| format!("{}: {e}", out.display()))?;
        println!("\nkept in {}", dir.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn write(out: &Path, results: &Results, table: &str) -> Result<PathBuf> {
    let dir = out.join(format!("{}-{}", results.date, results.machine.slug()));
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(readme::JSON), serde_json::to_string_pretty(results)? + "\n")?;
    fs::write(dir.join("results.md"), table)?;
    Ok(dir)
}

/// What all measurements share.
pub struct Bench {
    rounds: usize,
    seconds: f64,
    machine: Machine,
    began: Instant,
    interrupted: Arc<AtomicBool>,
}

impl Bench {
    fn new(args: &BenchArgs) -> Result<Bench> {
        let (rounds, seconds) = (args.rounds as usize, args.seconds);
        let interrupted = watch_interrupts()?;
        Ok(Bench { rounds, seconds, machine: Machine::here(), began: Instant::now(), interrupted })
    }

    fn measure(&self, args: &BenchArgs) -> Result<Results> {
        let wanted = |any: &[What]| args.what.is_empty() || args.what.iter().any(|w| any.contains(w));
        let bulk = if wanted(&[What::Bulk, What::Cpu]) { bulk::measure(self)? } else { Vec::new() };
        let rtt = if wanted(&[What::Rtt]) { rtt::measure(self)? } else { Vec::new() };
        let switch = if wanted(&[What::Switch]) { switch::measure(self)? } else { Vec::new() };
        let memory = wanted(&[What::Memory]).then(|| memory::measure(self)).transpose()?;
        let million = args.what.contains(&What::Million).then(|| million::measure(self, args.connections));
        let threshold = wanted(&[What::Threshold]).then(|| threshold::measure(self)).transpose()?;
        let skipped = if self.machine.haproxy.is_none() {
            vec!["HAProxy, which is not installed (apt-get install haproxy)".to_owned()]
        } else {
            Vec::new()
        };
        Ok(Results {
            format: FORMAT,
            date: machine::today(),
            machine: self.machine.clone(),
            setup: self.setup(),
            skipped,
            summary: Summary::of(&bulk, &rtt),
            bulk,
            rtt,
            switch,
            memory,
            threshold,
            million: million.transpose()?,
        })
    }

    fn setup(&self) -> Setup {
        let variants = [
            "IP forwarding: the client connects to the server, and the forwarder's kernel routes",
            "spliced: `longsplice run --splice at-once`, measured after the connections are spliced",
            "copying: `longsplice run --splice never`",
            "HAProxy: Debian's, TCP mode, `option splice-auto`, as many threads as it chooses",
        ];
        Setup {
            rounds: self.rounds,
            seconds: self.seconds,
            network: "client, forwarder and server are network namespaces joined by veth, MTU 1500, Reno, a lab for \
                      each variant; sender and receiver are threads with blocks of 256 KB"
                .to_owned(),
            variants: variants.map(str::to_owned).to_vec(),
            longsplice: venue::longsplice_config(),
            haproxy: venue::haproxy_config(),
            disturbed: "a round is left out when more than 2 % of the time was stolen by the hypervisor or more than \
                        5 % used by other programs"
                .to_owned(),
        }
    }

    /// A venue for each variant that can be had here.
    fn venues(&self, packets: Packets) -> Result<Vec<Venue>> {
        Variant::ALL.into_iter().filter(|v| self.has(*v)).map(|v| Venue::set(v, packets)).collect()
    }

    fn has(&self, variant: Variant) -> bool {
        variant != Variant::Haproxy || self.machine.haproxy.is_some()
    }

    /// Progress, for whoever waits.
    fn say(&self, text: &str) {
        eprintln!("{:5.1} s  {text}", self.began.elapsed().as_secs_f64());
    }

    /// To be called often: an interrupt ends the bench here, with everything cleaned up.
    fn check(&self) -> Result<()> {
        if self.interrupted.load(Relaxed) { Err("interrupted".into()) } else { Ok(()) }
    }
}

/// Ctrl-C must not leave namespaces and pinned links behind.
fn watch_interrupts() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::spawn(move || {
        runtime.block_on(async {
            // Without the handler, Ctrl-C does what it always does.
            if tokio::signal::ctrl_c().await.is_ok() {
                set.store(true, Relaxed);
            }
        });
    });
    Ok(flag)
}

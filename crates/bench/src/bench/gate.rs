//! Whether this program has become slower than another one of it, such as the one of the last release: both in one run, in turn.
//! Counts are stable and tell the most: system calls, and how often the program falls asleep. Times are ratios within rounds.

use super::{
    Result,
    network::Packets,
    objects::{Plan, fetch},
    results::{Run, is_quiet, plural, size},
    segment::{self, on_one_cpu},
    stats::{Spread, sign},
    variant::Variant,
    venue::Near,
};
use crate::{args::GateArgs, watch_interrupts, with_program};
use longsplice::Outcome;
use longsplice_lab::calls::SystemCalls;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    cmp::Ordering,
    fs,
    path::Path,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

/// What may be more than the other program's: a twentieth.
const MORE: f64 = 1.05;
/// Maximum number of disturbed rounds that are repeated.
const EXTRA: usize = 3;
/// Length of a run on one CPU in seconds.
const SECONDS: f64 = 0.5;
/// Maximum number of connections of a run, which has entries of its own.
const CONNECTIONS: usize = 2000;

/// Names of the counts of a run, each per connection.
const COUNTS: [&str; 2] = ["system calls", "sleeps"];

/// A run of one program.
struct Measured {
    run: Run,
    counts: Option<[f64; 2]>,
}

/// Compares all, prints a table, and fails if this program is slower anywhere.
pub fn gate(args: &GateArgs) -> Outcome {
    if !args.against.is_file() {
        return Err(format!("--against {}: there is no such program", args.against.display()).into());
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let gate = Gate { programs: [crate::program()?, args.against.clone()], rounds: args.rounds as usize };
    let interrupted = watch_interrupts()?;
    let mut slower = Vec::new();
    println!("the ratio to {}; above {MORE} is too slow", args.against.display());
    for variant in [Variant::Spliced, Variant::Copy] {
        on_one_cpu(|| {
            let set = |program| with_program(program, || Near::set(variant, Packets::Large));
            let venues = [set(&gate.programs[0])?, set(&gate.programs[1])?];
            for bytes in segment::BYTES {
                let run = |n: usize| {
                    segment::run(&venues[n], bytes as usize, SECONDS).map(|run| Measured { run, counts: None })
                };
                gate.compare(
                    &format!("segment of {}, {variant}", plural(bytes, "byte")),
                    run,
                    &interrupted,
                    &mut slower,
                )?;
            }
            Ok(())
        })?;
        for bytes in [1, 64 << 10] {
            let run = |n: usize| with_program(&gate.programs[n], || connections(variant, bytes));
            gate.compare(&format!("connection of {}, {variant}", size(bytes)), run, &interrupted, &mut slower)?;
        }
    }
    if slower.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(format!("slower than {}: {}", args.against.display(), slower.join("; ")).into())
}

struct Gate {
    /// This one and the other.
    programs: [std::path::PathBuf; 2],
    rounds: usize,
}

impl Gate {
    /// Runs both programs in turn, prints a line, and notes what is slower.
    fn compare(
        &self,
        what: &str,
        run: impl Fn(usize) -> Result<Measured>,
        interrupted: &AtomicBool,
        slower: &mut Vec<String>,
    ) -> Result<()> {
        let (mut ratios, mut least, mut disturbed) = (Vec::new(), [[f64::INFINITY; 2]; 2], 0);
        for round in 0..self.rounds + EXTRA {
            if ratios.len() == self.rounds {
                break;
            }
            let mut runs = [None, None];
            // neither program is always the first
            for n in [round % 2, (round + 1) % 2] {
                if interrupted.load(Relaxed) {
                    return Err("interrupted".into());
                }
                let measured = run(n).map_err(|e| format!("{what}, {}: {e}", self.programs[n].display()))?;
                // load only ever adds
                for (least, count) in least[n].iter_mut().zip(measured.counts.into_iter().flatten()) {
                    *least = least.min(count);
                }
                runs[n] = Some(measured.run);
            }
            let [Some(this), Some(other)] = runs else { unreachable!("both have run") };
            let ratio = this.value() / other.value();
            match is_quiet(&[this, other]) {
                true => ratios.push(ratio),
                false => disturbed += 1,
            }
        }
        let spread = Spread::of(ratios.iter().copied());
        let mut line = format!("{what:44} {}", spread.map_or_else(|| "-".to_owned(), |spread| spread.text(2)));
        if is_slower(&ratios) {
            slower.push(format!("{what}, by time"));
        }
        for (i, name) in COUNTS.into_iter().enumerate().filter(|(i, _)| least[0][*i].is_finite()) {
            line += &format!("  {:.2}/{:.2} {name}", least[0][i], least[1][i]);
            if least[0][i] > MORE * least[1][i].max(0.1) {
                slower.push(format!("{what}, by {name}"));
            }
        }
        if disturbed > 0 {
            line += &format!("  ({} disturbed)", plural(disturbed, "round"));
        }
        println!("{line}");
        if spread.is_none() {
            return Err(format!("{what}: every round was disturbed, so nothing is known; use a quieter machine").into());
        }
        Ok(())
    }
}

/// Whether times are too long, by more than chance.
fn is_slower(ratios: &[f64]) -> bool {
    sign(ratios.iter().map(|ratio| ratio - MORE)) == Ordering::Greater
}

/// Connections one after another, in a new venue: entries stay for a minute. The value is microseconds of processor time each.
fn connections(variant: Variant, bytes: u64) -> Result<Measured> {
    let venue = Near::set(variant, Packets::Large)?;
    let pid = venue.pid().ok_or("no program was started")?;
    let calls = SystemCalls::of(pid)?;
    let so_far = || Ok::<_, Box<dyn std::error::Error>>([calls.so_far().iter().sum(), sleeps(pid)?]);
    let before = so_far()?;
    let plan = Plan { bytes, clients: 1, length: Duration::from_secs(2), most: CONNECTIONS };
    let fetched = fetch(&venue, plan)?;
    let (n, after) = (fetched.times.len() as f64, so_far()?);
    let counts = [0, 1].map(|i| (after[i] - before[i]) as f64 / n);
    let micros = fetched.cost.cpu * 1e6 / n;
    Ok(Measured { run: Run::new(variant, fetched.cost, n, micros, micros), counts: Some(counts) })
}

/// How often the threads of a process have fallen asleep.
fn sleeps(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"))? {
        let status = fs::read_to_string(task?.path().join("status")).unwrap_or_default(); // one may have ended
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum += line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slower_is_what_chance_does_not_explain() {
        assert!(is_slower(&[1.06, 1.2, 1.07, 1.1, 1.08, 1.3, 1.06]));
        assert!(!is_slower(&[1.06, 1.2, 0.97, 1.1, 0.98, 1.3, 0.96]), "a noisy machine");
        assert!(!is_slower(&[1.04; 9]));
        assert!(!is_slower(&[1.2, 1.2]), "too few");
    }
}

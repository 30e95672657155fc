//! The one way in which everything is compared: rounds that measure each variant once, in an order that rotates.

use super::{
    Bench, Result,
    machine::Cost,
    results::{Case, Round, Run},
    subject::Subject,
    variant::Variant,
};

/// Rounds that are measured again at most, because others had the machine, and not more than were asked for. More would
/// wait for a quiet hour.
const EXTRA: usize = 3;

impl Run {
    /// A run from what it has cost.
    pub fn new(variant: Variant, cost: Cost, amount: f64, value: f64, cpu: f64) -> Run {
        let Cost { seconds, disturbed, .. } = cost;
        Run { variant, amount, seconds, value, cpu, per_ack: None, packet: None, disturbed }
    }
}

impl Bench {
    /// Measures until there are as many quiet rounds as were asked for, or [`EXTRA`] more have not helped. A peer that
    /// fails is left out from then on, and reported; ours must not fail.
    pub fn rounds(
        &self,
        subject: Subject,
        variants: &[Variant],
        run: impl FnMut(Variant) -> Result<Run>,
    ) -> Result<Case> {
        self.rounds_of(self.rounds, subject, variants, run)
    }

    /// The same, so many instead of as many as were asked for.
    pub fn rounds_of(
        &self,
        count: usize,
        subject: Subject,
        variants: &[Variant],
        mut run: impl FnMut(Variant) -> Result<Run>,
    ) -> Result<Case> {
        let mut variants: Vec<Variant> = variants.iter().copied().filter(|v| self.has(*v)).collect();
        let mut rounds: Vec<Round> = Vec::new();
        let most = count + EXTRA.min(count);
        let bar = self.bar(&subject.title(), count * variants.len());
        while rounds.iter().filter(|r| r.is_quiet()).count() < count && rounds.len() < most {
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
                    Err(e) if variant.peer().is_some() => {
                        self.leave_out(format!("{}: {variant}: {e}", subject.title()))
                    }
                    Err(e) => return Err(format!("{}: {variant}: {e}", subject.title()).into()),
                }
                bar.inc(1);
            }
            variants.retain(|v| runs.iter().any(|r| r.variant == *v));
            let round = Round { runs };
            self.say(&format!("{}: {}", subject.title(), words(subject, &round)));
            rounds.push(round);
        }
        bar.finish_and_clear();
        Ok(Case { subject, rounds })
    }
}

fn words(subject: Subject, round: &Round) -> String {
    let mut runs: Vec<&Run> = round.runs.iter().collect();
    runs.sort_by_key(|r| r.variant);
    let all: Vec<String> = runs.iter().map(|r| format!("{} {}", r.variant, subject.number(r.value))).collect();
    let disturbed = if round.is_quiet() { "" } else { " (disturbed)" };
    format!("{} {}{disturbed}", all.join(", "), subject.unit())
}

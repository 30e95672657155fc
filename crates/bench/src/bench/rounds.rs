//! The common method of comparison: rounds that measure each variant once, in rotated order.

use super::{
    Bench, Result,
    results::{Case, Round, Run},
    subject::Subject,
    variant::Variant,
};

/// Maximum number of disturbed rounds that are repeated, and never more than
/// the rounds requested. With more, the bench would just wait for a quiet hour.
const EXTRA: usize = 3;

impl Bench {
    /// Measures until there are enough quiet rounds, or [`EXTRA`] more have not helped. A peer that fails is left out from
    /// then on and reported; longsplice must not fail.
    pub fn rounds(
        &self,
        subject: Subject,
        variants: &[Variant],
        run: impl FnMut(Variant) -> Result<Run>,
    ) -> Result<Case> {
        self.rounds_of(self.rounds, subject, variants, run)
    }

    /// The same with `count` rounds instead of the requested number.
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
    let one = |r: &&Run| {
        let notes: String = r.notes.iter().map(|note| format!(" ({note})")).collect();
        format!("{} {}{notes}", subject.kind().title(r.variant), subject.number(r.value()))
    };
    let all: Vec<String> = runs.iter().map(one).collect();
    let disturbed = if round.is_quiet() { "" } else { " (disturbed)" };
    format!("{} {}{disturbed}", all.join(", "), subject.unit())
}

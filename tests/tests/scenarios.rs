//! Every situation of tests/scenarios: copied, spliced, and spliced and unspliced repeatedly.
//!
//! The modes of a scenario follow each other in one network, with one data path, until one fails; the next one then gets its own.
//! Each scenario runs with one of its families, which its name decides; `SCENARIO_FAMILIES=all` runs it with all of them.
//! `SCENARIO_MODE=Switched` and `SCENARIO_FAMILIES=V6` select a mode and families; `SCENARIO_REPEAT=n` repeats the runs.

use longsplice_tests::scenario::{Families, Mode, Scenario, run};
use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

include!(concat!(env!("OUT_DIR"), "/scenarios.rs"));

#[test]
fn there_are_scenarios() {
    assert!(!SCENARIOS.is_empty(), "no file in tests/scenarios");
}

fn chosen(variable: &str, value: &dyn std::fmt::Debug) -> bool {
    env::var(variable).map_or(true, |v| v.split(',').any(|v| v == format!("{value:?}")))
}

/// The families that a scenario runs with: those of the environment, or the one that its name selects.
fn families<'a>(name: &str, s: &'a Scenario) -> Vec<&'a Families> {
    match env::var("SCENARIO_FAMILIES").as_deref() {
        Ok("all") => s.families.iter().collect(),
        Ok(_) => s.families.iter().filter(|f| chosen("SCENARIO_FAMILIES", f)).collect(),
        Err(_) => vec![&s.families[name.bytes().map(usize::from).sum::<usize>() % s.families.len()]],
    }
}

fn situation(name: &str, text: &str) {
    let s = Scenario::parse(text);
    let repeat = env::var("SCENARIO_REPEAT").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let one = |families: &Families| -> Vec<String> {
        let modes = Mode::of(&s).into_iter().filter(|m| chosen("SCENARIO_MODE", m));
        let runs = modes.flat_map(|m| (0..repeat).map(move |_| m));
        let mut stage = None;
        runs.filter_map(|mode| {
            let began = Instant::now();
            let last = stage.take();
            let r = catch_unwind(AssertUnwindSafe(|| run(&s, *families, mode, last))).unwrap_or_else(|p| {
                let text = p.downcast_ref::<String>().cloned().or(p.downcast_ref::<&str>().map(|s| s.to_string()));
                Err(format!("  panic: {}\n", text.unwrap_or_default()))
            });
            let r = r.map(|(next, text)| {
                stage = Some(next);
                text
            });
            let (word, text) = match &r {
                Ok(text) => ("ok", text),
                Err(text) => ("FAILED", text),
            };
            println!("{name} {families:?} {mode:?}: {word} in {:.1?}\n{text}", began.elapsed());
            r.err().map(|e| format!("{name} {families:?} {mode:?}:\n{e}"))
        })
        .collect()
    };
    let families = families(name, &s).into_iter();
    let failed: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = families.map(|f| scope.spawn(move || one(f))).collect();
        running.into_iter().flat_map(|r| r.join().expect("panics were caught")).collect()
    });
    assert!(failed.is_empty(), "{}\n{}", s.about, failed.join("\n"));
}

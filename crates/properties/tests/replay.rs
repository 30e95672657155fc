//! The corpus, and seeded mutations of it: so many for each property, whatever the machine. FUZZ_RUNS asks for another number,
//! FUZZ_SEED for other mutations.

use longsplice_properties::{TARGETS, Target};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

/// Some seconds, all together.
const RUNS: u64 = 20_000;
/// Longer inputs find nothing that shorter ones do not, and take longer.
const LONGEST: usize = 2000;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text}: write a number")),
        Err(_) => default,
    }
}

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let files = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut found: Vec<_> = files.map(|f| f.unwrap().path()).map(|f| (f.clone(), fs::read(f).unwrap())).collect();
    assert!(found.len() >= 5, "{}: too few to begin with", dir.display());
    found.sort();
    found
}

fn check(target: Target, what: &str, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| (target.check)(input))).is_err() {
        panic!("{}, {what}: {}", target.name, input.escape_ascii());
    }
}

/// Bytes that parsers look for.
const TOKENS: [&[u8]; 20] = [
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"\0",
    b"0",
    b"chunked",
    b"Transfer-Encoding: ",
    b"Content-Length: ",
    b"Connection: close\r\n",
    b"Host: ",
    b"%2e",
    b"/..",
    b"[::1]",
    b"\xff\xff",
];

fn mutate(r: &mut StdRng, seeds: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let pick = |r: &mut StdRng| &seeds[r.random_range(0..seeds.len())].1;
    let mut input = pick(r).clone();
    for _ in 0..r.random_range(1..5) {
        let at = r.random_range(0..=input.len());
        let end = r.random_range(at..=input.len());
        match r.random_range(0..8) {
            0 if at < input.len() => input[at] ^= 1 << r.random_range(0..8),
            1 if at < input.len() => input[at] = r.random(),
            2 if at < input.len() => input[at] = input[at].wrapping_add(if r.random() { 1 } else { 255 }),
            3 => input.truncate(at),
            4 => drop(input.drain(at..end)),
            5 => {
                let part = input[at..end].to_vec();
                drop(input.splice(at..at, part));
            }
            6 => {
                let other = pick(r);
                let from = r.random_range(0..=other.len());
                let to = r.random_range(from..=other.len());
                drop(input.splice(at..end, other[from..to].iter().copied()));
            }
            _ => drop(input.splice(at..at, TOKENS[r.random_range(0..TOKENS.len())].iter().copied())),
        }
    }
    input.truncate(LONGEST);
    input
}

#[test]
fn the_corpus_and_its_mutations() {
    let (runs, seed) = (number("FUZZ_RUNS", RUNS), number("FUZZ_SEED", 1));
    for target in TARGETS {
        let seeds = corpus(target.name);
        for (file, input) in &seeds {
            check(target, &file.display().to_string(), input);
        }
        for n in seed..seed + runs {
            let input = mutate(&mut StdRng::seed_from_u64(n), &seeds);
            check(target, &format!("FUZZ_SEED={n} FUZZ_RUNS=1"), &input);
        }
    }
}

/// A property that nothing can break proves nothing.
#[test]
fn every_corpus_has_what_is_accepted_and_what_is_not() {
    use longsplice_http::{Kind, Request, Scan};
    let accepted = |input: &[u8]| {
        let end = Scan::new(Kind::Request).feed(input).ok().flatten();
        end.is_some_and(|end| Request::parse(&input[..end]).is_ok())
    };
    let all = corpus("http_request");
    let good = all.iter().filter(|(_, input)| accepted(input)).count();
    assert!(good > 0 && good < all.len(), "{good} of {}", all.len());
}

#[test]
fn cargo_fuzz_knows_each_property() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let bins = TARGETS.map(|Target { name, .. }| {
        let program = fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(program.contains(&format!("check(\"{name}\", input)")), "{program}");
        format!(
            "[[bin]]\nname = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\ntest = false\ndoc = false\nbench = false\n"
        )
    });
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    assert_eq!(manifest[manifest.find("[[bin]]").unwrap()..], bins.join("\n"));
}

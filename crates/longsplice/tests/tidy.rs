//! Style checks beyond rustfmt and clippy. The most important one finds prose that cites things which no longer exist.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    path::{Path, PathBuf},
};

/// Longest line of C, prose and scripts; Rust is left to rustfmt. Tables and links cannot be wrapped.
const WIDTH: usize = 130;
/// Maximum number of lines: a longer file does two things.
const LINES: usize = 800;
/// Files that are not our prose, and keep their line breaks.
const LICENCES: [&str; 5] = [
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "LICENSE.md",
    "crates/datapath/bpf/LICENSE-GPL-2.0",
    "crates/datapath/bpf/LICENSE-BSD-2-Clause",
];

/// A file of the project, with its path from the top.
struct Text {
    path: String,
    text: String,
}

impl Text {
    fn is(&self, extensions: &[&str]) -> bool {
        extensions.iter().any(|e| self.path.ends_with(e))
    }

    fn is_code(&self) -> bool {
        self.is(&[".rs", ".c", ".h"])
    }
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All text files, except for build output, hidden and recorded files.
fn texts() -> Vec<Text> {
    const KINDS: [&str; 9] = ["rs", "c", "h", "md", "toml", "service", "conf", "svg", ""];
    let top = top();
    let mut found = Vec::new();
    let mut left = vec![top.clone()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with('.') || ["target", "results", "corpus"].contains(&name.as_str()) {
                continue;
            }
            let kind = path.extension().map_or("", |e| e.to_str().unwrap());
            if path.is_dir() {
                left.push(path);
            } else if KINDS.contains(&kind)
                && kind != "svg"
                && let Ok(text) = fs::read_to_string(&path)
            {
                found.push(Text { path: path.strip_prefix(&top).unwrap().to_str().unwrap().to_owned(), text });
            }
        }
    }
    assert!(found.len() > 50, "looked in the wrong place: {}", top.display());
    found.retain(|t| !LICENCES.contains(&t.path.as_str()));
    found
}

fn none(what: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

fn lines<'a>(texts: impl Iterator<Item = &'a Text>, wrong: impl Fn(&str) -> bool) -> Vec<String> {
    texts
        .flat_map(|t| t.text.lines().enumerate().map(move |(n, line)| (t, n + 1, line)))
        .filter(|(_, _, line)| wrong(line))
        .map(|(t, n, line)| format!("{}:{n}: {}", t.path, line.trim()))
        .collect()
}

#[test]
fn lines_are_clean_and_not_too_long() {
    let texts = texts();
    none("white space at the end", lines(texts.iter(), |l| l.trim_end() != l));
    let long = |l: &str| l.chars().count() > WIDTH && !l.starts_with('|') && !l.contains("](");
    none("longer lines than 130", lines(texts.iter().filter(|t| !t.is(&[".rs", ".toml"])), long));
    let ragged = |t: &&Text| !t.text.is_empty() && (!t.text.ends_with('\n') || t.text.ends_with("\n\n"));
    none("files that do not end with one newline", texts.iter().filter(ragged).map(|t| t.path.clone()).collect());
}

#[test]
fn files_have_one_subject() {
    let long = |t: &&Text| t.is_code() && t.text.lines().count() > LINES;
    none("files of more than 800 lines", texts().iter().filter(long).map(|t| t.path.clone()).collect());
}

#[test]
fn nothing_is_left_to_do() {
    // Assembled here, so that this file passes, too.
    let marks = ["TO", "FIX", "XX"].iter().zip(["DO", "ME", "X"]).map(|(a, b)| format!("{a}{b}")).collect::<Vec<_>>();
    let macros = ["dbg", "todo", "unimplemented"].map(|m| format!("{m}!("));
    let unfinished = |l: &str| marks.iter().any(|m| has_word(l, m)) || macros.iter().any(|m| l.contains(m));
    none("unfinished", lines(texts().iter().filter(|t| t.is_code() || t.is(&[".md"])), unfinished));
}

#[test]
fn unsafe_code_stays_in_one_crate() {
    let allow = format!("allow({}", "unsafe_code");
    let elsewhere = |t: &&Text| t.is(&[".rs"]) && !t.path.starts_with("crates/datapath/");
    none("unsafe outside of the datapath crate", lines(texts().iter().filter(elsewhere), |l| l.contains(&allow)));
}

/// Every compiled file must be in its package, because a published crate has nothing beside it.
/// A check that could not be made is no check that was passed. The library's iterators end where the kernel refuses to go on,
/// and a question to the kernel that fails is no answer.
#[test]
fn refusals_of_the_kernel_are_not_taken_for_answers() {
    let is_product = |t: &Text| t.path.starts_with("crates/") && t.path.contains("/src/") && t.is(&[".rs"]);
    let texts = texts();
    let hides =
        |line: &str| ["ProgInfoIter", "MapInfoIter", "LinkInfoIter", "BtfInfoIter"].iter().any(|i| has_word(line, i));
    none("iterators that end at a refusal", lines(texts.iter().filter(|t| is_product(t)), hides));
    let asks = ["is_local(", "attached_programs(", "loaded_programs(", "is_owned(", "has_device(", "Holdings::of("];
    let forgives = ["unwrap_or(false)", "unwrap_or_default()", ".ok()", "is_ok_and("];
    let is_taken = |line: &str| asks.iter().any(|a| line.contains(a)) && forgives.iter().any(|f| line.contains(f));
    none("errors that count as an answer", lines(texts.iter().filter(|t| is_product(t)), is_taken));
}

#[test]
fn packages_hold_what_they_compile() {
    for (name, sources) in [
        ("longsplice-datapath", &["bpf/splice.bpf.c", "bpf/flow.h", "bpf/kernels.toml", "model/model.c"][..]),
        ("longsplice-engine", &["src/lib.rs", "README.md", "examples/plug.rs"]),
    ] {
        let mut list = std::process::Command::new(env!("CARGO"));
        list.args(["package", "--list", "--allow-dirty", "--offline", "--locked", "--package", name])
            .current_dir(top());
        let output = list.output().unwrap();
        let files = String::from_utf8(output.stdout).unwrap();
        let missing = sources.iter().filter(|source| !files.lines().any(|file| file == **source));
        none(&format!("missing in the package {name}"), missing.map(|source| (*source).to_owned()).collect());
    }
}

#[test]
fn every_file_for_the_kernel_states_its_licence() {
    const LICENCE: &str = "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause";
    let kernel = |t: &&Text| t.is(&[".c", ".h"]) && t.path.contains("/bpf/");
    let silent = |t: &&Text| !t.text.lines().next().unwrap_or("").contains(LICENCE);
    none("no SPDX line at the top", texts().iter().filter(kernel).filter(silent).map(|t| t.path.clone()).collect());
}

#[test]
fn links_lead_somewhere() {
    let mut dead = Vec::new();
    for t in texts().iter().filter(|t| t.is(&[".md"])) {
        let dir = top().join(&t.path).parent().unwrap().to_owned();
        for target in t.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap();
            if !file.is_empty() && !file.contains("://") && !dir.join(file).exists() {
                dead.push(format!("{}: {target}", t.path));
            }
        }
    }
    none("links to nothing", dead);
}

/// `Type::method`, `function()` and `dir/file.rs` in prose must exist.
#[test]
fn prose_cites_what_exists() {
    let texts = texts();
    let words: HashSet<&str> =
        texts.iter().filter(|t| t.is_code() || t.is(&[".toml"])).flat_map(|t| t.text.split(|c| !is_word(c))).collect();
    let mut gone = Vec::new();
    for t in texts.iter().filter(|t| t.is(&[".md"])) {
        for cited in spans(&t.text) {
            let symbol = cited.strip_suffix("()").or(cited.contains("::").then_some(cited));
            let last = symbol.and_then(|s| s.rsplit("::").next());
            if last.is_some_and(|s| s.chars().all(is_word) && !words.contains(s)) {
                gone.push(format!("{}: `{cited}`", t.path));
            }
            let file = [".rs", ".c", ".h"].iter().any(|e| cited.ends_with(e)) && !cited.contains([' ', '<', '*']);
            if file && !texts.iter().any(|t| t.path.ends_with(cited)) {
                gone.push(format!("{}: `{cited}`", t.path));
            }
        }
    }
    none("cited, but gone", gone);
}

/// Examples in prose use existing flags.
#[test]
fn prose_uses_flags_that_exist() {
    let man = std::process::Command::new(env!("CARGO_BIN_EXE_longsplice")).arg("man").output().unwrap();
    let page = String::from_utf8(man.stdout).unwrap().replace("\\-", "-");
    let texts = texts();
    // Its program is in another package, and not built for this test.
    let bench = texts.iter().find(|t| t.path == "crates/bench/src/args.rs").expect("the flags of longsplice-bench");
    let has = |program: &str, flag: &str| match program {
        "longsplice " => page.contains(&format!("--{flag}")),
        _ => bench.text.contains(&format!("pub {}:", flag.replace('-', "_"))),
    };
    let mut unknown = Vec::new();
    for t in texts.iter().filter(|t| t.is(&[".md", ".service"])) {
        for (line, program) in t.text.lines().flat_map(|l| ["longsplice ", "longsplice-bench "].map(|p| (l, p))) {
            let Some((_, call)) = line.split_once(program) else { continue };
            let call = call.split(['|', ';', '#', '`']).next().unwrap();
            for flag in call.split_whitespace().filter_map(|w| w.strip_prefix("--")) {
                let name = flag.split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).next().unwrap();
                if !has(program, name) {
                    unknown.push(format!("{}: {program}--{name}", t.path));
                }
            }
        }
    }
    none("flags that do not exist", unknown);
}

/// The kernels named are those in the record, all of which `make kernels` writes.
#[test]
fn the_kernels_that_were_tested_are_named() {
    let numbers = |release: &str| release.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap().to_owned();
    let tested: Vec<String> = longsplice_datapath::tested_kernels().into_iter().map(numbers).collect();
    let line = format!("Tested on Linux {}.", tested.join(", "));
    for file in ["README.md", "crates/datapath/bpf/compat.h"] {
        let text = fs::read_to_string(top().join(file)).unwrap();
        assert!(text.contains(&line), "{file}: not `{line}`");
    }
}

/// A function of a Rust file as laid out by rustfmt: attributes, name, and all lines up to its closing brace.
struct Function<'a> {
    attributes: Vec<&'a str>,
    name: &'a str,
    free: bool,
    body: String,
}

fn functions(text: &str) -> Vec<Function<'_>> {
    let lines: Vec<&str> = text.lines().collect();
    let start = |l: &str| l.trim_start().strip_prefix("async ").unwrap_or(l.trim_start()).starts_with("fn ");
    let found = (0..lines.len()).filter(|&n| start(lines[n])).map(|n| {
        let indent = lines[n].len() - lines[n].trim_start().len();
        let end = format!("{:indent$}}}", "");
        let (_, rest) = lines[n].split_once("fn ").unwrap();
        let attributes = lines[..n].iter().rev().map(|l| l.trim()).take_while(|l| l.starts_with("#["));
        let body = lines[n + 1..].iter().take_while(|l| **l != end && !lines[n].ends_with('}'));
        Function {
            attributes: attributes.collect(),
            name: rest.split(|c| !is_word(c)).next().unwrap(),
            free: indent == 0,
            body: body.copied().collect::<Vec<_>>().join("\n"),
        }
    });
    found.collect()
}

/// Whether this body calls the free function of this name.
fn calls(body: &str, name: &str) -> bool {
    body.match_indices(&format!("{name}("))
        .any(|(at, _)| !body[..at].ends_with(|c| is_word(c) || c == '.' || c == ':') && !body[..at].ends_with("fn "))
}

/// Tests that need root are recognized by their attribute, not their name. A test that creates a network or opens the data
/// path, directly or by a free function of its file, must have it.
#[test]
fn tests_that_need_root_are_marked() {
    const MARK: &str = r#"#[ignore = "root"]"#;
    const ROOT: [&str; 4] = ["Lab::new(", "Lab::simple(", "Forwarder::", "Datapath::open("];
    let (mut named, mut unmarked, mut marked) = (Vec::new(), Vec::new(), 0);
    for t in texts().iter().filter(|t| t.is(&[".rs"]) && !t.path.ends_with("/tidy.rs")) {
        let functions = functions(&t.text);
        let mut root: HashSet<&str> = HashSet::new();
        let needs = |f: &Function, root: &HashSet<&str>| {
            ROOT.iter().any(|r| f.body.contains(r)) || root.iter().any(|name| calls(&f.body, name))
        };
        while let Some(f) = functions.iter().find(|f| f.free && !root.contains(f.name) && needs(f, &root)) {
            root.insert(f.name);
        }
        for f in
            functions.iter().filter(|f| f.attributes.iter().any(|a| a.contains("test]") || a.contains("test_case(")))
        {
            let has_mark = f.attributes.contains(&MARK);
            marked += usize::from(has_mark);
            let place = format!("{}: {}", t.path, f.name);
            if f.name.starts_with("needs_root") {
                named.push(place);
            } else if !has_mark && needs(f, &root) {
                unmarked.push(place);
            }
        }
    }
    none("named instead of marked", named);
    none("in need of root, but not marked", unmarked);
    assert!(marked > 300, "{marked} were found");
}

/// The files of each crate that a file imports, by the first part of their path below src: a folder is one with the file of its
/// name. Tests may import anything.
fn imports(texts: &[Text]) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut all: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for t in texts.iter().filter(|t| t.is(&[".rs"]) && !t.path.ends_with("tests.rs") && !t.path.contains("/tests/")) {
        let Some((of, path)) = t.path.split_once("/src/") else { continue };
        let file = path.split('/').next().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&file) {
            continue;
        }
        let code = t.text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let code: String = code.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
        let code = if path.contains('/') { code } else { code.replace("super::", "crate::") };
        let found = all.entry((of.to_owned(), file.to_owned())).or_default();
        for import in code.split("crate::").skip(1) {
            let Some(group) = import.strip_prefix('{') else {
                found.extend(import.split(|c| !is_word(c)).next().map(str::to_owned));
                continue;
            };
            let mut depth = 0;
            let end = group.find(|c| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                depth < 0
            });
            let mut depth = 0;
            let outer = group[..end.unwrap()].split(|c| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                c == ',' && depth == 0
            });
            found.extend(outer.filter_map(|one| one.trim().split(|c| !is_word(c)).next()).map(str::to_owned));
        }
    }
    all
}

/// Nothing imports what is above it: the files of a crate have an order. docs/user-space.md shows that of the engine.
#[test]
fn files_import_each_other_in_one_direction() {
    let mut left = imports(&texts());
    assert!(left.len() > 80, "{} were found", left.len());
    // whatever imports nothing that is left is the next floor
    while !left.is_empty() {
        let is_left = |of: &String, file: &String| left.contains_key(&(of.clone(), file.clone()));
        let next: Vec<_> = left
            .iter()
            .filter(|((of, file), needs)| needs.iter().all(|need| need == file || !is_left(of, need)))
            .map(|(one, _)| one.clone())
            .collect();
        let circle = left.iter().map(|((of, file), needs)| {
            let needs: Vec<_> = needs.iter().filter(|need| *need != file && is_left(of, need)).collect();
            format!("{of}/src/{file} imports {needs:?}")
        });
        if next.is_empty() {
            none("files that import each other, or what does", circle.collect());
        }
        left.retain(|one, _| !next.contains(one));
    }
}

/// The crates of the product, from the bottom to the top. The proxy knows protocols with a crate of their own only as a `Service`.
#[test]
fn crates_depend_on_those_below() {
    const FLOORS: [&str; 6] = ["datapath", "engine", "http", "proxy", "proxy-http", "longsplice"];
    let mut up = Vec::new();
    for (floor, of) in FLOORS.iter().enumerate() {
        let path = format!("crates/{of}/Cargo.toml");
        let text = fs::read_to_string(top().join(&path)).unwrap();
        for line in text.lines().filter(|line| line.starts_with("longsplice")) {
            let name = line.split(['.', ' ', '=']).next().unwrap();
            let name = name.strip_prefix("longsplice-").unwrap_or(name);
            if FLOORS.iter().position(|other| *other == name).is_some_and(|below| below >= floor) {
                up.push(format!("{path}: {line}"));
            }
        }
    }
    none("crates that depend on what is above them", up);
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c| !is_word(c)).any(|w| w == word)
}

/// The texts in single backticks, outside code blocks.
fn spans(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (n, block) in text.split("```").enumerate() {
        if n % 2 == 0 {
            found.extend(block.lines().flat_map(|line| line.split('`').skip(1).step_by(2)));
        }
    }
    found
}

#[test]
fn spans_are_found_outside_of_blocks() {
    assert_eq!(spans("a `b` c\n```\n`d`\n```\n`e()` `f::g`"), ["b", "e()", "f::g"]);
    assert!(has_word("x FOO: y", "FOO") && !has_word("FOOD", "FOO"));
}

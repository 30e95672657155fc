//! The notices that the licences of other people's packages require of everybody who passes the program on.

use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// The file, which is passed on with the program.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/THIRD-PARTY-NOTICES.txt");
/// If set, the file is written anew: `make notices`.
const WRITE: &str = "WRITE_NOTICES";
/// Texts of sources that a package brings along, below its directory.
const CARRIED: [(&str, &str); 1] = [("libbpf-sys", "libbpf/LICENSE.BSD-2-Clause")];
/// Packages without a text, and those of the same repository, which have that of both.
const SHARED: [(&str, &str); 1] = [("alloc-stdlib", "alloc-no-stdlib")];
const HEAD: &str = "\
The program longsplice contains the packages below. The texts of their licences follow, each with the packages that it is of.
If a package may be used under any of several licences, the text of one is here. The program contains parts of the Rust
standard library, too, which is licensed as MIT OR Apache-2.0.
";

/// What `cargo metadata` says of the workspace, as it is built for one kind of machine: the list must not depend on that of the
/// caller.
fn metadata() -> Value {
    let mut command = Command::new(env!("CARGO"));
    command.args(["metadata", "--locked", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key}: {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value[key].as_array().unwrap_or_else(|| panic!("no {key}")).iter()
}

/// The packages that are linked into the program, without our own.
fn linked(metadata: &Value) -> Vec<&Value> {
    let packages: BTreeMap<_, _> = list(metadata, "packages").map(|p| (text(p, "id"), p)).collect();
    let nodes: BTreeMap<_, _> = list(&metadata["resolve"], "nodes").map(|n| (text(n, "id"), n)).collect();
    let program = packages.values().find(|p| p["name"] == "longsplice").expect("the program");
    let (mut left, mut found) = (vec![text(program, "id")], BTreeSet::new());
    while let Some(id) = left.pop() {
        // macros run in the compiler
        let is_macro = list(packages[id], "targets").any(|t| list(t, "kind").any(|kind| kind == "proc-macro"));
        if !is_macro && found.insert(id) {
            let is_linked = |d: &&Value| list(d, "dep_kinds").any(|kind| kind["kind"].is_null());
            left.extend(list(nodes[id], "deps").filter(is_linked).map(|d| text(d, "pkg")));
        }
    }
    let mut linked: Vec<_> = found.into_iter().map(|id| packages[id]).filter(|p| !p["source"].is_null()).collect();
    linked.sort_by_key(|p| (text(p, "name"), text(p, "version")));
    linked
}

/// The texts of a package's licences. Of a choice, not the longer ones.
fn texts(package: &Value) -> Vec<String> {
    let name = text(package, "name");
    let dir = Path::new(text(package, "manifest_path")).parent().unwrap();
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let upper = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_uppercase();
    let is_licence = |path: &PathBuf| ["LICEN", "COPYING", "NOTICE"].iter().any(|name| upper(path).starts_with(name));
    let mut files: Vec<_> = entries.filter(is_licence).collect();
    let is_longer = |path: &PathBuf| ["APACHE", "LGPL", "ZLIB"].iter().any(|name| upper(path).contains(name));
    if text(package, "license").contains(" OR ") && !files.iter().all(is_longer) {
        files.retain(|path| !is_longer(path));
    }
    files.sort();
    files.extend(CARRIED.iter().filter(|(of, _)| *of == name).map(|(_, path)| dir.join(path)));
    let texts: Vec<_> = files.iter().map(|path| tidied(&fs::read_to_string(path).unwrap())).collect();
    assert!(!texts.is_empty(), "{name} has no text of its licence: {}", dir.display());
    texts
}

/// The same text, whatever its ends of lines.
fn tidied(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

fn notices() -> String {
    let metadata = metadata();
    let linked = linked(&metadata);
    let mut of_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut all = format!("{HEAD}\n");
    for package in &linked {
        let name = format!("{} {}", text(package, "name"), text(package, "version"));
        all += &format!("{name}: {}\n", text(package, "license"));
        let other = SHARED.iter().find(|(of, _)| package["name"] == *of).map(|(_, other)| {
            let other = *linked.iter().find(|p| p["name"] == *other).expect("the other package");
            assert_eq!(other["repository"], package["repository"]);
            other
        });
        texts(other.unwrap_or(package))
            .into_iter()
            .for_each(|text| of_text.entry(text).or_default().push(name.clone()));
    }
    let mut of_text: Vec<_> = of_text.into_iter().map(|(text, packages)| (packages, text)).collect();
    of_text.sort();
    for (packages, text) in of_text {
        all += &format!("\n{}\n{}\n\n{text}\n", "=".repeat(80), packages.join(", "));
    }
    all
}

/// A dependency that is new, gone or of another version changes the file.
#[test]
fn the_notices_are_those_of_the_packages() {
    let now = notices();
    if env::var_os(WRITE).is_some() {
        fs::write(FILE, &now).unwrap();
    }
    let written = fs::read_to_string(FILE).unwrap_or_default();
    let (written, now): (BTreeSet<_>, BTreeSet<_>) = (written.lines().collect(), now.lines().collect());
    let [more, less] = [now.difference(&written), written.difference(&now)].map(Vec::from_iter);
    assert!(more.is_empty() && less.is_empty(), "run `make notices`; missing: {more:#?}, no longer right: {less:#?}");
}

/// Whoever gets one of our packages learns from it how it is licensed, and has the texts, which a published one brings along.
#[test]
fn each_of_our_packages_names_its_licence() {
    let metadata = metadata();
    let ours: Vec<_> = list(&metadata, "packages").filter(|p| p["source"].is_null()).collect();
    assert!(ours.len() > 5, "{ours:?}");
    for package in ours {
        let dir = Path::new(text(package, "manifest_path")).parent().unwrap();
        let licence = text(package, "license");
        assert!(licence.contains("Apache-2.0 OR MIT"), "{}: {licence}", dir.display());
        assert_eq!(dir.join("bpf").exists(), licence.contains("GPL-2.0-only OR BSD-2-Clause"), "{}", dir.display());
        let is_published = package["publish"].is_null();
        for file in ["LICENSE-APACHE", "LICENSE-MIT"].into_iter().filter(|_| is_published) {
            let [own, top] = [dir.to_owned(), Path::new(TOP).to_owned()].map(|dir| dir.join(file));
            assert_eq!(fs::read_to_string(own).unwrap(), fs::read_to_string(top).unwrap(), "{}", dir.display());
        }
    }
}

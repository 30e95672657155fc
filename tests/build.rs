//! Generates a test for each file in scenarios/.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=scenarios");
    let entries = fs::read_dir("scenarios").into_iter().flatten().flatten().map(|e| e.path());
    let mut files: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    files.sort();
    let (mut list, mut tests) = (String::new(), String::new());
    for file in &files {
        let name = file.file_stem().and_then(|n| n.to_str()).expect("scenarios have plain names");
        let path = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join(file);
        let _ = writeln!(list, "    {name:?},");
        let function = name.replace('-', "_");
        let _ = writeln!(
            tests,
            "#[test]\n#[ignore = \"root\"]\nfn {function}() {{ situation({name:?}, include_str!({path:?})); }}"
        );
    }
    let text = format!("const SCENARIOS: &[&str] = &[\n{list}];\n{tests}");
    let out = Path::new(&env::var("OUT_DIR").expect("set by cargo")).join("scenarios.rs");
    fs::write(out, text).expect("OUT_DIR can be written");
}

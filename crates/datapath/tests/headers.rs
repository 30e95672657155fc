//! Each header of bpf/ includes what it uses: it compiles by itself, whatever is included before it elsewhere.

use std::{fs, path::Path, process::Command};

#[test]
fn each_header_compiles_by_itself() {
    let bpf = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    let libbpf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libbpf");
    fs::create_dir_all(libbpf.join("bpf")).unwrap();
    for (name, text) in libbpf_sys::API_HEADERS {
        fs::write(libbpf.join("bpf").join(name), text).unwrap();
    }
    let files = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let (folders, mut headers): (Vec<_>, Vec<_>) = files(&bpf).into_iter().partition(|path| path.is_dir());
    assert!(!folders.is_empty());
    headers.extend(folders.iter().flat_map(|folder| files(folder)));
    headers.retain(|path| path.extension().is_some_and(|e| e == "h"));
    headers.sort();
    assert!(headers.len() > 20, "{headers:?}");
    let mut failed = Vec::new();
    for header in headers {
        let out = Command::new("clang")
            .args(["-target", "bpf", "-mcpu=v3", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-function"])
            .args([Path::new("-I"), &libbpf, Path::new("-I"), &bpf])
            .args(["-idirafter", &format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH)])
            .arg("-include")
            .arg(&header)
            .args(["-x", "c", "/dev/null"])
            .output()
            .expect("clang, as for the build");
        if !out.status.success() {
            failed.push(format!("{}:\n{}", header.display(), String::from_utf8_lossy(&out.stderr)));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

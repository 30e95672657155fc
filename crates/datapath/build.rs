//! Compiles bpf/*.bpf.c, and generates the typed view of their maps and the constants of the headers.

use libbpf_rs::btf::{Btf, types::Enum};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let bpf = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("bpf");
    // <asm/types.h> of Debian's multiarch layout
    let arch = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "aarch64-linux-gnu",
        _ => "x86_64-linux-gnu",
    };
    println!("cargo:rerun-if-changed={}", bpf.display());
    let compile = |name: &str| {
        let object = out.join(format!("{name}.bpf.o"));
        libbpf_cargo::SkeletonBuilder::new()
            .source(bpf.join(format!("{name}.bpf.c")))
            .clang_args(["-mcpu=v3", "-Wall", "-Werror", "-fno-strict-aliasing", "-I", &format!("/usr/include/{arch}")])
            .obj(&object)
            .build_and_generate(out.join(format!("{name}.skel.rs")))
            .expect("bpf/*.bpf.c compile: clang 14 or newer, libelf-dev and linux-libc-dev are installed");
        object
    };
    fs::write(out.join("names.rs"), names(&compile("splice"))).expect("OUT_DIR can be written");
    let btf = |name| Btf::from_path(compile(name)).expect("clang -g leaves BTF");
    let tpot = labels("TPOT_VERDICTS", &btf("tpot"), "tpot_verdict", "T_")
        + &labels("TPOT_ROUTER_VERDICTS", &btf("tpot_router"), "tpot_router_verdict", "R_");
    fs::write(out.join("tpot.rs"), tpot).expect("OUT_DIR can be written");
    compile("programs");
    #[cfg(feature = "model")]
    model(&bpf);
}

/// Enumerations of the object, as constants under the names that Rust code uses.
fn names(object: &Path) -> String {
    let btf = Btf::from_path(object).expect("clang -g leaves BTF");
    let members = |of: &str, prefix: &str| members(&btf, of, prefix);
    let mut text = String::new();
    let flags = [
        ("leg_flag", "LEG_", "LegFlags", "u32"),
        ("path_flag", "PATH_", "PathFlags", "u16"),
        ("via_flag", "VIA_", "ViaFlags", "u32"),
    ];
    for (of, prefix, name, kind) in flags {
        let all = members(of, prefix);
        let constant = |(flag, value): &(String, i64)| format!("    pub const {flag}: {kind} = {value:#x};\n");
        let mut constants: String = all.iter().map(constant).collect();
        let named: String = all.iter().map(|(flag, value)| format!("({flag:?}, {value:#x}), ")).collect();
        constants += &format!("    /// Names and bits.\n    pub const ALL: &[(&str, u32)] = &[{named}];\n");
        let allow = "#[allow(missing_docs)]";
        text += &format!("/// Bits of `enum {of}`.\n{allow}\n#[derive(Debug)]\npub struct {name};\n");
        text += &format!("{allow}\nimpl {name} {{\n{constants}}}\n");
    }
    text += &labels("VERDICTS", &btf, "verdict", "V_");
    for (of, header) in [("constant", "flow.h"), ("mark", "mark.h")] {
        for (name, value) in members(of, "") {
            text += &format!("/// `{name}` of bpf/{header}.\npub const {name}: u32 = {value};\n");
        }
    }
    text
}

/// The members of an enumeration, without their prefix, and their values.
fn members(btf: &Btf<'_>, of: &str, prefix: &str) -> Vec<(String, i64)> {
    let all: Enum<'_> = btf.type_by_name(of).unwrap_or_else(|| panic!("enum {of} is in the BTF: a variable has it"));
    let name = |name: &std::ffi::OsStr| name.to_str().and_then(|n| n.strip_prefix(prefix)).map(str::to_owned);
    all.iter().map(|m| (m.name.and_then(name).expect("a name with the prefix"), m.value)).collect()
}

/// The labels of an enumeration of verdicts, as a constant.
fn labels(constant: &str, btf: &Btf<'_>, of: &str, prefix: &str) -> String {
    let mut verdicts = members(btf, of, prefix);
    assert_eq!(verdicts.pop().map(|last| last.0), Some("MAX".into()), "the last verdict is none");
    let label = |(name, _): (String, i64)| format!("    {:?},\n", name.to_lowercase().replace('_', "-"));
    let labels: String = verdicts.into_iter().map(label).collect();
    format!(
        "/// Labels of `enum {of}`, in its order: what the programs did with a packet.\n\
         pub const {constant}: &[&str] = &[\n{labels}];\n"
    )
}

/// The decision logic for user space.
#[cfg(feature = "model")]
fn model(bpf: &Path) {
    println!("cargo:rerun-if-changed=model");
    cc::Build::new()
        .files(["model/model.c", "model/siphash.c"])
        .include(bpf)
        .opt_level(2)
        .flag("-fno-strict-aliasing")
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Werror=implicit-function-declaration")
        .compile("model");
}

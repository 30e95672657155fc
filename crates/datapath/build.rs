//! Compiles the programs of bpf/, and generates the typed view of their maps and the constants of the headers.

use libbpf_rs::btf::{
    Btf, BtfType, ReferencesType,
    types::{Array, Composite, DataSec, Enum, MemberAttr, Ptr},
};
use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
};

include!("src/tables/pinned_names.rs");

/// Types that are in pinned maps, or name values in them, without being named by their declarations.
const PINNED_TYPES: [&str; 8] = ["slot4", "slot6", "event", "leg_flag", "path_flag", "phase", "listens", "verdict"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let bpf = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("bpf");
    // <asm/types.h> of Debian's multiarch layout
    let arch = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "aarch64-linux-gnu",
        _ => "x86_64-linux-gnu",
    };
    println!("cargo:rerun-if-changed={}", bpf.display());
    let multiarch = format!("/usr/include/{arch}");
    let top = bpf.to_str().expect("the path is UTF-8"); // files in folders include headers that are not
    let compile = |source: &str| {
        let name = source.rsplit('/').next().expect("a name");
        let object = out.join(format!("{name}.bpf.o"));
        libbpf_cargo::SkeletonBuilder::new()
            .source(bpf.join(format!("{source}.bpf.c")))
            .clang_args(["-mcpu=v3", "-Wall", "-Werror", "-fno-strict-aliasing", "-I", top, "-I", &multiarch])
            .obj(&object)
            .build_and_generate(out.join(format!("{name}.skel.rs")))
            .expect("bpf/ compiles: clang 14 or newer, libelf-dev and linux-libc-dev are installed");
        object
    };
    fs::write(out.join("names.rs"), names(&compile("splice"))).expect("OUT_DIR can be written");
    let btf = |source| Btf::from_path(compile(source)).expect("clang -g leaves BTF");
    let tpot = labels("TPOT_VERDICTS", &btf("tpot/tpot"), "tpot_verdict", "T_")
        + &labels("TPOT_ROUTER_VERDICTS", &btf("tpot/tpot_router"), "tpot_router_verdict", "R_");
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
    let layout = fnv(layout(&btf).as_bytes());
    text + &format!("/// Fingerprint of the layout of all that is pinned.\npub const LAYOUT: u32 = {layout:#x};\n")
}

/// Describes the pinned maps and the types in them, down to integers and the values of enumerations.
fn layout(btf: &Btf<'_>) -> String {
    let section: DataSec<'_> = btf.type_by_name(".maps").expect("the object has maps");
    let (mut text, mut known) = (String::new(), BTreeSet::new());
    let mut maps = BTreeSet::new();
    for variable in section.iter().filter_map(|info| btf.type_by_id::<BtfType<'_>>(info.ty)) {
        let name = variable.name().and_then(|name| name.to_str()).expect("a map has a name");
        if !PINNED.contains(&name) {
            continue;
        }
        maps.insert(name);
        let declared = variable.next_type().expect("a variable has a type").skip_mods_and_typedefs();
        let declared = Composite::try_from(declared).expect("a map is declared as a struct");
        for member in declared.iter().filter(|m| m.name.is_some_and(|name| name != "max_entries")) {
            text += &format!("{name}.{}: ", member.name.expect("filtered").display());
            // a pointer to a type, or to an array whose length is the value; the pages of a table are declared inside
            describe(btf.type_by_id(member.ty).expect("a member has a type"), btf, &mut text, &mut known);
        }
    }
    assert_eq!(maps.len(), PINNED.len(), "every pinned map is declared: {maps:?}");
    for name in PINNED_TYPES {
        let found = btf.type_by_name::<BtfType<'_>>(name).unwrap_or_else(|| panic!("{name} is in the BTF"));
        describe(found, btf, &mut text, &mut known);
    }
    text
}

/// Describes a type, and once those in it.
fn describe(of: BtfType<'_>, btf: &Btf<'_>, text: &mut String, known: &mut BTreeSet<String>) {
    let of = of.skip_mods_and_typedefs();
    let name = of.name().map(|name| name.to_string_lossy().into_owned());
    *text += &format!("{:?} {} ", of.kind(), name.as_deref().unwrap_or_default());
    if name.is_some_and(|name| !known.insert(name)) {
        return;
    }
    if let Ok(array) = Array::try_from(of) {
        *text += &format!("{} times ", array.capacity());
        describe(array.contained_type(), btf, text, known);
    } else if let Ok(pointer) = Ptr::try_from(of) {
        describe(pointer.referenced_type(), btf, text, known);
    } else if let Ok(all) = Enum::try_from(of) {
        all.iter().for_each(|m| *text += &format!("{} = {}, ", m.name.unwrap_or_default().display(), m.value));
    } else if let Ok(composite) = Composite::try_from(of) {
        for member in composite.iter() {
            let at = match member.attr {
                MemberAttr::Normal { offset } | MemberAttr::BitField { offset, .. } => offset,
            };
            *text += &format!("{}@{at}: ", member.name.unwrap_or_default().display());
            describe(btf.type_by_id(member.ty).expect("a member has a type"), btf, text, known);
        }
    }
}

/// A hash that is the same with every compiler: FNV-1a.
fn fnv(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
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

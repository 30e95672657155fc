//! Compiles the programs in bpf/, and generates Rust constants from the enums in their headers.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

/// The name in bpf/NAME.bpf.c and bpf/NAME.h, and the file of constants.
const PROGRAMS: [(&str, &str); 3] = [("lab", "places.rs"), ("flood", "flood.rs"), ("calls", "calls.rs")];

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets the target");
    for (name, constants) in PROGRAMS {
        SkeletonBuilder::new()
            .source(format!("bpf/{name}.bpf.c"))
            .obj(out.join(format!("{name}.bpf.o")))
            // Atomic fetch-and-add needs version 3 of the instruction set; <asm/types.h> is in a directory per architecture.
            .clang_args(["-mcpu=v3".into(), format!("-I/usr/include/{architecture}-linux-gnu")])
            .build()
            .expect("clang compiles bpf/ (Debian packages clang, libelf-dev, zlib1g-dev)");
        let header = fs::read_to_string(format!("bpf/{name}.h")).expect("the header is there");
        fs::write(out.join(constants), places(&header)).expect("OUT_DIR can be written to");
    }
}

/// Generates one constant for each name of each enum, counting from zero.
fn places(header: &str) -> String {
    let mut constants = String::new();
    for list in header.split("enum ").skip(1).filter_map(|after| after.split_once('{')?.1.split_once('}')) {
        let names = list.0.lines().filter_map(|line| line.trim().strip_suffix(','));
        for (place, name) in names.filter(|name| !name.contains(' ')).enumerate() {
            let _ = writeln!(constants, "pub const {name}: u32 = {place};");
        }
    }
    constants
}

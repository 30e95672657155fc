//! Compiles bpf/splice.bpf.c and generates the typed view of its maps.

use std::{env, path::PathBuf};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let bpf = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../bpf");
    // <asm/types.h> of Debian's multiarch layout
    let arch = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "aarch64-linux-gnu",
        _ => "x86_64-linux-gnu",
    };
    println!("cargo:rerun-if-changed={}", bpf.display());
    libbpf_cargo::SkeletonBuilder::new()
        .source(bpf.join("splice.bpf.c"))
        .clang_args(["-mcpu=v3", "-Wall", "-Werror", "-fno-strict-aliasing", "-I", &format!("/usr/include/{arch}")])
        .obj(out.join("splice.bpf.o"))
        .build_and_generate(out.join("splice.skel.rs"))
        .expect("bpf/splice.bpf.c compiles: clang 14 or newer, libelf-dev and linux-libc-dev are installed");
    #[cfg(feature = "model")]
    model(&bpf);
}

/// The decision logic for user space.
#[cfg(feature = "model")]
fn model(bpf: &std::path::Path) {
    println!("cargo:rerun-if-changed=model/model.c");
    cc::Build::new()
        .file("model/model.c")
        .include(bpf)
        .opt_level(2)
        .flag("-fno-strict-aliasing")
        .flag("-Wall")
        .flag("-Wextra")
        .compile("model");
}

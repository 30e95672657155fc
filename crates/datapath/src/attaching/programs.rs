//! The programs that are loaded in the kernel, and those that are attached to devices. BPF_PROG_GET_NEXT_ID and
//! BPF_PROG_GET_FD_BY_ID need CAP_SYS_ADMIN, and libbpf-rs takes a refusal for the end of the list. So a program lists them
//! (bpf/programs.bpf.c), which needs only what splicing needs anyway.

use crate::{
    attaching::load::load_object,
    error::{OpenError, kernel, refused},
};
use libbpf_rs::{Iter, ObjectBuilder};
use nix::libc;
use std::io::{self, Read};

pub(crate) const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/programs.bpf.o"));

/// A program that is loaded, in whatever network namespace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Loaded {
    pub id: u32,
    /// Id of its map `legs`, if it has one.
    pub legs: Option<u32>,
    pub name: String,
}

/// Lists all loaded programs.
pub(crate) fn loaded_programs() -> Result<Vec<Loaded>, OpenError> {
    let failed = |source| OpenError::Kernel { what: "list of programs", source };
    let open = ObjectBuilder::default().open_memory(OBJECT).map_err(kernel("open object"))?;
    let object = load_object(open)?;
    let lister = object.progs_mut().find(|p| p.name() == "list_programs").expect("the object has it");
    let link = lister.attach().map_err(kernel("list of programs"))?;
    let mut text = String::new();
    Iter::new(&link).map_err(kernel("list of programs"))?.read_to_string(&mut text).map_err(failed)?;
    list(&text).map_err(failed)
}

/// Reads the list. It contains the program that makes it, so a list without that one was not read to its end.
fn list(text: &str) -> io::Result<Vec<Loaded>> {
    let all: Vec<_> = text.lines().map(read).collect::<io::Result<_>>()?;
    let is_whole = all.iter().any(|p| p.name == "list_programs");
    if is_whole { Ok(all) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn read(line: &str) -> io::Result<Loaded> {
    let mut words = line.splitn(3, ' ');
    let mut number = || words.next()?.parse().ok();
    let read = (|| Some((number()?, number()?)))();
    let (id, legs) = read.ok_or_else(|| io::Error::other(format!("not understood: {line}")))?;
    Ok(Loaded { id, legs: Some(legs).filter(|id| *id != 0), name: words.next().unwrap_or_default().to_owned() })
}

/// Returns the ids of the programs that tcx runs on packets that arrive on a device, or leave by it. None if it has just gone.
pub(crate) fn attached_programs(index: u32, leave: bool) -> Result<Vec<u32>, OpenError> {
    let direction = if leave { libbpf_sys::BPF_TCX_EGRESS } else { libbpf_sys::BPF_TCX_INGRESS };
    let mut ids = [0u32; 64]; // the maximum: BPF_MPROG_MAX
    // SAFETY: bpf_prog_query_opts is plain data; all-zero but for its size and the room for numbers is valid.
    let mut opts: libbpf_sys::bpf_prog_query_opts = unsafe { std::mem::zeroed() };
    (opts.sz, opts.prog_ids) = (size_of_val(&opts) as _, ids.as_mut_ptr());
    opts.__bindgen_anon_1.count = ids.len() as u32;
    // SAFETY: `ids` has room for as many numbers as `opts` says, and both outlive the call.
    match unsafe { libbpf_sys::bpf_prog_query_opts(index as i32, direction, &mut opts) } {
        0.. => {}
        r if -r == libc::ENODEV => return Ok(Vec::new()),
        r => return Err(refused("ask for programs", -r)),
    }
    // SAFETY: both members of the union are the same integer.
    let n = unsafe { opts.__bindgen_anon_1.count };
    Ok(ids[..n as usize].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let of = |id, legs, name: &str| Loaded { id, legs, name: name.into() };
        assert_eq!(read("7 0 list_programs").unwrap(), of(7, None, "list_programs"));
        assert_eq!(read("4294967295 12 ingress").unwrap(), of(u32::MAX, Some(12), "ingress"));
        assert_eq!(read("8 0 ").unwrap(), of(8, None, ""));
        assert!(read("").is_err() && read("8").is_err() && read("x 0 y").is_err());
    }

    #[test]
    fn a_list_that_lacks_the_lister_is_no_list() {
        assert!(list("7 0 list_programs\n4 12 ingress\n").is_ok_and(|all| all.len() == 2));
        for cut in ["", "4 12 ingress\n", "7 0 list_programs\n4"] {
            assert!(list(cut).is_err(), "{cut:?}");
        }
    }

    #[test]
    #[ignore = "root"]
    fn what_is_loaded_is_listed() {
        let all = loaded_programs().unwrap();
        assert!(all.iter().any(|p| p.name == "list_programs" && p.legs.is_none()), "{all:?}");
        assert!(
            [false, true].iter().all(|leave| attached_programs(0x7fff_ffff, *leave).unwrap().is_empty()),
            "no device"
        );
    }
}

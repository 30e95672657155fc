//! Loads the programs, and finds out why loading fails: the verifier rejects a program, the kernel lacks a feature,
//! or a privilege is missing. Each has another remedy. The messages of the library and the verifier go to a file.

use crate::{
    OpenError, VerifierLog, kernel_release,
    requirements::missing_capabilities,
    skel::{OpenSpliceSkel, SpliceSkel},
    tables::maps::errno,
};
use libbpf_rs::{AsRawLibbpf, Object, OpenObject, PrintLevel, set_print, skel::OpenSkel};
use nix::{
    libc,
    sys::signal::{SigSet, SigmaskHow},
};
use std::{cell::RefCell, ffi::CStr, fmt::Write, fs, io, path::Path, sync::Once};

/// The file with the messages of the verifier and the library from the last failed load.
const LOG: &str = "/run/longsplice/verifier.log";
/// Size in bytes of the buffer for a verifier log. The log covers the
/// failing path, hundreds of lines; only the end of a longer log is kept.
const ROOM: usize = 1 << 20;

thread_local! {
    /// Messages of the load that this thread performs: the library prints from the thread that calls it.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn hear(_: PrintLevel, text: String) {
    let kept = SAID.with_borrow_mut(|said| said.as_mut().map(|s| s.push_str(&text)).is_some());
    if !kept {
        tracing::warn!("libbpf: {}", text.trim_end());
    }
}

/// Loads the programs of an object whose maps have their final sizes.
pub(crate) fn load<'o>(mut open: OpenSpliceSkel<'o>) -> Result<SpliceSkel<'o>, OpenError> {
    let mut attempt = Attempt::at(open.open_object_mut())?;
    attempt.hear(|| open.load()).map_err(|e| attempt.verdict(&e, Path::new(LOG)))
}

/// Loads the programs of another object.
pub(crate) fn load_object(mut open: OpenObject) -> Result<Object, OpenError> {
    let mut attempt = Attempt::at(&mut open)?;
    attempt.hear(|| open.load()).map_err(|e| attempt.verdict(&e, Path::new(LOG)))
}

/// One attempt to load, from its preparation to the reason for its failure.
struct Attempt {
    /// The name of each program and the verifier's log of it, which is empty unless the program is rejected.
    programs: Vec<(String, Vec<u8>)>,
    said: String,
}

impl Attempt {
    fn at(object: &mut OpenObject) -> Result<Attempt, OpenError> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            set_print(Some((PrintLevel::Warn, hear)));
        });
        let mut programs = Vec::new();
        for program in object.progs_mut() {
            let mut log = vec![0; ROOM];
            let p = program.as_libbpf_object().as_ptr();
            // SAFETY: the program is open; the buffer, whose size is passed, is not moved until the attempt is over, and
            // the library writes to it only during the load.
            let r = unsafe { libbpf_sys::bpf_program__set_log_buf(p, log.as_mut_ptr().cast(), ROOM as _) };
            if r < 0 {
                let source = io::Error::from_raw_os_error(-r);
                return Err(OpenError::Kernel { what: "room for the verifier's log", source });
            }
            programs.push((program.name().to_string_lossy().into_owned(), log));
        }
        Ok(Attempt { programs, said: String::new() })
    }

    fn hear<T>(&mut self, load: impl FnOnce() -> libbpf_rs::Result<T>) -> libbpf_rs::Result<T> {
        SAID.set(Some(String::new()));
        // The verifier gives up when a signal is pending (EAGAIN), and the library tries five times only.
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
        let result = load();
        mask.and_then(|mask| mask.thread_set_mask()).expect("a valid mask");
        self.said = SAID.take().unwrap_or_default();
        result
    }

    /// Returns the reason for the failure, and writes all messages to a file.
    fn verdict(&self, error: &libbpf_rs::Error, log: &Path) -> OpenError {
        let text = |log: &[u8]| CStr::from_bytes_until_nul(log).unwrap_or_default().to_string_lossy().into_owned();
        let refused = self.programs.iter().map(|(name, log)| (name, text(log))).find(|(_, log)| !log.trim().is_empty());
        let cause = cause(refused.as_ref().map(|(name, log)| (name.as_str(), log.as_str())), &self.said, errno(error));
        if matches!(cause, Cause::Privilege) || !missing_capabilities().is_empty() {
            return OpenError::Privilege; // without CAP_PERFMON, the verifier reports this
        }
        let mut all = self.said.clone();
        if let Some((name, log)) = refused {
            let _ = write!(all, "\nThe verifier of {} on {name}:\n{log}", kernel_release().0);
        }
        let kept = keep(log, &all);
        let release = kernel_release().0;
        match cause {
            Cause::Refused { program, why } => OpenError::Refused { release, program, why, log: kept },
            Cause::Lacks(what) => OpenError::Lacks { release, what, log: kept },
            Cause::Privilege => OpenError::Privilege,
            Cause::Other(n) => OpenError::Kernel { what: "load programs", source: io::Error::from_raw_os_error(n) },
        }
    }
}

/// Writes the log. Returns where it was written, or why it was not.
fn keep(path: &Path, text: &str) -> VerifierLog {
    let folder = path.parent().unwrap_or(Path::new("/"));
    match fs::create_dir_all(folder).and_then(|()| fs::write(path, text)) {
        Ok(()) => VerifierLog::Written(path.to_owned()),
        Err(error) => VerifierLog::Lost { path: path.to_owned(), error },
    }
}

#[derive(Debug, PartialEq)]
enum Cause {
    Refused { program: String, why: String },
    Lacks(String),
    Privilege,
    Other(i32),
}

/// Finds the cause from the verifier's log of a rejected program, the library's messages, and the errno of the load.
fn cause(refused: Option<(&str, &str)>, said: &str, errno: i32) -> Cause {
    if [libc::EAGAIN, libc::ENOMEM].contains(&errno) {
        return Cause::Other(errno); // the verifier did not finish, so its log says nothing about the program
    }
    if let Some((program, log)) = refused {
        // statistics come last; the error is before them
        let about = |l: &&str| {
            let l = l.trim();
            !l.is_empty()
                && !["processed ", "verification time", "stack depth", "subprog ", "mark_precise"]
                    .iter()
                    .any(|s| l.starts_with(s))
        };
        let why = log.lines().rev().find(about).unwrap_or_default().trim().to_owned();
        // a helper, a kernel function or the JIT compiler is missing
        let lacking = ["unknown func", "invalid func", "JIT is required", "does not support calling kernel function"];
        return match lacking.iter().any(|l| log.contains(l)) {
            true => Cause::Lacks(why),
            false => Cause::Refused { program: program.to_owned(), why },
        };
    }
    let lacking = ["not found in kernel or module BTFs", "valid kernel BTF", "kernel BTF is required"];
    if let Some(line) = said.lines().find(|l| lacking.iter().any(|w| l.contains(w))) {
        return Cause::Lacks(line.trim_start_matches("libbpf: ").to_owned());
    }
    match errno {
        libc::EPERM | libc::EACCES => Cause::Privilege,
        n => Cause::Other(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use libbpf_rs::ObjectBuilder;
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, Signal, sigaction};
    use std::{
        sync::atomic::{AtomicBool, Ordering::Relaxed},
        thread,
        time::Duration,
    };

    const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/splice.bpf.o"));

    #[test]
    fn refusals_are_told_apart() {
        let log = "1145: (db) r0 = atomic64_cmpxchg((u64 *)(r4 +24), r0, r9)\n\
                   misaligned value access off (0x0; 0x7fff)+0+24 size 8\n\
                   processed 1018 insns (limit 1000000) max_states_per_insn 4\n\n";
        let why = "misaligned value access off (0x0; 0x7fff)+0+24 size 8".to_owned();
        let refused = Cause::Refused { program: "early".into(), why };
        assert_eq!(cause(Some(("early", log)), "", libc::EACCES), refused);
        // since Linux 7.3 the statistics have a line for each function
        let functions =
            "stack depth max 368\nsubprog 0 (early) main insns_self 1000 insns_total 1018 stack 320\nprocessed 1018";
        let log = log.replace("processed 1018", functions);
        assert_eq!(cause(Some(("early", &log)), "", libc::EACCES), refused);
        let said =
            "libbpf: extern (func ksym) 'bpf_cast_to_kern_ctx': not found in kernel or module BTFs\nlibbpf: failed\n";
        let what = "extern (func ksym) 'bpf_cast_to_kern_ctx': not found in kernel or module BTFs";
        assert_eq!(cause(None, said, libc::EINVAL), Cause::Lacks(what.into()));
        let log = "JIT is required for calling kernel function\nprocessed 0 insns";
        assert_eq!(cause(Some(("ingress", log)), "", libc::ENOTSUP), Cause::Lacks(log.lines().next().unwrap().into()));
        assert_eq!(cause(None, "libbpf: Couldn't load trivial BPF program.\n", libc::EPERM), Cause::Privilege);
        let log = "579: (79) r8 = *(u64 *)(r0 +8)\nprocessed 581 insns";
        assert_eq!(cause(Some(("ingress", log)), "", libc::EAGAIN), Cause::Other(libc::EAGAIN));
        assert_eq!(cause(None, "", libc::ENOMEM), Cause::Other(libc::ENOMEM));
    }

    /// A thread that gets a signal every millisecond loads the programs.
    #[test]
    #[ignore = "root"]
    fn signals_do_not_stop_a_load() {
        extern "C" fn ignore(_: i32) {}
        let nothing = SigAction::new(SigHandler::Handler(ignore), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler does nothing, and no other test uses this signal.
        unsafe { sigaction(Signal::SIGUSR2, &nothing) }.unwrap();
        let (process, thread, over) = (std::process::id(), nix::unistd::gettid().as_raw(), AtomicBool::new(false));
        let mut object = ObjectBuilder::default().open_memory(OBJECT).unwrap();
        let mut attempt = Attempt::at(&mut object).unwrap();
        let loaded = thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    // SAFETY: this takes three numbers; the thread waits for this one.
                    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR2) };
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let loaded = attempt.hear(|| object.load()).map(drop);
            over.store(true, Relaxed);
            loaded
        });
        loaded.unwrap_or_else(|e| panic!("{}", attempt.verdict(&e, &std::env::temp_dir().join("signals.log"))));
    }

    /// Replaces the first instruction of `egress` by one that reads an uninitialized register.
    #[test]
    #[ignore = "root"]
    fn a_refusal_names_program_and_reason_and_its_log_is_kept() {
        let open = |bytes: &[u8]| ObjectBuilder::default().open_memory(bytes).unwrap();
        let code = {
            let object = open(OBJECT);
            let program = object.progs().find(|p| p.name() == "egress").unwrap();
            // SAFETY: an instruction is eight bytes of plain data, and `insns` are those of a program that is open.
            program
                .insns()
                .iter()
                .map(|i| unsafe { std::mem::transmute::<_, [u8; 8]>(*i) })
                .collect::<Vec<_>>()
                .concat()
        };
        let at: Vec<_> = (0..OBJECT.len() - 64).filter(|at| OBJECT[*at..][..64] == code[..64]).collect();
        assert_eq!(at.len(), 1, "the program stands in the object once");
        let mut wrong = OBJECT.to_vec();
        wrong[at[0]..][..8].copy_from_slice(&[0xbf, 0x30, 0, 0, 0, 0, 0, 0]); // r0 = r3
        let mut object = open(&wrong);
        let mut attempt = Attempt::at(&mut object).unwrap();
        let error = attempt.hear(|| object.load()).map(drop).unwrap_err();
        let folder = std::env::temp_dir().join(format!("longsplice-verifier-{}", std::process::id()));
        let log = folder.join("run/verifier.log");
        match attempt.verdict(&error, &log) {
            OpenError::Refused { program, why, log: VerifierLog::Written(path), .. } => {
                assert_eq!((program.as_str(), why.as_str(), &path), ("egress", "R3 !read_ok", &log));
                let text = fs::read_to_string(&log).unwrap();
                assert!(text.contains("on egress:\n") && text.contains("R3 !read_ok"), "{text}");
            }
            other => panic!("{other:?}"),
        }
        fs::remove_dir_all(folder).unwrap();
    }
}

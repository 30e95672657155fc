//! The program `longsplice-bench`: measures what splicing saves ([`bench`]),
//! demonstrates it ([`demo`]), and provides a network to try it in ([`shell`]).

mod args;
mod bench;
mod cell;
mod demo;
mod plot;
mod shell;

use args::{Args, Command};
use clap::Parser;
use std::{
    cell::RefCell,
    env,
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.command {
        None => bench::bench(&args.bench),
        Some(Command::Demo(demo)) => demo::demo(demo),
        Some(Command::Gate(gate)) => bench::gate::gate(gate),
        Some(Command::Reloads(reloads)) => bench::reloads::reloads(reloads),
        Some(Command::Shell) => shell::shell(),
    };
    longsplice::exit_code("longsplice-bench", outcome)
}

thread_local! {
    /// See [`with_program`].
    static PROGRAM: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// Does this with another `longsplice`.
fn with_program<T>(program: &Path, work: impl FnOnce() -> T) -> T {
    PROGRAM.replace(Some(program.to_owned()));
    let done = work();
    PROGRAM.take();
    done
}

/// The `longsplice` to run: the one built together with this program, or that of [`with_program`].
fn program() -> Result<PathBuf, Box<dyn Error>> {
    if let Some(program) = PROGRAM.with_borrow(Clone::clone) {
        return Ok(program);
    }
    let program = env::current_exe()?.with_file_name("longsplice");
    if !program.exists() {
        return Err(format!("{} does not exist: build it too, with -p longsplice", program.display()).into());
    }
    Ok(program)
}

/// To be called before namespaces are made, which needs root. Catches Ctrl-C, SIGTERM, and the end of the terminal, which must not
/// leave namespaces and pinned links behind.
fn watch_interrupts() -> Result<Arc<AtomicBool>, Box<dyn Error>> {
    if !nix::unistd::Uid::effective().is_root() {
        return Err("this makes network namespaces: run it as root".into());
    }
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let context = runtime.enter();
    let [mut interrupt, mut terminate, mut hangup] =
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    drop(context);
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            set.store(true, Relaxed);
        });
    });
    Ok(flag)
}

//! The program as a library: `longsplice run` and what an operator needs around it.
//!
//! `args` is the only table of flags; help texts and man page (`man`) come from there. `run` is the proxy itself,
//! `control` its Unix socket, `client`, `ls`, `inspect` and `trace` the other end of that socket; `doctor` stands alone.
//! What else is public is for `longsplice-bench`, which watches proxies through their control sockets.

mod args;
mod client;
mod control;
mod doctor;
mod inspect;
mod ls;
mod man;
mod paths;
mod run;
mod trace;

pub use client::{AskError, Client};
pub use control::Ask;
pub use ls::{Row, bytes, flows};
pub use paths::{netns_inode, pin_folder};

use args::{Args, Command};
use clap::Parser;
use std::{error::Error, io, process::ExitCode};

/// The program: reads its arguments, and does what they say.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let control = args.control.as_deref();
    let outcome = match &args.command {
        Command::Run(run) => run::run(run, control, args.verbose),
        Command::Ls(args) => ls::ls(control, args),
        Command::Inspect(args) => inspect::inspect(control, args),
        Command::Trace(args) => trace::trace(control, args),
        Command::Splice(flow) => client::splice(control, flow.id),
        Command::Unsplice(flow) => client::unsplice(control, flow.id),
        Command::Counters(json) => client::counters(control, json.json),
        Command::Stop(stop) => client::stop(control, stop),
        Command::Doctor(json) => doctor::doctor(json.json),
        Command::Man => man::man(),
    };
    exit_code("longsplice", outcome)
}

/// What every subcommand gives: an exit code, or a message that names the place and the cure.
pub type Outcome = Result<ExitCode, Box<dyn Error>>;

/// How the program ends. It prints the message, with its name in front.
pub fn exit_code(program: &str, outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(code) => code,
        // Like `longsplice ls | head`: whoever read us has seen enough.
        Err(e) if is_broken_pipe(&*e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{program}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(e: &(dyn Error + 'static)) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

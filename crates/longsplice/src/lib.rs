//! The program as a library: `longsplice run` and the operator's commands.
//!
//! `args` is the only table of flags; the help texts, man pages and completions (`man`) are generated from it. `run` is the
//! proxy itself, `control` its Unix socket, and `haproxy` another one, for tools of HAProxy; `client`, `ls`, `inspect`, `trace`
//! and `events` are the client side of that socket; `doctor` stands alone. Other public items are for `longsplice-bench`, which
//! observes proxies through their control sockets.

mod admin;
mod args;
mod client;
mod configuring;
mod control;
mod doctor;
mod events;
mod farm;
mod handing;
mod haproxy;
mod import;
mod inspect;
mod ls;
mod man;
mod memory;
mod metrics;
mod paths;
mod pools;
mod run;
mod socket_file;
mod supervisor;
mod telling;
mod tpot;
mod trace;
mod which;

pub use client::{AskError, Client};
pub use control::Ask;
pub use ls::{Row, bytes, flows};
pub use paths::{netns_inode, pin_folder};
pub use which::Which;

use args::{Args, Command, RunArgs};
use clap::Parser;
use std::{error::Error, io, process::ExitCode};

/// Runs the program: parses the arguments and executes the subcommand.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let (control, verbose) = (args.control.as_deref(), args.verbose);
    let outcome = match &args.command {
        Command::Run(run) => run::run(run, control, verbose),
        Command::Check(run) => run::run(&RunArgs { check: true, ..(**run).clone() }, control, verbose),
        Command::Ls(args) => ls::ls(control, args),
        Command::Inspect(args) => inspect::inspect(control, args),
        Command::Trace(args) => trace::trace(control, args),
        Command::Splice(flow) => client::splice(control, flow.id),
        Command::Unsplice(flow) => client::unsplice(control, flow.id),
        Command::Kill(args) => client::kill(control, args),
        Command::Release(args) => client::release(control, args),
        Command::Events(args) => events::events(control, args),
        Command::Pools(json) => pools::pools(control, json.json),
        Command::Drain(args) => {
            pools::tell(control, Ask::Drain { member: args.of.member.clone(), maintenance: args.maintenance })
        }
        Command::Undrain(args) => pools::tell(control, Ask::Undrain { member: args.member.clone() }),
        Command::Weight(args) => {
            pools::tell(control, Ask::Weight { member: args.of.member.clone(), weight: args.weight })
        }
        Command::Pause(args) => client::pause(control, args, true),
        Command::Resume(args) => client::pause(control, args, false),
        Command::Counters(json) => client::counters(control, json.json),
        Command::Reload(args) => client::reload(control, args.enforce),
        Command::Upgrade(args) => client::upgrade(control, args),
        Command::Purge(args) => client::purge(control, args),
        Command::Rule(args) => client::rule(control, args),
        Command::Stop(stop) => client::stop(control, stop),
        Command::Tpot(args) => tpot::tpot(args, verbose),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Import(args) => import::import(args),
        Command::Man(args) => man::man(args.page),
        Command::Completions { shell } => man::completions(*shell),
    };
    exit_code("longsplice", outcome)
}

/// The result of a subcommand: an exit code, or a message that names the place of the error and its remedy.
pub type Outcome = Result<ExitCode, Box<dyn Error>>;

/// Turns the result into an exit code, and prints an error with the program's name in front.
pub fn exit_code(program: &str, outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(code) => code,
        // As in `longsplice ls | head`: the reader has seen enough.
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

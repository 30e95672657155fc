//! The program: `longsplice run` and what an operator needs around it.
//!
//! `args` is the only table of flags; help texts and man page (`man`) come from there. `run` is the proxy itself,
//! `control` its Unix socket, `client`, `ls`, `inspect` and `trace` the other end of that socket; `doctor`, `demo`,
//! `bench` and `shell` stand alone.

mod args;
mod bench;
mod client;
mod control;
mod demo;
mod doctor;
mod inspect;
mod ls;
mod man;
mod paths;
mod run;
mod shell;
mod trace;

use args::{Args, Command, LabCommand};
use clap::Parser;
use std::{error::Error, io, process::ExitCode};

fn main() -> ExitCode {
    let args = Args::parse();
    let control = args.control.as_deref();
    let result = match &args.command {
        Command::Run(run) => run::run(run, control, args.verbose),
        Command::Ls(args) => ls::ls(control, args),
        Command::Inspect(args) => inspect::inspect(control, args),
        Command::Trace(args) => trace::trace(control, args),
        Command::Splice(flow) => client::splice(control, flow.id),
        Command::Unsplice(flow) => client::unsplice(control, flow.id),
        Command::Counters(json) => client::counters(control, json.json),
        Command::Stop(stop) => client::stop(control, stop),
        Command::Doctor(json) => doctor::doctor(json.json),
        Command::Demo(demo) => demo::demo(demo),
        Command::Bench(bench) => bench::bench(bench),
        Command::Man => man::man(),
        Command::Lab(lab) => match lab.command {
            LabCommand::Shell => shell::shell(),
        },
    };
    match result {
        Ok(code) => code,
        // Like `longsplice ls | head`: whoever read us has seen enough.
        Err(e) if is_broken_pipe(&*e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("longsplice: {e}");
            ExitCode::FAILURE
        }
    }
}

/// What every subcommand gives: an exit code, or a message that names the place and the cure.
type Outcome = Result<ExitCode, Box<dyn Error>>;

fn is_broken_pipe(e: &(dyn Error + 'static)) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

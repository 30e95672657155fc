//! The program: `longsplice run` and what an operator needs around it.
//!
//! `args` is the only table of flags; help texts, man page and this list come from there. `run` is the proxy itself,
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
mod paths;
mod run;
mod shell;
mod trace;

use args::{Args, Command, LabCommand};
use clap::{CommandFactory, Parser};
use std::{
    error::Error,
    io::{self, Write},
    process::ExitCode,
};

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
        Command::Man => man(),
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

/// One page for all subcommands: eight pages of one paragraph each would help nobody.
fn man() -> Outcome {
    let mut page = Vec::new();
    let mut command = Args::command();
    command.build();
    let man = clap_mangen::Man::new(command.clone());
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    let subcommands = command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
    for subcommand in subcommands {
        writeln!(page, ".SH \"LONGSPLICE {}\"", subcommand.get_name().to_uppercase())?;
        // What holds for all of them has been said above.
        let own =
            subcommand.clone().mut_args(|a| if a.is_global_set() || a.get_id() == "help" { a.hide(true) } else { a });
        let man = clap_mangen::Man::new(own);
        let mut part = Vec::new();
        man.render_synopsis_section(&mut part)?;
        man.render_description_section(&mut part)?;
        man.render_options_section(&mut part)?;
        page.extend(as_subsections(&part));
    }
    page.extend_from_slice(args::MAN_TAIL.as_bytes());
    io::stdout().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}

/// Sections of a subcommand become subsections of the page.
fn as_subsections(part: &[u8]) -> Vec<u8> {
    String::from_utf8_lossy(part).replace("\n.SH ", "\n.SS ").replacen(".SH ", ".SS ", 1).into_bytes()
}

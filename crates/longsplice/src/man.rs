//! What is made of clap's table and of docs/ for whoever installs the program: man pages, and completions for shells.

mod page;

use crate::{
    Outcome,
    args::{Args, MAN_TAIL, ManPage},
};
use clap::CommandFactory;
use clap_complete::Shell;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// The reference of the configuration file. A test in the proxy crate compares it with the types.
const REFERENCE: &str = include_str!("../../../docs/configuration.md");

/// `longsplice man`: prints a man page.
pub fn man(page: ManPage) -> Outcome {
    let page = match page {
        ManPage::Program => program()?,
        ManPage::File => page::page("longsplice.toml", "configuration of longsplice(1)", REFERENCE).into_bytes(),
    };
    io::stdout().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}

/// `longsplice completions`: prints what makes a shell complete commands and flags.
pub fn completions(shell: Shell) -> Outcome {
    // Written whole: a reader that ends early is no error, but clap_complete would panic.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "longsplice", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// longsplice(1): one page for all subcommands, because each would fill only a paragraph.
fn program() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let mut command = Args::command();
    command.build();
    let man = clap_mangen::Man::new(command.clone());
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    let subcommands = |c: &clap::Command| -> Vec<_> {
        c.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help").cloned().collect()
    };
    for subcommand in subcommands(&command).iter().flat_map(|c| [vec![c.clone()], subcommands(c)].concat()) {
        let name = subcommand.get_bin_name().unwrap_or(subcommand.get_name());
        writeln!(page, ".SH \"{}\"", name.to_uppercase())?;
        // Global options are already described above.
        // Those of `check` are those of `run`.
        let again = subcommand.get_name() == "check";
        let is_told = |a: &clap::Arg| again || a.is_global_set() || a.get_id() == "help";
        let own = subcommand.clone().mut_args(|a| if is_told(&a) { a.hide(true) } else { a });
        let man = clap_mangen::Man::new(own);
        let mut part = Vec::new();
        man.render_synopsis_section(&mut part)?;
        man.render_description_section(&mut part)?;
        man.render_options_section(&mut part)?;
        page.extend(as_subsections(&part));
    }
    page.extend_from_slice(MAN_TAIL.as_bytes());
    Ok(page)
}

/// Turns the sections of a subcommand into subsections of the page.
fn as_subsections(part: &[u8]) -> Vec<u8> {
    String::from_utf8_lossy(part).replace("\n.SH ", "\n.SS ").replacen(".SH ", ".SS ", 1).into_bytes()
}

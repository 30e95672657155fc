//! The man page: commands and flags from clap's table, configuration keys from docs/configuration.md.

use crate::{
    Outcome,
    args::{Args, MAN_TAIL},
};
use clap::CommandFactory;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// The reference of the configuration file. A test in the proxy crate compares it with the types.
const REFERENCE: &str = include_str!("../../../docs/configuration.md");

/// `longsplice man`: one page for all subcommands, because each would fill only a paragraph.
pub fn man() -> Outcome {
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
    page.extend(configuration().into_bytes());
    page.extend_from_slice(MAN_TAIL.as_bytes());
    io::stdout().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}

/// Turns the sections of a subcommand into subsections of the page.
fn as_subsections(part: &[u8]) -> Vec<u8> {
    String::from_utf8_lossy(part).replace("\n.SH ", "\n.SS ").replacen(".SH ", ".SS ", 1).into_bytes()
}

/// The section on configuration: where the reference is, and the top-level keys of the file.
fn configuration() -> String {
    let mut section = String::from(
        ".SH \"CONFIGURATION FILE\"\n\
         \\fBlongsplice run \\-\\-config\\fR \\fIFILE\\fR reads a TOML file. docs/configuration.md in the source of longsplice\n\
         describes all of its tables and keys, with examples. These are the keys at the top level:\n",
    );
    for (key, default, meaning) in top_level() {
        section += &format!(".TP\n\\fB{}\\fR (default: {})\n{}\n", roff(key), roff(default), roff(meaning));
    }
    section
}

/// Key, default and meaning from the first table of the page.
fn top_level() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let section = REFERENCE.split("\n## Top level\n").nth(1).and_then(|rest| rest.split("\n#").next());
    section.unwrap_or_default().lines().filter(|line| line.starts_with("| `")).filter_map(|line| {
        let mut cells = line.split('|').map(str::trim);
        let (key, default) = (cells.nth(1)?, cells.nth(1)?);
        Some((key, default, cells.next()?))
    })
}

/// Converts Markdown to roff: links are reduced to their text, code
/// is not marked up, and roff's special characters are escaped.
fn roff(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once("](") {
        let (before, words) = before.rsplit_once('[').unwrap_or((before, ""));
        text = text + before + words;
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    (text + rest).replace('`', "").replace('\\', "\\e").replace('-', "\\-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_becomes_roff() {
        assert_eq!(
            roff("one `[[listener]]` per `a-b`; see [there](#there)."),
            "one [[listener]] per a\\-b; see there."
        );
        assert_eq!(roff("the [log](#log), and [pools](#pools)."), "the log, and pools.");
        assert_eq!(roff("`'\\.png'`"), "'\\e.png'");
    }

    #[test]
    fn the_keys_of_the_top_level_are_found() {
        let keys: Vec<_> = top_level().map(|(key, ..)| key).collect();
        assert!(keys.contains(&"`listener`") && keys.contains(&"`leave_flows_on_stop`"), "{keys:?}");
        assert!(!keys.contains(&"`format`"), "of the next table: {keys:?}");
        let section = configuration();
        assert!(section.contains(".TP\n\\fBconnections\\fR (default: 65536)\n"), "{section}");
        // a line that starts like this would be a roff request
        assert!(
            section
                .lines()
                .all(|l| !l.starts_with('\'') && (!l.starts_with('.') || l.starts_with(".TP") || l.starts_with(".SH")))
        );
    }
}

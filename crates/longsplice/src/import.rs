//! `longsplice import`: reads the configuration of another proxy, and writes ours.
//!
//! Each format is read by one file, into a [`model::Site`]. What our configuration cannot say becomes a comment; what would
//! make a listener more open than it was becomes a rule that denies.

mod dante;
mod haproxy;
mod model;
mod nginx;
mod rules;
mod three_proxy;
mod values;
mod write;

use crate::Outcome;
use clap::ValueEnum;
use longsplice_proxy::Config;
use model::{Mistake, Site};
use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Longest file in bytes: the largest ones that are written by programs have a megabyte.
const FILE_MAX: u64 = 8 << 20;
/// Most lines of it.
const LINES_MAX: usize = 100_000;
/// Longest line in bytes: HAProxy itself reads 2048, and lists of addresses are longer.
const LINE_MAX: usize = 65536;

/// Arguments of `longsplice import`.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The file of the other proxy.
    pub file: PathBuf,

    /// What it was written for [default: what its lines look like].
    #[arg(long, value_name = "PROXY")]
    pub from: Option<Format>,
}

/// Formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// haproxy.cfg: TCP mode, and HTTP mode without TLS.
    Haproxy,
    /// danted.conf or sockd.conf.
    Dante,
    /// 3proxy.cfg: proxy, socks and tcppm.
    #[value(name = "3proxy")]
    ThreeProxy,
    /// nginx.conf: its block `stream`.
    Nginx,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::Haproxy => "HAProxy",
            Format::Dante => "Dante",
            Format::ThreeProxy => "3proxy",
            Format::Nginx => "nginx",
        }
    }
}

/// `longsplice import`: prints a configuration.
pub fn import(args: &ImportArgs) -> Outcome {
    let file = args.file.display();
    let mut bytes = Vec::new();
    let read = File::open(&args.file).and_then(|open| open.take(FILE_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|e| format!("{file}: {e}"))?;
    let name = args.file.file_name().unwrap_or_default().to_string_lossy();
    let written =
        translate(&bytes, args.from, &name).map_err(|Mistake { line, what }| format!("{file}:{line}: {what}"))?;
    io::stdout().write_all(written.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Translates a file with this name.
fn translate(bytes: &[u8], from: Option<Format>, name: &str) -> Result<String, Mistake> {
    let text = text(bytes)?;
    let from = from.map_or_else(|| recognise(&text), Ok)?;
    let mut site = match from {
        Format::Haproxy => haproxy::translate(&text),
        Format::Dante => dante::translate(&text),
        Format::ThreeProxy => three_proxy::translate(&text),
        Format::Nginx => nginx::translate(&text),
    }?;
    site.finish()?;
    if site.listeners.is_empty() {
        return Err(nothing(&site, from));
    }
    let written = write::write(&site, &format!("{name} ({})", from.name()));
    // Nobody gets a file that the program does not start with.
    match Config::from_toml(&written, Path::new("translation")) {
        Ok(_) => Ok(written),
        Err(e) => Err(Mistake::new(1, format!("what it says cannot be a configuration: {e}"))),
    }
}

/// Why there is nothing to write.
fn nothing(site: &Site, from: Format) -> Mistake {
    let mut notes = site.notes.0.clone();
    notes.sort_by_key(|(line, _)| *line);
    let whys: Vec<String> = notes.iter().rev().take(3).rev().map(|(line, why)| format!("line {line}: {why}")).collect();
    let why = if whys.is_empty() { String::new() } else { format!(". Of what was left out: {}", whys.join("; ")) };
    let line = notes.first().map_or(1, |(line, _)| *line);
    Mistake::new(line, format!("as a file of {}, it has nothing to listen on that can be translated{why}", from.name()))
}

/// Checks that it is text of a reasonable size.
fn text(bytes: &[u8]) -> Result<String, Mistake> {
    let line_of = |at: usize| 1 + bytes[..at].iter().filter(|b| **b == b'\n').count();
    if bytes.len() as u64 > FILE_MAX {
        return Err(Mistake::new(
            1,
            format!("more than {} MB: no file that is written by hand is so long", FILE_MAX >> 20),
        ));
    }
    if let Some(at) = bytes.iter().position(|b| *b == 0) {
        return Err(Mistake::new(line_of(at), "a zero byte: this is no text, or UTF-16 (iconv -t UTF-8 changes it)"));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Mistake::new(line_of(e.valid_up_to()), "this is not UTF-8 (iconv -t UTF-8 changes it)"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (number, line) in (1..).zip(text.lines()) {
        if line.len() > LINE_MAX {
            return Err(Mistake::new(number, format!("a line of more than {LINE_MAX} bytes")));
        }
        if number > LINES_MAX {
            return Err(Mistake::new(number, format!("more than {LINES_MAX} lines")));
        }
    }
    Ok(text.to_owned())
}

/// Finds out what a file was written for, by how many lines look so.
fn recognise(text: &str) -> Result<Format, Mistake> {
    let mut votes = [(Format::Haproxy, 0), (Format::Dante, 0), (Format::ThreeProxy, 0), (Format::Nginx, 0)];
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let is_at_start = !line.starts_with([' ', '\t']);
        let of = match first {
            "global" | "defaults" if is_at_start && !line.contains('{') => Some(0),
            "frontend" | "backend" | "listen" if is_at_start && !line.contains([';', '{']) => Some(0),
            "use_backend" | "default_backend" | "bind" | "mode" | "balance" | "timeout" if !line.ends_with(';') => {
                Some(0)
            }
            "client" | "socks" if ["pass", "block"].contains(&second.trim_end_matches('{')) => Some(1),
            "pass" | "block" if second.starts_with('{') => Some(1),
            _ if [
                "internal:",
                "external:",
                "socksmethod:",
                "clientmethod:",
                "method:",
                "logoutput:",
                "user.privileged:",
            ]
            .iter()
            .any(|name| first.starts_with(name)) =>
            {
                Some(1)
            }
            "proxy" | "socks" | "tcppm" | "auth" | "allow" | "deny" | "nserver" | "nscache" | "users" | "internal"
            | "external" | "flush" | "maxconn"
                if is_at_start && !line.ends_with([';', '{']) =>
            {
                Some(2)
            }
            "stream" | "upstream" | "server" | "events" | "http" if line.contains('{') => Some(3),
            "proxy_pass" | "listen" | "server" | "worker_processes" if line.contains(';') => Some(3),
            _ => None,
        };
        if let Some(of) = of {
            votes[of].1 += 1;
        }
    }
    votes.sort_by_key(|(_, votes)| std::cmp::Reverse(*votes));
    match votes {
        [(format, most), (_, second), ..] if most > second => Ok(format),
        _ => Err(Mistake::new(
            1,
            "it is not clear what this was written for: give --from haproxy, dante, 3proxy or nginx",
        )),
    }
}

/// Whether a listener of HTTP, and a pool, may have these keys.
fn is_valid(listener: &str, pool: &str) -> bool {
    let to = if listener.contains("route = ") { "" } else { "\nroute = [{ pool = \"p\" }]" };
    let listener = format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:1\"\n{listener}{to}\n");
    Config::from_toml(&format!("{listener}[pool.p]\nservers = [\"127.0.0.1:2\"]\n{pool}\n"), Path::new("part")).is_ok()
}

/// Whether routes may have this expression.
fn is_expression(text: &str) -> bool {
    is_valid(&format!("route = [{{ pool = \"p\", path_regex = {} }}]", values::quote(text)), "")
}

#[cfg(test)]
mod tests;

//! The language of HAProxy's runtime socket, as its management guide describes it (2.6 and 3.0): what operators and their tools
//! ask there. This only reads; the program answers.
//!
//! A request is a line of commands, separated by `;`, of words, separated by spaces. A backslash takes the meaning from what
//! follows it. What HAProxy has and we have not is [`Refused`] with the reason, so that whoever asks learns more than that it
//! is unknown.

use std::{
    borrow::Cow,
    fmt::{self, Display, Write},
    time::Duration,
};

/// Longest line in bytes, with its end: the buffer of HAProxy (`tune.bufsize`), so that tools keep to it.
pub const LINE_MAX: usize = 16384;
/// Most commands in a line. A line has room for some hundred that name a server; more of shorter ones only make work.
pub const COMMANDS_MAX: usize = 512;
/// Most words of a command, as in HAProxy. The longest that is known here has seven.
const WORDS_MAX: usize = 64;
/// Longest time that a client may be silent if it asks for that: an operator at lunch.
const SILENCE_MAX: Duration = Duration::from_secs(3600);
/// Most that HAProxy takes for a weight.
const WEIGHT_MAX: u32 = 256;

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// List the commands.
    Help,
    /// Go on after this line, and prompt; or not any more.
    Prompt,
    /// Hang up.
    Quit,
    /// How long the client may be silent.
    SetTimeout(Duration),
    /// What the process is and does.
    ShowInfo(Form),
    /// Figures of listeners, pools and servers.
    ShowStat(Stat),
    /// Connections; a number: this one.
    ShowSess(Option<u64>),
    /// State of servers, of all pools or of one.
    ShowServersState(Option<Name>),
    /// Connections of servers, likewise.
    ShowServersConn(Option<Name>),
    /// Names of pools.
    ShowBackend,
    /// Pools of memory.
    ShowPools,
    /// The version.
    ShowVersion,
    /// What the client may do.
    ShowCliLevel,
    /// Where clients may ask.
    ShowCliSockets,
    /// Whether a server takes anything new.
    SetState(Server, State),
    /// Its share.
    SetWeight(Server, Weight),
    /// The same, asked.
    GetWeight(Server),
    /// End a connection.
    ShutdownSession(u64),
    /// End those of a server.
    ShutdownSessions(Server),
}

/// A pool or a listener, or a server of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// By its name.
    Called(String),
    /// By its number in `show stat`.
    Numbered(u32),
}

/// A server of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The pool.
    pub backend: Name,
    /// The server.
    pub server: Name,
}

/// What a server is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// To take its share.
    Ready,
    /// To take nothing new.
    Drain,
    /// The same, while somebody works on it.
    Maint,
}

/// A weight that a server is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// This one: 0 to 256.
    Of(u16),
    /// This part of the one in the configuration.
    Percent(u32),
}

impl Weight {
    /// Returns the weight of a server that has this one in the configuration.
    pub fn of(self, configured: u32) -> u16 {
        match self {
            Weight::Of(weight) => weight,
            Weight::Percent(percent) => (configured * percent / 100).min(WEIGHT_MAX) as u16,
        }
    }
}

/// How an answer is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Form {
    /// Its format.
    pub format: Format,
    /// With a description of each field.
    pub described: bool,
}

/// The format of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// CSV, or lines of `NAME: VALUE`.
    #[default]
    Plain,
    /// A line for each field, with its type and nature.
    Typed,
    /// The same in JSON.
    Json,
}

/// What of the figures is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// Of this one; none: all.
    pub of: Option<Name>,
    /// 1: of listeners, 2: of pools, 4: of servers; sums of these.
    pub kinds: u32,
    /// Of the server with this number; none: all.
    pub sid: Option<u32>,
    /// Only of those that are up.
    pub only_up: bool,
    /// Only of those that nobody works on.
    pub no_maint: bool,
    /// How it is written.
    pub form: Form,
}

impl Default for Stat {
    fn default() -> Stat {
        Stat { of: None, kinds: u32::MAX, sid: None, only_up: false, no_maint: false, form: Form::default() }
    }
}

/// Why a command is not obeyed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// It is none.
    Unknown,
    /// What is wrong with it, as HAProxy says it where it does.
    Because(Cow<'static, str>),
}

/// A line has more than [`COMMANDS_MAX`] commands, or is longer than [`LINE_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMuch;

/// What is needed besides the name of a server.
const NO_SERVER: Refused = because("Require 'backend/server'.");
/// What `set server` may be about.
const USAGE: Refused = because("usage: set server <backend>/<server> state | weight");

const fn because(why: &'static str) -> Refused {
    Refused::Because(Cow::Borrowed(why))
}

/// Takes a line, without its end, apart into commands, and these into words. Empty commands are left out.
pub fn split(line: &[u8]) -> Result<Vec<Vec<String>>, TooMuch> {
    if line.len() >= LINE_MAX {
        return Err(TooMuch);
    }
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), Vec::new());
    let mut bytes = line.iter().copied();
    loop {
        let byte = bytes.next();
        match byte {
            Some(b'\\') => word.extend(bytes.next()),
            Some(b) if b != b';' && !b.is_ascii_whitespace() => word.push(b),
            _ => {
                if !word.is_empty() {
                    words.push(String::from_utf8_lossy(&std::mem::take(&mut word)).into_owned());
                }
                if byte.is_none_or(|b| b == b';') && !words.is_empty() {
                    commands.push(std::mem::take(&mut words));
                }
                if commands.len() > COMMANDS_MAX {
                    return Err(TooMuch);
                }
                if byte.is_none() {
                    return Ok(commands);
                }
            }
        }
    }
}

/// Reads a command from its words.
pub fn parse(words: &[String]) -> Result<Command, Refused> {
    if words.len() > WORDS_MAX {
        return Err(Refused::Unknown);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Ok(match &words[..] {
        ["help", ..] => Command::Help,
        ["prompt", ..] => Command::Prompt,
        ["quit", ..] => Command::Quit,
        ["show", "info", words @ ..] => Command::ShowInfo(form(words)),
        ["show", "stat", words @ ..] => Command::ShowStat(stat(words)?),
        ["show", "sess"] | ["show", "sess", "all", ..] => Command::ShowSess(None),
        ["show", "sess", id, ..] => Command::ShowSess(Some(number(id).unwrap_or(0))), // there is no such one
        ["show", "servers", "state", of @ ..] => Command::ShowServersState(of.first().map(|of| name(of))),
        ["show", "servers", "conn", of @ ..] => Command::ShowServersConn(of.first().map(|of| name(of))),
        ["show", "backend", ..] => Command::ShowBackend,
        ["show", "pools", ..] => Command::ShowPools,
        ["show", "version", ..] => Command::ShowVersion,
        ["show", "cli", "level", ..] => Command::ShowCliLevel,
        ["show", "cli", "sockets", ..] => Command::ShowCliSockets,
        ["set", "server", words @ ..] => set_server(words)?,
        ["set", "weight", words @ ..] => {
            let server = server(words.first())?;
            Command::SetWeight(server, weight(words.get(1))?)
        }
        ["get", "weight", words @ ..] => Command::GetWeight(server(words.first())?),
        ["enable", "server", words @ ..] => Command::SetState(server(words.first())?, State::Ready),
        ["disable", "server", words @ ..] => Command::SetState(server(words.first())?, State::Maint),
        ["shutdown", "session", words @ ..] => {
            let id = words.first().and_then(|id| number(id));
            Command::ShutdownSession(id.ok_or(because("Session pointer expected (use 'show sess')."))?)
        }
        ["shutdown", "sessions", "server", words @ ..] => Command::ShutdownSessions(server(words.first())?),
        ["set", "timeout", words @ ..] => timeout(words)?,
        _ => return Err(missing(&words)),
    })
}

/// Returns why something is not done that HAProxy does.
fn missing(words: &[&str]) -> Refused {
    because(match words {
        ["set", "maxconn", "server", ..] => {
            "A limit of connections cannot be set at run time: write max_connections of the server, and reload."
        }
        ["set", "maxconn", "frontend", ..] => {
            "A limit of connections cannot be set at run time: write limits.connections of the listener, and reload."
        }
        ["set", "maxconn", ..] => "A limit of connections cannot be set at run time: write connections, and reload.",
        ["enable" | "disable" | "shutdown", "frontend", ..] => {
            "A listener cannot be paused: remove it from the configuration, and reload."
        }
        ["enable" | "disable", "health", ..] => {
            "Checks cannot be switched on and off: in the state maint, a server is not checked."
        }
        ["enable" | "disable", "agent", ..] => "There are no agents.",
        ["clear", "counters", ..] => "Counters cannot be cleared: they begin with the process.",
        ["show", "schema", "json", ..] => "There is no schema: the JSON is as in HAProxy.",
        ["operator" | "user", ..] => "There is one level: whoever can open this socket may use all of it.",
        _ => return Refused::Unknown,
    })
}

fn name(word: &str) -> Name {
    let number = word.strip_prefix('#').and_then(|digits| digits.parse().ok());
    number.map_or_else(|| Name::Called(word.to_owned()), Name::Numbered)
}

/// Reads `POOL/SERVER`. A pool may have `/` in its name, an address of a server has none.
fn server(word: Option<&&str>) -> Result<Server, Refused> {
    let (backend, server) = word.and_then(|word| word.rsplit_once('/')).ok_or(NO_SERVER)?;
    if backend.is_empty() || server.is_empty() {
        return Err(NO_SERVER);
    }
    Ok(Server { backend: name(backend), server: name(server) })
}

fn set_server(words: &[&str]) -> Result<Command, Refused> {
    let server = server(words.first())?;
    match &words[1..] {
        ["state", state, ..] => {
            let state = match *state {
                "ready" => State::Ready,
                "drain" => State::Drain,
                "maint" => State::Maint,
                _ => return Err(because("'set server <srv> state' expects 'ready', 'drain' and 'maint'.")),
            };
            Ok(Command::SetState(server, state))
        }
        ["state"] => Err(because("'set server <srv> state' expects 'ready', 'drain' and 'maint'.")),
        ["weight", words @ ..] => Ok(Command::SetWeight(server, weight(words.first())?)),
        ["health", ..] => Err(because("Health cannot be set: checks, connections and requests tell it.")),
        ["addr" | "fqdn", ..] => {
            Err(because("An address cannot be set at run time: write another server into the pool, and reload."))
        }
        _ => Err(USAGE),
    }
}

fn weight(word: Option<&&str>) -> Result<Weight, Refused> {
    let word = word.ok_or(because("Require <weight> or <weight%>."))?;
    let digits = word.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = word.split_at(digits);
    match (number, rest) {
        ("", rest) if rest.starts_with('-') && rest.ends_with('%') => Err(because("Relative weight must be positive.")),
        ("", rest) if rest.starts_with('-') => Err(because("Absolute weight can only be between 0 and 256 inclusive.")),
        ("", _) => Err(because("Empty weight string empty or preceded by garbage")),
        // a number of more digits is as much too large
        (number, "%") => Ok(Weight::Percent(number.parse().unwrap_or(u32::MAX).min(WEIGHT_MAX * 100))),
        (number, rest) => {
            let weight: u16 = number.parse().unwrap_or(u16::MAX);
            match rest {
                _ if u32::from(weight) > WEIGHT_MAX => {
                    Err(because("Absolute weight can only be between 0 and 256 inclusive."))
                }
                "" => Ok(Weight::Of(weight)),
                _ => Err(because("Trailing garbage in weight string")),
            }
        }
    }
}

/// Reads the number of a connection, in decimal or, as `show sess` writes it, in hexadecimal digits. No connection has 0.
fn number(word: &str) -> Option<u64> {
    let number = match word.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16),
        _ if !word.starts_with('+') => word.parse(),
        _ => return None,
    };
    number.ok().filter(|number| *number > 0)
}

fn form(words: &[&str]) -> Form {
    let mut form = Form::default();
    for word in words {
        match *word {
            "typed" => form.format = Format::Typed,
            "json" => form.format = Format::Json,
            "desc" => form.described = true,
            _ => {} // as in HAProxy
        }
    }
    form
}

fn stat(words: &[&str]) -> Result<Stat, Refused> {
    let mut stat = Stat { form: form(words), ..Stat::default() };
    stat.only_up = words.contains(&"up");
    stat.no_maint = words.contains(&"no-maint");
    if let [of, kinds, sid, ..] = words
        && let (Ok(kinds), Ok(sid)) = (kinds.parse::<i32>(), sid.parse::<i32>())
    {
        stat.of = match of.parse::<i64>() {
            Ok(-1) => None,
            Ok(iid) => Some(Name::Numbered(iid.try_into().map_err(|_| because("No such proxy."))?)),
            Err(_) => Some(Name::Called((*of).to_owned())),
        };
        stat.kinds = kinds as u32; // -1 is all
        stat.sid = sid.try_into().ok();
    }
    Ok(stat)
}

fn timeout(words: &[&str]) -> Result<Command, Refused> {
    let ["cli", words @ ..] = words else { return Err(because("'set timeout' only supports 'cli'.")) };
    let word = words.first().ok_or(because("Expects an integer value."))?;
    let wrong = because("Invalid timeout value.");
    let digits = word.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = word.split_at(digits);
    let of_unit = match unit {
        "" | "s" => 1000,
        "ms" => 1,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong),
    };
    let number: u64 = number.parse().map_err(|_| wrong)?;
    Ok(Command::SetTimeout(Duration::from_millis(number.saturating_mul(of_unit)).min(SILENCE_MAX)))
}

/// Writes what [`parse`] reads as the same.
impl Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Help => f.write_str("help"),
            Command::Prompt => f.write_str("prompt"),
            Command::Quit => f.write_str("quit"),
            Command::SetTimeout(time) => write!(f, "set timeout cli {}ms", time.as_millis()),
            Command::ShowInfo(form) => write!(f, "show info{form}"),
            Command::ShowStat(stat) => {
                f.write_str("show stat ")?;
                match &stat.of {
                    None => f.write_str("-1")?,
                    Some(Name::Numbered(iid)) => write!(f, "{iid}")?,
                    Some(Name::Called(name)) => escaped(name, f)?,
                }
                let sid = stat.sid.map_or(-1, i64::from);
                let only = [(stat.only_up, " up"), (stat.no_maint, " no-maint")];
                let only: String = only.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
                write!(f, " {} {sid}{only}{}", stat.kinds as i32, stat.form)
            }
            Command::ShowSess(None) => f.write_str("show sess"),
            Command::ShowSess(Some(id)) => write!(f, "show sess {id:#x}"),
            Command::ShowServersState(of) => with_name("show servers state", of.as_ref(), f),
            Command::ShowServersConn(of) => with_name("show servers conn", of.as_ref(), f),
            Command::ShowBackend => f.write_str("show backend"),
            Command::ShowPools => f.write_str("show pools"),
            Command::ShowVersion => f.write_str("show version"),
            Command::ShowCliLevel => f.write_str("show cli level"),
            Command::ShowCliSockets => f.write_str("show cli sockets"),
            Command::SetState(server, state) => write!(f, "set server {server} state {state}"),
            Command::SetWeight(server, Weight::Of(weight)) => write!(f, "set server {server} weight {weight}"),
            Command::SetWeight(server, Weight::Percent(part)) => write!(f, "set server {server} weight {part}%"),
            Command::GetWeight(server) => write!(f, "get weight {server}"),
            Command::ShutdownSession(id) => write!(f, "shutdown session {id:#x}"),
            Command::ShutdownSessions(server) => write!(f, "shutdown sessions server {server}"),
        }
    }
}

fn with_name(command: &str, name: Option<&Name>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(command)?;
    name.map_or(Ok(()), |name| write!(f, " {name}"))
}

fn escaped(word: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for c in word.chars() {
        if c.is_ascii_whitespace() || [';', '\\'].contains(&c) {
            f.write_char('\\')?;
        }
        f.write_char(c)?;
    }
    Ok(())
}

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Called(name) => escaped(name, f),
            Name::Numbered(number) => write!(f, "#{number}"),
        }
    }
}

impl Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.backend, self.server)
    }
}

impl Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Ready => "ready",
            State::Drain => "drain",
            State::Maint => "maint",
        })
    }
}

impl Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.format {
            Format::Plain => "",
            Format::Typed => " typed",
            Format::Json => " json",
        })?;
        f.write_str(if self.described { " desc" } else { "" })
    }
}

#[cfg(test)]
#[path = "haproxy_tests.rs"]
mod tests;

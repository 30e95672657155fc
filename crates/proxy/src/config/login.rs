//! Configuration of a login gateway, and its tables in the TOML file.

use super::{
    ConfigError,
    source::SourceFile,
    value::{Count, Many, Parsed, Seconds, Tables},
};
use crate::{
    secrets::is_trusted,
    target::Target,
    users::{
        Users,
        external_check::{Asked, Check, LIMIT},
        failures::{FAILURES, Failures},
    },
};
use serde::Deserialize;
use std::{
    fs,
    ops::Range,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::Duration,
};
use toml::Spanned;

/// Configuration of a login gateway.
#[derive(Debug, Clone)]
pub struct Login {
    /// Users with access; empty: everybody, unless there is a check by others.
    pub users: Users,
    /// Others who know the users.
    pub check: Option<Check>,
    /// Clients may speak telnet.
    pub telnet: bool,
    /// Text before the first question.
    pub banner: Option<String>,
    /// Destinations by name.
    pub destinations: Vec<Destination>,
    /// Clients may name any host that the rules allow.
    pub free: bool,
    /// Telnet servers are told the user, as the variable USER (RFC 1572).
    pub user_variable: bool,
    /// Time for an answer.
    pub prompt: Duration,
    /// Time for all answers.
    pub time: Duration,
    /// Maximum of failed logins from an address.
    pub max_failures: u32,
    pub(crate) failures: Arc<Failures>,
}

/// A destination with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// The name; its case does not matter.
    pub name: String,
    /// Where it is.
    pub target: Target,
    /// Users who may go there; empty: all.
    pub users: Vec<String>,
    /// The server speaks telnet.
    pub telnet: bool,
}

impl Destination {
    /// Whether the user may go there.
    pub fn is_for(&self, user: Option<&str>) -> bool {
        self.users.is_empty() || user.is_some_and(|user| self.users.iter().any(|own| own == user))
    }
}

impl Default for Login {
    fn default() -> Login {
        Login {
            users: Users::default(),
            check: None,
            telnet: false,
            banner: None,
            destinations: Vec::new(),
            free: false,
            user_variable: false,
            // People look up their password.
            prompt: Duration::from_secs(60),
            time: Duration::from_secs(180),
            max_failures: FAILURES,
            failures: Arc::new(Failures::new(FAILURES)),
        }
    }
}

impl PartialEq for Login {
    fn eq(&self, other: &Login) -> bool {
        let key = |l: &Login| (l.telnet, l.free, l.user_variable, l.prompt, l.time, l.max_failures);
        key(self) == key(other)
            && self.users == other.users
            && self.check == other.check
            && self.banner == other.banner
            && self.destinations == other.destinations
    }
}

impl Eq for Login {}

impl Login {
    /// Whether clients have to log in.
    pub fn asks_users(&self) -> bool {
        self.check.is_some() || !self.users.is_empty()
    }

    /// Returns the destination of this name, if the user may go there.
    pub fn destination(&self, name: &str, user: Option<&str>) -> Option<&Destination> {
        self.destinations.iter().find(|d| d.name.eq_ignore_ascii_case(name) && d.is_for(user))
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLogin {
    banner: Option<String>,
    check: Option<Spanned<RawCheck>>,
    #[serde(default)]
    free: bool,
    user_variable: Option<Spanned<bool>>,
    prompt: Option<Seconds>,
    time: Option<Seconds>,
    failures: Option<Count>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCheck {
    program: Option<Spanned<PathBuf>>,
    socket: Option<Spanned<PathBuf>>,
    limit: Option<Seconds>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawDestination {
    name: Spanned<Parsed<Name>>,
    target: Parsed<Target>,
    #[serde(default)]
    users: Many<String>,
    telnet: Option<bool>,
}

/// A name that can be typed, and shown in a list.
struct Name(String);

impl FromStr for Name {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if good { Ok(Name(text.into())) } else { Err("bad name: write 1 to 64 printable characters without spaces") }
    }
}

/// The keys of a listener that only a login gateway has.
pub(super) struct RawKeys {
    pub telnet: bool,
    pub login: Option<RawLogin>,
    pub destinations: Tables<Spanned<RawDestination>>,
}

impl SourceFile<'_> {
    /// Reads a login gateway. `at`: its place, and whether its clients want a server. `users`: with the place of their key.
    pub(super) fn login(
        &self,
        (at, is_transparent): (Range<usize>, bool),
        (users, of_users): (Users, Option<Range<usize>>),
        raw: RawKeys,
    ) -> Result<Login, ConfigError> {
        let RawKeys { telnet, login, destinations } = raw;
        let login = login.unwrap_or_default();
        let check = login.check.map(|check| self.check(check)).transpose()?;
        if let (Some(_), Some(at)) = (&check, of_users) {
            return Err(self.wrong(at, "either the users are here, or others know them: remove them, or `check`"));
        }
        let asks = check.is_some() || !users.is_empty();
        if let Some(variable) = login.user_variable.as_ref().filter(|v| *v.get_ref() && !(asks && telnet)) {
            let cure = "only telnet has such a variable, and only who logs in has a name: add telnet = true and users";
            return Err(self.wrong(variable.span(), cure));
        }
        let mut named: Vec<Destination> = Vec::new();
        for raw in destinations.0 {
            let raw = raw.into_inner();
            let (at, Parsed(Name(name)), target) = (raw.name.span(), raw.name.into_inner(), raw.target.0);
            if named.iter().any(|d| d.name.eq_ignore_ascii_case(&name)) {
                return Err(self.wrong(at, "another destination has this name: choose another one"));
            }
            if !raw.users.0.is_empty() && !asks {
                return Err(self.wrong(at, "nobody logs in, so nobody may go there: add users to the listener"));
            }
            let telnet = telnet && raw.telnet.unwrap_or(target.port == 23);
            named.push(Destination { name, target, users: raw.users.0, telnet });
        }
        if is_transparent && !asks {
            return Err(self.wrong(at, "nothing would be asked: add users or `check`, or use protocol = \"plug\""));
        }
        let free = login.free || (is_transparent && named.is_empty());
        if named.is_empty() && !free {
            let cure = "no client could go anywhere: add a [[listener.destination]], or login = { free = true }";
            return Err(self.wrong(at, cure));
        }
        let usual = Login::default();
        let max_failures = login.failures.map_or(usual.max_failures, |n| n.0);
        Ok(Login {
            users,
            check,
            telnet,
            banner: login.banner,
            destinations: named,
            free,
            user_variable: login.user_variable.is_some_and(Spanned::into_inner),
            prompt: login.prompt.map_or(usual.prompt, |s| s.0),
            time: login.time.map_or(usual.time, |s| s.0),
            max_failures,
            failures: Arc::new(Failures::new(max_failures)),
        })
    }

    /// Returns the path of a program that decides something.
    pub(super) fn program(&self, program: &Spanned<PathBuf>, decides: &str) -> Result<PathBuf, ConfigError> {
        let path = self.path(program.get_ref());
        let of = fs::metadata(&path).map_err(|e| self.wrong(program.span(), &format!("cannot be run: {e}")))?;
        if !of.is_file() || of.mode() & 0o111 == 0 {
            return Err(self.wrong(program.span(), "no program: chmod +x it"));
        }
        if of.mode() & 0o022 != 0 || !is_trusted(of.uid()) {
            let cure = format!("it decides {decides}, and others may change it: chown it to root, chmod go-w");
            return Err(self.wrong(program.span(), &cure));
        }
        Ok(path)
    }

    fn check(&self, raw: Spanned<RawCheck>) -> Result<Check, ConfigError> {
        let (span, raw) = (raw.span(), raw.into_inner());
        let limit = raw.limit.map_or(LIMIT, |limit| limit.0);
        let asked = match (raw.program, raw.socket) {
            (Some(program), None) => Asked::Program(self.program(&program, "who may log in")?),
            (None, Some(socket)) => {
                let path = self.path(socket.get_ref());
                // It may come later; what is there now has to be one.
                if fs::metadata(&path).is_ok_and(|of| !of.file_type().is_socket()) {
                    return Err(self.wrong(socket.span(), "no socket: write the path of a Unix socket"));
                }
                Asked::Socket(path)
            }
            _ => return Err(self.wrong(span, "write either program = \"PATH\" or socket = \"PATH\"")),
        };
        Ok(Check::new(asked, limit))
    }
}

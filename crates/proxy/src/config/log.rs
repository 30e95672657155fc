//! `[log]`: where the access log goes, and what its lines are like.

use super::{
    ConfigError, Places,
    source::SourceFile,
    table::{Keys, Table},
    value::{Many, Parsed, Seconds},
};
use crate::log::{
    access_log::{LogConfig, LogFormat, LogTarget, Wants},
    sockets::{Address, App, Facility, JOURNAL, Kind, Receiver},
    template::{Template, brace_at},
};
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor},
};
use std::{fmt, ops::Range, path::PathBuf, time::Duration};
use toml::Spanned;

/// Least time between two lines of a connection that goes on. More often, `longsplice ls` is the better one to ask.
const INTERVAL_MIN: Duration = Duration::from_secs(1);

/// What stands there.
#[derive(Default)]
pub(super) struct RawLog {
    format: Option<Spanned<RawFormat>>,
    template: Option<Spanned<String>>,
    add: Vec<Extra>,
    file: Option<Spanned<PathBuf>>,
    syslog: Option<Spanned<Parsed<Address>>>,
    journal: Option<Spanned<RawJournal>>,
    facility: Option<Spanned<Parsed<Facility>>>,
    app: Option<Spanned<Parsed<App>>>,
    begin: Option<Spanned<bool>>,
    interval: Option<Spanned<Seconds>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum LogKey {
    Format,
    Template,
    Add,
    File,
    Syslog,
    Journal,
    Facility,
    App,
    Begin,
    Interval,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RawFormat {
    Text,
    Json,
    Common,
    Combined,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum Extra {
    Version,
    Referrer,
    UserAgent,
}

impl Keys for RawLog {
    type Key = LogKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: LogKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            LogKey::Format => self.format = Some(table.next_value()?),
            LogKey::Template => self.template = Some(table.next_value()?),
            LogKey::Add => self.add = table.next_value::<Many<Extra>>()?.0,
            LogKey::File => self.file = Some(table.next_value()?),
            LogKey::Syslog => self.syslog = Some(table.next_value()?),
            LogKey::Journal => self.journal = Some(table.next_value()?),
            LogKey::Facility => self.facility = Some(table.next_value()?),
            LogKey::App => self.app = Some(table.next_value()?),
            LogKey::Begin => self.begin = Some(table.next_value()?),
            LogKey::Interval => self.interval = Some(table.next_value()?),
        }
        Ok(())
    }
}

/// The socket of the journal, or whether lines go there.
enum RawJournal {
    Usual(bool),
    At(PathBuf),
}

impl<'de> Deserialize<'de> for RawJournal {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = RawJournal;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, or the path of another socket of a journal")
            }
            fn visit_bool<E: de::Error>(self, is: bool) -> Result<RawJournal, E> {
                Ok(RawJournal::Usual(is))
            }
            fn visit_str<E: de::Error>(self, path: &str) -> Result<RawJournal, E> {
                Ok(RawJournal::At(path.into()))
            }
        }
        d.deserialize_any(V)
    }
}

impl SourceFile<'_> {
    /// Returns what `[log]` says, and notes where it names the destination.
    pub(super) fn log(&self, Table(raw): Table<RawLog>, places: &mut Places) -> Result<LogConfig, ConfigError> {
        let (to, at) = self.log_target(&raw)?;
        at.into_iter().for_each(|at| places.add(&to, self.place(at)));
        let format = match (&raw.format, &raw.template) {
            (Some(format), Some(_)) => {
                return Err(self.wrong(format.span(), "the template says what lines are like: remove one of the two"));
            }
            (_, Some(template)) => LogFormat::Template(self.log_template(template)?.into()),
            (None, None) => LogFormat::Text,
            (Some(format), None) => match format.get_ref() {
                RawFormat::Text => LogFormat::Text,
                RawFormat::Json => LogFormat::Json,
                RawFormat::Common => LogFormat::common(),
                RawFormat::Combined => LogFormat::combined(),
            },
        };
        let mut add = Wants::default();
        for extra in &raw.add {
            *match extra {
                Extra::Version => &mut add.version,
                Extra::Referrer => &mut add.referrer,
                Extra::UserAgent => &mut add.user_agent,
            } = true;
        }
        let interval = raw.interval.as_ref().map(|interval| (interval.get_ref().0, interval.span()));
        if let Some((_, at)) = interval.clone().filter(|(interval, _)| *interval < INTERVAL_MIN) {
            return Err(self.wrong(at, "too short: write a number of seconds from 1 on"));
        }
        let begin = raw.begin.as_ref().filter(|begin| *begin.get_ref()).map(Spanned::span);
        let more = begin.clone().or(interval.clone().map(|(_, at)| at));
        if let (Some(at), LogFormat::Template(template)) = (more, &format)
            && !template.has("event")
        {
            let cure = "lines of this format do not tell what they are about, so that each would count as a connection: \
                        write format = \"text\" or \"json\", or a template with {event}";
            return Err(self.wrong(at, cure));
        }
        Ok(LogConfig { format, to, add, begin: begin.is_some(), interval: interval.map(|(interval, _)| interval) })
    }

    fn log_template(&self, template: &Spanned<String>) -> Result<Template, ConfigError> {
        Template::parse(template.get_ref()).map_err(|mistake| {
            let span = template.span();
            let raw = self.text.get(span.clone()).unwrap_or_default();
            let at = mistake.brace.map_or(0, |number| brace_at(raw, number).start);
            self.wrong(span.start + at..span.end, &mistake.message)
        })
    }

    /// Returns where the log goes, and where that stands.
    fn log_target(&self, raw: &RawLog) -> Result<(LogTarget, Option<Range<usize>>), ConfigError> {
        let journal = raw.journal.as_ref().and_then(|journal| match journal.get_ref() {
            RawJournal::Usual(false) => None,
            RawJournal::Usual(true) => Some((PathBuf::from(JOURNAL), journal.span())),
            RawJournal::At(path) => Some((self.path(path), journal.span())),
        });
        let file = raw.file.as_ref().map(Spanned::span);
        let syslog = raw.syslog.as_ref().map(Spanned::span);
        let mut all = [file, syslog, journal.as_ref().map(|(_, at)| at.clone())].into_iter().flatten();
        if let (Some(_), Some(second)) = (all.next(), all.next()) {
            return Err(
                self.wrong(second, "there is one access log, and another key says where it goes: remove one of them")
            );
        }
        let kind = match (&raw.syslog, journal) {
            (Some(syslog), _) => {
                let mut kind = Kind::Syslog(syslog.get_ref().0.clone());
                kind.path_mut().into_iter().for_each(|path| *path = self.path(path));
                Some((kind, syslog.span()))
            }
            (None, Some((path, at))) => Some((Kind::Journal(path), at)),
            (None, None) => None,
        };
        let Some((kind, at)) = kind else {
            let of_receivers = [raw.facility.as_ref().map(Spanned::span), raw.app.as_ref().map(Spanned::span)];
            if let Some(at) = of_receivers.into_iter().flatten().next() {
                return Err(
                    self.wrong(at, "only syslog and the journal have this: remove it, or write syslog or journal")
                );
            }
            let mut to = raw.file.as_ref().map_or_else(LogTarget::default, |file| file.get_ref().as_path().into());
            to.path_mut().into_iter().for_each(|path| *path = self.path(path));
            let at = raw.file.as_ref().map(Spanned::span).filter(|_| matches!(to, LogTarget::File(_)));
            return Ok((to, at));
        };
        let facility = raw.facility.as_ref().map_or_else(Facility::default, |facility| facility.get_ref().0);
        let app = raw.app.as_ref().map_or_else(App::default, |app| app.get_ref().0.clone());
        Ok((LogTarget::Receiver(Receiver { kind, app, facility }.into()), Some(at)))
    }
}

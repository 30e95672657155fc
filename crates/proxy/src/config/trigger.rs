//! The keys of a trigger.

use super::{
    ConfigError, ListenerConfig, Protocol,
    source::SourceFile,
    value::{Parsed, Seconds},
};
use crate::triggers::{
    MOST, Then, TimeOfDay, Trigger, When,
    ask::{Answer, LIMIT, Question},
};
use longsplice_engine::{self as engine, Side, SpliceWhen};
use serde::Deserialize;
use std::{num::NonZeroU64, path::PathBuf};
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTrigger {
    data: Option<Spanned<RawSide>>,
    bytes: Option<Spanned<NonZeroU64>>,
    of: Option<Spanned<RawOf>>,
    idle: Option<Spanned<Seconds>>,
    at: Option<Spanned<Parsed<TimeOfDay>>>,
    then: Spanned<RawThen>,
    dir: Option<Spanned<PathBuf>>,
    program: Option<Spanned<PathBuf>>,
    limit: Option<Spanned<Seconds>>,
    otherwise: Option<Spanned<RawAnswer>>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawSide {
    Client,
    Server,
}

impl From<RawSide> for Side {
    fn from(raw: RawSide) -> Side {
        match raw {
            RawSide::Client => Side::Client,
            RawSide::Server => Side::Server,
        }
    }
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawOf {
    Client,
    Server,
    Both,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum RawThen {
    Copy,
    Kill,
    Tap,
    Ask,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawAnswer {
    GoOn,
    Copy,
    Kill,
}

impl From<RawAnswer> for Answer {
    fn from(raw: RawAnswer) -> Answer {
        match raw {
            RawAnswer::GoOn => Answer::GoOn,
            RawAnswer::Copy => Answer::Copy,
            RawAnswer::Kill => Answer::Kill,
        }
    }
}

impl SourceFile<'_> {
    /// Adds the triggers of a listener, all other keys of which are known.
    pub(super) fn triggers(&self, raw: Vec<Spanned<RawTrigger>>, of: &mut ListenerConfig) -> Result<(), ConfigError> {
        for spanned in raw {
            let at = spanned.span();
            let trigger = self.trigger(spanned, of)?;
            if let When::Data(side) = trigger.when {
                if of.policy.trigger.is_some() {
                    return Err(self.wrong(at, "the kernel waits for the data of one host at most: remove one of them"));
                }
                of.policy.trigger = Some(match side {
                    Side::Client => engine::Trigger::ClientData,
                    Side::Server => engine::Trigger::ServerData,
                });
            }
            if of.triggers.len() == MOST {
                return Err(self.wrong(at, &format!("a listener has {MOST} triggers at most: remove some")));
            }
            of.triggers = of.triggers.iter().cloned().chain([trigger]).collect();
        }
        Ok(())
    }

    fn trigger(&self, spanned: Spanned<RawTrigger>, of: &ListenerConfig) -> Result<Trigger, ConfigError> {
        let (span, raw) = (spanned.span(), spanned.into_inner());
        if let Protocol::Ftp(_) = of.protocol {
            return Err(self.wrong(span, "sessions of FTP are read anyway: remove it, or use protocol = \"plug\""));
        }
        if let (Some(of), None) = (&raw.of, &raw.bytes) {
            return Err(self.wrong(of.span(), "`of` says whose bytes are counted: add bytes = NUMBER, or remove it"));
        }
        let when = match (raw.data, raw.bytes, raw.idle, raw.at) {
            (Some(data), None, None, None) => {
                if of.policy.when == SpliceWhen::Never {
                    let cure = "it is pulled by data of a spliced connection, and none is: remove splice = \"never\"";
                    return Err(self.wrong(data.span(), cure));
                }
                When::Data(data.into_inner().into())
            }
            (None, Some(bytes), None, None) => {
                let of = match raw.of.map(Spanned::into_inner) {
                    Some(RawOf::Client) => Some(Side::Client),
                    Some(RawOf::Server) => Some(Side::Server),
                    Some(RawOf::Both) | None => None,
                };
                When::Bytes { count: bytes.into_inner().get(), of }
            }
            (None, None, Some(idle), None) => {
                let (at, Seconds(after)) = (idle.span(), idle.into_inner());
                if after >= of.policy.idle_limit.get() {
                    let cure = "such a connection has ended by then (idle_limit of the policy): write less";
                    return Err(self.wrong(at, cure));
                }
                When::Idle(after)
            }
            (None, None, None, Some(at)) => When::At(at.into_inner().0),
            _ => return Err(self.wrong(span, "write one of data, bytes, idle and at: it says when it is pulled")),
        };
        let kind = *raw.then.get_ref();
        let asks = [
            raw.program.as_ref().map(Spanned::span),
            raw.limit.as_ref().map(Spanned::span),
            raw.otherwise.as_ref().map(Spanned::span),
        ];
        if let (Some(span), true) = (asks.into_iter().flatten().next(), kind != RawThen::Ask) {
            return Err(self.wrong(span, "no program is asked: remove the key, or write then = \"ask\""));
        }
        if let (Some(dir), true) = (&raw.dir, kind != RawThen::Tap) {
            return Err(self.wrong(dir.span(), "nothing is written: remove the key, or write then = \"tap\""));
        }
        let then = match (kind, raw.dir, raw.program) {
            (RawThen::Copy, ..) => Then::Copy,
            (RawThen::Kill, ..) => Then::Kill,
            (RawThen::Tap, Some(dir), _) if of.tap.is_some() => {
                return Err(self.wrong(dir.span(), "the listener has a tap from the beginning: remove one of them"));
            }
            (RawThen::Tap, Some(dir), _) => Then::Tap(self.path(dir.get_ref())),
            (RawThen::Tap, None, _) => {
                return Err(self.wrong(raw.then.span(), "a tap needs a directory: add dir = \"DIR\""));
            }
            (RawThen::Ask, _, Some(program)) => {
                let program = self.program(&program, "what becomes of connections")?;
                let limit = raw.limit.map_or(LIMIT, |limit| limit.into_inner().0);
                let otherwise = raw.otherwise.map_or_else(Answer::default, |answer| answer.into_inner().into());
                Then::Ask(Question::new(program, limit, otherwise))
            }
            (RawThen::Ask, _, None) => {
                return Err(self.wrong(raw.then.span(), "who is asked? Add program = \"PATH\""));
            }
        };
        Ok(Trigger { when, then })
    }
}

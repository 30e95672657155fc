//! Rules on HTTP replies, from the TOML file.

use super::{
    site::{Number, Statuses},
    value::{Many, OrNumber, Parsed, RawAction, Seconds},
};
use crate::filter::{Coding, FIRST_MAX, Filter, Lengths, MediaType, Pattern, ReplyRule};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFilter {
    #[serde(default)]
    rules: Vec<RawReplyRule>,
    first: Option<Number<1, { FIRST_MAX as u32 }>>,
    wait: Option<Seconds>,
    #[serde(default)]
    pub accept_encoding: RawAcceptEncoding,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReplyRule {
    action: RawAction,
    #[serde(default)]
    status: Many<OrNumber<Statuses>>,
    #[serde(default, rename = "type")]
    media: Many<Parsed<MediaType>>,
    #[serde(default)]
    encoding: Many<Parsed<Coding>>,
    #[serde(default)]
    length: Many<OrNumber<Lengths>>,
    body_begins: Option<Parsed<Pattern>>,
    body_contains: Option<Parsed<Pattern>>,
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RawAcceptEncoding {
    #[default]
    Pass,
    Identity,
}

pub(super) fn filter(raw: RawFilter) -> Filter {
    let d = Filter::default();
    let rule = |raw: RawReplyRule| ReplyRule {
        action: raw.action.into(),
        status: raw.status.0.into_iter().map(|s| s.0.0).collect(),
        media: raw.media.0.into_iter().map(|m| m.0).collect(),
        encoding: raw.encoding.0.into_iter().map(|c| c.0).collect(),
        length: raw.length.0.into_iter().map(|l| l.0).collect(),
        body_begins: raw.body_begins.map(|p| p.0),
        body_contains: raw.body_contains.map(|p| p.0),
    };
    Filter {
        rules: raw.rules.into_iter().map(rule).collect(),
        first: raw.first.map_or(d.first, |n| n.0 as usize),
        wait: raw.wait.map_or(d.wait, |s| s.0),
    }
}

//! Rules on HTTP replies, from the TOML file.

use super::{
    site::{Number, Statuses},
    table::Keys,
    value::{Many, OrNumber, Parsed, RawAction, Seconds},
};
use crate::filter::{Coding, FIRST_MAX, Filter, Lengths, MediaType, Pattern, ReplyRule};
use serde::{Deserialize, de::MapAccess};

/// The table `filter`, of which one key is not about the filter itself.
#[derive(Default)]
pub(super) struct RawFilter {
    pub filter: Filter,
    pub accept_encoding: RawAcceptEncoding,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum FilterKey {
    Rules,
    First,
    Wait,
    AcceptEncoding,
}

impl Keys for RawFilter {
    type Key = FilterKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: FilterKey, table: &mut A) -> Result<(), A::Error> {
        let filter = &mut self.filter;
        match key {
            FilterKey::Rules => {
                filter.rules = table.next_value::<Vec<RawReplyRule>>()?.into_iter().map(rule).collect();
            }
            FilterKey::First => filter.first = table.next_value::<Number<1, { FIRST_MAX as u32 }>>()?.0 as usize,
            FilterKey::Wait => filter.wait = table.next_value::<Seconds>()?.0,
            FilterKey::AcceptEncoding => self.accept_encoding = table.next_value()?,
        }
        Ok(())
    }
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

fn rule(raw: RawReplyRule) -> ReplyRule {
    ReplyRule {
        action: raw.action.into(),
        status: raw.status.0.into_iter().map(|s| s.0.0).collect(),
        media: raw.media.0.into_iter().map(|m| m.0).collect(),
        encoding: raw.encoding.0.into_iter().map(|c| c.0).collect(),
        length: raw.length.0.into_iter().map(|l| l.0).collect(),
        body_begins: raw.body_begins.map(|p| p.0),
        body_contains: raw.body_contains.map(|p| p.0),
    }
}

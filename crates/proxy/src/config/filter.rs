//! Filters from the TOML file: rules on HTTP replies and changes of their bodies, and conditions on the first bytes of other
//! connections.

use super::{
    ConfigError, Http,
    site::{Number, Statuses},
    source::SourceFile,
    table::{Keys, Table},
    value::{Many, OrNumber, Parsed, RawAction, Seconds},
};
use crate::{
    filter::{CodingName, FIRST_MAX, Filter, Lengths, ReplyRule},
    first_bytes::{self, Conditions, FirstBytes},
    media::MediaType,
    pattern::Pattern,
    rewrite::{BodyChange, Edit, element::Element, replace::Expression},
};
use longsplice_http::accept::Codings;
use serde::{
    Deserialize,
    de::{self, MapAccess},
};
use std::sync::Arc;
use toml::Spanned;

/// Longest text in bytes that replaces a match: one may stand for each byte of a body.
const WITH_MAX: usize = 1024;

/// The table `filter`.
#[derive(Default)]
pub(super) struct RawFilter {
    filter: Filter,
    changes: Vec<Spanned<RawBodyChange>>,
    uploads: Vec<Spanned<RawBodyChange>>,
    accept_encoding: Option<Codings>,
    /// There are keys for HTTP.
    of_http: bool,
    first_bytes: FirstBytes,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum FilterKey {
    Rules,
    First,
    Wait,
    AcceptEncoding,
    Encode,
    DecodedSize,
    DecodedRatio,
    Change,
    Upload,
    Unreadable,
    NoTransform,
    Client,
    Server,
}

impl Keys for RawFilter {
    type Key = FilterKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: FilterKey, table: &mut A) -> Result<(), A::Error> {
        let filter = &mut self.filter;
        self.of_http |= !matches!(key, FilterKey::Client | FilterKey::Server);
        match key {
            FilterKey::Rules => {
                filter.rules = table.next_value::<Vec<RawReplyRule>>()?.into_iter().map(rule).collect();
            }
            FilterKey::First => filter.first = table.next_value::<Number<1, { FIRST_MAX as u32 }>>()?.0 as usize,
            FilterKey::Wait => filter.wait = table.next_value::<Seconds>()?.0,
            FilterKey::AcceptEncoding => self.accept_encoding = Some(table.next_value::<RawCodings>()?.into()),
            FilterKey::Encode => filter.changes.encode = table.next_value()?,
            FilterKey::DecodedSize => filter.changes.decoded.size = table.next_value()?,
            FilterKey::DecodedRatio => filter.changes.decoded.ratio = table.next_value::<Number<1, 100_000>>()?.0,
            FilterKey::Change => self.changes = table.next_value()?,
            FilterKey::Upload => {
                let Table(upload) = table.next_value::<Table<RawUpload>>()?;
                (filter.upload_rules, self.uploads) = (upload.rules, upload.changes);
            }
            FilterKey::Unreadable => filter.changes.unreadable = table.next_value()?,
            FilterKey::NoTransform => filter.changes.no_transform = table.next_value()?,
            FilterKey::Client => self.first_bytes.client = Some(table.next_value::<Table<Conditions>>()?.0),
            FilterKey::Server => self.first_bytes.server = Some(table.next_value::<Table<Conditions>>()?.0),
        }
        Ok(())
    }
}

/// The table `filter.upload`.
#[derive(Default)]
struct RawUpload {
    rules: Vec<ReplyRule>,
    changes: Vec<Spanned<RawBodyChange>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum UploadKey {
    Rules,
    Change,
}

impl Keys for RawUpload {
    type Key = UploadKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: UploadKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            UploadKey::Rules => {
                self.rules = table.next_value::<Vec<RawReplyRule>>()?.into_iter().map(rule).collect();
                if self.rules.iter().any(|rule| !rule.status.is_empty()) {
                    return Err(de::Error::custom("requests have no status: remove it"));
                }
            }
            UploadKey::Change => self.changes = table.next_value()?,
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum ConditionsKey {
    Must,
    Never,
    First,
    Wait,
}

impl Keys for Conditions {
    type Key = ConditionsKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: ConditionsKey, table: &mut A) -> Result<(), A::Error> {
        const MOST: u32 = first_bytes::FIRST_MAX as u32;
        match key {
            ConditionsKey::Must => self.must = Some(table.next_value::<Parsed<Pattern>>()?.0),
            ConditionsKey::Never => self.never = Some(table.next_value::<Parsed<Pattern>>()?.0),
            ConditionsKey::First => self.first = table.next_value::<Number<1, MOST>>()?.0 as usize,
            ConditionsKey::Wait => self.wait = table.next_value::<Seconds>()?.0,
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
    encoding: Many<Parsed<CodingName>>,
    #[serde(default)]
    length: Many<OrNumber<Lengths>>,
    body_begins: Option<Parsed<Pattern>>,
    body_contains: Option<Parsed<Pattern>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBodyChange {
    #[serde(rename = "type")]
    media: Many<Parsed<MediaType>>,
    #[serde(default)]
    status: Many<OrNumber<Statuses>>,
    replace: Option<Parsed<Expression>>,
    with: Option<Spanned<String>>,
    remove_element: Option<Many<Parsed<Element>>>,
    until: Option<Number<1, { u32::MAX }>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum RawCodings {
    Pass,
    Known,
    Identity,
}

impl From<RawCodings> for Codings {
    fn from(raw: RawCodings) -> Codings {
        match raw {
            RawCodings::Pass => Codings::Any,
            RawCodings::Known => Codings::Known,
            RawCodings::Identity => Codings::None,
        }
    }
}

impl SourceFile<'_> {
    /// Applies the table to an HTTP listener.
    pub(super) fn filter_replies(&self, raw: Spanned<Table<RawFilter>>, http: &mut Http) -> Result<(), ConfigError> {
        let at = raw.span();
        let Table(raw) = raw.into_inner();
        if !raw.first_bytes.is_empty() {
            let cure = "HTTP is read as requests and replies: write rules on replies, without client and server";
            return Err(self.wrong(at, cure));
        }
        let mut filter = raw.filter;
        filter.changes.list = raw.changes.into_iter().map(|c| self.body_change(c)).collect::<Result<_, _>>()?;
        filter.upload_changes = raw.uploads.into_iter().map(|c| self.body_change(c)).collect::<Result<_, _>>()?;
        if filter.upload_changes.iter().any(|change| !change.status.is_empty()) {
            return Err(self.wrong(at, "requests have no status: remove it from the changes of uploads"));
        }
        // Of two ways to change what servers would code, the one that takes no time is the usual one.
        let usual = match (filter.changes.list.is_empty(), filter.changes.encode) {
            (true, _) if !filter.rules.iter().any(ReplyRule::reads) => Codings::Any,
            (false, false) => Codings::None,
            (true, _) | (false, true) => Codings::Known,
        };
        http.codings = raw.accept_encoding.unwrap_or(usual);
        if usual != Codings::Any && http.codings == Codings::Any {
            let cure =
                "replies with a coding that cannot be read will be refused or passed on unchanged: write \"known\"";
            self.warn(at, cure);
        }
        http.filter = Arc::new(filter);
        Ok(())
    }

    /// Returns the conditions on first bytes. `reads`: whether such connections come to where they are checked.
    pub(super) fn first_bytes(
        &self,
        raw: Option<Spanned<Table<RawFilter>>>,
        reads: bool,
    ) -> Result<FirstBytes, ConfigError> {
        let Some(raw) = raw else { return Ok(FirstBytes::default()) };
        let at = raw.span();
        let Table(RawFilter { of_http, first_bytes, .. }) = raw.into_inner();
        let cure = match (of_http, reads) {
            (_, false) => "this listener has no filter: remove the key, or use protocol = \"http\" or \"plug\"",
            (true, true) => {
                "only replies of HTTP are filtered by rules: write client or server, or use protocol = \"http\""
            }
            (false, true) if first_bytes.is_empty() => "nothing is filtered: write client or server",
            (false, true) => return Ok(first_bytes),
        };
        Err(self.wrong(at, cure))
    }

    fn body_change(&self, raw: Spanned<RawBodyChange>) -> Result<BodyChange, ConfigError> {
        let span = raw.span();
        let raw = raw.into_inner();
        let what = match (raw.replace, raw.with, raw.remove_element) {
            (Some(expression), Some(with), None) => {
                if with.get_ref().len() > WITH_MAX {
                    return Err(self.wrong(with.span(), &format!("too long: write at most {WITH_MAX} bytes")));
                }
                Edit::Replace(expression.0, with.into_inner().into_bytes().into())
            }
            (None, None, Some(elements)) => Edit::Remove(elements.0.into_iter().map(|element| element.0).collect()),
            _ => return Err(self.wrong(span, "write replace, with `with`, or remove_element")),
        };
        Ok(BodyChange {
            status: raw.status.0.into_iter().map(|s| s.0.0).collect(),
            media: raw.media.0.into_iter().map(|m| m.0).collect(),
            what,
            until: raw.until.map(|n| n.0.into()),
        })
    }
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

//! Changes of the fields of HTTP heads, from the TOML file.

use super::{
    ConfigError,
    site::Statuses,
    source::SourceFile,
    value::{Many, OrNumber, Parsed, Tables},
};
use crate::fields::{Change, Expression, FieldChange, FieldChanges, Name, Names, Value, may_replace};
use serde::Deserialize;
use toml::Spanned;

/// The table `fields` of a listener or a route.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFields {
    #[serde(default)]
    request: Tables<Spanned<RawChange>>,
    #[serde(default)]
    reply: Tables<Spanned<RawChange>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawChange {
    set: Option<Parsed<Name>>,
    add: Option<Parsed<Name>>,
    default: Option<Parsed<Name>>,
    value: Option<Parsed<Value>>,
    remove: Option<Many<Parsed<Names>>>,
    replace: Option<Parsed<Name>>,
    #[serde(rename = "match")]
    expression: Option<Parsed<Expression>>,
    with: Option<Spanned<String>>,
    status: Option<Spanned<Many<OrNumber<Statuses>>>>,
}

impl SourceFile<'_> {
    pub(super) fn fields(&self, raw: RawFields) -> Result<FieldChanges, ConfigError> {
        let list = |raw: Tables<_>, of_request| -> Result<Vec<_>, _> {
            raw.0.into_iter().map(|change| self.field_change(change, of_request)).collect()
        };
        Ok(FieldChanges { request: list(raw.request, true)?, reply: list(raw.reply, false)? })
    }

    fn field_change(&self, raw: Spanned<RawChange>, of_request: bool) -> Result<FieldChange, ConfigError> {
        let span = raw.span();
        let wrong = |cure: &str| Err(self.wrong(span.clone(), cure));
        let raw = raw.into_inner();
        let with_value = [raw.set.is_some(), raw.add.is_some(), raw.default.is_some()].contains(&true);
        let what = match (raw.set, raw.add, raw.default, raw.value, raw.remove, raw.replace, raw.expression, raw.with) {
            (Some(name), None, None, Some(value), None, None, None, None) => Change::Set(name.0, value.0),
            (None, Some(name), None, Some(value), None, None, None, None) => Change::Add(name.0, value.0),
            (None, None, Some(name), Some(value), None, None, None, None) => Change::Default(name.0, value.0),
            (None, None, None, None, Some(names), None, None, None) => {
                Change::Remove(names.0.into_iter().map(|name| name.0).collect())
            }
            (None, None, None, None, None, Some(name), Some(expression), Some(with)) => {
                may_replace(with.get_ref()).map_err(|e| self.wrong(with.span(), &e))?;
                Change::Replace(name.0, expression.0, with.into_inner())
            }
            (_, _, _, None, None, None, None, None) if with_value => {
                return wrong("a value is missing: add value = \"TEXT\"");
            }
            _ => {
                return wrong(
                    "write one of set, add and default, each with value; or remove; or replace, with match and with",
                );
            }
        };
        let host = match &what {
            Change::Set(name, value) if name.is_host() => of_request && value.is_good_host(),
            Change::Set(name, _) | Change::Add(name, _) | Change::Default(name, _) | Change::Replace(name, ..) => {
                !name.is_host()
            }
            Change::Remove(names) => !names.iter().any(Names::is_host),
        };
        if !host {
            return wrong("each request has one Host: write set = \"Host\" for requests, with a host or \"${host}\"");
        }
        if let (Some(status), true) = (&raw.status, of_request) {
            return Err(self.wrong(status.span(), "requests have no status: remove the key"));
        }
        let status = raw.status.into_iter().flat_map(|s| s.into_inner().0).map(|s| s.0.0).collect();
        Ok(FieldChange { status, what })
    }
}

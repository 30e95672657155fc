//! What a route of a site does with paths, from the TOML file.

use super::{
    ConfigError,
    source::SourceFile,
    value::{OrNumber, Parsed},
};
use crate::routes::{Location, Paths, PlainPath, Redirect, Regex, Rewrite};
use serde::Deserialize;
use std::str::FromStr;
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRewrite {
    prefix: Option<Parsed<PlainPath>>,
    regex: Option<Parsed<Regex>>,
    to: Option<Spanned<String>>,
    replies: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRedirect {
    to: Parsed<Location>,
    status: Option<OrNumber<RedirectStatus>>,
}

/// A status with which clients go elsewhere.
struct RedirectStatus(u16);

impl FromStr for RedirectStatus {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "301" | "302" | "303" | "307" | "308" => Ok(RedirectStatus(text.parse().unwrap_or(302))),
            _ => Err("bad status: write 301, 302, 303, 307 or 308"),
        }
    }
}

impl SourceFile<'_> {
    /// Returns what becomes of paths, and whether that is undone in replies.
    pub(super) fn rewrite(&self, raw: Spanned<RawRewrite>, path: &Paths) -> Result<(Rewrite, bool), ConfigError> {
        let span = raw.span();
        match raw.into_inner() {
            RawRewrite { prefix: Some(to), regex: None, to: None, replies } => match path {
                Paths::Below(from) => Ok((Rewrite::Prefix(from.clone(), to.0), replies.unwrap_or(true))),
                _ => {
                    Err(self.wrong(span, "`prefix` replaces the route's `path`: use that, or rewrite by regex and to"))
                }
            },
            RawRewrite { prefix: None, regex: Some(regex), to: Some(to), replies: None } => {
                let is_good = |b: u8| b.is_ascii_graphic() && b != b'#';
                if !to.get_ref().bytes().all(is_good) {
                    return Err(self.wrong(to.span(), "bad path: write other than ASCII, spaces and `#` as %XX"));
                }
                Ok((Rewrite::Regex(regex.0, to.into_inner()), false))
            }
            RawRewrite { regex: Some(_), replies: Some(_), .. } => {
                Err(self.wrong(span, "only a prefix can be undone in replies: remove `replies`"))
            }
            _ => Err(self.wrong(span, "write prefix = \"/NEW\", or regex = 'EXPRESSION' with to = \"/NEW/$1\"")),
        }
    }
}

impl From<RawRedirect> for Redirect {
    fn from(raw: RawRedirect) -> Redirect {
        Redirect { status: raw.status.map_or(302, |s| s.0.0), to: raw.to.0 }
    }
}

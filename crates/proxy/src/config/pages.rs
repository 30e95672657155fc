//! Error pages, from the TOML file.

use super::{
    ConfigError,
    source::SourceFile,
    value::{Many, OrNumber, Tables},
};
use crate::pages::{ErrorPage, ErrorPages};
use serde::Deserialize;
use std::{fs, io::Read, ops::RangeInclusive, path::PathBuf, str::FromStr};
use toml::Spanned;

/// Largest page in bytes: all are kept in memory, and written at once.
const PAGE_MAX: u64 = 256 * 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawErrorPage {
    status: Many<OrNumber<Errors>>,
    file: Spanned<PathBuf>,
    #[serde(rename = "type")]
    media_type: Option<Spanned<String>>,
    #[serde(default)]
    servers: bool,
}

/// Statuses of errors.
struct Errors(RangeInclusive<u16>);

impl FromStr for Errors {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let status = |t: &str| t.trim().parse().ok().filter(|n| (400..=599).contains(n));
        match (status(first), status(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Errors(first..=last)),
            _ => Err("bad status: write one such as 404, or FIRST-LAST such as 500-599, from 400 to 599"),
        }
    }
}

impl SourceFile<'_> {
    pub(super) fn error_pages(&self, raw: Tables<RawErrorPage>) -> Result<ErrorPages, ConfigError> {
        raw.0.into_iter().map(|page| self.error_page(page)).collect::<Result<_, _>>().map(ErrorPages)
    }

    fn error_page(&self, raw: RawErrorPage) -> Result<ErrorPage, ConfigError> {
        let path = self.path(raw.file.get_ref());
        let wrong = |e: &dyn std::fmt::Display| self.wrong(raw.file.span(), &format!("{}: {e}", path.display()));
        let mut body = Vec::new();
        let file = fs::File::open(&path).map_err(|e| wrong(&e))?;
        file.take(PAGE_MAX + 1).read_to_end(&mut body).map_err(|e| wrong(&e))?;
        if body.len() as u64 > PAGE_MAX {
            return Err(wrong(&format!("more than {PAGE_MAX} bytes: make it smaller")));
        }
        let guessed = match path.extension().and_then(|e| e.to_str()) {
            Some("html" | "htm") => "text/html; charset=utf-8",
            Some("json") => "application/json",
            _ => "text/plain; charset=utf-8",
        };
        let media_type = match raw.media_type {
            Some(given) => {
                if !given.get_ref().contains('/') || !given.get_ref().bytes().all(|b| (b' '..0x7f).contains(&b)) {
                    return Err(self.wrong(given.span(), "bad media type: write one such as \"text/html\""));
                }
                given.into_inner()
            }
            None => guessed.into(),
        };
        let status = raw.status.0.into_iter().map(|s| s.0.0).collect();
        Ok(ErrorPage { status, media_type, body: body.into(), of_servers: raw.servers })
    }
}

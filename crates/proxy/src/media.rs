//! Media types, and the elements of fields that are lists.

use longsplice_http::Response;
use std::str::FromStr;

/// A media type, `text/html` or `image/*`, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaType {
    kind: String,
    /// `None`: any.
    subtype: Option<String>,
}

/// Returns the elements of a field that the client will get, without parameters, in lower case.
pub fn list(reply: &Response, name: &str) -> Vec<String> {
    elements(reply.passed_on(name))
}

/// The same, of all values of a field.
pub fn elements<'a>(values: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let elements = values.flat_map(|value| value.split(|b| *b == b','));
    let plain = elements.map(|e| e.split(|b| *b == b';').next().unwrap_or_default().trim_ascii());
    plain.filter(|e| !e.is_empty()).map(|e| String::from_utf8_lossy(e).to_ascii_lowercase()).collect()
}

/// Whether a text is a token without `*`, which stands for any.
pub(crate) fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'+-.^_`|~".contains(&b))
}

impl MediaType {
    /// Whether a type, in lower case and without parameters, is this one.
    pub fn matches(&self, found: &str) -> bool {
        let (kind, subtype) = found.split_once('/').unwrap_or((found, ""));
        self.kind == kind && self.subtype.as_ref().is_none_or(|own| own == subtype)
    }
}

impl FromStr for MediaType {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.to_ascii_lowercase();
        match text.split_once('/') {
            Some((kind, "*")) if is_token(kind) => Ok(MediaType { kind: kind.into(), subtype: None }),
            Some((kind, subtype)) if is_token(kind) && is_token(subtype) => {
                Ok(MediaType { kind: kind.into(), subtype: Some(subtype.into()) })
            }
            _ => Err("bad media type: write one such as text/html, or image/*, without parameters"),
        }
    }
}

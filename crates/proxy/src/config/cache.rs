//! The cache of an HTTP listener, from the TOML file.

use super::{
    ConfigError, ListenerConfig,
    source::SourceFile,
    value::{Many, Parsed, Seconds},
};
use crate::access::Prefix;
use serde::Deserialize;
use std::{ops::Range, path::PathBuf, time::Duration};
use toml::Spanned;

/// Default maximum size in bytes, which a small machine can spare.
const SIZE: u64 = 1 << 30;
/// Minimum of the maximum size in bytes: a smaller cache is useless.
const SIZE_MIN: u64 = 1 << 20;

/// Location and size of a listener's cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheConfig {
    /// Directory of the cache.
    pub dir: PathBuf,
    /// Maximum size on the disk, in bytes.
    pub size: u64,
    /// Maximum size of a stored body, in bytes.
    pub object: u64,
    /// How long stale replies are sent while the server is asked again (RFC 5861), unless they say it themselves.
    pub stale_while_revalidate: Option<Duration>,
    /// How long stale replies are sent if the server fails, unless they say it themselves.
    pub stale_if_error: Option<Duration>,
    /// How long a request waits for another one with the same URL; none: not at all.
    pub collapse: Option<Duration>,
    /// Clients that may remove replies with PURGE; none: PURGE is a method like others.
    pub purge: Vec<Prefix>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCache {
    dir: Spanned<PathBuf>,
    size: Option<Spanned<u64>>,
    object: Option<Spanned<u64>>,
    stale_while_revalidate: Option<Seconds>,
    stale_if_error: Option<Seconds>,
    collapse: Option<Seconds>,
    #[serde(default)]
    purge: Many<Parsed<Prefix>>,
}

impl SourceFile<'_> {
    pub(super) fn cache(&self, raw: RawCache) -> Result<CacheConfig, ConfigError> {
        let (at, size) = value(raw.size, SIZE);
        if size < SIZE_MIN {
            return Err(self.wrong(at, &format!("a cache of {size} bytes holds nothing: write {SIZE_MIN} or more")));
        }
        let (at, object) = value(raw.object, size / 4);
        if object == 0 || object > size {
            return Err(self.wrong(at, &format!("bodies of {object} bytes: write a number from 1 to the size, {size}")));
        }
        let (at, dir) = (raw.dir.span(), raw.dir.into_inner());
        if dir.as_os_str().is_empty() {
            return Err(self.wrong(at, "no directory for the cache: write dir = \"PATH\""));
        }
        Ok(CacheConfig {
            dir: self.path(&dir),
            size,
            object,
            stale_while_revalidate: raw.stale_while_revalidate.map(|s| s.0),
            stale_if_error: raw.stale_if_error.map(|s| s.0),
            collapse: raw.collapse.map(|s| s.0),
            purge: raw.purge.0.into_iter().map(|p| p.0).collect(),
        })
    }
}

fn value(raw: Option<Spanned<u64>>, default: u64) -> (Range<usize>, u64) {
    raw.map_or((0..0, default), |v| (v.span(), v.into_inner()))
}

/// Whether another listener uses the same directory with different keys.
pub(super) fn disagree(all: &[ListenerConfig], new: &ListenerConfig) -> bool {
    let Some(new) = new.cache() else { return false };
    all.iter().filter_map(ListenerConfig::cache).any(|c| c.dir == new.dir && c != new)
}

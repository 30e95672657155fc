//! The table `tpot`: for which connections of this machine to ask for proxies, and how proxies prove who they are.

use super::{
    ConfigError,
    source::SourceFile,
    value::{Many, OrNumber, Parsed},
};
use crate::{
    access::{PortRange, Prefix},
    secrets::keys::{KeyFileError, read_keys},
};
use longsplice_engine::{TpotKey, TpotOptions, TpotUdp};
use serde::Deserialize;
use std::{num::NonZeroU8, path::PathBuf};
use toml::Spanned;

/// For which connections of this machine to ask for a proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asking {
    /// Addresses of the proxies that may intercept them; empty: all that have one of `keys`.
    pub proxies: Vec<Prefix>,
    /// Keys, one of which a proxy must have to intercept them; empty: none. This machine proves with the first one that it may
    /// intercept connections of others.
    pub keys: Vec<TpotKey>,
    /// Ports of their destinations; empty: asks for none.
    pub ports: Vec<PortRange>,
    /// Addresses of their destinations; empty: all.
    pub to: Vec<Prefix>,
    /// How many proxies may intercept them, one after the other. Does not apply to connections that were intercepted here.
    pub hops: u8,
    /// Identifier of the TCP option. Applies to interception as well.
    pub exid: u16,
    /// When tunnels are in UDP. Applies to interception as well.
    pub udp: TpotUdp,
}

impl Default for Asking {
    fn default() -> Asking {
        let TpotOptions { hops, exid, udp, .. } = TpotOptions::default();
        Asking { proxies: Vec::new(), keys: Vec::new(), ports: Vec::new(), to: Vec::new(), hops, exid, udp }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawAsking {
    #[serde(default)]
    proxies: Many<Parsed<Prefix>>,
    key_file: Option<Spanned<PathBuf>>,
    #[serde(default)]
    ports: Many<OrNumber<PortRange>>,
    #[serde(default)]
    to: Many<Parsed<Prefix>>,
    hops: Option<NonZeroU8>,
    exid: Option<u16>,
    #[serde(default)]
    udp: TpotUdp,
}

impl SourceFile<'_> {
    /// Reads the table. `intercepts`: whether there is a listener of `protocol = "tpot"`, which uses its keys and identifier.
    pub(super) fn asking(&self, raw: Spanned<RawAsking>, intercepts: bool) -> Result<Asking, ConfigError> {
        let (span, raw) = (raw.span(), raw.into_inner());
        let all = |prefixes: Many<Parsed<Prefix>>| prefixes.0.into_iter().map(|p| p.0).collect();
        let usual = Asking::default();
        let asking = Asking {
            proxies: all(raw.proxies),
            keys: raw.key_file.map_or(Ok(Vec::new()), |file| self.keys(&file))?,
            ports: raw.ports.0.into_iter().map(|p| p.0).collect(),
            to: all(raw.to),
            hops: raw.hops.map_or(usual.hops, NonZeroU8::get),
            exid: raw.exid.unwrap_or(usual.exid),
            udp: raw.udp,
        };
        let asks = !asking.ports.is_empty();
        let about_asking = !asking.proxies.is_empty() || !asking.to.is_empty() || raw.hops.is_some();
        let mistake = match asks {
            true if asking.proxies.is_empty() && asking.keys.is_empty() => {
                "nobody may intercept these connections: add proxies = ... or key_file = ..."
            }
            false if about_asking => "connections to no port ask for proxies: add ports = ...",
            false if !intercepts => {
                "nothing uses this: add ports = ... to ask for proxies, or a listener of protocol = \"tpot\""
            }
            _ => return Ok(asking),
        };
        Err(self.wrong(span, mistake))
    }

    fn keys(&self, file: &Spanned<PathBuf>) -> Result<Vec<TpotKey>, ConfigError> {
        read_keys(&self.path(file.get_ref())).map_err(|e| match e {
            KeyFileError::Line { file, line, column, mistake } => {
                ConfigError::Wrong { file, line, column, message: mistake.to_string() }
            }
            e => self.wrong(file.span(), &e),
        })
    }
}

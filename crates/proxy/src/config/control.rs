//! `control`: the sockets on which operators ask. Its value is the path of the first one, or a table.

use super::table::{Keys, Table};
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use std::{
    ffi::OsStr,
    fmt,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use toml::Spanned;

/// Longest path of a Unix socket in bytes (unix(7): 108, with the zero at its end), less what the name has at first, which is
/// longer by the number of the process.
const PATH_MAX: usize = 107 - ".new-4194304".len();

/// What stands there.
#[derive(Default)]
pub(super) struct RawControl {
    /// That of the program's own commands.
    pub path: Option<PathBuf>,
    /// That of tools for HAProxy.
    pub haproxy: Option<Spanned<PathBuf>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum ControlKey {
    Path,
    Haproxy,
}

impl Keys for RawControl {
    type Key = ControlKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: ControlKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            ControlKey::Path => self.path = Some(table.next_value()?),
            ControlKey::Haproxy => self.haproxy = Some(table.next_value()?),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for RawControl {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawControl;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the path of a socket, or a table with the keys path and haproxy")
            }
            fn visit_str<E: de::Error>(self, path: &str) -> Result<RawControl, E> {
                Ok(RawControl { path: Some(path.into()), haproxy: None })
            }
            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<RawControl, A::Error> {
                Table::deserialize(MapAccessDeserializer::new(table)).map(|Table(control)| control)
            }
        }
        d.deserialize_any(V)
    }
}

/// Returns what is wrong with the path of the second socket, if something is. `control`: the first one.
pub(super) fn mistake(haproxy: &Path, control: Option<&Path>) -> Option<&'static str> {
    match haproxy.file_name().map(OsStr::as_bytes) {
        None => Some("no name of a file: write the path of a socket, such as \"/run/longsplice/haproxy.sock\""),
        Some(_) if haproxy.as_os_str().len() > PATH_MAX => {
            Some("too long for the path of a socket: write one of at most 95 bytes")
        }
        Some(_) if control == Some(haproxy) => Some("the control socket has this path: write another one"),
        Some(_) => None,
    }
}

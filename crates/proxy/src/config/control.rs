//! `control`: the sockets on which operators ask. Its value is the path of the first one, or a table.

use super::{
    table::{Keys, Table},
    value::Parsed,
};
use nix::unistd::Group;
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use std::{
    ffi::OsStr,
    fmt,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    str::FromStr,
};
use toml::Spanned;

/// Longest path of a Unix socket in bytes (unix(7): 108, with the zero at its end), less what the name has at first, which is
/// longer by the number of the process.
const PATH_MAX: usize = 107 - ".new-4194304".len();

/// Who may open the control sockets, besides the user who runs the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketAccess {
    /// Group of the files. `None`: that of the process.
    pub group: Option<u32>,
    /// Their permission bits.
    pub mode: u32,
}

impl Default for SocketAccess {
    fn default() -> Self {
        SocketAccess { group: None, mode: 0o600 }
    }
}

/// A group of this machine.
struct OfGroup(u32);

impl FromStr for OfGroup {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if let Ok(number) = name.parse() {
            return Ok(OfGroup(number));
        }
        match Group::from_name(name) {
            Ok(Some(group)) => Ok(OfGroup(group.gid.as_raw())),
            Ok(None) => {
                Err(format!("this machine has no group {name:?}: create it, or write another one, or its number"))
            }
            Err(error) => Err(format!("cannot look up group {name:?}: {error}")),
        }
    }
}

/// Permission bits, in octal digits.
struct Mode(u32);

impl FromStr for Mode {
    type Err = &'static str;

    fn from_str(digits: &str) -> Result<Self, Self::Err> {
        match u32::from_str_radix(digits, 8) {
            Ok(0o600) => Ok(Mode(0o600)),
            Ok(0o660) => Ok(Mode(0o660)),
            Ok(mode) if mode & 0o007 != 0 => {
                Err("everybody on this machine could end connections: write \"0660\", and a group")
            }
            _ => Err("write \"0600\", or \"0660\" for the group as well"),
        }
    }
}

/// What stands there.
#[derive(Default)]
pub(super) struct RawControl {
    /// That of the program's own commands.
    pub path: Option<PathBuf>,
    /// That of tools for HAProxy.
    pub haproxy: Option<Spanned<PathBuf>>,
    group: Option<u32>,
    mode: Option<u32>,
}

impl RawControl {
    pub fn access(&self) -> SocketAccess {
        let usual = if self.group.is_some() { 0o660 } else { SocketAccess::default().mode };
        SocketAccess { group: self.group, mode: self.mode.unwrap_or(usual) }
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum ControlKey {
    Path,
    Haproxy,
    Group,
    Mode,
}

impl Keys for RawControl {
    type Key = ControlKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: ControlKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            ControlKey::Path => self.path = Some(table.next_value()?),
            ControlKey::Haproxy => self.haproxy = Some(table.next_value()?),
            ControlKey::Group => self.group = Some(table.next_value::<Parsed<OfGroup>>()?.0.0),
            ControlKey::Mode => self.mode = Some(table.next_value::<Parsed<Mode>>()?.0.0),
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
                f.write_str("the path of a socket, or a table with the keys path, haproxy, group and mode")
            }
            fn visit_str<E: de::Error>(self, path: &str) -> Result<RawControl, E> {
                Ok(RawControl { path: Some(path.into()), ..RawControl::default() })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn read(control: &str) -> Result<SocketAccess, String> {
        let text = format!("[control]\n{control}\n[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:0\"\n");
        let config = Config::from_toml(&text, Path::new("/etc/longsplice.toml"));
        config.map(|config| config.control_access).map_err(|e| e.to_string())
    }

    #[test]
    fn a_group_may_get_access() {
        let (nobody, root) = (SocketAccess::default(), SocketAccess { group: Some(0), mode: 0o660 });
        assert_eq!(nobody, SocketAccess { group: None, mode: 0o600 });
        assert_eq!(read(""), Ok(nobody));
        assert_eq!(read("group = \"root\""), Ok(root));
        assert_eq!(read("group = \"0\"\nmode = \"0660\""), Ok(root));
        assert_eq!(read("group = \"0\"\nmode = \"600\""), Ok(SocketAccess { mode: 0o600, ..root }));
    }

    #[test]
    fn wrong_access_is_told_where_it_stands() {
        for (control, at, why) in [
            (
                "group = \"no such group\"",
                "2:9",
                "this machine has no group \"no such group\": create it, or write another one",
            ),
            ("mode = \"0666\"", "2:8", "everybody on this machine could end connections: write \"0660\", and a group"),
            ("mode = \"0640\"", "2:8", "write \"0600\", or \"0660\" for the group as well"),
            ("mode = \"rw-rw----\"", "2:8", "write \"0600\""),
            ("mode = 660", "2:8", "expected a string"),
        ] {
            let said = read(control).unwrap_err();
            assert!(said.contains(why) && said.contains(&format!("longsplice.toml:{at}")), "{control}: {said}");
        }
    }
}

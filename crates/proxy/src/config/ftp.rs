//! Configuration of an FTP listener.

use super::{
    source::SourceFile,
    table::{Keys, Table},
    value::{OrNumber, Parsed},
};
use crate::{
    access::PortRange,
    config::{ConfigError, pool::LeadTo},
    users::Users,
};
use serde::{Deserialize, de::MapAccess};
use std::{net::Ipv4Addr, ops::Range};
use toml::Spanned;

/// Configuration of an FTP listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ftp {
    /// The server, or the pool of servers; none: clients name it when they log in, as `user@host` (RFC 1919).
    pub target: Option<LeadTo>,
    /// Users with access; empty: everybody.
    pub users: Users,
    /// The table `ftp`.
    pub options: FtpOptions,
}

/// The table `ftp` of a listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FtpOptions {
    /// Who opens data connections between the proxy and servers.
    pub data: DataMode,
    /// What becomes of AUTH.
    pub tls: FtpTls,
    /// Ports on which data connections are awaited; none: the kernel chooses.
    pub ports: Option<PortRange>,
    /// Whether clients may ask for data connections to ports below 1024 (RFC 2577, 3).
    pub low_ports: bool,
    /// Our address as clients see it, if a router translates it.
    pub address: Option<Ipv4Addr>,
}

/// Who opens data connections between the proxy and servers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataMode {
    /// The proxy, whatever the client asks for.
    #[default]
    Passive,
    /// The server, whatever the client asks for.
    Active,
    /// As the client asks for.
    AsClient,
}

/// What becomes of AUTH (RFC 4217).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FtpTls {
    /// It is refused: 502.
    #[default]
    Refuse,
    /// The server gets it. If it agrees, the control connection is relayed like that of a plug from there on, and data
    /// connections are the clients' own.
    Relay,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum FtpKey {
    Data,
    Tls,
    Ports,
    LowPorts,
    Address,
}

impl Keys for FtpOptions {
    type Key = FtpKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: FtpKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            FtpKey::Data => self.data = table.next_value()?,
            FtpKey::Tls => self.tls = table.next_value()?,
            FtpKey::Ports => self.ports = Some(table.next_value::<OrNumber<PortRange>>()?.0),
            FtpKey::LowPorts => self.low_ports = table.next_value()?,
            FtpKey::Address => self.address = Some(table.next_value::<Parsed<Ipv4Addr>>()?.0),
        }
        Ok(())
    }
}

impl SourceFile<'_> {
    /// Returns the configuration of an FTP listener. `is_transparent`: clients want a server. `judges`: where it has rules on
    /// verbs or paths.
    pub(super) fn ftp(
        &self,
        (target, is_transparent): (Option<LeadTo>, bool),
        users: Users,
        options: Option<Spanned<Table<FtpOptions>>>,
        judges: Option<Range<usize>>,
    ) -> Result<Ftp, ConfigError> {
        let Some(spanned) = options else { return Ok(Ftp { target, users, options: FtpOptions::default() }) };
        let (span, options) = (spanned.span(), spanned.into_inner().0);
        if options.address.is_some() && is_transparent {
            return Err(self.wrong(span, "clients know the server by its own address: remove `address`"));
        }
        if options.tls == FtpTls::Relay {
            let wrong = |why: &str| Err(self.wrong(span.clone(), &format!("{why}, or use tls = \"refuse\"")));
            if (target.is_none() && !is_transparent) || !users.is_empty() {
                return wrong(
                    "AUTH comes before the login, which the proxy has to see: add a target, and remove users",
                );
            }
            if judges.is_some() {
                return wrong("nobody can read commands after AUTH: remove the rules with methods and path");
            }
        }
        Ok(Ftp { target, users, options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ListenerConfig};
    use longsplice_engine::SpliceWhen;
    use std::path::Path;

    const FTP: &str = "[[listener]]\nprotocol = \"ftp\"\nlisten = \"[::1]:21\"\n";
    const TARGET: &str = "target = \"a:21\"\n";

    fn read(more: &str) -> Result<ListenerConfig, String> {
        let config = Config::from_toml(&format!("{FTP}{more}"), Path::new("l.toml"));
        config.map(|config| config.listeners.into_iter().next().unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn what_an_ftp_listener_may_have() {
        let of = |more: &str| read(more).unwrap().ftp().unwrap().clone();
        assert_eq!(of(""), Ftp::default());
        let all = of("ftp = { data = \"active\", ports = \"1-2\", low_ports = true, address = \"192.0.2.1\" }");
        let ports = Some(PortRange { first: 1, last: 2 });
        let address = Some(Ipv4Addr::new(192, 0, 2, 1));
        let want = FtpOptions { data: DataMode::Active, tls: FtpTls::Refuse, ports, low_ports: true, address };
        assert_eq!(all.options, want);
        assert_eq!(of(&format!("{TARGET}ftp.tls = \"relay\"")).options.tls, FtpTls::Relay);
        let pooled = read("pool = \"a\"\nftp.tls = \"relay\"\n[pool.a]\nservers = [\"a:21\"]").unwrap();
        assert_eq!((pooled.fixed_pool(), pooled.fixed_target(), pooled.rules.guarded), (Some("a"), None, false));
        for (more, why) in [("", "5:8: a listener has a target or a pool"), ("x", "5:8: there is no pool \"ax\"")] {
            let target = if more.is_empty() { TARGET } else { "name = \"x\"\n" };
            let why_not = read(&format!("{target}pool = \"a{more}\"\n[pool.a]\nservers = [\"a:21\"]")).unwrap_err();
            assert!(why_not.contains(why), "{why_not}");
        }
        assert!(read("").unwrap().rules.guarded && !read(TARGET).unwrap().rules.guarded);
        assert!(read("rules = [{ action = \"deny\", methods = \"STOR\", path = \"/a*\" }]").is_ok());
    }

    #[test]
    fn tls_is_relayed_only_where_nobody_has_to_read_commands() {
        for more in ["", "target = \"a:21\"\nusers = { ann = \"x\" }\n"] {
            assert!(read(&format!("{more}ftp.tls = \"relay\"")).unwrap_err().contains("AUTH comes before the login"));
        }
        let rules = "rules = [{ action = \"deny\", methods = \"STOR\" }]\n";
        let why = read(&format!("{TARGET}{rules}ftp.tls = \"relay\"")).unwrap_err();
        assert!(why.starts_with("l.toml:6:1: nobody can read commands after AUTH"), "{why}");
    }

    #[test]
    fn keys_of_others() {
        for (more, why) in [
            ("via = \"x\"", "only HTTP has this"),
            ("port = 990", "only TLS has such a port"),
            ("handshake = \"proxy\"", "only plugs"),
            ("proxy_protocol.from = \"10.0.0.0/8\"", "data connections have no such header"),
            ("route = [{ name = \"a\" }]", "only HTTP and TLS have routes"),
        ] {
            let found = read(more).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        let plug = "[[listener]]\nprotocol = \"plug\"\nlisten = \"[::1]:1\"\ntarget = \"a:1\"\nftp.data = \"active\"";
        let why = Config::from_toml(plug, Path::new("l.toml")).unwrap_err().to_string();
        assert!(why.contains("only FTP has this"), "{why}");
    }

    #[test]
    fn data_connections_are_spliced_at_once_unless_told_otherwise() {
        let when = |more: &str| read(more).unwrap().policy_of_bodies().when;
        assert_eq!(when(""), SpliceWhen::AtOnce);
        assert_eq!(when("policy.splice = \"never\""), SpliceWhen::Never);
        assert_eq!(when("policy.splice = 100"), SpliceWhen::AfterBytes(100));
    }
}

//! Keys of listeners whose connections are routed through this machine (`protocol = "tpot"`, `transparent = true`), and of those
//! that show servers the client's address (`source`).

use super::{
    ConfigError,
    file::{Inside, Listener, Name},
    source::SourceFile,
};
use longsplice_engine::TpotWhose;
use serde::Deserialize;
use toml::Spanned;

/// Whose address servers see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shown {
    /// One of this machine.
    #[default]
    Own,
    /// The client's.
    Client,
}

impl SourceFile<'_> {
    /// Returns whose connections the listener intercepts, if it does, and sets the protocol that is read inside of them.
    pub(super) fn intercepts(&self, raw: &mut Listener) -> Result<Option<TpotWhose>, ConfigError> {
        let inside = raw.inside.as_ref();
        if raw.protocol != Name::Tpot {
            let only = "only connections that ask for a proxy have this: remove the key, or use protocol = \"tpot\"";
            return match inside {
                Some(inside) => Err(self.wrong(inside.span(), only)),
                None => self.transparent(raw),
            };
        }
        if let Some(transparent) = &raw.transparent {
            return Err(self.wrong(transparent.span(), "it always is: remove the key"));
        }
        raw.protocol = match inside.map(Spanned::get_ref) {
            None | Some(Inside::Bytes) => Name::Tpot,
            Some(Inside::Http) => Name::Http,
            Some(Inside::Tls) => Name::Tls,
        };
        let destination = raw.route.0.first().map(Spanned::span).or(raw.target.as_ref().map(Spanned::span));
        if let Some(span) = destination.or(raw.port.as_ref().map(Spanned::span)) {
            return Err(self.wrong(span, "intercepted connections go where their clients want: remove this"));
        }
        self.knows_no_users(raw)?;
        Ok(Some(TpotWhose::Askers))
    }

    fn transparent(&self, raw: &Listener) -> Result<Option<TpotWhose>, ConfigError> {
        let Some(at) = raw.transparent.as_ref().filter(|transparent| *transparent.get_ref()).map(Spanned::span) else {
            return Ok(None);
        };
        let cure = match raw.protocol {
            Name::Socks5 => "nobody speaks SOCKS to a proxy that nobody knows of: remove the key",
            Name::Transparent | Name::Tpot => "it always is: remove the key",
            _ if raw.listen.get_ref().0.0.port() == 0 => {
                "a transparent listener needs a port: write that of the servers in `listen`"
            }
            Name::Http | Name::Tls | Name::Plug | Name::Ftp | Name::Login => {
                if matches!(raw.protocol, Name::Http | Name::Ftp) {
                    self.knows_no_users(raw)?;
                }
                if let Some(port) = &raw.port {
                    return Err(self.wrong(port.span(), "transparent connections have their ports: remove the key"));
                }
                return Ok(Some(TpotWhose::All));
            }
        };
        Err(self.wrong(at, cure))
    }

    fn knows_no_users(&self, raw: &Listener) -> Result<(), ConfigError> {
        match raw.users.as_ref().map(Spanned::span).or(raw.users_file.as_ref().map(Spanned::span)) {
            Some(users) => Err(self.wrong(
                users,
                "clients of intercepted connections cannot authenticate, as they know of no proxy: remove the users",
            )),
            None => Ok(()),
        }
    }

    /// Returns whether servers see the client's address.
    pub(super) fn shows_clients(&self, raw: &Listener, end_to_end: bool) -> Result<bool, ConfigError> {
        let Some(source) = &raw.source else { return Ok(false) };
        let cure = match raw.protocol {
            Name::Transparent => "both hosts see each other: remove the key",
            Name::Plug if end_to_end && *source.get_ref() == Shown::Client => {
                "such a handshake comes from our address: remove the key, or use handshake = \"proxy\""
            }
            _ => return Ok(*source.get_ref() == Shown::Client),
        };
        Err(self.wrong(source.span(), cure))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        ListenerConfig, Protocol,
        ftp::FtpTls,
        tests::{mistake, read},
    };
    use longsplice_engine::{TpotHandshake, TpotWhose};

    fn text(protocol: &str, more: &str) -> String {
        format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"0.0.0.0:80\"\n{more}\n")
    }

    fn one(protocol: &str, more: &str) -> ListenerConfig {
        read(&text(protocol, more)).unwrap().listeners.remove(0)
    }

    #[track_caller]
    fn refused(protocol: &str, more: &str, (line, column): (usize, usize), cure: &str) {
        let (l, c, message) = mistake(&text(protocol, more));
        assert!((l, c) == (line, column) && message.contains(cure), "{l}:{c}: {message}");
    }

    #[test]
    fn connections_that_are_routed_through_the_machine() {
        for protocol in ["plug", "http", "tls", "ftp"] {
            let listener = one(protocol, "transparent = true");
            assert_eq!((listener.protocol.name(), listener.intercepts), (protocol, Some(TpotWhose::All)));
            assert!(listener.rules.guarded && !listener.binds() && !listener.shows_clients);
        }
        let led = one("plug", "transparent = true\ntarget = \"a:1\"");
        assert!(matches!(&led.protocol, Protocol::Plug { target: Some(_), .. }) && !led.rules.guarded);
        assert_eq!(one("http", "transparent = false").intercepts, None);
        let early = one("plug", "transparent = true\nhandshake = \"confirm\"");
        assert_eq!(early.handshake, TpotHandshake::Confirm);
        refused("plug", "", (1, 1), "or transparent = true");
        refused("plug", "transparent = true\nhandshake = \"end-to-end\"", (5, 13), "\"basic\", \"pipelined\" or");
        refused("plug", "transparent = true\ntarget = \"a:1\"\nhandshake = \"confirm\"", (6, 13), "remove `target`");
        refused("http", "transparent = true\nhandshake = \"pipelined\"", (5, 13), "what the client sends");
        refused("http", "transparent = true\nusers = { a = \"b\" }", (5, 9), "cannot authenticate");
        refused("tls", "transparent = true\nport = 443", (5, 8), "have their ports");
        refused("socks5", "transparent = true", (4, 15), "nobody speaks SOCKS");
        refused("transparent", "transparent = true", (4, 15), "always is");
        refused("tpot", "transparent = true", (4, 15), "always is");
        refused("ftp", "transparent = true\nusers = { a = \"b\" }", (5, 9), "cannot authenticate");
        refused("ftp", "transparent = true\nhandshake = \"pipelined\"", (5, 13), "what the client sends");
        refused("ftp", "transparent = true\nftp.address = \"192.0.2.1\"", (5, 1), "its own address");
        let relays = one("ftp", "transparent = true\nftp.tls = \"relay\"");
        assert_eq!(relays.ftp().map(|ftp| ftp.options.tls), Some(FtpTls::Relay));
        let asks = one("login", "transparent = true\nusers = { a = \"b\" }");
        assert!(matches!(&asks.protocol, Protocol::Login(login) if login.free) && asks.rules.guarded);
        refused("login", "transparent = true", (1, 1), "nothing would be asked");
        let (_, _, message) = mistake(&text("http", "transparent = true").replace(":80", ":0"));
        assert!(message.contains("needs a port"), "{message}");
    }

    #[test]
    fn whom_servers_see() {
        for protocol in ["socks5", "http", "tls", "tpot", "ftp"] {
            assert!(one(protocol, "source = \"client\"").shows_clients);
        }
        assert!(!one("ftp", "source = \"own\"").shows_clients);
        refused("transparent", "source = \"client\"", (4, 10), "both hosts see each other");
        let plug = "target = \"10.0.0.1:1\"\nhandshake = \"end-to-end\"\nsource = \"client\"";
        refused("plug", plug, (6, 10), "comes from our address");
    }

    /// Only tunnels are bypassed by XDP.
    #[test]
    fn it_goes_together_with_xdp() {
        let xdp = "devices = [\"eth0\"]\nxdp = \"eth0\"\n";
        assert!(read(&format!("{xdp}{}", text("http", "transparent = true"))).is_ok());
        let (_, _, message) = mistake(&format!("{xdp}{}", text("tpot", "")));
        assert!(message.contains("bypass the tunnels"), "{message}");
    }
}

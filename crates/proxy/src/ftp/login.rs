//! Logins that the proxy reads: which server (RFC 1919: `USER user@host`), and who may use the proxy (`USER user@proxyuser` or
//! `USER user@proxyuser@host`, then `PASS password@proxypassword`). The server is connected to afterwards.

use super::{Next, Session, line::Command};
use crate::{
    access::Subject,
    config::pool::LeadTo,
    fault::Fault,
    onward::{connect, pooled},
    target::{Host, Target, TargetError},
    users::{Credentials, NoUser},
};
use longsplice_engine::{Leg, LegOfProxy};
use std::str;
use tokio::time::timeout;

/// Default port of FTP.
const PORT: u16 = 21;
/// Failed logins after which the connection is closed (RFC 2577, 5).
const TRIES: u32 = 3;

/// Where a session is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The proxy waits for USER.
    #[default]
    Name,
    /// The proxy waits for PASS.
    Password {
        /// User of the server.
        user: String,
        /// User of the proxy.
        proxy_user: String,
    },
    /// There is a server, which gets the commands.
    Server,
}

/// Parses `host` or `host:port`.
fn target(text: &str) -> Option<Target> {
    match text.parse::<Target>() {
        Err(TargetError::NoPort | TargetError::NeedsBrackets) => {
            let host = Host::from_name(text.as_bytes()).ok()?;
            Some(Target { host, port: PORT })
        }
        // an IPv6 address in brackets, without a port
        Err(_) if text.ends_with(']') => Some(Target { host: Host::from_name(text.as_bytes()).ok()?, port: PORT }),
        parsed => parsed.ok(),
    }
}

impl Session<'_> {
    /// Serves a command before there is a server.
    pub(super) async fn log_in(&mut self, command: Command) -> Result<(), Next> {
        match (command.verb.as_str(), self.state.phase.clone()) {
            ("USER", _) => self.user(&command.argument).await,
            ("PASS", Phase::Password { user, proxy_user }) => self.password(user, proxy_user, &command.argument).await,
            ("PASS", _) => self.tell(503, "USER comes first").await,
            ("QUIT", _) => {
                self.tell(221, "Goodbye").await?;
                Err(Next::Close)
            }
            ("NOOP", _) => self.tell(200, "OK").await,
            ("FEAT", _) => self.tell_raw(b"211-Features:\r\n EPRT\r\n EPSV\r\n211 End\r\n").await,
            ("AUTH" | "PROT" | "PBSZ" | "CCC" | "ADAT", _) => self.refuse_protection().await,
            ("", _) => self.tell_wrong(500, "This is no command").await,
            _ => self.tell(530, "Log in first").await,
        }
    }

    async fn user(&mut self, argument: &[u8]) -> Result<(), Next> {
        let Ok(text) = str::from_utf8(argument) else { return self.tell_wrong(501, "A name in UTF-8 is needed").await };
        let mut rest = text;
        let mut last = || {
            let (before, part) = rest.rsplit_once('@')?;
            rest = before;
            Some(part)
        };
        let named = match &self.ftp.target {
            Some(given) => Some(given.clone()),
            None => last().and_then(target).map(LeadTo::Target),
        };
        let proxy_user = (!self.ftp.users.is_empty()).then(&mut last);
        let (Some(named), true) = (named, proxy_user != Some(None)) else {
            let form = match (&self.ftp.target, proxy_user) {
                (Some(_), _) => "USER user@proxyuser",
                (None, Some(_)) => "USER user@proxyuser@host",
                (None, None) => "USER user@host",
            };
            return self.tell_wrong(501, &format!("Log in with {form}")).await;
        };
        let user = rest.to_owned();
        self.state.target = named.target().cloned();
        match proxy_user.flatten() {
            Some(proxy_user) => {
                self.state.phase = Phase::Password { user, proxy_user: proxy_user.to_owned() };
                self.tell(331, "Send PASS password@proxypassword").await
            }
            None => {
                self.call().await?;
                self.state.user = Some(user.clone());
                self.pass_on(&Command::new("USER", user)).await.map(drop)
            }
        }
    }

    async fn password(&mut self, user: String, proxy_user: String, argument: &[u8]) -> Result<(), Next> {
        self.state.phase = Phase::Name;
        let at = argument.iter().rposition(|b| *b == b'@');
        let (password, given) = at.map_or((&b""[..], argument), |at| (&argument[..at], &argument[at + 1..]));
        let credentials = Credentials { name: proxy_user.clone().into_bytes(), password: given.to_vec() };
        let client = self.client.leg.source().ip();
        if let Err(no) = self.ftp.users.check_of(client, &credentials).await {
            let fault = Fault::AuthFailed { user: Some(proxy_user).filter(|_| no == NoUser::Wrong), why: no.why() };
            self.state.failures += 1;
            if no == NoUser::TooMany || self.state.failures >= TRIES {
                self.tell(421, "Too many failed logins").await?;
                return Err(Next::Fault(fault));
            }
            self.live.shared.counters.fault(&fault);
            return self.tell(530, "Wrong name or password for the proxy").await;
        }
        self.state.proxy_user = Some(proxy_user);
        self.call().await?;
        self.state.user = Some(user.clone());
        self.send(&Command::new("USER", user)).await?;
        match self.hear_reply().await? {
            (331, _) => self.pass_on(&Command::new("PASS", password)).await.map(drop),
            (_, text) => self.tell_line(&text).await,
        }
    }

    /// Connects to the server, or to one of the pool.
    async fn connect(&mut self, subject: &Subject<'_>) -> Result<Leg, Fault> {
        let (shared, listener, client) = (&self.live.shared, &self.front.listener, &self.client.leg);
        let mut record = self.record();
        let called = match (&self.ftp.target, &self.state.target) {
            (Some(LeadTo::Pool(pool)), _) => {
                let called =
                    pooled::connect(shared, (Some(&listener.rules), listener), client, subject, pool, &mut record);
                Box::pin(called).await.map(|(leg, lease)| (leg, Some(lease)))
            }
            (_, Some(target)) => {
                connect(shared, listener, client, subject, target, &mut record).await.map(|reached| (reached.leg, None))
            }
            (_, None) => Err(Fault::BadRequest("no server was named".into())),
        };
        (self.state.tried, self.state.connect_ms) = ((record.pool, record.member), record.connect_ms);
        let (leg, lease) = called?;
        if let Some(lease) = lease {
            self.state.target = Some(lease.0.target.clone());
            self.lease = Some(lease);
        }
        Ok(leg)
    }

    /// Connects to the server, and hears its greeting. The client is told of failures, and the session ends.
    pub(super) async fn call(&mut self) -> Result<(), Next> {
        let proxy_user = self.state.proxy_user.clone();
        let subject = Subject::by(self.client.leg.source().ip()).of(proxy_user.as_deref());
        match self.connect(&Subject { method: Some("USER"), ..subject }).await {
            Ok(mut leg) => {
                LegOfProxy::keep_alive(&mut leg, self.front.policy.keepalive);
                self.server = Some(leg.into());
            }
            Err(fault) => {
                let to = self.state.target.as_ref().map_or_else(|| "a server".to_owned(), Target::to_string);
                self.tell(421, &format!("No connection to {to}: {fault}")).await?;
                return Err(Next::Fault(fault));
            }
        }
        self.state.phase = Phase::Server;
        if !self.is_gated() {
            // it is the client's greeting, too
            return match self.relay_reply().await? {
                200..=299 => Ok(()),
                _ => Err(Next::Close),
            };
        }
        match self.hear_reply().await? {
            (200..=299, _) => Ok(()),
            (code, text) => {
                self.tell_line(&text).await?;
                Err(Next::Fault(Fault::BadReply(format!("the server greets with {code}"))))
            }
        }
    }

    /// Greets a client. If it does not have to name anything, it is the server that does.
    pub(super) async fn greet(&mut self) -> Result<(), Next> {
        if !self.is_gated() {
            self.state.target = self.given_target().and_then(|given| given.target().cloned());
            return self.call().await;
        }
        let limit = self.front.listener.limits.handshake;
        let greeting = self.tell(220, "longsplice: FTP proxy");
        timeout(limit, greeting).await.map_err(|_| Next::Close)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_and_without_ports() {
        for (text, want) in [
            ("ftp.example.org", Some("ftp.example.org:21")),
            ("ftp.example.org:2121", Some("ftp.example.org:2121")),
            ("192.0.2.1", Some("192.0.2.1:21")),
            ("2001:db8::1", Some("[2001:db8::1]:21")),
            ("[2001:db8::1]", Some("[2001:db8::1]:21")),
            ("[2001:db8::1]:2121", Some("[2001:db8::1]:2121")),
            ("", None),
            ("a b", None),
            ("host:0", None),
        ] {
            assert_eq!(target(text).map(|t| t.to_string()).as_deref(), want, "{text}");
        }
    }
}

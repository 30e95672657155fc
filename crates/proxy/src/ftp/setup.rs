//! PORT, EPRT, PASV and EPSV: answered by the proxy, which asks the server in its own way.

use super::{
    Next, Session,
    address::{AddressError, Epsv, encode_eprt, encode_port, parse_227, parse_229, parse_eprt, parse_epsv, parse_port},
    data::{Doors, End, Plan, Way, open_door},
    line::Command,
    verb::Setup,
};
use crate::{config::ftp::DataMode, fault::Fault};
use longsplice_engine::Listener;
use std::{
    io,
    net::{IpAddr, SocketAddr},
};

/// Ports below this one are those of services, which take what they are sent for commands (RFC 2577, 3).
const FIRST_HIGH_PORT: u16 = 1024;

impl Session<'_> {
    /// Prepares the next data connection.
    pub(super) async fn prepare(&mut self, setup: Setup, command: &Command) -> Result<(), Next> {
        (self.state.plan, self.doors) = (None, Doors::default());
        let is_ipv4 = self.client.leg.local().is_ipv4();
        if self.state.epsv_all && setup != Setup::Epsv {
            return self.tell(501, "EPSV ALL was sent").await;
        }
        let given = match setup {
            Setup::Pasv if !is_ipv4 => return self.tell(425, "Use EPSV: this connection is IPv6").await,
            Setup::Pasv => Ok(None),
            Setup::Epsv => match parse_epsv(&command.argument, is_ipv4) {
                Ok(Epsv::All) => {
                    self.state.epsv_all = true;
                    return self.tell(200, "EPSV ALL").await;
                }
                other => other.map(|_| None),
            },
            Setup::Port => parse_port(&command.argument).map(Some).ok_or(AddressError::Syntax),
            Setup::Eprt => parse_eprt(&command.argument, is_ipv4).map(Some),
        };
        let given = match given {
            Ok(given) => given,
            Err(AddressError::Syntax) => return self.tell_wrong(501, "This is no address").await,
            Err(AddressError::Family) => {
                let only = if is_ipv4 { 1 } else { 2 };
                return self.tell(522, &format!("Network protocol not supported, use ({only})")).await;
            }
        };
        if let Some(why) = given.and_then(|address| self.wrong(address)) {
            self.log_refused(command, &Fault::BadRequest(why.into()));
            return self.tell(504, why).await;
        }
        let asked = self.ask_server(setup, given.map(|address| address.port())).await?;
        let Some((server, at_server)) = asked else { return Ok(()) };
        let like = if let Way::Opened(at) = server { Some(at.port()) } else { None };
        let (client, at_client) = match given {
            Some(address) => (Way::Opened(address), None),
            None => match self.door(self.client_end(), like).await {
                Ok((door, at)) => (Way::Awaited(at), Some(door)),
                Err(error) => return self.no_port(&error).await,
            },
        };
        (self.state.plan, self.doors) = (Some(Plan { client, server }), Doors { client: at_client, server: at_server });
        match (setup, client) {
            (Setup::Pasv, Way::Awaited(at)) => {
                let known = self.ftp.options.address.map(IpAddr::V4).unwrap_or(at.ip().to_canonical());
                let IpAddr::V4(ip) = known else { return self.tell(425, "Use EPSV").await };
                self.tell(227, &format!("Entering Passive Mode ({}).", encode_port(ip, at.port()))).await
            }
            (_, Way::Awaited(at)) => {
                self.tell(229, &format!("Entering Extended Passive Mode (|||{}|)", at.port())).await
            }
            (_, Way::Opened(_)) => self.tell(200, &format!("{} accepted", command.verb)).await,
        }
    }

    /// Returns what is wrong with an address that the client wants to be connected to.
    fn wrong(&self, address: SocketAddr) -> Option<&'static str> {
        let client = self.client.leg.remote().ip().to_canonical();
        if address.ip().to_canonical() != client {
            Some("Data connections go to the client itself only")
        } else if address.port() < FIRST_HIGH_PORT && (address.port() == 0 || !self.ftp.options.low_ports) {
            Some("Data connections go to ports from 1024 on only")
        } else {
            None
        }
    }

    async fn door(&self, end: End, like: Option<u16>) -> io::Result<(Listener, SocketAddr)> {
        open_door(&self.live.shared, end, self.ftp.options.ports, like).await
    }

    async fn no_port(&mut self, error: &io::Error) -> Result<(), Next> {
        tracing::warn!(%error, "cannot open a port for a data connection: the transfer is refused");
        self.tell(425, "No port for a data connection").await
    }

    /// Asks the server for a data connection. Returns how it is made; if it is not, the client has been told. `like`: the port at
    /// which the client awaits its own.
    async fn ask_server(&mut self, setup: Setup, like: Option<u16>) -> Result<Option<(Way, Option<Listener>)>, Next> {
        let (Ok(server), Ok(end)) = (self.server(), self.server_end()) else { return Err(Next::Close) };
        let remote = server.remote();
        let is_ipv4 = remote.ip().to_canonical().is_ipv4();
        let is_active = match self.ftp.options.data {
            DataMode::Passive => false,
            DataMode::Active => true,
            DataMode::AsClient => matches!(setup, Setup::Port | Setup::Eprt),
        };
        if is_active {
            let (door, at) = match self.door(end, like).await {
                Ok(opened) => opened,
                Err(error) => return self.no_port(&error).await.map(|()| None),
            };
            let command = match at.ip().to_canonical() {
                IpAddr::V4(ip) => Command::new("PORT", encode_port(ip, at.port())),
                IpAddr::V6(_) => Command::new("EPRT", encode_eprt(at)),
            };
            self.send(&command).await?;
            return match self.hear_reply().await? {
                (200..=299, _) => Ok(Some((Way::Awaited(at), Some(door)))),
                (_, text) => self.tell_line(&text).await.map(|()| None),
            };
        }
        self.send(&Command::new(if is_ipv4 { "PASV" } else { "EPSV" }, "")).await?;
        let port = match self.hear_reply().await? {
            (227, text) if is_ipv4 => parse_227(&text),
            (229, text) if !is_ipv4 => parse_229(&text),
            (400.., text) => return self.tell_line(&text).await.map(|()| None),
            _ => None,
        };
        let Some(port) = port else {
            self.live.shared.counters.fault(&Fault::BadReply(String::new()));
            return self.tell(425, "The server names no port").await.map(|()| None);
        };
        let mut to = remote;
        to.set_port(port);
        Ok(Some((Way::Opened(to), None)))
    }
}

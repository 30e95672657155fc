//! The network of long and lossy paths: links with delays and losses, a server, and what stands in the middle. One venue serves
//! all cells: links change while nobody uses them.

use super::{
    Result,
    ends::{Client, Server},
    network::{PORT, listen},
    peers::{Peer, haproxy},
    variant::Variant,
    venue::Venue,
};
use crate::cell::{Cell, Protocol};
use longsplice_lab::{
    Family, Impair, Impairment, Lab, LinkDirection, Namespace, Options, Shape, process::wait_for, topology,
};
use serde::Deserialize;
use std::{
    fs, io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

/// Bytes per second of each link, for each connection: 40 Mbit/s.
pub const RATE: u64 = 5_000_000;
/// Frames wait this long for the rate: longer than windows allow, so that only the packets are lost that should be.
const QUEUE: Duration = Duration::from_secs(2);
/// Ports of a proxy; its plug has that of the server.
const SOCKS_PORT: u16 = PORT + 1;
const HTTP_PORT: u16 = PORT + 2;
/// Time until a proxy knows that the server has closed a connection, over the longest path.
const HANGING_UP: Duration = Duration::from_millis(600);
/// Name of the access log.
const LOG: &str = "access.log";
/// Directories of the files of two proxies. One has the first.
pub const PROXIES: [&str; 2] = ["first", "second"];
/// Their devices. Without being told, they would attach to those of the impairments as well.
const DEVICES: [[&str; 2]; 2] = [["f0", "f1"], ["g0", "g1"]];

/// A lab with one subject in the middle.
pub type Far = Venue<Links>;

/// Impaired links, and the server behind them.
pub struct Links {
    links: Vec<(LinkDirection, Impairment)>,
    /// Number of transfers of this cell that have lost packets.
    rounds: AtomicU64,
    /// The server.
    pub server: Server,
}

impl Far {
    /// Sets up a venue; its links are short until [`Far::prepare`].
    pub fn set(variant: Variant, shape: Shape) -> Result<Far> {
        let forwarding = variant.routed() || variant.translucent() > 0;
        let lab = Lab::new(shape, Options { large_packets: false, forwarding, ..Options::default() })?;
        let listeners = lab.server.run(|| {
            Family::BOTH.map(|f| listen(topology::SERVER.port(f, PORT))).into_iter().collect::<io::Result<_>>()
        })?;
        let server = Server::start(listeners)?;
        let mut venue = Venue::new(variant, lab)?;
        // Before the links are impaired: the programs on their devices are to see what has passed them.
        start(&mut venue)?;
        use LinkDirection::{FromClient, FromSecond, FromServer, ToClient, ToSecond, ToServer};
        let between: &[_] = if venue.lab.second.is_some() { &[FromSecond, ToSecond] } else { &[] };
        let links = [&[FromClient, ToClient, FromServer, ToServer], between].concat().into_iter();
        let links = links.map(|way| Ok((way, venue.lab.impair(way, Impair::NONE)?))).collect::<Result<_>>()?;
        Ok(venue.with(Links { links, rounds: AtomicU64::new(0), server }))
    }

    /// Makes the network that of a cell. Connections that exist are closed by the server.
    pub fn prepare(&self, cell: &Cell) -> Result<()> {
        if self.ends.server.hang_up() {
            thread::sleep(HANGING_UP);
        }
        self.ends.server.set_congestion(cell.congestion)?;
        for forwarder in [&self.lab.forwarder].into_iter().chain(&self.lab.second) {
            forwarder.sysctl("net.ipv4.tcp_congestion_control", cell.congestion_of_forwarder())?;
        }
        for (way, link) in &self.ends.links {
            link.change(impairment(cell, *way))?;
        }
        self.ends.rounds.store(0, Relaxed);
        Ok(())
    }

    /// Makes the links lose the same packets as in this round of the other venues, counted from now on.
    pub fn lose(&self, cell: &Cell) -> Result<()> {
        if cell.loss > 0.0 {
            // The last connection may still be closing.
            thread::sleep(HANGING_UP);
            let round = self.ends.rounds.fetch_add(1, Relaxed);
            for (seed, (way, link)) in (round * self.ends.links.len() as u64..).zip(&self.ends.links) {
                link.restart(Impair { seed, ..impairment(cell, *way) })?;
            }
        }
        Ok(())
    }

    /// Connects as the cell says. Must be called in the client's namespace.
    pub fn connect(&self, cell: &Cell) -> io::Result<Client> {
        let family = cell.family;
        let server = topology::SERVER.port(family, PORT);
        if self.variant.to_server() {
            return Client::connect(server, None, cell.congestion);
        }
        let at = |port| topology::FORWARDER_TO_CLIENT.port(family, port);
        match cell.protocol {
            Protocol::Plug => Client::connect(at(PORT), None, cell.congestion),
            Protocol::Socks => Client::connect(at(SOCKS_PORT), Some(server), cell.congestion),
            Protocol::Http => Client::connect(at(HTTP_PORT), None, cell.congestion),
        }
    }

    /// All hosts.
    pub fn hosts(&self) -> impl Iterator<Item = &Namespace> {
        [&self.lab.client, &self.lab.forwarder, &self.lab.server].into_iter().chain(&self.lab.second)
    }

    /// Packets dropped because a queue was full, or that the lab could not send.
    pub fn dropped(&self) -> u64 {
        self.ends.links.iter().map(|(_, link)| link.counters()).map(|c| c.overflowed + c.unsent).sum()
    }

    /// Lengths of the access logs of longsplice, from which [`Far::records`] is to read.
    pub fn logged(&self) -> [u64; 2] {
        PROXIES.map(|name| fs::metadata(self.log(name)).map_or(0, |log| log.len()))
    }

    /// Waits until at least `count` records of each proxy follow after `from` in its access log, and returns them; fewer if
    /// they do not come in time. None for other programs.
    pub fn records(&self, from: &[u64; 2], count: usize) -> Vec<Record> {
        if !self.variant.is_longsplice() {
            return Vec::new();
        }
        let new = |(name, from): (_, &u64)| {
            let text = fs::read_to_string(self.log(name)).unwrap_or_default();
            let new = text.get(*from as usize..).unwrap_or_default();
            new.lines().filter_map(|line| serde_json::from_str(line).ok()).collect::<Vec<Record>>()
        };
        let read =
            || PROXIES.into_iter().zip(from).take(self.variant.translucent().max(1)).map(new).collect::<Vec<_>>();
        let all = wait_for(Duration::from_secs(2), || Some(read()).filter(|all| all.iter().all(|l| l.len() >= count)));
        all.unwrap_or_else(read).concat()
    }

    fn log(&self, proxy: &str) -> PathBuf {
        self.path(proxy).join(LOG)
    }
}

/// A line of the access log.
#[derive(Clone, Debug, Deserialize)]
pub struct Record {
    /// Bytes from client to server.
    pub bytes_up: u64,
    /// Bytes from server to client.
    pub bytes_down: u64,
    /// Those forwarded while spliced.
    pub spliced_up: u64,
    /// The same.
    pub spliced_down: u64,
    /// Why the connection was not spliced.
    pub refusal: Option<String>,
}

/// The impairment of one direction of a link.
fn impairment(cell: &Cell, way: LinkDirection) -> Impair {
    let [client, server, between] = cell.shares();
    let share = match way {
        LinkDirection::FromClient | LinkDirection::ToClient => client,
        LinkDirection::FromServer | LinkDirection::ToServer => server,
        LinkDirection::FromSecond | LinkDirection::ToSecond => between,
    };
    Impair {
        // There and back.
        delay: Duration::from_millis(cell.ms.into()).mul_f64(share / 2.0),
        loss: cell.loss / 100.0 * share,
        rate_bytes_per_s: Some(RATE),
        queue: QUEUE,
        per_connection: true,
        ..Impair::NONE
    }
}

fn start(venue: &mut Venue) -> Result<()> {
    let (variant, forwarder) = (venue.variant, venue.lab.forwarder.clone());
    if variant.peer() == Some(Peer::Haproxy) {
        return venue.peer(&forwarder, Peer::Haproxy, "haproxy", &haproxy_config(), HTTP_PORT);
    }
    if !variant.is_longsplice() {
        return Ok(());
    }
    let config = if variant.translucent() > 0 { translucent_config(variant) } else { longsplice_config(variant) };
    let splice = variant.splice();
    let forwarders: Vec<Namespace> = [forwarder].into_iter().chain(venue.lab.second.clone()).collect();
    for ((at, name), devices) in forwarders.iter().zip(PROXIES).zip(DEVICES).take(variant.translucent().max(1)) {
        let mut arguments = vec!["--log-format", "json", "--access-log", LOG];
        arguments.extend(splice.iter().flat_map(|when| ["--splice", when]));
        arguments.extend(devices.iter().flat_map(|device| ["--device", device]));
        venue.longsplice(at, name, &config, &arguments)?;
    }
    variant.udp().map_or(Ok(()), |udp| venue.ask_for_proxies(udp))
}

/// The configuration of longsplice: a plug, SOCKS and a reverse proxy, each for both IP versions.
fn longsplice_config(variant: Variant) -> String {
    let policy = match variant {
        Variant::Spliced => "policy = { path = \"any\" }\n",
        Variant::EndToEnd => "policy = { splice = \"at-once\" }\n",
        _ => "",
    };
    let handshake = if variant == Variant::EndToEnd { "handshake = \"end-to-end\"\n" } else { "" };
    let mut text = String::new();
    for family in Family::BOTH {
        let own = |port| topology::FORWARDER_TO_CLIENT.port(family, port);
        let server = topology::SERVER.port(family, PORT);
        let pool = format!("{family:?}").to_lowercase();
        for (port, rest) in [
            (PORT, format!("protocol = \"plug\"\ntarget = \"{server}\"\n{handshake}")),
            (SOCKS_PORT, "protocol = \"socks5\"\n".to_owned()),
            (HTTP_PORT, format!("protocol = \"http\"\nroute = [{{ pool = \"{pool}\" }}]\n")),
        ] {
            text += &format!("[[listener]]\nlisten = \"{}\"\n{rest}{policy}", own(port));
        }
        text += &format!("[pool.{pool}]\nservers = [\"{server}\"]\n");
    }
    text
}

/// The configuration of longsplice as a translucent proxy.
fn translucent_config(variant: Variant) -> String {
    let handshake = if variant == Variant::TpotBasic { "basic" } else { "pipelined" };
    let spliced = variant.is_spliced();
    let policy = if spliced { "policy = { path = \"any\" }\n" } else { "" };
    let keys = format!("protocol = \"tpot\"\nhandshake = \"{handshake}\"\n{policy}");
    let listeners = ["0.0.0.0", "[::]"].map(|any| format!("[[listener]]\nlisten = \"{any}:{PORT}\"\n{keys}")).concat();
    match variant.translucent() {
        2 => format!("{listeners}[tpot]\nproxies = [\"10.77.0.0/16\", \"fd77::/16\"]\nports = {PORT}\n"),
        _ => listeners,
    }
}

/// The configuration of HAProxy: the plug and the reverse proxy, each for both IP versions.
fn haproxy_config() -> String {
    let all = Family::BOTH.map(|family| {
        let own = |port| topology::FORWARDER_TO_CLIENT.port(family, port);
        ([topology::SERVER.port(family, PORT)], own(PORT), own(HTTP_PORT))
    });
    let listeners = all.iter().flat_map(|(to, tcp, http)| [("tcp", *tcp, &to[..]), ("http", *http, &to[..])]);
    haproxy(&listeners.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_their_share_of_the_path() {
        let cell = |place| format!("{place}100, 1 MB, bbr, 2 % lost").parse::<Cell>().unwrap();
        let far = impairment(&cell('c'), LinkDirection::ToClient);
        assert_eq!((far.delay, far.loss, far.rate_bytes_per_s), (Duration::from_millis(50), 0.02, Some(RATE)));
        let near = impairment(&cell('c'), LinkDirection::FromServer);
        assert_eq!((near.delay, near.loss, near.rate_bytes_per_s), (Duration::ZERO, 0.0, Some(RATE)));
        let half = impairment(&cell('b'), LinkDirection::ToServer);
        assert_eq!((half.delay, half.loss), (Duration::from_millis(25), 0.01));
    }

    #[test]
    fn listeners_are_told_apart_by_port() {
        let config = longsplice_config(Variant::Spliced);
        assert_eq!(config.matches("[[listener]]").count(), 6);
        assert_eq!(config.matches("path = \"any\"").count(), 6, "{config}");
        assert!(!longsplice_config(Variant::Default).contains("any"));
        assert_eq!(longsplice_config(Variant::EndToEnd).matches("end-to-end").count(), 2, "plugs only");
        assert_eq!(haproxy_config().matches("bind").count(), 4);
    }
}

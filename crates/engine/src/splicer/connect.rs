//! Connections to servers: their source addresses, and the records that the data path needs before their SYN leaves.

use crate::{
    engine::ports::Usual,
    leg::{Leg, ip, live::Live},
    refusal::{self, Refusal},
    splicer::{Splicer, ticker},
};
use longsplice_datapath::{
    Agreed, Connection, Datapath, ExpectError, ExpectedLeg, Handshake, Tuple, acknowledge_with_data, agreed, headers,
    set_hops, set_transparent,
};
use nix::sys::socket::{setsockopt, sockopt::IpBindAddressNoPort};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

/// Number of source ports to try before a connect fails. If one port in fifty is free,
/// one connect in two hundred does not find it. Each attempt takes six microseconds.
const PORT_TRIES: u32 = 256;

/// Least value of TCP_MAXSEG (TCP_MIN_MSS of <net/tcp.h>).
const LEAST_MSS: u16 = 88;
/// MSS in bytes that the kernel announces at least, however small the MTU is (net.ipv6.route.min_adv_mss; less in IPv4).
const LEAST_ANNOUNCED: u32 = 1220;

/// For whom a connection to a server is opened.
#[derive(Clone, Copy, Default)]
pub(crate) struct Behalf<'a> {
    /// The client's leg, if there is one already.
    pub client: Option<&'a Leg>,
    /// How many more proxies may intercept the connection; `None`: as many as for any.
    pub hops: Option<u8>,
    /// The client's SYN, as long as it has no leg.
    pub syn: Option<&'a Handshake>,
    /// Our address; `None`: as configured, or as the kernel chooses.
    pub from: Option<IpAddr>,
    /// The client's address, which the server is to see instead of ours.
    pub shown: Option<IpAddr>,
}

impl Behalf<'_> {
    /// Returns what the client's socket says that was negotiated, if the data path does not know it.
    fn agreed(&self) -> Option<Agreed> {
        self.client.filter(|client| client.lacks_record())?.descriptor().and_then(|socket| agreed(socket).ok())
    }

    /// Prepares the record of the connection. `agreed`: with the client, if the data path does not know it. A server that would not
    /// be offered less anyway is not known either until it is adopted.
    fn expect(&self, d: &Datapath, leg: &Tuple, agreed: Option<Agreed>) -> Result<ExpectedLeg, ExpectError> {
        if let Some(agreed) = agreed {
            return match self.shown {
                None if agreed.is_all() && d.generation(leg).is_some() => Err(ExpectError::Taken),
                None if agreed.is_all() => {
                    Ok(ExpectedLeg { mss: Some(agreed.mss), generation: Connection::NONE, of_client: None })
                }
                shown => d.expect_for(leg, agreed, shown.is_some()),
            };
        }
        match (self.client, self.syn, self.shown) {
            (None, Some(syn), shown) => d.expect_for_syn(leg, syn, shown.is_some()),
            (client, _, None) => d.expect(leg, client.map(Leg::tuple).as_ref()),
            (client, _, Some(_)) => d.expect_from_elsewhere(leg, client.map(Leg::tuple).as_ref()),
        }
    }
}

impl Splicer {
    /// Connects to a server on behalf of `client`. Has no time limit of its own.
    ///
    /// The MSS announced to the server is that of the client, so that the server's segments fit the client's
    /// path when they are forwarded whole (symmetric TCP splice, 5.4.4). If the connection was opened on the client's SYN
    /// ([`Listener::pipeline`](crate::Listener::pipeline)), it is that one. Errors are those of socket(2),
    /// bind(2) and connect(2); [`io::ErrorKind::AddrNotAvailable`] also if no source port is free, and
    /// [`io::ErrorKind::Unsupported`] if the server cannot be shown the client's address
    /// ([`Listener::show_clients`](crate::Listener::show_clients)).
    pub async fn connect(&self, server: SocketAddr, client: &Leg) -> io::Result<Leg> {
        if let Some(early) = client.early_to(server) {
            return early.connected().await;
        }
        let shown = client.opened.is_shown.then(|| client.source().ip());
        let behalf = Behalf { client: Some(client), hops: client.opened.hops, shown, ..Behalf::default() };
        self.connect_for(server, behalf).await
    }

    /// Connects to a server, like [`Splicer::connect`], on behalf of no client.
    pub async fn connect_alone(&self, server: SocketAddr) -> io::Result<Leg> {
        self.connect_for(server, Behalf::default()).await
    }

    /// Connects from this address of ours, on behalf of `client` if there is one already. A second connection of a client or
    /// server that knows us by our address on the first one has to come from there.
    #[doc(hidden)]
    pub async fn connect_from(&self, from: IpAddr, to: SocketAddr, client: Option<&Leg>) -> io::Result<Leg> {
        self.connect_for(to, Behalf { client, from: Some(from), ..Behalf::default() }).await
    }

    /// Connects like [`Splicer::connect_from`] from an address that is not of this machine. It needs the routes that
    /// [`Splicer::listen_elsewhere`] needs.
    #[doc(hidden)]
    pub async fn connect_from_elsewhere(&self, from: IpAddr, to: SocketAddr, client: Option<&Leg>) -> io::Result<Leg> {
        self.connect_for(to, Behalf { client, shown: Some(from), ..Behalf::default() }).await
    }

    pub(crate) async fn connect_for(&self, server: SocketAddr, behalf: Behalf<'_>) -> io::Result<Leg> {
        let began = Instant::now();
        ticker::stir();
        loop {
            match self.try_connect(server, behalf).await {
                Err(e) if self.engine().is_to_be_tried_again(&e, began).await => {}
                done => return done,
            }
        }
    }

    async fn try_connect(&self, server: SocketAddr, behalf: Behalf<'_>) -> io::Result<Leg> {
        let client = behalf.client;
        let refused = client.and_then(Leg::refusal);
        if let Some(shown) = behalf.shown {
            may_show(shown, server, refused.or(self.refusal()))?;
        }
        if let Some(why) = refused {
            return self.connect_untracked(server, behalf.from, Some(why)).await;
        }
        let ports = &self.engine().ports;
        let (mut usual, mut fresh) = ports.usual_for(server)?;
        let Some(d) = self.datapath() else {
            return self.connect_untracked(server, behalf.from, None).await;
        };
        if usual.source.is_loopback() || usual.source == server.ip() {
            if behalf.shown.is_some() {
                return Err(not_shown("the server is this machine"));
            }
            return self.connect_untracked(server, behalf.from, Some(Refusal::Loopback)).await;
        }
        let turn = ports.next_turn();
        let agreed = behalf.agreed();
        for tries in 0..PORT_TRIES {
            let mut t = ports.candidate(turn, tries, server, usual.source);
            behalf.from.iter().chain(&behalf.shown).for_each(|from| t.local.set_ip(*from));
            let s = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), None)?;
            self.engine().opened_for_server(&s)?;
            s.set_reuse_address(true)?; // ports are counted per server
            // The answer of a proxy that is asked would go to the client itself.
            let hops = behalf.shown.map_or(behalf.hops, |_| Some(0));
            hops.map_or(Ok(()), |hops| set_hops(&s, hops))?;
            if let Some(shown) = behalf.shown {
                set_transparent(&s, shown.is_ipv6())?;
            }
            if client.is_some_and(|client| client.speaks_first) {
                acknowledge_with_data(&s)?;
            }
            match s.bind(&t.local.into()) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => continue,
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable && !fresh => {
                    ports.forget_usual(server);
                    (usual, fresh) = ports.usual_for(server)?;
                    continue;
                }
                Err(e) => return Err(e),
            }
            s.set_out_of_band_inline(true)?;
            let expected = match behalf.expect(d, &t, agreed) {
                Err(ExpectError::Taken) => self.make_way(d, &t, behalf, agreed),
                expected => expected,
            };
            let (known, refusal) = match expected {
                Ok(known) => (Some(known), None),
                Err(ExpectError::Taken) => continue,
                Err(_) if behalf.shown.is_some() => return Err(not_shown("the tables of the data path are full")),
                Err(e) => (None, Some(untracked(d, &e, &t, client))),
            };
            if let (Some(client), Some(generation)) = (client, known.and_then(|known| known.of_client)) {
                client.may_be(generation);
            }
            if let Some(mss) =
                known.and_then(|known| known.mss).filter(|mss| *mss >= LEAST_MSS && is_unusual(*mss, &t, usual, behalf))
            {
                // best effort: the kernel refuses values below its minimum and keeps its own
                let _ = SockRef::from(&s).set_tcp_mss(mss.into());
            }
            self.engine().lingering.begins_anew(&t);
            // If this is dropped without a connection, by an error or because the caller gave up, nothing is left behind.
            let has_record = known.is_some_and(|known| known.generation != Connection::NONE);
            let mut expected = Expected { datapath: d, leg: has_record.then_some(t) };
            let socket = match Live::connect(s, server).await {
                // a socket of ours has the address, or is in TIME-WAIT
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => continue,
                r => r?,
            };
            expected.leg = None;
            let mut leg = Leg::to_server(socket, server, t.local, refusal, known.map(|known| known.generation));
            leg.opened.client_rtt = agreed.and_then(|agreed| agreed.min_rtt);
            return Ok(if has_record { leg } else { leg.without_record() });
        }
        Err(io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            "no free source port: widen source_ports, or name more addresses as source",
        ))
    }

    async fn connect_untracked(
        &self,
        server: SocketAddr,
        from: Option<IpAddr>,
        refusal: Option<Refusal>,
    ) -> io::Result<Leg> {
        let s = Socket::new(Domain::for_address(server), Type::STREAM.nonblocking(), None)?;
        self.engine().opened_for_server(&s)?;
        if let Some(source) = from.map_or_else(|| self.engine().ports.named(server), |from| Ok(Some(from)))? {
            setsockopt(&s, IpBindAddressNoPort, &true)?; // the kernel chooses the port per server
            s.bind(&SocketAddr::new(source, 0).into())?;
        }
        s.set_out_of_band_inline(true)?;
        let socket = Live::connect(s, server).await?;
        let local = ip(&SockRef::from(socket.get()).local_addr()?);
        Ok(Leg::to_server(socket, server, local, refusal, None))
    }

    /// Removes the entries of the connection that has used the port, if it is over.
    fn make_way(
        &self,
        d: &Datapath,
        leg: &Tuple,
        behalf: Behalf<'_>,
        agreed: Option<Agreed>,
    ) -> Result<ExpectedLeg, ExpectError> {
        let (a, b) = self.engine().lingering.make_way(leg).ok_or(ExpectError::Taken)?;
        d.forget_ended(&a, b.as_ref());
        behalf.expect(d, leg, agreed)
    }
}

fn not_shown(why: &str) -> io::Error {
    let why = format!("the server cannot be shown the client's address: {why}");
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// Checks that the server's answers would be heard: they are for the client's address, and the data path has to know them.
fn may_show(client: IpAddr, server: SocketAddr, refused: Option<Refusal>) -> io::Result<()> {
    match refused {
        _ if client.is_ipv4() != server.is_ipv4() => Err(not_shown("it is of the other family")),
        Some(why) => Err(not_shown(&format!("the data path does not have the connection ({why})"))),
        None => Ok(()),
    }
}

/// Returns whether the kernel might announce a larger MSS than this one to the server.
fn is_unusual(mss: u16, leg: &Tuple, usual: Usual, behalf: Behalf<'_>) -> bool {
    // The route may depend on another address, or on the mark. An `advmss` of the route may exceed its MTU: the data path
    // then tells the server of the client's, as it does of any other smaller MTU.
    let is_known = leg.local.ip() == usual.source && behalf.hops.is_none() && behalf.shown.is_none();
    let announced = usual.mtu.filter(|_| is_known).map(|mtu| mtu.saturating_sub(headers(leg)).max(LEAST_ANNOUNCED));
    announced.is_none_or(|announced| u32::from(mss) < announced)
}

/// Returns why a connection to a server is not tracked. From now on, its client's connection is not tracked either.
fn untracked(d: &Datapath, error: &ExpectError, leg: &Tuple, client: Option<&Leg>) -> Refusal {
    let (why, client) = match error {
        ExpectError::Untracked => (refusal::of_untracked(d, client.map(Leg::tuple).as_slice()), client),
        ExpectError::Full { given_back } => (Refusal::TableFull, client.filter(|_| *given_back)),
        ExpectError::Io(e) => (refusal::of_errno(e.raw_os_error()), None),
        ExpectError::Taken => (Refusal::Failed, None),
    };
    tracing::debug!(?leg, %error, "not tracked");
    client.inspect(|client| client.refuse(why));
    why
}

/// The record of a connection that is being opened. Dropping it removes the record.
struct Expected<'a> {
    datapath: &'a Datapath,
    leg: Option<Tuple>,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        if let Some(t) = &self.leg {
            self.datapath.forget(t);
        }
    }
}

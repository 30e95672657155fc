//! Translucent proxying: what a machine asks for, and the programs that carry it.

use crate::{
    access::{PortRange, Prefix, Subject},
    config::{Asking, Config, ListenerConfig},
    context::{Fronts, ServerContext},
    fault::{Fault, Step},
    start_error::StartError,
};
use longsplice_engine::{
    Destinations, DeviceChanges, Listener, Permit, Splicer, TPOT_RULES, Tpot, TpotHandshake, TpotOptions, TpotWhose,
    Tuple, dropping_forward_chain, tpot_is_there,
};
use std::{
    future::pending,
    io,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Time between two looks at the tables while they are nearly full.
const ROOM_EVERY: Duration = Duration::from_millis(100);
/// Maximum time between two looks at tunnels, devices and addresses.
const TEND_EVERY: Duration = Duration::from_secs(10);

impl Asking {
    /// Puts it in force. Fails if there are too many rules: one for each of `proxies`, and for each of `to` with each of `ports`.
    pub fn begin(&self, tpot: &Tpot) -> io::Result<()> {
        self.trusted().iter().try_for_each(|proxies| tpot.trust(proxies))?;
        destinations(&self.to, &self.ports).iter().try_for_each(|to| tpot.ask(to))
    }

    fn trusted(&self) -> Vec<Destinations> {
        let any_port = PortRange { first: 0, last: u16::MAX };
        let any = self.keys.is_empty() && self.proxies.is_empty();
        if any { Vec::new() } else { destinations(&self.proxies, &[any_port]) }
    }

    fn rules(&self) -> usize {
        self.trusted().len() + destinations(&self.to, &self.ports).len()
    }
}

/// Returns each of these prefixes, or all addresses if there are none, with each of these ranges of ports.
pub fn destinations(prefixes: &[Prefix], ports: &[PortRange]) -> Vec<Destinations> {
    let everywhere = ["0.0.0.0/0", "::/0"].map(|all| all.parse().expect("a prefix"));
    let prefixes = if prefixes.is_empty() { &everywhere } else { prefixes };
    let each = |net: &Prefix, ports: &PortRange| Destinations {
        net: net.0.addr(),
        prefix: net.0.prefix_len(),
        ports: ports.first..=ports.last,
    };
    prefixes.iter().flat_map(|net| ports.iter().map(move |ports| each(net, ports))).collect()
}

/// Returns the connections that a listener intercepts.
pub(crate) fn intercepted(listen: SocketAddr) -> Destinations {
    let prefix = if listen.ip().is_unspecified() { 0 } else { u8::MAX };
    Destinations { net: listen.ip(), prefix, ports: listen.port()..=listen.port() }
}

/// Returns whether a configuration needs translucent proxying.
pub fn is_needed(config: &Config) -> bool {
    // a server that takes us for the client connects to the client
    let awaits = |l: &ListenerConfig| l.shows_clients && l.ftp().is_some();
    config.tpot.is_some() || config.listeners.iter().any(|l| l.intercepts.is_some() || awaits(l))
}

/// Returns whether there may be tunnels: connections of hosts that do not ask have none.
fn has_tunnels(config: &Config) -> bool {
    config.tpot.is_some() || config.listeners.iter().any(|l| l.intercepts == Some(TpotWhose::Askers))
}

/// Checks what cannot be used beside tunnels.
pub(crate) fn check(config: &Config) -> Result<(), StartError> {
    let rules = config.tpot.as_ref().map_or(0, Asking::rules)
        + config.listeners.iter().filter(|l| l.intercepts.is_some()).count();
    if rules > TPOT_RULES {
        return Err(StartError::TooManyRules(rules));
    }
    let datapath = &config.engine.datapath;
    match datapath.xdp.iter().chain(&datapath.peer).next() {
        Some(device) if has_tunnels(config) => Err(StartError::Bypass(device.clone())),
        _ => Ok(()),
    }
}

/// Opens translucent proxying if the configuration needs it. The data path has been opened before. `follows`: the rules of an earlier
/// process are in force until [`Tpot::settle`].
pub(crate) fn open(config: &Config, follows: bool) -> Result<Option<Arc<Tpot>>, StartError> {
    let asking = config.tpot.as_ref();
    // what an earlier process has begun has to end, too
    let is_left = || follows && tpot_is_there();
    if !(is_needed(config) || is_left()) {
        return Ok(None);
    }
    let datapath = &config.engine.datapath;
    let Asking { hops, exid, keys, udp, .. } = asking.cloned().unwrap_or_default();
    let devices = datapath.devices.clone();
    let tpot = Tpot::open(&TpotOptions { devices, hops, exid, keys, udp, follows, ..TpotOptions::default() })?;
    asking.map_or(Ok(()), |asking| asking.begin(&tpot)).map_err(StartError::Asking)?;
    Ok(Some(Arc::new(tpot)))
}

/// Leaves SYNs alone while a limit of connections is reached or the tables are nearly full: they are routed on, and their
/// connections work without a proxy. The same if the firewall drops what is forwarded unless a rule accepts it, and the listener has
/// no rules of its own: whoever asks for a proxy would get where the firewall lets nobody pass.
pub(crate) async fn leave(
    tpot: Weak<Tpot>,
    (whose, to): (TpotWhose, Destinations),
    (shared, fronts): (Arc<ServerContext>, Fronts),
) {
    let (mut own, mut all) = (fronts.now().full(), shared.all.full());
    // what is in a tunnel needs no record
    let mut tables = (whose == TpotWhose::All).then(|| shared.tables.nearly_full());
    let (mut left, mut barred, mut lacks_room) = (false, None, false);
    let mut look = interval(TEND_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let filled = async {
            match &mut tables {
                Some(tables) => tables.changed().await,
                None => pending().await,
            }
        };
        let changed = tokio::select! {
            changed = own.changed() => changed,
            changed = all.changed() => changed,
            changed = filled => changed,
            () = sleep(ROOM_EVERY), if lacks_room => {
                shared.tables.look(&shared.splicer, &shared.counters);
                Ok(())
            }
            _ = look.tick() => {
                let is_open = fronts.now().listener.rules.list().is_empty();
                barred = if is_open { is_barred(&to, barred) } else { None };
                Ok(())
            }
        };
        if changed.is_err() {
            return;
        }
        let is_full = [*own.borrow_and_update(), *all.borrow_and_update()].contains(&true);
        lacks_room = tables.as_mut().is_some_and(|tables| *tables.borrow_and_update());
        let leaves = is_full || lacks_room || barred.is_some();
        if leaves != left {
            let Some(tpot) = tpot.upgrade() else { return };
            if let Err(error) = tpot.leave(whose, &to, leaves) {
                tracing::warn!(%error, "cannot change what is intercepted: connections beyond the limit are refused, and not routed on");
            }
            left = leaves;
            let what = if left { "left alone" } else { "intercepted again" };
            tracing::debug!(to = %to.net, ports = ?to.ports, is_full, lacks_room, "SYNs are {what}");
        }
    }
}

/// Returns the chain that drops what is forwarded, or the reason why nobody knows. `before`: what was last returned.
fn is_barred(to: &Destinations, before: Option<String>) -> Option<String> {
    let now = match dropping_forward_chain(to.net.is_ipv6()) {
        Ok(chain) => chain.map(|name| format!("the firewall's chain {name} drops what is forwarded")),
        Err(error) => Some(format!("the firewall's chains cannot be read ({error})")),
    };
    if let Some(why) = now.as_ref().filter(|_| now != before) {
        tracing::warn!(
            to = %to.net, ports = ?to.ports,
            "connections are left alone that a listener would intercept: {why}, and would not hold for them; give the listener `rules`"
        );
    } else if before.is_some() && now.is_none() {
        tracing::info!(to = %to.net, ports = ?to.ports, "connections are intercepted");
    }
    now
}

/// Connects to the servers of a listener's clients on their SYN, if that is configured. Only for clients that rules and limits
/// allow now: the others are accepted first, and turned away as ever.
pub(crate) fn pipeline(shared: &Arc<ServerContext>, fronts: &Fronts, listener: &Listener) -> io::Result<()> {
    let handshake = fronts.now().listener.handshake;
    if handshake == TpotHandshake::Basic {
        return Ok(());
    }
    let (of_shared, of) = (shared.clone(), fronts.clone());
    let allow = move |client: SocketAddr, server: SocketAddr| {
        let of_front = of.now();
        of_front.listener.rules.check(&Subject::by(client.ip()), &server.into(), server).ok()?;
        of_front.begin_early(&of_shared, client.ip()).map(|slot| Box::new(slot) as Permit)
    };
    let (shared, fronts) = (shared.clone(), fronts.clone());
    let refused = move |client: SocketAddr, server: SocketAddr, error: io::Error| {
        let late = error.kind() == io::ErrorKind::TimedOut;
        let fault = if late { Fault::Timeout(Step::Connect) } else { Fault::Unreachable(error) };
        shared.counters.fault(&fault);
        let front = fronts.now();
        let mut record = front.listener.record(client);
        record.target = Some(server.to_string());
        record.fault(&fault);
        front.summed.add(&record);
        shared.write(record);
    };
    listener.pipeline(handshake, allow, refused)
}

/// Returns whether SYNs were given to a listener that has not answered them.
fn has_unanswered(tpot: &Tpot) -> bool {
    tpot.verdicts().is_ok_and(|all| all.iter().any(|(name, n)| *name == "unanswered" && *n > 0))
}

/// Forgets ended connections, and follows the devices and addresses of this machine, until nobody else holds `tpot`. `splicer`: of
/// this process, if it splices.
pub async fn tend(tpot: Weak<Tpot>, splicer: Option<Splicer>) {
    let datapath = splicer.as_ref().and_then(|splicer| splicer.datapath());
    let is_spliced = datapath.map(|d| |leg: &Tuple| d.path(leg).is_some());
    let is_spliced = is_spliced.as_ref().map(|f| f as &(dyn Fn(&Tuple) -> bool + Sync));
    let changes = DeviceChanges::new().inspect_err(|error| {
        tracing::warn!(%error, "cannot watch devices and addresses: new ones are found within {} seconds", TEND_EVERY.as_secs());
    });
    let mut warned = false;
    while let Some(tpot) = tpot.upgrade() {
        tpot.sweep(is_spliced);
        if !warned && has_unanswered(&tpot) {
            warned = true;
            tracing::warn!(
                "intercepted SYNs come again before the listener has answered them, and are routed on: an input rule of \
                 the firewall or a strict check of the source (rp_filter) drops them, or the listener's queue is full"
            );
        }
        if let Err(error) = tpot.follow() {
            tracing::warn!(%error, "cannot follow devices and addresses: translucent proxying does not use new ones");
        }
        drop(tpot);
        let changed = async {
            match &changes {
                Ok(changes) => changes.changed().await,
                Err(_) => std::future::pending().await,
            }
        };
        // an error shows again at the next look, and must not make this a busy loop
        if let Ok(Err(error)) = timeout(TEND_EVERY, changed).await {
            tracing::debug!(%error, "changes of devices are not heard");
            sleep(TEND_EVERY).await;
        }
    }
}

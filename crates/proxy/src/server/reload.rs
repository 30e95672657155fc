//! A reload: another configuration takes the place of the one in force, while connections go on.
//!
//! It is one transaction. What can fail comes first: comparing both configurations, binding addresses, opening files, directories
//! and pools. Only then is anything changed, by steps that cannot fail. Whatever has been opened for a reload that fails is closed
//! again.
//!
//! A listener keeps its socket, with all clients in its queue, as long as its address is the same. Its counts, limits in number
//! and failed logins go on as long as its name is the same. Connections keep the [`Front`] with which they began; each new one
//! takes the front that its listener has at that moment ([`Fronts`](crate::context::Fronts)). Idle limits reach them all.

use super::{Door, Server, State, bind, listening, lock, taps};
use crate::{
    access::Subject,
    config::{Config, ListenerConfig, Protocol},
    context::{Front, Opened, ServerContext, led::Led, roll::Told},
    inherited::Inherited,
    limits::CONNECTIONS,
    log::access_log::OpenLog,
    onward::{forbid, of_flow::Line},
    pool::{self, Pools},
    start_error::StartError,
    target::{Host, Target},
    tpot,
    users::Users,
};
use longsplice_engine::{BoundSocket, Command};
use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::task::{spawn_blocking, yield_now};

/// What a reload has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Names of listeners that are new.
    pub added: Vec<String>,
    /// Names of listeners that listen at another address.
    pub moved: Vec<String>,
    /// Names of listeners that do not accept any more.
    pub removed: Vec<String>,
    /// Number of connections that were reset, because they are forbidden now.
    pub reset: u64,
}

/// What is needed beside what is open already.
struct Beside {
    sockets: Vec<Option<BoundSocket>>,
    /// `None`: the log stays where it is.
    log: Option<OpenLog>,
    opened: Opened,
}

/// A listener of the configuration to come.
enum Next {
    /// It has the door of one that is there.
    Kept(Arc<Front>),
    New(Door),
}

/// For each listener of the configuration to come, the index of the door that it keeps.
type Kept = Vec<Option<usize>>;

impl Server {
    /// Puts another configuration in force, or returns the reason why it cannot be; then nothing has changed. One reload waits for
    /// the other.
    ///
    /// `enforce`: live connections that the new rules forbid, or whose users are gone, are reset, as if the configuration said so.
    pub async fn reload(&self, config: Config, enforce: bool) -> Result<Reloaded, StartError> {
        let _alone = self.reloading.lock().await;
        let (places, enforce) = (config.places.clone(), enforce || config.enforce);
        let mut reloaded = self.replace(config).await.map_err(|e| e.at(&places))?;
        if enforce {
            reloaded.reset = self.enforce().await;
        }
        Ok(reloaded)
    }

    async fn replace(&self, config: Config) -> Result<Reloaded, StartError> {
        if *self.stop.borrow() {
            return Err(StartError::Stopping);
        }
        if config.listeners.is_empty() {
            return Err(StartError::NoListener);
        }
        tpot::check(&config)?;
        let (kept, log_changes) = {
            let state = lock(&self.state);
            (self.compare(&state, &config)?, state.config.log != config.log)
        };
        let (shared, inherited, of) = (self.shared.clone(), self.inherited.clone(), kept.clone());
        let open = move || open((&shared, &inherited), &config, &of, log_changes).map(|beside| (beside, config));
        let (Beside { sockets, log, opened }, config) =
            spawn_blocking(open).await.map_err(|_| StartError::Stopping)??;
        let mut next = Vec::new();
        for ((listener, socket), kept) in config.listeners.iter().zip(sockets).zip(&kept) {
            let (before, addr, number) = {
                let mut state = lock(&self.state);
                state.numbered += usize::from(kept.is_none());
                let before =
                    state.doors.iter().map(|door| door.fronts.now()).find(|f| f.listener.name == listener.name);
                (before, kept.map(|at| state.doors[at].addr), state.numbered)
            };
            let (mut listener, before) = (listener.clone(), before.as_deref());
            next.push(if let Some(addr) = addr {
                listener.listen = addr;
                Next::Kept(Arc::new(Front::new(listener, &self.shared, &opened, before)))
            } else {
                let shared = (&self.shared, self.tpot.as_ref());
                Next::New(Door::open(shared, (listener, socket), &opened, (number, before)).await?)
            });
        }

        let (gone, reloaded) = {
            let mut state = lock(&self.state);
            if *self.stop.borrow() {
                return Err(StartError::Stopping);
            }
            // From here on, nothing fails.
            self.swap(&mut state, config, opened, log, next.into_iter().zip(kept))
        };
        for door in gone {
            door.close().await;
        }
        Ok(reloaded)
    }

    /// Puts all of it in force. Returns the doors that are left.
    fn swap(
        &self,
        state: &mut State,
        config: Config,
        mut opened: Opened,
        log: Option<OpenLog>,
        next: impl Iterator<Item = (Next, Option<usize>)>,
    ) -> (Vec<Door>, Reloaded) {
        let paused = state.paused();
        let mut old: Vec<Option<Door>> = state.doors.drain(..).map(Some).collect();
        for (next, kept) in next {
            let door = match (next, kept.and_then(|at| old[at].take())) {
                (Next::New(door), _) => door,
                (Next::Kept(front), Some(door)) => {
                    front.take_effect();
                    door.fronts.set(front);
                    door
                }
                (Next::Kept(_), None) => unreachable!("only a listener that has a door is to keep it"),
            };
            state.doors.push(door);
        }
        let gone: Vec<Door> = old.into_iter().flatten().collect();
        let names = |doors: &mut dyn Iterator<Item = &Door>| -> BTreeSet<String> {
            doors.map(|door| door.fronts.now().listener.name.to_string()).collect()
        };
        let (new, left) = (names(&mut state.doors.iter().filter(|door| door.is_new())), names(&mut gone.iter()));
        let reloaded = Reloaded {
            added: new.difference(&left).cloned().collect(),
            moved: new.intersection(&left).cloned().collect(),
            removed: left.difference(&names(&mut state.doors.iter())).cloned().collect(),
            reset: 0,
        };
        opened.listening = listening(&state.doors, &opened.pools);
        opened.services.iter().for_each(|service| service.take_effect(&config));
        self.shared.all.limit(config.connections.unwrap_or(CONNECTIONS), u32::MAX);
        self.shared.set_opened(opened);
        log.into_iter().for_each(|log| self.shared.log.switch_to(log));
        state.config = config;
        self.tend(state);
        self.shared.splicer.limits_changed();
        state.keep_paused(&paused, &self.shared.events);
        state.doors.iter_mut().filter(|door| door.is_new()).for_each(Door::accept);
        (gone, reloaded)
    }

    /// Returns which doors stay, or what of the configuration cannot change while the program runs.
    fn compare(&self, state: &State, next: &Config) -> Result<Kept, StartError> {
        let now = &state.config;
        let (engine, other) = (&now.engine, &next.engine);
        let (datapath, of) = (&engine.datapath, &other.datapath);
        for (key, same) in [
            ("devices", datapath.devices == of.devices),
            ("xdp", datapath.xdp == of.xdp),
            ("peer", datapath.peer == of.peer),
            ("splice", now.splice == next.splice),
            ("source_ports", engine.source_ports == other.source_ports),
            ("source", engine.sources == other.sources),
            ("control", (&now.control, now.control_access) == (&next.control, next.control_access)),
            ("admin", now.admin == next.admin),
            ("tpot", now.tpot == next.tpot),
        ] {
            if !same {
                return Err(StartError::Fixed(key));
            }
        }
        let needed = |l: &ListenerConfig, key, what| StartError::NotPrepared(l.name.clone(), l.listen, key, what);
        let first = |is: fn(&ListenerConfig) -> bool| next.listeners.iter().find(|l| is(l));
        let [copies, holds] = self.rings;
        if let Some(listener) = first(ListenerConfig::copies).filter(|_| !copies) {
            return Err(needed(listener, "tap", "copies what passes a tap or fills a cache"));
        }
        if let Some(listener) = first(ListenerConfig::holds).filter(|_| !holds) {
            return Err(needed(listener, "policy", "holds segments"));
        }
        let place = |listener: &ListenerConfig| {
            let Some(at) = state.doors.iter().position(|door| door.is_of(listener)) else {
                let is_routed = listener.intercepts.is_some() && self.tpot.is_none();
                return if is_routed { Err(needed(listener, "listen", "is transparent")) } else { Ok(None) };
            };
            match state.doors[at].obstacle(listener) {
                Some(key) => Err(StartError::FixedOf(listener.name.clone(), listener.listen, key)),
                None => Ok(Some(at)),
            }
        };
        next.listeners.iter().map(place).collect()
    }
}

/// Judging again. Connections of listeners that are gone are left alone: there are no rules for them.
impl Server {
    /// Judges all live connections by the rules and users that are in force now, and resets those that are forbidden. What these
    /// connections ask for later is judged by them, too. Returns the number of those that were reset.
    async fn enforce(&self) -> u64 {
        let fronts: HashMap<Arc<str>, Arc<Front>> = {
            let state = lock(&self.state);
            state.doors.iter().map(|door| door.fronts.now()).map(|front| (front.listener.name.clone(), front)).collect()
        };
        for ListenerConfig { rules, protocol, .. } in fronts.values().map(|front| &front.listener) {
            rules.replace_earlier();
            protocol.all_users().for_each(Users::replace_earlier);
        }
        let by_user =
            |name: &str, user: Option<&str>| is_unknown(&fronts.get(name)?.listener, user).then(|| GONE.into());
        // first those that tasks serve: what becomes a flow meanwhile is told so, or found in the list afterwards
        let (next, tasks) = self.shared.roll.judge(|| self.shared.splicer.number(), by_user);
        let mut reset = tasks.values().flatten().count() as u64;
        self.shared.counters.forbidden.fetch_add(reset, Relaxed);
        let mut last = 0;
        loop {
            let page = self.shared.splicer.flows_after(last, PAGE, None);
            let Some(end) = page.last() else { return reset };
            last = end.id;
            for flow in &page {
                let Some(front) = flow.name.as_deref().and_then(|name| fronts.get(name)) else { continue };
                let is_http = matches!(front.listener.protocol, Protocol::Http(_));
                match judged_by((flow.id, is_http), next, tasks.get(&flow.client)) {
                    JudgedBy::Roll { is_forbidden: true } => drop(self.shared.splicer.command(flow.id, Command::Reset)),
                    JudgedBy::Roll { is_forbidden: false } => {}
                    JudgedBy::List => {
                        let Some(judged) = self.shared.judged(flow.id).await else { continue };
                        let one = Relayed {
                            client: flow.client.ip(),
                            user: flow.user.as_deref(),
                            target: &flow.target,
                            server: flow.server,
                            judged,
                        };
                        if let Some(why) = forbids(&front.listener, one, &self.shared.opened().pools) {
                            reset += u64::from(forbid(&self.shared, flow.id, why));
                        }
                    }
                }
            }
            yield_now().await;
        }
    }
}

/// Turns that others get while a flow is in no list.
const TURNS: usize = 100;
/// Flows that are judged before others get their turn.
const PAGE: usize = 500;
/// Why connections of users are forbidden who cannot log in any more.
const GONE: &str = "no such user";

/// Where a flow of the list is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JudgedBy {
    /// On the roll: what is known of it is there.
    Roll { is_forbidden: bool },
    /// Here.
    List,
}

/// Returns where a flow is judged. `next`: a number that was given while nobody could enter the roll, or leave it. `task`: what was
/// said there of its client, if a task serves it.
fn judged_by((flow, is_http): (u64, bool), next: u64, task: Option<&Told>) -> JudgedBy {
    match task.filter(|_| is_http) {
        // a message, or what has become a flow meanwhile
        Some(why) => JudgedBy::Roll { is_forbidden: why.is_some() },
        // a message of a client who has come meanwhile: these rules have allowed it, by an address that only its task knows
        None if is_http && flow >= next => JudgedBy::Roll { is_forbidden: false },
        None => JudgedBy::List,
    }
}

/// A flow, as far as rules look at it.
#[derive(Debug, Clone, Copy)]
struct Relayed<'a> {
    client: IpAddr,
    user: Option<&'a str>,
    target: &'a str,
    server: SocketAddr,
    judged: Judged,
}

/// By which address the rules have allowed a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judged {
    /// That of its server.
    Server,
    /// Another one, since it is led; none: by the name alone.
    Led(Option<SocketAddr>),
    /// Nobody has said so: another process has left it, with a message.
    Unknown,
}

impl ServerContext {
    /// `None`: the flow has ended.
    async fn judged(&self, flow: u64) -> Option<Judged> {
        let of = |led: Option<Led>| match led {
            Some(led) if led.is_unknown => Judged::Unknown,
            Some(led) => Judged::Led(led.judged),
            None => Judged::Server,
        };
        for _ in 0..TURNS {
            if self.splicer.is_recovered(flow) {
                let line = Line::of(self.splicer.described(flow).as_deref());
                return Some(line.map_or(Judged::Unknown, |line| of(line.led)));
            }
            if self.splicer.lists(flow) {
                return Some(of(self.led.of(flow)));
            }
            yield_now().await; // it may be that it is just being taken up: it is entered, and then listed
        }
        None
    }
}

/// Returns why a listener forbids a flow, if it does.
fn forbids(listener: &ListenerConfig, flow: Relayed<'_>, pools: &Pools) -> Option<Arc<str>> {
    if is_unknown(listener, flow.user) {
        return Some(GONE.into());
    }
    // those of a site are judged by its name, and by our address
    let is_site = listener.http().is_some_and(|http| !http.routes.is_empty());
    let server = if is_site { listener.listen } else { flow.server };
    let named = [flow.target.to_owned(), format!("{}:{}", flow.target, server.port())];
    let named = named.iter().find_map(|text| text.parse().ok()).filter(|target: &Target| !is_unspecified(&target.host));
    let target = named.unwrap_or(Target::from(server));
    // the rules have been asked about this port, also where a server connects to us (BIND), or data have ports of their own (FTP)
    let server = SocketAddr::new(server.ip(), target.port);
    let known = match flow.judged {
        Judged::Led(judged) => judged,
        Judged::Unknown if listener.upstream.is_some() || listener.rules.lead() => {
            target.host.ip().map(|ip| SocketAddr::new(ip, target.port))
        }
        Judged::Server | Judged::Unknown => Some(server),
    };
    // what the configuration names is not guarded
    let members = listener.pools().filter_map(|name| pools.get(name)).flat_map(|pool| &pool.members);
    let is_named = listener
        .targets()
        .chain(members.map(|member| &member.target))
        .any(|named| *named == target || *named == server.into());
    let rules = if is_named { listener.rules.unguarded() } else { listener.rules.clone() };
    let is_asked = listener.http().is_some() && !is_site && listener.intercepts.is_none();
    let subject = Subject { method: is_asked.then_some("CONNECT"), ..Subject::by(flow.client).of(flow.user) };
    let by_address = || match (flow.judged, known) {
        (Judged::Unknown, None) => Ok(()), // only what the name forbids is certain
        (_, known) => rules.check_known(&subject, &target, known),
    };
    let checked = rules.check_name(&subject, &target).and_then(|()| by_address());
    checked.err().map(|why| why.to_string().into())
}

fn is_unspecified(host: &Host) -> bool {
    matches!(host, Host::Ip(ip) if ip.is_unspecified())
}

/// Returns whether somebody could not log in as this user, or without one.
fn is_unknown(listener: &ListenerConfig, user: Option<&str>) -> bool {
    let all = || listener.protocol.all_users().filter(|users| !users.is_empty());
    match &listener.protocol {
        Protocol::Login(login) if login.check.is_some() => false, // others know them
        // routes may ask for users, each for its own
        Protocol::Http(http) if !http.routes.is_empty() => {
            user.is_some_and(|user| all().next().is_some() && !all().any(|users| users.has(user)))
        }
        _ => all().any(|users| !user.is_some_and(|user| users.has(user))),
    }
}

/// Opens what the configuration needs and is not open yet.
fn open(
    (shared, inherited): (&ServerContext, &Inherited),
    config: &Config,
    kept: &Kept,
    log_changes: bool,
) -> Result<Beside, StartError> {
    super::check::check(config)?;
    let missing = |(listener, kept): (&ListenerConfig, &Option<usize>)| match kept {
        Some(_) => Ok(None),
        None => bind(listener, inherited),
    };
    let sockets = config.listeners.iter().zip(kept).map(missing).collect::<Result<_, _>>()?;
    let open = |log| StartError::AccessLog { to: config.log.to.clone(), source: log };
    let log = log_changes.then(|| shared.log.prepare(&config.log)).transpose().map_err(open)?;
    let now = shared.opened();
    let taps = taps(config, &now.taps)?;
    let pools = pool::open(&config.pools, &now.pools, &shared.events);
    let services = now.services.iter().map(|service| service.reopen(config, &pools)).collect::<Result<_, _>>()?;
    Ok(Beside { sockets, log, opened: Opened { taps, pools, services, ..Opened::default() } })
}

#[cfg(test)]
#[path = "reload_tests.rs"]
mod tests;

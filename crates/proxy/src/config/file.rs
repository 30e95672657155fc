//! The structure of the TOML file for serde, and its conversion to [`Config`].
//!
//! Values are checked while they are parsed ([`value`](super::value)), so that serde knows their position.
//! Rules that involve several values are checked afterwards, with the spans kept in [`Spanned`].

use super::{
    Config, ConfigError, Forwarded, Http, ListenerConfig, Places, PlugHandshake, Protocol, Twice, TwiceNamed,
    admin::RawAdmin,
    asking::RawAsking,
    cache::{RawCache, disagree},
    control::{self, RawControl},
    fields::RawFields,
    filter::RawFilter,
    ftp::FtpOptions,
    handshake::RawHandshake,
    intercepting::Shown,
    lead::{LedAt, RawLead},
    log::RawLog,
    login::{RawDestination, RawKeys, RawLogin},
    pages::RawErrorPage,
    plug::parse_listen,
    route::RawRoute,
    site::{Number, RawPool},
    socks::RawCommands,
    source::SourceFile,
    table::{Keys, Table},
    tls::RawProxyProtocol,
    trigger::RawTrigger,
    upstream::RawUpstreams,
    value::{
        Count, Keepalive, ListenerName, Many, OrNumber, Parsed, RawAction, Seconds, SecondsOrNever, Splice, Tables,
    },
};
use crate::{
    access::{Action, Days, Hours, PathPattern, Pattern, PortRange, Prefix, Rule, Rules, Times},
    commands::{Bind, Command, Udp},
    limits::{Limits, rate::Rate},
    secrets::{self, Secret},
    target::Target,
    users::Users,
};
use longsplice_engine::{Policy, SpliceWhen, TpotWhose};
use serde::{Deserialize, de::MapAccess};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};
use toml::Spanned;

/// The whole file. What depends on other tables is kept apart: it is checked at the end.
#[derive(Default)]
struct File {
    config: Config,
    listeners: Tables<Spanned<Listener>>,
    pools: BTreeMap<String, Spanned<RawPool>>,
    upstreams: RawUpstreams,
    tpot: Option<Spanned<RawAsking>>,
    haproxy: Option<Spanned<PathBuf>>,
    log: Table<RawLog>,
    /// Where `source` is named, and `xdp` or `peer`.
    source: Option<Range<usize>>,
    bypass: Option<Range<usize>>,
    /// Where the values of keys stand that count at the start alone.
    fixed: Vec<(&'static str, Range<usize>)>,
}

impl File {
    /// Returns a value that counts at the start alone, and notes where it stands.
    fn fixed<T>(&mut self, key: &'static str, value: Spanned<T>) -> T {
        self.fixed.push((key, value.span()));
        value.into_inner()
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum FileKey {
    Listener,
    Pool,
    Upstream,
    Connections,
    Log,
    Splice,
    Devices,
    Xdp,
    Peer,
    Tpot,
    Control,
    Admin,
    SourcePorts,
    Source,
    LeaveFlowsOnStop,
    Enforce,
    Groups,
}

impl Keys for File {
    type Key = FileKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: FileKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            FileKey::Listener => self.listeners = table.next_value()?,
            FileKey::Pool => self.pools = table.next_value()?,
            FileKey::Upstream => self.upstreams = table.next_value()?,
            FileKey::Connections => self.config.connections = Some(table.next_value::<Count>()?.0),
            FileKey::Log => self.log = table.next_value()?,
            FileKey::Splice => self.config.splice = self.fixed("splice", table.next_value()?),
            FileKey::Devices => self.config.engine.datapath.devices = names(self.fixed("devices", table.next_value()?)),
            FileKey::Xdp | FileKey::Peer => {
                let devices: Spanned<Many<Parsed<Device>>> = table.next_value()?;
                self.bypass.get_or_insert(devices.span());
                let is_xdp = matches!(key, FileKey::Xdp);
                let devices = names(self.fixed(if is_xdp { "xdp" } else { "peer" }, devices));
                let of = &mut self.config.engine.datapath;
                *(if is_xdp { &mut of.xdp } else { &mut of.peer }) = devices;
            }
            FileKey::Tpot => self.tpot = Some(table.next_value()?),
            FileKey::Control => {
                let control: RawControl = self.fixed("control", table.next_value()?);
                self.config.control_access = control.access();
                (self.config.control, self.haproxy) = (control.path, control.haproxy);
            }
            FileKey::Admin => self.config.admin = Some(self.fixed::<RawAdmin>("admin", table.next_value()?).into()),
            FileKey::SourcePorts => {
                let OrNumber(PortRange { first, last }) = self.fixed("source_ports", table.next_value()?);
                self.config.engine.source_ports = first..=last;
            }
            FileKey::Source => {
                let sources: Spanned<Many<Parsed<IpAddr>>> = table.next_value()?;
                self.source = Some(sources.span());
                let sources = self.fixed("source", sources);
                self.config.engine.sources = sources.0.into_iter().map(|s| s.0).collect();
            }
            FileKey::LeaveFlowsOnStop => self.config.leave_flows_on_stop = table.next_value()?,
            FileKey::Enforce => self.config.enforce = table.next_value()?,
            FileKey::Groups => {
                let groups: BTreeMap<String, Many<Parsed<UserName>>> = table.next_value()?;
                let users = |all: Many<Parsed<UserName>>| all.0.into_iter().map(|user| user.0.0).collect();
                self.config.groups = groups.into_iter().map(|(name, all)| (name, users(all))).collect();
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Listener {
    name: Option<Spanned<Parsed<ListenerName>>>,
    pub protocol: Name,
    pub inside: Option<Spanned<Inside>>,
    pub transparent: Option<Spanned<bool>>,
    pub source: Option<Spanned<Shown>>,
    pub listen: Spanned<Parsed<Listen>>,
    pub target: Option<Spanned<Parsed<Target>>>,
    pub pool: Option<Spanned<String>>,
    upstream: Option<Spanned<String>>,
    pub handshake: Option<Spanned<RawHandshake>>,
    pub users: Option<Spanned<BTreeMap<String, String>>>,
    pub users_file: Option<Spanned<PathBuf>>,
    commands: Option<Spanned<Many<Command>>>,
    bind: Option<Spanned<Table<Bind>>>,
    udp: Option<Spanned<Table<Udp>>>,
    via: Option<Spanned<String>>,
    forwarded: Option<Spanned<RawForwarded>>,
    strict_replies: Option<Spanned<bool>>,
    pub port: Option<Spanned<NonZeroU16>>,
    telnet: Option<Spanned<bool>>,
    login: Option<Spanned<RawLogin>>,
    #[serde(default)]
    destination: Tables<Spanned<RawDestination>>,
    #[serde(default)]
    pub route: Tables<Spanned<RawRoute>>,
    pub proxy_protocol: Option<Spanned<RawProxyProtocol>>,
    tap: Option<Spanned<PathBuf>>,
    filter: Option<Spanned<Table<RawFilter>>>,
    fields: Option<Spanned<RawFields>>,
    error_page: Option<Spanned<Tables<RawErrorPage>>>,
    cache: Option<Spanned<RawCache>>,
    ftp: Option<Spanned<Table<FtpOptions>>>,
    #[serde(default)]
    rules: Tables<Spanned<RawRule>>,
    #[serde(default)]
    policy: Table<RawPolicy>,
    #[serde(default)]
    limits: Table<Limits>,
    #[serde(default)]
    trigger: Tables<Spanned<RawTrigger>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Name {
    Socks5,
    Http,
    Tls,
    Ftp,
    Login,
    Plug,
    Transparent,
    Tpot,
}

impl Name {
    /// Whether clients can log in. `http`: whether those of HTTP can.
    fn has_users(self, http: bool) -> bool {
        match self {
            Name::Socks5 | Name::Ftp | Name::Login => true,
            Name::Http => http,
            Name::Tls | Name::Plug | Name::Transparent | Name::Tpot => false,
        }
    }
}

/// What is read of intercepted connections.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Inside {
    Bytes,
    Http,
    Tls,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawForwarded {
    None,
    Forwarded,
    XForwardedFor,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    action: RawAction,
    #[serde(default)]
    client: Many<Parsed<Prefix>>,
    #[serde(default)]
    target: Many<Parsed<Pattern>>,
    #[serde(default)]
    ports: Many<OrNumber<PortRange>>,
    users: Option<Spanned<Many<Parsed<UserName>>>>,
    methods: Option<Spanned<Many<Parsed<Method>>>>,
    path: Option<Spanned<Many<Parsed<PathPattern>>>>,
    groups: Option<Spanned<Many<Parsed<UserName>>>>,
    #[serde(default)]
    hours: Many<Parsed<Hours>>,
    #[serde(default)]
    days: Many<Parsed<Days>>,
    upstream: Option<Spanned<RawLead>>,
    pool: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum PolicyKey {
    Splice,
    Path,
    Hold,
    DrainLimit,
    ReleaseAfter,
    IdleLimit,
    Keepalive,
}

impl Keys for Policy {
    type Key = PolicyKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: PolicyKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            PolicyKey::Splice => self.when = table.next_value::<Splice>()?.0,
            PolicyKey::Path => self.path = table.next_value()?,
            PolicyKey::Hold => self.hold = table.next_value()?,
            PolicyKey::DrainLimit => self.drain_limit = table.next_value::<Seconds>()?.0,
            PolicyKey::ReleaseAfter => self.release_after = table.next_value::<SecondsOrNever>()?.0,
            PolicyKey::IdleLimit => self.idle_limit = table.next_value::<Seconds>()?.0.into(),
            PolicyKey::Keepalive => self.keepalive = Some(table.next_value::<Keepalive>()?.0),
        }
        Ok(())
    }
}

/// The table `policy`, and whether it says when to splice.
#[derive(Default)]
struct RawPolicy {
    policy: Policy,
    says_when: bool,
}

impl Keys for RawPolicy {
    type Key = PolicyKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: PolicyKey, table: &mut A) -> Result<(), A::Error> {
        self.says_when |= matches!(key, PolicyKey::Splice);
        self.policy.set(key, table)
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum LimitsKey {
    Handshake,
    Resolve,
    Connect,
    Reply,
    KeepAlive,
    RequestHead,
    RequestBody,
    ReplyBody,
    ConnectionsPerClient,
    NewPerClient,
    Connections,
}

impl Keys for Limits {
    type Key = LimitsKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: LimitsKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            LimitsKey::Handshake => self.handshake = table.next_value::<Seconds>()?.0,
            LimitsKey::Resolve => self.resolve = table.next_value::<Seconds>()?.0,
            LimitsKey::Connect => self.connect = table.next_value::<Seconds>()?.0,
            LimitsKey::Reply => self.reply = table.next_value::<Seconds>()?.0,
            LimitsKey::KeepAlive => self.keep_alive = table.next_value::<Seconds>()?.0,
            LimitsKey::RequestHead => self.request_head = table.next_value::<Number<1024, 32768>>()?.0,
            LimitsKey::RequestBody => self.request_body = Some(table.next_value()?),
            LimitsKey::ReplyBody => self.reply_body = Some(table.next_value()?),
            LimitsKey::ConnectionsPerClient => self.connections_per_client = table.next_value::<Count>()?.0,
            LimitsKey::NewPerClient => self.new_per_client = Some(table.next_value::<OrNumber<Rate>>()?.0),
            LimitsKey::Connections => self.connections = Some(table.next_value::<Count>()?.0),
        }
        Ok(())
    }
}

/// A listening address; it must be numeric.
pub(super) struct Listen(pub SocketAddr);

impl FromStr for Listen {
    type Err = super::plug::ListenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_listen(text).map(Listen)
    }
}

/// A valid device name.
struct Device(String);

impl FromStr for Device {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = (1..16).contains(&text.len()) && !text.contains(|c: char| c == '/' || c.is_whitespace());
        if good { Ok(Device(text.into())) } else { Err("no name of a device: write one of those that `ip link` shows") }
    }
}

fn names(devices: Many<Parsed<Device>>) -> Vec<String> {
    devices.0.into_iter().map(|device| device.0.0).collect()
}

/// An HTTP method in its usual spelling; methods are case-sensitive.
struct Method(String);

impl FromStr for Method {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase() || b"-_".contains(&b));
        if good { Ok(Method(text.into())) } else { Err("bad method: write one such as GET, in capital letters") }
    }
}

/// A name of a user.
struct UserName(String);

impl FromStr for UserName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() { Err("nobody has an empty name: write one") } else { Ok(UserName(text.into())) }
    }
}

pub(super) fn read(text: &str, file: &Path) -> Result<Config, ConfigError> {
    let source = SourceFile { text, file, warnings: RefCell::default(), has_passwords: Cell::default() };
    let Table(File { mut config, listeners, pools, upstreams, tpot, haproxy, source: sources, log, bypass, fixed }) =
        toml::from_str(text).map_err(|e| source.wrong(e.span().unwrap_or(0..0), e.message()))?;
    config.control.iter_mut().for_each(|path| *path = source.path(path));
    config.log = source.log(log, &mut config.places)?;
    if let Some(haproxy) = haproxy {
        let path = source.path(haproxy.get_ref());
        if let Some(mistake) = control::mistake(&path, config.control.as_deref()) {
            return Err(source.wrong(haproxy.span(), mistake));
        }
        config.places.add(path.display(), source.place(haproxy.span()));
        config.haproxy = Some(path);
    }
    let places = &mut config.places;
    let tpot_key = tpot.iter().map(|tpot| ("tpot", tpot.span()));
    fixed.into_iter().chain(tpot_key).for_each(|(key, at)| places.add(Places::key(key), source.place(at)));
    config
        .engine
        .sources
        .iter()
        .zip(sources.iter().cycle())
        .for_each(|(ip, at)| places.add(ip, source.place(at.clone())));
    let spans: Vec<_> = pools.iter().map(|(name, pool)| (name.clone(), pool.span())).collect();
    config.pools = source.pools(pools)?;
    config.upstreams = source.upstreams(&upstreams, &config.pools)?;
    for listener in listeners.0 {
        let listen = listener.get_ref().listen.span();
        let name = listener.get_ref().name.as_ref().map(Spanned::span);
        let cache = listener.get_ref().cache.as_ref().map(Spanned::span);
        let tap = listener.get_ref().tap.as_ref().map(Spanned::span);
        let upstream = listener.get_ref().upstream.clone();
        let rules = listener.get_ref().rules.0.iter().zip(0..);
        let led: Vec<LedAt> = rules.filter_map(|(rule, i)| Some((i, rule.get_ref().leads_at()?))).collect();
        let mut listener = source.listener(listener, &config)?;
        source.lead_through(&mut listener, upstream, &config.upstreams)?;
        source.may_lead(&listener, &led)?;
        if disagree(&config.listeners, &listener) {
            let cure =
                "another listener has a cache in this directory, with other keys: write the same, or another dir";
            return Err(source.wrong(cache.unwrap_or(listen), cure));
        }
        if let Some(other) = config.collision(&listener) {
            return Err(source.wrong(listen, &Twice(other)));
        }
        config.places.add(listener.listen, source.place(listen.clone()));
        let dirs = [(listener.tap.as_ref(), tap), (listener.cache().map(|cache| &cache.dir), cache)];
        for (dir, at) in dirs {
            dir.zip(at).into_iter().for_each(|(dir, at)| config.places.add(dir.display(), source.place(at)));
        }
        config.push(listener).map_err(|of| source.wrong(name.unwrap_or(listen), &TwiceNamed(of)))?;
    }
    source.look_at_pools(spans, &config);
    let intercepts = config.listeners.iter().any(|l| l.intercepts == Some(TpotWhose::Askers));
    if let (Some(at), true) = (bypass, intercepts || tpot.is_some()) {
        return Err(source.wrong(at, "packets would bypass the tunnels of tpot: remove xdp and peer, or tpot"));
    }
    config.tpot = tpot.map(|tpot| source.asking(tpot, intercepts)).transpose()?;
    (config.warnings, config.has_passwords) = (source.warnings.take(), source.has_passwords.get());
    Ok(config)
}

impl SourceFile<'_> {
    fn listener(&self, spanned: Spanned<Listener>, config: &Config) -> Result<ListenerConfig, ConfigError> {
        let (span, pools) = (spanned.span(), &config.pools[..]);
        let mut raw = spanned.into_inner();
        let whose = self.intercepts(&mut raw)?;
        let (of_plug, of_tpot) = self.handshake(&raw, whose)?;
        let shows_clients = self.shows_clients(&raw, of_plug == PlugHandshake::EndToEnd)?;
        let handshake = raw.handshake.as_ref().map(Spanned::span);
        let listen = raw.listen.into_inner().0.0;
        let of_http = [
            raw.via.as_ref().map(Spanned::span),
            raw.forwarded.as_ref().map(Spanned::span),
            raw.strict_replies.as_ref().map(Spanned::span),
            raw.fields.as_ref().map(Spanned::span),
            raw.error_page.as_ref().map(Spanned::span),
        ];
        if let (Some(span), true) = (of_http.into_iter().flatten().next(), raw.protocol != Name::Http) {
            return Err(self.wrong(span, "only HTTP has this: remove the key, or use protocol = \"http\""));
        }
        if let (Some(pool), false) = (&raw.pool, matches!(raw.protocol, Name::Plug | Name::Ftp)) {
            let cure = "only plugs and FTP have this: name the pool in a route, or use protocol = \"plug\"";
            return Err(self.wrong(pool.span(), cure));
        }
        if let (Some(cache), true) = (&raw.cache, raw.protocol != Name::Http) {
            let cure = "only HTTP has caches: remove the key, or use protocol = \"http\", or inside = \"http\"";
            return Err(self.wrong(cache.span(), cure));
        }
        let methods_or_path = |r: &Spanned<RawRule>| {
            r.get_ref().methods.as_ref().map(Spanned::span).or(r.get_ref().path.as_ref().map(Spanned::span))
        };
        let judges = raw.rules.0.iter().find_map(methods_or_path);
        if let (Some(span), false) = (&judges, matches!(raw.protocol, Name::Http | Name::Ftp)) {
            let cure = "only HTTP and FTP have methods and paths: remove the key, or use protocol = \"http\"";
            return Err(self.wrong(span.clone(), cure));
        }
        if let (Some(ftp), true) = (&raw.ftp, raw.protocol != Name::Ftp) {
            return Err(self.wrong(ftp.span(), "only FTP has this: remove the key, or use protocol = \"ftp\""));
        }
        let names_users = |r: &Spanned<RawRule>| {
            let RawRule { users, groups, .. } = r.get_ref();
            users.as_ref().map(Spanned::span).or(groups.as_ref().map(Spanned::span))
        };
        let asked = |r: &Spanned<RawRoute>| r.get_ref().users.is_some() || r.get_ref().users_file.is_some();
        let ask = raw.users.is_some() || raw.users_file.is_some() || raw.route.0.iter().any(asked);
        if !raw.protocol.has_users((raw.route.0.is_empty() || ask) && whose.is_none())
            && let Some(span) = raw.rules.0.iter().find_map(names_users)
        {
            return Err(self.wrong(span, "clients of this listener do not log in: remove the key"));
        }
        if let (Some(port), true) = (&raw.port, raw.protocol != Name::Tls) {
            return Err(self.wrong(port.span(), "only TLS has such a port: remove it, or use protocol = \"tls\""));
        }
        let of_login = [
            raw.telnet.as_ref().map(Spanned::span),
            raw.login.as_ref().map(Spanned::span),
            raw.destination.0.first().map(Spanned::span),
        ];
        if let (Some(span), true) = (of_login.into_iter().flatten().next(), raw.protocol != Name::Login) {
            return Err(self.wrong(span, "only login gateways have this: remove it, or use protocol = \"login\""));
        }
        if let (Some(route), Name::Socks5 | Name::Ftp | Name::Login | Name::Plug | Name::Transparent | Name::Tpot) =
            (raw.route.0.first(), raw.protocol)
        {
            let cure = "only HTTP and TLS have routes: remove them, or use protocol = \"http\" or \"tls\"";
            return Err(self.wrong(route.span(), cure));
        }
        let commands = RawCommands { commands: raw.commands, bind: raw.bind, udp: raw.udp };
        if let (Some(span), true) = (commands.span(), raw.protocol != Name::Socks5) {
            return Err(self.wrong(span, "only SOCKS has this: remove the key, or use protocol = \"socks5\""));
        }
        let users = raw.users.as_ref().map(Spanned::span).or(raw.users_file.as_ref().map(Spanned::span));
        if let (Name::Plug | Name::Tls | Name::Transparent | Name::Tpot, Some(span)) = (raw.protocol, users.clone()) {
            let cure = "clients of this protocol cannot authenticate: remove the users, or use protocol = \"socks5\"";
            return Err(self.wrong(span, cure));
        }
        let protocol = match (raw.protocol, raw.target) {
            (Name::Socks5, None) => Protocol::Socks5 {
                users: self.users(raw.users, raw.users_file)?,
                commands: self.commands(commands, raw.tap.is_some())?,
            },
            (Name::Socks5, Some(target)) => {
                return Err(self.wrong(
                    target.span(),
                    "a SOCKS client names its own target: remove `target`, or use protocol = \"plug\"",
                ));
            }
            (Name::Http, None) => {
                let mut http = self.http(raw.users, raw.users_file, raw.via, raw.forwarded)?;
                if let Some(raw) = raw.filter.take() {
                    self.filter_replies(raw, &mut http)?;
                }
                if let Some(raw) = raw.fields {
                    http.fields = Arc::new(self.fields(raw.into_inner())?);
                }
                if let Some(pages) = raw.error_page {
                    http.error_pages = self.error_pages(pages.into_inner())?.into();
                }
                http.strict_replies = raw.strict_replies.is_some_and(Spanned::into_inner);
                http.cache = raw.cache.map(|c| self.cache(c.into_inner())).transpose()?;
                Protocol::Http(Http { routes: self.routes(raw.route.0, pools)?, ..http })
            }
            (Name::Http, Some(target)) => {
                return Err(self.wrong(
                    target.span(),
                    "an HTTP client names its own target: remove `target`, add routes, or use protocol = \"plug\"",
                ));
            }
            (Name::Tls, None) => Protocol::Tls(self.tls(raw.port.map(|p| p.into_inner().get()), raw.route.0, pools)?),
            (Name::Tls, Some(target)) => {
                return Err(self.wrong(
                    target.span(),
                    "a TLS client names its own target: write `target` below a [[listener.route]]",
                ));
            }
            (Name::Ftp, target) => {
                let users = self.users(raw.users, raw.users_file)?;
                let target = self.lead_to((target, raw.pool), pools)?;
                Protocol::Ftp(self.ftp((target, whose.is_some()), users, raw.ftp, judges)?)
            }
            (Name::Login, None) => {
                let keys = RawKeys {
                    telnet: raw.telnet.is_some_and(Spanned::into_inner),
                    login: raw.login.map(Spanned::into_inner),
                    destinations: raw.destination,
                };
                let known = self.users(raw.users, raw.users_file)?;
                Protocol::Login(self.login((span, whose.is_some()), (known, users), keys)?)
            }
            (Name::Login, Some(target)) => {
                let cure = "clients choose: write it as a [[listener.destination]], or use protocol = \"plug\"";
                return Err(self.wrong(target.span(), cure));
            }
            (Name::Plug, target) => self.plug((span, whose), (target, raw.pool), of_plug, pools)?,
            (Name::Transparent, None) => Protocol::Transparent,
            (Name::Tpot, _) => Protocol::Tpot,
            (Name::Transparent, Some(target)) => {
                return Err(self.wrong(
                    target.span(),
                    "such connections have their targets: remove `target`, or use protocol = \"plug\"",
                ));
            }
        };
        let proxy_protocol = self.proxy_protocol(raw.proxy_protocol, &protocol)?;
        let mut listener = ListenerConfig::new(listen, protocol);
        if let Some(name) = raw.name {
            listener.name = name.into_inner().0.0.into();
        }
        listener.intercepts = whose;
        listener.shows_clients = shows_clients;
        listener.handshake = of_tpot;
        let guarded = listener.rules.guarded || (whose.is_some() && !listener.leads_all());
        let rules = Rules::new(self.rules(raw.rules.0, guarded, config)?, guarded);
        listener.rules = if whose.is_some() { rules.for_intercepted() } else { rules };
        let RawPolicy { policy, says_when } = raw.policy.0;
        listener.policy = policy;
        // The conversation is over: what follows is not read.
        if let (Protocol::Login(_), false) = (&listener.protocol, says_when) {
            listener.policy.when = SpliceWhen::AtOnce;
        }
        listener.limits = raw.limits.0;
        listener.proxy_protocol = proxy_protocol;
        let reads = !matches!(raw.protocol, Name::Http | Name::Ftp) && !listener.is_between_hosts();
        listener.first_bytes = self.first_bytes(raw.filter, reads)?;
        listener.tap = raw.tap.map(|dir| self.path(dir.get_ref()));
        if let (Some(at), Some(_)) = (handshake, listener.end_to_end()) {
            self.at_once(at, listener.policy.when)?;
        }
        self.triggers(raw.trigger.0, &mut listener)?;
        Ok(listener)
    }

    /// Returns the users of these groups.
    fn members(
        &self,
        groups: Option<Spanned<Many<Parsed<UserName>>>>,
        config: &Config,
    ) -> Result<Vec<String>, ConfigError> {
        let Some(groups) = groups else { return Ok(Vec::new()) };
        let (at, mut users) = (groups.span(), Vec::new());
        for Parsed(UserName(name)) in groups.into_inner().0 {
            let Some(members) = config.groups.get(&name) else {
                let cure = format!("there is no group {name:?}: add it to the table `groups`, with a list of users");
                return Err(self.wrong(at, &cure));
            };
            users.extend(members.iter().cloned());
        }
        Ok(users)
    }

    /// Returns the rules. Warns of those that are never reached.
    fn rules(&self, raw: Vec<Spanned<RawRule>>, guarded: bool, config: &Config) -> Result<Vec<Rule>, ConfigError> {
        let (mut rules, mut last): (Vec<Rule>, _) = (Vec::new(), None);
        for (number, spanned) in (1..).zip(raw) {
            let (at, mut raw) = (spanned.span(), spanned.into_inner());
            let (leads, groups) = ((raw.upstream.take(), raw.pool.take()), raw.groups.take());
            let mut rule = rule(raw);
            rule.way = self.way(leads, rule.action, config)?;
            rule.users.extend(self.members(groups, config)?);
            // What allows everything leaves guarded addresses to the rules after it.
            let opens = guarded && rule.action == Action::Allow && !rule.target.is_empty();
            if let Some((by, action)) = last
                && !(action == Action::Allow && opens)
            {
                self.warn(at, &format!("rule {number} is never reached: rule {by} matches everything"));
            } else if rule.matches_all() {
                last = Some((number, rule.action));
            }
            rules.push(rule);
        }
        Ok(rules)
    }

    fn http(
        &self,
        inline: Option<Spanned<BTreeMap<String, String>>>,
        file: Option<Spanned<PathBuf>>,
        via: Option<Spanned<String>>,
        forwarded: Option<Spanned<RawForwarded>>,
    ) -> Result<Http, ConfigError> {
        let mut http = Http { users: self.http_users(inline, file)?, ..Http::default() };
        if let Some(via) = via {
            // A pseudonym is a token (RFC 9110, 7.6.3), or a host with a port.
            let good = |b: u8| b.is_ascii_alphanumeric() || b"-._:".contains(&b);
            if !via.get_ref().bytes().all(good) {
                return Err(self.wrong(via.span(), "bad name: write letters, digits, '-', '.', '_' and ':', or \"\""));
            }
            http.via = Some(via.into_inner()).filter(|v| !v.is_empty());
        }
        http.forwarded = match forwarded.map(Spanned::into_inner) {
            Some(RawForwarded::Forwarded) => Forwarded::Standard,
            Some(RawForwarded::XForwardedFor) => Forwarded::XForwardedFor,
            Some(RawForwarded::None) | None => Forwarded::None,
        };
        Ok(http)
    }

    /// Users who log in with Basic authentication.
    pub(super) fn http_users(
        &self,
        inline: Option<Spanned<BTreeMap<String, String>>>,
        file: Option<Spanned<PathBuf>>,
    ) -> Result<Users, ConfigError> {
        let span = inline.as_ref().map(Spanned::span);
        let users = self.users(inline, file)?;
        // In a users file, the name ends at the first colon.
        if let (true, Some(span)) = (users.names().any(|n| n.contains(':')), span) {
            return Err(self.wrong(span, "a name with a colon cannot be sent (RFC 7617, 2): choose another"));
        }
        Ok(users)
    }

    fn users(
        &self,
        inline: Option<Spanned<BTreeMap<String, String>>>,
        file: Option<Spanned<PathBuf>>,
    ) -> Result<Users, ConfigError> {
        let mut users = Users::default();
        if let Some(inline) = inline {
            for (name, password) in inline.get_ref() {
                users.add(name, password).map_err(|e| self.wrong(inline.span(), &e))?;
            }
            self.has_passwords.set(self.has_passwords.get() || users.has_plain());
            self.some(&users, inline.span())?;
        }
        if let Some(file) = file {
            let path = self.path(file.get_ref());
            let Secret { text, exposed } = secrets::read(&path).map_err(|e| self.wrong(file.span(), &e))?;
            if exposed {
                let what = format!("{} holds passwords, and others may read it: chmod 600 it", path.display());
                self.warn(file.span(), &what);
            }
            users.add_lines(&text).map_err(|(line, e)| ConfigError::Wrong {
                file: path.clone(),
                line,
                column: 1,
                message: e.to_string(),
            })?;
            self.some(&users, file.span())?;
        }
        Ok(users)
    }

    /// Checks that there are users. The key `users` asks for authentication, so an empty list must not let everybody in.
    fn some(&self, users: &Users, span: Range<usize>) -> Result<(), ConfigError> {
        if users.is_empty() {
            return Err(self.wrong(span, "no users: add one, or remove the key to let everybody in"));
        }
        Ok(())
    }
}

impl RawRule {
    /// Returns where it stands that it leads somewhere.
    fn leads_at(&self) -> Option<Range<usize>> {
        self.upstream.as_ref().map(Spanned::span).or(self.pool.as_ref().map(Spanned::span))
    }
}

fn rule(raw: RawRule) -> Rule {
    Rule {
        action: raw.action.into(),
        client: raw.client.0.into_iter().map(|p| p.0).collect(),
        target: raw.target.0.into_iter().map(|p| p.0).collect(),
        ports: raw.ports.0.into_iter().map(|p| p.0).collect(),
        users: raw.users.into_iter().flat_map(|u| u.into_inner().0).map(|u| u.0.0).collect(),
        methods: raw.methods.into_iter().flat_map(|m| m.into_inner().0).map(|m| m.0.0).collect(),
        path: raw.path.into_iter().flat_map(|p| p.into_inner().0).map(|p| p.0).collect(),
        times: Times {
            hours: raw.hours.0.into_iter().map(|h| h.0).collect(),
            days: raw.days.0.into_iter().map(|d| d.0).collect(),
        },
        way: None,
    }
}

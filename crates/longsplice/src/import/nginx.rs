//! nginx: the block `stream`, which forwards TCP.

mod blocks;
mod upstream;

use super::{
    model::{Lead, Line, Listener, Mistake, Notes, Route, Site, everybody},
    rules::{Match, Step, compile, tidy},
    values::{Net, host_name, quote},
};
use blocks::{Block, parse};
use longsplice_proxy::target::Target;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};
use upstream::{Read, duration, pool};

/// Translates a file of nginx, or one that is included in its `stream`.
pub fn translate(text: &str) -> Result<Site, Mistake> {
    let all = parse(text)?;
    let mut site = Site::default();
    let mut streams: Vec<&Block> = all.iter().filter(|block| block.name() == "stream").collect();
    let file = Block { words: vec!["stream".into()], line: Line::default(), inner: Some(all.clone()) };
    if streams.is_empty() {
        if all.iter().any(|block| block.name() == "http") || !all.iter().any(|block| block.name() == "server") {
            let what = "there is no block `stream`: only that is translated, and `http` is not";
            return Err(Mistake::new(all.first().map_or(1, |block| block.line.number), what));
        }
        streams.push(&file);
    } else {
        for block in all.iter().filter(|block| block.name() != "stream") {
            site.notes.left_out(&block.line, outside(block.name()));
        }
    }
    for stream in streams {
        Stream::read(stream, &mut site)?.translate(&mut site)?;
    }
    Ok(site)
}

fn outside(name: &str) -> &'static str {
    match name {
        "http" => {
            "only `stream` is translated (write listeners with protocol = \"http\" and routes: docs/configuration.md)"
        }
        "include" => "other files are not read (put their text here, and import it again)",
        "mail" => "there is no such proxy",
        _ => "it is about the process of nginx",
    }
}

/// A block `stream`: what its servers inherit, and what they name.
struct Stream<'a> {
    inherited: Vec<&'a Block>,
    servers: Vec<&'a Block>,
    upstreams: BTreeMap<&'a str, &'a Block>,
    /// By the variable without `$`.
    maps: BTreeMap<&'a str, &'a Block>,
    /// Zones of `limit_conn` that count connections of a client.
    client_zones: BTreeSet<String>,
}

impl<'a> Stream<'a> {
    fn read(block: &'a Block, site: &mut Site) -> Result<Stream<'a>, Mistake> {
        let mut stream = Stream {
            inherited: Vec::new(),
            servers: Vec::new(),
            upstreams: BTreeMap::new(),
            maps: BTreeMap::new(),
            client_zones: BTreeSet::new(),
        };
        for inner in block.inner.iter().flatten() {
            let number = inner.line.number;
            match inner.name() {
                "server" => stream.servers.push(inner),
                "upstream" => {
                    let name = inner.word(1).ok_or_else(|| Mistake::new(number, "an upstream needs a name"))?;
                    if stream.upstreams.insert(name, inner).is_some() {
                        return Err(Mistake::new(number, format!("there are two upstreams {name}")));
                    }
                }
                "map" => {
                    let (Some(of), Some(variable)) = (inner.word(1), inner.word(2)) else {
                        return Err(Mistake::new(number, "a map needs two variables"));
                    };
                    if of == "$ssl_preread_server_name" {
                        stream.maps.insert(variable.trim_start_matches('$'), inner);
                    } else {
                        site.notes.left_out(&inner.line, "only maps of $ssl_preread_server_name are translated");
                    }
                }
                "limit_conn_zone" => {
                    let is_client =
                        inner.word(1).is_some_and(|key| ["$binary_remote_addr", "$remote_addr"].contains(&key));
                    let zone = inner.word(2).and_then(|zone| zone.strip_prefix("zone=")?.split(':').next());
                    match zone.filter(|_| is_client) {
                        Some(zone) => drop(stream.client_zones.insert(zone.to_owned())),
                        None => site.notes.left_out(&inner.line, "only connections of one client are counted"),
                    }
                }
                "log_format" | "access_log" => {
                    let why = "[log] says where the access log goes and what its lines are like (file, template)";
                    site.notes.left_out(&inner.line, why);
                }
                "include" => site.notes.left_out(&inner.line, outside("include")),
                "resolver"
                | "resolver_timeout"
                | "variables_hash_max_size"
                | "variables_hash_bucket_size"
                | "map_hash_bucket_size"
                | "map_hash_max_size"
                | "error_log" => {
                    site.notes.left_out(&inner.line, setting(inner.name()));
                }
                name if is_inherited(name) => stream.inherited.push(inner),
                _ => site.notes.left_out(&inner.line, unknown(inner.name())),
            }
        }
        Ok(stream)
    }

    fn translate(self, site: &mut Site) -> Result<(), Mistake> {
        let mut pools = BTreeMap::new();
        for (name, block) in &self.upstreams {
            pools.insert(*name, pool(name, block)?);
        }
        for server in &self.servers {
            self.server(server, &pools, site)?;
        }
        for (name, read) in pools {
            if site.leads_to(name) {
                site.pools.extend(read.pool);
            } else if !read.leads || read.pool.is_none() {
                site.notes.0.extend(read.notes.0);
            } else if let Some(pool) = read.pool {
                // A single server has become a target, or nothing leads here.
                site.notes.0.extend(pool.notes.0);
            }
        }
        Ok(())
    }

    /// Looks a directive up in the server, or what it inherits.
    fn all<'b>(&self, server: &'b Block, name: &str) -> Vec<&'b Block>
    where
        'a: 'b,
    {
        find(server, &self.inherited, name)
    }

    fn server(&self, server: &Block, pools: &BTreeMap<&str, Read>, site: &mut Site) -> Result<(), Mistake> {
        let number = server.line.number;
        let mut notes = Notes::default();
        let inherited = self.inherited.clone();
        let one = |name: &str| find(server, &inherited, name).last().map(|block| (*block).clone());
        let has = |name: &str| one(name).is_some_and(|block| block.word(1) == Some("on"));
        let Some(pass) = one("proxy_pass") else {
            site.notes.left_out(&server.line, "it has no proxy_pass, and only that is translated");
            return Ok(());
        };
        if has("proxy_ssl") {
            let why = "it encrypts connections to servers, which there is no key for; they would go in the clear";
            site.notes.left_out(&server.line, why);
            return Ok(());
        }
        let to = match self.lead(&pass, pools, &mut notes)? {
            Ok(to) => to,
            Err(why) => {
                site.notes.0.append(&mut notes.0);
                site.notes.left_out(&server.line, &format!("`{}`: {why}", pass.line.text));
                return Ok(());
            }
        };
        let mut model = Listener::new(&server.line, "", "plug", SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        for (directive, key, table, default) in [
            ("proxy_timeout", "idle_limit", &mut model.policy, Some("600")),
            ("proxy_connect_timeout", "connect", &mut model.limits, Some("60")),
        ] {
            let time = one(directive).map(|block| time(&block)).transpose()?;
            table.extend(time.or(default.map(str::to_owned)).map(|time| (key, time)));
        }
        match to {
            To::One(lead) => model.lead = Some(lead),
            To::Names(routes, port) => {
                model.protocol = "tls";
                model.routes = routes;
                model.keys.extend(port.map(|port| ("port", port)));
                let time = one("preread_timeout").map(|block| time(&block)).transpose()?;
                model.limits.insert("handshake", time.unwrap_or_else(|| "30".to_owned()));
                if !has("ssl_preread") {
                    notes.changed(&pass.line, "the name in the ClientHello is read, though ssl_preread is not on");
                }
                notes
                    .changed(&pass.line, "clients that do not speak TLS are refused, also where the map has a default");
            }
        }
        if has("proxy_protocol") {
            model.proxy_protocol.insert("send", quote("v1"));
        }
        self.source(server, &mut model, &mut notes)?;
        self.rules(server, &mut model)?;
        self.numbers(server, &mut model, &mut notes)?;
        for block in
            server.inner.iter().flatten().filter(|block| !is_inherited(block.name()) && block.name() != "listen")
        {
            notes.left_out(&block.line, unknown(block.name()));
        }
        for block in server.inner.iter().flatten().chain(self.inherited.iter().copied()) {
            if IGNORED.contains(&block.name()) {
                notes.left_out(&block.line, setting(block.name()));
            }
        }
        let listens = self.all(server, "listen");
        if listens.is_empty() {
            return Err(Mistake::new(number, "this server does not listen: add `listen`"));
        }
        let before = site.listeners.len();
        let mut unheard = Notes::default();
        for listen in listens {
            self.listen(server, listen, &model, (site, &mut unheard))?;
        }
        match site.listeners.get_mut(before) {
            Some(first) => first.notes.0.extend(notes.0.into_iter().chain(unheard.0)),
            None => site.notes.0.extend(unheard.0.into_iter().chain([(
                number,
                format!("{}: left out: none of its addresses can be listened on", server.line.text),
            )])),
        }
        Ok(())
    }

    /// Returns where `proxy_pass` leads to, or why it cannot be said.
    fn lead(
        &self,
        pass: &Block,
        pools: &BTreeMap<&str, Read>,
        notes: &mut Notes,
    ) -> Result<Result<To, String>, Mistake> {
        let to =
            pass.word(1).ok_or_else(|| Mistake::new(pass.line.number, "proxy_pass leads nowhere: add HOST:PORT"))?;
        if let Some(port) = to.strip_prefix("$ssl_preread_server_name:") {
            let good = port.parse::<u16>().ok().filter(|port| *port > 0);
            return Ok(match good {
                Some(port) => {
                    notes.changed(
                        &pass.line,
                        "addresses of this machine, and other guarded ones, are denied \
                            (docs/configuration.md, rules)",
                    );
                    Ok(To::Names(Vec::new(), Some(port.to_string())))
                }
                None => Err(format!("{port} is no port")),
            });
        }
        if let Some(variable) = to.strip_prefix('$') {
            let Some(map) = self.maps.get(variable).copied() else {
                return Ok(Err(format!("${variable} is not set by a map of $ssl_preread_server_name")));
            };
            let routes = self.routes(map, pools, notes)?;
            return Ok(if routes.is_empty() {
                Err("no entry of its map is translated".to_owned())
            } else {
                Ok(To::Names(routes, None))
            });
        }
        Ok(self.target(to, pools).map(To::One))
    }

    fn target(&self, to: &str, pools: &BTreeMap<&str, Read>) -> Result<Lead, String> {
        match pools.get(to) {
            Some(Read { single: Some(target), .. }) => Ok(Lead::Target(target.clone())),
            Some(Read { pool: Some(pool), .. }) => Ok(Lead::Pool(pool.name.clone())),
            Some(_) => Err(format!("no server of upstream {to} is translated")),
            None => match to.parse::<Target>() {
                Ok(target) => Ok(Lead::Target(target.to_string())),
                Err(e) => Err(format!("{to}: {e}")),
            },
        }
    }

    /// Names that are written out come first, then longer suffixes, then the default, as in nginx.
    fn routes(&self, map: &Block, pools: &BTreeMap<&str, Read>, notes: &mut Notes) -> Result<Vec<Route>, Mistake> {
        let (mut names, mut suffixes, mut default) = (Vec::new(), Vec::new(), Vec::new());
        for entry in map.inner.iter().flatten() {
            let key = entry.name();
            let value = match (key, entry.word(1)) {
                ("hostnames" | "volatile", None) => continue,
                ("include", _) => {
                    notes.left_out(&entry.line, outside("include"));
                    continue;
                }
                (_, Some(value)) if entry.words.len() == 2 => value,
                _ => return Err(Mistake::new(entry.line.number, "an entry of a map has a name and a value")),
            };
            let to = match self.target(value, pools) {
                Ok(to) => to,
                Err(why) => {
                    notes.left_out(&entry.line, &format!("{why}. These names go where the next entry that fits says"));
                    continue;
                }
            };
            let route = |name: Option<String>| Route {
                keys: name.map(|name| ("name", name)).into_iter().collect(),
                to: to.clone(),
            };
            if key == "default" {
                default.push(route(None));
            } else if let Some(name) = host_name(key) {
                names.push(route(Some(quote(&name))));
            } else if let Some(suffix) = key.strip_prefix("*.").and_then(host_name) {
                suffixes.push((suffix.len(), route(Some(quote(&format!("*.{suffix}"))))));
            } else if let Some(suffix) = key.strip_prefix('.').and_then(host_name) {
                let both = format!("[{}, {}]", quote(&suffix), quote(&format!("*.{suffix}")));
                suffixes.push((suffix.len(), route(Some(both))));
            } else {
                let why = "routes have names and *.NAME, and no expressions. These names go where the default says";
                notes.left_out(&entry.line, why);
            }
        }
        suffixes.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
        Ok(names.into_iter().chain(suffixes.into_iter().map(|(_, route)| route)).chain(default).collect())
    }

    /// `proxy_bind`: whose address servers see.
    fn source(&self, server: &Block, model: &mut Listener, notes: &mut Notes) -> Result<(), Mistake> {
        let Some(bind) = self.all(server, "proxy_bind").last().copied() else { return Ok(()) };
        match (bind.word(1), bind.word(2)) {
            (Some("$remote_addr" | "$remote_addr:$remote_port"), Some("transparent")) => {
                model.keys.insert("source", quote("client"));
            }
            (Some("off"), None) => {}
            (Some(_), _) => notes.left_out(
                &bind.line,
                "a listener has no address of its own to connect from (source = [...] is for all of them)",
            ),
            (None, _) => return Err(Mistake::new(bind.line.number, "proxy_bind needs an address")),
        }
        Ok(())
    }

    fn rules(&self, server: &Block, model: &mut Listener) -> Result<(), Mistake> {
        let is_rule = |block: &&Block| ["allow", "deny"].contains(&block.name());
        let own: Vec<&Block> = server.inner.iter().flatten().filter(is_rule).collect();
        let all =
            if own.is_empty() { self.inherited.iter().copied().filter(|block| is_rule(block)).collect() } else { own };
        let mut steps = Vec::new();
        for rule in all {
            let of = rule.word(1).ok_or_else(|| Mistake::new(rule.line.number, "whom? Write an address, or all"))?;
            let client = match (of, of.parse::<Net>()) {
                ("all", _) => Vec::new(),
                ("unix:", _) => continue,
                (_, Ok(net)) => vec![net],
                (_, Err(())) => {
                    return Err(Mistake::new(
                        rule.line.number,
                        format!("{of} is no address: write ADDRESS or ADDRESS/LENGTH"),
                    ));
                }
            };
            steps.push(Step::new(rule.name() == "allow", Match::client(client)));
        }
        match compile(&steps, true) {
            Ok(rules) => model.rules = tidy(rules),
            Err(_) => model.close(&server.line, "its rules are too many"),
        }
        Ok(())
    }

    fn numbers(&self, server: &Block, model: &mut Listener, notes: &mut Notes) -> Result<(), Mistake> {
        for limit in self.all(server, "limit_conn") {
            let (zone, number) = (limit.word(1).unwrap_or(""), limit.word(2).unwrap_or(""));
            match number.parse::<u32>() {
                Ok(number) if number > 0 && self.client_zones.contains(zone) => {
                    model.limits.insert("connections_per_client", number.to_string());
                    notes.changed(
                        &limit.line,
                        "each listener counts for itself, and IPv6 addresses of one /64 are one client",
                    );
                }
                Ok(_) => notes.left_out(
                    &limit.line,
                    "only connections of one client are counted (limits.connections is for all)",
                ),
                Err(_) => return Err(Mistake::new(limit.line.number, "limit_conn needs a zone and a number")),
            }
        }
        Ok(())
    }

    fn listen(
        &self,
        server: &Block,
        listen: &Block,
        model: &Listener,
        (site, notes): (&mut Site, &mut Notes),
    ) -> Result<(), Mistake> {
        let number = listen.line.number;
        let at = listen.word(1).ok_or_else(|| Mistake::new(number, "listen where? Write a port, or ADDRESS:PORT"))?;
        let options = &listen.words[2..];
        let option = |name: &str| options.iter().any(|option| option == name);
        if option("udp") || option("quic") {
            notes.left_out(&listen.line, "datagrams are not forwarded");
            return Ok(());
        }
        if option("ssl") {
            notes.left_out(
                &listen.line,
                "nothing is decrypted: what clients send would be passed on as it is (protocol \
                = \"tls\" routes by name)",
            );
            return Ok(());
        }
        if at.starts_with("unix:") {
            notes.left_out(&listen.line, "listeners have an address and a port, no path");
            return Ok(());
        }
        let (host, ports) = if at.parse::<u32>().is_ok() || (!at.contains(':') && at.contains('-')) {
            ("*", at)
        } else {
            at.rsplit_once(':').ok_or_else(|| Mistake::new(number, format!("{at} has no port: write ADDRESS:PORT")))?
        };
        let bad = || Mistake::new(number, format!("{ports} is no port: write one from 1 to 65535"));
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let [first, last]: [u16; 2] = [first, last].map(|port| port.parse().unwrap_or(0));
        if first == 0 || last < first {
            return Err(bad());
        }
        let ip: IpAddr = match host.trim_start_matches('[').trim_end_matches(']') {
            "*" => Ipv4Addr::UNSPECIFIED.into(),
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            host => match host.parse() {
                Ok(ip) => ip,
                Err(_) => {
                    notes.left_out(&listen.line, "listeners have addresses, no names (write the address)");
                    return Ok(());
                }
            },
        };
        let mut addresses = vec![ip];
        if ip == Ipv6Addr::UNSPECIFIED && option("ipv6only=off") {
            addresses.push(Ipv4Addr::UNSPECIFIED.into());
        }
        for option in options {
            let name = option.split('=').next().unwrap_or("");
            match name {
                "proxy_protocol" | "ipv6only" | "bind" | "reuseport" | "default_server" => {}
                "so_keepalive" => {
                    notes.changed(&listen.line, "so_keepalive is left out (policy = { keepalive = SECONDS })")
                }
                "backlog" | "rcvbuf" | "sndbuf" | "fastopen" | "deferred" | "setfib" | "accept_filter" => {
                    notes.changed(&listen.line, &format!("{name} is left out: sockets have no such setting"));
                }
                _ => return Err(Mistake::new(number, format!("listen has no option {name}"))),
            }
        }
        for ip in addresses {
            for port in first..=last {
                let mut one =
                    Listener { listen: SocketAddr::new(ip, port), line: listen.line.clone(), ..model.clone() };
                one.name = format!("{}-{}", one.protocol, one.listen);
                if option("proxy_protocol") {
                    self.expect_header(server, listen, &mut one)?;
                }
                site.listen(one)?;
            }
        }
        Ok(())
    }

    /// Clients begin with a PROXY header. Only some of them are believed.
    fn expect_header(&self, server: &Block, listen: &Block, one: &mut Listener) -> Result<(), Mistake> {
        let trusted = self.all(server, "set_real_ip_from");
        one.proxy_protocol.insert("required", "true".to_owned());
        let mut nets = Vec::new();
        for from in &trusted {
            match from.word(1).unwrap_or("").parse::<Net>() {
                Ok(net) => nets.push(quote(&net.to_string())),
                Err(()) => return Err(Mistake::new(from.line.number, "set_real_ip_from needs an address")),
            }
        }
        if nets.is_empty() {
            one.proxy_protocol.insert("from", everybody());
            let how = "headers of all addresses are believed: the client's address is what they say \
                (name the proxies in `from`)";
            one.notes.changed(&listen.line, how);
            if !one.rules.is_empty() {
                one.close(
                    &listen.line,
                    "its rules are about the address that connects, and here they would be about \
                        the one in the header",
                );
            }
        } else {
            one.proxy_protocol.insert("from", format!("[{}]", nets.join(", ")));
            one.notes
                .changed(&listen.line, "clients that set_real_ip_from does not name are refused, with a header, too");
        }
        Ok(())
    }
}

/// The directives of this name: those of the server, or else those that it inherits.
fn find<'a>(server: &'a Block, inherited: &[&'a Block], name: &str) -> Vec<&'a Block> {
    let own: Vec<&Block> = server.inner.iter().flatten().filter(|block| block.name() == name).collect();
    if own.is_empty() { inherited.iter().copied().filter(|block| block.name() == name).collect() } else { own }
}

/// Where a server leads to.
enum To {
    One(Lead),
    /// By the name in the ClientHello; without routes to that name, at this port.
    Names(Vec<Route>, Option<String>),
}

/// Returns whether a directive of servers may stand in `stream` as well.
fn is_inherited(name: &str) -> bool {
    READ.contains(&name) || IGNORED.contains(&name)
}

/// Those of them that are read.
const READ: [&str; 14] = [
    "proxy_pass",
    "proxy_timeout",
    "proxy_connect_timeout",
    "proxy_protocol",
    "proxy_ssl",
    "proxy_bind",
    "ssl_preread",
    "preread_timeout",
    "allow",
    "deny",
    "limit_conn",
    "set_real_ip_from",
    "proxy_responses",
    "server_name",
];
/// Those of them that are left out.
const IGNORED: [&str; 20] = [
    "proxy_next_upstream",
    "proxy_next_upstream_tries",
    "proxy_next_upstream_timeout",
    "proxy_socket_keepalive",
    "tcp_nodelay",
    "proxy_buffer_size",
    "proxy_upload_rate",
    "proxy_download_rate",
    "proxy_half_close",
    "proxy_protocol_timeout",
    "preread_buffer_size",
    "limit_conn_log_level",
    "limit_conn_dry_run",
    "access_log",
    "error_log",
    "resolver",
    "resolver_timeout",
    "proxy_requests",
    "proxy_session_drop",
    "status_zone",
];

/// Why a setting is left out.
fn setting(name: &str) -> &'static str {
    match name {
        "proxy_next_upstream" => "pools always try further servers (tries = 1 in the pool: only one)",
        "proxy_next_upstream_tries" => "it is a key of pools (tries)",
        "proxy_next_upstream_timeout" => "limits.connect is for all servers together",
        "proxy_socket_keepalive" => "policy = { keepalive = SECONDS } says how often",
        "proxy_upload_rate" | "proxy_download_rate" => "there is no limit of bytes per second",
        "access_log" => "all listeners share one ([log]: file, syslog or journal)",
        "error_log" => "messages go to standard error",
        "resolver" | "resolver_timeout" => "names are looked up by the system's resolver (limits.resolve)",
        "limit_conn_dry_run" => "limits are in force",
        "proxy_protocol_timeout" => "limits.handshake is the time for a header",
        _ => "there is no such setting, and none is needed",
    }
}

fn unknown(name: &str) -> &'static str {
    match name {
        "include" => outside("include"),
        "ssl_certificate"
        | "ssl_certificate_key"
        | "ssl_protocols"
        | "ssl_ciphers"
        | "ssl_session_cache"
        | "ssl_session_timeout"
        | "ssl_handshake_timeout" => "nothing is decrypted",
        "return" | "js_access" | "js_preread" | "js_filter" | "js_import" => {
            "there are no scripts and no fixed answers"
        }
        "geo" | "split_clients" | "set" => "there are no variables",
        _ => "it is not translated",
    }
}

fn time(block: &Block) -> Result<String, Mistake> {
    duration(block.word(1).unwrap_or(""), block.line.number)
}

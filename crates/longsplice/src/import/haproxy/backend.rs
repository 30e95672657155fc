//! Servers of a backend, and how they are chosen and checked.

use super::{
    proxy::Proxy,
    words::{Words, time},
};
use crate::import::{
    is_valid,
    model::{Keys, Mistake, Pool, SERVERS_MAX, Server},
    values::{escape, quote, seconds},
};
use longsplice_proxy::target::Target;

/// What was made of a backend.
#[derive(Clone, Debug)]
pub struct Backend {
    /// Without servers it leads nowhere.
    pub pool: Pool,
    /// The only server, of a backend that has nothing that only pools know.
    pub single: Option<String>,
    /// The PROXY header that servers expect: none, the same for all, or some of them another one.
    pub sends: Result<Option<&'static str>, Words>,
}

/// Parameters of a server.
#[derive(Default)]
struct Parameters {
    keys: Keys,
    check: Option<Words>,
    /// Where it is checked.
    port: Option<u16>,
    inter: Option<u64>,
    rise: Option<String>,
    fall: Option<String>,
    sends: Option<&'static str>,
    slow_start: Option<u64>,
    refused: Option<&'static str>,
    left: Vec<String>,
}

/// Reads the servers. `port`: the one that clients connect to, if there is only one.
pub fn read(proxy: &Proxy, port: Option<u16>) -> Result<Backend, Mistake> {
    let mut pool = Pool { name: proxy.name().to_owned(), ..Pool::default() };
    let mut all: Vec<(Words, Parameters)> = Vec::new();
    for of in &proxy.servers {
        let (address, parameters) = server(proxy, of, port)?;
        match address {
            _ if parameters.refused.is_some() => pool.notes.left_out(&of.line, parameters.refused.unwrap_or("")),
            Err(why) => pool.notes.left_out(&of.line, &why),
            Ok(address) if pool.servers.iter().any(|server| server.address == address) => {
                return Err(of.wrong(format!("{address} is a server already: give it a weight")));
            }
            Ok(address) => {
                if !parameters.left.is_empty() {
                    let what = format!(
                        "{} left out: servers have no such settings, or their pool has them",
                        parameters.left.join(", ")
                    );
                    pool.notes.changed(&of.line, &what);
                }
                pool.servers.push(Server { address, keys: parameters.keys.clone() });
                all.push((of.clone(), parameters));
            }
        }
    }
    if pool.servers.len() > SERVERS_MAX {
        return Err(proxy.head.wrong(format!("a pool has at most {SERVERS_MAX} servers: split the backend")));
    }
    let backups = pool.servers.iter().filter(|server| server.keys.contains_key("backup")).count();
    if backups > 0 && backups == pool.servers.len() {
        pool.servers.iter_mut().for_each(|server| drop(server.keys.remove("backup")));
        pool.notes.changed(&proxy.head.line, "all its servers are backups: they are the servers of the pool");
    } else if backups > 1 && !proxy.all_backups {
        pool.notes.changed(&proxy.head.line, "its backups all stand in together, not one after the other");
    }
    let is_queued = pool.servers.iter().any(|server| server.keys.contains_key("max_connections"));
    if let Some(wait) = proxy.times.get("queue").or(proxy.times.get("connect")).filter(|_| is_queued) {
        pool.keys.extend(seconds(*wait).map(|time| ("queue_wait", time)));
    }
    if let Some(retries) = proxy.retries {
        pool.keys.insert("tries", retries.saturating_add(1).clamp(1, 16).to_string());
    }
    balance(proxy, &mut pool);
    check(proxy, &all, &mut pool)?;
    cookie(proxy, &mut pool);
    if let Some(slow) = all.iter().find_map(|(_, p)| p.slow_start) {
        if pool.keys.get("balance").is_some_and(|balance| balance.contains("hash")) {
            pool.notes.changed(
                &proxy.head.line,
                "slowstart is left out: with a hash, clients would change their servers all the time",
            );
        } else {
            pool.keys.extend(seconds(slow).map(|time| ("slow_start", time)));
        }
    }
    let first = all.first().and_then(|(_, p)| p.sends);
    let sends = all.iter().find(|(_, p)| p.sends != first).map_or(Ok(first), |(of, _)| Err(of.clone()));
    let single = match &pool.servers[..] {
        [one] if pool.check.is_none() && !one.keys.contains_key("max_connections") && proxy.servers.len() == 1 => {
            Some(one.address.clone())
        }
        _ => None,
    };
    Ok(Backend { pool, single, sends })
}

fn balance(proxy: &Proxy, pool: &mut Pool) {
    let Some(of) = &proxy.balance else { return };
    let algorithm = of.word(1);
    let (name, argument) =
        algorithm.split_once('(').map_or((algorithm, ""), |(name, rest)| (name, rest.trim_end_matches(')')));
    match name {
        "roundrobin" | "static-rr" => {}
        "leastconn" => drop(pool.keys.insert("balance", quote("least-connections"))),
        "source" => drop(pool.keys.insert("balance", quote("consistent-hash"))),
        "hdr" if proxy.http && is_valid_field(argument) => {
            pool.keys.extend([("balance", quote("consistent-hash")), ("hash_field", quote(argument))]);
        }
        "random" => pool.notes.changed(&of.line, "servers are chosen in turn"),
        "first" => pool.notes.changed(&of.line, "servers are chosen in turn, and not filled one after the other"),
        _ => pool.notes.changed(
            &of.line,
            "servers are chosen in turn: only the client's address and a field of the \
            request can be hashed (balance = \"consistent-hash\", hash_field)",
        ),
    }
}

fn is_valid_field(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
}

/// `cookie NAME insert`: clients stay at their server.
fn cookie(proxy: &Proxy, pool: &mut Pool) {
    let Some(of) = proxy.cookie.as_ref().filter(|_| proxy.http) else { return };
    let words = of.from(2);
    let has = |word: &str| words.iter().any(|w| w == word);
    if !is_valid_field(of.word(1)) || !has("insert") {
        pool.notes.left_out(&of.line, "cookies of servers are not changed (sticky = { cookie = \"NAME\" } adds one)");
        return;
    }
    pool.sticky.insert("cookie", quote(of.word(1)));
    if has("secure") {
        pool.sticky.insert("secure", "true".to_owned());
    }
    let kept = ["insert", "nocache", "secure", "httponly", "postonly"];
    let left: Vec<&str> = words.iter().map(String::as_str).filter(|word| !kept.contains(word)).collect();
    let how = if left.is_empty() { String::new() } else { format!("; {} left out", left.join(" ")) };
    pool.notes.changed(&of.line, &format!("values of the cookie are made by the pool, and servers get it, too{how}"));
}

fn server(proxy: &Proxy, of: &Words, port: Option<u16>) -> Result<(Result<String, String>, Parameters), Mistake> {
    if of.words.len() < 3 {
        return Err(of.wrong("write server NAME ADDRESS:PORT"));
    }
    let address = address(of.word(2), port);
    let mut p = Parameters::default();
    parameters(of, &proxy.default_server, &mut p)?;
    parameters(of, of.from(3), &mut p)?;
    Ok((address, p))
}

fn address(text: &str, port: Option<u16>) -> Result<String, String> {
    let bare = ["ipv4@", "ipv6@", "tcp4@", "tcp6@", "tcp@"]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    if bare.starts_with('/') || bare.contains('@') {
        return Err("servers have a host and a port, no path".to_owned());
    }
    let (host, own) = match bare.rsplit_once(':') {
        Some((host, own)) if !bare.ends_with(']') => (host, own),
        _ => (bare, ""),
    };
    let own = if own.is_empty() || own.starts_with(['+', '-']) {
        let port = port.filter(|_| own.is_empty());
        port.ok_or(
            "it has no port of its own: HAProxy takes the one that the client has connected to (write HOST:PORT)",
        )?
        .to_string()
    } else {
        own.to_owned()
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    format!("{host}:{own}").parse::<Target>().map(|target| target.to_string()).map_err(|e| e.to_string())
}

fn parameters(of: &Words, words: &[String], p: &mut Parameters) -> Result<(), Mistake> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().map(String::as_str).ok_or_else(|| of.wrong(format!("{word} needs a value")));
        let number = |text: &str, most: u32| {
            let number = text.parse::<u32>().map_err(|_| of.wrong(format!("{word} {text}: write a number")))?;
            Ok::<u32, Mistake>(number.min(most))
        };
        match word.as_str() {
            "weight" => match number(value()?, 256)? {
                0 => {
                    p.refused = Some(
                        "its weight is 0, so it takes nothing new (longsplice drain does that while \
                            the program runs)",
                    )
                }
                1 => drop(p.keys.remove("weight")),
                weight => drop(p.keys.insert("weight", weight.to_string())),
            },
            "backup" => drop(p.keys.insert("backup", "true".to_owned())),
            "no-backup" => drop(p.keys.remove("backup")),
            "maxconn" => match number(value()?, u32::MAX)? {
                0 => drop(p.keys.remove("max_connections")),
                most => drop(p.keys.insert("max_connections", most.to_string())),
            },
            "check" => p.check = Some(of.clone()),
            "no-check" => p.check = None,
            "port" => {
                let port = value()?.parse().ok().filter(|port| *port > 0);
                p.port = Some(port.ok_or_else(|| of.wrong("port: write a number from 1 to 65535"))?);
            }
            "inter" => p.inter = Some(time(of, value()?)?),
            "rise" => p.rise = Some(number(value()?, 1000)?.max(1).to_string()),
            "fall" => p.fall = Some(number(value()?, 1000)?.max(1).to_string()),
            "send-proxy" => p.sends = Some("v1"),
            "send-proxy-v2" => p.sends = Some("v2"),
            "send-proxy-v2-ssl" | "send-proxy-v2-ssl-cn" => {
                p.sends = Some("v2");
                p.left.push("what the header says of TLS".to_owned());
            }
            "no-send-proxy" | "no-send-proxy-v2" => p.sends = None,
            "slowstart" => p.slow_start = Some(time(of, value()?)?),
            "ssl" => {
                p.refused = Some(
                    "connections to servers are not encrypted, and must not go there in the clear \
                        (put a proxy that encrypts in between)",
                )
            }
            "no-ssl" => p.refused = None,
            "disabled" => {
                p.refused = Some("it is disabled (longsplice drain --maintenance does that while the program runs)")
            }
            "enabled" => p.refused = None,
            "cookie" => drop(value()?),
            // what is so anyway
            "resolvers" | "resolve-prefer" | "init-addr" | "id" | "resolve-opts" => drop(value()?),
            // one of these without a value
            "check-ssl" | "check-send-proxy" | "agent-check" | "tfo" | "stick" | "non-stick" | "no-tfo"
            | "force-tlsv12" | "force-tlsv13" | "no-sslv3" | "no-tlsv10" | "no-tlsv11" | "no-verifyhost"
            | "allow-0rtt" | "ssl-reuse" | "no-ssl-reuse" | "tls-tickets" => {
                p.left.push(word.clone());
            }
            "addr" | "fastinter" | "downinter" | "observe" | "error-limit" | "on-error" | "on-marked-down"
            | "on-marked-up" | "track" | "source" | "minconn" | "maxqueue" | "redir" | "verify" | "ca-file" | "sni"
            | "crt" | "alpn" | "check-sni" | "check-alpn" | "check-proto" | "proto" | "ciphers" | "verifyhost"
            | "agent-port" | "agent-inter" | "agent-addr" | "agent-send" | "pool-max-conn" | "pool-purge-delay"
            | "pool-low-conn" | "max-reuse" | "namespace" | "interface" | "socks4" | "tcp-ut" | "log-proto" | "ws"
            | "shard" | "ssl-min-ver" | "ssl-max-ver" | "crl-file" | "curves" | "proxy-v2-options"
            | "check-via-socks4" => {
                let value = value()?;
                p.left.push(format!("{word} {value}"));
            }
            _ => return Err(of.wrong(format!("a server has no {word}"))),
        }
    }
    Ok(())
}

fn check(proxy: &Proxy, all: &[(Words, Parameters)], pool: &mut Pool) -> Result<(), Mistake> {
    let mut checked = all.iter().filter(|(_, p)| p.check.is_some());
    let Some((first, p)) = checked.next() else { return Ok(()) };
    let of_checks = |p: &Parameters| (p.port, p.inter, p.rise.clone(), p.fall.clone());
    if let Some((of, _)) = checked.find(|(_, other)| of_checks(other) != of_checks(p)) {
        let what = format!("a pool has one port, inter, rise and fall: those of line {}", first.line.number);
        pool.notes.changed(&of.line, &what);
    }
    if let Some((of, _)) = all.iter().find(|(_, p)| p.check.is_none()) {
        pool.notes.changed(&of.line, "it is checked, as the other servers of the pool are");
    }
    let mut keys = Keys::new();
    keys.extend(p.port.map(|port| ("port", port.to_string())));
    let inter = p.inter.filter(|n| *n > 0).unwrap_or(2000);
    keys.extend(seconds(inter).map(|time| ("interval", time)));
    keys.extend(seconds(proxy.times.get("check").copied().unwrap_or(inter)).map(|time| ("timeout", time)));
    keys.extend(p.rise.clone().map(|n| ("rise", n)));
    keys.extend(p.fall.clone().map(|n| ("fall", n)));
    if let Some(of) = &proxy.check {
        let asks = match of.word(1) {
            "httpchk" => http_check(proxy, of, pool)?,
            "ssl-hello-chk" => Keys::from([("tls", "true".to_owned())]),
            "redis-check" => Keys::from([("send", quote("PING\\r\\n")), ("expect", quote("^\\+PONG"))]),
            "smtpchk" => {
                pool.notes.changed(&of.line, "a check looks at the greeting of the server, and says nothing");
                Keys::from([("expect", quote("^220"))])
            }
            "tcp-check" => tcp_check(proxy, of, pool),
            other => {
                pool.notes.left_out(
                    &of.line,
                    &format!("{other} is not known: checks only connect (check = {{ send = ..., expect = ... }})"),
                );
                Keys::new()
            }
        };
        keys.extend(asks);
    }
    pool.check = Some(keys);
    Ok(())
}

fn http_check(proxy: &Proxy, of: &Words, pool: &mut Pool) -> Result<Keys, Mistake> {
    let mut keys = Keys::new();
    let (mut method, mut path) = match of.from(2) {
        [] => ("OPTIONS".to_owned(), "/".to_owned()),
        [path] => ("OPTIONS".to_owned(), path.clone()),
        [method, path, ..] => (method.clone(), path.clone()),
    };
    // HTTP/1.1\r\nHost:\ example.org, as it was written before there was http-check send
    let host = |text: &str| {
        let line = text.lines().find(|line| line.to_ascii_lowercase().starts_with("host:"))?;
        Some(line[5..].trim().to_owned())
    };
    let mut name = of.from(4).iter().find_map(|word| host(word));
    for line in proxy.check_lines.iter().filter(|line| line.name() == "http-check") {
        match line.word(1) {
            "send" => {
                let mut words = line.from(2).iter();
                while let Some(word) = words.next() {
                    let value = words.next().cloned().unwrap_or_default();
                    match word.as_str() {
                        "meth" => method = value,
                        "uri" => path = value,
                        "ver" => {}
                        "hdr" if value.eq_ignore_ascii_case("host") => name = words.next().cloned(),
                        _ => {
                            pool.notes.changed(
                                &line.line,
                                &format!("{word} {value} left out: a check has a path and a host"),
                            );
                            words.next();
                        }
                    }
                }
            }
            "expect" => match (line.word(2), line.word(3)) {
                ("status", status) if is_status(status) => drop(keys.insert("status", quote(status))),
                _ => pool
                    .notes
                    .left_out(&line.line, "a check looks at the status, of one range: 200-399 if none is written"),
            },
            "connect" | "comment" => {}
            _ => pool.notes.left_out(&line.line, "a check is one question"),
        }
    }
    if method != "GET" {
        pool.notes.changed(&of.line, &format!("checks ask with GET, not with {method}"));
    }
    let asks = |path: &str, host: Option<&str>| {
        let host = host.map_or(String::new(), |host| format!(", host = {}", quote(host)));
        is_valid("", &format!("check = {{ path = {}{host} }}", quote(path)))
    };
    if !asks(&path, None) {
        return Err(of.wrong(format!("{path:?} is no path: begin it with `/`")));
    }
    if let Some(host) = name {
        if asks(&path, Some(&host)) {
            keys.insert("host", quote(&host));
        } else {
            pool.notes.changed(&of.line, &format!("the host {host:?} is left out: it is none"));
        }
    }
    keys.insert("path", quote(&path));
    Ok(keys)
}

fn is_status(text: &str) -> bool {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let status = |text: &str| text.parse::<u16>().ok().filter(|n| (200..=599).contains(n));
    matches!((status(first), status(last)), (Some(first), Some(last)) if first <= last)
}

/// One thing that is sent, and one that is expected.
fn tcp_check(proxy: &Proxy, of: &Words, pool: &mut Pool) -> Keys {
    let lines: Vec<&Words> = proxy.check_lines.iter().filter(|line| line.name() == "tcp-check").collect();
    let (mut send, mut expect) = (String::new(), None);
    for line in &lines {
        let is_late = expect.is_some();
        match (line.word(1), line.word(2)) {
            ("connect" | "comment", _) if line.words.len() <= 3 => {}
            ("send", text) if !is_late => send.push_str(text),
            ("expect", "string") if !is_late => expect = Some(escape(line.word(3))),
            ("expect", "rstring") if !is_late => expect = Some(line.word(3).to_owned()),
            _ => {
                pool.notes.left_out(&line.line, "a check sends once and expects one thing");
                if !is_late {
                    pool.notes.changed(&of.line, "checks only connect");
                    return Keys::new();
                }
            }
        }
    }
    let Some(expect) = expect else {
        if !send.is_empty() {
            pool.notes.changed(&of.line, "checks only connect: nothing is expected of what is sent");
        }
        return Keys::new();
    };
    let mut keys = Keys::from([("expect", quote(&expect))]);
    if !send.is_empty() {
        let escaped: String = send
            .chars()
            .map(|c| match c {
                '\r' => "\\r".to_owned(),
                '\n' => "\\n".to_owned(),
                '\\' => "\\\\".to_owned(),
                c if c.is_control() => format!("\\x{:02x}", u32::from(c)),
                c => c.to_string(),
            })
            .collect();
        keys.insert("send", quote(&escaped));
    }
    if !is_valid("", &format!("check = {}", crate::import::write::inline(&keys))) {
        pool.notes.changed(&of.line, "checks only connect: the expression is not one of ours");
        return Keys::new();
    }
    keys
}

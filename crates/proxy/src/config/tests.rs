//! A complete file, defaults, the command line, and the position and advice of every error.

use super::pool::{Ask, Balance, Check, Get, HealthLimits, Key};
use super::*;
use crate::access::{Action, Pattern};
use crate::log::access_log::{LogFormat, LogTarget};
use crate::{
    commands::{Command, Replies},
    routes::Paths,
};
use longsplice_engine::{OpenOptions, PathRule, SpliceWhen, TpotHandshake, TpotUdp, TpotWhose};
use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

pub(super) fn read(text: &str) -> Result<Config, ConfigError> {
    Config::from_toml(text, Path::new("/etc/longsplice.toml"))
}

/// Returns line, column and message of the error in `text`.
pub(super) fn mistake(text: &str) -> (usize, usize, String) {
    match read(text) {
        Err(ConfigError::Wrong { line, column, message, file }) => {
            assert_eq!(file, Path::new("/etc/longsplice.toml"));
            (line, column, message)
        }
        other => panic!("{other:?}"),
    }
}

/// Checks that `text` is wrong at `line:column`, and that the message contains `part`.
#[track_caller]
fn expect(text: &str, (line, column): (usize, usize), part: &str) {
    let (l, c, message) = mistake(text);
    assert!((l, c) == (line, column) && message.contains(part), "{l}:{c}: {message}");
}

const SOCKS: &str = "[[listener]]\nprotocol = \"socks5\"\nlisten = \"127.0.0.1:1080\"\n";
const PLUG: &str = "[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1080\"\n";

fn socks(more: &str) -> String {
    format!("{SOCKS}{more}")
}

const WHOLE: &str = r#"
devices = ["eth0"]
xdp = ["eth0"]
peer = ["veth0"]
control = "control"
source_ports = "10000-20000"
leave_flows_on_stop = true
connections = 100
source = "192.0.2.7"
log = { format = "json", file = "/var/log/longsplice" }

[[listener]]
protocol = "socks5"
listen = "0.0.0.0:1080"
users = { ann = "secret", "bob b" = "x" }
rules = [
  { action = "allow", target = ["10.0.0.0/8", "*.example.org"], ports = [443, "8000-8999"] },
  { action = "deny", client = "192.0.2.0/24", ports = 25 },
]
[listener.policy]
splice = "at-once"
path = "any"
hold = true
drain_limit = 2.5
release_after = "never"
idle_limit = 60
keepalive = 30
[listener.limits]
handshake = 1
resolve = 2
connect = 3
connections_per_client = 4
new_per_client = 7
connections = 5

[[listener]]
protocol = "plug"
listen = "[::1]:8080"
target = "example.org:80"
policy = { splice = 1000, path = { rtt_ratio = 3.5, loss = 0.25 } }
"#;

#[test]
fn whole_file() {
    let c = read(WHOLE).unwrap();
    let d = c.engine.datapath;
    assert_eq!(
        (d.xdp, d.peer, d.devices, c.control),
        (vec!["eth0".into()], vec!["veth0".into()], vec!["eth0".to_string()], Some("/etc/control".into()))
    );
    assert_eq!(c.engine.source_ports, 10000..=20000);
    assert!(c.leave_flows_on_stop && c.connections == Some(100));
    assert_eq!(c.engine.sources, ["192.0.2.7".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(
        c.log,
        LogConfig {
            format: LogFormat::Json,
            to: LogTarget::File("/var/log/longsplice".into()),
            ..LogConfig::default()
        }
    );
    let [socks, plug] = &c.listeners[..] else { panic!() };
    assert_eq!((socks.listen, plug.listen), ("0.0.0.0:1080".parse().unwrap(), "[::1]:8080".parse().unwrap()));
    let Protocol::Socks5 { users, .. } = &socks.protocol else { panic!() };
    assert_eq!(format!("{users:?}"), r#"{"ann", "bob b"}"#);
    assert_eq!(
        plug.protocol,
        Protocol::Plug {
            target: Some(LeadTo::Target("example.org:80".parse().unwrap())),
            handshake: PlugHandshake::Proxy
        }
    );
    assert_eq!((socks.rules.guarded, plug.rules.guarded), (true, false));
    let [allow, deny] = socks.rules.list() else { panic!() };
    assert_eq!((allow.action, allow.target.len(), allow.ports.len()), (Action::Allow, 2, 2));
    assert_eq!(allow.target[1], Pattern::Below("example.org".into()));
    assert_eq!((deny.action, deny.client.len(), deny.ports[0].last), (Action::Deny, 1, 25));
    let p = &socks.policy;
    assert_eq!((p.when, p.path, p.hold, p.release_after), (SpliceWhen::AtOnce, PathRule::Any, true, None));
    assert_eq!((p.drain_limit, p.idle_limit.get()), (Duration::from_millis(2500), Duration::from_secs(60)));
    assert_eq!(p.keepalive, Some(Duration::from_secs(30)));
    assert_eq!(
        (plug.policy.when, plug.policy.path),
        (SpliceWhen::AfterBytes(1000), PathRule::Within { rtt_ratio: 3.5, loss: 0.25 })
    );
    let l = &socks.limits;
    assert_eq!(
        (l.handshake, l.resolve, l.connect),
        (Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(3))
    );
    assert_eq!(
        (l.connections_per_client, l.connections, l.new_per_client),
        (4, Some(5), Some("7/second".parse().unwrap()))
    );
}

#[test]
fn what_is_left_out_has_its_default() {
    let c = read(SOCKS).unwrap();
    assert_eq!(c.listeners[0].limits, Limits::default());
    assert_eq!(c.listeners[0].policy.when, Policy::default().when);
    assert_eq!((c.log, c.connections), (LogConfig::default(), None));
    assert_eq!(c.engine.source_ports, OpenOptions::default().source_ports);
    assert!(read("").unwrap().listeners.is_empty());
    for (word, to) in [("-", LogTarget::Stdout), ("off", LogTarget::Off)] {
        assert_eq!(read(&format!("log.file = \"{word}\"")).unwrap().log.to, to);
    }
}

#[test]
fn the_example_of_the_readme_is_right() {
    let readme = include_str!("../../../../README.md");
    let text = readme.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let c = read(text).unwrap();
    assert_eq!((c.listeners.len(), c.pools.len()), (7, 1));
    let taps: Vec<_> = c.listeners.iter().filter_map(|l| l.tap.as_ref()).collect();
    assert!(matches!(taps[..], [dir] if dir.ends_with("taps")), "{taps:?}");
}

#[test]
fn names_of_listeners() {
    let plug = |port: u16, more: &str| {
        format!("[[listener]]\nprotocol = \"plug\"\nlisten = \"[::1]:{port}\"\ntarget = \"a:1\"\n{more}\n")
    };
    let names = |text: &str| read(text).unwrap().listeners.iter().map(|l| l.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(&(plug(1, "name = \"db-1\"") + &plug(2, ""))), ["db-1", "plug-[::1]:2"]);
    assert_eq!(
        names(&(plug(0, "") + &plug(0, "") + &plug(0, ""))),
        ["plug-[::1]:0", "plug-[::1]:0-2", "plug-[::1]:0-3"]
    );
    let twice = plug(1, "name = \"a\"") + &plug(2, "name = \"a\"");
    expect(&twice, (10, 8), "another listener is called a already");
    let by_chance = plug(1, "name = \"plug-[::1]:2\"") + &plug(2, "");
    expect(&by_chance, (8, 10), "another listener is called plug-[::1]:2 already");
    for wrong in ["", "a b", "a=b", "\u{e9}", &"x".repeat(65)] {
        expect(&plug(1, &format!("name = \"{wrong}\"")), (5, 8), "bad name: write letters");
    }
    let mut config = read(&plug(1, "name = \"http-127.0.0.1:3128\"")).unwrap();
    let error = config.add_args(&[], &["127.0.0.1:3128"], &[], &[]).unwrap_err().to_string();
    assert!(error.starts_with("--http 127.0.0.1:3128: another listener is called"), "{error}");
}

#[test]
fn mistakes_of_the_language() {
    expect("devices = [", (1, 12), "");
    expect("a = 1", (1, 1), "unknown field `a`, expected one of `listener`");
    expect(&socks("tarpit = 1\n"), (4, 1), "unknown field `tarpit`");
    expect(&socks("limits = { total = 1 }\n"), (4, 12), "unknown field `total`");
    expect(&socks("limits = 1\n"), (4, 10), "expected a table");
    expect("log = \"off\"", (1, 7), "expected a table");
    expect("[[listener]]\nprotocol = \"plug\"\n", (1, 1), "missing field `listen`: add listen = ... here");
    expect("connections = -1", (1, 15), "");
    expect("source = [\"192.0.2.1\", \"here\"]", (1, 24), "invalid IP address");
    expect("connections = \"many\"", (1, 15), "expected a number from 1 to 4294967295");
}

#[test]
fn mistakes_in_values() {
    expect("source_ports = \"9-1\"", (1, 16), "FIRST not above LAST");
    expect("xdp = [\"eth0\", \"\"]", (1, 16), "no name of a device");
    expect("log.format = \"xml\"", (1, 14), "expected one of `text`, `json`, `common`, `combined`");
    expect(
        "[[listener]]\nprotocol = \"gopher\"",
        (2, 12),
        "expected one of `socks5`, `http`, `tls`, `ftp`, `login`, `plug`",
    );
    expect("[[listener]]\nlisten = \"localhost:1\"", (2, 10), "write ADDR:PORT");
    expect("# \u{e4}\n[[listener]]\nlisten = \"::1:1\"", (3, 10), "IPv6 in brackets");
    expect(
        &socks("policy.splice = \"soon\""),
        (4, 17),
        "expected \"auto\", \"never\", \"at-once\" or a number of bytes",
    );
    expect(&socks("policy.splice = -1"), (4, 17), "a number of bytes");
    for wrong in ["\"near\"", "3", "{ ratio = 3 }"] {
        let says = "write \"auto\", \"any\", or { rtt_ratio = NUMBER, loss = NUMBER }";
        expect(&socks(&format!("policy.path = {wrong}")), (4, 15), says);
    }
    expect(&socks("policy.path = {}"), (4, 15), "write rtt_ratio = NUMBER, loss = NUMBER, or both");
    expect(&socks("policy.path = { rtt_ratio = 0 }"), (4, 15), "write a number from 1 to 1000");
    expect(&socks("policy.path = { loss = 2 }"), (4, 15), "write a number from 0 to 1");
    expect(&socks("policy.path = { loss = nan }"), (4, 15), "write a number from 0 to 1");
    expect(&socks("policy.idle_limit = 0"), (4, 21), "a number of seconds above 0");
    expect(&socks("policy.idle_limit = nan"), (4, 21), "a number of seconds above 0");
    expect(&socks("policy.idle_limit = 1e300"), (4, 21), "a number of seconds above 0");
    expect(&socks("policy.drain_limit = \"never\""), (4, 22), "a number of seconds above 0");
    expect(&socks("policy.release_after = \"10s\""), (4, 24), "such as 10 or 2.5, or \"never\"");
}

#[test]
fn mistakes_in_rules() {
    expect(&socks("rules = [{}]"), (4, 10), "missing field `action`");
    expect(&socks("rules = [{ action = \"drop\" }]"), (4, 21), "expected `allow` or `deny`");
    expect(&socks("rules = [\n{ action = \"deny\", client = \"10.0.0.0/40\" }]"), (5, 29), "192.0.2.0/24");
    expect(&socks("rules = [{ action = \"deny\", client = [\"10.0.0.1\", \"x\"] }]"), (4, 51), "bad address prefix");
    expect(&socks("rules = [{ action = \"deny\", client = 10 }]"), (4, 38), "expected a");
    expect(&socks("rules = [{ action = \"deny\", target = \"*\" }]"), (4, 38), "leave `target` out");
    expect(&socks("rules = [{ action = \"deny\", target = [] }]"), (4, 38), "leave the key out");
    expect(&socks("rules = [{ action = \"deny\", ports = 65536 }]"), (4, 37), "from 1 to 65535");
    expect(&socks("rules = [{ action = \"deny\", ports = -1 }]"), (4, 37), "from 1 to 65535");
}

#[test]
fn values_that_do_not_go_together() {
    expect(&socks("target = \"a:1\""), (4, 10), "remove `target`");
    expect(PLUG, (1, 1), "add target = \"HOST:PORT\"");
    expect(&format!("{PLUG}target = \"::1:80\""), (4, 10), "write [ADDR]:PORT");
    expect(&format!("{PLUG}target = \"a:1\"\nusers = {{ a = \"b\" }}"), (5, 9), "cannot authenticate");
    let transparent = |more: &str| format!("[[listener]]\nprotocol = \"transparent\"\nlisten = \"0.0.0.0:25\"\n{more}");
    let c = Config::from_toml(&transparent("policy = { splice = \"at-once\" }"), Path::new("f")).unwrap();
    assert_eq!((&c.listeners[0].protocol, c.listeners[0].rules.guarded), (&Protocol::Transparent, false));
    expect(&transparent("target = \"a:1\""), (4, 10), "remove `target`");
    expect(&transparent("users = { a = \"b\" }"), (4, 9), "cannot authenticate");
    expect(&transparent("proxy_protocol = { send = \"v2\" }"), (4, 18), "nobody sees us: remove the key");
    let tpot = "[[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n";
    let c =
        Config::from_toml(&format!("{tpot}[tpot]\nproxies = \"10.0.0.0/8\"\nports = [80, \"90-99\"]"), Path::new("f"))
            .unwrap();
    assert_eq!((&c.listeners[0].protocol, c.listeners[0].rules.guarded), (&Protocol::Tpot, true));
    let asking = c.tpot.unwrap();
    assert_eq!((asking.proxies.len(), asking.ports.len(), asking.to.len()), (1, 2, 0));
    assert_eq!(
        (asking.hops, asking.exid, asking.udp),
        (Asking::default().hops, Asking::default().exid, TpotUdp::Never)
    );
    for (word, udp) in [("never", TpotUdp::Never), ("fallback", TpotUdp::Fallback), ("always", TpotUdp::Always)] {
        assert_eq!(read(&format!("{tpot}[tpot]\nudp = \"{word}\"")).unwrap().tpot.unwrap().udp, udp);
    }
    expect(&format!("{tpot}[tpot]\nudp = \"yes\""), (5, 7), "unknown variant");
    for (inside, name) in [("bytes", "tpot"), ("http", "http"), ("tls", "tls")] {
        let c = Config::from_toml(&format!("{tpot}inside = \"{inside}\""), Path::new("f")).unwrap();
        let listener = &c.listeners[0];
        assert_eq!(
            (listener.protocol.name(), listener.intercepts, listener.rules.guarded),
            (name, Some(TpotWhose::Askers), true)
        );
    }
    for (word, handshake) in
        [("basic", TpotHandshake::Basic), ("pipelined", TpotHandshake::Pipelined), ("confirm", TpotHandshake::Confirm)]
    {
        let c = Config::from_toml(&format!("{tpot}handshake = \"{word}\""), Path::new("f")).unwrap();
        assert_eq!(c.listeners[0].handshake, handshake);
    }
    expect(&format!("{tpot}handshake = \"proxy\""), (4, 13), "\"basic\", \"pipelined\" or \"confirm\"");
    expect(&format!("{tpot}inside = \"http\"\nhandshake = \"pipelined\""), (5, 13), "use inside = \"bytes\"");
    expect(&format!("{tpot}inside = \"tls\"\nhandshake = \"confirm\""), (5, 13), "use inside = \"bytes\"");
    let header = "proxy_protocol = { from = \"10.0.0.0/8\" }";
    expect(&format!("{tpot}handshake = \"confirm\"\n{header}"), (4, 13), "remove `from`");
    expect(&socks("inside = \"http\""), (4, 10), "use protocol = \"tpot\"");
    expect(&format!("{tpot}target = \"a:1\""), (4, 10), "where their clients want");
    expect(&format!("{tpot}inside = \"tls\"\nport = 443"), (5, 8), "where their clients want");
    expect(&format!("{tpot}inside = \"tls\"\nvia = \"a\""), (5, 7), "only HTTP has this");
    expect(&format!("{tpot}inside = \"http\"\nusers = {{ a = \"b\" }}"), (5, 9), "cannot authenticate");
    expect(&format!("{tpot}cache = {{ dir = \"c\" }}"), (4, 9), "inside = \"http\"");
    let cached = read(&format!("{tpot}inside = \"http\"\ncache = {{ dir = \"c\" }}")).unwrap();
    assert!(cached.listeners[0].cache().is_some());
    let pool = "[pool.p]\nservers = [\"a:1\"]\n";
    let route = format!("{pool}{tpot}inside = \"http\"\n[[listener.route]]\npool = \"p\"");
    expect(&route, (7, 1), "where their clients want");
    expect(&format!("{tpot}[tpot]\nports = 80"), (4, 1), "proxies = ... or key_file = ...");
    expect(&format!("{tpot}[tpot]\nproxies = \"10.0.0.0/8\""), (4, 1), "add ports = ...");
    expect(&format!("{tpot}[tpot]\nhops = 3"), (4, 1), "add ports = ...");
    expect(&format!("{SOCKS}[tpot]\nexid = 3"), (4, 1), "nothing uses this");
    expect(&format!("{tpot}[tpot]\nkey_file = \"/nowhere/keys\""), (5, 12), "cannot read /nowhere/keys");
    expect(&format!("{tpot}[tpot]\nproxies = \"10.0.0.0/8\"\nports = 80\nhops = 0"), (7, 8), "nonzero");
    expect(&format!("{SOCKS}{SOCKS}"), (6, 10), "another listener has 127.0.0.1:1080 already");
}

#[test]
fn http_listeners() {
    let http = |more: &str| format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:3128\"\n{more}");
    let read_http = |more: &str| match read(&http(more)).unwrap().listeners.remove(0) {
        ListenerConfig { protocol: Protocol::Http(http), limits, rules, .. } => {
            assert!(rules.guarded);
            (http, limits)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(read_http("").0, Http::default());
    let more =
        "users = { ann = \"pw\" }\nvia = \"\"\nforwarded = \"x-forwarded-for\"\nlimits = { reply = 1, keep_alive = 2 }";
    let (found, limits) = read_http(more);
    assert_eq!(
        (found.via, found.forwarded, found.users.names().collect()),
        (None, Forwarded::XForwardedFor, vec!["ann"])
    );
    assert_eq!((limits.reply, limits.keep_alive), (Duration::from_secs(1), Duration::from_secs(2)));
    assert_eq!(read_http("via = \"gate:80\"\nforwarded = \"forwarded\"").0.via.as_deref(), Some("gate:80"));
    expect(&http("via = \"a b\""), (4, 7), "bad name");
    expect(&http("forwarded = \"yes\""), (4, 13), "x-forwarded-for");
    expect(&http("target = \"a:1\""), (4, 10), "remove `target`");
    expect(&http("users = { \"a:b\" = \"x\" }"), (4, 9), "RFC 7617");
    expect(&socks("via = \"a\""), (4, 7), "only HTTP");
    assert!(read_http("strict_replies = true").0.strict_replies && !read_http("").0.strict_replies);
    expect(&socks("strict_replies = true"), (4, 18), "only HTTP");
}

#[test]
fn filters() {
    let told =
        |more: &str| read(&format!("{HTTP}[listener.filter]\n{more}")).map(|mut c| c.listeners.remove(0).protocol);
    let filter = |more: &str| if let Protocol::Http(http) = told(more).unwrap() { http } else { panic!() };
    assert_eq!(filter(""), Http::default());
    let found = filter(
        "rules = [{ action = \"allow\", status = [204, \"400-499\"], type = \"Text/*\", encoding = [\"br\", \"GZIP\"] },\n\
         { action = \"deny\", length = [0, \"5-\"], body_begins = '^a', body_contains = 'b' }]\n\
         first = 32768\nwait = 0.5\naccept_encoding = \"identity\"",
    );
    let [allow, deny] = &found.filter.rules[..] else { panic!() };
    assert_eq!((allow.action, &allow.status), (Action::Allow, &vec![204..=204, 400..=499]));
    assert_eq!((&allow.media, allow.encoding.len()), (&vec!["text/*".parse().unwrap()], 2));
    assert_eq!((deny.length.len(), &deny.body_begins), (2, &"^a".parse().ok()));
    assert_eq!(deny.body_contains, "b".parse().ok());
    assert_eq!(
        (found.filter.first, found.filter.wait, found.codings),
        (32768, Duration::from_millis(500), Codings::None)
    );
    let mistake =
        |more: &str, column, cure: &str| expect(&format!("{HTTP}[listener.filter]\n{more}"), (5, column), cure);
    mistake("first = 0", 9, "a number from 1 to 32768");
    mistake("wait = 0", 8, "seconds above 0");
    mistake("accept_encoding = \"gzip\"", 19, "expected one of `pass`, `known`, `identity`");
    mistake("rules = [{ action = \"deny\", type = \"html\" }]", 36, "write one such as text/html");
    mistake("rules = [{ action = \"deny\", encoding = \"a b\" }]", 40, "write one such as gzip");
    mistake("rules = [{ action = \"deny\", length = \"5-4\" }]", 38, "FIRST-LAST");
    mistake("rules = [{ action = \"deny\", status = 99 }]", 38, "from 200 to 599");
    mistake("rules = [{ action = \"deny\", body_begins = '(' }]", 43, "unclosed group");
    mistake("rules = [{ action = \"deny\", body_contains = '.*a.{999}' }]", 45, "more than 4 MB: write a simpler one");
    mistake("rules = [{ action = \"deny\", path = \"/\" }]", 29, "unknown field `path`, expected one of `action`");
    expect(&socks("filter.first = 1"), (4, 1), "only replies of HTTP are filtered");
}

#[test]
fn caches() {
    let cache = |more: &str| {
        let config = read(&format!("{HTTP}[listener.cache]\ndir = \"c\"\n{more}")).unwrap();
        config.listeners[0].cache().unwrap().clone()
    };
    let dir = PathBuf::from("/etc/c");
    assert_eq!(cache(""), CacheConfig { dir: dir.clone(), size: 1 << 30, object: 1 << 28, ..CacheConfig::default() });
    assert_eq!(
        cache("size = 1048576"),
        CacheConfig { dir: dir.clone(), size: 1 << 20, object: 1 << 18, ..CacheConfig::default() }
    );
    assert_eq!(cache("object = 1"), CacheConfig { dir, size: 1 << 30, object: 1, ..CacheConfig::default() });
    let mistake =
        |more: &str, at, cure: &str| expect(&format!("{HTTP}[listener.cache]\ndir = \"c\"\n{more}"), at, cure);
    mistake("size = 1000", (6, 8), "write 1048576 or more");
    mistake("size = -1", (6, 8), "expected u64");
    mistake("object = 0", (6, 10), "a number from 1 to the size, 1073741824");
    mistake("size = 2000000\nobject = 2000001", (7, 10), "a number from 1 to the size, 2000000");
    mistake(
        "memory = 1",
        (6, 1),
        "unknown field `memory`, expected one of `dir`, `size`, `object`, `stale_while_revalidate`",
    );
    expect(&format!("{HTTP}[listener.cache]\n"), (4, 1), "missing field `dir`");
    expect(&format!("{HTTP}cache.dir = \"\""), (4, 13), "no directory");
    expect(&socks("cache.dir = \"c\""), (4, 1), "only HTTP has caches");
    let site = format!("{HTTP}cache.dir = \"c\"\nroute = [{{ pool = \"p\" }}]\n[pool.p]\nservers = [\"a:1\"]");
    assert!(read(&site).unwrap().listeners[0].cache().is_some());
    mistake("purge = \"x\"", (6, 9), "");
    mistake("collapse = 0", (6, 12), "above 0");
    let two = |size| {
        format!("{HTTP}cache.dir = \"c\"\n{}cache = {{ dir = \"c\", size = {size} }}", HTTP.replace(":80", ":81"))
    };
    assert_eq!(read(&two(1 << 30)).unwrap().listeners.len(), 2);
    expect(&two(1 << 20), (8, 9), "write the same, or another dir");
}

pub(super) const HTTP: &str = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:80\"\n";
const SITE: &str = "[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:80\"\n";

#[test]
fn sites() {
    let text = format!(
        "{SITE}rules = [{{ action = \"deny\", methods = \"PUT\", path = \"/a*\" }}]\n\
         [[listener.route]]\nhost = \"a.example\"\npath_exact = \"/x\"\npool = \"p\"\n\
         [[listener.route]]\npool = \"p\"\n\
         [pool.p]\nservers = [\"a.example:1\", {{ address = \"192.0.2.1:2\", weight = 3 }}]\n\
         balance = \"consistent-hash\"\ntries = 2\nidle_connections = 0\nidle_time = 1.5\nfailures = 4\nout = 5\n\
         check = {{ path = \"/h?x\", status = 204, rise = 6, timeout = 7 }}\n"
    );
    let config = read(&text).unwrap();
    let listener = &config.listeners[0];
    let Protocol::Http(http) = &listener.protocol else { panic!() };
    assert!(!listener.rules.guarded && listener.rules.know_paths());
    assert_eq!(
        http.routes.iter().map(|r| (r.hosts.len(), r.pool().unwrap())).collect::<Vec<_>>(),
        [(1, "p"), (0, "p")]
    );
    assert_eq!(http.routes[1].path, Paths::default());
    let pool = &config.pools[0];
    assert_eq!(pool.servers.iter().map(|s| s.weight).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(pool.balance, Balance::ConsistentHash(Key::Client));
    assert_eq!((pool.tries, pool.idle_connections, pool.idle_time), (2, 0, Duration::from_millis(1500)));
    let d = HealthLimits::default();
    assert_eq!(pool.health, HealthLimits { failures: 4, out: Duration::from_secs(5), rise: 6, fall: d.fall });
    let ask = Some(Ask::Http(Get { status: 204..=204, ..Get::new("/h?x".into()) }));
    let check = Check { ask, timeout: Duration::from_secs(7), ..Check::default() };
    assert_eq!(pool.check, Some(check));
    let plain = read("[pool.p]\nservers = [\"a:1\"]").unwrap().pools.remove(0);
    assert_eq!(plain, PoolConfig::new("p".into(), plain.servers.clone()));
}

#[test]
fn mistakes_in_sites() {
    let route = |more: &str| format!("{SITE}[[listener.route]]\n{more}\n[pool.p]\nservers = [\"a:1\"]\n");
    expect(&route("pool = \"q\""), (5, 8), "there is no pool \"q\": add [pool.q]");
    expect(&route("path = \"/\""), (4, 1), "needs a pool: add pool = ");
    expect(&route("pool = \"p\"\nalpn = \"h2\""), (6, 8), "no `alpn`: remove it, or use protocol = \"tls\"");
    expect(&route("target = \"a:1\""), (5, 10), "hosts, paths, pools and redirects, and no `target`: remove it");
    expect(&route("path = \"a\"\npool = \"p\""), (5, 8), "begin it with `/`");
    expect(&route("path_regex = \"(\"\npool = \"p\""), (5, 14), "unclosed group");
    expect(&route("host = \"*\"\npool = \"p\""), (5, 8), "leave");
    expect(&route("path = \"/\"\npath_exact = \"/\"\npool = \"p\""), (4, 1), "one of path, path_exact and path_regex");
    let keyed = |key: &str| format!("{SITE}{key}\n[[listener.route]]\npool = \"p\"\n[pool.p]\nservers = [\"a:1\"]\n");
    expect(&keyed("users = {}"), (4, 9), "no users");
    expect(&keyed("users = { \"a:b\" = \"c\" }"), (4, 9), "cannot be sent");
    expect(&route("pool = \"p\"\nredirect = { to = \"/\" }"), (6, 12), "a pool or a redirect");
    expect(&route("redirect = { to = \"x\" }"), (5, 19), "begin it with http://");
    expect(&route("redirect = { to = \"/\", status = 304 }"), (5, 33), "write 301, 302, 303, 307 or 308");
    expect(&route("redirect = { to = \"/\" }\nusers = { a = \"b\" }"), (6, 9), "asks nobody for a password");
    expect(&route("pool = \"p\"\nusers = {}"), (6, 9), "no users");
    expect(&route("pool = \"p\"\npath_exact = \"/a\"\nrewrite = { prefix = \"/\" }"), (7, 11), "the route's `path`");
    expect(&route("pool = \"p\"\nrewrite = { regex = 'a' }"), (6, 11), "with to = ");
    expect(&route("pool = \"p\"\nrewrite = { regex = 'a', to = 'a b' }"), (6, 31), "as %XX");
    expect(&keyed("error_page = [{ status = 304, file = \"x\" }]"), (4, 26), "from 400 to 599");
    expect(&keyed("error_page = [{ status = 404, file = \"/no/such\" }]"), (4, 38), "No such file");
    expect(&keyed("limits = { request_head = 1 }"), (4, 27), "from 1024 to 32768");
    expect(&keyed("rules = [{ action = \"deny\", path = \"x\" }]"), (4, 36), "begin it with `/`");
    expect(&keyed("rules = [{ action = \"deny\", methods = \"get\" }]"), (4, 39), "in capital letters");
    expect(
        &format!("{SOCKS}[[listener.route]]\npool = \"p\"\n[pool.p]\nservers = [\"a:1\"]"),
        (4, 1),
        "only HTTP and TLS have routes: remove them, or use protocol = \"http\" or \"tls\"",
    );
    expect(
        &socks("rules = [{ action = \"deny\", path = \"/x\" }]"),
        (4, 36),
        "only HTTP and FTP have methods and paths",
    );
    expect(&socks("rules = [{ action = \"deny\", users = \"\" }]"), (4, 37), "nobody has an empty name");
    let plug = format!("{PLUG}target = \"a:1\"\nrules = [{{ action = \"deny\", users = \"ann\" }}]");
    expect(&plug, (5, 37), "do not log in");
    expect(&keyed("rules = [{ action = \"deny\", users = \"ann\" }]"), (4, 37), "do not log in");
    let pool = |more: &str| format!("[pool.p]\nservers = [\"a:1\"]\n{more}");
    expect("[pool.p]\nservers = []", (2, 11), "a pool has 1 to 256 servers");
    expect("[pool.p]\nservers = [\"a\"]", (2, 12), "HOST:PORT");
    expect("[pool.p]\nservers = [\"a:1\", { address = \"a:1\", weight = 2 }]", (2, 11), "a:1 is there twice");
    expect("[pool.p]\nservers = [{ address = \"a:1\", weight = 0 }]", (2, 40), "a number from 1 to 256");
    expect("[pool.p]\nservers = [{ address = \"a:1\", backup = true }]", (2, 11), "remove backup from at least one");
    expect(&pool("max_connections = 0"), (3, 19), "a number from 1");
    let most = read("[pool.p]\nservers = [\"a:1\", { address = \"b:1\", max_connections = 3 }]\nmax_connections = 7");
    let most = most.unwrap().pools[0].servers.iter().map(|s| s.max_connections).collect::<Vec<_>>();
    assert_eq!(most, [Some(7), Some(3)]);
    expect(&pool("balance = \"random\""), (3, 11), "expected one of `round-robin`");
    expect(&pool("hash_field = \"X-User\""), (3, 14), "remove hash_field");
    expect(&pool("balance = \"consistent-hash\"\nhash_field = \"X User\""), (4, 14), "bad field name");
    expect(&pool("tries = 0"), (3, 9), "a number from 1 to 16");
    expect(&pool("check = { path = \"health\" }"), (3, 18), "begin it with `/`");
    expect(&pool("check = { host = \"a\" }"), (3, 18), "has no host: add a path or tls");
    expect(&pool("check = { status = 200 }"), (3, 20), "has no status: add a path");
    expect(&pool("check = { tls = true, status = 200 }"), (3, 32), "has no status: add a path");
    expect(&pool("check = { path = \"/\", tls = true }"), (3, 29), "asks one thing: a path, tls or expect");
    expect(&pool("check = { tls = true, expect = \"a\" }"), (3, 32), "asks one thing: a path, tls or expect");
    expect(&pool("check = { send = \"a\" }"), (3, 18), "nobody looks at the answer: add expect");
    expect(&pool("check = { send = 'a\\q', expect = 'b' }"), (3, 18), "write \\\\, \\r, \\n or \\xHH");
    expect(&pool("check = { tls = true, host = \"a b\" }"), (3, 30), "HOST:PORT");
    expect(&pool("check = { tls = true, host = \"a.b:443\" }"), (3, 30), "without a port");
    let asks = |check: &str| read(&pool(&format!("check = {{ {check} }}"))).unwrap().pools.remove(0).check.unwrap().ask;
    assert_eq!(asks("tls = true"), Some(Ask::Tls(None)));
    assert_eq!(asks("tls = true, host = \"a.b\""), Some(Ask::Tls(Some("a.b".into()))));
    let bytes = asks(r"send = '\x00\xd2PING\r\n\\', expect = '^\+PONG'");
    assert_eq!(bytes, Some(Ask::Bytes(b"\0\xd2PING\r\n\\".to_vec(), r"^\+PONG".parse().unwrap())));
    assert_eq!(asks("expect = '^SSH-'"), Some(Ask::Bytes(Vec::new(), "^SSH-".parse().unwrap())));
    assert_eq!(read(&pool("check = {}")).unwrap().pools[0].check, Some(Check::default()));
    expect(&pool("check = { path = \"/\", status = \"100-200\" }"), (3, 32), "from 200 to 599");
    expect(&pool("check = { path = \"/\", host = \"a b\" }"), (3, 30), "HOST:PORT");
    expect(&pool("check = { path = \"/\", interval = 0 }"), (3, 34), "seconds above 0");
}

#[test]
fn mistakes_in_users() {
    expect(&socks("users = {}"), (4, 9), "no users");
    expect(&socks("users = { a = \"\" }"), (4, 9), "1 to 255 bytes");
    expect(&socks("users = { a = 1 }"), (4, 15), "expected a string");
    expect(&socks("users = { a = \"$6$salt$hash\" }"), (4, 9), "htpasswd -nB");
    expect(&socks("users_file = \"/nowhere/users\""), (4, 14), "cannot read /nowhere/users");
}

#[test]
fn users_files() {
    let dir = tempfile::tempdir().unwrap();
    let (file, users) = (dir.path().join("longsplice.toml"), dir.path().join("users"));
    fs::write(&file, socks("users = { ann = \"a\" }\nusers_file = \"users\"\n")).unwrap();
    fs::write(&users, "# nobody else\nbob:b\n").unwrap();
    let Protocol::Socks5 { users: found, .. } = &Config::from_file(&file).unwrap().listeners[0].protocol else {
        panic!()
    };
    assert_eq!(format!("{found:?}"), r#"{"ann", "bob"}"#);
    for (text, line) in [("ann:x", 1), ("\nbob", 2)] {
        fs::write(&users, text).unwrap();
        let e = Config::from_file(&file).unwrap_err().to_string();
        assert!(e.starts_with(&format!("{}:{line}:1: ", users.display())), "{e}");
    }
    // Anybody who may write the file could add himself.
    for (mode, refused) in [(0o620, true), (0o602, true), (0o600, false), (0o644, false)] {
        fs::write(&users, "bob:b\n").unwrap();
        fs::set_permissions(&users, fs::Permissions::from_mode(mode)).unwrap();
        let e = Config::from_file(&file).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(
            e.contains("longsplice.toml:5:14: ") && e.contains("others may read or write it"),
            refused,
            "{mode:o}: {e}"
        );
    }
    // The users of both sources are merged, but a file without users does not let everybody in.
    fs::write(&users, "").unwrap();
    fs::write(&file, socks("users_file = \"users\"\n")).unwrap();
    assert!(Config::from_file(&file).unwrap_err().to_string().contains("no users"));
}

#[test]
fn key_files() {
    let dir = tempfile::tempdir().unwrap();
    let (file, keys) = (dir.path().join("longsplice.toml"), dir.path().join("keys"));
    let listener = "[[listener]]\nprotocol = \"tpot\"\nlisten = \"0.0.0.0:80\"\n";
    let write = |mode, text: &str| {
        fs::write(&keys, text).unwrap();
        fs::set_permissions(&keys, fs::Permissions::from_mode(mode)).unwrap();
    };
    let key = "000102030405060708090a0b0c0d0e0f";
    write(0o600, key);
    // a proxy that asks for no other one, and one whose key is enough for asking
    for (table, ports) in [("key_file = \"keys\"", 0), ("key_file = \"keys\"\nports = 80", 1)] {
        fs::write(&file, format!("{listener}[tpot]\n{table}\n")).unwrap();
        let asking = Config::from_file(&file).unwrap().tpot.unwrap();
        assert_eq!((asking.keys.len(), asking.ports.len(), asking.proxies.len()), (1, ports, 0));
    }
    let mistake = || Config::from_file(&file).unwrap_err().to_string();
    write(0o600, &format!("# new\n{}\n", &key[1..]));
    assert!(mistake().starts_with(&format!("{}:2:1: 31 digits", keys.display())), "{}", mistake());
    write(0o640, key);
    assert!(mistake().contains("longsplice.toml:5:12: ") && mistake().contains("chmod 600"), "{}", mistake());
}

#[test]
fn a_file_that_is_not_there() {
    let e = Config::from_file(Path::new("/nowhere/longsplice.toml")).unwrap_err();
    assert!(e.to_string().starts_with("cannot read /nowhere/longsplice.toml: "));
}

#[test]
fn command_line() {
    let c = Config::from_args(
        &["127.0.0.1:1080", "[::1]:1080"],
        &["127.0.0.1:3128"],
        &["127.0.0.1:443"],
        &["127.0.0.1:8080=example.org:80"],
    )
    .unwrap();
    let names: Vec<_> = c.listeners.iter().map(|l| (l.protocol.name(), l.rules.guarded)).collect();
    assert_eq!(names, [("socks5", true), ("socks5", true), ("http", true), ("tls", true), ("plug", false)]);
    // Port 0 is a different port each time.
    assert!(Config::from_args(&["127.0.0.1:0", "127.0.0.1:0"], &[], &[], &[]).is_ok());
}

#[test]
fn mistakes_on_the_command_line() {
    let error = |socks5: &[&str], plugs: &[&str]| {
        Config::from_args(socks5, &["127.0.0.1:3128"], &[], plugs).unwrap_err().to_string()
    };
    assert!(error(&["1080"], &[]).starts_with("--socks5 1080: bad listen address: write ADDR:PORT"));
    assert!(error(&[], &["a"]).starts_with("--plug a: no `=`: write ADDR:PORT=HOST:PORT"));
    assert!(error(&[], &["127.0.0.1:3128=a:1"]).contains("another listener has 127.0.0.1:3128 already"));
    assert!(error(&["127.0.0.1:1"], &["127.0.0.1:1=a:1"]).contains("another listener has 127.0.0.1:1 already"));
    let mut config = read(SOCKS).unwrap();
    assert!(config.add_args(&["127.0.0.1:1080"], &[], &[], &[]).is_err());
}

const TLS: &str = "[[listener]]\nprotocol = \"tls\"\nlisten = \"127.0.0.1:443\"\n";

#[test]
fn routes_of_tls() {
    let tls = |more: &str| {
        let listener = read(&format!("{TLS}{more}")).unwrap().listeners.remove(0);
        let guarded = listener.rules.guarded;
        if let Protocol::Tls(tls) = listener.protocol { (tls, guarded) } else { panic!() }
    };
    assert_eq!(tls(""), (Tls::default(), true));
    assert_eq!(tls("port = 8443").0.port, Some(8443));
    let (routes, guarded) = tls("[[listener.route]]\nname = [\"A.b\", \"*.c\"]\nalpn = \"h2\"\ntarget = \"x:1\"");
    let [route] = &routes.routes[..] else { panic!() };
    assert_eq!(route.name, [Pattern::Name("a.b".into()), Pattern::Below("c".into())]);
    assert_eq!(
        (route.alpn.clone(), route.target.clone(), guarded),
        (vec!["h2".into()], "x:1".parse().ok().map(LeadTo::Target), false)
    );
    assert!(tls("[[listener.route]]\ntarget = \"x:1\"\n[[listener.route]]").1);
}

#[test]
fn mistakes_in_routes() {
    let route = |more: &str| format!("{TLS}[[listener.route]]\n{more}");
    expect(&route("name = \"*\""), (5, 8), "bad server name: write a name");
    expect(&route("name = [\"a\", \"192.0.2.1\"]"), (5, 14), "bad server name: write a name");
    expect(&route("alpn = \"\""), (5, 8), "1 to 255 bytes");
    expect(&route("target = \"x\""), (5, 10), "no port");
    expect(&route("host = \"x\""), (5, 8), "remove `host`, or use protocol = \"http\"");
    expect(&route("name = \"a\"\npath_exact = \"/\""), (6, 14), "name, alpn, target and pool: remove `path_exact`");
    expect(&route("pool = \"p\""), (5, 8), "there is no pool \"p\"");
    expect(&route("target = \"x:1\"\npool = \"p\""), (6, 8), "a target or a pool");
    expect(&route("sni = \"x\""), (5, 1), "unknown field `sni`");
    expect(&route("name = []"), (5, 8), "empty list");
    expect(&format!("{TLS}target = \"x:1\""), (4, 10), "below a [[listener.route]]");
    expect(&format!("{TLS}port = 0"), (4, 8), "nonzero u16");
    expect(&format!("{TLS}users = {{ a = \"b\" }}"), (4, 9), "cannot authenticate");
    expect(&socks("port = 1"), (4, 8), "only TLS has such a port: remove it");
    expect(&format!("{SITE}port = 1"), (4, 8), "only TLS has such a port: remove it");
    expect(&socks("[[listener.route]]"), (4, 1), "only HTTP and TLS have routes");
}

#[test]
fn the_proxy_protocol() {
    let told =
        |more: &str| read(&socks(&format!("proxy_protocol = {more}"))).unwrap().listeners.remove(0).proxy_protocol;
    assert_eq!(told("{}"), ProxyProtocol::default());
    let all = told("{ from = [\"10.0.0.0/8\", \"::1\"], required = true, send = \"v2\" }");
    assert_eq!((all.from.len(), all.required, all.send), (2, true, Some(crate::proxy_protocol::Version::V2)));
    expect(&socks("proxy_protocol.required = true"), (4, 1), "add from = ");
    expect(&socks("proxy_protocol.send = \"v3\""), (4, 23), "expected `v1` or `v2`");
    expect(&socks("proxy_protocol.from = \"lb\""), (4, 23), "bad address prefix");
    expect(&socks("proxy_protocol.from = []"), (4, 23), "empty list");
    let pool = "route = [{ pool = \"p\" }]\n[pool.p]\nservers = [\"a:1\"]";
    let site = |more: &str| format!("{SITE}proxy_protocol.{more}\n{pool}");
    expect(&site("send = \"v1\""), (4, 23), "remove `send`, and use forwarded = ");
    assert_eq!(read(&site("from = \"10.0.0.0/8\"")).unwrap().listeners[0].proxy_protocol.from.len(), 1);
    assert!(read(&format!("{SITE}proxy_protocol.send = \"v1\"")).is_ok());
}

#[test]
fn only_a_plug_without_proxy_headers_shakes_hands_end_to_end() {
    let plug = "[[listener]]\nprotocol = \"plug\"\nlisten = \"[::1]:1\"\ntarget = \"a:1\"\nhandshake = ";
    let handshake = |text: &str| match &read(text).unwrap().listeners[0].protocol {
        Protocol::Plug { handshake, .. } => *handshake,
        other => panic!("{other:?}"),
    };
    assert_eq!(handshake(&format!("{plug}\"end-to-end\"")), PlugHandshake::EndToEnd);
    assert_eq!(handshake(&format!("{plug}\"proxy\"")), PlugHandshake::Proxy);
    let with_header = format!("{plug}\"end-to-end\"\nproxy_protocol.send = \"v1\"");
    assert!(mistake(&with_header).2.contains("no room for a PROXY header"), "{:?}", mistake(&with_header));
    assert!(read(&with_header.replace("end-to-end", "proxy")).is_ok());
    assert!(mistake(&format!("{HTTP}handshake = \"proxy\"")).2.contains("only plugs"));
    assert!(mistake(&format!("{plug}\"confirm\"")).2.contains("\"proxy\" or \"end-to-end\""));
}

#[test]
fn what_socks_serves() {
    let commands = |more: &str| {
        let config = read(&socks(more)).unwrap();
        (config.listeners[0].socks().unwrap().clone(), config.warnings)
    };
    let (default, _) = commands("");
    assert_eq!(default.served, [Command::Connect, Command::Bind, Command::UdpAssociate]);
    let (tapped, _) = commands("tap = \"taps\"");
    assert_eq!(tapped.served, [Command::Connect, Command::Bind]);
    let (named, warnings) = commands("commands = \"connect\"\nudp.replies = \"any\"");
    assert_eq!((named.served, named.udp.replies), (vec![Command::Connect], Replies::Any));
    assert!(warnings[0].contains("does not serve \"udp-associate\""), "{warnings:?}");
    let (all, _) = commands("bind = { ports = \"4000-4009\", any_peer = true }\nudp.ports = 5000");
    assert_eq!((all.bind.ports.unwrap().last, all.bind.any_peer, all.udp.ports.unwrap().first), (4009, true, 5000));
    expect(&socks("tap = \"t\"\ncommands = [\"udp-associate\"]"), (5, 12), "datagrams are not copied");
    for key in ["commands = \"connect\"", "bind.wait = 1", "udp.idle_limit = 1"] {
        let (_, _, message) = mistake(&format!("{PLUG}target = \"a:1\"\n{key}"));
        assert!(message.contains("only SOCKS has this"), "{message}");
    }
}

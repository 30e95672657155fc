//! What is in the way of connections that are routed through this machine, and of servers that see the client's address.

use super::{Check, CheckResult};
use longsplice_engine::{dropping_forward_chain, is_local};
use longsplice_proxy::{
    Config, ListenerConfig,
    target::{Host, Target},
};
use std::{fs, path::Path};

/// Checks what the listeners of a configuration need of routing and firewall.
pub fn all(config: &Config) -> Vec<Check> {
    let needs = |l: &&ListenerConfig| !l.binds() || l.shows_clients;
    let listeners: Vec<_> = config.listeners.iter().filter(needs).collect();
    let mut checks: Vec<_> =
        [false, true].iter().filter_map(|v6| forwarding(&listeners, *v6, Path::new("/proc/sys/net"))).collect();
    checks.extend(reverse_path(&listeners, Path::new("/proc/sys/net/ipv4/conf")));
    checks.extend(return_path(&listeners));
    checks.extend(listeners.iter().filter_map(|l| forward_rules(l)));
    checks.extend(listeners.iter().filter_map(|l| own_server(l)));
    checks
}

/// What no listener takes has to be routed on, and so has everything when the program has stopped.
fn forwarding(listeners: &[&ListenerConfig], v6: bool, net: &Path) -> Option<Check> {
    const NAME: &str = "forwarding";
    let routes = |l: &&&ListenerConfig| !l.binds() && l.listen.is_ipv6() == v6;
    let first = listeners.iter().find(routes)?;
    let key = if v6 { "ipv6/conf/all/forwarding" } else { "ipv4/ip_forward" };
    let value = fs::read_to_string(net.join(key)).ok()?;
    let who = format!("for the listener {}", first.listen);
    Some(match value.trim() {
        "0" => {
            let found = format!("off, {who}: connections that it does not take end here");
            Check::warning(NAME, found, format!("sysctl -w net.{}=1", key.replace('/', ".")))
        }
        _ => Check::ok(NAME, format!("on, {who}")),
    })
}

/// A strict check of the source drops packets that come by another device than the one that leads back.
fn reverse_path(listeners: &[&ListenerConfig], conf: &Path) -> Option<Check> {
    const NAME: &str = "rp_filter";
    listeners.iter().find(|l| l.listen.is_ipv4())?;
    let value = |device: &Path| fs::read_to_string(device.join("rp_filter")).ok()?.trim().parse::<u8>().ok();
    let all = value(&conf.join("all"))?;
    let devices =
        fs::read_dir(conf).ok()?.flatten().filter(|d| !["all", "default", "lo"].iter().any(|n| d.file_name() == *n));
    // the kernel uses the larger one of both
    let strict = devices.filter(|d| value(&d.path()).is_some_and(|own| own.max(all) == 1));
    let mut names: Vec<_> = strict.map(|d| d.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let found = match names.is_empty() {
        true => return Some(Check::ok(NAME, "not strict")),
        false => format!(
            "strict on {}: right if hosts are reached by the device on which their packets arrive, otherwise set it to 2",
            names.join(", ")
        ),
    };
    Some(Check::new(NAME, CheckResult::Note, found))
}

/// Servers that see the client's address answer to it, whatever way that takes.
fn return_path(listeners: &[&ListenerConfig]) -> Option<Check> {
    let first = listeners.iter().find(|l| l.shows_clients)?;
    let found = format!(
        "servers of {} answer to their clients' addresses: right if that way leads through this machine, otherwise make it \
         their gateway, or remove source = \"client\"",
        first.listen
    );
    Some(Check::new("return path", CheckResult::Note, found))
}

/// A listener without rules does not let anybody pass where the firewall would not.
fn forward_rules(listener: &ListenerConfig) -> Option<Check> {
    const NAME: &str = "forward rules";
    let leaves = listener.intercepts.is_some() && listener.rules.list().is_empty();
    if !leaves {
        return None;
    }
    let why = match dropping_forward_chain(listener.listen.is_ipv6()) {
        Ok(None) => return None,
        Ok(Some(chain)) => format!("the chain {chain} drops what is forwarded"),
        Err(e) => format!("chains cannot be read ({e})"),
    };
    let found = format!("{why}, and the listener {} has no rules: it takes no connection", listener.listen);
    Some(Check::warning(NAME, found, "give it `rules` that say who may connect to what"))
}

/// A server on this machine cannot be shown the client's address.
fn own_server(listener: &ListenerConfig) -> Option<Check> {
    let Some(Target { host: Host::Ip(ip), .. }) = listener.fixed_target().filter(|_| listener.shows_clients) else {
        return None;
    };
    let cure = "remove source = \"client\"";
    match is_local(*ip) {
        Ok(false) => None,
        Ok(true) => {
            let found = format!("{ip} is this machine, and cannot be shown the clients of {}", listener.listen);
            Some(Check::missing("source", found, cure))
        }
        Err(e) => Some(Check::warning("source", format!("no route to {ip} can be read ({e})"), cure)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn config(text: &str) -> Config {
        let plug = "[[listener]]\nprotocol = \"plug\"\nlisten = \"0.0.0.0:80\"\n";
        Config::from_toml(&format!("{plug}{text}"), Path::new("f")).unwrap()
    }

    #[test]
    fn forwarding_and_the_reverse_path() {
        let net = tempfile::tempdir().unwrap();
        let write = |file: &str, value: &str| {
            let file = net.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, value).unwrap();
        };
        let config = config("transparent = true");
        let all: Vec<_> = config.listeners.iter().collect();
        write("ipv4/ip_forward", "0\n");
        let off = forwarding(&all, false, net.path()).unwrap();
        assert_eq!((off.state, off.cure.as_deref()), (CheckResult::Warning, Some("sysctl -w net.ipv4.ip_forward=1")));
        write("ipv4/ip_forward", "1\n");
        assert_eq!(forwarding(&all, false, net.path()).unwrap().state, CheckResult::Ok);
        assert!(forwarding(&all, true, net.path()).is_none());

        let conf = net.path().join("ipv4/conf");
        for (device, value) in [("all", "0"), ("eth0", "1"), ("eth1", "2"), ("default", "1"), ("lo", "1")] {
            write(&format!("ipv4/conf/{device}/rp_filter"), value);
        }
        let strict = reverse_path(&all, &conf).unwrap();
        assert!(strict.state == CheckResult::Note && strict.found.starts_with("strict on eth0:"), "{strict:?}");
        write("ipv4/conf/all/rp_filter", "2");
        assert_eq!(reverse_path(&all, &conf).unwrap().state, CheckResult::Ok);
    }

    #[test]
    fn a_server_on_this_machine() {
        let of = |target: SocketAddr| config(&format!("source = \"client\"\ntarget = \"{target}\""));
        let own = own_server(&of(([127, 0, 0, 1], 80).into()).listeners[0]).unwrap();
        assert_eq!(own.state, CheckResult::Missing);
        let routed = config("source = \"client\"\ntransparent = true");
        let way = all(&routed).into_iter().find(|check| check.name == "return path").unwrap();
        assert!(way.state == CheckResult::Note && way.found.contains("servers of 0.0.0.0:80"), "{way:?}");
        assert!(return_path(&config("transparent = true").listeners.iter().collect::<Vec<_>>()).is_none());
        assert!(own_server(&of(([192, 0, 2, 1], 80).into()).listeners[0]).is_none());
        assert!(all(&config("target = \"127.0.0.1:80\"")).is_empty());
    }
}

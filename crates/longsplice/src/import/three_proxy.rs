//! 3proxy: a script, whose commands are executed in their order. A service has what was said before it.

mod acl;

use super::{
    model::{Lead, Line, Listener, Mistake, Notes, Site, everybody},
    rules::{NOBODY, Step, compile, tidy},
    values::{is_password, quote, quote_all, seconds},
};
use acl::{Entry, Service};
use longsplice_proxy::target::Target;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

/// Connections of a service if no line says how many.
const MAXCONN: &str = "100";
/// Times in seconds if no line says them, in the order of `timeouts`.
const TIMEOUTS: [u64; 11] = [1, 5, 30, 60, 180, 1800, 15, 60, 15, 5, 5];
/// Of these, what ends a connection without a byte, short ones and long ones, and how long connecting may take.
const SHORT: usize = 4;
const LONG: usize = 5;
const CONNECT: usize = 8;

/// What has been said so far.
struct State {
    internal: Option<(Line, String)>,
    external: Vec<IpAddr>,
    /// The line and the methods of `auth`.
    auth: (Line, Vec<String>),
    users: BTreeMap<String, String>,
    acl: Vec<Entry>,
    maxconn: String,
    timeouts: [u64; 11],
}

/// Translates a file of 3proxy.
pub fn translate(text: &str) -> Result<Site, Mistake> {
    let mut site = Site::default();
    let mut state = State {
        internal: None,
        external: Vec::new(),
        auth: (Line::default(), vec!["none".to_owned()]),
        users: BTreeMap::new(),
        acl: Vec::new(),
        maxconn: MAXCONN.to_owned(),
        timeouts: TIMEOUTS,
    };
    for (number, text) in (1..).zip(text.lines()) {
        // A line that begins with a space is a comment, too.
        if text.is_empty() || text.starts_with(['#', ' ', '\t']) {
            continue;
        }
        let words = words(text).map_err(|what| Mistake::new(number, what))?;
        let line = Line { number, text: text.trim().to_owned() };
        match words.first().map(String::as_str) {
            None => {}
            Some("end") => break,
            Some(_) => state.command(&line, &words, &mut site)?,
        }
    }
    let sources: BTreeSet<IpAddr> = state.external.iter().copied().collect();
    if !sources.is_empty() {
        site.top.insert("source", quote_all(&sources.into_iter().collect::<Vec<_>>()));
    }
    Ok(site)
}

/// Words are parted by white space; in quotes, a quote is written twice.
fn words(text: &str) -> Result<Vec<String>, &'static str> {
    let mut all = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next_if(|_| true) {
        if c.is_whitespace() {
            continue;
        }
        let (mut word, mut next, mut is_quoted) = (String::new(), Some(c), false);
        while let Some(c) = next {
            match c {
                '"' if is_quoted && chars.peek() == Some(&'"') => {
                    chars.next();
                    word.push('"');
                }
                '"' => is_quoted = !is_quoted,
                c if c.is_whitespace() && !is_quoted => break,
                c => word.push(c),
            }
            next = chars.next();
        }
        if is_quoted {
            return Err("the quotes are not closed");
        }
        all.push(word);
    }
    Ok(all)
}

impl State {
    fn command(&mut self, line: &Line, words: &[String], site: &mut Site) -> Result<(), Mistake> {
        let wrong = |what: String| Mistake::new(line.number, what);
        let value = words.get(1).map_or("", String::as_str);
        match words[0].as_str() {
            "internal" => self.internal = Some((line.clone(), value.to_owned())),
            "external" => match value.parse::<IpAddr>() {
                Ok(ip) if ip.is_unspecified() => {}
                Ok(ip) => self.external(line, ip, &mut site.notes),
                Err(_) => return Err(wrong(format!("{value:?} is no address"))),
            },
            "auth" if words.len() > 1 => self.auth = (line.clone(), words[1..].to_vec()),
            "auth" => return Err(wrong("auth how? Write none, iponly or strong".to_owned())),
            "users" => self.users(line, &words[1..], &mut site.notes),
            "allow" | "deny" => self.acl.push(Entry::read(line, words)?),
            "redirect" => self.acl.push(Entry::elsewhere(
                line,
                "connections are not led elsewhere (protocol = \"plug\" leads to one server)",
            )),
            // It says where the connections of the entry before go to.
            "parent" => {
                let why = "connections would go to servers directly, not through another proxy (upstream \
                    = \"NAME\", and [upstream.NAME])";
                if let Some(last) = self.acl.last_mut() {
                    last.elsewhere.get_or_insert_with(|| (line.clone(), why));
                } else {
                    self.acl.push(Entry::elsewhere(line, why));
                }
            }
            "flush" => self.acl.clear(),
            "maxconn" => match value.parse::<u32>() {
                Ok(number) if number > 0 => self.maxconn = number.to_string(),
                _ => return Err(wrong(format!("{value:?} is no number of connections"))),
            },
            "timeouts" => {
                for (time, word) in self.timeouts.iter_mut().zip(&words[1..]) {
                    *time = word.parse().map_err(|_| wrong(format!("{word:?} is no number of seconds")))?;
                }
                site.notes.changed(
                    line,
                    "of these, those of connections (the fifth and sixth) and of connecting (the \
                    ninth) are translated",
                );
            }
            "proxy" | "socks" | "tcppm" => self.service(line, words, site)?,
            "log" => site.notes.left_out(
                line,
                "the access log is written to standard output, and is not rotated (log = { \
                file = \"PATH\" }, SIGUSR1 reopens it)",
            ),
            other => site.notes.left_out(line, why(other)),
        }
        Ok(())
    }

    fn external(&mut self, line: &Line, ip: IpAddr, notes: &mut Notes) {
        if self.external.iter().any(|other| other.is_ipv4() == ip.is_ipv4() && *other != ip) {
            notes.changed(line, "services share the addresses to connect from: all of them are used in turn, by all");
        }
        self.external.push(ip);
    }

    /// `NAME:TYPE:PASSWORD`.
    fn users(&mut self, line: &Line, words: &[String], notes: &mut Notes) {
        // Passwords are not shown again.
        let shown = Line { text: "users ...".to_owned(), ..line.clone() };
        for word in words {
            let mut parts = word.splitn(3, ':');
            let (name, kind, password) = (parts.next().unwrap_or(""), parts.next(), parts.next().unwrap_or(""));
            let fits = [name, password].iter().all(|text| (1..=255).contains(&text.len()));
            let is_good = match kind {
                _ if word.starts_with('$') || !fits || name.contains(':') => false,
                Some("CL") => is_password(password, false),
                Some("CR") => is_password(password, true),
                _ => false,
            };
            if is_good {
                self.users.insert(name.to_owned(), password.to_owned());
                continue;
            }
            let name = if word.starts_with('$') { "a file" } else { name };
            let why = format!(
                "{name}: only passwords, and hashes by bcrypt, SHA-crypt and Argon2id, are \
                    known (give it another password; users_file = \"PATH\" is for files)"
            );
            notes.left_out(&shown, &why);
        }
    }

    fn service(&self, line: &Line, words: &[String], site: &mut Site) -> Result<(), Mistake> {
        let (service, port) = match words[0].as_str() {
            "proxy" => (Service::Http, 3128),
            "socks" => (Service::Socks, 1080),
            _ => (Service::Plug, 0),
        };
        let (options, rest): (Vec<&String>, Vec<&String>) = words[1..].iter().partition(|word| word.starts_with('-'));
        let internal = self.internal.as_ref().map(|(_, ip)| ip.clone());
        let said = Options { port, internal, forwarded: Some("forwarded"), ..Options::default() };
        let mut options = said.read(line, &options)?;
        if let Some(why) = options.refused {
            site.notes.left_out(line, why);
            return Ok(());
        }
        let target = match (service, &rest[..]) {
            (Service::Plug, [port, host, to]) => {
                options.port = port.parse().map_err(|_| Mistake::new(line.number, format!("{port:?} is no port")))?;
                let host = if host.contains(':') { format!("[{host}]") } else { (*host).clone() };
                let target = format!("{host}:{to}").parse::<Target>();
                Some(target.map_err(|e| Mistake::new(line.number, format!("{host}:{to}: {e}")))?)
            }
            (Service::Plug, _) => return Err(Mistake::new(line.number, "write tcppm PORT HOST PORT")),
            (_, []) => None,
            _ => return Err(Mistake::new(line.number, format!("what is {:?}? Options begin with -", rest[0]))),
        };
        if options.port == 0 {
            return Err(Mistake::new(line.number, "a port is a number from 1 to 65535"));
        }
        let ip = match options.internal.as_deref().map(str::parse) {
            None => Ipv4Addr::UNSPECIFIED.into(),
            Some(Ok(ip)) => ip,
            Some(Err(_)) => {
                site.notes.left_out(line, "listeners have an address, and no path or name (-iADDRESS)");
                return Ok(());
            }
        };
        let protocol = match service {
            Service::Http => "http",
            Service::Socks => "socks5",
            Service::Plug => "plug",
        };
        let mut one =
            Listener::new(line, &format!("{}-{}", words[0], options.port), protocol, SocketAddr::new(ip, options.port));
        one.lead = target.map(|target| Lead::Target(target.to_string()));
        let idle = self.timeouts[if service == Service::Http { SHORT } else { LONG }];
        let time = |n: u64| n.checked_mul(1000).and_then(seconds);
        one.policy.extend(time(idle).map(|time| ("idle_limit", time)));
        one.limits.extend(time(self.timeouts[CONNECT]).map(|time| ("connect", time)));
        one.limits.insert("connections", self.maxconn.clone());
        if service == Service::Http {
            match options.forwarded {
                Some(field) => drop(one.keys.insert("forwarded", quote(field))),
                None => drop(one.keys.insert("via", quote(""))),
            }
        }
        if options.header {
            one.proxy_protocol.insert("from", everybody());
            one.proxy_protocol.insert("required", "true".to_owned());
        }
        for what in options.left {
            one.notes.changed(line, &what);
        }
        for ip in options.external {
            if !self.external.contains(&ip) {
                one.notes.changed(
                    line,
                    "-e is left out: a listener has no address of its own to connect from (source \
                        = [...] is for all)",
                );
            }
        }
        self.access(&mut one, service);
        site.listen(one)
    }

    /// Who may use a service, as `auth` and the list before it say.
    fn access(&self, one: &mut Listener, service: Service) {
        let (line, methods) = &self.auth;
        let methods: Vec<&str> = methods.iter().map(String::as_str).filter(|method| *method != "cache").collect();
        let asks = match methods[..] {
            // Then the list is not looked at.
            ["none"] => return,
            ["iponly"] => false,
            ["strong"] => true,
            ["iponly", "strong"] => {
                one.notes.changed(line, "everybody has to log in, also where an address would be enough");
                true
            }
            _ => {
                one.close(line, "clients are known by address, or by name and password, and in no other way");
                return;
            }
        };
        if asks && service == Service::Plug {
            one.close(line, "clients of a port map cannot log in");
            return;
        }
        let mut steps: Vec<Step> = Vec::new();
        for entry in &self.acl {
            steps.extend(entry.step(one, service, asks));
        }
        // Without any entry, everything is allowed.
        match compile(&steps, self.acl.is_empty()) {
            Ok(rules) => one.rules = tidy(rules),
            Err(_) => one.close(line, "the list of who may do what cannot be written as rules"),
        }
        let served = acl::commands(&self.acl, one, service);
        if let Some(served) = served {
            if served.is_empty() {
                one.rules.insert(0, NOBODY);
            } else {
                one.keys.insert("commands", quote_all(&served));
            }
        }
        if asks && self.users.is_empty() {
            one.close(line, "there are no users whose passwords are known (users = { NAME = \"PASSWORD\" })");
        } else if asks {
            one.users.clone_from(&self.users);
        }
    }
}

/// Options of a service.
#[derive(Default)]
struct Options {
    port: u16,
    internal: Option<String>,
    external: Vec<IpAddr>,
    /// The field that tells servers the client's address.
    forwarded: Option<&'static str>,
    /// Clients begin with a PROXY header.
    header: bool,
    /// Why there is no such service.
    refused: Option<&'static str>,
    left: Vec<String>,
}

impl Options {
    fn read(mut self, line: &Line, options: &[&String]) -> Result<Options, Mistake> {
        for option in options {
            let wrong = || Mistake::new(line.number, format!("{option}: what does it mean?"));
            let mut chars = option.chars().skip(1);
            let value = || option.chars().skip(2).collect::<String>();
            match (chars.next(), option.as_str()) {
                (_, "-a") => self.forwarded = None,
                (_, "-a2") => self.forwarded = Some("x-forwarded-for"),
                (_, "-a1") => {
                    self.forwarded = None;
                    self.left.push("-a1 is left out: servers are told nothing of clients, rather than lies".to_owned());
                }
                (Some('p'), _) => self.port = value().parse().map_err(|_| wrong())?,
                (Some('i'), _) => self.internal = Some(value()),
                (Some('e'), _) => self.external.extend(value().parse::<IpAddr>().ok()),
                (Some('H'), _) => self.header = true,
                (Some('R' | 'r'), _) => {
                    self.refused = Some("the proxy does not connect to its clients, and waits for no servers")
                }
                (Some('D'), _) if option.starts_with("-Di") => {
                    self.refused = Some("a listener is not bound to a device (write the device's address: -iADDRESS)");
                }
                (Some('n'), _) if option.starts_with("-ni") || option.starts_with("-ne") => {
                    self.refused = Some("the program runs in one network namespace (start another one there)");
                }
                // what is done anyway, or about programs inside of 3proxy
                (Some('n' | 's' | 'd' | 't' | 'f' | 'o' | 'g' | 'C' | 'S' | 'b'), _) => {}
                (Some('u'), "-u2") => {}
                (Some(_), _) => self.left.push(format!("{option} is left out: there is no such setting")),
                (None, _) => return Err(wrong()),
            }
        }
        Ok(self)
    }
}

/// Why a command is left out.
fn why(command: &str) -> &'static str {
    match command {
        "nserver" | "nscache" | "nscache6" | "nsrecord" | "authnserver" | "fakeresolve" | "dialer" => {
            "names are looked up by the system's resolver (/etc/resolv.conf, /etc/hosts)"
        }
        "logformat" | "rotate" | "archiver" | "logdump" => "[log] says where the access log goes: docs/access-log.md",
        "daemon" | "service" | "pidfile" | "setuid" | "setgid" | "chroot" | "stacksize" | "config" | "writable"
        | "monitor" => "the program runs in the foreground, as the user that starts it (longsplice.service)",
        "authcache" => "each connection is judged by itself",
        "bandlimin" | "bandlimout" | "nobandlimin" | "nobandlimout" => "there is no limit of bytes per second",
        "counter" | "countin" | "countout" | "countall" | "nocountin" | "nocountout" | "nocountall" => {
            "nobody is refused for what was used before"
        }
        "connlim" | "noconnlim" => {
            "it is a key of a listener (limits = { new_per_client = ..., connections_per_client = ... })"
        }
        "include" | "plugin" => "other files are not read (put their text here, and import it again)",
        "admin" => {
            "there is no page to administer the proxy ([admin] serves metrics, longsplice \
            ls shows connections)"
        }
        "ftppr" => "logins are written in another way: user@host (protocol = \"ftp\", docs/ftp.md)",
        "tlspr" => "write a listener with protocol = \"tls\"",
        "pop3p" | "smtpp" | "imapp" | "dnspr" | "udppm" | "icqpr" | "msnpr" | "auto" => "there is no such proxy",
        "backlog" | "maxseg" => "sockets have no such setting",
        "radius" => "clients are not known to a RADIUS server",
        _ => "it is not translated",
    }
}

//! What the lines of a section of HAProxy say, with those of `defaults` before it.

use super::{
    acl::Acls,
    words::{Section, Words, time},
};
use crate::import::model::{Mistake, Notes};
use std::collections::BTreeMap;

/// A section, or `defaults`, from which others begin.
#[derive(Clone, Debug)]
pub struct Proxy {
    pub head: Words,
    pub notes: Notes,
    pub http: bool,
    pub disabled: bool,
    pub acls: Acls,
    pub binds: Vec<Words>,
    pub servers: Vec<Words>,
    pub default_backend: Option<Words>,
    pub uses: Vec<Words>,
    /// `tcp-request connection`, and `session`, which follow each other; and `content`.
    pub connection: Vec<Words>,
    pub content: Vec<Words>,
    pub inspect: Option<u64>,
    /// `http-request` and `redirect`.
    pub requests: Vec<Words>,
    /// `http-response`.
    pub replies: Vec<Words>,
    /// `timeout`, in milliseconds.
    pub times: BTreeMap<String, u64>,
    pub maxconn: Option<u32>,
    pub retries: Option<u32>,
    pub balance: Option<Words>,
    pub cookie: Option<Words>,
    pub forwardfor: Option<Words>,
    /// `option httpchk` and its kind: how servers are checked.
    pub check: Option<Words>,
    /// `http-check` and `tcp-check`.
    pub check_lines: Vec<Words>,
    pub default_server: Vec<String>,
    pub all_backups: bool,
    pub stats: Option<Words>,
}

impl Proxy {
    /// What is so before any line says otherwise.
    pub fn new(head: &Words) -> Proxy {
        Proxy {
            head: head.clone(),
            notes: Notes::default(),
            http: false,
            disabled: false,
            acls: Acls::default(),
            binds: Vec::new(),
            servers: Vec::new(),
            default_backend: None,
            uses: Vec::new(),
            connection: Vec::new(),
            content: Vec::new(),
            inspect: None,
            requests: Vec::new(),
            replies: Vec::new(),
            times: BTreeMap::new(),
            maxconn: None,
            retries: None,
            balance: None,
            cookie: None,
            forwardfor: None,
            check: None,
            check_lines: Vec::new(),
            default_server: Vec::new(),
            all_backups: false,
            stats: None,
        }
    }

    /// Reads a section. `from`: the defaults.
    pub fn read(section: &Section, from: &Proxy) -> Result<Proxy, Mistake> {
        let mut proxy = Proxy { head: section.head.clone(), notes: Notes::default(), ..from.clone() };
        // Conditions come after all names are known.
        for line in section.lines.iter().filter(|line| line.name() == "acl") {
            proxy.acls.add(line)?;
        }
        for line in &section.lines {
            proxy.line(line)?;
        }
        for line in section.lines.iter().filter(|line| line.name() == "acl") {
            if let Some(what) = proxy.acls.unknown(line.word(1)) {
                proxy.notes.left_out(
                    &line.line,
                    &format!("rules and routes do not ask for `{what}`. Lines that name it say what becomes of them"),
                );
            }
        }
        Ok(proxy)
    }

    pub fn name(&self) -> &str {
        self.head.word(1)
    }

    fn line(&mut self, of: &Words) -> Result<(), Mistake> {
        let number = |text: &str| text.parse::<u32>().map_err(|_| of.wrong(format!("{text:?} is no number")));
        match of.name() {
            "acl" => {}
            "mode" => match of.word(1) {
                "http" => self.http = true,
                "tcp" => self.http = false,
                other => return Err(of.wrong(format!("mode {other}: only tcp and http are translated"))),
            },
            "bind" => self.binds.push(of.clone()),
            "server" => self.servers.push(of.clone()),
            "default_backend" => self.default_backend = Some(of.clone()),
            "use_backend" => self.uses.push(of.clone()),
            "disabled" => self.disabled = true,
            "enabled" => self.disabled = false,
            "tcp-request" => match of.word(1) {
                "connection" | "session" => self.connection.push(of.clone()),
                "content" => self.content.push(of.clone()),
                "inspect-delay" => self.inspect = Some(time(of, of.word(2))?),
                _ => return Err(of.wrong("write tcp-request connection, session, content or inspect-delay")),
            },
            "http-request" | "redirect" => self.requests.push(of.clone()),
            "http-response" => self.replies.push(of.clone()),
            "timeout" => self.timeout(of)?,
            "maxconn" => self.maxconn = Some(number(of.word(1))?).filter(|n| *n > 0),
            "retries" => self.retries = Some(number(of.word(1))?),
            "balance" => self.balance = Some(of.clone()),
            "cookie" => self.cookie = Some(of.clone()),
            "default-server" => self.default_server.extend_from_slice(of.from(1)),
            "http-check" | "tcp-check" => self.check_lines.push(of.clone()),
            "option" => self.option(of),
            "no" if of.word(1) == "option" => match of.word(2) {
                "httpchk" | "tcp-check" => self.check = None,
                "forwardfor" => self.forwardfor = None,
                "allbackups" => self.all_backups = false,
                _ => {}
            },
            // all of it is in the access log
            "no" => {}
            "stats" => {
                self.stats.get_or_insert_with(|| of.clone());
                self.notes.left_out(&of.line, why("stats"));
            }
            other => self.notes.left_out(&of.line, why(other)),
        }
        Ok(())
    }

    fn timeout(&mut self, of: &Words) -> Result<(), Mistake> {
        const KINDS: [&str; 8] =
            ["connect", "client", "server", "http-request", "http-keep-alive", "queue", "tunnel", "check"];
        let kind = match of.word(1) {
            "contimeout" => "connect",
            "clitimeout" => "client",
            "srvtimeout" => "server",
            kind => kind,
        };
        let number = time(of, of.word(2))?;
        if !KINDS.contains(&kind) {
            self.notes.left_out(
                &of.line,
                "there is no such limit in time (limits and policy of a listener: docs/configuration.md)",
            );
        } else if number == 0 {
            self.times.remove(kind);
            self.notes.left_out(&of.line, "there is always a limit: the usual one is in force");
        } else {
            self.times.insert(kind.to_owned(), number);
        }
        Ok(())
    }

    fn option(&mut self, of: &Words) {
        match of.word(1) {
            // The access log has a line for each connection and request; pools try other servers; connections are kept.
            "tcplog" | "httplog" | "httpslog" | "logasap" | "contstats" | "redispatch" | "http-keep-alive"
            | "dontlognull" | "tcp-smart-accept" | "tcp-smart-connect" | "splice-auto" | "splice-request"
            | "splice-response" | "http-no-delay" | "socket-stats" | "log-health-checks" => {}
            "httpchk" | "tcp-check" | "ssl-hello-chk" | "redis-check" | "smtpchk" | "mysql-check" | "pgsql-check"
            | "ldap-check" | "spop-check" | "external-check" => self.check = Some(of.clone()),
            "forwardfor" => self.forwardfor = Some(of.clone()),
            "allbackups" => self.all_backups = true,
            other => self.notes.left_out(&of.line, option_why(other)),
        }
    }
}

/// Why an option is left out.
fn option_why(name: &str) -> &'static str {
    match name {
        "tcpka" | "clitcpka" | "srvtcpka" => {
            "HAProxy uses the time of the kernel, and a listener has its own (policy = { keepalive = SECONDS })"
        }
        "http-server-close" | "httpclose" | "forceclose" | "http-pretend-keepalive" => {
            "connections to servers are kept for other requests (idle_connections = 0 in the pool: they are closed)"
        }
        "abortonclose" => "a request that waits is given up when its client has gone",
        "transparent" => "write transparent = true, and docs/edge.md says what else it needs",
        "persist" | "prefer-last-server" => "sticky in a pool keeps clients at their servers",
        "originalto" => "there is no such field (fields = { request = [...] })",
        "dontlog-normal" | "log-separate-errors" => "the access log has all connections",
        "accept-invalid-http-request" | "accept-invalid-http-response" => {
            "what can be read in two ways is refused (strict_replies is about replies)"
        }
        _ => "there is no such setting",
    }
}

/// Why a line is left out.
pub fn why(name: &str) -> &'static str {
    match name {
        "log" | "log-tag" | "log-format" | "log-format-sd" | "error-log-format" | "unique-id-format"
        | "unique-id-header" | "capture" | "declare" => {
            "[log] says where the access log goes and what its lines are like (file, syslog, template: docs/access-log.md)"
        }
        "errorfile" | "errorfiles" | "errorloc" | "errorloc302" | "errorloc303" | "http-error" => {
            "its files hold heads as well, and ours only the page (error_page = [{ status = 503, file = \"PATH\" }])"
        }
        "stats" => {
            "longsplice ls, pools and counters show it, and [admin] serves metrics \
                (control = { haproxy = \"PATH\" } is a socket as HAProxy has it)"
        }
        "stick-table"
        | "stick"
        | "hash-type"
        | "hash-balance-factor"
        | "persist"
        | "force-persist"
        | "ignore-persist"
        | "rate-limit" => {
            "there are no such tables (balance = \"consistent-hash\" and sticky in a pool, \
                new_per_client in the limits of a listener)"
        }
        "compression" => "replies are not compressed (servers do that)",
        "filter" | "use-fcgi-app" | "http-after-response" | "tcp-response" => "there is no such step",
        "source" => {
            "a pool has no address of its own to connect from (source = [...] is for all, \
                source = \"client\" for a listener)"
        }
        "server-template" | "dispatch" => "servers are written one by one (servers = [...])",
        "monitor-uri" | "monitor-net" | "monitor" => {
            "the proxy does not answer requests itself (longsplice doctor, [admin])"
        }
        "reqrep" | "reqadd" | "reqdel" | "reqideny" | "reqdeny" | "rspadd" | "rspdel" | "rspidel" | "rsprep"
        | "reqirep" | "rspirep" => {
            "it is not part of HAProxy any more (fields = { request = [...], reply = [...] }, and rules)"
        }
        "fullconn" | "minconn" | "max-keep-alive-queue" | "http-reuse" => {
            "pools have max_connections, queue and idle_connections"
        }
        "description" | "id" | "backlog" | "bind-process" | "clitcpka-cnt" | "clitcpka-idle" | "clitcpka-intvl"
        | "srvtcpka-cnt" | "srvtcpka-idle" | "srvtcpka-intvl" => "there is no such setting",
        "email-alert" | "external-check" => "no mail is sent, and no program started (longsplice events)",
        _ => "it is not translated",
    }
}

/// Why a line of `global` is left out.
pub fn global_why(name: &str) -> &'static str {
    match name {
        "daemon" | "user" | "group" | "uid" | "gid" | "chroot" | "pidfile" | "nbproc" | "nbthread" | "cpu-map"
        | "ulimit-n" | "node" | "description" | "master-worker" | "thread-groups" => {
            "the program runs in the foreground, with a thread for each processor, as the \
                user that starts it (longsplice.service)"
        }
        "log" | "log-tag" | "log-send-hostname" => why("log"),
        "stats" => "control = { haproxy = \"PATH\" } is such a socket, and longsplice has commands of its own",
        "ca-base" | "crt-base" | "tune.ssl.default-dh-param" => "nothing is decrypted",
        _ if name.starts_with("ssl-") => "nothing is decrypted",
        _ if name.starts_with("tune.") => "there is no such setting, and none is needed",
        _ if name.starts_with("lua-") => "there are no scripts",
        _ => "it is not translated",
    }
}

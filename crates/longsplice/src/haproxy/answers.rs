//! Answers of HAProxy's runtime socket: each command becomes what the control socket would ask and tell.

use super::{
    Answer,
    figures::{self, Proxy, Whole, proxies, status},
    info,
};
use crate::which::PAGE;
use longsplice_engine::{Command as Order, FlowStatus, Splicer};
use longsplice_proxy::{
    ListenerValues, MemberValues, PoolValues, Server, Tell,
    haproxy::{COMMANDS_MAX, Command, LINE_MAX, Name, Refused, Server as Named, Stat, State, Weight},
};
use std::{
    borrow::Cow,
    io,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, LazyLock},
};
use tokio::task::yield_now;

/// The commands, as `help` lists them.
const HELP: &str = "  disable server <bk>/<srv>               : as 'set server <bk>/<srv> state maint'
  enable server <bk>/<srv>                : as 'set server <bk>/<srv> state ready'
  get weight <bk>/<srv>                   : report the weight of a server, and that of the configuration
  set server <bk>/<srv> state <state>     : let a server take its share (ready), or nothing new (drain, maint)
  set server <bk>/<srv> weight <weight>   : give a server another weight, or a part of its own (50%)
  set timeout cli <delay>                 : how long you may be silent
  set weight <bk>/<srv> <weight>          : as 'set server <bk>/<srv> weight <weight>'
  show backend                            : list the pools
  show cli level                          : what you may do
  show cli sockets                        : where this socket is
  show info [desc|json|typed]*            : report what the process is and does
  show pools                              : report pools of memory, of which there are none
  show servers conn [<backend>]           : report connections of servers (all, or of one pool)
  show servers state [<backend>]          : report the state of servers (all, or of one pool)
  show sess [id]                          : list connections, or show one
  show stat [desc|json|no-maint|typed|up]*: report figures of each listener, pool and server
  show version                            : report the version
  shutdown session <id>                   : end a connection
  shutdown sessions server <bk>/<srv>     : end the connections of a server
  help                                    : list the commands
  prompt                                  : toggle interactive mode with prompt
  quit                                    : disconnect
";

/// What is said of a command that is none.
pub static UNKNOWN: LazyLock<String> =
    LazyLock::new(|| format!("Unknown command. Please enter one of the following commands only:\n{HELP}"));
/// What is said of a line that is too long.
pub static TOO_MUCH: LazyLock<String> = LazyLock::new(|| {
    format!("A line is too long: write at most {} bytes, and {COMMANDS_MAX} commands.\n\n", LINE_MAX - 1)
});

const NO_SERVER: &str = "No such server.\n";
const NO_BACKEND: &str = "No such backend.\n";

/// Writes the line of a server from the number and name of its pool, and its own number.
type LineOf = fn((u32, &str), (u32, &MemberValues)) -> String;

/// The first lines of `show servers state` and `show servers conn`.
const STATE_HEAD: &str = "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight \
    srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state \
    bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr srv_agent_addr \
    srv_agent_port\n";
const CONN_HEAD: &str = "# bkname/svname bkid/svid addr port - purge_delay used_cur used_max need_est unsafe_nb safe_nb \
    idle_lim idle_cur idle_per_thr[1]\n";

/// Returns why a command is refused, as it is said.
pub fn why(refused: &Refused) -> Cow<'static, str> {
    match refused {
        Refused::Unknown => Cow::Borrowed(UNKNOWN.as_str()),
        Refused::Because(why) => Cow::Owned(format!("{why}\n")),
    }
}

/// Who answers a client.
pub struct Clerk {
    pub splicer: Splicer,
    pub server: Arc<Server>,
    /// Where the client has come to.
    pub path: PathBuf,
}

/// What there is now.
struct Snapshot {
    listeners: Vec<ListenerValues>,
    pools: Vec<PoolValues>,
}

impl Snapshot {
    fn proxies(&self) -> Vec<Proxy<'_>> {
        proxies(&self.listeners, &self.pools)
    }
}

impl Clerk {
    fn snapshot(&self) -> Snapshot {
        Snapshot { listeners: self.server.listeners(), pools: self.server.pools() }
    }

    /// Does what a command says, and answers. Those that are about the client itself are obeyed elsewhere.
    pub async fn obey(&self, command: &Command, to: &mut Answer<'_, '_>) -> io::Result<()> {
        let said = match command {
            Command::Quit | Command::Prompt | Command::SetTimeout(_) => String::new(),
            Command::Help => format!("The following commands are valid at this level:\n{HELP}"),
            Command::ShowVersion => format!("{}\n", info::shown_version()),
            Command::ShowInfo(form) => info::answer(&self.server, *form),
            Command::ShowStat(asked) => return self.show_stat(asked, to).await,
            Command::ShowSess(id) => return self.show_sess(*id, to).await,
            Command::ShowServersState(of) => return self.show_servers(of.as_ref(), (STATE_HEAD, state_line), to).await,
            Command::ShowServersConn(of) => return self.show_servers(of.as_ref(), (CONN_HEAD, conn_line), to).await,
            Command::ShowBackend => {
                to.put("# name\n").await?;
                for proxy in self.snapshot().proxies().iter().filter(|proxy| proxy.pool.is_some()) {
                    to.put(&format!("{}\n", proxy.name)).await?;
                }
                return Ok(());
            }
            Command::ShowPools => "Dumping pools usage.\nTotal: 0 pools, 0 bytes allocated, 0 used.\n".into(),
            Command::ShowCliLevel => "admin\n".into(),
            Command::ShowCliSockets => {
                format!("# socket lvl processes\nunix@{} admin all\n", self.path.display())
            }
            Command::SetState(server, state) => {
                let what = match state {
                    State::Ready => Tell::Undrain,
                    State::Drain => Tell::Drain,
                    State::Maint => Tell::Maintain,
                };
                self.tell(server, |_| what)
            }
            Command::SetWeight(server, weight) => self.tell(server, |member| {
                // the whole one is that of the configuration, whatever that will be
                let whole = *weight == Weight::Percent(100);
                Tell::Weigh((!whole).then(|| weight.of(member.configured_weight)))
            }),
            Command::GetWeight(server) => match self.find(server) {
                Ok((_, member)) => format!("{} (initial {})\n", member.weight, member.configured_weight),
                Err(why) => why.into(),
            },
            Command::ShutdownSession(id) => match self.splicer.command(*id, Order::Reset) {
                true => String::new(),
                false => "No such session (use 'show sess').\n".into(),
            },
            Command::ShutdownSessions(server) => match self.find(server) {
                Ok((pool, member)) => {
                    self.end_all(format!("{pool}/{}", member.address)).await;
                    String::new()
                }
                Err(why) => why.into(),
            },
        };
        to.put(&said).await
    }

    /// Returns the pool and the values of a server.
    fn find(&self, named: &Named) -> Result<(String, MemberValues), &'static str> {
        let snapshot = self.snapshot();
        let pool = snapshot.proxies().into_iter().filter(|proxy| proxy.is(&named.backend)).find_map(|proxy| proxy.pool);
        let pool = pool.ok_or(NO_BACKEND)?;
        let member = match &named.server {
            Name::Called(address) => pool.members.iter().find(|member| member.address == *address),
            Name::Numbered(sid) => (*sid as usize).checked_sub(1).and_then(|at| pool.members.get(at)),
        };
        Ok((pool.name.clone(), member.ok_or(NO_SERVER)?.clone()))
    }

    fn tell(&self, named: &Named, what: impl FnOnce(&MemberValues) -> Tell) -> String {
        let told = self.find(named).and_then(|(pool, member)| {
            let told = self.server.tell(&format!("{pool}/{}", member.address), what(&member));
            told.ok_or(NO_SERVER) // a reload has removed it meanwhile
        });
        told.err().unwrap_or_default().into()
    }

    /// Ends the connections of a server, a page at a time.
    async fn end_all(&self, member: String) {
        let mut after = 0;
        while let Some(page) = self.page(&mut after) {
            let of_it = page.iter().filter(|flow| flow.member.as_deref() == Some(&member));
            for flow in of_it {
                let _ = self.splicer.command(flow.id, Order::Reset); // it may have ended by itself
            }
            yield_now().await;
        }
    }

    /// Returns the next flows after this number, if there are any, and moves it on.
    fn page(&self, after: &mut u64) -> Option<Vec<FlowStatus>> {
        let page = self.splicer.flows_after(*after, PAGE, None);
        *after = page.last()?.id;
        Some(page)
    }

    async fn show_sess(&self, id: Option<u64>, to: &mut Answer<'_, '_>) -> io::Result<()> {
        let Some(id) = id else {
            let mut after = 0;
            while let Some(page) = self.page(&mut after) {
                to.put(&page.iter().map(session).collect::<String>()).await?;
                yield_now().await;
            }
            return Ok(());
        };
        let found = self.splicer.flows_after(id.saturating_sub(1), 1, None).into_iter().find(|flow| flow.id == id);
        to.put(&found.map_or_else(|| "Session not found.\n".into(), |flow| session(&flow))).await
    }

    async fn show_stat(&self, asked: &Stat, to: &mut Answer<'_, '_>) -> io::Result<()> {
        let whole = Whole { max_connections: self.server.max_connections(), is_stopping: self.server.is_stopping() };
        let snapshot = self.snapshot();
        let proxies = snapshot.proxies();
        // a number that nobody has is no error, as in HAProxy
        if let Some(name @ Name::Called(_)) = &asked.of
            && !proxies.iter().any(|proxy| proxy.is(name))
        {
            return to.put("No such proxy.\n").await;
        }
        to.put(&figures::begin(asked.form)).await?;
        for (number, row) in figures::rows(&proxies, whole, asked).iter().enumerate() {
            to.put(&row.write(asked.form, number == 0)).await?;
        }
        to.put(figures::end(asked.form)).await
    }

    /// Writes a line for each server, behind a head.
    async fn show_servers(
        &self,
        of: Option<&Name>,
        (head, line): (&str, LineOf),
        to: &mut Answer<'_, '_>,
    ) -> io::Result<()> {
        let snapshot = self.snapshot();
        let proxies = snapshot.proxies();
        let is_wanted = |proxy: &&Proxy<'_>| of.is_none_or(|name| proxy.is(name)) && proxy.pool.is_some();
        let wanted: Vec<&Proxy<'_>> = proxies.iter().filter(is_wanted).collect();
        if of.is_some() && wanted.is_empty() {
            return to.put("Can't find backend.\n").await;
        }
        to.put(head).await?;
        for proxy in wanted {
            let members = proxy.pool.map_or(&[][..], |pool| &pool.members);
            for (sid, member) in (1..).zip(members) {
                to.put(&line((proxy.iid, proxy.name), (sid, member))).await?;
            }
        }
        Ok(())
    }
}

/// Returns the line of a connection. What HAProxy says of its buffers and tasks is left out; what longsplice knows besides is
/// at the end.
fn session(flow: &FlowStatus) -> String {
    let family = if flow.client.is_ipv4() { "tcpv4" } else { "tcpv6" };
    let (pool, member) =
        flow.member.as_deref().and_then(|label| label.rsplit_once('/')).unwrap_or(("<NONE>", "<none>"));
    let state = serde_json::to_value(flow.state).unwrap_or_default();
    format!(
        "{:#x}: proto={family} src={} fe={} be={pool} srv={member} age={} dst={} state={} in={} out={}\n",
        flow.id,
        flow.client,
        flow.name.as_deref().unwrap_or("<NONE>"),
        age(flow.age_ms / 1000),
        flow.server,
        state.as_str().unwrap_or_default(),
        flow.bytes_up,
        flow.bytes_down,
    )
}

/// Writes an age as HAProxy does: its two largest units.
fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86400, seconds / 3600 % 24),
    }
}

/// Returns a server's address, its name and its port; `-`: it has none of these.
fn parts(member: &MemberValues) -> (String, &str, &str) {
    let (host, port) = member.address.rsplit_once(':').unwrap_or((&member.address, "-"));
    match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(ip) => (ip.to_string(), "-", port),
        Err(_) => ("-".into(), host, port),
    }
}

fn state_line((iid, pool): (u32, &str), (sid, member): (u32, &MemberValues)) -> String {
    let (address, name, port) = parts(member);
    // stopped or running; told maint (1) or drain (8)
    let (runs, told) = match status(member) {
        "UP" => (2, 0),
        "DRAIN" if member.weight == 0 => (2, 0),
        "DRAIN" => (2, 8),
        "MAINT" => (0, 1),
        _ => (0, 0),
    };
    let (weight, configured) = (member.weight, member.configured_weight);
    format!(
        "{iid} {pool} {sid} {} {address} {runs} {told} {weight} {configured} - - - - - - 0 0 {name} {port} - 0 0 - - 0\n",
        member.address
    )
}

fn conn_line((iid, pool): (u32, &str), (sid, member): (u32, &MemberValues)) -> String {
    let (address, _, port) = parts(member);
    format!("{pool}/{} {iid}/{sid} {address} {port} - - {} - - - - - - -\n", member.address, member.connections)
}

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;

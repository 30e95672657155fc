//! Which flows a command is about: the options of `longsplice ls`, `kill` and `release`, and what requests say of them; which
//! server of a pool: those of `longsplice drain`, `undrain` and `weight`; which listeners: those of `longsplice pause` and `resume`;
//! and which events: those of `longsplice events`.

use longsplice_engine::FlowStatus;
use longsplice_proxy::{access::Prefix, events::Kind};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Flows held in memory at a time while an answer is written.
pub const PAGE: usize = 500;

/// Conditions on a flow, all of which have to hold. Those that are missing hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct Which {
    /// Only flows of the listener with this name.
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Only flows of this user.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Only flows of clients with this address, or in this prefix, such as 10.0.0.0/8.
    #[arg(long, value_name = "ADDR", value_parser = prefix)]
    pub client: Option<String>,
    /// Only flows to servers with this address, or in this prefix.
    #[arg(long, value_name = "ADDR", value_parser = prefix)]
    pub server: Option<String>,
    /// Only flows to this destination, as the client named it: HOST:PORT, or HOST for any port.
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// Only flows to this server of a pool, as `longsplice pools` shows it: POOL/HOST:PORT. Those that have outlived a process
    /// are not known to be.
    #[arg(long, value_name = "SERVER")]
    pub member: Option<String>,
    /// Only flows with this refusal, such as `policy` or `path`.
    #[arg(long, value_name = "REFUSAL")]
    pub refusal: Option<String>,
    /// Only flows that are older, in seconds.
    #[arg(long, value_name = "SECONDS")]
    pub min_age: Option<u64>,
    /// Only flows with more bytes, of both directions together.
    #[arg(long, value_name = "BYTES")]
    pub min_bytes: Option<u64>,
}

/// Arguments of `longsplice kill` and `longsplice release`.
#[derive(Debug, clap::Args)]
pub struct FlowsArgs {
    /// Numbers of flows, as `longsplice ls` shows them.
    #[arg(value_name = "ID", value_parser = parse_flow, conflicts_with = "all")]
    pub ids: Vec<u64>,

    /// All flows.
    #[arg(long)]
    pub all: bool,

    #[command(flatten)]
    pub which: Which,
}

/// Reads the number of a flow.
pub fn parse_flow(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write the number of a flow, as `longsplice ls` shows it".to_owned())
}

/// Checks a prefix, and leaves it as it was written.
fn prefix(text: &str) -> Result<String, String> {
    text.parse::<Prefix>().map(|_| text.to_owned()).map_err(|e| e.to_string())
}

/// Arguments of `longsplice pause` and `longsplice resume`.
#[derive(Debug, clap::Args)]
pub struct ListenerArgs {
    /// Names of listeners, as `longsplice counters` shows them.
    #[arg(value_name = "LISTENER", required = true)]
    pub listeners: Vec<String>,
}

/// Arguments of `longsplice undrain`, and of all that is told a server.
#[derive(Debug, clap::Args)]
pub struct MemberArgs {
    /// The server, as `longsplice pools` shows it: POOL/HOST:PORT, or HOST:PORT for that of all pools.
    #[arg(value_name = "SERVER")]
    pub member: String,
}

/// Arguments of `longsplice drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    #[command(flatten)]
    pub of: MemberArgs,

    /// Do not check it meanwhile, either: somebody works on it.
    #[arg(long)]
    pub maintenance: bool,
}

/// Arguments of `longsplice weight`.
#[derive(Debug, clap::Args)]
pub struct WeightArgs {
    #[command(flatten)]
    pub of: MemberArgs,

    /// 0 to 256, 0 for nothing new; without it, the weight of the configuration.
    #[arg(value_name = "WEIGHT", value_parser = clap::value_parser!(u16).range(0..=256))]
    pub weight: Option<u16>,
}

/// Arguments of `longsplice events`.
#[derive(Debug, clap::Args)]
pub struct EventsArgs {
    /// Of listeners and their connections, print only those of this name.
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,

    /// Print only events of these kinds, separated by commas; what was missed is always said.
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub kind: Vec<Kind>,
}

fn kind(text: &str) -> Result<Kind, String> {
    serde_json::from_value(text.into()).map_err(|e| e.to_string())
}

/// [`Which`] with prefixes that were read.
pub struct Chosen {
    which: Which,
    client: Option<Prefix>,
    server: Option<Prefix>,
}

impl Which {
    /// Returns whether every flow is meant.
    pub fn is_any(&self) -> bool {
        *self == Which::default()
    }

    /// Reads the prefixes. Fails with a message that names the one that is wrong.
    pub fn read(self) -> Result<Chosen, String> {
        let read = |text: &Option<String>| {
            let parse = |text: &String| text.parse::<Prefix>().map_err(|e| format!("{text}: {e}"));
            text.as_ref().map(parse).transpose()
        };
        Ok(Chosen { client: read(&self.client)?, server: read(&self.server)?, which: self })
    }
}

impl Chosen {
    /// Returns whether every flow is meant.
    pub fn is_any(&self) -> bool {
        self.which.is_any()
    }

    /// Returns whether this flow is meant.
    pub fn has(&self, flow: &FlowStatus) -> bool {
        let is = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        let lies =
            |prefix: &Option<Prefix>, ip: IpAddr| prefix.as_ref().is_none_or(|p| p.0.contains(&ip.to_canonical()));
        let Which { listener, user, target, member, refusal, min_age, min_bytes, .. } = &self.which;
        let host = flow.target.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']));
        is(listener, flow.name.as_deref())
            && is(user, flow.user.as_deref())
            && is(member, flow.member.as_deref())
            && is(refusal, flow.refusal.map(|why| why.as_str()))
            && (is(target, Some(&flow.target)) || is(target, host))
            && lies(&self.client, flow.client.ip())
            && lies(&self.server, flow.server.ip())
            && min_age.is_none_or(|seconds| flow.age_ms / 1000 >= seconds)
            && min_bytes.is_none_or(|bytes| flow.bytes_up + flow.bytes_down > bytes)
    }
}

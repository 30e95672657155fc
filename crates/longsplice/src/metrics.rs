//! What is counted, in the text format of OpenMetrics, which Prometheus reads. No flow, client or user is a label: their number
//! has no bound.

use crate::args::version;
use longsplice_engine::Splicer;
use longsplice_proxy::{
    Kind, LIFETIMES_MS, ListenerValues, MemberValues, Metric, PoolValues, Server, Times, Totals, WAITS_MS,
};
use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{SysconfVar, sysconf},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use std::{
    fmt, fs, io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The media type of [`of`].
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns all metrics. Fails if the kernel does not say what the data path has counted.
pub fn of(splicer: &Splicer, server: &Server) -> io::Result<String> {
    let snapshot = Snapshot {
        proxy: server.counters().metrics(),
        listeners: server.listeners(),
        pools: server.pools(),
        verdicts: splicer.verdicts()?,
        tpot: server.tpot().map_or(Ok(Vec::new()), |tpot| tpot.verdicts())?,
        entries: splicer.entries(),
        refusal: splicer.refusal().map(|why| why.as_str()),
    };
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    registry.register_collector(Box::new(Process));
    let mut written = String::new();
    text::encode(&mut written, &registry).map_err(io::Error::other)?;
    Ok(written)
}

#[derive(Debug)]
struct Snapshot {
    proxy: Vec<Metric>,
    listeners: Vec<ListenerValues>,
    pools: Vec<PoolValues>,
    verdicts: Vec<(&'static str, u64)>,
    tpot: Vec<(&'static str, u64)>,
    entries: Option<(u64, u64)>,
    refusal: Option<&'static str>,
}

/// Writes a counter with a value for each set of labels.
fn counters<L: EncodeLabelSet>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    values: impl IntoIterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    values.into_iter().try_for_each(|(labels, n)| ConstCounter::new(n).encode(family.encode_family(&labels)?))
}

fn gauge(to: &mut DescriptorEncoder<'_>, (name, help): (&str, &str), value: f64) -> fmt::Result {
    ConstGauge::new(value).encode(to.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

impl Collector for Snapshot {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut to;
        for metric in &self.proxy {
            let name = format!("longsplice_{}", metric.name);
            match metric.kind {
                Kind::Gauge => gauge(to, (&name, metric.help), metric.value as f64)?,
                Kind::Counter => {
                    let descriptor = to.encode_descriptor(&name, metric.help, None, MetricType::Counter)?;
                    ConstCounter::new(metric.value).encode(descriptor)?;
                }
            }
        }
        let about = ("longsplice_listener_spliced", "Flows of the listener that were spliced, each counted once.");
        counters(to, about, self.listeners.iter().map(|l| ([("listener", &*l.name)], l.spliced)))?;
        let refused = self.listeners.iter().flat_map(|l| l.refused.iter().map(|(why, n)| (&*l.name, *why, *n)));
        let about = ("longsplice_listener_refused", "Flows of the listener that were not spliced, by the reason.");
        counters(to, about, refused.map(|(name, why, n)| ([("listener", name), ("reason", why)], n)))?;
        self.of_pools(to)?;
        self.ended(to)?;
        let about = ("longsplice_verdicts", "Packets, by what the data path has done with them.");
        counters(to, about, self.verdicts.iter().map(|(name, n)| ([("verdict", *name)], *n)))?;
        let about =
            ("longsplice_tpot_verdicts", "Packets, by what the programs of translucent proxying have done with them.");
        counters(to, about, self.tpot.iter().map(|(name, n)| ([("verdict", *name)], *n)))?;
        if let Some((entries, room)) = self.entries {
            gauge(to, ("longsplice_table_entries", "Entries of the table of flows. A flow has two."), entries as f64)?;
            gauge(to, ("longsplice_table_room", "Entries that fit into the table of flows."), room as f64)?;
        }
        let about =
            ("longsplice_splices", "1: flows can be spliced. 0: they are copied, for the reason that is named.");
        let mut family = to.encode_descriptor(about.0, about.1, None, MetricType::Gauge)?;
        let reason = [("reason", self.refusal.unwrap_or_default())];
        ConstGauge::new(i64::from(self.refusal.is_none())).encode(family.encode_family(&reason)?)?;
        let about = ("longsplice_build_info", "1: the version that runs.");
        let mut family = to.encode_descriptor(about.0, about.1, None, MetricType::Gauge)?;
        ConstGauge::new(1_i64).encode(family.encode_family(&[("version", version())])?)
    }
}

impl Snapshot {
    /// What has become of connections, by listener.
    fn ended(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = ("longsplice_listener_begun", "Connections of the listener that have begun.");
        counters(to, about, self.listeners.iter().map(|l| ([("listener", &*l.name)], l.begun)))?;
        let about = ("longsplice_listener_live", "Connections of the listener that exist now.");
        let mut family = to.encode_descriptor(about.0, about.1, None, MetricType::Gauge)?;
        for l in &self.listeners {
            ConstGauge::new(i64::from(l.live)).encode(family.encode_family(&[("listener", &*l.name)])?)?;
        }
        let about =
            ("longsplice_listener_paused", "1: the listener is paused, and accepts nobody. 0: it accepts clients.");
        let mut family = to.encode_descriptor(about.0, about.1, None, MetricType::Gauge)?;
        for l in &self.listeners {
            ConstGauge::new(i64::from(l.is_paused)).encode(family.encode_family(&[("listener", &*l.name)])?)?;
        }
        let ended = self.listeners.iter().flat_map(|l| l.totals.ended.iter().map(|(how, n)| (&*l.name, *how, *n)));
        let about = (
            "longsplice_listener_ended",
            "Connections, HTTP requests and FTP transfers that have ended, by how they did.",
        );
        counters(to, about, ended.map(|(name, how, n)| ([("listener", name), ("how", how)], n)))?;
        let about = ("longsplice_listener_bytes", "Bytes of what has ended: up from clients to servers, and down.");
        let bytes = self.listeners.iter().flat_map(|l| {
            let of = |direction, passed: u64, spliced: u64| {
                let copied = passed.saturating_sub(spliced);
                [("copied", copied), ("spliced", spliced)]
                    .map(|(stage, n)| ([("listener", &*l.name), ("direction", direction), ("stage", stage)], n))
            };
            let t = &l.totals;
            [of("up", t.bytes_up, t.spliced_up), of("down", t.bytes_down, t.spliced_down)].concat()
        });
        counters(to, about, bytes)?;
        let histograms: [OfTotals; 3] = [
            ("lifetime", "How long what has ended had lived.", &LIFETIMES_MS, |t| &t.lifetimes),
            ("connect", "How long it took to connect to a server, or to give up.", &WAITS_MS, |t| &t.connects),
            ("reply", "How long servers took to reply to requests of HTTP.", &WAITS_MS, |t| &t.replies),
        ];
        for (name, help, bounds, of) in histograms {
            let name = format!("longsplice_listener_{name}_seconds");
            let mut family = to.encode_descriptor(&name, help, None, MetricType::Histogram)?;
            for l in &self.listeners {
                let times = of(&l.totals);
                let bounds = bounds.iter().map(|ms| *ms as f64 / 1e3).chain([f64::MAX]); // the last one is written as +Inf
                let groups: Vec<_> = bounds.zip(times.by_bound).collect();
                let (seconds, all) = (times.sum_ms as f64 / 1e3, times.by_bound.iter().sum());
                let labels = [("listener", &*l.name)];
                family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(seconds, all, &groups, None)?;
            }
        }
        Ok(())
    }
}

/// Name and meaning of a histogram, its bounds in milliseconds, and the times of a listener.
type OfTotals = (&'static str, &'static str, &'static [u64; 8], fn(&Totals) -> &Times);

/// Name and meaning of a metric, and the value of a server.
type OfMember<N> = (&'static str, &'static str, fn(&MemberValues) -> N);

impl Snapshot {
    fn of_pools(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let all = || self.pools.iter().flat_map(|pool| pool.members.iter().map(move |member| (pool, member)));
        let labels = |pool: &PoolValues, member: &MemberValues| {
            [("pool", pool.name.clone()), ("member", member.address.clone())]
        };
        let counted: [OfMember<u64>; 2] = [
            ("longsplice_pool_chosen", "Times that the server was chosen for a connection or request.", |m| m.chosen),
            ("longsplice_pool_failed", "Times that the server has failed at one.", |m| m.failed),
        ];
        for (name, help, value) in counted {
            counters(to, (name, help), all().map(|(pool, member)| (labels(pool, member), value(member))))?;
        }
        let states: [OfMember<i64>; 3] = [
            ("longsplice_pool_connections", "Connections and requests of the server now.", |m| m.connections.into()),
            ("longsplice_pool_weight", "Weight of the server.", |m| m.weight.into()),
            ("longsplice_pool_up", "1: the server is up. 0: it is out, down or drained.", |m| (m.state == "up").into()),
        ];
        for (name, help, value) in states {
            let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (pool, member) in all() {
                ConstGauge::new(value(member)).encode(family.encode_family(&labels(pool, member))?)?;
            }
        }
        let about = ("longsplice_pool_waiting", "Connections and requests that wait for a server of the pool.");
        let mut family = to.encode_descriptor(about.0, about.1, None, MetricType::Gauge)?;
        self.pools.iter().try_for_each(|pool| {
            ConstGauge::new(i64::from(pool.waiting)).encode(family.encode_family(&[("pool", &*pool.name)])?)
        })
    }
}

/// What all programs tell of themselves, by the names that Prometheus recommends. What the kernel does not say is left out.
#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut to;
        let unit = |which| sysconf(which).ok().flatten().map(|n| n as f64);
        if let (Some(stat), Some(ticks)) = (Stat::read(), unit(SysconfVar::CLK_TCK)) {
            let name = "process_cpu_seconds";
            let used = to.encode_descriptor(name, "Time of processors, user and system.", None, MetricType::Counter)?;
            ConstCounter::new((stat.user + stat.system) / ticks).encode(used)?;
            if let (Some(up), Ok(now)) = (uptime(), SystemTime::now().duration_since(UNIX_EPOCH)) {
                let started = now.as_secs_f64() - up + stat.started / ticks;
                gauge(
                    to,
                    ("process_start_time_seconds", "When the program was started, in seconds since 1970."),
                    started,
                )?;
            }
            if let Some(page) = unit(SysconfVar::PAGE_SIZE) {
                gauge(to, ("process_resident_memory_bytes", "Memory of the program."), stat.resident * page)?;
            }
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            gauge(to, ("process_open_fds", "Descriptors that are open."), open.count().saturating_sub(1) as f64)?;
        }
        if let Ok((most, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            gauge(to, ("process_max_fds", "Limit of descriptors."), most as f64)?;
        }
        Ok(())
    }
}

/// What /proc/self/stat has of the program: times in ticks, memory in pages (proc_pid_stat(5)).
struct Stat {
    user: f64,
    system: f64,
    started: f64,
    resident: f64,
}

impl Stat {
    fn read() -> Option<Stat> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // the name of the program, in parentheses, may contain anything
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse().ok();
        Some(Stat { user: field(14)?, system: field(15)?, started: field(22)?, resident: field(24)? })
    }
}

/// Returns for how long this process runs, if the kernel says so.
pub fn age() -> Option<Duration> {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok()??;
    Some(Duration::from_secs_f64((uptime()? - Stat::read()?.started / ticks as f64).max(0.0)))
}

/// Returns the seconds since the machine was started.
fn uptime() -> Option<f64> {
    fs::read_to_string("/proc/uptime").ok()?.split_whitespace().next()?.parse().ok()
}

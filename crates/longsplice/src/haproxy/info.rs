//! `show info`: what the process is and does, in HAProxy's fields. Those that longsplice has nothing for are left out.

use super::figures::{Field, Filled, in_json, plain, typed};
use crate::{args::version, metrics};
use longsplice_proxy::{
    Server,
    haproxy::{Form, Format},
};
use nix::sys::resource::{Resource, getrlimit};
use serde_json::json;
use std::{
    fs, process,
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::runtime::Handle;

const OUTPUT: (&str, &str) = ("POS", "str");
const CONFIG: (&str, &str) = ("CGS", "u32");
const LIMIT: (&str, &str) = ("CLP", "u32");
const GAUGE: (&str, &str) = ("MGP", "u32");
const COUNTER: (&str, &str) = ("MCP", "u64");

const NAME: Field = Field::new(0, "Name", OUTPUT, "Name of the program");
const VERSION: Field =
    Field::new(1, "Version", OUTPUT, "Version of HAProxy whose socket this is like, and of the program");
const RELEASE_DATE: Field = Field::new(2, "Release_date", OUTPUT, "Date of the program's source; - if it is not known");
const NBPROC: Field = Field::new(4, "Nbproc", CONFIG, "Number of processes, which is 1");
const PROCESS_NUM: Field = Field::new(5, "Process_num", ("KGP", "u32"), "Number among these");
const PID: Field = Field::new(6, "Pid", ("SGP", "u32"), "Number of the process");
const UPTIME: Field = Field::new(7, "Uptime", ("MDP", "str"), "How long it has run");
const UPTIME_SEC: Field = Field::new(8, "Uptime_sec", ("MDP", "u32"), "The same in seconds");
const ULIMIT_N: Field = Field::new(13, "Ulimit-n", LIMIT, "Limit of descriptors");
const MAXCONN: Field = Field::new(15, "Maxconn", LIMIT, "Limit of connections on all listeners together");
const HARD_MAXCONN: Field = Field::new(16, "Hard_maxconn", LIMIT, "The same");
const CURR_CONNS: Field = Field::new(17, "CurrConns", GAUGE, "Connections that exist now");
const CUM_CONNS: Field = Field::new(18, "CumConns", COUNTER, "Connections that were accepted");
const MAXPIPES: Field = Field::new(23, "Maxpipes", LIMIT, "0: pipes have no limit of their own");
const PIPES_USED: Field = Field::new(24, "PipesUsed", GAUGE, "0: not counted");
const TASKS: Field = Field::new(47, "Tasks", GAUGE, "Tasks that exist");
const RUN_QUEUE: Field = Field::new(48, "Run_queue", GAUGE, "Tasks that wait for the main thread");
const NODE: Field = Field::new(50, "node", ("COS", "str"), "Name of the host");
const STOPPING: Field = Field::new(52, "Stopping", GAUGE, "1: no client is accepted any more");
const LISTENERS: Field = Field::new(55, "Listeners", GAUGE, "Number of listeners");
const DROPPED_LOGS: Field = Field::new(58, "DroppedLogs", GAUGE, "Lines of the access log that were lost");
const BUILD_INFO: Field = Field::new(66, "Build info", OUTPUT, "Version of the program, and its commit");
const START_TIME_SEC: Field =
    Field::new(70, "Start_time_sec", ("MDP", "u32"), "When it was started, in seconds since 1970");

/// The version that is told: the one of HAProxy's socket first, because tools decide by that what they may ask.
pub fn shown_version() -> String {
    format!("2.6.0-longsplice-{}", version().split(' ').next().unwrap_or_default())
}

/// Returns the fields that are filled.
fn fields(server: &Server) -> Vec<Filled> {
    let (counters, most) = (server.counters(), server.max_connections());
    let number = |n: u64| n.into();
    let date = version().rsplit_once(", ").map_or("-".into(), |(_, date)| date.trim_end_matches(')').replace('-', "/"));
    let mut fields: Vec<Filled> = vec![
        (&NAME, "longsplice".into()),
        (&VERSION, (&*shown_version()).into()),
        (&RELEASE_DATE, (&*date).into()),
        (&NBPROC, 1_u32.into()),
        (&PROCESS_NUM, 1_u32.into()),
        (&PID, process::id().into()),
    ];
    let age = metrics::age();
    if let Some(seconds) = age.map(|age| age.as_secs()) {
        let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
        fields.push((&UPTIME, (&*format!("{days}d {hours}h{minutes:02}m{:02}s", seconds % 60)).into()));
        fields.push((&UPTIME_SEC, number(seconds)));
    }
    fields.extend(getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| (&ULIMIT_N, number(soft))));
    fields.extend([
        (&MAXCONN, most.into()),
        (&HARD_MAXCONN, most.into()),
        (&CURR_CONNS, number(counters.live)),
        (&CUM_CONNS, number(counters.accepted)),
        (&MAXPIPES, 0_u32.into()),
        (&PIPES_USED, 0_u32.into()),
    ]);
    let main = Handle::current().metrics();
    fields.push((&TASKS, number((server.tasks() + main.num_alive_tasks()) as u64)));
    fields.push((&RUN_QUEUE, number(main.global_queue_depth() as u64)));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "-" } else { host.trim() };
    fields.extend([
        (&NODE, host.into()),
        (&STOPPING, u32::from(server.is_stopping()).into()),
        (&LISTENERS, number(server.listen_addrs().len() as u64)),
        (&DROPPED_LOGS, number(counters.log_lines_dropped)),
        (&BUILD_INFO, version().into()),
    ]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    let started = age.zip(now).map(|(age, now)| now.saturating_sub(age).as_secs());
    fields.extend(started.map(|started| (&START_TIME_SEC, number(started))));
    fields
}

/// Returns the answer.
pub fn answer(server: &Server, form: Form) -> String {
    let fields = fields(server);
    match form.format {
        Format::Plain => fields.iter().map(|filled| plain(filled, form)).collect(),
        Format::Typed => fields.iter().map(|filled| typed(filled, form)).collect(),
        Format::Json => {
            let all: Vec<String> = fields.iter().map(|filled| in_json(filled, json!({}))).collect();
            format!("[{}]\n", all.join(","))
        }
    }
}

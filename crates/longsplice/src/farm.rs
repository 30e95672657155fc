//! `longsplice tpot router` and `longsplice tpot farm`: a farm of translucent proxies behind a router, and which of them are up.

use crate::{
    Outcome,
    args::{TpotFarmArgs, TpotRouterArgs},
};
use longsplice_datapath::{DeviceChanges, TPOT_WEIGHT, TpotRouter, TpotRouterOptions, tpot_router};
use longsplice_proxy::tpot::destinations;
use serde_json::json;
use std::{
    fs,
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    net::TcpStream,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval, timeout},
};

/// Maximum time between two looks at the devices, if their changes are not heard.
const FOLLOW_EVERY: Duration = Duration::from_secs(10);
/// Maximum length of the line in which a member reports its load, bytes: those of HAProxy's agents are shorter.
const REPORT: u64 = 256;

/// `longsplice tpot router`.
pub async fn router(args: &TpotRouterArgs) -> Outcome {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let TpotRouterArgs { farm, member, port, to, device, exid, .. } = args;
    let router = TpotRouter::open(TpotRouterOptions {
        farm: farm.clone(),
        members: member.iter().map(IpAddr::to_canonical).collect(),
        to: destinations(to, port),
        devices: device.clone(),
        exid: *exid,
        pin: None,
    })?;
    if let Some(why) = drops_returned(farm) {
        tracing::warn!("{why}");
    }
    let (report, mut reports) = mpsc::channel(member.len());
    for (i, ip) in member.iter().enumerate() {
        tokio::spawn(watch(i, SocketAddr::new(*ip, args.check), args.clone(), report.clone()));
    }
    let mut changes = DeviceChanges::new()
        .inspect_err(|error| tracing::warn!(%error, "cannot watch devices: changes are noticed late"))
        .ok();
    let (mut look, mut weights) = (interval(FOLLOW_EVERY), vec![0; member.len()]);
    tracing::info!("routing to the farm");
    loop {
        let changed = async {
            match &changes {
                Some(changes) => changes.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some((i, weight)) = reports.recv() => {
                weights[i] = weight;
                while let Ok((i, weight)) = reports.try_recv() {
                    weights[i] = weight;
                }
                router.set_weights(&weights)?;
                if weights.iter().all(|weight| *weight == 0) {
                    tracing::warn!("no member of the farm is up: everything is routed");
                }
            }
            change = changed => {
                if let Err(error) = change {
                    tracing::warn!(%error, "cannot watch devices any more: changes are noticed late");
                    changes = None;
                }
                follow(&router);
            }
            _ = look.tick() => follow(&router),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    for (what, syns) in router.verdicts()?.into_iter().filter(|v| v.1 > 0) {
        tracing::info!("{what}: {syns}");
    }
    tracing::info!("stopped; connections of the farm go on");
    Ok(ExitCode::SUCCESS)
}

fn follow(router: &TpotRouter) {
    if let Err(error) = router.follow() {
        tracing::warn!(%error, "cannot follow changes of devices: new ones are not routed to the farm");
    }
}

/// Returns whether the kernel drops SYNs that members send back: they have the addresses of hosts beyond other devices.
fn drops_returned(farm: &str) -> Option<String> {
    let value = |of: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).ok()?;
        text.trim().parse::<u8>().ok()
    };
    let strict = value("all").max(value(farm)) == Some(1);
    strict.then(|| {
        let cure = format!("set net.ipv4.conf.{farm}.rp_filter to 2");
        format!("SYNs that members of the farm send back are dropped, because rp_filter is strict: {cure}")
    })
}

/// Checks a member again and again, and sends its index and its weight whenever that changes.
async fn watch(i: usize, at: SocketAddr, args: TpotRouterArgs, report: mpsc::Sender<(usize, u8)>) {
    let every = Duration::from_secs(args.interval.into());
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut health, mut is_new) = (Health::new(args.rise, args.fall), true);
    loop {
        ticks.tick().await;
        let answer = timeout(every, check(at, args.load)).await;
        let answer = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let weight = answer.as_ref().ok().copied();
        let was_up = health.weight.is_some();
        // that a member is down from the start is said as well
        if !health.note(weight) && !is_new {
            continue;
        }
        is_new = false;
        match (&answer, was_up) {
            (Ok(weight), true) => tracing::debug!("member {}: weight {weight}", at.ip()),
            (Ok(weight), false) => tracing::info!("member {} is up, weight {weight}", at.ip()),
            (Err(error), _) => tracing::warn!("member {} is down: {at}: {error}", at.ip()),
        }
        if report.send((i, health.weight.unwrap_or(0))).await.is_err() {
            return;
        }
    }
}

/// Connects to a member. Returns the weight that it reports, if it is to do so.
async fn check(at: SocketAddr, load: bool) -> io::Result<u8> {
    let stream = TcpStream::connect(at).await?;
    if !load {
        return Ok(TPOT_WEIGHT);
    }
    let mut line = Vec::new();
    BufReader::new(stream.take(REPORT)).read_until(b'\n', &mut line).await?;
    let line = String::from_utf8_lossy(&line);
    weight(&line).ok_or_else(|| {
        let wrong = format!("it reports {:?}, and not a percentage like \"75%\"", line.trim_end());
        io::Error::new(io::ErrorKind::InvalidData, wrong)
    })
}

/// Reads the line of an agent as HAProxy's agent-check has it. Only a percentage counts.
fn weight(line: &str) -> Option<u8> {
    let mut words = line.split(|c: char| c == ',' || c.is_whitespace());
    words.find_map(|word| word.strip_suffix('%')?.parse().ok()).filter(|weight| *weight <= TPOT_WEIGHT)
}

/// Whether a member is up.
#[derive(Debug)]
struct Health {
    rise: u8,
    fall: u8,
    /// Weight of a member that is up.
    weight: Option<u8>,
    /// Number of answers in a row that speak for the other state.
    others: u8,
}

impl Health {
    /// A member is down at first, and up after a single good answer.
    fn new(rise: u8, fall: u8) -> Health {
        Health { rise, fall, weight: None, others: rise - 1 }
    }

    /// Notes the result of a check: the weight, or that it has failed. Returns whether the weight has changed.
    fn note(&mut self, answer: Option<u8>) -> bool {
        let before = self.weight;
        self.others = if answer.is_some() == before.is_some() { 0 } else { self.others + 1 };
        match answer {
            Some(_) if before.is_some() || self.others >= self.rise => (self.weight, self.others) = (answer, 0),
            None if self.others >= self.fall => (self.weight, self.others) = (None, 0),
            _ => {}
        }
        self.weight != before
    }
}

/// `longsplice tpot farm`: reads the pinned tables of the router.
pub fn list(args: &TpotFarmArgs) -> Outcome {
    let farm = tpot_router().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            "no router of a farm runs in this network namespace: start `longsplice tpot router`".to_owned()
        }
        _ => e.to_string(),
    })?;
    let mut out = io::stdout().lock();
    if args.json {
        let member =
            |m: &longsplice_datapath::TpotMember| json!({ "address": m.address, "share": m.share, "syns": m.syns });
        let members: Vec<_> = farm.members.iter().map(member).collect();
        let verdicts: serde_json::Map<_, _> =
            farm.verdicts.iter().map(|(name, n)| ((*name).into(), (*n).into())).collect();
        writeln!(out, "{}", json!({ "members": members, "verdicts": verdicts }))?;
        return Ok(ExitCode::SUCCESS);
    }
    for m in &farm.members {
        let share = if m.share > 0.0 { format!("{:.1} %", 100.0 * m.share) } else { "down".into() };
        writeln!(out, "member {}  {share}  {} SYNs", m.address, m.syns)?;
    }
    for (name, syns) in &farm.verdicts {
        writeln!(out, "{name:<12} {syns}")?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_rise_and_fall() {
        let mut health = Health::new(2, 3);
        let mut see = |answers: &[Option<u8>]| -> Vec<Option<u8>> {
            answers.iter().map(|answer| (health.note(*answer), health.weight).1).collect()
        };
        assert_eq!(see(&[None, Some(100), Some(100)]), [None, None, Some(100)], "the first answer was a failure");
        assert_eq!(
            see(&[None, None, Some(50), None, None, None]),
            [Some(100), Some(100), Some(50), Some(50), Some(50), None]
        );
        assert_eq!(see(&[Some(9), None, Some(9), Some(8), Some(7)]), [None, None, None, Some(8), Some(7)]);
        let mut health = Health::new(2, 3);
        assert!(health.note(Some(100)), "up at once after the start");
        assert!(!health.note(Some(100)));
    }

    #[test]
    fn lines_of_agents() {
        for (line, want) in [
            ("75%\n", Some(75)),
            ("up 100%\r\n", Some(100)),
            ("ready,0%", Some(0)),
            ("101%", None),
            ("256%", None),
            ("-1%", None),
            ("75", None),
            ("%", None),
            ("SSH-2.0-OpenSSH_9.2\r\n", None),
            ("", None),
        ] {
            assert_eq!(weight(line), want, "{line:?}");
        }
    }
}

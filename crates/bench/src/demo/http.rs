//! `longsplice-bench demo http`: a client like a browser requests a thousand objects from a site of two servers over a few
//! connections. Long replies are spliced past the proxy.

use super::{Story, stage::Result};
use crate::bench::{
    ends,
    site::{Files, Site, servers},
    variant::Variant,
    venue::OURS,
};
use longsplice::{Ask, Client};
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use serde_json::Value;
use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Number of requests, and of connections: as many as browsers open to a site.
const REQUESTS: usize = 1000;
const CONNECTIONS: usize = 6;
/// Sizes, with the number of requests per hundred; a single request is for [`LARGE`].
const SIZES: [(u64, u32); 7] =
    [(0, 5), (700, 25), (6_000, 30), (40_000, 20), (300_000, 10), (1_500_000, 7), (4_000_000, 3)];
const LARGE: u64 = 100 << 20;
/// The access log, which shows how each request was handled.
const LOG: &str = "access.log";
/// Interval of progress messages.
const TELL: Duration = Duration::from_millis(500);

/// Runs the demo.
pub fn tell(story: &Story, _: &Path) -> Result<()> {
    println!("client 10.77.1.2 ──── longsplice, a site ──┬── server 10.77.2.2\n{:45}└── server 10.77.2.12\n", "");
    let sizes = SIZES.map(|(size, _)| size);
    let files = Files::make(&[&sizes[..], &[LARGE]].concat())?;
    let site = Site::set(Variant::Default, &["--access-log", LOG, "--log-format", "json"], &files)?;
    story.say(&format!("nginx serves files of 0 to {} at two addresses", longsplice::bytes(LARGE)));
    story.say("longsplice run --config FILE: one site, both servers in turn, bodies spliced from 512 KB on");
    story.say(&format!("{REQUESTS} requests over {CONNECTIONS} connections, every byte of every reply compared"));
    let load = Load::start(&site, plan());
    let mut control = site.control(OURS)?;
    while !load.ended() {
        story.pause(TELL)?;
        story.say(&counts(&mut control, &load)?);
    }
    load.join()?;
    // The last connections have ended when their lines are in the log.
    let records = story.wait("the end of the access log", Duration::from_millis(20), || {
        let log = site.read(LOG)?;
        let records = log.lines().map(serde_json::from_str).collect::<std::result::Result<Vec<Value>, _>>();
        Ok(records.ok().filter(|r| r.len() >= REQUESTS))
    })?;
    summary(story, &records)
}

/// All sizes, always in the same order.
fn plan() -> Vec<u64> {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut all: Vec<u64> = (1..REQUESTS).map(|_| pick(rng.random_range(0..100))).collect();
    all.push(LARGE);
    all.shuffle(&mut rng);
    all
}

fn pick(mut percent: u32) -> u64 {
    for (size, share) in SIZES {
        if percent < share {
            return size;
        }
        percent -= share;
    }
    0
}

/// The clients.
struct Load {
    clients: Vec<JoinHandle<io::Result<()>>>,
    replies: Arc<AtomicUsize>,
    bytes: Arc<AtomicU64>,
}

impl Load {
    fn start(site: &Site, plan: Vec<u64>) -> Load {
        let (plan, next) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)));
        let (replies, bytes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
        let client = |number| {
            let (to, plan, next) = (site.address(number), plan.clone(), next.clone());
            let (replies, bytes) = (replies.clone(), bytes.clone());
            site.lab.client.spawn(move || {
                let mut client = ends::Client::near(to)?;
                while let Some(size) = plan.get(next.fetch_add(1, Relaxed)) {
                    client.get(*size)?;
                    replies.fetch_add(1, Relaxed);
                    bytes.fetch_add(*size, Relaxed);
                }
                Ok(())
            })
        };
        Load { clients: (0..CONNECTIONS).map(client).collect(), replies, bytes }
    }

    fn ended(&self) -> bool {
        self.clients.iter().all(JoinHandle::is_finished)
    }

    fn join(self) -> Result<()> {
        for client in self.clients {
            client.join().map_err(|_| "a client panicked")??;
        }
        Ok(())
    }
}

fn counts(control: &mut Client, load: &Load) -> Result<String> {
    let counters = control.ask(Ask::Counters)?;
    let count = |name: &str| counters["proxy"][name].as_u64().unwrap_or(0);
    let (copied, spliced) = (count("replies_copied"), count("replies_spliced"));
    let now = longsplice::flows(control)?.iter().filter(|row| row.state == "spliced").count();
    Ok(format!(
        "{:4} replies, {:>8}: {spliced:3} spliced and taken back, {now} spliced now, {copied:3} copied",
        load.replies.load(Relaxed),
        longsplice::bytes(load.bytes.load(Relaxed))
    ))
}

fn summary(story: &Story, records: &[Value]) -> Result<()> {
    let sum = |key: &str| records.iter().filter_map(|r| r[key].as_u64()).sum::<u64>();
    let (all, spliced) = (sum("bytes_down"), sum("spliced_down"));
    let splices = records.iter().filter(|r| r["spliced_down"].as_u64() > Some(0)).count();
    let whole = records.iter().filter(|r| r["how"] == "closed" && r["status"] == 200).count();
    let of = |server: &str| records.iter().filter(|r| r["server"] == server).count();
    let [a, b] = servers().map(|server| of(&server.to_string()));
    story.say(&format!("all {whole} replies are what was asked for; {a} came from one server and {b} from the other"));
    story.say(&format!("{splices} splices, and as many ways back: the same connections carried the next request"));
    story.say(&format!(
        "{} of {} went past the proxy ({:.0} %)",
        longsplice::bytes(spliced),
        longsplice::bytes(all),
        spliced as f64 / all as f64 * 100.0
    ));
    if whole != REQUESTS || records.len() != REQUESTS || a == 0 || b == 0 {
        return Err(format!("{whole} of {} lines of the access log tell of a whole reply", records.len()).into());
    }
    if splices == 0 || spliced < LARGE / 2 {
        return Err("what is long should have been spliced: see `longsplice doctor`".into());
    }
    Ok(())
}

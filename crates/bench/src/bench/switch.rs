//! Times of the calls of a switch: freeze, drain, commit, unsplice, with the data path in this process. The bench itself is
//! the proxy of one connection ([`Driver`]).

use super::{
    Bench, Result, bulk,
    driver::{Driver, Times},
    machine::Watch,
    network::{self, PATIENCE, Packets, Pins},
    ratio, release,
    results::{Case, Figure, Line, Results, Run, Section},
    segment,
    variant::Variant,
    venue,
};
use longsplice_engine::{DatapathOptions, Leg, Pair, Splicer};
use longsplice_lab::Lab;
use std::{
    io::Write,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Maximum number of splices, and of unsplices.
const CYCLES: usize = 2000;
/// Maximum duration for each kind of connection, in lengths of a transfer.
const SHARE: f64 = 8.0;

/// The state of a connection that is switched, as its row names it: with no data, with a server that sends at full speed, and
/// with no data and sockets that are closed and recreated.
const IDLE: &str = "idle";
const BUSY: &str = "busy";
const RELEASED: &str = "idle, released";

/// Measures idle, busy and released connections, and derives when a switch pays.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    for row in [IDLE, BUSY, RELEASED] {
        let lab = network::lab(Packets::Large, false)?;
        let _pins = Pins::at(&lab.forwarder)?;
        // Return an error that can be sent between threads.
        let rounds = lab.forwarder.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|e| e.to_string())?;
            runtime.block_on(cycles(bench, &lab, row)).map_err(|e| e.to_string())
        })?;
        bench.say(&format!("switching, {row}: {} cycles", rounds.len()));
        bench.results().add(Case { section: Section::Switch, row: row.to_owned(), rounds });
    }
    let mut results = bench.results();
    let pays = pays(&results);
    results.lines.extend(pays);
    Ok(())
}

/// Numbers of segments that save as much time as a switch takes: its calls by themselves, on an idle connection, since on a busy
/// one the hosts determine the time of the drain; and all that splicing costs a short connection.
fn pays(r: &Results) -> Vec<Line> {
    use Figure::{Commit, Drain, Freeze, Recreate, Release, Unsplice};
    let sum = |row, figures: &[Figure]| {
        let line = r.line(Section::Switch, row, Variant::Spliced)?;
        figures.iter().map(|figure| line.get(*figure)).sum::<Option<f64>>()
    };
    let cpu = |v| r.line(Section::Short, "1 byte", v)?.get(Figure::Cpu);
    let all = cpu(Variant::Spliced).zip(cpu(Variant::Copy)).map(|(spliced, copy)| spliced - copy);
    let saved = segment::BYTES.map(|bytes| {
        Some(ratio::cost(r, bytes, Variant::Copy)? - ratio::cost(r, bytes, Variant::Spliced)?).filter(|us| *us > 0.0)
    });
    let costs = [
        ("splice", sum(IDLE, &[Freeze, Drain, Commit])),
        ("splice and unsplice", sum(IDLE, &[Freeze, Drain, Commit, Unsplice])),
        ("splice and release", sum(RELEASED, &[Freeze, Drain, Commit, Release])),
        ("splice, release and recreate", sum(RELEASED, &[Freeze, Drain, Commit, Release, Recreate])),
        ("all that a splice costs", all.filter(|micros| *micros > 0.0)),
    ];
    let line = |(row, micros): (&str, Option<f64>)| {
        let [small, full] = saved.map(|saved| Some(micros? / saved?));
        let figures = [(Figure::Value, micros), (Figure::Small, small), (Figure::Full, full)];
        micros.map(|_| Line::of(Section::Pays, row, Variant::Spliced, figures))
    };
    costs.into_iter().filter_map(line).collect()
}

async fn cycles(bench: &Bench<'_>, lab: &Lab, row: &str) -> Result<Vec<Vec<Run>>> {
    let splicer = Splicer::open(&DatapathOptions { max_flows: 1024, ..DatapathOptions::default() }.into())?;
    let stop = Arc::new(AtomicBool::new(false));
    let done = on_splicer(bench, &splicer, lab, row, &stop).await;
    stop.store(true, Relaxed);
    splicer.close()?;
    done
}

/// Switches until there are enough cycles, or the time is over. Each cycle is a round.
async fn on_splicer(
    bench: &Bench<'_>,
    splicer: &Splicer,
    lab: &Lab,
    row: &str,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<Vec<Run>>> {
    let busy = row == BUSY;
    let (legs, _hosts) = connect(splicer, lab, busy, stop).await?;
    let mut driver = Driver::new(splicer.datapath().ok_or("no data path")?, legs);
    let late = "a switch did not come to its end";
    let (mut parked, mut released) = (None, None);
    if row == RELEASED {
        released = Some(timeout(PATIENCE, release::Flow::first(driver)).await.map_err(|_| late)??);
    } else {
        parked = Some(&mut driver);
    }
    let mut rounds = Vec::new();
    let watch = Watch::start();
    let end = Instant::now() + Duration::from_secs_f64(bench.seconds * SHARE);
    while rounds.len() < CYCLES && Instant::now() < end {
        bench.check()?;
        let mut times = Times::default();
        let cycle = async {
            match (&mut parked, &mut released) {
                (Some(driver), _) => driver.cycle(&mut times, busy).await,
                (_, Some(flow)) => flow.cycle(&mut times).await,
                _ => Ok(()),
            }
        };
        timeout(PATIENCE, cycle).await.map_err(|_| late)??;
        if times.0.contains_key(&Figure::Commit) {
            rounds.push(vec![Run::of(Variant::Spliced, times.0)]);
        }
    }
    // It takes so long that it is not measured again.
    let first = rounds.first_mut().ok_or("no switch in the time there was")?;
    first[0].notes.extend(watch.stop().disturbed);
    Ok(rounds)
}

/// Opens both legs with hosts at their ends, and passes one byte in each direction. If `busy`, the server sends at full speed
/// until it is told to stop. Returns the hosts' ends otherwise, to be held.
async fn connect(
    splicer: &Splicer,
    lab: &Lab,
    busy: bool,
    stop: &Arc<AtomicBool>,
) -> Result<(Pair<Leg>, Vec<TcpStream>)> {
    let at_server = lab.server.run(|| network::listen(network::server()))?;
    let listener = splicer.listen(network::proxy()).await?;
    let dialling = lab.client.spawn(|| venue::connect(network::proxy()));
    let mut client = timeout(PATIENCE, listener.accept()).await??;
    let mut at_client = dialling.join().map_err(|_| "the client panicked")??;
    let mut server = timeout(PATIENCE, splicer.connect(network::server(), &client)).await??;
    let mut at_server = network::accept(&at_server, PATIENCE)?.ok_or("no connection arrives at the server")?;
    venue::limit(&at_server)?;
    at_client.write_all(b"?")?;
    at_server.write_all(b"!")?;
    let mut byte = [0];
    timeout(PATIENCE, client.read_exact(&mut byte)).await??;
    server.write_all(&byte).await?;
    timeout(PATIENCE, server.read_exact(&mut byte)).await??;
    client.write_all(&byte).await?;
    if !busy {
        return Ok((Pair { client, server }, vec![at_client, at_server]));
    }
    let stop = stop.clone();
    thread::spawn(move || bulk::send(at_server, &stop, Duration::ZERO));
    thread::spawn(move || bulk::receive(at_client, &AtomicU64::new(0)));
    Ok((Pair { client, server }, Vec::new()))
}

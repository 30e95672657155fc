//! Times of the calls of a switch: freeze, drain, commit, unsplice, with the data path in this process. The bench itself is
//! the proxy of one connection ([`Driver`]).

use super::{
    Bench, Result,
    driver::{BLOCK, DWELL, Driver, Times},
    machine::Watch,
    network::{self, PATIENCE, Packets, Pins},
    release, report,
    results::{Figure, Line},
    stats::Spread,
    subject::{Connection, Subject},
    variant::Variant,
};
use longsplice_engine::{DatapathOptions, Leg, Pair, Splicer};
use longsplice_lab::Lab;
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
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

/// Measures idle, busy and released connections.
pub fn measure(bench: &Bench) -> Result<Vec<Line>> {
    let all = [Connection::Idle, Connection::Busy, Connection::Released];
    let bar = bench.bar("switch", all.len());
    let cases = all.into_iter().map(|connection| {
        bench.check()?;
        let line = case(bench, connection)?;
        let micros: Vec<String> = report::costs(&line).iter().map(|(what, n)| format!("{what} {n:.1}")).collect();
        let cycles = line.get(Figure::Amount).unwrap_or_default();
        bench.say(&format!("{}: {cycles} cycles, us: {}", line.subject.title(), micros.join(", ")));
        bar.inc(1);
        Ok(line)
    });
    let cases = cases.collect();
    bar.finish_and_clear();
    cases
}

fn case(bench: &Bench, connection: Connection) -> Result<Line> {
    let lab = network::lab(Packets::Large, false)?;
    let _pins = Pins::at(&lab.forwarder)?;
    let length = Duration::from_secs_f64(bench.seconds * SHARE);
    // Return an error that can be sent between threads.
    let case = lab.forwarder.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        runtime.block_on(cycles(bench, &lab, connection, length)).map_err(|e| e.to_string())
    });
    Ok(case?)
}

async fn cycles(bench: &Bench, lab: &Lab, connection: Connection, length: Duration) -> Result<Line> {
    let splicer = Splicer::open(&DatapathOptions { max_flows: 1024, ..DatapathOptions::default() }.into())?;
    let hosts = Hosts::default();
    let done = on_splicer(bench, &splicer, lab, &hosts, connection, length).await;
    hosts.stop.store(true, Relaxed);
    splicer.close()?;
    done
}

async fn on_splicer(
    bench: &Bench,
    splicer: &Splicer,
    lab: &Lab,
    hosts: &Hosts,
    connection: Connection,
    length: Duration,
) -> Result<Line> {
    let datapath = splicer.datapath().ok_or("no data path")?;
    let busy = connection == Connection::Busy;
    let mut driver = Driver::new(datapath, connect(splicer, lab, hosts, busy).await?);
    let mut times = Times::default();
    let watch = Watch::start();
    let end = Instant::now() + length;
    let late = "a switch did not come to its end";
    if connection == Connection::Released {
        let mut flow = timeout(PATIENCE, release::Flow::first(driver)).await.map_err(|_| late)??;
        while times.cycles() < CYCLES && Instant::now() < end {
            bench.check()?;
            timeout(PATIENCE, flow.cycle(&mut times)).await.map_err(|_| late)??;
        }
    } else {
        while times.cycles() < CYCLES && Instant::now() < end {
            bench.check()?;
            timeout(PATIENCE, driver.cycle(&mut times, busy)).await.map_err(|_| late)??;
        }
    }
    let cost = watch.stop();
    let cycles = times.cycles();
    if cycles == 0 {
        return Err("no switch in the time there was".into());
    }
    let spreads = times.0.into_iter().map(|(figure, values)| (figure, Spread::of(values)));
    let spreads = spreads.chain([(Figure::Amount, Spread::of([cycles as f64]))]);
    let notes = cost.disturbed.map(|why| (why, 1)).into_iter().collect();
    Ok(Line { notes, ..Line::of(Subject::Switch { connection }, Variant::Spliced, spreads) })
}

/// Threads that play client and server until told to stop.
#[derive(Default)]
struct Hosts {
    stop: Arc<AtomicBool>,
}

impl Hosts {
    /// The server. If `busy`, it sends at full speed.
    fn server(&self, listener: TcpListener, busy: bool) {
        let stop = self.stop.clone();
        thread::spawn(move || -> io::Result<()> {
            let Some(mut stream) = network::accept(&listener, PATIENCE)? else { return Ok(()) };
            stream.set_write_timeout(Some(PATIENCE))?;
            let block = vec![0x55; BLOCK];
            stream.write_all(&block[..1])?;
            while !stop.load(Relaxed) {
                if busy { stream.write_all(&block)? } else { thread::sleep(DWELL * 20) }
            }
            Ok(())
        });
    }

    /// The client: sends a byte, and reads everything.
    fn client(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE / 4))?;
        stream.write_all(b"?")?;
        let stop = self.stop.clone();
        thread::spawn(move || {
            let mut block = vec![0; BLOCK];
            while !stop.load(Relaxed) {
                match stream.read(&mut block) {
                    Ok(1..) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    _ => return,
                }
            }
        });
        Ok(())
    }
}

/// Opens both legs with hosts at their ends, and passes one byte in each direction.
async fn connect(splicer: &Splicer, lab: &Lab, hosts: &Hosts, busy: bool) -> Result<Pair<Leg>> {
    let at_server = lab.server.run(|| TcpListener::bind(network::server()))?;
    at_server.set_nonblocking(true)?;
    hosts.server(at_server, busy);
    let listener = splicer.listen(network::proxy()).await?;
    let dialling = lab.client.spawn(|| TcpStream::connect_timeout(&network::proxy(), PATIENCE));
    let mut client = timeout(PATIENCE, listener.accept()).await??;
    hosts.client(dialling.join().map_err(|_| "the client panicked")??)?;
    let mut server = timeout(PATIENCE, splicer.connect(network::server(), &client)).await??;
    let mut byte = [0];
    timeout(PATIENCE, client.read_exact(&mut byte)).await??;
    server.write_all(&byte).await?;
    timeout(PATIENCE, server.read_exact(&mut byte)).await??;
    client.write_all(&byte).await?;
    Ok(Pair { client, server })
}

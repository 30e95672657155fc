//! Checked streams through each kind of listener, and their server.

use super::{
    ftp,
    plan::{HANGS, Kind, Plan},
    traffic::Traffic,
    ways::{ANSWER, FTP, FTP_ROUTED, NAMES, STREAMS, TRANSPARENT, Way},
    web::DISCOURAGED,
};
use longsplice_lab::{
    Family, Lab, Namespace,
    topology::{CLIENT, SERVER},
    traffic::{self, STEP, Script, converse},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Number of streams at a time.
const LASTING: u64 = 22;
const SHORT: u64 = 2;
/// The first of the source ports of short streams. Each client has one of them, and uses it again as soon as its last stream is over.
const AGAIN: u16 = 4000;

/// Starts servers for each address family.
pub fn serve(traffic: &Arc<Traffic>, lab: &Lab) {
    for family in Family::BOTH {
        for port in [STREAMS, NAMES, TRANSPARENT, FTP, FTP_ROUTED] {
            let at = SERVER.port(family, port);
            let listener = lab.server.run(|| traffic::listen(at, &Script::answerer())).expect("the server listens");
            let traffic = traffic.clone();
            // FTP opens connections of its own
            lab.server.spawn(move || match port {
                FTP | FTP_ROUTED => ftp::accept(&traffic, &listener),
                _ => accept(&traffic, &listener, port == NAMES),
            });
        }
    }
}

/// Starts clients that connect repeatedly.
pub fn begin(traffic: &Arc<Traffic>, lab: &Lab, seed: u64) {
    serve(traffic, lab);
    // a host may use a port again at once if it keeps no TIME-WAIT, and some do not
    for host in [&lab.client, &lab.server] {
        host.sysctl("net.ipv4.tcp_max_tw_buckets", "0").expect("sysctl");
    }
    for n in 0..LASTING + SHORT {
        let (traffic, server) = (traffic.clone(), lab.server.clone());
        let mut r = SmallRng::seed_from_u64(seed ^ (n + 1) << 32);
        lab.client.spawn(move || {
            while let Some(_open) = traffic.enter() {
                let way = Way::ALL[r.random_range(0..Way::ALL.len())];
                if let Some(n) = n.checked_sub(LASTING) {
                    one(&traffic, &server, way, Kind::passing(&mut r), Some(AGAIN + n as u16), &mut r);
                } else {
                    one(&traffic, &server, way, Kind::lasting(&mut r), None, &mut r);
                    thread::sleep(Duration::from_millis(r.random_range(10..100)));
                }
            }
        });
    }
}

/// Runs one connection of a client from start to end. `port`: its source port; `None`: any.
pub fn one(traffic: &Arc<Traffic>, server: &Namespace, way: Way, kind: Kind, port: Option<u16>, r: &mut SmallRng) {
    let (seed, ledger, began) = (Plan::seed(kind, r), &traffic.ledger, Instant::now());
    let mut plan = Plan::of(seed).expect("one of ours");
    let [family, to] = [Family::BOTH[r.random_range(0..2)], Family::BOTH[r.random_range(0..2)]];
    plan.opener.local = port.zip(way.family_of_client(family, to)).map(|(port, family)| CLIENT.port(family, port));
    let script = &plan.opener;
    ledger.begin(seed, kind, way);
    match way.open(traffic, server, [family, to], script) {
        Ok((stream, talk)) => {
            ledger.client_done(seed, Ok(converse(stream, script)));
            talk.into_iter().for_each(|talk| talk.end(traffic, began));
        }
        Err(error) => {
            ledger.client_done(seed, Err(error));
            thread::sleep(DISCOURAGED);
        }
    }
}

fn accept(traffic: &Arc<Traffic>, listener: &TcpListener, greets: bool) {
    for stream in listener.incoming().map_while(Result::ok) {
        let traffic = traffic.clone();
        thread::spawn(move || answer(&traffic, stream, greets));
    }
}

/// Reads a ClientHello, and answers.
fn greet(mut stream: &TcpStream) -> io::Result<()> {
    let mut head = [0; 5];
    stream.set_read_timeout(Some(HANGS))?;
    stream.read_exact(&mut head)?;
    stream.read_exact(&mut vec![0; u16::from_be_bytes([head[3], head[4]]).into()])?;
    stream.write_all(&ANSWER)
}

/// Serves one connection. `greets`: a ClientHello comes first.
pub fn answer(traffic: &Traffic, stream: TcpStream, greets: bool) {
    let ledger = &traffic.ledger;
    let _open = traffic.count();
    let began = Instant::now();
    match if greets { greet(&stream) } else { Ok(()) } {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            return ledger.silent(began, format!("no ClientHello, from {:?}", stream.peer_addr()));
        }
        Err(_) => return, // ended before it began
        Ok(()) => {}
    }
    let seed = match first_word(&stream) {
        Ok(Some(seed)) => seed,
        Ok(None) => return, // ended before it began
        Err(why) => return ledger.silent(began, format!("{why}, from {:?}", stream.peer_addr())),
    };
    if let Some(plan) = ledger.arrived(seed) {
        ledger.server_done(seed, converse(stream, &plan.answerer));
    }
}

/// Peeks at the first word of a stream.
fn first_word(stream: &TcpStream) -> Result<Option<u64>, String> {
    let (began, mut word) = (Instant::now(), [0; 8]);
    if stream.set_read_timeout(Some(STEP)).is_err() {
        return Ok(None);
    }
    let mut seen = 0;
    while began.elapsed() < HANGS {
        match stream.peek(&mut word) {
            Ok(8) => return Ok(Some(u64::from_le_bytes(word))),
            // an end of stream after a part of the word looks no different
            Ok(n) if n > seen => seen = n,
            Ok(0) => return Ok(None),
            Ok(_) => thread::sleep(STEP),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Ok(None),
        }
    }
    if seen > 0 { Ok(None) } else { Err("a connection that says nothing".into()) }
}

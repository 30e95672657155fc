//! Datagrams through UDP ASSOCIATE to a server that sends them back. They may be lost, but never be altered, nor come to another
//! association, nor come twice unless the network does that.

use super::{
    plan::HANGS,
    traffic::Traffic,
    ways::SOCKS,
    web::{DISCOURAGED, failed},
};
use longsplice_lab::{
    Family, Lab, pattern,
    topology::{FORWARDER_TO_CLIENT, SERVER},
    traffic::{self, STEP, Script},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::{
    collections::{HashMap, HashSet},
    io::{self, ErrorKind, Read},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The server's port.
const ECHO: u16 = 7010;
/// Number of associations at a time.
const ASSOCIATIONS: u64 = 3;
/// SOCKS5's command.
const UDP_ASSOCIATE: u8 = 3;
/// An association to which nothing has come back for this time does not work.
const SILENT: Duration = Duration::from_secs(10);
/// The longest data of a datagram: several IP fragments.
const LONGEST: usize = 9000;

pub fn begin(traffic: &Arc<Traffic>, lab: &Lab, seed: u64) {
    for family in Family::BOTH {
        let socket = lab.server.run(|| UdpSocket::bind(SERVER.port(family, ECHO))).expect("the server has a socket");
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            loop {
                // the network may be away, for the answer as well
                if let Ok((n, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..n], from);
                }
            }
        });
    }
    for n in 0..ASSOCIATIONS {
        let traffic = traffic.clone();
        let mut r = SmallRng::seed_from_u64(seed ^ (n + 1) << 40);
        lab.client.spawn(move || {
            while let Some(_open) = traffic.enter() {
                let began = Instant::now();
                if let Err(error) = associate(&traffic, began, &mut r) {
                    failed(&traffic, began, "datagrams", &error);
                    thread::sleep(DISCOURAGED);
                }
            }
        });
    }
}

/// One association from start to end.
struct Association {
    /// It exists as long as this connection.
    control: TcpStream,
    relay: SocketAddr,
    socket: UdpSocket,
    /// What is in front of the data of each datagram, with a number.
    id: u64,
    /// What was sent, by number: where to, and how much. And which of these came back.
    sent: HashMap<u64, (SocketAddr, usize)>,
    back: HashSet<u64>,
    /// When the last one came back.
    heard: Instant,
}

fn associate(traffic: &Traffic, began: Instant, r: &mut SmallRng) -> io::Result<()> {
    let family = Family::BOTH[r.random_range(0..2)];
    let (script, unknown) = (Script { deadline: HANGS, ..Script::opener(0) }, SocketAddr::from(([0, 0, 0, 0], 0)));
    let (control, relay) =
        traffic::socks5_ask(FORWARDER_TO_CLIENT.port(family, SOCKS), UDP_ASSOCIATE, unknown, &script)?;
    control.set_nonblocking(true)?;
    let socket = UdpSocket::bind((control.local_addr()?.ip(), 0))?;
    socket.set_read_timeout(Some(STEP))?;
    let (sent, back, heard) = (HashMap::new(), HashSet::new(), Instant::now());
    let mut all = Association { control, relay, socket, id: r.random(), sent, back, heard };
    let end = Instant::now() + Duration::from_secs(r.random_range(2..20));
    let mut went_well = Ok(());
    while went_well.is_ok() && Instant::now() < end && traffic.is_open() {
        for _ in 0..r.random_range(1..30) {
            all.send(r);
        }
        thread::sleep(Duration::from_millis(r.random_range(0..100)));
        went_well = all.hear(traffic, began);
    }
    traffic.ledger.datagrams(all.back.len(), all.sent.len() - all.back.len());
    went_well
}

impl Association {
    fn send(&mut self, r: &mut SmallRng) {
        let to = SERVER.port(Family::BOTH[r.random_range(0..2)], ECHO);
        let length = if r.random_ratio(1, 8) { r.random_range(0..LONGEST) } else { r.random_range(0..1400) };
        let number = self.sent.len() as u64;
        self.sent.insert(number, (to, length));
        let _ = self.socket.send_to(&self.datagram(number, (to, length)), self.relay); // the network may be away
    }

    fn datagram(&self, number: u64, (to, length): (SocketAddr, usize)) -> Vec<u8> {
        let mut data = vec![0; length];
        pattern::fill(self.id ^ number, 0, &mut data);
        [&[0, 0, 0][..], &traffic::socks5_address(to), &self.id.to_be_bytes(), &number.to_be_bytes(), &data].concat()
    }

    /// Takes what has come back, and checks that the association still exists.
    fn hear(&mut self, traffic: &Traffic, began: Instant) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        while let Ok((n, from)) = self.socket.recv_from(&mut buffer) {
            self.heard = Instant::now();
            let got = &buffer[..n];
            // behind an IPv4 address or an IPv6 address
            let at = if got.get(3) == Some(&1) { 10 } else { 22 };
            let word = |at: usize| got.get(at..at + 8).and_then(|word| word.try_into().ok()).map(u64::from_be_bytes);
            let number = word(at).filter(|id| *id == self.id).and_then(|_| word(at + 8));
            let whole = number.and_then(|number| Some((number, *self.sent.get(&number)?)));
            match whole {
                Some((number, sent)) if from == self.relay && got == self.datagram(number, sent) => {
                    if !self.back.insert(number) {
                        traffic.ledger.twice(began, format!("datagram {number} of {:x} came twice", self.id));
                    }
                }
                _ => traffic.ledger.fail(format!("a wrong datagram: {n} bytes from {from}, {:?}", &got[..n.min(60)])),
            }
        }
        match self.control.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(n) => return Err(io::Error::other(format!("the association ended, with {n} bytes"))),
        }
        if self.heard.elapsed() > SILENT {
            return Err(ErrorKind::HostUnreachable.into());
        }
        Ok(())
    }
}

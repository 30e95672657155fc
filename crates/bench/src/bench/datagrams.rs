//! Cost of a datagram through UDP ASSOCIATE: round trips of a number of datagrams at a time, with everything on one CPU, as for
//! [`segment`]. More than one on the way lets a relay take them in batches.

use super::{
    Bench, Result,
    machine::Watch,
    network::{PATIENCE, PORT, Packets, proxy, server},
    results::{Run, Section, plural},
    segment::on_one_cpu,
    variant::Variant,
    venue::{Near, connect},
};
use longsplice_lab::topology;
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

/// A question of DNS, and a packet of QUIC.
const BYTES: [u64; 2] = [64, 1200];
/// Datagrams on the way. As many as fit the queue of a socket, whatever their size.
const WINDOWS: [u64; 2] = [1, 32];
const VARIANTS: [Variant; 4] = [Variant::Direct, Variant::IpForward, Variant::CopySocks, Variant::Dante];
/// Time until caches are warm.
const WARM_UP: Duration = Duration::from_millis(100);
/// A datagram that is away for so long is lost.
const LOST: Duration = Duration::from_millis(200);

/// Measures both sizes, alone and in numbers.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    on_one_cpu(|| {
        let venues = bench.venues(&VARIANTS, |v| Near::set(v, Packets::Large))?;
        let case = |(bytes, window): (u64, u64)| {
            let row = format!("{}, {window} on the way", plural(bytes, "byte"));
            let run = |v| run(venues.of(v)?, bytes as usize, window, bench.seconds);
            bench.rounds(Section::Datagrams, &row, &VARIANTS, run)
        };
        BYTES.iter().flat_map(|bytes| WINDOWS.map(|window| (*bytes, window))).try_for_each(case)
    })
}

fn run(venue: &Near, bytes: usize, window: u64, seconds: f64) -> Result<Run> {
    let (host, at) = match venue.variant {
        Variant::Direct => (&venue.lab.forwarder, proxy()),
        _ => (&venue.lab.server, server()),
    };
    let echo = host.run(|| UdpSocket::bind(at))?;
    echo.set_read_timeout(Some(PATIENCE))?;
    let echo = thread::spawn(move || answer(&echo));
    let (control, client, header) = venue.lab.client.run(|| open(venue.variant, at))?;
    let header_and_data = [&header[..], &vec![7; bytes]].concat();
    let measured = (|| {
        pass(&client, &header_and_data, window, WARM_UP)?;
        let watch = Watch::start();
        let count = pass(&client, &header_and_data, window, Duration::from_secs_f64(seconds))?;
        Ok::<_, io::Error>((2 * count, watch.stop()))
    })();
    client.send(&header)?; // which ends the other one
    let _ = echo.join();
    drop(control);
    let (count, cost) = measured?;
    Ok(Run::each(venue.variant, cost, count.max(1) as f64))
}

/// Opens a socket towards a host, or towards a relay, which wants a header. Its association lasts as long as the connection.
fn open(variant: Variant, to: SocketAddr) -> io::Result<(Option<TcpStream>, UdpSocket, Vec<u8>)> {
    let client = UdpSocket::bind((topology::CLIENT.v4, 0))?;
    client.set_read_timeout(Some(LOST))?;
    if !variant.socks() {
        client.connect(to)?;
        return Ok((None, client, Vec::new()));
    }
    let mut control = connect(proxy())?;
    control.write_all(&[5, 1, 0])?;
    control.read_exact(&mut [0; 2])?;
    let port = client.local_addr()?.port().to_be_bytes();
    control.write_all(&[&[5, 3, 0, 1], &topology::CLIENT.v4.octets()[..], &port].concat())?;
    let mut relay = [0; 10];
    control.read_exact(&mut relay)?;
    if relay[1] != 0 {
        return Err(io::Error::other(format!("SOCKS answers {}", relay[1])));
    }
    client.connect((proxy().ip(), u16::from_be_bytes([relay[8], relay[9]])))?;
    let header = [&[0, 0, 0, 1], &topology::SERVER.v4.octets()[..], &PORT.to_be_bytes()].concat();
    Ok((Some(control), client, header))
}

/// Sends so many datagrams at a time, and waits for all of them. Returns how many have come back.
fn pass(client: &UdpSocket, datagram: &[u8], window: u64, length: Duration) -> io::Result<u64> {
    let end = Instant::now() + length.min(PATIENCE * 6);
    let (mut block, mut count) = (vec![0; datagram.len() + 1], 0);
    while Instant::now() < end {
        for _ in 0..window {
            client.send(datagram)?;
        }
        for _ in 0..window {
            match client.recv(&mut block) {
                Ok(n) if n == datagram.len() => count += 1,
                Ok(n) => return Err(io::Error::other(format!("{n} bytes come back"))),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
    }
    Ok(count)
}

/// Answers until an empty datagram comes.
fn answer(at: &UdpSocket) -> io::Result<()> {
    let mut block = [0; 2048];
    loop {
        let (n, from) = at.recv_from(&mut block)?;
        if n == 0 {
            return Ok(());
        }
        at.send_to(&block[..n], from)?;
    }
}

//! FTP whose data connections carry checked streams, in both directions at a time: a client, and its server.

use super::{
    plan::HANGS,
    streams,
    traffic::Traffic,
    web::{failed, keep_alive},
};
use longsplice_lab::traffic::{self, Script};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use std::{
    io::{self, BufRead, BufReader, ErrorKind, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// How long a server waits for a data connection: the proxy has made it before it passes the command on.
const AWAITED: Duration = Duration::from_secs(20);

/// A client's control connection.
pub struct Talk(BufReader<TcpStream>);

/// Logs in at a server, and opens a data connection; `is_active`: the client awaits it. `proxy`: or the server, for a client that
/// takes the proxy for it.
pub fn open(proxy: SocketAddr, user: &str, is_active: bool, script: &Script) -> io::Result<(TcpStream, Talk)> {
    // hosts have several addresses, and data connections have to come from that of the control connection
    let local = script.local.map(|at| SocketAddr::new(at.ip(), 0));
    let stream = traffic::connect(proxy, &Script { local, ..script.clone() })?;
    stream.set_read_timeout(Some(script.deadline))?;
    // it waits for the end of a transfer, without anything to send
    keep_alive(&stream)?;
    let own = stream.local_addr()?.ip();
    let mut talk = Talk(BufReader::new(stream));
    talk.hear(&[220])?;
    talk.ask(&format!("USER {user}"), 331)?;
    talk.ask("PASS secret", 230)?;
    // either one, whatever kind the stream is of
    let command = if script.seed.is_some_and(|seed| seed & 8 == 0) { "RETR file" } else { "STOR file" };
    if is_active {
        let door = TcpListener::bind((own, 0))?;
        talk.ask(&here(door.local_addr()?), 200)?;
        talk.ask(command, 150)?;
        return Ok((accept_within(&door, script.deadline)?, talk));
    }
    let to = if own.is_ipv4() { port_of(&talk.ask("PASV", 227)?, ',') } else { port_of(&talk.ask("EPSV", 229)?, '|') };
    let local = script.local.or(Some(SocketAddr::new(own, 0)));
    let data = traffic::connect(SocketAddr::new(proxy.ip(), to?), &Script { local, ..script.clone() })?;
    talk.ask(command, 150)?;
    Ok((data, talk))
}

impl Talk {
    fn ask(&mut self, command: &str, code: u16) -> io::Result<String> {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        self.hear(&[code])
    }

    /// Reads a reply of one line, which has to have one of these codes.
    fn hear(&mut self, codes: &[u16]) -> io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let code = line.split(' ').next().and_then(|code| code.parse().ok());
        if code.is_some_and(|code| codes.contains(&code)) { Ok(line) } else { Err(io::Error::other(line)) }
    }

    /// Hears how the transfer has ended, and ends the session, which began at `began`. The data need no control connection:
    /// they may have outlived it.
    pub fn end(mut self, traffic: &Traffic, began: Instant) {
        // the server may wait for as long
        let patience = self.0.get_ref().set_read_timeout(Some(2 * HANGS));
        // 425: a client that resets its data connection may do so before the server has its own. The stream is judged anyway.
        let ended = patience.and_then(|()| self.hear(&[226, 425, 426])).and_then(|_| self.ask("QUIT", 221));
        if let Err(error) = ended {
            let error = if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error };
            failed(traffic, began, &format!("the end of FTP from {:?}", self.0.get_ref().local_addr()), &error);
        }
    }
}

/// The command that names an address for data connections: PORT or EPRT.
fn here(at: SocketAddr) -> String {
    let [high, low] = at.port().to_be_bytes();
    match at.ip() {
        IpAddr::V4(ip) => format!("PORT {},{high},{low}", ip.to_string().replace('.', ",")),
        IpAddr::V6(ip) => format!("EPRT |2|{ip}|{}|", at.port()),
    }
}

/// The port in a PORT, EPRT, or an answer to PASV or EPSV.
fn port_of(text: &str, separator: char) -> io::Result<u16> {
    let number = |part: &str| part.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u16>().ok();
    let mut parts = text.trim_end().trim_end_matches(['|', ')', '.']).rsplit(separator);
    let last = parts.next().and_then(number);
    let port = if separator == '|' { last } else { parts.next().and_then(number).zip(last).map(|(h, l)| h << 8 | l) };
    port.ok_or_else(|| io::Error::other(format!("no port in {text:?}")))
}

fn accept_within(door: &TcpListener, limit: Duration) -> io::Result<TcpStream> {
    setsockopt(door, sockopt::ReceiveTimeout, &TimeVal::new(limit.as_secs() as i64, 0))?; // limits accept(), too
    door.accept().map(|(stream, _)| stream)
}

/// Serves sessions. Call it in the server's namespace.
pub fn accept(traffic: &Arc<Traffic>, listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        let traffic = traffic.clone();
        // what becomes of a session matters to its client alone
        thread::spawn(move || serve(&traffic, &stream));
    }
}

/// Where the next data connection comes from.
enum Data {
    Awaited(TcpListener),
    Opened(SocketAddr),
}

fn serve(traffic: &Traffic, mut stream: &TcpStream) -> io::Result<()> {
    let _open = traffic.count();
    keep_alive(stream)?;
    let (own, peer) = (stream.local_addr()?.ip(), stream.peer_addr()?.ip());
    let (mut lines, mut data) = (BufReader::new(stream), None);
    stream.write_all(b"220 soak\r\n")?;
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let reply = match line.split([' ', '\r']).next().unwrap_or_default() {
            "USER" => "331 Password?".into(),
            "PASS" => "230 Welcome".into(),
            verb @ ("PASV" | "EPSV") => {
                let door = TcpListener::bind((own, 0))?;
                let at = door.local_addr()?;
                data = Some(Data::Awaited(door));
                match (verb, at) {
                    ("PASV", SocketAddr::V4(_)) => format!("227 Here ({})", &here(at)[5..]),
                    _ => format!("229 Here (|||{}|)", at.port()),
                }
            }
            verb @ ("PORT" | "EPRT") => {
                let port = port_of(&line, if verb == "PORT" { ',' } else { '|' })?;
                data = Some(Data::Opened(SocketAddr::new(peer, port)));
                "200 Noted".into()
            }
            "STOR" | "RETR" => {
                stream.write_all(b"150 Now\r\n")?;
                let opened = match data.take() {
                    Some(Data::Awaited(door)) => accept_within(&door, AWAITED),
                    Some(Data::Opened(to)) => {
                        let local = Some(SocketAddr::new(own, 0));
                        traffic::connect(to, &Script { local, deadline: AWAITED, ..Script::answerer() })
                    }
                    None => Err(io::Error::other("no data connection")),
                };
                match opened {
                    Ok(data) => {
                        streams::answer(traffic, data, false);
                        "226 Done".into()
                    }
                    Err(error) => format!("425 {error}"),
                }
            }
            "QUIT" => "221 Bye".into(),
            _ => "502 What?".into(),
        };
        stream.write_all(format!("{reply}\r\n").as_bytes())?;
    }
}

//! Conditions on first bytes through the real program: what fits is spliced behind them, what does not is reset. Needs root and
//! eBPF, and fails without.

use crate::running::{AT_ONCE, Setting, eventually, listener, round_trip};
use longsplice_lab::{Family, topology};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
};

const PORT: u16 = 7000;
const PROTOCOLS: [&str; 3] = ["plug", "socks5", "login"];

/// What a client says to the proxy before it speaks to the server, and how the proxy's answer ends.
fn conversation(protocol: &str, server: SocketAddr) -> (Vec<u8>, &'static [u8]) {
    match (protocol, server) {
        ("plug", _) => (Vec::new(), b""),
        ("login", _) => (b"box\r\n".to_vec(), b"connected to box\r\n"),
        (_, SocketAddr::V4(at)) => {
            let port = at.port().to_be_bytes();
            ([&[5, 1, 0, 5, 1, 0, 1][..], &at.ip().octets(), &port].concat(), b"")
        }
        (_, SocketAddr::V6(at)) => {
            let port = at.port().to_be_bytes();
            ([&[5, 1, 0, 5, 1, 0, 4][..], &at.ip().octets(), &port].concat(), b"")
        }
    }
}

fn run(family: Family) {
    let server = topology::SERVER.port(family, PORT);
    let at = |n: usize| topology::FORWARDER_TO_CLIENT.port(family, PORT + n as u16);
    let text: String = PROTOCOLS
        .into_iter()
        .enumerate()
        .map(|(n, protocol)| {
            let more = match protocol {
                "plug" => format!("target = \"{server}\"\n"),
                "login" => format!("destination = [{{ name = \"box\", target = \"{server}\" }}]\n"),
                _ => String::new(),
            };
            let filter = "filter.client = { must = '^SSH-2', never = 'evil', first = 16 }";
            listener(protocol, &at(n).to_string(), &format!("{more}{AT_ONCE}\n{filter}"))
        })
        .collect();
    let setting = Setting::new(&format!("log.format = \"json\"\n{text}"));
    setting.echo(server);
    let mut program = setting.start();
    let open = |n: usize| -> TcpStream {
        let mut stream = setting.connect(at(n));
        let (says, end) = conversation(PROTOCOLS[n], server);
        stream.write_all(&says).unwrap();
        let mut answer = vec![0; if PROTOCOLS[n] == "socks5" { if family == Family::V4 { 12 } else { 24 } } else { 0 }];
        stream.read_exact(&mut answer).unwrap();
        while !answer.ends_with(end) {
            answer.push(0);
            let last = answer.len() - 1;
            stream.read_exact(&mut answer[last..]).unwrap();
        }
        stream
    };
    for (n, protocol) in PROTOCOLS.into_iter().enumerate() {
        let mut good = open(n);
        round_trip(&mut good, b"SSH-2.0-a");
        round_trip(&mut good, b"1234567"); // the last of the first bytes
        program.wait_flow("spliced");
        let before = program.count("verdicts", "forwarded");
        round_trip(&mut good, &[7; 5000]);
        assert!(program.count("verdicts", "forwarded") > before, "{protocol}");
        drop(good);
        program.flows_end();
        for bad in ["GET / HTTP/1.1", "SSH-2.0-evil"] {
            let mut bad_one = open(n);
            bad_one.write_all(bad.as_bytes()).unwrap();
            let end = bad_one.read_to_end(&mut Vec::new()).map_err(|e| e.kind());
            assert_eq!(end, Err(ErrorKind::ConnectionReset), "{protocol}: {bad}");
        }
    }
    eventually("three lines each", || (program.records().len() == 3 * PROTOCOLS.len()).then_some(()));
    let records = program.end(&setting.pins[0]);
    for record in &records {
        let whole = (record["bytes_up"].as_u64(), record["bytes_down"].as_u64()) == (Some(5016), Some(5016));
        assert!(record["how"] == "denied" || whole && record["splices"] == 1, "{record}");
    }
    assert_eq!(records.iter().filter(|record| record["how"] == "denied").count(), 2 * PROTOCOLS.len());
}

#[test]
#[ignore = "root"]
fn what_fits_is_spliced_and_the_rest_reset() {
    run(Family::V4);
}

#[test]
#[ignore = "root"]
fn the_same_over_ipv6() {
    run(Family::V6);
}

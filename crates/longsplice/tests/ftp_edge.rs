//! FTP of hosts that know of no proxy (`transparent = true`), and of servers that see the client's address (`source = "client"`),
//! with real servers and clients. Needs root and eBPF, and fails without; Debian packages: curl, lftp, python3, and those of the servers.

use crate::{
    ftp::{PORT, Place, WAYS, connect_from, done, front, listener, number, same},
    ftp_servers::Server,
    ftp_talk::Talk,
    running::{AT_ONCE, Pins, Setting, round_trip, translucent::transparent},
};
use longsplice_lab::{
    ChildGuard, Family, Lab, Options, Shape, pattern,
    topology::{CLIENT, CLIENT_SECOND, FORWARDER_TO_SERVER, FORWARDER_TO_SERVER_SECOND, SERVER},
};
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener},
    process::Command,
    thread,
};
use test_case::test_case;

const SIZE: usize = 1_000_000;
/// What a host sends before anybody reads it.
const SMALL: usize = 10_000;

/// Python's client: downloads `file` and uploads it again. It takes data from the server only.
const FTPLIB: &str = "
import ftplib, io, sys
class Client(ftplib.FTP):
    trust_server_pasv_ipv4_address = True
client = Client()
client.connect(sys.argv[1], int(sys.argv[2]), 30)
client.login()
client.set_pasv(sys.argv[3] == 'passive')
data = io.BytesIO()
client.retrbinary('RETR file', data.write)
data.seek(0)
client.storbinary('STOR up/' + sys.argv[4], data)
client.quit()
";

fn lftp(place: &Place, at: SocketAddr, passive: bool) -> Command {
    let mode = if passive { "on" } else { "off" };
    let out = place.path("down");
    let script = format!(
        "set net:max-retries 1; set net:timeout 30; set ftp:verify-address true; set ftp:verify-port false; \
         set ftp:passive-mode {mode}; set ftp:fix-pasv-address false; open ftp://{at}; get file -o {}",
        out.display()
    );
    let mut command = place.lab.client.command("lftp");
    command.env("HOME", place.path("")).args(["-c", &script]);
    command
}

/// Each way to ask for a data connection, towards each way to make it, in both families. Servers and clients take data connections
/// only from whom they have their control connection with, and the machine routes nothing: all data pass the proxy.
#[test_case("own"; "the server sees the proxy")]
#[test_case("client"; "the server sees the client")]
#[ignore = "root"]
fn every_mode_and_family(source: &str) {
    let place = Place::new(Server::Vsftpd);
    let (bytes, mut upload) = (place.file("file", 1, SIZE), vec![0; SIZE / 2]);
    pattern::fill(2, 0, &mut upload);
    for data in ["passive", "active", "as-client"] {
        let more = format!("source = \"{source}\"\nftp.data = \"{data}\"");
        let (mut proxy, pins) = place.proxy(&transparent("ftp", PORT, &more));
        let _tpot = Pins::of_tpot(&place.lab.forwarder);
        let mut transfers = 0;
        for family in Family::BOTH {
            let at = SERVER.port(family, PORT);
            for (number, (way, _)) in WAYS.iter().enumerate().filter(|(_, (_, only))| !only || family == Family::V4) {
                let what = format!("{family:?}, {data}, {way:?}");
                let way = [way, &["--no-ftp-skip-pasv-ip"][..]].concat();
                let name = format!("{source}-{data}-{family:?}-{number}");
                place.exchange(at, &way, [("file", &bytes), (&name, &upload)], &what);
                transfers += 1;
            }
            for passive in [true, false] {
                let what = format!("lftp, {family:?}, {data}, passive: {passive}");
                let _ = fs::remove_file(place.path("down"));
                done(ChildGuard::spawn(&mut lftp(&place, at, passive)).unwrap(), &what);
                same(&place.path("down"), &bytes, &what);
                let (mode, name) = (if passive { "passive" } else { "active" }, format!("{source}-{data}-{family:?}"));
                let mut python = place.lab.client.command("/usr/bin/python3");
                python.args(["-c", FTPLIB, &at.ip().to_string(), &at.port().to_string(), mode]);
                done(ChildGuard::spawn(python.arg(format!("{name}-{mode}"))).unwrap(), &what);
                same(&place.path("root/up").join(format!("{name}-{mode}")), &bytes, &what);
                transfers += 2;
            }
        }
        let records = proxy.end(&pins);
        let lines: Vec<_> = records.iter().filter(|r| r["method"] == "RETR" || r["method"] == "STOR").collect();
        assert_eq!(lines.len(), 2 * transfers - 4, "lftp uploads nothing");
        for line in lines {
            let way = if line["method"] == "RETR" { "down" } else { "up" };
            let [all, spliced] = ["bytes", "spliced"].map(|what| number(line, &format!("{what}_{way}")));
            assert_eq!((number(line, "status"), number(line, "splices")), (226, 1), "{line}");
            match data {
                "passive" => assert_eq!(spliced, all, "from the first byte: {line}"),
                _ => assert!(spliced > all / 2, "{line}"),
            }
        }
    }
}

/// A listener that clients know, whose server sees the clients, and connects to them.
#[test]
#[ignore = "root"]
fn a_known_proxy_whose_server_sees_the_client() {
    let mut place = Place::new(Server::Vsftpd);
    let (bytes, upload) = (place.file("file", 3, SIZE), vec![7; SIZE]);
    let servers = [
        (Server::Vsftpd, "passive"),
        (Server::Vsftpd, "active"),
        (Server::Proftpd, "as-client"),
        (Server::PureFtpd, "as-client"),
    ];
    for (server, data) in servers {
        place.serve(server);
        let more = format!("source = \"client\"\nftp.data = \"{data}\"");
        let config: String = Family::BOTH.map(|family| listener(family, family, 2200, &more)).concat();
        let (mut proxy, pins) = place.proxy(&config);
        let _tpot = Pins::of_tpot(&place.lab.forwarder);
        for family in Family::BOTH {
            for (number, (way, _)) in WAYS.iter().enumerate().filter(|(_, (_, only))| !only || family == Family::V4) {
                let name = format!("{server:?}-{data}-{family:?}-{number}");
                let files = [("file", &bytes[..]), (&name[..], &upload[..])];
                place.exchange(front(family, 2200), way, files, &format!("{server:?}, {family:?}, {data}, {way:?}"));
            }
        }
        proxy.end(&pins);
    }
}

/// The test is the server: whom each side sees, and what does not concern the proxy.
#[test_case(Family::V4, "own"; "v4")]
#[test_case(Family::V6, "own"; "v6")]
#[test_case(Family::V4, "client"; "v4, the client's address")]
#[test_case(Family::V6, "client"; "v6, the client's address")]
#[ignore = "root"]
fn whom_hosts_see_and_what_is_routed(family: Family, source: &str) {
    let lab = Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).unwrap();
    let more = format!("source = \"{source}\"\nftp.data = \"as-client\"\n{AT_ONCE}");
    let here = Setting::at(lab, &transparent("ftp", PORT, &more));
    let (lab, server) = (&here.lab, here.listen(SERVER.port(family, PORT)));
    let mut proxy = here.start();
    let shown = match source {
        "own" => vec![FORWARDER_TO_SERVER.ip(family), FORWARDER_TO_SERVER_SECOND.ip(family)],
        _ => vec![CLIENT.ip(family)],
    };
    let client = CLIENT.ip(family);
    let from = |ip: IpAddr, to| lab.client.run(|| connect_from(SocketAddr::new(ip, 0), to)).unwrap();
    let control = from(client, SERVER.port(family, PORT));
    let (served, peer) = server.accept().unwrap();
    assert!(shown.contains(&peer.ip()), "{peer}");
    let (mut user, mut served) = (Talk::of(control), Talk::of(served));
    served.send(b"220 hello\r\n");
    assert_eq!(user.reply().0, 220);

    // passive: the server's own port, for this client alone
    user.send(b"EPSV\r\n");
    let door = here.listen(SERVER.port(family, 0));
    let at = door.local_addr().unwrap();
    let [high, low] = at.port().to_be_bytes();
    let asked = served.line().unwrap();
    match family {
        Family::V4 => assert_eq!(asked, "PASV\r\n"),
        Family::V6 => assert_eq!(asked, "EPSV\r\n"),
    }
    served.send(
        match family {
            Family::V4 => format!("227 here (10,77,2,2,{high},{low})\r\n"),
            Family::V6 => format!("229 here (|||{}|)\r\n", at.port()),
        }
        .as_bytes(),
    );
    assert_eq!(user.passive_reply(), at);
    let other = from(CLIENT_SECOND.ip(family), at);
    let (_, peer) = door.accept().unwrap();
    assert_eq!(peer, other.local_addr().unwrap(), "others are routed: the server judges them");
    let elsewhere = here.listen(SERVER.port(family, 0));
    let mut beside = from(client, elsewhere.local_addr().unwrap());
    let (beside_served, peer) = elsewhere.accept().unwrap();
    assert_eq!(peer, beside.local_addr().unwrap(), "and what the client does beside it");
    let mut own = from(client, at);
    user.send(b"RETR file\r\n");
    let (mut data, peer) = door.accept().unwrap();
    assert!(shown.contains(&peer.ip()), "{peer}");
    assert_ne!(peer, own.local_addr().unwrap());
    assert_eq!(served.line().unwrap(), "RETR file\r\n");
    served.send(b"150 now\r\n");
    assert_eq!(user.reply().0, 150);
    data.write_all(&[7; SMALL]).unwrap();
    drop(data);
    let mut got = Vec::new();
    own.read_to_end(&mut got).unwrap();
    assert_eq!(got, [7; SMALL]);
    served.send(b"226 done\r\n");
    assert_eq!(user.reply().0, 226);
    drop(own);
    thread::spawn(move || io::copy(&mut &beside_served, &mut &beside_served));
    round_trip(&mut beside, &[8; 1000]);
    drop((other, beside));

    // active: the server connects to whom it knows, and the client is connected to by the server
    assert_eq!(user.ask("EPRT |1|10.77.2.2|6446|").0, if family == Family::V4 { 504 } else { 522 });
    let waiting = lab.client.run(|| TcpListener::bind((client, 0))).unwrap();
    let port = waiting.local_addr().unwrap().port();
    let number = if family == Family::V4 { 1 } else { 2 };
    user.send(format!("EPRT |{number}|{client}|{port}|\r\n").as_bytes());
    let asked = served.line().unwrap();
    let to = match asked.trim().split_once(' ').unwrap() {
        ("PORT", six) => {
            let six: Vec<u8> = six.split(',').map(|n| n.parse().unwrap()).collect();
            SocketAddr::from(([six[0], six[1], six[2], six[3]], u16::from_be_bytes([six[4], six[5]])))
        }
        (_, extended) => {
            let parts: Vec<_> = extended.split('|').collect();
            SocketAddr::new(parts[2].parse().unwrap(), parts[3].parse().unwrap())
        }
    };
    assert!(shown.contains(&to.ip()), "{asked}");
    assert!(source == "own" || to.port() == port, "the client's own port: nothing else of the client has it");
    served.send(b"200 well\r\n");
    assert_eq!(user.reply().0, 200);
    user.send(b"STOR file\r\n");
    assert_eq!(served.line().unwrap(), "STOR file\r\n");
    let (mut own, peer) = waiting.accept().unwrap();
    assert_eq!(peer.ip(), SERVER.ip(family), "the client believes that it is the server");
    // from the address of the control connection: of several IPv6 addresses, the system may choose another one
    let mut data = lab.server.run(|| connect_from(SERVER.port(family, 0), to)).unwrap();
    served.send(b"150 now\r\n");
    assert_eq!(user.reply().0, 150);
    own.write_all(&[9; SMALL]).unwrap();
    drop(own);
    got.clear();
    data.read_to_end(&mut got).unwrap();
    assert_eq!(got, [9; SMALL]);
    drop(data);
    served.send(b"226 done\r\n");
    assert_eq!(user.reply().0, 226);
    // the control connection, and a data connection each way
    let taken = if source == "own" { 2 } else { 3 };
    assert_eq!(proxy.count("tpot", "intercepted-plain"), taken);
    assert_eq!(proxy.count("proxy", "denied"), 0);
    proxy.shut_down();
}

/// A download outlives the program, whichever side has connected.
#[test]
#[ignore = "root"]
fn a_transfer_outlives_the_program() {
    const LARGE: usize = 120_000_000;
    let place = Place::new(Server::Vsftpd);
    let bytes = place.file("file", 4, LARGE);
    for source in ["own", "client"] {
        for (way, data) in [("EPSV", "passive"), ("EPRT", "active")] {
            let config = transparent("ftp", PORT, &format!("source = \"{source}\"\nftp.data = \"{data}\""));
            let (mut proxy, _pins) = place.proxy(&config);
            let _tpot = Pins::of_tpot(&place.lab.forwarder);
            let mut talk = place.talk(SERVER.port(Family::V4, PORT));
            talk.log_in();
            let mut stream = place.lab.client.run(|| talk.retrieve(way, "file"));
            let mut got = vec![0; 1_000_000];
            stream.read_exact(&mut got).unwrap();
            proxy.kill();
            stream.read_to_end(&mut got).unwrap();
            assert_eq!((got.len(), Sha256::digest(&got)), (LARGE, Sha256::digest(&bytes)), "{source}, {way}");
            drop(stream);
            let (mut next, pins) = place.proxy(&config);
            next.stop(&pins);
        }
    }
}

//! Checked traffic: every script behaves as specified, and no alteration goes undetected.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use longsplice_lab::topology::SERVER;
use longsplice_lab::trace::Tap;
use longsplice_lab::traffic::{
    Chunks, Ending, Marks, Report, Script, Start, StreamEnd, connect, converse, intact, listen, serve, socks5_connect,
};
use longsplice_lab::{Family, Lab, Options, Shape};

/// A lab of its own, so that tests do not share ports.
fn lab() -> Lab {
    Lab::new(Shape::TwoDevices, Options { forwarding: true, ..Options::default() }).expect("a lab needs root")
}

fn exchange(lab: &Lab, opener: &Script, answerer: Script) -> (Report, Report) {
    let at = SERVER.port(Family::V4, 7000);
    let server = serve(lab.server.run(|| listen(at, &answerer)).expect("listen"), 1, answerer);
    let client = converse(lab.client.run(|| connect(at, opener)).expect("connect"), opener);
    (client, server.join().pop().expect("one connection"))
}

#[test]
#[ignore = "root"]
fn urgent_bytes_are_found_where_they_were_sent() {
    let urgent = vec![0, 7000, 14_000, 19_999];
    for marks in [Marks::Inline, Marks::Apart] {
        let opener = Script { urgent: urgent.clone(), ..Script::opener(1).bytes(20_000).pace(40_000) };
        let (client, server) = exchange(&lab(), &opener, Script { marks: Some(marks), ..Script::answerer() });
        intact(&client, &server).unwrap();
        assert_eq!((&client.urgent, &server.marks), (&urgent, &urgent), "{marks:?}");
    }
    let opener = Script { urgent, ..Script::opener(1).bytes(20_000).pace(40_000) };
    let (client, server) = exchange(&lab(), &opener, Script::answerer());
    intact(&client, &server).unwrap_err();
}

/// A relay on the server's loopback that alters the bytes from client to server.
fn relay(lab: &Lab, target: SocketAddr, change: impl Fn(u64, &mut Vec<u8>) + Send + 'static) -> SocketAddr {
    let listener = lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 0))).unwrap();
    let at = listener.local_addr().unwrap();
    lab.server.spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(target).unwrap();
        let (mut from_server, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut from_server, &mut to_client));
        let (mut position, mut buffer) = (0, vec![0; 4096]);
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            let mut bytes = buffer[..count].to_vec();
            change(position, &mut bytes);
            position += count as u64;
            server.write_all(&bytes).unwrap();
        }
        let _ = server.shutdown(std::net::Shutdown::Write);
    });
    at
}

fn through_relay(change: impl Fn(u64, &mut Vec<u8>) + Send + 'static) -> (Report, Report) {
    let lab = lab();
    let (opener, answerer) = (Script::opener(77).bytes(100_000), Script::answerer().bytes(1000));
    let server = serve(lab.server.run(|| listen(SERVER.port(Family::V4, 0), &answerer)).unwrap(), 1, answerer);
    let at = relay(&lab, server.local().unwrap(), change);
    let client = converse(lab.client.run(|| connect(at, &opener)).unwrap(), &opener);
    (client, server.join().pop().unwrap())
}

#[test]
#[ignore = "root"]
fn an_honest_relay_is_found_honest() {
    let (client, server) = through_relay(|_, _| {});
    intact(&client, &server).unwrap();
}

#[test]
#[ignore = "root"]
fn one_altered_byte_is_found() {
    let (client, server) = through_relay(|position, bytes| {
        if let Some(byte) = 54_321u64.checked_sub(position).and_then(|at| bytes.get_mut(at as usize)) {
            *byte ^= 1;
        }
    });
    assert_eq!(server.mismatch.unwrap().pos, 54_321);
    assert!(intact(&client, &server).is_err() && !server.clean());
}

#[test]
#[ignore = "root"]
fn lost_bytes_are_found_and_measured() {
    let (_, server) = through_relay(|position, bytes| {
        if position == 0 {
            bytes.drain(100..103);
        }
    });
    let mismatch = server.mismatch.unwrap();
    assert_eq!((mismatch.pos, mismatch.belongs_at), (100, Some(103)), "{mismatch}");
}

#[test]
#[ignore = "root"]
fn a_missing_end_is_found() {
    let (client, server) =
        through_relay(|position, bytes| bytes.truncate((99_000u64.saturating_sub(position)) as usize));
    assert!(server.clean() && server.received == 99_000);
    assert!(intact(&client, &server).is_err());
}

#[test]
#[ignore = "root"]
fn many_connections_have_streams_of_their_own() {
    let lab = lab();
    let answerer = Script::answerer().bytes(5000);
    let server = serve(lab.server.run(|| listen(SERVER.port(Family::V4, 7000), &answerer)).unwrap(), 20, answerer);
    let clients: Vec<Report> = thread::scope(|scope| {
        let connections: Vec<_> = (0..20)
            .map(|seed| {
                let lab = &lab;
                scope.spawn(move || {
                    let opener = Script::opener(1000 + seed).bytes(10_000).chunks(Chunks::Random(1, 4000));
                    converse(lab.client.run(|| connect(SERVER.port(Family::V4, 7000), &opener)).unwrap(), &opener)
                })
            })
            .collect();
        connections.into_iter().map(|connection| connection.join().unwrap()).collect()
    });
    let servers = server.join();
    for client in &clients {
        let server = servers.iter().find(|server| server.seed == client.seed).expect("the seed was learnt");
        intact(client, server).unwrap();
    }
}

#[test]
#[ignore = "root"]
fn single_bytes_turn_by_turn() {
    let (client, server) =
        exchange(&lab(), &Script::opener(2).bytes(200).ahead(1), Script::answerer_of(2).bytes(200).ahead(0));
    intact(&client, &server).unwrap();
}

#[test]
#[ignore = "root"]
fn the_server_speaks_first() {
    let opener = Script::opener(2).bytes(100).start(Start::Received(50));
    let (client, server) = exchange(&lab(), &opener, Script::answerer_of(2).bytes(50));
    intact(&client, &server).unwrap();
}

#[test]
#[ignore = "root"]
fn one_end_holds_open_while_the_other_half_closes() {
    let lab = lab();
    for (opener, answerer) in [(Ending::Hold, Ending::HalfClose), (Ending::HalfClose, Ending::Hold)] {
        let (opener, answerer) =
            (Script::opener(2).bytes(100_000).ending(opener), Script::answerer().bytes(100_000).ending(answerer));
        let (client, server) = exchange(&lab, &opener, answerer);
        intact(&client, &server).unwrap();
    }
}

#[test]
#[ignore = "root"]
fn the_half_that_is_open_still_carries() {
    let answerer = Script::answerer().bytes(200_000).start(Start::Delay(Duration::from_millis(200)));
    let (client, server) = exchange(&lab(), &Script::opener(2).bytes(10), answerer);
    intact(&client, &server).unwrap();
    assert!(client.first_byte.unwrap() > Duration::from_millis(150));
}

#[test]
#[ignore = "root"]
fn a_reset_is_seen_as_one() {
    let lab = lab();
    let holds = || Script::answerer().ending(Ending::Hold);
    let (client, server) = exchange(&lab, &Script::opener(2).bytes(5000).ending(Ending::Reset), holds());
    assert_eq!((client.end, server.end), (StreamEnd::Own, StreamEnd::Reset));
    assert_eq!(server.mismatch, None);

    // The reverse: the server resets while the client is still writing.
    let answerer = Script::answerer().ending(Ending::ResetReceived(10_000));
    let (client, server) = exchange(&lab, &Script::opener(2).lasting(Duration::from_secs(10), 1_000_000), answerer);
    assert_eq!((client.send_end, client.end, server.end), (StreamEnd::Reset, StreamEnd::Reset, StreamEnd::Own));
    assert!(client.duration < Duration::from_secs(5));
}

#[test]
#[ignore = "root"]
fn pauses_stop_the_reader_and_do_not_count_as_gaps() {
    let pause = Duration::from_millis(600);
    let answerer =
        Script { receive_buffer: Some(8192), ..Script::answerer() }.pause(10_000, pause).pause(300_000, pause);
    let (client, server) = exchange(&lab(), &Script::opener(2).bytes(1 << 20), answerer);
    intact(&client, &server).unwrap();
    assert!(server.duration > 2 * pause && server.longest_gap < pause, "{server}");
}

#[test]
#[ignore = "root"]
fn rests_stop_the_writer_and_are_not_caught_up_on() {
    const REST: Duration = Duration::from_millis(700);
    let opener = Script::opener(1).bytes(100_000).pace(200_000).chunks(Chunks::Fixed(1000)).rest(40_000, REST);
    let (client, server) = exchange(&lab(), &opener, Script::answerer());
    intact(&client, &server).unwrap();
    assert!(server.longest_gap >= REST / 2 && server.longest_gap_at == 40_000, "{server}");
    assert!(client.duration >= REST + Duration::from_millis(490), "{client}");
}

#[test]
#[ignore = "root"]
fn a_gap_is_measured_where_it_is() {
    // The opener waits for bytes that the answerer delays.
    let answerer = Script::answerer_of(2).bytes(100).start(Start::Delay(Duration::from_millis(200)));
    let opener = Script::opener(2).bytes(2000).chunks(Chunks::Fixed(1000)).ahead(1000);
    let (client, server) = exchange(&lab(), &opener, answerer);
    intact(&client, &server).unwrap();
    assert_eq!(server.longest_gap_at, 1000, "{server}");
    assert!(server.longest_gap > Duration::from_millis(150), "{server}");
}

#[test]
#[ignore = "root"]
fn a_reader_that_stops_for_good_closes_the_window() {
    let answerer = Script { stop_reading_at: Some(5000), receive_buffer: Some(8192), ..Script::answerer() }
        .ending(Ending::Hold)
        .deadline(Duration::from_millis(800));
    let opener = Script::opener(2).bytes(50 << 20).deadline(Duration::from_millis(400));
    let (client, server) = exchange(&lab(), &opener, answerer);
    assert_eq!((client.send_end, client.end), (StreamEnd::Timeout, StreamEnd::Timeout));
    assert!(client.sent < 10 << 20);
    assert_eq!((server.received, server.mismatch), (5000, None));
}

#[test]
#[ignore = "root"]
fn pace_is_kept() {
    let (client, server) = exchange(&lab(), &Script::opener(2).bytes(500_000).pace(2_000_000), Script::answerer());
    intact(&client, &server).unwrap();
    assert!(client.duration > Duration::from_millis(220), "{client}");
}

#[test]
#[ignore = "root"]
fn segment_size_is_asked_for() {
    let lab =
        Lab::new(Shape::TwoDevices, Options { forwarding: true, large_packets: false, ..Options::default() }).unwrap();
    let tap = Tap::start(&lab.server, "s0").unwrap();
    let opener = Script { max_segment: Some(700), ..Script::opener(2) }.bytes(20_000);
    let (client, server) = exchange(&lab, &opener, Script::answerer());
    intact(&client, &server).unwrap();
    let trace = tap.stop().unwrap();
    let largest = trace.packets.iter().map(|packet| packet.len).max().unwrap();
    assert!((600..=700).contains(&largest), "{largest}");
}

#[test]
#[ignore = "root"]
fn a_trace_shows_the_connection_from_its_syn_to_its_fin() {
    let lab = lab();
    for family in Family::BOTH {
        let tap = Tap::start(&lab.forwarder, lab.client_device()).unwrap();
        let at = SERVER.port(family, 7000);
        let (opener, answerer) = (Script::opener(2).bytes(300_000), Script::answerer());
        let server = serve(lab.server.run(|| listen(at, &answerer)).unwrap(), 1, answerer);
        let client = converse(lab.client.run(|| connect(at, &opener)).unwrap(), &opener);
        server.join();
        let trace = tap.stop().unwrap();
        assert_eq!(trace.dropped, 0);
        let there = trace.direction(client.local.unwrap(), at);
        let first = there.first().unwrap();
        assert!(first.flags.syn() && !first.flags.ack());
        let ends =
            there.iter().map(|packet| packet.seq.wrapping_sub(first.seq.wrapping_add(1)).wrapping_add(packet.len));
        // The SYN occupies the number before the first byte; the acknowledgement of the other FIN is one beyond the last.
        let end = ends.filter(|&end| end < u32::MAX / 2).max().unwrap();
        assert!((300_000..=300_001).contains(&end), "{end}");
        assert!(there.iter().any(|packet| packet.flags.fin()));
        assert!(there.windows(2).all(|pair| pair[0].time <= pair[1].time));
        assert!(trace.connection(client.local.unwrap(), at).len() > there.len());
    }
}

/// Answers one SOCKS5 request according to RFC 1928, and at once sends the target's first bytes.
fn tiny_socks(listener: TcpListener, reply: u8) -> Vec<u8> {
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; 3]).unwrap();
    stream.write_all(&[5, 0]).unwrap();
    let mut request = vec![0; 10];
    stream.read_exact(&mut request).unwrap();
    stream.write_all(&[5, reply, 0, 1, 0, 0, 0, 0, 0, 0, b'!']).unwrap();
    let _ = stream.read(&mut [0; 1]);
    request
}

#[test]
#[ignore = "root"]
fn socks_asks_and_leaves_the_rest_alone() {
    let lab = lab();
    for reply in [0, 5] {
        let listener = lab.server.run(|| TcpListener::bind(SERVER.port(Family::V4, 1080))).unwrap();
        let at = listener.local_addr().unwrap();
        let proxy = thread::spawn(move || tiny_socks(listener, reply));
        let target: SocketAddr = "10.1.2.3:513".parse().unwrap();
        let stream = lab.client.run(|| socks5_connect(at, target, &Script::opener(1)));
        if reply == 0 {
            let mut first = [0];
            stream.unwrap().read_exact(&mut first).unwrap();
            assert_eq!(&first, b"!");
        } else {
            stream.unwrap_err();
        }
        assert_eq!(proxy.join().unwrap(), [5, 1, 0, 1, 10, 1, 2, 3, 2, 1]);
    }
}

//! A client uses the port of its last connection again, for the same server, while the proxy still knows that one.

use super::{
    PATIENCE, PORT, asker,
    capture::Seen,
    everywhere,
    hand::{FIN_ACK, Hand, ISN, MSS, Open, SYN_ACK, each},
    wire::pass,
};
use longsplice_engine::{Command, FlowState};
use longsplice_lab::{
    Family, Lab, Shape,
    topology::{CLIENT, SERVER},
    traffic::{Script, connect},
};
use longsplice_tests::{
    Forwarder, at_once, by_hand,
    packet::{Packet, flag},
};
use std::{
    io::Read,
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};
use test_case::test_case;

const CONNECTIONS: u64 = 4;
pub(crate) const TICK: Duration = Duration::from_millis(2);

/// Bytes pass both ways, and the server closes first.
pub fn serve_and_close(mut client: TcpStream, accepted: TcpStream) {
    pass(&client, &accepted);
    pass(&accepted, &client);
    drop(accepted);
    client.set_read_timeout(Some(PATIENCE)).expect("an option");
    assert_eq!(client.read(&mut [0]).expect("the end"), 0);
}

/// The server closes first, and so does the proxy: the client has no TIME-WAIT, and may use its port at once.
#[test_case(Family::V4; "v4")]
#[test_case(Family::V6; "v6")]
#[ignore = "root"]
fn a_port_is_used_again_at_once(family: Family) {
    let states = [FlowState::Copying, FlowState::Spliced, FlowState::Released];
    for state in states {
        let lab = Lab::simple(Shape::TwoDevices).expect("lab");
        let asker = asker(&lab, family);
        let policy = if state == FlowState::Copying { by_hand() } else { at_once() };
        let f = Forwarder::taker(&lab.forwarder, everywhere(family), policy, false);
        let server = SERVER.port(family, PORT);
        let listener = lab.server.run(|| TcpListener::bind(server)).expect("listen");
        let mut script = Script::opener(1);
        script.local = Some(CLIENT.port(family, 4000));
        for n in 1..=CONNECTIONS {
            let client = lab.client.run(|| connect(server, &script)).expect("connected");
            let (accepted, _) = listener.accept().expect("accept");
            if state == FlowState::Released {
                f.wait_state(FlowState::Spliced);
                f.command(Command::Release);
            }
            f.wait_state(state);
            serve_and_close(client, accepted);
            f.ended(n as usize);
            // TIME-WAIT tells a new SYN by its number or timestamp. Numbers may have run ahead of their clock, which does not
            // matter once the clock of timestamps has ticked (1 ms; RFC 6191).
            thread::sleep(TICK);
        }
        // each meets the proxy, with its first SYN
        let sent = ["opened", "asked", "not-asked", "plain-refused", "failed"].map(|v| asker.verdict(v));
        assert_eq!(sent, [CONNECTIONS, CONNECTIONS, 0, 0, 0], "{family:?} {state:?}");
    }
}

/// A segment of the proxy that acknowledges the client's FIN, in the tunnel.
fn last_ack(seq: u32) -> impl Fn(&Seen) -> bool {
    move |s| s.is("f0", true) && s.has(flag::ACK) && s.p.ack == seq + 1 && s.outer.is_some()
}

/// Opens a connection with this SYN. The proxy closes it first, and is in TIME-WAIT then. Returns the client's FIN.
fn closed(h: &mut Hand, syn: &Packet) -> Packet {
    let Open { seq, ack, accepted } = h.open_with(syn);
    drop(accepted);
    h.capture.wait("a FIN", |s| s.is("f0", true) && s.has(FIN_ACK) && s.outer.is_some());
    let fin = Packet { flags: FIN_ACK, ..h.says(seq, ack + 1, b"") };
    h.tunnelled(&fin);
    h.capture.wait("the last acknowledgement", last_ack(seq));
    h.f.ended(1);
    fin
}

/// Only a newer SYN ends TIME-WAIT (RFC 6191). An older one changes nothing.
#[test]
#[ignore = "root"]
fn an_old_syn_does_not_end_time_wait() {
    let timestamps = |value: u32| [vec![1, 1, 8, 10], value.to_be_bytes().to_vec(), vec![0; 4]].concat();
    for with_timestamps in [false, true] {
        each(|mut h| {
            let syn = |h: &Hand, seq, clock| {
                let options = if with_timestamps { timestamps(clock) } else { Vec::new() };
                Packet { seq, options: [options, h.syn().options].concat(), ..h.syn() }
            };
            let first = syn(&h, ISN, 1000);
            let fin = closed(&mut h, &first);
            let (seq, onward) = (fin.seq, h.onward());
            let mut old = vec![(ISN, 1000), (seq, 1000), (seq.wrapping_add(3 << 30), 1000)];
            if with_timestamps {
                old.push((seq + 1000, 999)); // a later number, from an earlier time
            }
            for (at, clock) in old {
                h.plain(&syn(&h, at, clock));
                h.fence();
                let before = h.capture.count(last_ack(seq));
                h.tunnelled(&fin);
                h.capture.wait_nth("TIME-WAIT and the tunnel are still there", before, last_ack(seq));
            }
            assert_eq!(h.capture.count(|s| s.is("f0", true) && s.has(SYN_ACK)), 1, "{}", h.capture.last());
            assert_eq!(h.onward(), onward);
            let new = if with_timestamps { syn(&h, 500, 1001) } else { syn(&h, seq + 2, 0) };
            h.open_with(&new);
            assert_eq!((h.onward(), h.tunnels().len()), (onward + 1, 1));
        });
    }
}

/// The host does not ask any more: its SYN ends TIME-WAIT if it is newer, since that would keep it from being routed.
#[test]
#[ignore = "root"]
fn a_host_that_does_not_ask_again() {
    each(|mut h| {
        let first = h.syn();
        let fin = closed(&mut h, &first);
        let bare = |h: &Hand, seq| Packet { seq, options: MSS.to_vec(), ..h.syn() };
        let onward = h.onward();
        // an old one, which TIME-WAIT keeps; the first new one; and that again
        for (seq, routed) in [(fin.seq, 0), (fin.seq + 2, 0), (fin.seq + 2, 1)] {
            h.plain(&bare(&h, seq));
            h.fence();
            assert_eq!(h.onward(), onward + routed, "{}", h.capture.last());
        }
        assert!(h.tunnels().is_empty());
    });
}

use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn what_is_allowed_by_name_is_not_allowed_by_address() {
    let (mut all, now) = (Destinations::new(8), Instant::now());
    let to = at("192.0.2.1:53");
    assert_eq!(all.judge(to, now, true, || true), Verdict::Allowed);
    assert_eq!(all.judge(to, now, false, || false), Verdict::Denied, "the rules know only the name");
    assert_eq!(all.judge(to, now, true, || true), Verdict::Allowed, "still");
    assert!(all.answers(to, Replies::Addressed, now));
}

#[test]
fn rules_are_asked_again_each_second() {
    let (mut all, now) = (Destinations::new(8), Instant::now());
    let to = at("192.0.2.1:53");
    assert_eq!(all.judge(to, now, false, || true), Verdict::Allowed);
    assert_eq!(all.judge(to, now, false, || panic!("it is known")), Verdict::Allowed);
    assert_eq!(all.judge(to, now + CHECKED_FOR, false, || false), Verdict::Denied);
}

#[test]
fn replies_come_from_where_datagrams_went() {
    let (mut all, now) = (Destinations::new(8), Instant::now());
    all.judge(at("192.0.2.1:53"), now, false, || true);
    all.judge(at("192.0.2.2:53"), now, false, || false);
    let from = |all: &mut Destinations, text, replies| all.answers(at(text), replies, now);
    assert!(from(&mut all, "192.0.2.1:53", Replies::Addressed));
    assert!(!from(&mut all, "192.0.2.1:54", Replies::Addressed), "another port");
    assert!(from(&mut all, "192.0.2.1:54", Replies::Host));
    assert!(!from(&mut all, "192.0.2.3:53", Replies::Host));
    assert!(!from(&mut all, "192.0.2.2:53", Replies::Host), "denied");
}

#[test]
fn destinations_are_bounded_and_make_room() {
    let (mut all, now) = (Destinations::new(2), Instant::now());
    let later = |n| now + Duration::from_millis(n);
    all.judge(at("192.0.2.1:1"), now, false, || false);
    all.judge(at("192.0.2.1:2"), later(1), false, || true);
    all.judge(at("192.0.2.1:3"), later(2), false, || true);
    assert!(all.answers(at("192.0.2.1:2"), Replies::Addressed, later(3)), "the denied one has made room");
    all.judge(at("192.0.2.1:4"), later(4), false, || true);
    assert!(!all.answers(at("192.0.2.1:3"), Replies::Addressed, later(5)), "not used for the longest time");
    assert!(all.answers(at("192.0.2.1:2"), Replies::Addressed, later(5)));
    for n in 1..10_000 {
        all.judge(at(&format!("192.0.2.9:{n}")), now, false, || n % 3 == 0);
        assert!(all.all.len() <= 2);
    }
    let mut one = Destinations::new(1);
    for n in 1..5 {
        one.judge(at(&format!("192.0.2.9:{n}")), later(n), false, || true);
        assert_eq!(one.all.len(), 1);
    }
}

/// All sizes and both ways of sending arrive whole and in order, also those that are too long for a series.
#[test]
fn batches_arrive_as_they_were_sent() {
    for here in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(to) = batch::open(at(here)) else { continue }; // no IPv6 here
        let from = batch::open(at(here)).unwrap();
        let address = to.local_addr().unwrap();
        let mut buffers = Buffers::new();
        let mut sender = Sender::default();
        for sizes in [&[1000; 100][..], &[1, 2, 3, 3, 3, 2, 9, 0, 0, 5], &[40_000, 40_000, 7], &[1200, 1200, 10, 1200]]
        {
            let data: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(n, size)| vec![n as u8; *size]).collect();
            let header = Header::new(address);
            let outgoing = |data| Outgoing { to: Some(address), header: header.as_bytes(), data };
            let all: Vec<Outgoing<'_>> = data.iter().map(|data| outgoing(data)).collect();
            let sent = sender.send(&from, &all);
            let bytes = sizes.iter().sum::<usize>() as u64;
            assert_eq!(sent, Sent { datagrams: sizes.len() as u64, bytes, dropped: 0 });
            let mut came: Vec<Vec<u8>> = Vec::new();
            while came.len() < sizes.len() {
                let (received, _) = batch::receive(&to, &mut buffers).unwrap();
                assert!(received.iter().all(|one| one.source == from.local_addr().unwrap()));
                came.extend(received.iter().map(|one| one.bytes.to_vec()));
            }
            let want: Vec<Vec<u8>> = data.iter().map(|data| [header.as_bytes(), data].concat()).collect();
            assert!(came == want, "{sizes:?}");
        }
        let e = batch::receive(&to, &mut buffers).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
    }
}

#[test]
fn what_is_too_long_is_dropped_and_the_rest_goes_on() {
    let (to, from) = (batch::open(at("127.0.0.1:0")).unwrap(), batch::open(at("127.0.0.1:0")).unwrap());
    let address = Some(to.local_addr().unwrap());
    let long = vec![0; 65_536];
    let all = [&b"first"[..], &long, b"last"].map(|data| Outgoing { to: address, header: &[], data });
    let sent = Sender::default().send(&from, &all);
    assert_eq!((sent.datagrams, sent.dropped), (2, 1));
}

//! Packets that are corrupt, addressed to others, or request too many answers.

use super::*;

/// Packets that no stack would accept are not forwarded and change
/// no state: corruption, frames for other hosts, wrong lengths.
fn what_no_stack_would_take_moves_nothing() {
    type Damaged = (&'static str, fn(&mut Flow), fn(&mut Packet), fn(&mut [u8]));
    let cases: [Damaged; 10] = [
        ("another host's", |_| (), |_| (), |f| f[0] = 2),
        ("multicast", |_| (), |_| (), |f| f[0] = 1),
        ("broadcast", |_| (), |_| (), |f| f[..6].fill(0xff)),
        ("version", |_| (), |_| (), |f| f[ETHERNET] ^= 0x20),
        ("length 0", |_| (), |_| (), no_length),
        ("damaged: a hole", |_| (), |p| p.seq += 100, damage),
        ("damaged: a FIN", |_| (), |p| p.flags |= flag::FIN, damage),
        (
            "damaged: an acknowledgement",
            |f| f.up.max_ack -= 500,
            |p| (p.ack, p.payload) = (p.ack + 500, vec![]),
            damage,
        ),
        ("damaged: an acknowledgement with data", |f| f.up.max_ack -= 500, |p| p.ack += 500, damage),
        ("damaged: RST", |_| (), |p| (p.flags, p.payload) = (flag::RST, vec![]), damage),
    ];
    /// Corrupts the last byte: of the payload, or of the urgent pointer.
    fn damage(f: &mut [u8]) {
        *f.last_mut().expect("a byte") ^= 1;
    }
    /// Clears the length; the header is valid otherwise.
    fn no_length(f: &mut [u8]) {
        let v4 = f[12] == 8;
        let at = if v4 { ETHERNET + 2 } else { ETHERNET + 4 };
        let old = u16::from_be_bytes([f[at], f[at + 1]]);
        f[at..at + 2].fill(0);
        if v4 {
            let sum = u32::from(u16::from_be_bytes([f[24], f[25]])) + u32::from(old);
            f[24..26].copy_from_slice(&((sum + (sum >> 16)) as u16).to_be_bytes());
        }
    }
    bench(64, |b| {
        for v6 in FAMILIES {
            for (name, flow, packet, damage) in cases {
                let mut f = Flow::new(v6);
                flow(&mut f);
                let mut p = f.next(40);
                packet(&mut p);
                let mut frame = p.frame();
                damage(&mut frame);
                f.install(b, 0);
                let o = b.ingress(&frame);
                assert_ne!(o.code, REDIRECT, "{name}, {v6:?}: {o:?}");
                let got = f.read(b);
                assert_eq!((got.up, got.down), (f.up, f.down), "{name}, {v6:?}: state after {o:?}");
            }
        }
    });
}

/// Answers are limited to one per half second and connection, so the next connection still
/// gets its answer. However long the test takes, no more answers are sent than its time
/// allows. Many connections are used, because the coarse clock stands still for milliseconds.
fn answers_are_budgeted_for_each_connection() {
    const INTERVAL: Duration = Duration::from_millis(500);
    bench(64, |b| {
        let answered = |b: &Bench| b.counters()[VERDICTS.iter().position(|v| *v == "challenge").expect("a verdict")];
        for port in 40_001..40_041 {
            let mut f = Flow::new(V4);
            f.client.remote.set_port(port);
            f.down.out_to = f.client.remote;
            f.install(b, 0);
            let mut syn = f.next(0);
            syn.flags = flag::SYN;
            let (before, start) = (answered(b), Instant::now());
            assert_eq!(b.ingress(&syn.frame()).code, REDIRECT, "the first is answered");
            let limited = (0..20).filter(|_| b.ingress(&syn.frame()).code == DROP).count() as u64;
            let allowed = 1 + (start.elapsed().as_millis() / INTERVAL.as_millis()) as u64;
            let answers = answered(b) - before;
            assert_eq!(answers, 21 - limited);
            assert!((1..=allowed).contains(&answers), "{port}: {answers} answers, {allowed} are allowed");
        }
    });
}

together!(what_no_stack_would_take_moves_nothing, answers_are_budgeted_for_each_connection);

//! Selection of the next server.

use std::net::IpAddr;

/// A server that may be selected.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// Index in the pool.
    pub index: usize,
    pub weight: u32,
    /// Number of current connections and requests.
    pub active: u32,
    /// Hash of the server's name.
    pub hash: u64,
}

/// State of the round robin, by server index.
#[derive(Debug)]
pub(super) struct Turns(Vec<i64>);

impl Turns {
    pub fn new(servers: usize) -> Turns {
        Turns(vec![0; servers])
    }

    /// Selects the next server in turn.
    pub fn next(&mut self, candidates: &[Candidate]) -> Option<usize> {
        for c in candidates {
            self.0[c.index] += i64::from(c.weight);
        }
        // the first of equals
        let chosen = candidates.iter().rev().max_by_key(|c| self.0[c.index])?.index;
        self.0[chosen] -= candidates.iter().map(|c| i64::from(c.weight)).sum::<i64>();
        Some(chosen)
    }

    /// Selects the server with the least load.
    pub fn least(&mut self, candidates: &[Candidate]) -> Option<usize> {
        let less = |a: &&Candidate, b: &&Candidate| {
            // a.active / a.weight against b.active / b.weight
            (u64::from(a.active) * u64::from(b.weight)).cmp(&(u64::from(b.active) * u64::from(a.weight)))
        };
        let least = candidates.iter().min_by(less)?;
        let ties: Vec<Candidate> = candidates.iter().filter(|c| less(c, &least).is_eq()).copied().collect();
        self.next(&ties)
    }
}

/// Selects the server that owns the key.
pub(super) fn owner(key: u64, candidates: &[Candidate]) -> Option<usize> {
    let score = |c: &Candidate| {
        // in (0, 1); the weighted form of rendezvous hashing: -w / ln(h)
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept, which is what a double holds")]
        let unit = ((mix(key ^ c.hash) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        -f64::from(c.weight) / unit.ln()
    };
    candidates.iter().max_by(|a, b| score(a).total_cmp(&score(b))).map(|c| c.index)
}

/// Hashes with FNV-1a: equal in every process, so that several proxies agree. Not for secrets.
pub fn hash(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)))
}

/// Hashes a client's address.
pub(super) fn hash_of(client: IpAddr) -> u64 {
    match client.to_canonical() {
        IpAddr::V4(ip) => hash(&ip.octets()),
        IpAddr::V6(ip) => hash(&ip.octets()),
    }
}

/// The finalizer of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014): every output bit depends on every input bit.
fn mix(mut h: u64) -> u64 {
    h = (h ^ (h >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h = (h ^ (h >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    h ^ (h >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(weights: &[u32]) -> Vec<Candidate> {
        let candidate = |(index, weight): (usize, &u32)| Candidate {
            index,
            weight: *weight,
            active: 0,
            hash: hash(&[index as u8]),
        };
        weights.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn turns_are_spread_by_weight() {
        let all = servers(&[5, 1, 1]);
        let mut turns = Turns::new(3);
        let order: Vec<_> = (0..14).map(|_| turns.next(&all).unwrap()).collect();
        assert_eq!(order, [0, 0, 1, 0, 2, 0, 0, 0, 0, 1, 0, 2, 0, 0]);
        // the others keep their turns without the first one
        let order: Vec<_> = (0..4).map(|_| turns.next(&all[1..]).unwrap()).collect();
        assert_eq!(order, [1, 2, 1, 2]);
        assert_eq!(turns.next(&[]), None);
    }

    #[test]
    fn the_least_busy_by_weight() {
        let mut all = servers(&[1, 2, 2]);
        let mut turns = Turns::new(3);
        (all[0].active, all[1].active, all[2].active) = (1, 1, 3);
        assert_eq!(turns.least(&all), Some(1));
        all[2].active = 1;
        let order: Vec<_> = (0..4).map(|_| turns.least(&all).unwrap()).collect();
        assert_eq!(order, [1, 2, 1, 2], "of equals, in turn");
        assert_eq!(turns.least(&[]), None);
    }

    #[test]
    fn keys_stay_with_their_server() {
        let all = servers(&[1, 1, 1, 1]);
        let owners =
            |c: &[Candidate]| (0..10_000_u32).map(|k| owner(hash(&k.to_be_bytes()), c).unwrap()).collect::<Vec<_>>();
        let before = owners(&all);
        let without = owners(&all[..3]);
        for (a, b) in before.iter().zip(&without) {
            assert!(a == b || *a == 3, "only keys of the one that has gone move");
        }
        for n in 0..4 {
            let share = before.iter().filter(|o| **o == n).count();
            assert!((2300..2700).contains(&share), "server {n}: {share} of 10000");
        }
    }

    /// One percent is what is asked for; most of what is seen is the luck of these keys.
    #[test]
    fn shares_are_equal_and_only_those_of_the_one_that_goes_move() {
        const KEYS: u32 = 300_000;
        for n in [2, 3, 5, 8] {
            let all = servers(&vec![1; n]);
            let owners =
                |c: &[Candidate]| (0..KEYS).map(|k| owner(hash(&k.to_be_bytes()), c).unwrap()).collect::<Vec<_>>();
            let before = owners(&all);
            let mut shares = vec![0_u32; n];
            before.iter().for_each(|of| shares[*of] += 1);
            let mean = f64::from(KEYS) / n as f64;
            let worst = shares.iter().map(|share| (f64::from(*share) / mean - 1.0).abs()).fold(0.0, f64::max);
            assert!(worst < 0.01, "{n} servers: {shares:?}");
            let gone = n / 2;
            let left: Vec<Candidate> = all.iter().filter(|c| c.index != gone).copied().collect();
            let moved = owners(&left).iter().zip(&before).filter(|(after, before)| after != before).count();
            assert_eq!(moved, shares[gone] as usize, "{n} servers: only its keys, one in {n}");
        }
    }

    #[test]
    fn keys_are_shared_by_weight() {
        let all = servers(&[1, 3]);
        let heavy = (0..10_000_u32).filter(|k| owner(hash(&k.to_be_bytes()), &all) == Some(1)).count();
        assert!((7300..7700).contains(&heavy), "{heavy} of 10000");
        // keys move to the server that becomes heavier, and never away from it
        let heavier = servers(&[1, 4]);
        assert!(
            (0..10_000_u32)
                .map(|k| hash(&k.to_be_bytes()))
                .all(|k| owner(k, &all) != Some(1) || owner(k, &heavier) == Some(1))
        );
    }

    #[test]
    fn an_address_has_one_hash() {
        let of = |ip: &str| hash_of(ip.parse().unwrap());
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(hash(b"a"), mix(0xaf63_dc4c_8601_ec8c), "FNV-1a of `a`, mixed: the same in every build");
    }
}

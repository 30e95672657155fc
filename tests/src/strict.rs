//! Hosts that keep RFC 7323, 3.2, which Linux does not: one that has negotiated timestamps drops segments without them. Rules of
//! nftables play this part, and count.

use longsplice_lab::Namespace;

/// A host with such rules, for all of its connections.
pub struct Strict(Namespace);

impl Strict {
    /// Loads the rules. `timestamps`: whether the host's connections have negotiated timestamps. If not, no segment may have any,
    /// except SYNs, which may offer them.
    pub fn new(host: &Namespace, timestamps: bool) -> Strict {
        Strict::load(host, "", timestamps)
    }

    /// The same for connections with this port at either end only, in place of earlier rules.
    pub fn at_port(host: &Namespace, port: u16, timestamps: bool) -> Strict {
        Strict::load(host, &format!("tcp sport != {port} tcp dport != {port} accept;"), timestamps)
    }

    fn load(host: &Namespace, others: &str, timestamps: bool) -> Strict {
        let wrong = if timestamps { "missing" } else { "exists" };
        let rules = format!(
            "add table inet strict; delete table inet strict; table inet strict {{ counter refused {{ }}; chain input {{ \
             type filter hook input priority filter; {others} \
             tcp flags & (syn|rst) == 0 tcp option timestamp {wrong} counter name refused drop; }}; }}"
        );
        host.execute("nft", &[&rules]).expect("nft");
        Strict(host.clone())
    }

    /// Number of segments that were dropped.
    pub fn refused(&self) -> u64 {
        let counter = self.0.execute("nft", &["list", "counter", "inet", "strict", "refused"]).expect("nft");
        let packets = counter.split_whitespace().skip_while(|w| *w != "packets").nth(1).and_then(|n| n.parse().ok());
        packets.unwrap_or_else(|| panic!("{counter}"))
    }
}

//! Hosts that keep RFC 7323, 3.2, which Linux does not: one that has negotiated timestamps drops segments without them. Rules of
//! nftables play this part, and count.

use longsplice_lab::Namespace;

/// A host with such rules, for all of its connections.
pub struct Strict<'a>(&'a Namespace);

impl Strict<'_> {
    /// Loads the rules. `timestamps`: whether the host's connections have negotiated timestamps. If not, no segment may have any,
    /// except SYNs, which may offer them.
    pub fn new(host: &Namespace, timestamps: bool) -> Strict<'_> {
        let wrong = if timestamps { "missing" } else { "exists" };
        let rules = format!(
            "table inet strict {{ counter refused {{ }}; chain input {{ type filter hook input priority filter; \
             tcp flags & (syn|rst) == 0 tcp option timestamp {wrong} counter name refused drop; }}; }}"
        );
        host.execute("nft", &[&rules]).expect("nft");
        Strict(host)
    }

    /// Number of segments that were dropped.
    pub fn refused(&self) -> u64 {
        let counter = self.0.execute("nft", &["list", "counter", "inet", "strict", "refused"]).expect("nft");
        let packets = counter.split_whitespace().skip_while(|w| *w != "packets").nth(1).and_then(|n| n.parse().ok());
        packets.unwrap_or_else(|| panic!("{counter}"))
    }
}

//! Whether the firewall of this network namespace drops what is forwarded unless a rule accepts it. Intercepted connections end
//! here, so that chain never sees them.

use crate::network::netlink::{Netlink, attributes, find};
use nix::libc;
use std::io;

/// Returns the name of a chain of nftables, or of iptables over it, whose policy is to drop what is forwarded. `None`: there is
/// none. Tables of iptables-legacy are not seen. Needs CAP_NET_ADMIN.
pub fn dropping_forward_chain(v6: bool) -> io::Result<Option<String>> {
    let family = if v6 { libc::NFPROTO_IPV6 } else { libc::NFPROTO_IPV4 } as u8;
    let kind = (libc::NFNL_SUBSYS_NFTABLES << 8 | libc::NFT_MSG_GETCHAIN) as u16;
    let mut found = None;
    let chains = Netlink::netfilter()?.dump(kind, &[0, 0, 0, 0], &[], |(_, body)| {
        found = found.take().or_else(|| dropping(body, family));
    });
    match chains {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(None), // this kernel has no nftables
        chains => chains.map(|()| found),
    }
}

/// Reads a chain: `struct nfgenmsg`, and attributes, whose numbers are in network byte order.
fn dropping(body: &[u8], family: u8) -> Option<String> {
    // NFTA_CHAIN_* and NFTA_HOOK_HOOKNUM of <linux/netfilter/nf_tables.h>
    const NAME: u16 = 3;
    const HOOK: u16 = 4;
    const POLICY: u16 = 5;
    const HOOKNUM: u16 = 1;
    let word = |bytes: &[u8]| bytes.first_chunk().map(|b| u32::from_be_bytes(*b));
    let of = *body.first()?;
    let all = attributes(body.get(4..)?);
    let hook = attributes(find(&all, HOOK)?);
    let at = word(find(&hook, HOOKNUM)?)?;
    let policy = word(find(&all, POLICY)?)?;
    let is_ours = of == family || of == libc::NFPROTO_INET as u8;
    let name = find(&all, NAME)?.split(|byte| *byte == 0).next()?;
    let drops = is_ours && at == libc::NF_INET_FORWARD as u32 && policy == libc::NF_DROP as u32;
    drops.then(|| String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::netlink::row;

    #[test]
    fn only_a_forward_chain_that_drops() {
        let chain = |family: i32, hook: u32, policy: u32| {
            let hook = row(&[(1, &hook.to_be_bytes()), (2, &[0; 4])]);
            let all = row(&[(1, b"filter\0"), (3, b"FORWARD\0"), (4, &hook), (5, &policy.to_be_bytes())]);
            [&[family as u8, 0, 0, 0][..], &all].concat()
        };
        let v4 = libc::NFPROTO_IPV4 as u8;
        for family in [libc::NFPROTO_INET, libc::NFPROTO_IPV4] {
            assert_eq!(dropping(&chain(family, 2, 0), v4).as_deref(), Some("FORWARD"));
        }
        for other in [chain(libc::NFPROTO_IPV6, 2, 0), chain(libc::NFPROTO_INET, 1, 0), chain(libc::NFPROTO_INET, 2, 1)]
        {
            assert_eq!(dropping(&other, v4), None);
        }
        let plain = [&[v4, 0, 0, 0][..], &row(&[(3, b"rules\0")])].concat(); // no base chain
        assert_eq!(dropping(&plain, v4), None);
        assert_eq!(dropping(&[], v4), None);
    }
}

//! What devices do to packets before the data path sees them: features according to the kernel's ethtool family.

use crate::network::netlink::{Netlink, attributes, find, request, row};
use nix::libc;
use std::{ffi::CStr, io};

/// Large receive offload: joins segments, and forgets where they began. The kernel cannot take such packets apart again.
pub const LRO: &str = "rx-lro";
/// Joins segments in lists, each with its own headers (`make_one()` in bpf/offload.h).
pub const LISTS: &str = "rx-gro-list";

// <linux/genetlink.h>, <linux/ethtool_netlink.h>
const CONTROL: u16 = 0x10; // GENL_ID_CTRL
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const FEATURES_GET: u8 = 11;
const FEATURES_SET: u8 = 12;
const HEADER: u16 = 1;
const DEVICE: u16 = 1;
const WANTED: u16 = 3;
const ACTIVE: u16 = 4;
const BITS: u16 = 3;
const BIT: u16 = 1;
const NAME: u16 = 2;
const NESTED: u16 = libc::NLA_F_NESTED as u16;
/// Size of `struct genlmsghdr` in bytes.
const INFO: usize = 4;

fn command(number: u8) -> [u8; INFO] {
    [number, 1, 0, 0]
}

/// Asks the ethtool family. Returns the attributes of the answer.
fn ask(number: u8, device: u32, more: &[(u16, &[u8])]) -> io::Result<Vec<u8>> {
    let mut netlink = Netlink::generic()?;
    let family = netlink.ask(&request(CONTROL, 0, &command(GET_FAMILY), &[(FAMILY_NAME, b"ethtool\0")]))?;
    let family = attributes(family.get(INFO..).unwrap_or_default());
    let id = find(&family, FAMILY_ID).and_then(|id| id.first_chunk().copied());
    let id = u16::from_ne_bytes(id.ok_or(io::ErrorKind::InvalidData)?);
    let header = row(&[(DEVICE, &device.to_ne_bytes())]);
    let all = [&[(HEADER | NESTED, &header[..])], more].concat();
    let answer = netlink.ask(&request(id, 0, &command(number), &all))?;
    Ok(answer.get(INFO..).unwrap_or_default().to_vec())
}

/// Returns the names of the features that are on, as `ethtool -k` knows them.
pub fn features(device: u32) -> io::Result<Vec<String>> {
    let answer = ask(FEATURES_GET, device, &[])?;
    let inside = |all: &[(u16, &[u8])], kind| find(all, kind).map(<[u8]>::to_vec).unwrap_or_default();
    let bits = inside(&attributes(&inside(&attributes(&answer), ACTIVE)), BITS);
    let name =
        |bit: &[u8]| Some(CStr::from_bytes_until_nul(find(&attributes(bit), NAME)?).ok()?.to_str().ok()?.to_owned());
    Ok(attributes(&bits).into_iter().filter_map(|(_, bit)| name(bit)).collect())
}

/// Switches a feature off. Returns whether it was on. Fails if it is still on.
pub(crate) fn switch_off(device: u32, feature: &str) -> io::Result<bool> {
    let is_on = || Ok::<_, io::Error>(features(device)?.iter().any(|f| f == feature));
    if !is_on()? {
        return Ok(false);
    }
    let bit = row(&[(NAME, format!("{feature}\0").as_bytes())]);
    let bits = row(&[(BIT | NESTED, &bit)]);
    ask(FEATURES_SET, device, &[(WANTED | NESTED, &row(&[(BITS | NESTED, &bits)]))])?;
    if is_on()? { Err(io::ErrorKind::Unsupported.into()) } else { Ok(true) }
}

/// Switches large receive offload off, as the kernel does on devices that it routes from.
pub(crate) fn without_lro(device: u32) {
    match switch_off(device, LRO) {
        Ok(false) => {}
        Ok(true) => tracing::info!(device, "switched large receive offload off: what it joins cannot be forwarded"),
        Err(error) => {
            tracing::warn!(device, %error, "cannot switch large receive offload off: if it is on, connections stall");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_features() {
        let all = features(1).expect("those of the loopback device");
        assert!(all.iter().any(|f| f == "tx-tcp-segmentation") && !all.iter().any(|f| f == LRO), "{all:?}");
        assert_eq!(features(0x7fff_ffff).expect_err("no device").raw_os_error(), Some(libc::ENODEV));
        assert!(!switch_off(1, LRO).expect("nothing to do"));
    }
}

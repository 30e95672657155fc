//! Counters of a lab's devices and kernel: the packet sizes that a forwarder handled. And longsplice's own: how much it spliced.

use super::{
    Result,
    venue::{OURS, Venue},
};
use longsplice::Ask;
use longsplice_lab::Namespace;
use serde_json::Value;
use std::fs;

/// Counters of a device since its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Bytes received, including the headers of every packet.
    pub received_bytes: u64,
    /// Packets received, before coalescing.
    pub received: u64,
    /// Packets sent.
    pub sent: u64,
}

impl Device {
    /// Reads the current counters.
    pub fn of(host: &Namespace, name: &str) -> Result<Device> {
        let table = host.run(|| fs::read_to_string("/proc/thread-self/net/dev"))?;
        Ok(Device::parse(&table, name).ok_or_else(|| format!("no {name} in /proc/net/dev"))?)
    }

    fn parse(table: &str, name: &str) -> Option<Device> {
        let line = table.lines().find_map(|l| l.trim().strip_prefix(name)?.strip_prefix(':'))?;
        let fields: Vec<u64> = line.split_whitespace().map_while(|f| f.parse().ok()).collect();
        let [received_bytes, received, .., sent] = *fields.get(..10)? else { return None };
        Some(Device { received_bytes, received, sent })
    }
}

/// Packets from the server as the forwarder handled them: after coalescing by the device, if enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FromServer {
    bytes: u64,
    packets: u64,
}

impl FromServer {
    /// Reads the counters. The kernel counts packets that it receives or routes, the data path those that it forwards
    /// before. Packets from the client are subtracted: they are acknowledgements, which are never coalesced.
    pub fn so_far<E>(venue: &Venue<E>) -> Result<FromServer> {
        let lab = &venue.lab;
        let [client, server] = [lab.client_device(), lab.server_device()].map(|name| Device::of(&lab.forwarder, name));
        let routed = lab.forwarder.counter("Ip", "InReceives").ok_or("no InReceives in /proc/net/snmp")?;
        let handled = routed + if venue.variant.is_spliced() { forwarded(venue)? } else { 0 };
        Ok(FromServer { bytes: server?.received_bytes, packets: handled.saturating_sub(client?.received) })
    }

    /// Average packet size in bytes since `before`, headers included.
    pub fn size_since(self, before: FromServer) -> Option<f64> {
        let packets = self.packets.checked_sub(before.packets).filter(|n| *n > 0)?;
        Some((self.bytes - before.bytes) as f64 / packets as f64)
    }
}

/// Packets forwarded by longsplice's data path, in both directions.
fn forwarded<E>(venue: &Venue<E>) -> Result<u64> {
    let answer = venue.control(OURS)?.ask(Ask::Counters)?;
    let verdict = |name: &str| answer["verdicts"][name].as_u64();
    let all: Option<u64> = ["forwarded", "forwarded-slow", "forwarded-early"].into_iter().map(verdict).sum();
    Ok(all.ok_or("longsplice does not say how many packets it forwarded")?)
}

/// Connections and replies of a longsplice so far, by what has become of them. Both are zero for other variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flows {
    spliced: u64,
    copied: u64,
}

impl Flows {
    /// Those of the only longsplice of a venue.
    pub fn of<E>(venue: &Venue<E>) -> Result<Flows> {
        if !venue.variant.is_longsplice() {
            return Ok(Flows::default());
        }
        let answer = venue.control(OURS)?.ask(Ask::Counters)?;
        let listeners = answer["listeners"].as_array().ok_or("longsplice does not say what it has spliced")?;
        let refused = listeners.iter().filter_map(|l| l["refused"].as_object()).flat_map(|all| all.values());
        let sum = |counts: &mut dyn Iterator<Item = &Value>| counts.filter_map(Value::as_u64).sum();
        Ok(Flows { spliced: sum(&mut listeners.iter().map(|l| &l["spliced"])), copied: sum(&mut refused.into_iter()) })
    }

    /// Share of those since `before` that were spliced. `None` if there are none.
    pub fn share_since(self, before: Flows) -> Option<f64> {
        let (spliced, copied) = (self.spliced - before.spliced, self.copied - before.copied);
        (spliced + copied > 0).then(|| spliced as f64 / (spliced + copied) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_device() {
        let table = "Inter-|   Receive\n face |bytes    packets\n    f1: 3028 2 0 0 0 0 0 0 132 7 0 0 0 0 0 0\n";
        assert_eq!(Device::parse(table, "f1"), Some(Device { received_bytes: 3028, received: 2, sent: 7 }));
        assert_eq!(Device::parse(table, "f"), None);
        assert_eq!(Device::parse("f1: 1 2\n", "f1"), None);
    }

    #[test]
    fn the_share_that_is_spliced() {
        let at = |spliced, copied| Flows { spliced, copied };
        assert_eq!(at(5, 9).share_since(at(2, 8)), Some(0.75));
        assert_eq!(at(2, 8).share_since(at(2, 8)), None, "there was none");
    }

    #[test]
    fn an_average_packet() {
        let at = |bytes, packets| FromServer { bytes, packets };
        assert_eq!(at(4000, 5).size_since(at(1000, 3)), Some(1500.0));
        assert_eq!(at(1000, 3).size_since(at(1000, 3)), None, "none came");
    }
}

//! Cost of a small packet on one CPU: a [flood](longsplice_lab::flood) of random flows through each way of forwarding. The
//! cost includes generator and sink, which are the same for all.
//!
//! To add a way of forwarding, add a [`Variant`] and its case in [`Venue::set`].

use super::{
    Bench, Result,
    limits::{self, Raised},
    machine::Watch,
    network,
    results::{Run, Section, plural},
    segment::on_one_cpu,
    variant::Variant,
    venue::{Venue, load_rules, ruleset},
};
use longsplice_datapath::{Datapath, IdleLeg, NextHop, Options, Pair, Tuple};
use longsplice_lab::{
    Lab,
    flood::{self, Aim, Flood},
    topology,
};
use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

/// The variants measured.
const VARIANTS: [Variant; 7] = [
    Variant::IpForward,
    Variant::Filter,
    Variant::Nat,
    Variant::Tcx,
    Variant::TcxPeer,
    Variant::Xdp,
    Variant::Identity,
];
/// Time until tables and caches have seen the flows.
const WARM_UP: Duration = Duration::from_millis(100);
/// Time limit for connection tracking to learn the flows.
const MEETING: Duration = Duration::from_secs(60);
/// Maximum fraction of lost packets and of unknown flows. If more packets are lost, the time measured is not that of the
/// packets received; if more flows are unknown before, it is not that of known flows.
const LOSS: f64 = 0.01;
/// Window scale, large because the sequence numbers of a flow among a million grow in large steps.
const SCALE: u8 = 14;
/// Offset between the sequence numbers on the server's and the client's connections.
const AHEAD: u32 = 1 << 30;

/// Measures all numbers of flows, with the rounds interleaved.
pub fn measure(bench: &Bench<'_>) -> Result<()> {
    let case = |flows: &u32| {
        let mut venues = bench.venues(&VARIANTS, |v| Flooded::flooded(v, *flows))?;
        let row = plural((*flows).into(), "flow");
        bench.rounds(Section::Flood, &row, &VARIANTS, |v| venues.of_mut(v)?.flood(bench.seconds))
    };
    on_one_cpu(|| bench.args.flows.iter().try_for_each(case))
}

/// Address translation like a plug: packets to the proxy's address go to the server. Unlike masquerading, it keeps the
/// source of every flow: with a single source address, the ports would run out after some ten thousand flows.
pub fn translation() -> String {
    let (own, port, to) = (topology::FORWARDER_TO_CLIENT.v4, network::PORT, topology::SERVER.v4);
    format!(
        "table ip bench {{\nchain prerouting {{ type nat hook prerouting priority dstnat;\n\
         ip daddr {own} tcp dport {port} dnat to {to}\n}}\n}}\n"
    )
}

/// A lab with one variant in the middle.
type Flooded = Venue<Generator>;

/// What makes the packets, and what forwards and tracks them.
struct Generator {
    flood: Flood,
    datapath: Option<Datapath>,
    _room: Option<Raised>,
}

impl Flooded {
    fn flooded(variant: Variant, flows: u32) -> Result<Flooded> {
        let venue = Venue::new(variant, network::lab(network::Packets::Large, variant.routed())?)?;
        let lab = &venue.lab;
        let (mut datapath, mut room) = (None, None);
        match variant {
            Variant::Tcx => datapath = Some(splice(lab, flows, Options::default(), legs)?),
            Variant::Identity => datapath = Some(splice(lab, flows, Options::default(), same_legs)?),
            Variant::TcxPeer => {
                let peer = vec![lab.server_device().into()];
                datapath = Some(splice(lab, flows, Options { peer, ..Options::default() }, legs)?);
            }
            Variant::Xdp => {
                // lets a veth accept the frames that XDP sends to its peer, as a network card does
                lab.server.execute("ethtool", &["-K", "s0", "gro", "on"])?;
                let xdp = vec![lab.client_device().into()];
                datapath = Some(splice(lab, flows, Options { xdp, ..Options::default() }, legs)?);
            }
            Variant::Nat => {
                load_rules(lab, &translation())?;
                room = Some(Raised::for_tracked(&lab.forwarder, flows)?);
            }
            routed => ruleset(routed).map_or(Ok(()), |rules| load_rules(lab, &rules))?,
        }
        let v4 = |address| match address {
            SocketAddr::V4(v4) => v4,
            SocketAddr::V6(v6) => unreachable!("{v6}: the venue has IPv4 addresses"),
        };
        let to_server = variant.to_server() && variant != Variant::Nat;
        let target = v4(if to_server { network::server() } else { network::proxy() });
        let flood = Flood::new(lab, Aim { flows, target, arrives_at: network::server().port() })?;
        let mut venue = venue.with(Generator { flood, datapath, _room: room });
        if variant == Variant::Nat {
            venue.meet(flows)?;
        }
        Ok(venue)
    }

    /// Floods until connection tracking knows the flows: a new flow costs more than a known one.
    fn meet(&mut self, flows: u32) -> Result<()> {
        let enough = (f64::from(flows) * (1.0 - LOSS)).ceil() as u64;
        let began = Instant::now();
        loop {
            let run = self.ends.flood.run(WARM_UP)?;
            let known = limits::tracked(&self.lab.forwarder)?;
            if known >= enough {
                return Ok(());
            }
            if run.arrived == 0 || began.elapsed() > MEETING {
                return Err(format!("connection tracking holds {known} of {flows} flows").into());
            }
        }
    }

    fn flood(&mut self, seconds: f64) -> Result<Run> {
        let first = self.ends.flood.run(WARM_UP)?;
        if first.arrived == 0 {
            return Err(format!("nothing arrives; {}", self.verdicts()).into());
        }
        let watch = Watch::start();
        let flooded = self.ends.flood.run(Duration::from_secs_f64(seconds))?;
        let mut cost = watch.stop();
        if self.ends.flood.wrong()? > 0 {
            return Err("packets arrive with wrong checksums".into());
        }
        let lost = 1.0 - flooded.arrived as f64 / flooded.sent.max(1) as f64;
        let loss = (lost > LOSS).then(|| format!("{:.1} % of the packets were lost", lost * 100.0));
        cost.disturbed = loss.or(cost.disturbed);
        cost.seconds = flooded.elapsed.as_secs_f64();
        let nanos = flooded.cpu.as_nanos() as f64 / flooded.arrived.max(1) as f64;
        Ok(Run::new(self.variant, cost, flooded.arrived as f64, nanos, nanos / 1e3))
    }

    /// The data path's verdict counters.
    fn verdicts(&self) -> String {
        let all = self.ends.datapath.as_ref().and_then(|d| d.verdicts().ok()).unwrap_or_default();
        let some: Vec<String> = all.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
        some.join(", ")
    }
}

/// Both legs of a flow, without their next hops: as in [`IdleLeg`].
type Legs = Pair<(Tuple, [u32; 2])>;

/// The legs of a proxy.
fn legs(flow: u32) -> Legs {
    let (remote, local) = (Flood::source(flow).into(), Flood::other_side(flow).into());
    Pair {
        client: (Tuple { remote, local: network::proxy() }, [flood::FIRST_SEQ, flood::ACK]),
        server: (Tuple { remote: network::server(), local }, [flood::ACK + AHEAD, flood::FIRST_SEQ + AHEAD]),
    }
}

/// The legs of a transparent proxy.
fn same_legs(flow: u32) -> Legs {
    let (client, server) = (Flood::source(flow).into(), network::server());
    Pair {
        client: (Tuple { remote: client, local: server }, [flood::FIRST_SEQ, flood::ACK]),
        server: (Tuple { remote: server, local: client }, [flood::ACK, flood::FIRST_SEQ]),
    }
}

/// Attaches the data path and installs the flows.
fn splice(lab: &Lab, flows: u32, options: Options, legs: fn(u32) -> Legs) -> Result<Datapath> {
    let hop = |device: &str, host: &longsplice_lab::Namespace, its: &str| -> Result<NextHop> {
        let (own, neighbour) = (lab.forwarder.link(device)?, host.link(its)?);
        Ok(NextHop { device: own.index, to: neighbour.mac, from: own.mac })
    };
    let to_client = hop(lab.client_device(), &lab.client, "c0")?;
    let hops = Pair::new(to_client, hop(lab.server_device(), &lab.server, "s0")?);
    let options = Options { max_flows: flows, ..options }.with_smallest_rings();
    let datapath = lab.forwarder.run(|| Datapath::open(&options))?;
    let idle = |((leg, [end, ack]), hop): ((Tuple, [u32; 2]), NextHop)| IdleLeg { leg, hop, end, ack, scale: SCALE };
    let all: Vec<Pair<IdleLeg>> = (0..flows).map(|n| legs(n).zip(hops).map(idle)).collect();
    lab.forwarder.run(|| datapath.install(&all))?;
    Ok(datapath)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_to_the_proxy_goes_to_the_server() {
        assert!(translation().contains("ip daddr 10.77.1.1 tcp dport 7000 dnat to 10.77.2.2\n"), "{}", translation());
    }
}

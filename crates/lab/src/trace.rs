//! Packet captures on a device: times, sequence numbers and flags.
//!
//! `tcpdump` writes a pcap file, which is parsed here: the classic format with nanoseconds, link type Ethernet, TCP over
//! IPv4 or IPv6 without extension headers. Other packets are skipped.

use std::env;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::report::tail;
use crate::{ChildGuard, LabError, Namespace, Report};

/// Time limit for tcpdump to get ready.
const PATIENCE: Duration = Duration::from_secs(10);
/// Capture length: the longest Ethernet, IPv6 and TCP headers, and some to spare. The payload is not needed.
const SNAP: &str = "160";
/// The kernel's capture buffer in KiB. Holds a few hundred thousand packets of that length.
const BUFFER: &str = "65536";

/// A running capture. Dropping it discards the packets.
#[derive(Debug)]
pub struct Tap {
    tcpdump: ChildGuard,
    file: tempfile::NamedTempFile,
}

impl Tap {
    /// Starts a capture on a device. Packets sent after this returns are captured.
    pub fn start(namespace: &Namespace, device: &str) -> Result<Self, LabError> {
        let file = tempfile::NamedTempFile::new().map_err(LabError::io("temporary file"))?;
        let mut command = namespace.command("tcpdump");
        // Stay root: tcpdump would otherwise drop the privilege to write the file.
        command.args(["-i", device, "-n", "-U", "--immediate-mode", "--time-stamp-precision=nano", "-Z", "root"]);
        command
            .args(["-s", SNAP, "-B", BUFFER, "-w"])
            .arg(file.path())
            .arg("tcp or udp or arp or icmp or icmp6 or ip6 proto 44");
        // The signal that ends a test that hangs goes to its group: the capture has to be read afterwards.
        let mut tcpdump = ChildGuard::spawn(command.process_group(0))?;
        tcpdump.wait_output("listening on", PATIENCE)?;
        Ok(Self { tcpdump, file })
    }

    /// Stops the capture and keeps the file for people.
    pub fn keep(mut self, file: &Path) -> Result<(), LabError> {
        self.end()?;
        std::fs::copy(self.file.path(), file).map(drop).map_err(LabError::io("the capture"))
    }

    fn end(&mut self) -> Result<(), LabError> {
        self.catch_up()?;
        self.tcpdump.signal(Signal::SIGINT)?;
        match self.tcpdump.wait(PATIENCE) {
            Some(_) => Ok(()),
            None => Err(LabError::Late { what: "the end of tcpdump".into(), seconds: PATIENCE.as_secs() }),
        }
    }

    /// Stops the capture and parses it: all packets that passed the device before this call.
    pub fn stop(mut self) -> Result<Trace, LabError> {
        self.end()?;
        let pcap = std::fs::read(self.file.path()).map_err(LabError::io("the capture"))?;
        let packets = packets(&pcap).ok_or_else(|| {
            LabError::io("the capture")(std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                "not pcap with nanoseconds",
            ))
        })?;
        Ok(Trace { packets, dropped: counted(&self.tcpdump.output(), "dropped by kernel").unwrap_or(0) })
    }

    /// Waits until tcpdump has written all packets captured before this call:
    /// on a signal it exits at once, and loses what the kernel still buffers.
    fn catch_up(&mut self) -> Result<(), LabError> {
        let deadline = Instant::now() + PATIENCE;
        let mut came = None;
        while Instant::now() < deadline {
            let before = self.tcpdump.output().len();
            self.tcpdump.signal(Signal::SIGUSR1)?; // asks for its packet counts
            while Instant::now() < deadline {
                let words = self.tcpdump.output().split_off(before);
                let of = |what| counted(&words, what);
                if let (Some(written), Some(all)) = (of("captured"), of("received by filter")) {
                    let lost = of("dropped by kernel").unwrap_or(0);
                    if written + lost >= *came.get_or_insert(all) {
                        return Ok(());
                    }
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Err(LabError::Late { what: "what tcpdump had to write".into(), seconds: PATIENCE.as_secs() })
    }
}

/// The variable that names a directory where captures of a failed test are kept. Without it, no test captures: packets of which a
/// capture has a copy take another way through the data path, and every one would take longer.
const CAPTURE: &str = "LAB_CAPTURE";

/// The packets of all hosts of a lab, on all devices, if the environment asks for them.
pub(crate) fn report<'a>(name: String, hosts: impl Iterator<Item = &'a Namespace>) -> Result<Report, LabError> {
    let Some(folder) = env::var_os(CAPTURE).filter(|folder| !folder.is_empty()).map(PathBuf::from) else {
        return Ok(Report::new(name, || {
            format!("packets: not captured. With {CAPTURE}=DIR, the next run keeps and shows them")
        }));
    };
    let tap = |host: &Namespace| Tap::start(host, "any").map(|tap| (host.clone(), tap));
    let taps = hosts.map(tap);
    let taps = Mutex::new(taps.collect::<Result<Vec<_>, _>>()?);
    Ok(Report::new(name, move || {
        let taps = std::mem::take(&mut *taps.lock().unwrap_or_else(PoisonError::into_inner));
        let all = taps.into_iter().map(|(host, tap)| {
            let file = folder.join(format!("{}.pcap", host.name()));
            match tap.keep(&file).and_then(|()| listed(&host, &file)) {
                Ok(packets) => format!("packets: {}\n{packets}\n", file.display()),
                Err(error) => format!("packets: {}: {error}\n", file.display()),
            }
        });
        all.collect()
    }))
}

/// The last packets of a capture, for people. Names of devices are known in their host only.
fn listed(host: &Namespace, file: &Path) -> Result<String, LabError> {
    host.execute("tcpdump", &["-n", "-r", &file.display().to_string()]).map(|all| tail(&all))
}

/// The packets captured on a device.
#[derive(Clone, Debug)]
pub struct Trace {
    /// TCP packets in order of time.
    pub packets: Vec<Packet>,
    /// Packets that the kernel could not buffer. If there are any, gaps in the trace mean nothing.
    pub dropped: u64,
}

impl Trace {
    /// The packets between two addresses, both directions.
    pub fn connection(&self, one: SocketAddr, other: SocketAddr) -> Vec<Packet> {
        let between = |p: &&Packet| (p.from, p.to) == (one, other) || (p.from, p.to) == (other, one);
        self.packets.iter().filter(between).copied().collect()
    }

    /// The packets from one address to another.
    pub fn direction(&self, from: SocketAddr, to: SocketAddr) -> Vec<Packet> {
        self.packets.iter().filter(|p| (p.from, p.to) == (from, to)).copied().collect()
    }
}

/// The header of one TCP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Time of capture since the epoch.
    pub time: Duration,
    /// Source address.
    pub from: SocketAddr,
    /// Destination address.
    pub to: SocketAddr,
    /// Sequence number, as on the wire.
    pub seq: u32,
    /// Acknowledgement number, as on the wire.
    pub ack: u32,
    /// Payload length in bytes.
    pub len: u32,
    /// Window as on the wire, unscaled.
    pub window: u16,
    /// TCP flags.
    pub flags: Flags,
}

/// The flags of a TCP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// FIN.
    pub fn fin(self) -> bool {
        self.0 & 0x01 != 0
    }
    /// SYN.
    pub fn syn(self) -> bool {
        self.0 & 0x02 != 0
    }
    /// RST.
    pub fn rst(self) -> bool {
        self.0 & 0x04 != 0
    }
    /// PSH.
    pub fn psh(self) -> bool {
        self.0 & 0x08 != 0
    }
    /// ACK.
    pub fn ack(self) -> bool {
        self.0 & 0x10 != 0
    }
}

/// The number in tcpdump's last report about its packets, as in "3 packets dropped by kernel".
fn counted(words: &str, what: &str) -> Option<u64> {
    words.split(['\n', ',']).rev().find_map(|part| {
        let mut before = part.trim_end().strip_suffix(what)?.split_whitespace().rev().skip(1);
        before.next()?.parse().ok()
    })
}

/// Parses a pcap file. A truncated record ends it: tcpdump was still writing.
fn packets(pcap: &[u8]) -> Option<Vec<Packet>> {
    const NANOSECONDS: u32 = 0xa1b2_3c4d;
    const ETHERNET: u32 = 1;
    const FILE_HEADER: usize = 24;
    // Numbers are in the byte order of the machine that wrote the file: this one.
    let number = |at: usize| Some(u32::from_ne_bytes(pcap.get(at..at + 4)?.try_into().ok()?));
    if number(0)? != NANOSECONDS || number(20)? != ETHERNET {
        return None;
    }
    let mut packets = Vec::new();
    let mut at = FILE_HEADER;
    while let (Some(seconds), Some(nanoseconds), Some(kept)) = (number(at), number(at + 4), number(at + 8)) {
        let Some(frame) = pcap.get(at + 16..at + 16 + kept as usize) else {
            break;
        };
        packets.extend(packet(Duration::new(seconds.into(), nanoseconds), frame));
        at += 16 + kept as usize;
    }
    Some(packets)
}

fn packet(time: Duration, frame: &[u8]) -> Option<Packet> {
    const TCP: u8 = 6;
    let ip = frame.get(14..)?;
    let (from, to, tcp, tcp_len) = match frame.get(12..14)? {
        [0x08, 0x00] => {
            let header = usize::from(ip.first()? & 0xf) * 4;
            let [from, to] =
                [12, 16].map(|at| ip.get(at..at + 4)?.try_into().ok().map(|ip: [u8; 4]| Ipv4Addr::from(ip)));
            let total = u32::from(number16(ip, 2)?);
            (*ip.get(9)? == TCP).then_some(())?;
            (IpAddr::V4(from?), IpAddr::V4(to?), ip.get(header..)?, total.checked_sub(header as u32)?)
        }
        [0x86, 0xdd] => {
            let [from, to] =
                [8, 24].map(|at| ip.get(at..at + 16)?.try_into().ok().map(|ip: [u8; 16]| Ipv6Addr::from(ip)));
            (*ip.get(6)? == TCP).then_some(())?;
            (IpAddr::V6(from?), IpAddr::V6(to?), ip.get(40..)?, u32::from(number16(ip, 4)?))
        }
        _ => return None,
    };
    let header = u32::from(*tcp.get(12)? >> 4) * 4;
    Some(Packet {
        time,
        from: SocketAddr::new(from, number16(tcp, 0)?),
        to: SocketAddr::new(to, number16(tcp, 2)?),
        seq: number32(tcp, 4)?,
        ack: number32(tcp, 8)?,
        len: tcp_len.checked_sub(header)?,
        window: number16(tcp, 14)?,
        flags: Flags(*tcp.get(13)?),
    })
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_capture_is_refused() {
        assert_eq!(packets(b""), None);
        assert_eq!(packets(&[0; 100]), None);
    }

    #[test]
    fn a_frame_that_is_cut_off_is_no_packet() {
        let mut frame = vec![0; 14 + 20 + 20];
        (frame[12], frame[14], frame[17], frame[14 + 9], frame[14 + 20 + 12]) = (8, 0x45, 40, 6, 0x50);
        assert!(packet(Duration::ZERO, &frame).is_some());
        for len in 0..frame.len() - 4 {
            assert_eq!(packet(Duration::ZERO, &frame[..len]), None, "{len}");
        }
    }

    #[test]
    fn counts_are_read() {
        let words = "tcpdump: 1 packet captured, 10 packets received by filter, 0 packets dropped by kernel\n\
                     10 packets captured\n12 packets received by filter\n2 packets dropped by kernel\n";
        let of = |what| counted(words, what);
        assert_eq!((of("captured"), of("received by filter"), of("dropped by kernel")), (Some(10), Some(12), Some(2)));
        assert_eq!(counted(words.lines().next().unwrap(), "captured"), Some(1));
        assert_eq!(counted("listening\n", "captured"), None);
    }
}

//! What the next process has to know of a flow that is forwarded, or in a switch ([`FlowRecord`]). It is written when a switch
//! begins, when the flow is spliced, and when it is released; and removed when the flow is in control mode again, or just before its
//! end is told. So the next process tells the ends of those of which it finds a record, and of no others.

use crate::{
    core::{Core, Position, Progress, Stream, Time},
    engine::flow::{Flow, ForwardedFlow},
    engine::purpose::Purpose,
    types::{FlowInfo, FlowState},
};
use bytes::{Buf, BufMut, TryGetError};
use longsplice_datapath::{Connection, Datapath, FlowRecordId, FlowRecords, Pair, Released, Tuple};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Once,
};

/// Version of the layout, in the first byte. The one before has no description, and no records of drains.
const LAYOUT: u8 = 2;

/// Where the next process finds what it has to know of a flow.
#[derive(Debug, Default)]
pub(crate) struct Recorded(Option<FlowRecordId>);

impl Recorded {
    pub fn is_written(&self) -> bool {
        self.0.is_some()
    }

    pub fn write(&mut self, d: &Datapath, record: &FlowRecord) {
        static WARNED: Once = Once::new();
        let records = d.flow_records();
        let put = |contents: &[u8]| self.0.map_or_else(|| records.put(contents), |old| records.replace(old, contents));
        match put(&record.to_bytes(FlowRecords::MOST)) {
            Ok(at) => self.0 = Some(at),
            Err(error) => WARNED.call_once(|| {
                tracing::warn!(%error, "cannot write the record of a spliced flow: the next process will not know whose it is; this is said once");
            }),
        }
    }

    pub fn remove(&mut self, d: &Datapath) {
        self.0.take().into_iter().for_each(|at| d.flow_records().remove(at));
    }
}

impl From<FlowRecordId> for Recorded {
    fn from(at: FlowRecordId) -> Recorded {
        Recorded(Some(at))
    }
}

/// A record that an earlier process has left, and where it is.
pub(crate) struct Left {
    pub at: FlowRecordId,
    pub record: FlowRecord,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct FlowRecord {
    pub id: u64,
    /// Number of processes that it has lived through, with the one that writes this.
    pub processes: u32,
    /// One message of a connection is forwarded, for a caller who is gone with his process.
    pub is_message: bool,
    /// [`Core::is_fin_past`](crate::core::Core::is_fin_past).
    pub fin_past: bool,
    /// [`Core::may_be_beyond`](crate::core::Core::may_be_beyond).
    pub is_forced: bool,
    /// It is not forwarded yet: what its sockets held is passed on first. Then it has copied so much.
    pub is_draining: bool,
    pub info: FlowInfo,
    pub legs: Pair<Tuple>,
    pub generations: Pair<u32>,
    pub announced: Option<Box<(SocketAddr, SocketAddr)>>,
    /// When the flow began.
    pub began: Time,
    /// Positions of the sockets that it had.
    pub at: Pair<Position>,
    /// See [`Progress`].
    pub copied: Pair<u64>,
    pub spliced: Pair<u64>,
    pub since: Pair<u64>,
    pub splices: u32,
    /// Its legs, if it was released. Otherwise the data path has their records.
    pub released: Option<Pair<Released>>,
    /// What its caller has said of it: [`Finish::description`](crate::Finish).
    pub description: Option<String>,
}

impl FlowRecord {
    /// Describes a flow of this process that is forwarded.
    pub fn of(flow: &Flow, kept: &ForwardedFlow) -> FlowRecord {
        let at = kept.parked.each_ref().map(|parked| parked.at);
        let record = FlowRecord::new(flow, (&kept.core, &kept.purpose), at);
        FlowRecord { released: kept.sockets.released().copied(), ..record }
    }

    /// Describes a flow of this process in the drain before it is forwarded.
    pub fn of_drain(flow: &Flow, core: &Core, purpose: &Purpose, at: Pair<Position>) -> FlowRecord {
        let copied = core.streams().each_ref().map(Stream::when_drained);
        FlowRecord { is_draining: true, copied, ..FlowRecord::new(flow, (core, purpose), at) }
    }

    fn new(flow: &Flow, (core, purpose): (&Core, &Purpose), at: Pair<Position>) -> FlowRecord {
        let now = *flow.now();
        FlowRecord {
            id: flow.id,
            processes: flow.processes,
            is_message: matches!(purpose, Purpose::Message(_)),
            fin_past: core.is_fin_past(),
            is_forced: core.may_be_beyond(),
            is_draining: false,
            info: flow.info.clone(),
            legs: flow.legs,
            generations: flow.connections().map(|connection| connection.generation),
            announced: flow.announced.clone(),
            began: flow.began.into(),
            at,
            copied: now.copied,
            spliced: now.spliced,
            since: now.since,
            splices: now.splices,
            released: None,
            description: if let Purpose::Streams(done) = purpose { done.description() } else { None },
        }
    }

    /// Returns the legs' connections.
    pub fn connections(&self) -> Pair<Connection> {
        self.legs.zip(self.generations).map(|(leg, generation)| Connection { leg, generation })
    }

    /// Returns the client's address: `Leg::source`.
    pub fn source(&self) -> SocketAddr {
        self.announced.as_ref().map_or(self.legs.client.remote, |announced| announced.0)
    }

    /// Returns the progress of the flow when this was written.
    pub fn progress(&self) -> Progress {
        let FlowRecord { copied, spliced, since, splices, .. } = *self;
        Progress { state: FlowState::Released, copied, spliced, since, splices, ..Progress::new(None) }
    }

    /// Writes it as bytes, in this machine's byte order. Without its description if there would be more than `most` with it.
    pub fn to_bytes(&self, most: usize) -> Vec<u8> {
        let mut to = Vec::with_capacity(512);
        to.put_u8(LAYOUT);
        let flags = [self.is_message, self.fin_past, self.is_forced, self.is_draining];
        to.put_u8(flags.iter().rev().fold(0, |all, flag| all << 1 | u8::from(*flag)));
        for n in [self.processes, self.splices, self.generations.client, self.generations.server] {
            to.put_u32_ne(n);
        }
        to.put_u64_ne(self.id);
        to.put_u64_ne(self.began.as_nanos() as u64);
        for pair in [&self.copied, &self.spliced, &self.since] {
            pair.iter().for_each(|n| to.put_u64_ne(*n));
        }
        for at in self.at.iter() {
            to.put_u64_ne(at.consumed);
            to.put_u64_ne(at.produced);
            to.put_u8(u8::from(at.eof) | u8::from(at.shut) << 1 | u8::from(at.shimmed) << 2);
        }
        for leg in self.legs.iter() {
            put_address(&mut to, Some(leg.remote));
            put_address(&mut to, Some(leg.local));
        }
        let announced = self.announced.as_deref();
        put_address(&mut to, announced.map(|announced| announced.0));
        put_address(&mut to, announced.map(|announced| announced.1));
        put_address(&mut to, self.info.listen);
        let texts = [Some(&*self.info.protocol), Some(&*self.info.target), self.info.user(), self.info.name.as_deref()];
        texts.into_iter().for_each(|text| put_text(&mut to, text));
        to.put_u8(u8::from(self.released.is_some()));
        self.released.iter().flat_map(|released| released.iter()).for_each(|leg| leg.write(&mut to));
        let text = self.description.as_deref().filter(|text| to.len() + size_of::<u16>() + text.len() <= most);
        put_text(&mut to, text);
        to
    }

    /// Reads what [`FlowRecord::to_bytes`] has written. `None` if another version has written it.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<FlowRecord> {
        let from = &mut bytes;
        let layout = from.try_get_u8().ok()?;
        (1..=LAYOUT).contains(&layout).then(|| FlowRecord::read(from, layout).ok()).flatten()
    }

    fn read(from: &mut &[u8], layout: u8) -> Result<FlowRecord, TryGetError> {
        let flags = from.try_get_u8()?;
        let (processes, splices) = (from.try_get_u32_ne()?, from.try_get_u32_ne()?);
        let generations = Pair::new(from.try_get_u32_ne()?, from.try_get_u32_ne()?);
        let (id, began) = (from.try_get_u64_ne()?, Time::from_nanos(from.try_get_u64_ne()?));
        let mut pair = || Ok::<_, TryGetError>(Pair::new(from.try_get_u64_ne()?, from.try_get_u64_ne()?));
        let (copied, spliced, since) = (pair()?, pair()?, pair()?);
        let mut position = || {
            let (consumed, produced, flags) = (from.try_get_u64_ne()?, from.try_get_u64_ne()?, from.try_get_u8()?);
            let [eof, shut, shimmed] = [1, 2, 4].map(|flag| flags & flag != 0);
            Ok::<_, TryGetError>(Position { consumed, produced, eof, shut, shimmed })
        };
        let at = Pair::new(position()?, position()?);
        let lacks = || TryGetError { requested: 1, available: 0 };
        let mut leg = || {
            let (remote, local) = (get_address(from)?.ok_or_else(lacks)?, get_address(from)?.ok_or_else(lacks)?);
            Ok::<_, TryGetError>(Tuple { remote, local })
        };
        let legs = Pair::new(leg()?, leg()?);
        let announced = get_address(from)?.zip(get_address(from)?).map(Box::new);
        let listen = get_address(from)?;
        let (protocol, target) = (get_text(from)?.unwrap_or_default(), get_text(from)?.unwrap_or_default());
        let (user, name) = (get_text(from)?, get_text(from)?.map(Into::into));
        // The server of a pool is left out: its pool may have another one by then.
        let info = FlowInfo::new(protocol, target).with_user(user).with_listen(listen).with_name(name);
        let released = match from.try_get_u8()? {
            0 => None,
            _ => Some(Pair::new(Released::read(from)?, Released::read(from)?)),
        };
        let description = if layout == 1 { None } else { get_text(from)? };
        Ok(FlowRecord {
            id,
            processes,
            is_message: flags & 1 != 0,
            fin_past: flags & 2 != 0,
            is_forced: flags & 4 != 0,
            is_draining: flags & 8 != 0,
            info,
            legs,
            generations,
            announced,
            began,
            at,
            copied,
            spliced,
            since,
            splices,
            released,
            description,
        })
    }
}

/// A byte for the family, the address, and the port.
fn put_address(to: &mut Vec<u8>, address: Option<SocketAddr>) {
    let Some(address) = address else { return to.put_u8(0) };
    match address.ip() {
        IpAddr::V4(ip) => {
            to.put_u8(4);
            to.put_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            to.put_u8(6);
            to.put_slice(&ip.octets());
        }
    }
    to.put_u16_ne(address.port());
}

fn get_address(from: &mut &[u8]) -> Result<Option<SocketAddr>, TryGetError> {
    let ip: IpAddr = match from.try_get_u8()? {
        0 => return Ok(None),
        4 => {
            let mut octets = [0; 4];
            from.try_copy_to_slice(&mut octets)?;
            octets.into()
        }
        _ => {
            let mut octets = [0; 16];
            from.try_copy_to_slice(&mut octets)?;
            octets.into()
        }
    };
    Ok(Some(SocketAddr::new(ip, from.try_get_u16_ne()?)))
}

/// Its length plus one, or 0, and the text.
fn put_text(to: &mut Vec<u8>, text: Option<&str>) {
    let Some(text) = text else { return to.put_u16_ne(0) };
    // what is longer than any record makes it too long to be written
    let length = text.len().min(usize::from(u16::MAX) - 1);
    to.put_u16_ne(length as u16 + 1);
    to.put_slice(&text.as_bytes()[..length]);
}

fn get_text(from: &mut &[u8]) -> Result<Option<String>, TryGetError> {
    let length = from.try_get_u16_ne()?;
    let Some(length) = length.checked_sub(1) else { return Ok(None) };
    let mut text = vec![0; length.into()];
    from.try_copy_to_slice(&mut text)?;
    Ok(Some(String::from_utf8_lossy(&text).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(listen: &str, target: &str) -> FlowRecord {
        let listen: SocketAddr = listen.parse().unwrap();
        let leg = Tuple { remote: SocketAddr::new(listen.ip(), 40_000), local: listen };
        let position = Position { consumed: 1, produced: u64::MAX, eof: true, shut: false, shimmed: true };
        FlowRecord {
            id: 7,
            processes: 2,
            is_message: true,
            fin_past: false,
            is_forced: true,
            is_draining: true,
            info: FlowInfo::new("socks5", target)
                .with_user(Some("ann".into()))
                .with_listen(Some(listen))
                .with_name(Some("front".into())),
            legs: Pair::both(leg),
            generations: Pair::new(3, u32::MAX),
            announced: Some(Box::new((leg.local, leg.remote))),
            began: Time::from_nanos(5),
            at: Pair::new(position, Position::default()),
            copied: Pair::new(1, 2),
            spliced: Pair::new(3, 4),
            since: Pair::new(5, 6),
            splices: 9,
            released: None,
            description: Some("{}".into()),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for listen in ["192.0.2.1:80", "[2001:db8::1]:443"] {
            let one = record(listen, "example.org:443");
            let mut bytes = one.to_bytes(FlowRecords::MOST);
            let other = FlowRecord::from_bytes(&bytes).unwrap();
            assert_eq!(format!("{one:?}"), format!("{other:?}"));
            bytes[0] = 1;
            let before = FlowRecord { description: None, ..one };
            assert_eq!(format!("{:?}", FlowRecord::from_bytes(&bytes).unwrap()), format!("{before:?}"));
        }
        let bare = FlowRecord {
            info: FlowInfo::new("plug", ""),
            announced: None,
            is_message: false,
            fin_past: true,
            ..record("192.0.2.1:80", "")
        };
        assert_eq!(
            format!("{:?}", FlowRecord::from_bytes(&bare.to_bytes(FlowRecords::MOST)).unwrap()),
            format!("{bare:?}")
        );
    }

    #[test]
    fn what_is_not_whole_is_not_read() {
        let bytes = record("[2001:db8::1]:443", "example.org:443").to_bytes(FlowRecords::MOST);
        for length in 0..bytes.len() {
            assert!(FlowRecord::from_bytes(&bytes[..length]).is_none(), "{length}");
        }
        let mut other = bytes;
        other[0] = LAYOUT + 1;
        assert!(FlowRecord::from_bytes(&other).is_none(), "another version's");
    }

    /// The longest name of RFC 1035, and the longest user of RFC 1929.
    #[test]
    fn the_longest_names_fit() {
        let mut longest = record("[2001:db8::1]:443", &format!("{}:65535", "x".repeat(255)));
        longest.info = longest.info.with_user(Some("u".repeat(255)));
        let room = FlowRecords::MOST - 2 * size_of::<Released>();
        assert!(longest.to_bytes(room).len() <= room);
        assert!(FlowRecord::from_bytes(&longest.to_bytes(room)).unwrap().description.is_some());
        // a description that does not fit is left out, and everything else stays
        longest.description = Some("d".repeat(1024));
        let bytes = longest.to_bytes(FlowRecords::MOST);
        assert!(bytes.len() <= FlowRecords::MOST);
        longest.description = None;
        assert_eq!(format!("{:?}", FlowRecord::from_bytes(&bytes).unwrap()), format!("{longest:?}"));
    }
}

//! The handle of a data path, with access to its tables. Other files implement what needs more than that.

use crate::{
    Agreed, Connection, ExpectError, ExpectedLeg, LegFlags, LegView, Pair, PathFlags, PathView, SwitchError, Tuple,
    abi,
    attaching::attachment::{Attachment, Mended},
    error::OpenError,
    hops::vias::NextHops,
    network::conntrack::{Conntrack, ConntrackCounts},
    tables::flow_records::FlowRecords,
    tables::maps::{Maps, sum_of},
    tables::remotes::Remotes,
    tables::rest::{self, Rest},
};
use nix::sys::eventfd::EventFd;
use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::SeqCst, fence},
    },
    time::Duration,
};

/// A loaded and attached data path. Dropping it leaves links and maps pinned: spliced flows go on.
pub struct Datapath {
    pub(crate) maps: Maps,
    pub(crate) switch: OwnedFd,
    pub(crate) adopt: OwnedFd,
    pub(crate) ingress: OwnedFd,
    pub(crate) egress: OwnedFd,
    pub(crate) max_flows: u32,
    pub(crate) pin: PathBuf,
    /// Pins, links and lock. `None` after [`Datapath::remove`].
    pub(crate) attachment: Mutex<Option<Attachment>>,
    /// Names of the requested devices. Empty: all.
    pub(crate) devices: Vec<String>,
    pub(crate) xdp: Vec<String>,
    pub(crate) next_hops: NextHops,
    pub(crate) remotes: Mutex<Remotes>,
    pub(crate) conntrack: Conntrack,
    /// Held during a switch, so that there is one at a time. Apart from triggers, only user space starts switches.
    pub(crate) switching: Mutex<()>,
    /// Held during a trace, so that there is one at a time.
    pub(crate) one_trace: Mutex<()>,
    pub(crate) wake: EventFd,
    /// Events are read at short intervals at present.
    pub(crate) polls: AtomicBool,
    pub(crate) rest: Rest,
    pub(crate) flow_records: FlowRecords,
}

impl Datapath {
    /// Returns the maximum number of flows.
    pub fn max_flows(&self) -> u32 {
        self.max_flows
    }

    /// Returns the records of forwarded flows for the next process.
    pub fn flow_records(&self) -> &FlowRecords {
        &self.flow_records
    }

    /// Returns the indices of the devices attached to.
    pub fn attached(&self) -> Vec<u32> {
        self.attachment().as_ref().map(Attachment::devices).unwrap_or_default()
    }

    /// Tracks connections to this address from their SYN on.
    pub fn listen(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, Some(abi::listens::LISTENS))
    }

    /// Forgets the addresses of the process before at which nobody listens now; see [`Options::follows`](crate::Options).
    pub fn settle_listeners(&self) {
        self.maps.settle();
    }

    /// Stops tracking new connections to this address.
    pub fn unlisten(&self, addr: SocketAddr) -> io::Result<()> {
        self.maps.listen(addr, None)
    }

    /// Prepares the record of a connection that is about to be opened from `leg.local`. If `client` is given, the connection
    /// is opened on behalf of that leg. If there is no room, the
    /// client's leg gives its record back, unless it has been in a switch: it cannot be spliced, but others can. Timestamps
    /// and selective acknowledgements are offered to the server only if the client has negotiated them.
    pub fn expect(&self, leg: &Tuple, client: Option<&Tuple>) -> Result<ExpectedLeg, ExpectError> {
        self.expect_with(leg, client, 0)
    }

    /// The same for a connection from an address that is not ours: segments for it are given to its socket
    /// ([`TransparentRoutes`](crate::TransparentRoutes)).
    pub fn expect_from_elsewhere(&self, leg: &Tuple, client: Option<&Tuple>) -> Result<ExpectedLeg, ExpectError> {
        self.expect_with(leg, client, LegFlags::TRANSPARENT)
    }

    /// Like [`Datapath::expect`], on behalf of a client that the data path does not know. `agreed`: what its socket says
    /// ([`agreed`](crate::agreed)).
    pub fn expect_for(&self, leg: &Tuple, agreed: Agreed, from_elsewhere: bool) -> Result<ExpectedLeg, ExpectError> {
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let flags = flag(agreed.timestamps, LegFlags::TS) | flag(agreed.sack, LegFlags::SACK);
        let flags = flags | flag(from_elsewhere, LegFlags::TRANSPARENT);
        self.maps.expect(leg, None, flags).map(|expected| ExpectedLeg { mss: Some(agreed.mss), ..expected })
    }

    fn expect_with(&self, leg: &Tuple, client: Option<&Tuple>, flags: u32) -> Result<ExpectedLeg, ExpectError> {
        self.maps.expect(leg, client, flags | if client.is_some() { 0 } else { LegFlags::TS | LegFlags::SACK })
    }

    /// Removes the entries of a leg whose connection is over, or was never opened.
    pub fn forget(&self, leg: impl Into<Connection>) {
        self.forget_if(abi::path_op::PATH_OP_REMOVE, &leg.into(), None);
    }

    /// Removes the entries of both legs of a flow, in one call. The order of the legs does not matter.
    pub fn forget_flow(&self, legs: [impl Into<Connection>; 2]) {
        let [a, b] = legs.map(Into::into);
        self.forget_if(abi::path_op::PATH_OP_REMOVE, &a, Some(&b));
    }

    fn forget_if(&self, op: abi::path_op, leg: &Connection, other: Option<&Connection>) -> [bool; 2] {
        let gone = self.maps.forget(op, leg, other);
        self.free_remotes([Some(&leg.leg), other.map(|o| &o.leg)], gone);
        gone
    }

    /// Returns what tells the connection that has this leg's entry from others with the same addresses. `None`: there is no entry.
    pub fn generation(&self, leg: &Tuple) -> Option<u32> {
        self.maps.generation(leg)
    }

    /// Frees what belonged to an entry that the data path has removed ([`EventKind::Replaced`](crate::EventKind)). What belongs to a
    /// leg may be used by its next connection already.
    pub(crate) fn was_replaced(&self, leg: &Tuple) {
        self.rest.begin();
        let mut remotes = self.remotes.lock().expect("no panic under this lock");
        if self.maps.generation(leg).is_none() {
            remotes.free(leg);
        }
    }

    /// Frees what belongs to entries that were removed.
    pub(crate) fn free_remotes(&self, legs: [Option<&Tuple>; 2], gone: [bool; 2]) {
        self.rest.begin();
        let mut remotes = self.remotes.lock().expect("no panic under this lock");
        legs.into_iter().zip(gone).filter_map(|(leg, gone)| leg.filter(|_| gone)).for_each(|l| remotes.free(l));
    }

    /// Gives back the records of both legs of a flow that will not be spliced, except legs that have been in
    /// a switch. Their sockets go on without records. Returns for each leg whether its record was given back.
    pub fn give_back(&self, legs: Pair<impl Into<Connection>>) -> Pair<bool> {
        let legs: Pair<Connection> = legs.map(Into::into);
        self.forget_if(abi::path_op::PATH_OP_RETURN, &legs.client, Some(&legs.server)).into()
    }

    /// Gives back the record of one leg like [`Datapath::give_back`].
    pub fn give_back_one(&self, leg: &Tuple) {
        self.forget_if(abi::path_op::PATH_OP_RETURN, &leg.into(), None);
    }

    /// Removes the entries of one or both legs of a flow that is over, except legs whose port is used for a new connection.
    pub fn forget_ended(&self, leg: &Connection, other: Option<&Connection>) {
        self.forget_if(abi::path_op::PATH_OP_CLEAR, leg, other);
    }

    /// The same for many flows, in few calls.
    pub fn clear_ended(&self, flows: &[(Connection, Option<Connection>)]) {
        let gone = self.maps.clear_ended(flows);
        let legs = flows.iter().map(|(leg, other)| [Some(&leg.leg), other.as_ref().map(|other| &other.leg)]);
        legs.zip(gone).for_each(|(legs, gone)| self.free_remotes(legs, gone));
    }

    /// Removes a leg's record; its path entry stays.
    pub fn forget_leg(&self, leg: &Tuple) {
        self.maps.forget_leg(leg);
    }

    pub(crate) fn insert_leg(&self, leg: &Tuple, record: &abi::leg) -> io::Result<()> {
        self.maps.insert_leg(leg, record)
    }

    /// Returns whether there was no room for this leg when the client completed
    /// its handshake. Remembered until many other clients have sent SYNs.
    pub fn found_no_room(&self, leg: &Tuple) -> bool {
        self.maps.found_no_room(leg)
    }

    /// Returns the record of a leg.
    pub fn leg(&self, leg: &Tuple) -> Option<LegView> {
        self.maps.leg(leg)
    }

    /// Returns the path entry of packets that arrive on `leg`.
    pub fn path(&self, leg: &Tuple) -> Option<PathView> {
        self.maps.path(leg)
    }

    /// Returns the path entries of both directions of a flow, if both exist.
    pub fn paths_of(&self, legs: Pair<impl Into<Connection>>) -> Option<Pair<PathView>> {
        self.maps.paths_of(<[_; 2]>::from(legs).map(Into::into)).map(Pair::from)
    }

    /// Returns the leg on which packets of `leg` leave, if it is or was spliced.
    pub fn other_leg(&self, leg: &Tuple) -> Option<Tuple> {
        self.maps.other_leg(leg)
    }

    /// Returns whether the flow of this leg has ended. Its entries stay for a while, for late packets.
    pub fn is_over(&self, leg: &Tuple) -> bool {
        let paths = self.other_leg(leg).and_then(|other| self.maps.paths_of([leg.into(), (&other).into()]));
        paths.is_none_or(|paths| PathView::are_over(paths.each_ref()))
    }

    /// Returns all legs.
    pub fn legs(&self) -> Vec<(Tuple, LegView)> {
        self.maps.all_legs()
    }

    /// Returns all path entries, of legs and of spliced flows.
    pub fn paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_OP_NEXT)
    }

    /// Returns all path entries that are not in forwarding mode.
    pub fn stopped_paths(&self) -> Vec<(Tuple, PathView)> {
        self.paths_as(abi::path_op::PATH_OP_STOPPED)
    }

    fn paths_as(&self, op: abi::path_op) -> Vec<(Tuple, PathView)> {
        self.maps.all_paths(op).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read path entries: none are listed");
            Vec::new()
        })
    }

    /// Calls `f` with each path entry in forwarding mode, until it returns false. The table may change meanwhile.
    pub fn each_forwarded(&self, mut f: impl FnMut(&Tuple, &PathView) -> bool) -> io::Result<()> {
        self.maps.walk(abi::path_op::PATH_OP_NEXT, |t, e| {
            let path = PathView::new(&e.p);
            path.flags & PathFlags::SPLICED == 0 || f(&t, &path)
        })
    }

    /// Returns the counters since the maps were created: names and numbers of packets.
    pub fn verdicts(&self) -> io::Result<Vec<(&'static str, u64)>> {
        self.maps.verdicts()
    }

    /// Returns how many legs have found no room since the maps were created: the verdict `table-full`.
    pub fn legs_without_room(&self) -> io::Result<u64> {
        sum_of(&self.maps.verdicts, abi::verdict::V_TABLE_FULL.0)
    }

    /// Returns the number of path entries of both address families: two per flow, and those that linger.
    pub fn entries(&self) -> io::Result<u64> {
        self.maps.entries()
    }

    /// Returns the index in `remotes6` for the IPv6 address to which packets of this IPv4 leg go. Assigns one if necessary.
    pub(crate) fn remote_for(&self, leg: &Tuple) -> Result<u32, SwitchError> {
        self.remotes.lock().expect("no panic under this lock").take(leg).ok_or(SwitchError::Full)
    }

    /// Checks whether everything is still pinned and attached, and restores it. Legs whose
    /// segments went to their sockets unseen are no longer tracked, and cannot be spliced.
    pub fn mend(&self) -> Result<Mended, OpenError> {
        let mistrust = || {
            let legs = self.maps.all_legs();
            legs.iter().filter(|(_, l)| l.parked_at().is_none()).try_for_each(|(t, _)| self.maps.mistrust(t))
        };
        let mut attachment = self.attachment();
        let Some(attachment) = attachment.as_mut() else { return Ok(Mended::default()) };
        let mut mended = attachment.mend(mistrust)?;
        let again = self.flow_records.mend();
        mended.pins += again.map_err(|source| OpenError::Kernel { what: "pin again", source })?;
        Ok(mended)
    }

    /// Checks whether connections are tracked by netfilter here, if that is not known. Call it about once a second.
    pub fn look_for_conntrack(&self) {
        self.conntrack.is_used();
    }

    /// Renews conntrack entries before the parked sockets of a flow get their segments again.
    /// `away`: the time in forwarding mode, in which conntrack may have forgotten the connections.
    pub fn renew_parked(&self, legs: Pair<&Tuple>, away: Duration) {
        let scales = |t: &Tuple| self.leg(t).map(|l| (l.raw.wscale_in, l.raw.wscale_out));
        let Pair { client: Some(client), server: Some(server) } = legs.map(scales) else { return };
        self.conntrack.renew_flow(legs, Pair::new(client, server), Pair::both(away), false);
    }

    /// Returns whether NAT of this machine changes the addresses or ports of a leg, as conntrack knows it.
    pub fn is_translated(&self, leg: &Tuple) -> bool {
        self.conntrack.is_translated(leg)
    }

    /// Returns the counters of changes to conntrack entries so far.
    pub fn conntrack_counts(&self) -> ConntrackCounts {
        self.conntrack.counts()
    }

    /// Frees the slots of removed entries once no program can still read them. Ends when `is_over` returns true, which is asked
    /// after [`Datapath::wake`]. Call it once per data path, on a thread of its own. Fails if the kernel does not support membarrier(2).
    pub fn reuse_slots(&self, is_over: impl Fn() -> bool) -> io::Result<()> {
        self.rest.reuse_slots(&self.maps, is_over)
    }

    /// Lets slots be reused whose entries were removed before, except in the last few milliseconds. Waits for a grace period.
    pub fn reuse_slots_now(&self) -> io::Result<()> {
        rest::reuse_slots_now(&self.maps)
    }

    /// Ends the present or the next wait for events, and for slots to be reused.
    pub fn wake(&self) {
        if let Err(error) = self.wake.write(1) {
            tracing::warn!(%error, "cannot interrupt the wait for events: they are noticed late");
        }
        self.rest.wake();
    }

    /// Ends the next wait for events within a millisecond or two. Costs nothing if it ends by itself.
    pub fn wake_soon(&self) {
        fence(SeqCst); // what the waiter is to find is written before: see `Events::wait`
        if !self.polls.load(SeqCst) {
            self.wake();
        }
    }

    /// Leaves everything pinned and attached to another process, which may open it from now on. The tables can still be read, and what
    /// belongs to connections of this process be removed from them.
    pub fn let_go(&self) {
        drop(self.attachment().take());
    }

    /// Detaches from all devices and removes the maps. No flow survives this.
    pub fn remove(&self) -> io::Result<()> {
        self.attachment().take().map_or(Ok(()), Attachment::remove)
    }

    pub(crate) fn attachment(&self) -> MutexGuard<'_, Option<Attachment>> {
        self.attachment.lock().expect("no panic under this lock")
    }

    /// Returns the directory of the pins.
    pub fn pin(&self) -> &Path {
        &self.pin
    }
}

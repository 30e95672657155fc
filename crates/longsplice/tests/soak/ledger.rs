//! Records the events, and checks whether each connection ended as it should.

use super::{
    plan::{Kind, Plan},
    ways::Way,
};
use longsplice_lab::traffic::{Report, Role, StreamEnd, intact};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// How long new connections may still be affected by an event in the network.
const AFTERMATH: Duration = Duration::from_secs(2);
/// The same for [`Harm::Late`]: one and a half times
/// net.ipv4.neigh.default.base_reachable_time, and the longest wait of a client.
const STALE: Duration = Duration::from_secs(45 + 20);
/// How long after its client has given up a connection may reach the server.
const LATE: Duration = Duration::from_secs(30);
/// Number of connections per which one may be reset before a byte has arrived:
/// the kernel does this to plain servers, too (docs/kernel-notes.md).
const UNHEARD: usize = 50_000;

/// Who may fail because of an event.
#[derive(Clone, Debug)]
pub enum Harm {
    /// No one.
    None,
    /// Requests whose server was not reached in time: the kernel notices a
    /// silent change of an address only when it asks again, which may take 45 s.
    Late,
    /// Connections being opened, and requests, which may need one.
    New,
    /// The same, as a device is away: what hosts send only once, such as a reset, does not arrive.
    Away,
    /// Connections that a transparent listener takes, and that the server does not shake hands with: their clients are reset if
    /// the tables have no room.
    Taken,
    /// Connections from a port that was in use a moment before. The hosts keep no TIME-WAIT, so segments of the last
    /// connection that were lost and come again may reset the next one (RFC 1337).
    Again,
    /// All connections except those of these clients, because the process ends.
    AllBut(HashSet<SocketAddr>),
}

struct Event {
    what: String,
    from: Instant,
    until: Option<Instant>,
    harm: Harm,
}

impl Event {
    /// Whether the event overlaps this period.
    fn meets(&self, from: Instant, until: Instant) -> bool {
        self.from <= until && self.until.is_none_or(|end| end + AFTERMATH >= from)
    }

    fn harms_new(&self) -> bool {
        matches!(self.harm, Harm::New | Harm::Away | Harm::AllBut(_))
    }
}

struct Stream {
    kind: Kind,
    via: Way,
    began: Instant,
    /// When its server learned which stream it is.
    arrived: Option<Instant>,
    client: Option<(Instant, Result<Report, io::Error>)>,
    server: Option<(Instant, Report)>,
}

/// The results of streams and requests.
#[derive(Debug, Default)]
pub struct Tally {
    /// Streams that did everything they should, by kind.
    pub whole: BTreeMap<Kind, usize>,
    /// The same by listener.
    pub ways: BTreeMap<Way, usize>,
    /// Streams that were allowed to end early, and did, by kind.
    pub excused: BTreeMap<Kind, usize>,
    /// Streams that outlived a process, counted once for each process.
    pub outlived: usize,
    /// Bytes checked.
    pub bytes: u64,
    /// Connections reset without a byte.
    pub unheard: usize,
    /// Connections of which the server has heard nothing, since a reset was lost.
    pub silent: usize,
    /// Requests that were answered correctly.
    pub requests: usize,
    /// Requests among these that were not the first on their connection.
    pub reused: usize,
    /// Requests that were allowed to fail, and did.
    pub failed_requests: usize,
    /// Ends of connections that waited for long because the stop could not reset them.
    pub untold: usize,
    /// Datagrams that came back.
    pub datagrams: usize,
    /// Datagrams that did not: nobody promises that.
    pub lost: usize,
}

#[derive(Default)]
struct Book {
    streams: HashMap<u64, Stream>,
    known: HashSet<u64>,
    events: Vec<Event>,
    failures: Vec<String>,
    /// Times at which the program reported flows that its stop could not reset: one entry per end of each flow.
    untold: Vec<Instant>,
    tally: Tally,
}

pub struct Ledger {
    began: Instant,
    book: Mutex<Book>,
}

/// The index of an event in progress.
#[derive(Clone, Copy)]
pub struct Going(usize);

impl Ledger {
    pub fn new() -> Ledger {
        Ledger { began: Instant::now(), book: Mutex::default() }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("nothing panics under this lock")
    }

    // ---- events

    /// Records the start of an event.
    pub fn begins(&self, what: &str, harm: Harm) -> Going {
        eprintln!("{:7.1} s  {what}", self.began.elapsed().as_secs_f64());
        let mut book = self.book();
        book.events.push(Event { what: what.to_owned(), from: Instant::now(), until: None, harm });
        Going(book.events.len() - 1)
    }

    /// Sets who is harmed, once this is known.
    pub fn harms(&self, going: Going, harm: Harm) {
        self.book().events[going.0].harm = harm;
    }

    pub fn ends(&self, going: Going) {
        self.book().events[going.0].until = Some(Instant::now());
    }

    /// Records a harmless event that is over at once.
    pub fn note(&self, what: &str) {
        let going = self.begins(what, Harm::None);
        self.ends(going);
    }

    // ---- streams

    pub fn begin(&self, seed: u64, kind: Kind, via: Way) {
        let stream = Stream { kind, via, began: Instant::now(), arrived: None, client: None, server: None };
        let mut book = self.book();
        book.known.insert(seed);
        book.streams.insert(seed, stream);
    }

    /// Records the seed that arrived at a server. Returns the plan for the server.
    pub fn arrived(&self, seed: u64) -> Option<Plan> {
        let mut book = self.book();
        if !book.known.contains(&seed) {
            book.fail(self, format!("wrong bytes: a stream begins with {seed:#x}, as none does that was sent"));
            return None;
        }
        match book.streams.get_mut(&seed) {
            Some(stream) if stream.arrived.is_none() => {
                stream.arrived = Some(Instant::now());
                Plan::of(seed)
            }
            // already judged: excused or failed
            None => None,
            Some(_) => {
                book.fail(self, format!("wrong bytes: stream {seed:#x} has come to a server twice"));
                None
            }
        }
    }

    pub fn client_done(&self, seed: u64, report: Result<Report, io::Error>) {
        let mut book = self.book();
        if let Some(stream) = book.streams.get_mut(&seed) {
            stream.client = Some((Instant::now(), report));
        }
        book.settle(self, seed, false);
    }

    pub fn server_done(&self, seed: u64, report: Report) {
        let mut book = self.book();
        if let Some(stream) = book.streams.get_mut(&seed) {
            stream.server = Some((Instant::now(), report));
        }
        book.settle(self, seed, false);
    }

    /// Judges streams that their server will not see any more. `all`: there is no traffic any more.
    pub fn settle(&self, all: bool) {
        let mut book = self.book();
        let is_left =
            |s: &Stream| s.arrived.is_none() && s.client.as_ref().is_some_and(|(at, _)| all || at.elapsed() > LATE);
        let left: Vec<u64> = book.streams.iter().filter(|(_, s)| is_left(s)).map(|(seed, _)| *seed).collect();
        left.into_iter().for_each(|seed| book.settle(self, seed, true));
    }

    // ---- requests

    pub fn answered(&self, bytes: u64, reused: bool) {
        let tally = &mut self.book().tally;
        tally.requests += 1;
        tally.reused += usize::from(reused);
        tally.bytes += bytes;
    }

    /// Records the failure of a request, on a connection opened at `since`.
    pub fn unanswered(&self, since: Instant, what: String) {
        let mut book = self.book();
        if book.events.iter().any(|e| e.harms_new() && e.meets(since, Instant::now())) {
            book.tally.failed_requests += 1;
        } else {
            book.fail(self, what);
        }
    }

    /// Records how many datagrams of an association came back, and how many did not.
    pub fn datagrams(&self, back: usize, lost: usize) {
        let tally = &mut self.book().tally;
        tally.datagrams += back;
        tally.lost += lost;
    }

    /// Records a datagram that came twice to an association opened at `since`: only the network may do that.
    pub fn twice(&self, since: Instant, what: String) {
        let mut book = self.book();
        if !book.events.iter().any(|e| matches!(e.harm, Harm::Again) && e.meets(since, Instant::now())) {
            book.fail(self, what);
        }
    }

    /// Records the proxy's answer that the server does not respond.
    pub fn unreached(&self, since: Instant, what: String) {
        let is_late = |e: &Event| matches!(e.harm, Harm::Late) && e.from.elapsed() < STALE;
        if self.book().events.iter().any(is_late) {
            self.book().tally.failed_requests += 1;
        } else {
            self.unanswered(since, what);
        }
    }

    /// Records that the program reported this many flows that its stop could not reset: their hosts may wait.
    pub fn untold(&self, flows: usize) {
        let now = Instant::now();
        self.book().untold.extend(vec![now; 2 * flows]);
    }

    /// Records that an end of an HTTP connection has been waiting in vain since that time.
    pub fn hung(&self, since: Instant, what: String) {
        let mut book = self.book();
        if !book.is_untold(since, 1) {
            book.fail(self, format!("hung: {what}"));
        }
    }

    /// Records that a server has waited in vain for the first bytes of a connection that was opened at `since`. If its client has
    /// reset it at once, data and reset may have been lost, and TCP sends neither again (RFC 9293, 3.10.7).
    pub fn silent(&self, since: Instant, what: String) {
        let mut book = self.book();
        if book.events.iter().any(|e| matches!(e.harm, Harm::Away) && e.meets(since, since + AFTERMATH)) {
            book.tally.silent += 1;
        } else {
            book.fail(self, format!("hung: {what}"));
        }
    }

    // ---- the end

    /// Records a failure without an excuse.
    pub fn fail(&self, what: String) {
        self.book().fail(self, what);
    }

    pub fn failures(&self) -> Vec<String> {
        self.book().failures.clone()
    }

    /// Streams that are not over, or not judged.
    pub fn open(&self) -> Vec<String> {
        let book = self.book();
        let is = |(seed, s): (&u64, &Stream)| {
            let ends = [s.client.is_some(), s.arrived.is_some(), s.server.is_some()];
            format!(
                "{seed:#x} {:?} {:?} since {:?}: client done, arrived, server done: {ends:?}",
                s.kind,
                s.via,
                s.began.elapsed()
            )
        };
        book.streams.iter().map(is).collect()
    }

    /// The latest events.
    pub fn last_events(&self, most: usize) -> String {
        let book = self.book();
        let time = |at: Instant| (at - self.began).as_secs_f64();
        let line = |e: &Event| {
            let until = e.until.map_or("...".to_owned(), |at| format!("{:.1}", time(at)));
            format!("{:7.1} s to {until} s  {}\n", time(e.from), e.what)
        };
        book.events.iter().rev().take(most).rev().map(line).collect()
    }

    pub fn tally<T>(&self, look: impl FnOnce(&Tally) -> T) -> T {
        look(&self.book().tally)
    }
}

impl Book {
    fn fail(&mut self, ledger: &Ledger, what: String) {
        let what = format!("{:7.1} s  {what}", ledger.began.elapsed().as_secs_f64());
        eprintln!("FAILED: {what}");
        self.failures.push(what);
    }

    fn settle(&mut self, ledger: &Ledger, seed: u64, is_late: bool) {
        let is_over = |s: &Stream| s.client.is_some() && (s.server.is_some() || (s.arrived.is_none() && is_late));
        if !self.streams.get(&seed).is_some_and(is_over) {
            return;
        }
        let Some(stream) = self.streams.remove(&seed) else { return };
        if let Err(why) = self.judge(seed, &stream) {
            let Stream { kind, via, .. } = stream;
            let ends = stream.client.iter().map(|(at, _)| *at).chain(stream.server.iter().map(|(at, _)| *at));
            let ends: Vec<_> = ends.map(|at| (at - ledger.began).as_secs_f64()).collect();
            let began = (stream.began - ledger.began).as_secs_f64();
            let local = stream.local();
            self.fail(
                ledger,
                format!("{why}\n  {seed:#x}, {kind:?} by {via:?}, from {local:?}, since {began:.1} s, ends {ends:.1?}"),
            );
        }
    }

    fn judge(&mut self, seed: u64, s: &Stream) -> Result<(), String> {
        let server = s.server.as_ref().map(|(_, report)| report);
        let client = match s.client.as_ref().map(|(_, report)| report) {
            Some(Ok(report)) => report,
            // its source port is named, and the last connection from there has not ended yet: it never began
            Some(Err(error)) if error.kind() == ErrorKind::AddrNotAvailable => return Ok(()),
            Some(Err(error)) if is_waiting(error) && self.is_untold(s.began, 1) => return Ok(()),
            Some(Err(error)) if is_waiting(error) => return Err(format!("hung: {error}")),
            Some(Err(error)) if self.excuses(s) => return self.excused(s),
            // in the handshake of a proxy protocol, or by the last connection of its port
            Some(Err(error))
                if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused)
                    && self.may_be_unheard() =>
            {
                return Ok(());
            }
            Some(Err(error)) => return Err(format!("not connected: {error}")),
            None => return Ok(()),
        };
        let reports = || [Some(client), server].into_iter().flatten();
        self.tally.bytes += reports().map(|r| r.received).sum::<u64>();
        let all = || reports().map(|r| format!("\n  {r}")).collect::<String>();
        if reports().any(|r| r.mismatch.is_some()) {
            return Err(format!("wrong bytes{}", all()));
        }
        if server.is_some_and(|server| client.received > server.sent || server.received > client.sent) {
            return Err(format!("wrong bytes: more than were sent{}", all()));
        }
        if reports().any(|r| r.end == StreamEnd::Timeout || r.send_end == StreamEnd::Timeout) {
            return if self.is_untold(s.began, 2) { Ok(()) } else { Err(format!("hung{}", all())) };
        }
        let right = is_as_planned(seed, client, server);
        if right.is_ok() {
            *self.tally.whole.entry(s.kind).or_default() += 1;
            *self.tally.ways.entry(s.via).or_default() += 1;
            self.tally.outlived += self.changes(s).filter(|(_, stays)| *stays).count();
            return Ok(());
        }
        if self.excuses(s) {
            return self.excused(s);
        }
        if reports().all(|r| r.received == 0) && self.may_be_unheard() {
            return Ok(());
        }
        right.map_err(|why| why + &all())
    }

    /// Counts a connection that was reset before a byte has arrived. Returns whether the kernel alone resets as many.
    fn may_be_unheard(&mut self) -> bool {
        let may = self.tally.unheard <= self.known.len() / UNHEARD;
        self.tally.unheard += usize::from(may);
        may
    }

    /// Whether this many ends that have been waiting since then belong to flows that a stop could not reset. Each counts once.
    fn is_untold(&mut self, since: Instant, ends: usize) -> bool {
        for _ in 0..ends {
            let Some(i) = self.untold.iter().position(|at| *at >= since) else { return false };
            self.untold.swap_remove(i);
            self.tally.untold += 1;
        }
        true
    }

    fn excused(&mut self, s: &Stream) -> Result<(), String> {
        *self.tally.excused.entry(s.kind).or_default() += 1;
        Ok(())
    }

    /// The processes that ended during the stream, and whether it was to outlive each.
    fn changes(&self, s: &Stream) -> impl Iterator<Item = (&Event, bool)> {
        let (local, end) = (s.local(), s.end());
        let during = self.events.iter().filter(move |e| e.meets(s.began, end));
        during.filter_map(move |e| match &e.harm {
            // a stream opened when the next process was running is not affected
            Harm::AllBut(_) if e.until.is_some_and(|until| until < s.began) => None,
            Harm::AllBut(clients) => Some((e, local.is_some_and(|local| clients.contains(&local)))),
            _ => None,
        })
    }

    /// Whether there is an excuse for the stream to end early.
    fn excuses(&self, s: &Stream) -> bool {
        let arrived = s.arrived.unwrap_or_else(|| s.end());
        let was_made = |e: &Event| e.harms_new() && e.meets(s.began, arrived);
        let is_again = matches!(s.kind, Kind::Short | Kind::Cut);
        let meets_another = |e: &Event| is_again && matches!(e.harm, Harm::Again) && e.meets(s.began, s.end());
        let is_taken = matches!(s.via, Way::FtpRouted | Way::FtpRoutedActive);
        let was_taken = |e: &Event| is_taken && matches!(e.harm, Harm::Taken) && e.meets(s.began, arrived);
        let is_hurt = |e: &Event| was_made(e) || meets_another(e) || was_taken(e);
        self.events.iter().any(is_hurt) || self.changes(s).any(|(_, stays)| !stays)
    }
}

impl Stream {
    fn end(&self) -> Instant {
        let client = self.client.as_ref().map(|(at, _)| *at);
        client.max(self.server.as_ref().map(|(at, _)| *at)).unwrap_or_else(Instant::now)
    }

    fn local(&self) -> Option<SocketAddr> {
        self.client.as_ref().and_then(|(_, report)| report.as_ref().ok()?.local)
    }
}

fn is_waiting(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Checks that a stream was intact, or reset by the planned end with both hosts told.
fn is_as_planned(seed: u64, client: &Report, server: Option<&Report>) -> Result<(), String> {
    let plan = Plan::of(seed).ok_or("no plan")?;
    // a client that resets its connection at once may do so before anything has acknowledged what it has sent
    let is_cut_at_once = plan.reset_by == Some(Role::Opener) && client.received == 0;
    let Some(server) = server else {
        return if is_cut_at_once { Ok(()) } else { Err("it never came to a server".into()) };
    };
    let (from, to) = match plan.reset_by {
        None => return intact(client, server).map_err(|_| "not whole".into()),
        Some(Role::Opener) => (client, server),
        Some(Role::Answerer) => (server, client),
    };
    let are = (&from.end, &from.send_end, &to.end);
    if (are.0, are.1) == (&StreamEnd::Own, &StreamEnd::Eof) && to.was_reset() {
        Ok(())
    } else {
        Err(format!("not reset as it had to be: {are:?}"))
    }
}

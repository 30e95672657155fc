//! What happened, and whether each connection ended as it had to.

use super::{
    ends::{How, Seen},
    lines::{Due, Lines},
    plan::{Kind, Plan},
    ways::{self, Way},
    web::Visit,
};
use longsplice_lab::Family;
use rand::{SeedableRng, rngs::SmallRng};
use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Display, Formatter},
    io,
    net::SocketAddr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// How long after its client has given up a connection may reach the server.
const LATE: Duration = Duration::from_secs(60);
/// Time in which a process that is not killed has written the line of a connection that has ended.
pub const WRITES: Duration = Duration::from_secs(2);
/// More failures of one kind are not told: the first ones have to be understood. After so many of all kinds, the run ends.
const MOST_FAILURES: (usize, usize) = (4, 30);

/// A process was killed.
pub struct Kill {
    pub from: Instant,
    /// When another one served. `None`: not yet.
    pub until: Option<Instant>,
    /// Since when the process that was killed may have had connections. Those that were there before are of earlier ones.
    pub since: Instant,
    /// Its flows at that time, by client, and whether they are to outlive it. `None`: it was not known.
    pub flows: Option<HashMap<SocketAddr, bool>>,
    /// Whether the earlier ones were killed as well.
    pub older: bool,
}

impl Kill {
    /// Whether the process may still have had the line of a connection that was over then: lines wait for others, to be written with
    /// them.
    fn takes_line_of(&self, over: Instant) -> bool {
        self.from <= over + WRITES && self.until.is_none_or(|until| until >= over - WRITES)
    }
}

struct Stream {
    way: Way,
    to: Family,
    from: SocketAddr,
    began: Instant,
    /// When its server knew which one it is.
    arrived: Option<Instant>,
    client: Option<(Instant, Result<Seen, io::Error>)>,
    server: Option<(Instant, Seen)>,
}

impl Stream {
    fn over(&self) -> Instant {
        let client = self.client.as_ref().map(|(at, _)| *at);
        client.max(self.server.as_ref().map(|(at, _)| *at)).unwrap_or_else(Instant::now)
    }
}

/// Numbers of connections. Refused, reset and ended ones are those of a kill: without one, they are failures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    pub begun: usize,
    pub whole: usize,
    /// Reset by a host, as planned.
    pub planned: usize,
    pub refused: usize,
    pub reset: usize,
    pub early: usize,
    pub stalled: usize,
    pub wrong: usize,
    /// Those that have outlived a process, once for each.
    pub outlived: usize,
}

impl Sum {
    const NAMES: [&str; 9] = ["begun", "whole", "planned", "refused", "reset", "early", "stalled", "wrong", "outlived"];
}

impl Display for Sum {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Sum { begun, whole, planned, refused, reset, early, stalled, wrong, outlived } = self;
        let all = [begun, whole, planned, refused, reset, early, stalled, wrong, outlived];
        all.iter().try_for_each(|n| write!(f, "{n:>10}"))
    }
}

#[derive(Clone, Debug, Default)]
struct Tally {
    kinds: BTreeMap<Kind, Sum>,
    ways: BTreeMap<Way, Sum>,
    /// Requests of HTTP.
    requests: Sum,
    bytes: u64,
}

impl Tally {
    fn of(&mut self, seed: u64, way: Way, mut add: impl FnMut(&mut Sum)) {
        add(self.kinds.entry(Plan::kind(seed)).or_default());
        add(self.ways.entry(way).or_default());
    }
}

#[derive(Default)]
struct Book {
    streams: HashMap<u64, Stream>,
    kills: Vec<Kill>,
    lines: Lines,
    /// Bytes of requests as servers have read them, by path.
    served: HashMap<String, Vec<u64>>,
    failures: Vec<String>,
    /// Numbers of failures, by the words with which they begin.
    failed: BTreeMap<String, usize>,
    tally: Tally,
}

pub struct Ledger {
    began: Instant,
    book: Mutex<Book>,
    is_open: AtomicBool,
    ends: AtomicUsize,
}

/// A counted activity, until it is dropped.
pub struct Open<'a>(&'a AtomicUsize);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Ledger {
    pub fn new() -> Ledger {
        Ledger { began: Instant::now(), book: Mutex::default(), is_open: true.into(), ends: AtomicUsize::new(0) }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("nothing panics under this lock")
    }

    /// Says what happens.
    pub fn note(&self, what: &str) {
        eprintln!("{:7.1} s  {what}", self.began.elapsed().as_secs_f64());
    }

    // ---- activities

    pub fn count(&self) -> Open<'_> {
        self.ends.fetch_add(1, SeqCst);
        Open(&self.ends)
    }

    /// Number of activities in progress.
    pub fn ends(&self) -> usize {
        self.ends.load(SeqCst)
    }

    /// Whether there are to be more connections.
    pub fn is_open(&self) -> bool {
        self.is_open.load(SeqCst)
    }

    pub fn close(&self) {
        self.is_open.store(false, SeqCst);
    }

    // ---- the processes

    /// Records that a process is killed now. `until`, later: [`Ledger::serves_again`].
    pub fn killed(&self, kill: Kill) {
        self.book().kills.push(kill);
    }

    /// The last kill has changed nothing.
    pub fn not_killed(&self) {
        self.book().kills.pop();
    }

    pub fn serves_again(&self) {
        let now = Instant::now();
        self.book().kills.iter_mut().filter(|kill| kill.until.is_none()).for_each(|kill| kill.until = Some(now));
    }

    /// Takes lines of the access log.
    pub fn lines(&self, lines: &str) {
        let mut book = self.book();
        for line in lines.lines() {
            if let Err(why) = book.lines.take(line) {
                book.fail(self, why);
            }
        }
    }

    // ---- streams

    pub fn begin(&self, seed: u64, way: Way, from: SocketAddr, to: Family) {
        let stream = Stream { way, to, from, began: Instant::now(), arrived: None, client: None, server: None };
        let mut book = self.book();
        book.tally.of(seed, way, |sum| sum.begun += 1);
        book.streams.insert(seed, stream);
    }

    /// Records that a server has got the first word of a stream. Returns whether it is one that it may serve.
    pub fn arrived(&self, seed: u64) -> bool {
        let mut book = self.book();
        match book.streams.get_mut(&seed) {
            Some(stream) if stream.arrived.is_none() => {
                stream.arrived = Some(Instant::now());
                true
            }
            Some(_) => {
                book.fail(self, format!("wrong bytes: stream {seed:#x} has come to a server twice"));
                false
            }
            None => {
                // it was judged, or never begun
                if !book.lines.knows(seed) {
                    book.fail(self, format!("wrong bytes: a stream begins with {seed:#x}, as none does that was sent"));
                }
                false
            }
        }
    }

    pub fn has_arrived(&self, seed: u64) -> bool {
        self.book().streams.get(&seed).is_none_or(|stream| stream.arrived.is_some() || stream.client.is_some())
    }

    pub fn client_done(&self, seed: u64, seen: Result<Seen, io::Error>) {
        let mut book = self.book();
        if let Some(stream) = book.streams.get_mut(&seed) {
            stream.client = Some((Instant::now(), seen));
        }
        book.settle(self, seed, false);
    }

    pub fn server_done(&self, seed: u64, seen: Seen) {
        let mut book = self.book();
        if let Some(stream) = book.streams.get_mut(&seed) {
            stream.server = Some((Instant::now(), seen));
        }
        book.settle(self, seed, false);
    }

    /// A connection has come to a server, and ended before it was known which one it is: its client tells.
    pub fn unheard(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::TimedOut {
            self.book().fail(self, "stalled: a server waits for the first bytes of a connection".into());
        }
    }

    /// The same in a request.
    pub fn broken_off(&self, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::TimedOut => {
                self.book().fail(self, "stalled: a server waits for the rest of a request".into())
            }
            io::ErrorKind::InvalidData => self.book().fail(self, format!("wrong bytes: at a server of HTTP: {error}")),
            _ => {}
        }
    }

    /// Judges streams that their server will not see any more, and lines that are missing. `all`: there is no traffic any more.
    pub fn settle(&self, all: bool) {
        let mut book = self.book();
        let is_left =
            |s: &Stream| s.arrived.is_none() && s.client.as_ref().is_some_and(|(at, _)| all || at.elapsed() > LATE);
        let left: Vec<u64> = book.streams.iter().filter(|(_, s)| is_left(s)).map(|(seed, _)| *seed).collect();
        left.into_iter().for_each(|seed| book.settle(self, seed, true));
        let Book { lines, kills, .. } = &mut *book;
        let wrong = lines.overdue(all, |over| kills.iter().any(|kill| kill.takes_line_of(over)));
        wrong.into_iter().for_each(|why| book.fail(self, why));
    }

    // ---- requests

    pub fn not_connected(&self, visit: &Visit, error: &io::Error) {
        let mut book = self.book();
        book.tally.requests.begun += 1;
        book.broken(self, visit, &format!("not connected: {error}"), |sum| sum.refused += 1);
    }

    /// A server has read a request of so many bytes.
    pub fn served(&self, path: &str, bytes: u64) {
        self.book().served.entry(path.to_owned()).or_default().push(bytes);
    }

    /// A client has read the reply, of so many bytes.
    pub fn answered(&self, visit: &Visit, path: &str, bytes: u64) {
        let mut book = self.book();
        book.tally.requests.begun += 1;
        book.tally.requests.whole += 1;
        let served = book.served.remove(path).unwrap_or_default();
        // a server to which it was sent once more has read it twice
        let bytes = if let [up] = served[..] { Some([up, bytes]) } else { None };
        book.tally.bytes += bytes.iter().flatten().sum::<u64>();
        // a message that outlives its process has a line without a path
        let may_be_lost = book.was_killed_since(visit.asked.min(Instant::now() - WRITES));
        book.lines.expect(visit.from, Some(path), Due { bytes, may_be_lost, over: Instant::now() });
    }

    pub fn unanswered(&self, visit: &Visit, what: &str, how: How) {
        let mut book = self.book();
        book.tally.requests.begun += 1;
        let what = format!("HTTP: {what}: {how:?}");
        match how {
            How::Wrong(_) => {
                book.tally.requests.wrong += 1;
                book.fail(self, format!("wrong bytes: {what}"));
            }
            How::Stalled => {
                book.tally.requests.stalled += 1;
                book.fail(self, format!("stalled: {what}"));
            }
            _ => book.broken(self, visit, &what, |sum| sum.reset += 1),
        }
    }

    // ---- the end

    pub fn fail(&self, what: String) {
        self.book().fail(self, what);
    }

    pub fn failures(&self) -> Vec<String> {
        self.book().failures.clone()
    }

    pub fn has_failed_for_good(&self) -> bool {
        self.book().failures.len() >= MOST_FAILURES.1
    }

    /// Streams that are not over, or not judged.
    pub fn open(&self) -> Vec<String> {
        let book = self.book();
        let is = |(seed, s): (&u64, &Stream)| {
            let ends = [s.client.is_some(), s.arrived.is_some(), s.server.is_some()];
            let (kind, since) = (Plan::kind(*seed), s.began.elapsed());
            format!(
                "{seed:#x} {kind:?} {:?} of {} since {since:?}: client done, arrived, server done: {ends:?}",
                s.way, s.from
            )
        };
        book.streams.iter().map(is).collect()
    }

    pub fn told(&self) -> String {
        let book = self.book();
        let Tally { kinds, ways, requests, bytes } = &book.tally;
        let mut text = format!("{:16}{}\n", "", Sum::NAMES.map(|name| format!("{name:>10}")).concat());
        kinds.iter().for_each(|(kind, sum)| text += &format!("{:16}{sum}\n", format!("{kind:?}")));
        ways.iter().for_each(|(way, sum)| text += &format!("{:16}{sum}\n", format!("{way:?}")));
        text + &format!(
            "{:16}{requests}\n{bytes} bytes checked; {}\nfailures: {:?}",
            "requests",
            book.lines.told(),
            book.failed
        )
    }
}

impl Book {
    fn fail(&mut self, ledger: &Ledger, what: String) {
        let kind: String = what.chars().take_while(|c| c.is_ascii_alphabetic() || *c == ' ').collect();
        let count = self.failed.entry(kind).or_default();
        *count += 1;
        if *count <= MOST_FAILURES.0 {
            let what = format!("{:7.1} s  {what}", ledger.began.elapsed().as_secs_f64());
            eprintln!("FAILED: {what}");
            self.failures.push(what);
        }
    }

    fn was_killed_since(&self, since: Instant) -> bool {
        self.kills.iter().any(|kill| kill.until.is_none_or(|until| until >= since))
    }

    /// Whether the end of a process explains that of a connection that was there since `known`. A flow that the kernel forwards
    /// outlives its process. `own`: whether the program takes it back by itself.
    fn excuses(&self, from: SocketAddr, (began, known): (Instant, Option<Instant>), over: Instant, own: bool) -> bool {
        let during =
            self.kills.iter().filter(|kill| kill.from <= over && kill.until.is_none_or(|until| until >= began));
        let mut during = during.map(|kill| {
            let Some(known) = known.filter(|known| *known < kill.from) else { return true };
            match kill.flows.as_ref().map(|flows| flows.get(&from)) {
                Some(Some(true)) => own,
                Some(None) => known >= kill.since || kill.older,
                _ => true,
            }
        });
        during.any(|excused| excused)
    }

    /// Judges a request, or an attempt to connect, that has failed.
    fn broken(&mut self, ledger: &Ledger, visit: &Visit, what: &str, mut add: impl FnMut(&mut Sum)) {
        // Which process has it cannot be known: between two requests, it goes over to the next one. A message that is forwarded
        // outlives its process, its connection does not.
        if self.excuses(visit.from, (visit.began, None), Instant::now(), true) {
            add(&mut self.tally.requests);
        } else {
            let (began, answered) = (visit.began - ledger.began, visit.answered.map(|at| at - ledger.began));
            self.fail(ledger, format!("{what}\n  from {}, since {began:?}, answered at {answered:?}", visit.from));
        }
    }

    fn settle(&mut self, ledger: &Ledger, seed: u64, is_late: bool) {
        let is_over = |s: &Stream| s.client.is_some() && (s.server.is_some() || (s.arrived.is_none() && is_late));
        if !self.streams.get(&seed).is_some_and(is_over) {
            return;
        }
        let Some(stream) = self.streams.remove(&seed) else { return };
        let over = stream.over();
        self.lines.know(seed);
        let judged = self.judge(seed, &stream);
        // of a flow that was in a switch when its process was killed, little is known: docs/limits.md
        let is_excused = self.excuses(stream.from, (stream.began, stream.arrived), over, stream.way.is_taken_back());
        match judged {
            // it may have come to the program, or not
            Ok(None) if matches!(stream.client, Some((_, Err(_)))) => {}
            Ok(bytes) => {
                let due = Due { bytes: bytes.flatten(), may_be_lost: is_excused || bytes.is_none(), over };
                self.lines.expect(stream.from, None, due);
            }
            Err(why) => {
                self.lines.expect(stream.from, None, Due { bytes: None, may_be_lost: true, over });
                let (began, over) = ((stream.began - ledger.began).as_secs_f64(), (over - ledger.began).as_secs_f64());
                let arrived = stream.arrived.map(|at| (at - ledger.began).as_secs_f64());
                let Stream { way, from, to, .. } = stream;
                let kind = Plan::kind(seed);
                self.fail(
                    ledger,
                    format!(
                        "{why}\n  {seed:#x}, {kind:?} by {way:?} to {to:?}, from {from}, {began:.1} to {over:.1} s, \
                         arrived at {arrived:.1?}"
                    ),
                );
            }
        }
    }

    /// Returns what the access log has to say: `None`: perhaps nothing; `Some(None)`: something.
    fn judge(&mut self, seed: u64, s: &Stream) -> Result<Option<Option<[u64; 2]>>, String> {
        let mut tally = std::mem::take(&mut self.tally);
        let judged = self.judge_into(&mut tally, seed, s);
        self.tally = tally;
        judged
    }

    fn judge_into(&self, tally: &mut Tally, seed: u64, s: &Stream) -> Result<Option<Option<[u64; 2]>>, String> {
        let plan = Plan::of(seed);
        let mut add = |add: fn(&mut Sum)| tally.of(seed, s.way, add);
        let is_excused = self.excuses(s.from, (s.began, s.arrived), s.over(), s.way.is_taken_back());
        let server = s.server.as_ref().map(|(_, seen)| seen);
        let client = match &s.client.as_ref().expect("it is over").1 {
            Ok(seen) => seen,
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                add(|sum| sum.stalled += 1);
                return Err(format!("stalled: {error}"));
            }
            Err(error) => {
                add(|sum| sum.refused += 1);
                return if is_excused { Ok(None) } else { Err(format!("refused: {error}")) };
            }
        };
        let ends = || [Some(client), server].into_iter().flatten();
        let all = || ends().map(|seen| format!("\n  {seen}")).collect::<String>();
        let any = |is: fn(&How) -> bool| ends().any(|seen| is(&seen.how));
        let excess = server.is_some_and(|server| client.received > server.sent || server.received > client.sent);
        if excess || any(|how| matches!(how, How::Wrong(_))) {
            add(|sum| sum.wrong += 1);
            return Err(format!("wrong bytes{}", all()));
        }
        if any(|how| *how == How::Stalled) {
            add(|sum| sum.stalled += 1);
            return Err(format!("stalled{}", all()));
        }
        let bytes = ends().map(|seen| seen.received).sum::<u64>();
        if any(|how| *how == How::Own) && plan.halves.iter().any(|half| half.resets) && any(|how| *how == How::Reset) {
            add(|sum| sum.planned += 1);
            tally.bytes += bytes;
            return Ok(Some(None));
        }
        if let Some(server) = server
            && client.how == How::Whole
            && server.how == How::Whole
        {
            add(|sum| sum.whole += 1);
            let during = self.kills.iter().filter(|kill| kill.from <= s.over() && s.arrived < Some(kill.from));
            let outlived = during.filter(|kill| kill.from > s.began).count();
            tally.of(seed, s.way, |sum| sum.outlived += outlived);
            tally.bytes += bytes;
            let [up, down] = ways::added(s.way, s.to);
            return Ok(Some(Some([client.sent + up, server.sent + down])));
        }
        if any(|how| *how == How::Early) {
            add(|sum| sum.early += 1);
        } else {
            add(|sum| sum.reset += 1);
        }
        if is_excused { Ok(None) } else { Err(format!("not whole{}", all())) }
    }
}

/// Returns the failures if no line comes for a connection that has ended well, and a process is killed so long after it.
fn without_line(kill_after: Option<Duration>) -> usize {
    let (ledger, from) = (Ledger::new(), "10.0.0.1:20000".parse().expect("an address"));
    let seed = Plan::seed(Kind::Short, &mut SmallRng::seed_from_u64(1));
    let seen = || Seen { sent: 8, received: 8, how: How::Whole };
    ledger.begin(seed, Way::Copied, from, Family::V4);
    assert!(ledger.arrived(seed));
    ledger.server_done(seed, seen());
    ledger.client_done(seed, Ok(seen()));
    if let Some(after) = kill_after {
        let from = Instant::now() + after;
        ledger.killed(Kill { from, until: Some(from), since: ledger.began, flows: None, older: false });
    }
    ledger.settle(true);
    ledger.failures().len()
}

#[test]
fn a_line_may_be_missing_only_if_a_kill_follows_the_end() {
    assert_eq!(without_line(None), 1);
    assert_eq!(without_line(Some(Duration::ZERO)), 0);
    assert_eq!(without_line(Some(WRITES + Duration::from_secs(1))), 1);
}

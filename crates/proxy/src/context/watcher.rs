//! Watches connections with triggers, and does what they say: one task for all of them.
//!
//! The engine tells when the data of a host have taken a connection back. Everything else is looked at once a second, which
//! costs a look at the tables of the data path for each connection.

use crate::{
    context::{TapDirs, tap_dir::TapDir},
    counters::Counters,
    handed::Counted,
    triggers::{Then, Trigger, When, ask::Answer},
};
use longsplice_engine::{Command, FlowState, FlowStatus, OnTrigger, Pair, Splicer};
use std::{
    collections::HashMap,
    future::pending,
    io,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::yield_now,
    time::{sleep, sleep_until},
};

/// Pause between two looks at all connections.
const PAUSE: Duration = Duration::from_secs(1);
/// Connections that are looked at before other tasks get a turn.
const TURN: usize = 100;
/// Time within which a spliced connection has to be back, so that a tap may begin.
const BACK_WITHIN: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(20);

/// What the task is told. There is one message for each connection, so that no limit is needed, and one for each take-over by
/// data, after which the connection is not spliced until the task has acted.
pub(crate) enum Note {
    /// A connection with triggers has begun, or goes on after so much in another process.
    Began(u64, Arc<[Trigger]>, TapDirs, Option<Counted>),
    /// Somebody wants to know how far each is.
    Counted(oneshot::Sender<HashMap<u64, Counted>>),
    /// The data of a host have taken it back.
    Data(u64, Arc<[Trigger]>, TapDirs),
}

/// Tells the task.
#[derive(Clone)]
pub(crate) struct Triggers(UnboundedSender<Note>);

impl Triggers {
    pub fn new() -> (Triggers, UnboundedReceiver<Note>) {
        let (tell, told) = unbounded_channel();
        (Triggers(tell), told)
    }

    /// Watches a connection from now on.
    pub fn begin(&self, flow: u64, of: &Arc<[Trigger]>, taps: &TapDirs, counted: Option<Counted>) {
        if !of.is_empty() {
            let _ = self.0.send(Note::Began(flow, of.clone(), taps.clone(), counted)); // the server ends
        }
    }

    /// Returns how far all connections are that have triggers.
    pub async fn counted(&self) -> HashMap<u64, Counted> {
        let (tell, told) = oneshot::channel();
        let _ = self.0.send(Note::Counted(tell)); // the server ends
        told.await.unwrap_or_default()
    }

    /// Returns what the engine calls when data have taken a connection back.
    pub fn on_data(&self, of: &Arc<[Trigger]>, taps: &TapDirs) -> OnTrigger {
        let (tell, of, taps) = (self.0.clone(), of.clone(), taps.clone());
        OnTrigger::new(move |flow| drop(tell.send(Note::Data(flow, of.clone(), taps.clone()))))
    }
}

/// What is needed to act.
pub(crate) struct Means {
    pub splicer: Splicer,
    pub counters: Arc<Counters>,
}

/// A connection that is watched.
struct Watched {
    of: Arc<[Trigger]>,
    taps: TapDirs,
    /// Bytes that have passed, and when that was last known to have changed.
    bytes: (u64, Instant),
    /// For each trigger, what it takes to pull it: a number of bytes, or 0 and 1 for an idle one that may be pulled or was.
    next: Box<[u64]>,
    is_tapped: bool,
}

impl Watched {
    fn new(of: Arc<[Trigger]>, taps: TapDirs) -> Watched {
        let next =
            of.iter().map(|trigger| if let When::Bytes { count, .. } = trigger.when { count } else { 0 }).collect();
        Watched { of, taps, bytes: (0, Instant::now()), next, is_tapped: false }
    }

    /// Goes on where another process was, as far as the triggers are the same.
    fn goes_on(&mut self, counted: &Counted) {
        // bytes that have passed are no news
        self.bytes = (u64::MAX, counted.quiet_since.into());
        for (trigger, next) in self.of.iter().zip(self.next.iter_mut()) {
            let when = format!("{:?}", trigger.when);
            counted.next.iter().filter(|(was, _)| *was == when).for_each(|(_, n)| *next = *n);
        }
    }

    /// Says how far it is.
    fn counted(&self) -> Counted {
        let when = self.of.iter().map(|trigger| format!("{:?}", trigger.when));
        Counted { quiet_since: self.bytes.1.into(), next: when.zip(self.next.iter().copied()).collect() }
    }

    /// Returns which triggers are pulled, except those by data.
    fn look(&mut self, flow: &FlowStatus, now: Instant, day: [SystemTime; 2]) -> Vec<usize> {
        let bytes = Pair::new(flow.bytes_up, flow.bytes_down);
        match self.bytes.0 {
            u64::MAX => self.bytes.0 = bytes.client + bytes.server,
            n if n != bytes.client + bytes.server => self.bytes = (bytes.client + bytes.server, now),
            _ => {}
        }
        let idle = now.saturating_duration_since(self.bytes.1);
        let pulled = |(trigger, next): (&Trigger, &mut u64)| match trigger.when {
            When::Data(_) => false,
            When::Bytes { count, .. } => {
                let passed = trigger.when.counted(bytes);
                let is = passed >= *next;
                if is {
                    // only a program may be asked again
                    *next = if matches!(trigger.then, Then::Ask(_)) { passed.saturating_add(count) } else { u64::MAX };
                }
                is
            }
            When::Idle(after) => {
                let was = std::mem::replace(next, u64::from(idle >= after));
                was == 0 && *next == 1
            }
            When::At(time) => time.lies_between(day[0], day[1]),
        };
        let all = self.of.iter().zip(self.next.iter_mut()).map(pulled);
        (0..).zip(all).filter(|(_, is)| *is).map(|(n, _)| n).collect()
    }
}

/// Watches until the server is gone.
pub(crate) async fn watch_all(mut notes: UnboundedReceiver<Note>, means: Arc<Means>) {
    let mut watched: HashMap<u64, Watched> = HashMap::new();
    let (mut at, mut last) = (tokio::time::Instant::now(), SystemTime::now());
    loop {
        let is_idle = watched.is_empty();
        let look = async {
            if is_idle {
                pending::<()>().await;
            }
            sleep_until(at).await;
        };
        tokio::select! {
            note = notes.recv() => match note {
                None => return,
                Some(Note::Counted(tell)) => {
                    let all = watched.iter().map(|(flow, watched)| (*flow, watched.counted()));
                    let _ = tell.send(all.collect()); // nobody waits any more
                }
                Some(Note::Began(flow, of, taps, counted)) => {
                    if is_idle {
                        (at, last) = (tokio::time::Instant::now() + PAUSE, SystemTime::now());
                    }
                    let known = watched.entry(flow).or_insert_with(|| Watched::new(of, taps));
                    counted.iter().for_each(|counted| known.goes_on(counted));
                }
                Some(Note::Data(flow, of, taps)) => {
                    let known = watched.entry(flow).or_insert_with(|| Watched::new(of, taps));
                    if let (Some(status), Some(n)) = (means.splicer.status(flow), by_data(&known.of)) {
                        pull(&means, known, status, n);
                    }
                }
            },
            () = look => {
                let now = SystemTime::now();
                look_at_all(&means, &mut watched, [last, now]).await;
                (at, last) = (tokio::time::Instant::now() + PAUSE, now);
            }
        }
    }
}

/// The trigger by data. There is one at most.
fn by_data(of: &[Trigger]) -> Option<usize> {
    of.iter().position(|trigger| matches!(trigger.when, When::Data(_)))
}

async fn look_at_all(means: &Arc<Means>, watched: &mut HashMap<u64, Watched>, day: [SystemTime; 2]) {
    let mut gone = Vec::new();
    for (turn, (flow, known)) in watched.iter_mut().enumerate() {
        if turn % TURN == TURN - 1 {
            yield_now().await;
        }
        match means.splicer.status(*flow) {
            None => gone.push(*flow),
            Some(status) => {
                for n in known.look(&status, Instant::now(), day) {
                    pull(means, known, status.clone(), n);
                }
            }
        }
    }
    gone.iter().for_each(|flow| drop(watched.remove(flow)));
}

/// Does what a trigger says.
fn pull(means: &Arc<Means>, known: &mut Watched, flow: FlowStatus, n: usize) {
    Counters::add(&means.counters.triggered);
    let Trigger { when, then } = &known.of[n];
    let by_data = matches!(when, When::Data(_));
    tracing::debug!(flow = flow.id, when = when.label(), "triggered");
    match then {
        Then::Copy => act(means, &flow, by_data, Answer::Copy),
        Then::Kill => act(means, &flow, by_data, Answer::Kill),
        Then::Tap(_) if known.is_tapped => act(means, &flow, by_data, Answer::GoOn),
        Then::Tap(dir) => {
            known.is_tapped = true;
            let (means, dir) = (means.clone(), known.taps.get(dir).cloned());
            tokio::spawn(async move {
                if let Err(error) = tap(&means, &flow, by_data, dir).await {
                    Counters::add(&means.counters.trigger_failures);
                    tracing::error!(flow = flow.id, %error, "a tap cannot begin");
                }
            });
        }
        Then::Ask(question) => {
            let (means, question, label) = (means.clone(), question.clone(), when.label());
            tokio::spawn(async move {
                let answer = question.ask(label, &flow).await.unwrap_or_else(|error| {
                    Counters::add(&means.counters.trigger_failures);
                    let (program, otherwise) = (question.program.display(), question.otherwise);
                    tracing::error!(flow = flow.id, %error, "{program} does not say what to do: {otherwise:?}");
                    otherwise
                });
                act(&means, &flow, by_data, answer);
            });
        }
    }
}

/// `by_data`: the connection was spliced, and has been taken back.
fn act(means: &Means, flow: &FlowStatus, by_data: bool, answer: Answer) {
    let command = match answer {
        Answer::GoOn if by_data => Command::Splice,
        Answer::GoOn => return,
        Answer::Copy => Command::Unsplice,
        Answer::Kill => Command::Reset,
    };
    means.splicer.command(flow.id, command); // it may just have ended
}

/// Takes a connection back, taps it, and lets it go on as it was.
async fn tap(means: &Means, flow: &FlowStatus, by_data: bool, dir: Option<Arc<TapDir>>) -> io::Result<()> {
    let dir = dir.ok_or(io::ErrorKind::NotFound)?;
    let is_forwarded = matches!(flow.state, FlowState::Spliced | FlowState::Released);
    // one that may be spliced has to stay for a while
    let was_spliced = by_data || is_forwarded || flow.refusal.is_none();
    if was_spliced {
        means.splicer.command(flow.id, Command::Unsplice);
    }
    let (client, end) = (flow.client, Instant::now() + BACK_WITHIN);
    let make = || {
        let dir = dir.clone();
        move || dir.tap(client)
    };
    while !means.splicer.tap(flow.id, make()).await {
        let now = means.splicer.status(flow.id).ok_or_else(|| io::Error::other("the connection has ended"))?;
        if Instant::now() > end {
            let refusal = now.refusal.map_or_else(String::new, |why| format!(": {why}"));
            return Err(io::Error::other(format!("the connection cannot be taken back, and goes on{refusal}")));
        }
        sleep(STEP).await;
    }
    if was_spliced {
        means.splicer.command(flow.id, Command::Splice);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use longsplice_engine::{FlowInfo, Leftovers, Policy, Refusal};
    use tokio::{
        net::{TcpListener, TcpStream},
        sync::oneshot,
    };

    /// It ends before it is asked for, or with the order unread.
    #[tokio::test]
    async fn a_connection_that_ends_before_its_tap_begins_leaves_no_files() {
        let splicer = Splicer::copying(Refusal::Policy);
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listener = splicer.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let home = tempfile::tempdir().unwrap();
        let path = home.path().to_owned();
        let dir = Arc::new(TapDir::open(&path).unwrap());
        let means = Means { splicer: splicer.clone(), counters: Arc::default() };
        for has_ended in [true, false] {
            let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let leg = listener.accept().await.unwrap();
            let onward = splicer.connect(server.local_addr().unwrap(), &leg).await.unwrap();
            let (end, ended) = oneshot::channel();
            let (policy, info) = (Arc::new(Policy::default()), FlowInfo::new("plug", ""));
            let done = move |_, _: &FlowInfo| {
                let _ = end.send(());
            };
            let id = splicer.hand_over(leg, onward, Leftovers::default(), policy, info, done);
            let flow = splicer.status(id).unwrap();
            splicer.command(id, Command::Reset);
            if has_ended {
                ended.await.unwrap();
            }
            let error = tap(&means, &flow, false, Some(dir.clone())).await.unwrap_err();
            assert_eq!(error.to_string(), "the connection has ended");
            drop(client);
        }
        dir.flush(BACK_WITHIN);
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
    }
}

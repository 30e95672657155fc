//! The access log: one line for each connection, with its bytes.

use serde_json::Value;
use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::Read,
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

/// A line that has not come by then does not come. Hosts may have ended while the program still waits for a segment that was
/// lost, and what a killed process has left is told by the next one.
const COMES: Duration = Duration::from_secs(100);

/// The line that has to come.
#[derive(Clone, Copy, Debug)]
pub struct Due {
    /// Bytes of the client and of the server; `None`: any.
    pub bytes: Option<[u64; 2]>,
    /// The process that would write it was killed.
    pub may_be_lost: bool,
    /// When the connection was over.
    pub over: Instant,
}

/// A connection, and for a request its path.
type Key = (SocketAddr, Option<String>);

/// Lines that have come, those that have to come, and those of which both is the case.
#[derive(Default)]
pub struct Lines {
    come: HashMap<Key, Value>,
    due: HashMap<Key, Due>,
    both: HashMap<Key, Value>,
    /// Seeds of streams that were judged.
    seeds: HashSet<u64>,
    /// Numbers of lines, of those that were lost with their process, of those that were lost because a kill followed the end of their
    /// connections, and of those that say that a flow was left.
    all: usize,
    lost: usize,
    lost_at_end: usize,
    left: usize,
}

impl Lines {
    pub fn know(&mut self, seed: u64) {
        self.seeds.insert(seed);
    }

    pub fn knows(&self, seed: u64) -> bool {
        self.seeds.contains(&seed)
    }

    /// Takes a line. Fails if it is one too many, or wrong.
    pub fn take(&mut self, line: &str) -> Result<(), String> {
        let value: Value = serde_json::from_str(line).map_err(|e| format!("a line of the access log: {e}: {line}"))?;
        let client = value["client"].as_str().and_then(|client| client.parse().ok());
        let client = client.ok_or_else(|| format!("no client: {line}"))?;
        // those of upgrades of HTTP are of the connection
        let path = value["uri"].as_str().filter(|path| *path != "/other").map(str::to_owned);
        self.all += 1;
        if value["how"] == "left" {
            self.left += 1;
            return Ok(());
        }
        let key = (client, path);
        if self.both.contains_key(&key) || self.come.contains_key(&key) {
            let other = self.come.get(&key).or_else(|| self.both.get(&key)).map(Value::to_string).unwrap_or_default();
            return Err(format!("a second line: {line}\n  after {other}"));
        }
        match self.due.remove(&key) {
            Some(due) => self.settle(key, &value, due),
            None => {
                self.come.insert(key, value);
                Ok(())
            }
        }
    }

    /// A connection has ended.
    pub fn expect(&mut self, client: SocketAddr, path: Option<&str>, due: Due) {
        self.due.insert((client, path.map(str::to_owned)), due);
    }

    /// Compares lines with what has happened. Returns what is wrong, or missing. `all`: no line comes any more. `was_killed`: whether
    /// a process was killed that may still have had the line of a connection that was over then. This is known only now, since the
    /// kill may follow the end.
    pub fn overdue(&mut self, all: bool, was_killed: impl Fn(Instant) -> bool) -> Vec<String> {
        let mut wrong = Vec::new();
        let there: Vec<Key> = self.due.keys().filter(|key| self.come.contains_key(*key)).cloned().collect();
        for key in there {
            if let (Some(due), Some(value)) = (self.due.remove(&key), self.come.remove(&key)) {
                wrong.extend(self.settle(key, &value, due).err());
            }
        }
        let is_late = |due: &Due| all || due.over.elapsed() > COMES;
        let late: Vec<Key> = self.due.iter().filter(|(_, due)| is_late(due)).map(|(key, _)| key.clone()).collect();
        for key in late {
            match self.due.remove(&key) {
                Some(due) if due.may_be_lost => self.lost += 1,
                Some(due) if was_killed(due.over) => self.lost_at_end += 1,
                due => wrong.push(format!("no line in the access log for {key:?}, which ended as it had to: {due:?}")),
            }
        }
        wrong
    }

    fn settle(&mut self, key: Key, value: &Value, due: Due) -> Result<(), String> {
        let bytes = ["bytes_up", "bytes_down"].map(|field| value[field].as_u64().unwrap_or_default());
        // as much of it as tells which process has written it, since there may be a million
        let told = ["time", "id", "how", "processes", "splices"].map(|field| value[field].clone());
        self.both.insert(key, told.into_iter().collect());
        match due.bytes {
            Some(want) if want != bytes => Err(format!("{want:?} bytes, and the access log says: {value}")),
            _ => Ok(()),
        }
    }

    pub fn told(&self) -> String {
        let Lines { all, lost, lost_at_end, left, .. } = self;
        format!(
            "{all} lines of the access log: {left} say that a flow was left; {lost} are missing because a process was killed, and \
             {lost_at_end} because it was killed right after the end"
        )
    }
}

/// Reads a file that grows, even when its name is gone.
pub struct Tail {
    file: File,
    rest: Vec<u8>,
}

impl Tail {
    pub fn of(path: &Path) -> std::io::Result<Tail> {
        Ok(Tail { file: File::open(path)?, rest: Vec::new() })
    }

    /// The lines that are new, and complete.
    pub fn read(&mut self) -> std::io::Result<String> {
        self.file.read_to_end(&mut self.rest)?;
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        Ok(String::from_utf8_lossy(&self.rest.drain(..end).collect::<Vec<_>>()).into_owned())
    }
}

//! The cache of a forward or a translucent proxy (RFC 9111), shared by all its
//! clients, filled from the tap and served from the disk.
//!
//! A reply that may be stored is relayed like any other, copied or spliced. Its stored copy comes from a tap of the server's
//! leg, which never delays the relay. A thread takes bodies from the tap, finds their ends, decodes chunks, and writes files.
//! If a body is not known to be complete when the reply has ended, it is discarded, and the reason is counted ([`Count`]).
//!
//! | file | contents |
//! | --- | --- |
//! | `NUMBER.entry` | a reply in a self-contained format ([`file`]) |
//! | `NUMBER.tmp` | a reply that is being written; removed at the start of the program |
//! | `lock` | allows one program at a time |
//!
//! At the start, the index in memory ([`index`]) is built from the files. Damaged files are removed.

mod file;
mod index;
mod policy;
mod range;
mod turns;
mod writer;

pub(crate) use file::{BLOCK, Stored};
use index::{Index, Key, Labels};
use longsplice_engine::{Tap, TapReader, Taps};
use longsplice_http::{Body, Framing, Response};
pub(crate) use longsplice_proxy::counters::cache::Count;
use longsplice_proxy::{
    config::{CacheConfig, Came, Http},
    counters::cache::{CacheValues, Counts},
};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use policy::{Fit, digest};
pub(crate) use policy::{Meta, Question};
pub(crate) use range::Part;
use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, RwLock, Weak, atomic::Ordering::Relaxed},
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::task::JoinHandle;
pub(crate) use turns::Place;
use turns::{Turn, Turns};
use writer::Writer;

/// Bytes that may wait for the disk: half a second of traffic at 1 Gbit/s. Beyond that, replies are not stored.
const WAITING: usize = 64 << 20;
/// Number of replies stored at the same time; each takes a descriptor and a block of memory.
const FILLS: usize = 256;
/// Files of a process get numbers so far above those of one that lives: it may have given higher ones to replies that it does not
/// finish.
const APART: u64 = 1 << 32;

#[derive(Debug)]
pub(crate) struct Cache {
    taps: Taps,
    shared: Arc<CacheInner>,
}

/// Tells when a cache that nobody uses any more has left its directory: its writer may have to end first.
#[derive(Debug, Clone)]
pub(crate) struct Leaving(Weak<()>);

impl Leaving {
    pub fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Waits until then, for `limit` at most. Blocks the thread.
    pub fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// State shared by the cache handles and the writer.
#[derive(Debug)]
struct CacheInner {
    dir: PathBuf,
    /// Settings, which may change.
    config: RwLock<Arc<CacheConfig>>,
    state: Mutex<Contents>,
    turns: Turns,
    counts: Counts,
    /// Held for writing while the head of a file is rewritten, so that no reader sees half of it.
    heads: RwLock<()>,
    /// Lock of the directory, held until the last user of this state is gone, unless another process has it.
    lock: Mutex<Option<Flock<File>>>,
    /// Dropped last: once it is gone, the lock is free. A count of this state's users would be none before that.
    there: Arc<()>,
}

#[derive(Debug, Default)]
struct Contents {
    index: Index,
    /// Replies that are being stored, and the number of their bytes already written.
    fills: HashMap<u64, Filling>,
    writing: u64,
    /// The last number given to a file and its tap.
    next: u64,
    /// Another process has the directory now. The index only says what has to be removed.
    left: bool,
    /// What was seen of the directory, if another process had it then.
    seen: Option<Seen>,
}

/// What a file was known to hold before the directory was this cache's: its size and time, and what the index needs.
#[derive(Debug, Clone, Copy)]
struct Glimpse {
    is: (u64, Option<SystemTime>),
    size: u64,
    key: Key,
    marks: (u64, Labels),
}

/// What was seen of a directory, by the numbers of its files.
type Seen = HashMap<u64, Glimpse>;

/// A reply that is being stored.
#[derive(Debug)]
struct Filling {
    key: Key,
    meta: Meta,
    body: Body,
    /// Bytes of the body that were read before the tap began.
    first: Vec<u8>,
    /// The reply has ended, and was complete.
    whole: bool,
    /// The reply was invalidated while it was stored.
    stale: bool,
    /// Those who wait for the reply go on when it is stored, or is not after all.
    _turn: Option<Turn>,
}

/// Handle of a reply that is being stored, for the code that relays it. If it is dropped before
/// [`Fill::complete`], the reply is not stored.
#[derive(Debug)]
pub(crate) struct Fill {
    id: u64,
    shared: Arc<CacheInner>,
}

/// A stored reply for a question.
#[derive(Debug)]
pub(crate) struct Found {
    pub stored: Stored,
    /// Whether the reply may be sent as it is; otherwise its server has to be asked first.
    pub fresh: bool,
    key: Key,
    file: u64,
}

impl Cache {
    /// Creates the directory if it is missing, accessible to its owner only, and builds the index of its contents.
    pub fn open(config: &CacheConfig) -> io::Result<Cache> {
        let (cache, reader) = Cache::prepare(config)?;
        cache.begin(Duration::ZERO)?;
        cache.write_from(reader)?;
        Ok(cache)
    }

    /// The same for a directory that another process still has. It is looked at, and neither used nor changed before
    /// [`Cache::begin`].
    pub fn open_later(config: &CacheConfig) -> io::Result<Cache> {
        let (cache, reader) = Cache::prepare(config)?;
        cache.look_ahead()?;
        cache.write_from(reader)?;
        Ok(cache)
    }

    /// Reads what another process has stored, so that less is left for [`Cache::begin`].
    fn look_ahead(&self) -> io::Result<()> {
        let seen = self.shared.survey(&Seen::new(), false)?;
        self.shared.state().seen = Some(seen);
        Ok(())
    }

    fn write_from(&self, reader: TapReader) -> io::Result<()> {
        let writer = Writer::new(self.shared.clone());
        thread::Builder::new().name("cache".into()).spawn(move || writer.run(&reader)).map(drop)
    }

    fn prepare(config: &CacheConfig) -> io::Result<(Cache, TapReader)> {
        DirBuilder::new().recursive(true).mode(0o700).create(&config.dir)?;
        let shared = Arc::new(CacheInner {
            dir: config.dir.clone(),
            config: RwLock::new(Arc::new(config.clone())),
            state: Mutex::default(),
            turns: Turns::default(),
            counts: Default::default(),
            heads: RwLock::default(),
            lock: Mutex::default(),
            there: Arc::default(),
        });
        shared.state().left = true;
        let (taps, reader) = Taps::new(WAITING);
        Ok((Cache { taps, shared }, reader))
    }

    /// Takes the directory, unless this has it. Waits for another process to leave it, for `limit` at most. Blocks the thread.
    pub fn begin(&self, limit: Duration) -> io::Result<()> {
        if !self.shared.state().left {
            return Ok(());
        }
        let end = Instant::now() + limit;
        let open = || {
            let path = self.shared.dir.join("lock");
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
        };
        let mut tried = Flock::lock(open()?, FlockArg::LockExclusiveNonblock);
        while let Err((_, Errno::EWOULDBLOCK)) = tried
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(5));
            tried = Flock::lock(open()?, FlockArg::LockExclusiveNonblock);
        }
        let lock = tried.map_err(|(_, e)| match e {
            Errno::EWOULDBLOCK => io::Error::other("another program has its cache there"),
            e => e.into(),
        })?;
        *self.shared.lock.lock().expect("nothing panics under this lock") = Some(lock);
        let seen = self.shared.state().seen.take();
        self.shared.learn(seen)
    }

    /// Leaves the directory to another process: from now on nothing is found or stored here, and what is being stored is not
    /// finished. What requests invalidate is removed for the other process, too, as far as it was stored before.
    pub fn leave(&self) {
        {
            let mut state = self.shared.state();
            state.left = true;
            state.fills.values_mut().for_each(|filling| filling.stale = true);
        }
        drop(self.shared.heads.write().expect("nothing panics under this lock")); // one that is being rewritten is whole now
        self.shared.lock.lock().expect("nothing panics under this lock").take();
    }

    pub fn leaving(&self) -> Leaving {
        Leaving(Arc::downgrade(&self.shared.there))
    }

    pub fn config(&self) -> Arc<CacheConfig> {
        self.shared.config()
    }

    /// Changes the settings. If there is more than fits now, replies are evicted.
    pub fn configure(&self, config: &CacheConfig) {
        if *self.config() != *config {
            *self.shared.config.write().expect("nothing panics under this lock") = Arc::new(config.clone());
            self.shared.make_room(&mut self.shared.state());
        }
    }

    pub fn count(&self, count: Count) {
        self.shared.count(count);
    }

    pub fn values(&self) -> CacheValues {
        let state = self.shared.state();
        CacheValues::new(state.index.len() as u64, state.index.bytes() + state.writing, &self.shared.counts)
    }

    /// Returns a stored reply for this question that passed this filter, and that the client may have. Reads from the disk.
    pub async fn look(
        self: &Arc<Cache>,
        question: Question,
        filter: Arc<str>,
        may_have: impl Fn(&Meta) -> bool + Send + 'static,
    ) -> Option<Found> {
        let cache = self.clone();
        // fails only if the runtime is gone
        tokio::task::spawn_blocking(move || cache.shared.look(&question, &filter, may_have)).await.ok()?
    }

    /// Returns one block of the body, beginning at `at`. If the file is damaged, it is removed, and an error returned.
    pub async fn read(self: &Arc<Cache>, found: Arc<Found>, at: u64) -> io::Result<Vec<u8>> {
        let cache = self.clone();
        let read = move || {
            let block = found.stored.block(at);
            if let Err(error) = &block {
                cache.shared.damaged(found.key, found.file, error);
            }
            block
        };
        tokio::task::spawn_blocking(read).await?
    }

    /// Begins to store a reply whose head has arrived, with the `first` bytes of its body. `None`: it is not stored now.
    pub fn fill(&self, meta: Meta, framing: Framing, first: &[u8], turn: Option<Turn>) -> Option<(Fill, Tap)> {
        let most = self.config().object;
        if matches!(framing, Framing::Exact(n) if n > most) {
            self.count(Count::Large);
            return None;
        }
        let mut state = self.shared.state();
        let key = key(&meta.url);
        if state.left {
            return None;
        }
        if state.fills.len() >= FILLS || state.fills.values().any(|f| f.key == key) {
            self.count(Count::Busy);
            return None;
        }
        state.next += 1;
        let id = state.next;
        let body = Body::lenient(framing);
        state
            .fills
            .insert(id, Filling { key, meta, body, first: first.to_vec(), whole: false, stale: false, _turn: turn });
        Some((Fill { id, shared: self.shared.clone() }, self.taps.tap(id)))
    }

    /// Returns what a request for this URL has to do.
    pub fn turn(&self, url: &str) -> Place {
        self.shared.turns.take(url)
    }

    /// Invalidates everything stored for this URL (RFC 9111, 4.4). Returns whether there was something.
    pub fn invalidate(&self, url: &str) -> bool {
        let key = key(url);
        let mut state = self.shared.state();
        state.fills.values_mut().filter(|f| f.key == key).for_each(|f| f.stale = true);
        let files = state.index.files(key);
        for file in &files {
            self.shared.remove(&mut state, key, *file, Count::Invalidated);
        }
        !files.is_empty()
    }

    /// Invalidates what is stored for a URL, or for all that begin with it, of whatever site and pool: URLs are compared from
    /// their `http://` on. Looks at the files of the URL, or of its site, some thousand behind `after`. Returns how many were removed,
    /// and the last one that was looked at, unless it is the last one of all. Blocks.
    pub fn purge(&self, url: &str, below: bool, after: Option<u64>) -> (u64, Option<u64>) {
        const AT_ONCE: usize = 4096;
        let url = normal(url);
        let is_meant = |stored: &str| {
            let stored = plain(stored);
            if below { stored.starts_with(&url) } else { stored == url }
        };
        let [whole, site] = labels(&url);
        let page = {
            let mut state = self.shared.state();
            state.fills.values_mut().filter(|f| is_meant(&f.meta.url)).for_each(|f| f.stale = true);
            state.index.after(if below { site } else { whole }, after, AT_ONCE)
        };
        let mut removed = 0;
        for (file, key) in &page {
            // one that cannot be read is found damaged when it is asked for
            if Stored::open(&self.shared.entry(*file)).is_ok_and(|stored| is_meant(&stored.meta.url)) {
                self.shared.remove(&mut self.shared.state(), *key, *file, Count::Invalidated);
                removed += 1;
            }
        }
        (removed, page.last().map(|(file, _)| *file).filter(|_| page.len() == AT_ONCE))
    }

    /// Removes a reply that its server did not confirm.
    pub fn forget(&self, found: &Found) {
        self.shared.remove(&mut self.shared.state(), found.key, found.file, Count::Invalidated);
    }

    /// Updates the metadata of a stored reply, in memory and on the disk.
    pub async fn freshen(&self, found: &mut Found, meta: Meta) {
        found.stored.meta = meta.clone();
        // fails only if the runtime is gone
        let _ = self.freshen_file((found.key, found.file), meta).await;
    }

    fn freshen_file(&self, (key, file): (Key, u64), meta: Meta) -> JoinHandle<()> {
        let shared = self.shared.clone();
        tokio::task::spawn_blocking(move || shared.freshen(key, file, &meta))
    }

    /// Waits until no reply is being stored any more, for `limit` at most. Blocks the thread.
    pub fn flush(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.shared.state().fills.is_empty() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Found {
    /// Adds conditions to the head of a request ([`Fetch::ask`]).
    pub fn ask(&self, head: &mut Vec<u8>) {
        head.truncate(head.len() - 2); // the empty line
        for (name, value) in self.stored.meta.conditions() {
            head.extend([name.as_bytes(), b": ", &value, b"\r\n"].concat());
        }
        head.extend(b"\r\n");
    }
}

impl CacheInner {
    fn state(&self) -> MutexGuard<'_, Contents> {
        self.state.lock().expect("nothing panics under this lock")
    }

    fn config(&self) -> Arc<CacheConfig> {
        self.config.read().expect("nothing panics under this lock").clone()
    }

    fn count(&self, count: Count) {
        self.counts[count as usize].fetch_add(1, Relaxed);
    }

    fn entry(&self, file: u64) -> PathBuf {
        self.dir.join(format!("{file:016x}.entry"))
    }

    fn temporary(&self, file: u64) -> PathBuf {
        self.dir.join(format!("{file:016x}.tmp"))
    }

    fn unlink(path: &Path) {
        if let Err(error) = fs::remove_file(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}; remove it by hand", path.display());
        }
    }

    fn remove(&self, state: &mut Contents, key: Key, file: u64, why: Count) {
        if state.index.remove(key, file) {
            CacheInner::unlink(&self.entry(file));
            self.count(why);
        }
    }

    fn damaged(&self, key: Key, file: u64, error: &io::Error) {
        let mut state = self.state();
        // it may have been evicted in the meantime, or another process writes it
        if state.left || !state.index.files(key).contains(&file) {
        } else if error.kind() == io::ErrorKind::NotFound {
            // the process before had a request that invalidates it
            self.remove(&mut state, key, file, Count::Invalidated);
        } else {
            tracing::warn!("{} is damaged, and removed: {error}", self.entry(file).display());
            self.remove(&mut state, key, file, Count::Damaged);
        }
    }

    /// Builds the index from the directory. `seen`: what is not read again, unless it has changed since another process had it.
    fn learn(&self, seen: Option<Seen>) -> io::Result<()> {
        let apart = if seen.is_some() { APART } else { 0 };
        let mut found: Vec<_> = self.survey(&seen.unwrap_or_default(), true)?.into_iter().collect();
        found.sort_unstable_by_key(|(number, _)| *number); // oldest first: numbers grow
        let mut state = self.state();
        for (number, Glimpse { size, key, marks, .. }) in found {
            state.next = number;
            let gone = state.index.add(key, number, size, marks);
            gone.iter().for_each(|file| CacheInner::unlink(&self.entry(*file)));
        }
        state.next += apart;
        state.left = false;
        self.make_room(&mut state);
        Ok(())
    }

    /// Looks at the files of the directory. Those with unknown names are left alone, and unless the directory is `ours`, so are all.
    fn survey(&self, seen: &Seen, ours: bool) -> io::Result<Seen> {
        let mut found = Seen::new();
        for file in fs::read_dir(&self.dir)? {
            let file = file?;
            let path = file.path();
            let number = path.file_stem().and_then(|s| s.to_str()).filter(|s| s.len() == 16);
            let number = number.and_then(|s| u64::from_str_radix(s, 16).ok()).filter(|n| *n < u64::MAX / 2);
            let Some(number) = number else { continue };
            match path.extension().and_then(|e| e.to_str()) {
                Some("tmp") if ours => CacheInner::unlink(&path),
                Some("entry") => {
                    let is = file.metadata().map_or((0, None), |is| (is.len(), is.modified().ok()));
                    let glimpse = match seen.get(&number).filter(|seen| seen.is == is) {
                        Some(seen) => Ok(*seen),
                        None => Stored::open(&path).map(|Stored { size, meta, .. }| {
                            let (key, marks) = (key(&meta.url), marks(&meta));
                            Glimpse { is, size, key, marks }
                        }),
                    };
                    match glimpse {
                        Ok(glimpse) => drop(found.insert(number, glimpse)),
                        Err(error) if ours => {
                            tracing::warn!("{} is damaged, and removed: {error}", path.display());
                            CacheInner::unlink(&path);
                            self.count(Count::Damaged);
                        }
                        Err(_) => {} // it is looked at again
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Evicts replies until the total size is within the limit. False: nothing is left to evict.
    fn make_room(&self, state: &mut Contents) -> bool {
        let size = self.config().size;
        while state.index.bytes() + state.writing > size {
            let Some(file) = state.index.evict() else { return false };
            CacheInner::unlink(&self.entry(file));
            self.count(Count::Evicted);
        }
        true
    }

    fn look(&self, question: &Question, filter: &str, may_have: impl Fn(&Meta) -> bool) -> Option<Found> {
        let key = key(&question.url);
        let files = {
            let state = self.state();
            if state.left { Vec::new() } else { state.index.files(key) }
        };
        for file in files {
            let stored = {
                let _whole = self.heads.read().expect("nothing panics under this lock");
                Stored::open(&self.entry(file))
            };
            let stored = match stored {
                Ok(stored) => stored,
                Err(error) => {
                    self.damaged(key, file, &error);
                    continue;
                }
            };
            let fit = stored.meta.fit(question, SystemTime::now());
            if fit == Fit::Other || stored.meta.filter != filter || !may_have(&stored.meta) {
                continue;
            }
            self.state().index.touch(key, file, stored.size);
            return Some(Found { stored, fresh: fit == Fit::Fresh, key, file });
        }
        None
    }

    fn freshen(&self, key: Key, file: u64, meta: &Meta) {
        if !meta.may_stay() {
            return self.remove(&mut self.state(), key, file, Count::Invalidated);
        }
        let _alone = self.heads.write().expect("nothing panics under this lock");
        if self.state().left {
            return;
        }
        let path = self.entry(file);
        match Stored::open(&path).and_then(|stored| stored.rewrite(&path, meta)) {
            Ok(size) => self.state().index.touch(key, file, size),
            // the file was evicted
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => {
                tracing::warn!("cannot write {}: {e}; it is removed", path.display());
                self.remove(&mut self.state(), key, file, Count::Disk);
            }
        }
    }
}

impl Fill {
    /// Marks the reply as complete. Must be called before its tap is dropped.
    pub fn complete(self) {
        if let Some(filling) = self.shared.state().fills.get_mut(&self.id) {
            filling.whole = true;
        }
    }
}

/// Writes a URL as caches know it: the site in lower case, without the default port, and with a path.
fn normal(url: &str) -> String {
    let rest = url.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://")).map_or(url, |_| &url[7..]);
    let (site, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let site = site.to_ascii_lowercase();
    let slash = if path.starts_with('/') { "" } else { "/" };
    format!("http://{}{slash}{path}", site.strip_suffix(":80").unwrap_or(&site))
}

fn key(url: &str) -> Key {
    u128::from_str_radix(&digest(url.as_bytes()), 16).unwrap_or_default() // 32 hexadecimal digits
}

/// Returns the URL of a stored reply as in [`normal`], without its pool.
fn plain(stored: &str) -> String {
    normal(stored.find("http://").map_or(stored, |at| &stored[at..]))
}

/// Returns a hash that distinguishes replies with the same URL, and what they are purged by.
fn marks(meta: &Meta) -> (u64, Labels) {
    let way = meta.came.as_ref().map_or("", |came| &came.way);
    (hash(&format!("{}{:?}{way}", meta.filter, meta.asked)), labels(&plain(&meta.url)))
}

/// Returns the labels of a URL, as in [`normal`].
fn labels(url: &str) -> Labels {
    let site = url[7..].find('/').map_or(url, |end| &url[..7 + end]);
    [hash(url), hash(site)]
}

fn hash(text: &str) -> u64 {
    u64::from_str_radix(&digest(text.as_bytes())[..16], 16).unwrap_or_default()
}

/// Returns a digest of the filter and of changes in requests: a reply that one filter allowed may be denied by another, and
/// other requests have other replies.
pub(crate) fn fingerprint(http: &Http) -> Arc<str> {
    let (filter, asked) = (&http.filter, &http.fields.request);
    match (filter.rules.is_empty() && filter.changes.list.is_empty(), asked.is_empty()) {
        (true, true) => "".into(),
        (false, true) => digest(format!("{filter:?}").as_bytes()).into(),
        (_, false) => digest(format!("{filter:?} {asked:?}").as_bytes()).into(),
    }
}

/// A request that goes to a server, and what the cache needs to handle its reply.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub cache: Arc<Cache>,
    /// `None`: the reply is not stored.
    pub question: Option<Question>,
    pub filter: Arc<str>,
    /// A stored reply that this request revalidates, with our conditions or the client's, or that may be sent if the server
    /// fails.
    pub stale: Option<Found>,
    /// Held until the reply is stored, or is known not to be.
    pub turn: Mutex<Option<Turn>>,
    /// URL that the reply invalidates, unless it is an error.
    pub changes: Option<String>,
    /// How the connection to the server is led, if it does not go straight to the target.
    pub came: Option<Came>,
    pub asked_at: SystemTime,
}

/// What happens to a reply.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The reply is relayed; the cache is not involved.
    Pass,
    /// The reply is relayed and not stored.
    Miss,
    /// The reply is relayed and stored.
    Fill(Fill, Tap),
    /// The stored reply is valid, with this new metadata. `None`: the 304 belongs to another reply.
    Good(Option<Box<Meta>>),
}

impl Fetch {
    /// Adds conditions to the request head, which ask the server whether the stored reply is still valid (RFC 9111, 4.3.1).
    pub fn ask(&self, head: &mut Vec<u8>) {
        if let Some(stale) = self.stale.as_ref().filter(|_| !self.has_condition()) {
            stale.ask(head);
        }
    }

    /// Whether the client sent a condition. It is sent on, and the answer goes to the client.
    fn has_condition(&self) -> bool {
        self.question.as_ref().is_some_and(|q| q.conditional)
    }

    /// Whether the stored reply may be sent because the server has failed (RFC 5861, 4).
    pub fn stands_in(&self) -> bool {
        let (Some(question), Some(stale)) = (&self.question, &self.stale) else { return false };
        let default = self.cache.config().stale_if_error;
        stale.stored.meta.may_be_stale(question, "stale-if-error", default, SystemTime::now())
    }

    /// Decides what happens to a final reply, whose head and the `first` bytes of its body have arrived; `None`: it must not be
    /// stored, since it is changed.
    pub fn hear(&self, reply: &Response, server: SocketAddr, first: Option<&[u8]>) -> Heard {
        if let Some(url) = self.changes.as_ref().filter(|_| (200..400).contains(&reply.status)) {
            self.cache.invalidate(url);
            for name in ["location", "content-location"] {
                for url in reply.passed_on(name).filter_map(|v| same_origin(url, v)) {
                    self.cache.invalidate(&url);
                }
            }
        }
        let times = [self.asked_at, SystemTime::now()];
        let Some(question) = &self.question else { return Heard::Pass };
        let asked = self.stale.as_ref().filter(|s| question.conditional || s.stored.meta.has_validator());
        if let (Some(stale), 304) = (asked, reply.status) {
            let meta = stale.stored.meta.freshened(reply, !question.conditional, times);
            if !question.conditional {
                return Heard::Good(meta.map(Box::new));
            }
            if let Some(meta) = meta {
                drop(self.cache.freshen_file((stale.key, stale.file), meta)); // in the background
            }
        }
        self.cache.count(Count::Misses);
        let meta = question.meta(reply, server, &self.filter, times);
        let meta = meta.map(|meta| Meta { came: self.came.clone(), ..meta });
        let turn = self.turn.lock().ok().and_then(|mut turn| turn.take());
        let fill = meta.zip(first).and_then(|(meta, first)| self.cache.fill(meta, reply.framing, first, turn));
        fill.map_or(Heard::Miss, |(fill, tap)| Heard::Fill(fill, tap))
    }
}

/// Resolves a reference in a reply against the URL; `None` unless both have the same origin (RFC 9111, 4.4).
fn same_origin(url: &str, reference: &[u8]) -> Option<String> {
    let reference = std::str::from_utf8(reference).ok()?.split('#').next()?;
    let (server, url) = url.split_at(url.find("http://")?); // see `Question::url`
    let path = url.strip_prefix("http://")?.find('/')? + "http://".len();
    let (origin, _) = url.split_at(path);
    match reference {
        r if r.starts_with("//") => None,
        r if r.starts_with('/') => Some(format!("{server}{origin}{r}")),
        r => r.strip_prefix(origin).is_some_and(|rest| rest.starts_with('/')).then(|| format!("{server}{r}")),
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;

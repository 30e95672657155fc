//! Taps as files: a thread writes one file for each direction of each client connection. If the thread or
//! the disk cannot keep up, the file has a gap, which is recorded beside it. No connection waits for either.
//!
//! `START-NUMBER-ADDRESS-PORT-client` holds the bytes sent by the client, `...-server` those sent to it.
//! START is the start of the program (Unix time, milliseconds), NUMBER counts connections, ADDRESS and PORT
//! are the client's. A file with gaps has a second file with the suffix `.gaps`, with a line `OFFSET LENGTH`
//! (bytes, decimal) for each gap. Offsets after a gap stay correct. In the same format, a file with the
//! suffix `.doubts` lists bytes for which the receiver may have got different ones ([`PieceKind::Doubt`]).
//!
//! Until all of that is written, the name of the file ends in `.part`. It keeps that name if the gaps cannot be
//! recorded because of a disk error, or if the program ends before: an incomplete file never looks complete.

use longsplice_engine::{Piece, PieceKind, Tap, TapDirection, TapReader, Taps};
use std::{
    collections::{HashMap, VecDeque},
    fs::{DirBuilder, File, OpenOptions},
    io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Bytes that may wait for the disk: half a second of traffic at 1 Gbit/s.
const WAITING: usize = 64 << 20;
/// Maximum number of open files. Those that were opened first are closed, and reopened when there is data for them.
const OPEN_FILES: usize = 512;
/// Maximum length of a file in bytes. The rest is a gap: one endless connection must not fill the disk.
pub const MAX_FILE: u64 = 16 << 30;
/// Minimum time between two messages about the disk.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// State shared by the taps and the writer.
#[derive(Debug, Default)]
struct TapDirState {
    /// Names of connections of which nothing was written yet.
    names: Mutex<HashMap<u64, String>>,
    /// Number of streams that have not ended.
    live: AtomicU64,
    errors: AtomicU64,
    /// Bytes in the files, and bytes that the disk has refused or that exceed [`MAX_FILE`].
    written: AtomicU64,
    refused: AtomicU64,
}

/// Bytes in the files, missing there, and in doubt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub bytes: u64,
    pub gaps: u64,
    pub doubts: u64,
}

/// A directory for tap files.
#[derive(Debug)]
pub(crate) struct TapDir {
    taps: Taps,
    shared: Arc<TapDirState>,
    start: u128,
    next: AtomicU64,
}

impl TapDir {
    /// Creates the directory if it is missing, accessible to its owner only, and starts the writer.
    pub fn open(dir: &Path) -> io::Result<TapDir> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        // report an error now, and not at the first connection
        let probe = dir.join(format!("{start}-probe"));
        new_file(&probe)?;
        std::fs::remove_file(probe)?;
        let (taps, reader) = Taps::new(WAITING);
        let shared = Arc::new(TapDirState::default());
        let writer = Writer {
            dir: dir.into(),
            shared: shared.clone(),
            connections: HashMap::new(),
            open: VecDeque::new(),
            said: None,
            failed_at: None,
        };
        thread::Builder::new().name("taps".into()).spawn(move || writer.run(&reader))?;
        Ok(TapDir { taps, shared, start, next: AtomicU64::new(1) })
    }

    /// Returns a tap for a connection of this client.
    pub fn tap(&self, client: SocketAddr) -> Tap {
        let id = self.next.fetch_add(1, Relaxed);
        let name = format!("{}-{id}-{}-{}", self.start, client.ip(), client.port());
        self.shared.names.lock().expect("nothing panics under this lock").insert(id, name);
        self.shared.live.fetch_add(2, Relaxed);
        self.taps.tap(id)
    }

    /// Returns the number of bytes in the files, of those that are missing there, and of those in doubt.
    pub fn counts(&self) -> Counts {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let passed = self.taps.counts();
        let (bytes, gaps) = (of(&self.shared.written), passed.gaps + of(&self.shared.refused));
        Counts { bytes, gaps, doubts: passed.doubts }
    }

    /// Returns the number of disk errors.
    pub fn errors(&self) -> u64 {
        self.shared.errors.load(Relaxed)
    }

    /// Waits until everything of ended connections is written, for `limit` at most. Blocks the thread.
    pub fn flush(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.shared.live.load(Relaxed) > 0 && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// The files of one stream.
struct Stream {
    path: PathBuf,
    file: Option<File>,
    made: bool,
    ended: bool,
    /// Offset after the last byte in the file.
    length: u64,
    gaps: Beside,
    doubts: Beside,
}

/// A list of byte ranges in a file beside that of a stream, one per line.
struct Beside {
    suffix: &'static str,
    /// Bytes of complete lines.
    length: u64,
    /// Start and end of a range that was not recorded yet.
    part: Option<(u64, u64)>,
}

impl Beside {
    fn new(suffix: &'static str) -> Beside {
        Beside { suffix, length: 0, part: None }
    }

    /// Records the pending range. If only a part of a line was written before, it is overwritten.
    fn tell(&mut self, of: &Path) -> io::Result<()> {
        let Some((from, to)) = self.part else { return Ok(()) };
        let line = format!("{from} {}\n", to - from);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(with(of, self.suffix))?;
        file.write_all_at(line.as_bytes(), self.length)?;
        self.length += line.len() as u64;
        self.part = None;
        Ok(())
    }
}

fn with(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(suffix);
    name.into()
}

impl Stream {
    fn new(path: PathBuf) -> Stream {
        let (gaps, doubts) = (Beside::new(".gaps"), Beside::new(".doubts"));
        Stream { path, file: None, made: false, ended: false, length: 0, gaps, doubts }
    }

    /// Returns the name of the file before it is complete.
    fn part(&self) -> PathBuf {
        with(&self.path, ".part")
    }

    fn file(&mut self) -> io::Result<&File> {
        let file = match self.file.take() {
            Some(file) => file,
            None if self.made => OpenOptions::new().write(true).open(self.part())?,
            None => new_file(&self.part())?,
        };
        self.made = true;
        Ok(self.file.insert(file))
    }

    fn bytes(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.gaps.tell(&self.path)?;
        self.file()?.write_all_at(bytes, at)?;
        self.length = at + bytes.len() as u64;
        Ok(())
    }

    /// Adds missing bytes to the gaps. Pieces are consecutive, so an unrecorded gap is extended.
    fn skip(&mut self, at: u64, length: u64) {
        if length > 0 {
            self.gaps.part = Some((self.gaps.part.map_or(at, |gap| gap.0), at + length));
        }
    }

    /// Adds a range to the doubts. If an earlier one is still unrecorded, both become one range, including the bytes between.
    fn doubt(&mut self, at: u64, length: u64) -> io::Result<()> {
        let known = self.doubts.part.unwrap_or((at, at + length));
        self.doubts.part = Some((known.0.min(at), known.1.max(at + length)));
        self.doubts.tell(&self.path)
    }

    /// Extends the file to the length of the stream, and gives it its final name if all gaps and doubts are recorded.
    fn end(&mut self, length: u64) -> io::Result<()> {
        self.ended = true;
        let told = self.gaps.tell(&self.path).and(self.doubts.tell(&self.path));
        let longer = length > self.length;
        let file = self.file()?;
        if longer {
            file.set_len(length)?;
        }
        self.file = None;
        told?;
        std::fs::rename(self.part(), &self.path)
    }
}

struct Writer {
    dir: PathBuf,
    shared: Arc<TapDirState>,
    connections: HashMap<u64, [Stream; 2]>,
    /// Open files in the order of their opening.
    open: VecDeque<(u64, TapDirection)>,
    said: Option<Instant>,
    /// Value of `refused` when the disk began to refuse.
    failed_at: Option<u64>,
}

impl Writer {
    fn run(mut self, reader: &TapReader) {
        while let Some(piece) = reader.next() {
            self.write(&piece);
        }
    }

    fn write(&mut self, piece: &Piece) {
        let (id, at) = (piece.tap, piece.at);
        let streams = self.connections.entry(id).or_insert_with(|| {
            let name =
                self.shared.names.lock().expect("nothing panics under this lock").remove(&id).unwrap_or_default();
            ["client", "server"].map(|from| Stream::new(self.dir.join(format!("{name}-{from}"))))
        });
        let s = &mut streams[piece.way as usize];
        let was_open = s.file.is_some();
        let done = match &piece.what {
            PieceKind::Bytes(bytes) => {
                let room = usize::try_from(MAX_FILE.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
                let done = if room > 0 { s.bytes(at, &bytes[..room]) } else { Ok(()) };
                let kept = if done.is_ok() { room } else { 0 };
                s.skip(at + kept as u64, (bytes.len() - kept) as u64);
                let before = self.shared.refused.fetch_add((bytes.len() - kept) as u64, Relaxed);
                self.shared.written.fetch_add(kept as u64, Relaxed);
                if done.is_err() {
                    self.failed_at.get_or_insert(before);
                } else if let Some(then) = self.failed_at.take_if(|_| kept > 0) {
                    tracing::info!("taps are written again; {} bytes are missing", before - then);
                }
                done
            }
            PieceKind::Gap(length) => {
                s.skip(at, *length);
                Ok(())
            }
            PieceKind::Doubt(length) => s.doubt(at, *length),
            PieceKind::End => s.end(at),
            _ => Err(io::Error::other("a piece of a kind that is not known")),
        };
        if let Err(error) = done {
            self.shared.errors.fetch_add(1, Relaxed);
            if self.said.is_none_or(|t| t.elapsed() >= COMPLAIN_EVERY) {
                let name = s.path.display();
                tracing::warn!("cannot write the tap {name}: {error}; it has gaps, or keeps .part in its name");
                self.said = Some(Instant::now());
            }
        }
        let is_open = s.file.is_some();
        if streams.iter().all(|s| s.ended) {
            self.connections.remove(&id);
        }
        if was_open && !is_open {
            self.open.retain(|o| *o != (id, piece.way));
        } else if is_open && !was_open {
            self.open.push_back((id, piece.way));
            self.close_one_too_many();
        }
        if piece.what == PieceKind::End {
            self.shared.live.fetch_sub(1, Relaxed);
        }
    }

    fn close_one_too_many(&mut self) {
        if self.open.len() > OPEN_FILES
            && let Some((id, way)) = self.open.pop_front()
            && let Some(streams) = self.connections.get_mut(&id)
        {
            streams[way as usize].file = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn writer(dir: &Path) -> Writer {
        let shared = Arc::new(TapDirState::default());
        for id in 0..OPEN_FILES as u64 + 10 {
            shared.names.lock().unwrap().insert(id, format!("n{id}"));
        }
        Writer {
            dir: dir.into(),
            shared,
            connections: HashMap::new(),
            open: VecDeque::new(),
            said: None,
            failed_at: None,
        }
    }

    fn piece(tap: u64, way: TapDirection, at: u64, what: PieceKind) -> Piece {
        Piece { tap, way, at, what }
    }

    fn bytes(text: &'static str) -> PieceKind {
        PieceKind::Bytes(text.as_bytes().into())
    }

    #[test]
    fn holes_are_where_gaps_are() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = writer(dir.path());
        for (at, what) in [(0, bytes("ab")), (2, PieceKind::Gap(3)), (5, bytes("fg")), (7, PieceKind::Gap(1 << 30))] {
            w.write(&piece(1, TapDirection::FromHost, at, what));
        }
        w.write(&piece(1, TapDirection::FromHost, 7 + (1 << 30), PieceKind::End));
        w.write(&piece(1, TapDirection::ToHost, 0, PieceKind::End));
        let path = dir.path().join("n1-client");
        let file = File::open(&path).unwrap();
        let mut start = [9; 8];
        file.read_exact_at(&mut start, 0).unwrap();
        assert_eq!(&start, b"ab\0\0\0fg\0");
        assert_eq!(file.metadata().unwrap().len(), 7 + (1 << 30));
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(dir.path().join("n1-client.gaps")).unwrap(), "2 3\n7 1073741824\n");
        assert_eq!(std::fs::read(dir.path().join("n1-server")).unwrap(), b"");
        assert!(!dir.path().join("n1-server.gaps").exists() && w.connections.is_empty() && w.open.is_empty());
    }

    #[test]
    fn a_file_has_an_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = writer(dir.path());
        w.write(&piece(1, TapDirection::FromHost, 0, PieceKind::Gap(MAX_FILE - 1)));
        w.write(&piece(1, TapDirection::FromHost, MAX_FILE - 1, bytes("abc")));
        w.write(&piece(1, TapDirection::FromHost, MAX_FILE + 2, bytes("def")));
        w.write(&piece(1, TapDirection::FromHost, MAX_FILE + 5, PieceKind::End));
        let gaps = std::fs::read_to_string(dir.path().join("n1-client.gaps")).unwrap();
        assert_eq!(gaps, format!("0 {}\n{MAX_FILE} 5\n", MAX_FILE - 1));
        assert_eq!(w.shared.errors.load(Relaxed), 0);
    }

    #[test]
    fn files_are_closed_and_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = writer(dir.path());
        let all = OPEN_FILES as u64 + 10;
        for (at, text) in [(0, "ab"), (2, "cd")] {
            (0..all).for_each(|id| w.write(&piece(id, TapDirection::ToHost, at, bytes(text))));
            assert_eq!(w.open.len(), OPEN_FILES);
            let open = w.connections.values().flatten().filter(|s| s.file.is_some()).count();
            assert_eq!(open, OPEN_FILES);
        }
        for id in 0..all {
            assert_eq!(std::fs::read(dir.path().join(format!("n{id}-server.part"))).unwrap(), b"abcd");
            w.write(&piece(id, TapDirection::ToHost, 4, PieceKind::End));
            assert_eq!(std::fs::read(dir.path().join(format!("n{id}-server"))).unwrap(), b"abcd");
        }
        assert_eq!(w.shared.errors.load(Relaxed), 0);
    }

    /// Root may write anywhere, but not into a removed directory.
    #[test]
    fn what_the_disk_refuses_is_counted_and_becomes_a_gap() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("sub");
        std::fs::create_dir(&sub).unwrap();
        let mut w = writer(&sub);
        std::fs::remove_dir(&sub).unwrap();
        w.write(&piece(1, TapDirection::FromHost, 0, bytes("abc")));
        std::fs::create_dir(&sub).unwrap();
        w.write(&piece(1, TapDirection::FromHost, 3, bytes("def")));
        w.write(&piece(1, TapDirection::FromHost, 6, PieceKind::End));
        assert_eq!(std::fs::read(sub.join("n1-client")).unwrap(), b"\0\0\0def");
        assert_eq!(std::fs::read_to_string(sub.join("n1-client.gaps")).unwrap(), "0 3\n");
        assert_eq!(w.shared.errors.load(Relaxed), 1);
        assert_eq!([&w.shared.written, &w.shared.refused].map(|n| n.load(Relaxed)), [3, 3]);
        assert!(w.failed_at.is_none(), "it is told that it works again");
    }

    /// A file keeps the suffix .part until its end, and beyond if its gaps could not be recorded.
    #[test]
    fn only_what_is_told_as_it_is_gets_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = writer(dir.path());
        let [name, part, gaps] = ["", ".part", ".gaps"].map(|end| dir.path().join(format!("n1-client{end}")));
        std::fs::create_dir(&gaps).unwrap(); // prevents the creation of the file
        w.write(&piece(1, TapDirection::FromHost, 0, bytes("abc")));
        assert!(part.exists() && !name.exists());
        w.write(&piece(1, TapDirection::FromHost, 3, PieceKind::Gap(4)));
        w.write(&piece(1, TapDirection::FromHost, 7, bytes("def")));
        w.write(&piece(1, TapDirection::FromHost, 10, PieceKind::End));
        assert!(part.exists() && !name.exists(), "nothing says what is missing");
        assert_eq!((std::fs::metadata(&part).unwrap().len(), w.shared.errors.load(Relaxed)), (10, 2));
    }

    /// A disk may be full in the middle of a line.
    #[test]
    fn a_line_of_which_half_was_written_is_written_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let mut gaps = Beside { part: Some((3, 4)), ..Beside::new(".gaps") };
        gaps.tell(&path).unwrap();
        std::fs::write(dir.path().join("n.gaps"), "3 1\n10 2").unwrap();
        gaps.part = Some((10, 33));
        gaps.tell(&path).unwrap();
        gaps.part = Some((40, 41));
        gaps.tell(&path).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("n.gaps")).unwrap(), "3 1\n10 23\n40 1\n");
    }

    #[test]
    fn what_is_in_doubt_stands_beside() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = writer(dir.path());
        w.write(&piece(1, TapDirection::FromHost, 0, bytes("abcdef")));
        w.write(&piece(1, TapDirection::FromHost, 2, PieceKind::Doubt(3)));
        w.write(&piece(1, TapDirection::FromHost, 6, PieceKind::Doubt(9)));
        w.write(&piece(1, TapDirection::FromHost, 6, PieceKind::End));
        assert_eq!(std::fs::read(dir.path().join("n1-client")).unwrap(), b"abcdef");
        assert_eq!(std::fs::read_to_string(dir.path().join("n1-client.doubts")).unwrap(), "2 3\n6 9\n");
        assert!(!dir.path().join("n1-client.gaps").exists());
    }
}

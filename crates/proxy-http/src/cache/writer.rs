//! The thread that writes replies: it takes bodies from the tap and finds their ends.

use super::{CacheInner, Count, Filling, file::Writing, marks};
use longsplice_engine::{Piece, PieceKind, TapDirection, TapReader};
use longsplice_http::{Body, Step};
use std::{
    collections::HashMap,
    fs, io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Minimum time between two messages about the disk.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

pub(super) struct Writer {
    shared: Arc<CacheInner>,
    /// Replies by number. `None`: the reply is not stored after all, and the rest of it is ignored.
    open: HashMap<u64, Option<Open>>,
    said: Option<Instant>,
}

struct Open {
    file: Writing,
    body: Body,
    /// Bytes that are included in `Contents::writing`.
    counted: u64,
}

/// Reason why a reply is not stored.
enum Lost {
    Gap,
    Doubt,
    Cut,
    Large,
    Disk(io::Error),
}

impl Writer {
    pub fn new(shared: Arc<CacheInner>) -> Writer {
        Writer { shared, open: HashMap::new(), said: None }
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub fn run(mut self, reader: &TapReader) {
        while let Some(piece) = reader.next() {
            if piece.way == TapDirection::FromHost {
                self.take(piece);
            }
        }
    }

    pub(super) fn take(&mut self, piece: Piece) {
        let id = piece.tap;
        if !self.open.contains_key(&id) {
            let begun = self.begin(id);
            self.keep(id, begun);
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        match (piece.what, open) {
            (PieceKind::Bytes(bytes), Some(open)) => {
                if let Err(lost) = self.shared.feed(open, &bytes) {
                    self.keep(id, Err(lost));
                }
            }
            (PieceKind::Gap(_), Some(_)) => self.keep(id, Err(Lost::Gap)),
            (PieceKind::Doubt(_), Some(_)) => self.keep(id, Err(Lost::Doubt)),
            (PieceKind::End, _) => self.end(id),
            (_, None) => {}
            (_, Some(_)) => self.keep(id, Err(Lost::Gap)), // an unknown kind of piece
        }
    }

    fn keep(&mut self, id: u64, open: Result<Open, Lost>) {
        let (open, lost) = match open {
            Ok(open) => (Some(open), None),
            Err(lost) => (None, Some(lost)),
        };
        if let Some(Some(before)) = self.open.insert(id, open) {
            self.shared.written(&before);
        }
        let Some(lost) = lost else { return };
        CacheInner::unlink(&self.shared.temporary(id));
        self.shared.count(match &lost {
            Lost::Gap => Count::Gap,
            Lost::Doubt => Count::Doubt,
            Lost::Cut => Count::Cut,
            Lost::Large => Count::Large,
            Lost::Disk(_) => Count::Disk,
        });
        if let Lost::Disk(error) = lost
            && self.said.is_none_or(|t| t.elapsed() >= COMPLAIN_EVERY)
        {
            tracing::warn!("cannot write into {}: {error}; the reply is not stored", self.shared.dir.display());
            self.said = Some(Instant::now());
        }
    }

    /// Creates the file, and writes the bytes that were read before the tap began.
    fn begin(&self, id: u64) -> Result<Open, Lost> {
        let mut state = self.shared.state();
        let Some(Filling { body, first, .. }) = state.fills.get_mut(&id) else { return Err(Lost::Cut) };
        let (body, first) = (body.clone(), std::mem::take(first));
        drop(state);
        let file = Writing::create(&self.shared.temporary(id)).map_err(Lost::Disk)?;
        let mut open = Open { file, body, counted: 0 };
        match self.shared.feed(&mut open, &first) {
            Ok(()) => Ok(open),
            Err(lost) => {
                self.shared.written(&open);
                Err(lost)
            }
        }
    }

    /// Handles the end of the tap: stores the reply if it is complete.
    fn end(&mut self, id: u64) {
        if let Some(Some(open)) = self.open.remove(&id) {
            self.shared.written(&open);
            if let Err(lost) = self.shared.store(id, open) {
                self.keep(id, Err(lost));
                self.open.remove(&id);
            }
        }
        self.shared.state().fills.remove(&id);
    }
}

impl CacheInner {
    /// Takes the next bytes from the server.
    fn feed(&self, open: &mut Open, mut bytes: &[u8]) -> Result<(), Lost> {
        while !bytes.is_empty() {
            if open.body.is_done() {
                return Err(Lost::Cut); // bytes after the end of the body
            }
            let step = open.body.step(bytes).map_err(|_| Lost::Cut)?;
            let (these, rest) = bytes.split_at(step.len());
            bytes = rest;
            if let Step::Content(_) = step {
                if open.file.length() + these.len() as u64 > self.config().object {
                    return Err(Lost::Large);
                }
                open.file.write(these).map_err(Lost::Disk)?;
            }
        }
        let mut state = self.state();
        if state.left {
            return Err(Lost::Cut); // nothing may be evicted for it
        }
        state.writing += open.file.length() - open.counted;
        open.counted = open.file.length();
        if self.make_room(&mut state) { Ok(()) } else { Err(Lost::Large) }
    }

    /// Subtracts a file from `Contents::writing`.
    fn written(&self, open: &Open) {
        self.state().writing -= open.counted;
    }

    fn store(&self, id: u64, mut open: Open) -> Result<(), Lost> {
        let meta = self.state().fills.get(&id).filter(|f| f.whole).map(|f| f.meta.clone()).ok_or(Lost::Cut)?;
        open.body.end_of_stream().map_err(|_| Lost::Cut)?;
        let size = open.file.finish(&meta).map_err(Lost::Disk)?;
        // From here to the insertion under one lock: an invalidation finds the reply in `fills` or in the index.
        let mut state = self.state();
        let filling = state.fills.remove(&id).filter(|f| !f.stale).ok_or(Lost::Cut)?;
        fs::rename(self.temporary(id), self.entry(id)).map_err(Lost::Disk)?;
        let gone = state.index.add(filling.key, id, size, marks(&meta));
        gone.iter().for_each(|file| CacheInner::unlink(&self.entry(*file)));
        self.make_room(&mut state);
        self.count(Count::Stored);
        Ok(())
    }
}

//! The store: a written reply is found again complete, or not at all.

use super::*;
use longsplice_http::accept::Codings;
use longsplice_proxy::{
    fields::{Change, FieldChange, FieldChanges},
    filter::Filter,
};
use std::{os::unix::fs::FileExt, time::Duration};

/// A cache with the test in the role of the writer thread.
struct Scene {
    dir: tempfile::TempDir,
    cache: Arc<Cache>,
    writer: writer::Writer,
    _reader: longsplice_engine::TapReader,
}

fn config(dir: &Path, size: u64) -> CacheConfig {
    CacheConfig { dir: dir.into(), size, object: size / 4, ..CacheConfig::default() }
}

impl Scene {
    fn new(size: u64) -> Scene {
        Scene::with(tempfile::tempdir().unwrap(), size)
    }

    fn with(dir: tempfile::TempDir, size: u64) -> Scene {
        let (cache, reader) = Cache::prepare(&config(dir.path(), size)).unwrap();
        cache.begin(Duration::ZERO).unwrap();
        let writer = writer::Writer::new(cache.shared.clone());
        Scene { dir, cache: Arc::new(cache), writer, _reader: reader }
    }

    /// Simulates a restart of the program.
    fn again(self) -> Scene {
        let Scene { dir, cache, writer, .. } = self;
        let size = cache.config().size;
        drop((cache, writer));
        Scene::with(dir, size)
    }

    fn begin(&self, url: &str, asked: &str, framing: Framing, first: &[u8]) -> Option<(Fill, Tap)> {
        let meta = Meta {
            url: url.into(),
            filter: String::new(),
            server: "192.0.2.1:80".parse().unwrap(),
            came: None,
            time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs(),
            age: 0,
            version: "1.1".into(),
            status: 200,
            reason: "OK".into(),
            asked: vec![("accept".into(), asked.into())],
            fields: vec![("Cache-Control".into(), "max-age=1000".into()), ("Vary".into(), "Accept".into())],
        };
        self.cache.fill(meta, framing, first, None)
    }

    fn piece(&mut self, fill: u64, what: PieceKind) {
        self.writer.take(Piece { tap: fill, way: TapDirection::FromHost, at: 0, what });
    }

    fn store(&mut self, url: &str, asked: &str, body: &[u8]) {
        let (fill, _tap) = self.begin(url, asked, Framing::Exact(body.len() as u64), &body[..body.len() / 3]).unwrap();
        let id = fill.id;
        for piece in body[body.len() / 3..].chunks(16_384) {
            self.piece(id, PieceKind::Bytes(piece.to_vec().into()));
        }
        fill.complete();
        self.piece(id, PieceKind::End);
    }

    fn find(&self, url: &str, asked: &str) -> Option<Vec<u8>> {
        let head = format!("GET {url} HTTP/1.1\r\nHost: x\r\nAccept: {asked}\r\n\r\n");
        let request = longsplice_http::Request::parse(head.as_bytes()).unwrap();
        let found =
            self.cache.shared.look(&Question::new(&request, url.into(), Codings::Any).unwrap(), "", |_| true)?;
        let mut body = Vec::new();
        while (body.len() as u64) < found.stored.length {
            match found.stored.block(body.len() as u64) {
                Ok(block) => body.extend(block),
                Err(e) => {
                    self.cache.shared.damaged(found.key, found.file, &e);
                    return None;
                }
            }
        }
        Some(body)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = fs::read_dir(self.dir.path()).unwrap().map(|f| f.unwrap().path()).collect();
        all.retain(|p| p.file_name().unwrap() != "lock");
        all.sort();
        all
    }
}

use longsplice_engine::{Piece, PieceKind, TapDirection};

fn body(length: usize) -> Vec<u8> {
    (0..length as u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect()
}

#[test]
fn what_was_stored_is_found_after_a_restart() {
    let mut scene = Scene::new(8 << 20);
    let lengths = [0, 1, file::BLOCK - 1, file::BLOCK, file::BLOCK + 1, 1_000_000];
    for n in lengths {
        scene.store(&format!("http://x/{n}"), "a", &body(n));
    }
    scene.store("http://x/1", "b", b"?");
    fs::write(scene.dir.path().join("0000000000000099.tmp"), "half").unwrap();
    fs::write(scene.dir.path().join("notes.txt"), "somebody's").unwrap();
    for _ in 0..2 {
        for n in lengths {
            assert_eq!(scene.find(&format!("http://x/{n}"), "a"), Some(body(n)), "{n}");
        }
        assert_eq!(scene.find("http://x/1", "b").unwrap(), b"?");
        assert!(scene.find("http://x/1", "c").is_none() && scene.find("http://x/2", "a").is_none());
        assert_eq!(scene.cache.values().cache_entries, 7);
        scene = scene.again();
    }
    assert_eq!(scene.files().len(), 8, "{:?}", scene.files());
    scene.store("http://x/new", "a", b"new");
    assert_eq!(scene.find("http://x/new", "a").unwrap(), b"new");
}

#[test]
fn what_is_damaged_is_a_miss() {
    for start_again in [false, true] {
        let mut scene = Scene::new(8 << 20);
        for n in 0..6 {
            scene.store(&format!("http://x/{n}"), "a", &body(200_000));
        }
        let open = |path: &Path| OpenOptions::new().write(true).open(path).unwrap();
        let files = scene.files();
        let size = files[0].metadata().unwrap().len();
        open(&files[0]).write_all_at(b"?", 150_000).unwrap(); // body
        open(&files[1]).write_all_at(b"?", 200_020).unwrap(); // head
        open(&files[2]).write_all_at(b"?", size - 20).unwrap(); // magic
        open(&files[3]).set_len(size - 1).unwrap();
        open(&files[4]).set_len(0).unwrap();
        if start_again {
            scene = scene.again();
        }
        for n in 0..5 {
            assert_eq!(scene.find(&format!("http://x/{n}"), "a"), None, "{n}");
        }
        assert_eq!(scene.find("http://x/5", "a"), Some(body(200_000)));
        let values = scene.cache.values();
        assert_eq!((values.cache_entries, values.cache_damaged, scene.files().len()), (1, 5, 1));
    }
}

#[test]
fn what_is_not_whole_is_not_stored() {
    let mut scene = Scene::new(4 << 20);
    let bytes = |n| PieceKind::Bytes(body(n).into());
    let large = (1 << 20) + 1;
    type Case = (&'static str, Framing, Vec<PieceKind>, bool);
    let cases: [Case; 10] = [
        ("a gap", Framing::Exact(30), vec![bytes(10), PieceKind::Gap(5), bytes(15)], true),
        ("a doubt", Framing::Exact(30), vec![bytes(25), PieceKind::Doubt(5), bytes(5)], true),
        ("short", Framing::Exact(30), vec![bytes(29)], true),
        ("cut", Framing::Exact(30), vec![bytes(29)], false),
        ("broken off", Framing::UntilClose, vec![bytes(29)], false),
        ("too much", Framing::Exact(30), vec![bytes(31)], true),
        ("no chunk", Framing::Chunked, vec![PieceKind::Bytes("x\r\n".into())], true),
        ("chunks without end", Framing::Chunked, vec![PieceKind::Bytes("1\r\na\r\n".into())], true),
        ("too large", Framing::UntilClose, vec![bytes(large), bytes(1)], true),
        ("too large for all", Framing::Exact(large as u64), vec![], true),
    ];
    for (why, framing, pieces, complete) in cases {
        let begun = scene.begin("http://x/", "", framing, b"");
        let Some((fill, _tap)) = begun else {
            assert_eq!(why, "too large for all");
            continue;
        };
        let id = fill.id;
        pieces.into_iter().for_each(|p| scene.piece(id, p));
        if complete {
            fill.complete();
        }
        scene.piece(id, PieceKind::End);
        assert!(scene.files().is_empty() && scene.find("http://x/", "").is_none(), "{why}");
    }
    let v = scene.cache.values();
    let dropped = [v.cache_dropped_gap, v.cache_dropped_doubt, v.cache_dropped_cut, v.cache_dropped_large];
    assert_eq!((dropped, v.cache_dropped_disk, v.cache_stored, v.cache_bytes), ([1, 1, 6, 2], 0, 0, 0));
    assert!(scene.writer.is_empty() && scene.cache.shared.state().fills.is_empty());
}

#[test]
fn chunks_are_undone() {
    let mut scene = Scene::new(4 << 20);
    for (url, framing, all) in [
        ("http://x/c", Framing::Chunked, "3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\nX-Trailer: 1\r\n\r\n"),
        ("http://x/u", Framing::UntilClose, "abcdefg"),
    ] {
        for cut in 0..=all.len() {
            let (fill, _tap) = scene.begin(url, "", framing, &all.as_bytes()[..cut]).unwrap();
            let id = fill.id;
            if cut < all.len() {
                scene.piece(id, PieceKind::Bytes(all.as_bytes()[cut..].to_vec().into()));
            }
            fill.complete();
            scene.piece(id, PieceKind::End);
            assert_eq!(scene.find(url, "").as_deref(), Some(&b"abcdefg"[..]), "{cut}");
        }
    }
    assert_eq!((scene.files().len(), scene.cache.values().cache_entries), (2, 2), "one takes the other's place");
}

#[test]
fn room_is_made_by_what_was_not_used() {
    let mut scene = Scene::new(1 << 20);
    for n in 0..3 {
        scene.store(&format!("http://x/{n}"), "", &body(262_000));
    }
    assert!(scene.find("http://x/0", "").is_some());
    scene.store("http://x/3", "", &body(262_000));
    scene.store("http://x/4", "", &body(262_000));
    assert_eq!(
        [0, 1, 2, 3, 4].map(|n| scene.find(&format!("http://x/{n}"), "").is_some()),
        [true, false, false, true, true]
    );
    let values = scene.cache.values();
    assert!(values.cache_bytes <= 1 << 20 && values.cache_evicted == 2, "{values:?}");
    assert_eq!(scene.files().len(), 3);
    // a smaller limit from now on
    let Scene { dir, cache, writer, .. } = scene;
    drop((cache, writer));
    let scene = Scene::with(dir, 600_000);
    assert_eq!([0, 3, 4].map(|n| scene.find(&format!("http://x/{n}"), "").is_some()), [false, true, true]);
}

#[test]
fn one_is_stored_at_a_time_and_not_if_it_has_changed() {
    let mut scene = Scene::new(4 << 20);
    let (fill, _tap) = scene.begin("http://x/", "", Framing::Exact(3), b"abc").unwrap();
    assert!(scene.begin("http://x/", "", Framing::Exact(3), b"abc").is_none());
    assert_eq!(scene.cache.values().cache_dropped_busy, 1);
    scene.cache.invalidate("http://x/");
    let id = fill.id;
    fill.complete();
    scene.piece(id, PieceKind::End);
    assert_eq!(scene.find("http://x/", ""), None);
    scene.store("http://x/", "", b"new");
    assert_eq!(scene.find("http://x/", "").unwrap(), b"new");
    scene.cache.invalidate("http://x/");
    assert_eq!((scene.find("http://x/", ""), scene.files().len()), (None, 0));
    assert_eq!(scene.cache.values().cache_invalidated, 1);
}

/// Root may write anywhere, but not into a removed directory.
#[test]
fn what_the_disk_refuses_is_not_stored() {
    let mut scene = Scene::new(4 << 20);
    fs::remove_dir_all(scene.dir.path()).unwrap();
    scene.store("http://x/", "", b"abc");
    assert_eq!((scene.cache.values().cache_dropped_disk, scene.find("http://x/", "")), (1, None));
    fs::create_dir(scene.dir.path()).unwrap();
    scene.store("http://x/", "", b"abc");
    assert_eq!(scene.find("http://x/", "").unwrap(), b"abc");
}

#[test]
fn one_program_at_a_time() {
    let scene = Scene::new(4 << 20);
    let other = Cache::open(&config(scene.dir.path(), 4 << 20)).unwrap_err();
    assert_eq!(other.to_string(), "another program has its cache there");
}

/// Two processes of one directory: the one that leaves changes nothing any more, but for what its last requests invalidate.
#[test]
fn a_directory_goes_from_one_to_another() {
    let mut old = Scene::new(8 << 20);
    for url in ["http://a/1", "http://a/2", "http://a/3"] {
        old.store(url, "", b"old");
    }
    let at = old.dir.path().to_owned();
    let mut next = {
        let (cache, reader) = Cache::prepare(&config(&at, 8 << 20)).unwrap();
        cache.look_ahead().unwrap();
        let writer = writer::Writer::new(cache.shared.clone());
        Scene { dir: tempfile::tempdir().unwrap(), cache: Arc::new(cache), writer, _reader: reader }
    };
    let entries = |of: &Scene| of.cache.values().cache_entries;
    assert_eq!((next.find("http://a/1", ""), entries(&next)), (None, 0), "it is not its own yet");
    assert!(next.begin("http://a/1", "", Framing::Exact(1), b"?").is_none());
    assert!(next.cache.begin(Duration::ZERO).is_err());
    // the old one goes on meanwhile
    old.store("http://a/4", "", b"old");
    old.cache.invalidate("http://a/2");
    let (unfinished, _tap) = old.begin("http://a/5", "", Framing::Exact(6), b"old").unwrap();
    let number = unfinished.id;
    old.piece(number, PieceKind::Bytes(b"ol".to_vec().into()));
    assert!(at.join(format!("{number:016x}.tmp")).exists());
    old.cache.leave();
    next.cache.begin(Duration::ZERO).unwrap();
    assert_eq!((entries(&old), entries(&next)), (3, 3));
    let all = ["http://a/1", "http://a/2", "http://a/3", "http://a/4"].map(|url| next.find(url, ""));
    let is = Some(b"old".to_vec());
    assert_eq!(all, [is.clone(), None, is.clone(), is]);
    // what is on its way there is not stored any more, and nothing is found or begun
    old.piece(number, PieceKind::Bytes(b"d".to_vec().into()));
    unfinished.complete();
    old.piece(number, PieceKind::End);
    assert_eq!(old.find("http://a/1", ""), None);
    assert!(old.begin("http://a/6", "", Framing::Exact(1), b"?").is_none());
    next.store("http://a/7", "", b"new");
    assert_eq!(next.find("http://a/7", "").as_deref(), Some(&b"new"[..]));
    // a request that is still served there
    old.cache.invalidate("http://a/3");
    assert_eq!((next.find("http://a/3", ""), entries(&next)), (None, 3));
    assert_eq!(fs::read_dir(&at).unwrap().count(), 3 + 1, "with the lock");
}

/// Whoever has heard that a cache has left can have its directory, at this very moment.
#[test]
fn a_cache_that_has_left_holds_no_lock() {
    for _ in 0..300 {
        let scene = Scene::new(4 << 20);
        let Scene { dir, cache, writer, .. } = scene;
        let leaving = cache.leaving();
        let end = std::thread::spawn(move || drop((cache, writer)));
        while !leaving.is_over() {
            std::hint::spin_loop();
        }
        Cache::open(&config(dir.path(), 4 << 20)).unwrap();
        end.join().unwrap();
    }
}

#[test]
fn filters_and_changed_requests_tell_replies_apart() {
    let mut http = Http::default();
    assert_eq!(&*fingerprint(&http), "");
    let mut filter = Filter { wait: Duration::from_secs(1), ..Filter::default() };
    http.filter = filter.clone().into();
    assert_eq!(&*fingerprint(&http), "");
    filter.rules.push(longsplice_proxy::filter::ReplyRule {
        action: longsplice_proxy::access::Action::Deny,
        status: vec![],
        media: vec![],
        encoding: vec![],
        length: vec![],
        body_begins: Some("^MZ".parse().unwrap()),
        body_contains: None,
    });
    http.filter = filter.clone().into();
    let mut all = vec![fingerprint(&http)];
    filter.rules[0].body_begins = Some("^ME".parse().unwrap());
    http.filter = filter.into();
    all.push(fingerprint(&http));
    let what = Change::Remove(vec!["Cookie".parse().unwrap()]);
    let change = FieldChange { status: Vec::new(), what };
    http.fields = FieldChanges { reply: vec![change.clone()], request: Vec::new() }.into();
    assert_eq!(fingerprint(&http), all[1], "replies are changed when they leave");
    http.fields = FieldChanges { request: vec![change], reply: Vec::new() }.into();
    all.push(fingerprint(&http));
    assert!(all[0] != all[1] && all[1] != all[2] && all.iter().all(|f| !f.is_empty()), "{all:?}");
}

/// However much is stored of other sites, what is meant is found at once.
#[test]
fn purges_look_at_the_site_that_is_meant() {
    let mut scene = Scene::new(64 << 20);
    for url in ["pool http://a/x", "http://A:80/x?y", "http://a/z", "http://ab/x", "http://b/x"] {
        scene.store(url, "a", b"?");
    }
    for other in 0..10_000 {
        let url = format!("http://{other}.example/");
        let marks = (0, labels(&plain(&url)));
        scene.cache.shared.state().index.add(key(&url), 1_000_000 + other, 1, marks);
    }
    let left = |scene: &Scene| scene.cache.shared.state().index.len() - 10_000;
    assert_eq!(scene.cache.purge("http://c/", true, None), (0, None));
    assert_eq!(scene.cache.purge("http://a", false, None), (0, None));
    assert_eq!(scene.cache.purge("http://a/x", false, None), (1, None));
    assert_eq!(scene.cache.purge("http://a/x", true, None), (1, None));
    assert_eq!((scene.cache.purge("HTTP://a", true, None), left(&scene)), ((1, None), 2));
    // those of one site come page by page; that they have no files is found when they are asked for
    for page in 0..5000 {
        let url = format!("http://b/{page}");
        let marks = (0, labels(&plain(&url)));
        scene.cache.shared.state().index.add(key(&url), 2_000_000 + page, 1, marks);
    }
    let (removed, after) = scene.cache.purge("http://b", true, None);
    assert_eq!((removed, after.is_some()), (1, true));
    assert_eq!(scene.cache.purge("http://b", true, after), (0, None));
    // as after a restart
    let mut scene = scene.again();
    scene.store("http://ab/y", "a", b"?");
    assert_eq!(
        (scene.cache.purge("http://ab/", true, None), scene.cache.purge("http://b/", true, None)),
        ((2, None), (0, None))
    );
}

/// A reply that is on its way was asked for before the purge.
#[test]
fn what_is_being_stored_is_purged_as_well() {
    let mut scene = Scene::new(8 << 20);
    let urls = ["http://a/x", "http://a/xy", "http://b/x"];
    let begun: Vec<_> = urls.iter().map(|url| scene.begin(url, "a", Framing::Exact(1), b"?").unwrap()).collect();
    assert_eq!(scene.cache.purge("http://a/x", false, None), (0, None));
    assert_eq!(scene.cache.purge("http://b", true, None), (0, None));
    for (fill, _tap) in begun {
        let id = fill.id;
        fill.complete();
        scene.piece(id, PieceKind::End);
    }
    assert_eq!(urls.map(|url| scene.find(url, "a").is_some()), [false, true, false]);
}

#[test]
fn references() {
    let url = "http://x:81/a/b";
    for (reference, want) in [
        ("/c?d", Some("http://x:81/c?d")),
        ("http://x:81/c#e", Some("http://x:81/c")),
        ("http://x:815/c", None),
        ("http://y/c", None),
        ("//y/c", None),
        ("c", None),
    ] {
        assert_eq!(same_origin(url, reference.as_bytes()).as_deref(), want, "{reference}");
        let server = "[2001:db8::1]:80 ";
        let want = want.map(|want| format!("{server}{want}"));
        assert_eq!(same_origin(&format!("{server}{url}"), reference.as_bytes()), want, "{reference}");
    }
}

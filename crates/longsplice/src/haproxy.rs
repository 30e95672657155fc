//! HAProxy's runtime socket, spoken: tools that people have for HAProxy see listeners, pools and connections here, and tell
//! servers what `longsplice drain`, `weight` and `kill` tell them. docs/haproxy-socket.md is the reference.
//!
//! It is an adapter, with no state of its own: [`answers`] asks and tells the same server and engine as the control socket,
//! [`figures`] makes HAProxy's fields of what they say, and the language is read by [`longsplice_proxy::haproxy`].
//!
//! A reload may open the socket, move it and close it; an upgrade hands it over. Clients that are connected then see its end.

mod answers;
mod figures;
mod info;

use crate::socket_file::{SocketFile, give, listen_at};
use answers::Clerk;
use longsplice_engine::Splicer;
use longsplice_proxy::{
    Server, SocketAccess,
    haproxy::{Command, LINE_MAX, TooMuch, parse, split},
};
use std::{
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener as StdListener,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream, unix::WriteHalf},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

/// Most clients at a time, as on the control socket: each has a descriptor. Others wait to be accepted, as with HAProxy.
const CLIENTS: usize = 32;
/// A client that sends no line for this long is disconnected, as with HAProxy, unless it has asked for another time.
const SILENCE: Duration = Duration::from_secs(10);
/// A client that does not read a piece of its answer for this long is disconnected.
const SLOWNESS: Duration = Duration::from_secs(10);
/// Bytes of an answer that are written at a time, and kept in memory.
const PIECE: usize = 16 * 1024;

/// The socket, if the configuration has one now.
#[derive(Debug)]
pub struct Haproxy {
    now: watch::Sender<Option<Arc<Open>>>,
    slots: Arc<Semaphore>,
    /// A path that an earlier process had, and this one has not.
    left: Mutex<Option<PathBuf>>,
}

/// The socket while it is open.
#[derive(Debug)]
pub struct Open {
    path: PathBuf,
    listener: UnixListener,
    /// `None`: it belongs to another process.
    file: Mutex<Option<SocketFile>>,
    /// Clients leave when it is dropped.
    stays: watch::Sender<()>,
}

/// What a configuration to come needs of the socket.
#[derive(Debug)]
pub enum Next {
    /// What there is.
    Same,
    /// Another one, or none.
    Other(Option<Arc<Open>>),
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics in the middle of a change, so the data behind a poisoned lock is consistent.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Open {
    fn new(path: PathBuf, listener: StdListener, file: Option<SocketFile>) -> io::Result<Arc<Open>> {
        listener.set_nonblocking(true)?;
        let (listener, stays) = (UnixListener::from_std(listener)?, watch::Sender::new(()));
        Ok(Arc::new(Open { path, listener, file: Mutex::new(file), stays }))
    }
}

impl Haproxy {
    /// Listens, if the configuration names a path; at the socket of an earlier process, if that has the same.
    pub fn open(
        (path, access): (Option<&Path>, SocketAccess),
        offered: Option<(PathBuf, StdListener)>,
    ) -> io::Result<Haproxy> {
        let (open, left) = match (path, offered) {
            (Some(path), Some((of_earlier, socket))) if path == of_earlier => {
                (Some(Open::new(path.to_owned(), socket, None)?), None)
            }
            (Some(path), offered) => {
                let (socket, file) = listen_at(path, access)?;
                (Some(Open::new(path.to_owned(), socket, Some(file))?), offered)
            }
            (None, offered) => (None, offered),
        };
        let left = Mutex::new(left.map(|(path, _)| path));
        Ok(Haproxy { now: watch::Sender::new(open), slots: Arc::new(Semaphore::new(CLIENTS)), left })
    }

    /// Makes the file this process's, if it was that of an earlier one, and removes the one that this process does not need.
    pub fn take_file(&self, access: SocketAccess) {
        if let Some(open) = &*self.now.borrow() {
            if let Err(error) = give(&open.path, access) {
                tracing::warn!("cannot change who may open {}: {error}", open.path.display());
            }
            lock(&open.file).get_or_insert_with(|| SocketFile(open.path.clone()));
        }
        drop(lock(&self.left).take().map(SocketFile));
    }

    /// Leaves all of it to another process.
    pub fn leave(&self) {
        if let Some(open) = self.now.send_replace(None) {
            lock(&open.file).take().into_iter().for_each(std::mem::forget);
        }
    }

    /// Returns another descriptor of the socket, and its path.
    pub fn socket(&self) -> io::Result<Option<(PathBuf, OwnedFd)>> {
        let now = self.now.borrow();
        let socket = |open: &Arc<Open>| Ok((open.path.clone(), open.listener.as_fd().try_clone_to_owned()?));
        now.as_ref().map(socket).transpose()
    }

    /// Binds what a configuration to come needs. Blocks, if somebody listens there and does not accept.
    pub fn prepare(&self, (path, access): (Option<&Path>, SocketAccess)) -> io::Result<Next> {
        if self.now.borrow().as_ref().map(|open| &*open.path) == path {
            return Ok(Next::Same);
        }
        let open = |path: &Path| {
            let (socket, file) = listen_at(path, access)?;
            Open::new(path.to_owned(), socket, Some(file))
        };
        path.map(open).transpose().map(Next::Other)
    }

    /// Puts it in the place of what there was.
    pub fn put(&self, next: Next) {
        let Next::Other(next) = next else { return };
        if let Some(open) = self.now.send_replace(next) {
            // at once: whoever still accepts there would remove it later, when another one may have the name
            drop(lock(&open.file).take());
            tracing::info!("no socket for tools of HAProxy at {} any more", open.path.display());
        }
        self.announce();
    }

    /// Logs where it is.
    pub fn announce(&self) {
        if let Some(open) = &*self.now.borrow() {
            tracing::info!("socket for tools of HAProxy: {}", open.path.display());
        }
    }

    /// Answers until dropped.
    pub async fn serve(&self, splicer: &Splicer, server: &Arc<Server>) {
        let mut now = self.now.subscribe();
        loop {
            let Some(open) = now.borrow_and_update().clone() else {
                let _ = now.changed().await; // the sender is in `self`
                continue;
            };
            let accepted = async {
                let slot = self.slots.clone().acquire_owned().await.expect("it is never closed");
                (open.listener.accept().await, slot)
            };
            let (accepted, slot) = tokio::select! {
                accepted = accepted => accepted,
                _ = now.changed() => continue,
            };
            let Ok((mut stream, _)) = accepted else {
                sleep(Duration::from_secs(1)).await; // out of descriptors: it waits
                continue;
            };
            let (stays, path) = (open.stays.subscribe(), open.path.clone());
            let clerk = Clerk { splicer: splicer.clone(), server: server.clone(), path };
            tokio::spawn(async move {
                // Errors are ignored: the client has gone or was disconnected.
                let _ = attend(&clerk, &mut stream, stays).await;
                if let Ok(stream) = stream.into_std() {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                drop(slot);
            });
        }
    }
}

/// What is written to a client, a piece at a time, so that an answer is never in memory as a whole.
pub struct Answer<'a, 'b> {
    write: &'a mut WriteHalf<'b>,
    text: String,
}

impl Answer<'_, '_> {
    /// Adds to it.
    pub async fn put(&mut self, text: &str) -> io::Result<()> {
        self.text.push_str(text);
        if self.text.len() >= PIECE { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> io::Result<()> {
        timeout(SLOWNESS, self.write.write_all(self.text.as_bytes())).await??;
        self.text.clear();
        Ok(())
    }
}

/// Serves one client until it leaves, or has to.
async fn attend(clerk: &Clerk, stream: &mut UnixStream, mut stays: watch::Receiver<()>) -> io::Result<()> {
    let (read, mut write) = stream.split();
    let mut read = BufReader::new(read);
    let mut answer = Answer { write: &mut write, text: String::new() };
    let (mut prompts, mut silence) = (false, SILENCE);
    loop {
        let mut line = Vec::new();
        let mut most = (&mut read).take(LINE_MAX as u64);
        let got = tokio::select! {
            biased;
            _ = stays.changed() => return Ok(()),
            got = timeout(silence, most.read_until(b'\n', &mut line)) => got??,
        };
        let is_whole = line.pop_if(|b| *b == b'\n').is_some();
        if got < LINE_MAX && !is_whole {
            return Ok(()); // the end, perhaps in the middle of a line, as HAProxy has it
        }
        let commands = match split(&line) {
            Ok(commands) if is_whole => commands,
            Ok(_) | Err(TooMuch) => {
                answer.put(&answers::TOO_MUCH).await?;
                return answer.flush().await; // the rest is not the start of a line
            }
        };
        if commands.is_empty() {
            answer.put(if prompts { "" } else { &answers::UNKNOWN }).await?;
            answer.put(if prompts { "\n> " } else { "\n" }).await?;
        }
        for words in &commands {
            match parse(words) {
                Ok(Command::Quit) => return answer.flush().await,
                Ok(Command::Prompt) => prompts = !prompts,
                Ok(Command::SetTimeout(limit)) => silence = limit,
                Ok(command) => clerk.obey(&command, &mut answer).await?,
                Err(refused) => answer.put(&answers::why(&refused)).await?,
            }
            answer.put(if prompts { "\n> " } else { "\n" }).await?;
            if stays.has_changed().is_err() {
                return answer.flush().await; // who serves now has not heard of the rest
            }
            tokio::task::yield_now().await;
        }
        answer.flush().await?;
        if !prompts && !read.buffer().contains(&b'\n') {
            return Ok(());
        }
    }
}

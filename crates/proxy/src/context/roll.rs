//! The roll: connections that are served by a task, with what was last decided about them. A reload that judges live connections
//! again finds them here. Those that are relayed are found in the list of the engine instead.
//!
//! Nobody slips through between: a task enters what it was allowed before it looks whether the rules have changed meanwhile, and
//! leaves the roll after its flow is listed.

use crate::{
    access::{Allowed, Denied, Rules, Subject},
    target::Target,
};
use longsplice_engine::Leg;
use std::{
    collections::HashMap,
    future::pending,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;

/// Both addresses of a client's connection.
type Connection = (SocketAddr, SocketAddr);
/// Why a connection is forbidden, once it is.
pub(crate) type Told = Option<Arc<str>>;

/// The roll of all listeners.
#[derive(Debug, Clone, Default)]
pub(crate) struct Roll(Arc<Mutex<HashMap<Connection, Entry>>>);

#[derive(Debug)]
struct Entry {
    listener: Arc<str>,
    /// The client, from the PROXY header if there was one.
    source: SocketAddr,
    user: Option<String>,
    decided: Option<Decided>,
    tell: watch::Sender<Told>,
}

/// A connection to a server that the rules have allowed.
#[derive(Debug)]
struct Decided {
    rules: Rules,
    client: IpAddr,
    method: Option<String>,
    path: Option<String>,
    target: Target,
    /// None: an upstream proxy knows it.
    server: Option<SocketAddr>,
}

/// A connection on the roll, until this is dropped.
#[derive(Debug)]
pub(crate) struct Enrolled {
    roll: Roll,
    connection: Connection,
    told: watch::Receiver<Told>,
}

impl Roll {
    pub fn enter(&self, client: &Leg, listener: &Arc<str>) -> Enrolled {
        let (tell, told) = watch::channel(None);
        let connection = (client.remote(), client.local());
        let entry = Entry { listener: listener.clone(), source: client.source(), user: None, decided: None, tell };
        self.lock().insert(connection, entry);
        Enrolled { roll: self.clone(), connection, told }
    }

    /// Enters that the rules have allowed this client's connection to a server. Returns what allows it now. Fails if they have
    /// changed meanwhile, and deny it.
    pub fn decided(
        &self,
        client: &Leg,
        rules: &Rules,
        subject: &Subject<'_>,
        (target, server): (&Target, Option<SocketAddr>),
    ) -> Result<Allowed, Denied> {
        let owned = |text: Option<&str>| text.map(String::from);
        if let Some(entry) = self.lock().get_mut(&(client.remote(), client.local())) {
            (entry.source, entry.user) = (client.source(), owned(subject.user));
            entry.decided = Some(Decided {
                rules: rules.clone(),
                client: subject.client,
                method: owned(subject.method),
                path: owned(subject.path),
                target: target.clone(),
                server,
            });
        }
        rules.judge_known(subject, target, server)
    }

    /// Enters who has logged in.
    pub fn is_of(&self, client: &Leg, user: Option<&str>) {
        if let Some(entry) = self.lock().get_mut(&(client.remote(), client.local())) {
            entry.user = user.map(String::from);
        }
    }

    /// Judges all again, and tells those to end that are forbidden. `by_user`: why the user of a listener is forbidden. Returns for
    /// each client that has been allowed something whether and why it is forbidden.
    pub fn judge<N>(
        &self,
        number: impl Fn() -> N,
        by_user: impl Fn(&str, Option<&str>) -> Told,
    ) -> (N, HashMap<SocketAddr, Told>) {
        let mut judged = HashMap::new();
        let all = self.lock();
        let number = number();
        for entry in all.values().filter(|entry| entry.decided.is_some() || entry.user.is_some()) {
            let user = entry.user.as_deref();
            let by_rule = || Some(entry.decided.as_ref()?.check(user).err()?.to_string().into());
            let why: Told = by_user(&entry.listener, user).or_else(by_rule);
            if why.is_some() {
                entry.tell.send_replace(why.clone());
            }
            judged.insert(entry.source, why);
        }
        (number, judged)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Connection, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Decided {
    fn check(&self, user: Option<&str>) -> Result<(), Denied> {
        let subject = Subject { client: self.client, method: self.method.as_deref(), path: self.path.as_deref(), user };
        self.rules.check_name(&subject, &self.target)?;
        self.rules.check_known(&subject, &self.target, self.server)
    }
}

impl Enrolled {
    /// Returns why it is forbidden, if it is.
    pub fn forbidden(&self) -> Told {
        self.told.borrow().clone()
    }

    /// Waits until it is forbidden.
    pub fn told(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut told = self.told.clone();
        async move {
            if told.wait_for(Option::is_some).await.is_err() {
                pending().await // it is not on the roll any more
            }
        }
    }

    /// Leaves the roll. Returns why it is forbidden, if it was told so before.
    pub fn leave(self) -> Told {
        let told = self.told.clone();
        drop(self);
        told.borrow().clone()
    }
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        self.roll.lock().remove(&self.connection);
    }
}

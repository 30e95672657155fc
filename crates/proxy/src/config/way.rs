//! Where the connections of a listener go: where its rules lead them, or it does.

use super::ListenerConfig;
use crate::{
    access::{Allowed, Denied, Rules, Subject, Upstream, Way},
    target::Target,
};
use longsplice_engine::Leg;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

impl ListenerConfig {
    /// Returns where a connection goes that is allowed. `at`: the address of the target, if it was not looked up.
    pub(crate) fn way(&self, of_rule: Option<Way>, target: &Target, at: Option<SocketAddr>) -> Way {
        way(self.upstream.as_ref(), of_rule, target, at)
    }

    /// Judges a name that need not be looked up here, because of where it leads. Rules that name addresses do not match it then.
    /// `None`: its addresses decide.
    pub(crate) fn by_name(
        &self,
        rules: &Rules,
        subject: &Subject<'_>,
        target: &Target,
    ) -> Result<Option<(Allowed, Way)>, Denied> {
        by_name((rules, self.upstream.as_ref()), subject, target)
    }

    /// Returns who asks for a target, and what there is to judge this client by.
    pub fn asker(&self, client: &Leg, subject: &Subject<'_>, target: &Target) -> Asker {
        let known = target.host.ip().map(|ip| SocketAddr::new(ip, target.port));
        let owned = |text: Option<&str>| text.map(String::from);
        Asker {
            rules: self.rules.clone(),
            upstream: self.upstream.clone(),
            client: subject.client,
            method: owned(subject.method),
            path: owned(subject.path),
            user: owned(subject.user),
            target: target.clone(),
            wanted: self.wanted(client),
            known,
        }
    }
}

fn way(upstream: Option<&Arc<Upstream>>, of_rule: Option<Way>, target: &Target, at: Option<SocketAddr>) -> Way {
    let way = of_rule.or_else(|| upstream.cloned().map(Way::Through));
    match way {
        Some(Way::Through(upstream)) if !upstream.leads_to(target, at) => Way::Direct,
        Some(way) => way,
        None => Way::Direct,
    }
}

fn by_name(
    (rules, upstream): (&Rules, Option<&Arc<Upstream>>),
    subject: &Subject<'_>,
    target: &Target,
) -> Result<Option<(Allowed, Way)>, Denied> {
    // where nothing leads elsewhere, the addresses of all names decide
    if target.host.ip().is_some() || upstream.is_none() && !rules.lead() {
        return Ok(None);
    }
    match rules.judge_known(subject, target, None) {
        Ok(allowed) => {
            let way = way(upstream, allowed.way.clone(), target, None);
            Ok((!way.needs_address()).then_some((allowed, way)))
        }
        // without any rule that says otherwise, it would not be looked up
        Err(denied) if !way(upstream, None, target, None).needs_address() => Err(denied),
        Err(_) => Ok(None),
    }
}

/// How a reply has come that others may get, if not straight from its target. Then the address of its server is not that of the
/// target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    /// Where connections to the target were led: [`Way`] as a text.
    pub way: String,
    /// The address that the rules have judged; none: the name alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<SocketAddr>,
}

impl Came {
    /// Describes a connection that went this way. `judged`: the address that the rules have judged.
    pub fn of(way: &Way, judged: Option<SocketAddr>) -> Option<Came> {
        (*way != Way::Direct).then(|| Came { way: way.to_string(), judged })
    }
}

/// Who asks for a target, where somebody else may have been sent the reply.
#[derive(Debug, Clone)]
pub struct Asker {
    rules: Rules,
    upstream: Option<Arc<Upstream>>,
    client: IpAddr,
    method: Option<String>,
    path: Option<String>,
    user: Option<String>,
    target: Target,
    /// The address that the client has connected to, whatever name it asks for.
    wanted: Option<SocketAddr>,
    /// The target, if it is an address.
    known: Option<SocketAddr>,
}

/// What decides about a request before any name is looked up.
enum Decided {
    /// The name: allowed, to go this way.
    ByName(Way),
    /// This address; none: one that is not known.
    ByAddress(Option<SocketAddr>),
    Denied,
}

impl Asker {
    fn subject(&self) -> Subject<'_> {
        let Asker { client, method, path, user, .. } = self;
        Subject { client: *client, method: method.as_deref(), path: path.as_deref(), user: user.as_deref() }
    }

    fn decided(&self) -> Decided {
        if let Some(at) = self.wanted.or(self.known) {
            return Decided::ByAddress(Some(at));
        }
        match by_name((&self.rules, self.upstream.as_ref()), &self.subject(), &self.target) {
            Ok(Some((_, way))) => Decided::ByName(way),
            Ok(None) => Decided::ByAddress(None),
            Err(_) => Decided::Denied,
        }
    }

    /// Judges this address of the target. Returns where a connection would go.
    fn way_at(&self, at: SocketAddr) -> Option<Way> {
        let allowed = self.rules.judge(&self.subject(), &self.target, at).ok()?;
        Some(way(self.upstream.as_ref(), allowed.way, &self.target, self.wanted))
    }

    /// Returns the way that a connection would go, if that is known without looking up a name, and is not the straight one.
    pub fn is_led(&self) -> Option<String> {
        let way = match self.decided() {
            Decided::ByName(way) => way,
            Decided::ByAddress(Some(at)) => self.way_at(at)?,
            Decided::ByAddress(None) | Decided::Denied => return None,
        };
        Some(way).filter(|way| *way != Way::Direct).map(|way| way.to_string())
    }

    /// Whether the rules allow what somebody else was sent from `server`, and would have led this client the same way.
    pub fn may_have(&self, server: SocketAddr, came: Option<&Came>) -> bool {
        let (by, judged) = came.map_or((None, Some(server)), |came| (Some(&came.way), came.judged));
        let is_same = |way: Way| match by {
            Some(by) => way.to_string() == *by,
            None => way == Way::Direct,
        };
        match self.decided() {
            Decided::Denied => false,
            Decided::ByName(way) => is_same(way),
            // which address that was may not be known
            Decided::ByAddress(at) => at.or(judged).and_then(|at| self.way_at(at)).is_some_and(is_same),
        }
    }
}

#[cfg(test)]
#[path = "way_tests.rs"]
mod tests;

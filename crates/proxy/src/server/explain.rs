//! Which rule decides on a connection that is not there yet: `longsplice rule`.

use super::{Server, lock};
use crate::{
    access::{Allowed, Denied, Subject, Way},
    fault::Fault,
    target::Target,
};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

/// Time in which a name has to be looked up.
const RESOLVE: Duration = Duration::from_secs(5);

/// A connection that a client might ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Address of the client.
    pub client: IpAddr,
    /// What it would ask for: HOST:PORT.
    pub target: String,
    /// User that would have logged in.
    #[serde(default)]
    pub user: Option<String>,
    /// HTTP method, or verb of FTP.
    #[serde(default)]
    pub method: Option<String>,
    /// Path of the HTTP request.
    #[serde(default)]
    pub path: Option<String>,
    /// Only the listener with this name.
    #[serde(default)]
    pub listener: Option<String>,
}

/// What a listener would do with it, for one address of the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// Name of the listener.
    pub listener: String,
    /// Address of the target; none if its name is denied, whatever its address is.
    pub server: Option<SocketAddr>,
    /// Whether it would be connected.
    pub allowed: bool,
    /// Number of the rule that decides, from 1; none if no rule does.
    pub rule: Option<usize>,
    /// That rule, as a configuration has it, or what else decides.
    pub why: String,
    /// Name of the upstream proxy through which it would go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Name of the pool to a server of which it would go, or to a proxy of which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
}

impl Server {
    /// Returns what each listener would do whose clients can choose this target. Fails with a message if the question makes no sense
    /// or the name has no address.
    pub async fn explain(&self, asked: &Question) -> Result<Vec<Explained>, String> {
        let target: Target = asked.target.parse().map_err(|e| format!("{}: {e}", asked.target))?;
        let subject = Subject {
            client: asked.client,
            method: asked.method.as_deref(),
            path: asked.path.as_deref(),
            user: asked.user.as_deref(),
        };
        let fronts: Vec<_> = lock(&self.state).doors.iter().map(|door| door.fronts.now()).collect();
        let is_meant = |name: &str| asked.listener.as_deref().is_none_or(|only| only == name);
        let meant: Vec<_> = fronts.iter().filter(|front| is_meant(&front.listener.name)).collect();
        if let (Some(name), true) = (&asked.listener, meant.is_empty()) {
            return Err(format!("no listener has the name {name}"));
        }
        let (mut said, mut unknown, mut addresses) = (Vec::new(), Vec::new(), None::<Result<Vec<SocketAddr>, Fault>>);
        for front in meant {
            let listener = &front.listener;
            if listener.fixed_target().is_some_and(|fixed| *fixed != target) {
                continue;
            }
            let name = listener.name.to_string();
            let has_address = listener.has_wanted();
            let explained = |server: Option<SocketAddr>, decided: Result<Allowed, Denied>| {
                let rule = match &decided {
                    Ok(allowed) => allowed.rule,
                    Err(Denied::Rule(n)) => Some(*n),
                    Err(_) => None,
                };
                let why = match (rule.and_then(|n| listener.rules.list().get(n - 1)), &decided) {
                    (Some(rule), _) => rule.to_string(),
                    (None, Ok(_)) => "no rule matches".to_owned(),
                    (None, Err(denied)) => denied.to_string(),
                };
                // what is denied goes nowhere
                let at = server.filter(|_| has_address);
                let way = decided.ok().map(|decided| listener.way(decided.way, &target, at));
                let (upstream, pool) = match &way {
                    None => (None, None),
                    Some(Way::Direct) => (None, listener.fixed_pool()),
                    Some(Way::Through(upstream)) => (Some(upstream.name.clone()), upstream.pool.as_deref()),
                    Some(Way::Pool(pool)) => (None, Some(&**pool)),
                };
                let allowed = way.is_some();
                let (listener, pool) = (name.clone(), pool.map(String::from));
                Explained { listener, server, allowed, rule, why, upstream, pool }
            };
            if let Err(denied) = listener.rules.check_name(&subject, &target) {
                said.push(explained(None, Err(denied)));
                continue;
            }
            let by_name = || listener.by_name(&listener.rules, &subject, &target);
            if let Some(decided) = (!has_address).then(by_name).and_then(Result::transpose) {
                said.push(explained(None, decided.map(|(allowed, _)| allowed)));
                continue;
            }
            if addresses.is_none() {
                addresses = Some(self.shared.resolver.resolve(&target, RESOLVE).await);
            }
            match &addresses {
                Some(Ok(found)) => {
                    said.extend(
                        found.iter().map(|at| explained(Some(*at), listener.rules.judge(&subject, &target, *at))),
                    );
                }
                // others may lead it somewhere without its address
                Some(Err(fault)) => unknown.push(Explained {
                    listener: name.clone(),
                    server: None,
                    allowed: false,
                    rule: None,
                    why: fault.to_string(),
                    upstream: None,
                    pool: None,
                }),
                None => {}
            }
        }
        if let (true, Some(one)) = (said.is_empty(), unknown.first()) {
            return Err(format!("{target}: {}", one.why));
        }
        said.append(&mut unknown);
        Ok(said)
    }
}

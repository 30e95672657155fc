//! Where the connections of a listener go: where its rules lead them, or it does.

use super::ListenerConfig;
use crate::{
    access::{Allowed, Denied, Rules, Subject, Way},
    target::Target,
};
use std::net::SocketAddr;

impl ListenerConfig {
    /// Returns where a connection goes that is allowed. `at`: the address of the target, if it was not looked up.
    pub(crate) fn way(&self, of_rule: Option<Way>, target: &Target, at: Option<SocketAddr>) -> Way {
        let way = of_rule.or_else(|| self.upstream.clone().map(Way::Through));
        match way {
            Some(Way::Through(upstream)) if !upstream.leads_to(target, at) => Way::Direct,
            Some(way) => way,
            None => Way::Direct,
        }
    }

    /// Judges a name that need not be looked up here, because of where it leads. Rules that name addresses do not match it then.
    /// `None`: its addresses decide.
    pub(crate) fn by_name(
        &self,
        rules: &Rules,
        subject: &Subject<'_>,
        target: &Target,
    ) -> Result<Option<(Allowed, Way)>, Denied> {
        if target.host.ip().is_some() {
            return Ok(None);
        }
        match rules.judge_known(subject, target, None) {
            Ok(allowed) => {
                let way = self.way(allowed.way.clone(), target, None);
                Ok((!way.needs_address()).then_some((allowed, way)))
            }
            // without any rule that says otherwise, it would not be looked up
            Err(denied) if !self.way(None, target, None).needs_address() => Err(denied),
            Err(_) => Ok(None),
        }
    }

    /// Returns where the rules lead a target, as far as that is known without looking up its name. `None`: they say nothing of it.
    pub fn led(&self, subject: &Subject<'_>, target: &Target) -> Option<Way> {
        let known = target.host.ip().map(|ip| SocketAddr::new(ip, target.port));
        self.rules.judge_known(subject, target, known).ok()?.way
    }

    /// Whether all connections go straight to their targets.
    pub fn is_straight(&self) -> bool {
        self.upstream.is_none() && !self.rules.lead()
    }

    /// Checks whether the rules allow what somebody else was sent from `server`. That may not be an address of the target, where
    /// connections are led elsewhere.
    pub fn may_have(&self, subject: &Subject<'_>, target: &Target, server: SocketAddr) -> bool {
        let rules = &self.rules;
        let known = match (target.host.ip(), self.by_name(rules, subject, target)) {
            _ if self.is_straight() => Some(server),
            (_, Err(_)) => return false,
            (_, Ok(Some(_))) => None,
            (Some(ip), Ok(None)) if self.intercepts.is_none() => Some(SocketAddr::new(ip, target.port)),
            // which address that was is not known
            (_, Ok(None)) if rules.name_addresses() => return false,
            (_, Ok(None)) => None,
        };
        rules.check_known(subject, target, known).is_ok()
    }
}

#[cfg(test)]
#[path = "way_tests.rs"]
mod tests;

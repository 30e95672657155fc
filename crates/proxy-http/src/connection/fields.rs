//! Changes of fields, of the listener and then of the route, in all heads that leave: of requests, of replies of servers and
//! of the cache, and of our own.

use super::{
    Row,
    forward_request::{RoutedRequest, To},
    host,
};
use longsplice_http::reply::Reply;
use longsplice_proxy::{
    config::Http,
    fields::{About, FieldChange, FieldChanges, Head, change},
    routes::{Origins, Rewrite},
};
use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};
use tokio::time::timeout;

/// What changes of fields need of the current request, if there are any.
#[derive(Debug, Default)]
pub(super) struct Current {
    /// Number of the route, from 1.
    route: Option<usize>,
    host: String,
    user: Option<String>,
    /// The servers of the route's pool, if replies are changed by them.
    servers: Vec<String>,
}

/// The changes for a request and its reply.
#[derive(Clone, Copy)]
pub(crate) struct Changes<'a> {
    of_listener: &'a FieldChanges,
    of_route: Option<&'a FieldChanges>,
    about: About<'a>,
    /// What was done to the path, if it is undone in replies.
    rewrite: Option<(&'a Rewrite, Origins<'a>)>,
}

impl<'a> Changes<'a> {
    pub fn new(http: &'a Http, current: &'a Current, client: IpAddr) -> Changes<'a> {
        let route = current.route.and_then(|number| http.routes.get(number - 1));
        let about = About { client, host: &current.host, user: current.user.as_deref() };
        let rewrite = route.filter(|route| route.rewrite_replies).and_then(|route| route.rewrite.as_ref());
        let rewrite = rewrite.map(|rewrite| (rewrite, Origins { site: &current.host, servers: &current.servers }));
        Changes { of_listener: &http.fields, of_route: route.map(|route| &route.fields), about, rewrite }
    }

    pub fn in_request(&self, head: Vec<u8>) -> Vec<u8> {
        self.make(head, Head::Request, |all| &all.request)
    }

    /// Undoes what was done to the path, in a reply of a server.
    pub fn undo(&self, head: Vec<u8>) -> Vec<u8> {
        match &self.rewrite {
            Some((rewrite, origins)) => rewrite.back_in(head, origins),
            None => head,
        }
    }

    pub fn in_reply(&self, head: Vec<u8>, status: u16) -> Vec<u8> {
        self.make(head, Head::Reply(status), |all| &all.reply)
    }

    fn make(&self, head: Vec<u8>, which: Head, list: fn(&FieldChanges) -> &Vec<FieldChange>) -> Vec<u8> {
        let all = list(self.of_listener).iter().chain(self.of_route.into_iter().flat_map(list));
        change(head, which, all, &self.about)
    }
}

impl Row<'_> {
    /// Remembers what the changes of fields need of a request.
    pub(super) fn note_for_changes(&mut self, routed: &RoutedRequest<'_>) {
        let route = routed.route.and_then(|number| self.http.routes.get(number - 1));
        let of_route = route.map(|route| &route.fields);
        let undone = route.is_some_and(|route| route.rewrite_replies);
        if undone || of_route.into_iter().chain([&*self.http.fields]).any(|changes| *changes != FieldChanges::default())
        {
            let host = routed.site.clone().or_else(|| routed.target().map(host)).unwrap_or_default();
            let servers = match &routed.to {
                To::Pool(pool, _) if undone => pool.config().servers.iter().map(|s| s.target.to_string()).collect(),
                _ => Vec::new(),
            };
            self.current = Current { route: routed.route, host, user: routed.user.clone(), servers };
        }
    }

    /// Writes a reply of our own. Errors are ignored: the client may be gone.
    pub(super) async fn say(&mut self, reply: &Reply<'_>) {
        let limit: Duration = self.front.listener.limits.handshake;
        let client = self.client.leg.source().ip();
        let changes = Changes::new(self.http, &self.current, client);
        let head = reply.encode(SystemTime::now());
        let (head, body) =
            head.split_at(head.windows(4).position(|w| w == b"\r\n\r\n").map_or(head.len(), |at| at + 4));
        let bytes = [&changes.in_reply(head.to_vec(), reply.status), body].concat();
        let _ = timeout(limit, self.client.write_all(&bytes)).await;
    }
}

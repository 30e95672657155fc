//! Requests as servers get them: of clients that speak to a reverse proxy, or know of no proxy.
//!
//! A reverse proxy presents several servers as one site. Host and path of a request select a pool, and a server
//! of that pool gets the request. Its connection is kept for the next request of any client, so consecutive requests of
//! a client may go to different servers.
//!
//! Paths are forwarded as they were written. If a route or a rule matches them, they are
//! compared after [`path::plain`], which refuses paths that servers interpret in different ways.
//! Rules see the requested host and port as the target, and our own address as the server's.

use super::{
    Row, auth,
    forward_request::{RoutedRequest, To},
    no_trace, wrong,
};
use longsplice_http::{Authority, Form, Request, path};
use longsplice_proxy::{
    fault::{Fault, Step},
    log::access_log::Record,
    routes::{self, RouteTo},
    target::{Host, Target},
};
use tokio::time::timeout;

/// What a request asks of a server.
struct Asked {
    /// Host and port, as the client wrote them; none: HTTP/1.0.
    site: Option<String>,
    host: Option<Host>,
    /// The path for routes and rules; none if none of them has paths.
    path: Option<String>,
    /// The target for the rules.
    target: Target,
}

impl Row<'_> {
    /// Checks a request to a site, and selects the pool.
    pub(super) async fn judge_for_site<'r>(
        &self,
        request: &'r Request,
        record: &mut Record,
    ) -> Result<RoutedRequest<'r>, (Fault, u16)> {
        let Asked { site, host, path, target } = self.asked(request, record)?;
        let here = self.client.leg.local();
        let found = routes::find(&self.http.routes, host.as_ref(), path.as_deref().unwrap_or("/"));
        let Some((number, route)) = found else {
            let wanted = self.front.listener.intercepts.map(|_| self.judge_intercepted(request, record));
            return wanted.unwrap_or_else(|| Err((Fault::NoRoute("this host and path".into()), 404)));
        };
        record.route = Some(format!("{number}:{}", route.pool().unwrap_or("redirect")));
        let written = match &request.form {
            Form::Origin(path) | Form::Absolute(_, path) => path.as_str(),
            Form::Asterisk | Form::Authority(_) => "*",
        };
        let rewritten = route.rewrite.as_ref().and_then(|rewrite| rewrite.apply(written));
        let mut changed = rewritten.clone().map(|path| {
            let mut request = request.clone();
            request.form = Form::Origin(path);
            request
        });
        let to = match &route.to {
            RouteTo::Pool(name) => {
                let users = if route.users.is_empty() { &self.http.users } else { &route.users };
                let limit = self.front.listener.limits.handshake;
                let client = self.client.leg.source().ip();
                let user = auth::authenticate(&request.fields, ("authorization", 401), users, client);
                record.user = timeout(limit, user).await.map_err(|_| (Fault::Timeout(Step::Handshake), 503))??;
                if record.user.is_some() {
                    // the password is for us, and not for servers
                    changed.get_or_insert_with(|| request.clone()).keep_back("authorization");
                }
                let pool = self.of.pools.get(name).ok_or_else(|| (Fault::NoServer(name.clone()), 503))?;
                To::Pool(pool.clone(), pool.key(request, self.client.leg.source().ip()))
            }
            RouteTo::Redirect(redirect) => {
                let host = site.clone().unwrap_or_else(|| here.to_string());
                let target = rewritten.as_deref().unwrap_or(written);
                To::Elsewhere(redirect.status, redirect.to.of(&host, if target == "*" { "/" } else { target }))
            }
        };
        let user = record.user.clone();
        let routed = RoutedRequest { request, route: Some(number), changed, site, path, user, to };
        let denied = self.front.listener.rules.check(&routed.subject(&self.client), &target, here);
        let subject = routed.subject(&self.client);
        let noted = || self.shared().note(&self.client.leg, &self.front.listener, &subject, (&target, here));
        denied.and_then(|()| noted()).map_err(|why| (Fault::Denied(why), 403))?;
        Ok(routed)
    }

    /// Checks an intercepted request. It goes to the server that the client wants, whichever host it names. The rules see the
    /// name, and the server's address.
    pub(super) fn judge_intercepted<'r>(
        &self,
        request: &'r Request,
        record: &mut Record,
    ) -> Result<RoutedRequest<'r>, (Fault, u16)> {
        let Asked { site, path, mut target, .. } = self.asked(request, record)?;
        target.port = self.client.leg.local().port();
        record.target = Some(target.to_string());
        Ok(RoutedRequest { request, route: None, changed: None, site, path, user: None, to: To::Target(target) })
    }

    /// Reads what a request asks of a server.
    fn asked(&self, request: &Request, record: &mut Record) -> Result<Asked, (Fault, u16)> {
        let named = request.fields.all("host").next().map(String::from_utf8_lossy);
        let (authority, path) = match &request.form {
            // RFC 9112, 3.2.2: Host is ignored
            Form::Absolute(authority, path) => (Some(authority.clone()), path.as_str()),
            Form::Origin(path) => (named.and_then(|n| Authority::parse(&n).ok()), path.as_str()),
            Form::Asterisk => (named.and_then(|n| Authority::parse(&n).ok()), "*"),
            Form::Authority(_) => return Err((Fault::BadRequest("CONNECT is for forward proxies".into()), 501)),
        };
        // The server as a whole (RFC 9110, 9.3.7): handled by the route of `/`.
        let path = if path == "*" { "/" } else { path };
        let routes = &self.http.routes;
        let read = self.front.listener.rules.know_paths()
            || routes.iter().any(|route| !route.path.is_all() || route.rewrite.is_some());
        let path = read.then(|| path::plain(path)).transpose().map_err(wrong)?;
        let site = authority.as_ref().map(Authority::to_string);
        record.target.clone_from(&site);
        // `None`: HTTP/1.0.
        let host = authority.as_ref().map(|a| Host::from_name(a.host.as_bytes())).transpose();
        let host = host.map_err(|e| (Fault::BadRequest(e.to_string()), 400))?;
        no_trace(request)?;
        let here = self.client.leg.local();
        let target = Target {
            host: host.clone().unwrap_or(Host::Ip(here.ip())),
            port: authority.and_then(|a| a.port).unwrap_or(here.port()),
        };
        Ok(Asked { site, host, path, target })
    }
}

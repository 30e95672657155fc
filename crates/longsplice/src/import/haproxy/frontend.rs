//! A frontend, or the part of `listen` that is one: listeners, with rules and routes.

use super::{
    All,
    acl::Condition,
    backend::Backend,
    bind,
    proxy::{Proxy, why},
    words::Words,
};
use crate::import::{
    is_valid,
    model::{Keys, Lead, Listener, Mistake, Notes, Route, Site, everybody},
    rules::{Match, Rule, Step, TooHard, and, compile, tidy},
    values::{quote, quote_all, seconds},
};
use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
};

/// Where one condition leads to.
struct Use<'a> {
    of: Words,
    condition: Condition,
    backend: &'a (Proxy, Backend),
}

/// Translates a frontend.
pub fn translate(proxy: &Proxy, all: &All, site: &mut Site) -> Result<(), Mistake> {
    let mut one =
        Listener::new(&proxy.head.line, proxy.name(), "plug", SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    one.notes = proxy.notes.clone();
    let leads = match leads(proxy, all, &mut one)? {
        Ok(leads) => leads,
        Err(why) => {
            site.notes.0.append(&mut one.notes.0);
            site.notes.left_out(&proxy.head.line, &why);
            return Ok(());
        }
    };
    if proxy.http {
        one.protocol = "http";
        sites(proxy, &leads, &mut one)?;
    } else {
        plain(proxy, &leads, &mut one)?;
    }
    if one.protocol != "plug" && one.routes.is_empty() {
        site.notes.0.append(&mut one.notes.0);
        site.notes.left_out(&proxy.head.line, "none of its routes is translated");
        return Ok(());
    }
    times(proxy, &leads, &mut one);
    headers(proxy, &leads, &mut one);
    access(proxy, &leads, all, &mut one)?;
    if let Some(most) = proxy.maxconn {
        one.limits.insert("connections", most.to_string());
    }
    let before = site.listeners.len();
    let mut notes = Notes::default();
    let mut number = 0;
    for of in &proxy.binds {
        let bind = bind::read(of, &proxy.binds, &mut notes)?;
        for listen in bind.listen {
            let mut listener = Listener { listen, line: of.line.clone(), ..one.clone() };
            if number > 0 {
                listener.notes = Notes::default();
            }
            if bind.header {
                listener.proxy_protocol.insert("from", everybody());
                listener.proxy_protocol.insert("required", "true".to_owned());
                let judges = |of: &&Words| of.word(1) == "connection" && ["accept", "reject"].contains(&of.word(2));
                if let Some(of) = proxy.connection.iter().find(judges) {
                    let why = "it is about the address that connects, and here it would be about the one in the PROXY \
                               header (name the proxies in `from`)";
                    listener.close(&of.line, why);
                }
            }
            number += 1;
            site.listen(listener)?;
        }
    }
    match site.listeners.get_mut(before) {
        Some(first) => {
            if number > 1 && proxy.maxconn.is_some() {
                first.notes.changed(&proxy.head.line, "its maxconn is that of each of its addresses");
            }
            first.notes.0.append(&mut notes.0);
        }
        None if proxy.binds.is_empty() => return Err(proxy.head.wrong("it does not listen: add bind ADDRESS:PORT")),
        None => {
            site.notes.0.append(&mut one.notes.0);
            site.notes.0.append(&mut notes.0);
            site.notes.left_out(&proxy.head.line, "none of its addresses can be listened on");
        }
    }
    Ok(())
}

/// Where it leads to, in order. The last one is the default, if there is one.
fn leads<'a>(proxy: &Proxy, all: &'a All, one: &mut Listener) -> Result<Result<Vec<Use<'a>>, String>, Mistake> {
    let mut leads = Vec::new();
    let always = |of: &Words| proxy.acls.condition(of, &[]);
    for of in &proxy.uses {
        let name = of.word(1);
        if name.contains("%[") {
            one.notes.left_out(&of.line, "names of backends are not made of requests (write a use_backend for each)");
            continue;
        }
        let backend = all.backends.get(name).ok_or_else(|| of.wrong(format!("there is no backend {name}")))?;
        let condition = proxy.acls.condition(of, of.from(2))?;
        leads.push(Use { of: of.clone(), condition, backend });
    }
    if let Some(of) = &proxy.default_backend {
        let name = of.word(1);
        let backend = all.backends.get(name).ok_or_else(|| of.wrong(format!("there is no backend {name}")))?;
        leads.push(Use { of: of.clone(), condition: always(of)?, backend });
    } else if proxy.head.name() == "listen"
        && let Some(backend) = all.backends.get(proxy.name()).filter(|_| !proxy.servers.is_empty())
    {
        leads.push(Use { of: proxy.head.clone(), condition: always(&proxy.head)?, backend });
    }
    if leads.is_empty() {
        let about = if proxy.stats.is_some() { why("stats") } else { "it leads to no backend" };
        return Ok(Err(about.to_owned()));
    }
    leads.retain(|lead| {
        let leads_somewhere = !lead.backend.1.pool.servers.is_empty();
        if !leads_somewhere {
            one.notes.left_out(
                &lead.of.line,
                "none of its servers is translated. What it would take goes where the next line that fits says",
            );
        }
        leads_somewhere
    });
    Ok(if leads.is_empty() { Err("none of its servers is translated".to_owned()) } else { Ok(leads) })
}

/// Routes of a reverse proxy.
fn sites(proxy: &Proxy, leads: &[Use], one: &mut Listener) -> Result<(), Mistake> {
    for of in &proxy.requests {
        redirect(proxy, of, one)?;
    }
    for lead in leads {
        let (of_pool, backend) = lead.backend;
        match lead.condition.routes() {
            Ok(routes) => {
                for mut keys in routes {
                    let with: String = keys.iter().map(|(key, value)| format!(", {key} = {value}")).collect();
                    if !is_valid(&format!("route = [{{ pool = \"p\"{with} }}]"), "") {
                        one.notes.left_out(
                            &lead.of.line,
                            "its hosts or paths are too many, or none of ours. These requests go where the \
                            next route that fits says",
                        );
                        continue;
                    }
                    if leads.len() > 1
                        && let Some(fields) = backend_fields(of_pool)
                    {
                        keys.insert("fields", fields);
                    }
                    one.routes.push(Route { keys, to: Lead::Pool(backend.pool.name.clone()) });
                }
            }
            Err(what) => one.notes.left_out(
                &lead.of.line,
                &format!(
                    "routes have hosts and paths, and not {what}. These requests go where the next \
                        route that fits says"
                ),
            ),
        }
    }
    let is_about_all = |route: &Route| route.keys.keys().all(|key| *key == "fields");
    if let Some(last) = one.routes.iter().position(is_about_all) {
        one.routes.truncate(last + 1);
    }
    Ok(())
}

/// A plug, or routes by the name that clients of TLS ask for.
fn plain(proxy: &Proxy, leads: &[Use], one: &mut Listener) -> Result<(), Mistake> {
    let to = |backend: &Backend| match &backend.single {
        Some(target) => Lead::Target(target.clone()),
        None => Lead::Pool(backend.pool.name.clone()),
    };
    let asks = |lead: &Use| lead.condition.asks_for_names() || lead.condition.hello().is_some();
    let by_name = leads.iter().any(asks);
    if !by_name && !refuses_others(proxy)? {
        for lead in leads {
            if lead.condition.is_always() {
                one.lead = Some(to(&lead.backend.1));
                return Ok(());
            }
            one.notes.left_out(
                &lead.of.line,
                "a plug leads to one pool, and asks for nothing but the requested server name \
                (req.ssl_sni). These connections go where the next line says",
            );
        }
        // No connection is led anywhere that is known: nobody gets in.
        if let Some(first) = leads.first() {
            one.lead = Some(to(&first.backend.1));
            one.close(&first.of.line, "its condition cannot be said, and there is no default_backend");
        }
        return Ok(());
    }
    one.protocol = "tls";
    for lead in leads {
        let keys = if lead.condition.is_always() || lead.condition.hello() == Some(true) {
            Keys::new()
        } else {
            match lead.condition.names() {
                Ok(names) => Keys::from([("name", quote_all(&names))]),
                Err(what) => {
                    one.notes.left_out(
                        &lead.of.line,
                        &format!(
                            "routes of TLS have names, and not {what}. These connections go where the next \
                        route that fits says"
                        ),
                    );
                    continue;
                }
            }
        };
        let is_last = keys.is_empty();
        one.routes.push(Route { keys, to: to(&lead.backend.1) });
        if is_last {
            if by_name {
                one.notes.changed(&lead.of.line, "clients that do not speak TLS are refused");
            }
            break;
        }
    }
    if let Some(time) = proxy.inspect.and_then(seconds) {
        one.limits.insert("handshake", time);
    }
    Ok(())
}

/// Whether clients that do not speak TLS are refused.
fn refuses_others(proxy: &Proxy) -> Result<bool, Mistake> {
    let mut accepts = false;
    for of in &proxy.content {
        let condition = proxy.acls.condition(of, of.from(3))?;
        match of.word(2) {
            "accept" => accepts |= condition.hello() == Some(true),
            "reject" if condition.hello() == Some(false) || (condition.is_always() && accepts) => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

fn times(proxy: &Proxy, leads: &[Use], one: &mut Listener) {
    let longest = |kind: &str, one: &mut Listener| {
        let all: BTreeSet<u64> = leads.iter().filter_map(|lead| lead.backend.0.times.get(kind).copied()).collect();
        if all.len() > 1 {
            let how = format!("its backends have several times for `{kind}`, and a listener one: the longest");
            one.notes.changed(&proxy.head.line, &how);
        }
        all.last().copied()
    };
    let of_client = |kind: &str| proxy.times.get(kind).copied();
    let (connect, server, tunnel) = (longest("connect", one), longest("server", one), longest("tunnel", one));
    let client = of_client("client");
    let idle = tunnel.or(match (client, server) {
        (Some(client), Some(server)) => Some(client.min(server)),
        (one, other) => one.or(other),
    });
    let put = |table: &mut Keys, key, time: Option<u64>| table.extend(time.and_then(seconds).map(|time| (key, time)));
    put(&mut one.limits, "connect", connect);
    put(&mut one.policy, "idle_limit", idle);
    if proxy.http {
        put(&mut one.limits, "reply", server);
        put(&mut one.limits, "handshake", of_client("http-request").or(client));
        put(&mut one.limits, "keep_alive", of_client("http-keep-alive").or(of_client("http-request")).or(client));
    }
}

/// PROXY headers to servers, and fields.
fn headers(proxy: &Proxy, leads: &[Use], one: &mut Listener) {
    let sends: Vec<_> = leads.iter().map(|lead| &lead.backend.1.sends).collect();
    let first = sends.first().and_then(|first| first.as_ref().ok().copied()).flatten();
    let differs = sends.iter().any(|other| !matches!(other, Ok(version) if *version == first));
    if differs {
        one.notes.changed(
            &proxy.head.line,
            "send-proxy is left out: a listener sends all its servers the same PROXY \
            header, or none (write two listeners)",
        );
    } else if let Some(version) = first {
        if proxy.http {
            one.notes.changed(
                &proxy.head.line,
                "send-proxy is left out: clients share the connections to servers (forwarded = \"x-forwarded-for\")",
            );
        } else {
            one.proxy_protocol.insert("send", quote(version));
        }
    }
    if !proxy.http {
        for of in proxy.requests.iter().chain(&proxy.replies) {
            one.notes.left_out(&of.line, "the mode is tcp: requests are not read");
        }
        return;
    }
    let forwards: Vec<&Words> =
        leads.iter().filter_map(|lead| lead.backend.0.forwardfor.as_ref()).chain(&proxy.forwardfor).collect();
    if let Some(of) = forwards.first() {
        one.keys.insert("forwarded", quote("x-forwarded-for"));
        if of.words.len() > 2 {
            one.notes.changed(
                &of.line,
                &format!(
                    "{} left out: all requests get X-Forwarded-For, with what the client has sent in it in front",
                    of.from(2).join(" ")
                ),
            );
        }
        if proxy.forwardfor.is_none() && forwards.len() < leads.len() {
            one.notes.changed(&of.line, "all backends get the field");
        }
    }
    for of in &proxy.requests {
        match change(of) {
            Some(Ok(change)) => one.fields.request.push(change),
            Some(Err(what)) => one.notes.left_out(&of.line, &what),
            None => {}
        }
    }
    let mut replies: Vec<&Words> = proxy.replies.iter().collect();
    if let [only] = leads
        && only.backend.0.head.line.number != proxy.head.line.number
    {
        for of in &only.backend.0.requests {
            match change(of) {
                Some(Ok(change)) => one.fields.request.push(change),
                Some(Err(what)) => one.notes.left_out(&of.line, &what),
                None => {}
            }
        }
        replies.extend(&only.backend.0.replies);
    } else {
        for lead in leads.iter().filter(|lead| lead.backend.0.head.line.number != proxy.head.line.number) {
            for of in lead.backend.0.requests.iter().chain(&lead.backend.0.replies) {
                if let Some(Err(what)) = change(of) {
                    one.notes.left_out(&of.line, &what);
                }
            }
        }
    }
    for of in replies {
        match change(of) {
            Some(Ok(change)) => one.fields.reply.push(change),
            Some(Err(what)) => one.notes.left_out(&of.line, &what),
            None => one.notes.left_out(&of.line, "replies are judged by a filter (filter = { rules = [...] })"),
        }
    }
}

/// The fields that a backend changes, for its routes.
fn backend_fields(of_pool: &Proxy) -> Option<String> {
    let changes = |all: &[Words]| -> Vec<String> { all.iter().filter_map(|of| change(of)?.ok()).collect() };
    // A section `listen` has those of its listener.
    if of_pool.head.name() == "listen" {
        return None;
    }
    let mut keys = Keys::new();
    for (key, all) in [("request", changes(&of_pool.requests)), ("reply", changes(&of_pool.replies))] {
        if !all.is_empty() {
            keys.insert(key, format!("[{}]", all.join(", ")));
        }
    }
    (!keys.is_empty()).then(|| crate::import::write::inline(&keys))
}

/// The change of a field that a line makes, or why it cannot be said; `None` if it is about something else.
fn change(of: &Words) -> Option<Result<String, String>> {
    let action = of.word(1);
    let (words, condition) = parted(of, 2);
    let value = |text: &str| -> Option<String> {
        let known = [
            ("%[src]", "${client}"),
            ("%ci", "${client}"),
            ("%[hdr(host)]", "${host}"),
            ("%[req.hdr(host)]", "${host}"),
            ("%[hdr(Host)]", "${host}"),
            ("%[req.hdr(Host)]", "${host}"),
        ];
        if let Some((_, ours)) = known.iter().find(|(theirs, _)| *theirs == text) {
            return Some((*ours).to_owned());
        }
        let plain = text.replace("%%", "");
        (!plain.contains('%') && !text.contains("${")).then(|| text.replace("%%", "%"))
    };
    let table = match (action, words) {
        ("set-header" | "add-header", [name, text]) => {
            let Some(value) = value(text) else {
                return Some(Err(format!(
                    "a field cannot be made of {text} (${{client}}, ${{host}} and ${{user}} are known)"
                )));
            };
            format!("{{ {} = {}, value = {} }}", &action[..3], quote(name), quote(&value))
        }
        ("del-header", [name]) => format!("{{ remove = {} }}", quote(name)),
        ("set-header" | "add-header" | "del-header" | "replace-header" | "replace-value", _) => {
            return Some(Err(
                "such a change is not translated (fields = { request = [...], reply = [...] })".to_owned()
            ));
        }
        _ => return None,
    };
    let is_without =
        action == "set-header" && table.contains("X-Forwarded-Proto") && condition == ["if", "{", "ssl_fc", "}"];
    if is_without {
        return Some(Err("nothing is decrypted here, so it never holds".to_owned()));
    }
    if !condition.is_empty() && condition != ["if", "!{", "ssl_fc", "}"] && condition != ["unless", "{", "ssl_fc", "}"]
    {
        return Some(Err("fields are changed in all requests, without a condition".to_owned()));
    }
    let side = if of.name() == "http-response" { "reply" } else { "request" };
    if !is_valid(&format!("fields = {{ {side} = [{table}] }}"), "") {
        return Some(Err("this field cannot be changed so".to_owned()));
    }
    Some(Ok(table))
}

/// The words from here to `if` or `unless`, and the rest.
fn parted(of: &Words, from: usize) -> (&[String], &[String]) {
    let words = of.from(from);
    let at = words.iter().position(|word| word == "if" || word == "unless").unwrap_or(words.len());
    words.split_at(at)
}

/// `http-request redirect`, or `redirect`: a route.
fn redirect(proxy: &Proxy, of: &Words, one: &mut Listener) -> Result<(), Mistake> {
    let from = match (of.name(), of.word(1)) {
        ("redirect", _) => 1,
        (_, "redirect") => 2,
        _ => return Ok(()),
    };
    let (words, condition) = parted(of, from);
    let condition = proxy.acls.condition(of, condition)?;
    let [kind, to, rest @ ..] = words else {
        return Err(of.wrong("write redirect scheme, prefix or location, and where to"));
    };
    let mut keys = Keys::new();
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "code" => drop(keys.insert("status", rest.next().cloned().unwrap_or_default())),
            other => one.notes.changed(&of.line, &format!("{other} is left out")),
        }
    }
    let to = match kind.as_str() {
        "scheme" => format!("{to}://${{host}}${{uri}}"),
        "prefix" => format!("{to}${{uri}}"),
        _ => to.clone(),
    };
    keys.insert("to", quote(&to));
    let is_good = !to.contains("%[")
        && is_valid(&format!("route = [{{ redirect = {} }}]", crate::import::write::inline(&keys)), "");
    match condition.routes() {
        _ if !is_good => one.notes.left_out(
            &of.line,
            "a redirect leads to a URL or path, with ${host} and ${uri}, and has a status \
                of 301, 302, 303, 307 or 308",
        ),
        Ok(routes) => {
            one.routes.extend(routes.into_iter().map(|found| Route { keys: found, to: Lead::Redirect(keys.clone()) }))
        }
        Err(what) => {
            one.notes.left_out(&of.line, &format!("routes have hosts and paths, and not {what}. Nobody is redirected"))
        }
    }
    Ok(())
}

/// All lists of rules: each must let a connection in.
fn access(proxy: &Proxy, leads: &[Use], all: &All, one: &mut Listener) -> Result<(), Mistake> {
    let mut lists: Vec<Vec<Rule>> = Vec::new();
    let is_tls = one.protocol == "tls";
    let mut list = |proxy: &Proxy, lines: &[Words], at: usize, one: &mut Listener| -> Result<(), Mistake> {
        let mut steps = Vec::new();
        let mut accepts_hello = false;
        for of in lines {
            let condition = proxy.acls.condition(of, parted(of, at).1)?;
            let action = of.word(at);
            // A listener for TLS refuses what is no TLS.
            if is_tls && [("accept", Some(true)), ("reject", Some(false))].contains(&(action, condition.hello())) {
                accepts_hello |= action == "accept";
                continue;
            }
            if is_tls && accepts_hello && condition.is_always() && action == "reject" {
                continue;
            }
            step(of, action, &condition, all, (&mut steps, one));
        }
        if !steps.is_empty() {
            match compile(&steps, true) {
                Ok(rules) => lists.push(rules),
                Err(TooHard) => one.close(&proxy.head.line, "its rules cannot be written as one list"),
            }
        }
        Ok(())
    };
    list(proxy, &proxy.connection, 2, one)?;
    list(proxy, &proxy.content, 2, one)?;
    if proxy.http {
        let rules: Vec<Words> = proxy.requests.iter().filter(|of| of.name() == "http-request").cloned().collect();
        list(proxy, &rules, 1, one)?;
    }
    for lead in leads.iter().filter(|lead| lead.backend.0.head.line.number != proxy.head.line.number) {
        let of_pool = &lead.backend.0;
        if let [_] = leads {
            list(of_pool, &of_pool.content, 2, one)?;
            if proxy.http {
                list(of_pool, &of_pool.requests, 1, one)?;
            }
        } else {
            let refuses = |of: &&Words| {
                ["deny", "reject", "tarpit", "silent-drop", "auth"]
                    .iter()
                    .any(|word| of.from(1).contains(&(*word).to_owned()))
            };
            if let Some(of) = of_pool.content.iter().chain(&of_pool.requests).find(refuses) {
                one.close(
                    &of.line,
                    "a rule of one backend among several cannot be said (write it in the frontend, \
                    with the host or path)",
                );
            }
        }
    }
    let mut rules: Option<Vec<Rule>> = None;
    for list in lists {
        let joined = rules.map_or(Ok(list.clone()), |so_far| and(&so_far, &list));
        match joined {
            Ok(joined) => rules = Some(joined),
            Err(TooHard) => {
                one.close(
                    &proxy.head.line,
                    "its rules about connections and about requests cannot be joined to one list",
                );
                return Ok(());
            }
        }
    }
    let closed = std::mem::take(&mut one.rules);
    one.rules = closed.into_iter().chain(tidy(rules.unwrap_or_default())).collect();
    Ok(())
}

/// Adds what one line says. What cannot be said denies more, or allows nothing.
fn step(of: &Words, action: &str, condition: &Condition, all: &All, (steps, one): (&mut Vec<Step>, &mut Listener)) {
    let allow = match action {
        "accept" | "allow" => true,
        "reject" | "deny" | "tarpit" | "silent-drop" => false,
        "auth" => {
            let known = condition.without_login().map(|list| all.users.get(list).cloned().unwrap_or_default());
            match known.filter(|users| !users.is_empty() && one.users.is_empty()) {
                Some(users) => {
                    one.users = users;
                    return;
                }
                None => false,
            }
        }
        "redirect" | "set-header" | "add-header" | "del-header" | "replace-header" | "replace-value" => return,
        "expect-proxy" => {
            one.close(
                &of.line,
                "PROXY headers are for all clients of a listener (accept-proxy), or for those in `from`",
            );
            return;
        }
        _ => {
            let why = match action {
                "use-service" => "the proxy does not answer requests itself ([admin] serves metrics)",
                "return" => "the proxy does not answer requests itself, so servers get these",
                "set-path" | "replace-path" | "set-uri" | "replace-uri" | "set-query" => {
                    "paths are not changed (rewrite in a route)"
                }
                _ if action.starts_with("track-sc") => {
                    "clients are not counted in tables (limits = { new_per_client = \
                        \"NUMBER/second\", connections_per_client = NUMBER })"
                }
                _ => "there is no such step",
            };
            one.notes.left_out(&of.line, why);
            return;
        }
    };
    let Ok(access) = condition.access(!allow) else {
        one.notes.changed(&of.line, "its condition is too long, so it denies everybody");
        steps.push(Step::new(false, Match::default()));
        return;
    };
    if !access.unknown.is_empty() {
        let what = access.unknown.join("; ");
        if allow {
            one.notes
                .left_out(&of.line, &format!("rules do not know `{what}`, so it allows nothing (write an allow rule)"));
        } else if access.when.iter().any(|(when, unless)| when.is_all() && unless.is_empty()) {
            one.notes.changed(
                &of.line,
                &format!(
                    "rules do not know `{what}`. Without it the listener would be open, so it \
                denies everybody: replace that rule"
                ),
            );
        } else {
            one.notes.changed(&of.line, &format!("rules do not know `{what}`, so it denies whether or not that holds"));
        }
    }
    if action == "auth" && access.unknown.is_empty() {
        one.notes.changed(&of.line, "users are those of a listener or route: it denies");
    }
    steps.extend(access.when.into_iter().map(|(when, unless)| Step { allow, when, unless }));
}

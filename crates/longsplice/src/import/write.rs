//! Writes a configuration file.

use super::{
    model::{Fields, Keys, Lead, Listener, Notes, Pool, Route, Site},
    rules::{Match, Rule},
    values::{quote, quote_all},
};
use std::fmt::{self, Write};

/// Longest piece of the other file that a comment shows, in characters.
const SHOWN_MAX: usize = 400;

/// The text of the whole file. `from` says what it was made of.
pub fn write(site: &Site, from: &str) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = whole(&mut text, site, from);
    text
}

fn whole(out: &mut String, site: &Site, from: &str) -> fmt::Result {
    writeln!(out, "# Written by `longsplice import` from {}.", clean(from))?;
    writeln!(out, "# Comments say what was left out or changed. `longsplice check --config FILE` checks the rest.")?;
    notes(out, &site.notes)?;
    for (key, value) in &site.top {
        writeln!(out, "{key} = {value}")?;
    }
    for one in &site.listeners {
        writeln!(out)?;
        listener(out, one)?;
    }
    for one in &site.pools {
        writeln!(out)?;
        pool(out, one)?;
    }
    Ok(())
}

fn notes(out: &mut String, notes: &Notes) -> fmt::Result {
    let mut all = notes.0.clone();
    all.sort_by_key(|(line, _)| *line);
    all.iter().try_for_each(|(line, note)| writeln!(out, "# line {line}: {}", clean(note)))
}

/// On one line, and without what a comment cannot have.
fn clean(text: &str) -> String {
    let mut short: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_MAX).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        short.push_str("...");
    }
    short
}

fn listener(out: &mut String, one: &Listener) -> fmt::Result {
    notes(out, &one.notes)?;
    writeln!(out, "[[listener]]\nname = {}\nprotocol = {}", quote(&one.name), quote(one.protocol))?;
    writeln!(out, "listen = {}", quote(&one.listen.to_string()))?;
    match &one.lead {
        Some(Lead::Target(target)) => writeln!(out, "target = {}", quote(target))?,
        Some(Lead::Pool(pool)) => writeln!(out, "pool = {}", quote(pool))?,
        Some(Lead::Redirect(_)) | None => {}
    }
    for (key, value) in &one.keys {
        writeln!(out, "{key} = {value}")?;
    }
    for (key, table) in [("proxy_protocol", &one.proxy_protocol), ("policy", &one.policy), ("limits", &one.limits)] {
        if !table.is_empty() {
            writeln!(out, "{key} = {}", inline(table))?;
        }
    }
    if !one.rules.is_empty() {
        writeln!(out, "rules = [")?;
        for rule in &one.rules {
            writeln!(out, "  {},", rule_table(rule))?;
        }
        writeln!(out, "]")?;
    }
    if !one.users.is_empty() {
        writeln!(out, "\n[listener.users]")?;
        for (name, password) in &one.users {
            writeln!(out, "{} = {}", key(name), quote(password))?;
        }
    }
    fields(out, &one.fields)?;
    one.routes.iter().try_for_each(|one| route(out, one))
}

fn fields(out: &mut String, fields: &Fields) -> fmt::Result {
    if fields == &Fields::default() {
        return Ok(());
    }
    writeln!(out, "\n[listener.fields]")?;
    for (key, changes) in [("request", &fields.request), ("reply", &fields.reply)] {
        if !changes.is_empty() {
            writeln!(out, "{key} = [")?;
            changes.iter().try_for_each(|change| writeln!(out, "  {change},"))?;
            writeln!(out, "]")?;
        }
    }
    Ok(())
}

fn route(out: &mut String, one: &Route) -> fmt::Result {
    writeln!(out, "\n[[listener.route]]")?;
    for (key, value) in &one.keys {
        writeln!(out, "{key} = {value}")?;
    }
    match &one.to {
        Lead::Target(target) => writeln!(out, "target = {}", quote(target)),
        Lead::Pool(pool) => writeln!(out, "pool = {}", quote(pool)),
        Lead::Redirect(to) => writeln!(out, "redirect = {}", inline(to)),
    }
}

fn rule_table(rule: &Rule) -> String {
    let Match { client, target, ports, users, methods, path } = &rule.when;
    let mut parts = vec![format!("action = {}", quote(if rule.allow { "allow" } else { "deny" }))];
    let mut add = |key: &str, is_empty: bool, value: String| {
        if !is_empty {
            parts.push(format!("{key} = {value}"));
        }
    };
    add("client", client.is_empty(), quote_all(client));
    add("target", target.is_empty(), quote_all(target));
    let range = |&(first, last): &(u16, u16)| {
        if first == last { first.to_string() } else { quote(&format!("{first}-{last}")) }
    };
    let all: Vec<String> = ports.iter().map(range).collect();
    add("ports", ports.is_empty(), if all.len() == 1 { all.concat() } else { format!("[{}]", all.join(", ")) });
    add("users", users.is_empty(), quote_all(users));
    add("methods", methods.is_empty(), quote_all(methods));
    add("path", path.is_empty(), quote_all(path));
    format!("{{ {} }}", parts.join(", "))
}

fn pool(out: &mut String, one: &Pool) -> fmt::Result {
    notes(out, &one.notes)?;
    let name = key(&one.name);
    writeln!(out, "[pool.{name}]\nservers = [")?;
    for server in &one.servers {
        if server.keys.is_empty() {
            writeln!(out, "  {},", quote(&server.address))?;
        } else {
            let keys: Vec<String> = server.keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
            writeln!(out, "  {{ address = {}, {} }},", quote(&server.address), keys.join(", "))?;
        }
    }
    writeln!(out, "]")?;
    for (key, value) in &one.keys {
        writeln!(out, "{key} = {value}")?;
    }
    if let Some(check) = &one.check {
        writeln!(out, "check = {}", inline(check))?;
    }
    if !one.sticky.is_empty() {
        writeln!(out, "sticky = {}", inline(&one.sticky))?;
    }
    Ok(())
}

/// An inline table.
pub fn inline(keys: &Keys) -> String {
    let all: Vec<String> = keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    if all.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", all.join(", ")) }
}

/// A key, in quotes if it needs them.
fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    if is_bare { name.to_owned() } else { quote(name) }
}

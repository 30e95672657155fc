//! HAProxy: frontends, backends and what they share, in TCP mode and plain HTTP mode.

mod acl;
mod backend;
mod bind;
mod frontend;
mod proxy;
mod words;

use super::{
    model::{Line, Mistake, Site},
    values::is_password,
};
use backend::Backend;
use proxy::{Proxy, global_why};
use std::collections::BTreeMap;
use words::{Section, Words, sections};

/// All that frontends name.
struct All {
    backends: BTreeMap<String, (Proxy, Backend)>,
    users: BTreeMap<String, BTreeMap<String, String>>,
}

/// Translates a file of HAProxy.
pub fn translate(text: &str) -> Result<Site, Mistake> {
    let mut site = Site::default();
    let mut defaults = Proxy::new(&Words { line: Line::default(), words: Vec::new() });
    let mut named: BTreeMap<String, Proxy> = BTreeMap::new();
    let mut all = All { backends: BTreeMap::new(), users: BTreeMap::new() };
    let mut frontends: Vec<Proxy> = Vec::new();
    for section in sections(text)? {
        let head = &section.head;
        match head.name() {
            "global" => global(&section, &mut site)?,
            "defaults" => {
                let nothing = Proxy::new(head);
                let mut read = Proxy::read(&section, from(head, &named, &nothing)?)?;
                site.notes.0.append(&mut read.notes.0);
                if !head.word(1).is_empty() && head.word(1) != "from" {
                    named.insert(head.word(1).to_owned(), read.clone());
                }
                defaults = read;
            }
            kind @ ("frontend" | "backend" | "listen") => {
                let name = head.word(1);
                if name.is_empty() {
                    return Err(head.wrong(format!("a {kind} needs a name")));
                }
                let mut read = Proxy::read(&section, from(head, &named, &defaults)?)?;
                if !head.word(2).is_empty() && head.word(2) != "from" {
                    let what = "the address is not written behind the name: write a line bind ADDRESS:PORT";
                    return Err(head.wrong(what));
                }
                if read.disabled {
                    site.notes.left_out(&head.line, "it is disabled");
                    continue;
                }
                if kind != "frontend" {
                    let port = if kind == "listen" { bind::only_port(&read.binds) } else { None };
                    let backend = backend::read(&read, port)?;
                    if all.backends.insert(name.to_owned(), (read.clone(), backend)).is_some() {
                        return Err(head.wrong(format!("there are two backends {name}")));
                    }
                    // those of the servers are in the pool
                    read.notes = Default::default();
                }
                if kind == "frontend" || (kind == "listen" && !read.binds.is_empty()) {
                    frontends.push(read);
                }
            }
            "userlist" => {
                let users = userlist(&section, &mut site)?;
                all.users.insert(head.word(1).to_owned(), users);
            }
            _ => section.lines.iter().chain([head]).for_each(|of| {
                site.notes.left_out(&of.line, "sections of this kind are not translated");
            }),
        }
    }
    for proxy in &frontends {
        frontend::translate(proxy, &all, &mut site)?;
    }
    for (name, (proxy, backend)) in all.backends {
        let mut pool = backend.pool;
        pool.notes.0.extend(proxy.notes.0);
        if site.leads_to(&name) {
            site.pools.push(pool);
        } else {
            site.notes.0.append(&mut pool.notes.0);
            let is_listened = frontends.iter().any(|one| one.name() == name && one.head.name() == "listen");
            if backend.single.is_none() && !is_listened {
                site.notes.left_out(&proxy.head.line, "nothing that is translated leads to it");
            }
        }
    }
    Ok(site)
}

/// What a section begins with: the defaults before it, or those that it names.
fn from<'a>(head: &Words, named: &'a BTreeMap<String, Proxy>, defaults: &'a Proxy) -> Result<&'a Proxy, Mistake> {
    match head.words.iter().position(|word| word == "from") {
        Some(at) => named
            .get(head.word(at + 1))
            .ok_or_else(|| head.wrong(format!("there are no defaults {}", head.word(at + 1)))),
        None => Ok(defaults),
    }
}

fn global(section: &Section, site: &mut Site) -> Result<(), Mistake> {
    for of in &section.lines {
        match of.name() {
            "maxconn" => {
                let number: u32 = of.word(1).parse().map_err(|_| of.wrong("maxconn needs a number"))?;
                if number > 0 {
                    site.top.insert("connections", number.to_string());
                }
            }
            other => site.notes.left_out(&of.line, global_why(other)),
        }
    }
    Ok(())
}

/// Users whose passwords are known.
fn userlist(section: &Section, site: &mut Site) -> Result<BTreeMap<String, String>, Mistake> {
    let mut users = BTreeMap::new();
    for of in &section.lines {
        // Passwords are not shown again.
        let line = Line { number: of.line.number, text: format!("{} {} ...", of.name(), of.word(1)) };
        if of.name() != "user" {
            site.notes.left_out(&line, "rules name users, and no groups");
            continue;
        }
        let (name, kind, password) = (of.word(1), of.word(2), of.word(3));
        let is_good = match kind {
            "password" => is_password(password, true),
            "insecure-password" => is_password(password, false),
            _ => false,
        };
        let fits = [name, password].iter().all(|text| (1..=255).contains(&text.len())) && !name.contains(':');
        if is_good && fits {
            users.insert(name.to_owned(), password.to_owned());
        } else {
            site.notes.left_out(
                &line,
                "only passwords, and hashes by bcrypt and SHA-crypt, are known (give it another password)",
            );
        }
        if of.from(4).iter().any(|word| word == "groups") {
            site.notes.changed(&line, "groups are left out: rules name users");
        }
    }
    Ok(users)
}

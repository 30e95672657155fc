//! What routes of a site do beside choosing a server: other paths, redirects, users; error pages, and limits.

use crate::{
    member::Member,
    origin::Origin,
    proxying::{LIMIT, Proxy},
};
use std::{fs, net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{sleep, timeout},
};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Asks for a path of site.example, with more fields, on a connection of its own. Returns the reply.
async fn ask(proxy: &Proxy, path: &str, more: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: site.example:8080\r\n{more}Connection: close\r\n\r\n");
    String::from_utf8(proxy.answer(request.as_bytes()).await).unwrap()
}

fn pool(server: SocketAddr) -> String {
    format!("[pool.p]\nservers = [\"{server}\"]\n")
}

/// A server that answers each connection once.
async fn origin(replies: &[&'static str]) -> Origin {
    Origin::start(replies.iter().map(|reply| vec![("\r\n\r\n", *reply)]).collect()).await
}

fn status(reply: &str) -> &str {
    reply.split(' ').nth(1).unwrap_or(reply)
}

fn field<'a>(reply: &'a str, name: &str) -> Option<&'a str> {
    reply.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[tokio::test]
async fn servers_get_other_paths() {
    let server = Member::start("p").await;
    let routes = "[[listener.route]]\npath = \"/api\"\nrewrite = { prefix = \"/v2\" }\npool = \"p\"\n\
                  [[listener.route]]\npath = \"/strip\"\nrewrite = { prefix = \"/\" }\npool = \"p\"\n\
                  [[listener.route]]\nrewrite = { regex = '^/user/(\\d+)$', to = '/profile?id=$1' }\npool = \"p\"\n";
    let proxy = Proxy::start("http", &format!("{routes}{}", pool(server.addr))).await;
    for path in ["/api/x?y", "/%61pi", "/strip", "/strip/a%2Fb", "/user/7?x", "/other"] {
        assert_eq!(status(&ask(&proxy, path, "").await), "200", "{path}");
    }
    assert_eq!(status(&ask(&proxy, "/api/../secret", "").await), "400");
    let seen: Vec<_> = server.seen().iter().map(|head| head.split(' ').nth(1).unwrap().to_owned()).collect();
    assert_eq!(seen, ["/v2/x?y", "/v2", "/", "/a%2Fb", "/profile?id=7&x", "/other"]);
}

#[tokio::test]
async fn clients_are_told_to_ask_elsewhere() {
    let server = Member::start("p").await;
    let routes = "rules = [{ action = \"deny\", path = \"/old/secret\" }]\n\
                  [[listener.route]]\npath = \"/old\"\nrewrite = { prefix = \"/new\" }\n\
                  redirect = { to = \"https://${hostname}${uri}\", status = 308 }\n\
                  [[listener.route]]\npath = \"/moved\"\nredirect = { to = \"/here\" }\n\
                  [[listener.route]]\npool = \"p\"\n";
    let proxy = Proxy::start("http", &format!("{routes}{}", pool(server.addr))).await;
    let said = ask(&proxy, "/old/a%20b?c", "").await;
    assert_eq!((status(&said), field(&said, "Location")), ("308", Some("https://site.example/new/a%20b?c")), "{said}");
    let said = ask(&proxy, "/moved", "").await;
    assert_eq!((status(&said), field(&said, "Location")), ("302", Some("/here")), "{said}");
    assert_eq!(status(&ask(&proxy, "/old/secret", "").await), "403");
    // the connection goes on
    let both = "HEAD /moved HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let said = String::from_utf8(proxy.answer(both.as_bytes()).await).unwrap();
    assert!(said.contains("302 Found") && said.ends_with("\r\n\r\np"), "{said}");
}

#[tokio::test]
async fn users_of_a_site() {
    let server = Member::start("p").await;
    let routes = "users = { ann = \"secret\" }\nrules = [{ action = \"deny\", users = \"bob\", path = \"/staff/x\" }]\n\
                  [[listener.route]]\npath = \"/staff\"\nusers = { bob = \"pw\" }\npool = \"p\"\n\
                  [[listener.route]]\npath = \"/open\"\nredirect = { to = \"/\" }\n\
                  [[listener.route]]\npool = \"p\"\n";
    let proxy = Proxy::start("http", &format!("{routes}{}", pool(server.addr))).await;
    let [ann, bob] = ["YW5uOnNlY3JldA==", "Ym9iOnB3"].map(|pair| format!("Authorization: Basic {pair}\r\n"));
    for (path, who, want) in [
        ("/", "", "401"),
        ("/", &ann, "200"),
        ("/", &bob, "401"),
        ("/staff/", &bob, "200"),
        ("/staff/", &ann, "401"),
        ("/staff/x", &bob, "403"),
        ("/open", "", "302"),
        ("/", &format!("{ann}{ann}"), "401"),
        ("/", "Proxy-Authorization: Basic YW5uOnNlY3JldA==\r\n", "401"),
    ] {
        let said = ask(&proxy, path, who).await;
        assert_eq!(status(&said), want, "{path} {who}");
        assert_eq!(said.contains("WWW-Authenticate: Basic realm="), want == "401", "{said}");
    }
    assert_eq!(server.seen().len(), 2);
    for head in server.seen() {
        assert!(!head.to_ascii_lowercase().contains("authorization"), "{head}");
    }
    let lines = proxy.lines().await;
    assert_eq!(["ann", "bob"].map(|name| lines.iter().filter(|l| l["user"] == name).count()), [2, 3], "{lines:?}");
}

#[tokio::test]
async fn passwords_for_servers_go_to_them() {
    let server = Member::start("p").await;
    let proxy = Proxy::start("http", &format!("[[listener.route]]\npool = \"p\"\n{}", pool(server.addr))).await;
    ask(&proxy, "/", "Authorization: Basic x\r\n").await;
    assert!(server.seen()[0].contains("Authorization: Basic x"), "{:?}", server.seen());
}

#[tokio::test]
async fn pages_for_errors() {
    let dir = tempfile::tempdir().unwrap();
    let page = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).display().to_string()
    };
    let [lost, all] = [page("lost.html", "<p>not here</p>"), page("all", "an error\n")];
    let gone = "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone";
    let sick = "HTTP/1.1 503 Sick\r\nContent-Length: 4\r\n\r\nsick";
    let login = "HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n";
    let server = origin(&[gone, sick, login, OK]).await;
    let pages = format!(
        "error_page = [{{ status = [404, 401], file = \"{lost}\", servers = true }}, \
         {{ status = \"400-599\", file = \"{all}\", type = \"text/x-all\" }}]\n"
    );
    let route = "[[listener.route]]\nhost = \"site.example\"\npool = \"p\"\n";
    let proxy = Proxy::start("http", &format!("{pages}{route}{}", pool(server.addr))).await;
    let said = ask(&proxy, "/", "").await;
    assert_eq!((status(&said), field(&said, "Content-Type")), ("404", Some("text/html; charset=utf-8")), "{said}");
    assert!(said.ends_with("\r\n\r\n<p>not here</p>") && said.contains("Content-Length: 15"), "{said}");
    assert!(ask(&proxy, "/", "").await.ends_with("\r\n\r\nsick"), "only those of ours are replaced");
    let said = ask(&proxy, "/", "").await;
    assert!(said.contains("WWW-Authenticate") && !said.contains("not here"), "{said}");
    // no route: an error of ours
    let said =
        String::from_utf8(proxy.answer(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await).unwrap();
    assert!(said.contains("404 Not Found") && said.ends_with("<p>not here</p>"), "{said}");
    let said = String::from_utf8(proxy.answer(b"bad\r\n\r\n").await).unwrap();
    assert!(said.contains("text/x-all") && said.ends_with("\r\n\r\nan error\n"), "{said}");
}

/// A page replaces the error of a server without an end to the client's connection.
#[tokio::test]
async fn a_connection_goes_on_after_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page");
    fs::write(&file, "page").unwrap();
    let sick = "HTTP/1.1 500 Sick\r\nContent-Length: 4\r\n\r\nsick";
    let server = origin(&[sick, OK]).await;
    let page = format!("error_page = [{{ status = 500, file = \"{}\", servers = true }}]\n", file.display());
    let proxy = Proxy::start("http", &format!("{page}[[listener.route]]\npool = \"p\"\n{}", pool(server.addr))).await;
    let both = "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let said = String::from_utf8(proxy.answer(both.as_bytes()).await).unwrap();
    assert!(said.contains("page") && !said.contains("sick") && said.ends_with("ok"), "{said}");
}

#[tokio::test]
async fn requests_have_a_longest_head_and_body() {
    let server = Member::start("p").await;
    let limits = "limits = { request_head = 1024, request_body = 10 }\n";
    let proxy = Proxy::start("http", &format!("{limits}[[listener.route]]\npool = \"p\"\n{}", pool(server.addr))).await;
    let long = format!("X: {}\r\n", "x".repeat(1000));
    assert_eq!(status(&ask(&proxy, "/", &long).await), "431");
    assert_eq!(status(&ask(&proxy, "/", &long[100..].replace("xx", "yy").replacen('y', "X: ", 1)).await), "200");
    let put = |fields: &str, body: &str| {
        format!("PUT / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{fields}\r\n\r\n{body}").into_bytes()
    };
    for (fields, body, want) in [
        ("Content-Length: 10", "0123456789", "200"),
        ("Content-Length: 11", "0123456789x", "413"),
        ("Content-Length: 1000000", "", "413"),
    ] {
        let said = String::from_utf8(proxy.answer(&put(fields, body)).await).unwrap();
        assert_eq!(status(&said), want, "{fields}");
    }
    let seen = server.seen().len();
    for body in ["b\r\n", "5\r\n01234\r\n6\r\n"] {
        let said = String::from_utf8(proxy.answer(&put("Transfer-Encoding: chunked", body)).await).unwrap();
        assert_eq!(status(&said), "413", "{body}");
    }
    assert_eq!(server.seen().len(), seen, "nothing of them was sent");
    // the server has some of the body already
    let mut client = proxy.connect().await;
    let held = "GET /held HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n";
    client.write_all(held.as_bytes()).await.unwrap();
    while server.seen().len() == seen {
        sleep(Duration::from_millis(1)).await;
    }
    client.write_all(b"6\r\n").await.unwrap();
    let mut said = String::new();
    timeout(LIMIT, client.read_to_string(&mut said)).await.unwrap().unwrap();
    assert_eq!(status(&said), "413", "{said}");
}

#[tokio::test]
async fn replies_have_a_longest_body() {
    let replies = [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12345",
        "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n123456",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n123456\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n123456",
    ];
    for (number, reply) in replies.into_iter().enumerate() {
        let server = origin(&[reply]).await;
        let limits = "limits = { reply_body = 5 }\n[[listener.route]]\npool = \"p\"\n";
        let proxy = Proxy::start("http", &format!("{limits}{}", pool(server.addr))).await;
        let said = ask(&proxy, "/", "").await;
        assert_eq!(status(&said), if number == 0 { "200" } else { "502" }, "{reply}");
    }
}

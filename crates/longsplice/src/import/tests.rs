use super::*;
use std::{collections::BTreeSet, fs};
use test_case::test_case;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/import");

/// Files of other proxies, with what they are to become beside them.
fn samples() -> Vec<PathBuf> {
    let all = fs::read_dir(DATA).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|e| e != "toml")).collect();
    all.sort();
    all
}

fn mistake(text: &str, from: Option<Format>) -> String {
    let Mistake { line, what } = translate(text.as_bytes(), from, "sample").expect_err(text);
    format!("{line}: {what}")
}

fn written(text: &str) -> String {
    translate(text.as_bytes(), None, "sample").unwrap_or_else(|e| panic!("{text}: {e:?}"))
}

/// With LONGSPLICE_WRITE_SAMPLES, what is written becomes what is expected.
#[test]
fn samples_become_what_is_expected() {
    let all = samples();
    assert!(all.len() >= 20, "{}", all.len());
    for path in all {
        let name = path.file_name().unwrap().to_str().unwrap();
        let expected = path.with_file_name(format!("{name}.toml"));
        let written = translate(&fs::read(&path).unwrap(), None, name).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        if std::env::var_os("LONGSPLICE_WRITE_SAMPLES").is_some() {
            fs::write(&expected, &written).unwrap();
        }
        assert_eq!(fs::read_to_string(&expected).unwrap(), written, "{name}");
    }
}

/// The program starts with what was written, and has nothing to warn of but of rules that a denial in front hides.
#[test]
fn what_is_written_is_a_configuration() {
    for path in samples() {
        let written = translate(&fs::read(&path).unwrap(), None, "sample").unwrap();
        let config = Config::from_toml(&written, Path::new("written.toml")).unwrap();
        let about = |warning: &&String| !warning.contains("is never reached");
        assert_eq!(config.warnings.iter().find(about), None, "{}", path.display());
        assert!(!config.listeners.is_empty());
    }
}

/// No line is passed over in silence: each that nothing was made of stands in a comment. Words that cannot be known are put
/// into every place of the samples.
#[test]
fn what_is_not_known_is_told_or_refused() {
    for (sample, strange) in [
        ("haproxy-http.cfg", "    strange-thing on\n"),
        ("danted.conf", "strange.thing: on\n"),
        ("3proxy.cfg", "strangething on\n"),
        ("nginx-sni.conf", "strange_thing on;\n"),
    ] {
        let text = fs::read_to_string(Path::new(DATA).join(sample)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for at in 0..=lines.len() {
            let [before, after] =
                [&lines[..at], &lines[at..]].map(|part| part.iter().map(|l| format!("{l}\n")).collect::<String>());
            let format = recognise(&text).unwrap();
            match translate(format!("{before}{strange}{after}").as_bytes(), Some(format), "sample") {
                Ok(written) => {
                    // in a rule of Dante, the comment is that of the rule
                    let strange = strange.trim().trim_end_matches(';');
                    let is_told = written.lines().any(|line| line.starts_with("# line ") && line.contains(strange));
                    assert!(is_told, "{sample}: line {}\n{written}", at + 1);
                }
                Err(Mistake { line, .. }) => assert!(line > 0, "{sample}: line {}", at + 1),
            }
        }
    }
}

#[test]
fn formats_are_recognised() {
    for path in samples() {
        let name = path.file_name().unwrap().to_str().unwrap();
        let want = match name {
            name if name.starts_with("haproxy") => Format::Haproxy,
            name if name.starts_with("dante") => Format::Dante,
            name if name.starts_with("3proxy") => Format::ThreeProxy,
            _ => Format::Nginx,
        };
        assert_eq!(recognise(&fs::read_to_string(&path).unwrap()).unwrap(), want, "{name}");
    }
    for text in ["", "hello\n", "[[listener]]\nprotocol = \"plug\"\n"] {
        assert!(mistake(text, None).contains("give --from"), "{text}");
    }
}

#[test_case("listen a\n bind :80\n server s 10.0.0.1\n sever t 10.0.0.2:80\n", "sever t 10.0.0.2:80: left out"; "a typo")]
#[test_case("frontend a\n bind :80\n default_backend b\nbackend b\n server s 10.0.0.1:80\n \
    balance uri\n", "changed: servers are chosen in turn"; "another balance")]
#[test_case("listen a\n bind :::80\n bind 0.0.0.0:80\n server s 10.0.0.1:80\n", "listen = \"[::]:80\""; "both families")]
fn haproxy_says(text: &str, want: &str) {
    let written = written(text);
    assert!(written.contains(want), "{written}");
}

/// What decides who gets in is never left out without a denial in its place.
#[test_case("tcp-request connection reject if { src_get_gpc0 gt 0 }"; "a counter")]
#[test_case("tcp-request connection reject if !{ src -f /etc/office.lst }"; "a file")]
#[test_case("tcp-request content reject unless { req.ssl_sni -m reg ^a }"; "an expression")]
#[test_case("http-request deny if { req.hdr(x-key) -m len 3 }\n mode http"; "a field")]
#[test_case("http-request auth unless { http_auth(nobody) }\n mode http"; "users that are not known")]
#[test_case("http-request tarpit unless { cook(session) -m found }\n mode http"; "a cookie")]
fn haproxy_denies_what_it_cannot_judge(rule: &str) {
    let written = written(&format!("listen a\n bind 127.0.0.1:80\n server s 10.0.0.1:80\n {rule}\n"));
    assert!(written.contains("rules = [\n  { action = \"deny\" },\n]"), "{written}");
}

#[test_case("listen a\n bind :80\n server s 10.0.0.1:80 wieght 3\n", "3: a server has no wieght"; "a parameter")]
#[test_case("listen a\n bind :80 acept-proxy\n server s 10.0.0.1:80\n", "2: bind has no acept-proxy"; "a parameter of bind")]
#[test_case("listen a\n bind :80\n timeout conect 5q\n", "3: \"5q\" is no time"; "a time")]
#[test_case("frontend a\n bind :80\n default_backend b\n", "3: there is no backend b"; "a backend")]
#[test_case("frontend a\n bind :80\n use_backend b if c\nbackend b\n server s \
    10.0.0.1:80\n", "3: there is no acl c"; "an acl")]
#[test_case("listen a\n bind :99999\n server s 10.0.0.1:80\n", "2: \":99999\": write ADDRESS:PORT"; "a port")]
#[test_case("listen a\n bind :80\n bind 127.0.0.1:80\n server s 10.0.0.1:80\n", "3: 127.0.0.1:80 is listened on"; "twice")]
#[test_case("mode tcp\nlisten a\n", "1: `mode` belongs to no section"; "no section")]
#[test_case("listen a\n bind :80\n server s \"$HOST:80\"\n", "3: variables of the environment"; "a variable")]
#[test_case("listen a\n bind \":80\n", "2: the quotes are not closed"; "quotes")]
#[test_case(".if defined(X)\nlisten a\n", "1: .if: conditions are not read"; "a condition")]
#[test_case("listen a\n mode health\n bind :80\n", "2: mode health"; "a mode")]
#[test_case("listen a\n bind :80\n server s 10.0.0.1:80 check port 0\n", "3: port: write a number"; "a port of checks")]
#[test_case("listen a\n bind :1000-9000\n server s 10.0.0.1:80\n", "2: more than 1000 addresses"; "many ports")]
fn haproxy_mistakes(text: &str, want: &str) {
    let found = mistake(text, Some(Format::Haproxy));
    assert!(found.starts_with(want), "{found}");
}

#[test_case("internal: 127.0.0.1 port = 0\n", "1: write `internal: ADDRESS port = PORT`"; "a port")]
#[test_case("internal: 127.0.0.1 port = 1\nclient pas { from: 0/0 to: 0/0 }\n", "2: a block `client pas`"; "an action")]
#[test_case("internal: 127.0.0.1 port = 1\nclient pass { from: 0/0\n", "2: this block is not closed"; "a brace")]
#[test_case("internal: 127.0.0.1 port = 1\nclient pass { from: 0/0 to: 0/0 socks pass { \
    }\n", "2: a block in the block of line 2"; "a block in a block")]
#[test_case("internal: 127.0.0.1 port = 1\nsocks pass { from: 10.0.0.0/99 to: 0/0 }\n", "2: 10.0.0.0/99: this"; "a network")]
#[test_case("internal: 127.0.0.1 port = 1\nsocks pass { to: 0/0 }\n", "2: this rule has no `from`"; "half a rule")]
#[test_case("internal: 127.0.0.1 port = 1\ntimeout.io: soon\n", "2: \"soon\" is no number of seconds"; "a time")]
#[test_case("internal: eth0 port = 1080\nsocksmethod: none\n", "1: as a file of Dante, it has nothing to listen on"; "a device")]
fn dante_mistakes(text: &str, want: &str) {
    let found = mistake(text, Some(Format::Dante));
    assert!(found.starts_with(want), "{found}");
}

#[test_case("auth none\nallow * 10.0.0.0/8 * 99999\nproxy\n", "2: 99999 is no port"; "a port")]
#[test_case("proxy -pmany\n", "1: -pmany: what does it mean?"; "an option")]
#[test_case("tcppm 80\n", "1: write tcppm PORT HOST PORT"; "half a map")]
#[test_case("users \"a:CL:b\nproxy\n", "1: the quotes are not closed"; "quotes")]
#[test_case("maxconn lots\nproxy\n", "1: \"lots\" is no number"; "a number")]
#[test_case("auth\nproxy\n", "1: auth how?"; "no method")]
#[test_case("proxy -p80\nproxy -p80\n", "2: 0.0.0.0:80 is listened on by line 1"; "twice")]
fn three_proxy_mistakes(text: &str, want: &str) {
    let found = mistake(text, Some(Format::ThreeProxy));
    assert!(found.starts_with(want), "{found}");
}

#[test_case("stream {\n server {\n  listen 1\n  proxy_pass a:1;\n }\n}", "2: as a file of nginx"; "a semicolon in between")]
#[test_case("stream {\n server { listen 1; proxy_pass a:1 }\n}", "2: no `;` after `proxy_pass a:1`"; "a semicolon")]
#[test_case("stream {\n server { listen 1; proxy_pass a:1; }\n", "1: `stream` { is not closed"; "a brace")]
#[test_case("stream { }\n}\n", "2: a `}` that closes nothing"; "too many braces")]
#[test_case("stream { server { listen 1; proxy_pass \"a:1; } }", "1: the quotes are not closed"; "quotes")]
#[test_case("stream { server { proxy_pass a:1; } }", "1: this server does not listen"; "no address")]
#[test_case("stream { server { listen 0; proxy_pass a:1; } }", "1: 0 is no port"; "a port")]
#[test_case("stream { server { listen 1; proxy_pass a:1; deny 10.0.0; } }", "1: 10.0.0 is no address"; "a network")]
#[test_case("stream { server { listen 1; proxy_pass a:1; proxy_timeout soon; } }", "1: \"soon\" is no time"; "a time")]
#[test_case("http { server { listen 80; } }", "1: there is no block `stream`"; "only http")]
#[test_case("stream { upstream u { server a:1; server a:1; } server { listen 1; proxy_pass \
    u; } }", "1: a:1 is in upstream u twice"; "a server twice")]
#[test_case("stream { upstream u { server a:1 wait=3; } server { listen 1; proxy_pass u; } \
    }", "1: a server has no wait"; "a parameter")]
fn nginx_mistakes(text: &str, want: &str) {
    let found = mistake(text, Some(Format::Nginx));
    assert!(found.starts_with(want), "{found}");
}

#[test]
fn what_is_no_text_is_refused() {
    let of = |bytes: &[u8]| translate(bytes, Some(Format::Haproxy), "sample").unwrap_err();
    let utf16: Vec<u8> = "listen a\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(of(&utf16).what.contains("UTF-16"));
    let zero = of(b"listen a\n bind :80\0\n");
    assert_eq!((zero.line, zero.what.contains("a zero byte")), (2, true));
    let latin = of(b"listen a\n# M\xfcller\n");
    assert_eq!((latin.line, latin.what.contains("not UTF-8")), (2, true));
    let endless = of(&[b"listen a\n".as_slice(), &vec![b'x'; LINE_MAX + 1]].concat());
    assert_eq!((endless.line, endless.what.contains("a line of more than")), (2, true));
    assert!(of(&vec![b'\n'; FILE_MAX as usize + 1]).what.contains("more than 8 MB"));
    assert!(of(&vec![b'\n'; LINES_MAX + 1]).what.contains("lines"));
    let deep = translate("a { ".repeat(1000).as_bytes(), Some(Format::Nginx), "sample").unwrap_err();
    assert!(deep.what.contains("blocks in each other"), "{deep:?}");
    assert!(written("\u{feff}listen a\r\n bind :80\r\n server s 10.0.0.1:80\r\n").contains("10.0.0.1:80"));
}

/// What a file says stays in its strings and comments, whatever it is.
#[test]
fn no_text_gets_out_of_its_place() {
    let name = "x\\\"]\\\nlisten = \\\"evil";
    let nginx = format!(
        "stream {{ upstream \"{name}\" {{ server a:1; server b:1; }} server {{ listen \
            1; proxy_pass \"{name}\"; strange \"\u{1b}[2J\u{85}\"; }} }}"
    );
    let written = translate(nginx.as_bytes(), Some(Format::Nginx), "na\nme").unwrap();
    assert!(!written.contains('\u{1b}') && !written.contains("\nlisten = \"evil"), "{written}");
    assert!(written.starts_with("# Written by `longsplice import` from na me (nginx).\n"), "{written}");
    let config = Config::from_toml(&written, Path::new("l.toml")).unwrap();
    assert_eq!((config.listeners.len(), config.pools.len()), (1, 1));
    let users = "users \"a\"\"b]:CL:p\"\"w'\\\"\nauth strong\nsocks\n";
    let config =
        Config::from_toml(&translate(users.as_bytes(), Some(Format::ThreeProxy), "f").unwrap(), Path::new("l.toml"));
    assert_eq!(config.unwrap().listeners.len(), 1);
}

/// Files that would become endless, or take for ever, are refused or become less.
#[test]
fn what_grows_without_end_is_bounded() {
    let names: String = (0..2000).map(|n| format!("  n{n}.example.org 10.0.0.1:{};\n", n + 1)).collect();
    let nginx = format!(
        "stream {{ map $ssl_preread_server_name $n {{\n{names} }}\n server {{ listen \
            1000-1999; ssl_preread on; proxy_pass $n; }} }}"
    );
    let found = mistake(&nginx, Some(Format::Nginx));
    assert!(found.contains("routes, rules and users"), "{found}");
    let acls: String = (0..3000).map(|n| format!(" acl a path_beg /{n}\n acl b hdr(host) h{n}.org\n")).collect();
    let haproxy =
        format!("listen l\n mode http\n bind :80\n{acls} http-request deny if a b a b a b\n server s 10.0.0.1:80\n");
    let text = written(&haproxy);
    assert!(text.contains("rules = [\n  { action = \"deny\" },\n]"), "{}", &text[..2000]);
    let nets: String = (0..4000).map(|n| format!(" 10.{}.{}.0/24", n / 256, n % 256)).collect();
    let rules = " tcp-request connection reject if !{ src".to_owned() + &nets + " }\n";
    let text = written(&format!("listen l\n bind :80\n{} server s 10.0.0.1:80\n", rules.repeat(3)));
    assert!(text.contains("rules = [\n  { action = \"deny\" },\n]"), "{}", &text[..2000]);
}

/// Samples with bytes changed, lines doubled and cut: each becomes a configuration or a mistake, and nothing panics.
#[test]
fn damaged_samples_are_translated_or_refused() {
    use rand::{RngExt, SeedableRng, rngs::SmallRng};
    let mut random = SmallRng::seed_from_u64(35);
    let all: Vec<Vec<u8>> = samples().iter().map(|path| fs::read(path).unwrap()).collect();
    let mut kinds = BTreeSet::new();
    for round in 0..2000 {
        let mut text = all[round % all.len()].clone();
        for _ in 0..random.random_range(1..6) {
            let at = random.random_range(0..text.len());
            let end = (at + random.random_range(1..40)).min(text.len());
            match random.random_range(0..5) {
                0 => text[at] = *b"{}:;=\"'\\#*/ \n!-0\xff".get(random.random_range(0..17)).unwrap(),
                1 => drop(text.drain(at..end)),
                2 => {
                    let part = text[at..end].to_vec();
                    text.splice(at..at, part);
                }
                3 => {
                    let other = &all[random.random_range(0..all.len())];
                    let from = random.random_range(0..other.len());
                    let part = other[from..(from + 60).min(other.len())].to_vec();
                    text.splice(at..at, part);
                }
                _ => text.truncate(text.len().max(2) - 1),
            }
        }
        let format = [Format::Haproxy, Format::Dante, Format::ThreeProxy, Format::Nginx][random.random_range(0..4)];
        let format = Some(format).filter(|_| random.random_range(0..4) == 0);
        match translate(&text, format, "damaged") {
            Ok(_) => drop(kinds.insert("written")),
            // what is refused at last only is a mistake that has no line
            Err(mistake) => {
                let late = mistake.what.contains("cannot be a configuration");
                kinds.insert(if late { "refused late" } else { "refused" });
            }
        }
    }
    assert!(kinds.contains("written") && kinds.contains("refused"), "{kinds:?}");
}

/// A server for what is no TLS does not get what is: clients that do not speak TLS are refused.
#[test]
fn what_is_no_tls_is_not_mixed_with_what_is() {
    let text = "frontend a\n bind :443\n tcp-request inspect-delay 2s\n use_backend ssh if !{ req.ssl_hello_type 1 }\n \
                default_backend web\nbackend ssh\n server s 10.0.0.1:22\nbackend web\n server w 10.0.0.2:443\n";
    let written = written(text);
    assert!(written.contains("protocol = \"tls\"") && !written.contains("10.0.0.1:22"), "{written}");
    assert!(written.contains("# line 4: use_backend ssh"), "{written}");
}

/// Rules about who connects do not become rules about what a header says.
#[test]
fn rules_about_proxies_in_front_are_not_about_clients() {
    let text = "listen a\n bind :80 accept-proxy\n tcp-request connection reject unless { src \
        10.0.0.1 }\n server s 10.0.0.2:80\n";
    let written = written(text);
    assert!(written.contains("rules = [\n  { action = \"deny\" },\n") && written.contains("in `from`"), "{written}");
}

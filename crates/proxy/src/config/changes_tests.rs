//! Changes of fields: what is refused because it cannot be meant.

use super::tests::{HTTP, mistake, read};
use longsplice_http::accept::Codings;

/// Checks that the message for `text` in the table of an HTTP listener contains `part`, and that the mistake is at `place`.
#[track_caller]
fn refused(text: &str, place: &str, part: &str) {
    let (_, at, message) = mistake(&format!("{HTTP}{text}"));
    let place = text.find(place).map(|place| place + 1);
    assert!(Some(at) == place && message.contains(part), "{at}: {message}");
}

#[test]
fn changes_of_fields_are_whole() {
    let of = |list: &str, change: &str| format!("fields.{list} = [{{ {change} }}]");
    for (change, part) in [
        ("set = \"A\"", "add value"),
        ("status = 200", "write one of set"),
        ("set = \"A\", add = \"A\", value = \"1\"", "write one of set"),
        ("replace = \"A\", match = 'x'", "with match and with"),
        ("remove = \"A\", value = \"x\"", "write one of set"),
        ("set = \"Host\", value = \"a.example\"", "each request has one Host"),
    ] {
        refused(&of("reply", change), "{", part);
    }
    for change in [
        "remove = \"Host\"",
        "add = \"Host\", value = \"a\"",
        "set = \"Host\", value = \"a b\"",
        "set = \"host\", value = \"${client}\"",
        "remove = \"Host*\"",
    ] {
        refused(&of("request", change), "{", "each request has one Host");
    }
    refused(&of("request", "set = \"A\", value = \"b\", status = 200"), "200", "requests have no status");
    refused(&of("reply", "set = \"Content-Length\", value = \"0\""), "\"Con", "where a message ends");
    refused(&of("reply", "set = \"A\", value = \"a\\nB: c\""), "\"a\\n", "without line breaks");
    refused(&of("reply", "replace = \"A\", match = '(', with = \"\""), "'(", "bad regular expression: unclosed group");
    refused(&of("reply", "replace = \"A\", match = 'a', with = \"\\r\""), "\"\\r", "without line breaks");
    assert!(read(&format!("{HTTP}{}", of("request", "set = \"Host\", value = \"${host}\""))).is_ok());
}

#[test]
fn only_http_has_fields() {
    let plug = "[[listener]]\nprotocol = \"plug\"\nlisten = \"127.0.0.1:1\"\ntarget = \"10.0.0.1:1\"\nfields = {}\n";
    assert!(mistake(plug).2.contains("only HTTP has this"));
    let tls =
        "[[listener]]\nprotocol = \"tls\"\nlisten = \"127.0.0.1:1\"\nroute = [{ target = \"a:1\", fields = {} }]\n";
    assert!(mistake(tls).2.contains("`fields`"));
}

#[test]
fn changes_of_bodies_are_whole() {
    let of = |change: &str| format!("filter.change = [{{ type = \"text/html\", {change} }}]");
    for (change, place, part) in [
        ("replace = 'a'", "{", "write replace, with `with`, or remove_element"),
        ("with = \"\"", "{", "write replace"),
        ("remove_element = \"a\", with = \"\"", "{", "write replace"),
        ("replace = 'a*', with = \"\"", "'a*'", "of 1 to 1024 bytes"),
        ("replace = '^', with = \"\"", "'^'", "of 1 to 1024 bytes"),
        ("replace = '(', with = \"\"", "'('", "unclosed group"),
        ("remove_element = \"<a>\"", "\"<a>", "bad name of an element"),
        ("remove_element = \"a\", until = 0", "0 }", "write a number from 1"),
    ] {
        refused(&of(change), place, part);
    }
    refused("filter.change = [{ remove_element = \"a\" }]", "{", "add type = ... here");
    refused(&of(&format!("replace = 'a', with = \"{}\"", "x".repeat(1025))), "\"x", "at most 1024 bytes");
}

/// What cannot be read cannot be changed.
#[test]
fn changes_ask_for_what_they_can_read() {
    let codings = |more: &str| read(&format!("{HTTP}{more}")).unwrap().listeners[0].http().unwrap().codings;
    let change = "filter.change = [{ type = \"text/*\", remove_element = \"a\" }]\n";
    let encode = format!("{change}filter.encode = true\n");
    assert_eq!(["", change, &encode].map(codings), [Codings::Any, Codings::None, Codings::Known]);
    let rules = ["type = \"text/*\"", "body_begins = 'x'"]
        .map(|rule| format!("filter.rules = [{{ action = \"deny\", {rule} }}]\n"));
    assert_eq!([codings(&rules[0]), codings(&rules[1])], [Codings::Any, Codings::Known]);
    let config = read(&format!("{HTTP}{change}filter.accept_encoding = \"pass\"\n")).unwrap();
    assert!(config.warnings[0].contains("write \"known\""), "{:?}", config.warnings);
}

#[test]
fn filters_are_those_of_their_protocol() {
    let of = |protocol: &str, more: &str| {
        format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"127.0.0.1:1\"\n{more}\n")
    };
    let plug = "target = \"10.0.0.1:1\"\n";
    let must = "filter.client.must = 'a'";
    for (text, part) in [
        (of("http", must), "without client and server"),
        (of("plug", &format!("{plug}filter.rules = []")), "write client or server"),
        (of("plug", &format!("{plug}filter = {{}}")), "nothing is filtered"),
        (of("ftp", must), "this listener has no filter"),
        (of("transparent", must), "this listener has no filter"),
        (of("plug", &format!("{plug}handshake = \"end-to-end\"\n{must}")), "this listener has no filter"),
        (of("plug", &format!("{plug}filter.client.first = 0")), "write a number from 1 to 32768"),
    ] {
        let message = mistake(&text).2;
        assert!(message.contains(part), "{text}: {message}");
    }
    for text in [of("socks5", must), of("tls", must), of("plug", &format!("{plug}{must}"))] {
        assert!(!read(&text).unwrap().listeners[0].first_bytes.is_empty());
    }
}

//! Changes of fields: what is refused because it cannot be meant.

use super::tests::{HTTP, mistake, read};

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

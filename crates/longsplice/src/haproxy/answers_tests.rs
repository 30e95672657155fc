//! Lines about servers.

use super::*;

fn member(address: &str, state: &'static str) -> MemberValues {
    MemberValues {
        address: address.into(),
        state,
        backup: false,
        weight: 3,
        configured_weight: 2,
        connections: 7,
        max_connections: None,
        chosen: 0,
        failed: 0,
    }
}

#[test]
fn lines_have_as_many_fields_as_their_heads() {
    let count = |text: &str| text.split_whitespace().count();
    let states = STATE_HEAD.strip_prefix("1\n# ").unwrap();
    for address in ["192.0.2.1:80", "[2001:db8::1]:80", "db.example.org:80"] {
        let line = state_line((4, "db"), (1, &member(address, "up")));
        assert_eq!(count(&line), count(states), "{line}");
        let line = conn_line((4, "db"), (1, &member(address, "up")));
        assert_eq!(count(&line), count(CONN_HEAD.strip_prefix("# ").unwrap()), "{line}");
    }
}

#[test]
fn servers_have_states_of_haproxy() {
    let line = |member: &MemberValues| state_line((4, "db"), (1, member));
    let up = line(&member("192.0.2.1:80", "up"));
    assert_eq!(up, "4 db 1 192.0.2.1:80 192.0.2.1 2 0 3 2 - - - - - - 0 0 - 80 - 0 0 - - 0\n");
    let named = line(&member("db.example.org:80", "drained"));
    assert_eq!(named, "4 db 1 db.example.org:80 - 2 8 3 2 - - - - - - 0 0 db.example.org 80 - 0 0 - - 0\n");
    assert!(line(&member("[2001:db8::1]:80", "maintenance")).starts_with("4 db 1 [2001:db8::1]:80 2001:db8::1 0 1 "));
    assert!(line(&member("192.0.2.1:80", "out")).starts_with("4 db 1 192.0.2.1:80 192.0.2.1 0 0 "));
    let weightless = MemberValues { weight: 0, ..member("192.0.2.1:80", "drained") };
    assert!(line(&weightless).starts_with("4 db 1 192.0.2.1:80 192.0.2.1 2 0 0 2 "));
}

#[test]
fn ages_are_written_as_haproxy_does() {
    let ages = [0, 59, 60, 3599, 3600, 86399, 86400, 90000].map(age);
    assert_eq!(ages, ["0s", "59s", "1m0s", "59m59s", "1h0m", "23h59m", "1d0h", "1d1h"]);
}

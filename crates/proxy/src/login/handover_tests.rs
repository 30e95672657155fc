use super::super::telnet::{IS, SEND};
use super::*;

/// A client that has TERMINAL-TYPE and NAWS on.
fn options() -> Options {
    Options {
        client: [Agreed::Yes, Agreed::Yes, Agreed::No],
        window: Some((80, 24)),
        terminal_type: Some("XTERM".into()),
        ..Options::default()
    }
}

struct Hosts(Handover, String);

impl Hosts {
    fn begin(options: Options, tells: bool, user: Option<&str>) -> Hosts {
        let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
        let tell = (tells, user.map(String::from));
        let handover = Handover::new((Parser::default(), options, None), tell, &mut to_client, &mut to_server);
        Hosts(handover, shown(&to_client, &to_server))
    }

    fn client(&mut self, input: &[u8]) -> String {
        let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
        self.0.from_client(input, &mut to_server, &mut to_client);
        shown(&to_client, &to_server)
    }

    fn server(&mut self, input: &[u8]) -> String {
        let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
        self.0.from_server(input, &mut to_client, &mut to_server);
        shown(&to_client, &to_server)
    }
}

fn shown(to_client: &[u8], to_server: &[u8]) -> String {
    format!("{}|{}", to_client.escape_ascii(), to_server.escape_ascii())
}

#[test]
fn what_was_agreed_is_undone() {
    let mut hosts = Hosts::begin(options(), false, Some("ann"));
    assert_eq!(hosts.1, r"\xff\xfe\x18\xff\xfe\x1f|");
    assert!(!hosts.0.is_settled());
    // a late size is the gateway's; what is typed ahead passes
    assert_eq!(hosts.client(b"ls\xff\xfa\x1f\0\x50\0\x20\xff\xf0\r\n\xff\xff"), r"|ls\r\n\xff\xff");
    assert_eq!(hosts.client(b"\xff\xfc\x18"), "|");
    assert!(!hosts.0.is_settled());
    assert_eq!(hosts.client(b"\xff\xfc\x1f"), "|");
    assert!(hosts.0.is_settled());
    // From here on they negotiate with each other.
    assert_eq!(hosts.server(b"\xff\xfd\x1f\xff\xfb\x01"), r"\xff\xfd\x1f\xff\xfb\x01|");
    assert_eq!(hosts.client(b"\xff\xfb\x1f\xff\xfa\x1f\0\x50\0\x20\xff\xf0\xff\xfd\x01"), {
        r"|\xff\xfb\x1f\xff\xfa\x1f\x00P\x00 \xff\xf0\xff\xfd\x01"
    });
}

#[test]
fn a_server_is_told_the_terminal() {
    let mut hosts = Hosts::begin(options(), true, None);
    assert_eq!(hosts.1, r"|\xff\xfb\x18\xff\xfb\x1f");
    // its questions for other things pass
    assert_eq!(hosts.server(b"\xff\xfd\x18\xff\xfd\x20\xff\xfd\x1f"), {
        r"\xff\xfd |\xff\xfa\x1f\x00P\x00\x18\xff\xf0"
    });
    assert!(!hosts.0.is_settled(), "it will ask");
    assert_eq!(hosts.client(b"\xff\xfc\x20\xff\xfa\x1f\0\x64\0\x18\xff\xf0"), {
        r"|\xff\xfc \xff\xfa\x1f\x00d\x00\x18\xff\xf0"
    });
    let ask = [255, 250, TERMINAL_TYPE, SEND, 255, 240];
    assert_eq!(hosts.server(&ask), r"|\xff\xfa\x18\x00XTERM\xff\xf0");
    assert!(hosts.0.is_settled());
    assert_eq!(IS, 0);
}

#[test]
fn what_the_server_does_not_want_is_undone() {
    let mut hosts = Hosts::begin(options(), true, None);
    assert_eq!(hosts.server(b"\xff\xfe\x18\xff\xfe\x1f"), r"\xff\xfe\x18\xff\xfe\x1f|");
    assert!(!hosts.0.is_settled());
    assert_eq!(hosts.client(b"\xff\xfc\x1f\xff\xfc\x18"), "|");
    assert!(hosts.0.is_settled());
}

#[test]
fn a_client_that_changes_its_mind() {
    let mut hosts = Hosts::begin(options(), true, None);
    hosts.server(b"\xff\xfd\x18\xff\xfd\x1f\xff\xfa\x18\x01\xff\xf0");
    assert!(hosts.0.is_settled());
    assert_eq!(hosts.client(b"\xff\xfc\x1f"), r"\xff\xfe\x1f|\xff\xfc\x1f");
    assert!(!hosts.0.is_settled());
    assert_eq!(hosts.server(b"\xff\xfe\x1f"), "|");
    assert!(hosts.0.is_settled());
}

/// A client without an environment: afterwards, the server knows of none either.
#[test]
fn a_server_is_told_the_user() {
    let mut hosts = Hosts::begin(Options::default(), true, Some("ann"));
    assert_eq!(hosts.1, r"|\xff\xfb\'");
    assert_eq!(hosts.server(b"\xff\xfd\x27"), "|");
    assert_eq!(hosts.server(b"\xff\xfa\x27\x01\xff\xf0"), r"|\xff\xfa\'\x00\x00USER\x01ann\xff\xf0\xff\xfc\'");
    assert!(!hosts.0.is_settled());
    assert_eq!(hosts.server(b"\xff\xfe\x27"), "|");
    assert!(hosts.0.is_settled());
    let mut has_one = Options::default();
    has_one.client[2] = Agreed::Yes;
    let mut hosts = Hosts::begin(has_one, true, Some("ann"));
    hosts.server(b"\xff\xfd\x27");
    assert_eq!(hosts.server(b"\xff\xfa\x27\x01\xff\xf0"), r"|\xff\xfa\'\x00\x00USER\x01ann\xff\xf0");
    assert!(hosts.0.is_settled());
}

#[test]
fn a_server_that_talks_does_not_negotiate_any_more() {
    let mut hosts = Hosts::begin(options(), true, None);
    assert_eq!(hosts.server(b"login: "), "login: |");
    assert!(hosts.0.is_settled());
    // half a command waits for nobody
    assert_eq!(hosts.server(b"\xff\xfb"), "|");
    assert_eq!(hosts.client(b"\xff"), "|");
    assert_eq!(hosts.0.pending(), (&b"\xff"[..], &b"\xff\xfb"[..]));
}

/// ECHO was on for the password: the client's answer comes late, and what it wants afterwards is for the server.
#[test]
fn late_answers_about_echo() {
    let asked = Options { echo: Agreed::WantYes { then_no: true }, ..Options::default() };
    let mut hosts = Hosts::begin(asked, false, None);
    assert_eq!(hosts.client(b"\xff\xfd\x01"), r"\xff\xfc\x01|");
    assert!(!hosts.0.is_settled());
    assert_eq!(hosts.client(b"\xff\xfe\x01\xff\xfd\x01"), r"|\xff\xfd\x01");
    assert!(hosts.0.is_settled());
}

#[test]
fn a_message_that_never_ends_is_not_passed_on() {
    let mut hosts = Hosts::begin(options(), false, None);
    assert_eq!(hosts.client(b"\xff\xfa\x1f\0\0"), "|");
    for _ in 0..1000 {
        assert_eq!(hosts.client(&[0; 100]), "|");
    }
    assert!(hosts.0.is_within() && !hosts.0.is_settled());
    assert_eq!(hosts.0.pending().0, b"");
}

//! Commands of HAProxy's runtime socket. What is wrong is said as Debian's HAProxy 2.6 says it.

use super::*;

fn read(line: &str) -> Result<Command, Refused> {
    let commands = split(line.as_bytes()).unwrap();
    assert_eq!(commands.len(), 1, "{line}");
    parse(&commands[0])
}

fn error(line: &str) -> String {
    match read(line).unwrap_err() {
        Refused::Because(why) => why.into_owned(),
        Refused::Unknown => "unknown".into(),
    }
}

fn db(server: &str) -> Server {
    Server { backend: Name::Called("db".into()), server: Name::Called(server.into()) }
}

#[test]
fn a_line_is_commands_and_words() {
    let words = |line: &str| split(line.as_bytes()).unwrap();
    assert_eq!(words("show  info;show\tstat 1 2 -1\r"), [vec!["show", "info"], vec!["show", "stat", "1", "2", "-1"]]);
    assert_eq!(words(" ;; show info ;"), [["show", "info"]]);
    assert!(words("").is_empty() && words(" ; \t;").is_empty());
    assert_eq!(words(r"get weight a\;b\ c\\/d"), [["get", "weight", r"a;b c\/d"]]);
    assert_eq!(split(b"get \xff weight\\").unwrap(), [["get", "\u{fffd}", "weight"]]);
}

#[test]
fn a_line_has_limits() {
    assert_eq!(split(&"help;".repeat(COMMANDS_MAX).into_bytes()).unwrap().len(), COMMANDS_MAX);
    assert_eq!(split(&"help;".repeat(COMMANDS_MAX + 1).into_bytes()), Err(TooMuch));
    assert_eq!(split(&vec![b';'; LINE_MAX - 1]), Ok(Vec::new()));
    assert_eq!(split(&vec![b'x'; LINE_MAX]), Err(TooMuch));
    assert_eq!(parse(&vec!["help".into(); WORDS_MAX + 1]), Err(Refused::Unknown));
}

#[test]
fn servers_are_named_and_numbered() {
    let maint = |server| Ok(Command::SetState(server, State::Maint));
    assert_eq!(read("set server db/10.0.0.1:5432 state maint"), maint(db("10.0.0.1:5432")));
    assert_eq!(read("disable server db/[2001:db8::1]:5432"), maint(db("[2001:db8::1]:5432")));
    assert_eq!(read("disable server #4/#1"), maint(Server { backend: Name::Numbered(4), server: Name::Numbered(1) }));
    assert_eq!(
        read("enable server a/b/c:1"),
        Ok(Command::SetState(
            Server { backend: Name::Called("a/b".into()), server: Name::Called("c:1".into()) },
            State::Ready
        ))
    );
    for line in ["set server", "set server db state ready", "get weight db", "enable server /a", "get weight db/"] {
        assert_eq!(error(line), "Require 'backend/server'.", "{line}");
    }
    let expects = "'set server <srv> state' expects 'ready', 'drain' and 'maint'.";
    assert_eq!(error("set server db/a state foo"), expects);
    assert_eq!(error("set server db/a state"), expects);
    assert!(error("set server db/a").starts_with("usage: set server"));
}

#[test]
fn weights_are_absolute_or_parts() {
    for (word, want) in [
        ("0", Weight::Of(0)),
        ("256", Weight::Of(256)),
        ("100%", Weight::Percent(100)),
        ("99999999999%", Weight::Percent(25600)),
    ] {
        assert_eq!(read(&format!("set weight db/a {word}")), Ok(Command::SetWeight(db("a"), want)));
        assert_eq!(read(&format!("set server db/a weight {word}")), Ok(Command::SetWeight(db("a"), want)));
    }
    for (word, want) in [
        ("", "Require <weight> or <weight%>."),
        ("257", "Absolute weight can only be between 0 and 256 inclusive."),
        ("99999999999", "Absolute weight can only be between 0 and 256 inclusive."),
        ("-1", "Absolute weight can only be between 0 and 256 inclusive."),
        ("-1%", "Relative weight must be positive."),
        ("x", "Empty weight string empty or preceded by garbage"),
        ("7x", "Trailing garbage in weight string"),
    ] {
        assert_eq!(error(&format!("set weight db/a {word}")), want, "{word}");
    }
    let parts = [(100, 3), (50, 1), (10, 0), (25600, 256)].map(|(part, of_3)| Weight::Percent(part).of(3) == of_3);
    assert_eq!(parts, [true; 4]);
}

#[test]
fn figures_are_chosen() {
    let stat = |line: &str| match read(line).unwrap() {
        Command::ShowStat(stat) => stat,
        other => panic!("{other:?}"),
    };
    assert_eq!(stat("show stat"), Stat::default());
    assert_eq!(stat("show stat -1 4 -1"), Stat { kinds: 4, ..Stat::default() });
    let one = Stat { of: Some(Name::Numbered(4)), kinds: 6, sid: Some(1), ..Stat::default() };
    assert_eq!(stat("show stat 4 6 1"), one);
    assert_eq!(stat("show stat db 6 1"), Stat { of: Some(Name::Called("db".into())), ..one });
    let typed = Form { format: Format::Typed, described: true };
    assert_eq!(
        stat("show stat typed desc up no-maint"),
        Stat { form: typed, only_up: true, no_maint: true, ..Stat::default() }
    );
    assert_eq!(stat("show stat 4"), Stat::default(), "as in HAProxy");
    assert_eq!(error("show stat -2 4 -1"), "No such proxy.");
    assert_eq!(read("show info json"), Ok(Command::ShowInfo(Form { format: Format::Json, described: false })));
}

#[test]
fn connections_have_numbers() {
    for line in ["shutdown session 255", "shutdown session 0xff"] {
        assert_eq!(read(line), Ok(Command::ShutdownSession(255)));
    }
    for line in
        ["shutdown session", "shutdown session zz", "shutdown session -1", "shutdown session 0", "shutdown session +1"]
    {
        assert_eq!(error(line), "Session pointer expected (use 'show sess').", "{line}");
    }
    assert_eq!(read("show sess"), Ok(Command::ShowSess(None)));
    assert_eq!(read("show sess 0x7"), Ok(Command::ShowSess(Some(7))));
}

#[test]
fn silence_is_limited() {
    let seconds = |line: &str| read(line).map(|command| command == Command::SetTimeout(Duration::from_secs(60)));
    for line in ["set timeout cli 60", "set timeout cli 60s", "set timeout cli 1m", "set timeout cli 60000ms"] {
        assert_eq!(seconds(line), Ok(true), "{line}");
    }
    assert_eq!(read("set timeout cli 99999999999999999999h"), Err(because("Invalid timeout value.")));
    assert_eq!(read("set timeout cli 9999h"), Ok(Command::SetTimeout(SILENCE_MAX)));
    assert_eq!(error("set timeout cli"), "Expects an integer value.");
    assert_eq!(error("set timeout cli abc"), "Invalid timeout value.");
    assert_eq!(error("set timeout foo 1"), "'set timeout' only supports 'cli'.");
}

#[test]
fn what_haproxy_does_and_we_do_not_is_said() {
    for (line, want) in [
        ("set maxconn frontend front 100", "limits.connections"),
        ("set maxconn server db/a 100", "max_connections"),
        ("set maxconn global 100", "write connections"),
        ("disable frontend front", "cannot be paused"),
        ("enable health db/a", "maint"),
        ("enable agent db/a", "no agents"),
        ("clear counters all", "begin with the process"),
        ("show schema json", "no schema"),
        ("operator", "one level"),
        ("set server db/a health up", "Health cannot be set"),
        ("set server db/a addr 10.0.0.1", "reload"),
        ("show", "unknown"),
        ("SHOW INFO", "unknown"),
        ("show table", "unknown"),
        ("@1 show info", "unknown"),
    ] {
        assert!(error(line).contains(want), "{line}: {}", error(line));
    }
}

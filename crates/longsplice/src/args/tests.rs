use super::*;
use clap::CommandFactory;
use longsplice_engine::Policy;
use longsplice_proxy::Http;

fn parse(line: &str) -> Result<Args, clap::Error> {
    Args::try_parse_from(line.split_whitespace())
}

fn run(line: &str) -> RunArgs {
    match parse(line).unwrap().command {
        Command::Run(run) => *run,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_table_is_consistent() {
    Args::command().debug_assert();
}

#[test]
fn where_to_splice() {
    assert_eq!(run("longsplice run").path, None);
    assert_eq!(run("longsplice run --path any").path, Some(PathRule::Any));
    assert_eq!(run("longsplice run --path auto").path, Some(PathRule::default()));
    assert_eq!(run("longsplice run --path 3.5").path, Some(PathRule::Within { rtt_ratio: 3.5, loss: PathRule::LOSS }));
    for wrong in ["far", "0.5", "NaN", "1001"] {
        let error = Args::try_parse_from(["longsplice", "run", "--path", wrong]).expect_err(wrong);
        assert!(error.to_string().contains("from 1 to 1000"), "{error}");
    }
    assert!(parse("longsplice run --path short").is_err());
}

#[test]
fn when_to_splice() {
    assert_eq!(run("longsplice run").splice, None);
    assert_eq!(run("longsplice run --splice never").splice, Some(SpliceWhen::Never));
    assert_eq!(run("longsplice run --splice at-once").splice, Some(SpliceWhen::AtOnce));
    assert_eq!(run("longsplice run --splice 4096").splice, Some(SpliceWhen::AfterBytes(4096)));
    assert!(parse("longsplice run --splice soon").is_err());
}

/// Compares the figures in help, man page, README and docs/bench.md with the constants.
#[test]
fn the_defaults_are_as_they_are_told() {
    let mut command = Args::command();
    let help = command.find_subcommand_mut("run").unwrap().render_long_help().to_string();
    let texts = [&help, MAN_TAIL, include_str!("../../../../README.md"), include_str!("../../../../docs/bench.md")];
    let [help, man, readme, bench] = texts.map(|t| t.split_whitespace().collect::<Vec<_>>().join(" "));
    let (bytes, body) = (Policy::PAYS_FROM, format!("bodies from {} KB on", Http::BODY_PAYS_FROM >> 10));
    assert_eq!((bytes % 1024, Http::BODY_PAYS_FROM % 1024), (0, 0));
    assert!(help.contains(&format!("after {bytes} bytes [default: auto]")) && help.contains(&body), "{help}");
    assert!(man.contains(&format!("spliced after {} KiB:", bytes >> 10)), "{man}");
    assert!(readme.contains(&format!("(WebSocket) and {body}")), "{body}");
    assert!(bench.contains(&format!("after {} KB, and {body}", bytes >> 10)), "{body}");
}

#[test]
fn listeners_repeat() {
    let one = "--plug [::1]:3=a:4 --http [::1]:5 --tls [::1]:6";
    let run = run(&format!("longsplice run --socks5 [::1]:1 --socks5 [::1]:2 {one} --device a --device b"));
    assert_eq!((run.socks5.len(), run.device.len()), (2, 2));
    assert_eq!((run.plug.len(), run.http.len(), run.tls.len()), (1, 1, 1));
}

#[test]
fn drain_with_and_without_a_number() {
    for (line, want) in [("stop", None), ("stop --drain", Some(30)), ("stop --drain 5 --flush", Some(5))] {
        match parse(&format!("longsplice {line}")).unwrap().command {
            Command::Stop(stop) => assert_eq!(stop.drain, want, "{line}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn options_of_all_subcommands_stand_anywhere() {
    assert_eq!(parse("longsplice ls --control /a").unwrap().control, Some("/a".into()));
    assert_eq!(parse("longsplice --control /a -vv ls").unwrap().verbose, 2);
}

#[test]
fn contradictions_are_refused() {
    assert!(parse("longsplice run --copy-only --device eth0").is_err());
    assert!(parse("longsplice run --max-flows 1").is_err());
    assert!(parse("longsplice splice").is_err());
}

#[test]
fn a_tunnel_is_a_proxy_and_a_server() {
    let tunnel = |text: &str| parse(&format!("longsplice doctor --tunnel {text}")).map(drop);
    assert!(tunnel("192.0.2.1,198.51.100.1:80").is_ok() && tunnel("2001:db8::1,[2001:db8::2]:80").is_ok());
    for wrong in
        ["192.0.2.1", "192.0.2.1,198.51.100.1", "192.0.2.1:4,198.51.100.1:80", "192.0.2.1,[2001:db8::2]:80", "a,b:80"]
    {
        let said = tunnel(wrong).unwrap_err().to_string();
        assert!(said.contains("the proxy's address, a comma, and a server's address and port"), "{wrong}: {said}");
    }
}

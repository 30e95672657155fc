//! Lines of HAProxy's runtime socket.

use longsplice_proxy::haproxy::{COMMANDS_MAX, Command, LINE_MAX, Refused, Weight, parse, split};

/// What is read of a line is within its limits, and is read as the same when it is written again.
pub(crate) fn line(input: &[u8]) {
    let line = input.split(|b| *b == b'\n').next().unwrap_or_default();
    let Ok(commands) = split(line) else {
        assert!(line.len() >= LINE_MAX || line.iter().filter(|b| **b == b';').count() >= COMMANDS_MAX);
        return;
    };
    assert!(commands.len() <= COMMANDS_MAX && commands.len() <= line.len().div_ceil(2));
    let words = commands.iter().flatten();
    // invalid UTF-8 is replaced by three bytes for each
    assert!(words.clone().all(|word| !word.is_empty()) && words.map(String::len).sum::<usize>() <= 3 * line.len());
    for words in &commands {
        match parse(words) {
            Ok(command) => {
                if let Command::SetWeight(_, weight) = &command {
                    assert!([1, 100, 256].map(|configured| weight.of(configured)).iter().all(|weight| *weight <= 256));
                    assert!(*weight != Weight::Percent(100) || weight.of(7) == 7);
                }
                let written = command.to_string();
                let Ok(again) = split(written.as_bytes()) else {
                    assert!(written.len() >= LINE_MAX, "what replaces invalid UTF-8 is longer");
                    continue;
                };
                let [again] = &again[..] else { panic!("{command} is one command") };
                assert_eq!(parse(again), Ok(command));
            }
            Err(Refused::Because(why)) => assert!(!why.is_empty() && !why.contains('\n')),
            Err(Refused::Unknown) => {}
        }
    }
}

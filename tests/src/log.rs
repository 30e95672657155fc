//! The end of the engine's log, which a test shows if it fails.

use longsplice_lab::report::LINES;
use std::{
    collections::VecDeque,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

static LAST: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

fn lines() -> MutexGuard<'static, VecDeque<String>> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the last lines of the log of this process from now on. If RUST_LOG is set, it decides what is logged, and all of it is
/// printed, too.
pub fn keep() {
    let chosen = EnvFilter::try_from_default_env();
    let is_printed = chosen.is_ok();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(chosen.unwrap_or_else(|_| "longsplice_engine=debug,longsplice_datapath=debug,warn".into()))
        .with_ansi(false)
        .with_writer(Keep { is_printed })
        .try_init();
}

/// The last lines, for people.
pub fn last() -> String {
    format!("the log:\n{}", lines().iter().map(String::as_str).collect::<String>())
}

struct Keep {
    is_printed: bool,
}

impl MakeWriter<'_> for Keep {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line { is_printed: self.is_printed }
    }
}

/// Gets each line whole.
struct Line {
    is_printed: bool,
}

impl io::Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line).into_owned();
        if self.is_printed {
            print!("{text}"); // what the harness of Rust captures
        }
        let mut all = lines();
        if all.len() == LINES {
            all.pop_front();
        }
        all.push_back(text);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! Expressions that are looked for in a stream, piece by piece. The result does not depend on how the stream is cut.

use regex_automata::{
    dfa::{Automaton, StartKind, dense},
    nfa::thompson,
    util::{primitives::StateID, start, syntax},
};
use std::{error::Error, fmt, str::FromStr, sync::Arc};

/// Maximum size in bytes of an expression's automaton. It is built when the configuration is
/// read, and shared by all connections.
const AUTOMATON_MAX: usize = 4 * 1024 * 1024;

/// A regular expression over bytes. It reads a body piece by piece and stores nothing of it.
/// Patterns with the same text are equal.
#[derive(Clone)]
pub struct Pattern {
    text: String,
    dfa: Arc<dense::DFA<Vec<u32>>>,
}

/// State of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// It does not hold.
    No,
    /// It holds.
    Yes,
    /// Undecided, with the state of the automaton if the condition is a pattern.
    Open(Option<StateID>),
}

impl Pattern {
    /// Returns the state before the first byte.
    pub(crate) fn start(&self) -> Known {
        // An error would mean look-behind that was not compiled in, or quit bytes. The automaton has neither.
        self.dfa.start_state(&start::Config::new()).map_or(Known::Yes, |state| Known::Open(Some(state)))
    }

    /// Reads the next bytes.
    pub(crate) fn next(&self, known: Known, bytes: &[u8]) -> Known {
        let Known::Open(Some(mut state)) = known else { return known };
        for byte in bytes {
            state = self.dfa.next_state(state, *byte);
            if self.dfa.is_special_state(state) {
                if self.dfa.is_match_state(state) {
                    return Known::Yes;
                }
                if self.dfa.is_dead_state(state) {
                    return Known::No;
                }
            }
        }
        // The automaton reports a match one byte late. Often the match is certain whatever that byte is.
        let is_match = |next| self.dfa.is_match_state(next);
        let certain = (0..=u8::MAX).all(|byte| is_match(self.dfa.next_state(state, byte)))
            && is_match(self.dfa.next_eoi_state(state));
        if certain { Known::Yes } else { Known::Open(Some(state)) }
    }

    /// Handles the end of the text.
    pub(crate) fn end(&self, known: Known) -> Known {
        let Known::Open(Some(state)) = known else { return known };
        let found = self.dfa.is_match_state(self.dfa.next_eoi_state(state));
        if found { Known::Yes } else { Known::No }
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let dfa = dense::Builder::new()
            .syntax(syntax::Config::new().unicode(false).utf8(false))
            .thompson(thompson::Config::new().utf8(false).nfa_size_limit(Some(AUTOMATON_MAX)))
            .configure(
                dense::Config::new()
                    .start_kind(StartKind::Unanchored)
                    .dfa_size_limit(Some(AUTOMATON_MAX))
                    .determinize_size_limit(Some(AUTOMATON_MAX)),
            )
            .build(text);
        match dfa {
            Ok(dfa) => Ok(Pattern { text: text.into(), dfa: Arc::new(dfa) }),
            Err(e) if e.is_size_limit_exceeded() => Err(format!(
                "this expression takes more than {} MB: write a simpler one, with smaller counts in {{}}",
                AUTOMATON_MAX >> 20
            )),
            Err(e) => {
                let mut cause: &dyn Error = &e;
                while let Some(source) = cause.source() {
                    cause = source;
                }
                // the last line has the reason; the lines before repeat the expression and point into it
                let cause = cause.to_string();
                let last = cause.lines().last().unwrap_or_default().trim_start_matches("error: ");
                Err(format!("bad regular expression: {last}; see https://docs.rs/regex, without Unicode"))
            }
        }
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pattern").field(&self.text).finish()
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        self.text == other.text
    }
}

impl Eq for Pattern {}

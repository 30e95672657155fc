//! Replaces what an expression matches, in a stream.
//!
//! The longest text that an expression matches is known, so it is known when a match cannot become another one by what follows.
//! Only text in which a match has begun is held back, at most as much as the longest match: whoever waits for the end of an
//! event gets it.

use regex_automata::{
    Input,
    dfa::{Automaton, dense, regex::Regex},
    nfa::thompson,
    util::{primitives::StateID, start, syntax},
};
use std::{error::Error, fmt, str::FromStr, sync::Arc};

/// Longest match in bytes: that much is held back, and looked at again with each piece of a body.
pub const LONGEST: usize = 1024;
/// Maximum size in bytes of each of an expression's automata, which are built when the configuration is read.
const AUTOMATON_MAX: usize = 4 * 1024 * 1024;

/// An expression over bytes whose matches are not empty and not longer than [`LONGEST`]. Those with the same text are equal.
#[derive(Clone)]
pub struct Expression {
    text: String,
    regex: Arc<Regex>,
    /// States in which no match has begun.
    starts: Arc<[StateID]>,
    longest: usize,
}

/// Replaces in one stream.
#[derive(Debug)]
pub struct Replacer {
    expression: Expression,
    with: Arc<[u8]>,
    /// The byte before, if there is one, and what is held back.
    held: Vec<u8>,
    /// Number of bytes in `held` that were passed on.
    before: usize,
}

impl Replacer {
    /// Starts at the first byte.
    pub fn new(expression: &Expression, with: Arc<[u8]>) -> Replacer {
        Replacer { expression: expression.clone(), with, held: Vec::new(), before: 0 }
    }

    /// Reads the next bytes. Returns whether nothing can match any more; all was passed on then.
    pub fn read(&mut self, input: &[u8], end: bool, out: &mut Vec<u8>) -> bool {
        self.held.extend_from_slice(input);
        let Expression { regex, longest, .. } = &self.expression;
        let text = &self.held[..];
        // where a match that begins cannot become another one
        let decided = if end { text.len() } else { text.len().saturating_sub(*longest) };
        let mut at = self.before;
        while let Ok(Some(found)) = regex.try_search(&Input::new(text).span(at..text.len()))
            && found.start() < decided
            && !found.is_empty()
        {
            out.extend_from_slice(&text[at..found.start()]);
            out.extend_from_slice(&self.with);
            at = found.end();
        }
        let (quiet, over) = if end { (text.len(), false) } else { self.expression.quiet(text, at) };
        let until = if over { text.len() } else { quiet.max(decided).max(at) };
        out.extend_from_slice(&text[at..until]);
        self.before = until.min(1);
        self.held.drain(..until - self.before);
        over
    }
}

impl Expression {
    /// Returns the last position at which no match has begun, and whether none can begin any more.
    fn quiet(&self, text: &[u8], at: usize) -> (usize, bool) {
        let dfa = self.regex.forward();
        let before = at.checked_sub(1).map(|before| text[before]);
        let Ok(mut state) = dfa.start_state(&start::Config::new().look_behind(before)) else { return (at, false) };
        let mut quiet = at;
        for (n, byte) in text.iter().enumerate().skip(at) {
            state = dfa.next_state(state, *byte);
            if dfa.is_dead_state(state) {
                // A match that is not decided yet ends so, too.
                return (quiet, quiet == n);
            }
            if self.starts.contains(&state) {
                quiet = n + 1;
            }
        }
        (quiet, false)
    }
}

impl FromStr for Expression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let config = syntax::Config::new().unicode(false).utf8(false);
        let bad = |e: &dyn Error| {
            let mut cause = e;
            while let Some(source) = cause.source() {
                cause = source;
            }
            let cause = cause.to_string();
            let last = cause.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            format!("bad regular expression: {last}; see https://docs.rs/regex, without Unicode")
        };
        let parsed = syntax::parse_with(text, &config).map_err(|e| bad(&e))?;
        let of = parsed.properties();
        let (Some(1..), Some(longest @ ..=LONGEST)) = (of.minimum_len(), of.maximum_len()) else {
            return Err(format!(
                "its matches have to be of 1 to {LONGEST} bytes: write counts such as {{1,100}} instead of `*` and `+`"
            ));
        };
        let regex = Regex::builder()
            .syntax(config)
            .thompson(thompson::Config::new().utf8(false).nfa_size_limit(Some(AUTOMATON_MAX)))
            .dense(dense::Config::new().dfa_size_limit(Some(AUTOMATON_MAX)).determinize_size_limit(Some(AUTOMATON_MAX)))
            .build(text);
        let regex = regex.map_err(|e| match e.is_size_limit_exceeded() {
            true => format!("this expression takes more than {} MB: write a simpler one", AUTOMATON_MAX >> 20),
            false => bad(&e),
        })?;
        let start = |before| regex.forward().start_state(&start::Config::new().look_behind(before)).ok();
        let mut starts: Vec<StateID> = (0..=u8::MAX).map(Some).chain([None]).filter_map(start).collect();
        starts.sort_unstable();
        starts.dedup();
        Ok(Expression { text: text.into(), regex: Arc::new(regex), starts: starts.into(), longest })
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Expression").field(&self.text).finish()
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Expression) -> bool {
        self.text == other.text
    }
}

impl Eq for Expression {}

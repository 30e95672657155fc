//! The grammar of HAProxy: lines of words, which begin sections or belong to them.

use crate::import::model::{Line, Mistake};

/// A line with its words.
#[derive(Clone, Debug)]
pub struct Words {
    pub line: Line,
    pub words: Vec<String>,
}

impl Words {
    pub fn word(&self, n: usize) -> &str {
        self.words.get(n).map_or("", String::as_str)
    }

    pub fn name(&self) -> &str {
        self.word(0)
    }

    pub fn from(&self, n: usize) -> &[String] {
        self.words.get(n..).unwrap_or_default()
    }

    pub fn wrong(&self, what: impl Into<String>) -> Mistake {
        Mistake::new(self.line.number, what)
    }
}

/// A section: its first line, and the others.
#[derive(Debug)]
pub struct Section {
    pub head: Words,
    pub lines: Vec<Words>,
}

/// Words that begin a section.
const SECTIONS: [&str; 21] = [
    "global",
    "defaults",
    "frontend",
    "backend",
    "listen",
    "userlist",
    "peers",
    "resolvers",
    "mailers",
    "cache",
    "program",
    "http-errors",
    "ring",
    "log-forward",
    "fcgi-app",
    "crt-store",
    "traces",
    "log-profile",
    "acme",
    "dynamic-update",
    "ruleset",
];

/// Reads a file.
pub fn sections(text: &str) -> Result<Vec<Section>, Mistake> {
    let mut all: Vec<Section> = Vec::new();
    for (number, text) in (1..).zip(text.lines()) {
        let words = words(text).map_err(|what| Mistake::new(number, what))?;
        let Some(first) = words.first().map(String::as_str) else { continue };
        if [".if", ".elif", ".else", ".endif", ".notice", ".warning", ".alert", ".diag"].contains(&first) {
            return Err(Mistake::new(
                number,
                format!("{first}: conditions are not read: leave only the lines that hold"),
            ));
        }
        let is_section =
            SECTIONS.contains(&first) && (first != "cache" && first != "peers" || !text.starts_with([' ', '\t']));
        let line = Words { line: Line { number, text: text.trim().to_owned() }, words };
        match all.last_mut() {
            _ if is_section => all.push(Section { head: line, lines: Vec::new() }),
            Some(section) => section.lines.push(line),
            None => {
                return Err(Mistake::new(
                    number,
                    format!(
                        "`{}` belongs to no section: write global, defaults, frontend, backend or listen before",
                        line.name()
                    ),
                ));
            }
        }
    }
    Ok(all)
}

/// Splits a line: `\` makes the next character a plain one, and so do quotes.
fn words(text: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    let mut word: Option<String> = None;
    let mut quotes = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, quotes) {
            ('\'', Some('\'')) | ('"', Some('"')) => quotes = None,
            ('\'' | '"', None) => {
                quotes = Some(c);
                word.get_or_insert_default();
            }
            (c, Some('\'')) => word.get_or_insert_default().push(c),
            ('\\', _) => {
                let next = chars.next().ok_or("a line does not go on on the next one")?;
                let word = word.get_or_insert_default();
                match next {
                    ' ' | '#' | '\\' | '"' | '\'' | '$' => word.push(next),
                    'r' => word.push('\r'),
                    'n' => word.push('\n'),
                    't' => word.push('\t'),
                    'x' => {
                        let hex: String = chars.by_ref().take(2).collect();
                        let byte = u8::from_str_radix(&hex, 16).ok().filter(u8::is_ascii);
                        word.push(byte.ok_or_else(|| format!("\\x{hex} is no byte of ASCII"))?.into());
                    }
                    // as in expressions
                    other => word.extend(['\\', other]),
                }
            }
            ('$', Some('"')) if chars.peek().is_some_and(|c| *c == '{' || c.is_ascii_alphabetic() || *c == '_') => {
                return Err("variables of the environment are not read: write the value".to_owned());
            }
            ('#', None) => break,
            (c, None) if c.is_whitespace() => all.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quotes.is_some() {
        return Err("the quotes are not closed".to_owned());
    }
    all.extend(word);
    Ok(all)
}

/// A time of HAProxy in milliseconds.
pub fn time(of: &Words, text: &str) -> Result<u64, Mistake> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let wrong = || of.wrong(format!("{text:?} is no time: write one such as 500ms, 30s or 1m"));
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let factor = match &text[digits..] {
        "us" => return Ok(number.div_ceil(1000)),
        "" | "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(factor).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split() {
        for (text, want) in [
            (r"a b\ c 'd e' # f", r"a|b c|d e"),
            (r#"x "y\"z" \# a'b'"#, r#"x|y"z|#|ab"#),
            (r"path_reg ^/\w+\.php$", r"path_reg|^/\w+\.php$"),
            (r"send PING\r\n", "send|PING\r\n"),
            ("''", ""),
        ] {
            assert_eq!(words(text).unwrap().join("|"), want);
        }
        for text in ["\"a", "a\\", "\"$HOME\"", "\\xff"] {
            assert!(words(text).is_err(), "{text}");
        }
    }
}

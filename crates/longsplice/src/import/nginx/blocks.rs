//! The grammar of nginx: directives that end with `;`, or have a block of others.

use crate::import::model::{Line, Mistake};

/// How deep blocks may be in each other: nginx itself has no use for more than five.
const DEPTH_MAX: usize = 16;

/// A directive, or a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub words: Vec<String>,
    pub line: Line,
    /// What is between its braces.
    pub inner: Option<Vec<Block>>,
}

impl PartialEq for Line {
    fn eq(&self, other: &Line) -> bool {
        self.number == other.number
    }
}

impl Eq for Line {}

impl Block {
    pub fn name(&self) -> &str {
        self.word(0).unwrap_or("")
    }

    pub fn word(&self, n: usize) -> Option<&str> {
        self.words.get(n).map(String::as_str)
    }
}

/// Reads a file.
pub fn parse(text: &str) -> Result<Vec<Block>, Mistake> {
    // Blocks that are open, each with the directive before its brace.
    let mut open: Vec<(Vec<String>, usize, Vec<Block>)> = Vec::new();
    let mut all = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let mut first = 0;
    let mut tokens = Tokens { rest: text, line: 1 };
    while let Some((token, line)) = tokens.next()? {
        if words.is_empty() {
            first = line;
        }
        match token {
            Token::Word(word) => words.push(word),
            Token::End if words.is_empty() => return Err(Mistake::new(line, "a `;` with nothing before it")),
            Token::End => {
                let line = shown(&words, first, ";");
                all.push(Block { words: std::mem::take(&mut words), line, inner: None });
            }
            Token::Open if words.is_empty() => return Err(Mistake::new(line, "a `{` with nothing before it")),
            Token::Open if open.len() == DEPTH_MAX => {
                return Err(Mistake::new(line, format!("more than {DEPTH_MAX} blocks in each other")));
            }
            Token::Open => open.push((std::mem::take(&mut words), first, std::mem::take(&mut all))),
            Token::Close if !words.is_empty() => {
                return Err(Mistake::new(line, format!("no `;` after `{}`", words.join(" "))));
            }
            Token::Close => {
                let (words, first, outer) =
                    open.pop().ok_or_else(|| Mistake::new(line, "a `}` that closes nothing"))?;
                let inner = std::mem::replace(&mut all, outer);
                all.push(Block { line: shown(&words, first, " { ... }"), words, inner: Some(inner) });
            }
        }
    }
    if let Some((words, line, _)) = open.pop() {
        return Err(Mistake::new(line, format!("`{}` {{ is not closed", words.join(" "))));
    }
    if !words.is_empty() {
        return Err(Mistake::new(first, format!("no `;` after `{}`", words.join(" "))));
    }
    Ok(all)
}

fn shown(words: &[String], number: usize, end: &str) -> Line {
    Line { number, text: format!("{}{end}", words.join(" ")) }
}

enum Token {
    Word(String),
    End,
    Open,
    Close,
}

struct Tokens<'a> {
    rest: &'a str,
    line: usize,
}

impl Tokens<'_> {
    fn next(&mut self) -> Result<Option<(Token, usize)>, Mistake> {
        loop {
            let Some(c) = self.rest.chars().next() else { return Ok(None) };
            match c {
                '#' => self.skip(self.rest.find('\n').unwrap_or(self.rest.len())),
                c if c.is_whitespace() => self.skip(c.len_utf8()),
                _ => break,
            }
        }
        let line = self.line;
        let single = match self.rest.as_bytes().first() {
            Some(b';') => Some(Token::End),
            Some(b'{') => Some(Token::Open),
            Some(b'}') => Some(Token::Close),
            _ => None,
        };
        if let Some(token) = single {
            self.skip(1);
            return Ok(Some((token, line)));
        }
        Ok(Some((Token::Word(self.word()?), line)))
    }

    fn skip(&mut self, bytes: usize) {
        self.line += self.rest[..bytes].matches('\n').count();
        self.rest = &self.rest[bytes..];
    }

    /// A word ends at white space, `;` or `{`, unless it is in quotes or `${...}`.
    fn word(&mut self) -> Result<String, Mistake> {
        let start = self.line;
        let quoted = self.rest.chars().next().filter(|c| ['"', '\''].contains(c));
        let mut word = String::new();
        let mut chars = self.rest.char_indices().skip(usize::from(quoted.is_some())).peekable();
        let mut in_name = false;
        let mut end = None;
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => match chars.next() {
                    Some((_, c @ ('"' | '\'' | '\\' | ' ' | ';' | '{' | '}'))) => word.push(c),
                    Some((_, c)) => word.extend(['\\', c]),
                    None => break,
                },
                c if Some(c) == quoted => {
                    end = Some(at + 1);
                    break;
                }
                '$' if chars.peek().is_some_and(|(_, c)| *c == '{') => {
                    in_name = true;
                    word.push(c);
                }
                '{' if in_name => {}
                '}' if in_name => in_name = false,
                c if quoted.is_none() && (c.is_whitespace() || c == ';' || c == '{') => {
                    end = Some(at);
                    break;
                }
                c => word.push(c),
            }
        }
        if end.is_none() && quoted.is_some() {
            return Err(Mistake::new(start, "the quotes are not closed"));
        }
        self.skip(end.unwrap_or(self.rest.len()));
        Ok(word)
    }
}

//! The grammar of Dante: settings `NAME: VALUES`, which end where the next one begins, and blocks `KIND { NAME: VALUES ... }`.

use crate::import::model::{Line, Mistake};

/// A word, and the number of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    pub text: String,
    pub line: usize,
    /// The name of a setting: a colon follows.
    pub is_name: bool,
}

/// A part of the file.
#[derive(Debug)]
pub enum Statement {
    Setting { line: Line, name: String, values: Vec<String> },
    Block { line: Line, kind: Vec<String>, inner: Vec<Word> },
}

/// Whether a word before a colon is a name: addresses have colons as well.
fn is_name(word: &str) -> bool {
    let is_good = word.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    let is_hex = word.bytes().all(|b| b.is_ascii_hexdigit());
    is_good && !is_hex && word.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Splits the text into words. A comment goes from `#` to the end of its line.
fn words(text: &str) -> Vec<Word> {
    let mut all: Vec<Word> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or("");
        for chunk in line.split_whitespace() {
            let mut rest = chunk;
            while !rest.is_empty() {
                let one = |text: &str, is_name| Word { text: text.to_owned(), line: number, is_name };
                if let Some(mark) =
                    ["{", "}", ">=", "<=", "!=", "=", ">", "<"].iter().find(|mark| rest.starts_with(**mark))
                {
                    all.push(one(mark, false));
                    rest = &rest[mark.len()..];
                    continue;
                }
                let end = rest.find(['{', '}', '=', '<', '>', '!']).unwrap_or(rest.len());
                // a lone `!` is a word
                let word = &rest[..end.max(1)];
                match word.split_once(':') {
                    Some((name, _)) if is_name(name) => {
                        all.push(one(name, true));
                        rest = &rest[name.len() + 1..];
                    }
                    // a colon that stands alone, behind its name
                    Some(("", after))
                        if all.last().is_some_and(|last| is_name(&last.text)) && !after.starts_with(':') =>
                    {
                        if let Some(last) = all.last_mut() {
                            last.is_name = true;
                        }
                        rest = &rest[1..];
                    }
                    _ => {
                        all.push(one(word, false));
                        rest = &rest[word.len()..];
                    }
                }
            }
        }
    }
    all
}

/// Reads a file.
pub fn statements(text: &str) -> Result<Vec<Statement>, Mistake> {
    let all = words(text);
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(first) = all.get(at) {
        if first.is_name {
            let ends = |word: &Word| word.is_name || word.text == "{" || word.text == "}";
            let mut end = (at + 1..all.len()).find(|n| ends(&all[*n])).unwrap_or(all.len());
            if all.get(end).is_some_and(|word| word.text == "{") {
                // the words before the brace are of its block, and stand on lines of their own
                let line = all[end - 1].line;
                let kind =
                    |n: &usize| all[*n].line == line || ["client", "socks", "hostid"].contains(&all[*n].text.as_str());
                end = (at + 1..end).rev().take_while(|n| all[*n].line > first.line && kind(n)).last().unwrap_or(end);
            }
            let values: Vec<String> = all[at + 1..end].iter().map(|word| word.text.clone()).collect();
            let text = format!("{}: {}", first.text, values.join(" "));
            let line = Line { number: first.line, text: text.trim_end().to_owned() };
            found.push(Statement::Setting { line, name: first.text.clone(), values });
            at = end;
            continue;
        }
        let wrong = || {
            Mistake::new(
                first.line,
                format!("`{}`: write NAME: VALUE, or a rule such as client pass {{ ... }}", first.text),
            )
        };
        let open = (at..all.len())
            .take_while(|n| !all[*n].is_name && n - at < 4)
            .find(|n| all[*n].text == "{")
            .ok_or_else(wrong)?;
        if open == at {
            return Err(wrong());
        }
        let close = (open..all.len())
            .find(|n| all[*n].text == "}")
            .ok_or_else(|| Mistake::new(first.line, "this block is not closed: add `}`"))?;
        if let Some(again) = all[open + 1..close].iter().find(|word| word.text == "{") {
            return Err(Mistake::new(
                again.line,
                format!("a block in the block of line {}: is a `}}` missing?", first.line),
            ));
        }
        let kind: Vec<String> = all[at..open].iter().map(|word| word.text.clone()).collect();
        let mut text = kind.join(" ");
        text.push_str(" {");
        for word in &all[open + 1..close] {
            text.push(' ');
            text.push_str(&word.text);
            if word.is_name {
                text.push(':');
            }
        }
        text.push_str(" }");
        let line = Line { number: first.line, text };
        found.push(Statement::Block { line, kind, inner: all[open + 1..close].to_vec() });
        at = close + 1;
    }
    Ok(found)
}

//! What changes the bodies of replies.

use longsplice_proxy::rewrite::{
    element::{Element, Remover},
    replace::{Expression, Replacer},
};
use std::sync::{Arc, LazyLock};

const NAMES: [&str; 5] = ["script", "div", "br", "s", "x-div"];

/// Reads pieces. Returns what becomes of them, and whether an element has no end.
fn removed<'a>(pieces: impl Iterator<Item = &'a [u8]>, is_xml: bool, last: &[u8]) -> (Vec<u8>, bool) {
    let elements: Arc<[Element]> = NAMES.iter().map(|name| name.parse().expect("a name")).collect();
    let mut remover = Remover::new(elements.clone(), elements, is_xml);
    let mut out = Vec::new();
    pieces.for_each(|piece| remover.read(piece, &mut out));
    let used = remover.finish(last, &mut out);
    out.extend_from_slice(&last[used..]);
    (out, remover.is_within())
}

/// The beginning of a start tag of one of the names.
fn has_tag(text: &[u8]) -> bool {
    let ends = |b: Option<&u8>| b.is_some_and(|b| matches!(b, b'\t' | b'\n' | b'\x0c' | b'\r' | b' ' | b'/' | b'>'));
    let begins = |at: usize| {
        let rest = &text[at + 1..];
        let is = |name: &&str| {
            rest.get(..name.len()).is_some_and(|own| own.eq_ignore_ascii_case(name.as_bytes()))
                && ends(rest.get(name.len()))
        };
        text[at] == b'<' && NAMES.iter().any(is)
    };
    (0..text.len()).any(begins)
}

/// However a body is cut, the same is removed, and no element is left or comes into being.
pub(crate) fn elements(input: &[u8]) {
    for is_xml in [false, true] {
        let whole = removed(std::iter::once(input), is_xml, b"");
        assert_eq!(removed(input.chunks(1), is_xml, b""), whole, "byte by byte");
        assert_eq!(removed(input.chunks(7), is_xml, b""), whole, "in sevens");
        assert!(!has_tag(&whole.0), "{}", whole.0.escape_ascii());
        if !has_tag(input) {
            assert_eq!(whole, (input.to_vec(), false));
        }
        assert_eq!(removed(whole.0.chunks(3), is_xml, b""), (whole.0.clone(), false), "nothing is left to remove");
        // what begins behind the limit stays
        let (before, behind) = input.split_at(input.len() / 2);
        let limited = removed(std::iter::once(before), is_xml, behind);
        assert_eq!(removed(before.chunks(1), is_xml, behind), limited, "up to a limit");
        assert!(limited.1 || limited.0.ends_with(&behind[behind.len().saturating_sub(1)..]) || has_tag(before));
    }
}

/// Of each kind: alternatives, counts, borders of words and lines, the beginning and the end, classes.
static EXPRESSIONS: LazyLock<Vec<Expression>> = LazyLock::new(|| {
    let all = [
        "abc",
        "a{1,5}b",
        "ab|abcd|bc",
        "^ab",
        "ab$",
        r"\bab\b",
        "(?m)^a.b$",
        "(?i)a[^b]{0,3}c",
        "a|ba|b{3}",
        "(?s)a.{0,9}c",
    ];
    all.iter().map(|text| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))).collect()
});

fn replaced<'a>(expression: &Expression, pieces: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut replacer = Replacer::new(expression, Arc::from(&b"<>"[..]));
    let (mut out, mut over) = (Vec::new(), false);
    for piece in pieces {
        // whoever reads a body passes the rest on
        match over {
            true => out.extend_from_slice(piece),
            false => over = replacer.read(piece, false, &mut out),
        }
    }
    if !over {
        replacer.read(b"", true, &mut out);
    }
    out
}

/// However a body is cut, the same is replaced. Bytes that no expression knows stay, in their order.
pub(crate) fn expressions(input: &[u8]) {
    for expression in EXPRESSIONS.iter() {
        let mut whole = Vec::new();
        Replacer::new(expression, Arc::from(&b"<>"[..])).read(input, true, &mut whole);
        for size in [1, 2, 7, 100] {
            assert_eq!(replaced(expression, input.chunks(size)), whole, "{expression:?}, in pieces of {size}");
        }
        let (at, end) = (input.len() / 3, input.len() * 2 / 3);
        let pieces = [&input[..at], b"", &input[at..end], &input[end..]];
        assert_eq!(replaced(expression, pieces.into_iter()), whole, "{expression:?}, in thirds");
    }
}

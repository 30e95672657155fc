//! Corrects errors in replies that RFC 9112 forbids but every client understands.

/// Returns the corrected head, or trailer section if it has no start line: lines end with CR LF,
/// folded lines are joined (RFC 9112, 5.2), white space before a colon is removed (5.1), and control
/// characters in values become spaces (RFC 9110, 5.5). Other errors are kept. So are folds and control
/// characters in the fields that delimit the body, since programs would disagree about where it ends.
pub(crate) fn mend(section: &[u8], has_start_line: bool) -> Vec<u8> {
    let mut mended = Vec::with_capacity(section.len() + 64);
    let mut start_line = has_start_line;
    let mut framing = false;
    for line in section.split_inclusive(|b| *b == b'\n') {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let folded = line.starts_with(b" ") || line.starts_with(b"\t");
        if std::mem::take(&mut start_line) {
            start_line = line.is_empty(); // an empty line before it
            mended.extend(line);
        } else if folded && !framing && mended.ends_with(b"\r\n") {
            mended.truncate(mended.len() - 2);
            value(&mut mended, line);
        } else {
            let colon = line.iter().position(|b| *b == b':').unwrap_or(line.len());
            let is_name = |b: &u8| !matches!(b, b' ' | b'\t');
            let name = line[..colon].iter().rposition(is_name).map_or(&[][..], |last| &line[..=last]);
            framing = [&b"content-length"[..], b"transfer-encoding"].iter().any(|f| name.eq_ignore_ascii_case(f));
            mended.extend(name);
            if framing { mended.extend(&line[colon..]) } else { value(&mut mended, &line[colon..]) }
        }
        mended.extend(b"\r\n");
    }
    mended
}

fn value(mended: &mut Vec<u8>, value: &[u8]) {
    mended.extend(value.iter().map(|b| if b.is_ascii_control() && *b != b'\t' { b' ' } else { *b }));
}

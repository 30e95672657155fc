//! A page of docs/ as a man page: Markdown in, roff out.

use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

/// The man page `name` of section 5, which is `summary` in a line, from the Markdown of a page of docs/.
///
/// Headings of the second level become sections, rows of tables definitions: the first cell is the term. Links are reduced to
/// their text, because what they point at may not be installed.
pub fn page(name: &str, summary: &str, markdown: &str) -> String {
    let head = format!(".TH \"{name}\" 5\n.SH NAME\n{} \\- {summary}\n.SH DESCRIPTION\n", escape(name));
    let mut page = Page { out: head, ..Page::default() };
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        page.event(event);
    }
    page.out
}

#[derive(Default)]
struct Page {
    out: String,
    /// What the paragraph, item, heading or cell that is being read has so far.
    text: String,
    /// What stands before the next paragraph: nothing but `.PP`, or the mark of an item.
    request: Option<&'static str>,
    /// Lists around this place.
    lists: usize,
    in_code: bool,
    columns: Vec<String>,
    cells: Vec<String>,
}

impl Page {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Text(text) if self.in_code => self.out += &lines(&escape(&text)),
            Event::Text(text) => self.text += &escape(&text),
            Event::Code(code) => self.text += &format!("\\fB{}\\fR", escape(&code)),
            Event::SoftBreak | Event::HardBreak => self.text.push('\n'),
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag<'_>) {
        match tag {
            Tag::CodeBlock(_) => {
                self.paragraph();
                self.out += ".PP\n.RS 4\n.nf\n";
                self.in_code = true;
            }
            Tag::List(_) => {
                self.paragraph(); // of the item that this list is in
                if self.lists > 0 {
                    self.out += ".RS 2\n";
                }
                self.lists += 1;
            }
            Tag::Item => self.request = Some(".IP \\(bu 2"),
            Tag::Strong => self.text += "\\fB",
            Tag::Emphasis => self.text += "\\fI",
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::Item => self.paragraph(),
            TagEnd::Strong | TagEnd::Emphasis => self.text += "\\fR",
            TagEnd::CodeBlock => {
                self.out += ".fi\n.RE\n";
                self.in_code = false;
            }
            TagEnd::List(_) => {
                self.lists -= 1;
                if self.lists > 0 {
                    self.out += ".RE\n";
                }
            }
            TagEnd::Heading(level) => {
                let heading = std::mem::take(&mut self.text);
                match level {
                    HeadingLevel::H1 => {} // the page's name says it
                    HeadingLevel::H2 => self.out += &format!(".SH \"{}\"\n", heading.to_uppercase()),
                    _ => self.out += &format!(".SS \"{heading}\"\n"),
                }
            }
            TagEnd::TableCell => self.cells.push(std::mem::take(&mut self.text)),
            TagEnd::TableHead => self.columns = std::mem::take(&mut self.cells),
            TagEnd::TableRow => self.row(),
            _ => {}
        }
    }

    /// Writes what has been read as a paragraph, or as that of an item.
    fn paragraph(&mut self) {
        if !self.text.is_empty() {
            let text = lines(&std::mem::take(&mut self.text));
            let request = self.request.take().unwrap_or(if self.lists > 0 { ".IP \"\" 2" } else { ".PP" });
            self.out += &format!("{request}\n{text}\n");
        }
    }

    /// Writes a row: its first cell is the term, its last one the text; those between are named.
    fn row(&mut self) {
        let cells = std::mem::take(&mut self.cells);
        let [term, between @ .., meaning] = &cells[..] else { return };
        let named = between.iter().zip(&self.columns[1..]).filter(|(cell, _)| !cell.is_empty());
        let named: Vec<_> = named.map(|(cell, column)| format!("{column}: {cell}")).collect();
        self.out += &format!(".TP\n{}\n", lines(term));
        if !named.is_empty() {
            self.out += &format!("{}\n.br\n", lines(&named.join("; ")));
        }
        self.out += &format!("{}\n", lines(meaning));
    }
}

/// `text` without what roff would take for an escape, or for a hyphen that may be broken at.
fn escape(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-")
}

/// `text`, none of whose lines is a request.
fn lines(text: &str) -> String {
    let guarded = |line: &str| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() };
    text.split('\n').map(guarded).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(markdown: &str) -> String {
        page("a.toml", "b", markdown).split_once("DESCRIPTION\n").unwrap().1.to_owned()
    }

    #[test]
    fn headings_paragraphs_and_links() {
        let page =
            page("a-b.toml", "what it is", "# Title\n\nSee [the\nlog](log.md#x).\n\n## One two\n\n### `Three`\n");
        assert_eq!(
            page,
            ".TH \"a-b.toml\" 5\n.SH NAME\na\\-b.toml \\- what it is\n.SH DESCRIPTION\n\
             .PP\nSee the\nlog.\n.SH \"ONE TWO\"\n.SS \"\\fBThree\\fR\"\n"
        );
    }

    #[test]
    fn a_row_is_a_definition() {
        let table = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n| `a-b` | path | | **Where.** `'\\.x'` |\n";
        assert_eq!(body(table), ".TP\n\\fBa\\-b\\fR\nvalue: path\n.br\n\\fBWhere.\\fR \\fB'\\e.x'\\fR\n");
    }

    #[test]
    fn nothing_is_taken_for_a_request() {
        assert_eq!(body("a\n.TH b\n"), ".PP\na\n\\&.TH b\n");
        assert_eq!(body("```toml\n.a = 'b'\n'c'\n```\n"), ".PP\n.RS 4\n.nf\n\\&.a = 'b'\n\\&'c'\n.fi\n.RE\n");
    }

    #[test]
    fn lists_and_what_they_contain() {
        assert_eq!(
            body("- a\n- b\n  - c\n\nd\n"),
            ".IP \\(bu 2\na\n.IP \\(bu 2\nb\n.RS 2\n.IP \\(bu 2\nc\n.RE\n.PP\nd\n"
        );
        assert_eq!(body("- a\n\n  b\n"), ".IP \\(bu 2\na\n.IP \"\" 2\nb\n");
    }
}

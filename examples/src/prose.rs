//! Extraction of sentences from documents and from comments in sources: a text that a small model can learn in a
//! minute.

/// Shorter paragraphs are captions and fragments.
const SHORTEST: usize = 30;

/// The paragraphs of a Markdown file, a line each: no headings, tables, code or links, and white space collapsed.
pub fn of_markdown(text: &str) -> String {
    let mut fenced = false;
    let lines = text.lines().map(str::trim).map(|line| {
        let fence = line.starts_with("```");
        fenced ^= fence;
        if fenced || fence || line.starts_with(['|', '#']) { "" } else { line }
    });
    paragraphs(lines)
}

/// The comments of a Rust file, filtered like [`of_markdown`].
pub fn of_rust(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(|line| line.trim().strip_prefix("//").unwrap_or(""))
        .map(|line| line.trim_start_matches(['/', '!']))
        .collect();
    of_markdown(&lines.join("\n"))
}

fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let (mut all, mut open) = (String::new(), String::new());
    // The empty line ends the last paragraph.
    for line in lines.chain([""]) {
        let item = item(line);
        if line.is_empty() || item.is_some() {
            close(&mut all, &mut open);
        }
        open.push_str(item.unwrap_or(line));
        open.push(' ');
    }
    all
}

/// The text of a list item that begins at this line.
fn item(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
    if rest.len() < line.len() { rest.strip_prefix(". ") } else { line.strip_prefix("- ") }
}

/// Appends a paragraph to the others if it is long enough, and begins the next.
fn close(all: &mut String, open: &mut String) {
    let kept: String = without_links(open).chars().filter_map(plain).collect();
    let words: Vec<&str> = kept.split_whitespace().collect();
    let line = words.join(" ");
    if line.len() >= SHORTEST {
        all.push_str(&line);
        all.push('\n');
    }
    open.clear();
}

/// Turns `[text](target)` into `[text`: the bracket is dropped later with other signs.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut out = parts.next().unwrap_or("").to_owned();
    for part in parts {
        out.push_str(part.split_once(')').map_or(part, |(_, after)| after));
    }
    out
}

/// The character in the text: letters, digits and punctuation.
fn plain(c: char) -> Option<char> {
    match c {
        '—' | '–' | '−' => Some('-'),
        '×' => Some('x'),
        c if c.is_ascii_alphanumeric() || c.is_ascii_whitespace() || ".,;:'()-?!/".contains(c) => Some(c),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_becomes_its_sentences() {
        let text = "# Title\n\nOne sentence that goes on\nin  the `next` line, see [this](a/b.md).\n\n\
                    | a | table |\n|---|---|\n```rust\nlet code = 1; // and what it says is no prose\n```\n\
                    - **An item** of a list of two items.\n- And the other of these two × 3.\n\n1. A third, with a number before it.\nshort\n";
        assert_eq!(
            of_markdown(text),
            "One sentence that goes on in the next line, see this.\n\
             An item of a list of two items.\nAnd the other of these two x 3.\nA third, with a number before it. short\n"
        );
    }

    #[test]
    fn a_source_becomes_its_comments() {
        let text = "//! What this file is for, in a\n//! sentence of two lines.\n\nfn f() {\n    // Why it is done like this and not else.\n    g();\n}\n";
        assert_eq!(
            of_rust(text),
            "What this file is for, in a sentence of two lines.\nWhy it is done like this and not else.\n"
        );
    }
}

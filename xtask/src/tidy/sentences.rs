//! Rule: a sentence has at most 25 words, in doc comments and on pages.

use super::Finding;
use super::doc_comments::is_documented;
use super::markdown::prose;
use super::tree::Tree;

/// The most words of a sentence.
const WORDS: usize = 25;

/// Sources whose doc comments are checked.
const SOURCES: &[&str] = &[
    "adaptive/",
    "autograd/",
    "comm/",
    "conformance/",
    "data/",
    "distributed/",
    "engine-mpi/",
    "engine-nccl/",
    "engine-process/",
    "launch/",
    "linalg/",
    "models-export/",
    "models-import/",
    "models/",
    "nn/",
    "numcore/",
    "optim/",
    "pipeline-schedule/",
    "planner/",
    "runtime-wgpu/",
    "train/",
    "watch/",
    "weftgrad/",
];

/// Sources that are not: the reasons of combinations are read as a table.
const EXEMPT: &[&str] = &["distributed/src/combinations.rs"];

/// Pages that are checked, and folders of pages.
const PAGES: &[&str] = &["README.md", "docs/book/src/"];

/// Abbreviations whose dot ends no sentence.
const ABBREVIATIONS: &[&str] = &["al.", "cf.", "e.g.", "i.e.", "vs."];

/// Every sentence with more than [`WORDS`] words. Blocks of code, tables and headings have no sentences.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let sources =
        tree.texts(".rs").filter(|(path, _)| is_documented(path) && starts(path, SOURCES) && !EXEMPT.contains(path));
    let pages = tree.texts(".md").filter(|(path, _)| starts(path, PAGES));
    let comments = sources.flat_map(|(path, text)| in_page(path, &comments(text)));
    comments.chain(pages.flat_map(|(path, text)| in_page(path, text))).collect()
}

fn starts(path: &str, of: &[&str]) -> bool {
    of.iter().any(|start| path.starts_with(start))
}

/// The doc comments of a source, each on its line, as a page of Markdown.
fn comments(text: &str) -> String {
    let comment = |line: &str| {
        let line = line.trim_start();
        let comment = ["///", "//!"].iter().find_map(|mark| line.strip_prefix(mark));
        comment.map(|comment| comment.strip_prefix(' ').unwrap_or(comment).to_string()).unwrap_or_default()
    };
    text.lines().map(|line| comment(line) + "\n").collect()
}

fn in_page(path: &str, page: &str) -> Vec<Finding> {
    let (mut found, mut sentence, mut last) = (Vec::new(), Sentence::default(), 0);
    for (number, line) in prose(page) {
        let line = line.trim();
        let stands_alone = line.is_empty() || line.starts_with(['|', '#']);
        if stands_alone || number > last + 1 || begins_item(line) {
            sentence.end(path, &mut found);
        }
        last = number;
        if !stands_alone {
            for word in words(line) {
                sentence.add(number, &word);
                if ends_sentence(&word) {
                    sentence.end(path, &mut found);
                }
            }
        }
    }
    sentence.end(path, &mut found);
    found
}

#[derive(Default)]
struct Sentence {
    line: usize,
    words: usize,
    start: String,
}

impl Sentence {
    fn add(&mut self, line: usize, word: &str) {
        if !word.contains(char::is_alphanumeric) {
            return;
        }
        if self.words == 0 {
            self.line = line;
        }
        if self.words < 5 {
            self.start = format!("{} {word}", self.start);
        }
        self.words += 1;
    }

    fn end(&mut self, path: &str, found: &mut Vec<Finding>) {
        let Sentence { line, words, start } = std::mem::take(self);
        if words > WORDS {
            found.push(Finding::new(path, line, format!("a sentence of {words} words, {WORDS} at most:{start} …")));
        }
    }
}

/// Tells whether a line begins an item of a list.
fn begins_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    ["- ", "* ", "> "].iter().any(|mark| line.starts_with(mark))
        || number.len() < line.len() && number.starts_with(". ")
}

/// The words of a line. A span of code is one word, and so is the target of a link with the word before it.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut in_code, mut in_target) = (false, false);
    let mut before = ' ';
    for c in line.chars() {
        match c {
            '`' => {
                in_code = !in_code;
                words.last_mut().expect("one word").push('x');
            }
            _ if in_code => {}
            '(' if before == ']' => in_target = true,
            ')' if in_target => in_target = false,
            _ if in_target => {}
            c if c.is_whitespace() => words.push(String::new()),
            c => words.last_mut().expect("one word").push(c),
        }
        before = c;
    }
    words
}

fn ends_sentence(word: &str) -> bool {
    let word = word.trim_end_matches([')', '"', '*', '_', ']', '”']);
    word.ends_with(['.', '!', '?']) && !ABBREVIATIONS.iter().any(|short| word.trim_start_matches('(') == *short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    fn sentence(words: usize) -> String {
        "word ".repeat(words - 1) + "end."
    }

    #[test]
    fn long_sentences_are_found_on_the_line_where_they_begin() {
        let page = format!("{} {}\n{}\n", sentence(25), "and ".repeat(20), sentence(6));
        expect(check, &[("README.md", &page)], &["README.md:1: a sentence of 26 words"]);
        let source = format!("//! Short.\n//! {}\n\nfn f() {{}}\n", sentence(26));
        expect(check, &[("comm/src/a.rs", &source)], &["comm/src/a.rs:2: a sentence of 26 words"]);
        expect(check, &[("bench/src/a.rs", &source), ("CHANGELOG.md", &page)], &[]);
    }

    #[test]
    fn code_tables_and_items_end_sentences() {
        let half = "word ".repeat(20);
        for between in ["\n\n", "\n- ", "\n1. ", "\n| x |\n", "\n```\nx\n```\n", "\n# x\n"] {
            expect(check, &[("README.md", &format!("{half}{between}{half}"))], &[]);
        }
        expect(check, &[("README.md", &format!("{half}\n{half}"))], &["README.md:1: a sentence of 40 words"]);
    }

    #[test]
    fn code_and_targets_are_parts_of_words() {
        let words: Vec<String> = words("a [b c](d e) `f g(h)`s, i");
        assert_eq!(words, ["a", "[b", "c]", "xxs,", "i"]);
        assert!(ends_sentence("end.)") && ends_sentence("xx.") && !ends_sentence("e.g.") && !ends_sentence("0.1"));
    }
}

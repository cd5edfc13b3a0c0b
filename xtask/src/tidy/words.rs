//! Rule: the project speaks of itself alone, and nothing unfinished or switched off is called done.

use super::Finding;
use super::tree::Tree;

struct Word {
    text: &'static str,
    place: Place,
    why: &'static str,
}

#[derive(Debug, PartialEq)]
enum Place {
    /// In any text file, at the start of an absolute path.
    PathStart,
    /// Anywhere in any text file.
    Anywhere,
    /// In Rust files only.
    Rust,
}

const MACHINE: &str = "a path of one machine";
const OUTSIDE: &str = "a place outside the repository";
const REGISTRY: &str = "the host of a package registry: the project must build against any";
const UNFINISHED: &str = "unfinished or debugging code";

/// Composed, so that this table does not find itself.
const WORDS: &[Word] = &[
    Word { text: concat!("/ro", "ot/"), place: Place::PathStart, why: MACHINE },
    Word { text: concat!("/ho", "me/"), place: Place::PathStart, why: MACHINE },
    Word { text: concat!("/wo", "rk/"), place: Place::PathStart, why: MACHINE },
    Word { text: concat!("/Us", "ers/"), place: Place::PathStart, why: MACHINE },
    Word { text: concat!("../sha", "red"), place: Place::Anywhere, why: OUTSIDE },
    Word { text: concat!("DEVELO", "PERS.md"), place: Place::Anywhere, why: "a page that is not part of the project" },
    Word { text: concat!("crat", "es.io"), place: Place::Anywhere, why: REGISTRY },
    Word { text: concat!("py", "pi.org"), place: Place::Anywhere, why: REGISTRY },
    Word { text: concat!("to", "do!("), place: Place::Rust, why: UNFINISHED },
    Word { text: concat!("unimpl", "emented!("), place: Place::Rust, why: UNFINISHED },
    Word { text: concat!("db", "g!("), place: Place::Rust, why: UNFINISHED },
    Word { text: concat!("#[ig", "nore"), place: Place::Rust, why: "a test that is switched off" },
];

/// Finds every line with a word of the table or the number of an issue. `Cargo.lock` names its registry and is exempt.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let texts = tree.texts("").filter(|(path, _)| !path.ends_with("Cargo.lock"));
    texts
        .flat_map(|(path, text)| text.lines().enumerate().flat_map(move |(i, line)| complaints(path, i + 1, line)))
        .collect()
}

fn complaints(path: &str, number: usize, line: &str) -> Vec<Finding> {
    let is_rust = path.ends_with(".rs");
    let words = WORDS.iter().filter(|word| (is_rust || word.place != Place::Rust) && word.occurs(line));
    let mut found: Vec<Finding> =
        words.map(|word| Finding::new(path, number, format!("`{}`: {}", word.text, word.why))).collect();
    if names_an_issue(line) {
        found.push(Finding::new(path, number, "the number of an issue: say what it is about"));
    }
    found
}

impl Word {
    fn occurs(&self, line: &str) -> bool {
        line.match_indices(self.text).any(|(at, _)| self.may_follow(line[..at].chars().next_back()))
    }

    fn may_follow(&self, before: Option<char>) -> bool {
        match self.place {
            Place::PathStart => !before.is_some_and(|c| is_word(c) || "./-~})>*".contains(c)),
            Place::Anywhere | Place::Rust => !before.is_some_and(is_word),
        }
    }
}

/// Tells whether `c` may occur in an identifier.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a line has the word issue or issues and a number: with or without a space and a `#` between.
fn names_an_issue(line: &str) -> bool {
    let lower = line.to_lowercase();
    lower.match_indices("issue").any(|(at, word)| {
        let after = &lower[at + word.len()..];
        let after = after.strip_prefix('s').unwrap_or(after);
        let after = after.strip_prefix(' ').unwrap_or(after);
        let after = after.strip_prefix('#').unwrap_or(after);
        !lower[..at].ends_with(is_word) && after.starts_with(|c: char| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn every_word_is_found_where_it_stands_alone() {
        for word in WORDS {
            expect(check, &[("a.rs", &format!("x\n// see `{}x\n", word.text))], &["a.rs:2: `"]);
            expect(check, &[("a.rs", word.text)], &["a.rs:1: `"]);
        }
    }

    #[test]
    fn words_inside_others_are_let_be() {
        for word in WORDS.iter().filter(|word| word.place != Place::Rust) {
            expect(check, &[("a.md", &format!("my{}x", word.text))], &[]);
        }
    }

    #[test]
    fn relative_paths_and_variables_are_no_machine_paths() {
        for before in ["..", "~", "${DIR}", "<name>", "https:/"] {
            expect(check, &[("a.md", &format!("{before}{}x", WORDS[0].text))], &[]);
        }
    }

    #[test]
    fn code_words_are_a_matter_of_rust_files() {
        for word in WORDS.iter().filter(|word| word.place == Place::Rust) {
            expect(check, &[("a.md", word.text)], &[]);
        }
    }

    #[test]
    fn lock_files_may_name_a_registry() {
        let host = concat!("https://crat", "es.io/x");
        expect(check, &[("Cargo.lock", host), ("a/Cargo.lock", host), ("a.md", host)], &["a.md:1:"]);
    }

    #[test]
    fn numbers_of_issues_are_found() {
        for (before, after) in [("iss", "ue 12"), ("Iss", "ue #3"), ("(iss", "ues 4 and 5)"), ("iss", "ue7")] {
            let line = format!("fixes {before}{after}");
            assert!(names_an_issue(&line), "{line}");
        }
        for line in ["an issue of order", "tissue 3", "issues: 3", "github.com/a/b/issues/12", "reissue 4"] {
            assert!(!names_an_issue(line), "{line}");
        }
    }
}

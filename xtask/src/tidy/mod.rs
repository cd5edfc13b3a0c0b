//! `cargo xtask tidy`: the rules of this project that the compiler does not check.
//!
//! One file per rule: `fn check(&Tree) -> Vec<Finding>`, tested on small texts. A new rule is a file and a row of
//! [`RULES`].

mod aliases;
mod book;
mod circles;
mod dependencies;
mod doc_comments;
mod file_size;
mod ignore;
mod links;
mod manifest;
mod markdown;
mod names;
mod paths;
mod recipes;
mod rust;
mod safety;
mod sentences;
mod tree;
mod words;

use std::fmt;

use crate::repo;
use tree::Tree;

/// One line that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    /// The line number, from 1.
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.into(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

const RULES: &[fn(&Tree) -> Vec<Finding>] = &[
    file_size::check,
    safety::check,
    words::check,
    dependencies::check,
    circles::check,
    recipes::check,
    links::check,
    book::check,
    names::check,
    doc_comments::check,
    sentences::check,
    aliases::check,
];

/// Prints every finding; an error if there is one.
pub(crate) fn run() -> Result<(), String> {
    let tree = Tree::read(&repo::root()).map_err(|error| format!("tidy: cannot read the sources: {error}"))?;
    let findings = findings(&tree);
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        n => Err(format!("tidy: {n} {}", if n == 1 { "finding" } else { "findings" })),
    }
}

fn findings(tree: &Tree) -> Vec<Finding> {
    let mut all: Vec<Finding> = RULES.iter().flat_map(|rule| rule(tree)).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one rule over the given files and compares its findings, as shown, with `expect`.
    pub(super) fn check(rule: fn(&Tree) -> Vec<Finding>, files: &[(&str, &str)], expect: &[&str]) {
        let shown: Vec<String> = rule(&Tree::of(files)).iter().map(Finding::to_string).collect();
        assert_eq!(shown.len(), expect.len(), "{shown:#?}");
        for (found, start) in shown.iter().zip(expect) {
            assert!(found.starts_with(start), "found {found:?}, expected it to start with {start:?}");
        }
    }

    #[test]
    fn the_workspace_is_tidy() {
        let tree = Tree::read(&repo::root()).expect("readable sources");
        let shown: Vec<String> = findings(&tree).iter().map(Finding::to_string).collect();
        assert!(shown.is_empty(), "{}", shown.join("\n"));
    }

    #[test]
    fn findings_of_all_rules_come_in_order_of_place() {
        let tree =
            Tree::of(&[("b/src/lib.rs", "unsafe fn f() {}\n\nunsafe {}"), ("a/src/lib.rs", "unsafe impl T for U {}")]);
        let places: Vec<(String, usize)> = findings(&tree).into_iter().map(|f| (f.path, f.line)).collect();
        assert!(places.is_sorted() && places.iter().any(|p| p.0 == "a/src/lib.rs"), "{places:?}");
    }
}

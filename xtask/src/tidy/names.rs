//! Rule: the name of a public type exists once in the library crates, and so do most private ones: a reader who meets a
//! name knows what it is.

use std::collections::BTreeMap;

use super::Finding;
use proc_macro2::TokenTree;

use super::rust::{is, line_of, tokens};
use super::tree::Tree;

/// Programs and the suite: what they define is seen by no user.
const PROGRAMS: &[&str] = &["bench/", "conformance/", "examples/", "gpu-check/", "xtask/"];

/// Names with more than one definition, on purpose.
const REPEATED: &[&str] = &[
    // One for each runtime, alike: who has read one knows the others.
    "Engine",
    "FusedCall",
    "Memory",
    "Operand",
    "Queue",
    // The operation in `numcore` and the layer in `nn`, as in PyTorch.
    "Conv",
    "Fold",
    "Linear",
];

/// One in so many names of private types may exist more than once: each is read beside its own module.
const ONE_IN: usize = 20;

/// Every second public definition of a name; and second definitions of any kind, where they are more than a few.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut names: BTreeMap<String, Vec<Definition>> = BTreeMap::new();
    for (path, text) in tree.texts(".rs").filter(|(path, _)| is_library(path)) {
        for (name, definition) in definitions(path, text) {
            let known = names.entry(name).or_default();
            // Alternatives of one definition, by feature, stand in one file.
            if !known.iter().any(|other| other.path == path) {
                known.push(definition);
            }
        }
    }
    let repeated = || names.iter().filter(|(name, _)| !REPEATED.contains(&&***name));
    let public = repeated().flat_map(|(name, all)| again(name, all.iter().filter(|d| d.public)));
    let many = repeated().filter(|(_, all)| all.len() > 1).count() * ONE_IN > names.len() + ONE_IN;
    let private = repeated().filter(|_| many).flat_map(|(name, all)| again(name, all.iter()));
    public.chain(private).collect()
}

struct Definition {
    path: String,
    line: usize,
    public: bool,
}

fn again<'a>(name: &str, mut all: impl Iterator<Item = &'a Definition>) -> Vec<Finding> {
    let Some(first) = all.next() else { return Vec::new() };
    let why = format!(
        "the type name `{name}` exists already, in {}:{}: give this one a name of its own",
        first.path, first.line
    );
    all.map(|second| Finding::new(&second.path, second.line, why.clone())).collect()
}

fn is_library(path: &str) -> bool {
    let is_test = path.ends_with("/tests.rs") || path.contains("/tests/");
    path.contains("/src/") && !is_test && !PROGRAMS.iter().any(|program| path.starts_with(program))
}

/// The types that are defined at the top of a module. Types within functions, unit tests and associated types are in
/// brackets, and no concern of anybody else.
fn definitions(path: &str, text: &str) -> Vec<(String, Definition)> {
    const KEYWORDS: [&str; 5] = ["struct", "enum", "trait", "union", "type"];
    let tokens = tokens(text);
    let public = |at: usize| {
        let before = tokens[..at].iter().rev().find(|token| !is(token, "unsafe"));
        before.is_some_and(|token| is(token, "pub"))
    };
    let named = |(at, pair): (usize, &[TokenTree])| match pair {
        [keyword, TokenTree::Ident(name)] if KEYWORDS.iter().any(|word| is(keyword, word)) => {
            let definition = Definition { path: path.into(), line: line_of(keyword), public: public(at) };
            Some((name.to_string(), definition))
        }
        _ => None,
    };
    tokens.windows(2).enumerate().filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn a_second_definition_is_found() {
        let files = [("a/src/x.rs", "pub struct Plan;\n"), ("b/src/y.rs", "\npub enum Plan<T> { A(T) }\n")];
        expect(check, &files, &["b/src/y.rs:2: the type name `Plan` exists already, in a/src/x.rs:1"]);
    }

    #[test]
    fn comments_inner_types_tests_and_programs_do_not_count() {
        let twice = [
            ("a/src/x.rs", "struct Plan;\nfn f() {\n    struct Plan;\n}\nimpl T for U {\n    type Plan = u8;\n}\n"),
            ("a/src/y.rs", "// struct Plan\nfn f(s: &str) {}\n#[cfg(test)]\nmod tests {\nstruct Plan;\n}\n"),
            ("a/src/tests.rs", "struct Plan;\n"),
            ("a/tests/z.rs", "struct Plan;\n"),
            ("xtask/src/w.rs", "struct Plan;\n"),
        ];
        expect(check, &twice, &[]);
    }

    #[test]
    fn few_private_names_may_repeat() {
        let few = [("a/src/x.rs", "pub struct Plan;\n"), ("b/src/y.rs", "pub(crate) struct Plan;\n")];
        expect(check, &few, &[]);
        let many = [("a/src/x.rs", "struct Plan;\nstruct Step;\n"), ("b/src/y.rs", "struct Plan;\nstruct Step;\n")];
        expect(check, &many, &["b/src/y.rs:1: the type name `Plan`", "b/src/y.rs:2: the type name `Step`"]);
    }

    #[test]
    fn names_of_the_table_may_repeat() {
        for name in REPEATED {
            let text = format!("pub struct {name};\n");
            expect(check, &[("a/src/x.rs", &text), ("b/src/x.rs", &text)], &[]);
        }
    }
}

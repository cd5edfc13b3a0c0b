//! Rule: a type name exists once in the library crates, so that a reader who meets it knows what it is.

use std::collections::BTreeMap;

use super::Finding;
use super::rust::{code_only, is_word, line_of, words};
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

/// Every second definition of a name.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut first: BTreeMap<String, (String, usize)> = BTreeMap::new();
    let mut found = Vec::new();
    for (path, text) in tree.texts(".rs").filter(|(path, _)| is_library(path)) {
        let code = code_only(text);
        for (name, line) in definitions(library_part(&code)) {
            if REPEATED.contains(&name) {
                continue;
            }
            match first.get(name) {
                // Alternatives of one definition, by feature, stand in one file.
                Some((other, _)) if other == path => {}
                Some((other, at)) => {
                    let why = format!(
                        "the type name `{name}` exists already, in {other}:{at}: give this one a name of its own"
                    );
                    found.push(Finding::new(path, line, why));
                }
                None => drop(first.insert(name.into(), (path.into(), line))),
            }
        }
    }
    found
}

fn is_library(path: &str) -> bool {
    let is_test = path.ends_with("/tests.rs") || path.contains("/tests/");
    path.contains("/src/") && !is_test && !PROGRAMS.iter().any(|program| path.starts_with(program))
}

/// What stands before the file's own tests.
fn library_part(code: &str) -> &str {
    code.find("#[cfg(test)]\nmod ").map_or(code, |at| &code[..at])
}

/// The names of the types that are defined at the top of a module, and their lines. Types within functions and
/// associated types are indented, and no concern of anybody else.
fn definitions(code: &str) -> Vec<(&str, usize)> {
    let keywords = ["struct", "enum", "trait", "union", "type"];
    let of = |keyword: &'static str| words(code, keyword).filter_map(move |at| Some((name(code, at, keyword)?, at)));
    let mut all: Vec<(&str, usize)> = keywords.into_iter().flat_map(of).collect();
    all.sort_by_key(|&(_, at)| at);
    all.into_iter().map(|(name, at)| (name, line_of(code, at))).collect()
}

fn name<'a>(code: &'a str, at: usize, keyword: &str) -> Option<&'a str> {
    let line = code[..at].rfind('\n').map_or(0, |end| end + 1);
    let before = &code[line..at];
    let is_item = before.is_empty() || before.starts_with("pub") || before.starts_with("unsafe ");
    let after = code[at + keyword.len()..].trim_start();
    let end = after.find(|c| !is_word(c)).unwrap_or(after.len());
    (is_item && end > 0).then(|| &after[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn a_second_definition_is_found() {
        let files = [("a/src/x.rs", "pub struct Plan;\n"), ("b/src/y.rs", "\npub(crate) enum Plan<T> { A(T) }\n")];
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
    fn names_of_the_table_may_repeat() {
        for name in REPEATED {
            let text = format!("struct {name};\n");
            expect(check, &[("a/src/x.rs", &text), ("b/src/x.rs", &text)], &[]);
        }
    }
}

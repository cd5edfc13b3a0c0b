//! Rule: one concept per file. A file past the limit holds two.

use super::Finding;
use proc_macro2::TokenTree;

use super::rust::{holds, is, line_of, tokens};
use super::tree::Tree;

const LIMIT: usize = 400;
const TEST_LIMIT: usize = 600;
const GENERATED: &str = "// @generated";

/// Finds Rust files whose lines before the test module exceed the limit; test files have a higher one.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.texts(".rs")
        .filter(|(_, text)| !text.starts_with(GENERATED))
        .filter_map(|(path, text)| judge(path, text))
        .collect()
}

fn judge(path: &str, text: &str) -> Option<Finding> {
    let (lines, limit) =
        if is_test_file(path) { (text.lines().count(), TEST_LIMIT) } else { (lines_before_tests(text), LIMIT) };
    (lines > limit)
        .then(|| Finding::new(path, limit + 1, format!("{lines} lines, the limit is {limit}: split it by concept")))
}

fn is_test_file(path: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    name == "tests.rs" || folders.split('/').any(|folder| folder == "tests")
}

/// The lines up to a `#[cfg(test)] mod name { … }` that ends the file; all lines without one.
fn lines_before_tests(text: &str) -> usize {
    let tokens = tokens(text);
    let [before @ .., r#mod, TokenTree::Ident(_), TokenTree::Group(_)] = &tokens[..] else {
        return text.lines().count();
    };
    let mut attributes = before.rchunks(2).take_while(|attribute| matches!(attribute, [mark, _] if is(mark, "#")));
    let tests = attributes.find(|attribute| is(r#mod, "mod") && holds(&attribute[1], "cfg (test)"));
    tests.map_or(text.lines().count(), |attribute| line_of(&attribute[0]) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    const TESTS: &str = "\n#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n";

    fn long(lines: usize) -> String {
        "x();\n".repeat(lines)
    }

    #[test]
    fn the_limit_itself_is_allowed() {
        expect(check, &[("a/src/b.rs", &long(LIMIT))], &[]);
        expect(check, &[("a/src/b.rs", &long(LIMIT + 1))], &["a/src/b.rs:401: 401 lines"]);
    }

    #[test]
    fn tests_at_the_end_are_free() {
        let text = long(LIMIT - 1) + TESTS + "\n";
        expect(check, &[("a/src/b.rs", &text)], &[]);
        assert_eq!(lines_before_tests(&(long(3) + "\n#[cfg(test)]\n#[allow(x)]\nmod tests {\n}\n")), 4);
    }

    #[test]
    fn code_after_or_without_a_test_module_counts() {
        assert_eq!(lines_before_tests(&(long(3) + TESTS + "fn g() {}\n")), 9);
        assert_eq!(lines_before_tests("#[cfg(test)]\nmod tests;\nfn f() {\n}\n"), 4);
        assert_eq!(lines_before_tests("#[cfg(test)]\nfn f() {\n}\n"), 3);
        assert_eq!(lines_before_tests(&format!("let x = \"{TESTS}\";\n")), 6);
    }

    #[test]
    fn test_files_have_a_wider_limit() {
        for path in ["a/tests/b.rs", "a/src/b/tests.rs"] {
            expect(check, &[(path, &long(TEST_LIMIT))], &[]);
            expect(check, &[(path, &long(TEST_LIMIT + 1))], &[&format!("{path}:601: 601 lines")]);
        }
    }

    #[test]
    fn generated_files_are_free() {
        expect(check, &[("a/src/b.rs", &(format!("{GENERATED} by c\n") + &long(LIMIT)))], &[]);
    }
}

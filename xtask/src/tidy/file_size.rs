//! Rule: one concept per file. A file past the limit holds two.

use super::Finding;
use super::rust::code_only;
use super::tree::Tree;

const LIMIT: usize = 400;
const TEST_LIMIT: usize = 600;
const GENERATED: &str = "// @generated";

/// Finds Rust files whose lines before the test module exceed the limit; test files have a higher one.
pub fn check(tree: &Tree) -> Vec<Finding> {
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
    let code = code_only(text);
    let lines: Vec<&str> = code.lines().map(str::trim_end).collect();
    let start = lines.iter().rposition(|&line| line == "#[cfg(test)]");
    start.filter(|&at| is_last_module(&lines[at + 1..])).unwrap_or(lines.len())
}

/// Whether the lines are one module, formatted: its closing brace is the only one in the first column.
fn is_last_module(lines: &[&str]) -> bool {
    let opens = lines.iter().find(|line| !line.is_empty() && !line.starts_with("#["));
    let close = lines.iter().position(|&line| line == "}");
    opens.is_some_and(|line| line.split(' ').any(|word| word == "mod") && line.ends_with('{'))
        && close.is_some_and(|at| lines[at + 1..].iter().all(|line| line.is_empty()))
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

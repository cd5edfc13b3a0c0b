//! Rule: a doc comment can be read alone. In rustdoc nothing stands above it that "the same" or "its" could mean.

use super::Finding;
use super::tree::Tree;

const OPENINGS: &[&str] = &["The same", "As [", "As `", "Its ", "Their ", "Those ", "That "];

/// Every first line of a doc comment that refers to what is not there. Programs that nobody reads in rustdoc are exempt.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.texts(".rs").filter(|(path, _)| is_documented(path)).flat_map(|(path, text)| in_file(path, text)).collect()
}

fn is_documented(path: &str) -> bool {
    path.contains("/src/") && !path.contains("/bin/") && !path.starts_with("xtask/") && !path.ends_with("tests.rs")
}

fn in_file(path: &str, text: &str) -> Vec<Finding> {
    let (mut found, mut inside) = (Vec::new(), false);
    for (i, line) in text.lines().enumerate() {
        let comment = line.trim_start().strip_prefix("///").map(str::trim_start);
        if let Some(opening) = comment.filter(|_| !inside).and_then(opening) {
            let why = format!("a doc comment begins with \"{}\": name what it is about", opening.trim_end());
            found.push(Finding::new(path, i + 1, why));
        }
        inside = comment.is_some();
    }
    found
}

fn opening(comment: &str) -> Option<&'static str> {
    OPENINGS.iter().copied().find(|opening| comment.starts_with(opening))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn openings_are_found() {
        for opening in OPENINGS {
            let text = format!("/// One thing.\nstruct A;\n    /// {opening}x.\nstruct B;\n");
            expect(check, &[("a/src/x.rs", &text)], &["a/src/x.rs:3: a doc comment begins with"]);
        }
    }

    #[test]
    fn later_lines_and_other_files_are_let_be() {
        let text = "/// One thing.\n/// Its name.\n// Its reason.\nstruct A;\n";
        expect(check, &[("a/src/x.rs", text), ("a/tests/x.rs", "/// Its name.\n")], &[]);
    }
}

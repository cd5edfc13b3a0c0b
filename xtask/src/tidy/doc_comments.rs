//! Rule: a doc comment can be read alone. It begins with a noun or a verb of the field, not with a pronoun or a relative
//! clause, and fits a page of 120 columns.

use super::Finding;
use super::tree::Tree;

/// Openings that refer to what is not there: in rustdoc nothing stands above a comment.
const PRONOUNS: &[&str] = &["The same", "As [", "As `", "Its ", "Their ", "Those ", "That "];

/// Openings of a clause in place of a name.
const CLAUSES: &[&str] = &[
    "What ",
    "Whatever ",
    "Whether ",
    "How ",
    "Who ",
    "Whoever ",
    "Whose ",
    "Which ",
    "Where ",
    "When ",
    "If ",
    "So many ",
];

/// Sources in which a comment begins with no clause and is no wider than [`COLUMNS`].
const PLAIN: &[&str] = &[
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
    "nn-derive/",
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

const COLUMNS: usize = 120;

/// Every doc comment that does not name its object first, and every comment that is too wide. Programs that nobody reads
/// in rustdoc are exempt.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.texts(".rs").filter(|(path, _)| is_documented(path)).flat_map(|(path, text)| in_file(path, text)).collect()
}

pub(super) fn is_documented(path: &str) -> bool {
    path.contains("/src/") && !path.contains("/bin/") && !path.starts_with("xtask/") && !path.ends_with("tests.rs")
}

fn in_file(path: &str, text: &str) -> Vec<Finding> {
    let is_plain = PLAIN.iter().any(|sources| path.starts_with(sources));
    let clauses = if is_plain { CLAUSES } else { &[] };
    let (mut found, mut inside) = (Vec::new(), false);
    for (i, line) in text.lines().enumerate() {
        let line = line.trim_end();
        let comment = ["///", "//!"].iter().find_map(|mark| line.trim_start().strip_prefix(mark)).map(str::trim_start);
        let opens = comment.filter(|_| !inside);
        if let Some(opening) =
            opens.and_then(|comment| PRONOUNS.iter().chain(clauses).find(|o| comment.starts_with(**o)))
        {
            let why = format!("a doc comment begins with \"{}\": name what it is about", opening.trim_end());
            found.push(Finding::new(path, i + 1, why));
        }
        // A row of a table is a line.
        let may_be_wide =
            !line.trim_start().starts_with("//") || line.contains("://") || comment.is_some_and(|c| c.starts_with('|'));
        let columns = line.chars().count();
        if is_plain && !may_be_wide && columns > COLUMNS {
            found.push(Finding::new(path, i + 1, format!("a comment of {columns} columns: {COLUMNS} at most")));
        }
        inside = comment.is_some();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn openings_are_found() {
        for (path, opening) in
            PRONOUNS.iter().map(|o| ("a/src/x.rs", o)).chain(CLAUSES.iter().map(|o| ("train/src/x.rs", o)))
        {
            let text = format!("/// One thing.\nstruct A;\n    /// {opening}x.\nstruct B;\n");
            expect(check, &[(path, &text)], &[&format!("{path}:3: a doc comment begins with")]);
        }
    }

    #[test]
    fn wide_comments_are_found() {
        let text = format!("//! {}\nfn f() {{}} // {}\n", "x".repeat(117), "x".repeat(117));
        expect(check, &[("comm/src/x.rs", &text)], &["comm/src/x.rs:1: a comment of 121 columns"]);
        expect(check, &[("a/src/x.rs", &text)], &[]);
    }

    #[test]
    fn later_lines_and_other_files_are_let_be() {
        let text = "/// One thing.\n/// Its name.\n// Its reason.\nstruct A;\n";
        expect(check, &[("a/src/x.rs", text), ("a/tests/x.rs", "/// Its name.\n")], &[]);
    }
}

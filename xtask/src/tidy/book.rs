//! Rule: the book is whole. `SUMMARY.md` lists every chapter once, each chapter's code is a test of the facade, no block of it is left out of
//! the tests, a link to a heading of a chapter finds one, and no chapter links out of the book, whose pages are rendered elsewhere.

use std::collections::BTreeMap;

use super::Finding;
use super::markdown::{anchors, fences, link_targets, prose};
use super::tree::{Tree, resolve};

/// Where the chapters are.
const FOLDER: &str = "docs/book/src/";

const SUMMARY: &str = "docs/book/src/SUMMARY.md";

/// Where each chapter has a line of [`CALL`].
const FACADE: &str = "weftgrad/src/lib.rs";

/// The macro that makes tests of a chapter's code.
const CALL: &str = "chapter!(";

/// The widest line of prose.
const COLUMNS: usize = 120;

/// What is missing of the book, what is there twice, and links to headings that are not there.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let chapters = || tree.texts(".md").filter(|(path, _)| path.starts_with(FOLDER) && *path != SUMMARY);
    if chapters().next().is_none() {
        return Vec::new();
    }
    let mut found = listed(tree);
    let tested = tree.text(FACADE).unwrap_or_default();
    for (path, text) in chapters() {
        let name = path.trim_start_matches(FOLDER);
        if !tested.lines().any(|line| line.contains(CALL) && line.contains(&format!("\"{name}\""))) {
            found.push(Finding::new(path, 1, format!("no `{CALL}..)` of {FACADE} makes tests of this chapter's code")));
        }
        let ignored = fences(text).filter(|(_, words)| is_ignored(words));
        found.extend(ignored.map(|(line, words)| {
            Finding::new(
                path,
                line,
                format!("`{words}`: a block that no test compiles; say `no_run`, or `text` for what is no program"),
            )
        }));
        found.extend(wide(path, text));
        found.extend(outside(path, text));
    }
    found.extend(tree.texts(".md").flat_map(|(path, text)| lost_anchors(tree, path, text)));
    found
}

/// Chapters that the summary does not list, or lists more than once.
fn listed(tree: &Tree) -> Vec<Finding> {
    let Some(summary) = tree.text(SUMMARY) else { return vec![Finding::new(SUMMARY, 1, "the book has no summary")] };
    let mut lines: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (line, prose) in prose(summary) {
        for path in link_targets(prose).iter().filter_map(|target| resolve(SUMMARY, target)) {
            lines.entry(path).or_default().push(line);
        }
    }
    let missing = tree.texts(".md").filter(|(path, _)| path.starts_with(FOLDER) && *path != SUMMARY);
    let missing = missing.filter(|(path, _)| !lines.contains_key(*path));
    let mut found: Vec<Finding> =
        missing.map(|(path, _)| Finding::new(path, 1, format!("{SUMMARY} does not list this chapter"))).collect();
    let twice = lines.iter().filter(|(_, at)| at.len() > 1);
    found.extend(twice.map(|(path, at)| Finding::new(SUMMARY, at[1], format!("`{path}` is listed twice"))));
    found
}

/// Lines of prose that are wider than a page. Rows of tables are lines, and links may not break.
fn wide(path: &str, text: &str) -> Vec<Finding> {
    let lines = prose(text).filter(|(_, line)| !line.starts_with('|') && !line.contains("]("));
    let columns = lines.map(|(number, line)| (number, line.chars().count())).filter(|(_, columns)| *columns > COLUMNS);
    columns
        .map(|(n, columns)| Finding::new(path, n, format!("a line of {columns} columns: {COLUMNS} at most")))
        .collect()
}

/// Whether a block with these words after its fence is Rust that rustdoc does not compile.
fn is_ignored(words: &str) -> bool {
    words.split(',').map(str::trim).any(|word| word == "ignore" || word.starts_with("ignore-"))
}

/// Links of a chapter to files of the repository that are not chapters.
fn outside(path: &str, text: &str) -> Vec<Finding> {
    let targets =
        prose(text).flat_map(|(line, prose)| link_targets(prose).into_iter().map(move |target| (line, target)));
    let out = targets.filter(|(_, target)| {
        let file = target.split('#').next().unwrap_or_default();
        !file.contains("://")
            && !file.starts_with("mailto:")
            && resolve(path, file).is_none_or(|to| !to.starts_with(FOLDER.trim_end_matches('/')))
    });
    out.map(|(line, target)| {
        Finding::new(path, line, format!("`{target}` is not in the book: name the file in backticks"))
    })
    .collect()
}

/// Links, of any page, to a heading that a chapter does not have.
fn lost_anchors(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let targets =
        prose(text).flat_map(|(line, prose)| link_targets(prose).into_iter().map(move |target| (line, target)));
    let lost = targets.filter(|(_, target)| {
        let Some((file, anchor)) = target.split_once('#') else { return false };
        let page = if file.is_empty() { Some(path.to_string()) } else { resolve(path, file) };
        let page = page.filter(|page| page.starts_with(FOLDER));
        let headings = page.and_then(|page| tree.text(&page)).map(anchors);
        headings.is_some_and(|headings| !headings.iter().any(|heading| heading == anchor))
    });
    lost.map(|(line, target)| Finding::new(path, line, format!("`{target}`: there is no such heading"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    const A: &str = "docs/book/src/a.md";
    const B: &str = "docs/book/src/b.md";
    const BOTH: &str = "- [A](a.md)\n- [B](b.md)";
    const TESTED: &str = "chapter!(a, \"a.md\");\nchapter!(b, \"b.md\");";

    fn check_chapter(text: &str, findings: &[&str]) {
        expect(check, &[(SUMMARY, BOTH), (FACADE, TESTED), (A, text), (B, "# B\n\n## One part\n")], findings);
    }

    #[test]
    fn a_whole_book_is_fine() {
        check_chapter("# A\n[b](b.md#one-part) [web](https://example.org#x)", &[]);
        expect(check, &[("README.md", "[x](#gone)")], &[]);
    }

    #[test]
    fn every_chapter_is_listed_once() {
        let files = |summary| [(SUMMARY, summary), (FACADE, TESTED), (A, ""), (B, "")];
        expect(check, &files("- [A](a.md)"), &["docs/book/src/b.md:1: docs/book/src/SUMMARY.md does not list"]);
        expect(
            check,
            &files("[A](a.md)\n[B](b.md)\n[A](a.md)"),
            &["docs/book/src/SUMMARY.md:3: `docs/book/src/a.md` is"],
        );
        expect(check, &[(FACADE, TESTED), (A, "")], &["docs/book/src/SUMMARY.md:1: the book has no summary"]);
    }

    #[test]
    fn every_chapter_is_tested() {
        let half = "chapter!(a, \"a.md\");\n// \"b.md\"";
        expect(check, &[(SUMMARY, BOTH), (FACADE, half), (A, ""), (B, "")], &["docs/book/src/b.md:1: no `chapter!("]);
    }

    #[test]
    fn no_block_is_ignored() {
        check_chapter("```rust,no_run\n```\n```text\nignore\n```\n", &[]);
        check_chapter("x\n```rust,ignore\n```\n", &["docs/book/src/a.md:2: `rust,ignore`"]);
        check_chapter("```ignore-windows\n```\n", &["docs/book/src/a.md:1: `ignore-windows`"]);
    }

    #[test]
    fn wide_lines_of_prose_are_found() {
        let wide = "x".repeat(121);
        check_chapter(&format!("| {wide}\n```text\n{wide}\n```\n[{wide}](b.md)\n"), &[]);
        check_chapter(&format!("x\n{wide}\n"), &["docs/book/src/a.md:2: a line of 121 columns"]);
    }

    #[test]
    fn chapters_link_to_chapters() {
        check_chapter(
            "[x](../../../weftgrad/src/lib.rs)",
            &["docs/book/src/a.md:1: `../../../weftgrad/src/lib.rs` is not"],
        );
    }

    #[test]
    fn headings_that_are_linked_are_there() {
        check_chapter(
            "# A `b`, c\n[x](#a-b-c)\n[y](b.md#two)\n[z](#gone)",
            &["docs/book/src/a.md:3: `b.md#two`", "docs/book/src/a.md:4: `#gone`"],
        );
        let readme = [("README.md", "[x](docs/book/src/a.md#gone)"), (SUMMARY, "[A](a.md)"), (FACADE, TESTED), (A, "")];
        expect(check, &readme, &["README.md:1: `docs/book/src/a.md#gone`"]);
    }
}

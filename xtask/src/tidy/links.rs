//! Rule: relative links in Markdown lead somewhere.

use super::Finding;
use super::markdown::{link_targets, prose};
use super::tree::{Tree, resolve};

/// Finds links of any Markdown file to a file or folder that does not exist.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.texts(".md").flat_map(|(path, text)| broken(tree, path, text)).collect()
}

fn broken(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let targets =
        prose(text).flat_map(|(line, prose)| link_targets(prose).into_iter().map(move |target| (line, target)));
    let broken = targets.filter(|(_, target)| !leads_somewhere(tree, path, target));
    broken.map(|(line, target)| Finding::new(path, line, format!("the link to `{target}` leads nowhere"))).collect()
}

/// URLs and anchors within the page are not checked.
fn leads_somewhere(tree: &Tree, from: &str, target: &str) -> bool {
    let file = target.split('#').next().unwrap_or_default();
    let trusted = file.is_empty() || file.contains("://") || file.starts_with("mailto:");
    trusted || resolve(from, file).is_some_and(|path| tree.exists(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    fn check_page(text: &str, findings: &[&str]) {
        expect(check, &[("a/PAGE.md", text), ("README.md", ""), ("a/src/lib.rs", "")], findings);
    }

    #[test]
    fn files_folders_and_addresses_are_fine() {
        check_page("[r](../README.md#part) [s](src/) [t](#here) [w](https://example.org/x) [m](mailto:a@b.c)", &[]);
    }

    #[test]
    fn broken_links_are_found_outside_code() {
        check_page("ok\n[x](gone.md#a)", &["a/PAGE.md:2: the link to `gone.md#a`"]);
        check_page("[x]: ../../outside.md", &["a/PAGE.md:1: the link"]);
        check_page("```\n[x](gone.md)\n```\n`[x](gone.md)`", &[]);
    }
}

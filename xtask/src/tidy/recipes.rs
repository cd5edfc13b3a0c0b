//! Rule: the recipes of CONTRIBUTING.md name files that exist.
//!
//! A recipe is a section `## Recipe: …` whose list names, in backticks, every file to touch. `<name>` in a path stands
//! for a name that the reader chooses: the folders before it must exist.

use super::Finding;
use super::markdown::{code_spans, prose};
use super::tree::{Tree, resolve};

const PAGE: &str = "CONTRIBUTING.md";

/// Recipes without a path, and paths that are not there.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(text) = tree.text(PAGE) else { return vec![Finding::new(PAGE, 1, "the page of recipes is missing")] };
    let recipes = recipes(text);
    if recipes.is_empty() {
        return vec![Finding::new(PAGE, 1, "no section `## Recipe: …`")];
    }
    recipes.iter().flat_map(|recipe| recipe.complaints(tree)).collect()
}

struct Recipe<'a> {
    line: usize,
    paths: Vec<(usize, &'a str)>,
}

impl Recipe<'_> {
    fn complaints(&self, tree: &Tree) -> Vec<Finding> {
        if self.paths.is_empty() {
            return vec![Finding::new(PAGE, self.line, "this recipe lists no file: name each in backticks in a list")];
        }
        let gone = self.paths.iter().filter(|(_, path)| !is_there(tree, path));
        gone.map(|(line, path)| Finding::new(PAGE, *line, format!("`{path}` of this recipe is not there"))).collect()
    }
}

fn recipes(text: &str) -> Vec<Recipe<'_>> {
    let mut found: Vec<Recipe> = Vec::new();
    let (mut in_recipe, mut in_item) = (false, false);
    for (line, prose) in prose(text) {
        if prose.starts_with("# ") || prose.starts_with("## ") {
            in_recipe = prose.starts_with("## Recipe:");
            found.extend(in_recipe.then_some(Recipe { line, paths: Vec::new() }));
        }
        in_item = is_item(prose) || (in_item && continues_item(prose));
        if let Some(recipe) = found.last_mut().filter(|_| in_recipe && in_item) {
            recipe.paths.extend(code_spans(prose).filter(|span| is_path(span)).map(|span| (line, span)));
        }
    }
    found
}

fn is_item(line: &str) -> bool {
    let line = line.trim_start();
    let after_digits = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ")
        || line.starts_with("* ")
        || (after_digits.len() < line.len() && after_digits.starts_with(". "))
}

/// Any line but a blank one or a heading continues the item above it.
fn continues_item(line: &str) -> bool {
    !line.trim().is_empty() && !line.starts_with('#')
}

/// Whether a code span is a path rather than code: a slash or a file's ending, and no character that only code has.
fn is_path(span: &str) -> bool {
    const ENDINGS: [&str; 5] = [".rs", ".md", ".toml", ".json", ".safetensors"];
    let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "._-/<>".contains(c));
    plain && (span.contains('/') || ENDINGS.iter().any(|ending| span.ends_with(ending)))
}

fn is_there(tree: &Tree, path: &str) -> bool {
    let known =
        path.split_once('<').map_or(path, |(before, _)| before.rsplit_once('/').map_or("", |(folder, _)| folder));
    resolve(PAGE, known).is_some_and(|path| tree.exists(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    fn check_page(text: &str, findings: &[&str]) {
        expect(check, &[(PAGE, text), ("numcore/src/pointwise/expr.rs", ""), ("Cargo.toml", "")], findings);
    }

    #[test]
    fn files_folders_and_placeholders_exist() {
        check_page(
            "## Recipe: an op\n1. `numcore/src/pointwise/expr.rs`: a variant\n2. `numcore/src/`\n* `Cargo.toml`",
            &[],
        );
        check_page("## Recipe: a runtime\n- `runtime-<name>/src/lib.rs`\n- `numcore/src/<op>.rs`", &[]);
    }

    #[test]
    fn what_is_not_there_is_found() {
        check_page(
            "## Recipe: x\n\n- `numcore/gone.rs`, or\n  `gone/<op>.rs`",
            &["CONTRIBUTING.md:3: `numcore/gone.rs`", "CONTRIBUTING.md:4: `gone/<op>.rs`"],
        );
    }

    #[test]
    fn code_is_no_path() {
        check_page("## Recipe: x\n- `Cargo.toml`: add `a::b`, `f(x)`, `cargo test -p a/b`, `gelu`", &[]);
        assert!(!is_path("Expr::gelu") && !is_path("a / b") && is_path("LICENSES/MIT"));
    }

    #[test]
    fn only_lists_of_recipes_count() {
        let text = "- `gone/a.rs`\n## Recipe: x\nsee `gone/b.rs`\n\n- `Cargo.toml`\n\nsee `gone/c.rs`\n## Other\n- `gone/d.rs`";
        check_page(text, &[]);
    }

    #[test]
    fn a_recipe_lists_something() {
        check_page("intro\n## Recipe: x\nno list", &["CONTRIBUTING.md:2: this recipe lists no file"]);
    }

    #[test]
    fn the_page_has_recipes() {
        expect(check, &[], &["CONTRIBUTING.md:1: the page of recipes is missing"]);
        check_page("text", &["CONTRIBUTING.md:1: no section"]);
    }
}

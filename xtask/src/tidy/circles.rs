//! Rule: the modules of a crate make a tree: none uses another that uses it, on whatever way.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::tree::Tree;

/// The crates that are looked at. Those below are engines of one piece: tensors and their operations, the tape, kernels.
const CRATES: &[&str] = &[
    "adaptive",
    "comm",
    "data",
    "distributed",
    "engine-mpi",
    "engine-nccl",
    "engine-process",
    "models-export",
    "pipeline-schedule",
    "train",
    "watch",
    "weftgrad",
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    CRATES.iter().flat_map(|name| of_crate(tree, &format!("{name}/src/"))).collect()
}

fn of_crate(tree: &Tree, sources: &str) -> Vec<Finding> {
    let uses = uses(tree, sources);
    let circles = uses.iter().filter(|((from, to), _)| reaches(&uses, to, from));
    circles.map(|((from, to), path)| Finding::new(path, 1, format!("`{from}` uses `{to}`, which uses it"))).collect()
}

/// Which module uses which, and a file where it does.
type Uses = BTreeMap<(String, String), String>;

fn uses(tree: &Tree, sources: &str) -> Uses {
    let files: Vec<(&str, &str, &str)> = tree.texts(".rs").filter_map(|file| of_module(file, sources)).collect();
    let modules: BTreeSet<&str> = files.iter().map(|(module, ..)| *module).collect();
    let mut uses = Uses::new();
    for (module, path, text) in files {
        for used in used(text).into_iter().filter(|used| *used != module && modules.contains(used)) {
            uses.entry((module.into(), used.into())).or_insert_with(|| path.into());
        }
    }
    uses
}

fn of_module<'t>((path, text): (&'t str, &'t str), sources: &str) -> Option<(&'t str, &'t str, &'t str)> {
    let module = path.strip_prefix(sources)?.split('/').next()?;
    let module = module.strip_suffix(".rs").unwrap_or(module);
    (module != "lib").then_some((module, path, text))
}

/// The modules that a text names after `crate::`, but for comments and unit tests.
fn used(text: &str) -> BTreeSet<&str> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut used = BTreeSet::new();
    for (at, _) in text.match_indices("crate::") {
        let line = text[..at].rsplit('\n').next().unwrap_or_default();
        let rest = &text[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            _ if line.trim_start().starts_with("//") => {}
            Some(group) => used.extend(first_names(group)),
            None => used.extend(first_name(rest)),
        }
    }
    used
}

/// The first name of each path in a group, up to its closing brace.
fn first_names(group: &str) -> Vec<&str> {
    let (mut depth, mut names, mut starts) = (0, Vec::new(), true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => starts = true,
            c if starts && depth == 0 && !c.is_whitespace() => {
                names.extend(first_name(&group[at..]));
                starts = false;
            }
            _ => {}
        }
    }
    names
}

fn first_name(path: &str) -> Option<&str> {
    path.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().filter(|name| !name.is_empty())
}

fn reaches(uses: &Uses, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        if module == to {
            return true;
        }
        if seen.insert(module) {
            next.extend(uses.keys().filter(|(user, _)| user == module).map(|(_, used)| &used[..]));
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).into_iter().map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn modules_that_use_each_other_are_found_on_any_way() {
        let tree = [
            ("distributed/src/a.rs", "use crate::{\n    comm::{Comm, Ranks},\n    b::{B, C},\n};"),
            ("distributed/src/b/mod.rs", "fn f() { crate::c::g() }"),
            ("distributed/src/c.rs", "// crate::a is not used here\nuse crate::plan::Axis;"),
            ("distributed/src/plan.rs", ""),
        ];
        assert!(findings(&tree).is_empty());
        let mut circle = tree;
        circle[3].1 = "use crate::a::A;";
        assert_eq!(findings(&circle).len(), 4, "{:?}", findings(&circle));
        circle[3].1 = "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}";
        assert!(findings(&circle).is_empty());
    }
}

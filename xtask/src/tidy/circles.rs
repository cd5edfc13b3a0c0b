//! Rule: the modules of a crate make a tree: none uses another that uses it, on whatever way.
//!
//! A module is a file or a folder beside `lib.rs`. It uses another if it names it from the root of the crate, or names an
//! item of it that `lib.rs` re-exports.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::paths::{Named, named};
use super::tree::Tree;

/// A use that is let be although it closes circles.
struct Known {
    of: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn known(of: &'static str, from: &'static str, to: &'static str) -> Known {
    Known { of, from, to }
}

/// Crates whose modules are parts of one thing.
const EXEMPT: &[&str] = &[
    // The engine: a node keeps what its backward needs, and the sweep, hooks and modes are methods of values on the tape.
    "autograd",
];

/// The circles that are left, each cut at one use. A row that cuts nothing is a finding.
const KNOWN: &[Known] = &[
    // Quantizing takes a model as `Pretrained`, whose saving stores quantized weights, and names layers as LoRA does.
    known("models", "quantize", "lora"),
    known("models", "quantize", "pretrained"),
    // Plans of tensor parallelism walk modules, whose parameters know their cuts and exchanges.
    known("nn", "parallel", "module"),
    known("nn", "parallel", "param"),
    known("nn", "parallel", "walk"),
    // Errors show shapes, and shapes are checked.
    known("numcore", "shape", "error"),
    // Operations compute on tensors, whose methods are operations; a fused one decomposes into them.
    known("numcore", "ops", "fused"),
    known("numcore", "ops", "tensor"),
    // The rule of an optimizer, its state in shards, and the memory that both write: one update.
    known("optim", "clip", "gradients"),
    known("optim", "flat_optimizer", "further_params"),
    known("optim", "flat_optimizer", "optimizer"),
    known("optim", "memory", "captured"),
    known("optim", "optimizer", "combined"),
    known("optim", "params", "memory"),
    known("optim", "params", "rule"),
    known("optim", "rule", "elementwise"),
    // An engine keeps the choices that its queues have measured.
    known("runtime-cuda", "engine", "tuned"),
    // A device keeps its pipelines, which are compiled on it.
    known("runtime-wgpu", "pipelines", "device"),
];

const SELF: &str = "xtask/src/tidy/circles.rs";

/// Every use that is part of a circle.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let roots = tree.texts("/src/lib.rs").filter_map(|(path, text)| Some((path.strip_suffix("/src/lib.rs")?, text)));
    roots.filter(|(name, _)| !EXEMPT.contains(name)).flat_map(|(name, text)| of_crate(tree, name, text)).collect()
}

fn of_crate(tree: &Tree, name: &str, root: &str) -> Vec<Finding> {
    let mut uses = uses(tree, &format!("{name}/src/"), root);
    let known: Vec<(String, String)> =
        KNOWN.iter().filter(|known| known.of == name).map(|known| (known.from.into(), known.to.into())).collect();
    let all = uses.clone();
    uses.retain(|edge, _| !known.contains(edge));
    let idle =
        known.iter().filter(|(from, to)| !all.contains_key(&(from.clone(), to.clone())) || !reaches(&uses, to, from));
    let mut found: Vec<Finding> =
        idle.map(|(from, to)| Finding::new(SELF, 1, format!("{name}: `{from}` to `{to}` cuts no circle"))).collect();
    let circles = uses.iter().filter(|((from, to), _)| reaches(&uses, to, from));
    found.extend(
        circles.map(|((from, to), (path, line))| {
            Finding::new(path, *line, format!("`{from}` uses `{to}`, which uses it"))
        }),
    );
    found
}

/// Which module uses which, and the file and line of the first use.
type Uses = BTreeMap<(String, String), (String, usize)>;

fn uses(tree: &Tree, sources: &str, root: &str) -> Uses {
    let files: Vec<(Vec<&str>, &str, &str)> = tree
        .texts(".rs")
        .filter_map(|(path, text)| Some((module_of(path.strip_prefix(sources)?)?, path, text)))
        .collect();
    let modules: BTreeSet<&str> = files.iter().map(|(module, ..)| module[0]).collect();
    let exports = exports(root, &modules);
    let mut uses = Uses::new();
    for (module, path, text) in &files {
        for Named { names, line, .. } in named(text, module) {
            let used = modules.get(&names[0][..]).copied().or_else(|| exports.get(&names[0]).map(|used| &used[..]));
            if let Some(used) = used.filter(|used| *used != module[0]) {
                uses.entry((module[0].into(), used.into())).or_insert_with(|| (path.to_string(), line));
            }
        }
    }
    uses
}

/// The names that lead to the module of a file; `None` for the root, for programs and for tests.
fn module_of(file: &str) -> Option<Vec<&str>> {
    let file = file.strip_suffix(".rs")?;
    let names: Vec<&str> = file.strip_suffix("/mod").unwrap_or(file).split('/').collect();
    (!matches!(names[0], "lib" | "main" | "bin") && names.last() != Some(&"tests")).then_some(names)
}

/// The modules of the names that the root re-exports.
fn exports(root: &str, modules: &BTreeSet<&str>) -> BTreeMap<String, String> {
    let paths =
        named(root, &[]).into_iter().filter(|path| path.names.len() > 1 && modules.contains(&path.names[0][..]));
    paths.filter_map(|path| Some((path.alias.or(path.names.last().cloned())?, path.names[0].clone()))).collect()
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
            ("x/src/a.rs", "use crate::{\n    comm::{Comm, Ranks},\n    b::{B, C},\n};"),
            ("x/src/b/mod.rs", "fn f() { crate::c::g() }"),
            ("x/src/b/part.rs", "use super::super::c::D;\nuse super::E;"),
            ("x/src/c.rs", "// crate::a is not used here\nuse crate::plan::Axis;"),
            ("x/src/lib.rs", "mod a;\npub use a::{self, A as First};\npub use comm::Comm;"),
            ("x/src/plan.rs", ""),
        ];
        assert!(findings(&tree).is_empty());
        for closing in ["use crate::a::A;", "use super::a;", "fn f() -> crate::First { super::First }"] {
            let mut circle = tree;
            circle[5].1 = closing;
            assert_eq!(findings(&circle).len(), 4, "{closing}: {:?}", findings(&circle));
        }
    }

    #[test]
    fn tests_and_exempt_crates_are_let_be() {
        let tests = "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}";
        assert!(
            findings(&[("x/src/lib.rs", ""), ("x/src/a.rs", "use crate::b::B;"), ("x/src/b.rs", tests)]).is_empty()
        );
        let files = [("lib", ""), ("a", "use super::b::B;"), ("b", "use super::a::A;")];
        let of = |name: &str| files.map(|(file, text)| (format!("{name}/src/{file}.rs"), text));
        for (name, expect) in [("x", 2), (EXEMPT[0], 0)] {
            let files = of(name);
            assert_eq!(findings(&files.each_ref().map(|(path, text)| (&path[..], *text))).len(), expect);
        }
    }
}

//! Rule: dependencies between crates point one way. Dependencies of tests only (dev-dependencies) are free.

use std::collections::BTreeMap;

use super::Finding;
use super::manifest::{Entry, entries, members};
use super::tree::Tree;

/// A crate, and the crates it may depend on; a trailing `*` stands for any ending.
const ALLOWED: &[(&str, &[&str])] = &[
    ("numcore", &[]),
    ("nn-derive", &[]),
    ("autograd", &["numcore"]),
    ("ptx", &[]),
    ("runtime-cuda-emulated", &["numcore", "ptx", "runtime-cuda"]),
    ("runtime-*", &["numcore"]),
    ("comm", &["numcore"]),
    ("data", &["numcore"]),
    ("launch", &[]),
    ("engine-mpi", &["numcore", "engine-process"]),
    ("engine-*", &["numcore", "comm"]),
    ("nn", &["numcore", "autograd", "nn-derive"]),
    ("linalg", &["numcore", "autograd"]),
    ("optim", &["numcore", "autograd", "nn", "linalg"]),
    ("pipeline-schedule", &["numcore"]),
    ("distributed", &["numcore", "autograd", "comm", "nn", "optim", "pipeline-schedule"]),
    ("adaptive", &["numcore", "autograd", "nn", "optim", "distributed"]),
    ("watch", &["numcore", "comm", "data", "pipeline-schedule"]),
    ("train", &["numcore", "autograd", "comm", "nn", "optim", "distributed", "adaptive", "data", "watch"]),
    ("models", &["numcore", "autograd", "nn", "data"]),
    ("models-export", &["numcore", "autograd", "nn", "data", "models"]),
    ("models-import", &["numcore", "autograd", "nn", "data"]),
    // The program reads configurations, draws timelines, and measures the machine it runs on.
    ("planner", &["numcore", "autograd", "nn", "optim", "distributed", "models", "watch", "runtime-*"]),
    // The golden binary needs something to run on.
    ("conformance", &["numcore", "autograd", "nn", "optim", "runtime-*"]),
    ("weftgrad", &["*"]),
    ("examples", &["*"]),
    ("bench", &["*"]),
    ("gpu-check", &["*"]),
    ("xtask", &[]),
];

/// Dependencies the table does not allow, and members it does not list.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let rooms = Rooms::of(tree);
    rooms.members.iter().flat_map(|member| judge(tree, &rooms, member)).collect()
}

fn judge(tree: &Tree, rooms: &Rooms, member: &str) -> Vec<Finding> {
    let path = format!("{member}/Cargo.toml");
    let Some(text) = tree.text(&path) else {
        return vec![Finding::new("Cargo.toml", 1, format!("member {path} is not there"))];
    };
    let Some((_, allowed)) = ALLOWED.iter().find(|(room, _)| matches(room, member)) else {
        return vec![Finding::new(&path, 1, "this room is not in tidy's table of dependencies: add what it may know")];
    };
    let known = entries(text).into_iter().filter_map(|entry| Some((rooms.named_by(&entry)?, entry.line)));
    let wrong = known.filter(|(room, _)| !allowed.iter().any(|pattern| matches(pattern, room)));
    wrong.map(|(room, line)| Finding::new(&path, line, format!("{member} may not depend on {room}"))).collect()
}

fn matches(pattern: &str, room: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == room, |start| room.starts_with(start))
}

/// The workspace's members, and the names its manifests use for them.
struct Rooms {
    members: Vec<String>,
    /// Alias → package, from `[workspace.dependencies]`.
    aliases: BTreeMap<String, String>,
}

impl Rooms {
    fn of(tree: &Tree) -> Rooms {
        let root = entries(tree.text("Cargo.toml").unwrap_or_default()).into_iter();
        let shared = root.filter(|entry| entry.table == "workspace.dependencies");
        let aliases = shared.filter_map(|entry| Some((entry.key.clone(), entry.field("package")?.into()))).collect();
        Rooms { members: members(tree), aliases }
    }

    /// The crate that a manifest entry makes its package depend on.
    fn named_by(&self, entry: &Entry) -> Option<String> {
        let name = dependency(entry)?;
        let renamed = entry.field("package").or_else(|| entry.strings().next().filter(|_| entry.key == "package"));
        let package = renamed.or(self.aliases.get(name).map(String::as_str)).unwrap_or(name);
        let folder = package.strip_prefix("weftgrad-").unwrap_or(package).replace('_', "-");
        self.members.contains(&folder).then_some(folder)
    }
}

/// The dependency an entry is about: a row of `[dependencies]`, or any row of `[dependencies.name]`.
fn dependency(entry: &Entry) -> Option<&str> {
    let counts = |table: &str| matches!(table, "dependencies" | "build-dependencies");
    let mut table = entry.table.rsplit('.');
    let (last, before) = (table.next()?, table.next());
    if counts(last) {
        return entry.key.split('.').next();
    }
    before.is_some_and(counts).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    const ROOT: (&str, &str) = (
        "Cargo.toml",
        r#"
[workspace]
members = ["numcore", "autograd", "nn", "nn-derive", "optim", "runtime-cpu", "weftgrad"]
[workspace.dependencies]
tensors = { package = "weftgrad-numcore", path = "numcore" }
grads = { package = "weftgrad-autograd", path = "autograd" }
"#,
    );

    /// Asserts the findings about the manifest of `room` alone.
    fn check_room(room: &str, manifest: &str, findings: &[&str]) {
        let path = format!("{room}/Cargo.toml");
        let tree = Tree::of(&[ROOT, (&path, manifest)]);
        let found: Vec<String> = judge(&tree, &Rooms::of(&tree), room).iter().map(Finding::to_string).collect();
        assert_eq!(found, findings);
    }

    #[test]
    fn arrows_along_the_table_are_allowed() {
        check_room(
            "nn",
            "[dependencies]\ntensors.workspace = true\nweftgrad-autograd = { path = \"../autograd\" }\nhalf = \"2\"\n",
            &[],
        );
        check_room(
            "weftgrad",
            "[dependencies]\nruntime-cpu = { workspace = true, optional = true }\nnn = { path = \"../nn\" }\n",
            &[],
        );
    }

    #[test]
    fn arrows_against_it_are_found_under_every_spelling() {
        let finding = "numcore/Cargo.toml:2: numcore may not depend on autograd";
        for row in [
            "grads = { workspace = true }",
            "grads.workspace = true",
            "autograd = { path = \"../autograd\" }",
            "weftgrad-autograd = { path = \"../autograd\" }",
            "other = { package = \"weftgrad-autograd\", path = \"../autograd\" }",
        ] {
            check_room("numcore", &format!("[dependencies]\n{row}\n"), &[finding]);
        }
        check_room(
            "numcore",
            "[dependencies.x]\npackage = \"weftgrad-autograd\"\npath = \"../autograd\"\n",
            &[finding],
        );
    }

    #[test]
    fn every_kind_but_dev_counts() {
        for table in ["build-dependencies", "target.'cfg(unix)'.dependencies"] {
            let manifest = format!("[{table}]\nnn_derive = {{ path = \"../nn-derive\" }}\n");
            check_room(
                "runtime-cpu",
                &manifest,
                &["runtime-cpu/Cargo.toml:2: runtime-cpu may not depend on nn-derive"],
            );
        }
        check_room("runtime-cpu", "[dev-dependencies]\nnn = { path = \"../nn\" }\n", &[]);
        check_room("runtime-cpu", "[features]\nnn = []\n", &[]);
    }

    #[test]
    fn members_are_listed_and_there() {
        let root = ("Cargo.toml", "[workspace]\nmembers = [\"cellar\", \"nn\"]\n");
        let found = ["cellar/Cargo.toml:1: this room is not", "Cargo.toml:1: member nn/Cargo.toml"];
        expect(check, &[root, ("cellar/Cargo.toml", "")], &found);
    }

    #[test]
    fn the_table_has_no_cycle() {
        for (i, (room, knows)) in ALLOWED.iter().enumerate() {
            let later = &ALLOWED[i..];
            let earlier_only =
                knows.iter().all(|known| *known == "*" || !later.iter().any(|(other, _)| other == known));
            assert!(earlier_only, "{room} may know only rooms above it");
        }
    }
}

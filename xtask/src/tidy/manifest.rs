//! Just enough TOML to read this workspace's manifests: tables, dotted keys, values over several lines.

use super::tree::Tree;

/// One `key = value` line, with the table it belongs to.
#[derive(Debug, PartialEq)]
pub(super) struct Entry {
    pub table: String,
    pub key: String,
    /// The value as written, with lines joined and comments removed.
    pub value: String,
    /// The line number, from 1.
    pub line: usize,
}

impl Entry {
    /// The quoted strings in the value.
    pub(super) fn strings(&self) -> impl Iterator<Item = &str> {
        self.value.split('"').skip(1).step_by(2)
    }

    /// The string `field` of an inline table.
    pub(super) fn field(&self, field: &str) -> Option<&str> {
        let inside = self.value.strip_prefix('{')?;
        let given =
            inside.split(',').find_map(|pair| pair.trim_start().strip_prefix(field)?.trim_start().strip_prefix('='))?;
        given.split('"').nth(1)
    }
}

/// The entries of a manifest, in order.
pub(super) fn entries(text: &str) -> Vec<Entry> {
    let (mut found, mut table): (Vec<Entry>, String) = (Vec::new(), String::new());
    for (i, line) in text.lines().enumerate() {
        let line = without_comment(line).trim();
        match found.last_mut().filter(|entry| is_open(&entry.value)) {
            Some(open) => open.value.push_str(line),
            None => match line.strip_prefix('[') {
                Some(header) => table = header.trim_matches(['[', ']']).into(),
                None => found.extend(entry(&table, line, i + 1)),
            },
        }
    }
    found
}

/// The folders of the workspace's members.
pub(super) fn members(tree: &Tree) -> Vec<String> {
    let root = entries(tree.text("Cargo.toml").unwrap_or_default());
    let list = root.iter().filter(|entry| entry.table == "workspace" && entry.key == "members");
    list.flat_map(Entry::strings).map(String::from).collect()
}

fn entry(table: &str, line: &str, number: usize) -> Option<Entry> {
    let (key, value) = line.split_once('=')?;
    Some(Entry { table: table.into(), key: key.trim().into(), value: value.trim().into(), line: number })
}

/// A list or inline table whose end has not been read yet.
fn is_open(value: &str) -> bool {
    let count = |c| value.matches(c).count();
    value.starts_with(['[', '{']) && count(['[', '{']) > count([']', '}'])
}

fn without_comment(line: &str) -> &str {
    let comment = line.match_indices('#').find(|(at, _)| line[..*at].matches('"').count().is_multiple_of(2));
    comment.map_or(line, |(at, _)| &line[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_know_their_table_and_line() {
        let text = "[package] # which\nname = \"a#b\" # why\n\n[dependencies]\nnn.workspace = true\n";
        let shown: Vec<_> = entries(text).into_iter().map(|e| (e.table, e.key, e.value, e.line)).collect();
        let expect = |t: &str, k: &str, v: &str, l| (t.to_string(), k.to_string(), v.to_string(), l);
        assert_eq!(shown, [expect("package", "name", "\"a#b\"", 2), expect("dependencies", "nn.workspace", "true", 5)]);
    }

    #[test]
    fn lists_run_over_lines() {
        let tree =
            Tree::of(&[("Cargo.toml", "[workspace]\nmembers = [\n  \"a\", # one\n  \"b-c\",\n]\nresolver = \"3\"\n")]);
        assert_eq!(members(&tree), ["a", "b-c"]);
    }

    #[test]
    fn default_members_are_not_the_members() {
        let tree = Tree::of(&[("Cargo.toml", "[workspace]\ndefault-members = [\"a\"]\nmembers = [\"a\", \"b\"]\n")]);
        assert_eq!(members(&tree), ["a", "b"]);
    }

    #[test]
    fn fields_of_inline_tables_are_read() {
        let entry = &entries("nn = { package = \"weftgrad-nn\", path=\"../nn\", features = [\"x\"] }")[0];
        assert_eq!((entry.field("package"), entry.field("path")), (Some("weftgrad-nn"), Some("../nn")));
        assert_eq!(entry.field("version"), None);
        assert_eq!(entries("half = \"2.7\"")[0].field("package"), None);
    }
}

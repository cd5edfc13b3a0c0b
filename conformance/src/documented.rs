//! Checks that the documentation's table of runtimes matches their capabilities.

use numcore::{Capabilities, Runtime};

/// The path of the table in a checkout; a package of this crate does not contain it.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/book/src/runtimes.md");

/// Checks that the table of `docs/book/src/runtimes.md` and this runtime's [`Capabilities`] agree on every element
/// type.
///
/// # Panics
/// A row of the table is wrong: the message has the row and its right content. Also outside of a checkout, which has no
/// such page.
pub fn documented<R: Runtime>(rt: &R) {
    let kind = format!("{:?}", rt.device().kind);
    let page = std::fs::read_to_string(PAGE).unwrap_or_else(|error| panic!("{PAGE}: {error}"));
    let said = column(&page, &kind).unwrap_or_else(|| panic!("docs/book/src/runtimes.md has no column {kind}"));
    let table = Capabilities::table(&[(&kind, rt.capabilities())]);
    for (row, cell) in column(&table, &kind).into_iter().flatten().filter(|(row, _)| row.starts_with('`')) {
        assert!(
            said.contains(&(row, cell)),
            "docs/book/src/runtimes.md, row {row}, column {kind}: should say {cell:?}"
        );
    }
}

/// The rows of a Markdown table, each with its cell in the column `name`.
fn column<'t>(text: &'t str, name: &str) -> Option<Vec<(&'t str, &'t str)>> {
    let mut rows = text.lines().filter(|l| l.starts_with('|')).map(cells);
    let at = rows.find_map(|head| head.iter().position(|c| *c == name))?;
    Some(rows.filter_map(|row| Some((*row.first()?, *row.get(at)?))).collect())
}

fn cells(line: &str) -> Vec<&str> {
    line.trim_matches('|').split('|').map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_found_by_its_name() {
        let table = "text\n\n| | A | B |\n|---|---|---|\n| x | 1 | 2 |\n";
        assert_eq!(column(table, "B").unwrap(), [("---", "---"), ("x", "2")]);
        assert!(column(table, "C").is_none());
    }
}

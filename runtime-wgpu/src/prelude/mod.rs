//! The functions that printed programs call, in WGSL. They are found by name, and included in a kernel with those they
//! call.

use std::{collections::BTreeMap, sync::LazyLock};

const FILES: [&str; 5] = [
    include_str!("bits.wgsl"),
    include_str!("int.wgsl"),
    include_str!("long.wgsl"),
    include_str!("math.wgsl"),
    include_str!("exact.wgsl"),
];

/// The functions and constants of the files, by name. The order of declarations is irrelevant in WGSL.
static ITEMS: LazyLock<BTreeMap<&str, &str>> = LazyLock::new(|| FILES.into_iter().flat_map(items).collect());

/// The items of a file: each starts at the beginning of a line with `fn` or `const`, and ends before the next empty
/// line.
fn items(file: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    file.split("\n\n").filter_map(|piece| {
        let start = ["fn ", "const "].into_iter().filter_map(|k| piece.find(&format!("\n{k}")).map(|i| i + 1));
        let start = if piece.starts_with("fn ") || piece.starts_with("const ") { 0 } else { start.min()? };
        let item = &piece[start..];
        let name = item.split_whitespace().nth(1)?;
        let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(name.len());
        Some((&name[..end], item))
    })
}

/// The items that a source needs, directly or through others.
pub(crate) fn needed(text: &str) -> String {
    let mut found: BTreeMap<&str, &str> = BTreeMap::new();
    let mut left: Vec<&str> = vec![text];
    while let Some(text) = left.pop() {
        for name in names(text) {
            if let Some((&name, &item)) = ITEMS.get_key_value(name)
                && found.insert(name, item).is_none()
            {
                left.push(item);
            }
        }
    }
    found.into_values().collect::<Vec<_>>().join("\n")
}

/// The identifiers of a source that begin like names of the prelude.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|w| w.starts_with("wg_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_given_what_it_calls_and_no_more() {
        let text = needed("let x = wg_f16(y);");
        for name in ["fn wg_f16(", "fn wg_widen_f16(", "fn wg_narrow_f16("] {
            assert_eq!(text.matches(name).count(), 1, "{name}");
        }
        assert_eq!(text.matches("fn ").count(), 3, "{text}");
        assert_eq!(needed("let wg = 1; // wg_no_such"), "");
    }
}

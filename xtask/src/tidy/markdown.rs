//! Just enough Markdown: lines outside code blocks, what begins a block, code spans, link targets, anchors of headings.

/// The lines outside fenced code blocks, numbered from 1.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        (!in_code && !fence).then_some((i + 1, line))
    })
}

/// The words after each fence that begins a code block, with its line from 1.
pub(super) fn fences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let fences = text.lines().enumerate().filter_map(|(i, line)| Some((i + 1, line.trim_start().strip_prefix("```")?)));
    fences.step_by(2)
}

/// The anchors of a page's headings, as forges and mdBook make them: small letters, digits, `-` and `_`, and a hyphen for each space.
pub(super) fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#')).map(|(_, line)| line.trim_start_matches('#'));
    headings.filter_map(|heading| heading.strip_prefix(' ')).map(|heading| anchor(heading.trim())).collect()
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// What stands between backticks on a line.
pub(super) fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The targets of a line's links, images and reference definitions.
pub(super) fn link_targets(line: &str) -> Vec<String> {
    let text: String = line.split('`').step_by(2).collect();
    let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let definition =
        text.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target);
    inline.chain(definition).filter_map(without_title).map(String::from).collect()
}

fn without_title(target: &str) -> Option<&str> {
    target.split_whitespace().next().map(|url| url.trim_matches(['<', '>']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_blocks_are_no_prose() {
        let text = "a\n```rust\nb\n```\nc\n  ```\n  d\n  ```\n";
        assert_eq!(prose(text).collect::<Vec<_>>(), [(1, "a"), (5, "c")]);
    }

    #[test]
    fn fences_have_words_and_lines() {
        let text = "```rust,no_run\n```\nx\n  ```\n  ```\n```sh\n";
        assert_eq!(fences(text).collect::<Vec<_>>(), [(1, "rust,no_run"), (4, ""), (6, "sh")]);
    }

    #[test]
    fn anchors_are_those_of_forges() {
        let text = "# From one, to many\n```\n# no heading\n```\n## `a_b` and C-d\n#none";
        assert_eq!(anchors(text), ["from-one-to-many", "a_b-and-c-d"]);
    }

    #[test]
    fn spans_are_what_backticks_enclose() {
        assert_eq!(code_spans("- `a/b.rs`: and `c`, d").collect::<Vec<_>>(), ["a/b.rs", "c"]);
        assert_eq!(code_spans("none").count(), 0);
    }

    #[test]
    fn targets_of_every_kind_of_link() {
        assert_eq!(link_targets("[a](b.md), ![c](d/e.png \"title\") and [f](<g.md>)"), ["b.md", "d/e.png", "g.md"]);
        assert_eq!(link_targets("[name]: h.md"), ["h.md"]);
        assert!(link_targets("`[a](b.md)` and x[1](").is_empty());
    }
}

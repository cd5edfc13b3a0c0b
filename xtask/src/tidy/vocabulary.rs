//! Rule: the field's standard terms. Names and phrases that this project once had of its own do not come back.
//!
//! Prose is comments and Markdown, without code in back-ticks. `record/` and `CHANGELOG.md` say what was, in the words of
//! their time. `docs/book/src/glossary.md` defines the few terms that are the project's own.

use super::Finding;
use super::rust::{code_only, is_word, line_of, words};
use super::tree::Tree;

/// Identifiers of Rust code that have a standard name.
#[rustfmt::skip]
const IDENTIFIERS: &[(&str, &str)] = &[
    ("LaidOut", "PackedPanel"), ("lay_out", "pack_a"), ("turn_tile", "transpose_tile"), ("is_turned", "is_transposed"),
    ("by_turns", "interleave_pages"), ("windows_times", "gemm_im2col"), ("put_anew", "put_recomputed"), ("Chores", "InterleavedTasks"),
    ("leveled", "multiversion"), ("ask_for", "prefetch"), ("unanimous", "all_ok"), ("LentSum", "GradLoan"),
    ("lend_sum", "lend_grad"), ("restore_sum", "restore_grad"), ("send_for", "prefetch_set"),
    ("half_way", "on_backward_progress"), ("unhold", "release_prefetched"), ("unpin", "release_gathered"),
    ("settle", "complete, flush or mark_ready"), ("Remade", "Rematerialized"), ("layouts_beside", "adjacent_layouts"),
    ("keeps_order", "supports_strided_outputs"), ("ordered_as", "output_order_of"), ("Stuck", "BlockedRank"),
];

/// Phrases of prose that have a standard term.
#[rustfmt::skip]
const PHRASES: &[(&str, &str)] = &[
    ("first cache", "L1"), ("second cache", "L2"), ("last cache", "last-level cache"), ("near cache", "L1 or L2"),
    ("asks for memory", "prefetches, or allocates"), ("asked for ahead", "prefetched"), ("half a turn", "180°"), ("vector units", "SIMD units"),
    ("vector unit", "SIMD unit"), ("made again", "recomputed"), ("computed again", "recomputed"), ("sends for", "prefetches"), ("sent for", "prefetched"),
    ("put aside", "spilled"), ("laid out anew", "copied to contiguous memory"), ("added up anew", "recomputed"),
    ("on their way", "in flight"), ("sums that wait", "partial sums"), ("side by side in memory", "adjacent"),
];

pub fn check(tree: &Tree) -> Vec<Finding> {
    let rust = tree.texts(".rs").filter(|(path, _)| is_checked(path)).flat_map(|(path, text)| in_rust(path, text));
    let pages = tree.texts(".md").filter(|(path, _)| is_checked(path));
    let pages =
        pages.flat_map(|(path, text)| text.lines().enumerate().flat_map(move |(i, l)| in_prose(path, i + 1, l)));
    rust.chain(pages).collect()
}

fn is_checked(path: &str) -> bool {
    let past = path.starts_with("record/") || path.ends_with("CHANGELOG.md");
    !past && !path.ends_with("tidy/vocabulary.rs")
}

fn in_rust(path: &str, text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let mut found = Vec::new();
    for (word, standard) in IDENTIFIERS {
        let at = words(&code, word).map(|at| line_of(&code, at));
        found.extend(at.map(|line| Finding::new(path, line, format!("`{word}` is called {standard}"))));
    }
    for (i, line) in text.lines().enumerate() {
        let Some((_, comment)) = line.split_once("//") else { continue };
        found.extend(in_prose(path, i + 1, comment));
    }
    found
}

fn in_prose(path: &str, number: usize, line: &str) -> Vec<Finding> {
    let prose = without_code(line).to_lowercase();
    let found = PHRASES.iter().filter(|(phrase, _)| stands_in(&prose, phrase));
    found.map(|(phrase, term)| Finding::new(path, number, format!("`{phrase}`: the field says {term}"))).collect()
}

fn stands_in(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| {
        let after = line[at + phrase.len()..].chars().next();
        !line[..at].ends_with(is_word) && !after.is_some_and(is_word)
    })
}

/// The line without what stands between back-ticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    #[test]
    fn every_identifier_is_found_in_code_alone() {
        for (word, _) in IDENTIFIERS {
            expect(check, &[("a.rs", &format!("// {word}\nfn {word}() {{}}\n"))], &[&format!("a.rs:2: `{word}`")]);
            expect(check, &[("a.rs", &format!("fn x{word}() {{ f(\"{word}\") }}\n"))], &[]);
        }
    }

    #[test]
    fn every_phrase_is_found_in_prose_alone() {
        for (phrase, _) in PHRASES {
            let (upper, quoted) = (format!("x {} y", phrase.to_uppercase()), format!("x `{phrase}` y"));
            expect(check, &[("a.md", &upper)], &[&format!("a.md:1: `{phrase}`")]);
            expect(check, &[("a.rs", &format!("let x; // {phrase}"))], &[&format!("a.rs:1: `{phrase}`")]);
            expect(check, &[("a.md", &quoted), ("a.rs", &format!("f(\"{phrase}\")"))], &[]);
            expect(check, &[("record/a.md", phrase), ("CHANGELOG.md", phrase)], &[]);
        }
    }
}

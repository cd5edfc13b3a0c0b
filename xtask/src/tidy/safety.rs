//! Rule: `unsafe` is used only in the crates that need it, says why it is sound, and is forbidden by the compiler
//! everywhere else.

use super::Finding;
use super::manifest;
use proc_macro2::TokenTree;

use super::rust::{flat, holds, is, line_of, tokens};
use super::tree::Tree;

/// Folders, by the start of their name, that may use `unsafe`.
const ROOMS: &[&str] = &["runtime-", "engine-"];
/// How far above its `unsafe` a SAFETY comment may begin.
const REACH: usize = 8;
const FORBID: &str = "forbid (unsafe_code)";

/// Misplaced or unexplained `unsafe`, and crate roots that do not forbid it.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let uses = tree.texts(".rs").flat_map(|(path, text)| uses(path, text));
    let roots =
        manifest::members(tree).into_iter().filter(|member| !is_allowed(member)).flat_map(|m| open_roots(tree, &m));
    uses.chain(roots).collect()
}

fn is_allowed(path: &str) -> bool {
    ROOMS.iter().any(|room| path.starts_with(room))
}

fn open_roots(tree: &Tree, member: &str) -> Vec<Finding> {
    let roots = ["lib", "main"].map(|name| format!("{member}/src/{name}.rs"));
    let open =
        |path: &String| tree.text(path).is_some_and(|text| !tokens(text).iter().any(|token| holds(token, FORBID)));
    roots.iter().filter(|path| open(path)).map(|path| Finding::new(path, 1, "add `#![forbid(unsafe_code)]`")).collect()
}

fn uses(path: &str, text: &str) -> Vec<Finding> {
    let (lines, tokens): (Vec<&str>, _) = (text.lines().collect(), flat(tokens(text)));
    let keywords = (0..tokens.len()).filter(|&at| is(&tokens[at], "unsafe"));
    keywords.filter_map(|at| judge(path, &lines, line_of(&tokens[at]), &tokens[at + 1..])).collect()
}

/// `rest` comes after the keyword, which stands in `line`.
fn judge(path: &str, lines: &[&str], line: usize, rest: &[TokenTree]) -> Option<Finding> {
    let complaint = |message: &str| Some(Finding::new(path, line, message));
    if !is_allowed(path) {
        return complaint("unsafe outside the rooms that may use it (runtime-*, engine-*)");
    }
    match Use::of(rest) {
        Use::Block if !says_safety(lines, line) => complaint("add a `// SAFETY:` comment directly above"),
        Use::Declaration if !says_safety(lines, line) && !documents_safety(lines, line) => {
            complaint("add a `# Safety` section to its documentation, or a `// SAFETY:` comment directly above")
        }
        _ => None,
    }
}

#[derive(Debug, PartialEq)]
enum Use {
    /// Takes on an obligation: a block, an impl, an extern block, an attribute.
    Block,
    /// Hands one to its callers or implementers: a function, a trait.
    Declaration,
    /// Names a function's type.
    Type,
}

impl Use {
    fn of(rest: &[TokenTree]) -> Use {
        match rest {
            [r#extern, TokenTree::Literal(_), rest @ ..] | [r#extern, rest @ ..] if is(r#extern, "extern") => {
                Use::of(rest)
            }
            [r#fn, TokenTree::Group(_), ..] if is(r#fn, "fn") => Use::Type,
            [item, ..] if is(item, "fn") || is(item, "trait") => Use::Declaration,
            _ => Use::Block,
        }
    }
}

/// Whether a comment on the line itself or in the lines just above it says SAFETY.
fn says_safety(lines: &[&str], line: usize) -> bool {
    let near = &lines[line.saturating_sub(REACH + 1)..line];
    near.iter().any(|text| text.split_once("//").is_some_and(|(_, comment)| comment.contains("SAFETY")))
}

/// Whether the documentation that ends just above the line, however long, has a Safety section.
fn documents_safety(lines: &[&str], line: usize) -> bool {
    let above = lines[..line - 1].iter().rev().map(|text| text.trim());
    above.take_while(|text| text.starts_with("//") || text.starts_with("#[")).any(|text| text.contains("# Safety"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check as expect;

    const PATH: &str = "runtime-cpu/src/simd.rs";

    fn kernel(text: &str, findings: &[&str]) {
        expect(check, &[(PATH, text)], findings);
    }

    #[test]
    fn a_block_needs_its_comment() {
        kernel("unsafe { f() }", &["runtime-cpu/src/simd.rs:1: add a `// SAFETY:`"]);
        kernel("// SAFETY: f has no conditions.\nunsafe { f() }", &[]);
        kernel("unsafe { f() } // SAFETY: none needed", &[]);
        kernel("let s = \"SAFETY\";\nunsafe { f() }", &["runtime-cpu/src/simd.rs:2:"]);
    }

    #[test]
    fn the_comment_reaches_eight_lines() {
        let text = |gap: usize| format!("// SAFETY: x\n{}unsafe impl Send for T {{}}", "a();\n".repeat(gap));
        kernel(&text(7), &[]);
        kernel(&text(8), &["runtime-cpu/src/simd.rs:10:"]);
    }

    #[test]
    fn a_function_may_document_it() {
        kernel("/// # Safety\n/// Aligned.\n#[inline]\npub unsafe fn f() {}", &[]);
        kernel(&format!("/// # Safety\n{}pub unsafe fn f() {{}}", "/// text\n".repeat(20)), &[]);
        kernel("/// Text.\npub unsafe fn f() {}", &["runtime-cpu/src/simd.rs:2: add a `# Safety`"]);
        kernel("/// # Safety\nfn other() {}\nunsafe trait T {}", &["runtime-cpu/src/simd.rs:3:"]);
    }

    #[test]
    fn what_is_not_the_keyword_is_let_be() {
        kernel("type F = unsafe extern \"C\" fn(*const u8);\n// unsafe { }\nlet s = \"unsafe {\";", &[]);
    }

    #[test]
    fn uses_are_told_apart() {
        let check = |text, expect| assert_eq!(Use::of(&tokens(text)), expect, "{text}");
        check("fn f()", Use::Declaration);
        check("trait T {}", Use::Declaration);
        check("fn(u8)", Use::Type);
        check("extern \"C\" fn(u8)", Use::Type);
        check("extern fn f(u8)", Use::Declaration);
        check("extern \"C\" {}", Use::Block);
        check("impl T for U {}", Use::Block);
        check("{}", Use::Block);
        check("(no_mangle)", Use::Block);
    }

    #[test]
    fn other_rooms_have_none() {
        expect(check, &[("nn/src/a.rs", "// SAFETY: no\nunsafe { f() }")], &["nn/src/a.rs:2: unsafe outside"]);
    }

    #[test]
    fn other_crate_roots_forbid_it() {
        let root = ("Cargo.toml", "[workspace]\nmembers = [\"nn\", \"xtask\", \"runtime-cpu\"]\n");
        let (closed, open) = ("//! Doc.\n#![forbid(unsafe_code)]\n", "//! #![forbid(unsafe_code)]\n");
        expect(check, &[root, ("nn/src/lib.rs", closed), ("runtime-cpu/src/lib.rs", "")], &[]);
        expect(check, &[root, ("nn/src/lib.rs", open)], &["nn/src/lib.rs:1: add"]);
        expect(check, &[root, ("xtask/src/main.rs", "fn main() {}")], &["xtask/src/main.rs:1: add"]);
    }
}

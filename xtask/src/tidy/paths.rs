//! The paths that a Rust source names from the root of its crate.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::rust::{is, line_of};

/// One path from the root: `crate::a::B` is `["a", "B"]`.
#[derive(Debug, PartialEq)]
pub(super) struct Named {
    pub(super) names: Vec<String>,
    /// The name after `as`.
    pub(super) alias: Option<String>,
    pub(super) line: usize,
}

/// The paths after `crate::`, `self::` and `super::` in a source, whose module is `module`. In the root itself, paths after
/// `use` are such paths too. Comments and unit tests have none.
pub(super) fn named(source: &str, module: &[&str]) -> Vec<Named> {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let module: Vec<String> = module.iter().map(|name| name.to_string()).collect();
    let mut found = Vec::new();
    within(source.parse().unwrap_or_default(), &module, &mut found);
    found
}

fn within(tokens: TokenStream, module: &[String], found: &mut Vec<Named>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut rest = &tokens[..];
    while let Some((first, after)) = rest.split_first() {
        rest = match (first, after) {
            (first, [TokenTree::Ident(name), TokenTree::Group(group), after @ ..])
                if is(first, "mod") && group.delimiter() == Delimiter::Brace =>
            {
                within(group.stream(), &[module, &[name.to_string()]].concat(), found);
                after
            }
            (TokenTree::Group(group), after) => {
                within(group.stream(), module, found);
                after
            }
            (first, after) if module.is_empty() && is(first, "use") => path(after, Vec::new(), module, found),
            (TokenTree::Ident(_), [colon, ..]) if is(colon, ":") && starts_path(first) => {
                path(rest, Vec::new(), module, found)
            }
            (_, after) => after,
        };
    }
}

fn starts_path(token: &TokenTree) -> bool {
    ["crate", "self", "super"].iter().any(|start| is(token, start))
}

/// Reads one path of which `names` are known, and each path of its group. Returns the tokens after it.
fn path<'t>(
    tokens: &'t [TokenTree],
    mut names: Vec<String>,
    module: &[String],
    found: &mut Vec<Named>,
) -> &'t [TokenTree] {
    let mut rest = tokens;
    let Some(line) = tokens.first().map(line_of) else { return rest };
    let mut alias = None;
    while let Some((token, after)) = rest.split_first() {
        match token {
            TokenTree::Ident(_) if is(token, "crate") => names.clear(),
            TokenTree::Ident(_) if is(token, "self") && names.is_empty() => names.extend_from_slice(module),
            TokenTree::Ident(_) if is(token, "self") => {}
            TokenTree::Ident(_) if is(token, "super") => {
                if names.is_empty() {
                    names.extend_from_slice(module);
                }
                names.pop();
                if names.is_empty() && !module.is_empty() {
                    return at_root(after, found);
                }
            }
            TokenTree::Ident(name) => names.push(name.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for one in inner.split(|token| is(token, ",")) {
                    path(one, names.clone(), module, found);
                }
                return after;
            }
            _ => {}
        }
        rest = after;
        match rest {
            [a, b, after @ ..] if is(a, ":") && is(b, ":") => rest = after,
            [a, TokenTree::Ident(name), after @ ..] if is(a, "as") => {
                (alias, rest) = (Some(name.to_string()), after);
                break;
            }
            _ => break,
        }
    }
    if !names.is_empty() {
        found.push(Named { names, alias, line });
    }
    rest
}

/// Reads the rest of a path that has come to the root by `super`.
fn at_root<'t>(rest: &'t [TokenTree], found: &mut Vec<Named>) -> &'t [TokenTree] {
    match rest {
        [a, b, after @ ..] if is(a, ":") && is(b, ":") => path(after, Vec::new(), &[], found),
        _ => rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(source: &str, module: &[&str]) -> Vec<String> {
        let shown =
            |path: Named| path.names.join("::") + &path.alias.map(|alias| format!(" as {alias}")).unwrap_or_default();
        named(source, module).into_iter().map(shown).collect()
    }

    #[test]
    fn groups_and_names_of_their_own_are_read() {
        let source =
            "use crate::{\n    a::{self, B, c::D as E},\n    f::*,\n};\nfn g() -> crate::H { crate::i::j(self.k) }";
        assert_eq!(shown(source, &["x"]), ["a", "a::B", "a::c::D as E", "f", "H", "i::j"]);
        assert_eq!(named(source, &["x"]).iter().map(|path| path.line).collect::<Vec<_>>(), [2, 2, 2, 3, 5, 5]);
    }

    #[test]
    fn paths_are_followed_upwards() {
        let source =
            "use super::{a::B, super::c};\nuse self::d::E;\nmod inner { use super::f; fn g() { super::super::h() } }";
        assert_eq!(shown(source, &["x", "y"]), ["x::a::B", "c", "x::y::d::E", "x::y::f", "x::h"]);
        assert_eq!(shown("use super::a::B;", &["x"]), ["a::B"]);
    }

    #[test]
    fn the_root_uses_without_a_prefix() {
        assert_eq!(
            shown("mod a;\npub use a::{B, c::D};\npub use crate::e::F as G;", &[]),
            ["a::B", "a::c::D", "e::F as G"]
        );
    }

    #[test]
    fn comments_and_unit_tests_have_no_paths() {
        assert!(
            shown("// crate::a\n/// crate::b\nfn f() {}\n#[cfg(test)]\nmod tests {\n    use super::*;\n}", &["x"])
                .is_empty()
        );
    }
}

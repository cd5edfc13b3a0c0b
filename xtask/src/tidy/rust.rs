//! The tokens of Rust sources: comments are not among them, documentation is an attribute.

use proc_macro2::{TokenStream, TokenTree};

/// The tokens outside of all brackets; a group of brackets is one token. Text that is not Rust has none.
pub(super) fn tokens(source: &str) -> Vec<TokenTree> {
    source.parse::<TokenStream>().unwrap_or_default().into_iter().collect()
}

/// The tokens, those within brackets after their group.
pub(super) fn flat(tokens: impl IntoIterator<Item = TokenTree>) -> Vec<TokenTree> {
    let mut all = Vec::new();
    for token in tokens {
        let within = if let TokenTree::Group(group) = &token { flat(group.stream()) } else { Vec::new() };
        all.push(token);
        all.extend(within);
    }
    all
}

/// Tells whether a token is the identifier or the mark `text`.
pub(super) fn is(token: &TokenTree, text: &str) -> bool {
    match token {
        TokenTree::Ident(ident) => ident == text,
        TokenTree::Punct(mark) => text.starts_with(mark.as_char()),
        _ => false,
    }
}

/// Tells whether a token is a group of brackets around `content`, with spaces between its tokens.
pub(super) fn holds(token: &TokenTree, content: &str) -> bool {
    matches!(token, TokenTree::Group(group) if group.stream().to_string() == content)
}

/// The line of a token, from 1.
pub(super) fn line_of(token: &TokenTree) -> usize {
    token.span().start().line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_no_identifiers() {
        let source = "// unsafe\n/* unsafe /* */ */ f(\"unsafe\", br#\"unsafe\"#, 'u', r#unsafe, &'a b)\nunsafe";
        let all = flat(tokens(source));
        let found: Vec<_> = all.iter().filter(|token| is(token, "unsafe")).map(line_of).collect();
        assert_eq!(found, [3]);
        assert!(all.iter().any(|token| is(token, "b")) && holds(&flat(tokens("#[a(b)]"))[1], "a (b)"));
    }
}

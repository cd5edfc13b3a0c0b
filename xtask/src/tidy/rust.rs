//! Just enough of Rust's lexer to tell code from comments and literals.

/// `source` with every comment, string and character literal replaced by spaces. Lines stay where they are.
pub fn code_only(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while !rest.is_empty() {
        let (piece, after) = next_piece(rest);
        match piece {
            Piece::Code(text) => out.push_str(text),
            Piece::Other(text) => out.extend(text.chars().map(|c| if c == '\n' { '\n' } else { ' ' })),
        }
        rest = after;
    }
    out
}

/// The byte offsets where `word` occurs in `text` as a whole identifier.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Whether `c` may occur in an identifier.
pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The line, from 1, of a byte offset.
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text[..at].bytes().filter(|&byte| byte == b'\n').count()
}

enum Piece<'a> {
    Code(&'a str),
    Other(&'a str),
}

/// The first token of `rest`, which is not empty, and the text after it.
fn next_piece(rest: &str) -> (Piece<'_>, &str) {
    let other = comment(rest).or_else(|| literal(rest));
    match other {
        Some(length) => (Piece::Other(&rest[..length]), &rest[length..]),
        None => {
            let length = code(rest);
            (Piece::Code(&rest[..length]), &rest[length..])
        }
    }
}

fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    rest.starts_with("/*").then(|| block_comment(rest))
}

/// The length of a block comment; block comments nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        let step = &rest.as_bytes()[at..];
        let (change, length) = match step {
            [b'/', b'*', ..] => (1, 2),
            [b'*', b'/', ..] => (-1, 2),
            _ => (0, 1),
        };
        depth = depth.saturating_add_signed(change);
        at += length;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn literal(rest: &str) -> Option<usize> {
    match rest.as_bytes() {
        [b'"', ..] => Some(1 + quoted(&rest[1..], '"')),
        [b'\'', ..] => character(rest),
        [b'r' | b'b' | b'c', ..] => raw_string(rest),
        _ => None,
    }
}

/// The length up to and with the closing quote, past escapes.
fn quoted(body: &str, quote: char) -> usize {
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    body.len()
}

/// A character literal; None for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let body = &rest[1..];
    let first = body.chars().next()?;
    let closes = body[first.len_utf8()..].starts_with('\'');
    (first == '\\' || closes).then(|| 1 + quoted(body, '\''))
}

/// `r"…"`, `r#"…"#`, with `b` or `c` in front.
fn raw_string(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix(['b', 'c']).unwrap_or(rest).strip_prefix('r')?;
    let body = after.trim_start_matches('#');
    let hashes = after.len() - body.len();
    let end = format!("\"{}", "#".repeat(hashes));
    let inner = body.strip_prefix('"')?;
    let length = inner.find(&end).map_or(inner.len(), |at| at + end.len());
    Some(rest.len() - inner.len() + length)
}

/// A whole identifier, so that its last letter is not taken for a string's prefix; otherwise one character.
fn code(rest: &str) -> usize {
    let word = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
    if word > 0 { word } else { rest.chars().next().map_or(0, char::len_utf8) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, code: &str) {
        let squeezed = code_only(source).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(squeezed, code, "of {source}");
    }

    #[test]
    fn comments_go() {
        check("a // unsafe\nb", "a b");
        check("a /* x /* y */ z */ b", "a b");
        check("/// doc\nfn f() {}", "fn f() {}");
        check("a /* open", "a");
    }

    #[test]
    fn strings_go() {
        check(r#"f("unsafe", b"x\"y", c"z") + 1"#, "f( , b , c ) + 1");
        check(r##"f(r"\", r#"a "quoted" b"#, br"c") + 1"##, "f( , , ) + 1");
        check(r#"let bar"x""#, "let bar");
    }

    #[test]
    fn characters_go_and_lifetimes_stay() {
        check(r"let c: &'a str = ['x', '\'', '\u{1F600}', '𝄞'];", "let c: &'a str = [ , , , ];");
        check("'outer: loop { break 'outer }", "'outer: loop { break 'outer }");
    }

    #[test]
    fn raw_identifiers_are_code() {
        check("r#type + r", "r#type + r");
    }

    #[test]
    fn lines_stay_where_they_are() {
        let source = "a\n/* 1\n2 */ \"x\ny\" // é\nz";
        let code = code_only(source);
        assert_eq!(code.lines().count(), source.lines().count());
        assert_eq!(line_of(&code, code.find('z').expect("kept")), 5);
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(words("unsafe unsafe_code not_unsafe (unsafe)", "unsafe").collect::<Vec<_>>(), [0, 31]);
    }
}

//! The text of a module as tokens: words, numbers, strings and punctuation, with their lines.

use crate::error::PtxError;

/// A token: its text, and its line from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub text: &'a str,
    pub line: u32,
}

/// Splits a text into tokens, without comments.
pub(crate) fn tokens(text: &str) -> Result<Vec<Token<'_>>, PtxError> {
    let (mut all, mut line, mut rest) = (Vec::new(), 1, text);
    while let Some(first) = rest.chars().next() {
        let length = match first {
            _ if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            _ if rest.starts_with("/*") => {
                rest.find("*/").ok_or_else(|| PtxError::new(line, "a comment that does not end"))? + 2
            }
            '"' => rest[1..].find('"').ok_or_else(|| PtxError::new(line, "a string that does not end"))? + 2,
            _ if in_word(first) => word_length(rest),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        let comment = token.starts_with("//") || token.starts_with("/*");
        if !comment && !first.is_whitespace() {
            all.push(Token { text: token, line });
        }
        line += token.matches('\n').count() as u32;
        rest = after;
    }
    Ok(all)
}

/// The length of the word at the front of a text; it may have parts behind `::`.
fn word_length(text: &str) -> usize {
    let length = text.find(|c| !in_word(c)).unwrap_or(text.len());
    match text[length..].strip_prefix("::") {
        Some(part) if length > 0 => length + 2 + word_length(part),
        _ => length,
    }
}

fn in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$' | '%')
}

/// A position in a list of tokens.
#[derive(Clone)]
pub(crate) struct Cursor<'a, 't> {
    tokens: &'t [Token<'a>],
    at: usize,
}

impl<'a, 't> Cursor<'a, 't> {
    pub(crate) fn new(tokens: &'t [Token<'a>]) -> Cursor<'a, 't> {
        Cursor { tokens, at: 0 }
    }

    /// The text of the next token; empty at the end.
    pub(crate) fn peek(&self) -> &'a str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    /// The text of the token after the next one.
    pub(crate) fn second(&self) -> &'a str {
        self.tokens.get(self.at + 1).map_or("", |token| token.text)
    }

    /// The line of the next token, or of the last.
    pub(crate) fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |token| token.line)
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at >= self.tokens.len()
    }

    pub(crate) fn error(&self, message: impl Into<String>) -> PtxError {
        PtxError::new(self.line(), message)
    }

    /// Takes the next token.
    pub(crate) fn next(&mut self) -> Result<&'a str, PtxError> {
        let token = self.tokens.get(self.at).ok_or_else(|| self.error("the text ends too early"))?;
        self.at += 1;
        Ok(token.text)
    }

    /// Takes the next token if it is `text`.
    pub(crate) fn take(&mut self, text: &str) -> bool {
        let is = !self.is_at_end() && self.peek() == text;
        self.at += usize::from(is);
        is
    }

    /// Takes the next token, which must be `text`.
    pub(crate) fn expect(&mut self, text: &str) -> Result<(), PtxError> {
        if self.take(text) { Ok(()) } else { Err(self.error(format!("`{text}` expected, found `{}`", self.peek()))) }
    }

    /// Takes a whole number.
    pub(crate) fn number(&mut self) -> Result<u64, PtxError> {
        let text = self.peek();
        let number = integer(text).ok_or_else(|| self.error(format!("a number expected, found `{text}`")))?;
        self.at += 1;
        Ok(number)
    }

    /// Takes all tokens of the present line.
    pub(crate) fn rest_of_line(&mut self) -> &'t [Token<'a>] {
        let (start, line) = (self.at, self.line());
        while self.tokens.get(self.at).is_some_and(|token| token.line == line) {
            self.at += 1;
        }
        &self.tokens[start..self.at]
    }

    /// Takes a group in braces, with the braces; returns the tokens between them.
    pub(crate) fn braces(&mut self) -> Result<&'t [Token<'a>], PtxError> {
        let opened = self.line();
        self.expect("{")?;
        let (start, mut depth) = (self.at, 1);
        while depth > 0 {
            match self.next().map_err(|_| PtxError::new(opened, "a `{` without its `}`"))? {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
        }
        Ok(&self.tokens[start..self.at - 1])
    }

    /// Takes tokens up to a `;`, which is taken too.
    pub(crate) fn statement(&mut self) -> Result<&'t [Token<'a>], PtxError> {
        let start = self.at;
        while self.next()? != ";" {}
        Ok(&self.tokens[start..self.at - 1])
    }
}

/// A whole number, decimal or hexadecimal, with an optional `U`.
pub(crate) fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('U').unwrap_or(text);
    match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok(),
        None => digits.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_their_lines() {
        let text = "// one\nld.global.v2.f32 {%f1, %f2}, [%rd1+-8]; /* two\nlines */ $L_1: .file \"a b\"";
        let all = tokens(text).unwrap();
        let texts: Vec<&str> = all.iter().map(|token| token.text).collect();
        let expected = "ld.global.v2.f32 { %f1 , %f2 } , [ %rd1 + - 8 ] ; $L_1 : .file";
        assert_eq!(texts[..texts.len() - 1].join(" "), expected);
        assert_eq!((all[0].line, all.last().unwrap().line, *texts.last().unwrap()), (2, 3, "\"a b\""));
        assert_eq!(tokens("ok\n/* no end").unwrap_err().line, 2);
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!([integer("12"), integer("0xffU"), integer("7U")], [Some(12), Some(255), Some(7)]);
        assert_eq!([integer("x"), integer("1f"), integer("")], [None; 3]);
    }
}

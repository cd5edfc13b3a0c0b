//! Patterns of names: text in which `{}` stands for a number.

/// Rewrites `name` from the pattern `from` to the pattern `to`, if it matches.
pub(super) fn renamed(from: &str, to: &str, name: &str) -> Option<String> {
    Some(digits(from, name)?.into_iter().fold(to.to_owned(), |to, number| to.replacen("{}", number, 1)))
}

/// The numbers at the places of `{}`, if `name` matches `pattern`.
pub(super) fn numbered(pattern: &str, name: &str) -> Option<Vec<usize>> {
    digits(pattern, name)?.into_iter().map(|number| number.parse().ok()).collect()
}

/// The digits at the places of `{}`, if `name` matches `pattern`.
fn digits<'n>(pattern: &str, name: &'n str) -> Option<Vec<&'n str>> {
    let mut texts = pattern.split("{}");
    let mut rest = name.strip_prefix(texts.next()?)?;
    let mut found = Vec::new();
    for text in texts {
        let count = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(count);
        found.push(Some(number).filter(|number| !number.is_empty())?);
        rest = after.strip_prefix(text)?;
    }
    rest.is_empty().then_some(found)
}

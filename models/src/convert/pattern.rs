//! Patterns of names: text in which `{}` stands for a number.

/// Rewrites `name` from the pattern `from` to the pattern `to`, if it matches.
pub(super) fn renamed(from: &str, to: &str, name: &str) -> Option<String> {
    let Some((before, after)) = from.split_once("{}") else {
        return (from == name).then(|| to.to_owned());
    };
    let number = name.strip_prefix(before)?.strip_suffix(after)?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| to.replacen("{}", number, 1))
}

/// The numbers at the places of `{}`, if `name` matches `pattern`.
pub(super) fn numbered(pattern: &str, name: &str) -> Option<Vec<usize>> {
    let mut texts = pattern.split("{}");
    let mut rest = name.strip_prefix(texts.next()?)?;
    let mut numbers = Vec::new();
    for text in texts {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        numbers.push(number.parse().ok()?);
        rest = after.strip_prefix(text)?;
    }
    rest.is_empty().then_some(numbers)
}

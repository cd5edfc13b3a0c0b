//! Patterns of names: text in which `{}` stands for a number.

/// `name` as `to` writes it, if it is what `from` describes.
pub fn renamed(from: &str, to: &str, name: &str) -> Option<String> {
    let Some((before, after)) = from.split_once("{}") else {
        return (from == name).then(|| to.to_owned());
    };
    let number = name.strip_prefix(before)?.strip_suffix(after)?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| to.replacen("{}", number, 1))
}

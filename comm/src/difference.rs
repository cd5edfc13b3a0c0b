//! The first difference of two texts that should be equal on all ranks.

/// The largest number of characters of a line to show, and the number of them before the difference.
const SHOWN: usize = 120;
const BEFORE: usize = 60;

/// The first line in which two texts differ, as each has it; of a long line the part around the difference. None if
/// they are no texts.
pub(crate) fn between(here: &[u8], there: &[u8]) -> Option<(String, String)> {
    let [here, there] = [here, there].map(|bytes| std::str::from_utf8(bytes).ok());
    let (mut here, mut there) = (here?.lines(), there?.lines());
    loop {
        match (here.next(), there.next()) {
            (Some(a), Some(b)) if a == b => {}
            (None, None) => return None,
            (a, b) => return Some(shown(a, b)),
        }
    }
}

fn shown(a: Option<&str>, b: Option<&str>) -> (String, String) {
    let equal = a.unwrap_or("").chars().zip(b.unwrap_or("").chars()).take_while(|(a, b)| a == b).count();
    let part = |line: &str| -> String {
        if line.chars().count() <= SHOWN {
            return format!("`{line}`");
        }
        let from = equal.saturating_sub(BEFORE);
        let left = if from > 0 { "…" } else { "" };
        let part: String = line.chars().skip(from).take(SHOWN).collect();
        let right = if line.chars().count() > from + SHOWN { "…" } else { "" };
        format!("`{left}{part}{right}`")
    };
    let text = |line: Option<&str>| line.map_or("nothing more".into(), part);
    (text(a), text(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_shown() {
        let between = |a: &str, b: &str| between(a.as_bytes(), b.as_bytes());
        let pair = |a: &str, b: &str| Some((a.to_string(), b.to_string()));
        assert_eq!(between("a\nb\nc", "a\nB\nC"), pair("`b`", "`B`"));
        assert_eq!(between("a", "a\nb"), pair("nothing more", "`b`"));
        assert_eq!(super::between(&[0xff], &[0xfe]), None);
        let (long, names) = ("é".repeat(200), "z".repeat(100));
        let (here, there) = between(&format!("{long}lr 1 {names}"), &format!("{long}lr 2 {names}")).unwrap();
        assert!(here.starts_with("`…é") && here.ends_with("z…`") && here.contains("lr 1"), "{here}");
        assert!(there.contains("lr 2"), "{there}");
    }
}

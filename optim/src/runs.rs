//! Runs of adjacent ranges of a flat buffer that one launch can process together.

use std::ops::Range;

/// The next run at or after `from`: adjacent ranges, of `n`, with equal keys. Ranges without a key are skipped.
pub(crate) fn next_run<K: PartialEq>(n: usize, from: usize, key: impl Fn(usize) -> Option<K>) -> Option<Range<usize>> {
    let start = (from..n).find(|&i| key(i).is_some())?;
    let first = key(start);
    let end = (start + 1..n).find(|&i| key(i) != first).unwrap_or(n);
    Some(start..end)
}

/// All runs of adjacent ranges for which `is` is true.
pub(crate) fn runs(n: usize, is: impl Fn(usize) -> bool) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let run = next_run(n, at, |i| is(i).then_some(()))?;
        at = run.end;
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_neighbours_of_one_key() {
        let keys = [None, Some(1), Some(1), Some(2), None, Some(2)];
        let mut found = vec![];
        let mut at = 0;
        while let Some(run) = next_run(keys.len(), at, |i| keys[i]) {
            at = run.end;
            found.push(run);
        }
        assert_eq!(found, [1..3, 3..4, 5..6]);
        assert_eq!(runs(4, |i| i != 2).collect::<Vec<_>>(), [0..2, 3..4]);
        assert_eq!(runs(0, |_| true).count(), 0);
    }
}

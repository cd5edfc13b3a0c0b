//! Rows of scores, one for each class, and the right class.

use numcore::{Error, Result};

use super::IGNORED;

/// The counted rows, with their target.
pub(super) fn rows<'a>(
    op: &'static str,
    scores: &'a [f32],
    classes: usize,
    targets: &'a [i64],
) -> Result<impl Iterator<Item = (&'a [f32], usize)>> {
    if classes == 0 || Some(scores.len()) != targets.len().checked_mul(classes) {
        let (scores, rows) = (scores.len(), targets.len());
        let why = format!("{scores} scores are not {rows} rows of {classes} classes");
        return Err(Error::lengths(op, &[scores, rows], why));
    }
    let counts = |target: i64| (target != IGNORED).then(|| class(op, target, classes)).transpose();
    let targets: Vec<Option<usize>> = targets.iter().map(|&target| counts(target)).collect::<Result<_>>()?;
    Ok(scores.chunks(classes).zip(targets).filter_map(|(row, target)| Some((row, target?))))
}

/// Checks that a class is in `0..classes`.
pub(super) fn class(op: &'static str, class: i64, classes: usize) -> Result<usize> {
    usize::try_from(class).ok().filter(|&c| c < classes).ok_or_else(|| {
        let allowed = format!("in 0..{classes}, or {IGNORED} as the target of a row that does not count");
        Error::range(op, "class", class, allowed)
    })
}

/// The number of classes before `target`: classes of a higher score, and earlier ones of an equal score. A NaN comes
/// before every number, so a row with one is right only if a search for the greatest value finds the target.
pub(super) fn place(row: &[f32], target: usize) -> usize {
    let own = row[target];
    let before = |(class, &score): (usize, &f32)| {
        if score.is_nan() || own.is_nan() {
            score.is_nan() && (!own.is_nan() || class < target)
        } else {
            score > own || (score == own && class < target)
        }
    };
    row.iter().enumerate().filter(|&scored| before(scored)).count()
}

/// The class of the highest score, whose [`place`] is 0; 0 without a class.
pub(super) fn best(row: &[f32]) -> usize {
    let better = |best: usize, class: usize| {
        let is_higher = !row[best].is_nan() && (row[class].is_nan() || row[class] > row[best]);
        if is_higher { class } else { best }
    };
    (1..row.len()).fold(0, better)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_a_stable_sort() {
        let row = [0.5, f32::NAN, 2.0, 0.5, -1.0, f32::NAN];
        let places: Vec<usize> = (0..row.len()).map(|target| place(&row, target)).collect();
        assert_eq!(places, [3, 0, 2, 4, 5, 1]);
        let rows = [&row[..], &row[2..5], &row[..1], &[-1.0, -0.5, -0.5], &[f32::NEG_INFINITY, f32::NAN, f32::NAN]];
        rows.iter().for_each(|row| assert_eq!(place(row, best(row)), 0, "{row:?}"));
        assert_eq!(best(&[]), 0);
    }
}

//! Weights of experts whose columns are rows in files, and may come from several tensors in turn.

use std::ops::Range;

use numcore::{DType, Error, Result, Shape, placement::TensorPlacement};

/// The type and shape of a weight `[E, C, n · R]`, whose columns are the rows of `n` tensors `[E, R, C]` in turn; or of a
/// bias `[E, n · R]`, of `n` tensors `[E, R]`.
///
/// # Errors
/// Fails if the tensors differ in type or shape, or have no such shape.
pub(super) fn spec(name: &str, parts: &[(DType, Shape)]) -> Result<(DType, Shape)> {
    let (first, count) = (parts.first().copied(), parts.len());
    match first.filter(|first| parts.iter().all(|part| part == first)).map(|(dtype, shape)| (dtype, shape.to_vec())) {
        Some((dtype, shape)) if shape.len() == 3 => Ok((dtype, [shape[0], shape[2], count * shape[1]].into())),
        Some((dtype, shape)) if shape.len() == 2 => Ok((dtype, [shape[0], count * shape[1]].into())),
        _ => {
            let why = format!("its parts are {parts:?}, not of one type and shape with an axis of experts");
            Err(Error::format(format!("weight `{name}`"), why))
        }
    }
}

/// Reads a piece of such a weight of `count` tensors, in elements of `size` bytes. `read` fills its last operand with a
/// piece of a tensor. Only the elements of the piece are read, an expert at a time.
pub(super) fn read_piece(
    piece: &TensorPlacement,
    [count, size]: [usize; 2],
    into: &mut [u8],
    read: impl Fn(usize, &TensorPlacement, &mut [u8]) -> Result<()>,
) -> Result<()> {
    if into.is_empty() {
        return Ok(());
    }
    let (logical, last) = (piece.logical(), piece.logical().rank() - 1);
    // A bias has a single column in files.
    let columns = if last == 2 { piece.ranges(1).to_vec() } else { Vec::new() };
    let width = piece.local()[last];
    let height = if last == 2 { piece.local()[1] } else { 1 };
    let mut shape = vec![logical[0], logical[last] / count];
    shape.extend((last == 2).then(|| logical[1]));
    let shape = Shape::new(&shape)?;
    let by_expert = into.chunks_exact_mut(height * width * size);
    for (expert, into) in piece.ranges(0).iter().cloned().flatten().zip(by_expert) {
        for part in 0..count {
            let own = |at: &usize| at % count == part;
            let places: Vec<_> = piece.ranges(last).iter().cloned().flatten().enumerate().collect();
            let places: Vec<_> = places.into_iter().filter(|(_, at)| own(at)).map(|(place, _)| place).collect();
            let first = |at: usize| at.saturating_sub(part).div_ceil(count);
            let rows = piece.ranges(last).iter().map(|range| first(range.start)..first(range.end));
            let rows: Vec<Range<usize>> = rows.filter(|rows| !rows.is_empty()).collect();
            let mut dims = vec![std::iter::once(expert..expert + 1).collect(), rows];
            dims.extend((last == 2).then(|| columns.clone()));
            let mut values = vec![0; places.len() * height * size];
            read(part, &TensorPlacement::new(shape, dims)?, &mut values)?;
            // Some rows at a time stay in the nearest cache.
            for (rows, places) in values.chunks(32 * height * size).zip(places.chunks(32)) {
                for column in 0..height {
                    for (row, place) in rows.chunks_exact(height * size).zip(places) {
                        let to = (column * width + place) * size;
                        into[to..to + size].copy_from_slice(&row[column * size..][..size]);
                    }
                }
            }
        }
    }
    Ok(())
}

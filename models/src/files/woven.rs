//! Weights of all experts that are made of several tensors of a file.

use std::ops::Range;

use numcore::{DType, Error, Result, Shape, placement::TensorPlacement};

use crate::convert::Weave;

/// The type and shape of a weight that is woven of `n` tensors of all experts. Rows one after another give
/// `[E, n · R, C]` from `[E, R, C]`. Rows that take turns give `[E, C, n · R]`, and a bias `[E, n · R]` from `[E, R]`.
///
/// # Errors
/// Fails if the tensors differ in type or shape, or have no such shape.
pub(super) fn spec(name: &str, parts: &[(DType, Shape)], weave: Weave) -> Result<(DType, Shape)> {
    let (first, count) = (parts.first().copied(), parts.len());
    let first =
        first.filter(|first| parts.iter().all(|part| part == first)).map(|(dtype, shape)| (dtype, shape.to_vec()));
    match (weave, first) {
        (Weave::Rows, Some((dtype, shape))) if shape.len() == 3 => {
            Ok((dtype, [shape[0], count * shape[1], shape[2]].into()))
        }
        (Weave::Turns, Some((dtype, shape))) if shape.len() == 3 => {
            Ok((dtype, [shape[0], shape[2], count * shape[1]].into()))
        }
        (Weave::Turns, Some((dtype, shape))) if shape.len() == 2 => Ok((dtype, [shape[0], count * shape[1]].into())),
        _ => {
            let why = format!("its parts are {parts:?}, not of one type and shape with an axis of experts");
            Err(Error::format(format!("weight `{name}`"), why))
        }
    }
}

/// Reads a piece of a weight whose rows are those of `count` tensors, one after another, in elements of `size` bytes.
/// `read` fills its last operand with a piece of a tensor. Only the elements of the piece are read.
pub(super) fn read_rows(
    piece: &TensorPlacement,
    [count, size]: [usize; 2],
    into: &mut [u8],
    read: impl Fn(usize, &TensorPlacement, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let (logical, mut rest) = (piece.logical(), into);
    let (rows, width) = (logical[1] / count, piece.local()[2] * size);
    for expert in piece.ranges(0).iter().cloned().flatten() {
        for part in 0..count {
            let within = |at: usize| at.clamp(part * rows, (part + 1) * rows) - part * rows;
            let own = piece.ranges(1).iter().map(|range| within(range.start)..within(range.end));
            let own: Vec<_> = own.filter(|range| !range.is_empty()).collect();
            let (now, later) = rest.split_at_mut(own.iter().map(Range::len).sum::<usize>() * width);
            let dims = vec![std::iter::once(expert..expert + 1).collect(), own, piece.ranges(2).to_vec()];
            read(part, &TensorPlacement::new(logical.with(1, rows), dims)?, now)?;
            rest = later;
        }
    }
    Ok(())
}

/// Reads a piece of a weight whose columns are rows of `count` tensors in turn, as [`read_rows`] does.
pub(super) fn read_turns(
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

//! Search of the rows of one tensor in those of another.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use super::call::CallOutput;

/// The rows of a tensor on one rank, in which rows of other ranks are found again, in any order and cut along columns.
pub(super) struct RowSearch<'a> {
    rows: Vec<&'a [f64]>,
    width: usize,
    /// The largest magnitude, by which differences are measured.
    scale: f64,
    bound: f64,
    /// The indices of pieces that were searched before.
    indices: RefCell<BTreeMap<ColumnPiece, ProjectionIndex>>,
}

/// The projections of all rows onto a fixed direction, ascending, each with its row.
type ProjectionIndex = Rc<Vec<(f64, usize)>>;

/// The part of a tensor that a rank has.
pub(super) struct Found {
    /// The columns, as ranges' starts and their common length.
    pub columns: ColumnPiece,
    /// The number of the tensor's row for each of the rank's rows.
    pub rows: Vec<usize>,
}

/// ColumnPiece of a tensor: parts of equal length at equal distances. A weight fused of three has three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ColumnPiece {
    start: usize,
    len: usize,
    distance: usize,
    parts: usize,
}

impl ColumnPiece {
    /// The pieces of `width` columns that may be one of `count` equal pieces of all.
    fn candidates(all: usize, width: usize) -> Vec<ColumnPiece> {
        if width == all {
            return vec![ColumnPiece { start: 0, len: all, distance: all, parts: 1 }];
        }
        if width == 0 || !all.is_multiple_of(width) {
            return Vec::new();
        }
        let pieces = all / width;
        let parts = (1..=4).filter(|parts| width.is_multiple_of(*parts));
        let piece = |parts: usize| {
            let (len, distance) = (width / parts, all / parts);
            (0..pieces).map(move |k| ColumnPiece { start: k * len, len, distance, parts })
        };
        parts.flat_map(piece).collect()
    }

    fn of(self, row: &[f64]) -> impl Iterator<Item = f64> + '_ {
        (0..self.parts).flat_map(move |part| row[part * self.distance + self.start..][..self.len].iter().copied())
    }
}

impl<'a> RowSearch<'a> {
    /// The rows of all outputs, which have one width. None if they do not, or have no rows.
    pub(super) fn of(outputs: &[&'a CallOutput], bound: f64) -> Option<Self> {
        let width = outputs.first()?.width;
        if width == 0 || outputs.iter().any(|output| output.width != width || !output.is_float) {
            return None;
        }
        let rows: Vec<&[f64]> = outputs.iter().flat_map(|output| output.rows()).collect();
        let scale = rows.iter().flat_map(|row| row.iter()).fold(0.0f64, |most, value| most.max(value.abs()));
        Some(RowSearch { rows, width, scale: scale.max(f64::MIN_POSITIVE), bound, indices: RefCell::default() })
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Tells whether an output of this width can be a part of these rows.
    pub(super) fn may_hold(&self, output: &CallOutput) -> bool {
        output.is_float && !ColumnPiece::candidates(self.width, output.width).is_empty()
    }

    /// Finds all rows of an output, each at a place of its own that `taken` does not have; none if one is missing.
    /// Places that were taken are used where no other is left.
    pub(super) fn find(&self, output: &CallOutput, taken: &mut BTreeSet<(ColumnPiece, usize)>) -> Option<Found> {
        let mut candidates = ColumnPiece::candidates(self.width, output.width).into_iter();
        candidates.find_map(|columns| {
            let index = self.index(columns);
            let (mut places, mut own) = (Vec::new(), BTreeSet::new());
            for row in output.rows() {
                let near = self.near(&index, columns, row);
                let is_free = |place: &&usize| !own.contains(*place) && !taken.contains(&(columns, **place));
                let place = *near.iter().find(is_free).or_else(|| near.first())?;
                own.insert(place);
                places.push(place);
            }
            taken.extend(own.into_iter().map(|place| (columns, place)));
            Some(Found { columns, rows: places })
        })
    }

    fn index(&self, columns: ColumnPiece) -> ProjectionIndex {
        let sorted = || {
            let of = |(k, row): (usize, &&[f64])| (projection(columns.of(row)), k);
            let mut index: Vec<(f64, usize)> = self.rows.iter().enumerate().map(of).collect();
            index.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            Rc::new(index)
        };
        self.indices.borrow_mut().entry(columns).or_insert_with(sorted).clone()
    }

    /// The rows that equal `row`, the nearest first.
    fn near(&self, index: &[(f64, usize)], columns: ColumnPiece, row: &[f64]) -> Vec<usize> {
        let off = self.bound * self.scale;
        // Errors of either sign nearly cancel in the projection, whose weights have either sign too.
        let (at, slack) = (projection(row.iter().copied()), 4.0 * off * (row.len() as f64).sqrt());
        let first = index.partition_point(|(place, _)| *place < at - slack);
        let within = index[first..].iter().take_while(|(place, _)| *place <= at + slack);
        let distance =
            |k: usize| columns.of(self.rows[k]).zip(row).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
        let near = within.map(|(_, k)| (distance(*k), *k)).filter(|(distance, _)| *distance <= off);
        let mut near: Vec<(f64, usize)> = near.collect();
        near.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        near.into_iter().map(|(_, k)| k).collect()
    }
}

/// The product of a row with a fixed vector of numbers from -0.5 to 0.5 without order.
fn projection(row: impl Iterator<Item = f64>) -> f64 {
    let weight = |k: usize| ((k + 1) as f64 * 0.618_033_988_749_894_9).fract() - 0.5;
    row.enumerate().map(|(k, value)| weight(k) * value).sum()
}

//! The pieces of documents in each row: arithmetic on lengths.

use numcore::{Error, Result, Within};

/// A piece of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub document: usize,
    pub start: usize,
    pub len: usize,
    /// True if the document ends with this piece.
    pub last: bool,
}

/// The pieces of every row.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    /// Documents one after another: the end of each, in tokens.
    Concatenated(Vec<u64>),
    /// The pieces of all rows, and the end of each row in that list.
    Fitted { pieces: Vec<Piece>, ends: Vec<usize> },
}

impl Plan {
    pub(super) fn concatenated(lengths: &[usize]) -> Plan {
        let add = |end: &mut u64, &len: &usize| {
            *end += len as u64;
            Some(*end)
        };
        Plan::Concatenated(lengths.iter().scan(0, add).collect())
    }

    /// Cuts documents into pieces, and packs these into rows by `fit`.
    pub(super) fn fitted(
        lengths: &[usize],
        context: usize,
        fit: impl FnOnce(&[usize]) -> Result<Vec<Vec<usize>>>,
    ) -> Result<Plan> {
        let cut: Vec<Piece> =
            lengths.iter().enumerate().flat_map(|(document, &len)| cut(document, len, context)).collect();
        let rows = fit(&cut.iter().map(|piece| piece.len).collect::<Vec<_>>())?;
        let (mut pieces, mut ends) = (Vec::with_capacity(cut.len()), Vec::with_capacity(rows.len()));
        for row in rows {
            pieces.extend(row.into_iter().map(|i| cut[i]));
            ends.push(pieces.len());
        }
        Ok(Plan::Fitted { pieces, ends })
    }

    /// The number of rows.
    pub(super) fn rows(&self, context: usize) -> usize {
        match self {
            Plan::Concatenated(_) => self.tokens().div_ceil(context as u64) as usize,
            Plan::Fitted { ends, .. } => ends.len(),
        }
    }

    /// The number of tokens in all rows, without padding.
    pub(super) fn tokens(&self) -> u64 {
        match self {
            Plan::Concatenated(ends) => ends.last().copied().unwrap_or(0),
            Plan::Fitted { pieces, .. } => pieces.iter().map(|piece| piece.len as u64).sum(),
        }
    }

    /// The pieces of a row.
    pub(super) fn row(&self, index: usize, context: usize) -> Vec<Piece> {
        match self {
            Plan::Concatenated(ends) => concatenated_row(ends, index as u64 * context as u64, context as u64),
            Plan::Fitted { pieces, ends } => {
                let start = if index == 0 { 0 } else { ends[index - 1] };
                pieces[start..ends[index]].to_vec()
            }
        }
    }
}

/// Cuts a document into full rows and a rest.
fn cut(document: usize, len: usize, context: usize) -> impl Iterator<Item = Piece> {
    (0..len).step_by(context).map(move |start| {
        let end = len.min(start.saturating_add(context));
        Piece { document, start, len: end - start, last: end == len }
    })
}

/// The pieces of the `context` tokens from token `from` on.
fn concatenated_row(ends: &[u64], from: u64, context: u64) -> Vec<Piece> {
    let to = from + context;
    let first = ends.partition_point(|&end| end <= from);
    let start_of = |document: usize| if document == 0 { 0 } else { ends[document - 1] };
    let overlapping = (first..ends.len()).take_while(|&document| start_of(document) < to);
    let piece = |document: usize| {
        let (start, end) = (start_of(document).max(from), ends[document].min(to));
        Piece {
            document,
            start: (start - start_of(document)) as usize,
            len: (end - start) as usize,
            last: end == ends[document],
        }
    };
    overlapping.map(piece).filter(|piece| piece.len > 0).collect()
}

/// Puts each length in the first of `bins` open rows of `capacity` that has room for it. If none has, the fullest row
/// is closed. The result has the indices of each row's lengths: rows in the order they are closed, open ones last.
///
/// ```
/// # fn main() -> numcore::Result<()> {
/// assert_eq!(data::pack::first_fit(&[3, 4, 2, 1], 5, 2)?, [vec![0, 2], vec![1, 3]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if `bins` is 0, or a length is larger than the capacity.
#[track_caller]
pub fn first_fit(lengths: &[usize], capacity: usize, bins: usize) -> Result<Vec<Vec<usize>>> {
    check("first_fit", lengths, capacity, bins).at_caller()?;
    let (mut closed, mut open) = (Vec::new(), Vec::<Row>::new());
    for (i, &len) in lengths.iter().enumerate() {
        if let Some(row) = open.iter_mut().find(|row| row.room >= len) {
            row.push(i, len);
            continue;
        }
        if open.len() == bins {
            // The first of the fullest.
            let fullest = (0..bins).min_by_key(|&bin| open[bin].room).unwrap_or(0);
            closed.push(open.remove(fullest).members);
        }
        let mut row = Row { room: capacity, members: Vec::new() };
        row.push(i, len);
        open.push(row);
    }
    closed.extend(open.into_iter().map(|row| row.members));
    Ok(closed)
}

/// Sorts each window of `window` lengths, and puts them, longest first, in the fullest row of `capacity` with room.
/// The result has the indices of each row's lengths, ascending.
///
/// # Errors
/// Fails if `window` is 0, or a length is larger than the capacity.
#[track_caller]
pub fn best_fit(lengths: &[usize], capacity: usize, window: usize) -> Result<Vec<Vec<usize>>> {
    check("best_fit", lengths, capacity, window).at_caller()?;
    let mut rows = Vec::new();
    for (number, window_lengths) in lengths.chunks(window).enumerate() {
        let mut order: Vec<usize> = (0..window_lengths.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(window_lengths[i]));
        // The rows by (room, number), so that the least sufficient room is the next key.
        let mut by_room = std::collections::BTreeSet::<(usize, usize)>::new();
        let mut open = Vec::<Row>::new();
        for i in order {
            let len = window_lengths[i];
            let row = by_room.range((len, 0)..).next().copied().unwrap_or_else(|| {
                open.push(Row { room: capacity, members: Vec::new() });
                (capacity, open.len() - 1)
            });
            by_room.remove(&row);
            open[row.1].push(number * window + i, len);
            by_room.insert((open[row.1].room, row.1));
        }
        rows.extend(open.into_iter().map(|mut row| {
            row.members.sort_unstable();
            row.members
        }));
    }
    Ok(rows)
}

struct Row {
    room: usize,
    members: Vec<usize>,
}

impl Row {
    fn push(&mut self, number: usize, len: usize) {
        self.room -= len;
        self.members.push(number);
    }
}

fn check(op: &'static str, lengths: &[usize], capacity: usize, open: usize) -> Result<()> {
    if open == 0 {
        return Err(Error::range(op, "number of open rows", open, "at least 1"));
    }
    match lengths.iter().position(|&len| len > capacity) {
        Some(at) => {
            let allowed = format!("at most {capacity}, which a row holds; it is length {at}");
            Err(Error::range(op, "length", lengths[at], allowed))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_no_pieces_of_empty_documents() {
        let lengths = [0, 3, 0, 2, 0];
        let one_row = |pieces: &[usize]| Ok(vec![(0..pieces.len()).collect()]);
        for plan in [Plan::concatenated(&lengths), Plan::fitted(&lengths, 5, one_row).unwrap()] {
            let pieces: Vec<_> = plan.row(0, 5).into_iter().map(|piece| (piece.document, piece.len)).collect();
            assert_eq!(pieces, [(1, 3), (3, 2)]);
        }
    }
}

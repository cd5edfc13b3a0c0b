//! Matrices in memory, as a library counts them.

use numcore::Layout;

/// The last two axes of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatrixLayout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements between rows, and between columns.
    pub(crate) steps: [isize; 2],
}

impl MatrixLayout {
    pub(crate) fn of(layout: &Layout) -> MatrixLayout {
        let rank = layout.rank();
        let (dims, strides) = (layout.dims(), layout.strides());
        MatrixLayout { rows: dims[rank - 2], columns: dims[rank - 1], steps: [strides[rank - 2], strides[rank - 1]] }
    }

    pub(crate) fn transposed(self) -> MatrixLayout {
        MatrixLayout { rows: self.columns, columns: self.rows, steps: [self.steps[1], self.steps[0]] }
    }

    /// Elements between rows, if rows are contiguous.
    pub(crate) fn row_major(self) -> Option<usize> {
        let neighbours = self.steps[1] == 1 || self.columns == 1;
        // From a single row nothing leads to another: whatever makes rows start at multiples of 16 bytes.
        let leading = if self.rows == 1 { self.columns.next_multiple_of(8) as isize } else { self.steps[0] };
        (neighbours && leading >= self.columns as isize).then_some(leading as usize)
    }

    /// Elements between rows or columns, and whether the columns are the contiguous ones.
    pub(crate) fn form(self) -> Option<(usize, bool)> {
        let rows = self.row_major().map(|leading| (leading, false));
        rows.or_else(|| self.transposed().row_major().map(|leading| (leading, true)))
    }
}

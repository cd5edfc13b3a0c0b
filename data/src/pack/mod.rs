//! Packing: several documents in one row of a batch, so that little of it is padding.
//!
//! A row stores the position and the segment of each token. The segment is the number of its document in the row, from
//! 1; 0 is padding. Positions count from 0 in the document, or in the piece of it that the row holds. Attention limited
//! to one segment sees what it would see of each piece alone. The last token of a document and padding have loss weight
//! 0: no token to predict follows them.

mod plan;
mod row;

use std::{ops::Range, sync::Arc};

use numcore::{Error, Result, Within};
use plan::{Piece, Plan};
pub use plan::{best_fit, first_fit};
pub use row::{PackedBatch, PackedRow};

use crate::{Dataset, tokens::IndexedTokens};

/// Documents whose lengths are known before they are read.
pub trait Documents: Send + Sync {
    /// The number of documents.
    fn count(&self) -> usize;

    /// The number of tokens of a document.
    ///
    /// # Errors
    /// Fails if there is no such document.
    fn length(&self, document: usize) -> Result<usize>;

    /// Reads a range of a document's tokens.
    ///
    /// # Errors
    /// Fails if the document or the range does not exist, or cannot be read.
    fn read(&self, document: usize, range: Range<usize>) -> Result<Vec<u32>>;
}

/// Documents in memory.
impl Documents for Vec<Vec<u32>> {
    fn count(&self) -> usize {
        self.len()
    }

    fn length(&self, document: usize) -> Result<usize> {
        crate::dataset::check_index("Documents", document, self.len())?;
        Ok(self[document].len())
    }

    fn read(&self, document: usize, range: Range<usize>) -> Result<Vec<u32>> {
        let len = self.length(document)?;
        let tokens = self[document].get(range.clone()).map(<[u32]>::to_vec);
        let allowed = || format!("in {}..={len} in document {document}", range.start);
        tokens.ok_or_else(|| Error::range("Documents", "end of the tokens", range.end, allowed()))
    }
}

impl Documents for IndexedTokens {
    fn count(&self) -> usize {
        self.len()
    }

    fn length(&self, document: usize) -> Result<usize> {
        self.document_len(document)
    }

    fn read(&self, document: usize, range: Range<usize>) -> Result<Vec<u32>> {
        self.document_tokens(document, range)
    }
}

impl<D: Documents + ?Sized> Documents for Arc<D> {
    fn count(&self) -> usize {
        (**self).count()
    }

    fn length(&self, document: usize) -> Result<usize> {
        (**self).length(document)
    }

    fn read(&self, document: usize, range: Range<usize>) -> Result<Vec<u32>> {
        (**self).read(document, range)
    }
}

/// Rows of `context` tokens, packed from documents: a [`Dataset`] of [`PackedRow`]s.
/// [`Loader::stack`](crate::Loader::stack) makes a [`PackedBatch`] of them.
///
/// ```
/// use data::{Dataset, Loader, pack::Packed};
/// # fn main() -> numcore::Result<()> {
/// let documents = vec![vec![1, 2, 3], vec![4, 5], vec![6, 7, 8, 9]];
/// let rows = Packed::first_fit(documents, 5, 8)?;
/// assert_eq!(rows.get(0)?.tokens, [1, 2, 3, 4, 5]);
/// assert_eq!(rows.get(0)?.segments, [1, 1, 1, 2, 2]);
/// assert_eq!(rows.get(0)?.weights, [1.0, 1.0, 0.0, 1.0, 0.0]);
/// let loader = Loader::new(rows).batch(2).stack();
/// assert_eq!(loader.epoch(0)?.next().unwrap()?.data.tokens.dims(), [2, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Packed<D> {
    documents: D,
    context: usize,
    plan: Plan,
}

impl<D: Documents> Packed<D> {
    /// Puts documents one after another and cuts them every `context` tokens. Only the end of the last row is padded.
    ///
    /// # Errors
    /// Fails if `context` is 0, or a length cannot be read.
    #[track_caller]
    pub fn concatenated(documents: D, context: usize) -> Result<Self> {
        let plan = Plan::concatenated(&lengths(&documents, context).at_caller()?);
        Ok(Packed { documents, context, plan })
    }

    /// Puts each document in the first of `bins` open rows that has room for it. If none has, the fullest row is
    /// closed. A document longer than a row is cut into full rows and a rest. Documents of a row stay in order.
    ///
    /// # Errors
    /// Fails if `context` or `bins` is 0, or a length cannot be read.
    #[track_caller]
    pub fn first_fit(documents: D, context: usize, bins: usize) -> Result<Self> {
        let lengths = lengths(&documents, context).at_caller()?;
        let plan = Plan::fitted(&lengths, context, |pieces| first_fit(pieces, context, bins)).at_caller()?;
        Ok(Packed { documents, context, plan })
    }

    /// Sorts each window of `window` documents by length, and puts them, longest first, in the fullest row with room:
    /// the least padding. A document longer than a row is cut into full rows and a rest.
    ///
    /// # Errors
    /// Fails if `context` or `window` is 0, or a length cannot be read.
    #[track_caller]
    pub fn best_fit(documents: D, context: usize, window: usize) -> Result<Self> {
        let lengths = lengths(&documents, context).at_caller()?;
        let plan = Plan::fitted(&lengths, context, |pieces| best_fit(pieces, context, window)).at_caller()?;
        Ok(Packed { documents, context, plan })
    }

    /// The fraction of padding in all rows, from 0 to 1.
    pub fn padding(&self) -> f64 {
        let all = self.plan.rows(self.context) as f64 * self.context as f64;
        if all == 0.0 { 0.0 } else { 1.0 - self.plan.tokens() as f64 / all }
    }
}

fn lengths<D: Documents>(documents: &D, context: usize) -> Result<Vec<usize>> {
    if context == 0 {
        return Err(Error::range("Packed", "context", context, "at least 1 to hold a document"));
    }
    (0..documents.count()).map(|document| documents.length(document)).collect()
}

impl<D: Documents> Dataset for Packed<D> {
    type Example = PackedRow;

    fn len(&self) -> usize {
        self.plan.rows(self.context)
    }

    fn get(&self, index: usize) -> Result<PackedRow> {
        crate::dataset::check_index("Packed", index, self.len())?;
        let mut row = PackedRow::with_room(self.context);
        for Piece { document, start, len, last } in self.plan.row(index, self.context) {
            // One token more, if there is one: the target of the last.
            let tokens = self.documents.read(document, start..start + len + usize::from(!last))?;
            row.push(&tokens, len);
        }
        Ok(row.padded(self.context))
    }
}

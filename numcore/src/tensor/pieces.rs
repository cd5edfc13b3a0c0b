//! Splitting of owned memory into parts with several owners, which fill them at once, and joining the parts: for
//! collectives.

use std::sync::Arc;

use super::{Lent, TensorMut};
use crate::{Error, ErrorKind, Layout, Result, Runtime, Shape};

/// The memory that pieces were split from.
#[derive(Debug)]
pub(crate) struct SplitMemory {
    layout: Layout,
    lent: Option<Lent>,
    pieces: usize,
}

impl<R: Runtime> TensorMut<R> {
    /// Splits row-major memory into consecutive one-dimensional pieces of `lens` elements, which must sum to its size.
    pub fn split(self, lens: &[usize]) -> Result<Vec<TensorMut<R>>> {
        let layout = *self.memory.layout();
        let numel = layout.numel();
        let total = lens.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
        if !layout.is_contiguous() || total != Some(numel) {
            let why = format!("row-major memory of {numel} elements cannot be cut into {lens:?}");
            return Err(Error::shape("split", &[*self.shape()], why));
        }
        let cut = Arc::new(SplitMemory { layout, lent: self.lent.clone(), pieces: lens.len() });
        let mut start = layout.offset();
        let piece = |(at, &len): (usize, &usize)| {
            let layout = Layout::contiguous(Shape::new(&[len])?).at(start);
            start += len;
            Ok(self.part(layout, Some(Lent::Piece { cut: cut.clone(), at })))
        };
        lens.iter().enumerate().map(piece).collect()
    }

    /// Joins all `pieces` of [`split`](TensorMut::split) memory, in order. The result counts as written if a piece was.
    pub fn join(pieces: Vec<TensorMut<R>>) -> Result<TensorMut<R>> {
        let of = |t: &TensorMut<R>| match t.lent() {
            Some(Lent::Piece { cut, at }) => Some((cut.clone(), *at)),
            _ => None,
        };
        let Some((whole, (cut, _))) = pieces.first().and_then(|t| Some((t, of(t)?))) else { return Err(incomplete()) };
        let next = |(k, t): (usize, &TensorMut<R>)| of(t).is_some_and(|(c, at)| Arc::ptr_eq(&c, &cut) && at == k);
        if pieces.len() != cut.pieces || !pieces.iter().enumerate().all(next) {
            return Err(incomplete());
        }
        let mut joined = whole.part(cut.layout, cut.lent.clone());
        joined.written = pieces.iter().any(|t| t.written);
        Ok(joined)
    }
}

fn incomplete() -> Error {
    ErrorKind::Lent { op: "join", what: "these are not all pieces of one split, in order".into() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Flat, FlatLayout, NullRuntime};

    #[test]
    fn pieces_go_back_only_together() {
        let layout = FlatLayout::new(DType::F32, [("a".to_string(), Shape::of(&[70]))]);
        let mut flat = Flat::zeros(&NullRuntime::new(), layout).unwrap();
        let pieces = flat.lend_whole().unwrap().split(&[100, 0, 28]).unwrap();
        assert_eq!(pieces.iter().map(|p| p.shape().numel()).collect::<Vec<_>>(), [100, 0, 28]);
        let mut pieces = pieces.into_iter();
        let first = pieces.next().unwrap();
        assert!(flat.restore(first).is_err(), "one piece is not the whole");
        assert!(TensorMut::join(pieces.collect()).is_err());
        assert!(flat.reclaim());
        let pieces = flat.lend_whole().unwrap().split(&[64, 64]).unwrap();
        assert!(TensorMut::join(pieces.into_iter().rev().collect()).is_err(), "order counts");
        assert!(flat.reclaim());
        let whole = TensorMut::join(flat.lend_whole().unwrap().split(&[64, 64]).unwrap()).unwrap();
        flat.restore(whole).unwrap();
        assert!(flat.lend(0).is_ok());
    }

    #[test]
    fn cuts_must_add_up() {
        let row = || TensorMut::alloc(&NullRuntime::new(), Shape::of(&[2, 5]), DType::F32).unwrap();
        assert!(row().split(&[4, 5]).is_err());
        let error = row().split(&[6, 4]).unwrap().pop().unwrap().freeze().err().unwrap().to_string();
        assert!(error.contains("piece 1"), "{error}");
    }
}

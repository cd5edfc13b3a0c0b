//! Rows that experts of other ranks compute: where they go, and which of the others' come here.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, IndexOps},
};

use crate::parallel::{Placed, TensorGroup};

/// The exchange of rows of one layer, of which each rank has some experts: consecutive ones, as many as the others.
pub(super) struct Dispatch<'a, R: Runtime> {
    placed: &'a Placed<R>,
    /// The number of rows sent to each rank.
    send: Vec<usize>,
    /// The number of rows received from each rank.
    recv: Vec<usize>,
    /// The number of rows of each expert of this rank.
    counts: Vec<usize>,
    /// For rows ordered by expert, where they arrive, and the other way round; none if they arrive so.
    order: Option<[Vec<i64>; 2]>,
}

impl<'a, R: Runtime> Dispatch<'a, R> {
    /// The exchange of rows that are ordered by expert, `counts[e]` of them for expert `e` of all. Ranks tell each
    /// other their counts, so the host waits.
    pub(super) fn agree(placed: &'a Placed<R>, counts: &[usize]) -> Result<Self> {
        let (group, each) = (placed.group(), counts.len() / placed.group().size());
        let first = group.rank() * each;
        let table = of_all_ranks(&**group, counts, placed.name())?;
        let here: Vec<&[usize]> = table.iter().map(|of| &of[first..first + each]).collect();
        Ok(Dispatch {
            placed,
            send: counts.chunks(each).map(|of| of.iter().sum()).collect(),
            recv: here.iter().map(|of| of.iter().sum()).collect(),
            counts: (0..each).map(|e| here.iter().map(|of| of[e]).sum()).collect(),
            order: by_expert(&here),
        })
    }

    /// The number of rows of each expert of this rank.
    pub(super) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The rows that all ranks have for the experts of this one, ordered by expert, then by rank.
    pub(super) fn arrive(&self, rows: &Var<R>) -> Result<Var<R>> {
        let rows = self.placed.group().all_to_all(rows, &self.send, &self.recv, self.placed.name())?;
        self.order.as_ref().map_or(Ok(rows.clone()), |[arrived, _]| in_order(&rows, arrived))
    }

    /// Returns the experts' outputs to the ranks of their tokens, in the order of the rows sent.
    pub(super) fn leave(&self, outputs: &Var<R>) -> Result<Var<R>> {
        let outputs = self.order.as_ref().map_or(Ok(outputs.clone()), |[_, by_rank]| in_order(outputs, by_rank))?;
        self.placed.group().all_to_all(&outputs, &self.recv, &self.send, self.placed.name())
    }
}

fn in_order<R: Runtime>(rows: &Var<R>, order: &[i64]) -> Result<Var<R>> {
    rows.index_select(0, &Var::new(Tensor::from_slice(rows.runtime(), [order.len()], order)?))
}

/// The order of rows by expert, of rows that come by rank, and within by expert: `here[rank][expert]` of them. None if
/// that is their order.
fn by_expert(here: &[&[usize]]) -> Option<[Vec<i64>; 2]> {
    let mut starts = Vec::with_capacity(here.len());
    let mut at = 0;
    for of in here {
        starts.push(at);
        at += of.iter().sum::<usize>();
    }
    let mut arrived = Vec::with_capacity(at);
    for expert in 0..here.first().map_or(0, |of| of.len()) {
        for (start, of) in starts.iter_mut().zip(here) {
            arrived.extend((*start..*start + of[expert]).map(|row| row as i64));
            *start += of[expert];
        }
    }
    if arrived.is_sorted() {
        return None;
    }
    let mut by_rank = vec![0; arrived.len()];
    for (row, &from) in arrived.iter().enumerate() {
        by_rank[from as usize] = row as i64;
    }
    Some([arrived, by_rank])
}

/// The numbers of every rank, by rank, each as many as this one gives.
pub(super) fn of_all_ranks<R: Runtime>(group: &dyn TensorGroup<R>, own: &[usize], of: &str) -> Result<Vec<Vec<usize>>> {
    let bytes: Vec<u8> = own.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
    let all = group.exchange_bytes(&bytes, of)?;
    let numbers = |(rank, bytes): (usize, Vec<u8>)| {
        let numbers: Vec<usize> = bytes.as_chunks().0.iter().map(|&n| u64::from_le_bytes(n) as usize).collect();
        if numbers.len() == own.len() { Ok(numbers) } else { Err(unequal(of, rank, numbers.len(), own.len())) }
    };
    all.into_iter().enumerate().map(numbers).collect()
}

/// The error of ranks that do not have the same mixture: what `rank` sent, and what was due.
pub(super) fn unequal(of: &str, rank: usize, sent: usize, due: usize) -> Error {
    let why = format!(
        "is of a mixture that is another one on rank {rank} of its group: that sent {sent} numbers, and {due} were due"
    );
    Error::state(of.to_string(), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_come_by_rank_are_ordered_by_expert() {
        // Two ranks send 2 + 1 and 1 + 2 rows.
        let [arrived, by_rank] = by_expert(&[&[2, 1], &[1, 2]]).unwrap();
        assert_eq!(arrived, [0, 1, 3, 2, 4, 5]);
        assert_eq!(by_rank, [0, 1, 3, 2, 4, 5]);
        let [arrived, by_rank] = by_expert(&[&[0, 2], &[1, 0], &[1, 1]]).unwrap();
        assert_eq!(arrived, [2, 3, 0, 1, 4]);
        assert_eq!(by_rank, [2, 3, 0, 1, 4]);
        let [arrived, by_rank] = by_expert(&[&[1, 1, 1], &[1, 0, 1]]).unwrap();
        assert_eq!(arrived, [0, 3, 1, 2, 4]);
        assert_eq!(by_rank, [0, 2, 3, 1, 4]);
    }

    #[test]
    fn rows_that_come_in_order_are_left_so() {
        for here in [&[&[3][..], &[0], &[2]][..], &[&[2, 1], &[0, 4]], &[&[0, 0], &[0, 0]], &[&[1, 2, 3]], &[]] {
            assert!(by_expert(here).is_none(), "{here:?}");
        }
    }
}

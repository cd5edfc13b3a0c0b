//! Gradients summed in one order, whatever the number of ranks.

use std::{array, collections::BTreeMap, sync::LazyLock};

use numcore::{
    DType, Error, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Input, ViewOps, compute},
    pointwise::{Expr, Program, standard::COPY},
};

use super::{BucketReducer, FullBucket};
use crate::comm::{Collectives, Comm, Communicator, Work};

/// The most operands of one kernel launch.
const AT_ONCE: usize = 7;

/// A reducer that sums chunks of the batch in a fixed order, so that the result does not depend on the number of ranks.
/// Every rank gathers the gradients of all ranks, and adds them from rank 0 on. See
/// [`BucketOptions::canonical`](super::BucketOptions::canonical).
pub struct Canonical<R: Runtime> {
    /// The buckets in flight, by number.
    sent: BTreeMap<usize, SentChunks<R>>,
    /// The sums of the step so far, by bucket number.
    sums: BTreeMap<usize, TensorMut<R>>,
}

/// A bucket in flight.
struct SentChunks<R: Runtime> {
    row: TensorMut<R>,
    ranks: usize,
    gathered: Work<TensorMut<R>>,
}

impl<R: Runtime> Default for Canonical<R> {
    fn default() -> Self {
        Canonical { sent: BTreeMap::new(), sums: BTreeMap::new() }
    }
}

impl<R: Runtime> BucketReducer<R> for Canonical<R> {
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()> {
        let gathered = gather(bucket.comm, &row)?;
        self.sent.insert(bucket.number, SentChunks { row, ranks: bucket.comm.size(), gathered });
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<TensorMut<R>> {
        let not_sent = || Error::internal("Canonical", format!("bucket {number} was not sent"));
        let SentChunks { mut row, ranks, gathered } = self.sent.remove(&number).ok_or_else(not_sent)?;
        let (fits, gathered) = (|sum: &TensorMut<R>| sum.shape() == row.shape(), gathered.wait()?.freeze()?);
        let mut sum = match self.sums.remove(&number).filter(fits) {
            Some(sum) => sum,
            None => TensorMut::alloc_for(row.runtime(), MemoryCategory::Gradients, *row.shape(), row.dtype())?,
        };
        add(&mut sum, &gathered, ranks)?;
        compute(sum.runtime(), &COPY, &[Input::Memory(&sum)], &[], &mut [&mut row])?;
        self.sums.insert(number, sum);
        Ok(row)
    }

    fn reduces_every_pass(&self) -> bool {
        true
    }

    fn begin_step(&mut self) {
        self.sent.clear();
        self.sums.values_mut().for_each(TensorMut::reset);
    }
}

/// Gathers a bucket's gradients: every rank gets those of all ranks, `[n·len]`, in the order of ranks.
fn gather<R: Runtime>(comm: &Comm<R>, own: &TensorMut<R>) -> Result<Work<TensorMut<R>>> {
    let (n, len, dtype) = (comm.size(), own.shape().numel(), own.dtype());
    let all = TensorMut::alloc_for(own.runtime(), MemoryCategory::Communication, Shape::new(&[n * len])?, dtype)?;
    let mut parts = all.split(&vec![len; n])?;
    compute(own.runtime(), &COPY, &[Input::Memory(own)], &[], &mut [&mut parts[comm.rank()]])?;
    comm.all_gather_in_place(TensorMut::join(parts)?)
}

/// Adds the chunks in `gathered` to the row `sum`, from rank 0 on. Rounds after each addition, so the number of chunks
/// per launch does not matter.
fn add<R: Runtime>(sum: &mut TensorMut<R>, gathered: &Tensor<R>, ranks: usize) -> Result<()> {
    let len = sum.shape().numel();
    let chunks = (0..ranks).map(|rank| gathered.narrow(0, rank * len, len)).collect::<Result<Vec<_>>>()?;
    for some in chunks.chunks(AT_ONCE) {
        let own = sum.is_written().then_some(Input::Own(0));
        let ins: Vec<Input<'_, R>> = own.into_iter().chain(some.iter().map(Input::Value)).collect();
        compute(gathered.runtime(), fold(ins.len(), sum.dtype()), &ins, &[], &mut [sum])?;
    }
    Ok(())
}

/// A program for `((x0 + x1) + x2) + …` of `n` values, rounded to `dtype` after each addition; halves are added in
/// `f32`.
fn fold(n: usize, dtype: DType) -> &'static Program {
    static FULL: LazyLock<Folds> = LazyLock::new(|| folds(|a, b| a + b));
    static HALF: LazyLock<Folds> =
        LazyLock::new(|| folds(|a, b| (a.cast(DType::F32) + b.cast(DType::F32)).cast_like(a)));
    if dtype.is_half() { &HALF[n - 1] } else { &FULL[n - 1] }
}

/// Programs that fold 1, 2, … values: the operands of a launch and the sum so far.
type Folds = [Program; AT_ONCE + 1];

fn folds(two: impl for<'b> Fn(Expr<'b>, Expr<'b>) -> Expr<'b>) -> Folds {
    array::from_fn(|n| Program::build("fold", n + 1, 0, |_, x, _| x.iter().copied().reduce(&two).into_iter().collect()))
}

//! Gradient buckets summed by an all-reduce, in their own dtype or a narrower one.

use std::{collections::BTreeMap, sync::LazyLock};

use numcore::{
    DType, Error, Result, Runtime, Tensor, TensorMut,
    ops::{Input, compute},
    pointwise::Program,
};

use super::{BucketReducer, FullBucket, GradCompression, weight::TotalWeight};
use crate::{
    comm::{Collectives, Comm, Communicator, ReduceOp, Work},
    strategy::LossWeight,
};

static BF16: LazyLock<Program> = LazyLock::new(|| Program::new("narrow", |[x], []| [x.cast(DType::BF16)]));
static WIDEN: LazyLock<Program> = LazyLock::new(|| Program::new("widen", |[x, own], [n]| [x.cast_like(own) * n]));
/// The mean in `f16`, or 0 if the step weighs nothing. That is an error only after gradients were sent; until then gaps
/// in the row stay zero.
static MEAN: LazyLock<Program> = LazyLock::new(|| {
    Program::new("narrow_mean", |[x, weight], [n]| {
        let weight = weight.cast_like(x);
        [(x * weight.gt(0.0).select(n / weight, 0.0)).cast(DType::F16)]
    })
});
static SUM: LazyLock<Program> = LazyLock::new(|| {
    Program::new("widen_sum", |[mean, own, weight], []| [mean.cast_like(own) * weight.cast_like(own)])
});

/// A reducer that sums each bucket by an all-reduce of its gradients, in their own dtype or a narrower one.
pub struct AllReduce<R: Runtime> {
    compression: GradCompression,
    /// The total weight of the step's losses, used if means are sent.
    weight: TotalWeight<R>,
    ranks: usize,
    sent: BTreeMap<usize, Work<TensorMut<R>>>,
}

impl<R: Runtime> AllReduce<R> {
    /// Makes an all-reduce over the ranks of `comm`, which sends gradients in the dtype of `compression`. Custom
    /// reducers can wrap it; [`BucketOptions::compression`](super::BucketOptions::compression) chooses it otherwise.
    pub fn new(comm: &Comm<R>, compression: GradCompression) -> Self {
        let (weight, ranks) = (TotalWeight::new(comm), comm.size());
        AllReduce { compression, weight, ranks, sent: BTreeMap::new() }
    }

    /// Starts to sum a bucket's row over all ranks in place.
    fn start(&mut self, comm: &Comm<R>, row: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        let dtype = match self.compression {
            GradCompression::Own => row.dtype(),
            GradCompression::Bf16 => DType::BF16,
            GradCompression::F16 => DType::F16,
        };
        if dtype.size() >= row.dtype().size() {
            return comm.all_reduce(row, ReduceOp::Sum);
        }
        let narrow = TensorMut::alloc(comm.runtime(), *row.shape(), dtype)?;
        match self.compression.sends_means() {
            true => send_mean(comm, row, narrow, self.weight.get(self.ranks as f64)?),
            false => send_sum(comm, row, narrow),
        }
    }
}

/// Sends a row as `bf16`, whose range is that of `f32`: averaged over ranks, then multiplied by their number.
fn send_sum<R: Runtime>(comm: &Comm<R>, row: TensorMut<R>, mut narrow: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
    let (rt, n) = (comm.runtime().clone(), comm.size() as f64);
    compute(&rt, &BF16, &[Input::Memory(&row)], &[], &mut [&mut narrow])?;
    Ok(comm.all_reduce(narrow, ReduceOp::Avg)?.map(move |narrow| {
        let mut row = row;
        compute(&rt, &WIDEN, &[Input::Memory(&narrow), Input::Own(0)], &[n.into()], &mut [&mut row])?;
        Ok(row)
    }))
}

/// Sends a row as `f16`: the gradient of the mean loss, because sums would leave the range.
fn send_mean<R: Runtime>(
    comm: &Comm<R>,
    row: TensorMut<R>,
    mut narrow: TensorMut<R>,
    weight: Tensor<R>,
) -> Result<Work<TensorMut<R>>> {
    let (rt, n) = (comm.runtime().clone(), comm.size() as f64);
    compute(&rt, &MEAN, &[Input::Memory(&row), Input::Value(&weight)], &[n.into()], &mut [&mut narrow])?;
    Ok(comm.all_reduce(narrow, ReduceOp::Avg)?.map(move |mean| {
        let mut row = row;
        let ins = [Input::Memory(&mean), Input::Own(0), Input::Value(&weight)];
        compute(&rt, &SUM, &ins, &[], &mut [&mut row])?;
        Ok(row)
    }))
}

impl<R: Runtime> BucketReducer<R> for AllReduce<R> {
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()> {
        let work = self.start(bucket.comm, row)?;
        self.sent.insert(bucket.number, work);
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<TensorMut<R>> {
        let not_sent = || Error::internal("AllReduce", format!("bucket {number} was not sent"));
        self.sent.remove(&number).ok_or_else(not_sent)?.wait()
    }

    fn begin_step(&mut self) {
        self.sent.clear();
        self.weight.clear();
    }

    fn set_loss_weight(&mut self, losses: LossWeight) -> Result<()> {
        if self.compression.sends_means() { self.weight.begin(losses.weight) } else { Ok(()) }
    }
}

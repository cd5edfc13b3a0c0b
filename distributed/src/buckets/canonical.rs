//! Gradients added in one order, whatever the number of ranks.

use std::{array, ops::Range, sync::LazyLock};

use numcore::{
    DType, Flat, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Input, ViewOps, compute},
    pointwise::{Expr, Program},
};

use crate::comm::{Collectives, Comm, Work};

/// Operands of one launch.
const AT_ONCE: usize = 7;

/// Sends a chunk's gradients: every rank gets those of all ranks, one after another.
pub(super) fn gather<R: Runtime>(comm: &Comm<R>, own: &TensorMut<R>) -> Result<Work<TensorMut<R>>> {
    let (n, len, dtype) = (comm.size(), own.shape().numel(), own.dtype());
    let all = TensorMut::alloc_for(own.runtime(), MemoryCategory::Communication, Shape::new(&[n * len])?, dtype)?;
    let mut parts = all.split(&vec![len; n])?;
    static COPY: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]));
    compute(own.runtime(), &COPY, &[Input::Memory(own)], &[], &mut [&mut parts[comm.rank()]])?;
    comm.all_gather_in_place(TensorMut::join(parts)?)
}

/// Adds the chunks in `gathered` to `sums`, range by range, first rank first, rounding after each: so it does not matter how many came at
/// once.
pub(super) fn add<R: Runtime>(
    sums: &mut Flat<R>,
    ranges: Range<usize>,
    gathered: &Tensor<R>,
    ranks: usize,
) -> Result<()> {
    let span = sums.layout().span(ranges.clone());
    for i in ranges {
        let place = *sums.layout().range(i);
        let chunk = |r: usize| {
            let start = r * span.len() + place.offset() - span.start;
            gathered.narrow(0, start, place.numel())?.reshape(*place.shape())
        };
        let chunks = (0..ranks).map(chunk).collect::<Result<Vec<_>>>()?;
        for some in chunks.chunks(AT_ONCE) {
            let (rt, before) = (sums.runtime().clone(), sums.is_written(i));
            let mut sum = sums.lend(i)?;
            let own = before.then_some(Input::Own(0));
            let ins: Vec<Input<'_, R>> = own.into_iter().chain(some.iter().map(Input::Value)).collect();
            let done = compute(&rt, fold(ins.len(), sum.dtype()), &ins, &[], &mut [&mut sum]);
            sums.restore(sum)?;
            done?;
        }
    }
    Ok(())
}

/// `((x0 + x1) + x2) + …` of `n` values, rounded after each addition.
fn fold(n: usize, dtype: DType) -> &'static Program {
    static FULL: LazyLock<Folds> = LazyLock::new(|| folds(|a, b| a + b));
    static HALF: LazyLock<Folds> =
        LazyLock::new(|| folds(|a, b| (a.cast(DType::F32) + b.cast(DType::F32)).cast_like(a)));
    if dtype.is_half() { &HALF[n - 1] } else { &FULL[n - 1] }
}

/// Folds of 1, 2, … values: those of a launch, and the sums so far.
type Folds = [Program; AT_ONCE + 1];

fn folds(two: impl for<'b> Fn(Expr<'b>, Expr<'b>) -> Expr<'b>) -> Folds {
    array::from_fn(|n| Program::build("fold", n + 1, 0, |_, x, _| x.iter().copied().reduce(&two).into_iter().collect()))
}

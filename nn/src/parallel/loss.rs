//! The cross-entropy of logits that are sharded along the vocabulary.

use std::sync::LazyLock;

use autograd::Var;
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    fused::{CrossEntropyOptions, NnOps, Reduction},
    ops::{Apply, IndexOps, PointwiseOps, Reduce, ReduceOps, ScalarList, ViewOps, cat},
    pointwise::Program,
};

use super::{
    Exchange, Placed,
    placed::{LocalRows, fill_up, local_rows},
};

/// The cross-entropy of a language model, unsharded or cut along the vocabulary: the options of
/// [`NnOps::cross_entropy_with`], and a z-loss.
///
/// [`NnOps::cross_entropy_with`]: numcore::fused::NnOps::cross_entropy_with
#[derive(Clone, Copy, Debug, Default)]
pub struct VocabularyLoss {
    /// Ignored targets, label smoothing, and the reduction of the losses of rows.
    pub cross_entropy: CrossEntropyOptions,
    /// The factor of `(ln Σ exp z)²`, which is added to each row that counts and keeps logits from drifting (PaLM:
    /// 1e-4).
    pub z_loss: f64,
}

static EXP_SHIFTED: LazyLock<Program> = LazyLock::new(|| Program::new("exp_shifted", |[z, top], []| [(z - top).exp()]));
static SHIFTED: LazyLock<Program> = LazyLock::new(|| Program::new("shifted", |[z, top], []| [z - top]));

impl VocabularyLoss {
    /// The loss of logits `[.., V]` with classes `[..]` (`i64`). If `placed` is of a projection that is cut along the
    /// vocabulary, the logits are those of this rank's rows, `[.., V/t]`. The loss is then that of all logits, on every
    /// rank. Ranks exchange the largest logit of each row, then two or three sums of each row in one call. Without
    /// `placed` and a z-loss, it is the fused operation. The loss of half-precision logits is `f32`.
    pub fn of<R: Runtime>(&self, logits: &Var<R>, target: &Var<R>, placed: Option<&Placed<R>>) -> Result<Var<R>> {
        let (z, y) = (logits.spec(), target.spec());
        let Some((&here, rows)) = z.shape.dims().split_last().filter(|(_, rows)| **rows == y.shape[..]) else {
            return Err(Error::shape("cross_entropy", &[z.shape, y.shape], "needs logits [.., V] and classes [..]"));
        };
        if !z.dtype.is_float() || y.dtype != DType::I64 {
            return Err(Error::dtype("cross_entropy", &[z.dtype, y.dtype], "needs floating logits and i64 classes"));
        }
        let own = placed.map_or(LocalRows { first: 0, count: here, of: here }, Placed::rows);
        if own.count != here {
            let why = format!("this rank has rows {}..{} of {}", own.first, own.first + own.count, own.of);
            return Err(Error::shape("cross_entropy", &[z.shape], why));
        }
        if let Some(placed) = placed.filter(|placed| placed.whole_sums) {
            return self.of(&placed.all_logits(logits)?, target, None);
        }
        if placed.is_none() && self.z_loss == 0.0 {
            return logits.cross_entropy_with(target, self.cross_entropy);
        }
        let n: usize = rows.iter().product();
        let logits = logits.reshape([n, here])?.to_dtype(z.dtype.compute())?;
        self.reduced(self.of_rows(&logits, &target.reshape([n])?, own, placed)?, target)
    }

    /// The loss of each row, `[N]`, of logits `[N, V/t]`.
    fn of_rows<R: Runtime>(
        &self,
        logits: &Var<R>,
        target: &Var<R>,
        own: LocalRows,
        placed: Option<&Placed<R>>,
    ) -> Result<Var<R>> {
        let CrossEntropyOptions { ignore_index, label_smoothing, .. } = self.cross_entropy;
        let counts = target.ne(ignore_index as f64)?;
        let top = Var::new(top_of(&logits.value()?, placed)?);
        let sum = |program: &LazyLock<Program>| {
            let to = logits.spec().shape.with(1, 1);
            Var::apply1(Reduce::sum_of(LazyLock::force(program).clone(), ScalarList::new(), to), &[logits, &top])
        };
        // Ignored targets are set to an index of this rank, for a valid look-up.
        let target = target.where_cond(&counts, &number(target, own.first as i64)?)?;
        let (here, place) = local_rows(&target, own)?;
        // A rank without logits picks one of zeros, which no target means.
        let some = fill_up(logits, 1, usize::from(own.count == 0))?;
        let picked = some.gather(1, &place.unsqueeze(1)?)?.sub(&top)?.where_cond(&here.unsqueeze(1)?, 0.0)?;
        let mut parts = vec![sum(&EXP_SHIFTED)?, picked];
        if label_smoothing != 0.0 {
            parts.push(sum(&SHIFTED)?);
        }
        let joined = cat(&parts.iter().collect::<Vec<_>>(), 1)?;
        let all = placed.map_or(Ok(joined.clone()), |placed| placed.exchange(Exchange::AllReduce, &joined))?;
        let column = |k: usize| all.narrow(1, k, 1);
        let log_sum = column(0)?.log()?;
        let mut losses = log_sum.sub(&column(1)?)?;
        if label_smoothing != 0.0 {
            let spread = log_sum.sub(&column(2)?.div(own.of as f64)?)?;
            losses = losses.mul(1.0 - label_smoothing)?.add(&spread.mul(label_smoothing)?)?;
        }
        if self.z_loss != 0.0 {
            losses = losses.add(&log_sum.add(&top)?.square()?.mul(self.z_loss)?)?;
        }
        losses.squeeze(1)?.where_cond(&counts, 0.0)
    }

    fn reduced<R: Runtime>(&self, losses: Var<R>, target: &Var<R>) -> Result<Var<R>> {
        let CrossEntropyOptions { ignore_index, reduction, .. } = self.cross_entropy;
        match reduction {
            Reduction::None => losses.reshape(target.spec().shape),
            Reduction::Sum => losses.sum_all(),
            Reduction::Mean => {
                let counts = target.ne(ignore_index as f64)?.to_dtype(losses.dtype())?.sum_all()?;
                losses.sum_all()?.div(&counts)
            }
        }
    }
}

/// The largest logit of each row over all ranks, `[N, 1]`; 0 where it is infinite, so that the subtracted value is
/// finite.
fn top_of<R: Runtime>(logits: &Tensor<R>, placed: Option<&Placed<R>>) -> Result<Tensor<R>> {
    static FINITE: LazyLock<Program> =
        LazyLock::new(|| Program::new("finite", |[m], []| [m.abs().eq(f64::INFINITY).select(m.sign() * 0.0, m)]));
    let shape = *logits.shape();
    if shape[0] == 0 {
        return Tensor::zeros(logits.runtime(), Shape::new(&[0, 1])?, logits.dtype());
    }
    // A rank without logits asks the others for the largest.
    let own = match shape[1] {
        0 => Tensor::full(logits.runtime(), [shape[0], 1], logits.dtype(), f64::NEG_INFINITY)?,
        _ => logits.amax_keepdim(&[1])?,
    };
    placed.map_or(Ok(own.clone()), |placed| placed.max(&own))?.apply_program(&FINITE, &[], &[])
}

fn number<R: Runtime>(like: &Var<R>, value: i64) -> Result<Var<R>> {
    Ok(Var::new(Tensor::from_slice(like.runtime(), [1], &[value])?))
}

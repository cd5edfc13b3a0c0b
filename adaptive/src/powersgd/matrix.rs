//! The PowerSGD state of one parameter: its gradient as a matrix, the residual and `Q`.

use std::sync::LazyLock;

use numcore::{
    DType, Error, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Input, Matmul, MatmulOps, Op, PointwiseOps, ReduceOps, ViewOp, ViewOps, compute},
    pointwise::Program,
};

use super::{LowRankForm, orthonormal::orthonormal};

/// The residual plus the gradient of the mean loss.
static ABSORB: LazyLock<Program> = LazyLock::new(|| {
    Program::new("absorb", |[error, grad, weight], []| [error + grad.cast_like(error) / weight.cast_like(error)])
});
/// A column of `Q` that is zero, or not finite, would stay so for ever: it is redrawn.
static ALIVE: LazyLock<Program> =
    LazyLock::new(|| Program::new("alive", |[q, square, drawn], []| [square.gt(0.0).select(q, drawn - 0.5)]));
/// The sum over ranks, recovered from the mean, in the slot's dtype.
static GIVE: LazyLock<Program> = LazyLock::new(|| {
    Program::new("give", |[slot, product, weight], []| [(product * weight.cast_like(product)).cast_like(slot)])
});

/// The dtype of residual, `P` and `Q` for gradients of `dtype`: `f32` for halves, otherwise the same.
pub(super) fn working(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}

/// The state of a compressed parameter: its gradient is a matrix `[m, n]`, sent at rank `r`.
pub(super) struct LowRankGrad<R: Runtime> {
    form: LowRankForm,
    seed: u64,
    /// The residual, a row `[m·n]`; none while it is being written.
    error: Option<Tensor<R>>,
    /// The basis `[n, r]`, equal on all ranks.
    q: Tensor<R>,
    /// The residual and `Q` before the step, if the step may be undone.
    before: Option<(Tensor<R>, Tensor<R>)>,
}

impl<R: Runtime> LowRankGrad<R> {
    /// Makes the state for gradients of `dtype`, with a residual of zero.
    pub(super) fn new(rt: &R, form: LowRankForm, dtype: DType, seed: u64) -> Result<Self> {
        let LowRankForm { rows, columns, rank } = form;
        let numel = Shape::new(&[rows * columns])?;
        let mut error = TensorMut::alloc_for(rt, MemoryCategory::Gradients, numel, working(dtype))?;
        error.zero()?;
        let q = Tensor::zeros(rt, [columns, rank], working(dtype))?;
        Ok(LowRankGrad { form, seed, error: Some(error.freeze()?), q, before: None })
    }

    /// The dtype of residual, `P` and `Q`.
    pub(super) fn dtype(&self) -> DType {
        self.q.dtype()
    }

    /// The numbers of elements of `P` and of `Q`.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.form.rows * self.form.rank, self.form.columns * self.form.rank)
    }

    /// Adds the gradient, divided by `weight`, to the residual, which gives `M: [m, n]`. Writes `M·Q` to `p`.
    pub(super) fn begin(
        &mut self,
        grad: &TensorMut<R>,
        weight: &Tensor<R>,
        undoable: bool,
        p: &mut TensorMut<R>,
    ) -> Result<()> {
        let error = self.error()?;
        self.before = undoable.then(|| (error.clone(), self.q.clone()));
        self.error = None;
        let (rt, grad, weight) = (error.runtime().clone(), Input::Memory(grad), Input::Value(weight));
        let sum = match error.try_mut() {
            Ok(mut own) => {
                compute(&rt, &ABSORB, &[Input::Own(0), grad, weight], &[], &mut [&mut own])?;
                own
            }
            Err(kept) => {
                let mut sum = TensorMut::alloc_for(&rt, MemoryCategory::Gradients, *kept.shape(), kept.dtype())?;
                compute(&rt, &ABSORB, &[Input::Value(&kept), grad, weight], &[], &mut [&mut sum])?;
                sum
            }
        };
        self.error = Some(sum.freeze()?);
        let drawn =
            Tensor::uniform(self.q.runtime(), [self.form.columns, self.form.rank], self.dtype(), 0.0, 1.0, self.seed)?;
        self.q = self.q.apply_program(&ALIVE, &[&self.q.square()?.sum_keepdim(&[0])?, &drawn], &[])?;
        product(p, [self.form.rows, self.form.rank], &self.matrix()?, &self.q)
    }

    /// Makes the summed `p` orthonormal (`P̂`), and writes this rank's `Q = Mᵀ·P̂` to `q`. Subtracts `P̂·Qᵀ`, which is
    /// sent, from `M`. Returns `P̂`.
    pub(super) fn turn(&mut self, p: &Tensor<R>, q: &mut TensorMut<R>) -> Result<Tensor<R>> {
        let p = orthonormal(&p.reshape([self.form.rows, self.form.rank])?)?;
        let own = self.matrix()?.t()?.matmul(&p)?;
        q.accumulate_view(&[ViewOp::Reshape(*own.shape())], &Op::identity(), &[&own])?;
        let minus = own.neg()?.t()?;
        let error = self.error()?;
        self.error = None;
        let Ok(mut error) = error.try_mut() else {
            return Err(Error::internal("PowerSgd", "the error of a parameter is shared"));
        };
        product(&mut error, [self.form.rows, self.form.columns], &p, &minus)?;
        self.error = Some(error.freeze()?);
        Ok(p)
    }

    /// Writes the sum over all ranks, `P̂·Qᵀ` with the summed `q`, times `weight`.
    pub(super) fn end(
        &mut self,
        p: &Tensor<R>,
        q: &Tensor<R>,
        weight: &Tensor<R>,
        slot: &mut TensorMut<R>,
    ) -> Result<()> {
        // A copy, so that the row that was sent can be freed.
        self.q = q.reshape([self.form.columns, self.form.rank])?.copy()?;
        let sum = p.matmul(&self.q.t()?)?.reshape([self.form.rows * self.form.columns])?;
        compute(sum.runtime(), &GIVE, &[Input::Own(0), Input::Value(&sum), Input::Value(weight)], &[], &mut [slot])
    }

    /// Discards the state before the step: the step can no longer be undone.
    pub(super) fn keep(&mut self) {
        self.before = None;
    }

    /// Restores the state before the step, if it was kept.
    pub(super) fn undo(&mut self) {
        if let Some((error, q)) = self.before.take() {
            (self.error, self.q) = (Some(error), q);
        }
    }

    /// The residual, a row `[m·n]`. An error after a step that failed while writing it.
    pub(super) fn error(&self) -> Result<Tensor<R>> {
        self.error
            .clone()
            .ok_or_else(|| Error::internal("PowerSgd", "the error of a parameter was lost in a step that failed"))
    }

    /// The basis `Q`, `[n, r]`.
    pub(super) fn q(&self) -> &Tensor<R> {
        &self.q
    }

    /// The residual and `Q` after the last step that was taken.
    pub(super) fn taken(&self) -> Result<(Tensor<R>, Tensor<R>)> {
        self.before.clone().map_or_else(|| Ok((self.error()?, self.q.clone())), Ok)
    }

    /// Replaces `Q`, and the residual if there is one.
    pub(super) fn set(&mut self, error: Option<Tensor<R>>, q: &Tensor<R>) -> Result<()> {
        if let Some(error) = error {
            self.error = Some(error.copy_for(MemoryCategory::Gradients)?);
        }
        (self.q, self.before) = (q.reshape([self.form.columns, self.form.rank])?, None);
        Ok(())
    }

    fn matrix(&self) -> Result<Tensor<R>> {
        self.error()?.reshape([self.form.rows, self.form.columns])
    }
}

/// Adds `a·b` to a row, or overwrites the row if nothing was written to it.
fn product<R: Runtime>(row: &mut TensorMut<R>, shape: [usize; 2], a: &Tensor<R>, b: &Tensor<R>) -> Result<()> {
    row.accumulate_view(&[ViewOp::Reshape(Shape::new(&shape)?)], &Op::Matmul(Matmul), &[a, b])
}

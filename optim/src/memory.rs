//! The memory of one update: parameters with their gradients and state.

use std::{ops::Range, sync::LazyLock};

use numcore::{
    DType, Flat, Result, Runtime, Scalar, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ViewOps, update},
    pointwise::Program,
};
use smallvec::SmallVec;

use crate::{FlatParams, captured::DeviceNumbers};

/// The memory that an update reads and writes: a run of parameters, or one, with gradient and state. Tensors read from
/// it must be dropped before the same memory is written.
pub struct UpdateMemory<'a, R: Runtime> {
    pub(crate) params: &'a mut FlatParams<R>,
    pub(crate) states: &'a mut [Flat<R>],
    pub(crate) grads: &'a Flat<R>,
    pub(crate) scale: Option<&'a Tensor<R>>,
    pub(crate) ranges: Range<usize>,
    /// The device memory of the update's numbers, if they are not passed with each launch.
    pub(crate) numbers: Option<&'a mut DeviceNumbers<R>>,
}

impl<R: Runtime> UpdateMemory<'_, R> {
    /// Tells whether the gradient has a pending factor.
    pub fn is_scaled(&self) -> bool {
        self.scale.is_some()
    }

    /// The shape of the first parameter; for a rule that is called per parameter, that of its parameter.
    pub fn shape(&self) -> Shape {
        *self.params.layout().range(self.ranges.start).shape()
    }

    /// The dtype in which updates are computed.
    pub fn working(&self) -> DType {
        self.params.working()
    }

    /// The runtime of the state and of the parameters.
    pub fn runtime(&self) -> R {
        self.params.runtime().clone()
    }

    /// Runs a program of [`UpdateForm::program`](crate::UpdateForm::program) over all parameters of the run in one
    /// launch.
    pub fn launch(&mut self, program: &Program, scalars: &[Scalar]) -> Result<()> {
        let at = self.grads.layout().span(self.ranges.clone());
        let grad = self.grads.whole()?.narrow(0, at.start, at.len())?;
        let dtypes = self.numbers.is_some().then(|| self.operand_dtypes(&grad));
        let in_memory = match self.numbers.as_mut().zip(dtypes) {
            Some((n, dtypes)) => {
                Some(n.of_update(self.params.runtime(), program, scalars, dtypes, self.ranges.clone())?)
            }
            None => None,
        };
        let (program, numbers, scalars) = match &in_memory {
            Some((program, numbers)) => (program, &numbers[..], &[][..]),
            None => (program, &[][..], scalars),
        };
        let ins: SmallVec<[&Tensor<R>; 8]> = std::iter::once(&grad).chain(self.scale).chain(numbers).collect();
        let mut flats: SmallVec<[&mut Flat<R>; 6]> = SmallVec::new();
        flats.push(&mut self.params.values);
        flats.extend(self.states.iter_mut());
        flats.extend(self.params.master.as_mut());
        let span = |flat: &mut Flat<R>| flat.lend_span(self.ranges.clone());
        lending(&mut flats, span, |outs| update(program, &ins, scalars, outs))
    }

    /// The dtypes of the inputs and of the outputs of an update's program.
    fn operand_dtypes(&self, grad: &Tensor<R>) -> (SmallVec<[DType; 8]>, SmallVec<[Option<DType>; 8]>) {
        let flats = std::iter::once(&self.params.values).chain(self.states.iter()).chain(&self.params.master);
        let outs: SmallVec<[DType; 8]> = flats.map(|flat| flat.layout().dtype()).collect();
        let ins = std::iter::once(grad.dtype()).chain(self.scale.map(|x| x.dtype()));
        (outs.iter().copied().chain(ins).collect(), outs.into_iter().map(Some).collect())
    }

    /// Returns the gradient of the parameter in the dtype of updates, with the pending factor applied.
    pub fn gradient(&self) -> Result<Tensor<R>> {
        let grad = self.grads.tensor(self.ranges.start)?.to_dtype(self.working())?;
        match self.scale {
            Some(scale) => grad.apply_program(&SCALE, &[scale], &[]),
            None => Ok(grad),
        }
    }

    /// Returns the parameter in the dtype of updates: the master copy of a half-precision one.
    pub fn weight(&self) -> Result<Tensor<R>> {
        self.params.master.as_ref().unwrap_or(&self.params.values).tensor(self.ranges.start)
    }

    /// Returns state `k` of the parameter.
    pub fn state(&self, k: usize) -> Result<Tensor<R>> {
        self.states[k].tensor(self.ranges.start)
    }

    /// Updates the parameter in place. The inputs of `program` are the parameter, then `ins`. A half-precision
    /// parameter is rounded from its master copy.
    pub fn update_weight(&mut self, program: &Program, ins: &[&Tensor<R>], scalars: &[Scalar]) -> Result<()> {
        let i = self.ranges.start;
        let flat = self.params.master.as_mut().unwrap_or(&mut self.params.values);
        lending(&mut [flat], |f| f.lend(i), |outs| update(program, ins, scalars, outs))?;
        self.params.round(i)
    }

    /// Updates states of the parameter in place. Inputs of `program` are the `states`, then `fresh`, then `ins`; its
    /// outputs are the new `states`, then `fresh`, whose old contents are undefined. All must have one shape.
    pub fn update_states(
        &mut self,
        states: Range<usize>,
        fresh: Option<&mut TensorMut<R>>,
        program: &Program,
        ins: &[&Tensor<R>],
        scalars: &[Scalar],
    ) -> Result<()> {
        let i = self.ranges.start;
        let mut flats: SmallVec<[&mut Flat<R>; 3]> = self.states[states].iter_mut().collect();
        lending(
            &mut flats,
            |f| f.lend(i),
            |outs| {
                let mut all: SmallVec<[&mut TensorMut<R>; 4]> = outs.iter_mut().map(|t| &mut **t).collect();
                all.extend(fresh);
                update(program, ins, scalars, &mut all)
            },
        )
    }
}

/// Multiplies `x` by a factor of any floating dtype.
pub(crate) static SCALE: LazyLock<Program> =
    LazyLock::new(|| Program::new("scale", |[x, factor], []| [x * factor.cast_like(x)]));

/// Lends memory of several buffers, runs `f` over it, and takes it back even if `f` fails.
pub(crate) fn lending<R: Runtime>(
    flats: &mut [&mut Flat<R>],
    lend: impl Fn(&mut Flat<R>) -> Result<TensorMut<R>>,
    f: impl FnOnce(&mut [&mut TensorMut<R>]) -> Result<()>,
) -> Result<()> {
    let mut lent: SmallVec<[TensorMut<R>; 6]> = SmallVec::new();
    let all = flats.iter_mut().try_for_each(|flat| {
        lent.push(lend(flat)?);
        Ok(())
    });
    let done = all.and_then(|()| f(&mut lent.iter_mut().collect::<SmallVec<[_; 6]>>()));
    let back = flats.iter_mut().zip(lent).try_for_each(|(flat, part)| flat.restore(part));
    done.and(back)
}

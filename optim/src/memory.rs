//! The memory of one update: parameters with their gradients and state.

use std::{ops::Range, sync::LazyLock};

use numcore::{
    DType, Error, Flat, FlatLayout, Result, Runtime, Scalar, Shape, Tensor, TensorMut,
    ops::{Op, Pointwise, PointwiseOps, ViewOp, ViewOps, update},
    pointwise::Program,
};
use smallvec::SmallVec;

use crate::{
    captured::DeviceNumbers,
    params::{rounding, working},
};

/// The memory that an update reads and writes: a run of parameters, or one, with gradient and state. Tensors read from
/// it must be dropped before the same memory is written.
pub struct UpdateMemory<'a, R: Runtime> {
    pub(crate) values: Values<'a, R>,
    /// The layout of the parameters, in which `ranges` are counted.
    pub(crate) layout: &'a FlatLayout,
    pub(crate) states: &'a mut [Flat<R>],
    pub(crate) master: Option<&'a mut Flat<R>>,
    /// The gradients of the run in one row, gaps included.
    pub(crate) grad: Tensor<R>,
    pub(crate) scale: Option<&'a Tensor<R>>,
    pub(crate) ranges: Range<usize>,
    /// The device memory of the update's numbers, if they are not passed with each launch.
    pub(crate) numbers: Option<&'a mut DeviceNumbers<R>>,
}

/// The memory of parameters' values in an update.
pub(crate) enum Values<'a, R: Runtime> {
    /// The buffer of all parameters.
    Flat(&'a mut Flat<R>),
    /// The row of the run alone, gaps included; of a rule that reads its parameter, a copy of the parameter too.
    Row(&'a mut TensorMut<R>, Option<Tensor<R>>),
}

impl<R: Runtime> Values<'_, R> {
    fn split(&mut self) -> (Option<&mut Flat<R>>, Option<&mut TensorMut<R>>) {
        match self {
            Values::Flat(flat) => (Some(flat), None),
            Values::Row(row, _) => (None, Some(row)),
        }
    }
}

impl<R: Runtime> UpdateMemory<'_, R> {
    /// Tells whether the gradient has a pending factor.
    pub fn is_scaled(&self) -> bool {
        self.scale.is_some()
    }

    /// The shape of the first parameter; for a rule that is called per parameter, that of its parameter.
    pub fn shape(&self) -> Shape {
        *self.layout.range(self.ranges.start).shape()
    }

    /// The dtype in which updates are computed.
    pub fn working(&self) -> DType {
        working(self.layout.dtype())
    }

    /// The runtime of the state and of the parameters.
    pub fn runtime(&self) -> R {
        match &self.values {
            Values::Flat(flat) => flat.runtime().clone(),
            Values::Row(row, _) => row.runtime().clone(),
        }
    }

    /// Runs a program of [`UpdateForm::program`](crate::UpdateForm::program) over all parameters of the run in one
    /// launch.
    pub fn launch(&mut self, program: &Program, scalars: &[Scalar]) -> Result<()> {
        let (rt, dtypes) = (self.runtime(), self.numbers.is_some().then(|| self.operand_dtypes()));
        let in_memory = match self.numbers.as_mut().zip(dtypes) {
            Some((n, dtypes)) => Some(n.of_update(&rt, program, scalars, dtypes, self.ranges.clone())?),
            None => None,
        };
        let (program, numbers, scalars) = match &in_memory {
            Some((program, numbers)) => (program, &numbers[..], &[][..]),
            None => (program, &[][..], scalars),
        };
        let ins: SmallVec<[&Tensor<R>; 8]> = std::iter::once(&self.grad).chain(self.scale).chain(numbers).collect();
        let (flat, row) = self.values.split();
        let mut flats: SmallVec<[&mut Flat<R>; 6]> = flat.into_iter().chain(self.states.iter_mut()).collect();
        flats.extend(self.master.as_deref_mut());
        let span = |flat: &mut Flat<R>| flat.lend_span(self.ranges.clone());
        lending(&mut flats, span, |lent| {
            let outs = row.into_iter().chain(lent.iter_mut().map(|part| &mut **part));
            update(program, &ins, scalars, &mut outs.collect::<SmallVec<[_; 6]>>())
        })?;
        drop(flats);
        let shape = self.shape();
        if let Values::Row(row, Some(read)) = &mut self.values {
            *read = read_row(row, shape)?;
        }
        Ok(())
    }

    /// The dtypes of the inputs and of the outputs of an update's program.
    fn operand_dtypes(&self) -> (SmallVec<[DType; 8]>, SmallVec<[Option<DType>; 8]>) {
        let flats = self.states.iter().chain(self.master.as_deref()).map(|flat| flat.layout().dtype());
        let outs: SmallVec<[DType; 8]> = std::iter::once(self.layout.dtype()).chain(flats).collect();
        let ins = std::iter::once(self.grad.dtype()).chain(self.scale.map(|x| x.dtype()));
        (outs.iter().copied().chain(ins).collect(), outs.into_iter().map(Some).collect())
    }

    /// Returns the gradient of the parameter in the dtype of updates, with the pending factor applied.
    pub fn gradient(&self) -> Result<Tensor<R>> {
        let shape = self.shape();
        let grad = self.grad.narrow(0, 0, shape.numel())?.reshape(shape)?.to_dtype(self.working())?;
        match self.scale {
            Some(scale) => grad.apply_program(&SCALE, &[scale], &[]),
            None => Ok(grad),
        }
    }

    /// Returns the parameter in the dtype of updates: the master copy of a half-precision one.
    pub fn weight(&self) -> Result<Tensor<R>> {
        match (&self.master, &self.values) {
            (Some(flat), _) => flat.tensor(self.ranges.start),
            (None, Values::Flat(flat)) => flat.tensor(self.ranges.start),
            (None, Values::Row(_, read)) => read.clone().ok_or_else(|| {
                Error::internal("UpdateMemory", "a rule over several parameters at once read one of them")
            }),
        }
    }

    /// Returns state `k` of the parameter.
    pub fn state(&self, k: usize) -> Result<Tensor<R>> {
        self.states[k].tensor(self.ranges.start)
    }

    /// Updates the parameter in place. The inputs of `program` are the parameter, then `ins`. A half-precision
    /// parameter is rounded from its master copy.
    pub fn update_weight(&mut self, program: &Program, ins: &[&Tensor<R>], scalars: &[Scalar]) -> Result<()> {
        let i = self.ranges.start;
        let Some(master) = &mut self.master else {
            if let Values::Flat(flat) = &mut self.values {
                return lending(&mut [flat], |f| f.lend(i), |outs| update(program, ins, scalars, outs));
            }
            let new = self.weight()?.apply_program(program, ins, scalars)?;
            self.overwrite(&Op::identity(), &new)?;
            if let Values::Row(_, read) = &mut self.values {
                *read = Some(new);
            }
            return Ok(());
        };
        lending(&mut [master], |f| f.lend(i), |outs| update(program, ins, scalars, outs))?;
        let master = master.tensor(i)?;
        self.overwrite(&Pointwise::new(rounding(self.layout.dtype()), &[]).into(), &master)
    }

    /// The memory of the whole of a parameter, of which this is a piece: states are the whole's already. The new value
    /// is the [weight](UpdateMemory::weight) of the result.
    pub(crate) fn whole<'b>(
        &'b mut self,
        layout: &'b FlatLayout,
        row: &'b mut TensorMut<R>,
        weight: &Tensor<R>,
        grad: &Tensor<R>,
    ) -> Result<UpdateMemory<'b, R>> {
        row.reset();
        row.accumulate(&Op::identity(), &[&weight.reshape([weight.shape().numel()])?])?;
        Ok(UpdateMemory {
            values: Values::Row(row, Some(weight.clone())),
            layout,
            states: self.states,
            master: None,
            grad: grad.reshape([grad.shape().numel()])?.to_dtype(weight.dtype())?,
            scale: self.scale,
            ranges: self.ranges.clone(),
            numbers: None,
        })
    }

    /// Replaces the parameter, and its master copy, by a value in the dtype of updates.
    pub(crate) fn replace_weight(&mut self, value: &Tensor<R>) -> Result<()> {
        let (i, value) = (self.ranges.start, value.reshape(self.shape())?);
        let Some(master) = &mut self.master else { return self.overwrite(&Op::identity(), &value) };
        master.overwrite(i, &value)?;
        self.overwrite(&Pointwise::new(rounding(self.layout.dtype()), &[]).into(), &value)
    }

    /// Replaces the value of the parameter by what an operation makes of `x`.
    fn overwrite(&mut self, op: &Op, x: &Tensor<R>) -> Result<()> {
        let i = self.ranges.start;
        match &mut self.values {
            Values::Flat(flat) => {
                let write = |outs: &mut [&mut TensorMut<R>]| {
                    outs[0].reset();
                    outs[0].accumulate(op, &[x])
                };
                lending(&mut [flat], |f| f.lend(i), write)
            }
            Values::Row(row, _) => {
                let slice = ViewOp::Slice { axis: 0, start: 0, len: x.shape().numel(), step: 1 };
                row.reset();
                row.accumulate_view(&[slice, ViewOp::Reshape(*x.shape())], op, &[x])
            }
        }
    }

    /// Replaces state `k` of the parameter by a value of its shape and dtype.
    pub fn set_state(&mut self, k: usize, value: &Tensor<R>) -> Result<()> {
        self.update_states(k..k + 1, None, &REPLACE, &[value], &[])
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

/// Moves a running mean `v` towards `x` by the weight `w`.
pub(crate) static LERP: LazyLock<Program> =
    LazyLock::new(|| Program::new("lerp_into", |[v, x], [w]| [v + (x - v) * w]));

static REPLACE: LazyLock<Program> = LazyLock::new(|| Program::new("replace", |[_, new], []| [new]));

/// Copies the row of a parameter into its sizes.
pub(crate) fn read_row<R: Runtime>(row: &mut TensorMut<R>, shape: Shape) -> Result<Tensor<R>> {
    let mut copy = TensorMut::alloc(row.runtime(), *row.shape(), row.dtype())?;
    update(&COPY, &[], &[], &mut [&mut copy, row])?;
    copy.freeze()?.narrow(0, 0, shape.numel())?.reshape(shape)
}

static COPY: LazyLock<Program> = LazyLock::new(|| Program::new("copy_row", |[_, x], []| [x, x]));

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

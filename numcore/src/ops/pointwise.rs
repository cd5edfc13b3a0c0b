//! Elementwise operations: each is a [`Program`], and a model author adds one by writing its expression.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::SmallVec;

use super::{Apply, Backprop, Bits, Op, Outs, Reduce, Rule, Saves, Spec, Specs};
use crate::{
    Accumulate, DType, DeviceId, Error, ErrorKind, Layout, MemoryCategory, Out, ProgramOperand, Result, Runtime,
    Scalar, Shape, Tensor, TensorMut, pointwise::Program,
};

/// The run-time scalars of a program.
pub type ScalarList = SmallVec<[Scalar; 2]>;

/// A program applied to broadcast inputs; its gradient is its symbolic derivative.
#[derive(Clone, Debug)]
pub struct Pointwise {
    /// The program that is evaluated at every position.
    pub program: Program,
    /// The run-time scalars of the program.
    pub scalars: ScalarList,
}

impl Pointwise {
    /// The conversion to another dtype.
    pub(super) fn cast(dtype: DType) -> Self {
        static CASTS: LazyLock<Vec<Program>> =
            LazyLock::new(|| DType::ALL.iter().map(|&d| Program::new("to_dtype", |[x], []| [x.cast(d)])).collect());
        Pointwise::new(&CASTS[dtype as usize], &[])
    }

    /// A program with its run-time scalars.
    pub fn new(program: &Program, scalars: &[Scalar]) -> Self {
        Pointwise { program: program.clone(), scalars: scalars.into() }
    }

    /// The program that returns its input unchanged.
    pub fn identity() -> Self {
        static IDENTITY: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]).leak());
        Pointwise::new(&IDENTITY, &[])
    }
}

impl Rule for Pointwise {
    fn name(&self) -> &'static str {
        self.program.name()
    }

    fn arity(&self) -> RangeInclusive<usize> {
        self.program.inputs()..=self.program.inputs()
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let shape = broadcast(self.name(), ins)?;
        let dtypes: SmallVec<[DType; 4]> = ins.iter().map(|s| s.dtype).collect();
        let typed = self.program.typed(&dtypes, &[])?;
        self.program.check_scalars(typed, &self.scalars)?;
        Ok(self.program.outputs().iter().map(|&o| Spec { shape, dtype: typed.dtypes[o as usize] }).collect())
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let shape = outs[0].view.layout().shape();
        let mut rooms = rooms(ins.len());
        let operands = ins.iter().zip(&mut rooms).map(|(t, room)| t.view_at(shape, room).map(ProgramOperand::View));
        let operands = operands.collect::<Result<SmallVec<[ProgramOperand<'_, R>; 4]>>>()?;
        ins[0].runtime().pointwise(&self.program, &operands, &self.scalars, outs)
    }

    fn saves(&self, wants: Bits) -> Result<Saves> {
        let reads = (0..self.program.inputs())
            .filter(|&i| wants.has(i))
            .filter_map(|i| self.program.derivative(i))
            .flat_map(|d| d.inputs.iter().map(|&k| k as usize))
            .filter(|&k| k < self.program.inputs());
        Ok(Saves { inputs: Bits(reads.fold(0, |bits, k| bits | 1 << k)), outputs: Bits::NONE })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let upstream = upstreams(cx, self.program.outputs().len())?;
        chain(&self.program, &self.scalars, &upstream, cx)
    }
}

impl Pointwise {
    /// The tangents of the outputs; see [`tangents`](super::tangents).
    #[track_caller]
    pub(super) fn tangents<T: Apply>(&self, ins: &[&T], given: &[Option<&T>]) -> Result<Option<Outs<T>>> {
        let Some(program) = self.program.tangent(given_bits(given)) else { return Ok(None) };
        T::apply(Pointwise { program, scalars: self.scalars.clone() }.into(), &with_tangents(ins, given)).map(Some)
    }

    /// Computes operands that all have one shape, the common case, without broadcasting or building specs. `None` for
    /// other operands.
    pub(crate) fn compute_alike<R: Runtime>(&self, ins: &[&Tensor<R>]) -> Result<Option<Outs<Tensor<R>>>> {
        let (rt, shape) = (ins[0].runtime(), ins[0].shape());
        if ins[1..].iter().any(|t| t.shape() != shape) {
            return Ok(None);
        }
        let dtypes: SmallVec<[DType; 4]> = ins.iter().map(|t| t.dtype()).collect();
        let typed = self.program.typed(&dtypes, &[])?;
        self.program.check_scalars(typed, &self.scalars)?;
        let mut values: SmallVec<[TensorMut<R>; 1]> = SmallVec::new();
        for &o in self.program.outputs() {
            values.push(TensorMut::alloc_on(
                rt.with_category(MemoryCategory::Activations),
                *shape,
                typed.dtypes[o as usize],
            )?);
        }
        let operands: SmallVec<[ProgramOperand<'_, R>; 4]> =
            ins.iter().map(|t| ProgramOperand::View(t.view())).collect();
        let mut outs: SmallVec<[Out<'_, R>; 1]> = values.iter_mut().map(TensorMut::out).collect();
        rt.pointwise(&self.program, &operands, &self.scalars, &mut outs)?;
        drop(outs);
        let mut frozen = Outs::new();
        for value in values {
            frozen.push(value.freeze()?);
        }
        Ok(Some(frozen))
    }
}

/// Gradients through `program` for every wanted input, given the gradients of its outputs.
#[track_caller]
pub(super) fn chain<T: Apply>(
    program: &Program,
    scalars: &ScalarList,
    upstream: &[T],
    cx: &mut dyn Backprop<T>,
) -> Result<()> {
    let n = program.inputs();
    for i in (0..n).filter(|&i| cx.wants(i)).collect::<SmallVec<[usize; 4]>>() {
        let Some(d) = program.derivative(i) else { continue };
        let ins = d
            .inputs
            .iter()
            .map(|&k| if (k as usize) < n { cx.input(k as usize) } else { Ok(upstream[k as usize - n].clone()) })
            .collect::<Result<SmallVec<[T; 4]>>>()?;
        let refs: SmallVec<[&T; 4]> = ins.iter().collect();
        let to = cx.input_spec(i)?.shape;
        let shapes: SmallVec<[Shape; 4]> = refs.iter().map(|t| t.spec().shape).collect();
        let full = shapes.iter().all(|s| *s == to) || Shape::broadcast_all(program.name(), &shapes)? == to;
        let op = match full {
            true => Op::Pointwise(Pointwise { program: d.program.clone(), scalars: scalars.clone() }),
            false => Op::Reduce(Reduce::sum_of(d.program.clone(), scalars.clone(), to)),
        };
        cx.give(i, op, &refs)?;
    }
    Ok(())
}

/// The inputs that have a tangent.
pub(super) fn given_bits<T>(given: &[Option<&T>]) -> u64 {
    given.iter().enumerate().filter(|(_, t)| t.is_some()).fold(0, |bits, (i, _)| bits | 1 << i)
}

/// The operands of a program's tangents: its inputs, and a tangent for each. A tangent that is not read is the input.
pub(super) fn with_tangents<'a, T>(ins: &[&'a T], given: &[Option<&'a T>]) -> SmallVec<[&'a T; 8]> {
    ins.iter().copied().chain(ins.iter().zip(given).map(|(x, t)| t.unwrap_or(x))).collect()
}

/// The gradients of a node's outputs; an output that was not used has zeros (one element, broadcast).
#[track_caller]
pub(super) fn upstreams<T: Apply>(cx: &mut dyn Backprop<T>, outputs: usize) -> Result<SmallVec<[T; 2]>> {
    let given: SmallVec<[Option<T>; 2]> = (0..outputs).map(|k| cx.upstream(k)).collect::<Result<_>>()?;
    if given.iter().all(Option::is_some) {
        return Ok(given.into_iter().flatten().collect());
    }
    let Some(rt) = given.iter().flatten().next().map(|g| g.runtime().clone()) else { return Ok(SmallVec::new()) };
    let fill = |(k, g): (usize, Option<T>)| match g {
        Some(g) => Ok(g),
        None => {
            let Spec { shape, dtype } = cx.output_spec(k)?;
            let zero = Tensor::zeros(&rt, vec![1; shape.rank()], dtype)?;
            T::apply1(super::ViewOp::Broadcast(shape), &[&T::constant(zero)])
        }
    };
    given.into_iter().enumerate().map(fill).collect()
}

/// An input of a program in [`compute`].
pub enum Input<'a, R: Runtime> {
    /// A tensor that is read.
    Value(&'a Tensor<R>),
    /// Memory with a single owner that is read, and not written by this call.
    Memory(&'a TensorMut<R>),
    /// The old value of output `k`, for work in place.
    Own(usize),
}

impl<R: Runtime> Clone for Input<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for Input<'_, R> {}

impl<'a, R: Runtime> Input<'a, R> {
    fn runtime(&self) -> Option<&'a R> {
        match self {
            Input::Own(_) => None,
            Input::Value(t) => Some(t.runtime()),
            Input::Memory(t) => Some(t.runtime()),
        }
    }

    fn operand(self, shape: &Shape, room: &'a mut Option<Layout>) -> Result<ProgramOperand<'a, R>> {
        let view = match self {
            Input::Own(k) => return Ok(ProgramOperand::Own(k)),
            Input::Value(t) => t.view(),
            Input::Memory(t) => t.view(),
        };
        view.at_shape(shape, room).map(ProgramOperand::View)
    }
}

/// Runs `program` into memory with one owner. `outs` all have one shape, and `ins` are broadcast to it.
pub fn compute<R: Runtime>(
    rt: &R,
    program: &Program,
    ins: &[Input<'_, R>],
    scalars: &[Scalar],
    outs: &mut [&mut TensorMut<R>],
) -> Result<()> {
    let Some(shape) = outs.first().map(|t| *t.shape()) else { return Ok(()) };
    let mut rooms = rooms(ins.len());
    let operands = ins.iter().zip(&mut rooms).map(|(i, room)| i.operand(&shape, room));
    let operands = operands.collect::<Result<SmallVec<[ProgramOperand<'_, R>; 8]>>>()?;
    if let Some(other) = outs.iter().find(|t| *t.shape() != shape) {
        return Err(Error::shape(program.name(), &[shape, *other.shape()], "outputs must have one shape"));
    }
    let devices = ins.iter().filter_map(|i| i.runtime()).chain(outs.iter().map(|t| t.runtime())).map(R::device);
    one_device(program.name(), std::iter::once(rt.device()).chain(devices))?;
    let mut outs: SmallVec<[Out<'_, R>; 4]> =
        outs.iter_mut().map(|t| Out { view: t.rewritten(), how: Accumulate::Overwrite }).collect();
    launch(rt, program, &operands, scalars, &mut outs)
}

/// Runs `program` on operands of the outputs' shape; their number and dtypes must fit the program.
pub(crate) fn launch<R: Runtime>(
    rt: &R,
    program: &Program,
    ins: &[ProgramOperand<'_, R>],
    scalars: &[Scalar],
    outs: &mut [Out<'_, R>],
) -> Result<()> {
    let types: SmallVec<[Option<DType>; 4]> = outs.iter().map(|o| Some(o.view.dtype())).collect();
    let typed = |i: &ProgramOperand<'_, R>| match i {
        ProgramOperand::View(view) => Some(view.dtype()),
        ProgramOperand::Own(k) => types.get(*k).copied().flatten(),
    };
    let inputs = ins.iter().map(typed).collect::<Option<SmallVec<[DType; 8]>>>();
    let Some(inputs) = inputs.filter(|_| outs.len() == program.outputs().len()) else {
        return Err(Error::range(program.name(), "number of outputs", outs.len(), program.outputs().len()));
    };
    program.check_scalars(program.typed(&inputs, &types)?, scalars)?;
    rt.pointwise(program, ins, scalars, outs)
}

/// Checks that all operands are on one device; the error names `op`.
pub(crate) fn one_device(op: &'static str, devices: impl Iterator<Item = DeviceId> + Clone) -> Result<()> {
    let mut rest = devices.clone();
    let first = rest.next();
    if rest.all(|d| Some(d) == first) {
        return Ok(());
    }
    Err(ErrorKind::Device { op, devices: devices.collect() }.into())
}

/// Updates memory in place: `program` takes the old values of `outs`, then `ins`, and returns the new values.
/// Optimizers use it.
pub fn update<R: Runtime>(
    program: &Program,
    ins: &[&Tensor<R>],
    scalars: &[Scalar],
    outs: &mut [&mut TensorMut<R>],
) -> Result<()> {
    let Some(rt) = outs.first().map(|t| t.runtime().clone()) else { return Ok(()) };
    let own = (0..outs.len()).map(Input::Own);
    let inputs: SmallVec<[Input<'_, R>; 8]> = own.chain(ins.iter().map(|t| Input::Value(t))).collect();
    compute(&rt, program, &inputs, scalars, outs)
}

pub(crate) fn copy_into<R: Runtime>(x: &Tensor<R>, out: Out<'_, R>) -> Result<()> {
    Pointwise::identity().run(&[x], &mut [out])
}

pub(crate) fn fill_zero<R: Runtime>(rt: &R, out: Out<'_, R>) -> Result<()> {
    // A run-time scalar, because a constant written in the program is refused for `bool`.
    static ZERO: LazyLock<Program> = LazyLock::new(|| Program::new("zero", |[], [zero]| [zero]));
    rt.pointwise(&ZERO, &[], &[Scalar::I64(0)], &mut [out])
}

#[track_caller]
pub(crate) fn cast<T: Apply>(x: &T, dtype: DType) -> Result<T> {
    if x.spec().dtype == dtype { Ok(x.clone()) } else { T::apply1(Pointwise::cast(dtype), &[x]) }
}

fn broadcast(op: &'static str, ins: &[Spec]) -> Result<Shape> {
    match ins {
        [a] => Ok(a.shape),
        [a, b] if a.shape == b.shape => Ok(a.shape),
        _ => Shape::broadcast_all(op, &ins.iter().map(|s| s.shape).collect::<SmallVec<[Shape; 4]>>()),
    }
}

/// Storage for the layouts of operands that are broadcast.
pub(super) fn rooms(operands: usize) -> SmallVec<[Option<Layout>; 4]> {
    (0..operands).map(|_| None).collect()
}

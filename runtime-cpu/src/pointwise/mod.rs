//! Pointwise programs: lowered once to steps ([`Kernel`]), divided into tiles for each launch ([`LoopPlan`]), and run
//! tile by tile ([`Launch`]). A step is a loop over a block that stays in L1; there is one per operation and type. A
//! few hot programs are compiled ahead, as one step (`compiled`).

mod compile;
mod execute;
mod random;

use std::sync::LazyLock;

use numcore::{Accumulate, DType, Layout, MAX_RANK, Out, ProgramOperand, Result, Scalar, Shape, pointwise::Program};
use smallvec::SmallVec;

pub(crate) use compile::{Cache, Form, Kernel};
pub(crate) use execute::{Launch, LoopPlan, Moving, Place};

use crate::{
    Cpu, CpuBuffer, Engine,
    operand::{self, Base},
};

/// Runs `program` at every position of the outputs' shape.
pub(crate) fn run(
    cpu: &Cpu,
    program: &Program,
    ins: &[ProgramOperand<'_, Cpu>],
    scalars: &[Scalar],
    outs: &mut [Out<'_, Cpu>],
) -> Result<()> {
    let Some(first) = outs.first() else { return Ok(()) };
    let shape = first.view.layout().shape();
    let n = shape.numel();
    if n == 0 {
        return Ok(());
    }
    let engine = &*cpu.queue.engine;
    compile::with_kernel(engine, program, ins, outs, |kernel| {
        let common = kernel.with(program, scalars, engine.simd);
        // SAFETY: the contract of `numcore::Runtime`: views are in their buffers, outputs overlap nothing and nothing
        // else sees them.
        unsafe {
            let mut bases = Bases::new();
            if !kernel.positional && dense(ins, outs, &mut bases) {
                return common.run_dense(engine, &bases, n);
            }
            let plan = LoopPlan::rows(shape, moving(kernel, shape, operands(ins, outs)));
            Launch::new(common, plan).run(engine);
        }
    })
}

/// Stores elements as another type of the same compute type. It upcasts half-precision elements, rounds to half
/// precision, or accumulates.
pub(crate) fn convert(engine: &Engine, from: operand::Operand, to: operand::Operand, how: Accumulate) -> Result<()> {
    static SAME: LazyLock<Program> = LazyLock::new(|| Program::new("convert", |[x], []| [x]));
    let shape = *to.layout.shape();
    if shape.numel() == 0 {
        return Ok(());
    }
    let mut form = Form { converts: true, ..Form::default() };
    form.input(from.dtype, None);
    form.output(how, to.dtype);
    let kernel = engine.kernels.get(&SAME, &form, engine.simd)?;
    let plan = LoopPlan::rows(&shape, moving(&kernel, &shape, [from, to].into_iter()));
    // SAFETY: callers pass views, which are in their buffers, or memory of their own.
    unsafe { Launch::new(kernel.with(&SAME, &[], engine.simd), plan).run(engine) };
    Ok(())
}

/// The form of a launch: the types of its operands, and the treatment of its outputs.
fn form(ins: &[ProgramOperand<'_, Cpu>], outs: &[Out<'_, Cpu>]) -> Form {
    let mut form = Form::default();
    for operand in ins {
        match operand {
            ProgramOperand::View(view) => form.input(view.dtype(), None),
            ProgramOperand::Own(k) => form.input(outs[*k].view.dtype(), Some(*k as u16)),
        }
    }
    outs.iter().for_each(|out| form.output(out.how, out.view.dtype()));
    form
}

/// The addresses and element sizes of operands.
type Bases = SmallVec<[(Base<u8>, usize); 8]>;

/// Pushes the operands of a launch to `bases` until one is not contiguous, and tells whether all are contiguous.
fn dense(ins: &[ProgramOperand<'_, Cpu>], outs: &[Out<'_, Cpu>], bases: &mut Bases) -> bool {
    let mut push = |buffer: &CpuBuffer, layout: &Layout, dtype: DType| {
        let at = buffer.ptr().wrapping_add(layout.offset() * dtype.size());
        bases.push((Base::new(at), dtype.size()));
        layout.is_contiguous()
    };
    let inputs = ins.iter().all(|operand| match operand {
        ProgramOperand::View(v) => push(v.buffer(), v.layout(), v.dtype()),
        ProgramOperand::Own(k) => push(outs[*k].view.buffer(), outs[*k].view.layout(), outs[*k].view.dtype()),
    });
    inputs && outs.iter().all(|o| push(o.view.buffer(), o.view.layout(), o.view.dtype()))
}

/// The operands of a launch: inputs, then outputs.
fn operands<'a>(
    ins: &'a [ProgramOperand<'_, Cpu>],
    outs: &'a [Out<'_, Cpu>],
) -> impl Iterator<Item = operand::Operand> + 'a {
    let inputs = ins.iter().map(|operand| match operand {
        ProgramOperand::View(view) => operand::Operand::from(*view),
        ProgramOperand::Own(k) => (&outs[*k].view).into(),
    });
    inputs.chain(outs.iter().map(|out| (&out.view).into()))
}

/// The operands of a plan, and the positions of elements for a kernel that uses them.
pub(crate) fn moving(
    kernel: &Kernel,
    shape: &Shape,
    operands: impl Iterator<Item = operand::Operand>,
) -> SmallVec<[Moving; 6]> {
    let to_moving = |o: operand::Operand| {
        let size = o.dtype.size();
        Moving { base: o.ptr(), size, strides: bytes(&o.layout, size) }
    };
    let mut all: SmallVec<[Moving; 6]> = operands.map(to_moving).collect();
    if kernel.positional {
        let positions = Layout::contiguous(*shape);
        all.push(Moving { base: std::ptr::null_mut(), size: 1, strides: bytes(&positions, 1) });
    }
    all
}

fn bytes(layout: &Layout, size: usize) -> [isize; MAX_RANK] {
    let mut strides = [0; MAX_RANK];
    strides.iter_mut().zip(layout.strides()).for_each(|(to, s)| *to = s * size as isize);
    strides
}

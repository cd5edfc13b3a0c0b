//! Pointwise programs: lowered once to steps ([`Kernel`]), cut into tiles for each launch ([`Plan`]), run tile by tile
//! ([`Launch`]). A step is a loop over a block that stays in the first cache; there is one per operation and type.

mod cache;
mod exec;
mod kernel;
mod lower;
mod plan;
mod stage;
mod step;
mod table;

use numcore::{Accumulate, DType, Layout, MAX_RANK, Operand, Out, Result, Scalar, Shape, pointwise::Program};
use smallvec::SmallVec;

pub(crate) use cache::Cache;
pub(crate) use exec::Launch;
pub(crate) use kernel::Kernel;
use lower::Output;
pub(crate) use lower::Form;
pub(crate) use plan::{Moving, Place, Plan};

use crate::{Cpu, operand};

/// Runs `program` at every position of the outputs' shape.
pub(crate) fn run(
    cpu: &Cpu,
    program: &Program,
    ins: &[Operand<'_, Cpu>],
    scalars: &[Scalar],
    outs: &mut [Out<'_, Cpu>],
) -> Result<()> {
    let Some(first) = outs.first() else { return Ok(()) };
    let shape = *first.view.layout().shape();
    if shape.numel() == 0 {
        return Ok(());
    }
    let mut form = Form::default();
    let mut operands = Operands::new(&shape);
    for operand in ins {
        match operand {
            Operand::View(view) => {
                form.input(view.dtype(), None);
                operands.push((*view).into());
            }
            Operand::Own(k) => {
                form.input(outs[*k].view.dtype(), Some(*k as u16));
                operands.push((&outs[*k].view).into());
            }
        }
    }
    for out in outs.iter() {
        form.output(out.how, out.view.dtype());
        operands.push((&out.view).into());
    }
    let engine = &*cpu.queue.engine;
    let kernel = engine.kernels.get(program, &form, engine.simd)?;
    let plan = operands.plan(&kernel);
    // SAFETY: the contract of `numcore::Runtime`: views lie in their buffers, outputs overlap nothing and nothing else sees
    // them.
    unsafe { Launch::new(&kernel, plan, kernel.values(program, scalars), engine.simd).run(engine) };
    Ok(())
}

/// Collects what a plan moves.
pub(crate) struct Operands<'a> {
    shape: &'a Shape,
    moving: SmallVec<[Moving; 6]>,
    dense: bool,
}

impl<'a> Operands<'a> {
    pub(crate) fn new(shape: &'a Shape) -> Self {
        Operands { shape, moving: SmallVec::new(), dense: true }
    }

    pub(crate) fn push(&mut self, operand: operand::Operand) {
        let size = operand.dtype.size();
        self.dense &= operand.layout.is_contiguous();
        self.moving.push(Moving { base: operand.ptr(), size, strides: bytes(&operand.layout, size) });
    }

    /// The operands; for a kernel that wants them, with the positions of elements as a last one.
    pub(crate) fn moving(mut self, kernel: &Kernel) -> SmallVec<[Moving; 6]> {
        if kernel.positional {
            let positions = Layout::contiguous(*self.shape);
            self.moving.push(Moving { base: std::ptr::null_mut(), size: 1, strides: bytes(&positions, 1) });
        }
        self.moving
    }

    fn plan(self, kernel: &Kernel) -> Plan {
        let (shape, dense) = (self.shape, self.dense);
        Plan::new(shape, self.moving(kernel), dense)
    }
}

fn bytes(layout: &Layout, size: usize) -> [isize; MAX_RANK] {
    let mut strides = [0; MAX_RANK];
    strides.iter_mut().zip(layout.strides()).for_each(|(to, s)| *to = s * size as isize);
    strides
}

impl Form {
    pub(crate) fn input(&mut self, dtype: DType, own: Option<u16>) {
        self.inputs.push(dtype);
        self.own.push(own);
    }

    /// One output that is kept for the caller.
    pub(crate) fn keep(&mut self, dtype: DType) {
        self.outputs.push(Output::Keep(dtype));
    }

    fn output(&mut self, how: Accumulate, dtype: DType) {
        self.outputs.push(match how {
            Accumulate::Overwrite => Output::Overwrite(dtype),
            Accumulate::Add => Output::Add(dtype),
        });
    }
}

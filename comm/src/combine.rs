//! Collectives as pointwise programs: a reduction is one launch that reads every rank's memory and writes every rank's
//! memory.

use std::collections::BTreeMap;

use numcore::{
    DType, Result, Runtime, TensorMut,
    ops::{Input, compute},
    pointwise::{Expr, Program},
};

use super::ReduceOp;

/// The largest number of operands, and of outputs, of one launch. More ranks go through memory of the engine's own,
/// some at a time.
const AT_ONCE: usize = 8;

/// Runs the programs of collectives on a queue, and caches them.
#[derive(Debug)]
pub struct Combiner<R: Runtime> {
    rt: R,
    programs: BTreeMap<ProgramKey, Program>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ProgramKey {
    op: Option<u8>,
    dtype: u8,
    ins: usize,
    outs: usize,
    /// Three properties: the first input already has the type that values are combined in, the outputs stay in it, and
    /// the divisor.
    form: (bool, bool, usize),
}

impl<R: Runtime> Combiner<R> {
    /// Makes a combiner without programs on this queue.
    pub fn new(rt: R) -> Self {
        Combiner { rt, programs: BTreeMap::new() }
    }

    /// The queue.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// Copies `from` into every one of `outs`.
    pub fn copy(&mut self, from: Input<'_, R>, outs: &mut [&mut TensorMut<R>]) -> Result<()> {
        for outs in outs.chunks_mut(AT_ONCE) {
            let key = ProgramKey { op: None, dtype: 0, ins: 1, outs: outs.len(), form: (false, false, 1) };
            let program = self
                .programs
                .entry(key)
                .or_insert_with(|| Program::build("copy", 1, 0, |_, x, _| vec![x[0]; key.outs]));
            compute(&self.rt, program, &[from], &[], outs)?;
        }
        Ok(())
    }

    /// Combines `ins`, first to last, into the first of `outs`, which may be read as [`Input::Own`]; then copies it to
    /// the others.
    pub fn reduce(&mut self, op: ReduceOp, ins: &[Input<'_, R>], outs: &mut [&mut TensorMut<R>]) -> Result<()> {
        let Some((dtype, shape)) = outs.first().map(|t| (t.dtype(), *t.shape())) else { return Ok(()) };
        if ins.len() <= AT_ONCE && outs.len() <= AT_ONCE {
            return self.launch(op, dtype, ins, outs, (false, false, ins.len()));
        }
        // Outputs are read (as `Own`) until the last launch has written them, so intermediate sums go to separate
        // memory.
        let mut sum = TensorMut::alloc(&self.rt, shape, wide(dtype))?;
        self.many(op, dtype, ins, outs, &mut sum)
    }

    fn many(
        &mut self,
        op: ReduceOp,
        dtype: DType,
        ins: &[Input<'_, R>],
        outs: &mut [&mut TensorMut<R>],
        sum: &mut TensorMut<R>,
    ) -> Result<()> {
        let (last, n) = (ins.chunks(AT_ONCE - 1).count() - 1, ins.len());
        for (k, some) in ins.chunks(AT_ONCE - 1).enumerate() {
            let read: Vec<Input<'_, R>> = some.iter().map(|i| resolve(*i, outs)).collect();
            let own = (k > 0).then_some(Input::Own(0));
            let all: Vec<Input<'_, R>> = own.into_iter().chain(read).collect();
            self.launch(op, dtype, &all, &mut [sum], (k > 0, true, if k == last { n } else { 1 }))?;
        }
        for outs in outs.chunks_mut(AT_ONCE) {
            self.launch(op, dtype, &[Input::Memory(sum)], outs, (true, false, 1))?;
        }
        Ok(())
    }

    fn launch(
        &mut self,
        op: ReduceOp,
        dtype: DType,
        ins: &[Input<'_, R>],
        outs: &mut [&mut TensorMut<R>],
        form: (bool, bool, usize),
    ) -> Result<()> {
        let key = ProgramKey { op: Some(op as u8), dtype: dtype as u8, ins: ins.len(), outs: outs.len(), form };
        let program = self.programs.entry(key).or_insert_with(|| program(op, dtype, key));
        compute(&self.rt, program, ins, &[], outs)
    }
}

/// Replaces an output that is only read so far by its memory.
fn resolve<'a, R: Runtime>(input: Input<'a, R>, outs: &'a [&mut TensorMut<R>]) -> Input<'a, R> {
    match input {
        Input::Own(k) => Input::Memory(&*outs[k]),
        other => other,
    }
}

/// The type values are combined in.
fn wide(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}

fn program(op: ReduceOp, dtype: DType, key: ProgramKey) -> Program {
    let (started, unfinished, divisor) = key.form;
    Program::build("combine", key.ins, 0, |_, x, _| {
        let narrow = |i: usize| dtype.is_half() && !(started && i == 0);
        let values = x.iter().enumerate().map(|(i, &x)| if narrow(i) { x.cast(DType::F32) } else { x });
        let Some(mut all) = values.reduce(|all, x| two(op, dtype, all, x)) else { return vec![] };
        if op == ReduceOp::Avg && divisor > 1 {
            all = all / divisor as f64;
        }
        if dtype.is_half() && !unfinished {
            all = all.cast(dtype);
        }
        vec![all; key.outs]
    })
}

fn two<'b>(op: ReduceOp, dtype: DType, a: Expr<'b>, b: Expr<'b>) -> Expr<'b> {
    match (op, dtype) {
        (ReduceOp::Sum | ReduceOp::Max, DType::Bool) => a | b,
        (ReduceOp::Prod | ReduceOp::Min, DType::Bool) => a & b,
        (ReduceOp::Sum | ReduceOp::Avg, _) => a + b,
        (ReduceOp::Prod, _) => a * b,
        (ReduceOp::Min, _) => a.min(b),
        (ReduceOp::Max, _) => a.max(b),
    }
}

/// Cuts a row of `numel` elements into `n` parts, as even as multiples of 64 elements allow.
pub fn cuts(numel: usize, n: usize) -> Vec<usize> {
    let each = numel.div_ceil(n).next_multiple_of(64);
    (0..n).map(|i| each.min(numel.saturating_sub(i * each))).collect()
}

//! Lowering of a typed program to a [`Kernel`]: every value gets its step and its location.
//!
//! - A value that depends only on constants and scalars becomes an immediate.
//! - A product used once, by a sum, is contracted to an FMA.
//! - A value is written directly to its output where the stored and the computed type agree and no later step reads the
//!   output's old value.
//! - No step writes what it reads.

use std::sync::Arc;

use numcore::{
    DType, Error, Result,
    pointwise::{Binary, Inst, OpClass, Program, Typed},
};
use smallvec::SmallVec;

use super::{
    compiled,
    form::{Form, Output},
    kernel::{Immediate, Kernel, Slot, Slots},
    registers::{Draft, Location, assign},
    table::{self, FmaKind},
};
use crate::{
    Simd,
    pointwise::execute::{FastestWay, StepFn},
};

pub(in crate::pointwise) fn lower(program: &Program, typed: &Arc<Typed>, form: &Form, simd: Simd) -> Result<Kernel> {
    let mut l = ProgramLowering::new(program, typed, form, simd);
    for id in 0..program.insts().len() as u32 {
        l.instruction(id)?;
    }
    let value = l.outputs();
    let kernel = l.finish(value);
    Ok(match compiled::find(program, typed, form) {
        Some(body) => kernel.compiled(program, simd, body),
        None => kernel,
    })
}

struct ProgramLowering<'a> {
    program: &'a Program,
    typed: &'a Arc<Typed>,
    form: &'a Form,
    simd: Simd,
    /// The number of uses of each value, as an operand or an output.
    uses: Vec<u32>,
    uniform: Vec<bool>,
    places: Vec<Option<Location>>,
    steps: Vec<Draft>,
    immediates: Vec<Immediate>,
    results: u32,
    width: usize,
    positional: bool,
    weight: usize,
}

impl<'a> ProgramLowering<'a> {
    fn new(program: &'a Program, typed: &'a Arc<Typed>, form: &'a Form, simd: Simd) -> Self {
        let n = program.insts().len();
        let mut uses = vec![0; n];
        let operands = program.insts().iter().flat_map(|i| operands(*i));
        operands.chain(program.outputs().iter().copied()).for_each(|v| uses[v as usize] += 1);
        ProgramLowering {
            program,
            typed,
            form,
            simd,
            uses,
            uniform: program.uniform(),
            places: vec![None; n],
            steps: Vec::new(),
            immediates: Vec::new(),
            results: 0,
            width: 1,
            positional: false,
            weight: 0,
        }
    }

    fn dtype(&self, id: u32) -> DType {
        self.typed.dtypes[id as usize]
    }

    fn uniform(&self, id: u32) -> bool {
        self.uniform[id as usize]
    }

    /// Emits the steps that compute value `id`, unless they are emitted where it is used.
    fn instruction(&mut self, id: u32) -> Result<()> {
        if self.uniform(id) {
            return Ok(());
        }
        let t = self.dtype(id);
        match self.program.insts()[id as usize] {
            Inst::Input(_) | Inst::Index | Inst::Scalar(_) | Inst::Const(_) => {}
            Inst::Random { seed, stream } => {
                self.positional = true;
                let args =
                    [Slot::Positions, self.immediate(Immediate::Seed(seed)), self.immediate(Immediate::Stream(stream))];
                self.weight += 15;
                self.emit(id, table::random_bits(self.simd), &args.map(Location::Slot));
            }
            Inst::Unary(op, a) => {
                let f = table::unary(op, t.compute(), self.simd).ok_or_else(|| self.refused(op.name(), t))?;
                self.weight += if op.class() == OpClass::Float { 7 } else { 0 };
                let args = [self.place(a)];
                self.emit(id, f, &args);
            }
            Inst::Binary(..) if self.swallowed(id) => {}
            Inst::Binary(op, a, b) => self.binary(id, op, a, b)?,
            Inst::Select(c, a, b) => {
                let args = [self.place(c), self.place(a), self.place(b)];
                self.emit(id, table::select(t.compute(), self.simd), &args);
            }
            Inst::CastLike(a, _) if self.uniform(a) => {
                self.places[id as usize] = Some(Location::Slot(self.immediate(Immediate::Value { of: a, dtype: t })));
            }
            Inst::Cast(_, a) | Inst::CastLike(a, _) => match table::cast(self.dtype(a), t, self.simd) {
                Some(f) => {
                    let args = [self.place(a)];
                    self.emit(id, f, &args);
                }
                None => self.places[id as usize] = Some(self.place(a)),
            },
        }
        Ok(())
    }

    fn binary(&mut self, id: u32, op: Binary, a: u32, b: u32) -> Result<()> {
        if let Some((fused, args)) = self.fusable(id) {
            let args = args.map(|v| self.place(v));
            self.emit(id, table::fused(fused, self.dtype(id).compute(), self.simd), &args);
            return Ok(());
        }
        let t = self.dtype(a).compute();
        let f = table::binary(op, t, self.simd).ok_or_else(|| self.refused(op.name(), t))?;
        let args = [self.place(a), self.place(b)];
        self.weight += if matches!(op, Binary::Rem | Binary::Pow | Binary::Atan2) { 15 } else { 0 };
        self.emit(id, f, &args);
        Ok(())
    }

    /// Emits a sum with a product that has no other use, as one FMA step.
    fn fusable(&self, id: u32) -> Option<(FmaKind, [u32; 3])> {
        let Inst::Binary(op, a, b) = self.program.insts()[id as usize] else { return None };
        match op {
            Binary::Add => self
                .product(a)
                .map(|[x, y]| (FmaKind::MulAdd, [x, y, b]))
                .or_else(|| self.product(b).map(|[x, y]| (FmaKind::MulAdd, [x, y, a]))),
            Binary::Sub => self
                .product(a)
                .map(|[x, y]| (FmaKind::MulSub, [x, y, b]))
                .or_else(|| self.product(b).map(|[x, y]| (FmaKind::NegMulAdd, [x, y, a]))),
            _ => None,
        }
    }

    fn product(&self, id: u32) -> Option<[u32; 2]> {
        match self.program.insts()[id as usize] {
            Inst::Binary(Binary::Mul, x, y)
                if self.dtype(id).is_float() && self.uses[id as usize] == 1 && !self.uniform(id) =>
            {
                Some([x, y])
            }
            _ => None,
        }
    }

    /// Tells whether the single use of a product contracts it to an FMA.
    fn swallowed(&self, id: u32) -> bool {
        let Some(args) = self.product(id) else { return false };
        (id + 1..self.program.insts().len() as u32)
            .filter(|&user| operands(self.program.insts()[user as usize]).contains(&id))
            .any(|user| {
                !self.uniform(user) && self.fusable(user).is_some_and(|(_, [x, y, z])| [x, y] == args && z != id)
            })
    }

    fn refused(&self, op: &'static str, t: DType) -> Error {
        Error::dtype(self.program.name(), &[t], format!("`{op}` does not take it"))
    }

    /// The location from which value `id` can be read in compute form.
    fn place(&mut self, id: u32) -> Location {
        if let Some(place) = self.places[id as usize] {
            return place;
        }
        let t = self.dtype(id);
        let place = match self.program.insts()[id as usize] {
            _ if self.uniform(id) => Location::Slot(self.immediate(Immediate::Value { of: id, dtype: t })),
            Inst::Input(k) => self.converted(Slot::Input(k), table::widen(t, self.simd), DType::F32),
            Inst::Index => {
                self.positional = true;
                self.converted(Slot::Positions, table::cast(DType::I64, t.compute(), self.simd), t)
            }
            // Every other instruction was emitted when it was passed.
            _ => Location::Slot(Slot::Positions),
        };
        self.places[id as usize] = Some(place);
        place
    }

    fn converted(&mut self, from: Slot, f: Option<StepFn>, t: DType) -> Location {
        let Some(f) = f else { return Location::Slot(from) };
        self.result(f, t, &[Location::Slot(from)])
    }

    fn immediate(&mut self, value: Immediate) -> Slot {
        let at = self.immediates.iter().position(|i| *i == value).unwrap_or_else(|| {
            self.immediates.push(value);
            self.immediates.len() - 1
        });
        self.width = self.width.max(match value {
            Immediate::Value { dtype, .. } => dtype.compute().size(),
            _ => 8,
        });
        Slot::Immediate(at as u16)
    }

    fn emit(&mut self, id: u32, f: StepFn, args: &[Location]) {
        let place = self.result(f, self.dtype(id), args);
        self.places[id as usize] = Some(place);
    }

    fn result(&mut self, f: StepFn, t: DType, args: &[Location]) -> Location {
        self.width = self.width.max(t.compute().size());
        self.results += 1;
        let to = Location::Result(self.results - 1);
        self.step(f, to, args);
        to
    }

    fn step(&mut self, f: StepFn, to: Location, args: &[Location]) {
        self.weight += 1;
        self.steps.push(Draft { f, to, args: args.into() });
    }

    /// Stores every output; returns the location of one that is kept.
    fn outputs(&mut self) -> Location {
        let ids: SmallVec<[u32; 4]> = self.program.outputs().into();
        let mut stores: SmallVec<[(u16, StepFn, Location); 4]> = SmallVec::new();
        let mut kept = Location::Slot(Slot::Positions);
        for (o, (&id, &output)) in ids.iter().zip(&self.form.outputs).enumerate() {
            let o = o as u16;
            match output {
                Output::Keep(_) => kept = self.place(id),
                Output::Overwrite(t) => match self.verbatim(id, t) {
                    Some(k) if self.form.own[k as usize] == Some(o) => {}
                    Some(k) => {
                        let from = self.aside(Location::Slot(Slot::Input(k)), t, o, false);
                        stores.push((o, table::raw_copy(t.size(), self.simd), from));
                    }
                    None => {
                        let from = self.place(id);
                        let from = self.aside(from, t.compute(), o, false);
                        stores.push((o, table::store(t, self.simd), from));
                    }
                },
                Output::Add(t) => {
                    let from = self.place(id);
                    let from = self.aside(from, t.compute(), o, true);
                    stores.push((o, table::add_into(t, self.simd), from));
                }
            }
        }
        for i in 0..stores.len() {
            let (o, f, from) = stores[i];
            let to = Location::Slot(Slot::Output(o));
            if self.redirected(o, from) {
                stores[i + 1..].iter_mut().filter(|s| s.2 == from).for_each(|s| s.2 = to);
            } else {
                self.step(f, to, &[from]);
            }
        }
        kept
    }

    /// The input that output value `id` equals, when it is stored as `t`.
    fn verbatim(&self, id: u32, t: DType) -> Option<u16> {
        match self.program.insts()[id as usize] {
            Inst::Input(k) if self.form.inputs[k as usize] == t => Some(k),
            _ => None,
        }
    }

    /// Copies the old value of an output to a register, if a store would overwrite it before it is read.
    fn aside(&mut self, from: Location, t: DType, o: u16, add: bool) -> Location {
        match from {
            Location::Slot(Slot::Input(k)) if self.form.own[k as usize].is_some_and(|own| own != o || add) => {
                self.result(table::raw_copy(t.size(), self.simd), t, &[from])
            }
            _ => from,
        }
    }

    /// Lets the step that computes `from` write output `o` itself, if it may.
    fn redirected(&mut self, o: u16, from: Location) -> bool {
        let plain = matches!(self.form.outputs[o as usize], Output::Overwrite(t) if t.compute() == t);
        let Some(at) = self.steps.iter().position(|s| s.to == from) else { return false };
        let own = |p: &Location| matches!(p, Location::Slot(Slot::Input(k)) if self.form.own[*k as usize] == Some(o));
        if !plain || !matches!(from, Location::Result(_)) || self.steps[at..].iter().any(|s| s.args.iter().any(own)) {
            return false;
        }
        let to = Location::Slot(Slot::Output(o));
        self.steps[at].to = to;
        self.steps[at..].iter_mut().flat_map(|s| &mut s.args).filter(|p| **p == from).for_each(|p| *p = to);
        true
    }

    fn finish(self, kept: Location) -> Kernel {
        let counts = Slots {
            registers: 0,
            immediates: self.immediates.len() as u16,
            inputs: self.form.inputs.len() as u16,
            outputs: self.form.outputs.len() as u16,
        };
        let (steps, slots, value) = assign(&self.steps, self.results, kept, counts);
        Kernel {
            unread: self.unread(kept),
            copies: self.copies(),
            ways: FastestWay::default(),
            reads_outputs: self.reads_outputs(),
            steps,
            compiled: None,
            slots,
            value,
            immediates: self.immediates,
            own: self.form.own.clone(),
            width: self.width,
            positional: self.positional,
            weight: self.weight.max(1),
            typed: self.typed.clone(),
            keeps: self.form.outputs.iter().any(|o| matches!(o, Output::Keep(_))),
        }
    }

    /// The bytes of an element, if the program only copies one input to one output.
    fn copies(&self) -> Option<usize> {
        let [Output::Overwrite(t)] = self.form.outputs[..] else { return None };
        let [Inst::Input(0)] = self.program.insts() else { return None };
        (self.form.inputs[..] == [t] && self.form.own[0].is_none()).then_some(t.size())
    }

    fn unread(&self, value: Location) -> u64 {
        let read = self.steps.iter().flat_map(|s| &s.args).chain([&value]).filter_map(|p| match p {
            Location::Slot(Slot::Input(k)) => Some(1u64 << k),
            _ => None,
        });
        !read.fold(0, |a, b| a | b)
    }

    fn reads_outputs(&self) -> u64 {
        let added =
            self.form.outputs.iter().enumerate().filter(|(_, o)| matches!(o, Output::Add(_))).map(|(o, _)| o as u16);
        added.chain(self.form.own.iter().flatten().copied()).fold(0, |bits, o| bits | 1 << o)
    }
}

/// The values with which an instruction computes.
fn operands(inst: Inst) -> SmallVec<[u32; 3]> {
    match inst {
        Inst::Unary(_, a) | Inst::Cast(_, a) | Inst::CastLike(a, _) => [a].as_slice().into(),
        Inst::Binary(_, a, b) => [a, b].as_slice().into(),
        Inst::Select(c, a, b) => [c, a, b].into(),
        Inst::Input(_) | Inst::Scalar(_) | Inst::Const(_) | Inst::Index | Inst::Random { .. } => SmallVec::new(),
    }
}

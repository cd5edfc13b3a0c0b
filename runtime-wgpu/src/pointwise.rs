//! Pointwise programs: printed once per types and layout class, run at every position.

use std::fmt::Write;

use numcore::{
    Accumulate, DType, Out, ProgramOperand, Result, Scalar,
    pointwise::{Inst, Number, Program, Typed},
};
use smallvec::SmallVec;

use crate::{
    Wgpu,
    access::{Params, StorageForm},
    bindings::OperandView,
    elementwise::ElementwiseKernel,
    packing::PackedOperands,
};

/// The most iterations of one loop of a kernel. It is a quarter of the limit of the software driver, which ends a
/// kernel silently after 65535 iterations in total.
pub(crate) const STEPS: usize = 1 << 14;

/// Runs `program` at every position of the outputs' shape.
pub(crate) fn run(
    wgpu: &Wgpu,
    program: &Program,
    ins: &[ProgramOperand<'_, Wgpu>],
    scalars: &[Scalar],
    outs: &mut [Out<'_, Wgpu>],
) -> Result<()> {
    let Some(first) = outs.first() else { return Ok(()) };
    if first.view.layout().numel() == 0 {
        return Ok(());
    }
    let op = program.name();
    let dtype = |operand: &ProgramOperand<'_, Wgpu>| match operand {
        ProgramOperand::View(v) => v.dtype(),
        ProgramOperand::Own(k) => outs[*k].view.dtype(),
    };
    let types: SmallVec<[DType; 8]> = ins.iter().map(dtype).collect();
    let asked: SmallVec<[Option<DType>; 4]> = outs.iter().map(|o| Some(o.view.dtype())).collect();
    let typed = program.resolve(&types, &asked)?;
    let how: SmallVec<[Accumulate; 4]> = outs.iter().map(|o| o.how).collect();
    if outs.iter().any(|o| o.view.dtype() == DType::F64 && o.how == Accumulate::Add) {
        return Err(no_f64(wgpu, op));
    }
    // A copy moves bits: types of one size share its kernels, and NaNs keep their payload.
    let moves = program.is_identity() && how[..] == [Accumulate::Overwrite];
    let form = if moves { StorageForm::bits } else { StorageForm::of };
    let mut inputs: SmallVec<[(OperandView<'_>, StorageForm); 8]> = SmallVec::new();
    let mut names: SmallVec<[BoundInput; 8]> = SmallVec::new();
    for (i, operand) in ins.iter().enumerate() {
        match operand {
            ProgramOperand::View(v) if reads(program, i) => {
                names.push(BoundInput::Input(i, inputs.len()));
                inputs.push((OperandView::from(*v), form(v.dtype())));
            }
            ProgramOperand::Own(k) => names.push(BoundInput::Old(i, *k)),
            ProgramOperand::View(_) => {}
        }
    }
    let outputs = outs.iter().map(|o| (OperandView::from(&o.view), form(o.view.dtype())));
    let (first_output, operands) = (inputs.len(), inputs.into_iter().chain(outputs));
    let (places, forms): (SmallVec<[OperandView<'_>; 12]>, SmallVec<[StorageForm; 12]>) = operands.unzip();
    let packed = PackedOperands::of(wgpu, &places, 0)?;
    let bound: SmallVec<[_; 12]> = PackedOperands::bound(&packed, &places).into_iter().zip(forms).collect();
    let walk = ElementwiseKernel::new(wgpu, op, &bound[..first_output], &bound[first_output..])?;
    let launch = LaunchValues::of(program, &typed, scalars)?;
    let program_key = (!moves).then_some(program);
    // The dtypes are in the key, because two 64-bit types share a form, but not its operations.
    let all = types.iter().copied().chain(asked.iter().copied().flatten()).map(|d| d as u32);
    let details: SmallVec<[u32; 16]> = names.iter().map(|s| s.key()).chain(all.filter(|_| !moves)).collect();
    walk.run(wgpu, (op, "pointwise"), program_key, &how, (&launch.words, &details), |body| {
        let mut text = String::new();
        for source in &names {
            let (i, value) = match *source {
                BoundInput::Input(i, k) => (i, body.load(k)),
                BoundInput::Old(i, k) => (i, body.old(k)),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "let in{i} = {value};");
        }
        if moves {
            return Ok(text + "out0 = in0;\n");
        }
        Ok(text + &launch.text(&mut body.params) + &printed(program, &typed, wgpu)?)
    })?;
    let write_back =
        |packed: &PackedOperands| (first_output..places.len()).try_for_each(|k| packed.write_back(wgpu, k, places[k]));
    packed.as_ref().map_or(Ok(()), write_back)
}

/// Stores elements as another type of the same compute type. It upcasts half-precision elements, rounds to half
/// precision, or accumulates.
pub(crate) fn convert(wgpu: &Wgpu, from: OperandView<'_>, to: OperandView<'_>, how: Accumulate) -> Result<()> {
    let walk = ElementwiseKernel::new(
        wgpu,
        "convert",
        &[(from, StorageForm::of(from.dtype))],
        &[(to, StorageForm::of(to.dtype))],
    )?;
    walk.run(wgpu, ("convert", "convert"), None, &[how], (&[], &[]), |body| Ok(format!("out0 = {};\n", body.load(0))))
}

/// The source of an input's value: a bound operand, or an output's old value.
enum BoundInput {
    Input(usize, usize),
    Old(usize, usize),
}

impl BoundInput {
    fn key(&self) -> u32 {
        match *self {
            BoundInput::Input(i, k) => (i as u32) << 16 | k as u32,
            BoundInput::Old(i, k) => 1 << 31 | (i as u32) << 16 | k as u32,
        }
    }
}

/// Tells whether a program reads input `i`. It is true beyond `Program::MAX_INPUTS`, for which reads are not tracked.
pub(crate) fn reads(program: &Program, i: usize) -> bool {
    i >= Program::MAX_INPUTS || program.reads() >> i & 1 == 1
}

/// The statements of a program, or an error that names the operation that WGSL lacks.
pub(crate) fn printed(program: &Program, typed: &Typed, wgpu: &Wgpu) -> Result<String> {
    use numcore::pointwise::Dialect;
    program.print(typed, Dialect::Wgsl).map_err(|e| match typed.dtypes.contains(&DType::F64) {
        true => no_f64(wgpu, program.name()),
        false => e,
    })
}

/// The error for arithmetic in `f64`, which WebGPU stores and moves, but does not compute.
pub(crate) fn no_f64(wgpu: &Wgpu, op: &'static str) -> numcore::Error {
    let why = "f64 is only stored and moved here: WebGPU does not compute in it; use f32, or compute on the processor";
    wgpu.queue.device.unsupported(op, why.into())
}

/// The launch values of a program, equal for all elements: computed on the host and passed to the kernel as words.
pub(crate) struct LaunchValues {
    forms: SmallVec<[StorageForm; 8]>,
    /// The indices of scalars that are seeds of random bits.
    seeds: SmallVec<[u16; 2]>,
    pub(crate) words: SmallVec<[u32; 16]>,
}

impl LaunchValues {
    pub(crate) fn of(program: &Program, typed: &Typed, scalars: &[Scalar]) -> Result<LaunchValues> {
        program.check_scalars(typed, scalars)?;
        let mut launch = LaunchValues { forms: SmallVec::new(), seeds: SmallVec::new(), words: SmallVec::new() };
        for (id, value) in program.launch_values().into_iter().zip(program.launch_numbers(typed, scalars)) {
            let dtype = typed.dtypes[id as usize];
            launch.forms.push(StorageForm::of(dtype));
            launch.push(value, dtype);
        }
        for inst in program.insts() {
            if let Inst::Random { seed, .. } = *inst
                && !launch.seeds.contains(&seed)
            {
                launch.seeds.push(seed);
                launch.push(Number::from(scalars[seed as usize]), DType::I64);
            }
        }
        Ok(launch)
    }

    fn push(&mut self, value: Number, dtype: DType) {
        let value = value.computed_as(dtype);
        match dtype {
            DType::F64 => self.words.extend(words(value.to_f64().to_bits())),
            DType::I64 => self.words.extend(words(value.to_i64() as u64)),
            d if d.is_float() => self.words.push((value.to_f64() as f32).to_bits()),
            _ => self.words.push(value.to_i64() as u32),
        }
    }

    /// Statements that bind the values to the names in the program.
    pub(crate) fn text(&self, params: &mut Params) -> String {
        let mut text = String::new();
        for (k, form) in self.forms.iter().enumerate() {
            let words = params.many(if *form == StorageForm::I64 { 2 } else { 1 });
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(text, "let s{k}: {} = {};", form.ty(), form.parameter(&words));
        }
        for seed in &self.seeds {
            let _ = writeln!(text, "let seed{seed} = vec2<u32>({}, {});", params.next(), params.next());
        }
        text
    }
}

fn words(bits: u64) -> [u32; 2] {
    [bits as u32, (bits >> 32) as u32]
}

//! A pointwise program in a grid-stride loop: each thread moves several adjacent elements at once.

use std::fmt::Write;

use numcore::{
    DType, Result,
    pointwise::{Program, Typed},
};
use smallvec::SmallVec;

use super::{
    KernelSource, PRELUDE, THREADS, computed, entry,
    form::{ElementBody, KernelInput, KernelOutput, Loops, element, fetch, reads},
    stored,
};

/// The specialization of a kernel, apart from its program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PointwiseSpec {
    pub ins: SmallVec<[KernelInput; 6]>,
    pub outs: SmallVec<[KernelOutput; 2]>,
    pub loops: Loops,
    pub lanes: usize,
}

/// Generates the kernel. Its launch parameters are `(units, n, axes, inputs read: pointer, steps, outputs: pointer,
/// steps, [position steps], values, keys: given, stored)`. An input that is an output's old value has no parameters.
pub(crate) fn source(program: &Program, typed: &Typed, form: &PointwiseSpec) -> Result<(KernelSource, ElementBody)> {
    let inputs: SmallVec<[DType; 8]> = form.ins.iter().map(|i| i.dtype).collect();
    let outputs: SmallVec<[DType; 4]> = form.outs.iter().map(|o| o.dtype).collect();
    let body = ElementBody::of(program, typed, &inputs, &outputs)?;
    let kernel = PointwiseText { program, form, body: &body };
    let name = entry("wg_pointwise", program.name());
    let text = kernel.text(&name);
    Ok((KernelSource { text, entry: name, contracts: false }, body))
}

struct PointwiseText<'a> {
    program: &'a Program,
    form: &'a PointwiseSpec,
    body: &'a ElementBody,
}

impl PointwiseText<'_> {
    /// Inputs that are read through pointers of their own.
    fn views(&self) -> impl Iterator<Item = (usize, KernelInput)> + '_ {
        reads(self.program, self.form.ins.len()).map(|i| (i, self.form.ins[i])).filter(|(_, input)| input.own.is_none())
    }

    /// The index of output `k` among the operands; positions come last.
    fn output(&self, k: usize) -> usize {
        self.form.ins.len() + k
    }

    fn text(&self, name: &str) -> String {
        let PointwiseSpec { loops, lanes, outs, .. } = self.form;
        let mut text = format!("{PRELUDE}{}{}", loops.types("x"), self.body.text);
        let count = loops.count();
        let _ = writeln!(
            text,
            "extern \"C\" __global__ void __launch_bounds__({THREADS}) {name}({}) {{\n{}for ({count} unit = ({count})blockIdx.x * {THREADS} + threadIdx.x; unit < units; unit += ({count})gridDim.x * {THREADS}) {{",
            self.parameters().join(", "),
            self.body.keys()
        );
        text += &self.offsets();
        if loops.rank == 1 && *lanes > 1 {
            let _ = writeln!(text, "const {count} left = n - unit * {lanes};");
            let _ = writeln!(text, "const int count = left < {lanes} ? (int)left : {lanes};");
        } else {
            let _ = writeln!(text, "const int count = {lanes};");
        }
        for (i, input) in self.views() {
            text += &fetch(i, input.dtype, input.inner, *lanes, &format!("p{i}"), &format!("f{i}"));
        }
        for (k, out) in outs.iter().enumerate() {
            let (t, j) = (stored(out.dtype), self.output(k));
            if out.add || self.form.ins.iter().any(|i| i.own == Some(k as u16)) {
                text += &fetch(j, out.dtype, out.inner, *lanes, &format!("p{j}"), &format!("f{j}"));
            }
            let _ = writeln!(text, "wg_pack<{t}, {lanes}> r{k};");
        }
        text += &self.lanes();
        for (k, out) in outs.iter().enumerate() {
            let (t, j) = (stored(out.dtype), self.output(k));
            let _ = writeln!(text, "wg_write<{t}, {lanes}>(p{j} + f{j}, r{k}, count);");
        }
        text + "} }\n"
    }

    fn parameters(&self) -> Vec<String> {
        let count = self.form.loops.count();
        let mut list = vec![format!("const {count} units"), format!("const {count} n"), "const x_axes x".into()];
        for (i, input) in self.views() {
            list.push(format!("const {} *__restrict__ p{i}", stored(input.dtype)));
            list.push(format!("const x_steps x{i}"));
        }
        for (k, out) in self.form.outs.iter().enumerate() {
            let j = self.output(k);
            list.push(format!("{} *__restrict__ p{j}", stored(out.dtype)));
            list.push(format!("const x_steps x{j}"));
        }
        if self.body.positional {
            list.push(format!("const x_steps x{}", self.output(self.form.outs.len())));
        }
        list.extend(self.body.kernel_parameters());
        list
    }

    fn offsets(&self) -> String {
        let mut operands: Vec<usize> = self.views().map(|(i, _)| i).collect();
        operands.extend((0..self.form.outs.len()).map(|k| self.output(k)));
        if self.body.positional {
            operands.push(self.output(self.form.outs.len()));
        }
        let zeros: Vec<String> = operands.iter().map(|j| format!("f{j} = 0")).collect();
        let loops = self.form.loops;
        format!("{} {};\n{}", loops.offset(), zeros.join(", "), loops.offsets("x", "unit", &operands))
    }

    /// The loop over adjacent elements.
    fn lanes(&self) -> String {
        let PointwiseSpec { ins, outs, lanes, .. } = self.form;
        let mut text = format!("#pragma unroll\nfor (int i = 0; i < {lanes}; i++) {{\n");
        for (k, out) in outs.iter().enumerate() {
            let _ = writeln!(text, "{} out{k};", computed(out.dtype));
        }
        let inputs: Vec<String> = reads(self.program, ins.len())
            .map(|i| match ins[i].own {
                Some(k) => element(self.output(k as usize), outs[k as usize].inner),
                None => element(i, ins[i].inner),
            })
            .collect();
        let index = if self.body.positional { format!("(i64)f{} + i", self.output(outs.len())) } else { "0".into() };
        let _ = writeln!(text, "{}", self.body.call(&inputs, &index, outs.len()));
        for (k, out) in outs.iter().enumerate() {
            let value = match out.add {
                true => format!("wg_plus({}, out{k})", element(self.output(k), out.inner)),
                false => format!("out{k}"),
            };
            let _ = writeln!(text, "wg_store(r{k}.at[i], {value});");
        }
        text + "}\n"
    }
}

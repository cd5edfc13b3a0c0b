//! A reduction: the mapping program inlined, values combined per thread, then by a tree in shared memory, in a fixed
//! order.
//!
//! A block holds `kept × along` threads. If the nearest axis is reduced, adjacent threads walk along it (rows); if
//! it is kept, adjacent threads hold adjacent results (columns), several each where these can be read at once. A
//! second dimension of the grid divides long sums into chunks, whose values a second launch combines.

use std::fmt::Write;

use numcore::{
    DType, ReduceKind, Result,
    pointwise::{Program, Typed},
};
use smallvec::SmallVec;

use super::{
    KernelSource, PRELUDE, computed, entry,
    form::{ElementBody, KernelInput, Loops, element, fetch, reads},
    stored,
};

/// The most instructions (`SHORT`) of programs whose threads with several results read a round of `ROUND` rows at once.
const SHORT: usize = 3;
const ROUND: u32 = 8;
/// A launch bound that leaves each thread of such blocks (64 threads) the registers for a round. Otherwise the compiler
/// would read less at once, to fit more blocks than there are.
const ROUND_BLOCKS: &str = ", 8";

/// The order of the threads of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Near {
    /// Adjacent threads walk along the reduced axes.
    Reduced,
    /// Adjacent threads hold adjacent results.
    Kept,
}

/// The specialization of a kernel, apart from its program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ReduceSpec {
    pub ins: SmallVec<[KernelInput; 6]>,
    pub op: ReduceKind,
    pub out: DType,
    pub add: bool,
    /// True if results are partial, one per chunk: they are written in the compute type, chunk by chunk.
    pub partial: bool,
    pub kept: Loops,
    pub reduced: Loops,
    /// The number of adjacent elements of a thread: of a sum in rows, of several results in columns.
    pub lanes: usize,
    pub near: Near,
    /// Threads of a block: results, and threads along the reduced axes for each; powers of two.
    pub block: (u32, u32),
}

/// Generates the kernel. Its launch parameters are `(kept, units, n, per chunk, kept axes, reduced axes, inputs read:
/// pointer, kept steps, reduced steps, output: pointer, kept steps, [position: kept steps, reduced steps], values,
/// keys)`.
pub(crate) fn source(program: &Program, typed: &Typed, form: &ReduceSpec) -> Result<(KernelSource, ElementBody)> {
    let inputs: SmallVec<[DType; 8]> = form.ins.iter().map(|i| i.dtype).collect();
    let body = ElementBody::of(program, typed, &inputs, &[form.out])?;
    let name = entry("wg_reduce", program.name());
    let text = ReduceText { program, form, body: &body }.text(&name);
    Ok((KernelSource { text, entry: name, contracts: false }, body))
}

struct ReduceText<'a> {
    program: &'a Program,
    form: &'a ReduceSpec,
    body: &'a ElementBody,
}

impl ReduceText<'_> {
    fn inputs(&self) -> impl Iterator<Item = usize> + use<> {
        reads(self.program, self.form.ins.len())
    }

    /// The number of results of a thread.
    fn sums(&self) -> usize {
        if self.form.near == Near::Kept { self.form.lanes } else { 1 }
    }

    /// The index of the output among the operands; positions come after it.
    fn output(&self) -> usize {
        self.form.ins.len()
    }

    /// Operands with offsets along the reduced axes.
    fn moving(&self) -> Vec<usize> {
        let position = self.body.positional.then_some(self.output() + 1);
        self.inputs().chain(position).collect()
    }

    fn text(&self, name: &str) -> String {
        let f = self.form;
        let (acc, count) = (computed(f.out), f.reduced.count());
        let mut text = format!("{PRELUDE}{}{}{}", f.kept.types("k"), f.reduced.types("r"), self.body.text);
        let combine = match f.op {
            ReduceKind::Sum => "wg_plus",
            ReduceKind::Prod => "wg_times",
            ReduceKind::Max => "wg_max",
            ReduceKind::Min => "wg_min",
        };
        let (results, along) = f.block;
        let threads = results * along;
        let (result, place, stride) = match f.near {
            Near::Reduced => (format!("threadIdx.x / {along}"), format!("threadIdx.x % {along}"), 1),
            Near::Kept => (format!("threadIdx.x % {results}"), format!("threadIdx.x / {results}"), results),
        };
        let (kept_count, first, lanes) = (f.kept.count(), first(f.op, f.out), f.lanes);
        let sums = self.sums();
        let step = self.step(combine);
        // Whole rounds come first: between steps that might be the last a load would wait for the one before.
        let (rounds, blocks) = match sums > 1 && self.program.insts().len() <= SHORT {
            true => {
                let whole = format!("unit + {} < end", (ROUND - 1) * along);
                let each = format!("for (int s = 0; s < {ROUND}; s++, unit += {along})");
                (format!("while ({whole}) {{\n#pragma unroll\n{each} {{\n{step}}} }}\n"), ROUND_BLOCKS)
            }
            false => (String::new(), ""),
        };
        let joined = match sums {
            1 => format!("#pragma unroll\nfor (int i = 1; i < {lanes}; i++) sum[0] = {combine}(sum[0], sum[i]);\n"),
            _ => String::new(),
        };
        let _ = write!(
            text,
            "extern \"C\" __global__ void __launch_bounds__({threads}{blocks}) {name}({}) {{
{}__shared__ {acc} part[{sums}][{threads}];
const u32 place = {place};
const {kept_count} m = ({kept_count})blockIdx.x * {results} + {result};
{acc} sum[{lanes}];
#pragma unroll
for (int i = 0; i < {lanes}; i++) sum[i] = {first};
{}
if (m < kept) {{
{}const {count} from = ({count})blockIdx.y * per;
const {count} end = units - from < per ? units : from + per;
{count} unit = from + place;
{rounds}for (; unit < end; unit += {along}) {{
{step}}} }}
{joined}#pragma unroll
for (int i = 0; i < {sums}; i++) part[i][threadIdx.x] = sum[i];
for (u32 half = {along} / 2; half > 0; half /= 2) {{
__syncthreads();
if (place < half) {{
#pragma unroll
for (int i = 0; i < {sums}; i++) part[i][threadIdx.x] = {combine}(part[i][threadIdx.x], part[i][threadIdx.x + half * {stride}]);
}} }}
if (place == 0 && m < kept) {{
#pragma unroll
for (int i = 0; i < {sums}; i++) {{
{acc} total = part[i][threadIdx.x];
{}}} }} }}
",
            self.parameters().join(", "),
            self.body.keys(),
            self.bases(),
            f.kept.offsets("k", "m", &self.kept_operands()).replace(" f", " b"),
            self.store(),
        );
        text
    }

    /// Operands with offsets along the kept axes.
    fn kept_operands(&self) -> Vec<usize> {
        let output = (!self.form.partial).then_some(self.output());
        self.moving().into_iter().chain(output).collect()
    }

    fn bases(&self) -> String {
        let zeros: Vec<String> = self.kept_operands().iter().map(|j| format!("b{j} = 0")).collect();
        if zeros.is_empty() { String::new() } else { format!("{} {};", self.offset(), zeros.join(", ")) }
    }

    fn offset(&self) -> &'static str {
        Loops { rank: 1, wide: self.form.kept.wide || self.form.reduced.wide }.offset()
    }

    fn parameters(&self) -> Vec<String> {
        let f = self.form;
        let (kept, count) = (f.kept.count(), f.reduced.count());
        let mut list = vec![
            format!("const {kept} kept"),
            format!("const {count} units, const {count} n, const {count} per"),
            "const k_axes k, const r_axes r".into(),
        ];
        for i in self.inputs() {
            list.push(format!(
                "const {} *__restrict__ p{i}, const k_steps k{i}, const r_steps r{i}",
                stored(f.ins[i].dtype)
            ));
        }
        let to = if f.partial { computed(f.out) } else { stored(f.out) };
        let j = self.output();
        list.push(format!("{to} *__restrict__ p{j}, const k_steps k{j}"));
        if self.body.positional {
            list.push(format!("const k_steps k{0}, const r_steps r{0}", j + 1));
        }
        list.extend(self.body.kernel_parameters());
        list
    }

    /// One step of a thread along the reduced axes.
    fn step(&self, combine: &str) -> String {
        let f = self.form;
        let moving = self.moving();
        let starts: Vec<String> = moving.iter().map(|j| format!("f{j} = b{j}")).collect();
        let mut text = String::new();
        if !moving.is_empty() {
            let _ = writeln!(text, "{} {};", self.offset(), starts.join(", "));
            text += &f.reduced.offsets("r", "unit", &moving);
        }
        let tail = f.near == Near::Reduced && f.reduced.rank == 1 && f.lanes > 1;
        if tail {
            let _ = writeln!(text, "const {} left = n - unit * {};", f.reduced.count(), f.lanes);
            let _ = writeln!(text, "const int count = left < {0} ? (int)left : {0};", f.lanes);
        } else {
            let _ = writeln!(text, "const int count = {};", f.lanes);
        }
        for i in self.inputs() {
            text += &fetch(i, f.ins[i].dtype, f.ins[i].inner, f.lanes, &format!("p{i}"), &format!("f{i}"));
        }
        let inputs: Vec<String> = self.inputs().map(|i| element(i, f.ins[i].inner)).collect();
        let index = if self.body.positional { format!("(i64)f{} + i", self.output() + 1) } else { "0".into() };
        let guard = if tail { "if (i < count) " } else { "" };
        let _ = writeln!(
            text,
            "#pragma unroll\nfor (int i = 0; i < {}; i++) {guard}{{\n{} out0;\n{}\nsum[i] = {combine}(sum[i], out0);\n}}",
            f.lanes,
            computed(f.out),
            self.body.call(&inputs, &index, 1)
        );
        text
    }

    fn store(&self) -> String {
        let j = self.output();
        if self.form.partial {
            return match self.sums() {
                1 => format!("p{j}[(i64)blockIdx.y * kept + m] = total;\n"),
                n => format!("p{j}[((i64)blockIdx.y * kept + m) * {n} + i] = total;\n"),
            };
        }
        let at = if self.sums() > 1 { format!("p{j}[b{j} + i]") } else { format!("p{j}[b{j}]") };
        let old = if self.form.add { format!("total = wg_plus(wg_load({at}), total);\n") } else { String::new() };
        format!("{old}wg_store({at}, total);\n")
    }
}

/// The neutral element of a reduction, as C text.
fn first(op: ReduceKind, dtype: DType) -> &'static str {
    let extremes = match dtype.compute() {
        DType::F64 => ["-__longlong_as_double(0x7ff0000000000000ll)", "__longlong_as_double(0x7ff0000000000000ll)"],
        DType::I32 => ["(-2147483647 - 1)", "2147483647"],
        DType::I64 => ["(-9223372036854775807ll - 1)", "9223372036854775807ll"],
        DType::U32 => ["0u", "4294967295u"],
        DType::U8 => ["(u8)0", "(u8)255"],
        DType::Bool => ["false", "true"],
        _ => ["-__int_as_float(0x7f800000)", "__int_as_float(0x7f800000)"],
    };
    match op {
        ReduceKind::Sum => "0",
        ReduceKind::Prod => "1",
        ReduceKind::Max => extremes[0],
        ReduceKind::Min => extremes[1],
    }
}

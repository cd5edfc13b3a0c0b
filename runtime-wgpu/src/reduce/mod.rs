//! Reductions: the invocations of a workgroup that share an output, then a tree in workgroup memory. The order of
//! additions follows from the sizes alone.

mod fold;

use std::{fmt::Write, sync::LazyLock};

use numcore::{
    Accumulate, ArgOp, DType, Layout, LoopAxis, Out, ProgramOperand, ReduceKind, Result, Scalar, Shape, View, ViewMut,
    pointwise::{Inst, Program},
};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu,
    access::{Params, Site, StorageForm, header, offset, unravel},
    bindings::{Bindings, OperandView},
    elementwise::{LoopSizes, LoopStrides, counted, loops},
    packing::PackedOperands,
    pipelines::PipelineKey,
    pointwise::{self, LaunchValues, STEPS, no_f64, printed, reads},
    queue::Dispatch,
};

use fold::{FoldOp, far_merge};

/// The number of invocations of a workgroup: WebGPU's smallest limit.
const GROUP: usize = 256;
/// The number of workgroups that keep a device busy. With fewer, reductions are split into segments.
const BUSY: usize = 128;

/// Combines `map(ins)` over the axes along which `out` has size 1 and `full` has not.
pub(crate) fn reduce(
    wgpu: &Wgpu,
    map: &Program,
    ins: &[View<'_, Wgpu>],
    scalars: &[Scalar],
    full: &Shape,
    op: ReduceKind,
    out: Out<'_, Wgpu>,
) -> Result<()> {
    if out.view.layout().numel() == 0 {
        return Ok(());
    }
    if full.numel() == 0 {
        return nothing(wgpu, op, out);
    }
    let all: SmallVec<[OperandView<'_>; 8]> = ins.iter().map(|v| OperandView::from(*v)).collect();
    let types: SmallVec<[DType; 8]> = ins.iter().map(|v| v.dtype()).collect();
    let to = OperandView::from(&out.view);
    places(wgpu, (map, &types, to.dtype), &all, scalars, full, op, (to, out.how))
}

/// Reduces bound operands by a program that is resolved with the given types. There must be elements.
pub(crate) fn places(
    wgpu: &Wgpu,
    (map, types, result): (&Program, &[DType], DType),
    ins: &[OperandView<'_>],
    scalars: &[Scalar],
    full: &Shape,
    op: ReduceKind,
    (to, how): (OperandView<'_>, Accumulate),
) -> Result<()> {
    let typed = map.resolve(types, &[Some(result)])?;
    if typed.dtypes.contains(&DType::F64) {
        return Err(no_f64(wgpu, map.name()));
    }
    let launch = LaunchValues::of(map, &typed, scalars)?;
    let used: SmallVec<[usize; 8]> = (0..ins.len()).filter(|&i| reads(map, i)).collect();
    let places: SmallVec<[OperandView<'_>; 8]> = used.iter().map(|&i| ins[i]).collect();
    let packed = PackedOperands::of(wgpu, &places, 1)?;
    let mut places = PackedOperands::bound(&packed, &places);
    // Positions are the offsets of an operand that is not bound.
    let positions = map.insts().iter().any(|inst| matches!(inst, Inst::Index | Inst::Random { .. }));
    places.extend(positions.then(|| to.seen(Layout::contiguous(*full))));
    let mut details: SmallVec<[u32; 16]> = used.iter().map(|&i| (i as u32) << 8 | types[i] as u32).collect();
    details.extend([op as u32, to.dtype as u32]);
    let fold = FoldOp::of(op, StorageForm::of(to.dtype));
    let text = |params: &mut Params, loads: &[String]| {
        let mut text = launch.text(params);
        for (i, load) in used.iter().zip(loads) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "let in{i} = {load};");
        }
        if positions {
            let _ = writeln!(text, "let index = at{};", used.len());
        }
        Ok(text + &printed(map, &typed, wgpu)? + "b0 = out0;\n")
    };
    let cut = ReducePlan::new(full, &places, &to);
    let mapped = Mapped { op: map.name(), program: Some(map), details: &details, numbers: &launch.words, positions };
    if cut.segments == 1 {
        return cut.run(wgpu, mapped, &places, to, how, &fold, text);
    }
    // The first launch writes each segment's result, the second combines the results of an output.
    let parts = Layout::contiguous(Shape::from([cut.outputs(), cut.segments]));
    let memory = wgpu.scratch(parts.numel() * to.dtype.compute().size())?;
    let partial = OperandView::of(&memory, parts, to.dtype.compute());
    let last = cut.second();
    cut.into_parts().run(wgpu, mapped, &places, partial, Accumulate::Overwrite, &fold, text)?;
    let details = [op as u32, to.dtype as u32];
    let mapped = Mapped { op: map.name(), program: None, details: &details, numbers: &[], positions: false };
    let plain = |_: &mut Params, loads: &[String]| Ok(format!("b0 = {};\n", loads[0]));
    last.run(wgpu, mapped, &[partial], to, how, &fold, plain)
}

/// Fills the output with the neutral element of `op`, the combination of no values.
fn nothing(wgpu: &Wgpu, op: ReduceKind, out: Out<'_, Wgpu>) -> Result<()> {
    let dtype = out.view.dtype();
    let (low, high): (Scalar, Scalar) = match dtype {
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::U32 => (0u32.into(), u32::MAX.into()),
        DType::U8 | DType::Bool => (0i64.into(), if dtype == DType::U8 { 255i64 } else { 1 }.into()),
        _ => (f64::NEG_INFINITY.into(), f64::INFINITY.into()),
    };
    let value = match op {
        ReduceKind::Sum => 0i64.into(),
        ReduceKind::Prod => 1i64.into(),
        ReduceKind::Max => low,
        ReduceKind::Min => high,
    };
    fill(wgpu, value, &mut [out])
}

/// Sets every element to `value`.
pub(crate) fn fill(wgpu: &Wgpu, value: Scalar, out: &mut [Out<'_, Wgpu>]) -> Result<()> {
    static FILL: LazyLock<Program> = LazyLock::new(|| Program::new("full", |[], [s]| [s]));
    pointwise::run(wgpu, &FILL, &[] as &[ProgramOperand<'_, Wgpu>], &[value], out)
}

/// Computes the position of an extreme along `axis`.
pub(crate) fn arg_reduce(wgpu: &Wgpu, op: ArgOp, x: View<'_, Wgpu>, axis: usize, out: ViewMut<'_, Wgpu>) -> Result<()> {
    if out.layout().numel() == 0 {
        return Ok(());
    }
    let name = if op == ArgOp::Max { "argmax" } else { "argmin" };
    if x.dtype() == DType::F64 {
        return Err(no_f64(wgpu, name));
    }
    let (x, to) = (OperandView::from(x), OperandView::from(&out));
    let full = *x.layout.shape();
    let cut = ReducePlan { segments: 1, ..ReducePlan::new(&full, &[x], &to) }.sharing_enough();
    if full[axis] > GROUP * STEPS {
        let why =
            format!("an axis of {} elements; positions of extremes are found among {}", full[axis], GROUP * STEPS);
        return Err(wgpu.queue.device.unsupported(name, why));
    }
    let details = [op as u32, x.dtype as u32];
    let mapped = Mapped { op: name, program: None, details: &details, numbers: &[], positions: false };
    let text = |_: &mut Params, loads: &[String]| Ok(format!("b0 = {};\nb1 = r;\n", loads[0]));
    cut.run(wgpu, mapped, &[x], to, Accumulate::Overwrite, &FoldOp::arg(op, StorageForm::of(x.dtype)), text)
}

/// The computation of the values that are reduced, as far as a key and parameters contain it.
struct Mapped<'m> {
    op: &'static str,
    program: Option<&'m Program>,
    details: &'m [u32],
    numbers: &'m [u32],
    /// True if the last input stands for positions, and is not bound.
    positions: bool,
}

/// The partition of a reduction: walks over kept and reduced axes, invocations per output, segments.
#[derive(Clone)]
struct ReducePlan {
    outer: LoopSizes,
    /// The strides of each input along the kept axes, then of the output.
    outer_strides: Vec<LoopStrides>,
    inner: LoopSizes,
    inner_strides: Vec<LoopStrides>,
    /// The number of invocations that share an output; the others of a workgroup have adjacent outputs.
    sharing: usize,
    segments: usize,
    /// True if the output is the scratch memory with the segments' results.
    parts: bool,
}

impl ReducePlan {
    fn new(full: &Shape, ins: &[OperandView<'_>], out: &OperandView<'_>) -> ReducePlan {
        let rank = full.rank();
        let goes = |i: usize| full[i] != 1 && out.layout.dims()[i] == 1;
        let strides = |places: &[OperandView<'_>], i: usize| places.iter().map(|p| p.layout.strides()[i]).collect();
        let all: SmallVec<[OperandView<'_>; 8]> = ins.iter().copied().chain([*out]).collect();
        let axis = |places: &[OperandView<'_>], i: usize| LoopAxis { size: full[i], strides: strides(places, i) };
        let (outer, outer_strides) = loops((0..rank).filter(|&i| !goes(i)).map(|i| axis(&all, i)), all.len());
        let (inner, inner_strides) = loops((0..rank).filter(|&i| goes(i)).map(|i| axis(ins, i)), ins.len());
        let mut cut = ReducePlan { outer, outer_strides, inner, inner_strides, sharing: 1, segments: 1, parts: false };
        cut.share();
        cut
    }

    fn outputs(&self) -> usize {
        self.outer.iter().product()
    }

    fn length(&self) -> usize {
        self.inner.iter().product()
    }

    /// Chooses the sharing and the segments so that adjacent invocations read adjacent elements. These belong to one
    /// output where the reduced axis is innermost, otherwise to several.
    fn share(&mut self) {
        let (outputs, length) = (self.outputs(), self.length());
        let along = self.inner_strides.iter().any(|s| s.last() == Some(&1));
        let most = if along { GROUP } else { GROUP / 32 };
        let wanted = length.div_ceil(if along { 4 } else { 16 }).next_power_of_two();
        let fill = (GROUP / outputs.next_power_of_two().min(GROUP)).max(1);
        self.sharing = if length <= 16 { 1 } else { wanted.min(most.max(fill)).min(GROUP) };
        let groups = outputs.div_ceil(GROUP / self.sharing);
        let each = length / (self.sharing * 16);
        let wanted = if groups < BUSY { (BUSY / groups).min(each).max(1) } else { 1 };
        self.segments = wanted.max(length.div_ceil(self.sharing * STEPS));
    }

    /// Shares each output among so many invocations that their loops stay within `STEPS`.
    fn sharing_enough(mut self) -> ReducePlan {
        if self.length() > self.sharing * STEPS {
            self.sharing = GROUP;
        }
        self
    }

    /// The strides of the segments' results: the same outputs, with a contiguous run of segments for each.
    fn parts_strides(&self) -> LoopStrides {
        let mut step = self.segments as isize;
        let mut strides: LoopStrides = self
            .outer
            .iter()
            .rev()
            .map(|&d| {
                let s = step;
                step *= d as isize;
                s
            })
            .collect();
        strides.reverse();
        strides
    }

    fn into_parts(mut self) -> ReducePlan {
        let strides = self.parts_strides();
        if let Some(last) = self.outer_strides.last_mut() {
            *last = strides;
        }
        self.parts = true;
        self
    }

    /// The partition that combines the segments' results.
    fn second(&self) -> ReducePlan {
        let to = self.outer_strides.last().cloned().unwrap_or_default();
        let mut cut = ReducePlan {
            outer: self.outer.clone(),
            outer_strides: vec![self.parts_strides(), to],
            inner: smallvec![self.segments],
            inner_strides: vec![smallvec![1]],
            sharing: 1,
            segments: 1,
            parts: false,
        };
        cut.share();
        cut.segments = 1;
        cut
    }

    #[expect(clippy::too_many_arguments, reason = "one place that knows them all")]
    fn run(
        self,
        wgpu: &Wgpu,
        mapped: Mapped<'_>,
        ins: &[OperandView<'_>],
        to: OperandView<'_>,
        how: Accumulate,
        fold: &FoldOp,
        text: impl FnOnce(&mut Params, &[String]) -> Result<String>,
    ) -> Result<()> {
        let places: SmallVec<[OperandView<'_>; 8]> = ins.iter().copied().chain([to]).collect();
        let bound = &ins[..ins.len() - usize::from(mapped.positions)];
        let bound: SmallVec<[OperandView<'_>; 8]> = bound.iter().copied().chain([to]).collect();
        let (bindings, mut slots) = Bindings::of(&wgpu.queue.device, mapped.op, &bound)?;
        slots.extend(mapped.positions.then_some(slots[bound.len() - 1]));
        let mut atomic: SmallVec<[bool; 8]> = smallvec![false; bindings.len()];
        atomic[slots[ins.len()]] = StorageForm::of(to.dtype).per_word() > 1;
        let site = |i: usize| Site { slot: slots[i], form: StorageForm::of(places[i].dtype), atomic: atomic[slots[i]] };
        let sites: SmallVec<[Site; 8]> = (0..places.len()).map(site).collect();
        let (outputs, length) = (self.outputs(), self.length());
        counted(wgpu, mapped.op, length)?;
        let each = length.div_ceil(self.segments);
        let mut params: SmallVec<[u32; 64]> =
            smallvec![0, outputs as u32, length as u32, each as u32, self.segments as u32];
        params.extend(self.outer.iter().chain(&self.inner).map(|&d| d as u32));
        for (i, place) in places.iter().enumerate() {
            let is_position = mapped.positions && i + 1 == ins.len();
            params.push(if is_position { 0 } else { bindings.base(slots[i], place) });
            params.extend(self.outer_strides[i].iter().map(|&s| s as u32));
            if i < ins.len() {
                params.extend(self.inner_strides[i].iter().map(|&s| s as u32));
            }
        }
        params.extend_from_slice(mapped.numbers);
        let mut details: SmallVec<[u32; 32]> =
            smallvec![self.outer.len() as u32, self.inner.len() as u32, self.sharing as u32, bindings.len() as u32];
        details.extend([u32::from(self.parts), u32::from(how == Accumulate::Add)]);
        details.extend(sites.iter().map(|s| (s.slot as u32) << 8 | (s.form as u32) << 1 | u32::from(s.atomic)));
        details.extend_from_slice(mapped.details);
        let key = PipelineKey { kind: fold.kind, program: mapped.program.cloned(), details };
        let groups = outputs.div_ceil(GROUP / self.sharing) * self.segments;
        let header = header(&atomic, params.len());
        let launch = Dispatch { op: mapped.op, key, bindings, params: &params, groups, work: 0 };
        wgpu.queue.launch(launch, || self.source(&header, &sites, how, fold, text))
    }

    fn source(
        &self,
        header: &str,
        sites: &[Site],
        how: Accumulate,
        fold: &FoldOp,
        text: impl FnOnce(&mut Params, &[String]) -> Result<String>,
    ) -> Result<String> {
        let mut params = Params::new();
        let [outputs, length, each, segments] = std::array::from_fn(|_| params.next());
        let (outer, inner) = (params.many(self.outer.len()), params.many(self.inner.len()));
        let (to, ins) = sites.split_last().map_or((sites[0], &[][..]), |(to, ins)| (*to, ins));
        let (mut starts, mut places, mut loads) = (String::new(), String::new(), Vec::new());
        for (k, site) in ins.iter().enumerate() {
            let at = offset(&params.next(), "o", &params.many(outer.len()));
            starts += &format!("let from{k} = {at};\n");
            places += &format!("let at{k} = {};\n", offset(&format!("from{k}"), "c", &params.many(inner.len())));
            loads.push(site.load(&format!("at{k}")));
        }
        let mut target = offset(&params.next(), "o", &params.many(outer.len()));
        if self.parts {
            target += " + segment";
        }
        let map = text(&mut params, &loads)?;
        let (sharing, width) = (self.sharing, GROUP / self.sharing);
        let value = to.form.accumulate(how, &to.load("goal"), fold.result);
        let shared: String = fold
            .states
            .iter()
            .enumerate()
            .map(|(i, (ty, _))| format!("var<workgroup> w{i}: array<{ty}, {GROUP}>;\n"))
            .collect();
        // Distant elements are accumulated separately: a long sum in one variable would lose digits.
        let declare = fold.declare("b");
        let mut body = format!(
            "{first}{far}var count = 0u;\n\
             for (var r = low + share; r < high; r += {sharing}u) {{\n{unravel}{places}{declare}var out0: {ty};\n{map}{merge}\
             count++;\nif ((count & 31u) == 0u) {{ {flush}{restart} }}\n}}\n{flush}",
            first = fold.declare("a"),
            far = fold.declare("far"),
            unravel = unravel("c", "r", &inner),
            ty = to.form.ty(),
            merge = fold.merge,
            flush = far_merge(fold),
            restart = fold.each(|i| format!("a{i} = {};\n", fold.states[i].1)),
        );
        body += &fold.each(|i| format!("a{i} = far{i};\n"));
        if sharing > 1 {
            body += &fold.each(|i| format!("w{i}[local] = a{i};\n"));
            body += &format!(
                "workgroupBarrier();\nfor (var half = {}u; half > 0u; half >>= 1u) {{\nif (share < half) {{\n{declare}{}{}{}{}}}\n\
                 workgroupBarrier();\n}}\n",
                sharing / 2,
                fold.each(|i| format!("a{i} = w{i}[local];\n")),
                fold.each(|i| format!("b{i} = w{i}[local + half * {width}u];\n")),
                fold.merge,
                fold.each(|i| format!("w{i}[local] = a{i};\n")),
            );
            body += &fold.each(|i| format!("a{i} = w{i}[local];\n"));
        }
        Ok(format!(
            "{header}{shared}@compute @workgroup_size({GROUP})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
             @builtin(local_invocation_index) local: u32) {{\n\
             wg_zero = P[0].x;\n\
             let task = group.y * groups.x + group.x;\nlet segment = task % {segments};\n\
             let share = local / {width}u;\nlet output = (task / {segments}) * {width}u + local % {width}u;\n\
             let inside = output < {outputs};\nlet position = select(0u, output, inside);\n\
             let low = segment * {each};\nlet high = select(low, min({length}, low + {each}), inside);\n\
             {}{starts}let goal = {target};\n{body}\
             if (inside && share == 0u) {{\n{}}}\n}}\n",
            unravel("o", "position", &outer),
            to.store("goal", &value),
        ))
    }
}

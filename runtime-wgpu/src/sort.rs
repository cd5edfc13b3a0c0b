//! Stable sort along an axis: a bitonic network (Batcher 1968). Its keys' unsigned order is the order of the values,
//! and positions break ties. Lines are padded to a power of two.

use numcore::{Accumulate, DType, Layout, Result, Shape, View, ViewMut};
use smallvec::{SmallVec, smallvec};

use crate::{
    Wgpu, WgpuBuffer,
    access::{Params, StorageForm, header},
    bindings::{Bindings, OperandView},
    elementwise::ElementwiseKernel,
    pipelines::PipelineKey,
    pointwise::no_f64,
    queue::Dispatch,
};

/// The number of elements that a workgroup sorts in workgroup memory.
const BLOCK: usize = 512;
/// The number of invocations of a workgroup: one for each pair of elements.
const GROUP: usize = BLOCK / 2;

const OVERWRITE: Accumulate = Accumulate::Overwrite;

/// Sorts along `axis` into `values` and their positions `index`.
pub(crate) fn sort(
    wgpu: &Wgpu,
    x: View<'_, Wgpu>,
    axis: usize,
    descending: bool,
    values: ViewMut<'_, Wgpu>,
    index: ViewMut<'_, Wgpu>,
) -> Result<()> {
    if x.layout().numel() == 0 {
        return Ok(());
    }
    if x.dtype() == DType::F64 {
        return Err(no_f64(wgpu, "sort"));
    }
    let rank = x.layout().rank();
    let order: SmallVec<[usize; 8]> = (0..rank).filter(|&i| i != axis).chain([axis]).collect();
    let last = |place: OperandView<'_>| place.layout.permute(&order);
    let (x, values, index) = (OperandView::from(x), OperandView::from(&values), OperandView::from(&index));
    let (x, values, index) = (x.seen(last(x)?), values.seen(last(values)?), index.seen(last(index)?));
    let lines = SortLines::new(wgpu, &x)?;
    lines.keys(wgpu, x, descending)?;
    lines.network(wgpu)?;
    lines.results(wgpu, x, values, index)
}

/// The keys and positions of lines that are padded to a power of two.
struct SortLines {
    /// The keys of one word, or the high words of two-word keys.
    high: WgpuBuffer,
    low: Option<WgpuBuffer>,
    position: WgpuBuffer,
    /// The number of elements of all padded lines, and of one.
    total: usize,
    padded: usize,
    /// The elements that are not padding, in the shape of `x`.
    real: Layout,
}

impl SortLines {
    fn new(wgpu: &Wgpu, x: &OperandView<'_>) -> Result<SortLines> {
        let (shape, last) = (*x.layout.shape(), x.layout.rank() - 1);
        let padded = shape[last].next_power_of_two();
        let whole = Layout::contiguous(shape.with(last, padded));
        let total = whole.numel();
        let low = if x.dtype.size() == 8 { Some(wgpu.scratch(total * 4)?) } else { None };
        let real = whole.slice(last, 0, shape[last], 1)?;
        Ok(SortLines { high: wgpu.scratch(total * 4)?, low, position: wgpu.scratch(total * 4)?, total, padded, real })
    }

    fn buffers(&self) -> impl Iterator<Item = &WgpuBuffer> {
        [&self.high, &self.position].into_iter().chain(&self.low)
    }

    /// Fills keys and positions; padding comes last.
    fn keys(&self, wgpu: &Wgpu, x: OperandView<'_>, descending: bool) -> Result<()> {
        let all = Layout::contiguous(Shape::from([self.total]));
        let place = |b, layout| (OperandView::of(b, layout, DType::U32), StorageForm::U32);
        let outs: SmallVec<[(OperandView<'_>, StorageForm); 3]> = self.buffers().map(|b| place(b, all)).collect();
        let how: SmallVec<[Accumulate; 3]> = outs.iter().map(|_| OVERWRITE).collect();
        let numbers = [self.padded as u32 - 1];
        ElementwiseKernel::new(wgpu, "sort", &[], &outs)?.run(
            wgpu,
            ("sort", "sort_start"),
            None,
            &how,
            (&numbers, &[]),
            |body| {
                let low = if outs.len() == 3 { "out2 = 0xffffffffu;\n" } else { "" };
                Ok(format!("out0 = 0xffffffffu;\nout1 = index & {};\n{low}", body.params.next()))
            },
        )?;
        let keys = [&self.high].into_iter().chain(&self.low);
        let outs: SmallVec<[(OperandView<'_>, StorageForm); 2]> = keys.map(|b| place(b, self.real)).collect();
        let form = StorageForm::of(x.dtype);
        let details = [u32::from(descending), x.dtype as u32];
        let walk = ElementwiseKernel::new(wgpu, "sort", &[(x, form)], &outs)?;
        walk.run(wgpu, ("sort", "sort_keys"), None, &how[..outs.len()], (&[], &details), |body| {
            let flip = if descending { "~" } else { "" };
            let x = body.load(0);
            Ok(match form {
                StorageForm::I64 => format!("let x = {x};\nout0 = {flip}(x.y ^ 0x80000000u);\nout1 = {flip}x.x;\n"),
                StorageForm::I32 => format!("out0 = {flip}(bitcast<u32>({x}) ^ 0x80000000u);\n"),
                StorageForm::Bool => format!("out0 = {flip}select(0u, 1u, {x});\n"),
                StorageForm::F32 | StorageForm::F16 | StorageForm::BF16 => format!(
                    "let x = bitcast<u32>({x});\nlet a = x & 0x7fffffffu;\n\
                     var key = select(x | 0x80000000u, ~x, (x >> 31u) == 1u);\n\
                     if (a == 0u) {{ key = 0x80000000u; }}\nif (a > 0x7f800000u) {{ key = 0xffffffffu; }}\nout0 = {flip}key;\n"
                ),
                _ => format!("out0 = {flip}{x};\n"),
            })
        })
    }

    /// Runs the network: steps that span blocks one by one, all others in workgroup memory.
    fn network(&self, wgpu: &Wgpu) -> Result<()> {
        let whole = self.padded.min(BLOCK);
        if self.padded > 1 {
            self.step(wgpu, "sort_block", [2, whole, 0])?;
        }
        let mut size = 2 * BLOCK;
        while size <= self.padded {
            let mut apart = size / 2;
            while apart >= BLOCK {
                self.step(wgpu, "sort_step", [size, apart, 0])?;
                apart /= 2;
            }
            self.step(wgpu, "sort_block", [size, size, 0])?;
            size *= 2;
        }
        Ok(())
    }

    fn step(&self, wgpu: &Wgpu, kind: &'static str, [from, to, _]: [usize; 3]) -> Result<()> {
        let all = Layout::contiguous(Shape::from([self.total]));
        let places: SmallVec<[OperandView<'_>; 3]> =
            self.buffers().map(|b| OperandView::of(b, all, DType::U32)).collect();
        let (bindings, slots) = Bindings::of(&wgpu.queue.device, "sort", &places)?;
        let mut params: SmallVec<[u32; 16]> =
            smallvec![0, self.total as u32, self.padded as u32 - 1, from as u32, to as u32];
        params.extend(places.iter().zip(&slots).map(|(p, &s)| bindings.base(s, p)));
        let wide = self.low.is_some();
        let key = PipelineKey { kind, program: None, details: smallvec![u32::from(wide), bindings.len() as u32] };
        let header = header(&[false; 3][..bindings.len()], params.len());
        let groups = (self.total / 2).max(1).div_ceil(GROUP);
        let launch = Dispatch { op: "sort", key, bindings, params: &params, groups, work: 0 };
        wgpu.queue.launch(launch, || {
            Ok(if kind == "sort_step" { step_source(&header, wide) } else { block_source(&header, wide) })
        })
    }

    /// Stores the sorted positions, and the values at them.
    fn results(&self, wgpu: &Wgpu, x: OperandView<'_>, values: OperandView<'_>, index: OperandView<'_>) -> Result<()> {
        let last = x.layout.rank() - 1;
        let start = x.seen(crate::elementwise::still(&x.layout, last, x.layout.dims()[last])?);
        let from = OperandView::of(&self.position, self.real, DType::U32);
        let form = StorageForm::bits(x.dtype);
        let outs = [(values, form), (index, StorageForm::I64)];
        let walk = ElementwiseKernel::new(wgpu, "sort", &[(from, StorageForm::U32), (start, form)], &outs)?;
        let numbers = [x.layout.strides()[last] as u32];
        walk.run(wgpu, ("sort", "sort_results"), None, &[OVERWRITE; 2], (&numbers, &[]), |body| {
            let (place, step) = (body.load(0), body.params.next());
            let value = body.load_at(1, "there");
            Ok(format!(
                "let place = {place};\nlet there = at1 + place * {step};\nout0 = {value};\nout1 = vec2<u32>(place, 0u);\n"
            ))
        })
    }
}

/// The frame of both kernels: declarations, and the parameters `total`, the mask of a row, two integers, and the
/// operands' offsets.
fn frame(header: &str, wide: bool, shared: &str, body: &str) -> String {
    let mut params = Params::new();
    let names = ["total", "mask", "size", "apart", "high", "position"].into_iter().chain(wide.then_some("low"));
    let lets: String = names.map(|name| format!("let {name} = {};\n", params.next())).collect();
    format!(
        "{header}{shared}@compute @workgroup_size({GROUP})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, \
         @builtin(local_invocation_index) local: u32) {{\n\
         wg_zero = P[0].x;\nlet task = group.y * groups.x + group.x;\n{lets}{body}}}\n"
    )
}

/// The condition that element `j` comes before `i`, by keys `k`, positions `p` and low words `l`.
fn before(wide: bool) -> &'static str {
    if wide {
        "(kj < ki || (kj == ki && (lj < li || (lj == li && pj < pi))))"
    } else {
        "(kj < ki || (kj == ki && pj < pi))"
    }
}

/// The source of one step, which compares elements at the distance `apart`.
fn step_source(header: &str, wide: bool) -> String {
    let (load, store) = if wide {
        ("let li = buf2[low + i];\nlet lj = buf2[low + j];\n", "buf2[low + i] = lj;\nbuf2[low + j] = li;\n")
    } else {
        ("", "")
    };
    let body = format!(
        "let t = task * {GROUP}u + local;\nif (t >= total / 2u) {{ return; }}\n\
         let i = 2u * t - (t & (apart - 1u));\nlet j = i + apart;\nlet ascending = ((i & mask) & size) == 0u;\n\
         let ki = buf0[high + i];\nlet kj = buf0[high + j];\nlet pi = buf1[position + i];\nlet pj = buf1[position + j];\n{load}\
         if ({} == ascending) {{\nbuf0[high + i] = kj;\nbuf0[high + j] = ki;\nbuf1[position + i] = pj;\nbuf1[position + j] = pi;\n{store}}}\n",
        before(wide)
    );
    frame(header, wide, "", &body)
}

/// The source of all stages of sizes from `size` to `apart` that stay within a block.
fn block_source(header: &str, wide: bool) -> String {
    let mut shared = format!("var<workgroup> k: array<u32, {BLOCK}>;\nvar<workgroup> p: array<u32, {BLOCK}>;\n");
    let (mut read, mut load, mut swap, mut write) = (
        "k[e] = buf0[high + g];\np[e] = buf1[position + g];\n".to_owned(),
        "let ki = k[i];\nlet kj = k[j];\nlet pi = p[i];\nlet pj = p[j];\n".to_owned(),
        "k[i] = kj;\nk[j] = ki;\np[i] = pj;\np[j] = pi;\n".to_owned(),
        "buf0[high + g] = k[e];\nbuf1[position + g] = p[e];\n".to_owned(),
    );
    if wide {
        shared += &format!("var<workgroup> l: array<u32, {BLOCK}>;\n");
        read += "l[e] = buf2[low + g];\n";
        load += "let li = l[i];\nlet lj = l[j];\n";
        swap += "l[i] = lj;\nl[j] = li;\n";
        write += "buf2[low + g] = l[e];\n";
    }
    let each = |body: &str| {
        format!(
            "for (var e = local; e < {BLOCK}u; e += {GROUP}u) {{\nlet g = first + e;\nif (g < total) {{\n{body}}}\n}}\n"
        )
    };
    let body = format!(
        "let first = task * {BLOCK}u;\n{}\
         for (var width = size; width <= apart; width *= 2u) {{\n\
         for (var gap = min(width / 2u, {GROUP}u); gap > 0u; gap /= 2u) {{\nworkgroupBarrier();\n\
         let i = 2u * local - (local & (gap - 1u));\nlet j = i + gap;\n\
         let ascending = (((first + i) & mask) & width) == 0u;\n{load}\
         if (first + j < total && {} == ascending) {{\n{swap}}}\n}}\n}}\nworkgroupBarrier();\n{}",
        each(&read),
        before(wide),
        each(&write),
    );
    frame(header, wide, &shared, &body)
}

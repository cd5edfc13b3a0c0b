//! Launches of reductions. The partition of sums depends only on sizes, types and strides, never on the GPU, so results
//! repeat to the bit everywhere.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Layout, MAX_RANK, Out, ReduceKind, Result, Scalar, Shape, View,
    pointwise::{Program, Typed},
};
use smallvec::SmallVec;

use crate::{
    Cuda,
    axes::{LoopAxes, MemoryRef, Steps, WIDE, by_steps},
    codegen::{
        THREADS,
        form::{KernelInput, Loops, reads},
        reduce::{Near, ReduceSpec},
    },
    driver::Grid,
    driver::{KernelArgs, LIMIT},
    engine::{Generated, KernelKey},
    operand::Operand,
    pointwise::{self, InputSource, Target, is_positional, positions, values},
};

/// The number of blocks of a launch from which on long sums are left whole.
const ENOUGH: usize = 1024;
/// The least steps of a thread in each chunk of a partitioned sum.
const STEPS: usize = 8;
/// The number of adjacent results of a block, where adjacent threads hold adjacent results.
const COLUMNS: usize = 32;
/// The number of threads of a block along the results, where each has several adjacent ones: 128 bytes of a row.
const WIDE_COLUMNS: usize = 8;
/// The number of groups of elements for each thread of a row.
const EACH: usize = 4;

pub(crate) fn reduce(
    cuda: &Cuda,
    map: &Program,
    ins: &[View<'_, Cuda>],
    scalars: &[Scalar],
    full: &Shape,
    op: ReduceKind,
    out: Out<'_, Cuda>,
) -> Result<()> {
    let ins: SmallVec<[Operand; 6]> = ins.iter().map(|v| Operand::from(*v)).collect();
    reduce_operands(cuda, map, &ins, scalars, full, op, Target::from(&out))
}

/// A reduction of operands by address, which are seen as `full`.
pub(crate) fn reduce_operands(
    cuda: &Cuda,
    map: &Program,
    ins: &[Operand],
    scalars: &[Scalar],
    full: &Shape,
    op: ReduceKind,
    target: Target,
) -> Result<()> {
    if target.to.numel() == 0 {
        return Ok(());
    }
    let is_reduced = |i: usize| full[i] != 1 && target.to.dims()[i] == 1;
    let reduced: SmallVec<[usize; MAX_RANK]> = (0..full.rank()).filter(|&i| is_reduced(i)).collect();
    if reduced.is_empty() {
        let ins: SmallVec<[InputSource; 6]> = ins.iter().map(|x| InputSource::View(*x)).collect();
        return pointwise::launch(cuda, map, &ins, scalars, &[target]);
    }
    if full.numel() == 0 {
        return pointwise::fill(cuda, target.to, none(op, target.to.dtype), target.add);
    }
    let call = ReduceCall::new(map, ins, op, target, full.dims(), &reduced);
    call.run(cuda, scalars)
}

/// The result of a reduction over no elements.
fn none(op: ReduceKind, dtype: DType) -> Scalar {
    let lowest = match dtype {
        DType::I32 => Scalar::I64(i64::from(i32::MIN)),
        DType::I64 => Scalar::I64(i64::MIN),
        DType::U32 | DType::U8 | DType::Bool => Scalar::I64(0),
        _ => Scalar::F64(f64::NEG_INFINITY),
    };
    let highest = match dtype {
        DType::I32 => Scalar::I64(i64::from(i32::MAX)),
        DType::I64 => Scalar::I64(i64::MAX),
        DType::U32 => Scalar::I64(i64::from(u32::MAX)),
        DType::U8 => Scalar::I64(255),
        DType::Bool => Scalar::I64(1),
        _ => Scalar::F64(f64::INFINITY),
    };
    match op {
        ReduceKind::Sum => Scalar::I64(0),
        ReduceKind::Prod => Scalar::I64(1),
        ReduceKind::Max => lowest,
        ReduceKind::Min => highest,
    }
}

/// A reduction on addresses: its operands on the axes that are kept and on those that are reduced. Inputs come first,
/// then the output, then positions.
struct ReduceCall<'a> {
    map: &'a Program,
    ins: &'a [Operand],
    op: ReduceKind,
    target: Target,
    /// The axes that are kept, over all operands.
    kept: LoopAxes,
    reduced: LoopAxes,
    cut: ReducePartition,
    lanes: usize,
}

/// The assignment of threads to results and elements.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ReducePartition {
    near: Near,
    block: (usize, usize),
    chunks: usize,
    /// The number of groups of elements of a chunk.
    per: usize,
}

impl ReducePartition {
    /// Partitions `results` reductions of `units` groups of elements each.
    fn of(near: Near, results: usize, units: usize) -> ReducePartition {
        let threads = THREADS as usize;
        let block = match near {
            Near::Reduced => {
                let along = units.div_ceil(EACH).next_power_of_two().min(threads);
                (threads / along, along)
            }
            Near::Kept => {
                let columns = results.next_power_of_two().min(COLUMNS);
                (columns, threads / columns)
            }
        };
        let blocks = results.div_ceil(block.0);
        let chunks = ENOUGH.div_ceil(blocks).min(units / (block.1 * STEPS)).max(1);
        let per = units.div_ceil(chunks);
        ReducePartition { near, block, chunks: units.div_ceil(per), per }
    }
}

impl<'a> ReduceCall<'a> {
    fn new(
        map: &'a Program,
        ins: &'a [Operand],
        op: ReduceKind,
        target: Target,
        full: &[usize],
        reduced: &[usize],
    ) -> ReduceCall<'a> {
        let shape = Shape::new(full).unwrap_or(*target.to.layout.shape());
        let mut steps: SmallVec<[Steps; 8]> = ins.iter().map(Operand::steps).collect();
        let reference = reference(&steps, &target.to, full);
        let order = by_steps(full.len(), &reference);
        let nearest = order.iter().rev().find(|&&a| full[a] != 1 && reference[a] != 0);
        let near = if nearest.is_none_or(|a| reduced.contains(a)) { Near::Reduced } else { Near::Kept };
        steps.push(target.to.steps());
        steps.push(positions(&shape));
        // Positions that are not read must not prevent merging axes, nor must the output on axes it lacks.
        let positional = is_positional(map);
        let along = |kept: bool| {
            let mut used = steps.clone();
            if !positional {
                used.truncate(ins.len() + 1);
            }
            if !kept {
                used[ins.len()] = used[0];
                if ins.is_empty() {
                    used[0] = if positional { used[1] } else { [0; MAX_RANK] };
                }
            }
            let mut axes = LoopAxes::of(full, &used, order.iter().copied().filter(|a| reduced.contains(a) != kept));
            axes.steps.resize(ins.len() + 2, [0; MAX_RANK]);
            axes
        };
        let (kept, reduced) = (along(true), along(false));
        let lanes = match near {
            Near::Reduced => lanes(ins, &kept, &reduced),
            Near::Kept if positional => 1,
            Near::Kept => columns(ins, &kept, &reduced),
        };
        let units = reduced.units(if near == Near::Reduced { lanes } else { 1 }).iter().product();
        let mut cut = ReducePartition::of(near, kept.count(), units);
        if near == Near::Kept && lanes > 1 {
            // Sums are cut as those of single columns, so they have the same bits.
            cut.block.0 = WIDE_COLUMNS;
        }
        ReduceCall { map, ins, op, target, kept, reduced, cut, lanes }
    }

    fn run(&self, cuda: &Cuda, scalars: &[Scalar]) -> Result<()> {
        if self.cut.chunks == 1 {
            return self.launch(cuda, scalars, self.target.to.address, false);
        }
        static SAME: LazyLock<Program> = LazyLock::new(|| Program::new("combine", |[x], []| [x]));
        let acc = self.target.to.dtype.compute();
        let results = self.kept.count();
        let memory = cuda.scratch(self.cut.chunks * results * acc.size())?;
        self.launch(cuda, scalars, memory.address(), true)?;
        // Partial results lie chunk by chunk, in the order of the kept axes.
        let dims: SmallVec<[usize; MAX_RANK]> =
            std::iter::once(self.cut.chunks).chain(self.kept.sizes.clone()).collect();
        let partial = Operand { address: memory.address(), layout: Layout::contiguous(Shape::new(&dims)?), dtype: acc };
        let mut to = LoopAxes { steps: SmallVec::from_elem([0; MAX_RANK], 3), sizes: self.kept.sizes.clone() };
        to.steps[0] = shifted(&partial.steps());
        to.steps[1] = self.kept.steps[self.ins.len()];
        let mut reduced =
            LoopAxes { steps: SmallVec::from_elem([0; MAX_RANK], 3), sizes: SmallVec::from_slice(&dims[..1]) };
        reduced.steps[0][0] = results as isize;
        let near = if results == 1 { Near::Reduced } else { Near::Kept };
        let mut cut = ReducePartition::of(near, results, self.cut.chunks);
        (cut.chunks, cut.per) = (1, self.cut.chunks);
        let ins = [partial];
        ReduceCall { map: &SAME, ins: &ins, op: self.op, target: self.target, kept: to, reduced, cut, lanes: 1 }.launch(
            cuda,
            &[],
            self.target.to.address,
            false,
        )
    }

    /// The number of adjacent results of a thread, and of adjacent elements of a sum that it reads at once.
    fn groups(&self) -> (usize, usize) {
        match self.cut.near {
            Near::Reduced => (1, self.lanes),
            Near::Kept => (self.lanes, 1),
        }
    }

    /// Tells whether offsets, or the number of elements along either kind of axes, need more than 31 bits.
    fn is_wide(&self) -> bool {
        let both = self.kept.reaches().zip(self.reduced.reaches()).map(|(a, b)| a.saturating_add(b));
        self.kept.is_wide() || self.reduced.is_wide() || both.max().unwrap_or(0) >= WIDE
    }

    fn form(&self, partial: bool) -> ReduceSpec {
        let input = |(j, x): (usize, &Operand)| KernelInput {
            dtype: x.dtype,
            inner: match self.cut.near {
                Near::Reduced => self.reduced.inner(j, self.lanes),
                Near::Kept => self.kept.inner(j, self.lanes),
            },
            own: None,
        };
        ReduceSpec {
            ins: self.ins.iter().enumerate().map(input).collect(),
            op: self.op,
            out: self.target.to.dtype,
            add: self.target.add && !partial,
            partial,
            kept: Loops { rank: self.kept.rank(), wide: self.is_wide() },
            reduced: Loops { rank: self.reduced.rank(), wide: self.is_wide() },
            lanes: self.lanes,
            near: self.cut.near,
            block: (self.cut.block.0 as u32, self.cut.block.1 as u32),
        }
    }

    /// Launches the kernel, which writes results to `to`; with `partial`, the values of one chunk after another.
    fn launch(&self, cuda: &Cuda, scalars: &[Scalar], to: u64, partial: bool) -> Result<()> {
        let dtypes: SmallVec<[DType; 8]> = self.ins.iter().map(|x| x.dtype).collect();
        // A half-precision value that is read back in its compute type is still that value.
        let asked = if self.ins.len() == 1 && self.map.is_identity() { dtypes[0] } else { self.target.to.dtype };
        let typed = self.map.resolve(&dtypes, &[Some(asked)])?;
        let key = KernelKey::Reduce(self.map.clone(), self.form(partial));
        let kernel = cuda.queue.engine.generated(key, &typed)?;
        let mut args = self.args(cuda, &kernel, &typed, scalars, to)?;
        if args.size() > LIMIT {
            let why =
                format!("its {} inputs are more than a reduction can be given; make them contiguous", self.ins.len());
            return Err(Error::unsupported_on(cuda.queue.engine.device, self.map.name(), why));
        }
        let (results, along) = self.cut.block;
        let blocks = (self.kept.count() / self.groups().0).div_ceil(results);
        let grid = Grid { blocks: [blocks, self.cut.chunks, 1], threads: [(results * along) as u32, 1], shared: 0 };
        // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and the output overlaps nothing.
        // The arguments are those the source was generated for.
        unsafe { cuda.queue.launch(self.map.name(), &kernel.entry, kernel.function, grid, &mut args) }
    }

    /// The arguments in the order of the kernel's parameters.
    fn args(&self, cuda: &Cuda, kernel: &Generated, typed: &Typed, scalars: &[Scalar], to: u64) -> Result<KernelArgs> {
        let wide = self.is_wide();
        let (columns, lanes) = self.groups();
        let (results, units) = (self.kept.units(columns), self.reduced.units(lanes));
        let mut args = KernelArgs::default();
        args.count(results.iter().product(), wide);
        args.count(units.iter().product(), wide);
        args.count(self.reduced.count(), wide);
        args.count(self.cut.per, wide);
        args.axes(&results, wide);
        args.axes(&units, wide);
        for i in reads(self.map, self.ins.len()) {
            args.push(self.ins[i].address);
            args.steps(&self.kept.unit_steps(i, columns), wide);
            args.steps(&self.reduced.unit_steps(i, lanes), wide);
        }
        let output = self.ins.len();
        args.push(to);
        args.steps(&self.kept.unit_steps(output, columns), wide);
        if kernel.body.positional {
            args.steps(&self.kept.unit_steps(output + 1, 1), wide);
            args.steps(&self.reduced.unit_steps(output + 1, lanes), wide);
        }
        values(&mut args, cuda, self.map, kernel, typed, scalars)?;
        Ok(args)
    }
}

/// The strides without that of the first axis.
fn shifted(steps: &Steps) -> Steps {
    let mut rest = [0; MAX_RANK];
    rest[..MAX_RANK - 1].copy_from_slice(&steps[1..]);
    rest
}

/// The operand whose memory order the threads follow: the input with the most distinct elements.
fn reference(ins: &[Steps], out: &Operand, full: &[usize]) -> Steps {
    let own = |s: &Steps| -> usize { full.iter().zip(s).filter(|(_, s)| **s != 0).map(|(d, _)| *d).product() };
    let largest = ins.iter().rev().max_by_key(|s| own(s));
    largest.copied().unwrap_or_else(|| out.steps())
}

/// The number of adjacent elements that a thread reads at once along the reduced axes: rows must be aligned to such
/// groups.
fn lanes(ins: &[Operand], kept: &LoopAxes, reduced: &LoopAxes) -> usize {
    let mut places: SmallVec<[Option<MemoryRef>; 8]> = ins.iter().map(|x| Some(x.place())).collect();
    places.resize(reduced.steps.len(), None);
    let mut lanes = reduced.lanes(&places);
    let begins = |lanes: usize| {
        let inner = |j: usize| reduced.steps[j][reduced.rank() - 1];
        let rows = |j: usize| kept.steps[j][..kept.rank()].iter().zip(&kept.sizes).filter(|(_, d)| **d > 1);
        (0..ins.len()).filter(|&j| inner(j) == 1).all(|j| rows(j).all(|(s, _)| s.unsigned_abs().is_multiple_of(lanes)))
    };
    while lanes > 1 && !begins(lanes) {
        lanes /= 2;
    }
    lanes
}

/// The number of adjacent results of a thread, whose elements it reads at once: up to 16 bytes. It is 1 for at most
/// `COLUMNS / 2` results, and where columns do not begin at multiples of that number.
fn columns(ins: &[Operand], kept: &LoopAxes, reduced: &LoopAxes) -> usize {
    let mut places: SmallVec<[Option<MemoryRef>; 8]> = ins.iter().map(|x| Some(x.place())).collect();
    places.resize(kept.steps.len(), None);
    let (last, output) = (kept.rank() - 1, ins.len());
    if kept.steps[output][last] != 1 || kept.count() <= COLUMNS / 2 {
        return 1;
    }
    let lanes = kept.lanes(&places);
    let begins = (0..ins.len()).filter(|&j| kept.steps[j][last] == 1).all(|j| {
        let rows = reduced.steps[j][..reduced.rank()].iter().zip(&reduced.sizes).filter(|(_, d)| **d > 1);
        rows.into_iter().all(|(s, _)| s.unsigned_abs().is_multiple_of(lanes))
    });
    if begins && kept.sizes[last].is_multiple_of(lanes) { lanes } else { 1 }
}

/// The kernel of a reduction's first launch; the one that combines partial values is not included.
#[cfg(all(test, feature = "nvrtc-tests"))]
pub(crate) fn sources_of(
    map: &Program,
    ins: &[Operand],
    op: ReduceKind,
    target: Target,
    full: &[usize],
    reduced: &[usize],
) -> Result<Vec<crate::codegen::KernelSource>> {
    let call = ReduceCall::new(map, ins, op, target, full, reduced);
    let dtypes: Vec<DType> = ins.iter().map(|x| x.dtype).collect();
    let typed = map.resolve(&dtypes, &[Some(target.to.dtype)])?;
    let partial: &[bool] = if call.cut.chunks == 1 { &[false] } else { &[true] };
    partial.iter().map(|&p| Ok(crate::codegen::reduce::source(map, &typed, &call.form(p))?.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sums_are_cut_and_short_ones_are_not() {
        let whole = ReducePartition::of(Near::Reduced, 1, 1 << 22);
        assert_eq!((whole.block, whole.chunks, whole.per), ((1, 256), 1024, 4096));
        assert_eq!(ReducePartition::of(Near::Reduced, 4096, 256).chunks, 1);
        let short = ReducePartition::of(Near::Reduced, 1 << 20, 3);
        assert_eq!((short.block, short.chunks), ((256, 1), 1));
        let columns = ReducePartition::of(Near::Kept, 768, 8192);
        assert_eq!((columns.block, columns.chunks), ((32, 8), 43));
        assert!(columns.per * columns.chunks >= 8192);
    }

    #[test]
    fn chunks_cover_every_element() {
        for near in [Near::Reduced, Near::Kept] {
            for results in [1, 2, 31, 33, 1000, 70_000] {
                for units in [1, 2, 7, 255, 256, 257, 4097, 1 << 20] {
                    let cut = ReducePartition::of(near, results, units);
                    assert!(cut.per * cut.chunks >= units && cut.per * (cut.chunks - 1) < units, "{cut:?}");
                    assert!(cut.block.0.is_power_of_two() && cut.block.1.is_power_of_two());
                    assert_eq!(cut.block.0 * cut.block.1, THREADS as usize);
                    assert!(cut.chunks <= 65_535);
                }
            }
        }
    }
}

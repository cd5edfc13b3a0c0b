//! Launches of pointwise programs.

use std::sync::LazyLock;

use numcore::{
    Accumulate, DType, Error, Layout, MAX_RANK, Out, ProgramOperand as In, Result, Scalar, Shape,
    pointwise::{Program, Typed},
};
use smallvec::SmallVec;

use crate::{
    Cuda,
    axes::{LoopAxes, MemoryRef, Steps, by_steps},
    codegen::{
        THREADS,
        form::{KernelInput, KernelOutput, Loops, reads},
        pointwise::PointwiseSpec,
    },
    driver::Grid,
    driver::{KernelArgs, LIMIT},
    engine::{Generated, KernelKey},
    memory::CudaBuffer,
    operand::Operand,
};

/// The most blocks per multiprocessor: more only repeat the start of a block.
const BLOCKS: usize = 32;

/// The source of an input: its own memory, or the old value of an output.
#[derive(Clone, Copy)]
pub(crate) enum InputSource {
    View(Operand),
    Own(usize),
}

/// An output; with `add`, results are added to its old value.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub to: Operand,
    pub add: bool,
}

impl From<&Out<'_, Cuda>> for Target {
    fn from(out: &Out<'_, Cuda>) -> Target {
        Target { to: (&out.view).into(), add: out.how == Accumulate::Add }
    }
}

/// Runs `program` at every position of the outputs' shape.
pub(crate) fn run(
    cuda: &Cuda,
    program: &Program,
    ins: &[In<'_, Cuda>],
    scalars: &[Scalar],
    outs: &mut [Out<'_, Cuda>],
) -> Result<()> {
    let sources: SmallVec<[InputSource; 6]> = ins
        .iter()
        .map(|operand| match operand {
            In::View(view) => InputSource::View(Operand::from(*view)),
            In::Own(k) => InputSource::Own(*k),
        })
        .collect();
    let targets: SmallVec<[Target; 2]> = outs.iter().map(Target::from).collect();
    launch(cuda, program, &sources, scalars, &targets)
}

/// Launches a program on operands by address.
pub(crate) fn launch(
    cuda: &Cuda,
    program: &Program,
    ins: &[InputSource],
    scalars: &[Scalar],
    outs: &[Target],
) -> Result<()> {
    let Some(first) = outs.first() else { return Ok(()) };
    if first.to.numel() == 0 {
        return Ok(());
    }
    if let ([InputSource::View(from)], [Target { to, add: false }]) = (ins, outs)
        && program.is_identity()
        && from.dtype == to.dtype
        && from.layout.is_contiguous()
        && to.layout.is_contiguous()
    {
        // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and outputs overlap nothing.
        return unsafe { cuda.queue.copy(program.name(), from.address, to.address, to.numel() * to.dtype.size()) };
    }
    let call = PointwiseCall::new(program, ins, outs);
    let typed = program.resolve(&call.dtypes(), &call.asked())?;
    let key = KernelKey::Pointwise(program.clone(), call.form());
    let engine = &cuda.queue.engine;
    let kernel = engine.generated(key, &typed)?;
    let mut args = call.args(cuda, &kernel, &typed, scalars)?;
    if args.size() > LIMIT {
        return densely(cuda, program, ins, scalars, outs);
    }
    let units: usize = call.axes.units(call.lanes).iter().product();
    let most = engine.capabilities.parallelism.max(1) * BLOCKS;
    let blocks = units.div_ceil(THREADS as usize).min(most);
    let grid = Grid { blocks: [blocks, 1, 1], threads: [THREADS, 1], shared: 0 };
    // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and outputs overlap nothing. The
    // arguments are those the source was generated for.
    unsafe { cuda.queue.launch(program.name(), &kernel.entry, kernel.function, grid, &mut args) }
}

/// Copies strided operands to dense memory first, when their geometry exceeds the size limit of kernel parameters.
fn densely(cuda: &Cuda, program: &Program, ins: &[InputSource], scalars: &[Scalar], outs: &[Target]) -> Result<()> {
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let mut dense: SmallVec<[InputSource; 6]> = SmallVec::new();
    for source in ins {
        dense.push(match source {
            InputSource::View(x) if !x.layout.is_contiguous() => {
                let (memory, copy) = to_dense(cuda, x, x.dtype)?;
                kept.push(memory);
                InputSource::View(copy)
            }
            other => *other,
        });
    }
    if kept.is_empty() {
        let why = format!("its {} inputs and {} outputs are more than a kernel can be given", ins.len(), outs.len());
        return Err(Error::unsupported_on(cuda.queue.engine.device, program.name(), why));
    }
    launch(cuda, program, &dense, scalars, outs)
}

/// Copies an operand to dense memory as `dtype`. The returned buffer is the copy's memory.
pub(crate) fn to_dense(cuda: &Cuda, x: &Operand, dtype: DType) -> Result<(CudaBuffer, Operand)> {
    let layout = Layout::contiguous(*x.layout.shape());
    let memory = cuda.scratch(layout.numel() * dtype.size())?;
    let copy = Operand::of(&memory, layout, dtype);
    convert(cuda, x, copy, false)?;
    Ok((memory, copy))
}

/// Stores elements as another type of the same compute type: upcasts half-precision ones, rounds to them, or
/// accumulates into them.
pub(crate) fn convert(cuda: &Cuda, from: &Operand, to: Operand, add: bool) -> Result<()> {
    static SAME: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]));
    static CASTS: LazyLock<Vec<Program>> =
        LazyLock::new(|| DType::ALL.iter().map(|&d| Program::new("convert", |[x], []| [x.cast(d)])).collect());
    let program = if from.dtype == to.dtype { &SAME } else { &CASTS[to.dtype as usize] };
    launch(cuda, program, &[InputSource::View(*from)], &[], &[Target { to, add }])
}

/// Stores one value everywhere, or adds it everywhere.
pub(crate) fn fill(cuda: &Cuda, to: Operand, value: Scalar, add: bool) -> Result<()> {
    static FILL: LazyLock<Program> = LazyLock::new(|| Program::new("fill", |[], [value]| [value]));
    launch(cuda, &FILL, &[], &[value], &[Target { to, add }])
}

/// A launch: its operands on common axes. Inputs come first, then outputs, then positions.
struct PointwiseCall<'a> {
    program: &'a Program,
    ins: &'a [InputSource],
    outs: &'a [Target],
    axes: LoopAxes,
    lanes: usize,
}

impl<'a> PointwiseCall<'a> {
    fn new(program: &'a Program, ins: &'a [InputSource], outs: &'a [Target]) -> PointwiseCall<'a> {
        let shape = *outs[0].to.layout.shape();
        let operand = |source: &InputSource| match source {
            InputSource::View(x) => *x,
            InputSource::Own(k) => outs[*k].to,
        };
        let operands = ins.iter().map(operand).chain(outs.iter().map(|o| o.to));
        let (mut steps, mut places): (SmallVec<[Steps; 8]>, SmallVec<[Option<MemoryRef>; 8]>) =
            operands.map(|o| (o.steps(), Some(o.place()))).unzip();
        steps.push(positions(&shape));
        places.push(None);
        let order = by_steps(shape.rank(), &outs[0].to.steps());
        // Positions that are not read must not prevent merging axes.
        let used = if is_positional(program) { steps.len() } else { steps.len() - 1 };
        let mut axes = LoopAxes::of(shape.dims(), &steps[..used], order);
        axes.steps.resize(steps.len(), [0; MAX_RANK]);
        let lanes = axes.lanes(&places);
        PointwiseCall { program, ins, outs, axes, lanes }
    }

    fn loops(&self) -> Loops {
        Loops { rank: self.axes.rank(), wide: self.axes.is_wide() }
    }

    fn dtypes(&self) -> SmallVec<[DType; 8]> {
        let dtype = |source: &InputSource| match source {
            InputSource::View(x) => x.dtype,
            InputSource::Own(k) => self.outs[*k].to.dtype,
        };
        self.ins.iter().map(dtype).collect()
    }

    fn asked(&self) -> SmallVec<[Option<DType>; 4]> {
        self.outs.iter().map(|o| Some(o.to.dtype)).collect()
    }

    fn form(&self) -> PointwiseSpec {
        let inner = |j: usize| self.axes.inner(j, self.lanes);
        let input = |(j, (source, dtype)): (usize, (&InputSource, DType))| KernelInput {
            dtype,
            inner: inner(j),
            own: if let InputSource::Own(k) = source { Some(*k as u16) } else { None },
        };
        let outputs = self.outs.iter().enumerate();
        PointwiseSpec {
            ins: self.ins.iter().zip(self.dtypes()).enumerate().map(input).collect(),
            outs: outputs
                .map(|(k, o)| KernelOutput { dtype: o.to.dtype, inner: inner(self.ins.len() + k), add: o.add })
                .collect(),
            loops: self.loops(),
            lanes: self.lanes,
        }
    }

    /// The arguments in the order of the kernel's parameters.
    fn args(&self, cuda: &Cuda, kernel: &Generated, typed: &Typed, scalars: &[Scalar]) -> Result<KernelArgs> {
        let wide = self.loops().wide;
        let sizes = self.axes.units(self.lanes);
        let mut args = KernelArgs::default();
        args.count(sizes.iter().product(), wide);
        args.count(self.axes.count(), wide);
        args.axes(&sizes, wide);
        for i in reads(self.program, self.ins.len()) {
            if let InputSource::View(x) = &self.ins[i] {
                args.push(x.address);
                args.steps(&self.axes.unit_steps(i, self.lanes), wide);
            }
        }
        for (k, out) in self.outs.iter().enumerate() {
            args.push(out.to.address);
            args.steps(&self.axes.unit_steps(self.ins.len() + k, self.lanes), wide);
        }
        if kernel.body.positional {
            args.steps(&self.axes.unit_steps(self.ins.len() + self.outs.len(), self.lanes), wide);
        }
        values(&mut args, cuda, self.program, kernel, typed, scalars)?;
        Ok(args)
    }
}

/// Appends values that are equal for all elements, then keys of random bits.
pub(crate) fn values(
    args: &mut KernelArgs,
    cuda: &Cuda,
    program: &Program,
    kernel: &Generated,
    typed: &Typed,
    scalars: &[Scalar],
) -> Result<()> {
    if !kernel.body.values.is_empty() {
        let numbers = program.launch_numbers(typed, scalars);
        numbers.into_iter().zip(&kernel.body.values).for_each(|(value, dtype)| args.number(value, *dtype));
    }
    for &k in &kernel.body.seeds {
        let key = scalars[k as usize].to_i64() as u64;
        args.push(key);
        args.push(cuda.queue.stored_key(program.name(), key)?);
    }
    Ok(())
}

/// Tells whether a program reads the position of its elements.
pub(crate) fn is_positional(program: &Program) -> bool {
    use numcore::pointwise::Inst;
    program.insts().iter().any(|i| matches!(i, Inst::Index | Inst::Random { .. }))
}

/// The strides of row-major positions.
pub(crate) fn positions(shape: &Shape) -> Steps {
    let mut steps = [0; MAX_RANK];
    steps.iter_mut().zip(Layout::contiguous(*shape).strides()).for_each(|(to, s)| *to = *s);
    steps
}

/// The source of the kernel that a launch would run.
#[cfg(all(test, feature = "nvrtc-tests"))]
pub(crate) fn source_of(
    program: &Program,
    ins: &[InputSource],
    outs: &[Target],
) -> Result<crate::codegen::KernelSource> {
    let call = PointwiseCall::new(program, ins, outs);
    let typed = program.resolve(&call.dtypes(), &call.asked())?;
    Ok(crate::codegen::pointwise::source(program, &typed, &call.form())?.0)
}

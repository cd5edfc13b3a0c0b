//! The kernels of the folder `kernels`. A kernel is a file, an entry function in it, and the values of its defines.

use std::{
    fmt::{self, Write},
    sync::Arc,
};

use bytemuck::{NoUninit, Zeroable};
use numcore::{DType, Result};
use smallvec::SmallVec;

use crate::{
    Cuda,
    axes::LoopAxes,
    codegen::{KernelSource, scores::ScoreSpec},
    driver::KernelArgs,
    driver::{Grid, KernelFunction},
};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The text of every file, by name.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../kernels/", $name)))),*];
    };
}
files!(
    "common.cuh",
    "device.cuh",
    "tile.cuh",
    "window.cuh",
    "arg_reduce.cu",
    "attention.cu",
    "attention_grad.cu",
    "conv.cu",
    "cross_entropy.cu",
    "depthwise.cu",
    "gather.cu",
    "linear4bit.cu",
    "norm.cu",
    "radix.cu",
    "scan.cu",
    "scatter_add.cu",
    "softmax.cu",
    "sort.cu",
);

/// The value of a define.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DefineValue {
    Name(&'static str),
    Number(usize),
}

impl fmt::Display for DefineValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DefineValue::Name(name) => f.write_str(name),
            DefineValue::Number(n) => write!(f, "{n}"),
        }
    }
}

impl From<&'static str> for DefineValue {
    fn from(name: &'static str) -> DefineValue {
        DefineValue::Name(name)
    }
}

impl From<usize> for DefineValue {
    fn from(n: usize) -> DefineValue {
        DefineValue::Number(n)
    }
}

impl From<bool> for DefineValue {
    fn from(on: bool) -> DefineValue {
        DefineValue::Number(usize::from(on))
    }
}

/// A hand-written kernel: its file, its function, and the values of its defines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HandwrittenKernel {
    file: &'static str,
    entry: &'static str,
    defines: SmallVec<[(&'static str, DefineValue); 5]>,
    /// Bytes of dynamic shared memory it is launched with.
    shared: u32,
    /// The programs that it calls for each score.
    scores: Option<Arc<ScoreSpec>>,
}

impl HandwrittenKernel {
    pub(crate) fn new(
        file: &'static str,
        entry: &'static str,
        defines: &[(&'static str, DefineValue)],
    ) -> HandwrittenKernel {
        HandwrittenKernel { file, entry, defines: defines.into(), shared: 0, scores: None }
    }

    /// The file, the entry function and the defines, in one line.
    pub(crate) fn describe(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!(" {name}={value}")).collect::<String>();
        format!("{} {}{defines}", self.file, self.entry)
    }

    /// Sets `bytes` of dynamic shared memory.
    pub(crate) fn with_shared(self, bytes: usize) -> HandwrittenKernel {
        HandwrittenKernel { shared: bytes as u32, ..self }
    }

    /// Sets the programs that it calls for each score.
    pub(crate) fn with_scores(self, scores: Option<Arc<ScoreSpec>>) -> HandwrittenKernel {
        HandwrittenKernel { scores, ..self }
    }

    /// The source of this kernel: defines, programs, then the file with its includes inlined.
    pub(crate) fn source(&self) -> Result<KernelSource> {
        let mut text = self.scores.as_ref().map_or(Ok(String::new()), |scores| scores.text())?;
        for (name, value) in &self.defines {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "#define {name} {value}");
        }
        include(&mut text, self.file);
        Ok(KernelSource { text, entry: self.entry.into(), contracts: self.scores.is_none() })
    }
}

fn include(text: &mut String, file: &str) {
    let found = FILES.iter().find(|(name, _)| *name == file).map_or("", |(_, text)| text);
    for line in found.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(other) => include(text, other),
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

/// The C name of a type, for a kernel's define `T`.
pub(crate) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::I64 => "i64",
        DType::U32 => "u32",
        // 8-bit floats are refused where memory is allocated.
        DType::U8 | DType::F8E4M3 | DType::F8E5M2 => "u8",
        DType::Bool => "b8",
    }
}

/// The kernels' `struct Strided`: the layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, NoUninit, Zeroable)]
#[repr(C)]
pub(crate) struct Strided {
    stride: [i64; 8],
    size: [i32; 8],
    rank: i32,
    padding: i32,
}

// The size that `common.cuh` asserts too.
const _: () = assert!(size_of::<Strided>() == 104);

impl Strided {
    /// The layout of `operand` on the axes of a launch.
    pub(crate) fn of(axes: &LoopAxes, operand: usize) -> Strided {
        let mut strided = Strided { rank: axes.rank() as i32, ..Strided::zeroed() };
        for (d, &size) in axes.sizes.iter().enumerate() {
            strided.size[d] = size as i32;
            strided.stride[d] = axes.steps[operand][d] as i64;
        }
        strided
    }
}

/// A launch whose arguments are being collected.
pub(crate) struct KernelLaunch<'a> {
    cuda: &'a Cuda,
    op: &'static str,
    entry: &'static str,
    function: KernelFunction,
    shared: u32,
    args: KernelArgs,
}

impl<'a> KernelLaunch<'a> {
    /// Begins a launch of `kernel`, which is compiled now if it is new.
    pub(crate) fn new(cuda: &'a Cuda, op: &'static str, kernel: &HandwrittenKernel) -> Result<KernelLaunch<'a>> {
        let function = cuda.queue.engine.written(kernel, kernel.shared)?;
        Ok(KernelLaunch { cuda, op, entry: kernel.entry, function, shared: kernel.shared, args: KernelArgs::default() })
    }

    /// Appends an argument.
    pub(crate) fn arg<T: NoUninit>(mut self, value: T) -> Self {
        self.args.push(value);
        self
    }

    /// Appends the values of a structure.
    pub(crate) fn structure(mut self, fields: &KernelArgs) -> Self {
        self.args.structure(fields);
        self
    }

    /// Appends the address of the word in which the kernel reports an index out of range; the queue will read it.
    pub(crate) fn flag(mut self) -> Self {
        self.args.push(self.cuda.queue.flag);
        self.args.reports = true;
        self
    }

    /// Queues the kernel.
    ///
    /// # Safety
    /// The arguments match the parameters of the kernel's source, and the memory they point to is as it requires.
    pub(crate) unsafe fn run(mut self, blocks: [usize; 3], threads: [u32; 2]) -> Result<()> {
        let grid = Grid { blocks, threads, shared: self.shared };
        // SAFETY: the caller's promise.
        unsafe { self.cuda.queue.launch(self.op, self.entry, self.function, grid, &mut self.args) }
    }
}

/// The number of blocks of 256 threads for `elements` elements: at most 32 per multiprocessor, so a thread may take
/// several.
pub(crate) fn blocks(cuda: &Cuda, elements: usize) -> [usize; 3] {
    let most = cuda.queue.engine.capabilities.parallelism.max(1) * 32;
    [elements.div_ceil(256).clamp(1, most), 1, 1]
}

//! [`Cpu`]: the CPU as a runtime.
//!
//! Execution is synchronous: work is finished when a method returns. A queue is only a memory pool, events are no-ops,
//! and forks share the worker threads. Pointwise programs run in an interpreter over blocks that stay in L1
//! (`pointwise`). Reductions map through it (`reduce`). Matrix products are a packed, tiled GEMM (`gemm`).
//!
//! **Invariant**: results depend neither on the number of threads nor on the instruction set, with one exception. The
//! last bits of matrix products differ where the CPU has instructions for bf16: of bf16 products, and with AMX of `f32`
//! products (`gemm::amx`). Wherever the order of additions matters, the partition into tasks depends only on the sizes
//! of the problem.
//!
//! ```
//! use numcore::{Tensor, ops::PointwiseOps};
//! use runtime_cpu::Cpu;
//!
//! let cpu = Cpu::new();
//! let x = Tensor::from_slice(&cpu, [3], &[1f32, 2.0, 3.0])?;
//! assert_eq!(x.add(&x)?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok::<(), numcore::Error>(())
//! ```
#![warn(unreachable_pub)]

mod arg_reduce;
mod clock;
mod element;
mod fused;
mod gemm;
mod index;
mod machine;
mod math;
mod memory;
mod operand;
mod pointwise;
mod reduce;
mod runtime;
mod scan;
mod simd;
mod sort;
mod threads;
mod walk;

use std::{fmt, ops::Range, sync::Arc};

use numcore::{Capabilities, DType, MemoryCategory, Result};

pub use memory::CpuBuffer;
pub use simd::Simd;

use memory::Memory;
use threads::Threads;

/// A handle of the CPU runtime, cheap to clone. Clones share one queue with its memory pool and memory statistics.
#[derive(Clone)]
pub struct Cpu {
    pub(crate) queue: Arc<Queue>,
    use_: MemoryCategory,
}

/// The state that clones of a handle share.
pub(crate) struct Queue {
    pub(crate) memory: Arc<Memory>,
    pub(crate) engine: Arc<Engine>,
}

/// The state that clones and forks of a handle share.
pub(crate) struct Engine {
    pub(crate) threads: Threads,
    pub(crate) simd: Simd,
    pub(crate) kernels: pointwise::Cache,
    pub(crate) capabilities: Capabilities,
}

impl Cpu {
    /// A CPU runtime with as many threads as the process may use at once, and the highest instruction set available.
    pub fn new() -> Cpu {
        Self::builder().build()
    }

    /// A CPU runtime with `threads` threads, the calling one included, and the highest instruction set available.
    pub fn with_threads(threads: usize) -> Cpu {
        Self::builder().threads(threads).build()
    }

    /// A builder for a non-default number of threads or instruction set.
    pub fn builder() -> Builder {
        Builder { threads: None, simd: Simd::best() }
    }

    /// The number of threads that share a kernel, the calling one included.
    pub fn threads(&self) -> usize {
        self.queue.engine.threads.count()
    }

    /// The instruction set for which kernels are compiled.
    pub fn simd(&self) -> Simd {
        self.queue.engine.simd
    }

    fn on(engine: Arc<Engine>) -> Cpu {
        Cpu { queue: Arc::new(Queue { memory: Memory::new(), engine }), use_: MemoryCategory::Activations }
    }

    /// Allocates scratch memory for a kernel's intermediate results.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<CpuBuffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({} threads, {}, {:?})", self.threads(), self.simd().name(), self.use_)
    }
}

/// The options of a [`Cpu`]: `Cpu::builder().threads(2).simd(Simd::Avx2).build()`.
#[derive(Clone, Debug)]
pub struct Builder {
    threads: Option<usize>,
    simd: Simd,
}

impl Builder {
    /// Sets the number of threads that share a kernel, the calling one included; 0 counts as 1.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets the instruction set, for tests and measurements. [`Simd::Avx512`] or less gives equal bits on CPUs with AMX
    /// and without, at 0.6 times the speed of `f32` GEMM. A level that is not available is replaced by the highest that
    /// is.
    pub fn simd(mut self, simd: Simd) -> Self {
        self.simd = if simd.is_available() { simd } else { Simd::best() };
        self
    }

    /// Builds the handle and starts its worker threads.
    pub fn build(self) -> Cpu {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads::new(self.threads.unwrap_or_else(available).max(1));
        let capabilities = Capabilities {
            name: format!("{} ({})", model(), self.simd.name()),
            storage: DType::ALL.to_vec(),
            compute: DType::ALL.iter().copied().filter(|d| d.compute() == *d).collect(),
            parallelism: threads.count(),
            max_binding: isize::MAX as usize,
            // Half of it costs time where matrices are multiplied fastest.
            piece: 128 << 20,
        };
        Cpu::on(Arc::new(Engine { threads, simd: self.simd, kernels: Default::default(), capabilities }))
    }
}

impl Engine {
    /// Divides `0..len` into ranges of `grain` and calls `body` with each, on any thread. The ranges do not depend on
    /// the number of threads.
    pub(crate) fn ranges(&self, len: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
        self.threads.run(len.div_ceil(grain), |i| body(i * grain..len.min((i + 1) * grain)));
    }
}

/// The model name of the CPU, as the system reports it.
fn model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.trim().into())
}

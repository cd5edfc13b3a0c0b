//! The library, and the options of communicators over it.

use std::{fmt, sync::Arc};

use numcore::Result;

#[cfg(feature = "emulate")]
use super::emulated::BeginCall;
use super::{
    api::NcclApi,
    loaded::{LoadedNccl, version_text},
};

/// NVIDIA's library of collectives between GPUs, with the options of communicators over it.
///
/// ```no_run
/// use comm::{Collectives, Communicator, Ranks, ReduceOp};
/// use engine_nccl::Nccl;
/// # use numcore::{Result, Runtime, Shape, TensorMut, DType};
/// # fn gpu<R: Runtime>(index: usize) -> Result<R> { Err(numcore::Error::argument("gpu", format!("no GPU {index}"))) }
/// # fn main() -> Result<()> {
/// # type Cuda = numcore::NullRuntime;
/// # type Cpu = numcore::NullRuntime;
/// let nccl = Nccl::load()?;
/// // The control plane is threads of this process here; under `mpirun` it is a world of processes.
/// Ranks::new(4).run(|_| Ok(Cpu::new()), |control| {
///     let own: Cuda = gpu(control.rank())?;
///     let comm = nccl.communicator(&control, &own)?;
///     let x = TensorMut::zeros(&own, Shape::new(&[1 << 20])?, DType::F32)?;
///     comm.all_reduce(x, ReduceOp::Sum)?.wait()?;
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Nccl {
    pub(crate) api: Arc<dyn NcclApi>,
    pub(crate) native_sums: bool,
    pub(crate) chunk: usize,
}

/// The default number of bytes of a rank's part that are received from every other rank before they are combined.
const CHUNK: usize = 16 << 20;

impl Nccl {
    /// Opens the library: `libnccl.so.2`, or the file that the environment variable `WEFTGRAD_NCCL_LIBRARY` names.
    ///
    /// # Errors
    /// An error if the library is not found, or is older than NCCL 2.18. The message lists the names that were tried,
    /// and the messages of the system's loader.
    pub fn load() -> Result<Nccl> {
        Ok(Nccl::over(Arc::new(LoadedNccl::open()?)))
    }

    /// Emulates NCCL on the host, for tests of programs and of this engine: ranks are threads of this process, and
    /// memory is host memory. Mismatched calls never end, as in the library.
    #[cfg(feature = "emulate")]
    pub fn emulated() -> Nccl {
        Nccl::over(Arc::new(super::emulated::EmulatedNccl::default()))
    }

    /// Emulates NCCL on emulated GPUs, each rank on one of its own. `queue` queues a call on a stream: it gets the
    /// stream's handle, and each address of the call with true if it is written. The stream begins the call, and then
    /// asks whether it has ended. `queue` returns true if the call is captured, and none if there is no such stream.
    #[cfg(feature = "emulate")]
    pub fn emulated_on(
        queue: impl Fn(usize, &[(u64, bool)], Arc<BeginCall>) -> Option<bool> + Send + Sync + 'static,
    ) -> Nccl {
        Nccl::over(Arc::new(super::emulated::EmulatedNccl::on_streams(queue)))
    }

    /// Emulates NCCL on the host, and fails one operation after `operations` operations of all ranks together.
    #[cfg(feature = "emulate")]
    pub fn emulated_failing_after(operations: u64) -> Nccl {
        let api = super::emulated::EmulatedNccl::default();
        api.fail_after(operations);
        Nccl::over(Arc::new(api))
    }

    fn over(api: Arc<dyn NcclApi>) -> Nccl {
        Nccl { api, native_sums: false, chunk: CHUNK }
    }

    /// Sets whether NCCL computes sums. It takes less time, and its rings and trees need no scratch memory. But the
    /// order of additions then depends on the number of GPUs, their connections and the size of a tensor. So a sum
    /// depends on the way that gradients are divided into buckets. Off by default: the project's own kernels then add
    /// in the order of ranks, with the bits that threads give.
    pub fn native_sums(mut self, on: bool) -> Nccl {
        self.native_sums = on;
        self
    }

    /// Sets the bytes of a rank's part of a reduction that are received from every other rank before they are combined;
    /// 16 MiB by default. The scratch memory is at most this for every other rank. All ranks must set the same.
    pub fn chunk(mut self, bytes: usize) -> Nccl {
        self.chunk = bytes.max(1);
        self
    }

    /// The library's version.
    pub fn version(&self) -> String {
        version_text(self.api.version())
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({})", self.version())
    }
}

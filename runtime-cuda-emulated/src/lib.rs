//! An emulated NVIDIA GPU, for tests: [`Cuda`] over a driver that has no hardware.
//!
//! Kernels' sources are compiled by NVRTC, and the host interprets the PTX ([`ptx`]), which checks every access. Other
//! drivers watch the order of accesses, or only list kernels and memory. Nothing is private to this crate: it
//! implements [`runtime_cuda::driver::Driver`].
#![warn(unreachable_pub)]

mod access_order;
mod candidates;
mod captures;
mod foreign;
mod gpu;
mod listing;
mod live;
mod memory;
mod order_state;
mod ordered;
mod parallel;
mod parameters;
mod perform;
mod product;
mod refusal;
mod streams;
mod tracked_block;
mod tracked_memory;
mod vector_clock;

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use numcore::{DeviceId, DeviceKind, ErrorKind, Result};
use runtime_cuda::{
    Cuda,
    driver::{Architecture, Compiler, DriverFailure},
};

pub use access_order::AccessOrder;
pub use candidates::GemmCandidates;
pub use foreign::foreign_call;
pub use memory::EmulatedMemory;
pub use refusal::GemmRefusal;
pub use streams::{ForeignCall, ForeignProgress};

use gpu::Emulated;
use listing::Listing;
use ordered::Ordered;
use parallel::for_each;

/// A device index that no GPU has.
const EMULATED: DeviceId = DeviceId { kind: DeviceKind::Cuda, index: u32::MAX };

/// An emulated GPU: the host interprets the PTX that NVRTC gives for each kernel, which is cached in `folder`. It is
/// slow, checks every access ([`ptx`](::ptx#checks)), and is exact enough to test everything but the hardware.
pub fn open(folder: impl AsRef<Path>) -> Result<Cuda> {
    Cuda::shared(EMULATED, || Ok(whole(Emulated::new(folder.as_ref()))))
}

/// Compiles the kernels that `work` launches, for [`open`] in the same `folder`, on all processors. Nothing is
/// computed: `work` reads zeros, and its failures are ignored.
pub fn compile_for(folder: impl AsRef<Path>, work: impl FnOnce(&Cuda)) -> Result<()> {
    let listing = Arc::new(Listing::new());
    work(&Cuda::apart(EMULATED, listing.clone())?);
    let compiler = gpu::compiler(folder.as_ref());
    for_each(&listing.take_distinct(), |source| compiler.ptx(source).map(drop)).map_err(|e| failed("compile_for", e))
}

/// Compiles the kernels that `work` launches into the [folder](runtime_cuda#kernels-on-disk) of compiled kernels, and
/// returns the number of sources: kernels of one file share it. GPUs that find their kernels in this folder need no
/// compiler.
///
/// The GPUs have compute capability `capability` (90 is 9.0), and `driver` is their driver's major version of CUDA. The
/// call needs NVRTC and no GPU, and uses all processors. Nothing is computed: `work` reads zeros, and its failures are
/// ignored.
///
/// # Errors
/// No folder is known, NVRTC is missing or newer than the driver, or kernels do not compile; the other kernels are
/// compiled and kept.
pub fn precompile(capability: u32, driver: u32, work: impl FnOnce(&Cuda)) -> Result<usize> {
    let error = |e| failed("precompile", e);
    let Some(folder) = Compiler::cache_folder() else {
        return Err(error(DriverFailure::new("neither XDG_CACHE_HOME nor HOME says where kernels are kept")));
    };
    let listing = Arc::new(Listing::new());
    work(&Cuda::apart(EMULATED, listing.clone())?);
    let compiler = Compiler::new(Architecture(capability), Some(driver as i32), Some(folder));
    let sources = listing.take_distinct();
    let compiled = for_each(&sources, |source| compiler.compile(source).map(drop));
    compiled.map(|()| sources.len()).map_err(error)
}

/// An emulated GPU, separate from that of [`open`], and a race detector. The detector reports memory accesses that
/// streams and events do not order.
pub fn watched(folder: impl AsRef<Path>) -> Result<(Cuda, AccessOrder)> {
    let ordered = Arc::new(Ordered::new(Emulated::new(folder.as_ref())));
    ordered.inner.belongs_to(Arc::<Ordered>::downgrade(&ordered));
    let order = AccessOrder::of(&ordered);
    Ok((Cuda::apart(EMULATED, ordered)?, order))
}

/// An emulated GPU, separate from that of [`open`], in whose kernels' sources the text `from` is replaced by `to`; and
/// the number of modules loaded so far that had it. It shows which faults of a kernel are found.
pub fn altered(folder: impl AsRef<Path>, from: &str, to: &str) -> Result<(Cuda, impl Fn() -> u64)> {
    let (emulated, altered) = Emulated::new(folder.as_ref()).altering(from, to);
    Ok((Cuda::apart(EMULATED, whole(emulated))?, move || altered.load(Ordering::Relaxed)))
}

/// An emulated GPU with `bytes` bytes of memory that computes nothing; all reads yield zeros. It shows quickly how much
/// memory a step of any size needs.
pub fn unexecuted(bytes: usize) -> Result<(Cuda, EmulatedMemory)> {
    let driver = Arc::new(Listing::of(bytes));
    let memory = driver.device_memory().clone();
    Ok((Cuda::apart(EMULATED, driver)?, memory))
}

/// A driver of an emulated GPU alone.
fn whole(emulated: Emulated) -> Arc<Emulated> {
    let driver = Arc::new(emulated);
    driver.belongs_to(Arc::<Emulated>::downgrade(&driver));
    driver
}

fn failed(op: &'static str, failure: DriverFailure) -> numcore::Error {
    ErrorKind::Backend { op, device: EMULATED, message: failure.message }.into()
}

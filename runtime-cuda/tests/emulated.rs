//! The suite on the emulator: everything but the hardware.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use conformance::sections;
use numcore::Runtime;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));
static CUDA: LazyLock<Cuda> = LazyLock::new(|| emulated_gpu::open(&*FOLDER).unwrap_or_else(|e| panic!("{e}")));

/// Where values are wrong, as they are while kernels are listed, it looks for smaller programs that fail, and would
/// list all of those.
const SHRINKS: &str = "programs";

fn section(name: &str) {
    let (_, run) = *sections::<Cuda>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    if name != SHRINKS {
        emulated_gpu::compile_for(&*FOLDER, |listing| drop(run(listing))).unwrap_or_else(|e| panic!("{e}"));
    }
    // A new queue, since an index out of range is reported to the next reader.
    let section = run(&CUDA.fork().unwrap_or_else(|e| panic!("{e}")));
    assert!(section.checks > 0 && section.skipped.is_empty(), "{:?}", section.skipped);
    let lines = section.failures.join("\n  ");
    assert!(section.failures.is_empty(), "{} of {} failed:\n  {lines}", section.failures.len(), section.checks);
}

#[test]
fn the_documentation_says_what_it_can_do() {
    conformance::documented(&*CUDA);
}

#[cfg(feature = "emulate-all")]
conformance::section_tests!(section);

// The others need hundreds of kernels each, or the host's own arithmetic in an unoptimised program.
#[cfg(not(feature = "emulate-all"))]
conformance::section_tests! {
    section:
    fused_kernels "fused kernels",
    values "values",
    handle "handle",
    exactness "exactness",
    empty_tensors "empty tensors",
    errors "errors",
}

//! The suite on the emulator: everything but the hardware.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use conformance::sections;
use numcore::Runtime;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));
static CUDA: LazyLock<Cuda> = LazyLock::new(|| Cuda::emulated(&*FOLDER).unwrap_or_else(|e| panic!("{e}")));

/// Where values are wrong, as they are while kernels are listed, it looks for smaller programs that fail, and would list all of those.
const SHRINKS: &str = "programs";

fn section(name: &str) {
    let (_, run) = *sections::<Cuda>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    if name != SHRINKS {
        Cuda::compile_for(&*FOLDER, |listing| drop(run(listing))).unwrap_or_else(|e| panic!("{e}"));
    }
    // A queue of its own: an index out of range is told to whoever reads next.
    let section = run(&CUDA.fork().unwrap_or_else(|e| panic!("{e}")));
    assert!(section.checks > 0 && section.skipped.is_empty(), "{:?}", section.skipped);
    let lines = section.failures.join("\n  ");
    assert!(section.failures.is_empty(), "{} of {} failed:\n  {lines}", section.failures.len(), section.checks);
}

macro_rules! tests {
    (quick { $($quick:ident $a:literal;)* } long { $($long:ident $b:literal;)* }) => {
        $(#[test] fn $quick() { section($a); })*
        // Hundreds of kernels each, or the host's own arithmetic in an unoptimised program.
        $(#[cfg(feature = "emulate-all")] #[test] fn $long() { section($b); })*

        #[test]
        fn no_section_is_left_out() {
            let mut names: Vec<&str> = sections::<Cuda>().iter().map(|(n, _)| *n).collect();
            let mut known = vec![$($a,)* $($b,)*];
            names.sort();
            known.sort();
            assert_eq!(names, known);
        }
    };
}

tests! {
quick {
    fused_kernels "fused kernels";
    values "values";
    handle "handle";
    exactness "exactness";
    empty_tensors "empty tensors";
    errors "errors";
}
long {
    sizes "sizes";
    reference_values "references";
    gradients "gradients";
    second_derivatives "second derivatives";
    views "views";
    accumulation_in_slots "slots";
    narrow_types "narrow types";
    random_geometry "geometry";
    chains_of_views "chains";
    random_programs "programs";
}
}

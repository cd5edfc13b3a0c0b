//! The suite on the emulator: everything but the hardware.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use conformance::sections;
use runtime_cuda::Cuda;

static CUDA: LazyLock<Cuda> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    Cuda::emulated(folder).unwrap_or_else(|e| panic!("{e}"))
});

fn section(name: &str) {
    let (_, run) = *sections::<Cuda>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    let section = run(&CUDA);
    assert!(section.checks > 0 && section.skipped.is_empty(), "{:?}", section.skipped);
    let lines = section.failures.join("\n  ");
    assert!(section.failures.is_empty(), "{} of {} failed:\n  {lines}", section.failures.len(), section.checks);
}

macro_rules! tests {
    ($($test:ident $section:literal;)*) => {
        $(#[test] fn $test() { section($section); })*

        #[test]
        fn no_section_is_left_out() {
            let names: Vec<&str> = sections::<Cuda>().iter().map(|(n, _)| *n).collect();
            assert_eq!(names, [$($section,)*]);
        }
    };
}

tests! {
    reference_values "references";
    gradients "gradients";
    second_derivatives "second derivatives";
    views "views";
    accumulation_in_slots "slots";
    narrow_types "narrow types";
    fused_kernels "fused kernels";
    sizes "sizes";
    random_geometry "geometry";
    chains_of_views "chains";
    values "values";
    handle "handle";
    random_programs "programs";
    exactness "exactness";
    empty_tensors "empty tensors";
    errors "errors";
}

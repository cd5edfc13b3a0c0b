//! The suite on the processor.

use conformance::{Section, determinism, sections};
use runtime_cpu::Cpu;

/// Runs one section with one thread and with two.
fn section(name: &str) {
    let (_, run) = *sections::<Cpu>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    for threads in [1, 2] {
        check(run(&Cpu::with_threads(threads)), threads);
    }
}

fn check(section: Section, threads: usize) {
    assert!(section.checks > 0, "{} ran {} checks", section.name, section.checks);
    assert!(section.skipped.is_empty(), "{:?}", section.skipped);
    let lines = section.failures.join("\n  ");
    assert!(
        section.failures.is_empty(),
        "{} of {} checks failed with {threads} threads:\n  {lines}",
        section.failures.len(),
        section.checks
    );
}

macro_rules! tests {
    ($($test:ident $section:literal;)*) => {
        $(#[test] fn $test() { section($section); })*

        #[test]
        fn no_section_is_left_out() {
            let names: Vec<&str> = sections::<Cpu>().iter().map(|(n, _)| *n).collect();
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

#[test]
fn threads_do_not_change_a_bit() {
    check(determinism(Cpu::with_threads), 3);
}

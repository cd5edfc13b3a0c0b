//! The suite on the CPU.

use conformance::{Section, determinism, sections};
use runtime_cpu::Cpu;

/// Runs one section with two threads; another test compares the bits that one and three have.
fn section(name: &str) {
    let (_, run) = *sections::<Cpu>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    check(run(&Cpu::with_threads(2)), 2);
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

conformance::section_tests!(section);

#[test]
fn the_documentation_says_what_it_can_do() {
    conformance::documented(&Cpu::with_threads(1));
}

#[test]
fn threads_do_not_change_a_bit() {
    check(determinism(Cpu::with_threads), 3);
}

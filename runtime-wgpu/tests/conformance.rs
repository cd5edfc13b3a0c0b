//! The suite on a GPU, or on the software driver.

use std::sync::LazyLock;

use conformance::{Section, sections};
use numcore::Runtime;
use runtime_wgpu::Wgpu;

static DEVICE: LazyLock<Wgpu> = LazyLock::new(|| Wgpu::new(0).expect("an adapter"));

fn section(name: &str) {
    let (_, run) = *sections::<Wgpu>().iter().find(|(n, _)| *n == name).expect("a section of this name");
    // A new queue, since an index out of range is reported to the next reader.
    check(run(&DEVICE.fork().expect("a queue")));
}

fn check(section: Section) {
    assert!(section.checks + section.skipped.len() > 0, "{} ran nothing", section.name);
    println!("{}: {} checks, {} skipped", section.name, section.checks, section.skipped.len());
    let other: Vec<&String> = section.skipped.iter().filter(|s| !s.contains("is not in capabilities.")).collect();
    assert!(other.is_empty(), "skipped for another reason than the device's types: {other:?}");
    let lines = section.failures.join("\n  ");
    assert!(section.failures.is_empty(), "{} of {} checks failed:\n  {lines}", section.failures.len(), section.checks);
}

conformance::section_tests!(section);

#[test]
fn the_documentation_says_what_it_can_do() {
    conformance::documented(&*DEVICE);
}

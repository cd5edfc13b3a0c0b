//! Which instruction sets this CPU has: what `cargo xtask test isa` runs the suites with, one after another.

use runtime_cpu::{Cpu, Simd};

/// Prints a line for each level, `isa NAME yes` or `isa NAME no`.
#[test]
fn levels() {
    for level in Simd::ALL {
        println!("isa {} {}", level.name(), if level.is_supported() { "yes" } else { "no" });
    }
}

#[test]
fn a_runtime_uses_no_more_than_it_may() {
    assert_eq!(Cpu::new().simd(), Simd::best());
    for level in Simd::ALL {
        let used = Cpu::builder().threads(1).simd(level).build().simd();
        assert_eq!(used, if level.is_available() { level } else { Simd::best() });
    }
}

//! Calls with operands, memory, gradients, closures and integers that do not fit. Each ends in an error or in the right
//! result, never in a panic, and never reads or writes other memory. Operands are surrounded by NaN, memory by guards.
//! Run under AddressSanitizer or Valgrind, it also finds accesses that change no value.

mod calls;
mod draw;
mod numbers;
mod tape;

use numcore::{DeviceKind, Runtime};

use super::report::Section;
use draw::Draw;

/// The number of calls of each kind on runtimes whose kernels need no compiler at run time. In half of the op calls one
/// or two operands are changed, missing or added.
const CALLS: u64 = 1500;

/// The number of calls on other runtimes, where most calls compile a new kernel. The tested property, that no kernel is
/// reached, does not depend on the runtime.
const COMPILED_CALLS: u64 = 100;

pub(crate) fn misuse<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("misuse");
    let calls = match rt.device().kind {
        DeviceKind::Cpu | DeviceKind::Null => CALLS,
        DeviceKind::Cuda | DeviceKind::Wgpu => COMPILED_CALLS,
    };
    for seed in 0..calls {
        section.check(format!("op call {seed}"), || calls::op_call(rt, &mut Draw::new(rt, seed, 0)));
        section.check(format!("program {seed}"), || calls::program(rt, &mut Draw::new(rt, seed, 1)));
        section.check(format!("tape {seed}"), || tape::tape(rt, &mut Draw::new(rt, seed, 2)));
        section.check(format!("numbers {seed}"), || numbers::numbers(rt, &mut Draw::new(rt, seed, 3)));
    }
    section
}

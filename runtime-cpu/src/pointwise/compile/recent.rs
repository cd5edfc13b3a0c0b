//! A thread-local cache of the kernels launched last. It takes no lock and counts no references, either of which takes
//! as long as a launch over a few elements.

use std::{cell::RefCell, sync::Arc};

use numcore::{Accumulate, Out, ProgramOperand, Result, pointwise::Program};

use super::Kernel;
use crate::{Cpu, Engine, Simd, pointwise::form};

/// Slots of the cache, which is direct-mapped.
const SLOTS: usize = 64;
/// The largest number of operands of a launch that is cached: their types fit one word.
const OPERANDS: usize = 10;

struct RecentKernel {
    /// The program, kept alive so that its address identifies it.
    program: Program,
    simd: Simd,
    code: u64,
    kernel: Arc<Kernel>,
}

thread_local! {
    static RECENT: RefCell<[Option<RecentKernel>; SLOTS]> = const { RefCell::new([const { None }; SLOTS]) };
}

/// Calls `launch` with the kernel of `program` for these operands.
pub(in crate::pointwise) fn with_kernel<T>(
    engine: &Engine,
    program: &Program,
    ins: &[ProgramOperand<'_, Cpu>],
    outs: &[Out<'_, Cpu>],
    launch: impl FnOnce(&Kernel) -> T,
) -> Result<T> {
    let find = || engine.kernels.get(program, &form(ins, outs), engine.simd);
    let Some(code) = code(ins, outs) else { return Ok(launch(&*find()?)) };
    let (address, simd) = (program.ptr_id(), engine.simd);
    let slot = (address >> 4 ^ code as usize).wrapping_mul(0x9e37_79b9) >> 8 & (SLOTS - 1);
    RECENT.with(|recent| {
        if let Ok(recent) = recent.try_borrow()
            && let Some(entry) = &recent[slot]
            && (entry.program.ptr_id(), entry.code, entry.simd) == (address, code, simd)
        {
            return Ok(launch(&entry.kernel));
        }
        let kernel = find()?;
        if let Ok(mut recent) = recent.try_borrow_mut() {
            recent[slot] = Some(RecentKernel { program: program.clone(), simd, code, kernel: kernel.clone() });
        }
        Ok(launch(&kernel))
    })
}

/// The form of a launch as one word; `None` if it does not fit.
fn code(ins: &[ProgramOperand<'_, Cpu>], outs: &[Out<'_, Cpu>]) -> Option<u64> {
    if ins.len() + outs.len() > OPERANDS {
        return None;
    }
    let mut code = 1;
    for operand in ins {
        let ProgramOperand::View(view) = operand else { return None };
        code = code << 6 | view.dtype() as u64;
    }
    for out in outs {
        code = code << 6 | 16 << u64::from(out.how == Accumulate::Add) | out.view.dtype() as u64;
    }
    Some(code)
}

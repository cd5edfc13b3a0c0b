//! A thread's blocks: registers, immediates and staged tiles, and the addresses of all slots of a kernel.

use std::cell::RefCell;

use smallvec::SmallVec;

use super::stage;
use crate::pointwise::compile::{Kernel, Slot};

/// Bytes of L1 that blocks may take.
const L1: usize = 16 << 10;
/// Elements of a block, at least and at most.
const BLOCK: (usize, usize) = (256, 4096);

/// Sixty-four bytes, the unit of scratch memory, so that blocks are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

thread_local! {
    /// The scratch blocks of this thread. They stay allocated, so that a launch allocates nothing.
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Elements of a block, for a kernel that stages operands of `staged` bytes per element.
pub(in crate::pointwise) fn block(kernel: &Kernel, staged: usize) -> usize {
    let blocks = if kernel.compiled.is_some() { 0 } else { kernel.slots.registers + kernel.slots.immediates };
    let bytes = blocks as usize * kernel.width + staged;
    let (least, most) = BLOCK;
    (L1 / bytes.max(1)).clamp(least, most) / least * least
}

/// Addresses of a kernel's slots, and of staged blocks.
pub(in crate::pointwise) struct Blocks {
    pub slots: SmallVec<[*mut u8; 24]>,
    staged: *mut u8,
    stride: usize,
}

impl Blocks {
    /// The address of a staged block.
    pub(in crate::pointwise) fn staged(&self, n: u16) -> *mut u8 {
        self.staged.wrapping_add(n as usize * self.stride)
    }

    /// Runs every step on `n` elements.
    ///
    /// # Safety
    /// The slots of inputs and outputs name `n` elements of their types, aligned; nothing else writes the former or
    /// sees the latter meanwhile.
    #[inline(always)]
    pub(in crate::pointwise) unsafe fn run(&self, kernel: &Kernel, n: usize) {
        if let Some((simd, body)) = kernel.compiled {
            // SAFETY: the caller guarantees the slots of operands; `with_blocks` filled the immediates.
            return unsafe { body(simd, &self.slots, n) };
        }
        for step in &kernel.steps {
            let [a, b, c] = step.args.map(|s| self.slots[s as usize].cast_const());
            // SAFETY: the caller guarantees the slots of operands; lowering gave every step operands of its types, and
            // no destination that it reads.
            unsafe { (step.f)(self.slots[step.to as usize], a, b, c, n) };
        }
    }
}

/// Calls `body` with this thread's blocks, of `block` elements; immediates are filled.
pub(in crate::pointwise) fn with_blocks(
    launch: &super::exec::Common<'_>,
    block: usize,
    staged: usize,
    body: impl FnOnce(&mut Blocks),
) {
    let kernel = launch.kernel;
    let own = (kernel.slots.registers + kernel.slots.immediates) as usize;
    // Filled where it is: it is not moved, which costs as much as a launch over a few elements does elsewhere.
    let mut blocks = Blocks { slots: SmallVec::new(), staged: std::ptr::dangling_mut(), stride: 0 };
    blocks.slots.resize(kernel.slots.count(), std::ptr::dangling_mut());
    if own + staged == 0 {
        return body(&mut blocks);
    }
    LINES.with_borrow_mut(|lines| {
        // One line more, so that blocks do not map to the same sets of L1.
        let stride = (block * kernel.width.max(if staged > 0 { 8 } else { 1 })).next_multiple_of(64) + 64;
        let need = (own + staged) * stride / 64;
        if lines.len() < need {
            lines.resize(need, Line([0; 64]));
        }
        let start = lines.as_mut_ptr().cast::<u8>();
        blocks.slots.iter_mut().take(own).enumerate().for_each(|(i, s)| *s = start.wrapping_add(i * stride));
        let repeated = if kernel.compiled.is_some() { 1 } else { block };
        for (i, value) in launch.values.iter().enumerate() {
            let to = blocks.slots[kernel.slots.number(Slot::Immediate(i as u16)) as usize];
            // SAFETY: a block of this thread's scratch memory.
            unsafe { stage::splat(launch.simd, to, value, repeated) };
        }
        (blocks.staged, blocks.stride) = (start.wrapping_add(own * stride), stride);
        body(&mut blocks);
    });
}

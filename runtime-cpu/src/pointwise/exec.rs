//! Runs a kernel over the tiles of a plan: brings what does not lie in one run of memory into blocks, takes every step, and
//! spreads staged outputs out again.

use std::cell::RefCell;

use smallvec::SmallVec;

use super::{
    kernel::{Bits, Kernel, Slot},
    plan::{Moving, Place, Plan, Tile},
    stage,
};
use crate::{Engine, Simd};

/// Bytes of registers and staged blocks that should stay in the first cache.
const L1: usize = 16 << 10;
/// Elements of a block, at least and at most.
const BLOCK: (usize, usize) = (256, 4096);
/// Simple steps on one element, per task at least; and tasks at most.
const GRAIN: usize = 1 << 15;
const TASKS: usize = 128;

/// Sixty-four bytes: what scratch memory is made of, so that blocks are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

thread_local! {
    /// Registers and staged blocks of this thread; kept, so that a launch allocates nothing.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A kernel about to run: operands of the plan are its inputs, its outputs, and positions if it wants them.
pub(crate) struct Launch<'a> {
    kernel: &'a Kernel,
    plan: Plan,
    values: SmallVec<[Bits; 8]>,
    /// How each operand of the plan becomes a block.
    modes: SmallVec<[Mode; 6]>,
    block: usize,
    simd: Simd,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// Nothing reads it.
    Absent,
    /// A tile is one run of memory.
    Direct,
    /// A tile is brought into block `n` of the staged ones, or sent from there.
    Staged(u16),
}

impl<'a> Launch<'a> {
    /// Cuts `plan` into tiles that suit the kernel; a kernel that keeps its value gets whole rows or pieces of one.
    pub(crate) fn new(kernel: &'a Kernel, mut plan: Plan, values: SmallVec<[Bits; 8]>, simd: Simd) -> Self {
        let cut = if kernel.keeps { Plan::cut_lines } else { Plan::cut };
        let scratch = (kernel.slots.registers + kernel.slots.immediates) as usize * kernel.width;
        cut(&mut plan, block(scratch));
        let staged: usize = plan.operands.iter().filter(|o| !plan.flat(o)).map(|o| o.size.max(4)).sum();
        if staged > 0 {
            cut(&mut plan, block(scratch + staged));
        }
        let (inputs, outputs) = (kernel.slots.inputs as usize, kernel.slots.outputs as usize);
        let mut staged = 0;
        let mode = |(i, o): (usize, &Moving)| {
            let positions = i == inputs + outputs;
            let unread = i < inputs && (kernel.own[i].is_some() || kernel.unread >> i & 1 == 1);
            if unread || (kernel.keeps && i >= inputs && !positions) {
                return Mode::Absent;
            }
            if !positions && plan.flat(o) {
                return Mode::Direct;
            }
            staged += 1;
            Mode::Staged(staged - 1)
        };
        let modes = plan.operands.iter().enumerate().map(mode).collect();
        let block = plan.tile.rows * plan.tile.columns;
        Launch { kernel, plan, values, modes, block, simd }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Runs every tile, over as many threads as are worth it.
    ///
    /// # Safety
    /// Inputs and outputs lie in their buffers; nothing else writes the former or sees the latter meanwhile.
    pub(crate) unsafe fn run(&self, engine: &Engine) {
        let tiles = self.plan.tiles();
        let tasks = (tiles * self.block * self.kernel.weight / GRAIN).clamp(1, TASKS);
        engine.ranges(tiles, tiles.div_ceil(tasks), |part| {
            // SAFETY: the caller's promise; tasks share no tile.
            unsafe { self.tiles(part, |_, _| {}) }
        });
    }

    /// Runs some tiles on this thread and shows each with the address of the kernel's value.
    ///
    /// # Safety
    /// As for [`run`](Launch::run).
    #[inline(always)]
    pub(crate) unsafe fn tiles(&self, tiles: impl Iterator<Item = usize>, mut each: impl FnMut(&Place, *const u8)) {
        SCRATCH.with_borrow_mut(|lines| {
            let mut blocks = Blocks::new(self, lines);
            for tile in tiles {
                let place = self.plan.place(tile);
                // SAFETY: the caller's promise.
                unsafe { blocks.tile(&place) };
                each(&place, blocks.slots[self.kernel.value as usize]);
            }
        });
    }

    /// Bytes of a scratch block.
    fn stride(&self) -> usize {
        // One line more, so that blocks do not compete for the same sets of the cache.
        (self.block * self.kernel.width.max(8)).next_multiple_of(64) + 64
    }
}

/// Elements of a block when each needs this many bytes of scratch.
fn block(bytes: usize) -> usize {
    let (least, most) = BLOCK;
    (L1 / bytes.max(1)).clamp(least, most) / least * least
}

/// The blocks of one thread.
struct Blocks<'a> {
    launch: &'a Launch<'a>,
    slots: SmallVec<[*mut u8; 24]>,
    staged: *mut u8,
    /// For every operand, the address its staged block was brought from and how many rows; kept while it stays the same.
    held: SmallVec<[(*mut u8, Tile); 6]>,
}

impl<'a> Blocks<'a> {
    fn new(launch: &'a Launch<'a>, lines: &'a mut Vec<Line>) -> Self {
        let kernel = launch.kernel;
        let own = (kernel.slots.registers + kernel.slots.immediates) as usize;
        let staged = launch.modes.iter().filter(|m| matches!(m, Mode::Staged(_))).count();
        let stride = launch.stride();
        let need = (own + staged) * stride / 64;
        if lines.len() < need {
            lines.resize(need, Line([0; 64]));
        }
        let start = lines.as_mut_ptr().cast::<u8>();
        let mut slots: SmallVec<[*mut u8; 24]> = (0..own).map(|i| start.wrapping_add(i * stride)).collect();
        slots.resize(kernel.slots.count(), std::ptr::dangling_mut());
        for (i, value) in launch.values.iter().enumerate() {
            let to = slots[kernel.slots.number(Slot::Immediate(i as u16)) as usize];
            // SAFETY: a block of this thread's scratch memory.
            unsafe { stage::splat(launch.simd, to, value, launch.block) };
        }
        let nothing = (std::ptr::null_mut(), Tile { rows: 0, columns: 0 });
        let held = SmallVec::from_elem(nothing, launch.modes.len());
        Blocks { launch, slots, staged: start.wrapping_add(own * stride), held }
    }

    /// Takes every step on one tile.
    ///
    /// # Safety
    /// The tile lies in every operand; nothing else writes inputs or sees outputs meanwhile.
    unsafe fn tile(&mut self, place: &Place) {
        let n = place.size.rows * place.size.columns;
        // SAFETY: the caller's promise; a block holds a tile, and lowering gave every step operands of its types.
        unsafe {
            self.bring(place);
            for step in &self.launch.kernel.steps {
                let [a, b, c] = step.args.map(|s| self.slots[s as usize].cast_const());
                (step.f)(self.slots[step.to as usize], a, b, c, n);
            }
            self.send(place);
        }
    }

    /// Points the slots of all operands at the elements of a tile, staging those that do not lie in one run.
    ///
    /// # Safety
    /// The tile lies in every operand.
    unsafe fn bring(&mut self, place: &Place) {
        let Launch { kernel, plan, modes, .. } = self.launch;
        let first = (kernel.slots.registers + kernel.slots.immediates) as usize;
        let inputs = kernel.slots.inputs as usize;
        for (i, (operand, mode)) in plan.operands.iter().zip(modes).enumerate() {
            let at = plan.address(operand, place);
            self.slots[first + i] = match *mode {
                Mode::Absent => continue,
                Mode::Direct => at,
                Mode::Staged(n) => {
                    let block = self.staged.wrapping_add(n as usize * self.launch.stride());
                    let write_only = (inputs..inputs + kernel.slots.outputs as usize).contains(&i)
                        && kernel.reads_outputs >> (i - inputs) & 1 == 0;
                    if !write_only {
                        // SAFETY: the caller's promise; the block is this thread's.
                        unsafe { self.stage(i, at, block, place.size) };
                    }
                    block
                }
            };
        }
        for (i, own) in kernel.own.iter().enumerate() {
            if let Some(o) = own {
                self.slots[first + i] = self.slots[first + inputs + *o as usize];
            }
        }
    }

    /// # Safety
    /// As for [`bring`](Blocks::bring).
    unsafe fn stage(&mut self, i: usize, at: *mut u8, block: *mut u8, size: Tile) {
        let plan = &self.launch.plan;
        let operand = &plan.operands[i];
        let strides = plan.strides(operand);
        if operand.base.is_null() {
            // SAFETY: a block holds a tile of positions.
            return unsafe { stage::positions(block, at.addr() as i64, size, strides) };
        }
        let still = strides.0 == 0 || size.rows == 1;
        if still && self.held[i] == (at, size) && i < self.launch.kernel.slots.inputs as usize {
            return;
        }
        self.held[i] = (at, size);
        // SAFETY: the caller's promise.
        unsafe { stage::gather(self.launch.simd, operand.size, block, at, size, strides) };
    }

    /// Spreads staged outputs out.
    ///
    /// # Safety
    /// As for [`bring`](Blocks::bring).
    unsafe fn send(&self, place: &Place) {
        let Launch { kernel, plan, modes, .. } = self.launch;
        let (inputs, outputs) = (kernel.slots.inputs as usize, kernel.slots.outputs as usize);
        for i in inputs..inputs + outputs {
            if let Some(Mode::Staged(n)) = modes.get(i) {
                let (operand, block) = (&plan.operands[i], self.staged.wrapping_add(*n as usize * self.launch.stride()));
                let at = plan.address(operand, place);
                // SAFETY: the caller's promise.
                unsafe { stage::scatter(operand.size, at, block, place.size, plan.strides(operand)) };
            }
        }
    }
}

//! Runs a kernel, over contiguous operands or over the tiles of a plan. Operands that are not contiguous in a tile are
//! gathered into blocks, and outputs are scattered from them.

use smallvec::SmallVec;

use super::{
    plan::{LoopPlan, Moving, Place, Tile},
    scratch::{Blocks, block, with_blocks},
    stage::{self, Side},
    stream,
    ways::{WAYS, Way},
};
use crate::{
    Engine, Simd,
    operand::Base,
    pointwise::compile::{ImmediateBits, Kernel},
};

/// The fewest simple steps of a task, each on one element, and the largest number of tasks.
const GRAIN: usize = 1 << 15;
const TASKS: usize = 128;

/// A kernel with the immediates of a launch.
pub(crate) struct Common<'a> {
    pub kernel: &'a Kernel,
    pub values: SmallVec<[ImmediateBits; 8]>,
    pub simd: Simd,
}

impl Common<'_> {
    /// The number of tasks that are worth their hand-over.
    fn tasks(&self, elements: usize) -> usize {
        (elements * self.kernel.weight / GRAIN).clamp(1, TASKS)
    }

    /// The outputs that may be computed in L1 and copied from there by non-temporal stores. They are large, and their
    /// old values are not read.
    fn bypassed(&self, operands: &[(Base<u8>, usize)], n: usize) -> SmallVec<[usize; 4]> {
        let (inputs, outputs) = (self.kernel.slots.inputs as usize, self.kernel.slots.outputs as usize);
        let read = |o: usize| self.kernel.reads_outputs >> o & 1 == 1;
        (0..outputs).filter(|&o| !read(o) && stream::pays(n * operands[inputs + o].1)).map(|o| inputs + o).collect()
    }

    /// Runs over `n` elements of contiguous operands: their addresses and element sizes, inputs first.
    ///
    /// # Safety
    /// Operands hold `n` elements; no other thread writes inputs or accesses outputs meanwhile. Positions do not count.
    pub(crate) unsafe fn run_dense(&self, engine: &Engine, operands: &[(Base<u8>, usize)], n: usize) {
        let kernel = self.kernel;
        if let Some(size) = kernel.copies.filter(|size| stream::pays(n * size)) {
            return kernel.ways.run(stream::ORDERS.len(), n, |order| {
                // SAFETY: a kernel that copies has one input and one output, of `n` elements each, which the caller
                // guarantees.
                unsafe { self.copy_past_caches(engine, stream::ORDERS[order], operands[0].0, operands[1].0, n * size) }
            });
        }
        let bypassed = self.bypassed(operands, n);
        // With more steps, computing takes longer than memory does.
        let is_bound_by_memory = kernel.steps.len() == 1 || kernel.compiled.is_some();
        if bypassed.is_empty() || !is_bound_by_memory {
            // SAFETY: the caller's guarantees.
            return unsafe { self.run_in_way(engine, operands, n, WAYS[0], &[]) };
        }
        kernel.ways.run(WAYS.len(), n, |way| {
            let way = WAYS[way];
            let bypassed = if way.bypass { &bypassed[..] } else { &[] };
            // SAFETY: the caller's guarantees.
            unsafe { self.run_in_way(engine, operands, n, way, bypassed) }
        });
    }

    /// Runs over contiguous operands like [`run_dense`](Common::run_dense), in one of the ways. The outputs `bypassed`
    /// bypass the caches.
    ///
    /// # Safety
    /// As for [`run_dense`](Common::run_dense).
    unsafe fn run_in_way(
        &self,
        engine: &Engine,
        operands: &[(Base<u8>, usize)],
        n: usize,
        way: Way,
        bypassed: &[usize],
    ) {
        let block = way.block.unwrap_or_else(|| block(self.kernel, 0));
        let first = (self.kernel.slots.registers + self.kernel.slots.immediates) as usize;
        let inputs = self.kernel.slots.inputs as usize;
        let part = |from: usize, to: usize| {
            with_blocks(self, block.min(to - from), bypassed.len(), |blocks| {
                for at in (from..to).step_by(block) {
                    let slots = blocks.slots[first..].iter_mut();
                    slots.zip(operands).for_each(|(slot, (base, size))| *slot = base.at((at * size) as isize));
                    for (n, &i) in bypassed.iter().enumerate() {
                        blocks.slots[first + i] = blocks.staged(n as u16);
                    }
                    if way.ahead > 0 {
                        stream::prefetch_next(&blocks.slots[first..], &operands[..inputs], block, way.ahead);
                    }
                    let n = block.min(to - at);
                    // SAFETY: elements `at..at + n` of every operand, which the caller guarantees; no two tasks access
                    // one element.
                    unsafe { blocks.run(self.kernel, n) };
                    for &i in bypassed {
                        let (base, size) = operands[i];
                        let (to, from) = (base.at((at * size) as isize), blocks.slots[first + i]);
                        // SAFETY: elements `at..at + n` of this output; the block was computed just now.
                        unsafe { stream::copy(self.simd, stream::Order::Ahead(0), to, from, n * size) };
                    }
                }
            });
            if !bypassed.is_empty() {
                stream::finish();
            }
        };
        match self.tasks(n) {
            1 => part(0, n),
            tasks => engine.ranges(n, n.div_ceil(tasks).next_multiple_of(block), |p| part(p.start, p.end)),
        }
    }

    /// Copies `bytes` bytes by non-temporal stores.
    ///
    /// # Safety
    /// Both operands hold `bytes` bytes; no other thread writes `from` or accesses `to` meanwhile.
    unsafe fn copy_past_caches(
        &self,
        engine: &Engine,
        order: stream::Order,
        from: Base<u8>,
        to: Base<u8>,
        bytes: usize,
    ) {
        engine.ranges(bytes, bytes.div_ceil(TASKS).next_multiple_of(stream::CHUNK), |p| {
            let at = p.start as isize;
            // SAFETY: a range of the `bytes` bytes that the caller guarantees; no two tasks access one byte.
            unsafe { stream::copy(self.simd, order, to.at(at), from.at(at), p.len()) };
            stream::finish();
        });
    }
}

/// A kernel about to run over tiles. Operands of the plan are its inputs, its outputs, and positions if it uses them.
pub(crate) struct Launch<'a> {
    common: Common<'a>,
    plan: LoopPlan,
    /// The mode in which each operand of the plan becomes a block.
    modes: SmallVec<[OperandMode; 6]>,
    staged: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum OperandMode {
    /// The mode of an operand that no step reads.
    Absent,
    /// The operand is used in place, since a tile of it is contiguous in memory.
    Direct,
    /// The tile is gathered into staging block `n`, or scattered from it.
    Staged(u16),
}

impl<'a> Launch<'a> {
    /// Tiles `plan` to suit the kernel; a kernel that keeps its value gets whole rows, or parts of one.
    pub(crate) fn new(common: Common<'a>, plan: LoopPlan) -> Self {
        let most = block(common.kernel, 0);
        Launch::in_tiles(common, plan, most)
    }

    /// A launch like [`new`](Launch::new), but with tiles of up to `most` elements where they are read in place and no
    /// step computes.
    pub(crate) fn reading(common: Common<'a>, plan: LoopPlan, most: usize) -> Self {
        let computes = !common.kernel.steps.is_empty();
        let most = if computes { block(common.kernel, 0) } else { most };
        Launch::in_tiles(common, plan, most)
    }

    /// A launch like [`new`](Launch::new), but with tiles of one row: a row of a block of scores is contiguous, and
    /// the block is not.
    pub(crate) fn by_rows(common: Common<'a>, mut plan: LoopPlan) -> Self {
        let most = block(common.kernel, 0).min(plan.columns());
        plan.cut_rows(most);
        Launch::of_tiles(common, plan)
    }

    fn in_tiles(common: Common<'a>, mut plan: LoopPlan, most: usize) -> Self {
        let kernel = common.kernel;
        let cut = if kernel.keeps { LoopPlan::cut_rows } else { LoopPlan::cut };
        cut(&mut plan, most);
        let bytes: usize = plan.operands.iter().filter(|o| !plan.is_contiguous(o)).map(|o| o.size.max(4)).sum();
        if bytes > 0 {
            cut(&mut plan, block(kernel, bytes));
        }
        Launch::of_tiles(common, plan)
    }

    fn of_tiles(common: Common<'a>, plan: LoopPlan) -> Self {
        let kernel = common.kernel;
        let mut staged = 0;
        let modes = (0..plan.operands.len()).map(|i| mode(kernel, &plan, i, &mut staged)).collect();
        Launch { common, plan, modes, staged: staged as usize }
    }

    pub(crate) fn plan(&self) -> &LoopPlan {
        &self.plan
    }

    /// Runs every tile, over as many threads as are worth it.
    ///
    /// # Safety
    /// Inputs and outputs are in their buffers; no other thread writes the former or accesses the latter meanwhile.
    pub(crate) unsafe fn run(&self, engine: &Engine) {
        let tiles = self.plan.tiles();
        let tasks = self.common.tasks(tiles * self.plan.tile.rows * self.plan.tile.columns);
        engine.ranges(tiles, tiles.div_ceil(tasks), |part| {
            // SAFETY: the caller guarantees the operands; no two tasks access one tile.
            unsafe {
                match self.common.kernel.copies {
                    Some(size) => part.for_each(|tile| self.copy(size, tile)),
                    None => self.tiles(part, |_, _| {}),
                }
            }
        });
    }

    /// Moves one tile of a kernel that only copies, without a block between.
    ///
    /// # Safety
    /// The operands hold the tile; no other thread writes the input or accesses the output's tile meanwhile.
    unsafe fn copy(&self, size: usize, tile: usize) {
        let place = self.plan.place(tile);
        let [from, to] = [0, 1].map(|i| self.side(&self.plan.operands[i], &place));
        // SAFETY: the tile is within both operands, which the caller guarantees.
        unsafe { stage::copy(self.common.simd, size, to, from, place.size) };
    }

    fn side(&self, operand: &Moving, place: &Place) -> Side {
        let (row, column) = self.plan.strides(operand);
        Side { at: self.plan.address(operand, place), row, column }
    }

    /// Runs some tiles on this thread and shows each with the address of the kernel's value.
    ///
    /// # Safety
    /// As for [`run`](Launch::run), for the elements of these tiles.
    pub(crate) unsafe fn tiles(&self, tiles: impl Iterator<Item = usize>, mut each: impl FnMut(&Place, *const u8)) {
        let Tile { rows, columns } = self.plan.tile;
        with_blocks(&self.common, rows * columns, self.staged, |blocks| {
            // For every operand, the tile that its staging block holds: a tile that stays the same is gathered once.
            let mut held = SmallVec::from_elem((std::ptr::null_mut(), Tile { rows: 0, columns: 0 }), self.modes.len());
            for tile in tiles {
                let place = self.plan.place(tile);
                // SAFETY: the caller guarantees the operands in this tile; every block holds a tile.
                unsafe {
                    self.gather(blocks, &mut held, &place);
                    blocks.run(self.common.kernel, place.size.rows * place.size.columns);
                    self.scatter(blocks, &place);
                }
                each(&place, blocks.slots[self.common.kernel.value as usize]);
            }
        });
    }

    /// Points the slots of all operands at the elements of a tile, and gathers those that are not contiguous.
    ///
    /// # Safety
    /// Every operand holds the tile.
    unsafe fn gather(&self, blocks: &mut Blocks, held: &mut Held, place: &Place) {
        let kernel = self.common.kernel;
        let first = (kernel.slots.registers + kernel.slots.immediates) as usize;
        let inputs = kernel.slots.inputs as usize;
        for (i, mode) in self.modes.iter().enumerate() {
            let from = self.side(&self.plan.operands[i], place);
            blocks.slots[first + i] = match *mode {
                OperandMode::Absent => continue,
                OperandMode::Direct => from.at,
                OperandMode::Staged(n) => {
                    let block = blocks.staged(n);
                    // SAFETY: the caller guarantees that operand `i` holds the tile; the block is this thread's.
                    unsafe { self.stage(i, from, block, place.size, &mut held[i]) };
                    block
                }
            };
        }
        for (i, own) in kernel.own.iter().enumerate() {
            if let Some(o) = own {
                blocks.slots[first + i] = blocks.slots[first + inputs + *o as usize];
            }
        }
    }

    /// Gathers a tile of operand `i` into a block, unless the block already holds it or it will only be written.
    ///
    /// # Safety
    /// Operand `i` holds the tile, and `block` is this thread's and holds a tile.
    unsafe fn stage(&self, i: usize, from: Side, block: *mut u8, size: Tile, held: &mut (*mut u8, Tile)) {
        let (kernel, operand) = (self.common.kernel, &self.plan.operands[i]);
        let (inputs, outputs) = (kernel.slots.inputs as usize, kernel.slots.outputs as usize);
        if i == inputs + outputs {
            // SAFETY: a block holds a tile of positions.
            return unsafe {
                stage::positions(self.common.simd, block, from.at.addr() as i64, size, (from.row, from.column))
            };
        }
        let still = i < inputs && (from.row == 0 || size.rows == 1) && *held == (from.at, size);
        if still || (i >= inputs && kernel.reads_outputs >> (i - inputs) & 1 == 0) {
            return;
        }
        *held = (from.at, size);
        let to = Side::dense(block, operand.size, size.columns);
        // SAFETY: the caller guarantees that operand and block hold the tile.
        unsafe { stage::copy(self.common.simd, operand.size, to, from, size) };
    }

    /// Scatters staged outputs.
    ///
    /// # Safety
    /// Every output holds the tile, and no other thread accesses it.
    unsafe fn scatter(&self, blocks: &Blocks, place: &Place) {
        let slots = self.common.kernel.slots;
        for i in slots.inputs as usize..(slots.inputs + slots.outputs) as usize {
            if let OperandMode::Staged(n) = self.modes[i] {
                let operand = &self.plan.operands[i];
                let from = Side::dense(blocks.staged(n), operand.size, place.size.columns);
                // SAFETY: the caller guarantees that the output holds the tile; the block was computed.
                unsafe { stage::copy(self.common.simd, operand.size, self.side(operand, place), from, place.size) };
            }
        }
    }
}

type Held = SmallVec<[(*mut u8, Tile); 6]>;

/// The mode in which operand `i` becomes a block; `staged` counts the staged operands.
fn mode(kernel: &Kernel, plan: &LoopPlan, i: usize, staged: &mut u16) -> OperandMode {
    let (inputs, outputs) = (kernel.slots.inputs as usize, kernel.slots.outputs as usize);
    let positions = i == inputs + outputs;
    let unread = i < inputs && (kernel.own[i].is_some() || kernel.unread >> i & 1 == 1);
    if unread || (kernel.keeps && i >= inputs && !positions) {
        return OperandMode::Absent;
    }
    if !positions && plan.is_contiguous(&plan.operands[i]) {
        return OperandMode::Direct;
    }
    *staged += 1;
    OperandMode::Staged(*staged - 1)
}

//! A warp: its lanes' places in the code, its registers, and the execution of instructions.

use super::{
    LaunchState,
    copies::PendingCopies,
    history::Stamp,
    tiles::PendingProducts,
    trap::{Located, Trap, Trapped, trap},
};
use crate::{
    error::FaultKind,
    instruction::{Code, Instruction, Special, WarpAction},
    registers::{LANES, WarpRegisters},
};

/// The most branches backwards that a warp takes in one block.
const MOST_LOOPS: u64 = 1 << 24;

/// The reason why a warp does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    Barrier,
    End,
}

/// Lanes that are at the same place.
#[derive(Clone, Copy, Debug)]
struct LaneGroup {
    at: u32,
    lanes: u32,
}

/// A warp of a block.
pub(super) struct Warp {
    pub registers: WarpRegisters,
    pub copies: PendingCopies,
    pub products: PendingProducts,
    /// The lanes under way.
    current: LaneGroup,
    /// The other lanes that have not ended, all at later places.
    others: Vec<LaneGroup>,
    /// The first place of the others.
    horizon: u32,
    /// All lanes, also those that have ended.
    pub all: u32,
    ended: u32,
    loops: u64,
    /// The number of the first thread in its block.
    first: u32,
    /// The block's number and the epoch of its barriers.
    block: u32,
    epoch: u32,
    /// Local memory, lane by lane.
    pub local: Vec<u8>,
}

impl Warp {
    pub(super) fn new(code: &Code) -> Warp {
        let mut registers = WarpRegisters::new(code.rows);
        code.constants.iter().for_each(|(slot, bits)| registers.fill(*slot, *bits));
        Warp {
            registers,
            copies: PendingCopies::default(),
            products: PendingProducts::default(),
            current: LaneGroup { at: 0, lanes: 0 },
            others: Vec::new(),
            horizon: u32::MAX,
            all: 0,
            ended: 0,
            loops: 0,
            first: 0,
            block: 0,
            epoch: 0,
            local: vec![0; code.local * LANES],
        }
    }

    /// Puts all lanes at the beginning, as the threads from `first` on of a block at `place`.
    pub(super) fn begin(&mut self, launch: &LaunchState<'_>, place: [u32; 3], block: u32, first: u32) {
        let threads = launch.grid.threads;
        let count = threads.iter().product::<u32>() - first;
        self.all = if count < 32 { (1 << count) - 1 } else { u32::MAX };
        (self.first, self.block, self.ended, self.loops) = (first, block, 0, 0);
        (self.current, self.horizon) = (LaneGroup { at: 0, lanes: self.all }, u32::MAX);
        for (slot, special) in &launch.kernel.code.specials {
            for lane in 0..LANES {
                let thread = first + lane as u32;
                let value = match special {
                    Special::Thread(0) => thread % threads[0],
                    Special::Thread(1) => thread / threads[0] % threads[1],
                    Special::Thread(_) => thread / threads[0] / threads[1],
                    Special::Threads(axis) => threads[*axis],
                    Special::Block(axis) => place[*axis],
                    Special::Blocks(axis) => launch.grid.blocks[*axis],
                    Special::Lane => lane as u32,
                };
                self.registers.set_bits(*slot, lane, value.into());
            }
        }
    }

    /// The stamp of an access by a lane.
    #[inline]
    pub(super) fn stamp(&self, lane: usize) -> Stamp {
        Stamp::new(self.block, self.epoch, self.first + lane as u32)
    }

    /// Runs until all lanes wait at a barrier or have ended.
    pub(super) fn run(&mut self, launch: &mut LaunchState<'_>, epoch: u32) -> Result<Pause, Located> {
        self.epoch = epoch;
        let code = &launch.kernel.code;
        loop {
            if self.current.at >= self.horizon {
                self.settle();
            }
            let at = self.current.at;
            let instruction = &code.instructions[at as usize];
            launch.warp_instructions += 1;
            match self.step(launch, instruction) {
                Ok(None) => {}
                Ok(Some(pause)) => return Ok(pause),
                Err(trap) => return Err(self.locate(at, *trap)),
            }
        }
    }

    /// The number of the warp in its warpgroup of four.
    pub(super) fn in_group(&self) -> usize {
        self.first as usize / LANES % 4
    }

    /// The place of a finding.
    pub(super) fn locate(&self, instruction: u32, trap: Trap) -> Located {
        Located { instruction, thread: self.first + trap.lane, kind: trap.kind }
    }

    /// The place of a barrier at which this warp waits, for a finding about others.
    pub(super) fn behind_barrier(&self, kind: FaultKind) -> Located {
        let lane = self.current.lanes.trailing_zeros() % 32;
        self.locate(self.current.at - 1, Trap { lane, kind })
    }

    #[inline]
    fn step(&mut self, launch: &mut LaunchState<'_>, instruction: &Instruction) -> Trapped<Option<Pause>> {
        let active = self.current.lanes & (self.registers.mask(instruction.guard.row) ^ instruction.guard.flip);
        match &instruction.action {
            WarpAction::Compute { run, rows } => run(&mut self.registers, rows, active),
            WarpAction::Branch { to } => {
                self.branch(active, *to)?;
                return Ok(None);
            }
            WarpAction::Exit => return self.exit(active),
            WarpAction::Barrier => {
                self.needs("bar.sync", self.all, active)?;
                self.current.at += 1;
                return Ok(Some(Pause::Barrier));
            }
            WarpAction::Load(access) => self.load(launch, access, active)?,
            WarpAction::Store(access) => self.store(launch, access, active)?,
            WarpAction::Atomic(atomic) => self.atomic(launch, atomic, active)?,
            WarpAction::Shuffle(shuffle) => self.shuffle(shuffle, active)?,
            WarpAction::LoadMatrices(load) => {
                self.needs("ldmatrix", u32::MAX, active)?;
                self.load_matrices(launch, load)?;
            }
            WarpAction::MultiplyMatrices(product) => {
                self.needs("mma", u32::MAX, active)?;
                self.multiply_matrices(product);
            }
            WarpAction::MultiplyTiles { product } => {
                self.needs("wgmma.mma_async", u32::MAX, active)?;
                self.multiply_tiles(launch, &launch.kernel.code.tile_products[*product as usize])?;
            }
            WarpAction::FenceProducts => {
                self.needs("wgmma.fence", u32::MAX, active)?;
                self.products.fence();
            }
            WarpAction::CommitProducts => {
                self.needs("wgmma.commit_group", u32::MAX, active)?;
                self.products.commit();
            }
            WarpAction::AwaitProducts { left } => {
                self.needs("wgmma.wait_group", u32::MAX, active)?;
                self.await_products(*left);
            }
            WarpAction::FenceWrites => launch.shared.fence(self.first, active),
            WarpAction::StartCopy { to, from, bytes } => self.start_copy(launch, to, from, *bytes, active)?,
            WarpAction::CommitCopies => self.copies.commit(active),
            WarpAction::AwaitCopies { left } => self.await_copies(launch, *left, active),
        }
        self.current.at += 1;
        Ok(None)
    }

    /// A finding unless these lanes are active.
    fn needs(&self, instruction: &'static str, needed: u32, active: u32) -> Trapped<()> {
        if active == needed {
            return Ok(());
        }
        let missing = (needed & !active).trailing_zeros() as usize;
        if instruction == "bar.sync" && self.ended != 0 {
            return trap(missing, FaultKind::EndedBeforeBarrier { ended: self.ended.count_ones() });
        }
        trap(missing, FaultKind::InactiveLanes { instruction, needed, active })
    }

    /// Moves the lanes of `taken` to another place, and the other active ones on.
    fn branch(&mut self, taken: u32, to: u32) -> Trapped<()> {
        if to <= self.current.at && taken != 0 {
            self.loops += 1;
            if self.loops > MOST_LOOPS {
                let lane = taken.trailing_zeros() as usize;
                return trap(lane, FaultKind::Endless { instructions: self.loops });
            }
        }
        let staying = LaneGroup { at: self.current.at + 1, lanes: self.current.lanes & !taken };
        match (taken, staying.lanes) {
            (0, _) => self.current = staying,
            (_, 0) => {
                self.current.at = to;
                if self.horizon != u32::MAX {
                    self.settle();
                }
            }
            _ => {
                self.others.push(LaneGroup { at: to, lanes: taken });
                self.current = staying;
                self.settle();
            }
        }
        Ok(())
    }

    fn exit(&mut self, active: u32) -> Trapped<Option<Pause>> {
        if let Some(lane) = self.copies.under_way(active) {
            return trap(lane, FaultKind::CopiesUnderWay);
        }
        if self.products.are_under_way() {
            return trap(0, FaultKind::ProductsUnderWay);
        }
        self.ended |= active;
        self.current = LaneGroup { at: self.current.at + 1, lanes: self.current.lanes & !active };
        if self.ended == self.all {
            return Ok(Some(Pause::End));
        }
        if self.current.lanes == 0 {
            self.settle();
        }
        Ok(None)
    }

    /// Goes on with the lanes at the smallest place; lanes that meet there are one group again.
    fn settle(&mut self) {
        if self.current.lanes != 0 {
            self.others.push(self.current);
        }
        let at = self.others.iter().map(|group| group.at).min().unwrap_or(u32::MAX);
        let lanes = self.others.iter().filter(|group| group.at == at).fold(0, |all, group| all | group.lanes);
        self.others.retain(|group| group.at != at);
        self.current = LaneGroup { at, lanes };
        self.horizon = self.others.iter().map(|group| group.at).min().unwrap_or(u32::MAX);
    }
}

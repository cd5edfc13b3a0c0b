//! A block: its warps, and its barrier.

use super::{
    LaunchState,
    trap::Located,
    warp::{Pause, Warp},
};
use crate::{error::FaultKind, instruction::Code, registers::LANES, run::LaunchGrid};

/// The warps of a block, which the blocks of a launch use in turn. Without a barrier, one serves all.
pub(super) struct BlockRun {
    warps: Vec<Warp>,
    count: usize,
    waits: bool,
}

impl BlockRun {
    pub(super) fn new(code: &Code, grid: LaunchGrid) -> BlockRun {
        let count = (grid.threads.iter().product::<u32>() as usize).div_ceil(LANES);
        let kept = if code.waits { count } else { 1 };
        BlockRun { warps: (0..kept).map(|_| Warp::new(code)).collect(), count, waits: code.waits }
    }

    /// Runs all threads of the block at `place`, which has the given number.
    pub(super) fn run(&mut self, launch: &mut LaunchState<'_>, place: [u32; 3], number: u32) -> Result<(), Located> {
        launch.shared.begin();
        if !self.waits {
            for index in 0..self.count {
                self.warps[0].begin(launch, place, number, (index * LANES) as u32);
                self.warps[0].run(launch, 1)?;
            }
            return Ok(());
        }
        for (index, warp) in self.warps.iter_mut().enumerate() {
            warp.begin(launch, place, number, (index * LANES) as u32);
        }
        for epoch in 1.. {
            let (mut waiting, mut ended) = (None, 0);
            for (index, warp) in self.warps.iter_mut().enumerate() {
                match warp.run(launch, epoch)? {
                    Pause::Barrier => waiting = Some(index),
                    Pause::End => ended += warp.all.count_ones(),
                }
            }
            match waiting {
                None => return Ok(()),
                Some(index) if ended > 0 => {
                    return Err(self.warps[index].behind_barrier(FaultKind::EndedBeforeBarrier { ended }));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

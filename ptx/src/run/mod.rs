//! Launches: the blocks of a grid one after another, and the warps of each block.

mod access;
mod block;
mod copies;
mod global;
mod history;
mod matrices;
mod shared;
mod shuffle;
mod tiles;
mod trap;
mod warp;

use std::cell::Cell;

use crate::{
    error::{KernelFault, LaunchError},
    kernel::PtxKernel,
};
use block::BlockRun;
use global::GlobalMemory;
pub use global::{LaunchMemory, MemoryRegion};
use shared::SharedMemory;
use trap::Located;

/// The extents of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchGrid {
    /// The numbers of blocks.
    pub blocks: [u32; 3],
    /// The numbers of threads of a block.
    pub threads: [u32; 3],
    /// Bytes of shared memory beyond those that the kernel declares.
    pub shared: usize,
}

/// The work of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The number of instructions, one for each warp that takes it.
    pub warp_instructions: u64,
}

/// The most threads of a block.
const MOST_THREADS: u32 = 1024;

/// A launch under way: the memory that its blocks use in turn.
struct LaunchState<'a> {
    kernel: &'a PtxKernel,
    grid: LaunchGrid,
    parameters: Vec<u8>,
    global: GlobalMemory<'a>,
    shared: SharedMemory,
    warp_instructions: u64,
}

impl PtxKernel {
    /// Runs the kernel on all blocks of a grid. `arguments` are the bytes of each parameter.
    ///
    /// # Errors
    /// The grid or the arguments do not fit the kernel, or a [check](crate#checks) found a fault. The blocks before it,
    /// and a part of its own, have run then.
    pub fn launch(
        &self,
        grid: LaunchGrid,
        arguments: &[&[u8]],
        memory: &dyn LaunchMemory,
    ) -> Result<Statistics, LaunchError> {
        let refused = |message| LaunchError::Refused { kernel: self.name.clone(), message };
        let parameters = self.packed(arguments).and_then(|parameters| {
            self.admit(grid)?;
            Ok(parameters)
        });
        let variables: Vec<Cell<u8>> = self.variables.iter().copied().map(Cell::new).collect();
        let mut launch = LaunchState {
            kernel: self,
            grid,
            parameters: parameters.map_err(refused)?,
            global: GlobalMemory::new(memory, &variables, self.code.global_unit),
            shared: SharedMemory::new(self.code.shared + grid.shared, self.code.shared_unit),
            warp_instructions: 0,
        };
        let mut block = BlockRun::new(&self.code, grid);
        let [x, y, z] = grid.blocks;
        let places = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
        for (number, place) in places.enumerate() {
            block.run(&mut launch, place, number as u32).map_err(|at| launch.fault(place, at))?;
        }
        Ok(Statistics { warp_instructions: launch.warp_instructions })
    }

    /// The bytes of all parameters, each at its offset.
    fn packed(&self, arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
        if arguments.len() != self.parameters.len() {
            return Err(format!("{} arguments for {} parameters", arguments.len(), self.parameters.len()));
        }
        let mut packed = vec![0; self.parameters.last().map_or(0, |last| last.offset + last.bytes)];
        for (number, (argument, parameter)) in arguments.iter().zip(&self.parameters).enumerate() {
            let bytes = parameter.bytes;
            if argument.len() != bytes {
                let given = argument.len();
                return Err(format!("argument {number} has {given} bytes, and the parameter {bytes}"));
            }
            packed[parameter.offset..parameter.offset + bytes].copy_from_slice(argument);
        }
        Ok(packed)
    }

    /// Checks the extents of a launch.
    fn admit(&self, grid: LaunchGrid) -> Result<(), String> {
        let threads = grid.threads.iter().try_fold(1u32, |all, &n| all.checked_mul(n)).unwrap_or(u32::MAX);
        let most = self.most_threads.unwrap_or(MOST_THREADS).min(MOST_THREADS);
        let [_, y, z] = grid.blocks;
        if threads == 0 || grid.blocks.contains(&0) {
            return Err(format!("a launch without threads: {grid:?}"));
        }
        if threads > most {
            return Err(format!("{threads} threads in a block, and the kernel takes at most {most}"));
        }
        if y > 65_535 || z > 65_535 || grid.blocks[0] > i32::MAX as u32 {
            return Err(format!("a grid beyond the device's limits: {grid:?}"));
        }
        Ok(())
    }
}

impl LaunchState<'_> {
    /// The fault of a trap, in the words of the source.
    fn fault(&self, block: [u32; 3], at: Located) -> LaunchError {
        let lines = self.kernel.code.lines[at.instruction as usize];
        let [width, height, _] = self.grid.threads;
        let thread = [at.thread % width, at.thread / width % height, at.thread / width / height];
        let kernel = self.kernel.name.clone();
        LaunchError::Fault(Box::new(KernelFault {
            kernel,
            line: lines.ptx,
            source_line: lines.source,
            block,
            thread,
            kind: at.kind,
        }))
    }
}

//! The work of streams, done on the host.

use numcore::DType;
use runtime_cuda::driver::{DriverFailure, Fallible};

use crate::{
    gpu::{Emulated, LAUNCH_FAILED},
    live::Blocks,
    product::product,
    streams::StreamWork,
};

/// `CUDA_ERROR_ILLEGAL_ADDRESS`, after which a context is lost.
const ILLEGAL_ADDRESS: u32 = 700;

impl Emulated {
    /// Does queued work.
    pub(crate) fn perform(&self, work: &StreamWork, blocks: &Blocks) -> Fallible<()> {
        let outside = |at: u64, bytes: usize| {
            let found = format!("{bytes} bytes at {at:#x} are not inside of live memory");
            if self.live.holds(at, bytes) { Ok(()) } else { Err(DriverFailure::of_code(ILLEGAL_ADDRESS, found)) }
        };
        match work {
            StreamWork::Launch(kernel, grid, args) => {
                let kernel = self.kernels.lock()[kernel.0 as usize].clone();
                let [x, y, z] = grid.blocks.map(|b| b as u32);
                let grid = ptx::LaunchGrid {
                    blocks: [x, y, z],
                    threads: [grid.threads[0], grid.threads[1], 1],
                    shared: grid.shared as usize,
                };
                let arguments: Vec<&[u8]> = args.values().collect();
                let done = kernel.launch(grid, &arguments, &self.live.with(blocks));
                done.map(drop).map_err(|e| DriverFailure::of_code(LAUNCH_FAILED, e.to_string()))
            }
            // SAFETY: the promise of the caller of `gemm`: matrices are inside of memory that lives until the stream has
            // passed.
            StreamWork::Gemm(gemm, at) => unsafe {
                match (gemm.dtype, gemm.into) {
                    (DType::F64, _) => product::<f64, f64>(gemm, *at),
                    (DType::F32, _) => product::<f32, f32>(gemm, *at),
                    (DType::F16, DType::F32) => product::<half::f16, f32>(gemm, *at),
                    (DType::F16, _) => product::<half::f16, half::f16>(gemm, *at),
                    (_, DType::F32) => product::<half::bf16, f32>(gemm, *at),
                    _ => product::<half::bf16, half::bf16>(gemm, *at),
                }
                Ok(())
            },
            StreamWork::Copy { to, from, bytes } => {
                outside(*from, *bytes)?;
                outside(*to, *bytes)?;
                // SAFETY: both ranges are inside of live memory, and the caller of the copy keeps them apart.
                unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, *to as *mut u8, *bytes) };
                Ok(())
            }
            // Streams begin these, and ask whether they have ended.
            StreamWork::Foreign(_) => Ok(()),
            StreamWork::Zero { at, bytes } => {
                outside(*at, *bytes)?;
                // SAFETY: the range is inside of live memory.
                unsafe { (*at as *mut u8).write_bytes(0, *bytes) };
                Ok(())
            }
        }
    }
}

//! Stable sorting of pairs (key, position) by a radix sort of four bits per pass.

use numcore::Result;

use crate::{
    Cuda,
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch},
    memory::CudaBuffer,
};

/// The number of pairs of a tile, as in `radix.cu`.
const TILE: usize = 2048;
const DIGITS: usize = 16;
const BITS: usize = 4;
/// The most lines of a launch.
const LINES: usize = 65_535;

/// Keys and positions of `lines` rows of `n`, and memory of equal size to which each pass moves them.
pub(crate) struct Pairs {
    /// The bytes of a key: 4 or 8.
    pub key: usize,
    pub keys: [CudaBuffer; 2],
    pub places: [CudaBuffer; 2],
    pub lines: usize,
    pub n: usize,
}

impl Pairs {
    pub(crate) fn new(cuda: &Cuda, key: usize, lines: usize, n: usize) -> Result<Pairs> {
        let count = lines * n;
        let keys = [cuda.scratch(count * key)?, cuda.scratch(count * key)?];
        let places = [cuda.scratch(count * 4)?, cuda.scratch(count * 4)?];
        Ok(Pairs { key, keys, places, lines, n })
    }

    /// The C type of a key.
    pub(crate) fn name(&self) -> &'static str {
        if self.key == 4 { "u32" } else { "u64" }
    }

    /// Sorts by the lowest `bits` bits of the keys. The result is in the first of both buffers.
    pub(crate) fn sort(&mut self, cuda: &Cuda, op: &'static str, bits: usize) -> Result<()> {
        let tiles = self.n.div_ceil(TILE);
        let counts = cuda.scratch(self.lines.min(LINES) * DIGITS * tiles * 4)?;
        let kernel = |entry| HandwrittenKernel::new("radix.cu", entry, &[("K", DefineValue::from(self.name()))]);
        let (count, places, shift) = (kernel("radix_count"), kernel("radix_places"), kernel("radix_move"));
        for pass in 0..bits.div_ceil(BITS) {
            let low = (pass * BITS) as i32;
            for first in (0..self.lines).step_by(LINES) {
                let lines = (self.lines - first).min(LINES);
                let at = |buffer: &CudaBuffer, size: usize| buffer.address() + (first * self.n * size) as u64;
                let [from, to] = [0, 1].map(|i| (at(&self.keys[i], self.key), at(&self.places[i], 4)));
                let counting =
                    KernelLaunch::new(cuda, op, &count)?.arg(counts.address()).arg(from.0).arg(self.n as i64).arg(low);
                let placing = KernelLaunch::new(cuda, op, &places)?.arg(counts.address()).arg((DIGITS * tiles) as i64);
                let moving = KernelLaunch::new(cuda, op, &shift)?
                    .arg(to.0)
                    .arg(to.1)
                    .arg(from.0)
                    .arg(from.1)
                    .arg(counts.address())
                    .arg(self.n as i64)
                    .arg(low);
                // SAFETY: the buffers hold `lines · n` pairs, the counts a table for every tile.
                unsafe {
                    counting.run([tiles, lines, 1], [256, 1])?;
                    placing.run([lines, 1, 1], [256, 1])?;
                    moving.run([tiles, lines, 1], [256, 1])?;
                }
            }
            self.keys.swap(0, 1);
            self.places.swap(0, 1);
        }
        Ok(())
    }
}

//! Matrices that are spread over the lanes of a warp, by the PTX manual's figures.

use super::{LaunchState, trap::Trapped, warp::Warp};
use crate::{
    instruction::{LoadMatrices, MultiplyMatrices},
    registers::LANES,
};

impl Warp {
    /// Lane `8m + r` gives the address of row `r` of matrix `m`. Lane `l` receives of each matrix the elements
    /// `2(l % 4)` and `2(l % 4) + 1` of row `l / 4`, or of the transposed matrix.
    pub(super) fn load_matrices(&mut self, launch: &mut LaunchState<'_>, load: &LoadMatrices) -> Trapped<()> {
        let addresses = self.registers.addresses(load.address.base, load.address.offset);
        let mut rows = [[0u16; 8]; LANES];
        for (lane, row) in rows.iter_mut().enumerate() {
            let bytes = launch.shared.read(lane, addresses[lane], 16, self.stamp(lane))?;
            let (pairs, _) = bytes.as_chunks::<2>();
            row.iter_mut().zip(pairs).for_each(|(to, pair)| *to = u16::from_le_bytes(*pair));
        }
        for (matrix, result) in rows.as_chunks::<8>().0.iter().zip(load.results) {
            let to = self.registers.word_mut(result);
            for (lane, to) in to.iter_mut().enumerate() {
                let (across, along) = (lane / 4, lane % 4 * 2);
                let element =
                    |along: usize| if load.transposed { matrix[along][across] } else { matrix[across][along] };
                *to = u32::from(element(along)) | u32::from(element(along + 1)) << 16;
            }
        }
        Ok(())
    }

    /// With `g = lane / 4` and `t = lane % 4`, a lane holds of `a` rows `g` and `g + 8` at columns `2t`, `2t + 1` (words
    /// 0, 1) and `2t + 8`, `2t + 9` (words 2, 3); of `b` rows `2t`, `2t + 1` (word 0) and `2t + 8`, `2t + 9` (word 1) of
    /// column `g`; of `c` and `d` rows `g` (words 0, 1) and `g + 8` (words 2, 3) at columns `2t`, `2t + 1`.
    pub(super) fn multiply_matrices(&mut self, product: &MultiplyMatrices) {
        let (mut a, mut b, mut d) = ([[0f64; 16]; 16], [[0f64; 8]; 16], [[0f64; 8]; 16]);
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(|half| f64::from((product.widen)(half)));
        for (word, row) in product.a.iter().enumerate() {
            for (lane, bits) in self.registers.word(*row).iter().enumerate() {
                let (row, column) = operand_place(word, lane);
                [a[row][column], a[row][column + 1]] = halves(*bits);
            }
        }
        for (word, row) in product.b.iter().enumerate() {
            for (lane, bits) in self.registers.word(*row).iter().enumerate() {
                let row = lane % 4 * 2 + word * 8;
                [b[row][lane / 4], b[row + 1][lane / 4]] = halves(*bits);
            }
        }
        for (word, row) in product.c.iter().enumerate() {
            for (lane, bits) in self.registers.word(*row).iter().enumerate() {
                let (row, column) = result_place(word, lane);
                d[row][column] = f32::from_bits(*bits).into();
            }
        }
        for (d, a) in d.iter_mut().zip(&a) {
            for (a, b) in a.iter().zip(&b) {
                d.iter_mut().zip(b).for_each(|(d, b)| *d += a * b);
            }
        }
        for (word, row) in product.d.iter().enumerate() {
            for (lane, bits) in self.registers.word_mut(*row).iter_mut().enumerate() {
                let (row, column) = result_place(word, lane);
                *bits = (d[row][column] as f32).to_bits();
            }
        }
    }
}

/// The row and the first column of the pair in word `word` of a lane's left operand, `[16, 16]`.
pub(super) fn operand_place(word: usize, lane: usize) -> (usize, usize) {
    (lane / 4 + word % 2 * 8, lane % 4 * 2 + word / 2 * 8)
}

/// The row and the column of word `word` of a lane's result, `[16, N]`: four words for each eight columns.
pub(super) fn result_place(word: usize, lane: usize) -> (usize, usize) {
    (lane / 4 + word % 4 / 2 * 8, word / 4 * 8 + lane % 4 * 2 + word % 2)
}

//! A warpgroup's products of tiles in shared memory, by the PTX manual's figures of `wgmma`. Each warp of the four
//! computes its own 16 rows. Until it has waited for a product, nobody may use the result.

use super::{
    LaunchState,
    matrices::{operand_place, result_place},
    trap::{Trapped, trap},
    warp::Warp,
};
use crate::{
    error::FaultKind,
    instruction::{SharedTile, TileOperand, TileProduct},
    registers::LANES,
};

/// The terms of a sum of one product.
const TERMS: usize = 16;
/// The rows of a warp.
const ROWS: usize = 16;
/// The bits of a result that is under way: a NaN.
const UNDER_WAY: u32 = 0x7fff_dead;

/// The products of a warp that have been begun and not awaited.
#[derive(Default)]
pub(super) struct PendingProducts {
    products: Vec<PendingProduct>,
    /// The number of groups that have ended.
    groups: u32,
    /// True if registers were handed over since the last wait.
    fenced: bool,
}

/// A result: the rows of its registers, its group, and its values, row by row.
struct PendingProduct {
    rows: Vec<u32>,
    group: u32,
    values: Vec<f32>,
}

impl PendingProducts {
    pub(super) fn fence(&mut self) {
        self.fenced = true;
    }

    pub(super) fn commit(&mut self) {
        self.groups += 1;
    }

    pub(super) fn are_under_way(&self) -> bool {
        !self.products.is_empty()
    }
}

/// The place of a tile in shared memory: rows of 128 bytes, eight of which make a swizzled block of 1024.
#[derive(Clone, Copy)]
struct TileLayout {
    start: u64,
    /// From 64 elements of a transposed tile's rows to the next.
    leading: u64,
    /// From eight rows to the next.
    stride: u64,
}

impl TileLayout {
    /// Decodes a matrix descriptor.
    fn of(bits: u64) -> Option<TileLayout> {
        let field = |from: u32| (bits >> from & 0x3fff) << 4;
        let layout = TileLayout { start: field(0), leading: field(16), stride: field(32) };
        let is_swizzled = bits >> 62 == 1 && bits >> 49 & 7 == 0;
        (is_swizzled && layout.stride.is_multiple_of(1024)).then_some(layout)
    }

    /// The address of 16 bytes: words `word` of row `row`. The words of a row are permuted by its number in its block.
    fn word(self, row: usize, word: usize) -> u64 {
        let (row, word) = (row as u64, word as u64);
        let at = self.start + word / 8 * self.leading + row / 8 * self.stride + row % 8 * 128 + word % 8 * 16;
        at ^ (at >> 7 & 7) << 4
    }
}

impl Warp {
    pub(super) fn multiply_tiles(&mut self, launch: &mut LaunchState<'_>, product: &TileProduct) -> Trapped<()> {
        if !self.products.fenced {
            return trap(0, FaultKind::UnfencedRegisters);
        }
        if let Some(thread) = launch.shared.unfenced() {
            return trap(0, FaultKind::UnfencedWrites { thread });
        }
        let columns = product.d.len() * 2;
        let a = match product.a {
            TileOperand::Registers(words) => self.strip(words, product.widen),
            TileOperand::Shared(tile) => {
                let first = self.in_group() * ROWS;
                self.tile(launch, tile, first..first + ROWS, product.widen)?
            }
        };
        let b = self.tile(launch, product.b, 0..columns, product.widen)?;
        let accumulates = self.registers.bits(product.accumulate, 0) == 1;
        let before = self.products.products.iter().position(|pending| pending.rows == product.d);
        let mut values = match before.map(|at| self.products.products.swap_remove(at).values) {
            _ if !accumulates => vec![0.0; ROWS * columns],
            Some(values) => values,
            None => self.results(&product.d),
        };
        for (row, a) in values.chunks_exact_mut(columns).zip(&a) {
            for (value, b) in row.iter_mut().zip(&b) {
                let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                *value = (f64::from(*value) + sum) as f32;
            }
        }
        product.d.iter().for_each(|row| *self.registers.word_mut(*row) = [UNDER_WAY; LANES]);
        let group = self.products.groups;
        self.products.products.push(PendingProduct { rows: product.d.clone(), group, values });
        Ok(())
    }

    /// Lets the results of all but the last `left` groups arrive.
    pub(super) fn await_products(&mut self, left: u32) {
        let groups = self.products.groups;
        let arrived = |pending: &PendingProduct| pending.group + left < groups;
        for pending in self.products.products.iter().filter(|pending| arrived(pending)) {
            let columns = pending.rows.len() * 2;
            for (word, row) in pending.rows.iter().enumerate() {
                for (lane, bits) in self.registers.word_mut(*row).iter_mut().enumerate() {
                    let (row, column) = result_place(word, lane);
                    *bits = pending.values[row * columns + column].to_bits();
                }
            }
        }
        self.products.products.retain(|pending| !arrived(pending));
        self.products.fenced = false;
    }

    /// The values of results in registers, row by row.
    fn results(&self, rows: &[u32]) -> Vec<f32> {
        let columns = rows.len() * 2;
        let mut values = vec![0.0; ROWS * columns];
        for (word, row) in rows.iter().enumerate() {
            for (lane, bits) in self.registers.word(*row).iter().enumerate() {
                let (row, column) = result_place(word, lane);
                values[row * columns + column] = f32::from_bits(*bits);
            }
        }
        values
    }

    /// The rows of this warp's operand in registers, which has the layout of `mma.m16n8k16`.
    fn strip(&self, words: [u32; 4], widen: fn(u16) -> f32) -> Vec<[f32; TERMS]> {
        let mut rows = vec![[0.0; TERMS]; ROWS];
        for (word, at) in words.into_iter().enumerate() {
            for (lane, bits) in self.registers.word(at).iter().enumerate() {
                let (row, column) = operand_place(word, lane);
                [rows[row][column], rows[row][column + 1]] = [*bits as u16, (*bits >> 16) as u16].map(widen);
            }
        }
        rows
    }

    /// Rows of an operand in shared memory, of 16 terms each. A transposed tile has the terms in its rows.
    fn tile(
        &self,
        launch: &mut LaunchState<'_>,
        SharedTile { descriptor, transposed }: SharedTile,
        rows: std::ops::Range<usize>,
        widen: fn(u16) -> f32,
    ) -> Trapped<Vec<[f32; TERMS]>> {
        let descriptor = self.registers.bits(descriptor, 0);
        let Some(layout) = TileLayout::of(descriptor) else {
            return trap(0, FaultKind::UnknownTile { descriptor });
        };
        let now = self.stamp(0).by_unit();
        let mut tile = vec![[0.0; TERMS]; rows.len()];
        let mut word = |row: usize, word: usize| -> Trapped<[f32; 8]> {
            let bytes = launch.shared.read(0, layout.word(row, word), 16, now)?;
            let mut values = [0.0; 8];
            let (pairs, _) = bytes.as_chunks::<2>();
            values.iter_mut().zip(pairs).for_each(|(to, pair)| *to = widen(u16::from_le_bytes(*pair)));
            Ok(values)
        };
        if transposed {
            for term in 0..TERMS {
                for at in (0..rows.len()).step_by(8) {
                    let values = word(term, (rows.start + at) / 8)?;
                    tile[at..].iter_mut().zip(values).for_each(|(row, value)| row[term] = value);
                }
            }
        } else {
            for (to, row) in tile.iter_mut().zip(rows) {
                let (low, high) = to.split_at_mut(8);
                low.copy_from_slice(&word(row, 0)?);
                high.copy_from_slice(&word(row, 1)?);
            }
        }
        Ok(tile)
    }
}

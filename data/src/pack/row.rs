//! Packed rows, and batches of them.

use numcore::{Error, Result, Runtime, Tensor, Within};

use crate::{Array, Stack, ToDevice};

/// A row of several documents; every list has one entry per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PackedRow {
    /// The tokens; 0 for padding.
    pub tokens: Vec<u32>,
    /// The next token of the document; 0 if there is none.
    pub targets: Vec<u32>,
    /// The position in its document's piece, from 0.
    pub positions: Vec<u32>,
    /// The number of its document in the row, from 1; 0 for padding.
    pub segments: Vec<u32>,
    /// The loss weight: 1, or 0 if there is no target.
    pub weights: Vec<f32>,
}

impl PackedRow {
    pub(super) fn with_room(context: usize) -> Self {
        let list = || Vec::with_capacity(context);
        let weights = Vec::with_capacity(context);
        PackedRow { tokens: list(), targets: list(), positions: list(), segments: list(), weights }
    }

    /// Appends the first `len` tokens as a segment. One more token is the target of the last.
    pub(super) fn push(&mut self, tokens: &[u32], len: usize) {
        let segment = self.segments.last().copied().unwrap_or(0) + 1;
        for (at, &token) in tokens.iter().enumerate().take(len) {
            let target = tokens.get(at + 1);
            self.tokens.push(token);
            self.targets.push(target.copied().unwrap_or(0));
            self.weights.push(if target.is_some() { 1.0 } else { 0.0 });
            self.positions.push(at as u32);
            self.segments.push(segment);
        }
    }

    /// Pads the row at its end to `context` tokens.
    pub(super) fn padded(mut self, context: usize) -> Self {
        for list in [&mut self.tokens, &mut self.targets, &mut self.positions, &mut self.segments] {
            list.resize(context, 0);
        }
        self.weights.resize(context, 0.0);
        self
    }
}

/// Packed rows as arrays, all `[B, T]`: numbers are `i64`, weights `f32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedBatch<A = Array> {
    /// The tokens; 0 for padding.
    pub tokens: A,
    /// The next token of the document; 0 if there is none.
    pub targets: A,
    /// The position in its document's piece, from 0.
    pub positions: A,
    /// The number of its document in the row, from 1; 0 for padding.
    pub segments: A,
    /// The loss weight: 1, or 0 if there is no target.
    pub weights: A,
}

impl PackedBatch {
    /// The start of each document in the batch as one long row, and the end of the last: `cu_seqlens` of
    /// variable-length attention. Padding is a sequence of its own.
    #[track_caller]
    pub fn cu_seqlens(&self) -> Result<Vec<i32>> {
        let width = self.segments.dims().last().copied().unwrap_or(0);
        let segments = self.segments.to_vec::<i64>()?;
        let end = i32::try_from(segments.len());
        let many = |_| Error::range("cu_seqlens", "number of tokens", segments.len(), "at most what an i32 counts");
        let end = end.map_err(many).at_caller()?;
        let begins = |at: usize| at.is_multiple_of(width) || segments[at] != segments[at - 1];
        Ok((0..end).filter(|&at| begins(at as usize)).chain([end]).collect())
    }
}

impl Stack for PackedRow {
    type Batch = PackedBatch;

    fn stack(rows: Vec<Self>) -> Result<PackedBatch> {
        let width = rows.first().map_or(0, |row| row.tokens.len());
        if let Some(at) = rows.iter().position(|row| row.tokens.len() != width) {
            let why = format!("row 0 has {width} tokens, row {at} has {}", rows[at].tokens.len());
            return Err(Error::lengths("PackedRow::stack", &[width, rows[at].tokens.len()], why));
        }
        let shape = [rows.len(), width];
        let numbers = |list: fn(&PackedRow) -> &[u32]| {
            Array::new(shape, rows.iter().flat_map(|row| list(row).iter().map(|&x| i64::from(x))).collect())
        };
        Ok(PackedBatch {
            tokens: numbers(|row| &row.tokens)?,
            targets: numbers(|row| &row.targets)?,
            positions: numbers(|row| &row.positions)?,
            segments: numbers(|row| &row.segments)?,
            weights: Array::new(shape, rows.iter().flat_map(|row| row.weights.iter().copied()).collect())?,
        })
    }
}

impl<R: Runtime> ToDevice<R> for PackedBatch {
    type OnDevice = PackedBatch<Tensor<R>>;

    fn to_device(self, rt: &R) -> Result<Self::OnDevice> {
        Ok(PackedBatch {
            tokens: self.tokens.to_tensor(rt)?,
            targets: self.targets.to_tensor(rt)?,
            positions: self.positions.to_tensor(rt)?,
            segments: self.segments.to_tensor(rt)?,
            weights: self.weights.to_tensor(rt)?,
        })
    }
}

//! Weights of experts in MXFP4: blocks of 32 elements of four bits, with a power of two each.

use std::ops::Range;

use numcore::{DType, Error, Result, Shape, placement::TensorPlacement};

/// The ends of the names of a weight's elements and of its scales.
pub(super) const PARTS: [&str; 2] = ["_blocks", "_scales"];
/// The number of elements of a block, and of its bytes.
const BLOCK: usize = 32;
const BYTES: usize = BLOCK / 2;
/// The values of the lower three bits of an element; the highest bit is the sign.
const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The shape `[E, C, R]` of a weight, of elements `[E, R, C/32, 16]` and scales `[E, R, C/32]`.
///
/// # Errors
/// Fails if they have another form, or do not fit each other.
pub(super) fn shape(name: &str, elements: (DType, Shape), scales: (DType, Shape)) -> Result<Shape> {
    match (&elements.1[..], &scales.1[..]) {
        (&[experts, rows, blocks, BYTES], &[e, r, b])
            if [e, r, b] == [experts, rows, blocks] && [elements.0, scales.0] == [DType::U8; 2] =>
        {
            Ok([experts, blocks * BLOCK, rows].into())
        }
        _ => {
            let ((a, x), (b, y)) = (elements, scales);
            let why =
                format!("its elements are {a} {x} and its scales {b} {y}, not u8 [E, R, C/32, 16] and [E, R, C/32]");
            Err(Error::format(format!("MXFP4 weight `{name}`"), why))
        }
    }
}

/// Reads a piece of a weight `[E, C, R]` as the bytes of `bf16`, in which each value is exact. `read` fills its last
/// operand with a piece of the elements (0) or of the scales (1). Only the blocks of the piece are read, an expert at a
/// time.
pub(super) fn read_piece(
    piece: &TensorPlacement,
    into: &mut [u8],
    read: impl Fn(usize, &TensorPlacement, &mut [u8]) -> Result<()>,
) -> Result<()> {
    if into.is_empty() {
        return Ok(());
    }
    let [experts, columns, rows] = sizes(piece.logical())?;
    let blocks = columns / BLOCK;
    let mut read_blocks: Vec<Range<usize>> = Vec::new();
    for range in piece.ranges(1).iter().filter(|range| !range.is_empty()) {
        let own = range.start / BLOCK..range.end.div_ceil(BLOCK);
        match read_blocks.last_mut() {
            Some(last) if own.start <= last.end => last.end = last.end.max(own.end),
            _ => read_blocks.push(own),
        }
    }
    // The places of columns among the elements that are read.
    let read_columns = read_blocks.iter().flat_map(|range| range.start * BLOCK..range.end * BLOCK).enumerate();
    let is_own = |column: &usize| piece.ranges(1).iter().any(|range| range.contains(column));
    let places: Vec<_> = read_columns.filter(|(_, column)| is_own(column)).map(|(place, _)| place).collect();
    let [_, _, width] = sizes(piece.local())?;
    let count = read_blocks.iter().map(Range::len).sum::<usize>();
    let (mut elements, mut scales) = (vec![0; width * count * BYTES], vec![0; width * count]);
    let values: Vec<[u16; 16]> = (0..=255).map(|scale| std::array::from_fn(|code| bf16(code as u8, scale))).collect();
    let by_expert = into.chunks_exact_mut(places.len() * width * 2);
    for (expert, into) in piece.ranges(0).iter().cloned().flatten().zip(by_expert) {
        let own = vec![vec![expert..expert + 1], piece.ranges(2).to_vec(), read_blocks.clone(), vec![0..BYTES]];
        read(1, &TensorPlacement::new([experts, rows, blocks].into(), own[..3].to_vec())?, &mut scales)?;
        read(0, &TensorPlacement::new([experts, rows, blocks, BYTES].into(), own)?, &mut elements)?;
        // Rows of the file are columns here: some at a time stay in the nearest cache.
        for first in (0..width).step_by(BLOCK) {
            for (column, &place) in places.iter().enumerate() {
                for row in first..width.min(first + BLOCK) {
                    let byte = elements[row * count * BYTES + place / 2];
                    // The first element of two is in the lower half.
                    let code = usize::from(byte >> (4 * (place % 2)) & 15);
                    let value = values[usize::from(scales[row * count + place / BLOCK])][code];
                    into[2 * (column * width + row)..][..2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
    Ok(())
}

fn sizes(shape: Shape) -> Result<[usize; 3]> {
    shape[..].try_into().map_err(|_| Error::internal("MXFP4", "a weight has three dimensions"))
}

/// The bits of an element in `bf16`: its value times `2^(scale − 127)`, infinite past the largest number.
fn bf16(code: u8, scale: u8) -> u16 {
    let value = (VALUES[usize::from(code & 7)] * 2f64.powi(i32::from(scale) - 127)) as f32;
    (value.to_bits() >> 16) as u16 | u16::from(code & 8) << 12
}

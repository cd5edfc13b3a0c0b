//! Tensors of experts in MXFP4: blocks of 32 elements of four bits, with a power of two each.

use std::ops::Range;

use numcore::{DType, Error, Result, Shape, placement::TensorPlacement};

/// The ends of the names of a tensor's elements and of its scales.
pub(super) const PARTS: [&str; 2] = ["_blocks", "_scales"];
/// The number of elements of a block, and of its bytes.
const BLOCK: usize = 32;
const BYTES: usize = BLOCK / 2;
/// The values of the lower three bits of an element; the highest bit is the sign.
const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The type and shape `[E, R, C]` of a tensor, of elements `[E, R, C/32, 16]` and scales `[E, R, C/32]`. Each value is
/// exact in `bf16`.
///
/// # Errors
/// Fails if they have another form, or do not fit each other.
pub(super) fn spec(name: &str, elements: (DType, Shape), scales: (DType, Shape)) -> Result<(DType, Shape)> {
    match (&elements.1[..], &scales.1[..]) {
        (&[experts, rows, blocks, BYTES], &[e, r, b])
            if [e, r, b] == [experts, rows, blocks] && [elements.0, scales.0] == [DType::U8; 2] =>
        {
            Ok((DType::BF16, [experts, rows, blocks * BLOCK].into()))
        }
        _ => {
            let ((a, x), (b, y)) = (elements, scales);
            let why =
                format!("its elements are {a} {x} and its scales {b} {y}, not u8 [E, R, C/32, 16] and [E, R, C/32]");
            Err(Error::format(format!("MXFP4 tensor `{name}`"), why))
        }
    }
}

/// Reads a piece of a tensor `[E, R, C]` as the bytes of `bf16`. `read` fills its last operand with a piece of the
/// elements (0) or of the scales (1). Only those of the piece are read.
pub(super) fn read_piece(
    piece: &TensorPlacement,
    into: &mut [u8],
    read: impl Fn(usize, &TensorPlacement, &mut [u8]) -> Result<()>,
) -> Result<()> {
    if into.is_empty() {
        return Ok(());
    }
    let Ok([experts, rows, columns]) = <[usize; 3]>::try_from(&piece.logical()[..]) else {
        return Err(Error::internal("MXFP4", "a tensor has three dimensions"));
    };
    let mut blocks: Vec<Range<usize>> = Vec::new();
    for range in piece.ranges(2) {
        let own = range.start / BLOCK..range.end.div_ceil(BLOCK);
        match blocks.last_mut() {
            Some(last) if own.start <= last.end => last.end = last.end.max(own.end),
            _ => blocks.push(own),
        }
    }
    // The places of columns among the elements that are read.
    let read_columns = blocks.iter().flat_map(|range| range.start * BLOCK..range.end * BLOCK).enumerate();
    let is_own = |column: &usize| piece.ranges(2).iter().any(|range| range.contains(column));
    let places: Vec<_> = read_columns.filter(|(_, column)| is_own(column)).map(|(place, _)| place).collect();
    let count = blocks.iter().map(Range::len).sum::<usize>();
    let lines = into.len() / (2 * places.len().max(1));
    let (mut elements, mut scales) = (vec![0; lines * count * BYTES], vec![0; lines * count]);
    let own = vec![piece.ranges(0).to_vec(), piece.ranges(1).to_vec(), blocks];
    read(1, &TensorPlacement::new([experts, rows, columns / BLOCK].into(), own.clone())?, &mut scales)?;
    let own = [own, vec![std::iter::once(0..BYTES).collect()]].concat();
    read(0, &TensorPlacement::new([experts, rows, columns / BLOCK, BYTES].into(), own)?, &mut elements)?;
    let values: Vec<[u16; 16]> = (0..=255).map(|scale| std::array::from_fn(|code| bf16(code as u8, scale))).collect();
    let stored = elements.chunks_exact(count * BYTES).zip(scales.chunks_exact(count));
    for (line, (elements, scales)) in into.chunks_exact_mut(2 * places.len()).zip(stored) {
        for (to, &place) in line.as_chunks_mut::<2>().0.iter_mut().zip(&places) {
            // The first element of two is in the lower half.
            let code = usize::from(elements[place / 2] >> (4 * (place % 2)) & 15);
            *to = values[usize::from(scales[place / BLOCK])][code].to_le_bytes();
        }
    }
    Ok(())
}

/// The bits of an element in `bf16`: its value times `2^(scale − 127)`, infinite past the largest number.
fn bf16(code: u8, scale: u8) -> u16 {
    let value = (VALUES[usize::from(code & 7)] * 2f64.powi(i32::from(scale) - 127)) as f32;
    (value.to_bits() >> 16) as u16 | u16::from(code & 8) << 12
}

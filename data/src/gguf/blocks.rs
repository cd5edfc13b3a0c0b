//! Element types, and the decoding of quantised blocks as ggml's `ggml-quants.c` and gguf's `quants.py` do it.

use half::f16;
use numcore::DType;

/// The element type of a tensor in a GGUF file. Quantised types have blocks of elements with common scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "the names of the format")]
pub enum GgufType {
    /// 32-bit floating point.
    F32,
    /// 16-bit IEEE floating point.
    F16,
    /// bfloat16.
    BF16,
    /// 64-bit floating point.
    F64,
    /// 4 bits in blocks of 32, a scale.
    Q4_0,
    /// 4 bits in blocks of 32, a scale and a minimum.
    Q4_1,
    /// 5 bits in blocks of 32, a scale.
    Q5_0,
    /// 5 bits in blocks of 32, a scale and a minimum.
    Q5_1,
    /// 8 bits in blocks of 32, a scale.
    Q8_0,
    /// 4 bits in blocks of 256, with 8 scales and minima of 6 bits.
    Q4_K,
    /// 5 bits in blocks of 256, with 8 scales and minima of 6 bits.
    Q5_K,
    /// 6 bits in blocks of 256, with 16 scales of 8 bits.
    Q6_K,
    /// 4 bits in blocks of 32, a power of two.
    MXFP4,
}

impl GgufType {
    /// All types that are read.
    pub const ALL: [GgufType; 13] = [
        GgufType::F32,
        GgufType::F16,
        GgufType::BF16,
        GgufType::F64,
        GgufType::Q4_0,
        GgufType::Q4_1,
        GgufType::Q5_0,
        GgufType::Q5_1,
        GgufType::Q8_0,
        GgufType::Q4_K,
        GgufType::Q5_K,
        GgufType::Q6_K,
        GgufType::MXFP4,
    ];

    /// The number of the type in files, and the elements and bytes of a block.
    const fn row(self) -> (u32, usize, usize) {
        match self {
            GgufType::F32 => (0, 1, 4),
            GgufType::F16 => (1, 1, 2),
            GgufType::Q4_0 => (2, 32, 18),
            GgufType::Q4_1 => (3, 32, 20),
            GgufType::Q5_0 => (6, 32, 22),
            GgufType::Q5_1 => (7, 32, 24),
            GgufType::Q8_0 => (8, 32, 34),
            GgufType::Q4_K => (12, 256, 144),
            GgufType::Q5_K => (13, 256, 176),
            GgufType::Q6_K => (14, 256, 210),
            GgufType::F64 => (28, 1, 8),
            GgufType::BF16 => (30, 1, 2),
            GgufType::MXFP4 => (39, 32, 17),
        }
    }

    /// The type of a number in files.
    pub(super) fn of(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }

    /// The number of the type in files.
    pub fn id(self) -> u32 {
        self.row().0
    }

    /// The number of elements in a block; 1 if the type is not quantised.
    pub fn block(self) -> usize {
        self.row().1
    }

    /// The size in bytes of `elements` elements, a multiple of a block's.
    pub fn bytes(self, elements: usize) -> usize {
        elements / self.block() * self.row().2
    }

    /// The type of elements that are read: `F32` of quantised blocks.
    pub fn dtype(self) -> DType {
        match self {
            GgufType::F16 => DType::F16,
            GgufType::BF16 => DType::BF16,
            GgufType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// Appends the elements of quantised blocks. Other types have none.
    pub(super) fn decode(self, bytes: &[u8], to: &mut Vec<f32>) {
        let decode = match self {
            GgufType::Q4_0 => q4_0,
            GgufType::Q4_1 => q4_1,
            GgufType::Q5_0 => q5_0,
            GgufType::Q5_1 => q5_1,
            GgufType::Q8_0 => q8_0,
            GgufType::Q4_K => q4_k,
            GgufType::Q5_K => q5_k,
            GgufType::Q6_K => q6_k,
            GgufType::MXFP4 => mxfp4,
            GgufType::F32 | GgufType::F16 | GgufType::BF16 | GgufType::F64 => return,
        };
        bytes.chunks_exact(self.row().2).for_each(|block| decode(block, to));
    }
}

/// The `f16` at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32 numbers of four bits in 16 bytes: all low halves first.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

/// The numbers of five bits: four in `low`, and a bit of the four bytes `high` for each.
fn fives(high: &[u8], low: &[u8]) -> impl Iterator<Item = u8> {
    nibbles(low).enumerate().map(move |(i, x)| x | (high[i / 8] >> (i % 8) & 1) << 4)
}

fn q4_0(block: &[u8], to: &mut Vec<f32>) {
    let scale = half(block, 0);
    to.extend(nibbles(&block[2..]).map(|x| (f32::from(x) - 8.0) * scale));
}

fn q4_1(block: &[u8], to: &mut Vec<f32>) {
    let (scale, least) = (half(block, 0), half(block, 2));
    to.extend(nibbles(&block[4..]).map(|x| f32::from(x) * scale + least));
}

fn q5_0(block: &[u8], to: &mut Vec<f32>) {
    let scale = half(block, 0);
    to.extend(fives(&block[2..6], &block[6..]).map(|x| (f32::from(x) - 16.0) * scale));
}

fn q5_1(block: &[u8], to: &mut Vec<f32>) {
    let (scale, least) = (half(block, 0), half(block, 2));
    to.extend(fives(&block[4..8], &block[8..]).map(|x| f32::from(x) * scale + least));
}

fn q8_0(block: &[u8], to: &mut Vec<f32>) {
    let scale = half(block, 0);
    to.extend(block[2..].iter().map(|x| f32::from(x.cast_signed()) * scale));
}

/// The scale and minimum of the `i`-th 32 elements, of six bits each, in 12 bytes.
fn scale_and_least(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, least) = match i {
        0..4 => (packed[i] & 63, packed[i + 4] & 63),
        _ => (packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4),
    };
    (scale.into(), least.into())
}

fn q4_k(block: &[u8], to: &mut Vec<f32>) {
    let (scale, least) = (half(block, 0), half(block, 2));
    for (i, low) in block[16..].chunks_exact(32).enumerate() {
        for (i, shift) in [(2 * i, 0), (2 * i + 1, 4)] {
            let own = scale_and_least(&block[4..16], i);
            let (scale, least) = (scale * own.0, least * own.1);
            to.extend(low.iter().map(|b| scale * f32::from(b >> shift & 15) - least));
        }
    }
}

fn q5_k(block: &[u8], to: &mut Vec<f32>) {
    let (scale, least, high) = (half(block, 0), half(block, 2), &block[16..48]);
    for (i, low) in block[48..].chunks_exact(32).enumerate() {
        for (i, shift) in [(2 * i, 0), (2 * i + 1, 4)] {
            let own = scale_and_least(&block[4..16], i);
            let (scale, least) = (scale * own.0, least * own.1);
            let five = |(low, high): (&u8, &u8)| f32::from(low >> shift & 15 | (high >> i & 1) << 4);
            to.extend(low.iter().zip(high).map(|pair| scale * five(pair) - least));
        }
    }
}

fn q6_k(block: &[u8], to: &mut Vec<f32>) {
    let scale = half(block, 208);
    for (i, scales) in block[192..208].chunks_exact(8).enumerate() {
        let (low, high) = (&block[64 * i..][..64], &block[128 + 32 * i..][..32]);
        for part in 0..4 {
            for (at, high) in high.iter().enumerate() {
                let four = low[at + part % 2 * 32] >> (part / 2 * 4) & 15;
                let six = four | (high >> (2 * part) & 3) << 4;
                let scale = scale * f32::from(scales[2 * part + at / 16].cast_signed());
                to.push(scale * (f32::from(six) - 32.0));
            }
        }
    }
}

/// Numbers of a sign and three bits, which have these values, times half of a power of two.
fn mxfp4(block: &[u8], to: &mut Vec<f32>) {
    const VALUES: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let scale = f32::from_bits(match block[0] {
        exponent @ 0..2 => 0x0020_0000 << exponent,
        exponent => u32::from(exponent - 1) << 23,
    });
    let value = |x: u8| if x < 8 { VALUES[usize::from(x)] } else { -VALUES[usize::from(x & 7)] };
    to.extend(nibbles(&block[1..]).map(|x| f32::from(value(x)) * scale));
}

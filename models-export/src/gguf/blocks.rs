//! Encoding of elements in GGUF files.

use data::gguf::GgufType;
use half::{bf16, f16};
use numcore::{Error, Result};

use super::GgufWeights;

impl GgufWeights {
    /// The element type in GGUF files.
    pub(super) fn kind(self) -> GgufType {
        match self {
            GgufWeights::F32 => GgufType::F32,
            GgufWeights::F16 => GgufType::F16,
            GgufWeights::BF16 => GgufType::BF16,
            GgufWeights::Q8_0 => GgufType::Q8_0,
        }
    }

    /// The value of `general.file_type` for a file with matrices of this type.
    pub(super) fn file_type(self) -> u32 {
        match self {
            GgufWeights::F32 => 0,
            GgufWeights::F16 => 1,
            GgufWeights::Q8_0 => 7,
            GgufWeights::BF16 => 32,
        }
    }

    /// Encodes elements as bytes.
    ///
    /// # Errors
    /// Fails if a finite value is too large for the type, or `Q8_0` is given one that is not finite.
    pub(super) fn encode(self, name: &str, values: &[f32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.kind().bytes(values.len()));
        match self {
            GgufWeights::F32 => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
            GgufWeights::BF16 => values.iter().for_each(|&x| bytes.extend(bf16::from_f32(x).to_le_bytes())),
            GgufWeights::F16 => {
                for &x in values {
                    bytes.extend(fitting(name, x)?.to_le_bytes());
                }
            }
            GgufWeights::Q8_0 => {
                for block in values.chunks_exact(self.kind().block()) {
                    quantize(name, block, &mut bytes)?;
                }
            }
        }
        Ok(bytes)
    }
}

/// Encodes a block of `Q8_0`: the scale `max|x| / 127` as `f16`, and each element over the scale, rounded half away
/// from 0.
fn quantize(name: &str, block: &[f32], bytes: &mut Vec<u8>) -> Result<()> {
    if let Some(x) = block.iter().find(|x| !x.is_finite()) {
        return Err(Error::state(name, format!("holds {x}, which has no place in Q8_0: write F32")));
    }
    let scale = block.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    bytes.extend(fitting(name, scale)?.to_le_bytes());
    // The inverse of a subnormal scale may be infinite; casts saturate, and turn NaN into 0.
    bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
    Ok(())
}

fn fitting(name: &str, x: f32) -> Result<f16> {
    let rounded = f16::from_f32(x);
    if rounded.is_infinite() && x.is_finite() {
        return Err(Error::state(name, format!("holds {x}, which is too large for f16: write BF16 or F32")));
    }
    Ok(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 32;

    /// Values with a scale of 1, and ties, whose block is known by hand.
    #[test]
    fn a_block_of_q8_0() {
        let mut block = [0f32; BLOCK];
        (block[0], block[1], block[2], block[3], block[31]) = (127.0, -0.5, 0.5, -126.4, 2.5);
        let bytes = GgufWeights::Q8_0.encode("w", &block).unwrap();
        assert_eq!(bytes.len(), GgufType::Q8_0.bytes(BLOCK));
        assert_eq!(bytes[..2], f16::ONE.to_le_bytes());
        let due: Vec<u8> = [127i8, -1, 1, -126].map(i8::cast_unsigned).to_vec();
        assert_eq!(bytes[2..6], due);
        assert_eq!((bytes[6], bytes[33]), (0, 3));
        assert_eq!(GgufWeights::Q8_0.encode("w", &[0.0; BLOCK]).unwrap(), [0; 34]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = |weights: GgufWeights, x: f32| weights.encode("w", &[x; BLOCK]).unwrap_err().to_string();
        assert!(error(GgufWeights::F16, 1e5).contains("BF16"));
        assert!(error(GgufWeights::Q8_0, f32::NAN).contains("NaN"));
        assert!(error(GgufWeights::Q8_0, 1e8).contains("f16"));
        assert_eq!(GgufWeights::F16.encode("w", &[f32::INFINITY]).unwrap(), f16::INFINITY.to_le_bytes());
        assert!(GgufWeights::BF16.encode("w", &[1e5]).is_ok());
    }
}

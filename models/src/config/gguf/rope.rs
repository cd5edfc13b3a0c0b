//! Rotary positions in the metadata of a GGUF file.

use data::gguf::{GgufFile, GgufValue};
use nn::Rotary;
use numcore::Result;

use super::Keys;
use crate::config::{RopeConfig, RopeScaling, rope_scaling::long_attention};

/// The tensor with the divisors of frequencies, for the scaling of Llama 3.
const DIVISORS: &str = "rope_freqs.weight";
/// The tensors with the divisors of LongRoPE, of texts up to the first context and of longer ones.
const LONG_DIVISORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// The positions of heads of some width, of which a number of components are rotated.
pub(super) fn rope(keys: &mut Keys<'_>, context: u64, [head_dim, rotated]: [u64; 2]) -> Result<RopeConfig> {
    let part = rotated as f64 / head_dim.max(1) as f64;
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    let old = keys.number("rope.scale_linear")?;
    let kind = keys.typed("rope.scaling.type", "a string", GgufValue::text)?;
    let factor = keys.number("rope.scaling.factor")?.or(old);
    let original = keys.count("rope.scaling.original_context_length")?.unwrap_or(context) as f64;
    let is_long = LONG_DIVISORS.iter().any(|name| keys.file.tensor(name).is_ok());
    let (fast, slow) = (keys.number("rope.scaling.yarn_beta_fast")?, keys.number("rope.scaling.yarn_beta_slow")?);
    let attention = keys.number("rope.scaling.attn_factor")?;
    keys.typed("rope.scaling.finetuned", "a boolean", GgufValue::flag)?;
    let scaling = match (kind.or(old.map(|_| "linear")), factor) {
        (Some("linear"), Some(factor)) if factor > 0.0 => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) if factor > 0.0 => {
            // llama.cpp multiplies the usual factor of cosines and sines by this one.
            let usual = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            let (fast, slow) = (fast.unwrap_or(32.0), slow.unwrap_or(1.0));
            let attention = usual * attention.unwrap_or(1.0);
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate: true, all_dim: 0.0 }
        }
        (None | Some("longrope"), None) if is_long => {
            let [short, long] = LONG_DIVISORS.map(|name| divisors(keys.file, name, rotated));
            let usual = long_attention(context as f64 / original, original);
            // Converters write the usual factor in f32.
            let attention = attention.filter(|own| (own / usual - 1.0).abs() > 1e-6).unwrap_or(usual);
            RopeScaling::LongRope { short: short?, long: long?, original, attention }
        }
        (None | Some("none"), None) => RopeScaling::Default,
        (kind, factor) => {
            let why = format!("is {kind:?} with the factor {factor:?}; linear and yarn are known");
            return Err(keys.wrong("rope.scaling.type", why));
        }
    };
    let is_scaled = matches!(scaling, RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. });
    if let Some(attention) = attention.filter(|x| *x != 1.0 && !is_scaled) {
        let why = format!("is {attention}, which is not computed here without yarn");
        return Err(keys.wrong("rope.scaling.attn_factor", why));
    }
    let is_plain = matches!(scaling, RopeScaling::Default | RopeScaling::Linear { factor: 1.0 });
    match keys.file.tensor(DIVISORS) {
        Ok(_) if is_plain => Ok(RopeConfig { theta, part, scaling: llama3(keys.file, theta, head_dim)? }),
        Ok(_) => Err(keys.file.wrong(DIVISORS, "is beside another scaling of frequencies")),
        Err(_) => Ok(RopeConfig { theta, part, scaling }),
    }
}

/// The divisors of frequencies in a tensor, one for each pair of `rotated` components.
fn divisors(file: &GgufFile, name: &str, rotated: u64) -> Result<Vec<f64>> {
    let (kind, shape) = file.tensor(name)?;
    let rotated = usize::try_from(rotated).unwrap_or(usize::MAX);
    if kind.id() != 0 || shape[..] != [rotated / 2] {
        return Err(file.wrong(name, format_args!("is {kind:?} {shape}, no f32 of each pair of {rotated} channels")));
    }
    let mut bytes = vec![0; 4 * shape.numel()];
    file.read(name, 0, &mut bytes)?;
    let shortest = |x: f32| GgufValue::F32(x).number().unwrap_or_default();
    Ok(bytes.as_chunks::<4>().0.iter().map(|x| shortest(f32::from_le_bytes(*x))).collect())
}

/// The scaling of Llama 3 with the divisors of a file, which has no numbers of it. The divisors depend on ratios of its
/// numbers alone: published ones are tried, with any power of two as the first context.
fn llama3(file: &GgufFile, theta: f64, head_dim: u64) -> Result<RopeScaling> {
    let given = divisors(file, DIVISORS, head_dim)?;
    let head_dim = usize::try_from(head_dim).unwrap_or(usize::MAX);
    let plain = Rotary::new(theta, head_dim);
    // Converters compute divisors in f32.
    let fits = |scaling: &RopeScaling| {
        let stretched = RopeConfig { theta, part: 1.0, scaling: scaling.clone() }.rotary(head_dim);
        let divisors = plain.frequencies.iter().zip(&stretched.frequencies).map(|(plain, own)| plain / own);
        divisors.zip(&given).all(|(own, given)| (own / given - 1.0).abs() < 1e-5)
    };
    let factor = given.iter().copied().fold(1.0, f64::max);
    let scaling = |power: u32| RopeScaling::Llama3 { factor, low: 1.0, high: 4.0, original: f64::from(1 << power) };
    (0..24).rev().map(scaling).find(fits).ok_or_else(|| {
        file.wrong(DIVISORS, "has divisors of frequencies that are not those of Llama 3: no other kind is known")
    })
}

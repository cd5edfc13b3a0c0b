//! The scaling of rotary positions for longer contexts, as `config.json` has it.

use nn::Rotary;
use numcore::{Error, Result};
use serde_json::{Map, Value, json};

use crate::files::JsonObject;

/// The scaling of frequencies for contexts longer than those a model was first trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Divides all frequencies, and so positions, by `factor` (Chen et al. 2023).
    Linear {
        /// The ratio of the longer context to the first.
        factor: f64,
    },
    /// Divides low frequencies alone, with a linear transition (Llama 3.1).
    Llama3 {
        /// The ratio of the longer context to the first.
        factor: f64,
        /// Wavelengths above `original / low` are scaled in full.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// The context that the model was first trained on.
        original: f64,
    },
    /// Divides low frequencies alone, by the turns they make in the first context; cosines and sines are scaled (YaRN,
    /// Peng et al. 2023).
    Yarn {
        /// The ratio of the longer context to the first.
        factor: f64,
        /// Pairs that make more turns are kept.
        fast: f64,
        /// Pairs that make fewer turns are scaled in full.
        slow: f64,
        /// The context that the model was first trained on.
        original: f64,
        /// The factor of cosines and sines.
        attention: f64,
        /// True if the transition begins and ends at integer pairs.
        truncate: bool,
        /// The multiplier `m` of scores' factor in DeepSeek-V3, `(0.1 · m · ln factor + 1)²`; 0 for no factor.
        all_dim: f64,
    },
    /// Divides each pair's frequency by a factor of its own, in sequences longer than the first context by another.
    /// Cosines and sines are scaled (LongRoPE, Ding et al. 2024). The last position of a text tells its length, and a
    /// row without segments is one text. So padding on the right counts, unless it is given positions that do not.
    LongRope {
        /// The divisor of each pair in sequences up to the first context.
        short: Vec<f64>,
        /// The divisor of each pair in longer sequences.
        long: Vec<f64>,
        /// The context that the model was first trained on.
        original: f64,
        /// The factor of cosines and sines.
        attention: f64,
    },
}

/// The fields that every kind of scaling may have.
const COMMON: [&str; 5] =
    ["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"];

impl RopeScaling {
    /// The fields of a kind of scaling besides [`COMMON`]; `None` if the kind is not known.
    fn own_fields(kind: &str) -> Option<&'static [&'static str]> {
        Some(match kind {
            "default" => &[],
            "linear" => &["factor"],
            "llama3" => &["factor", "low_freq_factor", "high_freq_factor"],
            "longrope" => &["factor", "short_factor", "long_factor", "attention_factor"],
            "yarn" => &["factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"],
            _ => return None,
        })
    }

    /// Reads the fields of `part`. The first context is the field's, or `context`, unless `original` gives it.
    pub(super) fn read(part: &JsonObject, context: usize, original: Option<usize>) -> Result<Self> {
        let kind = match part.text("rope_type")?.or(part.text("type")?).unwrap_or("default") {
            // The name in the first files.
            "su" => "longrope",
            kind => kind,
        };
        let positive = |name: &str, default: Option<f64>| {
            let value = part.need(name, part.number(name)?.or(default))?;
            if value > 0.0 { Ok(value) } else { Err(part.wrong(name, format_args!("is {value}, and must be above 0"))) }
        };
        let own = RopeScaling::own_fields(kind);
        let known = |name: &str| COMMON.contains(&name) || own.is_none_or(|own| own.contains(&name));
        if let Some(name) = part.fields().keys().find(|name| part.get(name).is_some() && !known(name)) {
            return Err(part.wrong(name, format_args!("is no field of rotary positions of type `{kind}`")));
        }
        let original = || match original {
            Some(original) => Ok(original as f64),
            None => positive("original_max_position_embeddings", Some(context as f64)),
        };
        Ok(match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: positive("factor", None)? },
            "llama3" => RopeScaling::Llama3 {
                factor: positive("factor", None)?,
                low: positive("low_freq_factor", None)?,
                high: positive("high_freq_factor", None)?,
                original: original()?,
            },
            "yarn" => RopeScaling::Yarn {
                factor: positive("factor", None)?,
                fast: positive("beta_fast", Some(32.0))?,
                slow: positive("beta_slow", Some(1.0))?,
                original: original()?,
                attention: yarn_attention(part, positive("factor", None)?)?,
                truncate: part.flag("truncate")?.unwrap_or(true),
                all_dim: part.number("mscale_all_dim")?.unwrap_or(0.0),
            },
            "longrope" => {
                let (short, long) = (divisors(part, "short_factor")?, divisors(part, "long_factor")?);
                let original = original()?;
                let factor = positive("factor", Some(context as f64 / original))?;
                let usual = long_attention(factor, original);
                RopeScaling::LongRope { short, long, original, attention: positive("attention_factor", Some(usual))? }
            }
            other => {
                let why = format!("is `{other}`; default, linear, llama3, yarn and longrope are known");
                return Err(part.wrong("rope_type", why));
            }
        })
    }

    /// The factor of attention's scores in DeepSeek-V3, besides that of a head's width.
    pub(crate) fn score_factor(&self) -> f64 {
        match *self {
            RopeScaling::Yarn { factor, all_dim, .. } if all_dim != 0.0 => yarn_scale(factor, all_dim).powi(2),
            _ => 1.0,
        }
    }

    /// Tells whether cosines and sines have the factor that a file need not give.
    pub(super) fn has_usual_attention(&self, context: usize) -> bool {
        match self {
            RopeScaling::LongRope { original, attention, .. } => {
                *attention == long_attention(context as f64 / original, *original)
            }
            _ => false,
        }
    }

    /// The frequencies of pairs, from those without a scaling and their base.
    pub(super) fn of(&self, plain: Rotary, theta: f64) -> Rotary {
        match *self {
            RopeScaling::Default => plain,
            RopeScaling::Linear { factor } => each(plain, |_, f| f / factor),
            RopeScaling::Llama3 { factor, low, high, original } => {
                each(plain, |_, f| llama3(f, factor, low, high, original))
            }
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate, .. } => {
                let ramp = yarn_ramp(theta, 2 * plain.frequencies.len(), [fast, slow], original, truncate);
                let stretched = each(plain, |i, f| f / factor * ramp(i) + f * (1.0 - ramp(i)));
                Rotary { scale: attention, ..stretched }
            }
            RopeScaling::LongRope { ref short, ref long, original, attention } => {
                let divided = |by: &[f64]| plain.frequencies.iter().zip(by).map(|(f, by)| f / by).collect();
                let long = Some((original as usize, divided(long)));
                Rotary { frequencies: divided(short), scale: attention, long, ..plain }
            }
        }
    }

    /// The fields as transformers 5 writes them.
    pub(super) fn to_json(&self) -> Map<String, Value> {
        let fields = match self {
            RopeScaling::Default => json!({ "rope_type": "default" }),
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": *original as u64
            }),
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate, all_dim } => json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow,
                "attention_factor": attention, "truncate": truncate, "mscale_all_dim": (*all_dim != 0.0).then_some(all_dim),
                "original_max_position_embeddings": *original as u64
            }),
            RopeScaling::LongRope { short, long, original, attention } => json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention,
                "original_max_position_embeddings": *original as u64
            }),
        };
        let fields = fields.as_object().cloned().unwrap_or_default();
        fields.into_iter().filter(|(_, value)| !value.is_null()).collect()
    }
}

/// The divisors of pairs, all above 0.
fn divisors(part: &JsonObject, name: &str) -> Result<Vec<f64>> {
    let above_0 = |number: &Value| number.as_f64().filter(|number| *number > 0.0);
    let list = part.need(name, part.get(name))?.as_array();
    let divisors = list.and_then(|list| list.iter().map(above_0).collect());
    divisors.ok_or_else(|| part.wrong(name, "is no list of numbers above 0"))
}

/// The factor of cosines and sines in LongRoPE, where a file gives none.
pub(super) fn long_attention(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

/// Changes each frequency by a function of its index and value.
fn each(rotary: Rotary, change: impl Fn(usize, f64) -> f64) -> Rotary {
    let frequencies = rotary.frequencies.iter().enumerate().map(|(i, &f)| change(i, f)).collect();
    Rotary { frequencies, ..rotary }
}

fn llama3(frequency: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * std::f64::consts::PI / frequency;
    if wavelength > original / low {
        return frequency / factor;
    }
    if wavelength < original / high {
        return frequency;
    }
    let part = (original / wavelength - low) / (high - low);
    frequency * ((1.0 - part) / factor + part)
}

/// The scaled part of each pair's frequency: 0 for pairs that make many turns in the first context, 1 for those that
/// make few.
fn yarn_ramp(theta: f64, rotated: usize, turns: [f64; 2], original: f64, truncate: bool) -> impl Fn(usize) -> f64 {
    let pair =
        |turns: f64| rotated as f64 * (original / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let [mut first, mut last] = turns.map(pair);
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, last) = (first.max(0.0), last.min(rotated as f64 - 1.0));
    // Two equal ends would divide by 0.
    let last = if first == last { last + 0.001 } else { last };
    move |i| ((i as f64 - first) / (last - first)).clamp(0.0, 1.0)
}

/// YaRN's growth of values for a longer context, with a multiplier.
fn yarn_scale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

fn yarn_attention(part: &JsonObject, factor: f64) -> Result<f64> {
    let scale = |m: f64| yarn_scale(factor, m);
    if let Some(given) = part.number("attention_factor")? {
        return Ok(given);
    }
    let nonzero = |name| Ok::<_, Error>(part.number(name)?.filter(|m| *m != 0.0));
    Ok(match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(m), Some(all)) => scale(m) / scale(all),
        _ => scale(1.0),
    })
}

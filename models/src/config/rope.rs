//! Rotary positions in `config.json`: the frequencies, and their scaling for longer contexts.

use nn::Rotary;
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use super::{ConfigFields, Family};
use crate::files::JsonObject;

/// Rotary positions: the base and the scaling of frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies, `rope_theta`.
    pub theta: f64,
    /// The scaling of frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// The scaling of frequencies for contexts longer than those a model was first trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    },
}

impl RopeConfig {
    /// Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.
    ///
    /// # Errors
    /// Fails if the kind of scaling is not known, or one of its numbers is missing or out of range. Fails too if a
    /// field is not of that kind, or the two objects differ.
    #[track_caller]
    pub fn read(fields: &ConfigFields, default_theta: f64, context: usize) -> Result<Self> {
        Self::read_of(fields, fields.part("rope_parameters").at_caller()?, default_theta, context).at_caller()
    }

    /// The positions of a family's layers, and of its layers with a window where they have others.
    pub(super) fn read_all(
        fields: &ConfigFields,
        family: Family,
        theta: f64,
        context: usize,
    ) -> Result<(Self, Option<Self>)> {
        let says_nothing = ["rope_parameters", "rope_scaling"].iter().all(|name| fields.get(name).is_none());
        if family == Family::GptOss && says_nothing {
            let (factor, fast, slow, original, truncate) = (32.0, 32.0, 1.0, 4096.0, false);
            let attention = 0.1 * f64::ln(factor) + 1.0;
            let scaling = RopeScaling::Yarn { factor, fast, slow, original, attention, truncate };
            return Ok((RopeConfig { theta: fields.number_or("rope_theta", theta)?, scaling }, None));
        }
        if family != Family::Gemma3 {
            return Ok((Self::read(fields, theta, context)?, None));
        }
        const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
        let both = fields.part("rope_parameters")?;
        if let Some(name) = both.as_ref().and_then(|both| both.fields().keys().find(|name| !KINDS.contains(&&***name)))
        {
            return Err(
                fields.wrong("rope_parameters", format_args!("has `{name}`; {} are known", KINDS.join(" and ")))
            );
        }
        let part = |kind| both.as_ref().map_or(Ok(None), |both| both.object(kind));
        let local = fields.number_or("rope_local_base_freq", 10_000.0)?;
        let none = || JsonObject::of("config.json", Map::new());
        let local = Self::of(&part(KINDS[1])?.unwrap_or_else(none), local, context)?;
        Ok((Self::read_of(fields, part(KINDS[0])?, theta, context)?, Some(local)))
    }

    /// Writes the fields from which these positions, and those of layers with a window, can be read again.
    pub(super) fn insert_into(&self, fields: &mut Map<String, Value>, local: Option<&Self>) {
        let own = Value::Object(self.to_json());
        fields.remove("rope_scaling");
        // Versions of transformers before 5 read these.
        fields.insert("rope_theta".into(), json!(self.theta));
        if self.scaling != RopeScaling::Default {
            fields.insert("rope_scaling".into(), own.clone());
        }
        let parameters = match local {
            None => own,
            Some(local) => {
                fields.insert("rope_local_base_freq".into(), json!(local.theta));
                json!({ "full_attention": own, "sliding_attention": local.to_json() })
            }
        };
        fields.insert("rope_parameters".into(), parameters);
    }

    fn read_of(fields: &ConfigFields, new: Option<JsonObject>, default_theta: f64, context: usize) -> Result<Self> {
        // Files often have both, one of them empty.
        let filled = |part: &JsonObject| !part.fields().is_empty();
        let (new, old) = (new.filter(filled), fields.part("rope_scaling")?.filter(filled));
        let plain = fields.number_or("rope_theta", default_theta)?;
        fields.number_or("partial_rotary_factor", 1.0)?;
        let read = |part: &JsonObject| Self::of(part, plain, context);
        rotates_whole_heads(fields)?;
        match (new.as_ref().map(read).transpose()?, old.as_ref().map(read).transpose()?) {
            (Some(new), Some(old)) if new != old => {
                Err(fields.wrong("rope_parameters", "differs from `rope_scaling`: remove the wrong one"))
            }
            (Some(found), _) | (None, Some(found)) => Ok(found),
            (None, None) => read(&JsonObject::of("config.json", Map::new())),
        }
    }

    fn of(part: &JsonObject, theta: f64, context: usize) -> Result<Self> {
        let theta = part.number("rope_theta")?.unwrap_or(theta);
        rotates_whole_heads(part)?;
        // Frequencies must fall from pair to pair.
        if theta <= 1.0 {
            return Err(part.wrong("rope_theta", format_args!("is {theta}, and must be above 1")));
        }
        Ok(RopeConfig { theta, scaling: RopeScaling::read(part, context)? })
    }

    /// The frequencies of a head of width `head_dim`.
    pub fn rotary(&self, head_dim: usize) -> Rotary {
        let plain = Rotary::new(self.theta, head_dim);
        match self.scaling {
            RopeScaling::Default => plain,
            RopeScaling::Linear { factor } => each(plain, |_, f| f / factor),
            RopeScaling::Llama3 { factor, low, high, original } => {
                each(plain, |_, f| llama3(f, factor, low, high, original))
            }
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate } => {
                let ramp = yarn_ramp(self.theta, head_dim, [fast, slow], original, truncate);
                let stretched = each(plain, |i, f| f / factor * ramp(i) + f * (1.0 - ramp(i)));
                Rotary { scale: attention, ..stretched }
            }
        }
    }

    /// The fields as transformers 5 writes them.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = Map::from_iter([("rope_theta".to_owned(), json!(self.theta))]);
        let more = match self.scaling {
            RopeScaling::Default => json!({ "rope_type": "default" }),
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original as u64
            }),
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate } => json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow,
                "attention_factor": attention, "truncate": truncate,
                "original_max_position_embeddings": original as u64
            }),
        };
        fields.extend(more.as_object().cloned().unwrap_or_default());
        fields
    }
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
            "yarn" => &["factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"],
            _ => return None,
        })
    }

    fn read(part: &JsonObject, context: usize) -> Result<Self> {
        let kind = part.text("rope_type")?.or(part.text("type")?).unwrap_or("default");
        let positive = |name: &str, default: Option<f64>| {
            let value = part.need(name, part.number(name)?.or(default))?;
            if value > 0.0 { Ok(value) } else { Err(part.wrong(name, format_args!("is {value}, and must be above 0"))) }
        };
        let own = RopeScaling::own_fields(kind);
        let known = |name: &str| COMMON.contains(&name) || own.is_none_or(|own| own.contains(&name));
        if let Some(name) = part.fields().keys().find(|name| part.get(name).is_some() && !known(name)) {
            return Err(part.wrong(name, format_args!("is no field of rotary positions of type `{kind}`")));
        }
        let original = || positive("original_max_position_embeddings", Some(context as f64));
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
            },
            other => {
                let why = format!("is `{other}`; default, linear, llama3 and yarn are known");
                return Err(part.wrong("rope_type", why));
            }
        })
    }
}

/// Checks that heads are rotated in full: transformers' models of these families do not read the field.
fn rotates_whole_heads(fields: &JsonObject) -> Result<()> {
    match fields.number("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            Err(fields.wrong("partial_rotary_factor", format_args!("is {part}; these families rotate whole heads")))
        }
        _ => Ok(()),
    }
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

fn yarn_attention(part: &JsonObject, factor: f64) -> Result<f64> {
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    if let Some(given) = part.number("attention_factor")? {
        return Ok(given);
    }
    let nonzero = |name| Ok::<_, Error>(part.number(name)?.filter(|m| *m != 0.0));
    Ok(match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(m), Some(all)) => scale(m) / scale(all),
        _ => scale(1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, due: f64) {
        assert!((got - due).abs() <= due.abs() * 1e-9, "{got} is not {due}");
    }

    /// Frequencies of Llama 3.1, computed from the paper's formula independently of this code.
    #[test]
    fn the_frequencies_of_llama_3_1() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let rotary = RopeConfig { theta: 500_000.0, scaling }.rotary(128);
        for (i, due) in [
            (28, 3.211445995e-3),
            (29, 2.166570764e-3),
            (30, 1.371893568e-3),
            (32, 5.248461610e-4),
            (35, 9.556212354e-5),
            (63, 3.068925989e-7),
        ] {
            assert!((rotary.frequencies[i] / due - 1.0).abs() < 1e-8, "{i}: {}", rotary.frequencies[i]);
        }
    }

    #[test]
    fn old_and_new_fields_say_the_same() {
        let read = |json: &str| {
            let fields = serde_json::from_str(json).unwrap();
            RopeConfig::read(&ConfigFields::of(JsonObject::of("config.json", fields)), 10_000.0, 64)
        };
        let new = r#"{"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}"#;
        let old = r#"{"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}"#;
        let due = RopeConfig { theta: 500.0, scaling: RopeScaling::Linear { factor: 2.0 } };
        assert_eq!(read(new).unwrap(), due);
        assert_eq!(read(old).unwrap(), due);
        close(due.rotary(4).frequencies[1], 0.5 / 500f64.sqrt());
        let error = read(r#"{"rope_scaling": {"type": "longrope"}}"#).unwrap_err().to_string();
        assert!(error.contains("longrope") && error.contains("yarn"), "{error}");
        let error = read(r#"{"rope_scaling": {"type": "yarn"}}"#).unwrap_err().to_string();
        assert!(error.contains("`factor` is missing"), "{error}");
    }

    #[test]
    fn what_may_mean_something_else_is_refused() {
        let error = |json: &str| {
            let fields = serde_json::from_str(json).unwrap();
            let fields = ConfigFields::of(JsonObject::of("config.json", fields));
            RopeConfig::read(&fields, 10_000.0, 64).unwrap_err().to_string()
        };
        let linear = r#"{"rope_type": "linear", "factor": 2.0}"#;
        for (json, due) in [
            (
                format!(r#"{{"rope_parameters": {{"rope_type": "default"}}, "rope_scaling": {linear}}}"#),
                "`rope_scaling`",
            ),
            (r#"{"rope_scaling": {"factor": 2.0}}"#.into(), "`factor`"),
            (format!(r#"{{"rope_parameters": {{"full_attention": {linear}}}}}"#), "`full_attention`"),
            (r#"{"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1}}"#.into(), "low_freq_factor"),
            (r#"{"rope_theta": 1.0}"#.into(), "above 1"),
            (r#"{"partial_rotary_factor": 0.5}"#.into(), "whole heads"),
            (r#"{"rope_parameters": {"partial_rotary_factor": 0.5}}"#.into(), "whole heads"),
            (r#"{"rope_scaling": {"partial_rotary_factor": 0.25, "type": "linear", "factor": 2}}"#.into(), "whole"),
        ] {
            assert!(error(&json).contains(due), "{json}: {}", error(&json));
        }
        // Equal objects are no contradiction: both are written for old and new readers.
        for json in [
            format!(r#"{{"rope_parameters": {linear}, "rope_scaling": {linear}, "partial_rotary_factor": 1}}"#),
            format!(r#"{{"rope_parameters": {linear}, "rope_scaling": {{}}}}"#),
        ] {
            let fields = ConfigFields::of(JsonObject::of("config.json", serde_json::from_str(&json).unwrap()));
            assert_eq!(RopeConfig::read(&fields, 9.0, 64).unwrap().scaling, RopeScaling::Linear { factor: 2.0 });
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for scaling in [
            RopeScaling::Default,
            RopeScaling::Linear { factor: 2.5 },
            RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 },
            RopeScaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 16.0, attention: 1.25, truncate: false },
        ] {
            let config = RopeConfig { theta: 777.0, scaling };
            let fields = Map::from_iter([("rope_parameters".to_owned(), Value::Object(config.to_json()))]);
            let fields = ConfigFields::of(JsonObject::of("config.json", fields));
            assert_eq!(RopeConfig::read(&fields, 1.0, 3).unwrap(), config);
        }
    }
}

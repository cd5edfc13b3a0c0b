//! Rotary positions in `config.json`: the frequencies, and their scaling for longer contexts.

use nn::Rotary;
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use super::{ConfigFields, Family, RopeScaling};
use crate::files::JsonObject;

/// Rotary positions: the base and the scaling of frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies, `rope_theta`.
    pub theta: f64,
    /// The rotated part of a head, `partial_rotary_factor`; 1 but for Phi.
    pub part: f64,
    /// The scaling of frequencies for longer contexts.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`, of heads that are rotated in full.
    ///
    /// # Errors
    /// Fails if the kind of scaling is not known, or one of its numbers is missing or out of range. Fails too if a
    /// field is not of that kind, or the two objects differ.
    #[track_caller]
    pub fn read(fields: &ConfigFields, default_theta: f64, context: usize) -> Result<Self> {
        let assumed = Assumed { theta: default_theta, context, original: None, partial: false };
        Self::read_of(fields, fields.part("rope_parameters").at_caller()?, assumed).at_caller()
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
            let scaling = RopeScaling::Yarn { factor, fast, slow, original, attention, truncate, all_dim: 0.0 };
            return Ok((RopeConfig { theta: fields.number_or("rope_theta", theta)?, part: 1.0, scaling }, None));
        }
        let partial = family == Family::Phi3;
        // The first context of Phi is a field of its own.
        let original = partial.then(|| fields.size_or("original_max_position_embeddings", 4096)).transpose()?;
        let assumed = Assumed { theta, context, original, partial };
        if family != Family::Gemma3 {
            let found = Self::read_of(fields, fields.part("rope_parameters")?, assumed)?;
            if partial && !matches!(found.scaling, RopeScaling::Default | RopeScaling::LongRope { .. }) {
                return Err(fields.wrong("rope_scaling", "is of no type that Phi has: default and longrope are known"));
            }
            return Ok((found, None));
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
        let local = Self::of(&part(KINDS[1])?.unwrap_or_else(none), Assumed { theta: local, ..assumed }, None)?;
        Ok((Self::read_of(fields, part(KINDS[0])?, assumed)?, Some(local)))
    }

    /// Writes the fields from which these positions, and those of layers with a window, can be read again.
    pub(super) fn insert_into(
        &self,
        fields: &mut Map<String, Value>,
        (family, context): (Family, usize),
        local: Option<&Self>,
    ) {
        let own = Value::Object(self.to_json());
        fields.remove("rope_scaling");
        // Versions of transformers before 5 read these.
        fields.insert("rope_theta".into(), json!(self.theta));
        if self.scaling != RopeScaling::Default {
            fields.insert("rope_scaling".into(), own.clone());
        }
        if family == Family::Phi3 {
            fields.insert("partial_rotary_factor".into(), json!(self.part));
            if let RopeScaling::LongRope { short, long, original, .. } = &self.scaling {
                fields.insert("original_max_position_embeddings".into(), (*original as u64).into());
                // Versions before 5 take no other field here, and compute the factor of cosines and sines.
                let old = json!({ "type": "longrope", "short_factor": short, "long_factor": long });
                if self.scaling.has_usual_attention(context) {
                    fields.insert("rope_scaling".into(), old);
                }
            }
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

    fn read_of(fields: &ConfigFields, new: Option<JsonObject>, assumed: Assumed) -> Result<Self> {
        // Files often have both, one of them empty.
        let filled = |part: &JsonObject| !part.fields().is_empty();
        let (new, old) = (new.filter(filled), fields.part("rope_scaling")?.filter(filled));
        let plain = fields.number_or("rope_theta", assumed.theta)?;
        let part = fields.maybe_number("partial_rotary_factor")?;
        assumed.part(fields, part.unwrap_or(1.0))?;
        let read = |of: &JsonObject| Self::of(of, Assumed { theta: plain, ..assumed }, part);
        match (new.as_ref().map(read).transpose()?, old.as_ref().map(read).transpose()?) {
            (Some(new), Some(old)) if new != old => {
                Err(fields.wrong("rope_parameters", "differs from `rope_scaling`: remove the wrong one"))
            }
            (Some(found), _) | (None, Some(found)) => Ok(found),
            (None, None) => read(&JsonObject::of("config.json", Map::new())),
        }
    }

    fn of(of: &JsonObject, assumed: Assumed, part: Option<f64>) -> Result<Self> {
        let theta = of.number("rope_theta")?.unwrap_or(assumed.theta);
        let own = of.number("partial_rotary_factor")?;
        if let (Some(own), Some(other)) = (own, part.filter(|part| own.is_some_and(|own| own != *part))) {
            let why = format_args!("is {own}, and {other} outside of this object: remove the wrong one");
            return Err(of.wrong("partial_rotary_factor", why));
        }
        let part = assumed.part(of, own.or(part).unwrap_or(1.0))?;
        // Frequencies must fall from pair to pair.
        if theta <= 1.0 {
            return Err(of.wrong("rope_theta", format_args!("is {theta}, and must be above 1")));
        }
        Ok(RopeConfig { theta, part, scaling: RopeScaling::read(of, assumed.context, assumed.original)? })
    }

    /// The number of rotated components of a head of width `head_dim`.
    fn rotated(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.part) as usize
    }

    /// Checks that rotated components of a head of width `head_dim` are pairs, and that pairs have their numbers.
    pub(super) fn check(&self, head_dim: usize) -> Result<()> {
        let (rotated, part) = (self.rotated(head_dim), self.part);
        let wrong = |why: String| Err(Error::config("decoder", "rope", why));
        if rotated % 2 == 1 {
            return wrong(format!(
                "the {rotated} rotated components of a head of {head_dim} ({part} of it) are no pairs"
            ));
        }
        let RopeScaling::LongRope { short, long, .. } = &self.scaling else { return Ok(()) };
        for (name, divisors) in [("short_factor", short), ("long_factor", long)] {
            if divisors.len() != rotated / 2 {
                let count = divisors.len();
                return wrong(format!(
                    "`{name}` has {count} numbers for {} pairs of a head of {head_dim}",
                    rotated / 2
                ));
            }
        }
        Ok(())
    }

    /// The frequencies of a head of width `head_dim`.
    pub fn rotary(&self, head_dim: usize) -> Rotary {
        self.scaling.of(Rotary::new(self.theta, self.rotated(head_dim)), self.theta)
    }

    /// The fields as transformers 5 writes them.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = Map::from_iter([("rope_theta".to_owned(), json!(self.theta))]);
        if self.part != 1.0 {
            fields.insert("partial_rotary_factor".into(), json!(self.part));
        }
        fields.extend(self.scaling.to_json());
        fields
    }
}

/// A family's positions where fields do not say them.
#[derive(Clone, Copy)]
struct Assumed {
    theta: f64,
    context: usize,
    /// The first context, where no field of the scaling gives it.
    original: Option<usize>,
    /// True if a part of each head may be rotated; transformers' models of other families do not read the field.
    partial: bool,
}

impl Assumed {
    /// Checks the rotated part of heads, which a field of `fields` may be.
    fn part(&self, fields: &JsonObject, part: f64) -> Result<f64> {
        let wrong = |why: String| Err(fields.wrong("partial_rotary_factor", format_args!("is {part}; {why}")));
        match part {
            1.0 => Ok(part),
            _ if !self.partial => wrong("these families rotate whole heads".into()),
            _ if part > 0.0 && part < 1.0 => Ok(part),
            _ => wrong("a part of a head is above 0, and at most 1".into()),
        }
    }
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
        let rotary = RopeConfig { theta: 500_000.0, part: 1.0, scaling }.rotary(128);
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
        let due = RopeConfig { theta: 500.0, part: 1.0, scaling: RopeScaling::Linear { factor: 2.0 } };
        assert_eq!(read(new).unwrap(), due);
        assert_eq!(read(old).unwrap(), due);
        close(due.rotary(4).frequencies[1], 0.5 / 500f64.sqrt());
        let error = read(r#"{"rope_scaling": {"type": "dynamic"}}"#).unwrap_err().to_string();
        assert!(error.contains("dynamic") && error.contains("longrope"), "{error}");
        for (divisors, due) in [("", "`short_factor` is missing"), (r#", "short_factor": [1, 0]"#, "above 0")] {
            let error =
                read(&format!(r#"{{"rope_scaling": {{"type": "longrope"{divisors}}}}}"#)).unwrap_err().to_string();
            assert!(error.contains(due), "{error}");
        }
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
            RopeScaling::Yarn {
                factor: 4.0,
                fast: 32.0,
                slow: 1.0,
                original: 16.0,
                attention: 1.25,
                truncate: false,
                all_dim: 0.5,
            },
            RopeScaling::LongRope { short: vec![1.0, 2.5], long: vec![4.0, 8.0], original: 16.0, attention: 1.5 },
        ] {
            let config = RopeConfig { theta: 777.0, part: 1.0, scaling };
            let fields = Map::from_iter([("rope_parameters".to_owned(), Value::Object(config.to_json()))]);
            let fields = ConfigFields::of(JsonObject::of("config.json", fields));
            assert_eq!(RopeConfig::read(&fields, 1.0, 3).unwrap(), config);
        }
    }
}

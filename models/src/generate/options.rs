//! Options of generation: lengths, stop tokens and sampling.

use std::path::Path;

use numcore::{Error, Result, Within};
use serde_json::Value;

use super::TimeStampRules;
use crate::{
    config::{ConfigFields, UNSUPPORTED, is_generation_field},
    files::JsonObject,
};

/// The options of `generate`. By default 20 tokens, greedily.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOptions {
    /// The most tokens that are added to a prompt.
    pub max_new_tokens: usize,
    /// The most tokens of a text with its prompt; if `None`, only new tokens are limited.
    pub max_length: Option<usize>,
    /// The tokens that end a text, `eos_token_id`.
    pub eos_token_ids: Vec<u32>,
    /// The sampling of tokens; greedy if `None`.
    pub sampling: Option<Sampling>,
    /// The divisor of the logits of tokens that are in the text already; negative logits are multiplied by it. 1
    /// changes nothing.
    pub repetition_penalty: f64,
    /// The tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
    /// The tokens that are not chosen as the first after a prompt.
    pub begin_suppress_tokens: Vec<u32>,
    /// The rules of time stamps in texts of speech; none if `None`.
    pub time_stamps: Option<TimeStampRules>,
    /// The seed of the random numbers.
    pub seed: u64,
    /// The most texts that are continued at a time; all if `None`. Others wait, and take the places of those that end.
    pub rows: Option<usize>,
    /// True if the log-probability of each chosen token is computed too, by one more product with the head.
    pub logprobs: bool,
}

/// The sampling of tokens. Logits are changed in the order of the fields, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of logits.
    pub temperature: f64,
    /// The number of likeliest tokens that are kept.
    pub top_k: Option<usize>,
    /// The probability to reach with the fewest likeliest tokens, which are kept.
    pub top_p: Option<f64>,
    /// The least probability of tokens that are kept, as a part of the likeliest token's.
    pub min_p: Option<f64>,
    /// The probability to reach with the tokens that are kept, those first whose information is nearest to the entropy.
    pub typical_p: Option<f64>,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        GenerationOptions {
            max_new_tokens: 20,
            max_length: None,
            eos_token_ids: Vec::new(),
            sampling: None,
            repetition_penalty: 1.0,
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
            time_stamps: None,
            seed: 0,
            rows: None,
            logprobs: false,
        }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: None, top_p: None, min_p: None, typical_p: None }
    }
}

/// Fields of Whisper's files. Prompts are made by [`SpeechPrompt`](crate::SpeechPrompt), and the places of heads that
/// align words and sounds are not read.
const OF_WHISPER: [&str; 11] = [
    "alignment_heads",
    "forced_decoder_ids",
    "is_multilingual",
    "lang_to_id",
    "language",
    "max_initial_timestamp_index",
    "no_timestamps_token_id",
    "prev_sot_token_id",
    "return_timestamps",
    "task",
    "task_to_id",
];

impl GenerationOptions {
    /// Reads `generation_config.json` in a model's folder, or without that file the generation fields of `config.json`.
    /// A GGUF file has no options of generation, and gives the tokens that end a text alone.
    ///
    /// Absent fields have the defaults of transformers: no sampling, 20 new tokens, and `top_k` 50 if `do_sample` is
    /// true. The seed is 0. Without `max_new_tokens`, `max_length` limits prompt and new tokens together.
    ///
    /// # Errors
    /// Fails if the file cannot be read, a field is malformed, or one in use is out of range. A field that sets an
    /// unsupported option, such as `num_beams` 4, is an error too. So is an unknown field of `generation_config.json`,
    /// unless it is null.
    #[track_caller]
    pub fn of_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("generation_config.json");
        if path.is_file() {
            return Self::of_file(&JsonObject::open(&path)?).at_caller();
        }
        let fields = ConfigFields::open(folder.as_ref()).at_caller()?;
        Self::read(&fields).at_caller()
    }

    /// Reads a file of generation alone, in which every other field is an error.
    fn of_file(fields: &JsonObject) -> Result<Self> {
        let unknown = |name: &&String| {
            fields.get(name).is_some() && !is_generation_field(name) && !OF_WHISPER.contains(&name.as_str())
        };
        if let Some(name) = fields.fields().keys().find(unknown) {
            let why = "is not known here, and may change what is generated; delete it if it does not";
            return Err(fields.wrong(name, why));
        }
        Self::read(fields)
    }

    /// Reads the fields of generation of any file, and ignores others.
    fn read(fields: &JsonObject) -> Result<Self> {
        for (name, harmless) in UNSUPPORTED {
            let value = fields.get(name).filter(|v| **v != Value::Bool(false));
            if let Some(value) = value.filter(|v| !v.as_f64().is_some_and(|x| harmless.contains(&x))) {
                return Err(fields.wrong(name, format_args!("is {value}, which is not known here")));
            }
        }
        let max_length = fields.count("max_length")?;
        let sampling = Sampling {
            temperature: fields.number("temperature")?.unwrap_or(1.0),
            // The default of transformers.
            top_k: Some(fields.count("top_k")?.unwrap_or(50)).filter(|&k| k > 0),
            top_p: fields.number("top_p")?.filter(|&p| p < 1.0),
            min_p: fields.number("min_p")?,
            typical_p: fields.number("typical_p")?.filter(|&p| p < 1.0),
        };
        let options = GenerationOptions {
            // Given both, transformers takes the number of new tokens.
            max_new_tokens: fields.count("max_new_tokens")?.or(max_length).unwrap_or(20),
            max_length: max_length.filter(|_| fields.get("max_new_tokens").is_none()),
            eos_token_ids: tokens(fields, "eos_token_id")?,
            sampling: fields.flag("do_sample")?.unwrap_or(false).then_some(sampling),
            repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
            suppress_tokens: tokens(fields, "suppress_tokens")?,
            begin_suppress_tokens: tokens(fields, "begin_suppress_tokens")?,
            time_stamps: time_stamp_rules(fields)?,
            seed: 0,
            rows: None,
            logprobs: false,
        };
        options.check()?;
        Ok(options)
    }

    /// Changes the logits of the token after a prompt and the tokens that follow it, `new`, as sampling does before it
    /// draws. Tokens that are left out get −∞.
    ///
    /// # Errors
    /// Fails if an option is out of range, a logit is NaN or +∞, or there is no finite one.
    #[track_caller]
    pub fn process(&self, logits: &mut [f32], prompt: &[u32], new: &[u32]) -> Result<()> {
        self.check().at_caller()?;
        super::processors::process(logits, prompt, new, self).at_caller()
    }

    /// Checks that every option is in its range.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("generate", field, why));
        // Comparisons that NaN does not pass.
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return wrong("repetition_penalty", format!("a penalty of {} is not above 0", self.repetition_penalty));
        }
        if self.rows == Some(0) {
            return wrong("rows", "with 0 texts at a time none is continued".into());
        }
        let Some(Sampling { temperature, top_k, top_p, min_p, typical_p }) = self.sampling else { return Ok(()) };
        // Logits are divided as f32.
        let divisor = temperature as f32;
        if !(divisor.is_normal() && divisor > 0.0) {
            let why = format!("a temperature of {temperature} is not above 0; leave `sampling` out for greedy text");
            return wrong("temperature", why);
        }
        if top_k == Some(0) {
            return wrong("top_k", "the 0 likeliest tokens are none".into());
        }
        for (field, p) in [("top_p", top_p), ("min_p", min_p), ("typical_p", typical_p)] {
            if p.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
                return wrong(field, format!("`{field}` must be in [0, 1], and is {p:?}"));
            }
        }
        Ok(())
    }
}

/// The tokens of a field: one, or a list.
fn tokens(fields: &JsonObject, name: &str) -> Result<Vec<u32>> {
    let token = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    let tokens = match fields.get(name) {
        None => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(token).collect(),
        Some(one) => token(one).map(|one| vec![one]),
    };
    tokens.ok_or_else(|| fields.wrong(name, "is neither a token nor a list of them"))
}

/// The rules of time stamps, if the fields ask for them.
fn time_stamp_rules(fields: &JsonObject) -> Result<Option<TimeStampRules>> {
    let none = tokens(fields, "no_timestamps_token_id")?;
    if !fields.flag("return_timestamps")?.unwrap_or(false) {
        return Ok(None);
    }
    let (&[none], &[end, ..]) = (&none[..], &tokens(fields, "eos_token_id")?[..]) else {
        let why = "is true without `no_timestamps_token_id` and `eos_token_id`, which the rules of time stamps need";
        return Err(fields.wrong("return_timestamps", why));
    };
    let latest = tokens(fields, "max_initial_timestamp_index")?.first().copied();
    Ok(Some(TimeStampRules { first: none.saturating_add(1), end, latest_begin: latest }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<GenerationOptions> {
        GenerationOptions::of_file(&JsonObject::of("generation_config.json", serde_json::from_str(json).unwrap()))
    }

    #[test]
    fn the_file_is_understood() {
        let options =
            read(r#"{"do_sample": true, "temperature": 0.5, "eos_token_id": [1, 2], "num_beams": 1}"#).unwrap();
        assert_eq!(options.eos_token_ids, [1, 2]);
        let sampling = options.sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, Some(50), None));
        let length = |json: &str| read(json).map(|options| (options.max_new_tokens, options.max_length)).unwrap();
        assert_eq!(length(r#"{"max_length": 64}"#), (64, Some(64)));
        assert_eq!(length(r#"{"max_length": 64, "max_new_tokens": 9}"#), (9, None));
        // The defaults that transformers writes.
        for json in ["{}", r#"{"remove_invalid_values": false, "assistant_lookbehind": 10, "no_repeat_ngram_size": 0}"#]
        {
            assert_eq!(read(json).unwrap(), GenerationOptions::default());
        }
        assert_eq!(read(r#"{"eos_token_id": 7, "temperature": 2}"#).unwrap().sampling, None);
    }

    #[test]
    fn what_is_not_known_or_out_of_range_is_an_error() {
        for (json, due) in [
            (r#"{"num_beams": 4}"#, "num_beams"),
            (r#"{"bad_words_ids": [[1]]}"#, "bad_words_ids"),
            (r#"{"eos_token_id": "x"}"#, "eos_token_id"),
            (r#"{"some_new_processor": false}"#, "some_new_processor"),
            (r#"{"watermarking_config": {"bias": 2.5}}"#, "watermarking_config"),
            (r#"{"num_return_sequences": 2}"#, "num_return_sequences"),
            (r#"{"renormalize_logits": true}"#, "renormalize_logits"),
            (r#"{"stop_strings": ["x"]}"#, "stop_strings"),
            (r#"{"max_time": 2.5}"#, "max_time"),
            (r#"{"return_timestamps": true, "no_timestamps_token_id": 9}"#, "`return_timestamps` is true without"),
            (r#"{"suppress_tokens": [-1]}"#, "suppress_tokens"),
            (r#"{"no_speech_threshold": 0.6}"#, "no_speech_threshold"),
            (r#"{"is_assistant": true}"#, "is_assistant"),
            (r#"{"do_sample": true, "temperature": 0}"#, "temperature"),
            (r#"{"do_sample": true, "top_p": -0.5}"#, "top_p"),
            (r#"{"repetition_penalty": 0}"#, "penalty"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(due), "{json}: {error}");
        }
    }
}

//! The tokens that Whisper's texts begin with.

use std::{collections::BTreeMap, path::Path};

use autograd::{Var, no_grad};
use numcore::{DType, Error, Result, Runtime, Tensor, Within, ops::PointwiseOps};
use serde_json::Value;

use super::{StackMemory, Whisper};
use crate::{
    files::JsonObject,
    generate::{GenerationOptions, Prompt, TimeStampRules},
};

/// The tokens that a [`Whisper`]'s texts begin with, as `generation_config.json` has them, and the language and task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeechPrompt {
    /// The first token, `<|startoftranscript|>`.
    pub start: u32,
    /// The tokens of languages, as `<|en|>`; none of a model of English alone.
    pub languages: BTreeMap<String, u32>,
    /// The tokens of the tasks `transcribe` and `translate`.
    pub tasks: BTreeMap<String, u32>,
    /// The tokens after the first where neither a language nor a task is given; `None` for a language that is detected.
    pub forced: Vec<Option<u32>>,
    /// The language, as `en`. If it is `None`, the likeliest of each row is taken, unless `forced` has one.
    pub language: Option<String>,
    /// The task; `forced` has it if it is `None`, or it is `transcribe` where a language is given.
    pub task: Option<String>,
    /// The token of texts without time stamps, if the model has time stamps. Texts have them if
    /// [`GenerationOptions::time_stamps`] has rules.
    pub no_time_stamps: Option<u32>,
}

impl SpeechPrompt {
    /// Reads `generation_config.json` in a model's folder; what it lacks is read from `config.json`.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or a field is missing or malformed.
    #[track_caller]
    pub fn of_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let fields = JsonObject::open(&folder.join("generation_config.json")).at_caller()?;
        let path = folder.join("config.json");
        let outer = path.is_file().then(|| JsonObject::open(&path)).transpose().at_caller()?;
        let with = |name: &str| outer.as_ref().filter(|outer| fields.get(name).is_none() && outer.get(name).is_some());
        let of = |name: &str| with(name).unwrap_or(&fields);
        let start = of("decoder_start_token_id").count("decoder_start_token_id").at_caller()?;
        let start = fields.need("decoder_start_token_id", start).at_caller()?;
        let text = |name| Ok::<_, Error>(fields.text(name)?.map(str::to_owned));
        let prompt = SpeechPrompt {
            start: token(&fields, "decoder_start_token_id", start).at_caller()?,
            languages: tokens(&fields, "lang_to_id").at_caller()?,
            tasks: tokens(&fields, "task_to_id").at_caller()?,
            forced: forced(of("forced_decoder_ids")).at_caller()?,
            language: text("language").at_caller()?,
            task: text("task").at_caller()?,
            no_time_stamps: match fields.count("no_timestamps_token_id").at_caller()? {
                Some(id) => Some(token(&fields, "no_timestamps_token_id", id).at_caller()?),
                None => None,
            },
        };
        if fields.flag("is_multilingual").at_caller()? == Some(false) {
            // Transformers gives no model of English alone a language or a task.
            return Ok(SpeechPrompt { languages: BTreeMap::new(), tasks: BTreeMap::new(), ..prompt });
        }
        Ok(prompt)
    }

    /// Checks that time stamps begin after the token of texts without them.
    fn check(&self, time_stamps: Option<TimeStampRules>) -> Result<()> {
        let Some(TimeStampRules { first, .. }) = time_stamps else { return Ok(()) };
        let why = match self.no_time_stamps {
            Some(none) if none.checked_add(1) == Some(first) => return Ok(()),
            Some(none) => {
                format!("`no_time_stamps` is {none}, but the time stamps of `GenerationOptions` begin at {first}")
            }
            None => {
                "`no_time_stamps` is absent: the model has no time stamps; leave `GenerationOptions::time_stamps` out"
                    .into()
            }
        };
        Err(Error::config("SpeechPrompt", "no_time_stamps", why))
    }

    /// The tokens before the language, `None` in its place, and those after it.
    fn begin(&self) -> Vec<Option<u32>> {
        let forced: &[_] = if self.language.is_none() && self.task.is_none() { &self.forced } else { &[] };
        [Some(self.start)].into_iter().chain(forced.iter().copied()).collect()
    }

    /// Tells whether the language is that of each row of sounds.
    fn detects(&self) -> bool {
        self.language.is_none() && !self.languages.is_empty() && self.begin().get(1).copied().flatten().is_none()
    }

    /// All tokens, of a language that was detected if none is given, for a text with these time stamps.
    fn tokens(&self, detected: Option<u32>, time_stamps: Option<TimeStampRules>) -> Result<Vec<u32>> {
        let find = |field, of: &BTreeMap<String, u32>, name: &str| {
            of.get(name).copied().ok_or_else(|| {
                let known: Vec<_> = of.keys().map(String::as_str).collect();
                let why = format!("`{name}` is none of this model's: {}", known.join(", "));
                Error::config("SpeechPrompt", field, why)
            })
        };
        let mut all = self.begin();
        let language = match &self.language {
            Some(name) if name.starts_with("<|") => Some(find("language", &self.languages, name)?),
            Some(name) => Some(find("language", &self.languages, &format!("<|{}|>", name.to_lowercase()))?),
            None => detected,
        };
        match (all.get_mut(1), language) {
            (Some(place), Some(language)) => *place = Some(language),
            (None, Some(language)) => all.push(Some(language)),
            (_, None) => {}
        }
        let has_task = |all: &[Option<u32>]| all.iter().flatten().any(|token| self.tasks.values().any(|t| t == token));
        match &self.task {
            Some(task) => all.push(Some(find("task", &self.tasks, task)?)),
            None if self.language.is_some() && !self.tasks.is_empty() && !has_task(&all) => {
                all.push(Some(find("task", &self.tasks, "transcribe")?));
            }
            None => {}
        }
        let ends = self.no_time_stamps.is_some() && all.last() == Some(&self.no_time_stamps);
        match (time_stamps.is_some(), ends) {
            (true, true) => drop(all.pop()),
            (false, false) => all.push(self.no_time_stamps),
            _ => {}
        }
        Ok(all.into_iter().flatten().collect())
    }
}

fn token(fields: &JsonObject, name: &str, id: usize) -> Result<u32> {
    u32::try_from(id).map_err(|_| fields.wrong(name, format_args!("is {id}, which is no token")))
}

/// An object of tokens by name; empty if it is absent.
fn tokens(fields: &JsonObject, name: &str) -> Result<BTreeMap<String, u32>> {
    let Some(object) = fields.object(name)? else { return Ok(BTreeMap::new()) };
    let of = |key: &String| Ok((key.clone(), token(&object, key, object.need(key, object.count(key)?)?)?));
    object.fields().keys().map(of).collect()
}

/// The tokens at places 1, 2, … of `forced_decoder_ids`.
fn forced(fields: &JsonObject) -> Result<Vec<Option<u32>>> {
    let list = fields.get("forced_decoder_ids").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let of = |(i, pair): (usize, &Value)| match pair.as_array().map(Vec::as_slice) {
        Some([place, Value::Null]) if place.as_u64() == Some(i as u64 + 1) => Some(None),
        Some([place, id]) if place.as_u64() == Some(i as u64 + 1) => Some(Some(u32::try_from(id.as_u64()?).ok()?)),
        _ => None,
    };
    let all = list.iter().enumerate().map(of).collect::<Option<_>>();
    all.ok_or_else(|| fields.wrong("forced_decoder_ids", "is no list of tokens at places 1, 2, …"))
}

impl<R: Runtime> Whisper<R> {
    /// The prompts that texts of the rows of `memory` begin with, for `generate` of the
    /// [decoder](Whisper::decoder) by the same options. A language that is not given is the likeliest, row by row.
    ///
    /// # Errors
    /// Fails if the model has no such language, task or time stamps, or `memory` is another model's.
    #[track_caller]
    pub fn prompts(
        &self,
        memory: &StackMemory<R>,
        speech: &SpeechPrompt,
        options: &GenerationOptions,
    ) -> Result<Vec<Prompt>> {
        speech.check(options.time_stamps).at_caller()?;
        let detected = match speech.detects() {
            true => self.likeliest(memory, speech).at_caller()?.into_iter().map(Some).collect(),
            false => vec![None; memory.rows],
        };
        detected
            .into_iter()
            .map(|language| speech.tokens(language, options.time_stamps).map(Prompt::from))
            .collect::<Result<_>>()
            .at_caller()
    }

    /// The likeliest of all languages after the first token of each row.
    fn likeliest(&self, memory: &StackMemory<R>, speech: &SpeechPrompt) -> Result<Vec<u32>> {
        let rt = self.decoder.embed_tokens.weight.leaf().runtime().clone();
        let first = vec![i64::from(speech.start); memory.rows];
        let first = Var::new(Tensor::from_slice(&rt, [memory.rows, 1], &first)?);
        let logits = no_grad(|| self.decoder.logits(&first, memory, None))?.to_dtype(DType::F32)?;
        let (vocab, logits) = (logits.dims()[2], logits.value()?.to_vec::<f32>()?);
        let mut languages: Vec<u32> = speech.languages.values().copied().collect();
        languages.sort_unstable();
        let choose = |scores: &[f32]| {
            let scored = languages.iter().filter_map(|&token| Some((token, *scores.get(token as usize)?)));
            let best = scored.reduce(|best, next| if next.1 > best.1 { next } else { best });
            let why = "the tokens of all languages are beyond the vocabulary";
            best.map(|(token, _)| token).ok_or_else(|| Error::config("SpeechPrompt", "languages", why))
        };
        logits.chunks_exact(vocab.max(1)).map(choose).collect()
    }
}

//! [`SentenceEncoder`]: embeddings of texts.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use autograd::{Var, no_grad};
use data::{pad, sources::Tokenizer};
use nn::{Init, Module};
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, DistanceOps, IndexOps, MatmulOps, ViewOps, cat},
};
use serde_json::Map;

use super::{Bert, BertInputs, Pooling};
use crate::{files::JsonObject, pretrained::Pretrained};

/// A [`Bert`] with a tokenizer and [`Pooling`], as in the folders of sentence-transformers: texts in, vectors out.
///
/// ```no_run
/// use models::{SentenceEncoder, cosine_similarities};
/// use nn::Init;
/// use runtime_cpu::Cpu;
/// # fn main() -> numcore::Result<()> {
/// let encoder = SentenceEncoder::from_pretrained("all-MiniLM-L6-v2", &Init::new(&Cpu::new(), 0))?;
/// let questions = encoder.encode(&["How old is the universe?"])?;
/// let answers = encoder.encode(&["13.8 billion years.", "It is made of flour and water."])?;
/// let similar = cosine_similarities(&questions, &answers)?.to_f64s()?;
/// assert!(similar[0] > similar[1]);
/// # Ok(())
/// # }
/// ```
///
/// It is a [`Module`] with the names of the encoder, so it trains as any other: [`embed`](SentenceEncoder::embed) gives
/// vectors with gradients, for [`nn::loss::info_nce`] say.
#[doc(alias("SentenceTransformer", "sentence embeddings"))]
#[derive(Debug, Module)]
pub struct SentenceEncoder<R: Runtime> {
    /// The encoder of tokens.
    #[module(flatten)]
    pub encoder: Bert<R>,
    /// The tokenizer.
    #[module(skip)]
    pub tokenizer: Tokenizer,
    /// The ways of pooling, whose vectors are joined in this order.
    #[module(skip)]
    pub pooling: Vec<Pooling>,
    /// True if vectors are divided by their norm.
    #[module(skip)]
    pub normalizes: bool,
    /// The most tokens of a text, special ones included: more are cut off.
    #[module(skip)]
    pub most_tokens: usize,
    /// The texts that are put before others, by name.
    #[module(skip)]
    pub prompts: BTreeMap<String, String>,
    /// The name of the prompt for all texts.
    #[module(skip)]
    pub default_prompt: Option<String>,
    #[module(skip)]
    lowers: bool,
}

/// The ways of pooling, in the order in which sentence-transformers joins the vectors of several: each with its flag
/// and its word in files.
const POOLINGS: [(Pooling, &str, &str); 6] = [
    (Pooling::Cls, "pooling_mode_cls_token", "cls"),
    (Pooling::Max, "pooling_mode_max_tokens", "max"),
    (Pooling::Mean, "pooling_mode_mean_tokens", "mean"),
    (Pooling::MeanSqrt, "pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    (Pooling::WeightedMean, "pooling_mode_weightedmean_tokens", "weightedmean"),
    (Pooling::Last, "pooling_mode_lasttoken", "lasttoken"),
];

/// The most tokens, padding included, that are encoded at a time.
const BATCH_TOKENS: usize = 8192;

impl<R: Runtime> SentenceEncoder<R> {
    /// Reads a folder of sentence-transformers: `modules.json` with a transformer, pooling, and normalization or none;
    /// the files of a [`Bert`], and `tokenizer.json`.
    ///
    /// # Errors
    /// Fails if a file is missing or malformed, or the folder asks for something else: another model, a dense layer.
    #[track_caller]
    pub fn from_pretrained(folder: impl AsRef<Path>, init: &Init<R>) -> Result<Self> {
        Self::read(folder.as_ref(), init).at_caller()
    }

    fn read(folder: &Path, init: &Init<R>) -> Result<Self> {
        let parts = Parts::read(folder)?;
        let (encoder, mut report) = Bert::from_pretrained_partly(&parts.transformer, init)?;
        // Vectors are pooled from the states: nothing reads a pooler.
        report.missing.retain(|name, _| !name.starts_with("pooler."));
        report.strict()?;
        let limits = optional(&parts.transformer.join("sentence_bert_config.json"))?;
        let options = optional(&folder.join("config_sentence_transformers.json"))?;
        // Newer folders have the limit with the tokenizer, as a number that may be as large as 1e30.
        let of_tokenizer = optional(&parts.transformer.join("tokenizer_config.json"))?.number("model_max_length")?;
        let limit = limits.count("max_seq_length")?.or(of_tokenizer.map(|most| most as usize)).unwrap_or(usize::MAX);
        let default_prompt = options.text("default_prompt_name")?.map(String::from);
        let prompts = match options.object("prompts")? {
            None => BTreeMap::new(),
            Some(prompts) => {
                let names = prompts.fields().keys();
                let prompt = |name: &String| Ok((name.clone(), prompts.text(name)?.unwrap_or_default().to_string()));
                names.map(prompt).collect::<Result<_>>()?
            }
        };
        if let Some(name) = default_prompt.as_ref().filter(|name| !prompts.contains_key(*name)) {
            return Err(options.wrong("default_prompt_name", format!("is `{name}`, and `prompts` has no such name")));
        }
        Ok(SentenceEncoder {
            most_tokens: limit.min(encoder.config().context),
            encoder,
            tokenizer: Tokenizer::open(parts.transformer.join("tokenizer.json"))?,
            pooling: parts.pooling,
            normalizes: parts.normalizes,
            prompts,
            default_prompt,
            lowers: limits.flag("do_lower_case")?.unwrap_or(false),
        })
    }

    /// Encodes texts as vectors, `[N, C]` in the encoder's dtype, after the default prompt if there is one. Texts of
    /// similar lengths are computed together, without gradients; a text's vector does not depend on the others.
    ///
    /// # Errors
    /// Fails if the tokenizer has no tokens for a text.
    #[track_caller]
    pub fn encode(&self, texts: &[impl AsRef<str>]) -> Result<Tensor<R>> {
        let prompt = self.default_prompt.as_ref().and_then(|name| self.prompts.get(name));
        self.encode_after(prompt.map_or("", String::as_str), texts).at_caller()
    }

    /// Encodes texts, each after this prompt; an entry of [`prompts`](SentenceEncoder::prompts), say. See
    /// [`encode`](SentenceEncoder::encode).
    ///
    /// # Errors
    /// Fails if the tokenizer has no tokens for a text.
    #[track_caller]
    pub fn encode_after(&self, prompt: &str, texts: &[impl AsRef<str>]) -> Result<Tensor<R>> {
        let rows =
            texts.iter().map(|text| self.tokens(prompt, text.as_ref())).collect::<Result<Vec<_>>>().at_caller()?;
        let mut longest_first: Vec<usize> = (0..rows.len()).collect();
        longest_first.sort_by_key(|&k| std::cmp::Reverse(rows[k].len()));
        let (mut parts, mut left) = (Vec::new(), &longest_first[..]);
        while let Some(&first) = left.first() {
            let count = (BATCH_TOKENS / rows[first].len().max(1)).clamp(1, left.len());
            let batch: Vec<Vec<i64>> = left[..count].iter().map(|&k| rows[k].clone()).collect();
            parts.push(no_grad(|| self.embed(&batch)).at_caller()?.value()?);
            left = &left[count..];
        }
        let rt = self.encoder.embed_tokens.weight.leaf().runtime().clone();
        if parts.is_empty() {
            let width = self.encoder.config().block.width * self.pooling.len();
            return Tensor::zeros(&rt, [0, width], self.encoder.embed_tokens.weight.dtype());
        }
        let mut place = vec![0; rows.len()];
        longest_first.iter().enumerate().for_each(|(at, &k)| place[k] = at as i64);
        cat(&parts.iter().collect::<Vec<_>>(), 0)?.index_select(0, &Tensor::from_vec(&rt, place)?)
    }

    /// The tokens of a text after a prompt, cut to [`most_tokens`](SentenceEncoder::most_tokens), with special ones.
    ///
    /// # Errors
    /// Fails if the tokenizer has no tokens for a part of the text.
    #[track_caller]
    pub fn tokens(&self, prompt: &str, text: &str) -> Result<Vec<i64>> {
        let text = [prompt, text].concat();
        let text = if self.lowers { text.trim().to_lowercase() } else { text.trim().into() };
        let tokens = self.tokenizer.encode_cut(&text, self.most_tokens).at_caller()?;
        Ok(tokens.into_iter().map(i64::from).collect())
    }

    /// Embeds texts given as tokens: vectors `[B, C]`, with gradients.
    ///
    /// # Errors
    /// Fails if there is no text, or one is longer than the encoder's context.
    #[track_caller]
    pub fn embed(&self, texts: &[Vec<i64>]) -> Result<Var<R>> {
        let rt = self.encoder.embed_tokens.weight.leaf().runtime().clone();
        let batch = pad(texts, 0, 1).at_caller()?;
        let [tokens, mask] = [batch.values.to_tensor(&rt)?, batch.mask.to_tensor(&rt)?].map(Var::new);
        self.embed_padded(&tokens, &mask).at_caller()
    }

    /// Embeds rows of tokens `[B, T]` (`i64`) that are padded: vectors `[B, C]`. `mask: [B, T]` is not 0 for the tokens
    /// of texts. The pass has op calls alone, so it can be saved as a graph.
    ///
    /// # Errors
    /// Fails if shapes differ, or rows are longer than the encoder's context.
    #[track_caller]
    pub fn embed_padded(&self, tokens: &Var<R>, mask: &Var<R>) -> Result<Var<R>> {
        let inputs = BertInputs { mask: Some(mask), token_types: None };
        let states = self.encoder.states(tokens, &inputs).at_caller()?;
        let vectors = self.pooling.iter().map(|pooling| pooling.apply(&states, mask)).collect::<Result<Vec<_>>>();
        let vector = cat(&vectors.at_caller()?.iter().collect::<Vec<_>>(), 1)?;
        if self.normalizes { vector.normalize(1) } else { Ok(vector) }
    }
}

/// The modules of a folder.
struct Parts {
    transformer: PathBuf,
    pooling: Vec<Pooling>,
    normalizes: bool,
}

impl Parts {
    fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("modules.json");
        let (mut transformer, mut pooling, mut normalizes) = (None, Vec::new(), false);
        for part in &JsonObject::open_list(&file)? {
            let kind = part.need("type", part.text("type")?)?;
            let path = folder.join(part.text("path")?.unwrap_or_default());
            // Newer folders name the same modules by longer paths.
            match kind.rsplit('.').next().unwrap_or(kind) {
                "Transformer" if transformer.is_none() => transformer = Some(path),
                "Pooling" if transformer.is_some() && pooling.is_empty() => {
                    pooling = pooling_of(&JsonObject::open(&path.join("config.json"))?)?;
                }
                "Normalize" if !pooling.is_empty() && !normalizes => normalizes = true,
                _ => return Err(part.wrong("type", format!("is `{kind}`, which is not computed at this place"))),
            }
        }
        let wrong = || Error::format(file.display().to_string(), "it names no `Transformer` with a `Pooling` after it");
        let transformer = transformer.filter(|_| !pooling.is_empty()).ok_or_else(wrong)?;
        Ok(Parts { transformer, pooling, normalizes })
    }
}

/// A file of options, which are all absent if there is none.
fn optional(path: &Path) -> Result<JsonObject> {
    match path.is_file() {
        true => JsonObject::open(path),
        false => Ok(JsonObject::of(path.display().to_string(), Map::new())),
    }
}

/// The ways of pooling that a configuration of sentence-transformers names, as flags or as one word.
fn pooling_of(fields: &JsonObject) -> Result<Vec<Pooling>> {
    let mut chosen = Vec::new();
    for (pooling, flag, _) in POOLINGS {
        chosen.extend(fields.flag(flag)?.unwrap_or(false).then_some(pooling));
    }
    if let Some(word) = fields.text("pooling_mode")? {
        let known = POOLINGS.iter().find(|(_, _, known)| *known == word);
        let words = || POOLINGS.map(|(_, _, known)| known).join(", ");
        let unknown = || fields.wrong("pooling_mode", format!("is `{word}`, not one of {}", words()));
        chosen = vec![known.ok_or_else(unknown)?.0];
    }
    if !fields.flag("include_prompt")?.unwrap_or(true) {
        return Err(fields.wrong("include_prompt", "is false, and prompts are pooled with their texts here"));
    }
    if chosen.is_empty() { Err(fields.wrong("pooling_mode", "is missing")) } else { Ok(chosen) }
}

/// The cosine of each vector of `a: [N, C]` with each of `b: [M, C]`: `[N, M]`.
///
/// # Errors
/// Fails if the shapes do not fit.
#[doc(alias("cos_sim", "similarity"))]
#[track_caller]
pub fn cosine_similarities<T: Apply>(a: &T, b: &T) -> Result<T> {
    a.normalize(1).and_then(|a| a.matmul(&b.normalize(1)?.transpose(0, 1)?)).at_caller()
}

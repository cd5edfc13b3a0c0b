//! The tokenizers of `tokenizer.json` files (feature `text`).

use std::{fmt, ops::Range, path::Path};

use numcore::{Error, Result};
use tokenizers::models::{ModelWrapper, bpe::BPE};

use crate::files::without_mark;

/// A tokenizer as a `tokenizer.json` describes it: BPE, Unigram, WordPiece, with its normalizers. Nothing is fetched from anywhere.
///
/// Nothing but that file is read: what a `tokenizer_config.json` beside it says of special tokens, or of spaces in decoded
/// texts, is not obeyed.
///
/// Texts are neither cut nor padded, whatever the file says of `truncation` and `padding`: callers do both, as
/// transformers does at each call.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// One more than the largest token.
    rows: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// If it cannot be read, describes no tokenizer, or one that draws at random.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let bytes = without_mark(&bytes);
        let wrong = |why| Error::format(path.display().to_string(), format!("it describes no tokenizer: {why}"));
        let mut inner =
            tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| wrong(missing(bytes).unwrap_or(e.to_string())))?;
        if let ModelWrapper::BPE(BPE { dropout: Some(dropout), .. }) = inner.get_model()
            && *dropout > 0.0
        {
            let why = format!("it leaves out merges at random (`dropout` of {dropout}): set that to null");
            return Err(Error::format(path.display().to_string(), why));
        }
        // Trainers leave in the file what they did to their batches.
        inner.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let rows = inner.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        Ok(Tokenizer { inner, rows })
    }

    /// The tokens of a text, without the special tokens that models want around it.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of the text, nor one for what is unknown.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, false)
    }

    /// The tokens of a text with the special tokens that the file says go around it.
    ///
    /// # Errors
    /// If [`encode`](Tokenizer::encode) would fail.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, true)
    }

    /// The tokens of a text, as [`encode`](Tokenizer::encode) gives them, each with the bytes of the text that it stands for.
    ///
    /// # Errors
    /// If [`encode`](Tokenizer::encode) would fail.
    pub fn encode_with_offsets(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.inner.encode(text, false);
        let encoding = encoding.map_err(|e| Error::argument("Tokenizer::encode", e.to_string()))?;
        let places = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// If the tokenizer cannot put them together.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|e| Error::argument("Tokenizer::decode", e.to_string()))
    }

    /// One more than the largest token, special ones among them: what an embedding has rows for. Vocabularies may have
    /// holes.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of a token, such as `<|endoftext|>`.
    pub fn token(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn encoded(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        // Offsets are not asked for: without them it is faster.
        let encoding = self.inner.encode_fast(text, special);
        let encoding = encoding.map_err(|e| Error::argument("Tokenizer::encode", e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Why JSON that is well-formed is no tokenizer, where that is plain.
fn missing(bytes: &[u8]) -> Option<String> {
    match serde_json::from_slice(bytes) {
        Ok(serde_json::Value::Object(fields)) if !fields.contains_key("model") => {
            Some("there is no field `model`".into())
        }
        Ok(serde_json::Value::Object(_)) => None,
        Ok(_) => Some("it holds no JSON object".into()),
        Err(e) => Some(format!("it is no JSON: {e}")),
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.len())
    }
}

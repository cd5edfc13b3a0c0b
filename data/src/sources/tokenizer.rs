//! Tokenizers of `tokenizer.json` and GGUF files (feature `text`).

use std::{fmt, ops::Range, path::Path};

use numcore::{Error, Result, Within};
use tokenizers::{
    PostProcessor, TruncationDirection,
    models::{ModelWrapper, bpe::BPE},
};

use crate::{
    files::without_mark,
    gguf::{GgufFile, tokenizer_json},
};

/// A tokenizer from a `tokenizer.json` (BPE, Unigram or WordPiece, with its normalizers), or from a GGUF file (BPE of
/// bytes, or SentencePiece's). Nothing is fetched from anywhere.
///
/// Only that file is read. A `tokenizer_config.json` beside it, with rules for special tokens or spaces in decoded
/// texts, is ignored.
///
/// Texts are neither cut nor padded, even if the file has `truncation` and `padding`. Callers do both, as in
/// transformers.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The largest token plus 1.
    rows: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, or the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, describes no tokenizer, or one that draws at random (BPE `dropout`). Of GGUF,
    /// fails too if the kind of the tokenizer or of its pre-tokenizer is not known.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = match GgufFile::is_at(path) {
            true => tokenizer_json(&GgufFile::open(path).at_caller()?).at_caller()?.to_string().into_bytes(),
            false => std::fs::read(path).map_err(|e| Error::io(path, e)).at_caller()?,
        };
        let bytes = without_mark(&bytes);
        let wrong = |why| Error::format(path.display().to_string(), format!("it describes no tokenizer: {why}"));
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| wrong(missing(bytes).unwrap_or(e.to_string())))
            .at_caller()?;
        if let ModelWrapper::BPE(BPE { dropout: Some(dropout), .. }) = inner.get_model()
            && *dropout > 0.0
        {
            let why = format!("it leaves out merges at random (`dropout` of {dropout}): set that to null");
            return Err(Error::format(path.display().to_string(), why)).at_caller();
        }
        // Trainers leave their own truncation and padding in the file.
        inner.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string())).at_caller()?;
        let rows = inner.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        Ok(Tokenizer { inner, rows })
    }

    /// The tokens of a text, without the special tokens that models expect around it.
    ///
    /// # Errors
    /// Fails if the tokenizer has no token for a part of the text, and no unknown token.
    #[track_caller]
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, false).at_caller()
    }

    /// The tokens of a text, with the special tokens that the file puts around it.
    ///
    /// # Errors
    /// Fails if [`encode`](Tokenizer::encode) would fail.
    #[track_caller]
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, true).at_caller()
    }

    /// The tokens of a text, cut to at most `most`, with the special tokens that the file puts around it: these stay.
    ///
    /// # Errors
    /// Fails if [`encode`](Tokenizer::encode) would fail, or `most` has no place for the special tokens.
    #[doc(alias("truncation", "max_length"))]
    #[track_caller]
    pub fn encode_cut(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        const OP: &str = "Tokenizer::encode_cut";
        let special = self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        let Some(left) = most.checked_sub(special) else {
            return Err(Error::range(OP, "most", most, format!("at least {special}, the special tokens"))).at_caller();
        };
        let mut encoding = self.inner.encode_fast(text, false).map_err(|e| refused(OP, &*e)).at_caller()?;
        encoding.truncate(left, 0, TruncationDirection::Right);
        let encoding = self.inner.post_process(encoding, None, true).map_err(|e| refused(OP, &*e)).at_caller()?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a text from [`encode`](Tokenizer::encode), each with the byte range of the text that it stands
    /// for.
    ///
    /// # Errors
    /// Fails if [`encode`](Tokenizer::encode) would fail.
    #[track_caller]
    pub fn encode_with_offsets(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.inner.encode(text, false);
        let encoding = encoding.map_err(|e| refused("Tokenizer::encode", &*e)).at_caller()?;
        let places = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    /// The text of tokens, without the special ones.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot join the tokens.
    #[track_caller]
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|e| refused("Tokenizer::decode", &*e)).at_caller()
    }

    /// The largest token plus 1, special tokens included: the number of rows of an embedding. Vocabularies may have
    /// holes.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Tells whether the vocabulary is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of a token given as text, such as `<|endoftext|>`; `None` if there is none.
    pub fn token(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn encoded(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        // Offsets are not requested: without them encoding is faster.
        let encoding = self.inner.encode_fast(text, special);
        let encoding = encoding.map_err(|e| refused("Tokenizer::encode", &*e))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// An error of the tokenizer about a text or tokens.
fn refused(op: &'static str, error: &dyn std::error::Error) -> Error {
    Error::argument(op, error.to_string())
}

/// The reason why a file is no tokenizer, if it is plain: no JSON, no object, or no model.
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

//! The tables of a tokenizer in llama.cpp's format: byte-level BPE with a pre-tokenizer that llama.cpp knows by name.

use std::{collections::BTreeMap, path::Path};

use data::gguf::{GgufValue, pre_tokenizer_name, token_kind};
use models::JsonObject;
use numcore::{Error, Result};
use serde_json::Value;

/// The metadata of the tokenizer in a folder. The vocabulary has as many tokens as the model has rows; tokens that the
/// tokenizer lacks are marked unused.
///
/// # Errors
/// Fails if a file is malformed, or the tokenizer is of a kind without a known name in llama.cpp.
pub(super) fn tables(folder: &Path, vocab: usize) -> Result<Vec<(String, GgufValue)>> {
    let file = JsonObject::open(&folder.join("tokenizer.json"))?;
    let path = folder.join("tokenizer_config.json");
    let settings =
        if path.is_file() { JsonObject::open(&path)? } else { JsonObject::of("settings", Default::default()) };
    let model = file.need("model", file.object("model")?)?;
    let split = split(&file, &model)?;
    let tokens = Tokens::read(&file, &model, vocab)?;
    let mut pairs = vec![
        ("model", GgufValue::Text("gpt2".into())),
        ("pre", GgufValue::Text(split.into())),
        ("tokens", GgufValue::Texts(tokens.texts.clone())),
        ("token_type", GgufValue::I32s(tokens.kinds.clone())),
        ("merges", GgufValue::Texts(merges(&model)?)),
    ];
    for (theirs, ours) in [
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ] {
        if let Some(text) = special(&settings, ours) {
            let id = tokens.ids.get(text).ok_or_else(|| settings.wrong(ours, format_args!("is `{text}`, no token")))?;
            pairs.push((theirs, GgufValue::U32(*id)));
        }
    }
    pairs.push(("add_bos_token", GgufValue::Bool(adds_bos(&file, &settings)?)));
    if let Some(adds) = settings.flag("add_eos_token")? {
        pairs.push(("add_eos_token", GgufValue::Bool(adds)));
    }
    let mut pairs: Vec<(String, GgufValue)> =
        pairs.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    if let Some(template) = template(folder, &settings)? {
        pairs.push(("tokenizer.chat_template".into(), GgufValue::Text(template)));
    }
    Ok(pairs)
}

/// The tokens of a vocabulary, by number.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<i32>,
    ids: BTreeMap<String, u32>,
}

impl Tokens {
    fn read(file: &JsonObject, model: &JsonObject, vocab: usize) -> Result<Self> {
        let mut texts: Vec<String> = (0..vocab).map(|id| format!("[PAD{id}]")).collect();
        let (mut kinds, mut ids) = (vec![token_kind::UNUSED; vocab], BTreeMap::new());
        let mut put = |text: &str, id: Option<usize>, kind: i32| {
            let Some(id) = id.filter(|id| *id < vocab) else {
                return Err(
                    file.wrong("model", format_args!("has token `{text}`, which is none of the model's {vocab}"))
                );
            };
            (texts[id], kinds[id]) = (text.to_owned(), kind);
            ids.insert(text.to_owned(), id as u32);
            Ok(())
        };
        let number = |value: &Value| value.as_u64().and_then(|id| usize::try_from(id).ok());
        for (text, id) in model.need("vocab", model.object("vocab")?)?.fields() {
            put(text, number(id), token_kind::NORMAL)?;
        }
        for token in file.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let text = token.get("content").and_then(Value::as_str);
            let text = text.ok_or_else(|| file.wrong("added_tokens", "has a token without `content`"))?;
            let is_special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            put(
                text,
                token.get("id").and_then(number),
                if is_special { token_kind::CONTROL } else { token_kind::USER_DEFINED },
            )?;
        }
        Ok(Tokens { texts, kinds, ids })
    }
}

/// The merges as pairs of tokens with a space between: byte-level tokens have none.
fn merges(model: &JsonObject) -> Result<Vec<String>> {
    let list = model.need("merges", model.get("merges").and_then(Value::as_array))?;
    let merge = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    list.iter()
        .map(|value| merge(value).ok_or_else(|| model.wrong("merges", "has what is no pair of tokens")))
        .collect()
}

/// The name in llama.cpp of the tokenizer's pre-tokenizer.
fn split(file: &JsonObject, model: &JsonObject) -> Result<&'static str> {
    let kind = model.text("type")?.unwrap_or("BPE");
    let byte_fallback = model.flag("byte_fallback")?.unwrap_or(false);
    let normalizer = file.object("normalizer")?;
    let is_known = |n: &JsonObject| n.fields().get("type").and_then(Value::as_str) == Some("NFC");
    if kind != "BPE" || byte_fallback || !normalizer.as_ref().is_none_or(is_known) {
        return Err(unknown(file));
    }
    file.get("pre_tokenizer").and_then(pre_tokenizer_name).ok_or_else(|| unknown(file))
}

fn unknown(file: &JsonObject) -> Error {
    let why =
        "is not the byte-level BPE of GPT-2, Llama 3, Qwen or SmolLM: write the file without `GgufOptions::tokenizer`";
    file.wrong("pre_tokenizer", why)
}

/// The text of a special token, which is a string or an object with the string.
fn special<'a>(settings: &'a JsonObject, name: &str) -> Option<&'a str> {
    let value = settings.get(name)?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Tells whether a text begins with the begin-of-text token: by the settings, or by the post-processor's template.
fn adds_bos(file: &JsonObject, settings: &JsonObject) -> Result<bool> {
    if let Some(adds) = settings.flag("add_bos_token")? {
        return Ok(adds);
    }
    let Some(bos) = special(settings, "bos_token") else { return Ok(false) };
    let begins = |processor: &Value| {
        let first = processor.pointer("/single/0/SpecialToken/id").and_then(Value::as_str);
        first == Some(bos)
    };
    let Some(processor) = file.get("post_processor") else { return Ok(false) };
    let parts = processor.get("processors").and_then(Value::as_array);
    Ok(begins(processor) || parts.is_some_and(|parts| parts.iter().any(begins)))
}

fn template(folder: &Path, settings: &JsonObject) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        return std::fs::read_to_string(&path).map(Some).map_err(|e| Error::io(path, e));
    }
    Ok(settings.get("chat_template").and_then(Value::as_str).map(str::to_owned))
}

//! The chat templates of a GGUF file.

use data::gguf::{GgufFile, GgufValue};
use numcore::Result;
use serde_json::{Map, Value, json};

use crate::files::JsonObject;

/// The fields of a `tokenizer_config.json`: special tokens and chat templates.
pub(super) fn tokenizer_fields(file: &GgufFile) -> Result<JsonObject> {
    let key = |name: &str| format!("tokenizer.ggml.{name}_token_id");
    let none = Vec::new();
    let texts = file.typed("tokenizer.ggml.tokens", "a list of strings", GgufValue::texts)?.unwrap_or(&none);
    let mut fields = Map::new();
    for (theirs, ours) in [
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
        ("seperator", "sep_token"),
        ("cls", "cls_token"),
        ("mask", "mask_token"),
    ] {
        if let Some(id) = file.typed(&key(theirs), "a count", GgufValue::count)? {
            let text = usize::try_from(id).ok().and_then(|id| texts.get(id));
            let text = text.ok_or_else(|| file.wrong(&key(theirs), format_args!("is {id}, no token")))?;
            fields.insert(ours.into(), json!(text));
        }
    }
    let named = |key: &str| file.typed(key, "a string", GgufValue::text);
    let mut templates = Vec::new();
    if let Some(text) = named("tokenizer.chat_template")? {
        templates.push(json!({"name": "default", "template": text}));
    }
    for key in file.keys() {
        if let (Some(name), Some(text)) = (key.strip_prefix("tokenizer.chat_template."), file.get(key)) {
            templates.push(json!({"name": name, "template": text.text()}));
        }
    }
    fields.insert("chat_template".into(), Value::Array(templates));
    Ok(JsonObject::of(file.path().display().to_string(), fields))
}

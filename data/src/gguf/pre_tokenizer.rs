//! The pre-tokenizers of byte-level BPE that llama.cpp knows by name.

use serde_json::{Value, json};

/// The patterns of GPT-2's pre-tokenizers' successors, by llama.cpp's names.
const PATTERNS: [(&str, &str); 2] = [
    (
        "llama-bpe",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// The names, those of `PATTERNS` included.
const NAMES: [&str; 4] = ["gpt-2", "smollm", "llama-bpe", "qwen2"];

/// The field `pre_tokenizer` of `tokenizer.json` for llama.cpp's name; `None` if the name is not known.
pub fn pre_tokenizer(name: &str) -> Option<Value> {
    let bytes = |splits: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits});
    let parts = |first: Value, bytes: Value| json!({"type": "Sequence", "pretokenizers": [first, bytes]});
    match name {
        "gpt-2" => Some(bytes(true)),
        "smollm" => Some(parts(json!({"type": "Digits", "individual_digits": true}), bytes(true))),
        _ => {
            let pattern = PATTERNS.iter().find(|(known, _)| *known == name)?.1;
            let pattern =
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            Some(parts(pattern, bytes(false)))
        }
    }
}

/// llama.cpp's name of a `pre_tokenizer` of `tokenizer.json`; `None` if it has none.
pub fn pre_tokenizer_name(value: &Value) -> Option<&'static str> {
    let own = steps(value);
    NAMES.into_iter().find(|name| pre_tokenizer(name).is_some_and(|known| steps(&known) == own))
}

/// The steps of a pre-tokenizer, each with the fields that change tokens.
fn steps(value: &Value) -> Vec<Value> {
    let flag = |name: &str, default: bool| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    match value.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            let parts = value.get("pretokenizers").and_then(Value::as_array);
            parts.into_iter().flatten().flat_map(steps).collect()
        }
        Some("ByteLevel") => {
            vec![json!(["ByteLevel", flag("add_prefix_space", true), flag("use_regex", true)])]
        }
        Some("Digits") => vec![json!(["Digits", flag("individual_digits", false)])],
        Some("Split") => {
            vec![json!(["Split", value.get("pattern"), value.get("behavior"), flag("invert", false)])]
        }
        _ => vec![value.clone()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_both_ways() {
        for name in NAMES {
            assert_eq!(pre_tokenizer(name).as_ref().and_then(pre_tokenizer_name), Some(name));
        }
        let published = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
        assert_eq!(pre_tokenizer_name(&published), Some("smollm"));
        for other in [json!({"type": "Metaspace"}), json!({"type": "ByteLevel"}), json!(null)] {
            assert_eq!(pre_tokenizer_name(&other), None, "{other}");
        }
        assert_eq!(pre_tokenizer("tekken"), None);
    }
}

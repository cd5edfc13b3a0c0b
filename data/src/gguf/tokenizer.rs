//! The tokenizer of a file, as the fields of a `tokenizer.json`.

use std::collections::BTreeMap;

use numcore::Result;
use serde_json::{Map, Value, json};

use super::{GgufFile, GgufValue, pre_tokenizer, token_kind};

/// The space in vocabularies of SentencePiece.
const SPACE: &str = "\u{2581}";

/// The content of the `tokenizer.json` that has the tokens of a file's tokenizer: byte-level BPE (`gpt2`), or
/// SentencePiece's BPE (`llama`).
///
/// # Errors
/// Fails if the file has no tokenizer, or one of a kind or with a pre-tokenizer that is not known.
pub(crate) fn tokenizer_json(file: &GgufFile) -> Result<Value> {
    let need = |name: &str| format!("tokenizer.ggml.{name}");
    let text = |name: &str| file.typed(&need(name), "a string", GgufValue::text);
    let Some(model) = text("model")? else {
        return Err(file.wrong(&need("model"), "is missing: the file has no tokenizer"));
    };
    let tokens = file.typed(&need("tokens"), "a list of strings", GgufValue::texts)?;
    let tokens = tokens.ok_or_else(|| file.wrong(&need("tokens"), "is missing"))?;
    let kinds = match file.get(&need("token_type")) {
        Some(GgufValue::I32s(kinds)) if kinds.len() == tokens.len() => kinds,
        Some(_) => return Err(file.wrong(&need("token_type"), "is no kind of each token")),
        None => &vec![token_kind::NORMAL; tokens.len()],
    };
    let mut vocab = BTreeMap::new();
    for (id, (token, _)) in tokens.iter().zip(kinds).enumerate().filter(|(_, (_, k))| **k != token_kind::UNUSED) {
        if vocab.insert(token.as_str(), id).is_some() {
            return Err(file.wrong(&need("tokens"), format_args!("has `{token}` twice")));
        }
    }
    let flag = |name: &str, default: bool| {
        Ok::<_, numcore::Error>(file.typed(&need(name), "a boolean", GgufValue::flag)?.unwrap_or(default))
    };
    let token = |name: &str| match file.typed(&need(name), "a count", GgufValue::count)? {
        Some(id) => match tokens.get(id as usize) {
            Some(token) => Ok(Some(token.as_str())),
            None => Err(file.wrong(&need(name), format_args!("is {id}, and there are {} tokens", tokens.len()))),
        },
        None => Ok(None),
    };
    let ids: Map<String, Value> = vocab.iter().map(|(token, id)| ((*token).to_owned(), json!(id))).collect();
    let (mut fields, adds_bos) = match model {
        "gpt2" => {
            let pre =
                text("pre")?.ok_or_else(|| file.wrong(&need("pre"), "is missing: how texts are split is unknown"))?;
            let splits = pre_tokenizer(pre);
            let splits =
                splits.ok_or_else(|| file.wrong(&need("pre"), format_args!("is `{pre}`, which is not known")))?;
            let merges = file.typed(&need("merges"), "a list of strings", GgufValue::texts)?;
            let merges =
                merges.ok_or_else(|| file.wrong(&need("merges"), "is missing: texts would be cut into bytes"))?;
            let fields = json!({
                "normalizer": (pre == "qwen2").then(|| json!({"type": "NFC"})),
                "pre_tokenizer": splits,
                "decoder": pre_tokenizer("gpt-2"),
                "model": {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": pre == "llama-bpe"},
            });
            (fields, flag("add_bos_token", pre == "llama-bpe")?)
        }
        "llama" => (
            pieces(file, ids, &vocab, token("unknown_token_id")?.unwrap_or("<unk>"), flag("add_space_prefix", true)?)?,
            flag("add_bos_token", true)?,
        ),
        other => {
            let why = format!("is `{other}`; known are `gpt2` and `llama`: use the `tokenizer.json` of the model");
            return Err(file.wrong(&need("model"), why));
        }
    };
    let added = tokens.iter().zip(kinds).enumerate().filter_map(|(id, (token, kind))| {
        let special = match *kind {
            token_kind::CONTROL | token_kind::UNKNOWN => true,
            token_kind::USER_DEFINED => false,
            _ => return None,
        };
        Some(json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special}))
    });
    fields["added_tokens"] = added.collect();
    let ends = [("bos_token_id", adds_bos), ("eos_token_id", flag("add_eos_token", false)?)];
    let mut single = vec![json!({"Sequence": {"id": "A", "type_id": 0}})];
    let mut special = Map::new();
    for (name, _) in ends.into_iter().filter(|(_, adds)| *adds) {
        let text = token(name)?.ok_or_else(|| file.wrong(&need(name), "is missing, and is to be added to texts"))?;
        let part = json!({"SpecialToken": {"id": text, "type_id": 0}});
        single.insert(if name == "bos_token_id" { 0 } else { single.len() }, part);
        special.insert(text.into(), json!({"id": text, "ids": [vocab.get(text)], "tokens": [text]}));
    }
    if single.len() > 1 {
        let pair = json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]);
        fields["post_processor"] =
            json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special});
    }
    fields["version"] = "1.0".into();
    Ok(fields)
}

/// The fields for SentencePiece's BPE. It joins the neighbours whose joined token has the highest score. So each way to
/// cut a token in two is a merge, in the order of scores.
fn pieces(
    file: &GgufFile,
    ids: Map<String, Value>,
    vocab: &BTreeMap<&str, usize>,
    unknown: &str,
    space_first: bool,
) -> Result<Value> {
    let key = "tokenizer.ggml.scores";
    let scores = match file.get(key) {
        Some(GgufValue::F32s(scores)) => scores,
        _ => return Err(file.wrong(key, "is no list of each token's score")),
    };
    let score = |id: usize| scores.get(id).copied().ok_or_else(|| file.wrong(key, "is shorter than the tokens"));
    let mut merges = Vec::new();
    for (token, &id) in vocab {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&l), Some(&r)) = (vocab.get(left), vocab.get(right)) {
                merges.push((score(id)?, [score(l)?, score(r)?], id, [left, right]));
            }
        }
    }
    // Highest scores first.
    merges.sort_by(|a, b| {
        let by = |x: f32, y: f32| y.total_cmp(&x);
        by(a.0, b.0).then(a.2.cmp(&b.2)).then(by(a.1[0], b.1[0])).then(by(a.1[1], b.1[1]))
    });
    let merges: Vec<[&str; 2]> = merges.into_iter().map(|(.., pair)| pair).collect();
    let to_pieces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let first = space_first.then(|| json!({"type": "Prepend", "prepend": SPACE}));
    let normalizers: Vec<Value> = first.into_iter().chain([to_pieces]).collect();
    let strip = space_first.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    let decoders = [
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let decoders: Vec<Value> = decoders.into_iter().chain(strip).collect();
    Ok(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "unk_token": unknown, "fuse_unk": true,
                  "byte_fallback": true},
    }))
}

//! The sizes and options of a BERT.

use std::fmt::Debug;

use nn::{Activation, EncoderBlockConfig};
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use crate::{
    config::{ConfigFields, activation_name},
    files::JsonObject,
    quantize::quantization,
};

/// The task of a [`Bert`](super::Bert), which determines its head. `architectures` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertTask {
    /// No task: states of tokens (`BertModel`).
    States,
    /// The token at each mask (`BertForMaskedLM`).
    MaskedLm,
    /// A class of the full text (`BertForSequenceClassification`).
    Sequence,
    /// A class of each token (`BertForTokenClassification`).
    Tokens,
}

impl BertTask {
    const ALL: [(BertTask, &'static str); 4] = [
        (BertTask::States, "BertModel"),
        (BertTask::MaskedLm, "BertForMaskedLM"),
        (BertTask::Sequence, "BertForSequenceClassification"),
        (BertTask::Tokens, "BertForTokenClassification"),
    ];

    fn of(fields: &ConfigFields) -> Result<BertTask> {
        let named = fields.texts("architectures")?.and_then(|names| names.first().copied());
        let Some(name) = named else { return Ok(BertTask::States) };
        // Pretrained BERTs have two heads, of which the masked language model is supported.
        let name = if name == "BertForPreTraining" { "BertForMaskedLM" } else { name };
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(task, _)| *task).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|(_, known)| *known).collect();
            fields.wrong("architectures", format_args!("is `{name}`; known are: {}", known.join(", ")))
        })
    }

    /// The class of transformers that loads a model of this task.
    pub fn architecture(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The sizes and options of a [`Bert`](super::Bert), as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// The task, which determines the head.
    pub task: BertTask,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The longest text, in tokens.
    pub context: usize,
    /// The number of kinds of segments.
    pub token_types: usize,
    /// The number of layers.
    pub layers: usize,
    /// The sizes and options of a layer.
    pub block: EncoderBlockConfig,
    /// The number of classes, `N`.
    pub labels: usize,
    /// The padding token, whose embedding is not trained.
    pub padding: Option<usize>,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl BertConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if the task is not known, or a field is missing, malformed, or unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "bert").at_caller()?;
        fields.require("is_decoder", false)?;
        fields.require("add_cross_attention", false)?;
        fields.require("tie_word_embeddings", true)?;
        fields.expect("position_embedding_type", "absolute")?;
        let vocab = fields.size_or("vocab_size", 30_522)?;
        let config = BertConfig {
            task: BertTask::of(fields).at_caller()?,
            vocab,
            context: fields.size_or("max_position_embeddings", 512)?,
            token_types: fields.size_or("type_vocab_size", 2)?,
            layers: fields.layers_or("num_hidden_layers", 12)?,
            block: block(fields, false, true).at_caller()?,
            labels: labels(fields).at_caller()?,
            // Null means that there is none.
            padding: fields.row("pad_token_id", vocab)?.or((!fields.has("pad_token_id")).then_some(0)),
            fields: fields.fields().clone(),
        };
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = with_block(self.fields.clone(), "bert", &self.block, self.layers);
        fields.insert("architectures".into(), json!([self.task.architecture()]));
        fields.insert("pad_token_id".into(), json!(self.padding));
        fields.insert("vocab_size".into(), self.vocab.into());
        fields.insert("max_position_embeddings".into(), self.context.into());
        fields.insert("type_vocab_size".into(), self.token_types.into());
        with_labels(fields, self.labels)
    }

    /// Checks that the fields to be written describe this very model.
    pub(super) fn check(&self) -> Result<()> {
        let mut again = BertConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        again.block.dropout = self.block.dropout;
        same("bert", &again, self)
    }
}

/// Fields as a reader of the written file finds them.
pub(super) fn written(fields: Map<String, Value>) -> ConfigFields {
    ConfigFields::of(JsonObject::of("config.json of this model", fields))
}

/// Checks that a configuration read again equals the given one. Dropout is no field that is read.
pub(super) fn same<C: PartialEq + Debug>(model: &'static str, again: &C, given: &C) -> Result<()> {
    if again == given {
        return Ok(());
    }
    let why = format!("a `{model}` cannot be so: given {given:?}; transformers would make it {again:?}");
    Err(Error::config(model, "config", why))
}

/// Checks that `model_type` is `due`.
pub(super) fn expect_type(fields: &ConfigFields, due: &str) -> Result<()> {
    match fields.need("model_type", fields.text("model_type")?)? {
        name if name == due => Ok(()),
        other => Err(fields.wrong("model_type", format_args!("is `{other}`, not `{due}`"))),
    }
}

/// The layer options of an encoder, whose fields have one name in BERT and ViT.
pub(super) fn block(fields: &ConfigFields, pre_norm: bool, qkv_bias: bool) -> Result<EncoderBlockConfig> {
    Ok(EncoderBlockConfig {
        width: fields.size_or("hidden_size", 768)?,
        heads: fields.size_or("num_attention_heads", 12)?,
        hidden: fields.size_or("intermediate_size", 3072)?,
        activation: fields.activation("hidden_act", Activation::Gelu)?,
        pre_norm,
        qkv_bias,
        eps: fields.number_or("layer_norm_eps", 1e-12)?,
        dropout: 0.0,
    })
}

/// The number of classes: `num_labels`, or the length of `id2label`; 2 by default.
pub(super) fn labels(fields: &ConfigFields) -> Result<usize> {
    let listed = fields.part("id2label")?.map(|list| list.fields().len());
    let given = fields.maybe_size("num_labels")?;
    match (given, listed) {
        (Some(given), Some(listed)) if given != listed => {
            Err(fields
                .wrong("num_labels", format_args!("is {given}, and `id2label` names {listed}: remove one of them")))
        }
        _ => Ok(given.or(listed).unwrap_or(2)),
    }
}

/// The fields, with those of an encoder's layers brought up to date.
pub(super) fn with_block(
    mut fields: Map<String, Value>,
    kind: &str,
    block: &EncoderBlockConfig,
    layers: usize,
) -> Map<String, Value> {
    fields.insert("model_type".into(), kind.into());
    for (name, value) in [
        ("hidden_size", block.width),
        ("num_attention_heads", block.heads),
        ("intermediate_size", block.hidden),
        ("num_hidden_layers", layers),
    ] {
        fields.insert(name.into(), value.into());
    }
    fields.insert("layer_norm_eps".into(), json!(block.eps));
    fields.insert("hidden_act".into(), activation_name(block.activation).into());
    fields
}

/// The fields, with names for `labels` classes, unless they have as many.
pub(super) fn with_labels(mut fields: Map<String, Value>, labels: usize) -> Map<String, Value> {
    // The names in `id2label` give the number.
    fields.remove("num_labels");
    let has = |fields: &Map<String, Value>| fields.get("id2label").and_then(Value::as_object).map(Map::len);
    if has(&fields).unwrap_or(2) != labels {
        let name = |i: usize| format!("LABEL_{i}");
        let names = (0..labels).map(|i| (i.to_string(), name(i).into())).collect();
        let numbers = (0..labels).map(|i| (name(i), i.into())).collect();
        fields.insert("id2label".into(), Value::Object(names));
        fields.insert("label2id".into(), Value::Object(numbers));
    }
    fields
}

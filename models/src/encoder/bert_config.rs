//! The sizes and options of a BERT, or of a family like it.

use std::fmt::Debug;

use nn::{Activation, EncoderBlockConfig};
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use crate::{
    config::{ConfigFields, activation_name},
    files::JsonObject,
    quantize::quantization,
};

/// A family of encoders of text, named by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertFamily {
    /// BERT.
    Bert,
    /// RoBERTa: positions are counted from the padding token's number on, without padding.
    Roberta,
    /// XLM-RoBERTa, which computes as RoBERTa does.
    XlmRoberta,
    /// DistilBERT: no segments, and names of its own.
    DistilBert,
}

impl BertFamily {
    /// The families, each with its name in `model_type` and the first part of the names of its classes.
    const ALL: [(BertFamily, &'static str, &'static str); 4] = [
        (BertFamily::Bert, "bert", "Bert"),
        (BertFamily::Roberta, "roberta", "Roberta"),
        (BertFamily::XlmRoberta, "xlm-roberta", "XLMRoberta"),
        (BertFamily::DistilBert, "distilbert", "DistilBert"),
    ];

    fn of(fields: &ConfigFields) -> Result<Self> {
        let name = fields.need("model_type", fields.text("model_type")?)?;
        Self::ALL.iter().find(|(_, known, _)| *known == name).map(|(family, ..)| *family).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|(_, known, _)| *known).collect();
            fields.wrong("model_type", format_args!("is `{name}`; encoders of text are: {}", known.join(", ")))
        })
    }

    /// Tells whether positions are counted without padding, from the padding token's number on.
    pub(super) fn skips_padding(self) -> bool {
        matches!(self, BertFamily::Roberta | BertFamily::XlmRoberta)
    }
}

/// The task of a [`Bert`](super::Bert), which determines its head. `architectures` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertTask {
    /// No task: states of tokens (`…Model`).
    States,
    /// The token at each mask (`…ForMaskedLM`).
    MaskedLm,
    /// A class of the full text (`…ForSequenceClassification`).
    Sequence,
    /// A class of each token (`…ForTokenClassification`).
    Tokens,
}

impl BertTask {
    const ALL: [(BertTask, &'static str); 4] = [
        (BertTask::States, "Model"),
        (BertTask::MaskedLm, "ForMaskedLM"),
        (BertTask::Sequence, "ForSequenceClassification"),
        (BertTask::Tokens, "ForTokenClassification"),
    ];

    fn of(fields: &ConfigFields, family: BertFamily) -> Result<BertTask> {
        let named = fields.texts("architectures")?.and_then(|names| names.first().copied());
        let Some(name) = named else { return Ok(BertTask::States) };
        // Pretrained BERTs have two heads, of which the masked language model is supported.
        let name = if name == "BertForPreTraining" { "BertForMaskedLM" } else { name };
        Self::ALL.iter().map(|(task, _)| *task).find(|task| task.architecture(family) == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|(task, _)| task.architecture(family)).collect();
            fields.wrong("architectures", format_args!("is `{name}`; known are: {}", known.join(", ")))
        })
    }

    /// The class of transformers that loads a model of this task.
    pub fn architecture(self, family: BertFamily) -> String {
        format!("{}{}", BertFamily::ALL[family as usize].2, Self::ALL[self as usize].1)
    }
}

/// The sizes and options of a [`Bert`](super::Bert), as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// The family, which determines positions, segments and names.
    pub family: BertFamily,
    /// The task, which determines the head.
    pub task: BertTask,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The longest text, in tokens.
    pub context: usize,
    /// The number of kinds of segments; 0 in DistilBERT.
    pub token_types: usize,
    /// The number of layers.
    pub layers: usize,
    /// The sizes and options of a layer.
    pub block: EncoderBlockConfig,
    /// The number of classes, `N`.
    pub labels: usize,
    /// The padding token, whose embedding is not trained; nor that of its position in RoBERTa.
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
        let family = BertFamily::of(fields).at_caller()?;
        let is_small = family == BertFamily::DistilBert;
        fields.require("is_decoder", false)?;
        fields.require("add_cross_attention", false)?;
        fields.require("tie_word_embeddings", true)?;
        fields.expect("position_embedding_type", "absolute")?;
        let vocab = fields.size_or("vocab_size", if family == BertFamily::Roberta { 50_265 } else { 30_522 })?;
        // Null means that there is none.
        let default = (!fields.has("pad_token_id")).then_some(usize::from(family.skips_padding()));
        let mut config = BertConfig {
            family,
            task: BertTask::of(fields, family).at_caller()?,
            vocab,
            context: fields.size_or("max_position_embeddings", 512)?,
            token_types: if is_small { 0 } else { fields.size_or("type_vocab_size", 2)? },
            layers: if is_small {
                fields.layers_or("n_layers", 6)?
            } else {
                fields.layers_or("num_hidden_layers", 12)?
            },
            block: if is_small { small_block(fields) } else { block(fields, false, true) }.at_caller()?,
            labels: labels(fields).at_caller()?,
            padding: fields.row("pad_token_id", vocab)?.or(default),
            fields: fields.fields().clone(),
        };
        if family.skips_padding() && config.padding.is_none() {
            return Err(fields.wrong("pad_token_id", "is null, and positions are counted from it on")).at_caller();
        }
        config.context = config.context.saturating_sub(config.first_position());
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let name = BertFamily::ALL[self.family as usize].1;
        let mut fields = if self.family == BertFamily::DistilBert {
            let names = ["dim", "n_heads", "hidden_dim", "n_layers", "activation"];
            with_layers(self.fields.clone(), name, names, &self.block, self.layers)
        } else {
            let mut fields = with_block(self.fields.clone(), name, &self.block, self.layers);
            fields.insert("type_vocab_size".into(), self.token_types.into());
            fields
        };
        fields.insert("architectures".into(), json!([self.task.architecture(self.family)]));
        fields.insert("pad_token_id".into(), json!(self.padding));
        fields.insert("vocab_size".into(), self.vocab.into());
        fields.insert("max_position_embeddings".into(), (self.context + self.first_position()).into());
        with_labels(fields, self.labels)
    }

    /// The number of the first token's position.
    pub(super) fn first_position(&self) -> usize {
        self.padding.filter(|_| self.family.skips_padding()).map_or(0, |padding| padding + 1)
    }

    /// Checks that the fields to be written describe this very model.
    pub(super) fn check(&self) -> Result<()> {
        let mut again = BertConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        again.block.dropout = self.block.dropout;
        same("bert", &again, self)
    }
}

/// Fields as a reader of the written file finds them.
pub(crate) fn written(fields: Map<String, Value>) -> ConfigFields {
    ConfigFields::of(JsonObject::of("config.json of this model", fields))
}

/// Checks that a configuration read again equals the given one. Dropout is no field that is read.
pub(crate) fn same<C: PartialEq + Debug>(model: &'static str, again: &C, given: &C) -> Result<()> {
    if again == given {
        return Ok(());
    }
    let why = format!("a `{model}` cannot be so: given {given:?}; transformers would make it {again:?}");
    Err(Error::config(model, "config", why))
}

/// Checks that `model_type` is `due`.
pub(crate) fn expect_type(fields: &ConfigFields, due: &str) -> Result<()> {
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

/// The layer options of DistilBERT, whose fields have names of their own.
fn small_block(fields: &ConfigFields) -> Result<EncoderBlockConfig> {
    // A table of sinusoids would not be trained.
    fields.require("sinusoidal_pos_embds", false)?;
    Ok(EncoderBlockConfig {
        width: fields.size_or("dim", 768)?,
        heads: fields.size_or("n_heads", 12)?,
        hidden: fields.size_or("hidden_dim", 3072)?,
        activation: fields.activation("activation", Activation::Gelu)?,
        pre_norm: false,
        qkv_bias: true,
        eps: 1e-12,
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
    fields: Map<String, Value>,
    kind: &str,
    block: &EncoderBlockConfig,
    layers: usize,
) -> Map<String, Value> {
    let names = ["hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "hidden_act"];
    let mut fields = with_layers(fields, kind, names, block, layers);
    fields.insert("layer_norm_eps".into(), json!(block.eps));
    fields
}

/// The fields, with the kind of the model, and its layers by a family's names for width, heads, hidden width, number of
/// layers and activation.
fn with_layers(
    mut fields: Map<String, Value>,
    kind: &str,
    names: [&str; 5],
    block: &EncoderBlockConfig,
    layers: usize,
) -> Map<String, Value> {
    let sizes = [block.width, block.heads, block.hidden, layers].map(Value::from);
    let values = sizes.into_iter().chain([activation_name(block.activation).into()]);
    fields.insert("model_type".into(), kind.into());
    fields.extend(names.into_iter().map(String::from).zip(values));
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

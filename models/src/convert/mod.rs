//! Conversion tables between weights of files and parameters of models. A table is data, and is read in both
//! directions.

mod gguf;
mod image_tables;
mod pattern;
mod seq2seq_tables;
mod stack;
mod tables;

pub use gguf::GGUF_TABLE;
pub(crate) use gguf::{GGUF_FORMS, GgufForm, Weave};
pub(crate) use image_tables::{CLIP, CONVNEXT, RESNET, VIT};
use pattern::renamed;
pub(crate) use seq2seq_tables::{T5, T5_GATED, WHISPER};
pub use stack::{StackNames, StackPlace, StackRule};
pub(crate) use tables::{
    BERT, DEEPSEEK_V3, DISTILBERT, GEMMA, GPT_OSS, GPT2, LLAMA, MIXTRAL, ROBERTA, ROBERTA_OF_TEXTS,
};

/// The difference between a weight in a file and in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// No difference.
    Keep,
    /// A module's weight is transposed; its bias is not.
    Transpose,
}

/// A row of a table: a module in files and the module in the model. `{}` stands for a number, equal in both.
#[derive(Clone, Copy, Debug)]
pub struct ConversionRule {
    /// The module in files.
    pub theirs: &'static str,
    /// The module in the model.
    pub ours: &'static str,
    /// The change of the module's weight.
    pub change: Change,
}

impl ConversionRule {
    /// A module whose weight is equal in both.
    pub const fn keep(theirs: &'static str, ours: &'static str) -> Self {
        ConversionRule { theirs, ours, change: Change::Keep }
    }

    /// A module whose weight is `[I, O]` in files.
    pub const fn transposed(theirs: &'static str, ours: &'static str) -> Self {
        ConversionRule { theirs, ours, change: Change::Transpose }
    }
}

/// The conversion table of a family of models.
#[derive(Clone, Copy, Debug)]
pub struct ConversionTable {
    /// The rules of modules, read in both directions.
    pub rules: &'static [ConversionRule],
    /// The rules of parameters of all experts, which files have one by one.
    pub stacks: &'static [StackRule],
    /// The prefix of names in files. Files of the base model alone leave it out.
    pub prefix: &'static str,
    /// Old names of the last part of a name in files, each with the new one.
    pub old_leaves: &'static [(&'static str, &'static str)],
    /// Names in files that models do not need: buffers that can be computed, and heads that are not supported.
    pub ignored: &'static [&'static str],
    /// Modules whose names in memory differ from those in files, in transformers 5: `theirs` in memory, `ours` in
    /// files. Adapters are named by those in memory.
    pub modules: &'static [ConversionRule],
}

/// A name converted to the other naming, and the change of its weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The converted name.
    pub name: String,
    /// The change of the weight.
    pub change: Change,
}

impl ConversionTable {
    /// The name in files of a parameter of the model.
    pub fn theirs(&self, ours: &str) -> Option<Converted> {
        converted(self.rules, ours, |rule| (rule.ours, rule.theirs))
    }

    /// The parameter of the model for a name in files.
    pub fn ours(&self, theirs: &str) -> Option<Converted> {
        let (module, leaf) = theirs.rsplit_once('.').unwrap_or(("", theirs));
        let leaf = self.old_leaves.iter().find(|(old, _)| *old == leaf).map(|(_, new)| *new);
        let today = leaf.map(|leaf| format!("{module}.{leaf}"));
        let theirs = today.as_deref().unwrap_or(theirs);
        let found = |name: &str| converted(self.rules, name, |rule| (rule.theirs, rule.ours));
        found(theirs).or_else(|| found(&format!("{}{theirs}", self.prefix)))
    }

    /// The name in transformers' memory of a name in files.
    pub fn in_memory(&self, theirs: &str) -> String {
        let named = converted(self.modules, theirs, |rule| (rule.ours, rule.theirs));
        named.map_or_else(|| theirs.to_owned(), |named| named.name)
    }

    /// Tells whether a name in files is in `ignored`.
    pub fn ignores(&self, theirs: &str) -> bool {
        let with_prefix = format!("{}{theirs}", self.prefix);
        let is = |rule: &str, name: &str| renamed(rule, rule, name).is_some();
        self.ignored.iter().any(|rule| [theirs, &with_prefix].iter().any(|name| is(rule, name)))
    }
}

/// Converts the longest part of a name that a rule knows, and keeps the rest: `….c_attn.lora_A.weight` by the rule of
/// `….c_attn`.
fn converted(
    rules: &[ConversionRule],
    name: &str,
    sides: impl Fn(&ConversionRule) -> (&'static str, &'static str),
) -> Option<Converted> {
    let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
    ends.collect::<Vec<_>>().into_iter().rev().find_map(|end| {
        let (module, rest) = name.split_at(end);
        rules.iter().find_map(|rule| {
            let (from, to) = sides(rule);
            let change = if rest == ".weight" { rule.change } else { Change::Keep };
            Some(Converted { name: renamed(from, to, module)? + rest, change })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_both(table: &ConversionTable, theirs: &str, ours: &str, change: Change) {
        let converted = |name: &str| Some(Converted { name: name.into(), change });
        assert_eq!(table.ours(theirs), converted(ours));
        assert_eq!(table.theirs(ours), converted(theirs));
    }

    #[test]
    fn names_are_converted_both_ways() {
        let (theirs, ours) = ("transformer.h.11.attn.c_attn", "layers.11.self_attn.qkv_proj");
        check_both(&GPT2, &format!("{theirs}.weight"), &format!("{ours}.weight"), Change::Transpose);
        check_both(&GPT2, &format!("{theirs}.bias"), &format!("{ours}.bias"), Change::Keep);
        check_both(&GPT2, &format!("{theirs}.lora_A.weight"), &format!("{ours}.lora_A.weight"), Change::Keep);
        check_both(&LLAMA, "lm_head.weight", "lm_head.weight", Change::Keep);
        check_both(&VIT, "vit.embeddings.cls_token", "cls_token", Change::Keep);
        let [query, norm] =
            ["attention.attention.query.lora_A", "layernorm_after"].map(|m| format!("vit.encoder.layer.3.{m}"));
        assert_eq!(VIT.in_memory(&query), "vit.layers.3.attention.q_proj.lora_A");
        assert_eq!([VIT.in_memory(&norm), BERT.in_memory(&norm)], ["vit.layers.3.layernorm_after".to_owned(), norm]);
    }

    #[test]
    fn a_prefix_may_be_left_out() {
        assert_eq!(GPT2.ours("wte.weight").unwrap().name, "embed_tokens.weight");
        assert_eq!(BERT.ours("encoder.layer.3.output.LayerNorm.gamma").unwrap().name, "layers.3.norm2.weight");
        assert_eq!(LLAMA.ours("layers.0.mlp.up_proj.weight").unwrap().name, "layers.0.mlp.up_proj.weight");
    }

    #[test]
    fn what_no_rule_knows_is_unknown() {
        for name in ["", ".", "h.x.ln_1.weight", "transformer.h.1", "lm_head2.weight", "model.layers.1.mlp"] {
            assert_eq!(GPT2.ours(name).or(LLAMA.ours(name)).map(|c| c.name), None, "{name}");
        }
        assert!(GPT2.ignores("h.3.attn.bias") && GPT2.ignores("transformer.h.3.attn.masked_bias"));
        assert!(!GPT2.ignores("h.3.attn.c_attn.bias"));
    }

    #[test]
    fn no_two_rules_meet() {
        for table in [
            &GPT2,
            &LLAMA,
            &MIXTRAL,
            &GEMMA,
            &GPT_OSS,
            &DEEPSEEK_V3,
            &BERT,
            &ROBERTA,
            &ROBERTA_OF_TEXTS,
            &DISTILBERT,
            &VIT,
            &RESNET,
            &CONVNEXT,
            &T5,
            &T5_GATED,
            &WHISPER,
            &CLIP,
        ] {
            for side in [|r: &ConversionRule| r.ours, |r: &ConversionRule| r.theirs] {
                let names: std::collections::BTreeSet<_> = table.rules.iter().map(side).collect();
                assert_eq!(names.len(), table.rules.len());
            }
        }
    }
}

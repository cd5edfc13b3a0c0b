//! Conversion tables: which weight of a file is which parameter here. A table is data, and is read in both directions.

mod pattern;
mod stack;
mod tables;

use pattern::renamed;
pub use stack::{StackNames, StackPlace, StackRule};
pub use tables::{BERT, GPT2, LLAMA, MIXTRAL, VIT};

/// How a weight differs between a file and the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Not at all.
    Keep,
    /// The weight of the module is transposed; a bias is not.
    Transpose,
}

/// One row: a module of a file and the module here. `{}` stands for a number, the same in both.
#[derive(Clone, Copy, Debug)]
pub struct ConversionRule {
    /// The module in files.
    pub theirs: &'static str,
    /// The module in the model.
    pub ours: &'static str,
    /// What else differs.
    pub change: Change,
}

/// The conversion table of a family of models.
#[derive(Clone, Copy, Debug)]
pub struct ConversionTable {
    /// Modules in files that are modules here, and the other way round.
    pub rules: &'static [ConversionRule],
    /// Parameters of all experts, which files have one by one.
    pub stacks: &'static [StackRule],
    /// What files begin their names with, or leave out: their base model's own files do.
    pub prefix: &'static str,
    /// Names that older files use for the last part of a name, with today's.
    pub old_leaves: &'static [(&'static str, &'static str)],
    /// Names in files that hold nothing which is not computed here.
    pub ignored: &'static [&'static str],
    /// Modules that transformers 5 has in memory, which adapters are named by, and what they are in files, where that
    /// is not the same.
    pub modules: &'static [ConversionRule],
}

/// A name in the other naming, and what else differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The name.
    pub name: String,
    /// What else differs.
    pub change: Change,
}

impl ConversionTable {
    /// The name in files of a parameter here.
    pub fn theirs(&self, ours: &str) -> Option<Converted> {
        converted(self.rules, ours, |rule| (rule.ours, rule.theirs))
    }

    /// The parameter here of a name in files.
    pub fn ours(&self, theirs: &str) -> Option<Converted> {
        let (module, leaf) = theirs.rsplit_once('.').unwrap_or(("", theirs));
        let leaf = self.old_leaves.iter().find(|(old, _)| *old == leaf).map(|(_, new)| *new);
        let today = leaf.map(|leaf| format!("{module}.{leaf}"));
        let theirs = today.as_deref().unwrap_or(theirs);
        let found = |name: &str| converted(self.rules, name, |rule| (rule.theirs, rule.ours));
        found(theirs).or_else(|| found(&format!("{}{theirs}", self.prefix)))
    }

    /// The name in memory of what has this name in files.
    pub fn in_memory(&self, theirs: &str) -> String {
        let named = converted(self.modules, theirs, |rule| (rule.ours, rule.theirs));
        named.map_or_else(|| theirs.to_owned(), |named| named.name)
    }

    /// Whether a name in files is one that is left out.
    pub fn ignores(&self, theirs: &str) -> bool {
        let with_prefix = format!("{}{theirs}", self.prefix);
        self.ignored.iter().any(|rule| [theirs, &with_prefix].iter().any(|name| renamed(rule, rule, name).is_some()))
    }
}

/// The part of a name that a rule knows is converted, the rest kept: `….c_attn.lora_A.weight` by the rule of
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
        for table in [&GPT2, &LLAMA, &MIXTRAL, &BERT, &VIT] {
            for side in [|r: &ConversionRule| r.ours, |r: &ConversionRule| r.theirs] {
                let names: std::collections::BTreeSet<_> = table.rules.iter().map(side).collect();
                assert_eq!(names.len(), table.rules.len());
            }
        }
    }
}

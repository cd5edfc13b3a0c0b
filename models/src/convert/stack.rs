//! Parameters of all experts, which files have as one weight for each expert.

use super::{ConversionTable, pattern::numbered};

/// The rule of a parameter of all experts, `[E, n · F, C]`: files have `n` weights `[F, C]` of each expert.
#[derive(Clone, Copy, Debug)]
pub struct StackRule {
    /// The modules in files, in the order of their rows in an expert. The first `{}` is the layer, the second the
    /// expert.
    pub theirs: &'static [&'static str],
    /// The parameter in the model; `{}` is the layer.
    pub ours: &'static str,
}

/// The place of a file's weight in a parameter of all experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackPlace {
    /// The parameter in the model.
    pub name: String,
    /// The expert.
    pub expert: usize,
    /// The index of the weight among the expert's weights, in the order of their rows.
    pub part: usize,
}

/// The names in files of the weights of a parameter of all experts.
#[derive(Clone, Debug)]
pub struct StackNames {
    rule: StackRule,
    layer: usize,
}

impl StackNames {
    /// The number of weights of each expert.
    pub fn parts(&self) -> usize {
        self.rule.theirs.len()
    }

    /// The name in files of weight `part` of an expert.
    pub fn of(&self, expert: usize, part: usize) -> String {
        let module = self.rule.theirs.get(part).copied().unwrap_or_default();
        let module = module.replacen("{}", &self.layer.to_string(), 1).replacen("{}", &expert.to_string(), 1);
        format!("{module}.weight")
    }
}

impl ConversionTable {
    /// The place of a file's weight, if it is one of an expert's.
    pub fn stacked(&self, theirs: &str) -> Option<StackPlace> {
        let module = theirs.strip_suffix(".weight")?;
        let with_prefix = format!("{}{module}", self.prefix);
        self.stacks.iter().find_map(|rule| {
            let place = |(part, pattern): (usize, &&str)| {
                let numbers = numbered(pattern, module).or_else(|| numbered(pattern, &with_prefix))?;
                let &[layer, expert] = &numbers[..] else { return None };
                Some(StackPlace { name: rule.ours.replacen("{}", &layer.to_string(), 1), expert, part })
            };
            rule.theirs.iter().enumerate().find_map(place)
        })
    }

    /// The names in files of a parameter's weights, if it is one of all experts.
    pub fn stack(&self, ours: &str) -> Option<StackNames> {
        self.stacks.iter().find_map(|&rule| match numbered(rule.ours, ours)?[..] {
            [layer] => Some(StackNames { rule, layer }),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::{GPT2, LLAMA, MIXTRAL};

    #[test]
    fn names_of_experts_are_converted_both_ways() {
        for (table, ours, part, theirs) in [
            (&MIXTRAL, "layers.3.mlp.experts.gate_up_proj", 1, "model.layers.3.block_sparse_moe.experts.11.w3.weight"),
            (&MIXTRAL, "layers.3.mlp.experts.down_proj", 0, "model.layers.3.block_sparse_moe.experts.11.w2.weight"),
            (&LLAMA, "layers.3.mlp.experts.gate_up_proj", 0, "model.layers.3.mlp.experts.11.gate_proj.weight"),
        ] {
            assert_eq!(table.stacked(theirs), Some(StackPlace { name: ours.into(), expert: 11, part }));
            assert_eq!(table.stack(ours).unwrap().of(11, part), theirs);
            let bare = theirs.strip_prefix("model.").unwrap();
            assert_eq!(table.stacked(bare), table.stacked(theirs));
        }
        assert_eq!(LLAMA.stack("layers.3.mlp.experts.gate_up_proj").unwrap().parts(), 2);
    }

    #[test]
    fn what_is_no_weight_of_an_expert_is_none() {
        for name in [
            "",
            "model.layers.3.mlp.experts.11.gate_proj",
            "model.layers.3.mlp.experts.x.gate_proj.weight",
            "model.layers.3.mlp.experts.1.2.gate_proj.weight",
            "model.layers.3.mlp.gate_proj.weight",
            "model.layers.3.mlp.experts.99999999999999999999999.gate_proj.weight",
        ] {
            assert_eq!(LLAMA.stacked(name).or(GPT2.stacked(name)), None, "{name}");
        }
        assert!(LLAMA.stack("layers.3.mlp.experts").is_none() && LLAMA.stack("mlp.experts.down_proj").is_none());
    }
}

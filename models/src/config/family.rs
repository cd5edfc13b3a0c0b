//! The families of decoders.

use numcore::{Result, Within};

use super::ConfigFields;

/// A family of decoders, named by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2: learned positions, layer norms, one projection for queries, keys and values.
    Gpt2,
    /// Llama 2 and 3: rotary positions, RMS norms, gated linear layers, grouped queries.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: Llama with biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: Llama with norms on the heads of queries and keys.
    Qwen3,
    /// Mixtral: Mistral with mixtures of experts.
    Mixtral,
    /// Qwen 1.5 and 2 with mixtures of experts: every token also uses one shared expert, weighed by a gate.
    Qwen2Moe,
    /// Qwen 3 with mixtures of experts.
    Qwen3Moe,
}

/// The sizes of a family where a configuration has no field.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    pub vocab: usize,
    pub width: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// The number of key heads; as many as heads of queries if `None`.
    pub kv_heads: Option<usize>,
    /// The width over the heads if `None`.
    pub head_dim: Option<usize>,
    pub context: usize,
    pub norm_eps: f64,
    pub theta: f64,
}

impl Family {
    /// The families, each with its name in `model_type` and its class in transformers.
    const ALL: [(Family, &'static str, &'static str); 8] = [
        (Family::Gpt2, "gpt2", "GPT2LMHeadModel"),
        (Family::Llama, "llama", "LlamaForCausalLM"),
        (Family::Mistral, "mistral", "MistralForCausalLM"),
        (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
        (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
        (Family::Qwen2Moe, "qwen2_moe", "Qwen2MoeForCausalLM"),
        (Family::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
    ];

    /// The family that a configuration names.
    ///
    /// # Errors
    /// Fails if it names none, or one that is not known.
    #[track_caller]
    pub fn of(fields: &ConfigFields) -> Result<Family> {
        let name = fields.need("model_type", fields.text("model_type")?)?;
        Self::ALL
            .iter()
            .find(|(_, known, _)| *known == name)
            .map(|(family, ..)| *family)
            .ok_or_else(|| {
                let known: Vec<_> = Self::ALL.iter().map(|(_, known, _)| *known).collect();
                fields.wrong("model_type", format_args!("is `{name}`; decoders are known of: {}", known.join(", ")))
            })
            .at_caller()
    }

    /// The sizes that transformers assumes where a configuration has no field.
    pub(super) fn defaults(self) -> Defaults {
        // Llama's sizes; its context is the shortest but GPT-2's.
        let llama = Defaults {
            vocab: 32_000,
            width: 4096,
            hidden: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            head_dim: None,
            context: 2048,
            norm_eps: 1e-6,
            theta: 10_000.0,
        };
        let mistral = Defaults { hidden: 14_336, kv_heads: Some(8), context: 131_072, ..llama };
        let qwen = Defaults { vocab: 151_936, hidden: 22_016, kv_heads: Some(32), context: 32_768, ..llama };
        match self {
            Family::Gpt2 => {
                let sizes = Defaults { vocab: 50_257, width: 768, layers: 12, heads: 12, context: 1024, ..llama };
                Defaults { norm_eps: 1e-5, ..sizes }
            }
            Family::Llama => llama,
            Family::Mistral => mistral,
            Family::Mixtral => Defaults { norm_eps: 1e-5, theta: 1_000_000.0, ..mistral },
            Family::Qwen2 => qwen,
            Family::Qwen3 => Defaults { head_dim: Some(128), ..qwen },
            Family::Qwen2Moe => {
                Defaults { width: 2048, hidden: 5632, layers: 24, heads: 16, kv_heads: Some(16), ..qwen }
            }
            Family::Qwen3Moe => Defaults { width: 2048, hidden: 6144, layers: 24, kv_heads: Some(4), ..qwen },
        }
    }

    /// Tells whether layers may have mixtures of experts.
    pub fn has_experts(self) -> bool {
        matches!(self, Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe)
    }

    /// Tells whether heads of queries and keys are normalized.
    pub(crate) fn has_head_norms(self) -> bool {
        matches!(self, Family::Qwen3 | Family::Qwen3Moe)
    }

    /// The name in `model_type`.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The class of transformers that loads a model of this family.
    pub fn architecture(self) -> &'static str {
        Self::ALL[self as usize].2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, (family, ..)) in Family::ALL.iter().enumerate() {
            assert_eq!(*family as usize, i);
        }
    }
}

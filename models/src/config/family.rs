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
    /// OLMo 2: norms of outputs in place of inputs, and of all heads of queries and of keys together.
    Olmo2,
    /// Phi 3 and 4: Mistral with fused projections.
    Phi3,
    /// SmolLM 3: Llama with layers without positions.
    SmolLm3,
    /// Gemma 2: norms of inputs and outputs, soft caps, a window in every other layer.
    Gemma2,
    /// Gemma 3, its text model: norms on heads, and positions of their own in layers with a window.
    Gemma3,
    /// GPT-OSS: sinks of attention, a window in every other layer, mixtures of clamped experts with biases.
    GptOss,
    /// DeepSeek-V3: keys and values from latent vectors, mixtures with a shared expert, groups and a selection bias.
    DeepseekV3,
}

/// The parts of a family's layers that no field of a configuration describes.
#[derive(Clone, Copy)]
pub(crate) struct FamilyParts {
    /// True if the inputs of attention and of the linear layers are normalized.
    pub input_norms: bool,
    /// True if their outputs are normalized, before they are added.
    pub output_norms: bool,
    /// The number added to the weights of norms.
    pub norm_offset: f64,
    /// The norms of queries and keys: of all heads together if true, of each head if false.
    pub head_norms: Option<bool>,
    /// True if projections of one input are one.
    pub fused: bool,
    /// True if the linear layers have a gate.
    pub gated: bool,
    /// True if the embeddings of tokens are multiplied by the root of the width.
    pub scaled_embedding: bool,
    /// True if heads have sinks.
    pub sinks: bool,
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
    /// The token whose embedding is not trained.
    pub padding: Option<usize>,
    pub tied: bool,
    /// The sliding window.
    pub window: Option<usize>,
}

impl Family {
    /// The families, each with its name in `model_type` and its class in transformers.
    const ALL: [(Family, &'static str, &'static str); 15] = [
        (Family::Gpt2, "gpt2", "GPT2LMHeadModel"),
        (Family::Llama, "llama", "LlamaForCausalLM"),
        (Family::Mistral, "mistral", "MistralForCausalLM"),
        (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
        (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
        (Family::Qwen2Moe, "qwen2_moe", "Qwen2MoeForCausalLM"),
        (Family::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
        (Family::Olmo2, "olmo2", "Olmo2ForCausalLM"),
        (Family::Phi3, "phi3", "Phi3ForCausalLM"),
        (Family::SmolLm3, "smollm3", "SmolLM3ForCausalLM"),
        (Family::Gemma2, "gemma2", "Gemma2ForCausalLM"),
        (Family::Gemma3, "gemma3_text", "Gemma3ForCausalLM"),
        (Family::GptOss, "gpt_oss", "GptOssForCausalLM"),
        (Family::DeepseekV3, "deepseek_v3", "DeepseekV3ForCausalLM"),
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
            padding: None,
            tied: false,
            window: None,
        };
        let window = Some(4096);
        let mistral = Defaults { hidden: 14_336, kv_heads: Some(8), context: 131_072, window, ..llama };
        let qwen = Defaults { vocab: 151_936, hidden: 22_016, kv_heads: Some(32), context: 32_768, window, ..llama };
        let gemma = Defaults { hidden: 9216, layers: 26, heads: 8, kv_heads: Some(4), head_dim: Some(256), ..llama };
        let gemma = Defaults { width: 2304, padding: Some(0), tied: true, window, ..gemma };
        match self {
            Family::Gpt2 => {
                let sizes = Defaults { vocab: 50_257, width: 768, layers: 12, heads: 12, context: 1024, ..llama };
                Defaults { norm_eps: 1e-5, tied: true, ..sizes }
            }
            Family::Llama => llama,
            Family::Mistral => mistral,
            Family::Mixtral => Defaults { norm_eps: 1e-5, theta: 1_000_000.0, window: None, ..mistral },
            Family::Qwen2 => qwen,
            Family::Qwen3 => Defaults { head_dim: Some(128), ..qwen },
            Family::Qwen2Moe => {
                Defaults { width: 2048, hidden: 5632, layers: 24, heads: 16, kv_heads: Some(16), ..qwen }
            }
            Family::Qwen3Moe => Defaults { width: 2048, hidden: 6144, layers: 24, kv_heads: Some(4), ..qwen },
            Family::Olmo2 => Defaults { vocab: 50_304, norm_eps: 1e-5, padding: Some(1), ..llama },
            Family::Phi3 => {
                let sizes = Defaults { vocab: 32_064, width: 3072, hidden: 8192, context: 4096, ..llama };
                Defaults { norm_eps: 1e-5, padding: Some(32_000), ..sizes }
            }
            Family::SmolLm3 => {
                let sizes = Defaults { vocab: 128_256, width: 2048, layers: 36, heads: 16, kv_heads: Some(4), ..llama };
                Defaults { context: 32_768, theta: 2_000_000.0, padding: Some(128_004), tied: true, ..sizes }
            }
            Family::Gemma2 => Defaults { vocab: 256_000, context: 8192, ..gemma },
            Family::Gemma3 => Defaults { vocab: 262_208, context: 131_072, theta: 1_000_000.0, ..gemma },
            Family::GptOss => {
                let sizes = Defaults { vocab: 201_088, width: 2880, hidden: 2880, layers: 36, heads: 64, ..llama };
                let sizes = Defaults { kv_heads: Some(8), head_dim: Some(64), context: 131_072, ..sizes };
                Defaults { norm_eps: 1e-5, theta: 150_000.0, window: Some(128), ..sizes }
            }
            Family::DeepseekV3 => {
                let sizes = Defaults { vocab: 129_280, width: 7168, hidden: 18_432, layers: 61, heads: 128, ..llama };
                Defaults { kv_heads: Some(128), head_dim: Some(64), context: 4096, ..sizes }
            }
        }
    }

    /// The parts of the family's layers.
    pub(crate) fn parts(self) -> FamilyParts {
        let llama = FamilyParts {
            input_norms: true,
            output_norms: false,
            norm_offset: 0.0,
            head_norms: None,
            fused: false,
            gated: true,
            scaled_embedding: false,
            sinks: false,
        };
        let gemma = FamilyParts { output_norms: true, norm_offset: 1.0, scaled_embedding: true, ..llama };
        match self {
            Family::Gpt2 => FamilyParts { fused: true, gated: false, ..llama },
            Family::Phi3 => FamilyParts { fused: true, ..llama },
            Family::Qwen3 | Family::Qwen3Moe => FamilyParts { head_norms: Some(false), ..llama },
            Family::Olmo2 => FamilyParts { input_norms: false, output_norms: true, head_norms: Some(true), ..llama },
            Family::GptOss => FamilyParts { sinks: true, ..llama },
            Family::Gemma2 => gemma,
            Family::Gemma3 => FamilyParts { head_norms: Some(false), ..gemma },
            _ => llama,
        }
    }

    /// Tells whether linear layers of attention may have biases, by the field `attention_bias`.
    pub(super) fn has_attention_bias(self) -> bool {
        !matches!(
            self,
            Family::Gpt2 | Family::Mistral | Family::Mixtral | Family::Qwen2 | Family::Qwen2Moe | Family::Phi3
        )
    }

    /// Tells whether the other linear layers may have biases, by the field `mlp_bias`.
    pub(super) fn has_mlp_bias(self) -> bool {
        matches!(self, Family::Llama | Family::SmolLm3)
    }

    /// Tells whether this is a Gemma.
    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma2 | Family::Gemma3)
    }

    /// Tells whether layers may have mixtures of experts.
    pub fn has_experts(self) -> bool {
        matches!(self, Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe | Family::GptOss | Family::DeepseekV3)
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

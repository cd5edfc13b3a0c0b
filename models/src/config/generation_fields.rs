//! Fields of `generation_config.json`, which a `config.json` may have too.

/// The options of transformers that change the generated text and are not supported, with the values that change
/// nothing.
pub(crate) const UNSUPPORTED: &[(&str, &[f64])] = &[
    ("assistant_ensemble_weight", &[]),
    ("bad_words_ids", &[]),
    ("constraints", &[]),
    ("diversity_penalty", &[0.0]),
    ("dola_layers", &[]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("exponential_decay_length_penalty", &[]),
    ("force_bos_token_to_be_generated", &[]),
    ("force_words_ids", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("guidance_scale", &[1.0]),
    ("is_assistant", &[]),
    ("max_time", &[]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("num_beam_groups", &[1.0]),
    ("num_beams", &[1.0]),
    ("num_return_sequences", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("remove_invalid_values", &[]),
    ("renormalize_logits", &[]),
    ("sequence_bias", &[]),
    ("stop_strings", &[]),
    ("token_healing", &[]),
    ("top_h", &[]),
    ("watermarking_config", &[]),
];

/// The options that are read, and those that do not change one text's tokens. The latter concern outputs, memory,
/// comparison of beams, and drafts, of which the model decides.
const KNOWN: &[&str] = &[
    "_commit_hash",
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "min_p",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "repetition_penalty",
    "return_dict_in_generate",
    "return_legacy_cache",
    "speculation_type",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "typical_p",
    "use_cache",
    "use_model_defaults",
    "use_mtp",
];

/// Tells whether a field is one of generation: in a `config.json` it changes nothing of what the model computes.
pub(crate) fn is_generation_field(name: &str) -> bool {
    KNOWN.binary_search(&name).is_ok() || UNSUPPORTED.binary_search_by_key(&name, |(known, _)| known).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_fields_are_sorted() {
        assert!(KNOWN.is_sorted() && UNSUPPORTED.is_sorted_by_key(|(name, _)| *name));
    }
}

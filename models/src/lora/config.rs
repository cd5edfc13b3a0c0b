//! The configuration of adapters: their layers, ranks and scales.

use std::collections::BTreeMap;

use numcore::{Error, Result};
use serde_json::{Map, Value, json};

use super::names::{chosen, is_within, matches};
use crate::files::{JsonObject, is_empty};

/// The layers that have an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoraTargets {
    /// Layers whose name is in this list, or ends with `.` and a name in it.
    Names(Vec<String>),
    /// The linear layers except heads.
    AllLinear,
}

/// The configuration of adapters. By default those of `q_proj` and `v_proj`, of rank 8.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank `r` of the matrices.
    pub rank: usize,
    /// The numerator of the update's factor `alpha / rank`.
    pub alpha: f64,
    /// The dropout probability of an adapter's input.
    pub dropout: f64,
    /// The layers that have an adapter.
    pub target_modules: LoraTargets,
    /// Layers to leave out of the targets, by the ends of their names.
    pub exclude_modules: Vec<String>,
    /// True if the update is multiplied by `alpha / √rank` instead (rsLoRA, Kalajdzievski 2023).
    pub use_rslora: bool,
    /// True if each output has a trained magnitude (DoRA).
    pub dora: bool,
    /// Modules that are trained in full, in place, and saved with the adapters, by the ends of their names. The head of
    /// a classifier (`SEQ_CLS`, `TOKEN_CLS`) is one even if not named, as in peft.
    pub modules_to_save: Vec<String>,
    /// Ranks of some layers, by the ends of their names, or by a full name after `^`.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of some layers, by the ends of their names, or by a full name after `^`.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// The field `base_model_name_or_path` of the adapter's files.
    pub base_model_name_or_path: Option<String>,
    /// The field `task_type` of the adapter's files, such as `CAUSAL_LM` or `SEQ_CLS`: peft chooses the class of the
    /// model by it.
    pub task_type: Option<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            target_modules: LoraTargets::Names(vec!["q_proj".into(), "v_proj".into()]),
            exclude_modules: Vec::new(),
            use_rslora: false,
            dora: false,
            modules_to_save: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            base_model_name_or_path: None,
            task_type: None,
        }
    }
}

/// Fields of `adapter_config.json` that are read.
const READ: &[&str] = &[
    "alpha_pattern",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// Fields that change nothing where they are false.
const OFF: &[&str] = &["lora_bias", "merge_weights", "use_bdlora", "use_qalora"];

/// Fields of `adapter_config.json` about how an adapter was made or is loaded, which do not change its output.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// The heads of classifiers, of which a model has one.
const CLASSIFIERS: [&str; 2] = ["classifier", "score"];

impl LoraConfig {
    /// Reads an `adapter_config.json`.
    ///
    /// # Errors
    /// Fails if it describes no LoRA adapter, or one with unsupported options.
    pub(super) fn read(fields: &JsonObject) -> Result<Self> {
        if fields.text("peft_type")? != Some("LORA") {
            return Err(fields.wrong("peft_type", "is not `LORA`: only these adapters are known"));
        }
        if fields.text("bias")?.unwrap_or("none") != "none" {
            return Err(fields.wrong("bias", "is not `none`: biases are not trained with adapters here"));
        }
        check_start(fields)?;
        let unknown = fields.fields().iter().find(|(name, value)| {
            let is_in = |list: &[&str]| list.contains(&name.as_str());
            let off = is_empty(value) || **value == Value::Bool(false) && is_in(OFF);
            !off && !is_in(READ) && !is_in(HARMLESS)
        });
        if let Some((name, value)) = unknown {
            return Err(fields.wrong(name, format_args!("is {value}, which is not known here")));
        }
        let config = LoraConfig {
            rank: fields.need("r", fields.count("r")?)?,
            alpha: fields.need("lora_alpha", fields.number("lora_alpha")?)?,
            dropout: fields.number("lora_dropout")?.unwrap_or(0.0),
            target_modules: targets(fields)?,
            exclude_modules: owned(fields.texts("exclude_modules")?.unwrap_or_default()),
            use_rslora: fields.flag("use_rslora")?.unwrap_or(false),
            dora: fields.flag("use_dora")?.unwrap_or(false),
            modules_to_save: owned(fields.texts("modules_to_save")?.unwrap_or_default()),
            rank_pattern: pattern(fields, "rank_pattern", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))?,
            alpha_pattern: pattern(fields, "alpha_pattern", Value::as_f64)?,
            base_model_name_or_path: fields.text("base_model_name_or_path")?.map(str::to_owned),
            task_type: fields.text("task_type")?.map(str::to_owned),
        };
        config.check()?;
        Ok(config)
    }

    /// The fields of an `adapter_config.json`.
    pub(super) fn to_json(&self, fan_in_fan_out: bool) -> Map<String, Value> {
        let targets = match &self.target_modules {
            LoraTargets::Names(names) => json!(names),
            LoraTargets::AllLinear => json!("all-linear"),
        };
        let saved = self.saved_modules();
        let value = json!({
            "peft_type": "LORA", "task_type": self.task_type, "r": self.rank,
            "base_model_name_or_path": self.base_model_name_or_path, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "target_modules": targets,
            "exclude_modules": if self.exclude_modules.is_empty() { Value::Null } else { json!(self.exclude_modules) },
            "use_rslora": self.use_rslora, "use_dora": self.dora, "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern, "bias": "none", "fan_in_fan_out": fan_in_fan_out,
            "inference_mode": true, "init_lora_weights": true,
            "modules_to_save": if saved.is_empty() { Value::Null } else { json!(saved) }
        });
        value.as_object().cloned().unwrap_or_default()
    }

    /// Checks that every option is in its range.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("lora", field, why));
        if self.rank == 0 || self.rank_pattern.values().any(|&rank| rank == 0) {
            return wrong("rank", "an adapter of rank 0 has no matrices".into());
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return wrong("dropout", format!("a dropout of {} is not in [0, 1)", self.dropout));
        }
        if let Some(name) = self.exclude_modules.iter().find(|name| name.contains('^')) {
            return wrong("exclude_modules", format!("`{name}` is a regular expression: give ends of names"));
        }
        let patterns = self.rank_pattern.keys().chain(self.alpha_pattern.keys());
        let special = |name: &&String| name.contains(['*', '+', '?', '(', '[', '{', '|', '\\', '$']);
        if let Some(name) = patterns.chain(&self.exclude_modules).find(special) {
            return wrong("pattern", format!("`{name}` is a regular expression: give ends of names"));
        }
        Ok(())
    }

    /// Checks that no two patterns give a layer different values: peft's choice between them depends on their order in
    /// the file.
    pub(super) fn check_patterns(&self, layer: &str) -> Result<()> {
        let ranks = differing(&self.rank_pattern, layer);
        let Some([a, b]) = ranks.or_else(|| differing(&self.alpha_pattern, layer)) else { return Ok(()) };
        let why = format!("`{a}` and `{b}` both match {layer} and give it different values");
        Err(Error::config("lora", "pattern", why))
    }

    /// Tells whether a layer has an adapter. Modules that are trained in full have none.
    pub(super) fn adapts(&self, layer: &str) -> bool {
        chosen(&self.target_modules, &self.exclude_modules, layer) && !self.saves(layer)
    }

    /// The modules that are trained in full, by the ends of their names.
    pub(super) fn saved_modules(&self) -> Vec<&str> {
        let is_classifier = matches!(self.task_type.as_deref(), Some("SEQ_CLS" | "TOKEN_CLS"));
        let heads =
            CLASSIFIERS.into_iter().filter(|head| is_classifier && !self.modules_to_save.iter().any(|m| m == head));
        self.modules_to_save.iter().map(String::as_str).chain(heads).collect()
    }

    /// Tells whether a module, or one that contains it, is trained in full.
    pub(super) fn saves(&self, module: &str) -> bool {
        self.saved_modules().iter().any(|name| is_within(module, name))
    }

    /// Checks that the model has every module to train in full; of the heads of classifiers, one is enough.
    pub(super) fn check_saved(&self, modules: &[&str]) -> Result<()> {
        let has = |name: &str| modules.iter().any(|module| is_within(module, name));
        let has_head = CLASSIFIERS.iter().any(|head| has(head));
        let names = self.saved_modules();
        let absent = names.iter().find(|name| !(has(name) || has_head && CLASSIFIERS.contains(name)));
        let Some(name) = absent else { return Ok(()) };
        let task = self.task_type.as_deref().unwrap_or("none");
        let why = format!("this model has no module `{name}` to train whole (`task_type` is {task})");
        Err(Error::config("lora", "modules_to_save", why))
    }

    /// Replaces names by those that `today` returns: older adapters may have older names.
    pub(super) fn renamed(self, today: impl Fn(&str) -> Vec<String>) -> Self {
        let all = |names: Vec<String>| names.iter().flat_map(|name| today(name)).collect();
        LoraConfig {
            target_modules: match self.target_modules {
                LoraTargets::Names(names) => LoraTargets::Names(all(names)),
                LoraTargets::AllLinear => LoraTargets::AllLinear,
            },
            exclude_modules: all(self.exclude_modules),
            rank_pattern: renamed_keys(self.rank_pattern, &today),
            alpha_pattern: renamed_keys(self.alpha_pattern, &today),
            ..self
        }
    }

    /// The rank of a layer's adapter.
    pub(super) fn rank_of(&self, layer: &str) -> usize {
        by_pattern(&self.rank_pattern, layer).unwrap_or(self.rank)
    }

    /// The factor of a layer's update.
    pub(super) fn scale_of(&self, layer: &str) -> f64 {
        let (rank, alpha) = (self.rank_of(layer) as f64, by_pattern(&self.alpha_pattern, layer).unwrap_or(self.alpha));
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

fn by_pattern<T: Copy>(patterns: &BTreeMap<String, T>, layer: &str) -> Option<T> {
    patterns.iter().find(|(name, _)| matches(layer, name)).map(|(_, value)| *value)
}

fn renamed_keys<T: Copy>(patterns: BTreeMap<String, T>, today: impl Fn(&str) -> Vec<String>) -> BTreeMap<String, T> {
    let renamed =
        patterns.into_iter().flat_map(|(name, value)| today(&name).into_iter().map(move |name| (name, value)));
    renamed.collect()
}

/// Two patterns that match a layer and give it different values.
fn differing<'a, T: PartialEq>(patterns: &'a BTreeMap<String, T>, layer: &str) -> Option<[&'a str; 2]> {
    let mut matching = patterns.iter().filter(|(name, _)| matches(layer, name));
    let (first, value) = matching.next()?;
    matching.find(|(_, other)| *other != value).map(|(other, _)| [&**first, &**other])
}

/// Checks that the adapter's initialization left the base model's weights as they are in its files. Only the listed
/// kinds do; after others the adapter would compute something else.
fn check_start(fields: &JsonObject) -> Result<()> {
    let harmless = match fields.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => true,
        Some(Value::String(how)) => ["gaussian", "eva", "orthogonal"].contains(&how.to_lowercase().as_str()),
        Some(_) => false,
    };
    if harmless {
        return Ok(());
    }
    let why = "changes the base model's weights: convert the adapter in peft with \
               `save_pretrained(..., path_initial_model_for_weight_conversion=...)`";
    Err(fields.wrong("init_lora_weights", why))
}

fn targets(fields: &JsonObject) -> Result<LoraTargets> {
    match fields.need("target_modules", fields.get("target_modules"))? {
        Value::String(all) if all == "all-linear" => Ok(LoraTargets::AllLinear),
        Value::String(other) => {
            Err(fields
                .wrong("target_modules", format_args!("is the regular expression `{other}`: give a list of names")))
        }
        _ => Ok(LoraTargets::Names(owned(fields.texts("target_modules")?.unwrap_or_default()))),
    }
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(String::from).collect()
}

fn pattern<T>(
    fields: &JsonObject,
    name: &'static str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<BTreeMap<String, T>> {
    let Some(part) = fields.object(name)? else { return Ok(BTreeMap::new()) };
    let entry = |(key, value): (&String, &Value)| Some((key.clone(), read(value)?));
    let entries: Option<BTreeMap<_, _>> = part.fields().iter().map(entry).collect();
    entries.ok_or_else(|| fields.wrong(name, "has a value that is not a number"))
}

#[cfg(test)]
mod tests {
    use super::{super::names::ends, *};

    #[test]
    fn names_are_matched_by_whole_parts() {
        assert!(ends("model.layers.0.self_attn.q_proj", "q_proj") && ends("q_proj", "q_proj"));
        assert!(!ends("model.layers.0.self_attn.xq_proj", "q_proj") && !ends("q_proj.x", "q_proj"));
        let all = LoraConfig {
            target_modules: LoraTargets::AllLinear,
            exclude_modules: vec!["up_proj".into()],
            ..Default::default()
        };
        assert!(all.adapts("model.layers.0.mlp.down_proj"));
        assert!(!all.adapts("lm_head") && !all.adapts("model.layers.0.mlp.up_proj"));
        let whole = LoraConfig { modules_to_save: vec!["down_proj".into()], ..all };
        assert!(!whole.adapts("model.layers.0.mlp.down_proj") && whole.adapts("model.layers.0.mlp.gate_proj"));
    }

    /// The fields that peft 0.21 writes, with their defaults; fields that are not peft's are refused.
    #[test]
    fn fields_are_read_or_harmless_or_refused() {
        let default = json!({
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": "x", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
            "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
            "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8, "lora_bias": false, "lora_dropout": 0.0,
            "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core",
            "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2",
            "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"],
            "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null,
            "use_bdlora": null, "use_dora": false, "use_qalora": false, "use_rslora": false, "velora_config": null
        });
        let read = |field: &str, value: Value| {
            let mut fields = default.as_object().cloned().unwrap_or_default();
            fields.insert(field.into(), value);
            LoraConfig::read(&JsonObject::of("adapter_config.json", fields))
        };
        assert_eq!(read("r", json!(4)).unwrap().rank, 4);
        for (field, value) in [
            ("alora_invocation_tokens", json!([1])),
            ("arrow_config", json!({"top_k": 3})),
            ("bias", json!("all")),
            ("exclude_modules", json!("x.*")),
            ("init_lora_weights", json!("pissa")),
            ("kasa_config", json!({"beta": 1e-4})),
            ("layer_replication", json!([[0, 4]])),
            ("layers_to_transform", json!([1])),
            ("lora_bias", json!(true)),
            ("monteclora_config", json!({"buffer_size": 150})),
            ("target_modules", json!(".*q_proj")),
            ("target_parameters", json!(["experts.down_proj"])),
            ("trainable_token_indices", json!([0])),
            ("use_bdlora", json!({"nblocks": 2})),
            ("use_qalora", json!(true)),
            ("velora_config", json!({"num_groups": 2})),
            ("use_scale", json!(false)),
            ("use_scale", json!(1)),
        ] {
            let error = read(field, value).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
    }

    #[test]
    fn patterns_that_contradict_are_an_error() {
        let alphas = |list: &[(&str, f64)]| LoraConfig {
            alpha_pattern: list.iter().map(|(name, alpha)| ((*name).to_owned(), *alpha)).collect(),
            ..Default::default()
        };
        let two = alphas(&[("q_proj", 2.0), ("layers.1.q_proj", 3.0)]);
        assert!(
            two.check_patterns("layers.1.q_proj").unwrap_err().to_string().contains("`layers.1.q_proj` and `q_proj`")
        );
        two.check_patterns("layers.0.q_proj").unwrap();
        alphas(&[("q_proj", 2.0), ("layers.1.q_proj", 2.0)]).check_patterns("layers.1.q_proj").unwrap();
        // A caret begins a full name.
        let whole = alphas(&[("^layers.1.q_proj", 16.0)]);
        assert_eq!((whole.scale_of("layers.1.q_proj"), whole.scale_of("model.layers.1.q_proj")), (2.0, 1.0));
        let excluded = LoraConfig { exclude_modules: vec!["^q_proj".into()], ..Default::default() };
        assert!(excluded.check().unwrap_err().to_string().contains("`^q_proj`"));
    }

    #[test]
    fn scales_follow_rank_and_pattern() {
        let patterns = BTreeMap::from([("layers.1.self_attn.q_proj".to_owned(), 5.0)]);
        let ranks = BTreeMap::from([("down_proj".to_owned(), 2)]);
        let config =
            LoraConfig { rank: 4, alpha: 8.0, alpha_pattern: patterns, rank_pattern: ranks, ..Default::default() };
        assert_eq!(config.scale_of("model.layers.1.self_attn.q_proj"), 1.25);
        assert_eq!(config.scale_of("model.layers.0.self_attn.q_proj"), 2.0);
        assert_eq!(config.scale_of("model.layers.0.mlp.down_proj"), 4.0);
        let stable = LoraConfig { use_rslora: true, ..config };
        assert_eq!(stable.scale_of("model.layers.0.self_attn.q_proj"), 4.0);
    }
}

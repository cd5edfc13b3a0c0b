//! Linear layers whose weights are stored in four bits (NF4), as in QLoRA (Dettmers et al. 2023). The frozen model
//! under the adapters then takes about an eighth of the memory of `f32`.
//!
//! Names, layout and numbers are those of bitsandbytes. A quantised layer is an [`nn::Adapter`] that computes from the
//! stored form. The CPU dequantises a tile at a time, CUDA the matrix for a GEMM. The weight is still a parameter: it
//! has no memory, and is dequantised when its value is read.

mod blocks;
mod code;
mod files;
mod layer;

use std::{collections::BTreeMap, sync::Arc};

use nn::{Module, ModuleEntry, ModuleExt, walk};
use numcore::{DType, Error, Result, Runtime, Within};

pub(crate) use files::{QuantizedForm, StoredWeight, is_part, quantization, quantization_fields};
pub use layer::Weight4bit;
pub(crate) use layer::{Base4bit, LinearPlace, slots};

use crate::{
    lora::{LoraTargets, check_names, chosen},
    pretrained::Pretrained,
};

/// The storage of weights in four bits, and the layers that have it. Defaults are QLoRA's: blocks of 64, nested scales,
/// all linear layers but the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizeConfig {
    /// The number of elements that share a scale: a power of two from 32 to 4096.
    pub block: usize,
    /// True if scales are themselves stored in eight bits (double quantisation): 4.13 bits an element in place of 4.5.
    pub double_quant: bool,
    /// The layers that are quantised, by transformers' names.
    pub target_modules: LoraTargets,
    /// Layers to leave out of the targets, by the ends of their names.
    pub exclude_modules: Vec<String>,
}

impl Default for QuantizeConfig {
    fn default() -> Self {
        QuantizeConfig {
            block: 64,
            double_quant: true,
            target_modules: LoraTargets::AllLinear,
            exclude_modules: Vec::new(),
        }
    }
}

/// Stores the weights of a model's linear layers in four bits, one after another, and freezes them. Other parameters
/// are read if they were not yet. A model built with [`Init::lazily`](nn::Init::lazily) is thus never in memory in full
/// before that. Experts of mixtures, which are no linear layers, stay as they are.
///
/// Returns the names of the quantised layers.
///
/// # Errors
/// Fails if no layer is chosen, a name matches none, or an option is out of range. Fails too if a chosen layer has an
/// adapter already, or its value cannot be read or is not finite.
#[track_caller]
pub fn quantize<R: Runtime, M: Pretrained<R>>(model: &M, config: &QuantizeConfig) -> Result<Vec<String>> {
    config.check().at_caller()?;
    let table = model.table();
    let theirs = |ours: &str| table.theirs(&format!("{ours}.weight")).map(|c| c.name);
    let mut layers = Vec::new();
    for (ours, place) in slots(model) {
        let Some(name) = theirs(&ours) else { continue };
        layers.push((ours, name.trim_end_matches(".weight").to_owned(), place));
    }
    check_names("quantize", &config.target_modules, layers.iter().map(|(_, theirs, _)| &**theirs)).at_caller()?;
    layers.retain(|(_, theirs, _)| chosen(&config.target_modules, &config.exclude_modules, theirs));
    if layers.is_empty() {
        return Err(Error::config("quantize", "target_modules", "no layer of this model is chosen: all are left out"))
            .at_caller();
    }
    if let Some((taken, ..)) = layers.iter().find(|(_, _, place)| place.slot.get().is_some()) {
        return Err(Error::state(
            &**taken,
            "has an adapter or is quantised already: quantise before adapters are made",
        ))
        .at_caller();
    }
    for (ours, _, place) in &layers {
        let value = place.weight.value().map_err(|e| Error::state(&**ours, e.to_string())).at_caller()?;
        place.fill(Arc::new(Weight4bit::quantize(ours, &value, config).at_caller()?)).at_caller()?;
    }
    let quantised: Vec<String> = layers.into_iter().map(|(ours, ..)| ours).collect();
    let is_quantised = |name: &str| quantised.iter().any(|layer| name.strip_suffix(".weight") == Some(layer));
    for (name, parameter) in model.named_parameters() {
        if !is_quantised(&name) && !parameter.leaf().is_resident() {
            parameter.leaf().put(parameter.value().at_caller()?).at_caller()?;
        }
    }
    Ok(quantised)
}

/// The quantised layers of a model, by the names of their weights.
pub(crate) fn quantized<R: Runtime>(model: &impl Module<R>) -> BTreeMap<String, Arc<Weight4bit<R>>> {
    let mut found = BTreeMap::new();
    walk(model, |name, entry| {
        if let ModuleEntry::Adapter(slot) = entry
            && let Some(weight) = slot.get().as_deref().and_then(Base4bit::of)
        {
            found.insert(format!("{name}.weight"), weight);
        }
    });
    found
}

impl QuantizeConfig {
    fn check(&self) -> Result<()> {
        if !self.block.is_power_of_two() || !(32..=4096).contains(&self.block) {
            let why = format!("a block of {} elements is no power of two from 32 to 4096", self.block);
            return Err(Error::config("quantize", "block", why));
        }
        Ok(())
    }
}

/// The name of an element type in bitsandbytes' files.
fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

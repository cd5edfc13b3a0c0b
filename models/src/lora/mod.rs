//! Low-rank adapters: a frozen model, and small matrices that are trained in its place.

mod adapter;
mod config;
mod files;
mod merge;

use std::sync::Arc;

pub use adapter::{LoraAdapter, LowRank};
pub use config::{LoraConfig, LoraTargets, check_names, chosen};
use nn::{Adapter, AdapterSlot, Init, Module, ModuleExt, Param, Visitor};
use numcore::{Error, Result, Runtime, Tensor};

use crate::{
    convert::{Change, ConversionTable},
    pretrained::Pretrained,
    quantize::{Base4bit, slots},
};

/// The adapters of a model (Hu et al. 2021), which is frozen. As a module it has the adapters alone: given to an optimizer or a trainer, nothing
/// but adapters is in its buckets, shards and checkpoints.
///
/// ```no_run
/// use models::{Decoder, Lora, LoraConfig, Pretrained};
/// use nn::Init;
/// use optim::{AdamW, AdamWConfig};
/// use runtime_cpu::Cpu;
/// # fn main() -> numcore::Result<()> {
/// let init = Init::new(&Cpu::new(), 0);
/// let model = Decoder::from_pretrained("Qwen2.5-0.5B", &init)?;
/// let lora = Lora::new(&model, &init, LoraConfig { rank: 16, alpha: 32.0, ..LoraConfig::default() })?;
/// let mut optimizer = AdamW::new(&lora, AdamWConfig { lr: 2e-4, ..AdamWConfig::default() })?;
/// // … train on what `model` computes …
/// lora.save("adapter")?;
/// # Ok(())
/// # }
/// ```
pub struct Lora<R: Runtime> {
    layers: Vec<AdaptedLayer<R>>,
    config: LoraConfig,
    /// Whether files have these layers' weights transposed, which peft wants to know.
    transposed: bool,
}

/// A linear layer with an adapter.
struct AdaptedLayer<R: Runtime> {
    /// The layer's name in the model, and in files.
    ours: String,
    theirs: String,
    slot: AdapterSlot<R>,
    weight: Param<R>,
    adapter: Arc<LoraAdapter<R>>,
    /// The row norms that a merge divided by, for DoRA.
    norms: Option<Tensor<R>>,
    /// Whether the update is in the weight, and the adapter not in its place.
    merged: bool,
}

impl<R: Runtime> Lora<R> {
    /// Freezes a model and puts an adapter into each layer that the configuration names, by the names that transformers has for them:
    /// `q_proj`, or `c_attn` of GPT-2. What the model computes does not change yet.
    ///
    /// # Errors
    /// If no layer has such a name, a name is of no layer, one has an adapter already, an option is out of range, or the model was cut over
    /// ranks.
    pub fn new<M: Pretrained<R>>(model: &M, init: &Init<R>, config: LoraConfig) -> Result<Self> {
        Self::with_names(model, init, config, Some(&model.table()))
    }

    /// Adapters of any model, by the names of its own linear layers: `qkv` of an [`nn::Gpt`]. Files then have these names.
    ///
    /// # Errors
    /// If [`new`](Lora::new) would fail.
    pub fn on_module(model: &impl Module<R>, init: &Init<R>, config: LoraConfig) -> Result<Self> {
        Self::with_names(model, init, config, None)
    }

    fn with_names(
        model: &impl Module<R>,
        init: &Init<R>,
        config: LoraConfig,
        table: Option<&ConversionTable>,
    ) -> Result<Self> {
        config.check()?;
        let candidates = candidates(model, table);
        check_names("lora", &config.target_modules, candidates.iter().map(|layer| &*layer.theirs))?;
        let chosen: Vec<Candidate<R>> = candidates.into_iter().filter(|layer| config.adapts(&layer.theirs)).collect();
        if chosen.is_empty() {
            return Err(Error::config("lora", "target_modules", "no layer of this model is chosen: all are left out"));
        }
        chosen.iter().try_for_each(|layer| config.check_patterns(&layer.theirs))?;
        let is_base = |adapter: Arc<dyn Adapter<R>>| Base4bit::of(&*adapter).is_some();
        if let Some(taken) = chosen.iter().find(|layer| layer.slot.get().is_some_and(|a| !is_base(a))) {
            return Err(Error::state(&*taken.ours, "has an adapter already: merge it or remove it first"));
        }
        if let Some(cut) = chosen.iter().find(|layer| layer.weight.placed().is_some()) {
            let why = "is of a model that was cut over ranks: put adapters in before `Mesh::parallelize`";
            return Err(Error::state(&*cut.ours, why));
        }
        let adapter = |layer: &Candidate<R>| {
            let base = AdapterSlot::default();
            base.replace(layer.slot.get());
            LoraAdapter::new(init, &layer.weight, base, &config, &layer.theirs)
        };
        let adapters = chosen.iter().map(adapter).collect::<Result<Vec<_>>>()?;
        let transposed = chosen.iter().any(|layer| layer.transposed);
        model.freeze();
        let layers = chosen.into_iter().zip(adapters).map(|(layer, adapter)| {
            let (adapter, Candidate { ours, theirs, slot, weight, .. }) = (Arc::new(adapter), layer);
            slot.replace(Some(adapter.clone()));
            AdaptedLayer { ours, theirs, slot, weight, adapter, norms: None, merged: false }
        });
        let lora = Lora { layers: layers.collect(), config, transposed };
        // Leaves get their full names.
        model.named_parameters();
        Ok(lora)
    }

    /// What the adapters were made by.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The names of the layers that have an adapter, in the model's order.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        self.layers.iter().map(|layer| &*layer.ours)
    }

    /// Takes the adapters out: the model computes what it did before. Those that are merged are taken out of the weights first, up to rounding.
    /// Its parameters stay frozen.
    ///
    /// # Errors
    /// If a weight that an adapter was merged into is shared with tensors that someone holds.
    pub fn remove(mut self) -> Result<()> {
        if self.is_merged() {
            self.unmerge()?;
        }
        self.layers.iter().for_each(|layer| drop(layer.slot.replace(layer.adapter.base())));
        Ok(())
    }

    /// Computes something as the model without its adapters does: the reference of preference optimization.
    ///
    /// # Errors
    /// If adapters are merged: the weights are not those of the model without them.
    pub fn without<T>(&self, compute: impl FnOnce() -> T) -> Result<T> {
        if self.is_merged() {
            let why = "the adapters are merged: unmerge them to compute without them";
            return Err(Error::argument("lora", why));
        }
        let taken = |layer: &AdaptedLayer<R>| {
            let adapter = layer.slot.replace(layer.adapter.base());
            Taken { slot: layer.slot.clone(), adapter }
        };
        let _back: Vec<Taken<R>> = self.layers.iter().map(taken).collect();
        Ok(compute())
    }
}

/// An adapter that was taken out, and goes back when this is dropped: after a panic too.
struct Taken<R: Runtime> {
    slot: AdapterSlot<R>,
    adapter: Option<Arc<dyn Adapter<R>>>,
}

impl<R: Runtime> Drop for Taken<R> {
    fn drop(&mut self) {
        self.slot.replace(self.adapter.take());
    }
}

impl<R: Runtime> Module<R> for Lora<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        self.layers.iter().for_each(|layer| layer.adapter.visit(&layer.ours, visitor));
        visitor.leave();
    }
}

/// A linear layer of a model.
struct Candidate<R: Runtime> {
    ours: String,
    theirs: String,
    slot: AdapterSlot<R>,
    weight: Param<R>,
    transposed: bool,
}

/// The linear layers of a model that have a name in files.
fn candidates<R: Runtime>(model: &impl Module<R>, table: Option<&ConversionTable>) -> Vec<Candidate<R>> {
    let named = slots(model).into_iter().filter_map(|(ours, place)| {
        let (theirs, transposed) = match table {
            None => (ours.clone(), false),
            Some(table) => {
                let theirs = table.theirs(&format!("{ours}.weight"))?;
                (theirs.name.trim_end_matches(".weight").to_owned(), theirs.change == Change::Transpose)
            }
        };
        Some(Candidate { ours, theirs, slot: place.slot, weight: place.weight, transposed })
    });
    named.collect()
}

//! Low-rank adapters: a frozen model, and small matrices that are trained in its place.

mod adapter;
mod config;
mod files;
mod merge;

use std::sync::Arc;

pub use adapter::{LoraAdapter, LowRank};
pub use config::{LoraConfig, LoraTargets};
use nn::{AdapterSlot, Init, Module, ModuleEntry, ModuleExt, Param, Visitor, walk};
use numcore::{Error, Result, Runtime, Tensor};

use crate::{
    convert::{Change, ConversionTable},
    pretrained::Pretrained,
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
    merged: bool,
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
}

impl<R: Runtime> Lora<R> {
    /// Freezes a model and puts an adapter into each layer that the configuration names, by the names that transformers has for them:
    /// `q_proj`, or `c_attn` of GPT-2. What the model computes does not change yet.
    ///
    /// # Errors
    /// If no layer has such a name, a name is of no layer, one has an adapter already, or an option is out of range.
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
        config.check_names(candidates.iter().map(|layer| &*layer.theirs))?;
        let chosen: Vec<Candidate<R>> = candidates.into_iter().filter(|layer| config.adapts(&layer.theirs)).collect();
        if let Some(taken) = chosen.iter().find(|layer| layer.slot.get().is_some()) {
            return Err(Error::state(&*taken.ours, "has an adapter already: merge it or remove it first"));
        }
        let adapter = |layer: &Candidate<R>| LoraAdapter::new(init, &layer.weight, &config, &layer.theirs);
        let adapters = chosen.iter().map(adapter).collect::<Result<Vec<_>>>()?;
        let transposed = chosen.iter().any(|layer| layer.transposed);
        model.freeze();
        let layers = chosen.into_iter().zip(adapters).map(|(layer, adapter)| {
            let (adapter, Candidate { ours, theirs, slot, weight, .. }) = (Arc::new(adapter), layer);
            slot.replace(Some(adapter.clone()));
            AdaptedLayer { ours, theirs, slot, weight, adapter, norms: None }
        });
        let lora = Lora { layers: layers.collect(), config, transposed, merged: false };
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

    /// Takes the adapters out: the model computes what it did before. Its parameters stay frozen.
    pub fn remove(self) {
        self.layers.iter().for_each(|layer| drop(layer.slot.replace(None)));
    }

    /// Computes something as the model without its adapters does: the reference of preference optimization.
    pub fn without<T>(&self, compute: impl FnOnce() -> T) -> T {
        let taken: Vec<_> = self.layers.iter().map(|layer| layer.slot.replace(None)).collect();
        let found = compute();
        self.layers.iter().zip(taken).for_each(|(layer, adapter)| drop(layer.slot.replace(adapter)));
        found
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

/// The linear layers of a model that have a name in files: the weight of each is shown just before its place for an adapter.
fn candidates<R: Runtime>(model: &impl Module<R>, table: Option<&ConversionTable>) -> Vec<Candidate<R>> {
    let (mut found, mut weight) = (Vec::new(), None);
    walk(model, |name, entry| match entry {
        ModuleEntry::Parameter(p) if name.ends_with(".weight") => weight = Some((name.to_owned(), p.clone())),
        ModuleEntry::Adapter(slot) => {
            let own = weight.take().filter(|(of, _)| of.strip_suffix(".weight") == Some(name));
            let Some((of, weight)) = own else { return };
            let (theirs, transposed) = match table {
                None => (name.to_owned(), false),
                Some(table) => match table.theirs(&of) {
                    None => return,
                    Some(c) => (c.name.trim_end_matches(".weight").to_owned(), c.change == Change::Transpose),
                },
            };
            found.push(Candidate { ours: name.to_owned(), theirs, slot: slot.clone(), weight, transposed });
        }
        _ => {}
    });
    found
}

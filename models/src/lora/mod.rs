//! Low-rank adapters: a frozen model, and small matrices that are trained in its place.

mod adapter;
mod config;
mod files;
mod merge;
mod names;

use std::sync::Arc;

pub use adapter::{LoraAdapter, LowRank};
pub use config::{LoraConfig, LoraTargets};
use names::matches;
pub use names::{check_names, chosen};
use nn::{Adapter, AdapterSlot, Init, Module, ModuleExt, Param, Visitor};
use numcore::{Error, Result, Runtime, Tensor};

use crate::{
    convert::{Change, ConversionTable},
    pretrained::Pretrained,
    quantize::{Base4bit, quantized, slots},
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
    /// What is trained whole.
    saved: Vec<SavedParam<R>>,
    config: LoraConfig,
    /// Whether files have these layers' weights transposed, which peft wants to know.
    transposed: bool,
}

/// A linear layer with an adapter.
struct AdaptedLayer<R: Runtime> {
    names: LayerNames,
    slot: AdapterSlot<R>,
    weight: Param<R>,
    adapter: Arc<LoraAdapter<R>>,
    /// The row norms that a merge divided by, for DoRA.
    norms: Option<Tensor<R>>,
    /// Whether the update is in the weight, and the adapter not in its place.
    merged: bool,
}

/// The names of a layer.
#[derive(Clone)]
struct LayerNames {
    /// In the model.
    ours: String,
    /// In transformers' model, which adapters' files have.
    theirs: String,
    /// In the model's files, which adapters' files had before.
    stored: String,
}

/// A parameter that is trained whole and saved with the adapters.
struct SavedParam<R: Runtime> {
    /// The name in the model, and in adapters' files.
    ours: String,
    theirs: String,
    change: Change,
    parameter: Param<R>,
}

/// What transformers' names of a model's parts follow from.
struct ModelNames<'a> {
    table: &'a ConversionTable,
    /// Parameters of which the model has a copy that is tied to them.
    tied: Vec<&'static str>,
}

impl<'a> ModelNames<'a> {
    fn of<R: Runtime>(model: &impl Pretrained<R>, table: &'a ConversionTable) -> Self {
        let parameters =
            table.rules.iter().flat_map(|rule| ["weight", "bias"].map(|leaf| format!("{}.{leaf}", rule.ours)));
        ModelNames { table, tied: parameters.filter_map(|parameter| model.tied_to(&parameter)).collect() }
    }
}

impl<R: Runtime> Lora<R> {
    /// Freezes a model and puts an adapter into each layer that the configuration names, by the names that transformers
    /// has for them: `q_proj`, or `c_attn` of GPT-2. What the model computes does not change yet. Modules that the
    /// configuration says are trained whole, as a classifier's head is, stay trainable.
    ///
    /// # Errors
    /// If no layer has such a name, a name is of no layer, one has an adapter already, an option is out of range, or the model was cut over
    /// ranks.
    pub fn new<M: Pretrained<R>>(model: &M, init: &Init<R>, config: LoraConfig) -> Result<Self> {
        Self::with_names(model, init, config, Some(&ModelNames::of(model, &model.table())))
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
        names: Option<&ModelNames<'_>>,
    ) -> Result<Self> {
        config.check()?;
        let candidates = candidates(model, names.map(|names| names.table));
        let config = config.renamed(|name| todays(name, &candidates));
        let saved = saved(model, names, &config)?;
        check_names("lora", &config.target_modules, candidates.iter().map(|layer| &*layer.names.theirs))?;
        let is_chosen = |layer: &Candidate<R>| config.adapts(&layer.names.theirs);
        let chosen: Vec<Candidate<R>> = candidates.into_iter().filter(is_chosen).collect();
        if chosen.is_empty() {
            return Err(Error::config("lora", "target_modules", "no layer of this model is chosen: all are left out"));
        }
        chosen.iter().try_for_each(|layer| config.check_patterns(&layer.names.theirs))?;
        let is_base = |adapter: Arc<dyn Adapter<R>>| Base4bit::of(&*adapter).is_some();
        if let Some(taken) = chosen.iter().find(|layer| layer.slot.get().is_some_and(|a| !is_base(a))) {
            return Err(Error::state(&*taken.names.ours, "has an adapter already: merge it or remove it first"));
        }
        let layers = chosen.iter().map(|layer| (&layer.names.ours, &layer.weight));
        let all = layers.chain(saved.iter().map(|saved| (&saved.ours, &saved.parameter)));
        if let Some((cut, _)) = all.into_iter().find(|(_, parameter)| parameter.placed().is_some()) {
            let why = "is of a model that was cut over ranks: put adapters in before `Mesh::parallelize`";
            return Err(Error::state(&**cut, why));
        }
        let adapter = |layer: &Candidate<R>| {
            let base = AdapterSlot::default();
            base.replace(layer.slot.get());
            LoraAdapter::new(init, &layer.weight, base, &config, &layer.names.theirs)
        };
        let adapters = chosen.iter().map(adapter).collect::<Result<Vec<_>>>()?;
        let transposed = chosen.iter().any(|layer| layer.transposed);
        model.freeze();
        saved.iter().for_each(|saved| saved.parameter.set_requires_grad(true));
        let layers = chosen.into_iter().zip(adapters).map(|(layer, adapter)| {
            let (adapter, Candidate { names, slot, weight, .. }) = (Arc::new(adapter), layer);
            slot.replace(Some(adapter.clone()));
            AdaptedLayer { names, slot, weight, adapter, norms: None, merged: false }
        });
        let lora = Lora { layers: layers.collect(), saved, config, transposed };
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
        self.layers.iter().map(|layer| &*layer.names.ours)
    }

    /// Takes the adapters out: the model computes what it did before. Those that are merged are taken out of the weights first, up to rounding.
    /// Its parameters are frozen; modules that were trained whole keep what they learned.
    ///
    /// # Errors
    /// If a weight that an adapter was merged into is shared with tensors that someone holds.
    pub fn remove(mut self) -> Result<()> {
        if self.is_merged() {
            self.unmerge()?;
        }
        self.layers.iter().for_each(|layer| drop(layer.slot.replace(layer.adapter.base())));
        self.saved.iter().for_each(|saved| saved.parameter.set_requires_grad(false));
        Ok(())
    }

    /// Computes something as the model without its adapters does: the reference of preference optimization.
    ///
    /// # Errors
    /// If adapters are merged, or modules are trained whole: the weights are not those of the model without them.
    pub fn without<T>(&self, compute: impl FnOnce() -> T) -> Result<T> {
        if self.is_merged() {
            let why = "the adapters are merged: unmerge them to compute without them";
            return Err(Error::argument("lora", why));
        }
        if !self.saved.is_empty() {
            let why = "`modules_to_save` are trained in place: what they were before is not kept";
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
        self.layers.iter().for_each(|layer| layer.adapter.visit(&layer.names.ours, visitor));
        self.saved.iter().for_each(|saved| saved.parameter.visit(&saved.ours, visitor));
        visitor.leave();
    }
}

/// A linear layer of a model.
struct Candidate<R: Runtime> {
    names: LayerNames,
    slot: AdapterSlot<R>,
    weight: Param<R>,
    transposed: bool,
}

/// The linear layers of a model that have a name in files.
fn candidates<R: Runtime>(model: &impl Module<R>, table: Option<&ConversionTable>) -> Vec<Candidate<R>> {
    let named = slots(model).into_iter().filter_map(|(ours, place)| {
        let (theirs, stored, change) = match table {
            None => (ours.clone(), ours.clone(), Change::Keep),
            Some(table) => {
                let stored = table.theirs(&format!("{ours}.weight"))?;
                let name = stored.name.trim_end_matches(".weight").to_owned();
                (table.in_memory(&name), name, stored.change)
            }
        };
        let (names, transposed) = (LayerNames { ours, theirs, stored }, change == Change::Transpose);
        Some(Candidate { names, slot: place.slot, weight: place.weight, transposed })
    });
    named.collect()
}

/// The names today of the layers that a name is of: itself, unless it is of none today and of some in the model's
/// files.
fn todays<R: Runtime>(name: &str, layers: &[Candidate<R>]) -> Vec<String> {
    let before = layers.iter().filter(|layer| matches(&layer.names.stored, name));
    let before: Vec<String> = before.map(|layer| layer.names.theirs.clone()).collect();
    if before.is_empty() || layers.iter().any(|layer| matches(&layer.names.theirs, name)) {
        return vec![name.to_owned()];
    }
    before
}

/// The parameters that are trained whole.
fn saved<R: Runtime>(
    model: &impl Module<R>,
    names: Option<&ModelNames<'_>>,
    config: &LoraConfig,
) -> Result<Vec<SavedParam<R>>> {
    let named = model.named_parameters().into_iter().filter_map(|(ours, parameter)| {
        let (theirs, change) = match names {
            None => (ours.clone(), Change::Keep),
            Some(ModelNames { table, .. }) => {
                let stored = table.theirs(&ours)?;
                (table.in_memory(&stored.name), stored.change)
            }
        };
        Some(SavedParam { ours, theirs, change, parameter })
    });
    let mut all: Vec<SavedParam<R>> = named.collect();
    config.check_saved(&all.iter().map(SavedParam::module).collect::<Vec<_>>())?;
    all.retain(|saved| config.saves(saved.module()));
    let is_tied = |saved: &&SavedParam<R>| names.is_some_and(|names| names.tied.contains(&&*saved.ours));
    if let Some(tied) = all.iter().find(is_tied) {
        let why = "is tied to another, of which peft would train a copy: leave it out of `modules_to_save`";
        return Err(Error::state(&*tied.ours, why));
    }
    let stored = quantized(model);
    if let Some(stored) = all.iter().find(|saved| stored.contains_key(&saved.ours)) {
        return Err(Error::state(&*stored.ours, "is stored in four bits, and cannot be trained whole"));
    }
    Ok(all)
}

impl<R: Runtime> SavedParam<R> {
    /// The module that it is of, in transformers' model.
    fn module(&self) -> &str {
        self.theirs.rsplit_once('.').map_or("", |(module, _)| module)
    }
}

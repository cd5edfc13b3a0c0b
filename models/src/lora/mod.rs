//! Low-rank adapters: small matrices that are trained over a frozen model.

mod adapter;
mod config;
mod files;
mod merge;
mod names;

use std::sync::Arc;

pub use adapter::{LoraAdapter, LowRank};
pub use config::{LoraConfig, LoraTargets};
use names::matches;
pub(crate) use names::{check_names, chosen};
use nn::{Adapter, AdapterSlot, Init, Module, ModuleExt, Param, Visitor};
use numcore::{Error, Result, Runtime, Tensor, Within};

use crate::{
    convert::{Change, ConversionTable},
    pretrained::Pretrained,
    quantize::{Base4bit, quantized, slots},
};

/// The adapters of a frozen model (LoRA, Hu et al. 2021). As a module it has only the adapters' parameters, and modules
/// that are trained in full. An optimizer or trainer that is given it has nothing else in buckets, shards and
/// checkpoints.
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
#[doc(alias("PeftModel"))]
pub struct Lora<R: Runtime> {
    layers: Vec<AdaptedLayer<R>>,
    /// Parameters that are trained in full.
    saved: Vec<SavedParam<R>>,
    config: LoraConfig,
    /// True if files have these layers' weights transposed, which peft needs to know.
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
    /// True if the update is in the weight and the adapter not in its slot.
    merged: bool,
}

/// The names of an adapted layer.
#[derive(Clone)]
struct LayerNames {
    /// The name in this model.
    ours: String,
    /// The name in transformers' model, which adapters' files have.
    theirs: String,
    /// The name in the model's files, which older adapters' files have.
    stored: String,
}

/// A parameter that is trained in full and saved with the adapters.
struct SavedParam<R: Runtime> {
    /// The name in this model; `theirs` is the one in adapters' files.
    ours: String,
    theirs: String,
    change: Change,
    parameter: Param<R>,
}

/// The source of transformers' names for a model's modules.
struct ModelNames<'a> {
    table: &'a ConversionTable,
    /// Parameters that have a tied copy in the model.
    tied: Vec<&'static str>,
}

impl<'a> ModelNames<'a> {
    fn of<R: Runtime>(model: &impl Pretrained<R>, table: &'a ConversionTable) -> Self {
        // Copies in numbered layers are no parameters of the model.
        let modules = table.rules.iter().map(|rule| rule.ours).filter(|ours| !ours.contains("{}"));
        let parameters = modules.flat_map(|ours| ["weight", "bias"].map(|leaf| format!("{ours}.{leaf}")));
        ModelNames { table, tied: parameters.filter_map(|parameter| model.tied_to(&parameter)).collect() }
    }
}

impl<R: Runtime> Lora<R> {
    /// Freezes a model and puts an adapter into each layer that the configuration names. Names are those of
    /// transformers: `q_proj`, or `c_attn` of GPT-2. The model's output does not change until training. Modules that
    /// the configuration trains in full, such as a classifier's head, stay trainable.
    ///
    /// # Errors
    /// Fails if no layer or module has a given name, a layer has an adapter already, or an option is out of range.
    /// Fails too if the model was cut over ranks, or a module to train in full is tied or stored in four bits.
    #[track_caller]
    pub fn new<M: Pretrained<R>>(model: &M, init: &Init<R>, config: LoraConfig) -> Result<Self> {
        Self::with_names(model, init, config, Some(&ModelNames::of(model, &model.table()))).at_caller()
    }

    /// Adapts any model, by its own names of linear layers, such as `qkv` of an [`nn::Gpt`]. Files then have these
    /// names.
    ///
    /// # Errors
    /// Fails if [`new`](Lora::new) would fail.
    #[track_caller]
    pub fn on_module(model: &impl Module<R>, init: &Init<R>, config: LoraConfig) -> Result<Self> {
        Self::with_names(model, init, config, None).at_caller()
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
        // A pass over the model gives leaves their full names.
        model.named_parameters();
        Ok(lora)
    }

    /// The configuration of the adapters.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The names of the layers that have an adapter, in the model's order.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        self.layers.iter().map(|layer| &*layer.names.ours)
    }

    /// Takes the adapters out, so that the model computes as before them. Merged adapters are taken out of the weights
    /// first, up to rounding. The model's parameters are frozen; modules that were trained in full keep their values.
    ///
    /// # Errors
    /// Fails if a weight that an adapter was merged into shares memory with another tensor.
    #[track_caller]
    pub fn remove(mut self) -> Result<()> {
        if self.is_merged() {
            self.unmerge().at_caller()?;
        }
        self.layers.iter().for_each(|layer| drop(layer.slot.replace(layer.adapter.base())));
        self.saved.iter().for_each(|saved| saved.parameter.set_requires_grad(false));
        Ok(())
    }

    /// Runs `compute` with the adapters taken out: the reference model of preference optimization.
    ///
    /// # Errors
    /// Fails if adapters are merged or modules are trained in full, since the base model's weights are then changed.
    #[track_caller]
    pub fn without<T>(&self, compute: impl FnOnce() -> T) -> Result<T> {
        if self.is_merged() {
            let why = "the adapters are merged: unmerge them to compute without them";
            return Err(Error::usage("lora", why)).at_caller();
        }
        if !self.saved.is_empty() {
            let why = "`modules_to_save` are trained in place: their earlier values are not kept";
            return Err(Error::usage("lora", why)).at_caller();
        }
        let taken = |layer: &AdaptedLayer<R>| {
            let adapter = layer.slot.replace(layer.adapter.base());
            Taken { slot: layer.slot.clone(), adapter }
        };
        let _back: Vec<Taken<R>> = self.layers.iter().map(taken).collect();
        Ok(compute())
    }
}

/// An adapter that was taken out, and goes back when this is dropped, even after a panic.
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

/// A linear layer that could get an adapter.
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

/// Today's names of the layers that a name matches. A name that matches none today is looked up among names in the
/// model's files.
fn todays<R: Runtime>(name: &str, layers: &[Candidate<R>]) -> Vec<String> {
    let before = layers.iter().filter(|layer| matches(&layer.names.stored, name));
    let before: Vec<String> = before.map(|layer| layer.names.theirs.clone()).collect();
    if before.is_empty() || layers.iter().any(|layer| matches(&layer.names.theirs, name)) {
        return vec![name.to_owned()];
    }
    before
}

/// The parameters that are trained in full.
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
    /// The module of this parameter in transformers' model.
    fn module(&self) -> &str {
        self.theirs.rsplit_once('.').map_or("", |(module, _)| module)
    }
}

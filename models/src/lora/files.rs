//! Reading and writing peft's folders of adapters.

use std::{collections::BTreeSet, path::Path};

use nn::{Init, Module, ModuleExt, Param};
use numcore::{Error, Result, Runtime, Within, ops::PointwiseOps};

use super::{AdaptedLayer, Lora, LoraConfig, ModelNames, SavedParam};
use crate::{
    convert::Change,
    files::{JsonObject, SaveOptions, WeightWriter, Weights},
    pretrained::Pretrained,
    source::{changed, changed_shape, written},
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model";
/// The prefix of every name in peft's files.
const PREFIX: &str = "base_model.model.";

impl<R: Runtime> Lora<R> {
    /// Writes a folder that peft loads: the adapters, their configuration, and the modules that are trained in full.
    /// Names are those of transformers 5.
    ///
    /// # Errors
    /// Fails if a file cannot be written, or some adapted layers are in pipeline stages of other ranks. A rank with
    /// none of the adapted layers cannot detect that. Then load a training checkpoint on one rank and save there.
    #[track_caller]
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        self.save_with(folder, &SaveOptions::default())
    }

    /// Writes a folder, with options; see [`Pretrained::save_pretrained_with`].
    ///
    /// # Errors
    /// Fails if [`save`](Lora::save) would fail.
    #[track_caller]
    pub fn save_with(&self, folder: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        let folder = folder.as_ref();
        self.require_all_stages().at_caller()?;
        let named = self.layers.iter().flat_map(|layer| layer.named(&layer.names.theirs));
        let mut weights: Vec<_> = named.map(|(name, p)| writer(name, p, options)).collect();
        weights.extend(self.saved.iter().map(|saved| {
            let dtype = options.dtype.unwrap_or(saved.parameter.dtype());
            written(&saved.parameter, saved.name(), saved.change, dtype)
        }));
        let fields = self.config.to_json(self.transposed);
        WeightWriter::save_all(folder, WEIGHTS, &weights, (CONFIG, &fields), options).at_caller()
    }

    /// Checks that no adapted layer was dropped with a stage that another rank trains: its adapter has not learned.
    fn require_all_stages(&self) -> Result<()> {
        let is_there = |layer: &&AdaptedLayer<R>| layer.slot.is_shared();
        let gone = self.layers.iter().find(|layer| !is_there(layer));
        let Some((gone, _)) = gone.zip(self.layers.iter().find(is_there)) else { return Ok(()) };
        let why =
            "is of a stage that this rank does not have: save a checkpoint of all stages, and load it on one rank";
        Err(Error::state(&*gone.names.ours, why))
    }

    /// Freezes a model and puts the adapters of a folder into it, which peft or [`save`](Lora::save) wrote.
    ///
    /// # Errors
    /// Fails if the folder holds no adapters for this model, or unsupported ones. One error lists all names that do not
    /// fit.
    #[track_caller]
    pub fn load<M: Pretrained<R>>(model: &M, init: &Init<R>, folder: impl AsRef<Path>) -> Result<Self> {
        Self::load_named(model, init, folder.as_ref(), Some(&ModelNames::of(model, &model.table()))).at_caller()
    }

    /// Freezes any model and puts adapters into it that were made with [`on_module`](Lora::on_module).
    ///
    /// # Errors
    /// Fails if [`load`](Lora::load) would fail.
    #[track_caller]
    pub fn load_on_module(model: &impl Module<R>, init: &Init<R>, folder: impl AsRef<Path>) -> Result<Self> {
        Self::load_named(model, init, folder.as_ref(), None).at_caller()
    }

    fn load_named(
        model: &impl Module<R>,
        init: &Init<R>,
        folder: &Path,
        names: Option<&ModelNames<'_>>,
    ) -> Result<Self> {
        let config = LoraConfig::read(&JsonObject::open(&folder.join(CONFIG))?)?;
        let weights = Weights::open(folder, WEIGHTS)?;
        let trained: Vec<Param<R>> = model.parameters().into_iter().filter(Param::requires_grad).collect();
        // Values are not drawn: shapes are compared before memory is allocated.
        let lora = Lora::with_names(model, &init.clone().lazily(), config, names)?;
        if let Err(e) = lora.fill(&weights) {
            lora.remove()?;
            trained.iter().for_each(|p| p.set_requires_grad(true));
            return Err(e);
        }
        Ok(lora)
    }

    fn fill(&self, weights: &Weights) -> Result<()> {
        let mut rest: BTreeSet<&str> = weights.names().collect();
        let (mut wrong, mut fit) = (Vec::new(), Vec::new());
        for (names, parameter, change) in self.places() {
            let Some(name) = names.iter().find(|name| rest.remove(&***name)) else {
                wrong.push(format!("{} is missing", names[0]));
                continue;
            };
            let (due, (dtype, shape)) = (changed_shape(change, parameter.shape()), weights.spec(name)?);
            if shape != due || !dtype.is_float() {
                wrong.push(format!("{name} is {dtype} {shape} in the file, and {due} here"));
            }
            fit.push((name.clone(), parameter, change));
        }
        wrong.extend(rest.iter().map(|name| format!("{name} is of no adapted layer")));
        if !wrong.is_empty() {
            return Err(Error::state("adapter weights", wrong.join("; ")));
        }
        fit.into_iter().try_for_each(|(name, parameter, change)| {
            let value = changed(change, weights.tensor(parameter.leaf().runtime(), &name)?)?;
            parameter.leaf().put(value.to_dtype(parameter.dtype())?)
        })
    }

    /// The parameters, each with the names that files may have for it, the newest first.
    fn places(&self) -> Vec<(Vec<String>, Param<R>, Change)> {
        let adapters = self.layers.iter().flat_map(|layer| {
            let before = layer.named(&layer.names.stored).into_iter().map(|(name, _)| name);
            let today = layer.named(&layer.names.theirs).into_iter();
            today.zip(before).map(|((name, parameter), before)| (vec![name, before], parameter, Change::Keep))
        });
        let saved = self.saved.iter().map(|saved| (vec![saved.name()], saved.parameter.clone(), saved.change));
        adapters.chain(saved).collect()
    }
}

impl<R: Runtime> SavedParam<R> {
    /// The name in files.
    fn name(&self) -> String {
        format!("{PREFIX}{}", self.theirs)
    }
}

impl<R: Runtime> AdaptedLayer<R> {
    /// The adapter's parameters, by peft's names for a layer called `layer`.
    fn named(&self, layer: &str) -> Vec<(String, Param<R>)> {
        let parameters = self.adapter.named_parameters();
        // Names of the walk are relative to the adapter.
        let renamed = parameters.into_iter().map(|(name, p)| (format!("{PREFIX}{layer}.{name}"), p));
        renamed.collect()
    }
}

fn writer<R: Runtime>(name: String, p: Param<R>, options: &SaveOptions) -> WeightWriter<'static, R> {
    let (shape, dtype) = (p.logical_shape(), options.dtype.unwrap_or(p.dtype()));
    WeightWriter { name, shape, dtype, value: Box::new(move || p.gathered()?.to_dtype(dtype)) }
}

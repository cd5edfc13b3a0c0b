//! Models from Hugging Face's folders and GGUF files, and back to folders.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
    sync::Arc,
};

use autograd::Residency;
use nn::{Buffer, Init, Module, ModuleEntry, ModuleExt, Param, parallel::attention_slots, walk};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{PointwiseOps, Spec},
};
use serde_json::{Map, Value, json};

use crate::{
    config::ConfigFields,
    convert::{ConversionTable, Converted, StackNames, StackPlace},
    files::{SaveOptions, WeightWriter, Weights},
    quantize::{self, Base4bit, LinearPlace, QuantizedForm, StoredWeight},
    report::PretrainedReport,
    source::{Source, SourceNames, require_uncut, written, written_experts},
    tied::{take_copies, untied},
};

/// The stem of the names of weights' files.
const WEIGHTS: &str = "model";

/// A model that files hold: a folder of Hugging Face, with `config.json` and safetensors, or a GGUF file.
pub trait Pretrained<R: Runtime>: Module<R> + Sized {
    /// Builds a model as `config.json` describes it, with parameters that `init` draws.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless.
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self>;

    /// The conversion table between names of weights in files and names of this model's parameters.
    fn table(&self) -> ConversionTable;

    /// Tells whether a model of this kind may lack a parameter that files have: a copy tied to another parameter, or an
    /// unused head.
    fn does_without(&self, parameter: &str) -> bool {
        let _ = parameter;
        false
    }

    /// The name of the parameter that this one is a copy of, in models that tie weights. A file in which the two differ
    /// is of a model without tied weights; loading it is an error.
    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        let _ = parameter;
        None
    }

    /// Tells whether this is a full model, not a pipeline stage of one.
    fn is_whole(&self) -> bool {
        true
    }

    /// The fields of a `config.json` from which this model can be built again.
    fn fields(&self) -> Map<String, Value>;

    /// Loads the model in a folder or a GGUF file, with parameters of the element type in `init`.
    ///
    /// Names and shapes are compared before any memory is allocated; then one weight at a time is read. With
    /// [`Init::lazily`] only buffers and weights in four bits are read at once. A trainer that shards reads its rank's
    /// part of each other weight, so no rank holds the full model.
    ///
    /// # Errors
    /// Fails if the folder holds no such model. One error lists all weights that are missing, unexpected or of another
    /// shape, by their names in the file and in the model.
    #[track_caller]
    fn from_pretrained(path: impl AsRef<Path>, init: &Init<R>) -> Result<Self> {
        let (model, report) = Self::from_pretrained_partly(path, init)?;
        report.strict().at_caller()?;
        Ok(model)
    }

    /// Loads the model in a folder or a GGUF file where weights may be missing: a new head on a pretrained model.
    /// Parameters without a weight keep the values that `init` draws. The report lists missing and left-over weights.
    ///
    /// # Errors
    /// Fails if a weight has another shape, or a file is missing or malformed.
    #[track_caller]
    fn from_pretrained_partly(path: impl AsRef<Path>, init: &Init<R>) -> Result<(Self, PretrainedReport)> {
        let path = path.as_ref();
        let fields = ConfigFields::open(path).at_caller()?;
        let form = quantize::quantization(&fields).at_caller()?;
        let weights = Weights::open(path, WEIGHTS).at_caller()?;
        let weights = match form {
            Some(QuantizedForm::Mxfp4) => weights.with_mxfp4().at_caller()?,
            _ => weights,
        };
        let weights = Arc::new(weights);
        let fields = fields.with_weights(&weights);
        let model = Self::from_fields(&init.clone().lazily(), &fields).at_caller()?;
        let plan = Plan::of(&model, &weights).at_caller()?;
        plan.report.check_shapes().at_caller()?;
        if form == Some(QuantizedForm::Nf4) && plan.quantised.is_empty() {
            let why = "says that weights are stored in four bits, and none of this model's is";
            return Err(fields.wrong("quantization_config", why)).at_caller();
        }
        let missing = model.named_parameters().into_iter().filter(|(name, _)| plan.report.missing.contains_key(name));
        let drawn: Vec<Param<R>> = missing.map(|(_, p)| p).collect();
        for (place, stored) in plan.quantised {
            place.fill(Arc::new(stored.read(place.weight.leaf().runtime(), &weights).at_caller()?)).at_caller()?;
        }
        for (buffer, theirs) in plan.buffers {
            let value = weights.tensor(buffer.value().runtime(), &theirs).at_caller()?;
            buffer.set(value.to_dtype(buffer.spec().dtype)?).at_caller()?;
        }
        for (parameter, source) in plan.sources {
            let leaf = parameter.leaf();
            if init.is_lazy() {
                leaf.set_residency(Arc::new(source));
            } else {
                leaf.put(source.fetch(&leaf).at_caller()?).at_caller()?;
            }
        }
        if !init.is_lazy() {
            drawn.iter().try_for_each(|p| p.leaf().put(p.value()?)).at_caller()?;
        }
        Ok((model, plan.report))
    }

    /// Writes a folder that transformers loads: `config.json` and the weights. Tied weights are written once.
    ///
    /// # Errors
    /// Fails if `save_pretrained_with` would fail.
    #[track_caller]
    fn save_pretrained(&self, folder: impl AsRef<Path>) -> Result<()> {
        self.save_pretrained_with(folder, &SaveOptions::default())
    }

    /// Writes a folder, with options. Where parameters are sharded or cut, all ranks call this, and the rank with
    /// `SaveOptions::writes` writes.
    ///
    /// # Errors
    /// Fails if a file cannot be written, or a parameter has no name in the family's files. Fails too for a model with
    /// adapters or programs of scores, which these files cannot hold. Cut experts, weights in four bits and pipeline
    /// stages are errors too.
    #[track_caller]
    fn save_pretrained_with(&self, folder: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        let (folder, table) = (folder.as_ref(), self.table());
        require_unchanged(self).at_caller()?;
        if !self.is_whole() {
            let why = "is a stage: save a checkpoint of all, and load its parameters into the whole model";
            return Err(Error::state("save_pretrained", why)).at_caller();
        }
        let (named, quantised) = (self.named_parameters(), quantize::quantized(self));
        let mut weights = Vec::new();
        for (name, parameter) in &named {
            match quantised.get(name) {
                Some(weight) => {
                    require_uncut(name, parameter).at_caller()?;
                    weights.extend(weight.writers(&theirs(&table, name).at_caller()?.name));
                }
                None => weights.extend(writers(&table, name, parameter, options).at_caller()?),
            }
        }
        for (name, buffer) in self.named_buffers() {
            let Spec { dtype, shape } = buffer.spec();
            let name = theirs(&table, &name).at_caller()?.name;
            weights.push(WeightWriter { name, shape, dtype, value: Box::new(move || Ok(buffer.value())) });
        }
        let mut fields = self.fields();
        if let Some(first) = weights.iter().find(|weight| weight.dtype.is_float()) {
            fields.remove("torch_dtype");
            fields.insert("dtype".into(), json!(torch_name(first.dtype)));
        }
        let before = fields.remove("quantization_config");
        if let Some(weight) = quantised.values().next() {
            let value = quantize::quantization_fields(before.as_ref(), weight);
            fields.insert("quantization_config".into(), value);
        }
        WeightWriter::save_all(folder, WEIGHTS, &weights, ("config.json", &fields), options).at_caller()
    }
}

/// The source of each parameter.
struct Plan<R: Runtime> {
    sources: Vec<(Param<R>, Source)>,
    /// The name in files of each buffer.
    buffers: Vec<(Buffer<R>, String)>,
    /// Linear layers whose weights are stored in four bits.
    quantised: Vec<(LinearPlace<R>, StoredWeight)>,
    report: PretrainedReport,
}

impl<R: Runtime> Plan<R> {
    fn of(model: &impl Pretrained<R>, weights: &Arc<Weights>) -> Result<Self> {
        let table = weights.table().unwrap_or_else(|| model.table());
        let (mut report, mut sources) = (PretrainedReport::default(), Vec::new());
        // Names in files by the model's names: files may leave the prefix out.
        let (mut given, mut stacks) = (BTreeMap::new(), GivenStacks::default());
        for theirs in weights.names() {
            if table.ignores(theirs) {
                report.ignored.push(theirs.to_owned());
                continue;
            }
            if let Some(place) = table.stacked(theirs) {
                stacks.add(place, theirs, &mut report);
                continue;
            }
            match table.ours(theirs) {
                _ if quantize::is_part(theirs, weights) => {}
                // Two weights of one parameter: the first is taken.
                Some(ours) if given.contains_key(&ours.name) => {
                    drop(report.unexpected.insert(theirs.to_owned(), Some(ours.name)));
                }
                Some(ours) => drop(given.insert(ours.name, (theirs.to_owned(), ours.change))),
                None => drop(report.unexpected.insert(theirs.to_owned(), None)),
            }
        }
        let tied_to = |name: &str| model.tied_to(name);
        take_copies(&tied_to, &mut given);
        for (copy, why) in untied(&tied_to, weights, &given)? {
            report.unfit.insert(copy, why);
        }
        let (mut places, mut quantised) = (BTreeMap::from_iter(quantize::slots(model)), Vec::new());
        for (name, parameter) in model.named_parameters() {
            if let Some(names) = table.stack(&name) {
                match stacks.take(&name, &names, parameter.shape()[0]) {
                    Ok(names) => {
                        fit(name, parameter, Source { weights: weights.clone(), names }, &mut sources, &mut report)
                    }
                    Err(missing) => drop(report.missing.insert(name, missing)),
                }
                continue;
            }
            let Some((theirs, change)) = given.remove(&name) else {
                let theirs = table.theirs(&name).map_or_else(|| "no name".into(), |c| c.name);
                report.missing.insert(name, theirs);
                continue;
            };
            if let Some(stored) = StoredWeight::find(weights, &theirs)? {
                let place = name.strip_suffix(".weight").and_then(|layer| places.remove(layer));
                match place.filter(|_| stored.shape() == parameter.shape()) {
                    Some(place) => quantised.push((place, stored)),
                    None => {
                        let why = format!(
                            "is {} here, {} in four bits in files as {theirs}, which is a linear layer's",
                            parameter.shape(),
                            stored.shape()
                        );
                        report.unfit.insert(name, why);
                    }
                }
                continue;
            }
            let source = Source { weights: weights.clone(), names: SourceNames::Weight(theirs, change) };
            fit(name, parameter, source, &mut sources, &mut report);
        }
        for (theirs, ours) in stacks.left() {
            if model.does_without(&ours) {
                report.ignored.push(theirs);
            } else {
                report.unexpected.insert(theirs, Some(ours));
            }
        }
        let mut buffers = Vec::new();
        for (name, buffer) in model.named_buffers() {
            match given.remove(&name) {
                None => {
                    let theirs = table.theirs(&name).map_or_else(|| "no name".into(), |c| c.name);
                    report.missing.insert(name, theirs);
                }
                Some((theirs, _)) => match unfit_buffer(&buffer, weights, &theirs) {
                    Some(why) => drop(report.unfit.insert(name, why)),
                    None => buffers.push((buffer, theirs)),
                },
            }
        }
        for (ours, (theirs, _)) in given {
            if model.does_without(&ours) {
                report.ignored.push(theirs);
            } else {
                report.unexpected.insert(theirs, Some(ours));
            }
        }
        Ok(Plan { sources, buffers, quantised, report })
    }
}

/// The reason why a weight of files is no value of a buffer, if it is none.
fn unfit_buffer<R: Runtime>(buffer: &Buffer<R>, weights: &Weights, theirs: &str) -> Option<String> {
    let due = buffer.spec();
    match weights.spec(theirs) {
        Err(e) => Some(e.to_string()),
        Ok((dtype, shape)) if shape != due.shape || dtype.is_float() != due.dtype.is_float() => {
            Some(format!("is {} {} here, {dtype} {shape} in files as {theirs}", due.dtype, due.shape))
        }
        Ok(_) => None,
    }
}

/// Keeps the source of a parameter, or reports that it does not fit.
fn fit<R: Runtime>(
    name: String,
    parameter: Param<R>,
    source: Source,
    sources: &mut Vec<(Param<R>, Source)>,
    report: &mut PretrainedReport,
) {
    match source.unfit(parameter.spec()) {
        Some(why) => drop(report.unfit.insert(name, why)),
        None => sources.push((parameter, source)),
    }
}

/// The weights of experts in files: by parameter of the model, then by expert and part.
#[derive(Default)]
struct GivenStacks(BTreeMap<String, BTreeMap<(usize, usize), String>>);

impl GivenStacks {
    fn add(&mut self, place: StackPlace, theirs: &str, report: &mut PretrainedReport) {
        let weights = self.0.entry(place.name.clone()).or_default();
        match weights.entry((place.expert, place.part)) {
            // Two weights of one parameter: the first is taken.
            Entry::Occupied(_) => drop(report.unexpected.insert(theirs.to_owned(), Some(place.name))),
            Entry::Vacant(free) => drop(free.insert(theirs.to_owned())),
        }
    }

    /// The names of the weights of a parameter with `experts` experts, or the first name that is missing.
    fn take(&mut self, name: &str, names: &StackNames, experts: usize) -> std::result::Result<SourceNames, String> {
        let mut given = self.0.remove(name).unwrap_or_default();
        let mut weight = |expert, part| given.remove(&(expert, part)).ok_or_else(|| names.of(expert, part));
        let weights = (0..experts).map(|expert| (0..names.parts()).map(|part| weight(expert, part)).collect());
        let weights = weights.collect::<std::result::Result<_, _>>()?;
        if !given.is_empty() {
            // Weights of experts that the model does not have.
            self.0.insert(name.to_owned(), given);
        }
        Ok(SourceNames::Experts(weights))
    }

    /// The weights that no parameter took, each with the parameter that it would be of.
    fn left(self) -> impl Iterator<Item = (String, String)> {
        self.0.into_iter().flat_map(|(name, weights)| weights.into_values().map(move |w| (w, name.clone())))
    }
}

/// Checks that no layer has an adapter or a program of scores, which a file of the model alone would leave out. Weights
/// in four bits are no such adapters.
///
/// # Errors
/// Fails with the name of the first layer that has one.
#[track_caller]
pub fn require_unchanged<R: Runtime>(model: &impl Module<R>) -> Result<()> {
    require_no_adapters(model).at_caller()?;
    let scored = attention_slots(model).into_iter().find(|(_, slot)| slot.scores().is_some());
    let why = "has a program of scores, which the model's files cannot hold: save the parameters as a checkpoint";
    scored.map_or(Ok(()), |(name, _)| Err(Error::state(name, why))).at_caller()
}

/// Checks that no layer has an adapter, but for weights in four bits.
pub(crate) fn require_no_adapters<R: Runtime>(model: &impl Module<R>) -> Result<()> {
    let mut adapted = None;
    walk(model, |name, entry| match entry {
        ModuleEntry::Adapter(slot) if adapted.is_none() && slot.get().is_some_and(|a| Base4bit::of(&*a).is_none()) => {
            adapted = Some(name.to_owned());
        }
        _ => {}
    });
    let why = "has an adapter, which the model's files cannot hold: merge the adapters, or save the `Lora`";
    adapted.map_or(Ok(()), |name| Err(Error::state(name, why)))
}

/// The writers of a parameter's weights: one, or one for each expert and part.
fn writers<'a, R: Runtime>(
    table: &ConversionTable,
    name: &str,
    parameter: &'a Param<R>,
    options: &SaveOptions,
) -> Result<Vec<WeightWriter<'a, R>>> {
    let dtype = options.dtype.unwrap_or(parameter.dtype());
    if let Some(names) = table.stack(name) {
        require_uncut(name, parameter)?;
        return Ok(written_experts(parameter, &names, dtype).collect());
    }
    let Converted { name, change } = theirs(table, name)?;
    Ok(vec![written(parameter, name, change, dtype)])
}

fn theirs(table: &ConversionTable, name: &str) -> Result<Converted> {
    table.theirs(name).ok_or_else(|| Error::state(name, "has no name in the family's files"))
}

fn torch_name(dtype: numcore::DType) -> &'static str {
    match dtype {
        numcore::DType::F16 => "float16",
        numcore::DType::BF16 => "bfloat16",
        numcore::DType::F64 => "float64",
        _ => "float32",
    }
}

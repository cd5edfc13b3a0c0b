//! A model's state by name: read, and loaded all or nothing.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use numcore::{
    Error, MemoryCategory, Result, Runtime, Tensor, TensorMut,
    ops::{Apply, Op, Spec},
    safetensors,
};

use crate::{Buffer, Module, ModuleEntry, Param, walk};

/// The names that a non-strict load left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Entries of the model that were not given, and keep their values.
    pub missing: Vec<String>,
    /// Values that were given and have no entry in the model.
    pub unexpected: Vec<String>,
}

/// A model's parameters and buffers, each once, under all of its names.
pub(crate) struct ModelState<R: Runtime>(Vec<NamedSlot<R>>);

struct NamedSlot<R: Runtime> {
    names: Vec<String>,
    slot: StateSlot<R>,
}

enum StateSlot<R: Runtime> {
    Parameter(Param<R>),
    Buffer(Buffer<R>),
}

impl<R: Runtime> StateSlot<R> {
    fn value(&self) -> Result<Tensor<R>> {
        match self {
            StateSlot::Parameter(p) => p.value(),
            StateSlot::Buffer(b) => Ok(b.value()),
        }
    }

    fn set(&self, value: Tensor<R>) -> Result<()> {
        match self {
            StateSlot::Parameter(p) => p.set(p.piece_of(value)?),
            StateSlot::Buffer(b) => b.set(value),
        }
    }

    fn spec(&self) -> Spec {
        match self {
            StateSlot::Parameter(p) => p.spec(),
            StateSlot::Buffer(b) => b.spec(),
        }
    }

    fn runtime(&self) -> R {
        match self {
            StateSlot::Parameter(p) => p.leaf().runtime().clone(),
            StateSlot::Buffer(b) => b.value().runtime().clone(),
        }
    }

    /// The reason why a value does not fit this entry, if it does not.
    fn mismatch(&self, value: &Tensor<R>) -> Option<String> {
        let (is, got) = (self.spec(), value.spec());
        let whole = match self {
            StateSlot::Parameter(p) => p.logical_shape(),
            StateSlot::Buffer(_) => is.shape,
        };
        if is != got && (whole, is.dtype) != (got.shape, got.dtype) {
            return Some(format!("is {} {}, given {} {}", is.dtype, is.shape, got.dtype, got.shape));
        }
        let (here, there) = (self.runtime().device(), value.device());
        (here != there).then(|| format!("is on {here}, given on {there}"))
    }
}

/// An error if this rank has pieces of some parameters alone.
pub(crate) fn require_whole<R: Runtime>(parameters: &[(String, Param<R>)]) -> Result<()> {
    match parameters.iter().find(|(_, p)| p.placed().is_some_and(|placed| !placed.placement().is_whole())) {
        None => Ok(()),
        Some((name, p)) => {
            let (here, whole) = (p.shape(), p.logical_shape());
            let why = format!("is cut over ranks, this one has {here} of {whole}: save a checkpoint, and export that");
            Err(Error::state(name.clone(), why))
        }
    }
}

impl<R: Runtime> ModelState<R> {
    pub(crate) fn of(module: &(impl Module<R> + ?Sized)) -> Self {
        let mut by_id = HashMap::new();
        let mut entries: Vec<NamedSlot<R>> = Vec::new();
        walk(module, |name, entry| {
            let (id, slot) = match entry {
                ModuleEntry::Parameter(p) => (p.id(), StateSlot::Parameter(p.clone())),
                ModuleEntry::Buffer(b) => (b.id(), StateSlot::Buffer(b.clone())),
                ModuleEntry::Mode(_) | ModuleEntry::Adapter(_) | ModuleEntry::Context(_) => return,
            };
            let at = *by_id.entry(id).or_insert(entries.len());
            if at == entries.len() {
                entries.push(NamedSlot { names: Vec::new(), slot });
            }
            entries[at].names.push(name.to_string());
        });
        ModelState(entries)
    }

    pub(crate) fn values(&self) -> Result<Vec<(String, Tensor<R>)>> {
        self.0.iter().map(|e| Ok((e.names[0].clone(), e.slot.value()?))).collect()
    }

    pub(crate) fn load(&self, values: Vec<(String, Tensor<R>)>, strict: bool) -> Result<LoadReport> {
        let mut given: HashMap<String, Tensor<R>> = HashMap::new();
        let mut wrong = StateMismatch::default();
        for (name, value) in values {
            if given.insert(name.clone(), value).is_some() {
                wrong.mismatching.push(format!("{name} is given twice"));
            }
        }
        let mut fits = Vec::new();
        for NamedSlot { names, slot } in &self.0 {
            // A file may hold a shared parameter once or under every name.
            let mut found: Vec<Tensor<R>> = names.iter().filter_map(|n| given.remove(n)).collect();
            let Some(value) = (!found.is_empty()).then(|| found.remove(0)) else {
                wrong.report.missing.push(names[0].clone());
                continue;
            };
            match slot.mismatch(&value) {
                Some(why) => wrong.mismatching.push(format!("{} {why}", names[0])),
                None => fits.push((slot, value)),
            }
        }
        wrong.report.unexpected = given.into_keys().collect::<BTreeSet<_>>().into_iter().collect();
        let report = wrong.check(strict)?;
        let owned =
            fits.into_iter().map(|(slot, value)| Ok((slot, owned(value, slot)?))).collect::<Result<Vec<_>>>()?;
        owned.into_iter().try_for_each(|(slot, value)| slot.set(value))?;
        Ok(report)
    }
}

impl<R: Runtime> ModelState<R> {
    /// An error unless `theirs` has the names and shapes of this model, and no others. Dtypes may differ.
    pub(crate) fn check_structure<S: Runtime>(&self, theirs: &[(String, Tensor<S>)]) -> Result<()> {
        let mut given: HashMap<&str, &Tensor<S>> = theirs.iter().map(|(name, value)| (&**name, value)).collect();
        let mut wrong = StateMismatch::default();
        for NamedSlot { names, slot } in &self.0 {
            let found: Vec<_> = names.iter().filter_map(|name| given.remove(&**name)).collect();
            match found.first() {
                None => wrong.report.missing.push(names[0].clone()),
                Some(value) if *value.shape() != slot.spec().shape => {
                    wrong.mismatching.push(format!(
                        "{} is {} here and {} there",
                        names[0],
                        slot.spec().shape,
                        value.shape()
                    ));
                }
                Some(_) => {}
            }
        }
        wrong.report.unexpected = given.into_keys().map(String::from).collect::<BTreeSet<_>>().into_iter().collect();
        wrong.check(true).map(drop)
    }

    /// The runtime of the first parameter or buffer; `None` for a model that has none.
    pub(crate) fn runtime(&self) -> Option<R> {
        Some(self.0.first()?.slot.runtime().with_category(MemoryCategory::Parameters))
    }
}

/// Takes a state from a file, by way of the memory its parameters are booked under.
pub(crate) fn load_file<R: Runtime>(state: &ModelState<R>, path: &Path, strict: bool) -> Result<LoadReport> {
    let Some(rt) = state.runtime() else {
        return state.load(Vec::new(), strict);
    };
    state.load(safetensors::load(path, &rt)?, strict)
}

/// The value in memory without another holder, so that it can be updated in place.
fn owned<R: Runtime>(value: Tensor<R>, slot: &StateSlot<R>) -> Result<Tensor<R>> {
    match value.try_mut() {
        Ok(memory) => memory.freeze(),
        Err(shared) => {
            let mut memory = TensorMut::alloc(&slot.runtime(), *shared.shape(), shared.dtype())?;
            memory.accumulate(&Op::identity(), &[&shared])?;
            memory.freeze()
        }
    }
}

/// All mismatches of a state.
#[derive(Default)]
struct StateMismatch {
    report: LoadReport,
    mismatching: Vec<String>,
}

impl StateMismatch {
    fn check(self, strict: bool) -> Result<LoadReport> {
        let LoadReport { missing, unexpected } = &self.report;
        let (missing, unexpected) = if strict { (&missing[..], &unexpected[..]) } else { (&[][..], &[][..]) };
        let lists = [("missing", missing), ("unexpected", unexpected), ("mismatching", &self.mismatching)];
        let why: Vec<String> = lists
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{} {what}: {}", names.len(), names.join(", ")))
            .collect();
        if why.is_empty() { Ok(self.report) } else { Err(Error::state("state dict", why.join("; "))) }
    }
}

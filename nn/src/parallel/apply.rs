//! The application of a plan: each rank keeps its pieces of the parameters, and layers learn how they are cut.

use std::{collections::HashMap, sync::Arc};

use autograd::{Leaf, Residency};
use numcore::{Error, Result, Runtime, Tensor, placement::TensorPlacement};

use super::{
    ExpertGroups, Placed, TensorGroup, TensorPlan, TensorStyle,
    plan::{Partiality, PlanEntry, is_within},
};
use crate::{Module, ModuleEntry, Param, walk};

impl TensorPlan {
    /// Cuts a model over the ranks of a group. Each rank keeps its piece of each parameter; values are those of the
    /// uncut model. A model made with [`Init::lazily`](crate::Init::lazily) is never complete in memory, only one
    /// parameter at a time. That parameter is made whenever its piece is read, until a training step or an assignment
    /// stores the piece.
    ///
    /// Make optimizers and trainers afterwards, since a cut parameter gets another leaf. On a group of one rank the
    /// plan is only checked.
    ///
    /// # Errors
    /// An error if a pattern names no parameter, or two patterns name one in different ways. Also if sizes or heads
    /// cannot be shared out, or a layer cannot be cut as the plan says. The model is then unchanged.
    #[track_caller]
    pub fn apply<R: Runtime>(&self, model: &(impl Module<R> + ?Sized), group: &Arc<dyn TensorGroup<R>>) -> Result<()> {
        self.apply_to_part(model, group, None, &self.found_in(model))
    }

    /// Tells, for each pattern of the entries and then of the regions, whether it names a parameter of a model or of a
    /// part.
    pub fn found_in<R: Runtime>(&self, model: &(impl Module<R> + ?Sized)) -> Vec<bool> {
        let parameters = NamedParameter::all_of(model);
        let lines = self.entries().iter().map(|entry| parameters.iter().any(|p| p.is_named_by(entry)));
        let regions = self.regions().iter().map(|region| parameters.iter().any(|p| p.is_in(region)));
        lines.chain(regions).collect()
    }

    /// Cuts a part of a model, such as a pipeline stage, as [`apply`](TensorPlan::apply) cuts a model. Shards the
    /// experts of its mixtures over the ranks of `experts`; if `None`, experts are replicated. A pattern may name
    /// nothing in this part if `found` says that another part has it: all parts together have all that the plan names.
    ///
    /// # Errors
    /// Errors of [`apply`](TensorPlan::apply); and an error if the experts cannot be shared out.
    pub fn apply_to_part<R: Runtime>(
        &self,
        part: &(impl Module<R> + ?Sized),
        group: &Arc<dyn TensorGroup<R>>,
        experts: Option<&ExpertGroups<R>>,
        found: &[bool],
    ) -> Result<()> {
        let parameters = NamedParameter::all_of(part);
        self.check_patterns(&parameters, found)?;
        let placed = |p: &NamedParameter<R>| self.placed(p, group, experts);
        let placed = parameters.iter().map(placed).collect::<Result<Vec<_>>>()?;
        let placed = parameters.iter().zip(placed).filter_map(|(p, placed)| Some((p, placed?)));
        placed.into_iter().try_for_each(|(p, placed)| p.parameter.place(placed))
    }

    /// Returns an error if a pattern names nothing: such a pattern is a mistake, since its layer would stay unsharded.
    fn check_patterns<R: Runtime>(&self, parameters: &[NamedParameter<R>], found: &[bool]) -> Result<()> {
        if self.is_sequence_parallel() && self.regions().is_empty() {
            let why = "the plan has no region in which values are cut along the sequence (`TensorPlan::sequence_region`), so its model \
                       does not cut sequences";
            return Err(Error::config("TensorPlan", "sequence_parallel", why));
        }
        if self.is_sequence_parallel() && self.has_whole_sums() {
            let why = "sequences that are cut are summed part by part: leave out `sequence_parallel`";
            return Err(Error::config("TensorPlan", "whole_sums", why));
        }
        if let Some(pattern) = self.unknown().first() {
            let why = format!("the plan has no entry for `{pattern}`, so none can be removed");
            return Err(Error::config("TensorPlan", "without", why));
        }
        let lines = self.entries().iter().map(|entry| (&entry.pattern, entry.optional));
        let mut patterns = lines.chain(self.regions().iter().map(|region| (region, false))).zip(found);
        match patterns.find(|((_, optional), found)| !optional && !**found) {
            None => Ok(()),
            Some(((pattern, _), _)) => {
                let names = parameters.iter().flat_map(|p| &p.names);
                let some: Vec<&str> = names.take(8).map(String::as_str).collect();
                let why = format!("`{pattern}` names no parameter of the model, whose first are {}", some.join(", "));
                Err(Error::config("TensorPlan", "pattern", why))
            }
        }
    }

    /// The placement of a parameter on this rank; `None` if it concerns no other rank.
    fn placed<R: Runtime>(
        &self,
        of: &NamedParameter<R>,
        group: &Arc<dyn TensorGroup<R>>,
        experts: Option<&ExpertGroups<R>>,
    ) -> Result<Option<Placed<R>>> {
        let (name, parameter) = (&of.names[0], of.parameter.clone());
        let entry = self.entry_of(of)?;
        let named = entry.map_or(TensorStyle::Replicated, |entry| self.style_of(entry));
        let experts = experts.filter(|groups| named == TensorStyle::Experts && groups.examples.size() > 1);
        if group.size() == 1 && experts.is_none() {
            return Ok(None);
        }
        if parameter.placed().is_some() {
            return Err(Error::state(&**name, "is cut already: a plan is applied to a model once"));
        }
        if self.is_sequence_parallel() && group.size() > 1 {
            self.check_sequence(of, entry).map_err(|why| Error::state(&**name, why))?;
        }
        let (style, group) = match experts.filter(|groups| groups.experts.size() > 1) {
            Some(groups) => (named, &groups.experts),
            None if named == TensorStyle::Experts => (TensorStyle::Replicated, group),
            None => (named, group),
        };
        let examples = experts.map(|groups| groups.examples.clone());
        let (shape, size) = (parameter.shape(), group.size());
        let placements = (0..size).map(|rank| parameter.cuts().piece(style, shape, rank, size));
        let placements = placements.collect::<std::result::Result<Vec<_>, _>>().map_err(|why| {
            Error::state(&**name, format!("of shape {shape} cannot be cut by {style:?} over {size} ranks: {why}"))
        })?;
        let replicas = placements[group.rank()].1;
        let placements = placements.into_iter().map(|(placement, _)| placement).collect();
        let partial = match entry.map_or(Partiality::Never, |entry| entry.partial) {
            Partiality::Always => true,
            Partiality::OfSequence => self.is_sequence_parallel(),
            // Partial where ranks share a head of keys and use it for different heads of queries, or add a bias to
            // different parts of a sequence.
            Partiality::Never if style == TensorStyle::Row => self.is_sequence_parallel() && replicas > 1,
            Partiality::Never => style != TensorStyle::Replicated && replicas > 1,
        };
        let (sequence, pieces, group) = (self.is_sequence_parallel(), self.pieces(), group.clone());
        let (name, whole_sums) = (name.as_str().into(), self.has_whole_sums());
        Ok(Some(Placed { name, style, placements, replicas, partial, sequence, whole_sums, pieces, group, examples }))
    }

    /// Checks that a parameter's entry, or the lack of one, fits values that are cut along the sequence. Otherwise its
    /// gradient would be partial and never summed, or complete and summed.
    fn check_sequence<R: Runtime>(
        &self,
        of: &NamedParameter<R>,
        entry: Option<&PlanEntry>,
    ) -> std::result::Result<(), String> {
        let inside = self.regions().iter().any(|region| of.is_in(region));
        let (style, partial) = entry.map_or((TensorStyle::Replicated, Partiality::Never), |e| (e.style, e.partial));
        match (inside, style, partial) {
            (true, TensorStyle::Replicated, Partiality::Never) => Err(format!(
                "{}, and values there are cut along the sequence: name it by `sequence`, or cut its layer by `column` or `row`",
                if entry.is_some() { "is named by `replicated`" } else { "is named by no entry of the plan" }
            )),
            (true, TensorStyle::Replicated, Partiality::OfSequence) if of.parameter.cuts().has_heads(of.parameter.shape()) => Err(
                "is of a projection of attention heads, which need all of the sequence: cut it by `column`, or leave out \
                 `sequence_parallel`"
                    .into(),
            ),
            (false, TensorStyle::Replicated, Partiality::OfSequence) => {
                Err("is named by `sequence`, and is in no region of the plan in which values are cut along the sequence".into())
            }
            (true, TensorStyle::Experts, _) => Err("is named by `Experts`, and values there are cut along the sequence, of which a \
                 mixture needs every token once: leave out `sequence_parallel`"
                .into()),
            (false, TensorStyle::Column | TensorStyle::Row, _) => Err(format!(
                "is named by `{style:?}`, and is in no region of the plan in which values are cut along the sequence, as its layer \
                 would need"
            )),
            _ => Ok(()),
        }
    }

    /// The entry of the table for a parameter, under any of its names.
    fn entry_of<R: Runtime>(&self, of: &NamedParameter<R>) -> Result<Option<&PlanEntry>> {
        let mut found = self.entries().iter().filter(|entry| of.is_named_by(entry));
        let first = found.next();
        match found.find(|other| first.is_some_and(|f| (f.style, f.partial) != (other.style, other.partial))) {
            None => Ok(first),
            Some(other) => {
                let [one, two] = [first.unwrap_or(other), other].map(|e| format!("`{}` ({:?})", e.pattern, e.style));
                Err(Error::state(&*of.names[0], format!("is named by {one} and by {two}, which differ")))
            }
        }
    }
}

/// A parameter with all of its names; a shared parameter has several.
struct NamedParameter<R: Runtime> {
    names: Vec<String>,
    parameter: Param<R>,
}

impl<R: Runtime> NamedParameter<R> {
    fn all_of(model: &(impl Module<R> + ?Sized)) -> Vec<Self> {
        let (mut all, mut places): (Vec<Self>, HashMap<usize, usize>) = (Vec::new(), HashMap::new());
        walk(model, |name, entry| {
            let ModuleEntry::Parameter(p) = entry else { return };
            let at = *places.entry(p.id()).or_insert(all.len());
            match all.get_mut(at) {
                Some(known) => known.names.push(name.to_string()),
                None => all.push(NamedParameter { names: vec![name.to_string()], parameter: p.clone() }),
            }
        });
        all
    }

    /// Tells whether an entry of a plan names the parameter or its layer. A parameter of an adapter belongs to the
    /// layer that has the adapter.
    fn is_named_by(&self, entry: &PlanEntry) -> bool {
        let of_adapter = self.parameter.cuts().is_low_rank();
        let names = |name: &str| match name.rsplit_once('.') {
            Some((matrix, _)) if of_adapter => entry.names(matrix),
            _ => entry.names(name),
        };
        self.names.iter().any(|name| names(name))
    }

    /// Tells whether the parameter is in a region of a plan.
    fn is_in(&self, region: &str) -> bool {
        self.names.iter().any(|name| is_within(region, name))
    }
}

/// A piece of a parameter that is drawn or fetched at each read. The whole parameter is made for it, unless its
/// residency can make pieces.
pub(crate) struct PieceOf<R: Runtime> {
    pub(crate) whole: Arc<Leaf<R>>,
    pub(crate) placement: TensorPlacement,
}

impl<R: Runtime> Residency<R> for PieceOf<R> {
    fn fetch(&self, _: &Leaf<R>) -> Result<Tensor<R>> {
        // An unsharded parameter needs no copy.
        if self.placement.is_whole() { self.whole.value() } else { self.whole.piece(&self.placement) }
    }
}

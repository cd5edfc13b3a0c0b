//! Checkpoints of local updates: common values once, and the values of each rank.
//!
//! | name | content | saved by |
//! |---|---|---|
//! | `parameter/…` | global weights; parameters that are not trained | the rank that has the elements |
//! | `outer/0/…`, `outer/mean/…` | the rule's state; sums in flight | the rank that has the elements |
//! | `buffer/…` | buffers of rank 0, for readers of the model alone | rank 0 |
//! | `rank/R/local/…` | all entries of the inner step of rank `R`: its own weights, its optimizer's state | that rank |
//!
//! With as many ranks as saved, training continues as if it had never stopped. Another number of ranks begins with the
//! global weights. Rank `r` then has the optimizer's state of rank `r` modulo the number that saved.

use std::collections::BTreeMap;

use numcore::{Error, Result, Runtime, Tensor, ops::ViewOps};

use super::{LocalSteps, fragment::OwnElements};
use optim::StateRow;

use distributed::{
    checkpoint::{CheckpointPart, Checkpointed, Folder, Manifest, SnapshotWriter, Wanted, names},
    comm::{Comm, Communicator},
    train::{CheckpointNotes, Step},
};

const RANKS: &str = "outer/ranks";
const TAKEN: &str = "outer/taken";
const SYNCHRONIZATIONS: &str = "outer/meetings";
const LAST_EQUAL: &str = "outer/together";

/// Facts about a checkpoint that are read before it.
pub(super) struct SavedRanks {
    ranks: usize,
    /// True for each fragment whose sum was in flight.
    in_flight: Vec<bool>,
}

fn in_flight(k: usize) -> String {
    format!("outer/flying/{k}")
}

fn rate(k: usize) -> String {
    format!("outer/rate/{k}")
}

/// A copy of a checkpoint part.
fn copied<R: Runtime>(part: &CheckpointPart<R>) -> Result<CheckpointPart<R>> {
    let row = match &part.row {
        StateRow::Device(row) => StateRow::Device(row.clone()),
        StateRow::Host(dtype, bytes) => StateRow::Host(*dtype, bytes.clone()),
    };
    Ok(CheckpointPart { name: part.name.clone(), placement: part.placement.clone(), start: part.start, row })
}

/// The checkpoint's name of an entry of a rank's inner step.
fn local(rank: usize, name: &str) -> String {
    names::own(rank, &format!("local/{name}"))
}

impl<R: Runtime, S: Step<R>> LocalSteps<R, S> {
    /// Tells whether an entry of the inner step is a parameter that is not trained, which is equal on all ranks.
    fn is_common(&self, name: &str) -> bool {
        let trained = || self.fragments.iter().flat_map(|fragment| &fragment.leaves).map(|outer| &outer.name);
        names::is_parameter(name) && trained().all(|trained| names::parameter(trained) != name)
    }

    /// The checkpoint's name of an entry of a rank's inner step: its own name if the entry is common to all ranks.
    fn renamed(&self, rank: usize, name: &str) -> String {
        if self.is_common(name) { name.into() } else { local(rank, name) }
    }

    /// The rank whose optimizer state this rank takes over.
    fn source(&self) -> usize {
        self.comm.rank() % self.saved.as_ref().map_or(self.comm.size(), |saved| saved.ranks)
    }

    /// The name of the loss weight of fragment `k` since its last synchronization. Each rank of a machine has its own.
    fn weight_name(&self, k: usize) -> String {
        format!("weight/{k}/{}", self.inner.ranks().everyone.rank())
    }

    /// Saves everything that resuming needs. Every rank calls it.
    ///
    /// # Errors
    /// Fails as [`Folder::save`], and if an inner step has several ranks and [all ranks](LocalSteps::among) were not
    /// set.
    #[track_caller]
    pub fn save(&self, folder: &Folder, notes: &CheckpointNotes) -> Result<()> {
        folder.save(self.everyone()?, self.steps, self, notes)
    }

    /// A writer for [`save_in_background`](LocalSteps::save_in_background). Every rank makes one, and keeps it.
    #[track_caller]
    pub fn snapshot_writer(&self) -> Result<SnapshotWriter<R>> {
        SnapshotWriter::new(self.everyone()?)
    }

    /// Saves as [`save`](LocalSteps::save) does, while training goes on. Returns once a copy is made, which a thread
    /// writes. Every rank calls it.
    ///
    /// # Errors
    /// Fails as [`SnapshotWriter::save`].
    pub fn save_in_background(
        &self,
        writer: &mut SnapshotWriter<R>,
        folder: &Folder,
        notes: &CheckpointNotes,
    ) -> Result<()> {
        writer.save(folder, self.steps, self, notes)
    }

    /// Resumes from the last complete checkpoint in a folder, saved by any number of ranks. Returns none if there is no
    /// checkpoint. Every rank calls it.
    ///
    /// # Errors
    /// Fails as [`Folder::load_latest`], and if an inner step has several ranks and [all ranks](LocalSteps::among) were
    /// not set.
    #[track_caller]
    pub fn load(&mut self, folder: &Folder) -> Result<Option<Manifest>> {
        let everyone = self.everyone()?.clone();
        folder.load_latest(&everyone, self)
    }

    /// All ranks that train.
    pub(super) fn everyone(&self) -> Result<&Comm<R>> {
        let everyone = &self.ranks.everyone;
        if everyone.size() == self.comm.size() * self.inner.ranks().everyone.size() {
            return Ok(everyone);
        }
        let why = "the inner step has several ranks, which save and decide together with the ranks of the other inner steps: give all of them to \
                   `LocalSteps::among`";
        Err(Error::config("LocalSteps", "among", why).on_rank(self.comm.world_rank()))
    }

    /// Names of the tensors that are kept beside the global weights.
    fn kept(&self, k: usize, is_in_flight: bool) -> Vec<String> {
        let states = (0..self.fragments[k].state.len()).map(|i| format!("outer/{i}"));
        states.chain(is_in_flight.then(|| "outer/mean".to_string())).collect()
    }

    fn outer_parts(&self, k: usize) -> Result<Vec<CheckpointPart<R>>> {
        let fragment = &self.fragments[k];
        let mean = fragment.mean()?;
        let tensors: Vec<&Tensor<R>> = std::iter::once(&fragment.global).chain(&fragment.state).chain(&mean).collect();
        let mut names = vec!["parameter".to_string()];
        names.extend(self.kept(k, mean.is_some()));
        let mut parts = Vec::new();
        for OwnElements { outer, at, part, len } in fragment.own().filter(|own| own.outer.saves) {
            for (kind, tensor) in names.iter().zip(&tensors) {
                let name = format!("{kind}/{}", outer.name);
                let row = tensor.narrow(0, part, len)?.into();
                parts.push(CheckpointPart { name, placement: outer.placement.clone(), start: at, row });
            }
        }
        Ok(parts)
    }

    fn outer_wanted(&self, k: usize, is_in_flight: bool) -> Vec<Wanted> {
        let fragment = &self.fragments[k];
        let mut kinds = vec!["parameter".to_string()];
        kinds.extend(self.kept(k, is_in_flight));
        let wanted = |(kind, OwnElements { outer, at, len, .. }): (&String, OwnElements<'_, R>)| {
            let (name, placement) = (format!("{kind}/{}", outer.name), outer.placement.clone());
            Wanted { name, placement, dtype: fragment.dtype(), elements: at..at + len }
        };
        kinds.iter().flat_map(|kind| fragment.own().map(move |own| (kind, own))).map(wanted).collect()
    }

    fn is_in_flight(&self, k: usize) -> bool {
        match &self.saved {
            Some(saved) => saved.in_flight.get(k).copied().unwrap_or(false),
            None => self.fragments[k].is_in_flight(),
        }
    }

    /// Reads this rank's parts of a fragment: the global values, the outer optimizer's state, a mean in flight.
    fn read_fragment(&self, k: usize, read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>) -> Result<Vec<Tensor<R>>> {
        let (is_in_flight, fragment) = (self.is_in_flight(k), &self.fragments[k]);
        let wanted = self.outer_wanted(k, is_in_flight);
        let tensors = 1 + fragment.state.len() + usize::from(is_in_flight);
        let each = wanted.len() / tensors;
        let mut tensor = |t: usize| {
            let rows = wanted[t * each..(t + 1) * each].iter().map(&mut *read).collect::<Result<Vec<_>>>()?;
            fragment.padded(&rows.iter().collect::<Vec<_>>())
        };
        (0..tensors).map(&mut tensor).collect()
    }

    /// The numbers of the inner step of the rank whose state is taken over.
    fn inner_numbers(&self, numbers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let prefix = local(self.source(), "");
        let own = |(name, number): (&String, &u64)| Some((name.strip_prefix(&prefix)?.to_string(), *number));
        numbers.iter().filter_map(own).collect()
    }
}

/// The updates that another number of ranks would lose if it took over this state now; `None` if it would lose none.
/// [`ElasticWorld`](crate::elastic::ElasticWorld) commits no state that would lose some.
pub fn lost_at_resize<R: Runtime>(state: &(impl Checkpointed<R> + ?Sized)) -> Option<&'static str> {
    let numbers = state.numbers();
    (numbers.get(TAKEN) != numbers.get(LAST_EQUAL)).then_some(
        "ranks train independently, and another number of them would begin with the global weights and lose later updates: commit where all ranks have equal weights, right after a synchronization of all parameters (one fragment, a rule that keeps nothing of a rank's own)",
    )
}

impl<R: Runtime, S: Step<R>> Checkpointed<R> for LocalSteps<R, S> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let rank = self.comm.rank();
        let mut parts = self.inner.parts()?;
        parts.retain(|part| rank == 0 || !self.is_common(&part.name));
        // Buffers of the first rank are saved by their plain names as well, for readers of the model alone.
        let buffers: Vec<CheckpointPart<R>> = match rank {
            0 => parts.iter().filter(|part| names::is_buffer(&part.name)).map(copied).collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        parts.iter_mut().for_each(|part| part.name = self.renamed(rank, &part.name));
        parts.extend(buffers);
        for k in 0..self.fragments.len() {
            parts.extend(self.outer_parts(k)?);
        }
        Ok(parts)
    }

    /// The first call puts `rows` in place of the weights. The next call restores this rank's own weights and ignores
    /// its `rows`: the own weights are not the parameters of [`parts`](Checkpointed::parts).
    fn swap_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        if self.inner.ranks().everyone.size() > 1 {
            return Ok(false);
        }
        let leaves = || self.fragments.iter().flat_map(|fragment| &fragment.leaves).map(|outer| &outer.leaf);
        if let Some(own) = self.own.take() {
            leaves().zip(own).try_for_each(|(leaf, value)| leaf.set(value))?;
            return Ok(true);
        }
        self.own = Some(leaves().map(|leaf| leaf.value()).collect::<Result<_>>()?);
        // Rows of parameters that are not trained come first, and are not changed.
        let count: usize = self.fragments.iter().map(|fragment| fragment.own().count()).sum();
        let mut rows = rows[rows.len().saturating_sub(count)..].iter();
        for fragment in &self.fragments {
            let parts: Vec<&Tensor<R>> = rows.by_ref().take(fragment.own().count()).collect();
            fragment.spread(&self.comm, &fragment.padded(&parts)?)?;
        }
        Ok(true)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let rank = self.comm.rank();
        let inner = self.inner.numbers().into_iter().map(|(name, number)| (local(rank, &name), number));
        let mut numbers: BTreeMap<String, u64> = inner.collect();
        numbers.insert(RANKS.into(), self.comm.size() as u64);
        numbers.insert(TAKEN.into(), self.steps);
        numbers.insert(SYNCHRONIZATIONS.into(), self.synchronizations);
        numbers.insert(LAST_EQUAL.into(), self.last_equal);
        for (k, fragment) in self.fragments.iter().enumerate() {
            numbers.insert(in_flight(k), u64::from(fragment.is_in_flight()));
            numbers.insert(rate(k), fragment.rate.to_bits());
            numbers.insert(local(rank, &self.weight_name(k)), fragment.weight.to_bits());
        }
        numbers
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        let number = |name: &str| numbers.get(name).copied().unwrap_or(0);
        let ranks = usize::try_from(number(RANKS)).unwrap_or(0).max(1);
        let in_flight = (0..self.fragments.len()).map(|k| number(&in_flight(k)) != 0).collect();
        self.saved = Some(SavedRanks { ranks, in_flight });
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let source = self.source();
        let inner = self.inner.wanted()?;
        let buffers = inner.iter().filter(|wanted| names::is_buffer(&wanted.name)).cloned();
        let renamed = inner.iter().map(|w| Wanted { name: self.renamed(source, &w.name), ..w.clone() });
        let mut wanted: Vec<Wanted> = renamed.chain(buffers).collect();
        for k in 0..self.fragments.len() {
            wanted.extend(self.outer_wanted(k, self.is_in_flight(k)));
        }
        Ok(wanted)
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        let inner = self.inner_numbers(numbers);
        self.inner.check_restore(&inner)
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        // All fragments are read before one changes: the inner step refuses steps after a failed load, they do not.
        let fragments = (0..self.fragments.len()).map(|k| self.read_fragment(k, read)).collect::<Result<Vec<_>>>()?;
        let (source, inner) = (self.source(), self.inner_numbers(numbers));
        let common: Vec<(String, String)> =
            self.inner.wanted()?.into_iter().map(|w| (w.name.clone(), self.renamed(source, &w.name))).collect();
        let names: BTreeMap<String, String> = common.into_iter().collect();
        let mut renamed = |wanted: &Wanted| {
            let name = names.get(&wanted.name).cloned().unwrap_or_else(|| local(source, &wanted.name));
            read(&Wanted { name, ..wanted.clone() })
        };
        self.inner.restore(&mut renamed, &inner)?;
        for (fragment, values) in self.fragments.iter_mut().zip(fragments) {
            let mut values = values.into_iter();
            fragment.global = values.next().ok_or_else(|| Error::internal("local updates", "nothing was read"))?;
            fragment.state = values.by_ref().take(fragment.state.len()).collect();
            fragment.set_mean(values.next());
        }
        let number = |name: &str| numbers.get(name).copied().unwrap_or(0);
        (self.steps, self.synchronizations, self.last) = (number(TAKEN), number(SYNCHRONIZATIONS), None);
        let weights: Vec<String> = (0..self.fragments.len()).map(|k| local(source, &self.weight_name(k))).collect();
        let as_saved = self.saved.take().is_none_or(|saved| saved.ranks == self.comm.size());
        self.last_equal = if as_saved { number(LAST_EQUAL) } else { self.steps };
        for (k, fragment) in self.fragments.iter_mut().enumerate() {
            fragment.rate = f64::from_bits(number(&rate(k)));
            let weight = f64::from_bits(number(&weights[k]));
            fragment.weight = if as_saved { weight } else { 0.0 };
            if !as_saved {
                fragment.spread_global(&self.comm)?;
            }
        }
        Ok(())
    }
}

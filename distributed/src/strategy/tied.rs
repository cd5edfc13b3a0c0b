//! Tied parameters: one parameter in several stages, whose copies are trained as one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use autograd::Leaf;
use nn::{Module, ModuleExt};
use numcore::{
    Error, Result, Runtime, TensorMut,
    ops::{Input, compute},
    pointwise::standard::{ADD, COPY},
};

use super::{GradLoan, Strategy};
use crate::{
    comm::{Collectives, Comm, ReduceOp, Work, memory},
    unused::used_anywhere,
};

/// A parameter of which several stages have a copy, such as a token table that is also the head. Its gradient is the
/// sum of the copies' gradients. The copies start equal and stay equal, bit for bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie(Vec<String>);

impl Tie {
    /// Ties every stage's parameter of one of these names, at most one in each stage. The initial value is that of the
    /// earliest stage.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Tie(names.into_iter().map(Into::into).collect())
    }

    /// The ties of parameters that are duplicates of one another in `stages`, in the order of the stages. `stages` must
    /// be all stages of the model.
    pub(crate) fn of_duplicates<R: Runtime>(stages: &[impl Module<R>]) -> Vec<Tie> {
        let (mut places, mut copies) = (HashMap::new(), Vec::<BTreeMap<usize, String>>::new());
        for (stage, module) in stages.iter().enumerate() {
            for (name, parameter) in module.named_parameters() {
                let place = *places.entry(parameter.origin()).or_insert(copies.len());
                copies.resize_with(copies.len().max(place + 1), BTreeMap::new);
                copies[place].insert(stage, name);
            }
        }
        copies.into_iter().filter(|of| of.len() > 1).map(|of| Tie::new(of.into_values())).collect()
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.0
    }
}

/// This rank's copies of a tied parameter.
pub(crate) struct Tied<R: Runtime> {
    /// The ranks of this replica with a copy.
    comm: Comm<R>,
    /// The copies, by stage.
    pub(super) copies: Vec<TiedCopy<R>>,
    /// The earliest stage with a copy, on any rank. This copy counts where each parameter counts once.
    pub(super) first: usize,
    /// The name of the first copy, which is the parameter's in checkpoints.
    pub(super) name: String,
}

/// A copy: its stage and leaf.
type TiedCopy<R> = (usize, Arc<Leaf<R>>);

/// The description of a copy that ranks exchange.
struct CopyRecord {
    rank: usize,
    tie: usize,
    stage: usize,
    name: String,
    /// The dtype, the shape, and "trained" or "frozen".
    what: String,
}

/// The gradients of a tie while they are summed. The copies' strategies lend them; the first copy's is in flight.
struct Summing<R: Runtime> {
    lent: Vec<GradLoan<R>>,
    others: Vec<TensorMut<R>>,
    work: Work<TensorMut<R>>,
}

impl<R: Runtime> Tied<R> {
    /// Finds the ties of which this rank has copies in its stages, and makes the copies equal within the replica.
    /// Blocks.
    pub(crate) fn all(pipe: &Comm<R>, ties: &[Tie], stages: &[(usize, &dyn Module<R>)]) -> Result<Vec<Self>> {
        let own: Vec<_> = ties.iter().map(|tie| copies(tie, stages)).collect();
        let table = exchanged(pipe, &own)?;
        let mut tied = Vec::new();
        for (k, copies) in own.into_iter().enumerate() {
            let lines: Vec<&CopyRecord> = table.iter().filter(|line| line.tie == k).collect();
            check(&ties[k], &lines)?;
            let Some(comm) = pipe.split((!copies.is_empty()).then_some(k), pipe.rank())? else { continue };
            let Some(first) = lines.iter().min_by_key(|line| line.stage) else { continue };
            let mut holders: Vec<usize> = lines.iter().map(|line| line.rank).collect();
            holders.sort_unstable();
            holders.dedup();
            let root = holders.iter().position(|&rank| rank == first.rank).unwrap_or(0);
            let value = comm.broadcast(memory(&copies[0].1.value()?)?, root)?.wait()?.freeze()?;
            copies.iter().try_for_each(|(_, leaf)| leaf.set(value.clone()))?;
            tied.push(Tied { comm, copies, first: first.stage, name: first.name.clone() });
        }
        Ok(tied)
    }

    /// Tells whether a leaf is one of the copies.
    pub(super) fn has(&self, leaf: &Arc<Leaf<R>>) -> bool {
        self.copies.iter().any(|(_, own)| Arc::ptr_eq(own, leaf))
    }

    /// Sums the gradients of the copies of each tie, which `strategies` have. If parameters may be unused, a copy that
    /// no replica used adds zeros, and a parameter of which none was used stays without a gradient.
    pub(super) fn sum(ties: &[Self], strategies: &mut dyn Strategy<R>, may_be_unused: bool) -> Result<()> {
        let start = |tied: &Self| tied.start(strategies, may_be_unused);
        let summing = ties.iter().map(start).collect::<Result<Vec<_>>>()?;
        ties.iter().zip(summing).try_for_each(|(tied, summing)| match summing {
            Some(summing) => tied.finish(summing, strategies),
            None => Ok(()),
        })
    }

    /// Starts the sum: first over this rank's copies by stage, then over ranks. Returns none if the parameter is
    /// frozen, or no rank used it.
    fn start(&self, strategies: &mut dyn Strategy<R>, may_be_unused: bool) -> Result<Option<Summing<R>>> {
        let trained: Vec<_> = self.copies.iter().filter(|(_, leaf)| leaf.requires_grad()).collect();
        let mut lent = trained.iter().map(|(_, leaf)| strategies.lend_grad(leaf)).collect::<Result<Vec<_>>>()?;
        if may_be_unused && !trained.is_empty() {
            let used = lent.iter().any(GradLoan::is_written);
            if !used_anywhere(&self.comm, std::iter::once(used))?[0] {
                trained.iter().zip(lent).try_for_each(|((_, leaf), lent)| strategies.restore_grad(leaf, lent))?;
                return Ok(None);
            }
            lent.iter_mut().filter(|lent| !lent.is_written()).try_for_each(GradLoan::zero)?;
        }
        let mut taken = lent.iter_mut().map(GradLoan::take);
        let Some(mut sum) = taken.next() else { return Ok(None) };
        let others: Vec<_> = taken.collect();
        let rt = sum.runtime().clone();
        for other in &others {
            compute(&rt, &ADD, &[Input::Own(0), Input::Memory(other)], &[], &mut [&mut sum])?;
        }
        let work = self.comm.all_reduce(sum, ReduceOp::Sum)?;
        Ok(Some(Summing { lent, others, work }))
    }

    /// Writes the sum to every copy of this rank.
    fn finish(&self, summing: Summing<R>, strategies: &mut dyn Strategy<R>) -> Result<()> {
        let Summing { lent, mut others, work } = summing;
        let sum = work.wait()?;
        let rt = sum.runtime().clone();
        for other in &mut others {
            compute(&rt, &COPY, &[Input::Memory(&sum)], &[], &mut [other])?;
        }
        let sums = std::iter::once(sum).chain(others);
        for (((_, leaf), mut lent), sum) in self.copies.iter().zip(lent).zip(sums) {
            lent.give(sum);
            strategies.restore_grad(leaf, lent)?;
        }
        Ok(())
    }
}

/// The copies of a tie among `stages`.
fn copies<R: Runtime>(tie: &Tie, stages: &[(usize, &dyn Module<R>)]) -> Vec<TiedCopy<R>> {
    let of = |stage: usize, module: &dyn Module<R>| {
        let named = module.named_parameters().into_iter().filter(|(name, _)| tie.0.contains(name));
        named.map(|(_, parameter)| (stage, parameter.leaf())).collect::<Vec<_>>()
    };
    stages.iter().flat_map(|&(stage, module)| of(stage, module)).collect()
}

/// The copies of every rank.
fn exchanged<R: Runtime>(pipe: &Comm<R>, own: &[Vec<TiedCopy<R>>]) -> Result<Vec<CopyRecord>> {
    let line = |tie: usize, (stage, leaf): &TiedCopy<R>| {
        let (spec, trained) = (leaf.spec(), if leaf.requires_grad() { "trained" } else { "frozen" });
        format!("{tie}\t{stage}\t{}\t{} {} {trained}\n", leaf.name(), spec.dtype, spec.shape)
    };
    let text: String = own.iter().enumerate().flat_map(|(k, of)| of.iter().map(move |copy| line(k, copy))).collect();
    let mut table = Vec::new();
    for (rank, text) in pipe.exchange(text.as_bytes())?.into_iter().enumerate() {
        table.extend(String::from_utf8_lossy(&text).lines().filter_map(|line| parsed(rank, line)));
    }
    Ok(table)
}

fn parsed(rank: usize, line: &str) -> Option<CopyRecord> {
    let mut words = line.splitn(4, '\t');
    let (tie, stage) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(CopyRecord { rank, tie, stage, name: words.next()?.into(), what: words.next()?.into() })
}

/// Checks the copies of a tie. Every rank sees the same lines, so all find the same fault.
fn check(tie: &Tie, lines: &[&CopyRecord]) -> Result<()> {
    let refuse = |why: String| Err(Error::state(format!("pipeline tie {:?}", tie.0), why));
    let Some(first) = lines.first() else {
        return refuse("no stage has a parameter of this name".into());
    };
    for (k, line) in lines.iter().enumerate() {
        if line.what != first.what {
            return refuse(format!(
                "stage {}'s copy is {}, stage {}'s is {}",
                first.stage, first.what, line.stage, line.what
            ));
        }
        if lines[..k].iter().any(|earlier| earlier.stage == line.stage) {
            return refuse(format!("stage {} has two copies: share the parameter within a stage", line.stage));
        }
    }
    Ok(())
}

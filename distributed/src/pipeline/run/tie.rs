//! One parameter in several stages: copies that are trained as one.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use autograd::Leaf;
use nn::ModuleExt;
use numcore::{
    Error, Result, Runtime, TensorMut,
    ops::{Input, compute},
    pointwise::Program,
};

use super::{Groups, Stage};
use crate::comm::{Collectives, Comm, ReduceOp, Work, memory};

/// A parameter of which several stages have a copy, such as a token table that is also the head. Its gradient is the sum of the copies'
/// gradients; the copies start equal and stay equal, bit for bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie(Vec<String>);

impl Tie {
    /// Every stage's parameter of one of these names, at most one in each stage. The value to start from is the earliest stage's.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Tie(names.into_iter().map(Into::into).collect())
    }
}

/// This rank's copies of a tied parameter.
pub(super) struct Tied<R: Runtime> {
    /// The ranks with a copy, in all replicas.
    comm: Comm<R>,
    /// By stage.
    pub(super) copies: Vec<Copy<R>>,
    /// The earliest stage with a copy, on any rank: it is the one that counts where each parameter counts once.
    pub(super) first: usize,
    /// Stages here whose gradients are not in yet.
    waits_for: usize,
    /// The first copy's gradient, being summed; the other copies' gradients, to be overwritten.
    work: Option<Work<TensorMut<R>>>,
    others: Vec<TensorMut<R>>,
}

/// A copy: its stage and leaf.
type Copy<R> = (usize, Arc<Leaf<R>>);

/// A line of what ranks tell each other: tie, stage, and what the copy is.
type Line = (usize, usize, String);

impl<R: Runtime> Tied<R> {
    /// The ties of which this rank has copies, made equal. Blocks.
    pub(super) fn all(
        groups: &Groups<R>,
        ties: &[Tie],
        stages: &BTreeMap<usize, Box<dyn Stage<R>>>,
    ) -> Result<Vec<Self>> {
        let own: Vec<_> = ties.iter().map(|tie| copies(tie, stages)).collect();
        let table = exchanged(&groups.pipe, &own)?;
        let mut tied = Vec::new();
        for (k, copies) in own.into_iter().enumerate() {
            let lines: Vec<&(usize, Line)> = table.iter().filter(|(_, (tie, ..))| *tie == k).collect();
            check(&ties[k], &lines)?;
            let color = (!copies.is_empty()).then_some(k);
            let Some(comm) = groups.world.split(color, groups.world.rank())? else { continue };
            let Some(&(owner, (_, first, _))) = lines.iter().min_by_key(|(_, (_, stage, _))| stage) else { continue };
            // The group begins with the first replica's holders, by rank.
            let mut holders: Vec<usize> = lines.iter().map(|(rank, _)| *rank).collect();
            holders.sort_unstable();
            holders.dedup();
            let root = holders.iter().position(|rank| rank == owner).unwrap_or(0);
            let value = comm.broadcast(memory(&copies[0].1.value()?)?, root)?.wait()?.freeze()?;
            copies.iter().try_for_each(|(_, leaf)| leaf.set(value.clone()))?;
            let (waits_for, first) = (copies.len(), *first);
            tied.push(Tied { comm, copies, first, waits_for, work: None, others: Vec::new() });
        }
        Ok(tied)
    }

    /// Before the gradients of a step.
    pub(super) fn begin(&mut self) {
        (self.waits_for, self.work) = (self.copies.len(), None);
        self.others.clear();
    }

    /// A stage's gradients are in: true if it was the last one the sum waits for.
    pub(super) fn is_due(&mut self, stage: usize) -> bool {
        let has = self.copies.iter().any(|(own, _)| *own == stage);
        self.waits_for -= usize::from(has);
        has && self.waits_for == 0
    }

    /// Starts the sum: of the copies here, by stage, then of all ranks. Nobody waits for it before [`finish`](Tied::finish),
    /// because ranks come here at different times.
    pub(super) fn start(&mut self, gradients: Vec<TensorMut<R>>) -> Result<()> {
        static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[x, y], []| [x + y]));
        let mut gradients = gradients.into_iter();
        let Some(mut sum) = gradients.next() else { return Ok(()) };
        self.others = gradients.collect();
        for other in &self.others {
            let rt = sum.runtime().clone();
            compute(&rt, &ADD, &[Input::Own(0), Input::Memory(other)], &[], &mut [&mut sum])?;
        }
        self.work = Some(self.comm.all_reduce(sum, ReduceOp::Sum)?);
        Ok(())
    }

    /// The gradients of the copies here, all the same now.
    pub(super) fn finish(&mut self) -> Result<Vec<TensorMut<R>>> {
        static COPY: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]));
        let Some(work) = self.work.take() else { return Ok(Vec::new()) };
        let sum = work.wait()?;
        let rt = sum.runtime().clone();
        let mut others = std::mem::take(&mut self.others);
        for other in &mut others {
            compute(&rt, &COPY, &[Input::Memory(&sum)], &[], &mut [other])?;
        }
        Ok(std::iter::once(sum).chain(others).collect())
    }
}

/// A tie's copies among these stages.
fn copies<R: Runtime>(tie: &Tie, stages: &BTreeMap<usize, Box<dyn Stage<R>>>) -> Vec<Copy<R>> {
    let of = |stage: usize, module: &dyn Stage<R>| {
        let named = module.named_parameters().into_iter().filter(|(name, _)| tie.0.contains(name));
        named.map(|(_, parameter)| (stage, parameter.leaf())).collect::<Vec<_>>()
    };
    stages.iter().flat_map(|(&stage, module)| of(stage, &**module)).collect()
}

/// Every rank's copies, with the rank.
fn exchanged<R: Runtime>(pipe: &Comm<R>, own: &[Vec<Copy<R>>]) -> Result<Vec<(usize, Line)>> {
    let line = |tie: usize, (stage, leaf): &Copy<R>| {
        let (spec, trained) = (leaf.spec(), if leaf.requires_grad() { "trained" } else { "frozen" });
        format!("{tie} {stage} {} {} {trained}\n", spec.dtype, spec.shape)
    };
    let text: String = own.iter().enumerate().flat_map(|(k, of)| of.iter().map(move |copy| line(k, copy))).collect();
    let mut table = Vec::new();
    for (rank, text) in pipe.exchange(text.as_bytes())?.into_iter().enumerate() {
        let text = String::from_utf8_lossy(&text).into_owned();
        table.extend(text.lines().filter_map(parsed).map(|line| (rank, line)));
    }
    Ok(table)
}

fn parsed(line: &str) -> Option<Line> {
    let mut words = line.splitn(3, ' ');
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.to_string()))
}

/// Every rank sees the same lines, so all of them find the same fault.
fn check(tie: &Tie, lines: &[&(usize, Line)]) -> Result<()> {
    let refuse = |why: String| Err(Error::argument("pipeline tie", format!("{:?}: {why}", tie.0)));
    let Some((_, (_, first, what))) = lines.first() else {
        return refuse("no stage has a parameter of this name".into());
    };
    for (k, (_, (_, stage, other))) in lines.iter().enumerate() {
        if other != what {
            return refuse(format!("stage {first}'s copy is {what}, stage {stage}'s is {other}"));
        }
        if lines[..k].iter().any(|(_, (_, earlier, _))| earlier == stage) {
            return refuse(format!("stage {stage} has two copies: share the parameter within a stage"));
        }
    }
    Ok(())
}

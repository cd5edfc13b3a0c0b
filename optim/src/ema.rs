//! Exponential moving averages of the weights, for evaluation.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use autograd::Leaf;
use numcore::{
    Error, Flat, MemoryCategory, Result, Runtime, Tensor, Within,
    ops::{Op, update},
    pointwise::Program,
};

use crate::{EvaluationWeights, FlatParams, Optimizer, memory::lending};

static BLEND: LazyLock<Program> =
    LazyLock::new(|| Program::new("ema", |[average, weight], [take]| [average + (weight - average) * take]));

/// The exponential moving average of an optimizer's parameters, `a ← δa + (1 − δ)θ`, with one launch per buffer.
/// Half-precision parameters are averaged from their `f32` master copies.
///
/// Polyak and Juditsky, *Acceleration of Stochastic Approximation by Averaging*, 1992.
pub struct Ema<R: Runtime> {
    decay: f64,
    warmup: bool,
    updates: u64,
    averages: Vec<Flat<R>>,
    leaves: Vec<Vec<Arc<Leaf<R>>>>,
    /// The parameters' own values, while the averages replace them.
    own: Option<EvaluationWeights<R>>,
}

impl<R: Runtime> Ema<R> {
    /// Starts averages from the current parameters; `decay` is in `[0, 1)`.
    #[track_caller]
    pub fn new(optimizer: &mut dyn Optimizer<R>, decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::range("Ema", "decay", decay, "in [0, 1)")).at_caller();
        }
        let mut ema = Ema { decay, warmup: false, updates: 0, averages: vec![], leaves: vec![], own: None };
        for params in optimizer.params_mut() {
            let layout = params.layout().with_dtype(params.working());
            let mut average = Flat::zeros_for(params.runtime(), MemoryCategory::Optimizer, layout)?;
            let weights = params.weights()?;
            lending(&mut [&mut average], Flat::lend_whole, |outs| {
                outs[0].reset();
                outs[0].accumulate(&Op::identity(), &[&weights])
            })?;
            ema.averages.push(average);
            ema.leaves.push(params.leaves().to_vec());
        }
        Ok(ema)
    }

    /// Lets the decay increase from small values, `min(δ, (1 + t)/(10 + t))` at update `t` (from 1), so that early
    /// weights are forgotten soon.
    pub fn with_warmup(mut self) -> Self {
        self.warmup = true;
        self
    }

    /// The decay of the next update.
    pub fn decay(&self) -> f64 {
        let t = (self.updates + 1) as f64;
        if self.warmup { self.decay.min((1.0 + t) / (10.0 + t)) } else { self.decay }
    }

    /// The number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Updates the averages with the parameters' current values. Call it after each step of the optimizer.
    #[track_caller]
    pub fn update(&mut self, optimizer: &mut dyn Optimizer<R>) -> Result<()> {
        self.require_out("update")?;
        if self.warmup && self.averages.first().is_some_and(|flat| flat.runtime().is_capturing()) {
            let why = "the decay of its warmup changes from step to step, and every launch of a captured step repeats that of the capture";
            return Err(Error::usage("Ema", why)).at_caller();
        }
        let take = [(1.0 - self.decay()).into()];
        let params = optimizer.params_mut();
        self.follow(&params)?;
        for (params, average) in params.into_iter().zip(&mut self.averages) {
            let weights = params.weights()?;
            lending(&mut [average], Flat::lend_whole, |outs| update(&BLEND, &[&weights], &take, outs))?;
        }
        self.updates += 1;
        Ok(())
    }

    /// Moves the averages to the order of the parameters in a [reordered](crate::OptimizerCore::reorder) optimizer.
    fn follow(&mut self, params: &[&mut FlatParams<R>]) -> Result<()> {
        let stays = |(p, of): (&&mut FlatParams<R>, &Vec<Arc<Leaf<R>>>)| {
            p.len() == of.len() && p.leaves().iter().zip(of).all(|(a, b)| Arc::ptr_eq(a, b))
        };
        if params.len() == self.leaves.len() && params.iter().zip(&self.leaves).all(stays) {
            return Ok(());
        }
        let old: HashMap<usize, (usize, usize)> = self.leaves.iter().enumerate().flat_map(places).collect();
        let now = params.iter().map(|p| p.leaves().to_vec()).collect::<Vec<_>>();
        let (count, known) = (now.iter().map(Vec::len).sum::<usize>(), |l: &Arc<Leaf<R>>| old.contains_key(&l.id()));
        if count != old.len() || !now.iter().flatten().all(known) {
            return Err(Error::usage("Ema", "these are not the parameters of the optimizer it was made for"));
        }
        let mut moved = Vec::with_capacity(params.len());
        for params in params {
            let layout = params.layout().with_dtype(params.working());
            let mut average = Flat::zeros_for(params.runtime(), MemoryCategory::Optimizer, layout)?;
            for (i, (p, k)) in params.leaves().iter().enumerate().filter_map(|(i, l)| Some((i, *old.get(&l.id())?))) {
                average.overwrite(i, &self.averages[p].tensor(k)?)?;
            }
            moved.push(average);
        }
        (self.averages, self.leaves) = (moved, now);
        Ok(())
    }

    /// The averages as values of the parameters, without a copy if the dtypes agree.
    pub fn weights(&self) -> Result<EvaluationWeights<R>> {
        let mut values = Vec::new();
        for (average, of) in self.averages.iter().zip(&self.leaves) {
            for (i, leaf) in of.iter().enumerate() {
                values.push((leaf.clone(), average.tensor(i)?));
            }
        }
        EvaluationWeights::new(values)
    }

    /// Sets the parameters to the averages, without a copy if the dtypes agree. Until [`swap_out`](Ema::swap_out)
    /// neither the optimizer nor the averages can be updated.
    #[track_caller]
    pub fn swap_in(&mut self) -> Result<()> {
        self.require_out("swap_in")?;
        self.own = Some(self.weights()?.exchange()?);
        Ok(())
    }

    /// Restores the parameters' own values.
    #[track_caller]
    pub fn swap_out(&mut self) -> Result<()> {
        match self.own.take() {
            Some(own) => own.exchange().map(|_| ()),
            None => Err(Error::usage("Ema::swap_out", "the averages are not in the parameters; call `swap_in` first"))
                .at_caller(),
        }
    }

    /// Runs `f` with the averages as the parameters' values.
    pub fn averaged<T>(&mut self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        self.swap_in()?;
        let result = f();
        self.swap_out()?;
        result
    }

    /// The averages as `ema.<parameter>`, and the count of updates. They are views, to be dropped before the next
    /// update.
    #[track_caller]
    pub fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>> {
        let mut state = Vec::new();
        for (average, of) in self.averages.iter().zip(&self.leaves) {
            for (i, leaf) in of.iter().enumerate() {
                state.push((entry(leaf), average.tensor(i)?));
            }
        }
        if let Some(average) = self.averages.first() {
            state.push(("ema_updates".into(), Tensor::from_slice(average.runtime(), [], &[self.updates as i64])?));
        }
        Ok(state)
    }

    /// Loads a state that [`state_dict`](Ema::state_dict) returned.
    ///
    /// # Errors
    /// An error if an entry is missing or unexpected, or does not fit. Nothing changes then.
    #[track_caller]
    pub fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.require_out("load_state_dict")?;
        let mut reader = crate::state::StateReader::new(state);
        let mut values = Vec::new();
        for (p, (average, of)) in self.averages.iter().zip(&self.leaves).enumerate() {
            for (i, leaf) in of.iter().enumerate() {
                let spec = numcore::ops::Spec { shape: leaf.spec().shape, dtype: average.layout().dtype() };
                values.extend(reader.tensor(&entry(leaf), spec, average.runtime()).map(|t| (p, i, t)));
            }
        }
        let updates = if self.averages.is_empty() { 0 } else { reader.count("ema_updates") };
        reader.finish("Ema").at_caller()?;
        self.averages.iter_mut().try_for_each(crate::params::require_sole)?;
        values.into_iter().try_for_each(|(p, i, t)| self.averages[p].overwrite(i, t))?;
        self.updates = updates;
        Ok(())
    }

    #[track_caller]
    fn require_out(&self, op: &'static str) -> Result<()> {
        match self.own {
            None => Ok(()),
            Some(_) => {
                Err(Error::usage("Ema", format!("{op}: the averages are in the parameters; call `swap_out` first")))
                    .at_caller()
            }
        }
    }
}

/// The location of the average of each parameter of buffer `p`.
fn places<R: Runtime>((p, of): (usize, &Vec<Arc<Leaf<R>>>)) -> Vec<(usize, (usize, usize))> {
    of.iter().enumerate().map(|(i, leaf)| (leaf.id(), (p, i))).collect()
}

fn entry<R: Runtime>(leaf: &Leaf<R>) -> String {
    format!("ema.{}", leaf.name())
}

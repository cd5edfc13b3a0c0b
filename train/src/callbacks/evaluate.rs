//! Evaluation on data that is not trained on.

mod counted_metric;

use autograd::no_grad;
use data::{Batch, Loader, State};
use distributed::{
    combinations::Feature,
    comm::{Collectives, Communicator},
    strategy::BatchShare,
    train::{Loss, WeightedSum},
};
use nn::{Module, set_counted_rows};
use numcore::{Error, Result, Runtime};

use self::counted_metric::{CountedMetric, MetricWithUpdate};
use crate::{
    Callback, CallbackState, Event, Interval, Run, StopReason, metrics::Metric, modes::Modes, padding::counted, scalars,
};

/// The function that computes a batch's outputs.
type Predict<'e, M, B, O> = Box<dyn FnMut(&M, &Batch<B>) -> Result<O> + 'e>;
/// The function that returns sum and weight of a measurement of a batch's outputs.
type Measure<'e, B, O> = Box<dyn FnMut(&O, &Batch<B>) -> Result<(f64, f64)> + 'e>;

/// Evaluates the model on other data: the mean of the training loss over it, and other measurements. Sums and weights
/// are added up in `f64` over batches and ranks, and divided once. With [`Loss::sum`](distributed::train::Loss::sum)
/// every example counts once, whatever the number of ranks. A [`Loss::mean`](distributed::train::Loss::mean) weighs 1,
/// however many examples it is the mean of, so its value is the mean of the means of batches and shares.
///
/// The model is in evaluation mode, no gradients are recorded, and training goes on with the random values it would
/// have had. Names of values begin with the evaluation's name: `validation/loss`.
///
/// The model runs once in each batch: [`predict`](Evaluate::predict) computes the outputs for metrics, and for a [loss
/// of outputs](Evaluate::loss). The training loss runs it once more. Every row of a batch counts: padding rows are not
/// read (but by the stages of a pipeline). The prediction of a rank without an example is dropped.
///
/// ```
/// use train::{Evaluate, metrics::Accuracy};
/// # use autograd::Var;
/// # use data::{Array, Loader, Rows};
/// # use nn::{Forward, Init, Linear};
/// # use numcore::{DType, ops::{PointwiseOps, ViewOps}};
/// # use runtime_cpu::Cpu;
/// # fn main() -> numcore::Result<()> {
/// # let cpu = Cpu::with_threads(1);
/// # let loader = Loader::new(Rows::new(Array::new([8, 3], vec![0.5f32; 24])?)?).batch(4).stack().on(&cpu);
/// let evaluate = Evaluate::on(loader)
///     .predict(|model: &Linear<Cpu>, batch| model.forward(&Var::new(batch.data.narrow(1, 0, 2)?))?.value())
///     .metric("accuracy", Accuracy::new(), |accuracy, scores, batch| {
///         accuracy.update_tensors(scores, &batch.data.narrow(1, 2, 1)?.to_dtype(DType::I64)?.reshape([batch.rows])?)
///     })
///     .measure("largest", |scores, batch| {
///         let largest = scores.to_f64s()?.into_iter().fold(f64::MIN, f64::max);
///         Ok((largest * batch.rows as f64, batch.rows as f64))
///     });
/// # let _ = evaluate;
/// # Ok(())
/// # }
/// ```
pub struct Evaluate<'e, M, B, O = ()> {
    loader: Loader<B>,
    /// The prefix of the names of its values.
    prefix: String,
    /// The name of its state in checkpoints.
    name: String,
    every: Interval,
    at_start: bool,
    at_end: bool,
    batches: Option<u64>,
    loss: bool,
    predict: Predict<'e, M, B, O>,
    measures: Vec<(String, Measure<'e, B, O>)>,
    metrics: Vec<(String, Box<dyn CountedMetric<B, O> + 'e>)>,
    /// True if measurements were added before `predict`, which would lose them.
    is_misplaced: bool,
    is_due: bool,
    /// The step after which it ran last.
    ran_at: Option<u64>,
}

impl<'e, M, B: Send + 'static> Evaluate<'e, M, B> {
    /// Evaluates on the batches of epoch 0 of a loader, at the end of every epoch and at the end of the run. Its name
    /// is `validation`.
    pub fn on(loader: Loader<B>) -> Self {
        Evaluate {
            loader,
            prefix: "validation".into(),
            name: "evaluate validation".into(),
            every: Interval::Epochs(1.0),
            at_start: false,
            at_end: true,
            batches: None,
            loss: true,
            predict: Box::new(|_, _| Ok(())),
            measures: Vec::new(),
            metrics: Vec::new(),
            is_misplaced: false,
            is_due: false,
            ran_at: None,
        }
    }
}

impl<'e, M, B: Send + 'static, O> Evaluate<'e, M, B, O> {
    /// Sets the function that computes each batch's outputs, once, for all measurements that are added after this call.
    /// Every rank calls it equally often.
    pub fn predict<P>(self, predict: impl FnMut(&M, &Batch<B>) -> Result<P> + 'e) -> Evaluate<'e, M, B, P> {
        let is_misplaced = self.has_measurements();
        let Evaluate { loader, prefix, name, every, at_start, at_end, batches, loss, is_due, ran_at, .. } = self;
        let (predict, measures, metrics) = (Box::new(predict), Vec::new(), Vec::new());
        Evaluate {
            loader,
            prefix,
            name,
            every,
            at_start,
            at_end,
            batches,
            loss,
            predict,
            measures,
            metrics,
            is_misplaced,
            is_due,
            ran_at,
        }
    }

    /// Tells whether anything but the loss is measured.
    fn has_measurements(&self) -> bool {
        !(self.measures.is_empty() && self.metrics.is_empty())
    }

    /// Sets the prefix of the names of its values.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.prefix = name.into();
        self.name = format!("evaluate {}", self.prefix);
        self
    }

    /// Sets the interval of evaluations.
    pub fn every(mut self, interval: Interval) -> Self {
        self.every = interval;
        self
    }

    /// Evaluates before the first step too.
    pub fn at_start(mut self) -> Self {
        self.at_start = true;
        self
    }

    /// Leaves out the evaluation when the run ends. Otherwise there is one then, unless it has just run.
    pub fn skip_end(mut self) -> Self {
        self.at_end = false;
        self
    }

    /// Sets the largest number of batches.
    pub fn limit_batches(mut self, batches: u64) -> Self {
        self.batches = Some(batches);
        self
    }

    /// Adds a measurement of the [outputs](Evaluate::predict) of each batch, which returns a sum and the weight it is
    /// the sum over.
    pub fn measure(
        mut self,
        name: impl Into<String>,
        measure: impl FnMut(&O, &Batch<B>) -> Result<(f64, f64)> + 'e,
    ) -> Self {
        self.measures.push((name.into(), Box::new(measure)));
        self
    }

    /// Adds a [metric](crate::metrics) of the [outputs](Evaluate::predict) over all batches and ranks: accuracy, F1,
    /// the area under a curve. A metric without a value is left out.
    pub fn metric<X: Metric + Clone + 'e>(
        mut self,
        name: impl Into<String>,
        metric: X,
        update: impl FnMut(&mut X, &O, &Batch<B>) -> Result<()> + 'e,
    ) -> Self {
        self.metrics.push((name.into(), Box::new(MetricWithUpdate { metric, update })));
        self
    }

    /// Measures a loss of the [outputs](Evaluate::predict) in place of the training loss, which runs the model again.
    pub fn loss<R: Runtime>(self, mut loss: impl FnMut(&O, &Batch<B>) -> Result<Loss<R>> + 'e) -> Self {
        self.without_loss().measure("loss", move |outputs, batch| {
            let loss = loss(outputs, batch)?;
            Ok((loss.total().item()?, loss.weight()))
        })
    }

    /// Leaves the training loss out: for data that does not fit the loss function.
    pub fn without_loss(mut self) -> Self {
        self.loss = false;
        self
    }

    /// Requests this evaluation alone.
    fn request<R: Runtime>(&mut self, run: &mut Run<'_, R, M, B>) {
        self.is_due = true;
        run.control().evaluate_due();
    }

    /// The description of the data, which must be equal on all ranks.
    fn data(&self) -> Result<String> {
        Ok(format!("{} {} {:?}", self.loader.note(State::default()), self.loader.steps()?, self.batches))
    }

    fn run<R: Runtime>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<()>
    where
        M: Module<R>,
    {
        self.metrics.iter_mut().for_each(|(_, metric)| metric.reset());
        let modes = Modes::evaluating(run.model());
        let measured = scalars::capture(|| self.sums(run));
        set_counted_rows(None);
        modes.restore(run.model());
        let (mut sums, mut recorded) = measured?;
        if !run.engine.ranks().counts_examples {
            sums.iter_mut().flatten().for_each(|sum| *sum = (0.0, 0.0));
            self.metrics.iter_mut().for_each(|(_, metric)| metric.reset());
            recorded.clear();
        }
        // A signal does not wait for the rest: the evaluation runs from its beginning when the run is resumed.
        self.is_due = sums.is_none();
        let Some(sums) = sums else {
            run.control().interrupt();
            return Ok(());
        };
        run.evaluation_ran(&self.prefix);
        self.ran_at = Some(run.progress().step);
        let mut all = sum_over_ranks(run, &sums)?;
        let examples = all.pop().map_or(0.0, |(examples, _)| examples);
        if examples == 0.0 || self.loss && all[0].1 == 0.0 {
            let name = if examples == 0.0 { "number of examples" } else { "weight of all losses" };
            let allowed = format!("above 0: `{}` has seen {examples} examples, and has no mean", self.prefix);
            return Err(Error::range("Evaluate", name, 0.0, allowed));
        }
        let recorded = recorded.means(run.comm())?;
        let names = self.loss.then_some("loss").into_iter().chain(self.measures.iter().map(|(name, _)| &**name));
        // A measurement of weight 0 has no mean, and is left out.
        let means = names
            .zip(all)
            .filter(|(_, (_, weight))| *weight != 0.0)
            .map(|(name, (sum, w))| (name.to_string(), sum / w));
        for (name, value) in means.chain(recorded).collect::<Vec<_>>() {
            run.evaluation_value(&format!("{}/{name}", self.prefix), value);
        }
        for (name, metric) in &self.metrics {
            let all = run.comm().exchange(&metric.counted())?;
            if let Some(value) = metric.value_of(&all)? {
                run.evaluation_value(&format!("{}/{name}", self.prefix), value);
            }
        }
        Ok(())
    }

    /// The names of its values, except recorded scalars.
    fn names(&self) -> Vec<String> {
        let metrics = self.metrics.iter().map(|(name, _)| &**name);
        let measures = self.measures.iter().map(|(name, _)| &**name).chain(metrics);
        self.loss.then_some("loss").into_iter().chain(measures).map(|name| format!("{}/{name}", self.prefix)).collect()
    }

    /// This rank's sums and weights: of the loss, unless it is left out, and of the measurements; and the number of
    /// examples. None if a signal came before the last batch.
    fn sums<R: Runtime>(&mut self, run: &mut Run<'_, R, M, B>) -> Result<Option<Vec<(f64, f64)>>> {
        let BatchShare { index, of } = run.engine.ranks().share;
        let most = if run.is_fast_dev_run() { Some(1) } else { self.batches };
        let mut sums = vec![(0.0, 0.0); usize::from(self.loss) + self.measures.len()];
        let mut examples = 0.0;
        // Stages take micro-batches of one shape.
        let keeps_padding = run.features().has(Feature::Pipeline) && !self.has_measurements();
        let loader = if keeps_padding { self.loader.clone() } else { self.loader.clone().unpadded() };
        let batches = loader.rank(index, of).epoch(0)?;
        for batch in batches.take(most.map_or(usize::MAX, |n| n as usize)) {
            if run.is_interrupted()? {
                return Ok(None);
            }
            let (batch, mut sums) = (batch?, sums.iter_mut());
            examples += batch.count as f64;
            scalars::set_weight(batch.count as f64);
            set_counted_rows(counted(&batch));
            let mut add = |(sum, weight): (f64, f64)| {
                if let Some(all) = sums.next() {
                    *all = (all.0 + sum, all.1 + weight);
                }
            };
            if self.loss {
                let WeightedSum { sum, weight } = run.engine.evaluate(run.model, &batch)?;
                add((sum, weight));
            }
            if self.has_measurements() {
                no_grad(|| self.measure_batch(run.model, &batch, &mut add))?;
            }
        }
        sums.push((examples, 1.0));
        Ok(Some(sums))
    }

    /// Runs the model on a batch, for all measurements but the loss; `add` receives sums and weights. A share without
    /// examples is predicted, too: sharded parameters need this rank's forward pass.
    fn measure_batch(&mut self, model: &M, batch: &Batch<B>, add: &mut dyn FnMut((f64, f64))) -> Result<()> {
        let outputs = (self.predict)(model, batch)?;
        if batch.count == 0 {
            return Ok(());
        }
        for (_, measure) in &mut self.measures {
            add(measure(&outputs, batch)?);
        }
        self.metrics.iter_mut().try_for_each(|(_, metric)| metric.update(&outputs, batch))
    }
}

/// The sums and weights of all ranks, added up in their order.
fn sum_over_ranks<R: Runtime, M, B>(run: &Run<'_, R, M, B>, own: &[(f64, f64)]) -> Result<Vec<(f64, f64)>> {
    if run.comm().size() == 1 {
        return Ok(own.to_vec());
    }
    let bytes: Vec<u8> = own.iter().flat_map(|(s, w)| [s.to_le_bytes(), w.to_le_bytes()].concat()).collect();
    let mut all = vec![(0.0, 0.0); own.len()];
    for bytes in run.comm().exchange(&bytes)? {
        let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|number| f64::from_le_bytes(*number)).collect();
        for (all, own) in all.iter_mut().zip(numbers.chunks_exact(2)) {
            *all = (all.0 + own[0], all.1 + own[1]);
        }
    }
    Ok(all)
}

impl<R: Runtime, M: Module<R>, B: Send + 'static, O> Callback<R, M, B> for Evaluate<'_, M, B, O> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let ran = self.ran_at == Some(run.progress().step);
        match event {
            Event::Begin => {
                if run.state.to_come.contains_key(&self.prefix) {
                    let why = format!("two evaluations are called `{}`: give one of them another name", self.prefix);
                    return Err(Error::config("Evaluate", "name", why));
                }
                run.declare_evaluation(&self.prefix, self.names());
                run.comm().agree(&format!("the data of `{}`", self.prefix), self.data()?.as_bytes())?;
                // It is due, too, in a resumed run that was interrupted before it ran.
                if self.is_due || self.at_start && run.resumed().is_none() {
                    self.request(run);
                }
                Ok(())
            }
            Event::StepEnd(_) | Event::Skipped if run.is_due(&self.every) => {
                self.request(run);
                Ok(())
            }
            // After a signal the checkpoint comes first.
            Event::Ending(reason) if self.at_end && !ran && **reason != StopReason::Interrupted => {
                self.request(run);
                Ok(())
            }
            // The resumed run will have no step left, so the evaluation at its end is noted: it runs first then.
            Event::Ending(StopReason::Interrupted) if self.at_end && !ran => {
                self.is_due |= run.length().is_reached(run.progress());
                Ok(())
            }
            Event::WentBack => {
                (self.ran_at, self.is_due) = (None, false);
                Ok(())
            }
            Event::Evaluate { all } if *all || self.is_due => self.run(run),
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn state(&self) -> CallbackState {
        if self.is_due { CallbackState::from([("is_due".into(), String::new())]) } else { CallbackState::new() }
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.is_due = state.contains_key("is_due");
        Ok(())
    }

    fn counts_tokens(&self) -> bool {
        self.every.counts_tokens()
    }

    fn check(&self) -> Result<()> {
        if self.is_misplaced {
            let why = "measurements get the outputs of the `predict` before them: call `predict` first";
            return Err(Error::config("Evaluate", "predict", why));
        }
        self.every.check("Evaluate")
    }
}

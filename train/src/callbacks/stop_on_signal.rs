//! Ending a run on a signal.

use numcore::{Result, Runtime};

use crate::{
    Callback, Event, Run,
    interrupt::{self, SignalListener},
};

/// Ends a run after its current step on SIGTERM or SIGINT (Ctrl-C): for runs that save nothing.
/// [`Checkpoints`](crate::Checkpoints) do so by themselves, and save.
///
/// The run ends with [`StopReason::Interrupted`](crate::StopReason::Interrupted), on all ranks at one step. A second
/// signal, a second later or more, ends the process at once, with status 130 (SIGINT) or 143 (SIGTERM). SIGHUP is left
/// alone: it ends a process, or is ignored under `nohup`.
///
/// ```
/// # use data::{Array, Loader, Rows};
/// # use distributed::{comm::NoOpCommunicator, train::{Loss, TrainStep}};
/// # use nn::{Forward, Init, Linear};
/// # use optim::AdamWConfig;
/// # use autograd::Var;
/// # use numcore::ops::ReduceOps;
/// use train::{StopOnSignal, StopReason, Trainer};
/// # fn main() -> numcore::Result<()> {
/// # let cpu = runtime_cpu::Cpu::with_threads(1);
/// # let model = Linear::new(&Init::new(&cpu, 0), 2, 1)?;
/// # let step = TrainStep::builder(&NoOpCommunicator::new(&cpu), &model).optimizer(AdamWConfig::default()).build()?;
/// # let loader = Loader::new(Rows::new(Array::new([8, 2], vec![0.5f32; 16])?)?).batch(4).stack().on(&cpu);
/// # let loss = |model: &Linear<_>, batch: &data::Batch<numcore::Tensor<_>>| {
/// #     Loss::sum(model.forward(&Var::new(batch.data.clone()))?.sum_all()?, batch.count as f64)
/// # };
/// let report = Trainer::new(&model, step, loader).with(StopOnSignal::new()).run(loss)?;
/// assert_eq!(report.reason, StopReason::Finished); // there was no signal
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct StopOnSignal {
    listening: Option<SignalListener>,
}

impl StopOnSignal {
    /// Listens for signals while a run lasts.
    pub fn new() -> Self {
        StopOnSignal::default()
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for StopOnSignal {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin => self.listening = Some(SignalListener::start()?),
            Event::StepEnd(_) if interrupt::is_signaled() => run.control().interrupt(),
            Event::End(_) => self.listening = None,
            _ => {}
        }
        Ok(())
    }
}

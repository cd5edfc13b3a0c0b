//! One run on one rank: its row, action by action. The executor depends on the actions alone, not on the kind of
//! schedule.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use autograd::{Deferred, RandomState, Var};
use nn::CountedRows;
use numcore::{
    Result, Runtime, Tensor,
    trace::{self, SpanKind},
};

use super::{
    LossFn, MicroBatches, PipelineOptions, PipelineOutput, Stage, StageHooks, boundary::Boundaries,
    transfers::Transfers,
};
use crate::{
    comm::{Collectives, Comm},
    loss::Loss,
    pipeline::{
        Action, Checked, Compute, Direction, End, Message, Pass, PassInput, Schedule, TimelineEvent, UnitAction, UnitOp,
    },
};

/// A schedule with the state that lasts between its runs.
pub(super) struct RunPlan {
    pub(super) checked: Arc<Checked>,
    pub(super) boundaries: Boundaries,
}

impl RunPlan {
    pub(super) fn new(checked: Checked) -> Self {
        RunPlan { checked: Arc::new(checked), boundaries: Boundaries::default() }
    }
}

/// The inputs of a run.
pub(super) struct RunInputs<'a, R: Runtime> {
    pub(super) comm: Comm<R>,
    pub(super) plan: &'a mut RunPlan,
    pub(super) stages: &'a BTreeMap<usize, Box<dyn Stage<R>>>,
    pub(super) loss: Option<&'a mut LossFn<R>>,
    pub(super) hooks: &'a mut dyn StageHooks<R>,
    pub(super) batch: MicroBatches<R>,
    pub(super) options: PipelineOptions,
    /// The gradient from which the backward pass of every loss starts.
    pub(super) seed: f64,
    /// The counted rows of all micro-batches together, if other rows only fill them up.
    pub(super) counted: Option<CountedRows>,
    /// The state from which the run's random numbers start. `None` leaves the thread's stream alone.
    pub(super) random: Option<RandomState>,
}

/// The state of a stage for a micro-batch between its passes.
pub(super) enum Live<R: Runtime> {
    /// From F to B or I: the roots of the backward pass, and the inputs that it is to reach.
    Forward { inputs: Vec<Var<R>>, roots: Vec<Var<R>> },
    /// From I to W; none if no gradient reached the stage.
    Weights(Option<Box<Deferred<R>>>),
}

/// A message to a stage, sent or waiting: direction, stage and micro-batch of inputs, or of gradients of outputs.
pub(super) type MessageSlot = (Direction, usize, usize);

/// A run in progress.
pub(super) struct ScheduleRun<'a, R: Runtime> {
    pub(super) job: RunInputs<'a, R>,
    pub(super) checked: Arc<Checked>,
    transfers: Transfers<R>,
    /// Received values and gradients that this rank's stages will read.
    pub(super) inbox: BTreeMap<MessageSlot, Vec<Tensor<R>>>,
    /// Values and gradients for stages on other ranks.
    outbox: BTreeMap<Message, Vec<Tensor<R>>>,
    pub(super) live: BTreeMap<(usize, usize), Live<R>>,
    /// The last weight gradient of each stage.
    pub(super) last: BTreeMap<usize, Compute>,
    /// Losses, by micro-batch.
    pub(super) losses: BTreeMap<usize, Loss<R>>,
    pub(super) outputs: BTreeMap<usize, Vec<Tensor<R>>>,
    pub(super) input_gradients: BTreeMap<usize, Vec<Tensor<R>>>,
    peak_live: usize,
    /// The current action.
    pub(super) at: Option<Action>,
    clock: Option<ActionClock>,
}

impl<'a, R: Runtime> ScheduleRun<'a, R> {
    pub(super) fn new(job: RunInputs<'a, R>) -> Result<Self> {
        let checked = job.plan.checked.clone();
        let row = checked.row(job.comm.rank());
        let transfers = Transfers::new(&job.comm, row, checked.schedule().placement());
        let clock = job.options.measured.then(|| ActionClock::start(&job.comm)).transpose()?;
        let weights = row.iter().flat_map(Action::computes).filter(|compute| compute.pass.makes_weight_gradient());
        let last = weights.map(|compute| (compute.stage, compute)).collect();
        let (losses, outputs, input_gradients) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (inbox, outbox, live) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (peak_live, at) = (0, None);
        Ok(ScheduleRun {
            job,
            checked,
            transfers,
            inbox,
            outbox,
            live,
            last,
            losses,
            outputs,
            input_gradients,
            peak_live,
            at,
            clock,
        })
    }

    pub(super) fn run(&mut self) -> Result<()> {
        self.transfers.begin(&self.job.plan.boundaries)?;
        let checked = self.checked.clone();
        for &action in checked.row(self.job.comm.rank()) {
            self.at = Some(action);
            for compute in action.computes() {
                self.fetch(compute)?;
            }
            let start = self.clock.as_ref().map_or(0, ActionClock::now);
            let traced = trace::is_recorded(SpanKind::Phase).then(trace::now);
            self.act(action)?;
            if let Some(start) = traced {
                trace::ended(SpanKind::Phase, "action", Some(&action.to_string()), start, 0);
            }
            if let Some(clock) = &mut self.clock {
                clock.note(action, start, self.job.comm.runtime())?;
            }
        }
        self.at = None;
        self.transfers.finish()
    }

    pub(super) fn into_output(self) -> PipelineOutput<R> {
        PipelineOutput {
            losses: self.losses.into_values().collect(),
            outputs: self.outputs.into_values().collect(),
            input_gradients: self.input_gradients.into_values().collect(),
            peak_live: self.peak_live,
            events: self.clock.map_or(Vec::new(), |clock| clock.events),
        }
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Compute(compute) => self.pass(compute),
            // A simulation counts them so too: for a moment the activations of both are in memory.
            Action::Overlap(forward, backward) => {
                self.pass(forward)?;
                self.pass(backward)
            }
            Action::Message(message) => self.message(message),
            Action::Unit(UnitAction { stage, op }) => match op {
                UnitOp::Unshard => self.job.hooks.unshard(stage),
                UnitOp::Reshard => self.job.hooks.reshard(stage),
                UnitOp::ReduceGrad => self.job.hooks.reduce_grad(stage),
            },
        }
    }

    fn pass(&mut self, compute: Compute) -> Result<()> {
        match compute.pass {
            Pass::F => self.forward(compute)?,
            Pass::B | Pass::I => self.backward(compute)?,
            Pass::W => self.weights(compute)?,
        }
        // An evaluation keeps nothing, but the values of the current pass are in memory.
        let working = usize::from(compute.pass == Pass::F && self.checked.is_forward_only());
        self.peak_live = self.peak_live.max(self.live.len() + working);
        Ok(())
    }

    /// Waits for the values that a pass reads.
    fn fetch(&mut self, compute: Compute) -> Result<()> {
        let PassInput::Received(recv) = self.schedule().input(compute) else { return Ok(()) };
        if let Some(from) = self.other(recv) {
            let arrived = self.transfers.take(recv, from)?;
            self.inbox.insert((recv.direction, recv.stage, recv.micro), arrived);
        }
        Ok(())
    }

    fn message(&mut self, message: Message) -> Result<()> {
        let Some(other) = self.other(message) else { return Ok(()) };
        if message.end == End::Recv {
            return self.transfers.expect(message, other, &mut self.job.plan.boundaries);
        }
        let tensors = self.outbox.remove(&message).unwrap_or_default();
        if message.direction == Direction::Forward
            && let Some(boundary) = self.job.plan.boundaries.announce(message.stage, message.micro)
        {
            self.transfers.send_header(boundary, other)?;
        }
        self.transfers.send(&tensors, other)
    }

    /// Hands on the output of a pass: to a later send, or to the neighbouring stage if it is on this rank.
    pub(super) fn give(&mut self, compute: Compute, made: Vec<Tensor<R>>) {
        let neighbour = compute.send(self.schedule().stages()).and_then(|send| send.peer());
        match (self.schedule().output(compute), neighbour) {
            (Some(send), _) => _ = self.outbox.insert(send, made),
            (None, Some(here)) => _ = self.inbox.insert((here.direction, here.stage, here.micro), made),
            (None, None) => {}
        }
    }

    pub(super) fn schedule(&self) -> &Schedule {
        self.checked.schedule()
    }

    /// The rank at the other end of a message.
    fn other(&self, message: Message) -> Option<usize> {
        self.schedule().placement().rank_of(message.peer()?.stage)
    }
}

/// Measures actions, from a moment that all ranks have in common.
struct ActionClock {
    origin: Instant,
    events: Vec<TimelineEvent>,
}

impl ActionClock {
    fn start<R: Runtime>(comm: &Comm<R>) -> Result<Self> {
        comm.barrier()?;
        Ok(ActionClock { origin: Instant::now(), events: Vec::new() })
    }

    /// Nanoseconds since the origin.
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Records an action, which ends when the device has finished it.
    fn note<R: Runtime>(&mut self, action: Action, start: u64, rt: &R) -> Result<()> {
        if action.is_compute() {
            rt.synchronize()?;
        }
        self.events.push(TimelineEvent { action, start, end: self.now() });
        Ok(())
    }
}

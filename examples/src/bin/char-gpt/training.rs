//! A run in progress: the model, its optimizer, and what was measured.

use std::time::Instant;

use weftgrad::{
    AnyRuntime,
    nn::Gpt,
    optim::{AdamW, AdamWConfig, NormOrder, Optimizer, clip_grad_norm, split_decay},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    budget::Budget,
    progress::Progress,
    stop::Stop,
    text::{Batch, Corpus, Part},
};

use crate::command::Settings;

/// Batches that the validation loss is the mean of.
const VALIDATION_BATCHES: usize = 20;
/// Steps between validations.
const VALIDATE_EVERY: u64 = 100;

/// A run in progress.
pub struct Training<'a> {
    /// Where it runs.
    pub rt: &'a AnyRuntime,
    /// What it is.
    pub settings: Settings,
    /// How long it trains.
    pub budget: Budget,
    /// The model.
    pub model: Gpt<AnyRuntime>,
    /// Its optimizer.
    pub optimizer: AdamW<AnyRuntime>,
    /// Steps taken.
    pub step: u64,
    /// Seconds they took.
    pub elapsed: f64,
    /// `(step, training loss)`.
    pub losses: Vec<(f64, f64)>,
    /// `(step, validation loss)`.
    pub validation: Vec<(f64, f64)>,
    train: &'a [i64],
    held_out: &'a [i64],
}

impl<'a> Training<'a> {
    /// A run at its beginning.
    pub fn new(rt: &'a AnyRuntime, settings: Settings, budget: Budget, corpus: &'a Corpus) -> Outcome<Self> {
        let model = Gpt::new(&weftgrad::nn::Init::new(rt, settings.seed), settings.model)?;
        model.to_dtype(settings.dtype)?;
        let (decayed, others) = split_decay(model.parameters().iter().map(|p| p.leaf()));
        let config = AdamWConfig { lr: settings.lr, betas: [0.9, 0.99], weight_decay: 0.1, ..Default::default() };
        let optimizer = AdamW::in_groups(config)
            .group(decayed, |_| {})?
            .group(others, |c| c.weight_decay = 0.0)?
            .scheduled(budget.schedule());
        let context = settings.model.context;
        Ok(Training {
            rt,
            model,
            optimizer,
            budget,
            step: 0,
            elapsed: 0.0,
            losses: Vec::new(),
            validation: Vec::new(),
            train: corpus.part(Part::Train, context)?,
            held_out: corpus.part(Part::Validation, context)?,
            settings,
        })
    }

    /// The run in a line.
    pub fn describe(&self) -> String {
        let m = &self.settings.model;
        format!(
            "GPT of {} parameters ({}): {} layers × {}, {} heads; batches of {} × {}; vocabulary {}; {} characters to train on",
            self.model.num_parameters().total,
            self.settings.dtype,
            m.layers,
            m.width,
            m.heads,
            self.settings.batch,
            m.context,
            m.vocab,
            self.train.len(),
        )
    }

    /// Trains to the end; false if it was stopped before.
    pub fn run(&mut self, stop: &Stop) -> Outcome<bool> {
        let per_step = self.settings.batch * self.settings.model.context;
        let progress = Progress::new(self.step, per_step, "characters");
        let (begun, before) = (Instant::now(), self.elapsed);
        while !self.is_done() && !stop.requested() {
            let loss = self.one_step()?;
            if !loss.is_finite() {
                return Err(format!("the loss is {loss} at step {}; a lower --lr may help", self.step).into());
            }
            self.step += 1;
            self.losses.push((self.step as f64, loss));
            self.elapsed = before + begun.elapsed().as_secs_f64();
            progress.step(self.step, self.budget.estimate(self.step, self.elapsed), loss);
            if let Some(total) = self.budget.choose(self.step, self.elapsed) {
                progress.say(&format!("step {}: {total} steps fit; --steps {total} repeats this run", self.step));
            }
            if self.step.is_multiple_of(VALIDATE_EVERY) {
                let loss = self.validate()?;
                self.validation.push((self.step as f64, loss));
                progress.say(&format!("step {}: validation loss {loss:.4}", self.step));
            }
        }
        progress.finish();
        Ok(self.is_done())
    }

    fn is_done(&self) -> bool {
        self.budget.total().is_some_and(|total| self.step >= total)
    }

    fn one_step(&mut self) -> weftgrad::Result<f64> {
        let Settings { batch, model, seed, .. } = self.settings;
        let batch = Batch::random(self.rt, self.train, batch, model.context, seed, self.step)?;
        let loss = self.loss(&batch)?;
        self.optimizer.backward(&loss)?;
        clip_grad_norm(self.optimizer.gradients()?, 1.0, NormOrder::L2)?;
        self.optimizer.step()?;
        loss.item()
    }

    fn loss(&self, batch: &Batch) -> weftgrad::Result<Var<AnyRuntime>> {
        let logits = self.model.forward(&batch.x)?;
        let vocab = self.settings.model.vocab;
        let rows = logits.reshape([logits.spec().shape.numel() / vocab, vocab])?;
        rows.to_dtype(rows.dtype().compute())?.cross_entropy(&batch.y)
    }

    /// The mean loss over batches spread evenly over the text that is not trained on.
    pub fn validate(&self) -> weftgrad::Result<f64> {
        let Settings { batch, model, .. } = self.settings;
        let last = self.held_out.len() - model.context - 1;
        let places = VALIDATION_BATCHES * batch;
        let starts: Vec<usize> = (0..places).map(|i| i * last / places).collect();
        self.model.eval();
        let total = no_grad(|| {
            starts.chunks(batch).try_fold(0.0, |sum, starts| {
                let batch = Batch::at(self.rt, self.held_out, starts, model.context)?;
                Ok::<_, weftgrad::Error>(sum + self.loss(&batch)?.item()?)
            })
        });
        self.model.train();
        Ok(total? / VALIDATION_BATCHES as f64)
    }
}

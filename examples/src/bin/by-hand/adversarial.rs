//! A generative adversarial network: a generator learns a distribution of numbers from a discriminator. Two models with
//! two optimizers step in turn.

use weftgrad::{
    AnyRuntime,
    autograd::backward,
    distributed::{
        comm::{Comm, Communicator},
        compat::Ddp,
    },
    nn::{Init, Linear},
    optim::{AdamW, AdamWConfig, Optimizer},
    prelude::*,
};

use crate::{BATCH, mean, share};

const NOISE: usize = 4;

#[derive(Module)]
struct Net<R: Runtime> {
    hidden: Linear<R>,
    out: Linear<R>,
}

impl<R: Runtime> Net<R> {
    fn new(init: &Init<R>, inputs: usize) -> Result<Self> {
        Ok(Net { hidden: Linear::new(init, inputs, 32)?, out: Linear::new(init, 32, 1)? })
    }
}

impl<R: Runtime> Forward<R> for Net<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.out.forward(&self.hidden.forward(x)?.gelu()?)
    }
}

/// A model with its data-parallel wrapper and its optimizer.
struct Player {
    net: Net<AnyRuntime>,
    ddp: Ddp<AnyRuntime>,
    optimizer: AdamW<AnyRuntime>,
}

impl Player {
    fn new(comm: &Comm<AnyRuntime>, seed: u64, inputs: usize) -> Result<Self> {
        let net = Net::new(&Init::new(comm.runtime(), seed), inputs)?;
        let ddp = Ddp::new(comm, &net)?;
        ddp.sync_params()?;
        let optimizer = AdamW::new(&net, AdamWConfig { lr: 2e-3, betas: [0.5, 0.999], ..Default::default() })?;
        Ok(Player { net, ddp, optimizer })
    }

    /// Takes a step against the gradient of a mean over this rank's examples. Gradients of the other player are
    /// ignored.
    fn step(&mut self, loss: &Var<AnyRuntime>, counts: &[u64]) -> Result<()> {
        let mut gradients = backward(loss)?;
        self.ddp.weighted_all_reduce_gradients(&mut gradients, counts)?;
        self.optimizer.step_with(&gradients)
    }
}

/// The discriminator's loss for its answers to real or generated examples.
fn judged(answers: &Var<AnyRuntime>, real: bool) -> Result<Var<AnyRuntime>> {
    // -log sigmoid of the answer, or of its opposite.
    answers.mul(if real { 1.0 } else { -1.0 })?.log_sigmoid()?.neg()?.mean_all()
}

pub(crate) fn losses(comm: &Comm<AnyRuntime>, steps: usize) -> Result<Vec<f64>> {
    let mut generator = Player::new(comm, 1, NOISE)?;
    let mut discriminator = Player::new(comm, 2, 1)?;
    let rt = comm.runtime();
    (0..steps as u64)
        .map(|step| {
            let real = Tensor::normal(rt, [BATCH, 1], DType::F32, 3.0, 0.5, 2 * step)?;
            let noise = Tensor::normal(rt, [BATCH, NOISE], DType::F32, 0.0, 1.0, 2 * step + 1)?;
            let (real, counts) = share(comm, &real)?;
            let made = generator.net.forward(&share(comm, &noise)?.0)?;
            let answers = [discriminator.net.forward(&real)?, discriminator.net.forward(&made.detach())?];
            let loss = judged(&answers[0], true)?.add(&judged(&answers[1], false)?)?;
            discriminator.step(&loss, &counts)?;
            let fooled = judged(&discriminator.net.forward(&made)?, true)?;
            generator.step(&fooled, &counts)?;
            mean(comm, &loss, &counts)
        })
        .collect()
}

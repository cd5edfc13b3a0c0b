//! A model that grows: twice during training it gets another residual block. The optimizer and the data-parallel
//! wrapper are then new.

use weftgrad::{
    AnyRuntime,
    autograd::backward,
    distributed::{
        comm::{Comm, Communicator},
        compat::Ddp,
    },
    nn::{Init, Linear, loss::mse},
    optim::{AdamW, AdamWConfig, Optimizer},
    prelude::*,
};

use crate::{BATCH, mean, share};

const WIDTH: usize = 16;

#[derive(Module)]
struct Growing<R: Runtime> {
    first: Linear<R>,
    blocks: Vec<Linear<R>>,
    out: Linear<R>,
}

impl<R: Runtime> Growing<R> {
    fn new(init: &Init<R>) -> Result<Self> {
        Ok(Growing { first: Linear::new(init, 2, WIDTH)?, blocks: Vec::new(), out: Linear::new(init, WIDTH, 1)? })
    }

    /// Adds a block with small weights, so that the output changes little: mostly by the block's biases.
    fn grow(&mut self, init: &Init<R>) -> Result<()> {
        let block = Linear::new(init, WIDTH, WIDTH)?;
        block.weight.set(block.weight.value()?.mul(1e-2)?)?;
        self.blocks.push(block);
        Ok(())
    }
}

impl<R: Runtime> Forward<R> for Growing<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let first = self.first.forward(x)?.tanh()?;
        let grown = self.blocks.iter().try_fold(first, |x, block| block.forward(&x)?.tanh()?.add(&x))?;
        self.out.forward(&grown)
    }
}

/// The target `sin(3a) · b` of each row `(a, b)`.
fn target(x: &Var<AnyRuntime>) -> Result<Var<AnyRuntime>> {
    x.narrow(1, 0, 1)?.mul(3.0)?.sin()?.mul(&x.narrow(1, 1, 1)?)
}

pub(crate) fn losses(comm: &Comm<AnyRuntime>, steps: usize) -> Result<Vec<f64>> {
    let (rt, mut losses) = (comm.runtime(), Vec::with_capacity(steps));
    let mut model = Growing::new(&Init::new(rt, 1))?;
    for phase in 0..3 {
        if phase > 0 {
            // Every rank draws another block; `sync_params` then gives all ranks the block of rank 0.
            model.grow(&Init::new(rt, 10 + comm.rank() as u64))?;
        }
        let ddp = Ddp::new(comm, &model)?;
        ddp.sync_params()?;
        let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 5e-3, ..Default::default() })?;
        for step in phase * steps / 3..(phase + 1) * steps / 3 {
            let x = Tensor::uniform(rt, [BATCH, 2], DType::F32, -1.0, 1.0, step as u64)?;
            let (x, counts) = share(comm, &x)?;
            let loss = mse(&model.forward(&x)?, &target(&x)?, Default::default())?;
            let mut gradients = backward(&loss)?;
            ddp.weighted_all_reduce_gradients(&mut gradients, &counts)?;
            optimizer.step_with(&gradients)?;
            losses.push(mean(comm, &loss, &counts)?);
        }
    }
    Ok(losses)
}

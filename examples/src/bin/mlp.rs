//! Trains an MLP to classify points of two interleaved spirals.
#![forbid(unsafe_code)]

use weftgrad::{
    AnyRuntime,
    optim::{AdamW, AdamWConfig, Optimizer},
    prelude::*,
    rng::Philox,
};

/// A model is a struct, generic over the device it runs on.
#[derive(Module)]
struct Mlp<R: Runtime> {
    fc1: nn::Linear<R>,
    fc2: nn::Linear<R>,
    out: nn::Linear<R>,
}

impl<R: Runtime> Mlp<R> {
    fn new(init: &nn::Init<R>, width: usize) -> Result<Self> {
        Ok(Mlp {
            fc1: nn::Linear::new(init, 2, width)?,
            fc2: nn::Linear::new(init, width, width)?,
            out: nn::Linear::new(init, width, 2)?,
        })
    }
}

impl<R: Runtime> Forward<R> for Mlp<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.fc1.forward(x)?.gelu()?;
        self.out.forward(&self.fc2.forward(&x)?.gelu()?)
    }
}

/// Points `[N, 2]` on two spirals, and the spiral of each.
fn spirals(rt: &AnyRuntime, n: usize, seed: u64) -> Result<(Var<AnyRuntime>, Var<AnyRuntime>)> {
    let mut rng = Philox::new(seed, 0);
    let (mut points, mut arms) = (Vec::new(), Vec::new());
    for i in 0..n {
        let (arm, radius) = (i % 2, rng.uniform());
        let angle = 3.0 * std::f64::consts::PI * radius + std::f64::consts::PI * arm as f64 + 0.1 * rng.normal();
        points.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        arms.push(arm as i64);
    }
    Ok((Var::new(Tensor::from_slice(rt, [n, 2], &points)?), Var::new(Tensor::from_slice(rt, [n], &arms)?)))
}

fn accuracy(model: &Mlp<AnyRuntime>, x: &Var<AnyRuntime>, y: &Var<AnyRuntime>) -> Result<f64> {
    let hits = no_grad(|| model.forward(x)?.argmax(-1)?.eq(y))?;
    hits.to_dtype(DType::F32)?.mean_all()?.item()
}

fn main() -> Result<()> {
    let rt = weftgrad_examples::options::device("Learn which of two spirals a point belongs to")?;
    let (x, y) = spirals(&rt, 1000, 1)?;
    let model = Mlp::new(&nn::Init::new(&rt, 0), 64)?;
    println!("{}", model.summary());
    let config = AdamWConfig { lr: 5e-3, ..Default::default() };
    let mut optimizer = AdamW::new(&model, config)?;
    for step in 0..=300 {
        let loss = model.forward(&x)?.cross_entropy(&y)?;
        optimizer.backward(&loss)?;
        optimizer.step()?;
        if step % 50 == 0 {
            println!("step {step:3}: loss {:.4}", loss.item()?);
        }
    }
    let (x, y) = spirals(&rt, 1000, 2)?;
    println!("accuracy on new points: {:.1} %", 100.0 * accuracy(&model, &x, &y)?);
    Ok(())
}

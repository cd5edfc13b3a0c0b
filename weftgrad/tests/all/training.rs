//! What must hold of whole training runs: the same bits at any thread count, exact resumption, and memory that stays
//! flat.

use weftgrad::{
    optim::{AdamW, AdamWConfig, NormOrder, Optimizer, clip_grad_norm},
    prelude::*,
};

#[derive(Module)]
struct Net<R: Runtime> {
    conv: nn::Conv2d<R>,
    norm: nn::LayerNorm<R>,
    hidden: nn::Linear<R>,
    drop: nn::Dropout,
    out: nn::Linear<R>,
}

impl<R: Runtime> Net<R> {
    fn new(init: &nn::Init<R>) -> Result<Self> {
        Ok(Net {
            conv: nn::Conv2d::new(init, 1, 4, [3, 3], Default::default())?,
            norm: nn::LayerNorm::new(init, 4 * 36)?,
            hidden: nn::Linear::new(init, 4 * 36, 67)?,
            drop: nn::Dropout::new(0.1)?,
            out: nn::Linear::new(init, 67, 5)?,
        })
    }
}

impl<R: Runtime> Forward<R> for Net<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let x = self.norm.forward(&self.conv.forward(x)?.flatten(1, -1)?)?;
        self.out.forward(&self.drop.forward(&self.hidden.forward(&x)?.gelu()?)?)
    }
}

struct Run {
    cpu: Cpu,
    model: Net<Cpu>,
    optimizer: AdamW<Cpu>,
    x: Var<Cpu>,
    y: Var<Cpu>,
}

impl Run {
    fn new(threads: usize) -> Result<Run> {
        let cpu = Cpu::with_threads(threads);
        weftgrad::manual_seed(3);
        let model = Net::new(&nn::Init::new(&cpu, 1))?;
        let optimizer = AdamW::new(&model, AdamWConfig { lr: 1e-2, ..Default::default() })?;
        let x = Var::new(Tensor::normal(&cpu, [33, 1, 8, 8], DType::F32, 0.0, 1.0, 2)?);
        let y = Var::new(Tensor::from_vec(&cpu, (0..33).map(|i| i % 5).collect::<Vec<i64>>())?);
        Ok(Run { cpu, model, optimizer, x, y })
    }

    fn step(&mut self) -> Result<f64> {
        let loss = self.model.forward(&self.x)?.cross_entropy(&self.y)?;
        self.optimizer.backward(&loss)?;
        clip_grad_norm(self.optimizer.gradients()?, 1.0, NormOrder::L2)?;
        self.optimizer.step()?;
        loss.item()
    }

    fn steps(&mut self, n: usize) -> Result<Vec<f64>> {
        (0..n).map(|_| self.step()).collect()
    }

    fn weights(&self) -> Result<Vec<Vec<u8>>> {
        self.model.parameters().iter().map(|p| p.value()?.to_bytes()).collect()
    }
}

#[test]
fn the_same_bits_at_any_thread_count() -> Result<()> {
    let mut one = Run::new(1)?;
    let losses = one.steps(20)?;
    assert!(losses[19] < losses[0], "{losses:?}");
    for threads in [2, 3, 5] {
        let mut run = Run::new(threads)?;
        assert_eq!(run.steps(20)?, losses, "{threads} threads");
        assert_eq!(run.weights()?, one.weights()?, "{threads} threads");
    }
    Ok(())
}

#[test]
fn a_resumed_run_gives_the_same_bits() -> Result<()> {
    let mut whole = Run::new(2)?;
    let losses = whole.steps(14)?;

    let mut first = Run::new(2)?;
    first.steps(6)?;
    let random = weftgrad::random_state();
    let dir = std::env::temp_dir().join(format!("weftgrad-resume-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary folder");
    let file = dir.join("run.safetensors");
    let named =
        |p: &str, e: Vec<(String, Tensor<Cpu>)>| e.into_iter().map(|(n, t)| (format!("{p}{n}"), t)).collect::<Vec<_>>();
    let entries = [named("m.", first.model.state_dict()?), named("o.", first.optimizer.state_dict()?)].concat();
    weftgrad::safetensors::save(&file, &entries, &Default::default())?;
    drop((first, entries));

    let mut second = Run::new(2)?;
    let entries = weftgrad::safetensors::load(&file, &second.cpu)?;
    let under = |p: &str| -> Vec<(String, Tensor<Cpu>)> {
        entries.iter().filter_map(|(n, t)| Some((n.strip_prefix(p)?.to_owned(), t.clone()))).collect()
    };
    second.model.load_state_dict(under("m."))?;
    second.optimizer.load_state_dict(&under("o."))?;
    weftgrad::set_random_state(random);
    assert_eq!(second.steps(8)?, losses[6..]);
    assert_eq!(second.weights()?, whole.weights()?);
    std::fs::remove_dir_all(&dir).expect("the folder to go");
    Ok(())
}

#[test]
fn memory_is_flat_over_a_thousand_steps() -> Result<()> {
    let mut run = Run::new(2)?;
    run.steps(3)?;
    let warm = run.cpu.memory();
    for step in 0..1000 {
        run.step()?;
        let now = run.cpu.memory();
        assert_eq!((now.reserved, now.total.live), (warm.reserved, warm.total.live), "step {step}");
    }
    Ok(())
}

#[test]
fn graphs_that_never_run_backward_leave_nothing() -> Result<()> {
    let run = Run::new(1)?;
    let before = run.cpu.memory().total.live;
    for _ in 0..100 {
        drop(run.model.forward(&run.x)?);
    }
    assert_eq!(run.cpu.memory().total.live, before);
    Ok(())
}

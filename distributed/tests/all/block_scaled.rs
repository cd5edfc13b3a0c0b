//! Linear layers with 8-bit operands on many ranks: a step is that of one rank, if cuts are at multiples of a block.

use nn::{BlockScaling, Buffer, block_scaled};

use crate::{checkpoint_common::Scratch, prelude::*, tensor_layers::same_in};

/// The side of a block.
const SIDE: usize = 128;

#[derive(Module)]
#[module(crate = "::nn")]
struct Pair<R: Runtime> {
    up: Linear<R>,
    down: Linear<R>,
}

/// Two layers of which the hidden one has `hidden` channels.
fn pair(init: &Init<Cpu>, hidden: usize) -> Result<Pair<Cpu>> {
    let model = Pair { up: Linear::new(init, SIDE, hidden)?, down: Linear::new(init, hidden, 2 * SIDE)? };
    block_scaled(&model, BlockScaling { powers_of_two: true }, |_| true)?;
    Ok(model)
}

fn output(model: &Pair<Cpu>, x: &Var<Cpu>) -> Result<Var<Cpu>> {
    model.down.forward(&model.up.forward(x)?.gelu()?)
}

/// The loss of 128 rows of `128 · n`, part `k`.
fn loss(model: &Pair<Cpu>, rt: &Cpu, k: usize, n: usize) -> Result<Loss<Cpu>> {
    let all = Tensor::normal(rt, [n * SIDE, SIDE], DType::F32, 0.0, 1.0, 3)?;
    let x = Var::new(all.narrow(0, k * SIDE, SIDE)?);
    Loss::sum(output(model, &x)?.square()?.sum_all()?, (n * SIDE) as f64)
}

fn step(comm: &Comm<Cpu>, zero: Option<ZeroStage>, parts: &[usize], n: usize) -> Result<Vec<f64>> {
    let rt = comm.runtime();
    let model = pair(&Init::new(rt, 5), SIDE)?;
    let builder = TrainStep::builder(comm, &model).optimizer(sgd()).accumulation(parts.len());
    let mut step = match zero {
        Some(stage) => builder.zero(stage).build()?,
        None => builder.build()?,
    };
    step.step(|k| loss(&model, rt, parts[k], n))?;
    let _scope = step.gather_full_params()?;
    weights(&model)
}

/// Ranks with whole tiles of rows, in every stage of ZeRO, and one rank that accumulates.
#[test]
fn a_step_of_many_ranks_is_that_of_one() {
    for n in WORLDS {
        let parts: Vec<usize> = (0..n).collect();
        let one = Ranks::new(1).run(cpu, |comm| step(&comm, None, &parts, n)).unwrap().remove(0);
        for zero in [None].into_iter().chain(ZeroStage::ALL.map(Some)) {
            let many = Ranks::new(n).run(cpu, |comm| step(&comm, zero, &[comm.rank()], n)).unwrap();
            many.iter().for_each(|weights| close(weights, &one, 1e-6, &format!("{zero:?} on {n} ranks")));
        }
    }
}

/// A column and a row, cut at multiples of 128, along the tokens too.
#[test]
fn a_layer_cut_at_blocks_is_the_whole_layer() {
    for t in WORLDS {
        let plan = TensorPlan::new().column("up").row("down");
        same_in(
            DType::F32,
            1e-5,
            t,
            &plan,
            |init| pair(init, t * SIDE),
            |model, rt| output(model, &Var::new(Tensor::normal(rt, [2, 30, SIDE], DType::F32, 0.0, 1.0, 3)?)),
        );
    }
}

/// A layer, and a weight in 8 bits beside it.
#[derive(Module)]
#[module(crate = "::nn")]
struct Stored<R: Runtime> {
    layer: Linear<R>,
    codes: Buffer<R>,
    scales: Buffer<R>,
}

impl Stored<Cpu> {
    fn new(rt: &Cpu, seed: u64) -> Result<Self> {
        let weight = Tensor::normal(rt, [SIDE + 3, 5], DType::F32, 0.0, 1.0, seed)?;
        let [codes, scales] = BlockScaling::default().quantize(&weight)?;
        let layer = Linear::new(&Init::new(rt, 1), 5, 2)?;
        Ok(Stored { layer, codes: Buffer::new(codes), scales: Buffer::new(scales) })
    }

    fn bytes(&self) -> Result<[Vec<u8>; 2]> {
        Ok([self.codes.value().to_bytes()?, self.scales.value().to_bytes()?])
    }
}

/// Ranks begin with the codes of rank 0, and checkpoints have them.
#[test]
fn codes_are_sent_and_saved() {
    let scratch = Scratch::new("codes");
    let first = Stored::new(&Cpu::new(), 0).unwrap().bytes().unwrap();
    let train = |comm: &Comm<Cpu>, seed| {
        let model = Stored::new(comm.runtime(), seed)?;
        let step = TrainStep::builder(comm, &model).optimizer(sgd()).build()?;
        Ok::<_, Error>((model, step))
    };
    let saved = Ranks::new(3).run(cpu, |comm| {
        let (model, step) = train(&comm, comm.rank() as u64)?;
        step.save(&scratch.folder(), &CheckpointNotes::new())?;
        model.bytes()
    });
    assert_eq!(saved.unwrap(), vec![first.clone(); 3]);
    let loaded = Ranks::new(2).run(cpu, |comm| {
        let (model, mut step) = train(&comm, 9)?;
        assert_ne!(model.bytes()?, first);
        assert!(step.load(&scratch.folder())?.is_some());
        model.bytes()
    });
    assert_eq!(loaded.unwrap(), vec![first.clone(); 2]);
}

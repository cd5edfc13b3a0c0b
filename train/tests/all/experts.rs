//! A loop over ranks among which experts are shared out: evaluations, averages of weights and resumed runs are those of one rank.

use nn::moe::{MixtureOfExperts, MoeConfig};
use train::compat::TrainConfig;

use crate::{common::*, prelude::*};

#[derive(Module)]
#[module(crate = "::nn")]
struct Model<R: Runtime> {
    a: Linear<R>,
    mixture: MixtureOfExperts<R>,
    b: Linear<R>,
}

impl Model<Cpu> {
    fn new(mesh: &Mesh<Cpu>) -> Result<Self> {
        let init = Init::new(mesh.world().runtime(), 5).dtype(DType::F64);
        let mixture = MixtureOfExperts::new(&init, MoeConfig::new(6, 4, 4, 2))?;
        let model = Model { a: Linear::new(&init, 3, 6)?, mixture, b: Linear::new(&init, 6, 1)? };
        mesh.parallelize(&model, &TensorPlan::new().experts("mixture.experts"))?;
        Ok(model)
    }

    fn loss(&self, batch: &Batch<Rows>) -> Result<Loss<Cpu>> {
        let [x, y] =
            [(0, 3), (3, 1)].map(|(at, n)| batch.data.narrow(1, at, n).and_then(|x| x.contiguous()).map(Var::new));
        let out = self.mixture.forward_routed(&self.a.forward(&x?)?.tanh()?)?;
        let sum = self.b.forward(&out.y)?.sub(&y?)?.square()?.sum_all()?;
        Loss::sum(sum.add(&out.routing.balance_loss()?.mul(0.01)?)?, batch.rows as f64)
    }
}

/// Trains up to a step, from what is in the folder, and remembers losses and evaluations.
fn run<S: Step<Cpu>>(
    mesh: &Mesh<Cpu>,
    model: &Model<Cpu>,
    step: S,
    until: u64,
    folder: &Scratch,
    memory: &Memory,
) -> Result<()> {
    let rt = mesh.world().runtime();
    Trainer::new(model, step, loader(rt))
        .until(Length::Steps(until))
        .with(WeightAveraging::new(0.7))
        .with(EqualWeights::every(Interval::Steps(2)))
        .with(Evaluate::on(held_out(rt)).every(Interval::Steps(2)))
        .with(Checkpoints::in_folder(&folder.0).ignore_signals())
        .resume(Resume::IfThere)
        .record_every(Interval::Steps(1))
        .sink(memory.clone())
        .run(|model, batch| model.loss(batch))
        .map(drop)
}

fn on(axes: &[(Axis, usize)], zero: Option<ZeroStage>, until: u64, folder: &Scratch, memory: &Memory) {
    let plan = ParallelPlan::of(axes.to_vec()).unwrap();
    let program = |comm: &Comm<Cpu>| {
        let mesh = Mesh::new(comm, plan.clone())?;
        let model = Model::new(&mesh)?;
        let builder = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5);
        let step = builder.zero(zero.unwrap_or(ZeroStage::None)).experts().build()?;
        run(&mesh, &model, step, until, folder, memory)
    };
    on_ranks(plan.world(), program).unwrap_or_else(|error| panic!("{axes:?} {zero:?}: {error}"));
}

#[test]
fn a_run_over_ranks_with_experts_is_that_of_one() {
    let (alone, folder) = (Memory::default(), Scratch::new("experts-alone"));
    on(&[(Axis::Data, 1)], None, 8, &folder, &alone);
    for zero in [None, Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
        let (many, folder) = (Memory::default(), Scratch::new(&format!("experts-{zero:?}")));
        on(&[(Axis::Data, 4), (Axis::Expert, 2)], zero, 5, &folder, &many);
        // Goes on elsewhere, with other ranks for the experts.
        on(&[(Axis::Data, 1), (Axis::Shard, 2), (Axis::Expert, 2)], zero, 8, &folder, &many);
        for name in ["loss", "validation/loss"] {
            let (many, alone) = (many.of(name), alone.of(name));
            assert!(many.len() >= 4, "{name}: {many:?}");
            for (step, value) in many {
                let due = alone.iter().find(|(other, _)| *other == step);
                let off = due.map_or(0.0, |(_, due)| (value - due).abs() / due.abs());
                assert!(off <= 1e-11, "{zero:?} {name} of step {step}: {value} and {due:?}");
            }
        }
    }
}

#[test]
fn a_loop_of_ones_own_shares_out_experts_by_a_value() {
    let losses = |axes: &[(Axis, usize)], stage: ZeroStage| {
        let plan = ParallelPlan::of(axes.to_vec()).unwrap();
        let losses = on_ranks(plan.world(), |comm| {
            let mesh = Mesh::new(comm, plan.clone())?;
            let model = Model::new(&mesh)?;
            let config = TrainConfig { experts: true, zero: stage.into(), ..Default::default() };
            let mut trainer = Trainer::setup_with(&mesh, &model, adamw(), config)?;
            let batches = trainer.epoch(&loader(comm.runtime()), 0)?;
            let step = |batch: Result<Batch<Rows>>| trainer.step(&batch?, |model, batch| model.loss(batch))?.loss();
            batches.map(step).collect::<Result<Vec<f64>>>()
        });
        losses.unwrap()
    };
    let expected = losses(&[(Axis::Data, 1)], ZeroStage::None);
    for stage in [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters] {
        let found = losses(&[(Axis::Data, 4), (Axis::Expert, 2)], stage);
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(found.len() == 5 && off <= 1e-11, "{stage:?}: {found:?}, {expected:?}");
    }
}

//! Parameters that take no part in a loss, in the stages of a pipeline: replicas and micro-batches use different ones.

use distributed::pipeline::split;
use distributed::train::Step;
use nn::Forward;

use crate::{pipeline_common::*, prelude::*};

/// Layers of which the input chooses one; the third is never used.
#[derive(Module)]
#[module(crate = "::nn")]
struct Switch<R: Runtime> {
    up: Linear<R>,
    down: Linear<R>,
    never: Linear<R>,
}

impl Switch<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        let layer = || Linear::new(init, WIDTH, WIDTH);
        Ok(Switch { up: layer()?, down: layer()?, never: layer()? })
    }
}

impl Forward<Cpu> for Switch<Cpu> {
    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        let up = x.value()?.sum_all()?.item()? > 0.0;
        let layer = if up { &self.up } else { &self.down };
        x.add(&layer.forward(x)?.tanh()?)
    }
}

const LAYERS: usize = 4;

/// The layers; of one rank, the first and the last have a matrix in common if it is `tied`.
fn layers(rt: &Cpu, tied: bool) -> Result<Sequential<Cpu>> {
    let init = Init::new(rt, 5).dtype(DType::F64);
    let mut all = (0..LAYERS).map(|_| Switch::new(&init)).collect::<Result<Vec<_>>>()?;
    if tied {
        all[LAYERS - 1].down.weight = all[0].up.weight.clone();
    }
    Ok(all.into_iter().fold(Sequential::new(), Sequential::push))
}

/// The rows of a micro-batch, of which the number decides what is used.
fn micro(rt: &Cpu, number: usize) -> Result<[Tensor<Cpu>; 2]> {
    let rows = |seed: usize| Tensor::normal(rt, [ROWS, WIDTH], DType::F64, 0.0, 1.0, seed as u64);
    Ok([rows(number)?, rows(1000 + number)?])
}

const TRAINED: usize = 3;

/// The weights that one rank has after `TRAINED` steps of `micros` micro-batches, by name.
fn alone(micros: usize, tied: bool) -> BTreeMap<String, Vec<f64>> {
    let rt = cpu(0).unwrap();
    let model = layers(&rt, tied).unwrap();
    let config = TrainingConfig { accumulation: micros, ..config() };
    let options = BucketOptions { unused: Unused::Allow, ..Default::default() };
    let mut step = bucketed(&NoOpCommunicator::new(&rt), &model, config, options).unwrap();
    for s in 0..TRAINED {
        let loss = |k: usize| {
            let [x, y] = micro(&rt, s * micros + k)?;
            squares(&[model.forward(&Var::new(x))?], &[Var::new(y)])
        };
        step.step(loss).unwrap();
    }
    values(&model).unwrap()
}

fn values(model: &(impl Module<Cpu> + ?Sized)) -> Result<BTreeMap<String, Vec<f64>>> {
    model.named_parameters().into_iter().map(|(name, p)| Ok((name, p.value()?.to_vec::<f64>()?))).collect()
}

/// The weights that this rank's stages have after the same steps, by name.
fn staged(mesh: &Mesh<Cpu>, checked: &Checked, zero: &ZeroOptions, tied: bool) -> Result<BTreeMap<String, Vec<f64>>> {
    let (rt, schedule, pipe) = (mesh.world().runtime(), checked.schedule(), mesh.axis(Axis::Pipe));
    let stages = split(
        layers(rt, false)?.into_layers(),
        &(1..schedule.stages()).map(|k| k * LAYERS / schedule.stages()).collect::<Vec<_>>(),
    )?;
    let mut model = PipelineModel::on(pipe.rank(), checked.clone(), stages).loss(squares);
    if tied {
        model = model.ties(vec![Tie::new(["0.up.weight", "3.down.weight"])]);
    }
    let builder = TrainStep::builder(mesh, model).optimizer(adamw()).config(config());
    let mut step = match zero.stage {
        ZeroStage::None => builder.buckets(BucketOptions { unused: Unused::Allow, ..Default::default() }).build()?,
        _ => builder.zero(zero.clone()).build()?,
    };
    let (replica, replicas, micros) = (mesh.batch().rank(), mesh.batch().size(), schedule.micro_batches());
    for s in 0..TRAINED {
        let own = (0..micros).map(|k| micro(rt, (s * replicas + replica) * micros + k)).collect::<Result<Vec<_>>>()?;
        let joined = |at: usize| numcore::ops::cat(&own.iter().map(|pair| &pair[at]).collect::<Vec<_>>(), 0);
        let batch = MicroBatches::split(&[joined(0)?], &[joined(1)?], micros)?;
        step.step(|_| Ok(batch.clone()))?;
    }
    let _all = step.gather_full_params()?;
    let all = step.modules().into_iter().map(values).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().flatten().collect())
}

#[test]
fn replicas_of_stages_may_use_different_parameters() {
    let zero = |stage: ZeroStage| ZeroOptions { unused: Unused::Allow, ..stage.into() };
    let once = ZeroOptions { reduce_once: true, ..zero(ZeroStage::Gradients) };
    let mut turns = Turns::one_of(5);
    let ways = STAGES.map(zero).into_iter().chain([once]);
    for ((p, v, replicas), zero) in
        [(2, 1, 3), (2, 2, 2), (4, 1, 2)].into_iter().flat_map(|size| ways.clone().map(move |zero| (size, zero)))
    {
        for tied in [false, true] {
            let want = alone(4 * replicas, tied);
            for (kind, checked) in kinds(p, v, 4).filter(|_| turns.come()) {
                let split = if zero.stage == ZeroStage::None { Axis::Data } else { Axis::Shard };
                let outcome = Ranks::new(p * replicas).timeout(TIMEOUT).run(cpu, |comm| {
                    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Pipe, p), (split, replicas)])?)?;
                    staged(&mesh, &checked, &zero, tied)
                });
                for (name, value) in
                    outcome.unwrap_or_else(|e| panic!("{kind} {zero:?} {tied}: {e}")).into_iter().flatten()
                {
                    let name = if tied && name == "3.down.weight" { "0.up.weight" } else { &name };
                    close(&value, &want[name], CLOSE, &format!("{kind} {zero:?}, tied {tied}: {name}"));
                }
            }
        }
    }
    let before = values(&layers(&cpu(0).unwrap(), false).unwrap()).unwrap();
    let after = alone(8, false);
    let changed =
        |part: &str| after.iter().filter(|(name, value)| name.contains(part) && before[*name] != **value).count();
    assert_eq!((changed("never"), changed("up"), changed("down")), (0, 2 * LAYERS, 2 * LAYERS));
}

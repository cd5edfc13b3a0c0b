//! Checkpoints: exact resumption, any other number of ranks and any other strategy.

use data::State;

use crate::{checkpoint_common::*, prelude::*};

#[test]
fn what_follows_is_what_would_have_followed() {
    use Axis::{Data, Expert, Pipe, Shard, Tensor};
    let gpt = |dtype, axes: &[(Axis, usize)]| {
        let mut way = Way { dtype, examples: 8, ..Way::gpt(2).over(axes) };
        way.gpt.tied_head = true;
        way
    };
    let staged = |kind, v| gpt(DType::F32, &[(Pipe, 2), (Data, 2)]).staged(kind, v);
    let ways = [
        gpt(DType::F32, &[(Data, 3)]),
        gpt(DType::BF16, &[(Data, 2), (Shard, 2)]),
        gpt(DType::BF16, &[(Shard, 2), (Tensor, 2)]),
        Way { dtype: DType::BF16, ..Way::mixture(4).over(&[(Shard, 2), (Expert, 2)]) },
        Way::mixture(4).over(&[(Data, 2), (Tensor, 2), (Expert, 2)]),
        staged(ScheduleKind::OneFOneB, 1),
        // The first and the last stage, with both copies of the table, on one rank.
        staged(ScheduleKind::Zbv, 2),
    ];
    let mut turns = Turns::one_of(2);
    for way in ways.iter().flat_map(Way::strategies).filter(|_| turns.come()) {
        let scratch = Scratch::new("resume");
        way.go_on(None, 0..2, Some(&scratch.folder()));
        let resumed = way.go_on(Some(&scratch.folder()), 2..4, None);
        let whole = way.go_on(None, 0..4, None);
        assert!(resumed.pieces == whole.pieces, "{way:?}");
        assert_eq!((&resumed.losses[..], &resumed.norms[..]), (&whole.losses[2..], &whole.norms[2..]), "{way:?}");
    }
}

/// With parameters that have no elements: in a unit of their own, and between others.
#[derive(Module)]
#[module(crate = "::nn")]
struct Hollow<R: Runtime> {
    mlp: Mlp<R>,
    none: Linear<R>,
    between: Vec<Linear<R>>,
}

impl Task for Hollow<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        let between = vec![Linear::new(init, 5, 2)?, Linear::new(init, 5, 0)?, Linear::new(init, 5, 3)?];
        Ok(Hollow { mlp: Mlp::new(init)?, none: Linear::new(init, 5, 0)?, between })
    }

    fn loss(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let (x, _) = self.mlp.batch(rt, step, examples)?;
        let sum = |linear: &Linear<Cpu>| -> Result<Var<Cpu>> { linear.forward(&x)?.square()?.sum_all() };
        let all = self.between.iter().chain([&self.none]).map(sum);
        let loss = self.mlp.loss(rt, step, examples)?;
        let total = all.into_iter().try_fold(loss.total().clone(), |total, sum| total.add(&sum?))?;
        Loss::sum(total, loss.weight())
    }
}

#[test]
fn parameters_without_elements_pass_between_strategies() {
    let one = single::<Hollow<Cpu>>(DType::F64, config()).unwrap();
    for from in STAGES {
        for n in [1, 2, 3] {
            let scratch = Scratch::new("hollow");
            let folder = scratch.folder();
            Ranks::new(n).run(cpu, |c| run::<Hollow<Cpu>>(&c, from, DType::F64, &folder, 0, 2, true)).unwrap();
            for to in STAGES {
                let all = Ranks::new(2).run(cpu, |c| run::<Hollow<Cpu>>(&c, to, DType::F64, &folder, 2, 4, false));
                for got in all.unwrap_or_else(|e| panic!("{from:?} on {n} to {to:?}: {e}")) {
                    let expected = [&one.losses[2..4], &one.weights[3][..]].concat();
                    let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(off < 1e-11, "{from:?} on {n} to {to:?}: {off:e}");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_can_be_read_without_a_trainer() {
    let scratch = Scratch::new("export");
    let folder = scratch.folder();
    let how = ZeroStage::Parameters;
    let trained = Ranks::new(3).run(cpu, |c| run::<Mlp<Cpu>>(&c, how, DType::F64, &folder, 0, 1, true)).unwrap();
    let mut reader = CheckpointReader::open(folder.step(1)).unwrap();
    assert_eq!(reader.manifest().ranks(), 3);
    assert_eq!(reader.manifest().names().filter(|n| n.starts_with("parameter/")).count(), 6);
    let weight = reader.tensor(&Cpu::with_threads(1), "parameter/a.weight").unwrap();
    assert_eq!(weight.dims(), [9, 5]);
    assert_eq!(weight.to_vec::<f64>().unwrap(), trained[0][1..46]);
    assert!(reader.tensor(&Cpu::with_threads(1), "parameter/z").unwrap_err().to_string().contains("parameter/z"));
}

#[test]
fn scaler_and_counts_go_on() {
    // Of one rank: every process has its own.
    let scratch = Scratch::new(&format!("scaler-{}", std::process::id()));
    let folder = scratch.folder();
    let mut scaler = LossScaler::starting_at(64.0).unwrap();
    scaler.interval = 2;
    let scaled = TrainingConfig { loss_scaling: Some(scaler), ..config() };
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    let all: Vec<usize> = (0..5).collect();
    let mut first = simple(&rt, &model, scaled.clone()).unwrap();
    for step in 0..3 {
        first.step(|_| model.loss(&rt, step, &all)).unwrap();
    }
    first.save(&folder, &CheckpointNotes::new()).unwrap();
    let mut second = simple(&rt, &Mlp::new(&Init::new(&rt, 1)).unwrap(), scaled).unwrap();
    second.load(&folder).unwrap().unwrap();
    assert_eq!(second.global_step(), 3);
    assert_eq!(second.scaler().cloned(), first.scaler().cloned());
    assert_eq!(second.scaler().unwrap().factor(), 128.0);
}

#[test]
fn other_ranks_read_what_was_left_of_the_epoch() {
    const EXAMPLES: usize = 13;
    let scratch = Scratch::new("loader");
    let folder = scratch.folder();
    let run = |n: usize, how: ZeroStage, resumed: bool, batches: usize| {
        let ranks = Ranks::new(n).run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            let examples = InMemory::new((0..EXAMPLES).collect::<Vec<_>>());
            let loader = Loader::new(examples).batch(2 * n).shuffle(8).rank(comm.rank(), n);
            let mut at = State::default();
            if resumed {
                let manifest = trainer.load(&folder)?.expect("a checkpoint");
                at = loader.state_of(&manifest.notes()["data"])?;
            }
            let mut epoch = loader.resume(at)?;
            let mut read = Vec::new();
            for _ in 0..batches {
                let batch = epoch.next().expect("not the end of the epoch")?.data;
                trainer.step_with(|_| model.loss(comm.runtime(), 0, &batch))?;
                read.extend(batch);
            }
            trainer.save_with(&folder, CheckpointNotes::from([("data".into(), loader.note(epoch.state()))]))?;
            Ok(read)
        });
        ranks.unwrap().concat()
    };
    let first = run(3, ZeroStage::None, false, 1);
    let second = run(2, ZeroStage::Parameters, true, 1);
    let third = run(1, ZeroStage::Optimizer, true, 1);
    assert_eq!((first.len(), second.len(), third.len()), (6, 4, 2));
    let mut all = [first, second, third].concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 12, "nothing twice");
}

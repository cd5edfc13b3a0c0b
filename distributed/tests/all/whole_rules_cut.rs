//! Rules that need whole parameters, over parameters that are cut along tensor: one rank updates each.

use crate::{prelude::*, zero_rules::StepsDecayed, zero_whole_rules::thaw};

const RULES: [Rule; 3] = [Rule::Lamb, Rule::Adafactor, Rule::Muon];
const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn all() -> impl Iterator<Item = (Rule, ZeroStage)> {
    RULES.into_iter().flat_map(|rule| STAGES.map(|stage| (rule, stage)))
}

#[test]
fn updates_of_cut_parameters_are_those_of_one_rank() {
    use Axis::{Context, Data, Pipe, Shard, Tensor};
    for (rule, stage) in all() {
        let split = if stage == ZeroStage::None { Data } else { Shard };
        let way = |t: usize| Way { examples: 12, rule, accumulation: 2, ..Way::gpt(t).zero(stage) };
        for t in [2, 3] {
            way(t).over(&[(Tensor, t)]).same();
            way(t).over(&[(split, 2), (Tensor, t)]).same();
        }
        Way { frozen: &["blocks.0.fc1", "wte"], sequence: true, ..way(2) }.over(&[(split, 3), (Tensor, 2)]).same();
        way(4).over(&[(Context, 2), (Tensor, 2)]).same();
        Way { accumulation: 1, ..way(2) }
            .staged(ScheduleKind::OneFOneB, 1)
            .micros(2)
            .over(&[(Pipe, 2), (split, 2), (Tensor, 2)])
            .same();
    }
    // Of 6 rows the last of 4 ranks has none.
    let mut few = Way { rule: Rule::Lamb, ..Way::gpt(4) };
    few.gpt.vocab = 5;
    few.over(&[(Tensor, 4)]).same();
}

#[test]
fn experts_of_ranks_are_updated_together() {
    for rule in [Rule::Lamb, Rule::Adafactor] {
        for stage in STAGES {
            Way { rule, ..Way::mixture(4).zero(stage) }.over(&[(Axis::Data, 4), (Axis::Expert, 2)]).same();
        }
    }
}

/// Of each cut to each other one; what is saved is the same bytes.
#[test]
fn checkpoints_pass_between_all_cuts() {
    use Axis::{Data, Shard, Tensor};
    for rule in RULES {
        let at = |axes: &[(Axis, usize)], stage: ZeroStage| Way { rule, ..Way::gpt(2).zero(stage).over(axes) };
        let cuts = [
            at(&[], STAGES[0]),
            at(&[(Tensor, 2)], STAGES[0]),
            at(&[(Shard, 3), (Tensor, 2)], STAGES[3]),
            at(&[(Data, 2), (Tensor, 2)], STAGES[0]),
            at(&[(Shard, 2)], STAGES[1]),
            at(&[(Shard, 2), (Tensor, 2)], STAGES[2]),
        ];
        let one = Scratch::new("cut-whole-rules");
        cuts[0].go_on(None, 0..2, Some(&one.folder()));
        let want = cuts[0].go_on(Some(&one.folder()), 2..4, None);
        let mut from = one.folder();
        let mut kept = Vec::new();
        for way in &cuts {
            let again = Scratch::new("cut-whole-rules");
            way.go_on(Some(&from), 0..0, Some(&again.folder()));
            assert!(contents(&again.folder()) == contents(&one.folder()), "{way:?}: saved otherwise");
            let off = distance(&way.go_on(Some(&again.folder()), 2..4, None), &want);
            assert!(off <= CLOSE, "{way:?}: {off:e}");
            from = again.folder();
            kept.push(again);
        }
    }
}

/// Trains two linear layers for a step on small integers, all sums of which are exact: the weights have the bits of any
/// cut. Without a rule they have one that launches an elementwise update first.
fn of_integers(rule: Option<Rule>, stage: ZeroStage, t: usize, dtype: DType) -> Vec<Vec<f64>> {
    let weights = Ranks::new(t).run(cpu, |comm| {
        let rt = comm.runtime();
        let init = Init::new(rt, 0).dtype(dtype);
        let model = vec![Linear::new(&init, 8, 12)?, Linear::new(&init, 12, 6)?];
        let integers = |shape: &[usize], k: usize| {
            let numel: usize = shape.iter().product();
            let values: Vec<f64> = (0..numel).map(|i| ((i * 7 + i / 5 + k) % 5) as f64 - 2.0).collect();
            Tensor::from_slice(rt, numcore::Shape::new(shape)?, &values)?.to_dtype(dtype)
        };
        for (k, (_, p)) in model.named_parameters().into_iter().enumerate() {
            p.set(integers(p.shape().dims(), k)?)?;
        }
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
        mesh.parallelize(&model, &TensorPlan::new().column("0").row("1"))?;
        let builder = TrainStep::builder(&mesh, &model).zero(stage);
        let mut step = match rule {
            None => builder.optimizer(StepsDecayed::default()),
            Some(Rule::Lamb) => builder.optimizer(lamb()),
            Some(Rule::Adafactor) => builder.optimizer(AdafactorConfig { eps1: Some(1e-4), ..Default::default() }),
            _ => builder.optimizer(muon()),
        }
        .build()?;
        step.step(|_| {
            let x = model[0].forward(&Var::new(integers(&[4, 8], 3)?))?;
            Loss::sum(model[1].forward(&x)?.mul(&Var::new(integers(&[4, 6], 1)?))?.sum_all()?, 1.0)
        })?;
        let _whole = step.gather_full_params()?;
        let gathered = |(_, p): (String, Param<Cpu>)| p.gathered()?.to_dtype(DType::F64)?.to_vec::<f64>();
        model.named_parameters().into_iter().map(gathered).collect::<Result<Vec<_>>>()
    });
    let weights = weights.unwrap();
    assert!(weights.iter().all(|own| *own == weights[0]), "{rule:?} {stage:?} {t}: ranks differ");
    weights[0].clone()
}

#[test]
fn an_update_of_equal_gradients_has_the_bits_of_one_rank() {
    let rules = all().map(|(rule, stage)| (Some(rule), stage)).chain(STAGES.map(|stage| (None, stage)));
    for (rule, stage) in rules {
        for dtype in [DType::F32, DType::BF16] {
            let one = of_integers(rule, ZeroStage::None, 1, dtype);
            for t in [2, 3] {
                assert!(of_integers(rule, stage, t, dtype) == one, "{rule:?} {stage:?} over {t} in {dtype}");
            }
        }
    }
}

fn thawing(t: usize, stage: ZeroStage) -> Trace {
    everywhere(t, |comm| {
        let init = Init::new(comm.runtime(), 0).dtype(DType::F64);
        let model = Mlp { a: Linear::new(&init, 5, 12)?, b: Linear::new(&init, 12, 6)?, c: Linear::new(&init, 6, 3)? };
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
        mesh.parallelize(&model, &TensorPlan::new().column("a").row("b"))?;
        model.freeze_where(nn::under("b"));
        let mut step = TrainStep::builder(&mesh, &model).optimizer(muon()).zero(stage).build()?;
        let mut trace = Trace::default();
        for k in 0..STEPS {
            thaw(&model, k);
            step.step(|_| model.loss(comm.runtime(), k, &(0..EXAMPLES).collect::<Vec<_>>()))?;
            let _whole = step.gather_full_params()?;
            let own = |(_, p): (String, Param<Cpu>)| p.gathered()?.to_vec::<f64>();
            trace.weights.push(model.named_parameters().into_iter().map(own).collect::<Result<Vec<_>>>()?.concat());
        }
        Ok(trace)
    })
}

#[test]
fn cut_parameters_that_are_unfrozen_have_an_owner() {
    let one = thawing(1, ZeroStage::None);
    for stage in STAGES {
        for t in [2, 3] {
            let off = difference(&thawing(t, stage), &one);
            assert!(off <= CLOSE, "{stage:?} over {t}: {off:e}");
        }
    }
}

/// Each matrix has its state on one rank, and ranks have as many of equal ones.
#[test]
fn state_is_shared_out_along_tensor() {
    for stage in STAGES {
        let bytes = Ranks::new(3).run(cpu, |comm| {
            let init = Init::new(comm.runtime(), 0);
            let layer = |_| Linear::new(&init, 96, 96).map(Linear::without_bias);
            let model = (0..6).map(layer).collect::<Result<Vec<_>>>()?;
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 3)])?)?;
            mesh.parallelize(&model, &TensorPlan::new().column("*"))?;
            let _step = TrainStep::builder(&mesh, &model).optimizer(MuonConfig::default()).zero(stage).build()?;
            Ok(comm.runtime().memory().of(MemoryCategory::Optimizer).live)
        });
        assert_eq!(bytes.unwrap(), vec![2 * 96 * 96 * 4; 3], "{stage:?}");
    }
}

#[test]
fn shards_cannot_have_nothing_of_a_whole_parameter() {
    let outcomes = Ranks::new(4).outcomes(cpu, |comm| {
        let mut way = Way::gpt(4);
        way.gpt.vocab = 5;
        let model = Gpt::new(&Init::new(comm.runtime(), 0), way.gpt)?;
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 4)])?)?;
        mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
        TrainStep::builder(&mesh, &model).optimizer(lamb()).zero(ZeroStage::Optimizer).build().map(drop)
    });
    refused(outcomes.unwrap(), &["wte.weight", "has no elements on rank 3", "`ParamGroups::others`"]);
}

#[test]
fn an_optimizer_that_has_updated_pieces_cannot_be_one_of_whole_parameters() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = vec![Linear::new(&Init::new(comm.runtime(), 0), 4, 4)?];
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        mesh.parallelize(&model, &TensorPlan::new().column("0"))?;
        let mut optimizer = FlatOptimizer::new(&model, lamb())?;
        let x = Var::new(Tensor::ones(comm.runtime(), [1, 4], DType::F32)?);
        optimizer.backward(&model[0].forward(&x)?.sum_all()?)?;
        optimizer.step()?;
        TrainStep::builder(&mesh, &model).optimizer(optimizer).build().map(drop)
    });
    refused(outcomes.unwrap(), &["0.weight", "was updated before ranks had pieces of it"]);
}

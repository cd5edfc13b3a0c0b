//! Plans that train the model of one rank.

use crate::common::*;

fn gpt_report(axes: &[(Axis, usize)], config: GptConfig, zero: ZeroStage, sequence: bool) -> Verification {
    let cut = Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence);
    let make = |mesh: &Mesh<Cpu>| {
        let model = gpt_on(mesh, config, &cut)?;
        let step =
            TrainStep::builder(mesh, &model).optimizer(adamw()).zero(zero).max_norm(0.5).accumulation(2).build()?;
        Ok((model, step))
    };
    Verify::new(plan(axes)).run(runtime, make, texts(16), gpt_loss).unwrap()
}

/// Axes, the stage of ZeRO, and whether sequences are cut along tensor.
type Case<'a> = (&'a [(Axis, usize)], ZeroStage, bool);

#[test]
fn a_gpt_over_every_axis_is_that_of_one_rank() {
    use Axis::{Context, Data, Shard, Tensor};
    let plans: [Case<'_>; 8] = [
        (&[(Data, 2)], ZeroStage::None, false),
        (&[(Data, 4)], ZeroStage::Optimizer, false),
        (&[(Data, 2), (Shard, 2)], ZeroStage::Gradients, false),
        (&[(Shard, 4)], ZeroStage::Parameters, false),
        (&[(Tensor, 2)], ZeroStage::None, false),
        (&[(Tensor, 4)], ZeroStage::None, true),
        (&[(Context, 2)], ZeroStage::None, false),
        (&[(Data, 2), (Context, 2), (Tensor, 2)], ZeroStage::Parameters, true),
    ];
    for (axes, zero, sequence) in plans {
        for dropout in [0.0, 0.1] {
            let report = gpt_report(axes, GptConfig { dropout, ..gpt() }, zero, sequence);
            assert!(report.is_equal(), "{zero:?}, dropout {dropout}: {report}");
        }
    }
}

#[test]
fn a_gpt_in_stages_is_that_of_one_rank() {
    let kinds = [(ScheduleKind::OneFOneB, 1), (ScheduleKind::Interleaved, 2)];
    for (kind, v) in kinds {
        for tied_head in [false, true] {
            let config = GptConfig { layers: 2 * v, tied_head, ..gpt() };
            let make = |mesh: &Mesh<Cpu>| gpt_in_stages(mesh, config, (kind, v), summed());
            for axes in
                [&[(Axis::Pipe, 2)][..], &[(Axis::Pipe, 2), (Axis::Data, 2)], &[(Axis::Pipe, 2), (Axis::Tensor, 2)]]
            {
                let report = Verify::new(plan(axes)).run(runtime, make, texts(16), texts_in_stages).unwrap();
                assert!(report.is_equal(), "{kind:?}, tied {tied_head}: {report}");
            }
        }
    }
}

/// A choice from a seed, the same at every call.
pub struct Draw(pub u64);

impl Draw {
    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        of[(self.0 >> 33) as usize % of.len()]
    }
}

/// A random GPT under a random plan, in shards, stages, or pieces.
fn random_report(seed: u64) -> (String, Verification) {
    use Axis::{Context, Data, Pipe, Shard, Tensor};
    let draw = &mut Draw(seed);
    let dtype = draw.one(&[DType::F64, DType::F64, DType::F32]);
    let mut sizes = [Data, Shard, Context, Tensor, Pipe].map(|axis| (axis, draw.one(&[1, 1, 2])));
    while sizes.iter().map(|(_, size)| size).product::<usize>() > 8 {
        sizes[draw.one(&[0, 1, 2, 3, 4])].1 = 1;
    }
    let staged = sizes[4].1 > 1;
    // Each stage draws masks of its own.
    let dropouts: &[f64] = if staged { &[0.0] } else { &[0.0, 0.0, 0.1] };
    let config = GptConfig {
        layers: draw.one(&[2, 3]),
        heads: draw.one(&[2, 4]),
        bias: draw.one(&[true, false]),
        dropout: draw.one(dropouts),
        tied_head: draw.one(&[true, false]),
        ..gpt()
    };
    let stages = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
    let (zero, accumulation) = (draw.one(&stages), draw.one(&[1, 2]));
    let (clips, sgd) = (draw.one(&[true, false]), draw.one(&[true, false]));
    let kind = draw.one(&[ScheduleKind::OneFOneB, ScheduleKind::GPipe]);
    let cut = Gpt::<Cpu>::tensor_plan().sequence_parallel(draw.one(&[true, false]));
    let told = format!(
        "{sizes:?} {dtype:?} {config:?} {zero:?} {kind:?}, accumulation {accumulation}, clips {clips}, sgd {sgd}"
    );
    let built = |mesh: &Mesh<Cpu>, model: StepModel<'_, Cpu>| {
        let builder = TrainStep::builder(mesh, model).zero(zero).accumulation(accumulation);
        let builder = if clips { builder.max_norm(0.3) } else { builder };
        match sgd {
            true => builder.optimizer(SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() }).build(),
            false => builder.optimizer(adamw()).build(),
        }
    };
    let init = |mesh: &Mesh<Cpu>| Init::new(mesh.world().runtime(), 42).dtype(dtype);
    let verify = Verify::new(plan(&sizes));
    if staged {
        let make = |mesh: &Mesh<Cpu>| {
            let pipe = mesh.axis(Pipe);
            let checked = schedule(kind, pipe.size(), 1)?;
            let (stages, loss) = Gpt::new(&init(mesh), config)?.split_with_loss(pipe.size(), summed())?;
            let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
                Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
            };
            let model = PipelineModel::on(pipe.rank(), checked, stages).loss(loss).parallelize(mesh, &cut)?;
            let model = match mesh.plan().size(Context) {
                1 => model,
                _ => model.context_parallel(mesh, ContextExchange::Ring)?,
            };
            Ok((Vec::<Linear<Cpu>>::new(), built(mesh, model.into())?))
        };
        return (told, verify.run(runtime, make, texts(32), texts_in_stages).unwrap());
    }
    let make = |mesh: &Mesh<Cpu>| {
        let model = Gpt::new(&init(mesh), config)?;
        mesh.parallelize(&model, &cut)?;
        if mesh.plan().size(Context) > 1 {
            mesh.context_parallel(&model, ContextExchange::AllGather)?;
        }
        let step = built(mesh, (&model).into())?;
        Ok((model, step))
    };
    (told, verify.run(runtime, make, texts(16), gpt_loss).unwrap())
}

#[test]
fn no_random_model_raises_an_alarm() {
    let count = if std::env::var_os("WEFTGRAD_TEST_ALL_CASES").is_some() { 200 } else { 24 };
    for seed in 0..count {
        let (told, report) = random_report(seed);
        assert!(report.is_equal(), "seed {seed}, {told}: {report}");
    }
}

#[test]
fn chunks_in_canonical_order_have_the_bits_of_one_rank() {
    use distributed::buckets::BucketOptions;
    for accumulation in [1, 2] {
        let make = |mesh: &Mesh<Cpu>| {
            let model = Gpt::new(&init(mesh), gpt())?;
            let buckets = BucketOptions { canonical: true, ..Default::default() };
            let step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(buckets).accumulation(accumulation);
            let step = step.build()?;
            Ok((model, step))
        };
        let report = Verify::new(plan(&[(Axis::Data, 4)])).run(runtime, make, texts(16), gpt_loss).unwrap();
        assert!(report.is_equal(), "{report}");
    }
}

/// The gradient of the bias before a norm of the whole batch is rounding alone.
#[test]
fn statistics_of_all_ranks_are_those_of_one() {
    use distributed::SyncBatchNorm;
    for dtype in [DType::F64, DType::F32] {
        let make = |mesh: &Mesh<Cpu>| {
            let init = Init::new(mesh.world().runtime(), 42).dtype(dtype);
            let norm = SyncBatchNorm::over(BatchNorm::new(&init, 4)?, mesh.batch());
            let model = Sequential::new().push(Linear::new(&init, 4, 4)?).push(norm);
            let step = TrainStep::builder(mesh, &model).optimizer(adamw()).build()?;
            Ok((model, step))
        };
        let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
            let x = Var::new(examples.tensors[0].to_dtype(dtype)?);
            Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
        };
        let report = Verify::new(plan(&[(Axis::Data, 2)])).run(runtime, make, numbers(8, 4), loss).unwrap();
        assert!(report.is_equal(), "{dtype:?}: {report}");
    }
}

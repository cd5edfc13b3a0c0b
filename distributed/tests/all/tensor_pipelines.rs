//! Pipelines whose stages are cut along tensor: what their heads give out, what stages are of a model, what is refused.

use autograd::{RandomState, random_state};

use crate::prelude::*;

const FOUR: [(Axis, usize); 2] = [(Axis::Pipe, 2), (Axis::Tensor, 2)];

fn staged(tied_head: bool) -> Way {
    let mut way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).over(&FOUR);
    (way.gpt.tied_head, way.gpt.vocab) = (tied_head, 7);
    way
}

/// Losses of the micro-batches of an evaluation, and its outputs.
fn evaluated(step: &mut TrainStep<Cpu>, way: &Way, rt: &Cpu) -> Result<(Vec<f64>, Vec<Tensor<Cpu>>)> {
    let output = step.evaluate_stages(batch(way, rt)?)?;
    let losses = step.pipeline().expect("stages").losses(&output)?.into_iter().map(|(sum, _)| sum).collect();
    Ok((losses, output.outputs().iter().map(|y| y[0].clone()).collect()))
}

/// All examples of the first step.
fn batch(way: &Way, rt: &Cpu) -> Result<MicroBatches<Cpu>> {
    let (x, y) = way.batch(rt, 0, &(0..way.examples).collect::<Vec<_>>())?;
    MicroBatches::split(&[x.value()?], &[y.value()?], 4)
}

/// Stages that are cut, or not, whose loss takes whole logits.
fn gathering(way: &Way, mesh: &Mesh<Cpu>, plan: Option<&TensorPlan>) -> Result<PipelineModel<Cpu>> {
    let stages = Gpt::new(&Init::new(mesh.world().runtime(), 7).dtype(way.dtype), way.gpt)?.split(2)?;
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), way.checked(2).unwrap(), stages)
        .loss(move |y, t| Loss::sum(cross_entropy_with(&y[0], &t[0], options)?, 1.0));
    match plan {
        Some(plan) => model.parallelize(mesh, plan),
        None => Ok(model),
    }
}

/// Losses of an evaluation and of a step, of stages whose head gathers its logits.
#[test]
fn a_head_that_gathers_its_logits_has_the_same_loss() {
    for (tied_head, sequence) in [(false, false), (false, true), (true, false), (true, true)] {
        let way = Way { steps: 1, ..staged(tied_head) };
        let want = way.alone().losses[0];
        let plan = Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence);
        let losses = way.ranks(|mesh| {
            let (rt, model) = (mesh.world().runtime(), gathering(&way, mesh, Some(&plan))?);
            let mut step = TrainStep::builder(mesh, model).optimizer(adamw()).build()?;
            let (losses, outputs) = evaluated(&mut step, &way, rt)?;
            assert_eq!(step.ranks().counts_examples, mesh.axis(Axis::Tensor).rank() == 0);
            assert!(outputs.iter().all(|y| y.dims().last() == Some(&way.gpt.vocab)));
            Ok((losses.into_iter().sum::<f64>(), step.step(|_| batch(&way, rt))?.loss()?))
        });
        let tokens = (way.examples * way.gpt.context) as f64;
        for (evaluated, trained) in losses.unwrap() {
            assert!((evaluated / tokens - want).abs() <= CLOSE, "{evaluated}, {want}");
            // Each micro-batch weighs 1.
            assert!((trained * 4.0 / tokens - want).abs() <= CLOSE, "{trained}, {want}");
        }
    }
}

/// The stages of a model say what the model says, and compute what it computes, to the bit.
#[test]
fn stages_are_the_model() {
    let rt = cpu(0).unwrap();
    let case = Way::gpt(2);
    for tied_head in [false, true] {
        let config = GptConfig { tied_head, ..case.gpt };
        let init = || Init::new(&rt, 7).dtype(DType::BF16);
        let model = Gpt::new(&init(), config).unwrap();
        let (stages, loss) = Gpt::new(&init(), config).unwrap().split_with_loss(2, case.loss).unwrap();
        let run = |x: &Var<Cpu>| stages.iter().try_fold(vec![x.clone()], |x, stage| stage.forward_values(&x));
        let (x, y) = case.batch(&rt, 0, &[0, 1, 2]).unwrap();
        let staged = loss.of(&run(&x).unwrap()[0], &y).unwrap();
        let whole = model.next_token_loss(&x, &y, &case.loss).unwrap();
        assert_eq!(staged.value().unwrap().to_f64s().unwrap(), whole.value().unwrap().to_f64s().unwrap());
        let long = Var::new(Tensor::zeros(&rt, [1, config.context + 1], DType::I64).unwrap());
        let flat = Var::new(Tensor::zeros(&rt, [3], DType::I64).unwrap());
        let unknown = Var::new(Tensor::full(&rt, [1, 2], DType::I64, 1e6).unwrap());
        for wrong in [&long, &flat, &unknown] {
            // Each says where it was called.
            let [staged, whole] =
                [run(wrong).map(drop), model.forward(wrong).map(drop)].map(|of| of.unwrap_err().to_string());
            assert_eq!(staged.split(", at ").next(), whole.split(", at ").next());
        }
    }
}

/// Evaluations give out the logits of the whole vocabulary, on every rank of the last stage, also where training leaves them cut.
#[test]
fn evaluations_give_out_whole_logits() {
    let close =
        |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= CLOSE * 100.0);
    for tied_head in [false, true] {
        let evaluated = |axes: &[(Axis, usize)]| {
            staged(tied_head).over(axes).each(|training| {
                let (losses, outputs) = evaluated(&mut training.step, training.way, training.mesh.world().runtime())?;
                Ok((losses, outputs.iter().map(|y| y.to_f64s()).collect::<Result<Vec<_>>>()?.concat()))
            })
        };
        let one = evaluated(&[(Axis::Pipe, 2)]);
        for (rank, (losses, logits)) in evaluated(&FOUR).into_iter().enumerate() {
            let (of, want) = &one[rank / 2];
            assert!(close(&losses, of), "{losses:?} {of:?}");
            assert!(close(&logits, want), "rank {rank}: {} logits, {}", logits.len(), want.len());
        }
        assert!(!one[1].1.is_empty());
    }
}

#[test]
fn stages_that_cannot_be_cut_or_were_not_are_refused_everywhere() {
    let plans = [
        ("blocks.*.mlp", Some(Gpt::<Cpu>::tensor_plan().column("blocks.*.mlp"))),
        // The second stage has `lnf`, which cannot be cut so.
        ("lnf.weight", Some(TensorPlan::new().column("lnf"))),
        ("cut the model by `Mesh::parallelize`", None),
    ];
    let way = staged(false);
    for (why, plan) in plans {
        let outcomes = way.outcomes(|mesh| {
            TrainStep::builder(mesh, gathering(&way, mesh, plan.as_ref())?).optimizer(adamw()).build().map(drop)
        });
        refused(outcomes, &[why]);
    }
}

#[test]
fn ranks_along_tensor_go_on_with_one_random_state() {
    let scratch = Scratch::new("random-states");
    // Saved by ranks of which each has a seed of its own.
    Way { gpt: staged(false).gpt, ..Way::gpt(2) }.over(&[(Axis::Data, 4)]).each(|training| {
        manual_seed(10 + training.mesh.world().rank() as u64);
        training.go_on(None, 0..1, Some(&scratch.folder())).map(drop)
    });
    let states = staged(false).each(|training| {
        assert!(training.step.load(&scratch.folder())?.is_some());
        let RandomState { seed, drawn, .. } = random_state();
        Ok((seed, drawn))
    });
    assert!(states[0] == states[1] && states[2] == states[3], "{states:?}");
    assert!(states.iter().all(|(seed, _)| *seed >= 10), "{states:?}");
}

//! Batch sizes and sequence lengths that differ from call to call.

use crate::{pipeline_common::*, prelude::*};

/// `m` micro-batches of `rows` examples.
fn data(rt: &Cpu, seed: u64, m: usize, rows: usize) -> Result<Tensor<Cpu>> {
    Tensor::uniform(rt, [m * rows, WIDTH], DType::F32, -1.0, 1.0, seed)
}

fn batch(rt: &Cpu, seed: u64, m: usize, rows: usize) -> Result<MicroBatches<Cpu>> {
    MicroBatches::split(from_ref(&data(rt, seed, m, rows)?), from_ref(&data(rt, seed + 50, m, rows)?), m)
}

/// Rows of a micro-batch, call after call.
const ROWS_OF: [usize; 6] = [3, 1, 5, 5, 2, 3];

fn each(test: impl Fn(ScheduleKind, &Checked, usize, usize, usize)) {
    for (p, v, m) in [(2, 1, 4), (2, 2, 4), (3, 2, 6)] {
        for (kind, checked) in kinds(p, v, m) {
            test(kind, &checked, p, v, m);
        }
    }
}

/// What one rank computes of micro-batch `k` of `rows` examples.
fn expected(rt: &Cpu, depth: usize, seed: u64, m: usize, rows: usize) -> Vec<f32> {
    let (model, x) = (mlp(rt, depth), data(rt, seed, m, rows).unwrap());
    let part = |k| {
        let x = numcore::ops::ViewOps::narrow(&x, 0, k * rows, rows)?;
        model.forward(&autograd::Var::new(x))?.value()?.to_vec::<f32>()
    };
    (0..m).map(part).collect::<Result<Vec<_>>>().unwrap().concat()
}

#[test]
fn evaluations_differ_in_shape_from_each_other_and_from_training() {
    each(|kind, checked, p, v, m| {
        let last = checked.schedule().placement().rank_of(p * v - 1).unwrap();
        let ranks = world(p, |comm| {
            let rt = comm.runtime();
            let mut pipeline = pipeline(&comm, checked, mlp_stages(rt, p * v, p * v))?;
            let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
            let mut seen = Vec::new();
            for (k, rows) in ROWS_OF.into_iter().enumerate() {
                let output = pipeline.evaluate(batch(rt, k as u64, m, rows)?)?;
                let values = output.outputs().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                seen.push(values.concat());
                // Training keeps its own shapes in between.
                if k % 2 == 1 {
                    pipeline.run(batch(rt, 9, m, 2)?, &mut gradients)?;
                }
            }
            Ok(seen)
        });
        let rt = cpu(0).unwrap();
        for (k, rows) in ROWS_OF.into_iter().enumerate() {
            assert!(ranks[last][k] == expected(&rt, p * v, k as u64, m, rows), "{kind} {p} {v} {m}, call {k}");
        }
    });
}

/// Sum and weight of each micro-batch's loss.
type Losses = Vec<(f64, f64)>;

/// Trains with batches of these rows; losses by step, and weights.
fn trained(comm: &Comm<Cpu>, checked: &Checked, depth: usize, rows: &[usize]) -> Result<(Vec<Losses>, Numbers)> {
    let rt = comm.runtime();
    let options = PipelineOptions { dynamic_shapes: true, ..Default::default() };
    let staged =
        PipelineModel::on(comm.rank(), checked.clone(), mlp_stages(rt, depth, depth)).loss(squares).options(options);
    let mut pipeline = Pipeline::new(comm, staged)?;
    let (mut optimizers, mut gradients) = optimizers(&pipeline, 0.05)?;
    let (m, mut losses) = (checked.schedule().micro_batches(), Vec::new());
    for (step, &rows) in rows.iter().enumerate() {
        gradients.values_mut().for_each(optim::FlatGradients::zero);
        let output = pipeline.run(batch(rt, step as u64, m, rows)?, &mut gradients)?;
        losses.push(pipeline.losses(&output)?);
        for (stage, optimizer) in &mut optimizers {
            optim::OptimizerCore::step_from(optimizer, &gradients[stage])?;
        }
    }
    Ok((losses, stage_weights(pipeline.stages().values())))
}

#[test]
fn training_may_take_batches_of_other_shapes_from_run_to_run() {
    each(|kind, checked, p, v, m| {
        let ranks = world(p, |comm| trained(&comm, checked, p * v, &ROWS_OF));
        let rt = cpu(0).unwrap();
        let of = |step: usize, k: usize| {
            let (rows, seed) = (ROWS_OF[step], step as u64);
            let part =
                |seed| numcore::ops::ViewOps::narrow(&data(&rt, seed, m, rows).unwrap(), 0, k * rows, rows).unwrap();
            (part(seed), part(seed + 50))
        };
        let (losses, weights) = alone(&rt, &mlp(&rt, p * v), m, 0.05, ROWS_OF.len(), of, squares);
        let mut seen = BTreeMap::new();
        for (of_rank, weights) in ranks {
            // Kinds whose backwards come in another order add in another order.
            let near = |a: f64, b: f32| (a - f64::from(b)).abs() <= 1e-5 * f64::from(b).abs();
            let same = of_rank.iter().zip(&losses).all(|(a, b)| a.iter().zip(b).all(|(a, b)| near(a.0, *b)));
            assert!(same, "{kind} {p} {v} {m}: {of_rank:?}, alone {losses:?}");
            seen.extend(weights);
        }
        assert!(seen.keys().eq(weights.keys()));
        let pairs = seen.values().flatten().zip(weights.values().flatten());
        let off = pairs.fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
        assert!(off <= 1e-5, "{kind} {p} {v} {m}: {off:e}");
    });
}

#[test]
fn fixed_shapes_are_agreed_on_once_and_others_are_refused_with_what_to_do() {
    let checked = checked(ScheduleKind::OneFOneB, 2, 1, 4).unwrap();
    let sent = world(2, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let mut seen = Vec::new();
        for dynamic_shapes in [false, true] {
            let options = PipelineOptions { dynamic_shapes, ..Default::default() };
            let stages = mlp_stages(comm.runtime(), 2, 2);
            let staged = PipelineModel::on(comm.rank(), checked.clone(), stages).loss(squares).options(options);
            let mut pipeline = Pipeline::new(&comm, staged)?;
            let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
            for _ in 0..3 {
                counting.reset();
                pipeline.run(batch(comm.runtime(), 1, 4, 3)?, &mut gradients)?;
                seen.push(counting.of("send").calls);
            }
        }
        Ok(seen)
    });
    // Rank 0 sends four activations, and a header of two tensors where the ranks agree: once, or of each.
    assert_eq!(sent, [[6, 4, 4, 12, 12, 12], [4, 4, 4, 4, 4, 4]]);
    let outcomes = distributed::comm::Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), 2, 2))?;
        let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
        pipeline.run(batch(comm.runtime(), 1, 4, 3)?, &mut gradients)?;
        pipeline.run(batch(comm.runtime(), 1, 4, 2)?, &mut gradients).map(|_| ())
    });
    refused(outcomes.unwrap(), &["f32 [2, 12]", "dynamic_shapes"]);
}

/// The rows of batches that are no multiple of their micro-batches, and how many of them micro-batch `k` has.
fn uneven(m: usize, step: usize) -> (usize, impl Fn(usize) -> std::ops::Range<usize>) {
    let rows = 2 * m + 1 + step % (m - 1);
    let (each, more) = (rows / m, rows % m);
    (rows, move |k: usize| {
        let start = k * each + k.min(more);
        start..start + each + usize::from(k < more)
    })
}

fn uneven_data(rt: &Cpu, step: usize, rows: usize) -> Result<[Tensor<Cpu>; 2]> {
    let data = |seed: usize| Tensor::uniform(rt, [rows, WIDTH], DType::F32, -1.0, 1.0, seed as u64);
    Ok([data(step)?, data(step + 50)?])
}

#[test]
fn micro_batches_of_one_run_may_have_other_numbers_of_rows() {
    let steps = 3;
    each(|kind, checked, p, v, m| {
        let ranks = world(p, |comm| {
            let rt = comm.runtime();
            let options = PipelineOptions { dynamic_shapes: true, ..Default::default() };
            let stages = mlp_stages(rt, p * v, p * v);
            let staged = PipelineModel::on(comm.rank(), checked.clone(), stages).loss(squares).options(options);
            let mut pipeline = Pipeline::new(&comm, staged)?;
            let (mut optimizers, mut gradients) = optimizers(&pipeline, 0.05)?;
            let mut rows = Vec::new();
            for step in 0..steps {
                let [x, y] = uneven_data(rt, step, uneven(m, step).0)?;
                let batch = || MicroBatches::split(from_ref(&x), from_ref(&y), m);
                rows.push(pipeline.evaluate(batch()?)?.outputs().iter().map(|of| of[0].dims()[0]).collect::<Vec<_>>());
                gradients.values_mut().for_each(optim::FlatGradients::zero);
                pipeline.run(batch()?, &mut gradients)?;
                for (stage, optimizer) in &mut optimizers {
                    optim::OptimizerCore::step_from(optimizer, &gradients[stage])?;
                }
            }
            Ok((rows, stage_weights(pipeline.stages().values())))
        });
        let rt = cpu(0).unwrap();
        let of = |step: usize, k: usize| {
            let (rows, of) = uneven(m, step);
            let [x, y] = uneven_data(&rt, step, rows).unwrap();
            let part = |x: &Tensor<Cpu>| numcore::ops::ViewOps::narrow(x, 0, of(k).start, of(k).len()).unwrap();
            (part(&x), part(&y))
        };
        let (_, weights) = alone(&rt, &mlp(&rt, p * v), m, 0.05, steps, of, squares);
        let last = checked.schedule().placement().rank_of(p * v - 1).unwrap();
        for (step, rows) in ranks[last].0.iter().enumerate() {
            assert!(rows.iter().copied().eq((0..m).map(|k| uneven(m, step).1(k).len())), "{kind}: {rows:?}");
        }
        let seen: BTreeMap<_, _> = ranks.into_iter().flat_map(|(_, weights)| weights).collect();
        assert!(seen.keys().eq(weights.keys()));
        let pairs = seen.values().flatten().zip(weights.values().flatten());
        let off = pairs.fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
        assert!(off <= 1e-5, "{kind} {p} {v} {m}: {off:e}");
    });
}

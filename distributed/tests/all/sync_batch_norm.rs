//! Batch norm over all ranks: what one rank with all examples computes, forward, backward and running.

use distributed::SyncBatchNorm;
use numcore::ops::cat;

use crate::prelude::*;

const CHANNELS: usize = 3;
const EXAMPLES: usize = 11;

/// The examples of each of `n` ranks: none on the last of four and more.
fn parts(n: usize) -> Vec<std::ops::Range<usize>> {
    let holders = if n >= 4 { n - 1 } else { n };
    let cut = |r: usize| EXAMPLES * r.min(holders) * (r.min(holders) + 1) / (holders * (holders + 1));
    (0..n).map(|r| cut(r)..cut(r + 1)).collect()
}

fn norm(rt: &Cpu, dtype: DType) -> Result<BatchNorm<Cpu>> {
    let norm = BatchNorm::new(&Init::new(rt, 0).dtype(dtype), CHANNELS)?;
    let of = |seed| Tensor::uniform(rt, [CHANNELS], dtype, 0.5, 1.5, seed);
    norm.weight.as_ref().unwrap().set(of(1)?)?;
    norm.bias.as_ref().unwrap().set(of(2)?)?;
    Ok(norm)
}

fn shape(rank: usize) -> Vec<usize> {
    [vec![EXAMPLES, CHANNELS], vec![4, 2]].concat()[..rank].to_vec()
}

/// Far from 0, so that sums of squares would lose digits.
fn data(rt: &Cpu, rank: usize, dtype: DType, seed: u64) -> Result<Tensor<Cpu>> {
    Tensor::normal(rt, shape(rank), dtype, 50.0, 2.0, seed)
}

/// The gradients of a loss, which depends on all inputs.
fn gradients(loss: &Var<Cpu>, inputs: &[&Var<Cpu>], create_graph: bool) -> Result<Vec<Var<Cpu>>> {
    Ok(if create_graph { differentiable_grad } else { grad }(&[loss], inputs)?
        .into_iter()
        .map(|g| g.expect("a gradient"))
        .collect())
}

/// Two batches through a layer: outputs, gradients of inputs and of the parameters, running statistics.
fn two_batches(
    layer: &dyn Forward<Cpu>,
    norm: &BatchNorm<Cpu>,
    at: std::ops::Range<usize>,
    rank: usize,
    dtype: DType,
) -> Result<[Vec<f64>; 4]> {
    let rt = norm.weight.as_ref().unwrap().value()?.runtime().clone();
    let wide = |t: &Tensor<Cpu>| t.to_dtype(DType::F64)?.contiguous()?.to_vec::<f64>();
    let [mut outputs, mut inputs, mut parameters, mut running] = [const { Vec::new() }; 4];
    for seed in [5, 6] {
        let part = |seed| data(&rt, rank, dtype, seed)?.narrow(0, at.start, at.len());
        let x = Var::leaf("x", part(seed)?)?;
        let y = layer.forward(&x)?;
        outputs.extend(wide(&y.value()?)?);
        let loss = y.square()?.mul(&Var::new(part(seed + 10)?.mul(0.02)?))?.sum_all()?;
        let (weight, bias) = (norm.weight.as_ref().unwrap().var(), norm.bias.as_ref().unwrap().var());
        let gradients = gradients(&loss, &[&x, &weight, &bias], false)?;
        inputs.extend(wide(&gradients[0].value()?)?);
        parameters.extend(gradients[1..].iter().map(|g| wide(&g.value()?)).collect::<Result<Vec<_>>>()?.concat());
    }
    for buffer in [&norm.running_mean, &norm.running_var, &norm.num_batches_tracked] {
        running.extend(wide(&buffer.value())?);
    }
    Ok([outputs, inputs, parameters, running])
}

fn off(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(f64::MIN_POSITIVE, |most, v| most.max(v.abs()));
    a.iter()
        .zip(b)
        .fold(0.0, |most: f64, (a, b)| if (a - b).is_nan() { f64::NAN } else { most.max((a - b).abs() / scale) })
}

#[test]
fn ranks_with_parts_of_a_batch_are_one_with_all_of_it() {
    for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 3e-2)] {
        for rank in [2, 3, 4] {
            let rt = cpu(0).unwrap();
            let alone = norm(&rt, dtype).unwrap();
            let one = two_batches(&alone, &alone, 0..EXAMPLES, rank, dtype).unwrap();
            for n in WORLDS {
                let all = Ranks::new(n).run(cpu, |comm| {
                    let layer = SyncBatchNorm::over(norm(comm.runtime(), dtype)?, &comm);
                    two_batches(&layer, layer.norm(), parts(n)[comm.rank()].clone(), rank, dtype)
                });
                let all = all.unwrap();
                let batch = |k: usize| {
                    // The first batch of every rank, then the second.
                    let half = |h: usize| {
                        all.iter()
                            .flat_map(move |of| of[k].chunks(of[k].len().max(2) / 2).nth(h).unwrap_or(&[]).to_vec())
                    };
                    half(0).chain(half(1)).collect::<Vec<f64>>()
                };
                let sums: Vec<f64> = (0..one[2].len()).map(|i| all.iter().map(|of| of[2][i]).sum()).collect();
                let what = format!("{dtype}, rank {rank}, {n} ranks");
                assert!(off(&batch(0), &one[0]) <= bound, "{what}: outputs {:e}", off(&batch(0), &one[0]));
                assert!(off(&batch(1), &one[1]) <= bound * 10.0, "{what}: inputs {:e}", off(&batch(1), &one[1]));
                assert!(off(&sums, &one[2]) <= bound * 10.0, "{what}: parameters {:e}", off(&sums, &one[2]));
                for of in &all {
                    assert!(of[3] == all[0][3] && off(&of[3], &one[3]) <= bound, "{what}: running {:?}", of[3]);
                }
            }
        }
    }
}

#[test]
fn the_second_derivative_goes_through_all_ranks_too() {
    let second = |layer: &dyn Forward<Cpu>, rt: &Cpu, at: std::ops::Range<usize>| -> Result<Vec<f64>> {
        let x = Var::leaf("x", data(rt, 2, DType::F64, 5)?.narrow(0, at.start, at.len())?)?;
        let loss = layer.forward(&x)?.tanh()?.square()?.sum_all()?;
        let first = gradients(&loss, &[&x], true)?.remove(0);
        let weights = Var::new(data(rt, 2, DType::F64, 9)?.narrow(0, at.start, at.len())?);
        gradients(&first.mul(&weights)?.sum_all()?, &[&x], false)?.remove(0).value()?.to_vec::<f64>()
    };
    let rt = cpu(0).unwrap();
    let one = second(&norm(&rt, DType::F64).unwrap(), &rt, 0..EXAMPLES).unwrap();
    for n in [2, 3, 5] {
        let all = Ranks::new(n).run(cpu, |comm| {
            let layer = SyncBatchNorm::over(norm(comm.runtime(), DType::F64)?, &comm);
            second(&layer, comm.runtime(), parts(n)[comm.rank()].clone())
        });
        let all = all.unwrap().concat();
        assert!(off(&all, &one) <= 1e-10, "{n} ranks: {:e}", off(&all, &one));
    }
}

/// A model of one's own choice of norm.
fn model(rt: &Cpu, comm: Option<&Comm<Cpu>>) -> Result<Sequential<Cpu>> {
    let init = Init::new(rt, 3).dtype(DType::F64);
    let model = Sequential::new().push(Linear::new(&init, CHANNELS, CHANNELS)?);
    let norm = norm(rt, DType::F64)?;
    let model = match comm {
        Some(comm) => model.push(SyncBatchNorm::over(norm, comm)),
        None => model.push(norm),
    };
    Ok(model.push(Tanh).push(Linear::new(&init, CHANNELS, 2)?))
}

fn loss(model: &Sequential<Cpu>, rt: &Cpu, step: usize, at: std::ops::Range<usize>) -> Result<Loss<Cpu>> {
    let x = Var::new(data(rt, 2, DType::F64, step as u64)?.narrow(0, at.start, at.len())?);
    Loss::sum(model.forward(&x)?.square()?.sum_all()?, at.len() as f64)
}

/// The same with a row that only fills the batch up, and is not even finite after the layer.
fn padded(model: &Sequential<Cpu>, rt: &Cpu, step: usize, at: std::ops::Range<usize>) -> Result<Loss<Cpu>> {
    let own = data(rt, 2, DType::F64, step as u64)?.narrow(0, at.start, at.len())?;
    let x = cat(&[&own, &Tensor::full(rt, [1, CHANNELS], DType::F64, 1e200)?], 0)?;
    set_counted_rows(Some(CountedRows { count: at.len(), rows: at.len() + 1 }));
    let y = model.forward(&Var::new(x))?;
    match at.len() {
        0 => Loss::sum(y.square()?.sum_all()?, 1.0)?.weightless(),
        rows => Loss::sum(y.narrow(0, 0, rows)?.square()?.sum_all()?, rows as f64),
    }
}

#[test]
fn data_parallel_training_is_that_of_one_rank() {
    let state = |model: &Sequential<Cpu>| -> Result<Vec<(String, Vec<f64>)>> {
        let all = model.state_dict()?.into_iter();
        all.map(|(name, t)| Ok((name, t.to_dtype(DType::F64)?.to_vec::<f64>()?))).collect()
    };
    let rt = cpu(0).unwrap();
    let alone = model(&rt, None).unwrap();
    let mut trainer = simple(&rt, &alone, crate::common::config()).unwrap();
    for step in 0..4 {
        trainer.step(|_| loss(&alone, &rt, step, 0..EXAMPLES)).unwrap();
    }
    let (one, x) = (state(&alone).unwrap(), Var::new(data(&rt, 2, DType::F64, 77).unwrap()));
    alone.eval();
    let evaluated = alone.forward(&x).unwrap().value().unwrap().to_vec::<f64>().unwrap();
    for (n, is_padded) in WORLDS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let loss = if is_padded { padded } else { loss };
        let ranks = Ranks::new(n).run(cpu, |comm| {
            let model = model(comm.runtime(), Some(&comm))?;
            let mut trainer = bucketed(&comm, &model, crate::common::config(), GradientSums::default())?;
            for step in 0..4 {
                trainer.step(|_| loss(&model, comm.runtime(), step, parts(n)[comm.rank()].clone()))?;
            }
            set_counted_rows(None);
            let state = state(&model)?;
            model.eval();
            let x = Var::new(data(comm.runtime(), 2, DType::F64, 77)?);
            Ok((state, model.forward(&x)?.value()?.to_vec::<f64>()?))
        });
        for (state, said) in ranks.unwrap() {
            for ((name, got), (due, want)) in state.iter().zip(&one) {
                assert!(name == due && off(got, want) <= 1e-9, "{n} ranks, {name}: {:e}", off(got, want));
            }
            assert!(off(&said, &evaluated) <= 1e-9, "{n} ranks: {:e}", off(&said, &evaluated));
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error_and_evaluation_asks_nobody() {
    let ranks = Ranks::new(2).run(cpu, |comm| {
        let layer = SyncBatchNorm::new(&Init::new(comm.runtime(), 0), CHANNELS, &comm)?;
        for wrong in [vec![4], vec![4, 5]] {
            let x = Var::new(Tensor::zeros(comm.runtime(), &wrong, DType::F32)?);
            let error = layer.forward(&x).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains("3 channels") && error.contains(&format!("rank {}", comm.rank())), "{error}");
        }
        layer.eval();
        // One rank alone: no collective.
        let x = Var::new(Tensor::ones(comm.runtime(), [2, CHANNELS], DType::F32)?);
        let y = if comm.rank() == 0 { Some(layer.forward(&x)?.value()?.to_vec::<f32>()?) } else { None };
        Ok(y.is_none_or(|y| y.iter().all(|v| (v - 1.0).abs() < 1e-4)))
    });
    assert_eq!(ranks.unwrap(), [true, true]);
    // A rank whose output does not reach the loss: an error on all, not a hang.
    let outcomes = Ranks::new(2).timeout(std::time::Duration::from_secs(5)).outcomes(cpu, |comm| {
        let layer = SyncBatchNorm::new(&Init::new(comm.runtime(), 0), CHANNELS, &comm)?;
        let x =
            Var::leaf("x", Tensor::uniform(comm.runtime(), [4, CHANNELS], DType::F32, 0.0, 1.0, comm.rank() as u64)?)?;
        let y = layer.forward(&x)?;
        let y = if comm.rank() == 0 { y } else { x.mul(2.0)? };
        y.sum_all()?.backward()
    });
    let errors: Vec<String> = outcomes.unwrap().into_iter().filter_map(|o| o.err().map(|e| e.to_string())).collect();
    assert!(!errors.is_empty() && errors.iter().all(|e| e.contains("batch norm")), "{errors:?}");
}

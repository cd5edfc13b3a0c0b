//! PowerSGD against its formulas: what is sent, what is kept, what it weighs, and what a step that was left out leaves behind.

use crate::prelude::*;

pub fn compressed(power: PowerSgd) -> GradientSums {
    let limits = Some(BucketLimits { first: 100, others: 300 });
    GradientSums { options: BucketOptions { limits, ..Default::default() }, power: Some(power) }
}

/// As [`compressed`], where parameters may be unused.
pub fn with_unused(power: PowerSgd) -> GradientSums {
    let sums = compressed(power);
    GradientSums { options: BucketOptions { unused: Unused::Allow, ..sums.options }, ..sums }
}

/// The errors of a parameter on this rank, as checkpoints have them; empty if it is not compressed.
pub fn errors(comm: &Comm<Cpu>, step: &TrainStep<Cpu>, name: &str) -> Result<Vec<f64>> {
    let name = distributed::checkpoint::names::own(comm.rank(), &format!("error/{name}"));
    let part = step.parts()?.into_iter().find(|part| part.name == name);
    part.map_or(Ok(Vec::new()), |part| part.row.on(comm.runtime())?.to_f64s())
}

pub fn plain() -> TrainingConfig {
    TrainingConfig { max_norm: None, ..config() }
}

/// A loss whose gradient for every parameter is known: normal numbers, other ones on every rank and at every step.
fn known(model: &Mlp<Cpu>, rank: usize, step: usize, weight: f64, leave_out: &str) -> Result<Loss<Cpu>> {
    let mut sum: Option<Var<Cpu>> = None;
    for (name, p) in model.named_parameters().into_iter().filter(|(name, _)| name != leave_out) {
        let (spec, value) = (p.leaf().spec(), p.var());
        let grad = Tensor::normal(&Cpu::with_threads(1), spec.shape, DType::F64, 0.0, 1.0, seed(&name, rank, step))?;
        let term = value.mul(&Var::new(grad.to_dtype(spec.dtype)?))?.sum_all()?;
        sum = Some(sum.map_or(Ok(term.clone()), |sum| sum.add(&term))?);
    }
    Loss::sum(sum.unwrap_or(Var::new(Tensor::zeros(&Cpu::with_threads(1), [], DType::F64)?)), weight)
}

fn seed(name: &str, rank: usize, step: usize) -> u64 {
    u64::from(crc32fast::hash(name.as_bytes())) * 1000 + 100 * step as u64 + rank as u64
}

fn gradient(name: &str, numel: usize, rank: usize, step: usize) -> Vec<f64> {
    let mut rng = Philox::new(seed(name, rank, step), 0);
    (0..numel).map(|_| rng.normal()).collect()
}

/// A model, its trainer, and what they leave after each step: the mean gradient as it was applied, and this rank's error.
struct Run {
    comm: Comm<Cpu>,
    model: Mlp<Cpu>,
    trainer: TrainStep<Cpu>,
}

impl Run {
    fn new(comm: &Comm<Cpu>, dtype: DType, config: TrainingConfig, sums: impl Into<GradientSums>) -> Result<Self> {
        let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
        let trainer = bucketed(comm, &model, config, sums)?;
        Ok(Run { comm: comm.clone(), model, trainer })
    }

    fn gradient(&self, name: &str) -> Result<Vec<f64>> {
        let leaf = self.model.named_parameters().into_iter().find(|(n, _)| n == name).map(|(_, p)| p.leaf());
        let gradients = data_parallel(&self.trainer).gradients();
        leaf.map(|l| gradients.get(&l)).transpose()?.flatten().map_or(Ok(vec![]), |g| g.to_f64s())
    }

    fn error(&self, name: &str) -> Result<Vec<f64>> {
        errors(&self.comm, &self.trainer, name)
    }

    fn step(&mut self, step: usize, weight: f64) -> Result<()> {
        let (model, rank) = (&self.model, self.comm.rank());
        self.trainer.step(|_| known(model, rank, step, weight, "")).map(|_| ())
    }
}

const MATRICES: [(&str, usize, usize); 3] = [("a.weight", 9, 5), ("b.weight", 7, 9), ("c.weight", 3, 7)];

/// `a: [m, k]` times `b: [k, n]`.
fn product(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
    (0..m * n).map(|at_| at(at_ / n, at_ % n)).collect()
}

fn transposed(a: &[f64], m: usize, n: usize) -> Vec<f64> {
    (0..m * n).map(|at| a[(at % m) * n + at / m]).collect()
}

/// Classical Gram–Schmidt, column by column.
fn orthonormal(p: &mut [f64], m: usize, r: usize) {
    for j in 0..r {
        for before in 0..j {
            let along: f64 = (0..m).map(|i| p[i * r + before] * p[i * r + j]).sum();
            (0..m).for_each(|i| p[i * r + j] -= along * p[i * r + before]);
        }
        let norm = (0..m).map(|i| p[i * r + j] * p[i * r + j]).sum::<f64>().sqrt();
        (0..m).for_each(|i| p[i * r + j] /= norm);
    }
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// A step on the host: the mean gradient, and every rank's error.
struct ByHand {
    mean: Vec<f64>,
    errors: Vec<Vec<f64>>,
}

/// Algorithms 1 and 2 of the paper for one matrix on the host.
fn by_hand((name, m, n): (&str, usize, usize), ranks: usize, r: usize, weights: &[f64]) -> Result<Vec<ByHand>> {
    let first = u64::from(crc32fast::hash(name.as_bytes()));
    let drawn = Tensor::uniform(&Cpu::with_threads(1), [n, r], DType::F64, 0.0, 1.0, first)?.to_vec::<f64>()?;
    let mut q: Vec<f64> = drawn.iter().map(|x| x - 0.5).collect();
    let mut errors = vec![vec![0.0; m * n]; ranks];
    let mut steps = Vec::new();
    for (step, weight) in weights.iter().enumerate() {
        let whole = weight * ranks as f64;
        let scaled = |rank| gradient(name, m * n, rank, step).iter().map(|g| g / whole).collect::<Vec<_>>();
        let all: Vec<Vec<f64>> = (0..ranks).map(|rank| sum(&scaled(rank), &errors[rank])).collect();
        let mut p = all.iter().fold(vec![0.0; m * r], |p, own| sum(&p, &product(own, &q, m, n, r)));
        orthonormal(&mut p, m, r);
        let own_q: Vec<_> = all.iter().map(|own| product(&transposed(own, m, n), &p, n, m, r)).collect();
        q = own_q.iter().fold(vec![0.0; n * r], |q, own| sum(&q, own));
        errors = (0..ranks)
            .map(|rank| {
                let sent = product(&p, &transposed(&own_q[rank], n, r), m, r, n);
                all[rank].iter().zip(sent).map(|(m, s)| m - s).collect()
            })
            .collect();
        steps.push(ByHand { mean: product(&p, &transposed(&q, n, r), m, r, n), errors: errors.clone() });
    }
    Ok(steps)
}

fn off(a: &[f64], b: &[f64]) -> f64 {
    assert!(a.len() == b.len() && !a.is_empty(), "{} and {}", a.len(), b.len());
    let scale = b.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0, |m: f64, (a, b)| if a.is_nan() { f64::NAN } else { m.max((a - b).abs() / scale) })
}

/// What a step's losses weigh on each rank: very different from step to step.
const WEIGHTS: [f64; 4] = [1.0, 100.0, 3.0, 3.0];

#[test]
fn steps_are_those_of_the_paper() {
    for (n, rank) in [(1, 1), (2, 2), (3, 1), (5, 2)] {
        let power = PowerSgd { rank, min_rate: 0.0, ..Default::default() };
        let expected: Vec<_> = MATRICES.iter().map(|&m| by_hand(m, n, rank, &WEIGHTS).unwrap()).collect();
        let program = |comm: Comm<Cpu>| {
            let mut run = Run::new(&comm, DType::F64, plain(), compressed(power))?;
            for (step, weight) in WEIGHTS.into_iter().enumerate() {
                run.step(step, weight)?;
                for ((name, ..), expected) in MATRICES.iter().zip(&expected) {
                    let ByHand { mean, errors } = &expected[step];
                    let (grad, error) = (run.gradient(name)?, run.error(name)?);
                    // Rounding of a few hundred operations a step, amplified where columns of P are nearly parallel.
                    assert!(off(&grad, mean) < 1e-10, "{name} on {n} at {step}: {:e}", off(&grad, mean));
                    assert!(off(&error, &errors[comm.rank()]) < 1e-10, "{name} on {n} at {step}");
                }
            }
            Ok(())
        };
        Ranks::new(n).run(cpu, program).unwrap();
    }
}

#[test]
fn enough_columns_lose_nothing() {
    for n in WORLDS {
        let power = PowerSgd { rank: 100, min_rate: 0.0, ..Default::default() };
        for (dtype, bound) in [(DType::F64, 1e-11), (DType::F32, 1e-4)] {
            let program = |comm: Comm<Cpu>| {
                let mut low = Run::new(&comm, dtype, plain(), compressed(power))?;
                let mut exact = Run::new(&comm, dtype, plain(), BucketOptions::default())?;
                for (step, weight) in WEIGHTS.into_iter().enumerate() {
                    low.step(step, weight)?;
                    exact.step(step, weight)?;
                    for (name, ..) in MATRICES {
                        let worst = off(&low.gradient(name)?, &exact.gradient(name)?);
                        assert!(worst < bound, "{name} {dtype} on {n} at {step}: {worst:e}");
                    }
                }
                Ok(())
            };
            Ranks::new(n).run(cpu, program).unwrap();
        }
    }
}

#[test]
fn what_was_sent_and_what_is_left_are_the_gradients() {
    for n in [1, 3, 4] {
        let power = PowerSgd { rank: 1, ..Default::default() };
        let program = |comm: Comm<Cpu>| {
            let mut run = Run::new(&comm, DType::F64, plain(), compressed(power))?;
            let mut seen = Vec::new();
            for (step, weight) in WEIGHTS.into_iter().enumerate() {
                run.step(step, weight)?;
                for (name, ..) in MATRICES {
                    seen.push((run.gradient(name)?, run.error(name)?));
                }
            }
            Ok(seen)
        };
        let all = Ranks::new(n).run(cpu, program).unwrap();
        for (k, &(name, rows, columns)) in MATRICES.iter().enumerate() {
            let (mut given, mut sent) = (vec![0.0; rows * columns], vec![0.0; rows * columns]);
            for (step, weight) in WEIGHTS.iter().enumerate() {
                for rank in 0..n {
                    let own = gradient(name, rows * columns, rank, step);
                    given = sum(&given, &own.iter().map(|g| g / (weight * n as f64)).collect::<Vec<_>>());
                }
                sent = sum(&sent, &all[0][3 * step + k].0);
                let left = all.iter().fold(sent.clone(), |s, rank| sum(&s, &rank[3 * step + k].1));
                assert!(off(&left, &given) < 1e-13, "{name} on {n} at {step}: {:e}", off(&left, &given));
            }
        }
    }
}

#[test]
fn bytes_are_those_of_the_formula() {
    // Rank 1: a and b are compressed; c (3 + 7 > 21 / 3), and all biases, travel as they are.
    let power = PowerSgd { rank: 1, min_rate: 3.0, start_iter: 1, ..Default::default() };
    let (whole, low) = (45 + 63 + 21 + 19, (9 + 5) + (7 + 9) + 21 + 19);
    for n in [1, 3] {
        Ranks::new(n)
            .run(cpu, |comm| {
                let counted = Arc::new(CountingCommunicator::new(comm));
                let comm = counted.clone() as Comm<Cpu>;
                let mut run = Run::new(&comm, DType::F32, plain(), compressed(power))?;
                for (step, elements) in [whole, low, low].into_iter().enumerate() {
                    counted.reset();
                    run.step(step, 1.0)?;
                    // What the losses weigh, and the sum and weight of the metrics, are f64.
                    assert_eq!(counted.of("all_reduce").payload, 4 * elements + 8 + 16, "step {step}");
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn the_first_steps_are_sent_as_they_are() {
    let steps = |sums: GradientSums| {
        everywhere(3, |comm| {
            let mut run = Run::new(&comm, DType::F32, config(), sums.clone())?;
            let mut trace = Trace::default();
            for step in 0..3 {
                run.step(step, 1.0)?;
                trace.weights.push(weights(&run.model)?);
            }
            Ok(trace)
        })
        .weights
    };
    let limits = Some(BucketLimits { first: 100, others: 300 });
    let exact = steps(BucketOptions { limits, ..Default::default() }.into());
    let late = steps(compressed(PowerSgd { start_iter: 2, ..Default::default() }));
    assert!(exact[..2] == late[..2] && exact[2] != late[2]);
}

#[test]
fn a_step_that_is_left_out_leaves_errors_alone() {
    left_out(TrainingConfig { loss_scaling: Some(LossScaler::starting_at(1024.0).unwrap()), ..plain() });
    left_out(TrainingConfig { skip_non_finite: true, ..plain() });
}

fn left_out(scaled: TrainingConfig) {
    everywhere(3, |comm| {
        let mut run = Run::new(&comm, DType::F32, scaled.clone(), compressed(PowerSgd::default()))?;
        let mut other = Run::new(&comm, DType::F32, scaled.clone(), compressed(PowerSgd::default()))?;
        for (step, bad) in [(0, false), (1, false), (9, true), (2, false), (3, false)] {
            let before = run.error("b.weight")?;
            let spoil = if bad && comm.rank() == 1 { f64::INFINITY } else { 1.0 };
            let (model, rank) = (&run.model, comm.rank());
            let metrics = run.trainer.step(|_| {
                let loss = known(model, rank, step, 1.0, "")?;
                Loss::sum(loss.total().mul(spoil)?, loss.weight())
            })?;
            assert_eq!(metrics.stepped(), !bad);
            assert_eq!(run.error("b.weight")? == before, bad);
            if !bad {
                other.step(step, 1.0)?;
            }
            assert!(run.error("b.weight")?.iter().all(|e| e.is_finite()));
        }
        // The loss scale, a power of two, takes no part: as if the step had not been.
        assert_eq!(weights(&run.model)?, weights(&other.model)?);
        assert_eq!(run.error("b.weight")?, other.error("b.weight")?);
        Ok(Trace { weights: vec![weights(&run.model)?], ..Default::default() })
    });
}

#[test]
fn a_parameter_that_nobody_used_keeps_its_error() {
    let options = || with_unused(PowerSgd::default());
    everywhere(2, |comm| {
        let mut run = Run::new(&comm, DType::F64, plain(), options())?;
        let mut last = vec![];
        // At first nobody has it, then all, then one rank alone, then nobody.
        for (step, out) in [[true, true], [false, false], [true, false], [true, true]].into_iter().enumerate() {
            let (model, rank) = (&run.model, comm.rank());
            let leave_out = if out[rank] { "b.weight" } else { "" };
            run.trainer.step(|_| known(model, rank, step, 1.0, leave_out))?;
            let (grad, error) = (run.gradient("b.weight")?, run.error("b.weight")?);
            match out {
                [true, true] => {
                    assert!(grad.is_empty() && (error == last || (step == 0 && error.iter().all(|&e| e == 0.0))))
                }
                _ => assert!(grad.iter().any(|g| g.abs() > 0.01), "the column that was zero is drawn anew: {grad:?}"),
            }
            last = error;
        }
        Ok(Trace { weights: vec![weights(&run.model)?], ..Default::default() })
    });
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let refused = |sums: GradientSums| {
        let comm = Arc::new(distributed::comm::NoOpCommunicator::new(&Cpu::with_threads(1))) as Comm<Cpu>;
        Run::new(&comm, DType::F32, plain(), sums).err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(refused(compressed(PowerSgd { rank: 0, ..Default::default() })).contains("`rank` is 0"));
    assert!(refused(compressed(PowerSgd { min_rate: f64::NAN, ..Default::default() })).contains("min_rate"));
    assert!(
        refused(GradientSums {
            options: BucketOptions { canonical: true, ..Default::default() },
            ..compressed(PowerSgd::default())
        })
        .contains("canonical")
    );
    let rt = Cpu::with_threads(1);
    let comm = Arc::new(distributed::comm::NoOpCommunicator::new(&rt)) as Comm<Cpu>;
    let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
    let fine = bucketed(&comm, &model, plain(), compressed(PowerSgd::default()));
    assert!(fine.unwrap().step(|_| model.loss(&rt, 0, &own(&comm))).is_ok());
}

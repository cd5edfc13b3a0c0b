//! Running a program, and what must hold of it.

use std::{fs, path::Path, sync::Arc, time::Duration};

use weftgrad::{
    Use,
    distributed::{
        buckets::{BucketLimits, BucketOptions},
        checkpoint::{Checkpointed, Folder},
        comm::{Collectives, Comm, Communicator, Fault, FaultyCommunicator, NoOpCommunicator, Ranks},
        sampler::shard_batches,
        train::{BucketedTrainer, Loss, Notes, Strategy, Trainer, TrainingConfig},
        zero::{UnitOf, ZeroOptions, ZeroTrainer},
    },
    fused::Reduction,
    nn::{Init, Linear},
    prelude::*,
};

use crate::program::{How, Program};

type Model = Vec<Linear<Cpu>>;
/// Fine, or what is wrong.
pub type Verdict = std::result::Result<(), String>;

/// Far longer than any call takes here, and short for whoever waits for a fault to be found.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Rounding in `f64`, grown by a handful of steps of AdamW.
const BOUND: f64 = 1e-9;

/// What a rank has at the end: losses, weights, and bytes that are still booked after everything was dropped.
#[derive(Clone, Debug, PartialEq)]
struct End {
    losses: Vec<f64>,
    weights: Vec<f64>,
    left: usize,
}

/// Runs a program; what must hold and does not, in words.
pub fn check(program: &Program) -> Verdict {
    let scratch = std::env::temp_dir().join(format!("weftgrad-soak-{}-{}", std::process::id(), program.seed));
    let _ = fs::remove_dir_all(&scratch);
    let outcome = checked(program, &scratch);
    let _ = fs::remove_dir_all(&scratch);
    outcome
}

fn checked(program: &Program, scratch: &Path) -> Verdict {
    let alone = single(program).map_err(|e| format!("on one rank: {e}"))?;
    let folder = Folder::new(scratch);
    let ranks = Ranks::new(program.ranks).timeout(TIMEOUT);
    let outcomes =
        ranks.outcomes(|_| Ok(Cpu::with_threads(1)), |comm| rank(comm, program, &folder)).map_err(|e| e.to_string())?;
    let failed = outcomes.iter().filter(|o| o.is_err()).count();
    let harmless = matches!(program.fault, None | Some((_, _, Fault::Delay(_))));
    if harmless && failed > 0 {
        let errors: Vec<String> = outcomes.iter().filter_map(|o| o.as_ref().err().map(ToString::to_string)).collect();
        return Err(format!("{failed} ranks failed: {}", errors.join("\n")));
    }
    // A fault may befall a call that was never made; one that does is everybody's. Who left its last call out does not see that the
    // others wait for it.
    let skipped = matches!(program.fault, Some((_, _, Fault::Skip)));
    if failed > 0 && failed + usize::from(skipped) < program.ranks {
        return Err(format!("a fault was seen by {failed} of {} ranks", program.ranks));
    }
    let ends: Vec<End> = outcomes.into_iter().filter_map(Result::ok).collect();
    for (rank, end) in ends.iter().enumerate() {
        if (&end.losses, &end.weights) != (&ends[0].losses, &ends[0].weights) {
            return Err(format!("rank {rank} differs from rank 0"));
        }
        if end.left > 0 {
            return Err(format!("rank {rank} leaks {} bytes", end.left));
        }
        near("losses", &end.losses, &alone.losses)?;
        near("weights", &end.weights, &alone.weights)?;
    }
    resumed(program, &folder, &alone, failed == 0)
}

/// Whatever happened, the last checkpoint loads on one rank, and going on ends where an undisturbed run does.
fn resumed(program: &Program, folder: &Folder, alone: &End, saved: bool) -> Verdict {
    let Some(step) = folder.latest().map_err(|e| e.to_string())? else {
        return if saved { Err("there is no checkpoint".into()) } else { Ok(()) };
    };
    let rt = Cpu::with_threads(1);
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&rt));
    let go_on = || {
        let model = model(&rt, program, 99)?;
        let mut trainer = BucketedTrainer::new(&comm, &model, config(program), BucketOptions::default())?;
        trainer.load(folder)?;
        steps(&mut trainer, &comm, &model, program, step as usize..program.steps)?;
        weights(&model)
    };
    near("weights after resuming", &go_on().map_err(|e| format!("the checkpoint of step {step}: {e}"))?, &alone.weights)
}

fn near(what: &str, got: &[f64], expected: &[f64]) -> Verdict {
    let off = got.iter().zip(expected).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
    match got.len() == expected.len() && off <= BOUND {
        true => Ok(()),
        false => Err(format!("{what} differ from one rank's by {off:e}")),
    }
}

fn config(program: &Program) -> TrainingConfig {
    TrainingConfig {
        learning_rate: 1e-2,
        weight_decay: 0.1,
        accumulation: program.accumulation,
        max_norm: program.max_norm,
        ..Default::default()
    }
}

fn model(rt: &Cpu, program: &Program, seed: u64) -> Result<Model> {
    let init = Init::new(rt, seed).dtype(DType::F64);
    program.widths.windows(2).map(|w| Linear::new(&init, w[0], w[1])).collect()
}

fn loss(rt: &Cpu, model: &Model, program: &Program, step: usize, own: &[usize]) -> Result<Loss<Cpu>> {
    let (first, last) = (program.widths[0], program.widths[program.widths.len() - 1]);
    let index = Tensor::from_vec(rt, own.iter().map(|&i| i as i64).collect::<Vec<_>>())?;
    let batch = |width, stream: u64| {
        let seed = program.seed.wrapping_mul(1000) + stream + step as u64;
        Tensor::normal(rt, [program.examples, width], DType::F64, 0.0, 1.0, seed)?.index_select(0, &index)
    };
    let (x, y) = (batch(first, 0)?, batch(last, 500)?);
    let out = model.iter().try_fold(Var::new(x), |x, layer| layer.forward(&x)?.tanh())?;
    Loss::sum(nn::loss::mse(&out, &Var::new(y), Reduction::Sum)?, (last * own.len()) as f64)
}

fn weights(model: &Model) -> Result<Vec<f64>> {
    model.named_parameters().iter().try_fold(Vec::new(), |mut all, (_, p)| {
        all.extend(p.value()?.to_vec::<f64>()?);
        Ok(all)
    })
}

fn steps<S: Strategy<Cpu>>(
    trainer: &mut Trainer<Cpu, S>,
    comm: &Comm<Cpu>,
    model: &Model,
    program: &Program,
    which: std::ops::Range<usize>,
) -> Result<Vec<f64>> {
    let own = shard_batches(program.examples, comm.rank(), comm.size());
    let micro = |k: usize| own.iter().copied().skip(k).step_by(program.accumulation).collect::<Vec<_>>();
    which.map(|s| trainer.step(|k| loss(comm.runtime(), model, program, s, &micro(k)))?.loss()).collect()
}

fn single(program: &Program) -> Result<End> {
    let rt = Cpu::with_threads(1);
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&rt));
    let model = model(&rt, program, 1)?;
    let mut trainer = BucketedTrainer::new(&comm, &model, config(program), BucketOptions::default())?;
    let losses = steps(&mut trainer, &comm, &model, program, 0..program.steps)?;
    Ok(End { losses, weights: weights(&model)?, left: 0 })
}

fn rank(comm: Comm<Cpu>, program: &Program, folder: &Folder) -> Result<End> {
    let rt = comm.runtime().clone();
    let comm: Comm<Cpu> = match program.fault {
        Some((rank, call, fault)) if rank == comm.rank() => Arc::new(FaultyCommunicator::new(comm, call, fault)),
        _ => comm,
    };
    let (losses, weights) = match program.how {
        How::Buckets { first, others } => {
            let model = model(&rt, program, 1 + comm.rank() as u64)?;
            let options = BucketOptions { limits: BucketLimits { first, others }, ..Default::default() };
            let mut trainer = BucketedTrainer::new(&comm, &model, config(program), options)?;
            let losses = saving(&mut trainer, &comm, &model, program, folder)?;
            (losses, weights(&model)?)
        }
        How::Zero { stage, whole } => {
            let model = model(&rt, program, 1 + comm.rank() as u64)?;
            let units = if whole { UnitOf::whole() } else { UnitOf::layers() };
            let options = ZeroOptions { stage, units, ..Default::default() };
            let mut trainer = ZeroTrainer::new(&comm, &model, config(program), options)?;
            let losses = saving(&mut trainer, &comm, &model, program, folder)?;
            let _scope = trainer.strategy().gather_full_params()?;
            (losses, weights(&model)?)
        }
    };
    comm.barrier()?;
    drop(comm);
    let left = Use::ALL.iter().map(|&u| rt.memory().of(u).live).sum();
    Ok(End { losses, weights, left })
}

fn saving<S: Strategy<Cpu> + Checkpointed<Cpu>>(
    trainer: &mut Trainer<Cpu, S>,
    comm: &Comm<Cpu>,
    model: &Model,
    program: &Program,
    folder: &Folder,
) -> Result<Vec<f64>> {
    let mut losses = steps(trainer, comm, model, program, 0..program.save_after)?;
    trainer.save(folder, &Notes::new())?;
    losses.extend(steps(trainer, comm, model, program, program.save_after..program.steps)?);
    Ok(losses)
}

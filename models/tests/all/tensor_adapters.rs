//! Adapters of models whose layers are cut over ranks: training them is training them on one rank.

use autograd::{Var, manual_seed};
use distributed::{
    comm::{Comm, Communicator, Ranks},
    context_parallel::ContextExchange,
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{Lora, LoraConfig, LoraTargets, SaveOptions};
use nn::{Forward, Gpt, GptConfig, Init, ModuleExt, loss::cross_entropy_with, parallel::TensorPlan};
use numcore::{
    DType, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::ViewOps,
};
use optim::AdamWConfig;
use runtime_cpu::Cpu;

use crate::common::*;

#[derive(Clone, Copy, Debug)]
struct Case {
    /// Ranks that layers are cut over, and the sizes of the model: heads that so many ranks divide.
    tensor: usize,
    /// Ranks that the examples, or the state, are shared out among.
    others: usize,
    zero: Option<ZeroStage>,
    sequence: bool,
    dropout: f64,
    dora: bool,
    targets: &'static [&'static str],
    /// Whether the head is left whole, behind all of the sequence.
    whole_head: bool,
}

const CUT: &[&str] = &["qkv", "proj", "fc1", "fc2"];

impl Case {
    fn of(tensor: usize) -> Self {
        Case {
            tensor,
            others: 1,
            zero: None,
            sequence: false,
            dropout: 0.0,
            dora: false,
            targets: CUT,
            whole_head: false,
        }
    }

    fn model(&self) -> GptConfig {
        let heads = self.tensor.max(2);
        let (width, context) = (4 * heads, 2 * heads);
        GptConfig { vocab: heads + 1, context, layers: 2, heads, width, ..Default::default() }
    }

    fn adapted(&self, comm: &Comm<Cpu>) -> Result<(Gpt<Cpu>, Lora<Cpu>)> {
        let init = Init::new(comm.runtime(), 7).dtype(DType::F64).lazily();
        let model = Gpt::new(&init, self.model())?;
        let names = self.targets.iter().map(|name| name.to_string()).collect();
        let config = LoraConfig {
            rank: 3,
            dropout: self.dropout,
            dora: self.dora,
            target_modules: LoraTargets::Names(names),
            ..LoraConfig::default()
        };
        let lora = Lora::on_module(&model, &init, config)?;
        Ok((model, lora))
    }

    fn plan(&self) -> TensorPlan {
        let plan = Gpt::<Cpu>::tensor_plan().sequence_parallel(self.sequence);
        if self.whole_head { plan.without("head") } else { plan }
    }

    /// The losses and norms of a few steps on a mesh, and what the model computes with the adapters merged.
    fn train(&self, comm: &Comm<Cpu>, tensor: usize, others: usize, zero: Option<ZeroStage>) -> Result<Vec<f64>> {
        manual_seed(5);
        let axis = if zero.is_some() { Axis::Shard } else { Axis::Data };
        let mesh = Mesh::new(comm, ParallelPlan::of([(axis, others), (Axis::Tensor, tensor)])?)?;
        let (model, mut lora) = self.adapted(comm)?;
        mesh.parallelize(&model, &self.plan())?;
        let builder =
            TrainStep::builder(&mesh, &lora).optimizer(AdamWConfig { lr: 0.02, ..Default::default() }).max_norm(0.3);
        let examples = mesh.batch();
        let Some(stage) = zero else {
            let seen = self.steps(&mut builder.build()?, &model, examples)?;
            return self.merged(&model, &mut lora, seen);
        };
        let mut step = builder.zero(stage).build()?;
        let seen = self.steps(&mut step, &model, examples)?;
        let _whole = step.gather_full_params()?;
        self.merged(&model, &mut lora, seen)
    }

    fn steps(&self, step: &mut TrainStep<Cpu>, model: &Gpt<Cpu>, examples: &Comm<Cpu>) -> Result<Vec<f64>> {
        let mut seen = Vec::new();
        for k in 0..4 {
            let (tokens, targets) = self.batch(examples, k)?;
            let metrics = step.step(|_| {
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                let loss = cross_entropy_with(&model.forward(&tokens)?, &targets, options)?;
                Loss::sum(loss, targets.dims().iter().product::<usize>() as f64)
            })?;
            seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
        }
        Ok(seen)
    }

    /// What was seen, and what the model computes before and after its adapters are merged.
    fn merged(&self, model: &Gpt<Cpu>, lora: &mut Lora<Cpu>, mut seen: Vec<f64>) -> Result<Vec<f64>> {
        model.eval();
        let (tokens, _) = self.rows(model.start()?.tokens.weight.leaf().runtime(), 9, 0..1)?;
        let logits = |seen: &mut Vec<f64>| -> Result<()> {
            seen.extend(model.forward(&tokens)?.value()?.to_vec::<f64>()?.into_iter().step_by(3));
            Ok(())
        };
        logits(&mut seen)?;
        lora.merge()?;
        logits(&mut seen)?;
        lora.unmerge()?;
        logits(&mut seen)?;
        Ok(seen)
    }

    fn batch(&self, examples: &Comm<Cpu>, step: usize) -> Result<(Var<Cpu>, Var<Cpu>)> {
        let each = 4 / examples.size();
        self.rows(examples.runtime(), step, examples.rank() * each..(examples.rank() + 1) * each)
    }

    /// Tokens and targets of these examples of a step.
    fn rows(&self, rt: &Cpu, step: usize, rows: std::ops::Range<usize>) -> Result<(Var<Cpu>, Var<Cpu>)> {
        let GptConfig { vocab, context, .. } = self.model();
        let of = |shift: usize| {
            let token = |i: usize| ((i * 7 + i / 3 + step * 5 + shift) % vocab) as i64;
            let tokens: Vec<i64> = (rows.start * context..rows.end * context).map(token).collect();
            Tensor::from_slice(rt, [rows.len(), context], &tokens).map(Var::new)
        };
        Ok((of(0)?, of(3)?))
    }

    fn check(&self) {
        let run = |tensor: usize, others: usize, zero| {
            Ranks::new(tensor * others).run(|_| Ok(cpu()), |comm| self.train(&comm, tensor, others, zero)).unwrap()
        };
        let one = run(1, 1, None).remove(0);
        for (rank, seen) in run(self.tensor, self.others, self.zero).into_iter().enumerate() {
            assert_eq!(seen.len(), one.len());
            for (k, (a, b)) in seen.iter().zip(&one).enumerate() {
                assert!((a - b).abs() <= 1e-10 * b.abs().max(1.0), "{self:?}, rank {rank}, {k}: {a} and {b}");
            }
        }
    }
}

#[test]
fn adapters_of_cut_layers_train_as_on_one_rank() {
    for tensor in [2, 3, 4] {
        for sequence in [false, true] {
            Case { sequence, ..Case::of(tensor) }.check();
        }
    }
}

#[test]
fn so_they_do_with_magnitudes_and_dropout() {
    for sequence in [false, true] {
        Case { sequence, dora: true, ..Case::of(2) }.check();
        Case { sequence, dropout: 0.25, ..Case::of(2) }.check();
        Case { sequence, dora: true, dropout: 0.25, ..Case::of(2) }.check();
    }
}

#[test]
fn so_they_do_beside_replicas_and_shards() {
    for zero in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
        Case { others: 2, zero, sequence: zero.is_none(), ..Case::of(2) }.check();
    }
}

#[test]
fn a_head_cut_along_its_vocabulary_has_one() {
    Case { targets: &["head", "proj"], ..Case::of(2) }.check();
    Case { targets: &["head", "fc1"], sequence: true, dora: true, ..Case::of(4) }.check();
    for whole_head in [false, true] {
        Case { targets: &["head", "fc2"], sequence: true, dropout: 0.25, whole_head, ..Case::of(2) }.check();
    }
}

#[test]
fn the_adapters_alone_are_trained_on_parts_of_sequences() {
    let losses = |ranks: usize| {
        let run = |comm: Comm<Cpu>| {
            let case = Case::of(2);
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, ranks)])?)?;
            let (model, lora) = case.adapted(&comm)?;
            mesh.context_parallel(&model, ContextExchange::AllGather)?;
            let mut step =
                TrainStep::builder(&mesh, &lora).optimizer(AdamWConfig { lr: 0.02, ..Default::default() }).build()?;
            let mut seen = Vec::new();
            for k in 0..3 {
                let (tokens, targets) = case.batch(mesh.batch(), k)?;
                let metrics = step.step(|_| {
                    let here = model.context.take(&targets, 1)?;
                    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                    let loss = cross_entropy_with(&model.forward(&tokens)?, &here, options)?;
                    Loss::sum(model.context.of_whole(&loss)?, targets.dims().iter().product::<usize>() as f64)
                })?;
                seen.push(metrics.loss()?);
            }
            Ok(seen)
        };
        Ranks::new(ranks).run(|_| Ok(cpu()), run).unwrap().remove(0)
    };
    for (two, one) in losses(2).into_iter().zip(losses(1)) {
        assert!((two - one).abs() <= 1e-11, "{two} and {one}");
    }
}

/// Rows `[N, C]` of parts of sequences do not show where one of them ends, which masks of dropout must know.
#[test]
fn rows_without_their_sequences_have_no_masks() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, 2)])?)?;
            let case = Case { dropout: 0.25, ..Case::of(2) };
            let ((model, _lora), width) = (case.adapted(&comm)?, case.model().width);
            mesh.context_parallel(&model, ContextExchange::AllGather)?;
            let x = Tensor::ones(comm.runtime(), [4, width], DType::F64)?;
            let refused = model.blocks[0].fc1.forward(&Var::new(x.clone())).map(drop).unwrap_err().to_string();
            model.blocks[0].fc1.forward(&Var::new(x.reshape([2, 2, width])?))?;
            Ok(refused)
        },
    );
    for refused in outcome.unwrap() {
        assert!(refused.contains("does not show where one of them ends"), "{refused}");
    }
}

/// Files of ranks that have pieces are those of one rank, to the bit.
#[test]
fn adapters_are_saved_while_they_are_cut() {
    let [one, many] = [(); 2].map(|()| Scratch::new());
    let case = Case { dora: true, targets: &["qkv", "proj", "fc1", "head"], ..Case::of(4) };
    for (ranks, folder) in [(1, &one), (4, &many)] {
        let run = |comm: Comm<Cpu>| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, ranks)])?)?;
            let (model, lora) = case.adapted(&comm)?;
            mesh.parallelize(&model, &case.plan())?;
            lora.save_with(&folder.0, &SaveOptions { writes: comm.rank() == 0, ..Default::default() })
        };
        Ranks::new(ranks).run(|_| Ok(cpu()), run).unwrap();
    }
    same_tensors(&weight_files(&many.0), &weight_files(&one.0));
}

#[test]
fn layers_that_are_named_by_their_weights_alone_are_refused() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let case = Case::of(2);
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
            let (model, lora) = case.adapted(&comm)?;
            let plan = TensorPlan::new().column("blocks.*.fc1.weight").column("blocks.*.fc1.bias").row("blocks.*.fc2");
            mesh.parallelize(&model, &plan)?;
            let (tokens, _) = case.rows(comm.runtime(), 0, 0..1)?;
            drop(lora);
            Ok(model.forward(&tokens).unwrap_err().to_string())
        },
    );
    for forward in outcome.unwrap() {
        assert!(forward.contains("fc1.lora_B.weight") && forward.contains("let a line of the plan name"), "{forward}");
    }
}

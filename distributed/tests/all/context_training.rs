//! Context parallelism: a model whose sequences are cut trains as the whole one does, with every strategy.

use crate::{
    prelude::*,
    tensor_common::{TensorCase, apart},
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

/// A model of `heads` heads and sequences that `c` ranks can share out, in parts that two ranks can cut further.
fn case(c: usize, heads: usize) -> TensorCase {
    let mut case = TensorCase::new(heads);
    case.model.context = 4 * c;
    case
}

fn same(case: &TensorCase, axes: &[(Axis, usize)]) {
    let off = apart(&case.on(axes), &case.alone());
    assert!(off <= CLOSE, "{axes:?} {case:?}: {off:e}");
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    for c in [1, 2, 3, 4, 5, 8] {
        let mut case = case(c, 2);
        case.model.tied_head = c % 2 == 0;
        same(&case, &[(Axis::Context, c)]);
    }
}

#[test]
fn twenty_clipped_steps_are_those_of_one_rank() {
    let case = TensorCase { steps: 20, max_norm: 0.05, ..case(2, 2) };
    let alone = case.alone();
    for (axes, zero) in [
        (&[(Axis::Data, 2), (Axis::Context, 2)][..], None),
        (&[(Axis::Shard, 2), (Axis::Context, 2)], Some(ZeroStage::Parameters)),
        (&[(Axis::Data, 2), (Axis::Context, 2), (Axis::Tensor, 2)], None),
        (&[(Axis::Shard, 2), (Axis::Context, 2), (Axis::Tensor, 2)], Some(ZeroStage::Gradients)),
    ] {
        let off = apart(&TensorCase { zero, sequence: zero.is_some(), ..case.clone() }.on(axes), &alone);
        assert!(off <= CLOSE, "{axes:?}: {off:e}");
    }
}

#[test]
fn every_stage_of_zero_shards_over_shard_and_context() {
    for stage in ZeroStage::ALL {
        let case = TensorCase { zero: Some(stage), ..case(2, 2) };
        for axes in [
            &[(Axis::Context, 2)][..],
            &[(Axis::Data, 3), (Axis::Context, 2)],
            &[(Axis::Shard, 3), (Axis::Context, 2)],
            &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Context, 2)],
        ] {
            same(&case, axes);
        }
    }
}

#[test]
fn every_exchange_trains_alike() {
    for exchange in [ContextExchange::Ring, ContextExchange::Ulysses] {
        for (c, axes, zero) in [
            (2, &[(Axis::Data, 2), (Axis::Context, 2)][..], Some(ZeroStage::Parameters)),
            (3, &[(Axis::Context, 3)], None),
            (2, &[(Axis::Context, 2), (Axis::Tensor, 2)], None),
        ] {
            let mut case = TensorCase { exchange, zero, accumulation: 2, sequence: true, ..case(c, 12) };
            case.model.dropout = 0.2;
            // Of a batch that is shared out, ranks have masks of their own.
            case.model.dropout *= if axes[0].0 == Axis::Data { 0.0 } else { 1.0 };
            same(&case, axes);
        }
    }
}

#[test]
fn masks_do_not_depend_on_the_cut() {
    for (c, axes, sequence) in [
        (2, &[(Axis::Context, 2)][..], false),
        (3, &[(Axis::Context, 3)], false),
        (2, &[(Axis::Context, 2), (Axis::Tensor, 2)], false),
        (2, &[(Axis::Context, 2), (Axis::Tensor, 2)], true),
    ] {
        let mut case = TensorCase { sequence, ..case(c, 2) };
        case.model.dropout = 0.3;
        same(&case, axes);
    }
}

#[test]
fn accumulated_and_frozen_parameters_train_alike() {
    let stages = [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Parameters)];
    let frozen = [&[][..], &["blocks.0.ln1", "wte", "wpe"], &["blocks.0"], &["blocks.1.qkv", "lnf"]];
    for (zero, frozen) in half(&stages, &frozen) {
        let case = TensorCase { zero, frozen, accumulation: 3, ..case(2, 2) };
        same(&case, &[(Axis::Data, 2), (Axis::Context, 2)]);
        same(&TensorCase { sequence: true, ..case }, &[(Axis::Context, 2), (Axis::Tensor, 2)]);
    }
}

#[test]
fn single_precision_stays_within_its_rounding() {
    let case = TensorCase { dtype: DType::F32, steps: 1, ..case(3, 2) };
    let (many, one) = (case.on(&[(Axis::Context, 3)]), case.alone());
    assert!((many.losses[0] - one.losses[0]).abs() <= 1e-5 * one.losses[0], "{many:?}");
    assert!((many.norms[0] - one.norms[0]).abs() <= 1e-5 * one.norms[0], "{many:?}");
}

#[test]
fn losses_of_ignored_targets_are_those_of_one_rank() {
    for reduction in [Reduction::Sum, Reduction::Mean] {
        for (label_smoothing, z_loss) in [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2)] {
            let cross_entropy = CrossEntropyOptions { label_smoothing, ignore_index: 3, reduction };
            let loss = VocabularyLoss { cross_entropy, z_loss };
            let case = TensorCase { loss, ..case(3, 2) };
            same(&case, &[(Axis::Context, 3)]);
            same(&case, &[(Axis::Context, 3), (Axis::Tensor, 2)]);
        }
    }
}

#[test]
fn logits_and_losses_of_rows_are_those_of_the_tokens_here() {
    let mut case = case(3, 2);
    case.loss.cross_entropy.reduction = Reduction::None;
    let rt = cpu(0).unwrap();
    let (x, y) = case.batch(&rt, 0, &[0, 1]).unwrap();
    let model = case.build(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
    let rows = model.next_token_loss(&x, &y, &case.loss).unwrap().value().unwrap();
    let logits = model.forward(&x).unwrap().value().unwrap();
    let run = Ranks::new(3).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, 3)])?)?;
        let model = case.build(&mesh)?;
        let (x, y) = case.batch(comm.runtime(), 0, &[0, 1])?;
        let here = model.next_token_loss(&x, &y, &case.loss)?.value()?.to_vec::<f64>()?;
        Ok((here, model.forward(&x)?.value()?.to_vec::<f64>()?, model.context.part(case.model.context)?))
    });
    for (here, logits_here, part) in run.unwrap() {
        let whole = part.take(&rows, 1).unwrap().to_vec::<f64>().unwrap();
        assert!(here.iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 1e-12) && here.len() == whole.len());
        let whole = part.take(&logits, 1).unwrap().to_vec::<f64>().unwrap();
        assert!(
            logits_here.iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 1e-12) && logits_here.len() == whole.len()
        );
    }
}

#[test]
fn a_step_weighs_what_one_rank_says() {
    let case = case(2, 2);
    let weights = Ranks::new(4).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Context, 2)])?)?;
        let model = case.build(&mesh)?;
        let mut step =
            distributed::train::TrainStep::builder(&mesh, &model).optimizer(crate::common::adamw()).build()?;
        case.step(&mut step, &model, mesh.batch(), 0)?.weight()
    });
    let tokens = (crate::tensor_common::SEQUENCES * case.model.context) as f64;
    assert_eq!(weights.unwrap(), vec![tokens; 4]);
    assert_eq!(case.exchange, ContextExchange::default());
}

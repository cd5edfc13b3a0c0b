//! Tensor parallelism: a model that is cut trains as the whole one does, and with every strategy.

use crate::{
    prelude::*,
    tensor_common::{TensorCase, apart},
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

fn same(case: &TensorCase, axes: &[(Axis, usize)]) {
    let off = apart(&case.on(axes), &case.alone());
    assert!(off <= CLOSE, "{axes:?} {case:?}: {off:e}");
}

#[test]
fn a_gpt_trains_over_data_and_tensor_as_on_one_rank() {
    same(&TensorCase::new(2), &[(Axis::Data, 2), (Axis::Tensor, 2)]);
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    for t in [1, 2, 3, 4, 5, 8] {
        for tied_head in [false, true] {
            let mut case = TensorCase::new(t);
            case.model.tied_head = tied_head;
            same(&case, &[(Axis::Tensor, t)]);
        }
    }
}

#[test]
fn single_precision_stays_within_its_rounding() {
    for t in [2, 3] {
        let case = TensorCase { dtype: DType::F32, steps: 1, ..TensorCase::new(t) };
        let (many, one) = (case.on(&[(Axis::Tensor, t)]), case.alone());
        assert!((many.losses[0] - one.losses[0]).abs() <= 1e-5 * one.losses[0], "{many:?}");
        assert!((many.norms[0] - one.norms[0]).abs() <= 1e-5 * one.norms[0], "{many:?}");
    }
}

#[test]
fn twenty_clipped_steps_are_those_of_one_rank() {
    let case = TensorCase { steps: 20, max_norm: 0.05, ..TensorCase::new(2) };
    same(&case, &[(Axis::Data, 2), (Axis::Tensor, 2)]);
}

#[test]
fn every_stage_of_zero_shards_the_pieces() {
    let mut turns = Turns::one_of(5);
    for stage in ZeroStage::ALL {
        for axes in [
            &[(Axis::Data, 2), (Axis::Tensor, 2)][..],
            &[(Axis::Shard, 3), (Axis::Tensor, 2)],
            &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)],
        ] {
            for sequence in [false, true].into_iter().filter(|_| turns.come()) {
                same(&TensorCase { zero: Some(stage), sequence, ..TensorCase::new(2) }, axes);
            }
        }
    }
}

#[test]
fn a_sequence_that_is_cut_changes_nothing() {
    for t in [2, 3, 4, 5, 8] {
        for tied_head in [false, true] {
            let mut case = TensorCase { sequence: true, ..TensorCase::new(t) };
            case.model.tied_head = tied_head;
            same(&case, &[(Axis::Tensor, t)]);
        }
    }
    same(&TensorCase { sequence: true, ..TensorCase::new(2) }, &[(Axis::Data, 3), (Axis::Tensor, 2)]);
}

#[test]
fn masks_do_not_depend_on_the_cut() {
    for t in [2, 3] {
        for sequence in [false, true] {
            let mut case = TensorCase { sequence, ..TensorCase::new(t) };
            case.model.dropout = 0.3;
            same(&case, &[(Axis::Tensor, t)]);
        }
    }
}

#[test]
fn accumulated_and_frozen_parameters_train_alike() {
    for sequence in [false, true] {
        let stages = [None, Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)];
        let frozen = [&[][..], &["blocks.0.ln1", "wte"], &["blocks.0"], &["blocks.1.qkv", "lnf"]];
        for (zero, frozen) in half(&stages, &frozen) {
            let case = TensorCase { sequence, zero, frozen, accumulation: 3, ..TensorCase::new(2) };
            same(&case, &[(Axis::Data, 2), (Axis::Tensor, 2)]);
        }
    }
}

#[test]
fn models_without_biases_train_alike() {
    let case = TensorCase::new(2);
    let model = GptConfig { bias: false, ..case.model };
    same(&TensorCase { model, sequence: true, ..case.clone() }, &[(Axis::Tensor, 2)]);
    same(&TensorCase { model, ..case }, &[(Axis::Tensor, 2)]);
}

#[test]
fn the_loss_of_a_cut_vocabulary_is_that_of_the_whole() {
    for t in [2, 3, 4] {
        for (label_smoothing, z_loss) in [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)] {
            let cross_entropy = CrossEntropyOptions { label_smoothing, ignore_index: 3, reduction: Reduction::Sum };
            let loss = VocabularyLoss { cross_entropy, z_loss };
            same(&TensorCase { loss, ..TensorCase::new(t) }, &[(Axis::Tensor, t)]);
        }
    }
}

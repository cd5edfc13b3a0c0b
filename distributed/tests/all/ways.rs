//! Tables of ways to train, each of which is one rank: sizes, schedules and options that `matrix` draws seldom or never.

use crate::{pipeline_common::shape, prelude::*};

const FOUR: [(Axis, usize); 3] = [(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 2)];

#[test]
fn any_number_of_ranks_along_an_axis() {
    for n in WORLDS {
        let tied = |mut way: Way, tied: bool| {
            way.gpt.tied_head = tied;
            way
        };
        for sequence in [false, true].into_iter().filter(|_| n != 1) {
            let way = tied(Way::gpt(n), (n % 2 == 0) == sequence).over(&[(Axis::Tensor, n)]);
            Way { sequence, examples: 2, ..way }.same();
        }
        let mut context = tied(Way::gpt(2), n % 2 == 0).over(&[(Axis::Context, n)]);
        context.gpt.context = 4 * n;
        context.same();
        Way::mixture(2 * n).over(&[(Axis::Data, n), (Axis::Expert, n)]).same();
        let stage = ZeroStage::ALL[n % 3];
        Way { examples: 13, ..Way::gpt(2).zero(stage).over(&[(Axis::Shard, n)]) }.same();
        let limits = Some(BucketLimits { first: 100, others: 300 });
        let data = Way::gpt(2).over(&[(Axis::Data, n)]);
        Way { examples: 13, buckets: BucketOptions { limits, ..Default::default() }, ..data }.same();
    }
    Way::mixture(4).over(&[(Axis::Data, 6), (Axis::Expert, 2)]).same();
}

#[test]
fn replicas_of_shards_beside_what_else_cuts() {
    let axes = |other| [(Axis::Data, 2), (Axis::Shard, 2), (other, 2)];
    for stage in ZeroStage::ALL {
        for other in [Axis::Context, Axis::Tensor] {
            Way { examples: 8, ..Way::gpt(2).zero(stage).over(&axes(other)) }.same();
        }
    }
    let mixture = Way::mixture(4).zero(ZeroStage::Parameters);
    mixture.over(&[&axes(Axis::Context)[..], &[(Axis::Expert, 4)]].concat()).same();
}

#[test]
fn twenty_clipped_steps() {
    use Axis::{Context, Data, Expert, Pipe, Shard, Tensor};
    let long = |way: Way| {
        let way = Way { steps: 20, max_norm: Some(0.05), ..way };
        assert!(way.alone().norms.iter().all(|norm| *norm > 0.05), "{way:?}");
        way.same();
    };
    let gpt = |zero: ZeroStage, axes: &[(Axis, usize)]| Way { examples: 8, ..Way::gpt(2).zero(zero).over(axes) };
    long(Way { sequence: true, ..gpt(ZeroStage::None, &[(Data, 2), (Tensor, 2)]) });
    long(gpt(ZeroStage::Parameters, &[(Shard, 2), (Context, 2), (Tensor, 2)]));
    let staged = |way: Way| way.staged(ScheduleKind::OneFOneB, 1).micros(2);
    long(staged(gpt(ZeroStage::Optimizer, &[(Pipe, 2), (Shard, 2), (Context, 2)])));
    let mixture = |axes: &[(Axis, usize)]| Way { router: [0.3, 0.1], ..Way::mixture(4).over(axes) };
    long(mixture(&[(Data, 2), (Context, 2), (Expert, 2)]));
    long(staged(mixture(&[(Pipe, 2), (Shard, 4), (Expert, 2)]).zero(ZeroStage::Gradients)));
}

#[test]
fn lower_precision_stays_within_its_rounding() {
    let axes = [[(Axis::Tensor, 2)], [(Axis::Tensor, 3)], [(Axis::Context, 3)], [(Axis::Data, 5)], [(Axis::Shard, 5)]];
    for axes in axes {
        let mut way = Way { dtype: DType::F32, ..Way::gpt(6).over(&axes) };
        way.zero.stage = if axes[0].0 == Axis::Shard { ZeroStage::Parameters } else { ZeroStage::None };
        way.near(1e-5);
    }
    for (dtype, within) in [(DType::F32, 1e-5), (DType::BF16, 0.05)] {
        Way { dtype, ..Way::mixture(4).over(&[(Axis::Data, 4), (Axis::Expert, 2)]) }.near(within);
    }
}

/// Every schedule over stages that are cut further: layers, sequences, experts; whole stages in shards.
#[test]
fn every_schedule() {
    let exchanges = [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses];
    let mut turns = Turns::one_of(3);
    for (k, &kind) in ScheduleKind::ALL.iter().enumerate() {
        let v = if kind.generate(shape(2, 1, 4)).is_ok() { 1 } else { 2 };
        let mut gpt = Way { sequence: k % 4 < 2, exchange: exchanges[k % 3], ..Way::gpt(2).staged(kind, v) };
        (gpt.gpt.tied_head, gpt.gpt.context) = (k % 2 == 0, 8);
        let gathered = if k % 2 == 0 { gpt.clone().gathered() } else { gpt.clone().zero(ZeroStage::Parameters) };
        let ways = [
            gpt.clone().over(&[(Axis::Pipe, 2), (Axis::Tensor, 2)]),
            gpt.over(&[(Axis::Pipe, 2), (Axis::Context, 2)]),
            gathered.over(&[(Axis::Pipe, 2), (Axis::Shard, 2)]),
            Way { router: [0.3, 0.1], ..Way::mixture(4).staged(kind, v).over(&FOUR) },
        ];
        ways.iter().filter(|_| turns.come()).for_each(Way::same);
    }
}

/// Every schedule that adds micro-batches up from the first to the last gives the same bits; LoopedBFS goes the other way.
#[test]
fn every_schedule_at_every_number_of_ranks() {
    for (p, v) in WORLDS.into_iter().flat_map(|p| [(p, 1), (p, 2)]) {
        let mut first: Option<RunOutcome> = None;
        for &kind in ScheduleKind::ALL {
            // What takes any number of stages on a rank, with two: with one it is a schedule of another name.
            let way = Way { examples: 4 * p, ..Way::layers(p * v).staged(kind, v).micros(2 * p) };
            if way.checked(p).is_none() || v == 1 && kind.generate(shape(p, 2, 2 * p)).is_ok() {
                continue;
            }
            let way = Way { max_norm: None, ..way.over(&[(Axis::Pipe, p)]) };
            let outcome = way.outcome();
            let off = distance(&outcome, &way.alone());
            assert!(off <= CLOSE, "{way:?}: {off:e}");
            if kind != ScheduleKind::LoopedBfs {
                let first = first.get_or_insert_with(|| outcome.clone());
                assert!(outcome.pieces == first.pieces, "{way:?}: not bit for bit the other schedules'");
            }
        }
        assert!(first.is_some());
    }
}

/// Schedules and stages that a rank goes through in its own order.
#[test]
fn longer_pipelines_and_pipelines_of_one_rank() {
    use ScheduleKind::{GPipe, Interleaved, LoopedBfs, OneFOneB, ZbH1};
    Way::gpt(2).staged(Interleaved, 2).over(&[(Axis::Pipe, 4), (Axis::Tensor, 2)]).same();
    Way { sequence: true, ..Way::gpt(4).staged(ZbH1, 1) }.over(&[(Axis::Pipe, 2), (Axis::Tensor, 4)]).same();
    for (k, stage) in ZeroStage::ALL.into_iter().enumerate() {
        let one = Way::gpt(3).staged([GPipe, OneFOneB, LoopedBfs][k], 1 + k / 2).zero(stage);
        let one = Way { examples: 36, accumulation: 3, ..one };
        one.over(&[(Axis::Pipe, 1), (Axis::Shard, 3)]).same();
    }
    Way::gpt(3).staged(GPipe, 1).over(&[(Axis::Pipe, 1), (Axis::Tensor, 3)]).same();
}

#[test]
fn masks_do_not_depend_on_the_cut() {
    for (axes, sequence) in [
        (&[(Axis::Tensor, 2)][..], false),
        (&[(Axis::Tensor, 3)], true),
        (&[(Axis::Context, 3)], false),
        (&[(Axis::Context, 2), (Axis::Tensor, 2)], true),
    ] {
        let mut way = Way { sequence, ..Way::gpt(6).over(axes) };
        way.gpt.dropout = 0.3;
        way.same();
    }
    for (axes, sequence) in [(Axis::Tensor, false), (Axis::Tensor, true), (Axis::Context, false)] {
        let mut way = Way { sequence, ..Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).over(&[(Axis::Pipe, 2)]) };
        way.gpt.dropout = 0.3;
        let whole = way.outcome();
        way.over(&[(Axis::Pipe, 2), (axes, 2)]).same_as(&whole);
    }
}

#[test]
fn losses_of_cut_vocabularies_and_sequences() {
    let mut turns = Turns::one_of(2);
    for reduction in [Reduction::Sum, Reduction::Mean] {
        for axes in [&[(Axis::Tensor, 3)][..], &[(Axis::Context, 3)], &[(Axis::Context, 3), (Axis::Tensor, 2)]] {
            let factors = [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)];
            for (label_smoothing, z_loss) in factors.into_iter().filter(|_| turns.come()) {
                let cross_entropy = CrossEntropyOptions { label_smoothing, ignore_index: 3, reduction };
                Way { loss: VocabularyLoss { cross_entropy, z_loss }, examples: 2, ..Way::gpt(6).over(axes) }.same();
            }
        }
    }
}

/// Ranks have different numbers of rows, and the last ones none where rows are few.
#[test]
fn vocabularies_of_any_size() {
    let mut turns = Turns::one_of(4);
    let tensor = [2, 3, 4, 5, 8].into_iter().flat_map(|t| [1, 2, 7, 13, 257].map(|vocab| (t, vocab)));
    for (t, vocab) in tensor {
        for tied_head in [false, true] {
            for (sequence, label_smoothing, z_loss) in [(false, 0.0, 1e-2), (true, 0.1, 1e-2), (true, 0.2, 0.0)] {
                let cross_entropy = CrossEntropyOptions { label_smoothing, ignore_index: 3, reduction: Reduction::Sum };
                let mut way = Way { loss: VocabularyLoss { cross_entropy, z_loss }, examples: 2, ..Way::gpt(t) };
                way = Way { sequence, ..way.over(&[(Axis::Tensor, t)]) };
                (way.gpt.vocab, way.gpt.tied_head, way.gpt.layers) = (vocab, tied_head, 1);
                if turns.come() {
                    way.same();
                }
            }
        }
    }
    for zero in STAGES {
        for vocab in [1, 4, 13] {
            let mut way = Way { zero: zero.into(), ..Way::gpt(3).over(&[(Axis::Shard, 2), (Axis::Tensor, 3)]) };
            (way.gpt.vocab, way.gpt.tied_head) = (vocab, vocab != 13);
            way.same();
        }
    }
    // A stage that leaves logits cut has all of them, or none, where there is one.
    let mut way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).over(&[(Axis::Pipe, 2), (Axis::Tensor, 2)]);
    (way.gpt.vocab, way.loss.z_loss) = (1, 1e-2);
    way.same();
}

#[test]
fn models_without_biases() {
    for sequence in [false, true] {
        let mut way = Way { sequence, ..Way::gpt(2).over(&[(Axis::Tensor, 2)]) };
        way.gpt.bias = false;
        way.same();
    }
}

/// The experts of replicas that have no example of their own have tokens of the others; a copy of tied parameters has
/// gradients of the first replica alone.
#[test]
fn a_replica_without_examples_takes_part_and_weighs_nothing() {
    for stage in [ZeroStage::None, ZeroStage::Parameters] {
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1] {
            let first = |way: Way| Way { first_has_all: true, ..way.staged(kind, 1).zero(stage) };
            first(Way::mixture(4)).over(&FOUR).same();
            first(Way::gpt(2)).over(&[(Axis::Pipe, 2), (Axis::Data, 2)]).same();
            first(Way::layers(4)).over(&[(Axis::Pipe, 2), (Axis::Data, 2)]).same();
        }
    }
}

/// A step whose losses and weights are to the bit those of another way.
fn equal(a: &Way, b: &Way) {
    assert!(a.outcome() == b.outcome(), "{a:?}, {b:?}");
}

#[test]
fn pieces_of_a_sequence_have_the_bits_of_the_whole() {
    let mut turns = Turns::one_of(3);
    for (t, dtype) in [(2, DType::F64), (4, DType::F32), (2, DType::BF16)] {
        let mut way = Way { sequence: true, dtype, frozen: &["blocks.1.fc1.weight"], ..Way::gpt(t) };
        way.gpt.context = 12 * t;
        let way = way.over(&[(Axis::Data, 2), (Axis::Tensor, t)]);
        for pieces in [2, 3, 5, 100].into_iter().filter(|_| turns.come()) {
            equal(&Way { pieces, ..way.clone() }, &way);
        }
    }
    for (kind, v) in [(ScheduleKind::ZbH1, 1), (ScheduleKind::Zbv, 2)] {
        let way = Way::gpt(2).staged(kind, v).over(&[(Axis::Pipe, 2), (Axis::Tensor, 2)]);
        let way = Way { sequence: true, steps: 2, ..way };
        equal(&Way { pieces: 3, ..way.clone() }, &way);
    }
}

/// What changes nothing but where things are, and when they travel.
#[test]
fn units_buckets_and_places_do_not_change_a_bit() {
    for (n, dtype) in [(2, DType::F32), (3, DType::BF16), (5, DType::F32)] {
        let way = || Way { dtype, max_norm: None, examples: 13, ..Way::gpt(2) };
        let data = |first, others| {
            let buckets = BucketOptions { limits: Some(BucketLimits { first, others }), ..Default::default() };
            Way { buckets, ..way().over(&[(Axis::Data, n)]) }
        };
        equal(&data(1, 1), &data(1 << 30, 1 << 30));
        equal(&data(500, 1500), &data(1 << 30, 1 << 30));
        let shard = |zero: ZeroOptions| way().zero(zero).over(&[(Axis::Shard, n)]);
        let stage = ZeroStage::ALL[n % 3];
        let whole = ZeroOptions { units: UnitOf::whole(), ..stage.into() };
        equal(&shard(stage.into()), &shard(whole.clone()));
        equal(&shard(ZeroOptions { units: UnitOf::new(|name| name.into()), ..stage.into() }), &shard(whole));
        let three = |zero: ZeroOptions| Way { accumulation: 2, ..shard(zero) };
        let kept = ZeroOptions { whole_up_to: usize::MAX, ..ZeroStage::Parameters.into() };
        equal(&three(kept), &three(ZeroStage::Gradients.into()));
        let late = ZeroOptions { gathered_until_backward: true, ..ZeroStage::Parameters.into() };
        equal(&three(late), &three(ZeroStage::Parameters.into()));
    }
}

/// Stage 1 adds micro-batches, then ranks, as replicas do; stages 2 and 3 ranks, then micro-batches. A norm is of other
/// parts: without clipping.
#[test]
fn stages_of_zero_that_add_in_one_order_do_not_differ_by_a_bit() {
    for (kind, v, n) in [(ScheduleKind::OneFOneB, 1, 3), (ScheduleKind::Zbv, 2, 2)] {
        for model in [Way::gpt(2), Way::layers(4), Way { dtype: DType::BF16, ..Way::layers(4) }] {
            let way = Way { max_norm: None, steps: 2, ..model.staged(kind, v) };
            let way = Way { examples: 4 * n, ..way.over(&[(Axis::Pipe, 2), (Axis::Data, n)]) };
            equal(&way.clone().zero(ZeroStage::Optimizer), &way);
            let shards = way.zero(ZeroStage::Gradients);
            equal(&shards.clone().zero(ZeroStage::Parameters), &shards);
            equal(&shards.clone().gathered(), &shards);
        }
    }
}

/// A gradient of the last rank is not finite: of what it has alone, of experts that others have too, of what all have.
#[test]
fn an_overflow_on_one_rank_is_skipped_by_all() {
    use Axis::{Context, Data, Expert, Tensor};
    let ring = Way { exchange: ContextExchange::Ring, ..Way::gpt(4) };
    for (way, names) in [
        (Way::gpt(2).over(&[(Data, 3)]), ["wte.weight", "fc2.bias"]),
        (Way::gpt(2).over(&[(Data, 2), (Tensor, 2)]), ["fc1.weight", "wpe.weight"]),
        (ring.over(&[(Data, 2), (Context, 2)]), ["fc1.weight", "wpe.weight"]),
        (Way::mixture(4).over(&[(Data, 4), (Expert, 2)]), ["down_proj", "norm1.weight"]),
    ] {
        for way in way.strategies() {
            let ranks = way.ranks(|mesh| {
                let scaler = LossScaler::starting_at(4.0)?;
                let mut training = Training::with(&way, mesh, |builder| builder.loss_scaling(scaler))?;
                let (world, mut factors) = (mesh.world(), Vec::new());
                for k in 0..4 {
                    let (before, is_last) = (training.pieces()?, world.rank() + 1 == world.size());
                    let stepped = training.take_spoiled(k, names[k / 2], is_last && k % 2 == 1)?.stepped();
                    assert_eq!((stepped, training.pieces()? != before), (k % 2 == 0, stepped), "{way:?}, step {k}");
                    factors.push(training.step.scaler().map(|scaler| scaler.factor()));
                }
                Ok(factors)
            });
            let factors = ranks.unwrap_or_else(|error| panic!("{way:?}: {error}"));
            assert!(factors.iter().all(|own| *own == [4.0, 2.0, 2.0, 1.0].map(Some)), "{way:?}: {factors:?}");
        }
    }
}

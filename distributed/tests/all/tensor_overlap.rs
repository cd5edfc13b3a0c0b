//! What layers that are cut exchange in backward is under way while gradients of weights are computed.

use autograd::{LeafGrad, backward_with_hooks};

use crate::{between::Between, prelude::*};

type Events = Arc<Mutex<Vec<String>>>;

/// Notes when calls are started, and when they are waited for.
fn noting(comm: Comm<Cpu>, events: Events) -> Comm<Cpu> {
    Arc::new(Between::new(comm, move |inner, call| {
        let what = format!("{} of {}", call.what().name(), call.of().map_or("nothing", |of| of));
        events.lock().unwrap().push(format!("start {what}"));
        let (work, events) = (inner.start(call)?, events.clone());
        Ok(work.map(move |memory| {
            events.lock().unwrap().push(format!("wait {what}"));
            Ok(memory)
        }))
    }))
}

/// Notes when gradients are final.
struct Ready(Events);

impl BackwardHook<Cpu> for Ready {
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<Cpu>>, _: LeafGrad<Cpu>) -> Result<()> {
        self.0.lock().unwrap().push(leaf.name().to_string());
        Ok(())
    }
}

/// What happens in a backward pass of a GPT, by rank.
fn events(sequence: bool) -> Vec<Vec<String>> {
    let case = Way { sequence, ..Way::gpt(2) };
    let ranks = Ranks::new(2).run(cpu, |comm| {
        let events = Events::default();
        let comm = noting(comm, events.clone());
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let model = case.gpt_on(&mesh)?;
        let (x, y) = case.batch(comm.runtime(), 0, &[0, 1, 2])?;
        let loss = model.next_token_loss(&x, &y, &case.loss)?;
        events.lock().unwrap().clear();
        backward_with_hooks(&loss, &mut Ready(events.clone()))?;
        let events = events.lock().unwrap().clone();
        Ok(events)
    });
    ranks.unwrap()
}

#[test]
fn input_gradients_travel_while_weight_gradients_are_computed() {
    for sequence in [false, true] {
        let all = events(sequence);
        assert_eq!(all[0], all[1], "ranks do the same in the same order");
        let at =
            |event: &str| all[0].iter().position(|e| e == event).unwrap_or_else(|| panic!("{event}: {:?}", all[0]));
        let sum = if sequence { "reduce_scatter" } else { "all_reduce" };
        for layer in ["blocks.1.fc1", "blocks.1.qkv", "blocks.0.fc1", "blocks.0.qkv", "head"] {
            let of = format!("{sum} of {layer}.weight, backward");
            let (start, wait) = (at(&format!("start {of}")), at(&format!("wait {of}")));
            let weight = at(&format!("{layer}.weight"));
            assert!(start < weight && weight < wait, "{layer}, sequence {sequence}: {:?}", all[0]);
        }
    }
}

/// Steps of a GPT whose norms and embeddings have partial gradients: these travel while earlier layers are computed,
/// and, where other ranks have parts too, while their sums are in flight.
#[test]
fn partial_gradients_travel_during_the_backward_pass() {
    let case = Way { sequence: true, ..Way::gpt(2) };
    let axes = |other| [(other, 2), (Axis::Tensor, 2)];
    for (axes, stage) in [
        (&[(Axis::Tensor, 2)][..], ZeroStage::None),
        (&axes(Axis::Data), ZeroStage::None),
        (&axes(Axis::Shard), ZeroStage::Gradients),
        (&axes(Axis::Shard), ZeroStage::Parameters),
    ] {
        let plan = ParallelPlan::of(axes.to_vec()).unwrap();
        let ranks = Ranks::new(plan.world()).run(cpu, |comm| {
            let events = Events::default();
            let mesh = Mesh::new(&noting(comm, events.clone()), plan.clone())?;
            let model = case.gpt_on(&mesh)?;
            let limits = Some(BucketLimits { first: 1000, others: 1000 });
            let builder = TrainStep::builder(&mesh, &model).optimizer(adamw());
            let mut step = match stage {
                ZeroStage::None => builder.buckets(BucketOptions { limits, ..Default::default() }),
                stage => builder.zero(stage),
            }
            .build()?;
            for _ in 0..2 {
                events.lock().unwrap().clear();
                step.step(|_| {
                    let (x, y) = case.batch(mesh.world().runtime(), 0, &[0, 1, 2])?;
                    Loss::sum(model.next_token_loss(&x, &y, &case.loss)?, (3 * case.gpt.context) as f64)
                })?;
            }
            let events = events.lock().unwrap().clone();
            Ok(events)
        });
        let is_plain = axes.len() > 1 && stage == ZeroStage::None;
        let later = if is_plain { "wait all_reduce of bucket" } else { "blocks.0.qkv.weight, backward" };
        let travels = |events: &Vec<String>| {
            let is_sum = |event: &String| event.starts_with("start") && event.contains("partial gradients");
            let first = events.iter().position(is_sum);
            first.is_some_and(|first| events.iter().skip(first).any(|event| event.contains(later)))
        };
        // A shard may have no partial gradient of the last block.
        assert!(ranks.unwrap().iter().any(travels), "{axes:?} {stage:?}");
    }
}

/// A vocabulary of which one rank has more rows: the ranks cut other buckets.
#[test]
fn partial_gradients_of_uneven_pieces_are_summed_alike() {
    let limits = Some(BucketLimits { first: 400, others: 400 });
    let mut way = Way { sequence: true, rule: Rule::Sgd, ..Way::gpt(2) };
    (way.gpt.vocab, way.gpt.tied_head) = (13, false);
    way.buckets = BucketOptions { limits, ..Default::default() };
    way.over(&[(Axis::Tensor, 2)]).same();
}

/// The same in shards: with this vocabulary the final norm is in another shard of one rank along tensor.
#[test]
fn partial_gradients_of_uneven_pieces_are_summed_alike_in_shards() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters] {
        let mut way = Way { sequence: true, rule: Rule::Sgd, zero: stage.into(), ..Way::gpt(2) };
        (way.gpt.vocab, way.gpt.width, way.gpt.tied_head) = (3, 32, false);
        way.over(&[(Axis::Shard, 4), (Axis::Tensor, 2)]).same();
    }
}

#[test]
fn with_parts_of_the_sequence_the_whole_input_is_gathered_again() {
    for (sequence, again) in [(false, 0), (true, 5)] {
        let own = &events(sequence)[0];
        let is_gather = |e: &&String| e.starts_with("start all_gather of") && !e.ends_with("backward");
        assert_eq!(own.iter().filter(is_gather).count(), again, "two in each of two blocks, and the head: {own:?}");
    }
}

/// Bytes that a column layer keeps between forward and backward, and those it sends in both, of a sequence that is cut.
#[test]
fn mixed_precision_gathers_halves_and_keeps_its_part() {
    let [plain, mixed] = [false, true].map(|mixed| {
        let ranks = Ranks::new(2).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let (comm, rt): (Comm<Cpu>, _) = (counting.clone(), counting.runtime());
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
            let model = vec![Linear::new(&Init::new(rt, 0), 64, 64)?.without_bias()];
            mesh.parallelize(&model, &TensorPlan::new().column("0").sequence_region("0").sequence_parallel(true))?;
            let x = Var::leaf("x", Tensor::normal(rt, [1, 256, 64], DType::F32, 0.0, 1.0, 1 + comm.rank() as u64)?)?;
            counting.reset();
            let before = rt.memory().of(MemoryCategory::Activations).live;
            let forward = || model[0].forward(&x);
            let y = if mixed { autocast(DType::BF16, forward)? } else { forward()? };
            // The output, and a cast copy of the weight.
            let cast = if mixed { 32 * 64 * 2 } else { 0 };
            let kept = rt.memory().of(MemoryCategory::Activations).live - before - 512 * 32 * y.dtype().size() - cast;
            let loss = y.to_dtype(DType::F32)?.square()?.sum_all()?;
            let gradients = backward(&loss)?;
            let of = |v: &Var<Cpu>| gradients.get(v.as_leaf().unwrap()).unwrap().to_f64s();
            let sent = ["all_gather", "reduce_scatter"].map(|kind| counting.of(kind).sent);
            Ok((kept, sent, of(&x)?, of(&model[0].weight.var())?))
        });
        ranks.unwrap()
    });
    let part = 256 * 64;
    for ((kept, sent, x, w), (half_kept, half_sent, half_x, half_w)) in plain.into_iter().zip(mixed) {
        assert_eq!((kept, sent), (0, [2 * part * 4, part * 4]), "gathered again in backward");
        assert_eq!((half_kept, half_sent), (0, [2 * part * 2, part * 2]));
        let close = |a: &[f64], b: &[f64]| {
            let most = a.iter().fold(0.0, |most: f64, a| most.max(a.abs()));
            a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 0.03 * most)
        };
        assert!(close(&x, &half_x) && close(&w, &half_w));
    }
}

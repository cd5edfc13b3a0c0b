//! One mixture of experts that is shared out among ranks: outputs, losses and all gradients are those of one rank with all tokens.

use autograd::checkpoint;
use nn::{Initializer, parallel::TensorStyle};

use crate::prelude::*;

const WIDTH: usize = 8;

/// What the ranks compute, joined: outputs, loads and losses, gradients of the input and of every parameter, by name.
type Joined = Vec<(String, Vec<f64>)>;

/// What is computed of which tokens.
#[derive(Clone, Debug)]
struct LayerCase {
    config: MoeConfig,
    /// The number of tokens of each rank.
    tokens: Vec<usize>,
    /// What every expert's score is moved by when experts are picked.
    bias: Vec<f32>,
    /// Whether backward computes the layer again.
    checkpointed: bool,
}

/// What one rank has: its tokens' part of some values, and its pieces of gradients.
struct RankResult {
    tokens: Range<usize>,
    y: Vec<f64>,
    dx: Vec<f64>,
    losses: [f64; 2],
    loads: Vec<u64>,
    dropped: usize,
    gradients: Vec<(String, Option<TensorPlacement>, Vec<f64>)>,
    traffic: Traffic,
    /// Rows that this rank sends to others, by a look at the experts that its tokens picked.
    rows_out: usize,
}

impl LayerCase {
    fn new(experts: usize, top_k: usize, tokens: &[usize]) -> Self {
        let config = MoeConfig::new(WIDTH, 8, experts, top_k);
        LayerCase { config, tokens: tokens.to_vec(), bias: vec![], checkpointed: false }
    }

    fn run(&self, comm: Comm<Cpu>, expert_ranks: usize) -> Result<RankResult> {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let (rt, all) = (comm.runtime(), self.tokens.iter().sum::<usize>());
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, comm.size()), (Axis::Expert, expert_ranks)])?)?;
        let init = Init::new(rt, 3).dtype(DType::F64).weights(Initializer::Normal { mean: 0.0, std: 0.7 });
        let layer = Arc::new(MixtureOfExperts::new(&init, self.config.clone())?);
        if let Some(bias) = &layer.gate.e_score_correction_bias {
            bias.set(Tensor::from_slice(rt, [self.bias.len()], &self.bias)?)?;
        }
        mesh.parallelize(&*layer, &TensorPlan::new().experts("experts"))?;
        let before: usize = self.tokens[..comm.rank()].iter().sum();
        let own = before..if comm.size() == 1 { all } else { before + self.tokens[comm.rank()] };
        let of = |seed| {
            let whole = Tensor::uniform(rt, [all, WIDTH], DType::F64, -1.0, 1.0, seed)?;
            whole.narrow(0, own.start, own.len())?.contiguous()
        };
        let (x, upstream) = (Var::leaf("x", of(11)?)?, Var::new(of(5)?));
        counting.reset();
        let out = layer.forward_routed(&x)?;
        let picked = out.routing.experts.value()?.to_vec::<i64>()?;
        let (mut y, mut balance, mut z) = (out.y, out.routing.balance_loss()?, out.routing.z_loss()?);
        if self.checkpointed {
            [y, balance, z] = checkpoint(|| {
                let out = layer.forward_routed(&x)?;
                Ok::<_, Error>([out.y, out.routing.balance_loss()?, out.routing.z_loss()?])
            })?;
        }
        let loss = y.mul(&upstream)?.sum_all()?.add(&balance.mul(0.3)?)?.add(&z.mul(0.1)?)?;
        let gradients = backward(&loss)?;
        let each = self.config.experts / expert_ranks;
        let place = mesh.axis(Axis::Expert).rank();
        let pieces = layer.named_parameters().into_iter().map(|(name, p)| {
            let experts = p.placed().filter(|placed| placed.style() == TensorStyle::Experts);
            let gradient = gradients.get(&p.leaf()).unwrap().contiguous()?.to_vec::<f64>()?;
            Ok((name, experts.map(|placed| placed.placement().clone()), gradient))
        });
        Ok(RankResult {
            tokens: own,
            y: y.value()?.to_vec::<f64>()?,
            dx: gradients.of(&x).unwrap().contiguous()?.to_vec::<f64>()?,
            losses: [balance.value()?.item()?, z.value()?.item()?],
            loads: out.routing.loads()?,
            dropped: out.routing.order.dropped(),
            gradients: pieces.collect::<Result<_>>()?,
            traffic: counting.of("all_to_all"),
            rows_out: picked.iter().filter(|&&expert| expert as usize / each != place).count(),
        })
    }

    fn on(&self, expert_ranks: usize) -> (Joined, Vec<RankResult>) {
        let found = Ranks::new(self.tokens.len()).run(cpu, |comm| self.run(comm, expert_ranks));
        let found = found.unwrap_or_else(|error| panic!("{self:?} over {expert_ranks}: {error}"));
        (joined(&found), found)
    }

    fn alone(&self) -> Joined {
        joined(&Ranks::new(1).run(cpu, |comm| self.run(comm, 1)).unwrap())
    }

    /// Requires that ranks compute what one does.
    fn same(&self, expert_ranks: usize) -> Vec<RankResult> {
        let (many, found) = self.on(expert_ranks);
        for ((name, many), (other, one)) in many.iter().zip(&self.alone()) {
            assert_eq!((name, many.len()), (other, one.len()));
            let scale = one.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
            for (a, b) in many.iter().zip(one) {
                assert!((a - b).abs() <= 1e-12 * scale, "{name} of {self:?} over {expert_ranks}: {a} and {b}");
            }
        }
        found
    }
}

fn joined(found: &[RankResult]) -> Joined {
    let by_token = |of: &dyn Fn(&RankResult) -> Vec<f64>| found.iter().flat_map(of).collect::<Vec<f64>>();
    let summed = |of: &dyn Fn(&RankResult) -> f64| found.iter().map(of).sum::<f64>();
    let mut all = vec![
        ("y".to_string(), by_token(&|f| f.y.clone())),
        ("dx".to_string(), by_token(&|f| f.dx.clone())),
        ("losses".to_string(), vec![summed(&|f| f.losses[0]), summed(&|f| f.losses[1])]),
        ("dropped".to_string(), vec![summed(&|f| f.dropped as f64)]),
    ];
    assert!(found.iter().all(|f| f.loads == found[0].loads), "ranks know other loads");
    all.push(("loads".to_string(), found[0].loads.iter().map(|&n| n as f64).collect()));
    for (k, (name, placement, values)) in found[0].gradients.iter().enumerate() {
        let mut whole = vec![0.0; placement.as_ref().map_or(values.len(), |p| p.logical().numel())];
        for f in found {
            let (_, placement, values) = &f.gradients[k];
            let shape = numcore::Shape::new(&[values.len()]).unwrap();
            let placement = placement.clone().unwrap_or_else(|| TensorPlacement::whole(shape));
            for run in placement.runs(0..values.len()) {
                (0..run.len).for_each(|i| whole[run.logical + i] += values[run.local + i]);
            }
        }
        all.push((name.clone(), whole));
    }
    all
}

#[test]
fn a_mixture_over_ranks_is_that_of_one() {
    for (experts, top_k, expert_ranks, tokens) in [
        (4, 2, 1, &[5, 4][..]),
        (4, 2, 2, &[5, 4]),
        (8, 2, 4, &[3, 1, 6, 2]),
        (8, 3, 8, &[2, 1, 3, 2, 2, 1, 1, 2]),
        (6, 2, 3, &[4, 4, 5]),
        (5, 1, 5, &[2, 3, 2, 1, 4]),
        (4, 2, 2, &[3, 4, 2, 5]),
        (6, 2, 2, &[1, 2, 3, 1, 2, 3]),
    ] {
        LayerCase::new(experts, top_k, tokens).same(expert_ranks);
    }
}

#[test]
fn ranks_and_experts_may_have_no_tokens() {
    for tokens in [&[0, 7, 0, 2][..], &[0, 0, 0, 1], &[0, 0, 0, 0]] {
        for expert_ranks in [2, 4] {
            LayerCase::new(8, 2, tokens).same(expert_ranks);
        }
    }
}

#[test]
fn one_expert_may_take_all_tokens() {
    for taker in [0, 3, 5] {
        let mut case = LayerCase::new(6, 1, &[4, 0, 5]);
        case.config = MoeConfig { scores: RouterScores::Sigmoid, balance_bias: true, ..case.config };
        case.bias = vec![0.0; 6];
        case.bias[taker] = 10.0;
        let found = case.same(3);
        assert_eq!(found[0].loads[taker], 9);
    }
}

#[test]
fn all_experts_of_a_token_are_the_dense_mixture() {
    // One rank with all of them is compared with a loop over tokens and experts in `nn`.
    LayerCase::new(4, 4, &[3, 5]).same(2);
    let mut case = LayerCase::new(4, 4, &[3, 5, 1, 1]);
    case.config = MoeConfig { normalize_weights: false, weight_scale: 0.5, shared_hidden: 5, ..case.config };
    case.same(4);
    case.config.shared_gate = true;
    case.same(2);
}

#[test]
fn what_backward_computes_again_travels_again() {
    for (expert_ranks, tokens) in [(2, &[5, 4][..]), (4, &[3, 0, 6, 2]), (2, &[3, 4, 2, 5])] {
        let case = LayerCase { checkpointed: true, ..LayerCase::new(4, 2, tokens) };
        case.same(expert_ranks);
    }
}

#[test]
fn capacities_are_those_of_the_tokens_of_all_ranks() {
    for drop in [DropBy::Position, DropBy::Weight] {
        for factor in [0.3, 0.7, 1.0, 8.0] {
            for (expert_ranks, tokens) in [(1, &[6, 5][..]), (2, &[6, 5]), (2, &[7, 0, 3, 4]), (4, &[1, 6, 2, 5])] {
                let mut case = LayerCase::new(4, 2, tokens);
                case.config.capacity = Some(Capacity { factor, drop });
                let found = case.same(expert_ranks);
                let dropped: usize = found.iter().map(|f| f.dropped).sum();
                assert_eq!(dropped == 0, factor == 8.0, "{case:?}");
            }
        }
    }
}

#[test]
fn a_layer_sends_what_its_tokens_and_those_of_others_are() {
    for (experts, top_k, expert_ranks, tokens) in
        [(8, 2, 4, &[3, 1, 6, 2][..]), (4, 2, 2, &[3, 4, 2, 5]), (4, 1, 4, &[0, 9, 0, 1]), (4, 2, 1, &[3, 4])]
    {
        let (_, found) = LayerCase::new(experts, top_k, tokens).on(expert_ranks);
        let rows_out: Vec<usize> = found.iter().map(|f| f.rows_out).collect();
        // Rows out and back, forward and backward; what comes in goes out again too.
        let sent: u64 = found.iter().map(|f| f.traffic.sent).sum();
        let rows: usize = rows_out.iter().sum();
        assert_eq!(sent, (4 * rows * WIDTH * 8) as u64, "{rows_out:?}");
        let calls = if expert_ranks == 1 { 0 } else { 4 };
        assert!(found.iter().all(|f| f.traffic.calls == calls));
        assert_eq!(found.iter().map(|f| f.tokens.len()).sum::<usize>(), tokens.iter().sum::<usize>());
    }
}

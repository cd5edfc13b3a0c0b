//! Mixtures of experts against a loop over tokens and experts, and the formulas of their losses.

use autograd::{Backward, Gradients, Var, backward};
use nn::{
    Forward, Init, Initializer, ModuleExt,
    moe::{Capacity, DropBy, MixtureOfExperts, MoeConfig, MoeOutput, RouterGroups, RouterScores},
};
use numcore::{
    DType, Result, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps, cat, stack},
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;

const WIDTH: usize = 6;

fn cpu() -> Cpu {
    Cpu::with_threads(2)
}

fn layer(config: MoeConfig) -> MixtureOfExperts<Cpu> {
    let init = Init::new(&cpu(), 3).dtype(DType::F64).weights(Initializer::Normal { mean: 0.0, std: 0.7 });
    MixtureOfExperts::new(&init, config).unwrap()
}

fn config(experts: usize, top_k: usize) -> MoeConfig {
    MoeConfig::new(WIDTH, 5, experts, top_k)
}

fn tokens(count: usize) -> V {
    Var::leaf("x", Tensor::uniform(&cpu(), [count, WIDTH], DType::F64, -1.0, 1.0, 11).unwrap()).unwrap()
}

fn values(x: &V) -> Vec<f64> {
    x.value().unwrap().to_f64s().unwrap()
}

/// What one expert gives for all tokens.
fn expert(layer: &MixtureOfExperts<Cpu>, x: &V, e: usize) -> Result<V> {
    let hidden = x.matmul(&layer.experts.gate_up_proj.var().select(0, e)?.t()?)?;
    let halves = hidden.chunk(-1, 2)?;
    let active = halves[0].mul(&halves[0].sigmoid()?)?.mul(&halves[1])?;
    active.matmul(&layer.experts.down_proj.var().select(0, e)?.t()?)
}

/// The layer as a dense mixture: every expert computes every token, and those that `stays` does not know weigh nothing.
fn dense(layer: &MixtureOfExperts<Cpu>, x: &V, stays: impl Fn(usize, usize) -> bool) -> Result<V> {
    let MoeConfig { experts: count, top_k, scores, normalize_weights, weight_scale, .. } = *layer.config();
    let logits = x.matmul(&layer.gate.weight.var().t()?)?;
    let scores = if scores == RouterScores::Softmax {
        let e = logits.exp()?;
        e.div(&e.sum_keepdim(&[-1])?)?
    } else {
        logits.sigmoid()?
    };
    let bias = layer.gate.e_score_correction_bias.as_ref().map(|b| b.value().to_f64s().unwrap());
    let plain = values(&scores);
    let rows = x.dims()[0];
    let mut picked = vec![0.0; rows * count];
    for t in 0..rows {
        let score = |e: usize| plain[t * count + e] + bias.as_ref().map_or(0.0, |b| b[e]);
        let mut best: Vec<usize> = (0..count).collect();
        best.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        best[..top_k].iter().for_each(|&e| picked[t * count + e] = 1.0);
    }
    let mask = |of: &dyn Fn(usize, usize) -> f64| {
        let all: Vec<f64> = (0..rows * count).map(|i| of(i / count, i % count)).collect();
        Ok::<_, numcore::Error>(Var::new(Tensor::from_slice(&cpu(), [rows, count], &all)?))
    };
    let mut weights = scores.mul(&mask(&|t, e| picked[t * count + e])?)?;
    if normalize_weights {
        weights = weights.div(&weights.sum_keepdim(&[-1])?)?;
    }
    let weights = weights.mul(weight_scale)?.mul(&mask(&|t, e| f64::from(stays(t, e)))?)?;
    let outputs: Vec<V> = (0..count).map(|e| expert(layer, x, e)).collect::<Result<_>>()?;
    let y = stack(&outputs.iter().collect::<Vec<_>>(), 1)?.mul(&weights.unsqueeze(-1)?)?.sum(&[1])?;
    match &layer.shared_experts {
        None => Ok(y),
        Some(shared) => {
            let gate = shared.gate_proj.forward(x)?;
            let active = gate.mul(&gate.sigmoid()?)?.mul(&shared.up_proj.forward(x)?)?;
            let shared = shared.down_proj.forward(&active)?;
            match &layer.shared_expert_gate {
                None => y.add(&shared),
                Some(gate) => y.add(&x.matmul(&gate.weight.var().t()?)?.sigmoid()?.mul(&shared)?),
            }
        }
    }
}

fn near(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let far = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
    assert!(far < 1e-12, "{what}: {far:e} apart");
}

/// Output and all gradients equal those of the dense mixture.
fn same(layer: &MixtureOfExperts<Cpu>, x: &V, stays: impl Fn(usize, usize) -> bool) -> MoeOutput<Cpu> {
    let upstream = Var::new(Tensor::uniform(&cpu(), *x.value().unwrap().shape(), DType::F64, -1.0, 1.0, 5).unwrap());
    let gradients = |y: &V| {
        let mut gradients = Gradients::new();
        Backward::from(y, &upstream).unwrap().run(&mut gradients).unwrap();
        gradients
    };
    let out = layer.forward_routed(x).unwrap();
    let want = dense(layer, x, stays).unwrap();
    near(&values(&out.y), &values(&want), "output");
    let (got, want) = (gradients(&out.y), gradients(&want));
    near(&got.of(x).unwrap().to_f64s().unwrap(), &want.of(x).unwrap().to_f64s().unwrap(), "x");
    for (name, p) in layer.named_parameters() {
        let (got, want) = (got.of(&p.var()), want.of(&p.var()));
        near(&got.unwrap().to_f64s().unwrap(), &want.unwrap().to_f64s().unwrap(), &name);
    }
    out
}

#[test]
fn tokens_by_expert_are_a_dense_mixture() {
    for (experts, top_k) in [(1, 1), (4, 1), (4, 2), (5, 3), (4, 4)] {
        for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
            for (normalize_weights, weight_scale, shared_hidden) in [(true, 1.0, 0), (false, 2.5, 7)] {
                let shared_gate = shared_hidden > 0 && top_k == 2;
                let config = MoeConfig {
                    scores,
                    normalize_weights,
                    weight_scale,
                    shared_hidden,
                    shared_gate,
                    ..config(experts, top_k)
                };
                let out = same(&layer(config), &tokens(9), |_, _| true);
                assert_eq!(out.routing.order.picked().iter().sum::<usize>(), 9 * top_k);
            }
        }
    }
}

#[test]
fn one_expert_may_take_all_tokens_and_others_none() {
    let layer = layer(MoeConfig { scores: RouterScores::Sigmoid, balance_bias: true, ..config(4, 1) });
    let bias = layer.gate.e_score_correction_bias.as_ref().unwrap();
    bias.set(Tensor::from_vec(&cpu(), vec![0f32, 0.0, 10.0, 0.0]).unwrap()).unwrap();
    let out = same(&layer, &tokens(7), |_, _| true);
    assert_eq!(out.routing.order.counts(), [0, 0, 7, 0]);
}

#[test]
fn no_tokens_give_nothing_and_gradients_of_zero() {
    let layer = layer(MoeConfig { shared_hidden: 3, ..config(4, 2) });
    let out = layer.forward_routed(&tokens(0)).unwrap();
    assert_eq!(out.y.dims(), [0, WIDTH]);
    let gradients = backward(&out.y.sum_all().unwrap()).unwrap();
    for (name, p) in layer.named_parameters().into_iter().filter(|(name, _)| name.starts_with("experts")) {
        let gradient = gradients.of(&p.var()).unwrap_or_else(|| panic!("no gradient of {name}")).to_f64s().unwrap();
        assert!(gradient.iter().all(|&g| g == 0.0), "{name}");
    }
}

#[test]
fn axes_before_the_channels_are_tokens() {
    let layer = layer(config(4, 2));
    let x = tokens(6);
    let folded = layer.forward(&x.reshape([2, 3, WIDTH]).unwrap()).unwrap();
    assert_eq!(folded.dims(), [2, 3, WIDTH]);
    assert_eq!(values(&folded), values(&layer.forward(&x).unwrap()));
}

#[test]
fn a_token_does_not_depend_on_the_others() {
    let layer = layer(config(5, 2));
    let x = tokens(8);
    let all = layer.forward(&x).unwrap();
    let one = |t| layer.forward(&x.narrow(0, t, 1).unwrap()).unwrap();
    let alone: Vec<V> = (0..8).map(one).collect();
    near(&values(&all), &values(&cat(&alone.iter().collect::<Vec<_>>(), 0).unwrap()), "alone");
}

#[test]
fn what_exceeds_the_capacity_adds_nothing() {
    for drop in [DropBy::Position, DropBy::Weight] {
        let capacity = Some(Capacity { factor: 0.5, drop });
        let layer = layer(MoeConfig { capacity, shared_hidden: 4, ..config(3, 2) });
        let x = tokens(12);
        let routing = layer.forward_routed(&x).unwrap().routing;
        let limit = Capacity { factor: 0.5, drop }.limit(12, 2, 3);
        assert_eq!(limit, 4);
        assert!(routing.order.counts().iter().all(|&n| n <= limit) && routing.order.dropped() >= 12);
        let experts = routing.experts.value().unwrap().to_vec::<i64>().unwrap();
        let weights = values(&routing.weights);
        // Which choices stay, found again by looking at each expert's choices.
        let staying = |e: usize| {
            let mut own: Vec<usize> = (0..24).filter(|&choice| experts[choice] == e as i64).collect();
            if drop == DropBy::Weight {
                own.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
            }
            own.truncate(limit);
            own
        };
        let stays = [0, 1, 2].map(staying);
        same(&layer, &x, |t, e| stays[e].iter().any(|choice| choice / 2 == t));
    }
}

#[test]
fn equal_scores_pick_the_first_experts() {
    let layer = layer(config(6, 3));
    layer.gate.weight.set(Tensor::zeros(&cpu(), [6, WIDTH], DType::F64).unwrap()).unwrap();
    let routing = layer.forward_routed(&tokens(2)).unwrap().routing;
    assert_eq!(routing.experts.value().unwrap().to_vec::<i64>().unwrap(), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn losses_have_the_values_of_their_formulas() {
    for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
        let layer = layer(MoeConfig { scores, ..config(4, 2) });
        let routing = layer.forward_routed(&tokens(10)).unwrap().routing;
        let (logits, scores) = (values(&routing.logits), values(&routing.scores));
        let loads = routing.order.picked();
        let mean = |e: usize| {
            let row = |t: usize| scores[4 * t + e] / scores[4 * t..4 * t + 4].iter().sum::<f64>();
            (0..10).map(row).sum::<f64>() / 10.0
        };
        let balance = 10.0 * 4.0 * (0..4).map(|e| loads[e] as f64 / 20.0 * mean(e)).sum::<f64>();
        near(&values(&routing.balance_loss().unwrap()), &[balance], "balance");
        let lse = |t: usize| logits[4 * t..4 * t + 4].iter().map(|z| z.exp()).sum::<f64>().ln();
        near(&values(&routing.z_loss().unwrap()), &[(0..10).map(|t| lse(t).powi(2)).sum()], "z");
        assert!(
            routing
                .balance_loss_with(&[0.5; 3])
                .unwrap_err()
                .to_string()
                .contains("number of shares is 3, and must be 4")
        );
    }
}

#[test]
fn evenly_spread_tokens_lose_one_each() {
    let layer = layer(config(4, 4));
    layer.gate.weight.set(Tensor::zeros(&cpu(), [4, WIDTH], DType::F64).unwrap()).unwrap();
    let routing = layer.forward_routed(&tokens(5)).unwrap().routing;
    near(&values(&routing.balance_loss().unwrap()), &[5.0], "balance");
}

#[test]
fn balance_losses_of_parts_add_up() {
    let layer = layer(config(4, 2));
    let x = tokens(10);
    let whole = layer.forward_routed(&x).unwrap().routing;
    let parts = [(0, 3), (3, 7)].map(|(at, n)| layer.forward_routed(&x.narrow(0, at, n).unwrap()).unwrap().routing);
    let sum = parts[0]
        .balance_loss_with(&whole.shares().unwrap())
        .unwrap()
        .add(&parts[1].balance_loss_with(&whole.shares().unwrap()).unwrap());
    near(&values(&sum.unwrap()), &values(&whole.balance_loss().unwrap()), "sum");
}

#[test]
fn the_bias_moves_towards_experts_with_too_few_tokens() {
    let layer = layer(MoeConfig { balance_bias: true, ..config(4, 1) });
    layer.update_balance_bias(&[5, 2, 3, 2], 1e-3).unwrap();
    layer.update_balance_bias(&[3, 3, 3, 3], 1e-3).unwrap();
    layer.update_balance_bias(&[0, 0, 0, 0], 1e-3).unwrap();
    let bias = layer.gate.e_score_correction_bias.as_ref().unwrap().value();
    assert_eq!(bias.to_vec::<f32>().unwrap(), [-1e-3, 1e-3, 0.0, 1e-3]);
    assert!(
        layer
            .update_balance_bias(&[1; 3], 1e-3)
            .unwrap_err()
            .to_string()
            .contains("number of loads is 3, and must be 4")
    );
    let without = self::layer(config(4, 1)).update_balance_bias(&[1; 4], 1e-3).unwrap_err().to_string();
    assert!(without.contains("balance_bias"), "{without}");
}

#[test]
fn halves_are_routed_in_full_precision() {
    let init = Init::new(&cpu(), 3).dtype(DType::BF16);
    let layer = MixtureOfExperts::new(&init, config(4, 2)).unwrap();
    let x = Var::new(Tensor::uniform(&cpu(), [5, WIDTH], DType::BF16, -1.0, 1.0, 1).unwrap());
    let out = layer.forward_routed(&x).unwrap();
    assert_eq!((out.y.dtype(), out.routing.scores.dtype()), (DType::BF16, DType::F32));
}

#[test]
fn configurations_that_are_none_are_errors() {
    for (wrong, words) in [
        (config(4, 0), "0 of 4 experts"),
        (config(4, 5), "5 of 4 experts"),
        (MoeConfig { width: 0, ..config(4, 1) }, "0 channels"),
        (MoeConfig { weight_scale: f64::NAN, ..config(4, 1) }, "not finite"),
        (MoeConfig { capacity: Some(Capacity { factor: 0.0, drop: DropBy::Position }), ..config(4, 1) }, "factor of 0"),
    ] {
        let error = MixtureOfExperts::new(&Init::new(&cpu(), 1), wrong).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let other = Var::new(Tensor::zeros(&cpu(), [3, WIDTH + 1], DType::F64).unwrap());
    assert!(layer(config(2, 1)).forward(&other).unwrap_err().to_string().contains("[.., 6]"));
}

/// DeepSeek-V3's choice by formula, where the bias makes all scores negative.
#[test]
fn experts_of_dropped_groups_lose_to_negative_scores() {
    let (count, kept) = (3, 2);
    let groups = Some(RouterGroups { count, kept });
    let layer = layer(MoeConfig { scores: RouterScores::Sigmoid, balance_bias: true, groups, ..config(6, 3) });
    let bias: [f32; 6] = [-1.2, -1.4, -1.1, -1.3, -1.5, -1.25];
    layer.gate.e_score_correction_bias.as_ref().unwrap().set(Tensor::from_slice(&cpu(), [6], &bias).unwrap()).unwrap();
    let x = tokens(16);
    let routing = layer.gate.route(&x).unwrap();
    let scores = values(&x.matmul(&layer.gate.weight.var().t().unwrap()).unwrap().sigmoid().unwrap());
    let mut due = Vec::new();
    for scores in scores.chunks(6) {
        let ranked: Vec<f64> = scores.iter().zip(bias).map(|(score, bias)| score + f64::from(bias)).collect();
        let of_group = |g: usize| ranked[2 * g] + ranked[2 * g + 1];
        let mut best: Vec<usize> = (0..count).collect();
        best.sort_by(|&a, &b| of_group(b).total_cmp(&of_group(a)));
        let mut experts: Vec<usize> = best[..kept].iter().flat_map(|g| [2 * g, 2 * g + 1]).collect();
        experts.sort_by(|&a, &b| ranked[b].total_cmp(&ranked[a]));
        let sum: f64 = experts[..3].iter().map(|&e| scores[e]).sum();
        due.extend(experts[..3].iter().map(|&e| scores[e] / sum));
    }
    near(&values(&routing.weights), &due, "weights");
    let few = MoeConfig { groups: Some(RouterGroups { count, kept: 1 }), ..layer.config().clone() };
    let error = few.check().unwrap_err().to_string();
    assert!(error.contains("1 of 3 groups have 2 experts, and a token uses 3"), "{error}");
}

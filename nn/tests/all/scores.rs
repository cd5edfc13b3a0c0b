//! Programs of scores that finished models were given.

use autograd::{Var, grad};
use nn::{
    AttentionOptions, Forward, Gpt, GptConfig, GroupedQueryAttention, GroupedQueryConfig, Init, Linear, ModuleExt,
    MultiHeadAttention, Param, ScoreOptions,
    parallel::{AttendedTokens, AttentionScores, set_scores},
};
use numcore::{
    DType, Result, Tensor,
    fused::AttentionProgram,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;

const HEADS: usize = 4;
const T: usize = 70;

fn cpu() -> Cpu {
    Cpu::with_threads(2)
}

fn init() -> Init<Cpu> {
    Init::new(&cpu(), 3).dtype(DType::F64)
}

fn drawn(shape: &[usize], seed: u64) -> V {
    Var::leaf("x", Tensor::uniform(&cpu(), shape, DType::F64, -1.0, 1.0, seed).unwrap()).unwrap()
}

fn slopes() -> Param<Cpu> {
    Param::new(Tensor::uniform(&cpu(), [HEADS, 1, 1], DType::F64, 0.1, 1.0, 5).unwrap()).unwrap()
}

fn alibi() -> AttentionProgram {
    AttentionProgram::over(1).score(|score, at, args| score + args[0] * (at.key - at.query).cast_like(score))
}

/// The distance of each key, `[T, T]`.
fn distances() -> V {
    let mut at = 0..T * T;
    let next = || at.next().map_or(0.0, |i| (i % T) as f64 - (i / T) as f64);
    V::new(Tensor::from_f64_fn(&cpu(), [T, T], DType::F64, next).unwrap())
}

fn close(got: &V, due: &V) {
    let [got, due] = [got, due].map(|x| x.value().unwrap().to_f64s().unwrap());
    assert_eq!(got.len(), due.len());
    let apart = got.iter().zip(&due).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
    assert!(apart < 1e-12 && due.iter().any(|x| x.abs() > 1e-3), "{apart}");
}

fn grouped(scores: ScoreOptions, window: Option<usize>) -> GroupedQueryAttention<Cpu> {
    let (width, heads, kv_heads, head_dim) = (12, HEADS, 2, 3);
    let (fused, bias, output_bias, head_norm) = (false, true, false, None);
    let config =
        GroupedQueryConfig { width, heads, kv_heads, head_dim, fused, bias, output_bias, head_norm, window, scores };
    GroupedQueryAttention::new(&init(), config).unwrap()
}

/// Learned slopes beside a mask that is added, with hidden keys, are the sum of both as one mask.
#[test]
fn slopes_are_a_mask_with_gradients() {
    let layer = MultiHeadAttention::new(&init(), 12, HEADS).unwrap();
    let (x, slopes) = (drawn(&[2, T, 12], 1), slopes());
    let hidden = distances().gt(20.0).unwrap();
    let mask = drawn(&[T, T], 2).masked_fill(&hidden, f64::NEG_INFINITY).unwrap();
    let run = |mask: &V| layer.attend_self(&x, AttentionOptions { mask: Some(mask), ..Default::default() }).unwrap();
    let both = run(&mask.add(&slopes.var().mul(&distances()).unwrap()).unwrap());
    let names = |layer: &MultiHeadAttention<Cpu>| layer.named_parameters().into_iter().map(|p| p.0).collect::<Vec<_>>();
    let before = names(&layer);
    let count = set_scores(&layer, |name| {
        assert_eq!(name, "the model");
        Ok(Some(AttentionScores::by(alibi()).learned("slopes", slopes.clone())))
    });
    assert_eq!(count.unwrap(), 1);
    assert_eq!(names(&layer).into_iter().filter(|name| !before.contains(name)).collect::<Vec<_>>(), ["scores.slopes"]);
    let scored = run(&mask);
    close(&scored, &both);
    let leaf = slopes.var();
    let gradient = |y: &V| grad(&[&y.square().unwrap().sum_all().unwrap()], &[&leaf]).unwrap().remove(0).unwrap();
    close(&gradient(&scored), &gradient(&both));
}

/// Masks are applied after a program that changes scores.
#[test]
fn a_bent_score_of_a_hidden_key_stays_hidden() {
    let layer = MultiHeadAttention::new(&init(), 12, HEADS).unwrap();
    let bent = AttentionProgram::over(0).score(|score, _, _| score.tanh());
    set_scores(&layer, |_| Ok(Some(AttentionScores::by(bent.clone())))).unwrap();
    let hidden = distances().gt(20.0).unwrap();
    let added = distances().mul(0.0).unwrap().masked_fill(&hidden, f64::NEG_INFINITY).unwrap();
    let [got, due] = [added, hidden.logical_not().unwrap()].map(|mask| {
        layer.attend_self(&drawn(&[2, T, 12], 1), AttentionOptions { mask: Some(&mask), ..Default::default() }).unwrap()
    });
    close(&got, &due);
}

/// A soft cap by a program is the layer's own, within documents, a window and a mask.
#[test]
fn a_soft_cap_is_that_of_the_layer() {
    let x = drawn(&[2, T, 12], 1);
    let documents: Vec<i64> = (0..2 * T as i64).map(|i| i / 33).collect();
    let segments = V::new(Tensor::from_slice(&cpu(), [2, T], &documents).unwrap());
    let mask = drawn(&[2, 1, 1, T], 4).gt(-0.7).unwrap().logical_or(&distances().eq(0.0).unwrap()).unwrap();
    for window in [None, Some(9)] {
        let own = grouped(ScoreOptions { softcap: Some(0.3), ..Default::default() }, window);
        let given = grouped(ScoreOptions::default(), window);
        let cap = AttentionProgram::over(0).score(|score, _, _| (score / 0.3).tanh() * 0.3);
        set_scores(&given, |_| Ok(Some(AttentionScores::by(cap.clone())))).unwrap();
        for (mask, segments) in [(None, None), (Some(&mask), None), (Some(&mask), Some(&segments))] {
            let [got, due] = [&given, &own].map(|layer| {
                let tokens = AttendedTokens { segments, ..Default::default() };
                layer.attend_tokens(layer.project(&x, None).unwrap(), mask, tokens, None).unwrap()
            });
            close(&got, &due);
        }
    }
}

/// The keys that a program hides are those that a mask hides, in a causal model. Layers differ by their names.
#[test]
fn masks_of_programs_hide_keys_besides_those_of_the_model() {
    let config = GptConfig { vocab: 11, context: T, layers: 2, heads: HEADS, width: 12, ..Default::default() };
    let tokens =
        V::new(Tensor::from_slice(&cpu(), [1, T], &(0..T as i64).map(|i| i * i % 11).collect::<Vec<_>>()).unwrap());
    let logits = |window: Option<i64>| {
        let model = Gpt::new(&init(), config).unwrap();
        // Positions of its own move what a program sees, not the mask of the model.
        let program =
            |n: i64| AttentionProgram::over(0).mask(move |at, _| (at.query - at.key).lt(n + 3)).shifted(0, 0, 3, 0);
        if let Some(window) = window {
            let of = |name: &str| Ok((name == "blocks.1").then(|| AttentionScores::by(program(window))));
            assert_eq!(set_scores(&model, of).unwrap(), 1);
        }
        model.forward(&tokens).unwrap()
    };
    close(&logits(Some(T as i64)), &logits(None));
    let apart = logits(Some(5)).sub(&logits(None)).unwrap().abs().unwrap();
    let largest = |from: usize, n: usize| apart.narrow(1, from, n).unwrap().amax(&[0, 1, 2]).unwrap().item().unwrap();
    assert!(largest(0, 5) < 1e-12 && largest(5, T - 5) > 1e-6, "{} {}", largest(0, 5), largest(5, T - 5));
}

#[test]
fn misuse_says_what_is_wrong() {
    let says = |result: Result<()>, words: &[&str]| {
        let error = result.unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let with = |layer: &GroupedQueryAttention<Cpu>, scores: AttentionScores<Cpu>, queries: usize| {
        set_scores(layer, |_| Ok(Some(scores.clone())))?;
        let [q, k, v] = layer.project(&drawn(&[1, 6, 12], 1), None)?;
        layer.attend([q.narrow(2, 6 - queries, queries)?, k, v], None, None).map(drop)
    };
    let layer = grouped(ScoreOptions::default(), None);
    says(set_scores(&layer, |_| Ok(None)).map(drop), &["no layer", "set_scores"]);
    says(set_scores(&Linear::new(&init(), 2, 2).unwrap(), |_| Ok(None)).map(drop), &["no layer"]);
    says(with(&layer, AttentionScores::by(alibi()), 6), &["number of arguments", "1"]);
    let dense = Param::new(drawn(&[6, 6], 2).value().unwrap()).unwrap();
    let dense =
        AttentionScores::by(AttentionProgram::over(1).score(|score, _, args| score + args[0])).learned("bias", dense);
    with(&layer, dense.clone(), 6).unwrap();
    says(with(&layer, dense, 2), &["bias", "[6, 6]", "after a cache"]);
    let sinks = grouped(ScoreOptions { sinks: true, ..Default::default() }, None);
    says(with(&sinks, AttentionScores::by(AttentionProgram::over(0)), 6), &["sinks", "program of scores"]);
}

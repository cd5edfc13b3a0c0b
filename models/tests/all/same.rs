//! Log-probabilities of a token are the same bits in training, in prefill and in decoding, in any batch.

use autograd::no_grad;
use comm::{Comm, Communicator, Ranks};
use distributed::{
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
};
use models::{
    Decoder, DecoderConfig, DecoderInputs, Family, FinishReason, GenerationOptions, Prompt, Rollout, RolloutBatch,
    RopeConfig, RopeScaling, Sampling, rollouts,
};
use nn::{Activation, Init, Initializer, parallel::set_scores};
use numcore::{
    DType, Tensor,
    fused::{CrossEntropyOptions, NnOps, Reduction},
    ops::{PointwiseOps, ViewOps, cat},
};
use runtime_cpu::{Cpu, Simd};

use crate::common::{V, learned_scores};

const VOCAB: usize = 131;

/// A random decoder with grouped heads, whose sums are longer than a block of a product.
fn model(simd: Simd, dtype: DType, kind: usize) -> Decoder<Cpu> {
    model_on(&Cpu::builder().threads(2).simd(simd).build(), dtype, kind)
}

fn model_on(cpu: &Cpu, dtype: DType, kind: usize) -> Decoder<Cpu> {
    let mut given = DecoderConfig {
        family: Family::Llama,
        vocab: VOCAB,
        width: 48,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        hidden: 1056,
        context: 2048,
        norm_eps: 1e-5,
        activation: Activation::Silu,
        rope: Some(RopeConfig { theta: 10_000.0, part: 1.0, scaling: RopeScaling::Default }),
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        windows: vec![None; 2],
        options: Default::default(),
        mixtures: None,
        tied: false,
        padding: None,
        fields: Default::default(),
    };
    configure(&mut given, kind);
    let wide = Initializer::Normal { mean: 0.0, std: 0.15 };
    let init = Init::new(cpu, 7).dtype(dtype).weights(wide).biases(wide);
    let model = Decoder::new(&init, given).unwrap();
    if matches!(kind, 5 | 6) {
        set_scores(&model, |_| learned_scores(&init, 4)).unwrap();
    }
    model
}

fn tokens(model: &Decoder<Cpu>, rows: usize, tokens: &[i64]) -> V {
    V::new(
        Tensor::from_slice(
            model.parts.start().unwrap().tokens.weight.leaf().runtime(),
            [rows, tokens.len() / rows],
            tokens,
        )
        .unwrap(),
    )
}

/// The bits of the log-probability of each token's successor in a text, of logits `[1, T, V]`.
fn bits(logits: &V, text: &[i64]) -> Vec<u32> {
    let n = logits.dims()[1].min(text.len() - 1);
    let logits = logits.narrow(1, 0, n).unwrap().value().unwrap().contiguous().unwrap();
    let target = Tensor::from_slice(logits.runtime(), [1, n], &text[1..=n]).unwrap();
    let options = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    let losses = logits.cross_entropy_with(&target, options).unwrap();
    losses.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// A text read through a cache: in these pieces, in this row of rows of these lengths, padded on the left.
fn cached(model: &Decoder<Cpu>, texts: &[Vec<i64>], row: usize, pieces: &[usize]) -> Vec<u32> {
    let width = texts.iter().map(Vec::len).max().unwrap();
    let padding: Vec<_> = texts.iter().map(|text| width - text.len()).collect();
    let padded: Vec<_> =
        texts.iter().flat_map(|text| vec![5; width - text.len()].into_iter().chain(text.iter().copied())).collect();
    let all = tokens(model, texts.len(), &padded);
    let mut cache = model.cache(width, padding.clone());
    let mut at = 0;
    let mut found = Vec::new();
    for &piece in pieces {
        let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
        let here = all.narrow(1, at, piece).unwrap();
        let logits =
            no_grad(|| model.forward_with(&V::new(here.value().unwrap().contiguous().unwrap()), inputs)).unwrap();
        found.push(logits.narrow(0, row, 1).unwrap().value().unwrap().contiguous().unwrap());
        at += piece;
    }
    let logits = V::new(cat(&found.iter().collect::<Vec<_>>(), 1).unwrap());
    bits(&logits.narrow(1, padding[row], width - padding[row]).unwrap(), &texts[row])
}

/// Texts packed into one row, as `data::pack` has them.
fn packed(model: &Decoder<Cpu>, texts: &[Vec<i64>], row: usize) -> Vec<u32> {
    let all = texts.concat();
    let positions: Vec<_> = texts.iter().flat_map(|text| 0..text.len() as i64).collect();
    let segments: Vec<_> = texts.iter().enumerate().flat_map(|(i, text)| vec![i as i64; text.len()]).collect();
    let (positions, segments) = (tokens(model, 1, &positions), tokens(model, 1, &segments));
    let inputs = DecoderInputs { positions: Some(&positions), segments: Some(&segments), cache: None };
    let logits = model.forward_with(&tokens(model, 1, &all), inputs).unwrap();
    let from = texts[..row].iter().map(Vec::len).sum();
    bits(&logits.narrow(1, from, texts[row].len()).unwrap(), &texts[row])
}

/// Texts in one batch, padded on the right.
fn batched(model: &Decoder<Cpu>, texts: &[Vec<i64>], row: usize) -> Vec<u32> {
    let width = texts.iter().map(Vec::len).max().unwrap();
    let padded: Vec<_> =
        texts.iter().flat_map(|text| text.iter().copied().chain(vec![5; width - text.len()])).collect();
    let logits = model.forward_with(&tokens(model, texts.len(), &padded), DecoderInputs::default()).unwrap();
    bits(&logits.narrow(0, row, 1).unwrap(), &texts[row])
}

/// The bits of `of` on every rank of models that are cut along tensor, with sums of one rank.
fn cut(
    ranks: usize,
    (simd, dtype, kind): (Simd, DType, usize),
    of: impl Fn(&Decoder<Cpu>) -> Vec<u32> + Sync,
) -> Vec<Vec<u32>> {
    let cpu = |_| Ok(Cpu::builder().threads(1).simd(simd).build());
    let run = |comm: Comm<Cpu>| {
        let model = model_on(comm.runtime(), dtype, kind);
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, ranks)])?)?;
        mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan().whole_sums())?;
        Ok(of(&model))
    };
    Ranks::new(ranks).run(cpu, run).unwrap()
}

/// The bits of log-probabilities of a text, which are computed without all logits.
fn trained(model: &Decoder<Cpu>, text: &[i64]) -> Vec<u32> {
    let n = text.len() - 1;
    let states = model.states(&tokens(model, 1, &text[..n]), DecoderInputs::default()).unwrap();
    let found = model.logprobs(&states, &tokens(model, 1, &text[1..])).unwrap().neg().unwrap();
    let found = found.value().unwrap().to_dtype(DType::F32).unwrap();
    found.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Numbers below a bound.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }

    fn text(&mut self, longest: usize) -> Vec<i64> {
        (0..2 + self.below(longest - 1)).map(|_| self.below(VOCAB) as i64).collect()
    }

    /// Lengths of pieces of `n` tokens: a few of any length, then single tokens.
    fn pieces(&mut self, n: usize) -> Vec<usize> {
        let (mut pieces, mut left) = (vec![], n);
        for _ in 0..self.below(3) {
            let piece = self.below(left + 1);
            pieces.extend((piece > 0).then_some(piece));
            left -= piece;
        }
        let single = self.below(4).min(left);
        pieces.extend((left > single).then_some(left - single));
        pieces.extend(vec![1; single]);
        pieces
    }
}

/// The configurations that differ in the kernels they use.
fn configure(config: &mut DecoderConfig, kind: usize) {
    match kind {
        1 => (config.family, config.qkv_bias) = (Family::Qwen2, true),
        2 | 6 => (config.family, config.windows) = (Family::Mistral, vec![Some(37); 2]),
        3 => {
            (config.family, config.rope, config.activation) = (Family::Gpt2, None, Activation::GeluTanh);
            config.head_dim = config.width / config.heads;
            (config.kv_heads, config.qkv_bias, config.output_bias, config.mlp_bias) = (config.heads, true, true, true);
        }
        4 => config.family = Family::Qwen3,
        7 => config.family = Family::Olmo2,
        _ => (),
    }
}

/// Cases are few here; `WEFTGRAD_TEST_CASES=1000` tries more of them.
#[test]
fn a_token_has_the_bits_of_its_text_alone() {
    let cases = std::env::var("WEFTGRAD_TEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(56);
    let levels: Vec<_> = Simd::ALL.into_iter().filter(|simd| simd.is_available() && *simd != Simd::Amx).collect();
    let kinds = levels.iter().flat_map(|simd| [DType::F32, DType::BF16].map(|dtype| (*simd, dtype)));
    let kinds: Vec<_> = kinds.flat_map(|(simd, dtype)| (0..8).map(move |kind| (simd, dtype, kind))).collect();
    let models: Vec<_> = kinds.iter().map(|(simd, dtype, kind)| model(*simd, *dtype, *kind)).collect();
    let mut random = Random(1);
    for case in 0..cases {
        let at = case % kinds.len();
        let model = &models[at];
        // Most texts are short; some are longer than a block of keys.
        let longest = if random.below(6) == 0 { 600 } else { 60 };
        let rows = 1 + random.below(5);
        let texts: Vec<_> = (0..rows).map(|_| random.text(longest)).collect();
        let (row, way) = (random.below(rows), random.below(6));
        let due = batched(model, &texts[row..=row], 0);
        let (got, how) = match way {
            0 => (batched(model, &texts, row), "in a batch".into()),
            // Learned positions begin at 0 in each text, too. More keys are summed in blocks.
            1 if texts.iter().map(Vec::len).sum::<usize>() <= 2048 => (packed(model, &texts, row), "packed".into()),
            2 | 3 => {
                let ranks = [2, 4][random.below(2)];
                let pieces = random.pieces(texts.iter().map(Vec::len).max().unwrap());
                let all = cut(ranks, kinds[at], |model| match way {
                    2 => trained(model, &texts[row]),
                    _ => cached(model, &texts, row, &pieces),
                });
                assert!(all.iter().all(|bits| *bits == all[0]), "case {case}: ranks differ");
                (all[0].clone(), format!("cut over {ranks} ranks, in way {way}"))
            }
            _ => {
                let pieces = random.pieces(texts.iter().map(Vec::len).max().unwrap());
                (cached(model, &texts, row, &pieces), format!("with a cache, in pieces of {pieces:?}"))
            }
        };
        let lengths: Vec<_> = texts.iter().map(Vec::len).collect();
        assert!(due.iter().any(|&bits| bits != 0) && due.len() == texts[row].len() - 1);
        assert_eq!(got, due, "case {case}: {:?}, text {row} of {lengths:?} {how}", kinds[at]);
    }
}

/// Texts are the same however many are continued at a time, and training computes the log-probabilities of the sampler.
#[test]
fn the_sampler_has_the_bits_of_training() {
    for (dtype, kind) in
        [(DType::F32, 0), (DType::BF16, 1), (DType::F32, 2), (DType::BF16, 4), (DType::F32, 5), (DType::BF16, 6)]
    {
        let model = model(Simd::best().min(Simd::Avx512Bf16), dtype, kind);
        let mut random = Random(3);
        let prompts: Vec<_> = (0..5)
            .map(|i| Prompt { tokens: random.text(50).into_iter().map(|t| t as u32).collect(), stream: i })
            .collect();
        let sampling = Some(Sampling { temperature: 0.7, ..Default::default() });
        let eos_token_ids = (0..12).collect();
        let options = GenerationOptions { max_new_tokens: 30, sampling, eos_token_ids, ..Default::default() };
        let sample = |rows| {
            let options = GenerationOptions { rows, ..options.clone() };
            rollouts(&model, &prompts, 2, &options, None, |_, text| Ok(text.tokens.len() as f64)).unwrap()
        };
        let all = sample(None);
        let lengths: Vec<_> = all.iter().map(|r| r.completion.tokens.len()).collect();
        assert!(lengths.iter().any(|&n| n < 30) && lengths.iter().any(|&n| n > 5), "{lengths:?}");
        for rows in [1, 2, 3, 7] {
            assert_eq!(sample(Some(rows)), all, "{rows} at a time");
        }
        let batch = RolloutBatch::new(&model, &all).unwrap();
        let states = model.states(&batch.tokens, DecoderInputs::default()).unwrap();
        let new = model.logprobs(&states, &batch.targets).unwrap();
        let [new, old] = [&new, &batch.old].map(|x| x.value().unwrap().to_vec::<f32>().unwrap());
        assert_eq!(new.len(), all.len() * batch.tokens.dims()[1]);
        let worst =
            new.iter().zip(&old).filter(|(a, b)| a.to_bits() != b.to_bits() && (**a, **b) != (0.0, 0.0)).count();
        assert_eq!((worst, old.iter().filter(|x| **x != 0.0).count()), (0, lengths.iter().sum()));
    }
}

#[test]
fn misuse_of_rollouts_is_told() {
    let model = model(Simd::Baseline, DType::F32, 0);
    let says = |group, options: GenerationOptions, word: &str| {
        let error = rollouts(&model, &[vec![1].into()], group, &options, None, |_, _| Ok(0.0)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    let sampled = GenerationOptions { sampling: Some(Sampling::default()), ..Default::default() };
    says(2, GenerationOptions::default(), "greedy");
    says(0, sampled.clone(), "group");
    says(2, GenerationOptions { rows: Some(0), ..sampled }, "texts at a time");
    let completion = models::Generated { tokens: vec![1], logprobs: vec![], reason: FinishReason::Length };
    let bare = Rollout { prompt: vec![1].into(), completion, reward: 0.0 };
    let error = RolloutBatch::new(&model, &[bare]).unwrap_err().to_string();
    assert!(error.contains("0 log-probabilities"), "{error}");
}

/// A layer with a window drops old keys from the cache; those that stay keep their positions, without padding too.
#[test]
fn keys_that_stay_in_a_cache_keep_their_positions() {
    let (model, mut random) = (model(Simd::best().min(Simd::Avx512Bf16), DType::F32, 6), Random(5));
    let text: Vec<_> = (0..240).map(|_| random.below(VOCAB) as i64).collect();
    let pieces: Vec<_> = [100].into_iter().chain([1; 100]).chain([40]).collect();
    let texts = [text];
    assert_eq!(cached(&model, &texts, 0, &pieces), batched(&model, &texts, 0));
}

//! Clipping, loss scaling, averaging, and the optimizers PyTorch does not have, against their formulas in `f64`.

use std::sync::Arc;

use crate::common::{self, Params, close, fill, leaves, numbers, tensor, train, values};
use autograd::{Gradients, Leaf};
use half::f16;
use numcore::{DType, ErrorKind, Tensor};
use optim::*;
use runtime_cpu::Cpu;

const SHAPES: [&[usize]; 3] = [&[5, 3], &[70], &[2, 2]];

/// All gradients concatenated into one row.
fn row(gradients: &FlatGradients<Cpu>, params: &[Arc<Leaf<Cpu>>]) -> Vec<f64> {
    let one = |l: &Arc<Leaf<Cpu>>| gradients.get(l).unwrap().map_or(vec![], |g| g.to_f64s().unwrap());
    params.iter().flat_map(one).collect()
}

fn norm(x: &[f64], which: NormOrder) -> f64 {
    match which {
        NormOrder::L2 => x.iter().map(|x| x * x).sum::<f64>().sqrt(),
        NormOrder::Inf => x.iter().fold(0.0, |m, x| m.max(x.abs())),
    }
}

fn setup(dtype: DType) -> (Params<Cpu>, Sgd<Cpu>, FlatGradients<Cpu>) {
    let params = leaves(&Cpu::new(), &SHAPES, dtype);
    let sgd = Sgd::over(SgdConfig { lr: 1.0, ..Default::default() }, &params).unwrap();
    let gradients = sgd.alloc_gradients().unwrap();
    (params, sgd, gradients)
}

#[test]
fn clips_by_norm() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for which in [NormOrder::L2, NormOrder::Inf] {
            for max in [0.5, 1e3] {
                let (params, _, mut flat) = setup(dtype);
                fill(&mut flat, &params, 3);
                let before = row(&flat, &params);
                let total = clip_grad_norm(&mut flat, max, which).unwrap();
                let want = norm(&before, which);
                assert!(total.dims().is_empty());
                close(&[total.item().unwrap()], &[want], 1e-6, "norm");
                let factor = (max / (want + 1e-6)).min(1.0);
                let scaled: Vec<f64> = before.iter().map(|x| x * factor).collect();
                let tol = if dtype == DType::BF16 { 4e-3 } else { 1e-6 };
                close(&row(&flat, &params), &scaled, tol, "clipped");
                let now = grad_norm(&flat, which).unwrap().item().unwrap();
                close(&[now], &[want * factor], 1e-6, "the norm sees the factor that waits");
            }
        }
    }
}

/// Errors of clipping, averages, loss scaling and gradient buffers have the caller's line.
#[test]
fn arguments_have_the_line_of_the_caller() {
    let (params, mut sgd, mut flat) = setup(DType::F32);
    let other = leaves(&Cpu::new(), &SHAPES, DType::F32);
    let mut ema = Ema::new(&mut sgd, 0.9).unwrap();
    let mut scaler = LossScaler::default();
    let sgd_again = |p: &Params<Cpu>| Box::new(Sgd::over(SgdConfig::default(), p).unwrap()) as Box<dyn Optimizer<Cpu>>;
    let twice = vec![sgd_again(&params), sgd_again(&params)];
    let errors = [
        clip_grad_norm(&mut flat, -1.0, NormOrder::L2).map(|_| ()),
        clip_grad_value(&mut flat, -1.0).map(|_| ()),
        grad_norm(&Gradients::<Cpu>::default(), NormOrder::L2).map(|_| ()),
        flat.set(&other[0], &tensor(&Cpu::new(), SHAPES[0], DType::F32, 1)).map(|_| ()),
        flat.set(&params[0], &tensor(&Cpu::new(), &[7], DType::F32, 1)).map(|_| ()),
        flat.require_all().map(|_| ()),
        Ema::new(&mut sgd, 1.0).map(|_| ()),
        ema.swap_out().map(|_| ()),
        ema.load_state_dict(&[]).map(|_| ()),
        LossScaler::starting_at(0.0).map(|_| ()),
        scaler.resume(-1.0, 0).map(|_| ()),
        scaler.load_state_dict::<Cpu>(&[]).map(|_| ()),
        Combined::new(twice).map(|_| ()),
    ];
    let first = line!() - 14;
    for (i, error) in errors.into_iter().enumerate() {
        let error = error.unwrap_err();
        assert_eq!(error.location().map(|at| at.line()), Some(first + i as u32), "{error}");
    }
}

#[test]
fn stale_ranges_do_not_count() {
    let (params, mut sgd, mut flat) = setup(DType::F64);
    fill(&mut flat, &params, 3);
    flat.zero();
    let grad = tensor(&Cpu::new(), SHAPES[1], DType::F64, 5);
    flat.set(&params[1], &grad).unwrap();
    let want = norm(&values(70, 5), NormOrder::L2);
    close(&[clip_grad_norm(&mut flat, 1.0, NormOrder::L2).unwrap().item().unwrap()], &[want], 1e-6, "norm");
    let before = numbers(&params);
    sgd.step_from(&flat).unwrap();
    let moved: Vec<f64> = before[1].iter().zip(&numbers(&params)[1]).map(|(b, a)| b - a).collect();
    close(&moved, &values(70, 5).iter().map(|g| g / (want + 1e-6)).collect::<Vec<_>>(), 1e-5, "step");
    flat.zero();
    assert_eq!(grad_norm(&flat, NormOrder::L2).unwrap().item().unwrap(), 0.0);
}

#[test]
fn plain_gradients_are_clipped_alike() {
    let (params, _, mut flat) = setup(DType::F32);
    let mut plain = Gradients::new();
    fill(&mut flat, &params, 1);
    params.iter().for_each(|l| plain.set(l, flat.get(l).unwrap().unwrap().copy().unwrap()).unwrap());
    let a = clip_grad_norm(&mut flat, 0.7, NormOrder::L2).unwrap().item().unwrap();
    let b = clip_grad_norm(&mut plain, 0.7, NormOrder::L2).unwrap().item().unwrap();
    close(&[a], &[b], 1e-6, "norm");
    let of_plain =
        |p: &Gradients<Cpu>| params.iter().flat_map(|l| p.get(l).unwrap().to_f64s().unwrap()).collect::<Vec<_>>();
    close(&row(&flat, &params), &of_plain(&plain), 1e-6, "clipped");
    clip_grad_value(&mut flat, 0.01).unwrap();
    clip_grad_value(&mut plain, 0.01).unwrap();
    close(&row(&flat, &params), &of_plain(&plain), 1e-6, "clamped");
    assert_eq!(norm(&row(&flat, &params), NormOrder::Inf), f64::from(0.01f32));
    assert!(clip_grad_norm(&mut flat, f64::NAN, NormOrder::L2).is_err() && clip_grad_value(&mut flat, -1.0).is_err());
    assert!(clip_grad_norm(&mut Gradients::<Cpu>::new(), 1.0, NormOrder::L2).is_err());
}

#[test]
fn every_rule_takes_the_factor() {
    fn same<C: UpdateRule>(config: C, dtype: DType) {
        let (a, b) = (leaves(&Cpu::new(), &[&[5, 3], &[4, 4]], dtype), leaves(&Cpu::new(), &[&[5, 3], &[4, 4]], dtype));
        let mut waiting = FlatOptimizer::over(config.clone(), &a).unwrap();
        let mut applied = FlatOptimizer::over(config, &b).unwrap();
        let (mut with, mut without) = (waiting.alloc_gradients().unwrap(), applied.alloc_gradients().unwrap());
        for k in 0..3 {
            fill(&mut with, &a, k);
            fill(&mut without, &b, k);
            with.multiply(0.25).unwrap();
            without.multiply(0.25).unwrap();
            without.apply_scale().unwrap();
            waiting.step_from(&with).unwrap();
            applied.step_from(&without).unwrap();
        }
        // A power of two: rounding the gradient first changes nothing.
        assert_eq!(numbers(&a), numbers(&b), "{}", C::NAME);
    }
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        same(SgdConfig { momentum: 0.9, ..Default::default() }, dtype);
        same(AdamWConfig::default(), dtype);
        same(LionConfig::default(), dtype);
        same(AdanConfig::default(), dtype);
        same(ScheduleFreeAdamWConfig::default(), dtype);
        same(ProdigyConfig { d0: 0.01, ..Default::default() }, dtype);
        same(AdamW8bitConfig::default(), dtype);
        same(LambConfig::default(), dtype);
        same(AdafactorConfig::default(), dtype);
        same(MuonConfig::default(), dtype);
        #[cfg(feature = "linalg")]
        same(SoapConfig::default(), dtype);
        #[cfg(feature = "linalg")]
        same(ShampooConfig::default(), dtype);
    }
}

#[test]
fn loss_scaling_skips_and_adapts() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F16);
    let mut sgd = Sgd::over(SgdConfig { lr: 0.1, ..Default::default() }, &params).unwrap();
    let mut gradients = sgd.alloc_gradients().unwrap();
    let fresh = || {
        let mut scaler = LossScaler::starting_at(8.0).unwrap();
        scaler.interval = 2;
        scaler
    };
    let mut scaler = fresh();
    let loss = autograd::Var::leaf("loss", Tensor::from_slice(&cpu, [1], &[0.5f32]).unwrap()).unwrap();
    assert_eq!(scaler.scale(&loss).unwrap().item().unwrap(), 4.0);

    let scaled = |gradients: &mut FlatGradients<Cpu>, bad: f64| {
        gradients.zero();
        for (i, leaf) in params.iter().enumerate() {
            let mut data: Vec<f16> =
                values(leaf.spec().shape.numel(), i).iter().map(|x| f16::from_f64(x * 8.0)).collect();
            data[0] = f16::from_f64(if i == 1 { bad } else { 0.0 });
            gradients.set(leaf, &Tensor::from_slice(&cpu, leaf.spec().shape, &data).unwrap()).unwrap();
        }
    };
    let before = numbers(&params);
    for bad in [f64::INFINITY, f64::NAN, f64::NEG_INFINITY] {
        scaled(&mut gradients, bad);
        assert!(!scaler.step_from(&mut sgd, &mut gradients).unwrap());
    }
    assert_eq!((numbers(&params), sgd.steps(), scaler.factor()), (before.clone(), 0, 1.0));

    scaler = fresh();
    scaled(&mut gradients, 0.0);
    assert!(scaler.unscale(&mut gradients).unwrap());
    assert!(scaler.unscale(&mut gradients).is_err(), "once is enough");
    assert!(scaler.step_from(&mut sgd, &mut gradients).unwrap());
    let want: Vec<f64> = before[2].iter().zip(values(4, 2)).map(|(b, g)| b - 0.1 * g).collect();
    close(&numbers(&params)[2][1..], &want[1..], 2e-3, "the factor is divided out");
    assert_eq!((scaler.factor(), scaler.good_steps()), (8.0, 1));
    let saved = scaler.state_dict(&cpu).unwrap();
    scaled(&mut gradients, 0.0);
    assert!(scaler.step_from(&mut sgd, &mut gradients).unwrap());
    assert_eq!((scaler.factor(), scaler.good_steps()), (16.0, 0));
    scaler.load_state_dict(&saved).unwrap();
    assert_eq!((scaler.factor(), scaler.good_steps()), (8.0, 1));
    assert!(scaler.load_state_dict(&saved[..1]).unwrap_err().to_string().contains("`good_steps` is missing"));
    assert!(LossScaler::starting_at(0.0).is_err());
}

#[test]
fn averages_follow_the_weights() {
    for dtype in [DType::F32, DType::BF16] {
        let params = leaves(&Cpu::new(), &SHAPES, dtype);
        let mut adam = AdamW::over(AdamWConfig { lr: 0.1, ..Default::default() }, &params).unwrap();
        let mut ema = Ema::new(&mut adam, 0.9).unwrap().with_warmup();
        let weights = |adam: &AdamW<Cpu>| match dtype {
            DType::F32 => numbers(&params),
            _ => {
                let state = adam.state_dict().unwrap();
                let master = state.iter().filter(|(n, _)| n.starts_with("master."));
                master.map(|(_, t)| t.to_f64s().unwrap()).collect()
            }
        };
        let mut want = weights(&adam);
        for k in 0..5 {
            train(&mut adam, &params, k..k + 1);
            ema.update(&mut adam).unwrap();
            let decay = (0.9f64).min((2.0 + k as f64) / (11.0 + k as f64));
            for (w, now) in want.iter_mut().flatten().zip(weights(&adam).iter().flatten()) {
                *w = *w * decay + now * (1.0 - decay);
            }
        }
        let state = common::copies(ema.state_dict().unwrap());
        for (i, w) in want.iter().enumerate() {
            close(&state[i].1.to_f64s().unwrap(), w, 1e-5, &state[i].0);
        }

        let own = numbers(&params);
        let averaged = ema.averaged(|| Ok(numbers(&params))).unwrap();
        let tol = if dtype == DType::F32 { 1e-5 } else { 4e-3 };
        averaged.iter().zip(&want).for_each(|(a, w)| close(a, w, tol, "swapped in"));
        assert_eq!(numbers(&params), own, "and out");

        ema.swap_in().unwrap();
        let mut gradients = adam.alloc_gradients().unwrap();
        fill(&mut gradients, &params, 9);
        let error = adam.step_from(&gradients).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Shared { .. }), "{error}");
        assert!(ema.update(&mut adam).is_err() && ema.swap_in().is_err());
        ema.swap_out().unwrap();
        assert_eq!(numbers(&params), own);
        assert!(ema.swap_out().is_err());

        train(&mut adam, &params, 9..10);
        ema.update(&mut adam).unwrap();
        ema.load_state_dict(&state).unwrap();
        assert_eq!((common::bytes(&ema.state_dict().unwrap()), ema.updates()), (common::bytes(&state), 5));
        assert!(ema.load_state_dict(&state[1..]).unwrap_err().to_string().contains("`ema.p0` is missing"));
    }
}

#[test]
fn averages_follow_an_optimizer_that_is_reordered() {
    for dtype in [DType::F32, DType::BF16] {
        let averages = |reordered: bool| {
            let params = leaves(&Cpu::new(), &SHAPES, dtype);
            let mut adam = AdamW::over(AdamWConfig { lr: 0.1, ..Default::default() }, &params).unwrap();
            let mut ema = Ema::new(&mut adam, 0.9).unwrap();
            for k in 0..3 {
                train(&mut adam, &params, k..k + 1);
                ema.update(&mut adam).unwrap();
                if reordered && k < 2 {
                    // As gradients become ready: the other way round, then back.
                    let place = |l: &std::sync::Arc<autograd::Leaf<Cpu>>| params.iter().position(|p| p.id() == l.id());
                    adam.reorder(&|l| place(l).map_or(0, |at| if k == 0 { 9 - at } else { at })).unwrap();
                }
            }
            let mut state = common::copies(ema.state_dict().unwrap());
            state.sort_by(|a, b| a.0.cmp(&b.0));
            common::bytes(&state)
        };
        assert_eq!(averages(true), averages(false));
    }
    let [own, other] = [0, 1].map(|_| leaves(&Cpu::new(), &SHAPES, DType::F32));
    let mut adam = AdamW::over(AdamWConfig::default(), &own).unwrap();
    let mut ema = Ema::new(&mut adam, 0.9).unwrap();
    let mut stranger = AdamW::over(AdamWConfig::default(), &other).unwrap();
    assert!(ema.update(&mut stranger).unwrap_err().to_string().contains("not the parameters of the optimizer"));
}

#[test]
fn lion_is_its_formula() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let mut want = numbers(&params);
    let config = LionConfig { lr: 0.1, betas: [0.8, 0.95], weight_decay: 0.2, maximize: false };
    train(&mut Lion::over(config, &params).unwrap(), &params, 0..6);
    for (i, p) in want.iter_mut().enumerate() {
        let mut m = vec![0.0; p.len()];
        for k in 0..6 {
            for ((p, m), g) in p.iter_mut().zip(&mut m).zip(values(SHAPES[i].iter().product(), 1000 * k + i)) {
                *p = *p * (1.0 - 0.1 * 0.2) - 0.1 * (0.8 * *m + 0.2 * g).signum();
                *m = 0.95 * *m + 0.05 * g;
            }
        }
    }
    numbers(&params).iter().zip(&want).for_each(|(got, want)| close(got, want, 1e-12, "lion"));
}

#[test]
fn rates_decrease_with_depth() {
    let [matrix, vector, _] = [0, 1, 2].map(|k| leaves(&Cpu::new(), &SHAPES, DType::F32)[k].spec());
    let groups = ParamGroups::decay_matrices(AdamWConfig { lr: 0.8, weight_decay: 0.5, ..Default::default() })
        .others(|name, _| name.starts_with("other"), ParamGroups::new(LionConfig { lr: 8.0, ..Default::default() }))
        .by_depth(3, 0.5, |name| name.len() % 5);
    let groups: &dyn Shards<Cpu> = &groups;
    let of = |name: &str, spec| {
        let group = groups.group(name, spec);
        let own = &groups.hyper_parameters().unwrap()[group].values;
        (groups.base_lrs()[group], own.iter().any(|(name, value)| name == "weight_decay" && value.as_slice() == [0.5]))
    };
    assert_eq!(
        ["12345", "1", "12", "1234"].map(|name| of(name, &matrix)),
        [(0.2, true), (0.4, true), (0.8, true), (0.8, true)]
    );
    assert_eq!(
        ["12345", "1", "12", "1234"].map(|name| of(name, &vector)),
        [(0.2, false), (0.4, false), (0.8, false), (0.8, false)]
    );
    assert_eq!(["other", "other1", "other12"].map(|name| of(name, &matrix).0), [2.0, 4.0, 8.0]);
    assert_eq!(groups.base_lrs()[0], 0.8, "the first group has the rate that records show");
}

#[test]
fn adan_is_its_formula() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let mut want = numbers(&params);
    let config = AdanConfig { lr: 0.1, betas: [0.9, 0.8, 0.7], eps: 1e-3, weight_decay: 0.2, maximize: false };
    train(&mut Adan::over(config, &params).unwrap(), &params, 0..6);
    for (i, p) in want.iter_mut().enumerate() {
        let (mut m, mut v, mut n) = (vec![0.0; p.len()], vec![0.0; p.len()], vec![0.0; p.len()]);
        for k in 0..6 {
            let g = values(p.len(), 1000 * k + i);
            let before = if k == 0 { g.clone() } else { values(p.len(), 1000 * (k - 1) + i) };
            let [c1, c2, c3] = [0.9f64, 0.8, 0.7].map(|b| 1.0 - b.powi(k as i32 + 1));
            for j in 0..p.len() {
                let d = g[j] - before[j];
                m[j] = 0.9 * m[j] + 0.1 * g[j];
                v[j] = 0.8 * v[j] + 0.2 * d;
                n[j] = 0.7 * n[j] + 0.3 * (g[j] + 0.8 * d).powi(2);
                let step = (m[j] / c1 + 0.8 * v[j] / c2) / ((n[j] / c3).sqrt() + 1e-3);
                p[j] = (p[j] - 0.1 * step) / (1.0 + 0.1 * 0.2);
            }
        }
    }
    numbers(&params).iter().zip(&want).for_each(|(got, want)| close(got, want, 1e-12, "adan"));
}

#[cfg(feature = "linalg")]
#[test]
fn shampoo_of_a_vector_with_momentum_is_its_formula() {
    let params = leaves(&Cpu::new(), &[&[7]], DType::F64);
    let mut want = numbers(&params).remove(0);
    let config = ShampooConfig { lr: 0.1, momentum: 0.8, eps: 1e-2, weight_decay: 0.2, ..Default::default() };
    train(&mut Shampoo::over(config, &params).unwrap(), &params, 0..6);
    let (mut sums, mut u) = (vec![0.0; 7], vec![0.0; 7]);
    for k in 0..6 {
        let g = values(7, 1000 * k);
        for j in 0..7 {
            sums[j] += g[j] * g[j];
            u[j] = 0.8 * u[j] + g[j] / (sums[j] + 1e-2).sqrt();
            want[j] = (1.0 - 0.1 * 0.2) * want[j] - 0.1 * u[j];
        }
    }
    close(&numbers(&params)[0], &want, 1e-12, "shampoo");
}

#[test]
fn lamb_is_its_formula() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let zero = Leaf::new("zero", Tensor::zeros(params[0].runtime(), [3], DType::F64).unwrap()).unwrap();
    let params: Params<Cpu> = params.into_iter().chain([zero]).collect();
    let mut want = numbers(&params);
    let config = LambConfig { lr: 0.1, betas: [0.8, 0.9], eps: 1e-3, weight_decay: 0.2, maximize: false };
    train(&mut Lamb::over(config, &params).unwrap(), &params, 0..6);
    for (i, p) in want.iter_mut().enumerate() {
        let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        for k in 0..6 {
            let g = values(p.len(), 1000 * k + i);
            let (c1, c2) = (1.0 - 0.8f64.powi(k as i32 + 1), 1.0 - 0.9f64.powi(k as i32 + 1));
            let r: Vec<f64> = (0..p.len())
                .map(|j| {
                    m[j] = 0.8 * m[j] + 0.2 * g[j];
                    v[j] = 0.9 * v[j] + 0.1 * g[j] * g[j];
                    m[j] / c1 / ((v[j] / c2).sqrt() + 1e-3) + 0.2 * p[j]
                })
                .collect();
            let (of_p, of_r) = (norm(p, NormOrder::L2), norm(&r, NormOrder::L2));
            let ratio = if of_p > 0.0 && of_r > 0.0 { of_p / of_r } else { 1.0 };
            p.iter_mut().zip(&r).for_each(|(p, r)| *p -= 0.1 * ratio * r);
        }
    }
    numbers(&params).iter().zip(&want).for_each(|(got, want)| close(got, want, 1e-12, "lamb"));
}

#[test]
fn programs_are_listed_once_each() {
    let all = programs();
    let mut hashes: Vec<u64> = all.iter().map(|p| p.hash()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), all.len());
    let scalars = AdamWConfig::default().scalars(StepContext { lr: 0.1, step: 3 }).len();
    assert!(all.iter().any(|p| p.name() == "adamw" && p.scalars() == scalars));
}

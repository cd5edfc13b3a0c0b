//! Attention's options and rotary positions against their formulas, computed on the host element by element.

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{NnOps, RopeOptions, SdpaOptions},
    ops::{PointwiseOps, ViewOps},
    rng::Philox,
};

use super::{
    close::near,
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};

pub(crate) fn attend<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("attention and positions");
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F64, 1e-13), (DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        if !computes(rt, dtype) {
            section.skip(lacks(dtype));
            continue;
        }
        // Equal numbers of queries and keys, fewer, more, one, none.
        for [t, s] in [[5, 5], [3, 7], [7, 3], [1, 6], [6, 1], [0, 4], [4, 0]] {
            for scores in options() {
                let name = format!("{scores:?} T{t} S{s} {dtype}");
                section.check(name, || attention(rt, dtype, [t, s], scores, tolerance));
            }
        }
        for (interleaved, dim) in [(false, None), (true, None), (false, Some(4)), (true, Some(2)), (false, Some(0))] {
            let name = format!("rope interleaved {interleaved} of {dim:?} {dtype}");
            section.check(name, || rotations(rt, dtype, interleaved, dim, tolerance));
        }
    }
    section
}

/// The options of one attention call.
#[derive(Clone, Copy, Debug)]
struct Scores {
    causal: bool,
    window: (Option<usize>, Option<usize>),
    lower_right: bool,
    softcap: Option<f64>,
    masked: bool,
}

fn options() -> Vec<Scores> {
    let windows = [(None, None), (Some(0), None), (Some(2), Some(1)), (None, Some(1)), (Some(100), Some(100))];
    let mut all = Vec::new();
    for (i, window) in windows.into_iter().enumerate() {
        for lower_right in [false, true] {
            let softcap = (i % 2 == 1 || lower_right).then_some(0.75);
            all.push(Scores { causal: false, window, lower_right, softcap, masked: i == 2 });
            all.push(Scores { causal: true, window, lower_right, softcap: None, masked: i == 1 });
        }
    }
    all
}

/// Random values of a dtype, and the same values as `f64`.
fn draw<R: Runtime>(rt: &R, dtype: DType, shape: [usize; 4], seed: u64) -> Result<(Tensor<R>, Vec<f64>)> {
    let mut rng = Philox::new(seed, 2);
    let x = Tensor::from_f64_fn(rt, shape, dtype, || rng.normal())?;
    let values = x.to_f64s()?;
    Ok((x, values))
}

fn attention<R: Runtime>(rt: &R, dtype: DType, [t, s]: [usize; 2], o: Scores, tolerance: f64) -> Result<Verdict> {
    const D: usize = 3;
    let (q, qs) = draw(rt, dtype, [1, 2, t, D], 1)?;
    let (k, ks) = draw(rt, dtype, [1, 1, s, D], 2)?;
    let (v, vs) = draw(rt, dtype, [1, 1, s, D], 3)?;
    let allowed: Vec<bool> = (0..t * s).map(|i| i % 3 != 1).collect();
    let mask = Tensor::from_slice(rt, [t, s], &allowed)?;
    let Scores { causal, window, lower_right, softcap, masked } = o;
    let options =
        || SdpaOptions { mask: masked.then_some(&mask), causal, window, lower_right, softcap, scale: Some(0.8) };
    let sees = |i: usize, j: usize| {
        let at = i as isize + if lower_right { s as isize - t as isize } else { 0 };
        let (before, after) = (at - j as isize, j as isize - at);
        let right = if causal { Some(0) } else { window.1 };
        window.0.is_none_or(|n| before <= n as isize)
            && right.is_none_or(|n| after <= n as isize)
            && (!masked || allowed[i * s + j])
    };
    let mut want = Vec::new();
    for row in 0..2 * t {
        let score = |j: usize| {
            let x: f64 = 0.8 * (0..D).map(|d| qs[row * D + d] * ks[j * D + d]).sum::<f64>();
            softcap.map_or(x, |c| c * (x / c).tanh())
        };
        let weights: Vec<f64> = (0..s).map(|j| if sees(row % t, j) { score(j).exp() } else { 0.0 }).collect();
        let sum = weights.iter().sum::<f64>();
        let total = if sum == 0.0 { 1.0 } else { sum };
        want.extend((0..D).map(|d| (0..s).map(|j| weights[j] * vs[j * D + d]).sum::<f64>() / total));
    }
    let dense = q.attention_with(&k, &v, options())?;
    // Both heads share the keys, as views of any kind.
    let (far, wide) = (k.flip(&[2])?.contiguous()?.flip(&[2])?, v.broadcast_to([1, 2, s, D])?);
    let viewed = q.attention_with(&far.broadcast_to([1, 2, s, D])?, &wide, options())?;
    Ok(near("the output", &dense.to_f64s()?, &want, tolerance).and(near(
        "the output of views",
        &viewed.to_f64s()?,
        &want,
        tolerance,
    )))
}

fn rotations<R: Runtime>(
    rt: &R,
    dtype: DType,
    interleaved: bool,
    dim: Option<usize>,
    tolerance: f64,
) -> Result<Verdict> {
    let [b, h, t, width] = [2, 2, 3, 6];
    let (x, xs) = draw(rt, dtype, [b, h, t, width], 4)?;
    let (turning, base) = (dim.unwrap_or(width), 50.0f64);
    let half = turning / 2;
    let turned = |position: &dyn Fn(usize, usize) -> i64| -> Vec<f64> {
        let mut y = xs.clone();
        for row in 0..b * h * t {
            let (batch, at) = (row / (h * t), row % t);
            for i in 0..half {
                let angle = position(batch, at) as f64 * base.powf(-(i as f64) / half as f64);
                let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (p, q) = (xs[row * width + first], xs[row * width + second]);
                y[row * width + first] = p * angle.cos() - q * angle.sin();
                y[row * width + second] = q * angle.cos() + p * angle.sin();
            }
        }
        y
    };
    let options = || RopeOptions { base, dim, interleaved, ..RopeOptions::default() };
    let check = |what: &str, y: Tensor<R>, want: Vec<f64>| -> Result<Verdict> {
        Ok(near(what, &y.to_f64s()?, &want, 8.0 * tolerance))
    };
    let counted = x.rope_with(RopeOptions { start: 7, ..options() })?;
    let mut verdict = check("counted positions", counted, turned(&|_, at| at as i64 + 7))?;
    let own = [4i64, 0, 9];
    let positions = Tensor::from_slice(rt, [t], &own)?;
    let y = x.rope_with(RopeOptions { positions: Some(&positions), ..options() })?;
    verdict = verdict.and(check("positions", y, turned(&|_, at| own[at]))?);
    let each = [1i64, 2, 5, -3, 8, 0];
    let positions = Tensor::from_slice(rt, [b, t], &each)?;
    let y = x.rope_with(RopeOptions { positions: Some(&positions), ..options() })?;
    verdict = verdict.and(check("positions of each sequence", y, turned(&|batch, at| each[batch * t + at]))?);
    let table = |f: fn(f64) -> f64| {
        let mut next =
            (0..t * half).map(|k| f((k / half.max(1)) as f64 * base.powf(-((k % half.max(1)) as f64) / half as f64)));
        Tensor::from_f64_fn(rt, [t, half], dtype, || next.next().unwrap_or(0.0))
    };
    let y = x.transpose(0, 1)?.rotate(&table(f64::cos)?, &table(f64::sin)?, interleaved)?.transpose(0, 1)?;
    Ok(verdict.and(check("given tables", y.to_dtype(dtype)?, turned(&|_, at| at as i64))?))
}

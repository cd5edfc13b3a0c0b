//! Attention by programs of scores against its decomposition. Arguments are whole and real, along any axes; there is
//! every kind of mask, and gradients of scores and of arguments.

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{Attention, ScoredAttention, ScoredAttentionGrad},
    ops::{Apply, ViewOps},
    pointwise::Program,
};

use super::{close::near, kernels::Bench, report::Verdict};

/// Programs over a slope of each head, a bias of each key, a value of each score, and a number and factor of each
/// query.
fn programs() -> [Program; 6] {
    [
        Program::build("alibi", 10, 0, |_, x, _| vec![x[0] + x[5] * (x[4] - x[3]).cast_like(x[0]) * 0.01]),
        Program::build("bent", 10, 0, |_, x, _| vec![((x[0] * x[5] + x[6]) * 0.5).tanh() * 2.0 + x[7]]),
        // Whole numbers of data have 64 bits, and their remainders are long on some devices.
        Program::build("hidden", 10, 0, |b, x, _| {
            let seen = (x[4] % 3).ne(x[8] % 3) & x[3].ne(2);
            vec![seen.select(x[0] * x[7], b.c(f64::NEG_INFINITY))]
        }),
        // Divisions of positions, and a value of each example that replaces the score.
        Program::build("given", 10, 0, |b, x, _| {
            let value = x[6] + (x[2] - x[1] * 2).cast_like(x[6]) * 0.1;
            vec![((x[4] - 5) / 4).le(x[3] / 3).select(value, b.c(f64::NEG_INFINITY))]
        }),
        Program::build("steep", 10, 0, |_, x, _| vec![x[0] + x[5] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]),
        Program::build("warm", 10, 0, |_, x, _| vec![(x[0] + x[6] * x[5]) * (x[9] + 1.5) * 0.5]),
    ]
}

/// Masks of kernels, first positions, and learned arguments. A program whose slope has no value at later keys is
/// causal.
fn kinds() -> Vec<(ScoredAttention, Vec<usize>)> {
    let of = |program: &Program, causal, lower_right, first, learned: &[usize]| {
        let attention = Attention { causal, lower_right, ..Attention::new(0.3) };
        (ScoredAttention { attention, program: program.clone(), first }, learned.into())
    };
    let [alibi, bent, hidden, given, steep, warm] = programs();
    let far = [7, 1, 1 << 33, (1 << 33) - 2];
    vec![
        of(&alibi, true, false, [0; 4], &[]),
        of(&alibi, true, true, far, &[0]),
        of(&bent, false, false, [0; 4], &[0, 1, 2]),
        of(&bent, true, false, [0; 4], &[]),
        of(&hidden, false, false, [0; 4], &[]),
        of(&hidden, true, true, [0, 0, 2, 1], &[2]),
        of(&given, false, false, [2, 1, 3, 0], &[]),
        of(&given, true, true, far, &[1]),
        of(&steep, true, false, [0; 4], &[0]),
        of(&warm, false, false, [0; 4], &[4]),
        of(&warm, true, true, [1, 0, 2, 1], &[0, 1, 4]),
    ]
}

impl<R: Runtime> Bench<'_, R> {
    pub(super) fn scored_attention(&mut self) {
        // Batch, query heads, key heads, queries, keys, depth, depth of values.
        let sizes = [
            [1, 1, 1, 1, 1, 1, 1],
            [2, 4, 2, 33, 40, 16, 12],
            [1, 2, 1, 19, 7, 8, 8],
            [1, 2, 1, 70, 70, 32, 32],
            [2, 2, 2, 0, 4, 8, 8],
        ];
        for [b, h, k, t, s, d, e] in sizes {
            let (q, key, v) =
                (self.real(&[b, h, t, d], 40), self.real(&[b, k, s, d], 41), self.real(&[b, k, s, e], 42));
            let g = self.real(&[b, h, t, e], 43);
            let (slopes, bias, values) =
                (self.real(&[h, 1, 1], 44), self.real(&[b, 1, 1, s], 45), self.real(&[h, t, s], 46));
            let numbers = Tensor::arange(self.rt, 0i64, 1, t, DType::I64).and_then(|x| x.reshape([t, 1]));
            let numbers = numbers.expect("a tensor of whole numbers");
            let factors = self.real(&[b, 1, t, 1], 47);
            for (op, learned) in kinds() {
                let Attention { causal, lower_right, .. } = op.attention;
                let name = op.program.name();
                let what = format!("B{b} H{h} K{k} T{t} S{s} D{d} E{e} {name} causal {causal} {lower_right}");
                let forward = [&q, &key, &v, &slopes, &bias, &values, &numbers, &factors];
                let outs = self.compare(&format!("scored_attention {what}"), op.clone(), &forward);
                let [o, lse] = &outs[..] else { continue };
                let saved: Vec<&Tensor<R>> = [&g, o, lse].into_iter().chain(forward).collect();
                let what = format!("scored_attention_grad {what} of {learned:?}");
                self.compare(&what, ScoredAttentionGrad { of: op, learned: learned.into_iter().collect() }, &saved);
            }
        }
    }

    /// Checks scores of infinities against softmax's limits. Keys at −∞ have no weight, a query with no other keys
    /// gives zeros, and one with a key at ∞ has no value. Others have their own values and gradients.
    pub(super) fn infinite_scores(&mut self) {
        const KEYS: usize = 5;
        const WIDTH: usize = 32;
        let x = [(4, 50), (KEYS, 51), (KEYS, 52), (4, 53)].map(|(rows, seed)| self.real(&[1, 1, rows, WIDTH], seed));
        let (rt, dtype, tolerance) = (self.rt, self.dtype, self.tolerance);
        self.section.check(format!("scores of infinities {dtype}"), || {
            let [q, k, v, g] = &x;
            let (low, high) = (f64::NEG_INFINITY, f64::INFINITY);
            let added = [[0.0; KEYS], [low; KEYS], [0.5, low, -1.0, low, 0.0], [0.0, 0.0, high, low, 0.0]].concat();
            let (mut all, mut finite) = (added.iter(), added.iter());
            let infinite = Tensor::from_f64_fn(rt, [4, KEYS], dtype, || all.next().map_or(0.0, |x| *x))?;
            let hidden =
                Tensor::from_f64_fn(rt, [4, KEYS], dtype, || finite.next().map_or(0.0, |x| x.clamp(-1e4, 0.5)))?;
            let program = Program::build("added", 6, 0, |_, x, _| vec![x[0] + x[5]]);
            let op = ScoredAttention { attention: Attention::new(0.1), program, first: [0; 4] };
            let outs = Tensor::apply(op.clone().into(), &[q, k, v, &infinite])?;
            let near_by = Tensor::apply(op.clone().into(), &[q, k, v, &hidden])?;
            let rows = |x: &Tensor<R>| {
                Ok::<_, numcore::Error>(x.to_f64s()?.chunks(WIDTH).map(<[f64]>::to_vec).collect::<Vec<_>>())
            };
            let (o, lse, want) = (rows(&outs[0])?, outs[1].to_f64s()?, rows(&near_by[0])?);
            let mut verdict =
                near("the seen", &o[0], &want[0], tolerance).and(near("the rest", &o[2], &want[2], tolerance));
            let limits = o[1] == [0.0; WIDTH] && o[3].iter().all(|x| x.is_nan()) && lse[1] == low;
            verdict = verdict.and(Verdict::when(limits && lse[0].is_finite() && !lse[3].is_finite(), || {
                format!("{:?}, {:?}, {lse:?}", o[1], o[3])
            }));
            // Without the last query, whose gradients have no value.
            let three = |x: &Tensor<R>, axis| x.narrow(axis, 0, 3);
            let (q, g, o, added) = (three(q, 2)?, three(g, 2)?, three(&outs[0], 2)?, three(&infinite, 0)?);
            let (hidden, lse) = (three(&hidden, 0)?, three(&outs[1], 2)?);
            let grad = ScoredAttentionGrad { of: op, learned: [].into_iter().collect() };
            let got = Tensor::apply(grad.clone().into(), &[&g, &o, &lse, &q, k, v, &added])?;
            let of_queries = rows(&got[0])?;
            let near_by = [three(&near_by[0], 2)?, three(&near_by[1], 2)?];
            let want = Tensor::apply(grad.into(), &[&g, &near_by[0], &near_by[1], &q, k, v, &hidden])?;
            let want = rows(&want[0])?;
            let finite =
                got.iter().map(|x| x.to_f64s()).collect::<Result<Vec<_>>>()?.concat().iter().all(|x| x.is_finite());
            verdict = verdict.and(near("a gradient", &of_queries[2], &want[2], tolerance));
            Ok(verdict.and(Verdict::when(finite && of_queries[1] == [0.0; WIDTH], || format!("{of_queries:?}"))))
        });
    }
}

//! Attention by programs of scores against its decomposition: whole and real arguments along any axes, every kind of
//! mask, and gradients of scores and of arguments.

use numcore::{
    DType, Runtime, Tensor,
    fused::{Attention, ScoredAttention, ScoredAttentionGrad},
    ops::ViewOps,
    pointwise::Program,
};

use super::kernels::Bench;

/// Programs over a slope of each head, a bias of each key, a value of each score, and a number of each query.
fn programs() -> [Program; 5] {
    [
        Program::build("alibi", 9, 0, |_, x, _| vec![x[0] + x[5] * (x[4] - x[3]).cast_like(x[0]) * 0.01]),
        Program::build("bent", 9, 0, |_, x, _| vec![((x[0] * x[5] + x[6]) * 0.5).tanh() * 2.0 + x[7]]),
        // Whole numbers of data have 64 bits, and their remainders are long on some devices.
        Program::build("hidden", 9, 0, |b, x, _| {
            let seen = (x[4] % 3).ne(x[8] % 3) & x[3].ne(2);
            vec![seen.select(x[0] * x[7], b.c(f64::NEG_INFINITY))]
        }),
        // Divisions of positions, and a value of each example that replaces the score.
        Program::build("given", 9, 0, |b, x, _| {
            let value = x[6] + (x[2] - x[1] * 2).cast_like(x[6]) * 0.1;
            vec![((x[4] - 5) / 4).le(x[3] / 3).select(value, b.c(f64::NEG_INFINITY))]
        }),
        Program::build("steep", 9, 0, |_, x, _| vec![x[0] + x[5] * (x[3] - x[4] + 1).cast_like(x[0]).sqrt()]),
    ]
}

/// Masks of kernels, first positions, and learned arguments. A program whose slope has no value at later keys is causal.
fn kinds() -> Vec<(ScoredAttention, Vec<usize>)> {
    let of = |program: &Program, causal, lower_right, first, learned: &[usize]| {
        let attention = Attention { causal, lower_right, ..Attention::new(0.3) };
        (ScoredAttention { attention, program: program.clone(), first }, learned.into())
    };
    let [alibi, bent, hidden, given, steep] = programs();
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
            for (op, learned) in kinds() {
                let Attention { causal, lower_right, .. } = op.attention;
                let name = op.program.name();
                let what = format!("B{b} H{h} K{k} T{t} S{s} D{d} E{e} {name} causal {causal} {lower_right}");
                let forward = [&q, &key, &v, &slopes, &bias, &values, &numbers];
                let outs = self.compare(&format!("scored_attention {what}"), op.clone(), &forward);
                let [o, lse] = &outs[..] else { continue };
                let saved: Vec<&Tensor<R>> = [&g, o, lse].into_iter().chain(forward).collect();
                let what = format!("scored_attention_grad {what} of {learned:?}");
                self.compare(&what, ScoredAttentionGrad { of: op, learned: learned.into_iter().collect() }, &saved);
            }
        }
    }
}

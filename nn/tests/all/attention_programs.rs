//! Attention by programs against loops over queries and keys, against dense masks, and in parts.

use autograd::{Backward, Gradients, Var, checkpoint, differentiable_grad, grad};
use numcore::{
    DType, Result, Tensor,
    fused::{AttentionProgram, NnOps, SdpaOptions},
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::{Expr, Program},
};
use runtime_cpu::Cpu;

use crate::common::{cpu, f64s};

type V = Var<Cpu>;

fn drawn(shape: &[usize], seed: u64) -> V {
    Var::leaf(&format!("x{seed}"), Tensor::uniform(&cpu(), shape, DType::F64, -1.0, 1.0, seed).unwrap()).unwrap()
}

/// Queries of `heads` heads, and keys and values of `shared` heads.
fn operands(heads: usize, shared: usize, queries: usize, keys: usize) -> [V; 3] {
    [drawn(&[2, heads, queries, 3], 1), drawn(&[2, shared, keys, 3], 2), drawn(&[2, shared, keys, 4], 3)]
}

/// Attention by a loop: the score of `(score, batch, head, query, key)` is `None` where a key is hidden.
fn looped([q, k, v]: &[V; 3], score: impl Fn(f64, [usize; 4]) -> Option<f64>) -> Vec<f64> {
    let (qs, ks, vs) = (f64s(q), f64s(k), f64s(v));
    let ([batch, heads, queries, depth], [_, shared, keys, width]) = (sizes(q), sizes(v));
    let mut out = Vec::new();
    for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..queries).map(move |i| (b, h, i)))) {
        let g = b * shared + h / (heads / shared);
        let row = |j: usize| {
            let (at, to) = (((b * heads + h) * queries + i) * depth, (g * keys + j) * depth);
            let dot: f64 = (0..depth).map(|d| qs[at + d] * ks[to + d]).sum();
            score(dot / (depth as f64).sqrt(), [b, h, i, j])
        };
        let weights: Vec<f64> = (0..keys).map(|j| row(j).map_or(0.0, f64::exp)).collect();
        let total: f64 = weights.iter().sum();
        for e in 0..width {
            let sum: f64 = (0..keys).map(|j| weights[j] * vs[(g * keys + j) * width + e]).sum();
            out.push(if total > 0.0 { sum / total } else { 0.0 });
        }
    }
    out
}

fn sizes(x: &V) -> [usize; 4] {
    x.dims().try_into().unwrap()
}

fn near(got: &[f64], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
    assert!(worst <= bound, "off by {worst}");
}

#[test]
fn programs_are_loops() {
    for (heads, shared, queries, keys) in [(4, 2, 5, 7), (2, 2, 130, 200), (3, 1, 1, 65)] {
        let x @ [q, k, v] = &operands(heads, shared, queries, keys);
        let attend = |program: &AttentionProgram, args: &[&V]| f64s(&program.attend(q, k, v, args).unwrap());
        let plain = AttentionProgram::over(0);
        near(&attend(&plain, &[]), &looped(x, |s, _| Some(s)), 1e-13);
        near(&attend(&AttentionProgram::causal(), &[]), &looped(x, |s, [.., i, j]| (j <= i).then_some(s)), 1e-13);
        let window = plain.clone().mask(|at, _| (at.query - at.key).abs().le(3));
        near(&attend(&window, &[]), &looped(x, |s, [.., i, j]| (i.abs_diff(j) <= 3).then_some(s)), 1e-13);
        let documents = plain.clone().mask(|at, _| (at.key / 64).eq(at.query / 64) & at.key.le(at.query));
        let want = looped(x, |s, [.., i, j]| (j / 64 == i / 64 && j <= i).then_some(s));
        near(&attend(&documents, &[]), &want, 1e-13);
        let capped = plain.clone().scale(2.0 / 3f64.sqrt()).score(|s, _, _| (s / 0.7).tanh() * 0.7);
        near(&attend(&capped, &[]), &looped(x, |s, _| Some((2.0 * s / 0.7).tanh() * 0.7)), 1e-13);
        let strided = plain.mask(|at, _| (at.key % 5).eq(at.query % 5) | (at.batch.eq(1) & at.head.ge(1)));
        let shown = |[b, h, i, j]: [usize; 4]| j % 5 == i % 5 || (b == 1 && h >= 1);
        near(&attend(&strided, &[]), &looped(x, |s, at| shown(at).then_some(s)), 1e-13);
    }
}

#[test]
fn steps_of_scores_are_no_added_values() {
    let x @ [q, k, v] = &operands(2, 1, 9, 70);
    let attend = |program: AttentionProgram| f64s(&program.attend(q, k, v, &[]).unwrap());
    let over = || AttentionProgram::over(0);
    // The derivatives of all of these by the score are 1 in almost every place.
    let floors = over().score(|s, _, _| s + (s * 4.0).floor());
    near(&attend(floors), &looped(x, |s, _| Some(s + (4.0 * s).floor())), 1e-13);
    let signs = over().score(|s, _, _| s - s.gt(0.1).cast_like(s));
    near(&attend(signs), &looped(x, |s, _| Some(s - f64::from(u8::from(s > 0.1)))), 1e-13);
    let wrapped = over().score(|s, _, _| s % 0.5);
    near(&attend(wrapped), &looped(x, |s, _| Some(s.rem_euclid(0.5))), 1e-13);
    // Sums of three values, a difference, and a value of heads beside a mask of positions.
    let sums = over().score(|s, at, _| 0.25 * at.head.cast_like(s) + (s - at.key.cast_like(s) * 0.125));
    let want = |s: f64, h: usize, j: usize| s - 0.125 * j as f64 + 0.25 * h as f64;
    near(&attend(sums.clone()), &looped(x, |s, [_, h, _, j]| Some(want(s, h, j))), 1e-13);
    let masked = sums.mask(|at, _| (at.key - at.query).ge(at.head * 2));
    near(&attend(masked), &looped(x, |s, [_, h, i, j]| (j >= i + 2 * h).then(|| want(s, h, j))), 1e-13);
    let of_heads = over().score(|s, at, _| s + at.key.cast_like(s)).mask(|at, _| at.head.eq(1));
    near(&attend(of_heads), &looped(x, |s, [_, h, _, j]| (h == 1).then_some(s + j as f64)), 1e-13);
}

#[test]
fn rows_that_data_hides_give_zeros_and_no_gradients() {
    let [q, k, v] = &operands(2, 1, 70, 90);
    let seen: Vec<bool> = (0..70).map(|i| i % 3 != 0).collect();
    let seen = Var::new(Tensor::from_slice(&cpu(), [70, 1], &seen).unwrap());
    for bent in [false, true] {
        let program = AttentionProgram::over(1)
            .score(move |s, at, _| if bent { s.tanh() } else { s + at.key.cast_like(s) * 0.01 })
            .mask(|at, args| args[0] & at.key.ge(at.query));
        let y = program.attend(q, k, v, &[&seen]).unwrap();
        let gradients = grad(&[&y.square().unwrap().sum_all().unwrap()], &[q, k, v]).unwrap();
        let of_queries = f64s(gradients[0].as_ref().unwrap());
        for (values, width) in [(f64s(&y), 4), (of_queries, 3)] {
            for (n, row) in values.chunks(width).enumerate() {
                assert_eq!(row.iter().all(|&x| x == 0.0), (n % 70) % 3 == 0, "row {n}: {row:?}");
            }
        }
        assert!(gradients.iter().all(|g| f64s(g.as_ref().unwrap()).iter().all(|x| x.is_finite())));
    }
}

#[test]
fn bounds_of_masks_hold_in_every_range() {
    type Mask = for<'b> fn(Expr<'b>, Expr<'b>) -> Expr<'b>;
    let masks: [Mask; 12] = [
        |i, j| j.le(i),
        |i, j| j.lt(i) | !(i - j).lt(3),
        |i, j| (i / 4).eq(j / 4),
        |i, j| (i / -3).ne(j),
        |i, j| (i % 5).ge(j % 3),
        |i, j| ((i - j) % 4).eq(1) & j.ge(2),
        |i, j| (i * j).gt(12),
        |i, j| (i - j).abs().le(2),
        |i, j| (-i).min(j).lt(-3),
        |i, j| i.max(j * -2).eq(i),
        |i, j| i.gt(3).select(i - 7, j * 2).le(1),
        |i, j| (i.lt(4).cast(DType::I64) + j).cast(DType::Bool),
    ];
    const FIRST: i64 = -6;
    const COUNT: usize = 20;
    let grid = Tensor::arange(&cpu(), FIRST, 1i64, COUNT, DType::I64).unwrap();
    let mut decided = 0;
    for (n, mask) in masks.iter().enumerate() {
        let program = Program::build("mask", 2, 0, |_, ins, _| vec![mask(ins[0], ins[1])]);
        let values = grid.reshape([COUNT, 1]).unwrap().apply_program(&program, &[&grid], &[]).unwrap();
        let values = values.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap();
        for (i, j, len) in (0..15).flat_map(|i| (0..15).flat_map(move |j| [1, 2, 5].map(|len| (i, j, len)))) {
            let range = |start: usize| Some((FIRST + start as i64, FIRST + (start + len) as i64 - 1));
            let bounds = program.bounds(&[range(i), range(j)])[0];
            assert!(len > 1 || n == 3 || bounds.is_some_and(|(low, high)| low == high), "mask {n} at {i}, {j}");
            let Some((low, high)) = bounds else { continue };
            decided += usize::from(low == high);
            let mut rows = values.chunks(COUNT).skip(i).take(len).map(|row| &row[j..j + len]);
            let holds = rows.all(|row| row.iter().all(|x| (low..=high).contains(x)));
            assert!(holds, "mask {n}: not {low} to {high} from {i}, {j} on, {len} each");
        }
    }
    assert!(decided > 4000, "{decided}");
}

/// A slope of each head, a bias of each key, and the documents of queries and keys.
fn arguments(heads: usize, queries: usize, keys: usize) -> [V; 4] {
    let documents = |count: usize, by: usize| {
        let all: Vec<i64> = (0..2 * count).map(|i| ((i % count) / by) as i64).collect();
        Tensor::from_slice(&cpu(), [2, count], &all).unwrap()
    };
    let (of_queries, of_keys) = (documents(queries, 30), documents(keys, 30));
    let shaped = |t: Tensor<Cpu>, shape: [usize; 4]| Var::new(t.reshape(shape).unwrap());
    [
        drawn(&[heads, 1, 1], 7),
        drawn(&[2, 1, 1, keys], 8),
        shaped(of_queries, [2, 1, queries, 1]),
        shaped(of_keys, [2, 1, 1, keys]),
    ]
}

/// ALiBi and a bias of each key, within documents; `bent` makes it no sum of the score and a value.
fn with_arguments(bent: bool) -> AttentionProgram {
    AttentionProgram::over(4)
        .score(move |s, at, args| {
            let sum = s + args[0] * (at.key - at.query).cast_like(s) * 0.01 + args[1];
            if bent { sum.tanh() * 2.0 } else { sum }
        })
        .mask(|at, args| args[2].eq(args[3]) & at.key.le(at.query))
}

#[test]
fn arguments_are_operands_of_loops() {
    let (heads, queries, keys) = (4, 70, 90);
    let x @ [q, k, v] = &operands(heads, 2, queries, keys);
    let args = arguments(heads, queries, keys);
    let refs: Vec<&V> = args.iter().collect();
    let [slopes, bias] = [0, 1].map(|i| f64s(&args[i]));
    for bent in [false, true] {
        let want = looped(x, |s, [b, h, i, j]| {
            let sum = s + slopes[h] * (j as f64 - i as f64) * 0.01 + bias[b * keys + j];
            (i / 30 == j / 30 && j <= i).then_some(if bent { sum.tanh() * 2.0 } else { sum })
        });
        near(&f64s(&with_arguments(bent).attend(q, k, v, &refs).unwrap()), &want, 1e-13);
        // The keys of each block of queries by a table, in place of all keys up to the diagonal.
        let blocks = vec![0..30, 0..60, 30..60, 30..70, 60..70];
        let by_table = with_arguments(bent).blocks(15, blocks).attend(q, k, v, &refs).unwrap();
        near(&f64s(&by_table), &want, 1e-13);
    }
}

/// The gradients of a weighted sum, and of the sum of their squares.
fn derivatives(y: &V, of: &[&V]) -> Vec<Vec<f64>> {
    let weights = drawn(&y.dims(), 20).detach();
    let first = differentiable_grad(&[&y.mul(&weights).unwrap().sum_all().unwrap()], of).unwrap();
    let first: Vec<V> = first.into_iter().map(|g| g.expect("a gradient")).collect();
    let squares = first.iter().map(|g| g.square().unwrap().sum_all().unwrap()).reduce(|a, b| a.add(&b).unwrap());
    let second = grad(&[&squares.unwrap()], of).unwrap();
    first.iter().map(f64s).chain(second.iter().map(|g| f64s(g.as_ref().unwrap()))).collect()
}

#[test]
fn derivatives_are_those_of_a_dense_mask() {
    let (heads, queries, keys) = (2, 70, 90);
    let [q, k, v] = &operands(heads, 1, queries, keys);
    let args = arguments(heads, queries, keys);
    let refs: Vec<&V> = args.iter().collect();
    let distance: Vec<f64> = (0..queries * keys).map(|n| (n % keys) as f64 - (n / keys) as f64).collect();
    let mut distance = distance.into_iter();
    let distance = Tensor::from_f64_fn(&cpu(), [queries, keys], DType::F64, || distance.next().unwrap()).unwrap();
    let hidden: Vec<bool> = (0..queries * keys)
        .map(|n| {
            let (i, j) = (n / keys, n % keys);
            i / 30 != j / 30 || j > i
        })
        .collect();
    let hidden = Var::new(Tensor::from_slice(&cpu(), [queries, keys], &hidden).unwrap());
    let dense = || -> Result<V> {
        let bias = args[0].mul(&Var::new(distance.clone()))?.mul(0.01)?.add(&args[1])?;
        let mask = bias.masked_fill(&hidden, f64::NEG_INFINITY)?;
        q.attention_with(k, v, SdpaOptions { mask: Some(&mask), ..Default::default() })
    };
    let of = [q, k, v, &args[0], &args[1]];
    let program = with_arguments(false);
    let want = derivatives(&dense().unwrap(), &of);
    let plain = program.attend(q, k, v, &refs).unwrap();
    let again = checkpoint(|| program.attend(q, k, v, &refs)).unwrap();
    for y in [plain, again] {
        derivatives(&y, &of).iter().zip(&want).for_each(|(got, want)| near(got, want, 1e-11));
    }
}

#[test]
fn weight_gradients_can_be_deferred() {
    let (x, w, cap) = (drawn(&[2, 6, 4], 1), drawn(&[4, 12], 2), drawn(&[2, 1, 1], 3));
    let loss = || -> Result<V> {
        let heads = |x: &V| x.reshape([2, 6, 2, 2])?.transpose(1, 2);
        let [q, k, v] = x.matmul(&w)?.chunk(-1, 3)?.try_into().unwrap();
        let program =
            AttentionProgram::over(1).score(|s, _, args| (s * args[0]).tanh()).mask(|at, _| at.key.le(at.query));
        program.attend(&heads(&q)?, &heads(&k)?, &heads(&v)?, &[&cap])?.square()?.sum_all()
    };
    let plain = loss().unwrap().backward().unwrap();
    let mut split = Gradients::new();
    let deferred = Backward::of(&loss().unwrap()).unwrap().inputs_only(&[&x], &mut split).unwrap();
    assert!(split.of(&x).is_some() && split.of(&w).is_none() && !deferred.is_empty());
    deferred.run(&mut split).unwrap();
    for leaf in [&x, &w, &cap] {
        assert_eq!(split.of(leaf).unwrap().to_f64s().unwrap(), plain.of(leaf).unwrap().to_f64s().unwrap());
    }
}

#[test]
fn bent_scores_have_the_slopes_of_differences() {
    let (heads, queries, keys) = (2, 66, 40);
    let operands = operands(heads, 2, queries, keys);
    let args = arguments(heads, queries, keys);
    let weights = drawn(&[2, heads, queries, 4], 20).detach();
    let loss = |[q, k, v]: &[V; 3], args: &[V]| {
        let refs: Vec<&V> = args.iter().collect();
        with_arguments(true).attend(q, k, v, &refs).unwrap().mul(&weights).unwrap().sum_all().unwrap()
    };
    let [q, k, v] = &operands;
    let gradients = grad(&[&loss(&operands, &args)], &[q, k, v, &args[0], &args[1]]).unwrap();
    for (n, gradient) in gradients.iter().enumerate() {
        let along = |x: &V| drawn(&x.dims(), 30 + n as u64).detach();
        let moved = |by: f64| {
            let (mut operands, mut args) = (operands.clone(), args.clone());
            let x = if n < 3 { &mut operands[n] } else { &mut args[n - 3] };
            *x = x.detach().add(&along(x).mul(by).unwrap()).unwrap();
            loss(&operands, &args).item().unwrap()
        };
        let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let gradient = gradient.as_ref().unwrap();
        let got = gradient.mul(&along(gradient)).unwrap().sum_all().unwrap().item().unwrap();
        assert!(
            (got - slope).abs() < 1e-7 * (1.0 + slope.abs()),
            "operand {n}: {got}, the difference quotient {slope}"
        );
    }
}

#[test]
fn parts_of_heads_queries_and_keys_have_global_positions() {
    let (heads, queries, keys) = (4, 48, 48);
    let [q, k, v] = &operands(heads, 4, queries, keys);
    let program = AttentionProgram::over(0)
        .score(|s, at, _| s + (at.key - at.query).cast_like(s) * 0.1 * (at.head + 1).cast_like(s))
        .mask(|at, _| at.key.le(at.query) & (at.query - at.key).lt(20));
    let whole = program.attend(q, k, v, &[]).unwrap();
    let part = |x: &V, axis: isize, start: usize, len: usize| x.narrow(axis, start, len).unwrap();
    for (from, count) in [(0, 2), (2, 2), (1, 3)] {
        let [q, k, v] = [q, k, v].map(|x| part(x, 1, from, count));
        let got = program.clone().shifted(0, from, 0, 0).attend(&q, &k, &v, &[]).unwrap();
        near(&f64s(&got), &f64s(&part(&whole, 1, from, count)), 1e-13);
    }
    // Queries one after another after a cache, and a rank's part of the queries with all keys before them.
    for (from, count) in [(0, 1), (17, 1), (47, 1), (16, 16), (32, 16)] {
        let (k, v) = (part(k, 2, 0, from + count), part(v, 2, 0, from + count));
        let got = program.clone().shifted(0, 0, from, 0).attend(&part(q, 2, from, count), &k, &v, &[]).unwrap();
        near(&f64s(&got), &f64s(&part(&whole, 2, from, count)), 1e-13);
    }
    // Keys from a position on, as a sliding cache holds them.
    let got =
        program.clone().shifted(0, 0, 40, 21).attend(&part(q, 2, 40, 8), &part(k, 2, 21, 27), &part(v, 2, 21, 27), &[]);
    near(&f64s(&got.unwrap()), &f64s(&part(&whole, 2, 40, 8)), 1e-13);
}

#[test]
fn a_causal_program_has_the_bits_of_the_causal_kernel() {
    let [q, k, v] = &operands(4, 2, 70, 70).map(|x| x.to_dtype(DType::F32).unwrap());
    let want = q.causal_attention(k, v).unwrap();
    let program = AttentionProgram::over(0).mask(|at, _| at.query.ge(at.key));
    assert_eq!(f64s(&program.attend(q, k, v, &[]).unwrap()), f64s(&want));
    let last = q.narrow(2, 60, 10).unwrap();
    let options = SdpaOptions { causal: true, lower_right: true, ..Default::default() };
    let cached = program.shifted(0, 0, 60, 0).attend(&last, k, v, &[]).unwrap();
    assert_eq!(f64s(&cached), f64s(&last.attention_with(k, v, options).unwrap()));
}

#[test]
fn half_precision_is_near_f32() {
    for dtype in [DType::F16, DType::BF16] {
        let x = operands(2, 1, 40, 40).map(|x| x.to_dtype(dtype).unwrap());
        let wide = x.clone().map(|x| x.to_dtype(DType::F32).unwrap());
        for bent in [false, true] {
            let args =
                arguments(2, 40, 40).map(|x| if x.dtype().is_float() { x.to_dtype(DType::F32).unwrap() } else { x });
            let refs: Vec<&V> = args.iter().collect();
            let [got, want] = [&x, &wide].map(|[q, k, v]| with_arguments(bent).attend(q, k, v, &refs).unwrap());
            assert_eq!(got.dtype(), dtype);
            near(&f64s(&got), &f64s(&want), 4.0 * dtype.epsilon());
        }
    }
}

/// A mask of one axis is computed once, apart from scores: its arguments meet as those of scores do.
#[test]
fn half_precision_arguments_of_a_mask_meet_wider_ones() {
    let [q, k, v] = &operands(2, 2, 5, 7);
    let seen = drawn(&[2, 1, 1, 7], 4);
    let [half, wide] = [DType::F16, DType::F32].map(|dtype| seen.to_dtype(dtype).unwrap());
    let zero = Var::new(Tensor::zeros(&cpu(), [1], DType::F32).unwrap());
    let program = AttentionProgram::over(2).mask(|_, args| args[0].gt(args[1]));
    let [got, want] = [&half, &wide].map(|seen| f64s(&program.attend(q, k, v, &[seen, &zero]).unwrap()));
    near(&got, &want, 0.0);
}

#[test]
fn nothing_is_computed_of_hidden_blocks() {
    let [q, k, v] = &operands(1, 1, 512, 512);
    let work = |program: AttentionProgram| {
        let (y, ops) = autograd::observe_ops(|| program.attend(q, k, v, &[]));
        y.unwrap();
        ops.iter().map(|op| op.flops()).sum::<u64>() as f64
    };
    let full = work(AttentionProgram::over(0));
    let documents = work(AttentionProgram::over(0).mask(|at, _| (at.key / 64).eq(at.query / 64)));
    assert!(documents / full < 0.13, "{}", documents / full);
    let window = work(AttentionProgram::over(0).mask(|at, _| at.key.le(at.query) & (at.query - at.key).lt(64)));
    assert!(window / full < 0.27, "{}", window / full);
}

#[test]
fn pieces_whose_keys_differ_little_are_one() {
    let [q, k, v] = &operands(1, 1, 2048, 2048);
    let calls = |program: AttentionProgram| {
        let (y, ops) = autograd::observe_ops(|| program.attend(q, k, v, &[]));
        y.unwrap();
        let flops: Vec<u64> = ops.iter().map(|op| op.flops()).filter(|&flops| flops > 0).collect();
        (flops.len(), flops.iter().sum::<u64>() as f64)
    };
    let triangle = AttentionProgram::causal().score(|s, at, _| s + at.key.cast_like(s));
    let window = AttentionProgram::over(0).mask(|at, _| at.key.le(at.query) & (at.query - at.key).lt(512));
    for (program, reach) in [(triangle, 2048), (window, 512)] {
        // A table of blocks is kept as it is.
        let seen = |i: usize| (i * 64).saturating_sub(reach - 1) / 64 * 64..(i + 1) * 64;
        let (blocks, least) = calls(program.clone().blocks(64, (0..32).map(seen).collect()));
        let (pieces, done) = calls(program);
        assert_eq!(blocks, 32);
        assert!(pieces <= 20 && done <= least * 1.125, "{pieces} pieces of {done}, {blocks} of {least}");
    }
    let documents = AttentionProgram::over(0).mask(|at, _| (at.key / 64).eq(at.query / 64) & at.key.le(at.query));
    assert_eq!(calls(documents).0, 32);
}

#[test]
fn unusual_operands() {
    let x @ [q, k, v] = &operands(2, 1, 5, 6);
    // Nothing is seen: zeros, whose gradients are zeros.
    let nothing = AttentionProgram::over(0).mask(|at, _| at.key.gt(100));
    let y = nothing.attend(q, k, v, &[]).unwrap();
    for g in grad(&[&y.sum_all().unwrap()], &[q, k, v]).unwrap() {
        assert!(f64s(g.as_ref().expect("a gradient")).iter().all(|g| *g == 0.0));
    }
    // Scores of an argument alone, and of nothing that is read.
    let given = AttentionProgram::over(1).score(|_, _, args| args[0]);
    let bias = drawn(&[2, 5, 6], 9);
    let values = f64s(&bias);
    near(
        &f64s(&given.attend(q, k, v, &[&bias]).unwrap()),
        &looped(x, |_, [_, h, i, j]| Some(values[(h * 5 + i) * 6 + j])),
        1e-13,
    );
    let heads = drawn(&[2, 1, 1], 9);
    near(&f64s(&given.attend(q, k, v, &[&heads]).unwrap()), &looped(x, |_, _| Some(0.0)), 1e-13);
    // No examples, and no queries.
    let window = AttentionProgram::over(0).mask(|at, _| (at.query - at.key).abs().le(1));
    let none = |shape: [usize; 4]| Var::new(Tensor::zeros(&cpu(), shape, DType::F64).unwrap());
    let empty = window.attend(&none([0, 2, 5, 3]), &none([0, 1, 6, 3]), &none([0, 1, 6, 4]), &[]).unwrap();
    assert_eq!(empty.dims(), [0, 2, 5, 4]);
    assert_eq!(window.attend(&none([2, 2, 0, 3]), k, v, &[]).unwrap().dims(), [2, 2, 0, 4]);
    let blind = window.attend(q, &none([2, 1, 0, 3]), &none([2, 1, 0, 4]), &[]).unwrap();
    assert_eq!(f64s(&blind), vec![0.0; 2 * 2 * 5 * 4]);
    // A mask of one head serves all of them.
    let (_, ops) = autograd::observe_ops(|| {
        AttentionProgram::over(1).mask(|_, args| args[0].gt(0.0)).attend(q, k, v, &[&drawn(&[1, 6], 3)])
    });
    let masks = ops.iter().flat_map(|op| &op.outputs).filter(|out| out.dtype == DType::Bool);
    assert!(masks.clone().count() > 0 && masks.into_iter().all(|mask| mask.shape.numel() <= 6));
    // Far keys of half-precision queries keep the digits of what is added.
    let far = |x: &V| x.to_dtype(DType::F16).unwrap();
    let added = AttentionProgram::over(0).score(|s, at, _| s + at.key.cast_like(s) * 0.001).shifted(0, 0, 0, 70_000);
    let got = added.attend(&far(q), &far(k), &far(v), &[]).unwrap();
    near(&f64s(&got), &looped(x, |s, [.., j]| Some(s + j as f64 * 0.001)), 5e-3);
}

#[test]
fn misuse_says_what_is_wrong() {
    let [q, k, v] = &operands(2, 1, 5, 6);
    let plain = || AttentionProgram::over(0);
    let says = |result: Result<V>, words: &[&str]| {
        let error = result.unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    says(AttentionProgram::over(1).attend(q, k, v, &[]), &["number of arguments", "0", "1"]);
    says(AttentionProgram::over(1).attend(q, k, v, &[&drawn(&[4], 1)]), &["[4]", "[2, 2, 5, 6]"]);
    says(plain().mask(|at, _| at.key - at.query).attend(q, k, v, &[]), &["gives truth values", "i64"]);
    says(plain().score(|_, at, _| at.key).attend(q, k, v, &[]), &["gives a floating value", "i64"]);
    says(plain().attend(q, &v.detach(), k, &[]), &["attention"]);
    says(plain().blocks(2, vec![0..6; 2]).attend(q, k, v, &[]), &["number of ranges", "blocks of 2 queries among 5"]);
    says(plain().blocks(5, vec![0..7; 1]).attend(q, k, v, &[]), &["0..7", "6 keys"]);
    let nothing = plain().mask(|at, _| at.key.gt(100)).attend(q, k, v, &[]).unwrap();
    assert_eq!(f64s(&nothing), vec![0.0; 2 * 2 * 5 * 4]);
    let rows = cat(&[&nothing, &nothing], 2).unwrap();
    assert_eq!(rows.dims(), [2, 2, 10, 4]);
}

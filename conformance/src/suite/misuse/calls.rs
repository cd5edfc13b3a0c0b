//! Op calls and programs: computed, accumulated, and computed into memory.

use numcore::{
    DType, ErrorKind, ReduceKind, Result, Runtime, Shape, Tensor,
    fused::{
        Attention, AttentionGrad, Conv, ConvKind, CrossEntropy, CrossEntropyGrad, Linear, MaxPool, MaxPoolGrad, Norm,
        NormGrad, NormKind, ScatterExtreme, Softmax, SoftmaxGrad,
    },
    ops::{self, Input, Matmul, Op, Pointwise, Reduce, Rule, Spec, ViewOp},
    pointwise::Program,
};

use super::draw::{Draw, Guarded};
use crate::suite::{close::near, report::Verdict};

/// Checks one op call, with operands that often do not fit, computed in three ways.
pub(super) fn op_call<R: Runtime>(rt: &R, draw: &mut Draw) -> Result<Verdict> {
    let dtype = draw.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]);
    let (op, mut specs) = call(draw, dtype);
    draw.misfit(&mut specs);
    let ins = specs.iter().map(|s| draw.tensor(rt, *s)).collect::<Result<Vec<_>>>()?;
    let refs: Vec<&Tensor<R>> = ins.iter().collect();
    let due = op.infer(&specs);
    let dense = ins.iter().map(Tensor::copy).collect::<Result<Vec<_>>>()?;
    let want = values(Tensor::compute(&op, &dense.iter().collect::<Vec<_>>()));
    let got = values(Tensor::compute(&op, &refs));
    let what = || format!("{op:?} of {specs:?}");
    let verdict = match (&got, &want) {
        (Ok(got), Ok(want)) => got.iter().zip(want).fold(Verdict::PASSED, |v, (g, w)| v.and(nearly(&what(), g, w))),
        (Err(_), Err(_)) => Verdict::PASSED,
        _ => Verdict::failed(format!("{}: {:?} and contiguous {:?}", what(), got.err(), want.as_ref().err())),
    };
    Ok(verdict.and(into_memory(rt, draw, &op, &refs, due.ok().as_deref(), want.ok().as_deref())?))
}

/// Runs the call into memory between guards, of the right spec or a changed one.
fn into_memory<R: Runtime>(
    rt: &R,
    draw: &mut Draw,
    op: &Op,
    ins: &[&Tensor<R>],
    due: Option<&[Spec]>,
    want: Option<&[Vec<f64>]>,
) -> Result<Verdict> {
    let first = due.and_then(|d| d.first().copied()).unwrap_or_else(|| draw.spec());
    let given = if draw.once_in(2) { draw.changed(first) } else { first };
    let last = given.shape.rank().saturating_sub(1);
    let way = draw.below(if given.shape.rank() > 0 { 3 } else { 2 });
    // Through a view of every second element of a row.
    let row = if way == 2 { given.shape[last] } else { 0 };
    let stored = if way == 2 { given.shape.with(last, 2 * row + 1) } else { given.shape };
    let mut guarded = Guarded::new(rt, Spec { shape: stored, ..given })?;
    let (outcome, memory) = match way {
        0 => {
            let mut memory = guarded.lend()?;
            (memory.accumulate(op, ins), Some(memory))
        }
        2 => {
            let mut memory = guarded.lend()?;
            let view = ViewOp::Slice { axis: last, start: 1, len: row, step: 2 };
            (memory.accumulate_view(&[view], op, ins), Some(memory))
        }
        _ => {
            let mut memory = Some(guarded.lend()?);
            match Tensor::compute_into(op, ins, |k| if k == 0 { memory.take() } else { None }) {
                Ok(outs) => (Ok(()), outs.into_iter().next()),
                Err(e) => (Err(e), memory),
            }
        }
    };
    let what = || format!("{op:?} into {given:?}");
    let fits = given == first && want.is_some();
    let seen = |all: Vec<f64>| match way {
        2 => all.chunks(2 * row + 1).flat_map(|r| r.iter().skip(1).step_by(2).copied()).collect(),
        _ => all,
    };
    // A runtime may find an index out of range only at the next wait.
    let outcome = outcome.and_then(|()| rt.synchronize());
    let written = guarded.value(memory)?.map(seen);
    Ok(match (outcome, written, want) {
        (Ok(()), Some(got), Some(want)) if fits => nearly(&what(), &got, &want[0]),
        (Ok(()), ..) => Verdict::failed(format!("{}: no error, where {first:?} is due", what())),
        (Err(e), ..) if matches!(e.kind(), ErrorKind::Unsupported { .. }) => Verdict::PASSED,
        (Err(_), ..) if !fits || due.is_some_and(|d| d.len() != 1) => Verdict::PASSED,
        (Err(e), ..) => Verdict::failed(format!("{}: {e}", what())),
    })
}

fn values<R: Runtime>(outs: Result<ops::Outs<Tensor<R>>>) -> Result<Vec<Vec<f64>>> {
    outs?.iter().map(Tensor::to_f64s).collect()
}

/// Compares like [`near`], where NaN and infinities are equal to themselves. Gradients of fused ops get statistics that
/// no forward pass computed, and a decomposition does not read those. For them the check only looks for NaN from
/// outside of the operands.
fn nearly(what: &str, got: &[f64], want: &[f64]) -> Verdict {
    if ["AttentionGrad", "CrossEntropyGrad", "NormGrad"].iter().any(|op| what.starts_with(&format!("Fused({op}"))) {
        let strays = got.iter().zip(want).filter(|(g, w)| g.is_nan() && !w.is_nan()).count();
        return Verdict::when(strays == 0 && got.len() == want.len(), || format!("{what}: {strays} strays"));
    }
    let plain = |values: &[f64], other: &[f64]| -> Vec<f64> {
        let same = |a: f64, b: f64| (a.is_nan() && b.is_nan()) || a == b;
        values.iter().zip(other).map(|(a, b)| if same(*a, *b) { 0.0 } else { *a }).collect()
    };
    if got.len() != want.len() {
        return Verdict::failed(format!("{what}: {} elements, expected {}", got.len(), want.len()));
    }
    near(what, &plain(got, want), &plain(want, got), 1e-2)
}

/// An op with operands that fit it, of any values.
fn call(draw: &mut Draw, dtype: DType) -> (Op, Vec<Spec>) {
    let [b, m, k, n] = [(); 4].map(|()| draw.size());
    let of = |dims: &[usize]| Spec::new(Shape::new(dims).unwrap_or(Shape::SCALAR), dtype);
    let [yes, also] = [(); 2].map(|()| draw.once_in(2));
    let optional = |yes: bool, spec: Spec| yes.then_some(spec);
    match draw.below(14) {
        0 => (Matmul.into(), vec![of(&[b, m, k]), if yes { of(&[k, n]) } else { of(&[1, k, n]) }]),
        1 => {
            let op = Linear { bias: yes, residual: also };
            let ins =
                [Some(of(&[b, m, k])), Some(of(&[k, n])), optional(yes, of(&[n])), optional(also, of(&[b, m, n]))];
            (op.into(), ins.into_iter().flatten().collect())
        }
        2 => (Softmax { log: yes }.into(), vec![of(&[m, n])]),
        3 => (SoftmaxGrad { log: yes }.into(), vec![of(&[m, n]); 2]),
        4 => cross_entropy(draw, dtype, [m, 2 + n]),
        5 => norm(draw, dtype, &[b, m, n]),
        6 => attention(draw, dtype),
        7 => conv(draw, dtype),
        8 => max_pool(draw, dtype),
        9 => (Pointwise::new(&add(), &[]).into(), vec![of(&[m, n]), if yes { of(&[n]) } else { of(&[m, 1]) }]),
        10 => {
            let to = if yes { Shape::from([1, n]) } else { Shape::from([n]) };
            let op = if also { Reduce::sum_to(to) } else { Reduce::new(ReduceKind::Max, to) };
            (op.into(), vec![of(&[m, n])])
        }
        12 => {
            let op = ScatterExtreme { axis: draw.below(3), largest: yes, include_self: also };
            (op.into(), vec![of(&[4, n]), Spec::new([m, n], DType::I64), of(&[m, n])])
        }
        11 => (ViewOp::Reshape(Shape::from([n, m])).into(), vec![of(&[m, n])]),
        _ => (Op::identity(), vec![draw.spec()]),
    }
}

/// A call of the forward op, or of its gradient with the forward op's operands and outputs.
fn cross_entropy(draw: &mut Draw, dtype: DType, dims: [usize; 2]) -> (Op, Vec<Spec>) {
    let weighted = draw.once_in(2);
    let op = CrossEntropy { ignore_index: -100, label_smoothing: 0.1, weighted };
    let [x, y, w] = [Spec::new(dims, dtype), Spec::new([dims[0]], DType::I64), Spec::new([dims[1]], dtype)];
    let mut ins = vec![x, y];
    ins.extend(weighted.then_some(w));
    if draw.once_in(2) {
        return (op.into(), ins);
    }
    let outs = Op::from(op.clone()).infer(&ins).unwrap_or_default();
    let mut given: Vec<Spec> = vec![x, y];
    given.extend(outs[1..].iter().chain(&outs[..1]));
    given.extend(weighted.then_some(w));
    (CrossEntropyGrad(op).into(), given)
}

fn norm(draw: &mut Draw, dtype: DType, dims: &[usize; 3]) -> (Op, Vec<Spec>) {
    let kind = draw.pick(&[NormKind::Layer, NormKind::Rms]);
    let weight = draw.once_in(2);
    let op = Norm { kind, eps: 1e-5, weight, bias: weight && kind == NormKind::Layer };
    let (x, w) = (Spec::new(*dims, dtype), Spec::new([dims[2]], dtype));
    let mut ins = vec![x];
    ins.extend(std::iter::repeat_n(w, usize::from(op.weight) + usize::from(op.bias)));
    if draw.once_in(2) {
        return (op.into(), ins);
    }
    let outs = Op::from(op.clone()).infer(&ins).unwrap_or_default();
    let mut given = vec![x, x];
    given.extend(&outs[1..]);
    given.extend(weight.then_some(w));
    (NormGrad(op).into(), given)
}

fn attention(draw: &mut Draw, dtype: DType) -> (Op, Vec<Spec>) {
    let [b, kv, t, s, d, e] = [(); 6].map(|()| draw.size());
    let masked = draw.once_in(2);
    let window = [(); 2].map(|()| draw.once_in(4).then(|| draw.number()));
    let softcap = draw.once_in(4).then_some(3.0);
    let [causal, lower_right] = [2, 4].map(|n| draw.once_in(n));
    let op = Attention { causal, window, lower_right, softcap, masked, ..Attention::new(0.5) };
    let mut ins: Vec<Spec> =
        [[b, 2 * kv, t, d], [b, kv, s, d], [b, kv, s, e]].map(|dims| Spec::new(dims, dtype)).into();
    ins.extend(masked.then(|| Spec::new([t, s], dtype)));
    if draw.once_in(2) {
        return (op.into(), ins);
    }
    let Ok(outs) = Op::from(op.clone()).infer(&ins) else { return (op.into(), ins) };
    let given = [outs[0], outs[0], outs[1]].into_iter().chain(ins).collect();
    (AttentionGrad(op).into(), given)
}

fn conv(draw: &mut Draw, dtype: DType) -> (Op, Vec<Spec>) {
    let any = draw.once_in(3);
    let mut number = |usual: usize| if any { draw.number() } else { usual };
    let (stride, padding) = ([number(1), number(2)], [number(1), number(0)]);
    let (dilation, groups) = ([number(1), number(1)], number(2));
    let kind = draw.pick(&[ConvKind::Forward, ConvKind::Input([5, 6]), ConvKind::Weight([3, 2])]);
    let bias = kind == ConvKind::Forward && draw.once_in(2);
    let op = Conv { kind, stride, padding, dilation, groups, bias };
    let (x, w, y) = ([2, 4, 5, 6], [6, 2, 3, 2], [2, 6, 5, 3]);
    let pair = match kind {
        ConvKind::Forward => [x, w],
        ConvKind::Input(_) => [y, w],
        ConvKind::Weight(_) => [x, y],
    };
    let mut ins: Vec<Spec> = pair.map(|dims| Spec::new(dims, dtype)).into();
    ins.extend(bias.then(|| Spec::new([6, 1, 1], dtype)));
    (op.into(), ins)
}

fn max_pool(draw: &mut Draw, dtype: DType) -> (Op, Vec<Spec>) {
    let any = draw.once_in(3);
    let mut number = |usual: usize| if any { draw.number() } else { usual };
    let op =
        MaxPool { kernel: [number(2), number(3)], stride: [number(2), number(1)], padding: [number(1), number(1)] };
    let x = Spec::new([2, 3, 5, 6], dtype);
    match Op::from(op.clone()).infer(&[x]) {
        Ok(outs) if draw.once_in(2) => (MaxPoolGrad(op).into(), vec![x, outs[0]]),
        _ => (op.into(), vec![x]),
    }
}

fn add() -> Program {
    Program::new("add", |[a, b], []| [a + b])
}

/// Checks a program that writes to memory, with operands of any number, shape and type. Among them are old values of
/// outputs that may not exist.
pub(super) fn program<R: Runtime>(rt: &R, draw: &mut Draw) -> Result<Verdict> {
    let fits = Spec::new([draw.size(), 3], DType::F32);
    let two = Program::new("sum and difference", |[a, b], [s]| [a + b * s, a - b]);
    let given = |draw: &mut Draw| if draw.once_in(4) { draw.changed(fits) } else { fits };
    let outs = [given(draw), given(draw)];
    let value = given(draw);
    let value = draw.tensor(rt, value)?;
    let mut guarded = [Guarded::new(rt, outs[0])?, Guarded::new(rt, outs[1])?];
    let mut memory = [guarded[0].lend()?, guarded[1].lend()?];
    let all = [Input::Own(draw.pick(&[0, 0, 1, 2, usize::MAX])), Input::Value(&value), Input::Own(1)];
    let ins = &all[..draw.pick(&[0, 1, 2, 2, 2, 2, 3])];
    let scalars = &[2.0.into(), 3i64.into()][..draw.pick(&[0, 1, 1, 1, 2])];
    let [first, second] = &mut memory;
    let outcome = match draw.once_in(5) {
        true => ops::compute(rt, &two, ins, scalars, &mut [first]),
        false => ops::compute(rt, &two, ins, scalars, &mut [first, second]),
    };
    for (guarded, memory) in guarded.iter_mut().zip(memory) {
        guarded.value(Some(memory))?;
    }
    let right = outs == [fits; 2] && ins.len() == 2 && scalars.len() == 1;
    Ok(Verdict::when(right || outcome.is_err(), || format!("no error: {outs:?}, {} inputs", ins.len())))
}

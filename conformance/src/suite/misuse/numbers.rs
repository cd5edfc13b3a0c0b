//! Sizes, axes, strides and paddings on which arithmetic overflows.

use numcore::{
    DType, Flat, FlatLayout, Result, Runtime, Shape, Tensor, TensorMut,
    fused::{ConvOptions, NnOps},
    ops::Windows,
    ops::{Apply, IndexOps, JoinOps, MatmulOps, Op, PointwiseOps, ReduceOps, SortOps, ViewOp, ViewOps},
};

use super::draw::Draw;
use crate::suite::report::Verdict;

/// Checks one method of a table with mostly invalid arguments; its result, if there is one, must be readable.
pub(super) fn numbers<R: Runtime>(rt: &R, draw: &mut Draw) -> Result<Verdict> {
    let x = draw.tensor(rt, numcore::ops::Spec::new([4, 6], DType::F32))?;
    let n = [(); 6].map(|()| draw.number());
    let axis = draw.pick(&[0, 1, -1, -2, 2, -3, isize::MAX, isize::MIN]);
    let call = draw.below(CREATIONS + MEMORY + VIEWS + WINDOWS);
    let outcome = match call {
        c if c < CREATIONS => created(rt, c, n),
        c if c < CREATIONS + MEMORY => memory(rt, &x, c - CREATIONS, n),
        c if c < CREATIONS + MEMORY + VIEWS => seen(&x, c - CREATIONS - MEMORY, axis, n),
        c => windows(rt, draw, c - CREATIONS - MEMORY - VIEWS, n),
    };
    // The last element of a result is read, which may be too large to be read whole.
    if let Ok(value) = outcome
        && value.shape().numel() > 0
    {
        let last =
            value.dims().iter().enumerate().try_fold(value.clone(), |v, (i, d)| v.narrow(i as isize, d - 1, 1))?;
        // Some runtimes find an index out of range only now.
        let _ = last.to_bytes();
    }
    Ok(Verdict::PASSED)
}

const CREATIONS: usize = 8;

fn created<R: Runtime>(rt: &R, call: usize, n: [usize; 6]) -> Result<Tensor<R>> {
    let shape = Shape::from([n[0], n[1]]);
    match call {
        0 => Tensor::zeros(rt, [n[0], n[1]], DType::U8),
        1 => Tensor::uniform(rt, [n[0], n[1], n[2]], DType::F32, 0.0, 1.0, 1),
        2 => TensorMut::alloc(rt, shape, DType::U8)?.freeze(),
        3 => TensorMut::zeros(rt, shape, DType::F64)?.freeze(),
        4 => Tensor::from_bytes(rt, shape, DType::F32, &[0; 24]),
        5 => Tensor::from_slice(rt, [n[0], n[1]], &[0i64; 6]),
        6 => Tensor::eye(rt, n[0], DType::F32),
        _ => Tensor::ones(rt, [1], DType::F32)?.broadcast_to([n[0], n[1], n[2]]),
    }
}

const MEMORY: usize = 4;

fn memory<R: Runtime>(rt: &R, x: &Tensor<R>, call: usize, n: [usize; 6]) -> Result<Tensor<R>> {
    let layout = || FlatLayout::new(DType::F32, [("a".into(), Shape::from([3, 5])), ("b".into(), Shape::from([2]))]);
    match call {
        0 => {
            let pieces = TensorMut::zeros(rt, Shape::from([12]), DType::F32)?.split(&n)?;
            TensorMut::join(pieces)?.freeze()
        }
        1 => Flat::zeros(rt, layout())?.tensor(n[0]),
        2 => {
            let mut flat = Flat::zeros(rt, layout())?;
            let part = if n[2].is_multiple_of(2) { flat.lend(n[0])? } else { flat.lend_span(n[0]..n[1])? };
            flat.restore(part)?;
            flat.whole()
        }
        _ => {
            let mut memory = TensorMut::zeros(rt, Shape::from([4, 6]), DType::F32)?;
            let view = ViewOp::Slice { axis: n[0], start: n[1], len: n[2], step: n[3] };
            memory.accumulate_view(&[view], &Op::identity(), &[x])?;
            memory.freeze()
        }
    }
}

const VIEWS: usize = 20;

fn seen<R: Runtime>(x: &Tensor<R>, call: usize, axis: isize, n: [usize; 6]) -> Result<Tensor<R>> {
    let view = |view: ViewOp| {
        let seen = Tensor::apply1(view.clone(), &[x])?;
        Tensor::apply1(view.adjoint(*x.shape())?, &[&seen])
    };
    match call {
        0 => x.slice(axis, n[0], n[1], n[2]),
        1 => x.unfold(axis, n[0], n[1], n[2]),
        2 => x.fold(axis, n[0], n[1], n[2]),
        3 => x.embed(axis, n[0], n[1], n[2]),
        4 => x.reshape([n[0], n[1]]),
        5 => x.broadcast_to([n[0], 4, 6]),
        6 => x.pad(&[(n[0], n[1]), (n[2], n[3])], 1.0),
        7 => Ok(x.split(axis, n[0])?.remove(0)),
        8 => Ok(x.chunk(axis, n[0])?.remove(0)),
        9 => x.roll(axis, n[0] as isize),
        10 => x.tril(n[0] as isize),
        11 => Ok(x.topk(n[0], axis)?.0),
        12 => x.argmax(axis)?.one_hot(n[0] % 1000),
        13 => x.unsqueeze(axis)?.squeeze(axis),
        14 => x.flatten(axis, n[0] as isize),
        15 => view(ViewOp::Permute(n[..2].into())),
        16 => view(ViewOp::Slice { axis: n[0], start: n[1], len: n[2], step: n[3] }),
        17 => view(ViewOp::Unfold(Windows { axis: n[0], size: n[1], step: n[2], dilation: n[3] })),
        18 => {
            // Sizes that are too large only together.
            let tall = x.narrow(1, 0, 1)?.narrow(0, 0, 1)?.broadcast_to([n[0], 1])?;
            let wide = x.narrow(1, 0, 1)?.narrow(0, 0, 1)?.broadcast_to([1, n[1]])?;
            if n[2].is_multiple_of(2) { tall.add(&wide) } else { tall.matmul(&wide) }
        }
        _ => x.narrow(0, 0, 1)?.broadcast_to([n[0], 6])?.narrow(0, n[1], n[2]),
    }
}

const WINDOWS: usize = 5;

fn windows<R: Runtime>(rt: &R, draw: &mut Draw, call: usize, n: [usize; 6]) -> Result<Tensor<R>> {
    let image = draw.tensor(rt, numcore::ops::Spec::new([1, 2, 5, 4], DType::F32))?;
    let weight = draw.tensor(rt, numcore::ops::Spec::new([2, 2, 2, 3], DType::F32))?;
    let options = ConvOptions { stride: [n[0], n[1]], padding: [n[2], n[3]], dilation: [n[4], 1], groups: 1 };
    match call {
        0 => image.conv2d(&weight, None, options),
        1 => image.conv_transpose2d(&weight, None, options, [n[5], 0]),
        2 => image.max_pool2d([n[0], n[1]], [n[2], n[3]], [n[4], n[5]]),
        3 => image.avg_pool2d([n[0], n[1]], [n[2], n[3]], [n[4], n[5]]),
        _ => image.adaptive_avg_pool2d([n[0] % 100, n[1] % 100]),
    }
}

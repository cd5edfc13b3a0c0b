//! Single kernels, into existing memory (`new`: into fresh memory).

use std::sync::LazyLock;

use weftgrad::{
    DType, Result, Runtime, Scalar, Shape, Tensor, TensorMut,
    ops::{Apply, IndexOps, Matmul, MatmulOps, Op, Pointwise, PointwiseOps, ReduceOps, Rule, ViewOps},
    pointwise::Program,
};

use super::{Case, data};

/// A case that runs `op` on `ins` into one block of memory.
pub(super) fn repeat<R: Runtime>(op: impl Into<Op>, ins: Vec<Tensor<R>>) -> Result<Case> {
    let op = op.into();
    let specs: Vec<_> = ins.iter().map(|t| t.spec()).collect();
    let spec = op.infer(&specs)?[0];
    let mut out = TensorMut::alloc(ins[0].runtime(), spec.shape, spec.dtype)?;
    Ok(Case::new(move || {
        out.reset();
        out.accumulate(&op, &ins.iter().collect::<Vec<_>>())
    }))
}

pub(super) fn gemm<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let dtype = data::dtype_of(name);
    let operand = |rows, columns, turned, seed| match turned {
        true => data::normal(rt, &[columns, rows], dtype, seed)?.t(),
        false => data::normal(rt, &[rows, columns], dtype, seed),
    };
    let (a, b) = (operand(n[0], n[1], name.ends_with("tn"), 1)?, operand(n[1], n[2], name.ends_with("nt"), 2)?);
    repeat(Matmul, vec![a, b])
}

pub(super) fn gemm_new<R: Runtime>(rt: &R, _: &str, n: &[usize]) -> Result<Case> {
    let a = data::normal(rt, &[n[0], n[1]], DType::F32, 1)?;
    let b = data::normal(rt, &[n[1], n[2]], DType::F32, 2)?;
    Ok(Case::new(move || a.matmul(&b).map(drop)))
}

pub(super) fn elementwise<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[a, b], []| [a + b]));
    let program = match name {
        "add" => ADD.clone(),
        "copy" => Program::new("copy", |[x], []| [x]),
        "exp" => Program::new("exp", |[x], []| [x.exp()]),
        "tanh" => Program::new("tanh", |[x], []| [x.tanh()]),
        "relu" => Program::new("relu", |[x], []| [x.relu()]),
        "gelu" => Program::new("gelu", |[x], []| [x.gelu()]),
        _ => Program::new("gelu_tanh", |[x], []| [x.gelu_tanh()]),
    };
    let ins = (0..program.inputs()).map(|i| data::normal(rt, n, DType::F32, i as u64)).collect::<Result<_>>()?;
    repeat(Pointwise::new(&program, &[] as &[Scalar]), ins)
}

pub(super) fn add_new<R: Runtime>(rt: &R, _: &str, n: &[usize]) -> Result<Case> {
    let (a, b) = (data::normal(rt, n, DType::F32, 1)?, data::normal(rt, n, DType::F32, 2)?);
    Ok(Case::new(move || a.add(&b).map(drop)))
}

pub(super) fn sum<R: Runtime>(rt: &R, _: &str, n: &[usize]) -> Result<Case> {
    let x = data::normal(rt, n, DType::F32, 1)?;
    Ok(Case::new(move || x.sum_all().map(drop)))
}

/// The sums of columns: the gradient of a bias.
pub(super) fn column_sums<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let x = data::normal(rt, n, data::dtype_of(name), 1)?;
    Ok(Case::new(move || x.sum(&[0]).map(drop)))
}

pub(super) fn embedding<R: Runtime>(rt: &R, _: &str, n: &[usize]) -> Result<Case> {
    let table = data::normal(rt, &Shape::new(&n[..2])?, DType::F32, 1)?;
    let ids = data::classes(rt, &[n[2]], n[0], 2)?;
    Ok(Case::new(move || table.embedding(&ids).map(drop)))
}

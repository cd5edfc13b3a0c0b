//! Programs of integers and `bool`, which must agree in every bit.

use numcore::{
    DType, Element, Result, Runtime, Tensor,
    ops::PointwiseOps,
    pointwise::{Expr, Number, Program, ProgramBuilder},
};
use proptest::prelude::*;

use super::random;
use crate::suite::{
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};

const ELEMENTS: usize = 41;
const CASES: u32 = 200;

/// An expression of integers of one type.
#[derive(Clone, Debug)]
enum Tree {
    Input(usize),
    Number(i64),
    Index,
    One(usize, Box<Tree>),
    Two(usize, Box<Tree>, Box<Tree>),
    Select(Box<[Tree; 4]>),
    /// A cast to another type and back.
    Through(DType, Box<Tree>),
}

const ONES: usize = 3;
const TWOS: usize = 11;

/// A strategy for expressions; with `wide`, values also pass through `f64`.
fn trees(wide: bool) -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        4 => (0..2usize).prop_map(Tree::Input),
        1 => prop::sample::select(vec![0, 1, 2, 3, 7, 31, 100]).prop_map(Tree::Number),
        1 => Just(Tree::Index),
    ];
    leaf.prop_recursive(4, 20, 4, move |inner| {
        let mut types = vec![DType::I32, DType::I64, DType::U32, DType::U8, DType::Bool];
        types.extend(wide.then_some(DType::F64));
        let through = prop::sample::select(types);
        prop_oneof![
            (0..ONES, inner.clone()).prop_map(|(op, x)| Tree::One(op, Box::new(x))),
            (0..TWOS, inner.clone(), inner.clone()).prop_map(|(op, a, b)| Tree::Two(op, Box::new(a), Box::new(b))),
            [inner.clone(), inner.clone(), inner.clone(), inner.clone()].prop_map(|four| Tree::Select(Box::new(four))),
            (through, inner).prop_map(|(d, x)| Tree::Through(d, Box::new(x))),
        ]
    })
}

impl Tree {
    fn write<'b>(&self, b: &'b ProgramBuilder, x: &[Expr<'b>]) -> Expr<'b> {
        match self {
            Tree::Input(i) => x[*i],
            Tree::Number(v) => b.int(*v).cast_like(x[0]),
            Tree::Index => b.index().cast_like(x[0]),
            Tree::One(op, a) => {
                let a = a.write(b, x);
                [-a, a.abs(), a.sign()][*op]
            }
            Tree::Two(op, l, r) => two(b, *op, l.write(b, x), r.write(b, x)),
            Tree::Select(four) => {
                let [l, r, then, or] = &**four;
                l.write(b, x).le(r.write(b, x)).select(then.write(b, x), or.write(b, x))
            }
            Tree::Through(d, a) => a.write(b, x).cast(*d).cast_like(x[0]),
        }
    }
}

fn two<'b>(b: &'b ProgramBuilder, op: usize, l: Expr<'b>, r: Expr<'b>) -> Expr<'b> {
    match op {
        0 => l + r,
        1 => l - r,
        2 => l * r,
        3 => l / r,
        4 => l % r,
        5 => l.max(r),
        6 => l.min(r),
        7 => l & r,
        8 => l | r,
        9 => l ^ r,
        _ => (l << (r & b.int(7))) >> b.int(2),
    }
}

pub(super) fn checks<R: Runtime>(rt: &R, section: &mut Section) {
    let wide = computes(rt, DType::F64);
    if !wide {
        section.skip(format!("integers through f64: {}", lacks(DType::F64)));
    }
    section.check("i32", || Ok(random(CASES, trees(wide), |t| check::<R, i32>(rt, t))));
    section.check("i64", || Ok(random(CASES, trees(wide), |t| check::<R, i64>(rt, t))));
    section.check("u32", || Ok(random(CASES, trees(wide), |t| check::<R, u32>(rt, t))));
    section.check("u8", || Ok(random(CASES, trees(wide), |t| check::<R, u8>(rt, t))));
}

/// Small integers, and the type's extremes.
fn data<E: Element>(k: usize) -> Vec<E> {
    let ends = [f64::MAX, f64::MIN, 0.0, 1.0, -1.0, 127.0, 255.0, 32_768.0];
    let value = |i: usize| if i % 4 == k { ends[i / 4 % ends.len()] } else { ((i * 13 + k * 5) % 23) as f64 - 9.0 };
    (0..ELEMENTS).map(|i| E::from_f64(value(i))).collect()
}

/// The exact value: an `i64` has more digits than an `f64` holds.
fn number<E: Element>(x: E) -> Number {
    let mut bytes = [0u8; 8];
    let raw = E::bytes(std::slice::from_ref(&x));
    bytes[..raw.len()].copy_from_slice(raw);
    let bits = i64::from_le_bytes(bytes);
    Number::Int(match E::DTYPE {
        DType::I32 => i64::from(bits as i32),
        _ => bits,
    })
}

fn check<R: Runtime, E: Element>(rt: &R, tree: &Tree) -> Result<Verdict> {
    let program = Program::build("random", 2, 0, |b, x, _| vec![tree.write(b, x)]);
    let typed = program.resolve(&[E::DTYPE; 2], &[Some(E::DTYPE)])?;
    let (a, b) = (data::<E>(0), data::<E>(1));
    let (x, y) = (Tensor::from_slice(rt, [ELEMENTS], &a)?, Tensor::from_slice(rt, [ELEMENTS], &b)?);
    let got = x.apply_program(&program, &[&y], &[])?.to_vec::<E>()?;
    for (i, &g) in got.iter().enumerate() {
        let want = program.eval(&typed, &[number(a[i]), number(b[i])], &[], i as u64)[0];
        if number(g) != want {
            return Ok(Verdict::failed(format!(
                "at ({:?}, {:?}), element {i}, it is {g:?}, expected {want:?}",
                a[i], b[i]
            )));
        }
    }
    Ok(Verdict::PASSED)
}

//! Random programs, run and compared exactly with their evaluation on the host, element by element.
//!
//! Values stay small integers, so that every type computes them exactly and an FMA gives no other result.

mod common;

use common::*;
use numcore::{
    DType, Scalar, TensorMut,
    ops::{Op, Pointwise, PointwiseOps, update},
    pointwise::{Expr, Number, Program},
    rng::Philox,
};
use runtime_cpu::Cpu;

const TYPES: [DType; 8] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U32, DType::U8];

/// A program over values of one type, with detours through others.
fn random_program(rng: &mut Philox, dtype: DType, inputs: usize, outputs: usize) -> Program {
    Program::build("random", inputs, 1, |b, x, s| {
        let mut values: Vec<Expr<'_>> = x.to_vec();
        for _ in 0..3 + rng.below(12) {
            let pick = |rng: &mut Philox| values[rng.below(values.len() as u64) as usize];
            let (p, q, r) = (pick(rng), pick(rng), pick(rng));
            let condition = match rng.below(4) {
                0 => p.lt(q),
                1 => p.eq(q) | q.le(r),
                2 => !p.le(q),
                _ => p.ne(q) & r.lt(q),
            };
            let new = match rng.below(12) {
                0 => p + q,
                1 => p - q,
                2 => p * q + r,
                3 => p - q * r,
                4 => q * r - p,
                5 => p.max(q),
                6 => p.min(q) + b.int(1),
                7 => condition.select(p, q),
                8 => condition.cast(dtype),
                9 => p.cast(TYPES[rng.below(8) as usize]).cast(dtype) * s[0],
                10 => p + (b.index() % b.int(5)).cast(dtype),
                _ => (p * p + s[0]).abs(),
            };
            values.push(new.min(b.int(7)).max(if dtype == DType::U8 || dtype == DType::U32 {
                b.int(0)
            } else {
                b.int(-7)
            }));
        }
        (0..outputs).map(|_| values[values.len() - 1 - rng.below(values.len() as u64 / 2) as usize]).collect()
    })
}

/// A tensor of small integers, in one of several layouts.
fn operand(cpu: &Cpu, rng: &mut Philox, dtype: DType, shape: &[usize], dense: bool) -> Known {
    let seed = rng.next_u64();
    let small = |n: usize| {
        let unsigned = matches!(dtype, DType::U8 | DType::U32);
        draw(DType::F64, n, seed).into_iter().map(|x| (if unsigned { x.abs() } else { x } % 5.0).trunc()).collect()
    };
    let mut all = views_of(cpu, dtype, shape, small);
    let at = if dense { 0 } else { rng.below(all.len() as u64) as usize };
    all.swap_remove(at)
}

/// The outputs of a program at every position, before they are stored.
fn evaluate(program: &Program, dtype: DType, inputs: &[&Known], scalar: Scalar) -> Vec<Vec<Number>> {
    let typed = program.resolve(&vec![dtype; inputs.len()], &[]).unwrap();
    let number = |x: f64| if dtype.is_float() { Number::Float(x) } else { Number::Int(x as i64) };
    let at = |i: usize| {
        let values: Vec<Number> = inputs.iter().map(|x| number(x.values[i])).collect();
        program.eval(&typed, &values, &[scalar], i as u64)
    };
    let all: Vec<Vec<Number>> = (0..inputs[0].values.len()).map(at).collect();
    (0..program.outputs().len()).map(|o| all.iter().map(|v| v[o]).collect()).collect()
}

fn numbers(values: &[Number]) -> Vec<f64> {
    values.iter().map(|v| v.to_f64()).collect()
}

fn each(mut check: impl FnMut(&Cpu, &mut Philox, DType, &[usize])) {
    let cpu = Cpu::with_threads(2);
    for dtype in TYPES {
        for seed in 0..40 {
            let rng = &mut Philox::new(seed, dtype as u32);
            let shape = [&[5][..], &[700], &[2, 600], &[100, 7], &[33, 35], &[2, 3, 4, 5]][rng.below(6) as usize];
            check(&cpu, rng, dtype, shape);
        }
    }
}

#[test]
fn any_layouts_and_outputs() {
    each(|cpu, rng, dtype, shape| {
        let (inputs, outputs) = (1 + rng.below(3) as usize, 1 + rng.below(3) as usize);
        let program = random_program(rng, dtype, inputs, outputs);
        let ins: Vec<Known> = (0..inputs).map(|_| operand(cpu, rng, dtype, shape, false)).collect();
        let others: Vec<&T> = ins[1..].iter().map(|k| &k.tensor).collect();
        let got = ins[0].tensor.apply_program_all(&program, &others, &[2i64.into()]).unwrap();
        let expected = evaluate(&program, dtype, &ins.iter().collect::<Vec<_>>(), 2i64.into());
        for (got, expected) in got.iter().zip(&expected) {
            close(got, &numbers(expected), 0.0, &format!("{dtype} {shape:?} {:?}", program.insts()));
        }
    });
}

#[test]
fn in_place() {
    each(|cpu, rng, dtype, shape| {
        let (own, others) = (1 + rng.below(3) as usize, rng.below(3) as usize);
        let program = random_program(rng, dtype, own + others, own);
        let ins: Vec<Known> = (0..own + others).map(|i| operand(cpu, rng, dtype, shape, i < own)).collect();
        let mut outs: Vec<TensorMut<Cpu>> =
            ins[..own].iter().map(|k| k.tensor.copy().unwrap().try_mut().ok().unwrap()).collect();
        let views: Vec<&T> = ins[own..].iter().map(|k| &k.tensor).collect();
        update(&program, &views, &[2i64.into()], &mut outs.iter_mut().collect::<Vec<_>>()).unwrap();
        let expected = evaluate(&program, dtype, &ins.iter().collect::<Vec<_>>(), 2i64.into());
        for (got, expected) in outs.into_iter().zip(&expected) {
            close(&got.freeze().unwrap(), &numbers(expected), 0.0, &format!("{dtype} {shape:?} {:?}", program.insts()));
        }
    });
}

#[test]
fn added_to_outputs() {
    each(|cpu, rng, dtype, shape| {
        let program = random_program(rng, dtype, 2, 1);
        let ins: Vec<Known> = (0..2).map(|_| operand(cpu, rng, dtype, shape, false)).collect();
        let old = operand(cpu, rng, dtype, shape, false);
        let mut out = TensorMut::alloc(cpu, *old.tensor.shape(), dtype).unwrap();
        out.accumulate(&Op::identity(), &[&old.tensor]).unwrap();
        let op = Op::from(Pointwise::new(&program, &[2i64.into()]));
        out.accumulate(&op, &[&ins[0].tensor, &ins[1].tensor]).unwrap();
        let new = evaluate(&program, dtype, &ins.iter().collect::<Vec<_>>(), 2i64.into()).remove(0);
        let sum = |(old, new): (&f64, &Number)| match *new {
            Number::Float(x) => Number::Float(old + x).cast(dtype).to_f64(),
            x => Number::Int(*old as i64 + x.to_i64()).cast(dtype).to_f64(),
        };
        let expected: Vec<f64> = old.values.iter().zip(&new).map(sum).collect();
        close(&out.freeze().unwrap(), &expected, 0.0, &format!("{dtype} {shape:?} {:?}", program.insts()));
    });
}

//! Simplified programs give the same bits as the program as written, also for NaN, ±0 and ±∞.

use proptest::prelude::*;

use super::*;
use crate::pointwise::{Const, OpClass};

const FLOATS: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    -4.0,
    3.7,
    -1e-300,
    1e300,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    0.1,
    -2.5,
    1e-310,
];
const WHOLES: [i64; 10] = [0, 1, -1, 2, 3, 7, -128, 255, i64::MAX, i64::MIN];

/// A random step of a program: the kind of op, and the indices of three operands.
type Step = (u8, u8, u8, u8);

/// The arithmetic of a program.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Whole,
    /// Arithmetic in `f64`, as constants are folded and scalar-dependent values are computed.
    Wide,
    /// Narrower floats: a constant is only ever the right operand of a value typed by an input, since it would
    /// otherwise be rounded later.
    Narrow,
}

/// The values written so far: numeric ones, each with a flag if an input decides its dtype, and `bool` ones.
struct Pool {
    numbers: Vec<(u32, bool)>,
    truths: Vec<u32>,
}

impl Pool {
    fn number(&self, k: u8) -> (u32, bool) {
        self.numbers[k as usize % self.numbers.len()]
    }

    /// A value of an input's dtype. A value without inputs has a dtype that folding need not respect.
    fn typed(&self, k: u8) -> u32 {
        let typed: Vec<u32> = self.numbers.iter().filter(|(_, typed)| *typed).map(|(id, _)| *id).collect();
        typed[k as usize % typed.len()]
    }

    fn truth(&self, k: u8) -> u32 {
        self.truths[k as usize % self.truths.len()]
    }

    /// Writes one step by `push`; every step is well typed.
    fn write(&mut self, (kind, i, j, k): Step, mode: Mode, push: impl Fn(Inst) -> u32) {
        let ((a, x), (b, y)) = match mode {
            Mode::Narrow => ((self.typed(j), true), self.number(k)),
            _ => (self.number(j), self.number(k)),
        };
        let whole = mode == Mode::Whole;
        match kind % 8 {
            0 => self.numbers.push((push(Inst::Const(constant(i, whole))), false)),
            1 => self.numbers.push((push(Inst::Unary(unary(i, whole), a)), x)),
            2 | 3 => self.numbers.push((push(Inst::Binary(arithmetic(i, whole), a, b)), x || y)),
            4 => self.truths.push(push(Inst::Binary(COMPARISONS[i as usize % 4], self.typed(j), b))),
            5 => self.numbers.push((
                push(Inst::Select(self.truth(i), a, if mode == Mode::Narrow { self.typed(k) } else { b })),
                x || y,
            )),
            6 => self.truths.push(push(Inst::Binary(LOGIC[i as usize % 4], self.truth(j), self.truth(k)))),
            _ if i % 2 == 0 => self.truths.push(push(Inst::Unary(Unary::Not, self.truth(j)))),
            _ => self.numbers.push((push(Inst::CastLike(a, self.typed(k))), true)),
        }
    }
}

const LOGIC: [Binary; 4] = [Binary::And, Binary::Or, Binary::Xor, Binary::Eq];
const COMPARISONS: [Binary; 4] = [Binary::Eq, Binary::Ne, Binary::Lt, Binary::Le];

fn constant(i: u8, whole: bool) -> Const {
    if whole {
        Const::Int(WHOLES[i as usize % WHOLES.len()])
    } else {
        Const::Float(FLOATS[i as usize % FLOATS.len()].to_bits())
    }
}

fn unary(i: u8, whole: bool) -> Unary {
    let fits = |op: &&Unary| if whole { op.class() == OpClass::Number } else { **op != Unary::Not };
    let ops: Vec<&Unary> = Unary::ALL.iter().filter(fits).collect();
    *ops[i as usize % ops.len()]
}

fn arithmetic(i: u8, whole: bool) -> Binary {
    let dtype = if whole { DType::I64 } else { DType::F64 };
    let ops: Vec<&Binary> = Binary::ALL.iter().filter(|op| !op.is_comparison() && op.class().takes(dtype)).collect();
    *ops[i as usize % ops.len()]
}

/// Every value is an output, so that dead code cannot hide a difference.
fn program(steps: &[Step], mode: Mode, plain: bool) -> Program {
    let b = ProgramBuilder::default();
    let push = |inst| if plain { b.push_plain(inst) } else { b.push(inst) };
    let numbers = (0..2).map(|i| (push(Inst::Input(i)), true)).collect();
    let mut pool = Pool { numbers, truths: vec![push(Inst::Const(Const::Bool(true)))] };
    steps.iter().for_each(|&step| pool.write(step, mode, push));
    let typed = pool.numbers.iter().filter(|(_, typed)| *typed).map(|(id, _)| *id);
    let outputs: Vec<Expr<'_>> = typed.chain(pool.truths.iter().copied()).map(|id| b.expr(id)).collect();
    b.finish("random", 2, 0, &outputs)
}

fn same(a: Number, b: Number) -> bool {
    match (a, b) {
        (Number::Float(a), Number::Float(b)) => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
        (a, b) => a == b,
    }
}

fn check(steps: &[Step], dtype: DType, inputs: [Number; 2]) -> Result<(), TestCaseError> {
    let run = |p: &Program| p.eval(&p.resolve(&[dtype; 2], &[]).unwrap(), &inputs.map(|x| x.cast(dtype)), &[], 0);
    let mode = match dtype {
        DType::F64 => Mode::Wide,
        d if d.is_float() => Mode::Narrow,
        _ => Mode::Whole,
    };
    let (plain, simple) = (program(steps, mode, true), program(steps, mode, false));
    for (k, (a, b)) in run(&plain).into_iter().zip(run(&simple)).enumerate() {
        prop_assert!(same(a, b), "value {k}: {a:?} became {b:?}\n{plain}\n{simple}");
    }
    Ok(())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn floats_keep_their_bits(
        steps in steps(),
        dtype in prop::sample::select(&[DType::F64, DType::F32, DType::BF16][..]),
        x in prop::sample::select(&FLOATS[..]),
        y in prop::sample::select(&FLOATS[..]),
    ) {
        check(&steps, dtype, [Number::Float(x), Number::Float(y)])?;
    }

    #[test]
    fn integers_keep_their_bits(
        steps in steps(),
        dtype in prop::sample::select(&[DType::I64, DType::I32, DType::U32, DType::U8][..]),
        x in prop::sample::select(&WHOLES[..]),
        y in prop::sample::select(&WHOLES[..]),
    ) {
        check(&steps, dtype, [Number::Int(x), Number::Int(y)])?;
    }
}

fn shape_of(f: impl for<'b> FnOnce(Expr<'b>) -> Expr<'b>) -> String {
    let text = Program::new("p", |[x], []| [f(x)]).to_string();
    text.lines().filter(|l| l.contains('=') || l.contains("return")).map(str::trim).collect::<Vec<_>>().join("; ")
}

#[test]
fn exact_identities_are_used() {
    let nothing: [Write; 10] = [
        |x| x * 1.0,
        |x| 1.0 * x,
        |x| x / 1.0,
        |x| x - 0.0,
        |x| x + -0.0,
        |x| -(-x),
        |x| x.pow(1.0),
        |x| x * 1,
        |x| x.gt(1.0).select(x, x),
        |x| x.cast_like(x),
    ];
    for f in nothing {
        assert_eq!(shape_of(f), "return in0");
    }
    assert_eq!(shape_of(|x| x * -1.0), "v1 = neg(in0); return v1");
    assert_eq!(shape_of(|x| x / 8.0), "v2 = mul(in0, 0.125); return v2");
    assert_eq!(shape_of(|x| x * (3.0 * x.sqrt().recip() * 0.0 + 1.0).cast_like(x)).matches("mul").count(), 3);
    assert_eq!(shape_of(|x| 1.0 - (-x)), "v2 = add(in0, 1.0); return v2");
    assert_eq!(shape_of(|x| (!x.lt(0.0)).select(1.0, x)), "v2 = lt(in0, 0.0); v4 = select(v2, in0, 1.0); return v4");
}

#[test]
fn inexact_ones_are_not() {
    assert!(shape_of(|x| x + 0.0).contains("add"));
    assert!(shape_of(|x| x * 0.0).contains("mul"));
    assert!(shape_of(|x| x - x).contains("sub"));
    assert!(shape_of(|x| x / 3.0).contains("div"));
    assert!(shape_of(|x| x.recip().recip()).matches("recip").count() == 2);
    assert!(shape_of(|x| x / 2f64.powi(200)).contains("div"));
    // For integers, a quotient is not a product with the reciprocal.
    assert!(shape_of(|x| x / 2).contains("div"));
}

#[test]
fn equal_values_are_shared_and_dead_ones_dropped() {
    let p = Program::new("shared", |[x, y], []| {
        let _dead = x.exp();
        [(x + y) * (y + x)]
    });
    assert_eq!(
        p.to_string(),
        "shared(2 inputs, 0 scalars) {\n  v2 = add(in0, in1)\n  v3 = mul(v2, v2)\n  return v3\n}"
    );
}

#[test]
fn constants_fold() {
    let p = Program::new("folded", |[x], []| [x * (2.0 * x.cast_like(x).exp().pow(1.0)).pow(1.0)]);
    assert_eq!(p.to_string().matches("mul").count(), 2);
    let b = ProgramBuilder::default();
    let folded = (b.c(2.0) * 3.0 + 0.5).sqrt().id();
    assert_eq!(b.inst(folded), Inst::Const(Const::Float(6.5f64.sqrt().to_bits())));
    assert_eq!(b.inst((b.int(7) * b.int(6)).id()), Inst::Const(Const::Int(42)));
    // The quotient 7/2 is 3 or 3.5 by dtype, so it is not folded; nor is a sum of an integer and a real.
    assert!(matches!(b.inst((b.int(7) / b.int(2)).id()), Inst::Binary(..)));
    assert!(matches!(b.inst((b.int(7) + b.c(2.0)).id()), Inst::Binary(..)));
}

#[test]
fn content_decides_equality_and_hash() {
    let a = Program::new("a", |[x, y], [s]| [x * s + y]);
    let b = Program::new("b", |[p, q], [t]| [q + t * p]);
    assert!(a == b && a.hash() == b.hash() && a.ptr_id() != b.ptr_id());
    let c = Program::new("a", |[x, y], [s]| [x * s - y]);
    assert!(a != c && a.hash() != c.hash());
    // The hash is the same on every machine, since AOT-compiled kernels are found by it.
    assert_eq!(Program::new("copy", |[x], []| [x]).hash(), Program::build("id", 1, 0, |_, x, _| vec![x[0]]).hash());
    assert_eq!(format!("{:016x}", a.hash()), "31512bd5e5fb252d");
}

#[test]
fn bodies_can_be_written_into_others() {
    let noise = Program::build("noise", 1, 1, |b, x, _| vec![x[0] + b.random(0, 3).cast(DType::F32)]);
    let outer = Program::build("outer", 1, 2, |b, x, s| noise.inline(b, &[x[0] * 2.0], &s[1..]).unwrap());
    assert!(outer.insts().contains(&Inst::Random { seed: 1, stream: 3 }));
    Program::build("errors", 1, 1, |b, x, s| {
        assert!(noise.inline(b, &[], s).is_err());
        assert!(noise.inline(b, x, &[s[0] + 1.0]).is_err());
        vec![x[0]]
    });
}

#[test]
fn reads_say_which_inputs_are_live() {
    let p = Program::new("third", |[a, _, c], []| [a + c]);
    assert_eq!(p.reads(), 0b101);
    assert!(Program::new("copy", |[x], []| [x * 1.0]).is_identity());
    assert!(!Program::new("second", |[_, y], []| [y]).is_identity());
}

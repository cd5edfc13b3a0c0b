//! Random expressions of floats, as trees: evaluated on the host in the written order, and written as a program.

use std::fmt;

use numcore::pointwise::{Expr, Program, ProgramBuilder};
use proptest::prelude::*;

/// An expression tree.
#[derive(Clone)]
pub(super) enum Tree {
    Input(usize),
    Number(f64),
    One(One, Box<Tree>),
    Two(Two, Box<Tree>, Box<Tree>),
    /// `if a < b { c } else { d }`.
    Select(Box<[Tree; 4]>),
}

/// An op of one operand: its name, its value, its form in a program, and whether it jumps.
#[derive(Clone, Copy)]
pub(super) struct One {
    pub(super) name: &'static str,
    pub(super) value: fn(f64) -> f64,
    pub(super) write: for<'b> fn(Expr<'b>) -> Expr<'b>,
    pub(super) jumps: bool,
}

/// An op of two operands.
#[derive(Clone, Copy)]
pub(super) struct Two {
    pub(super) name: &'static str,
    pub(super) value: fn(f64, f64) -> f64,
    pub(super) write: for<'b> fn(Expr<'b>, Expr<'b>) -> Expr<'b>,
    pub(super) jumps: bool,
}

macro_rules! ones {
    ($($name:ident($value:expr, $jumps:literal),)*) => {
        &[$(One { name: stringify!($name), value: $value, write: |x| x.$name(), jumps: $jumps },)*]
    };
}

/// Functions that are smooth where they are defined.
const SMOOTH: &[One] = ones![
    exp(f64::exp, false),
    expm1(f64::exp_m1, false),
    log(f64::ln, false),
    log1p(f64::ln_1p, false),
    sqrt(f64::sqrt, false),
    rsqrt(|x| 1.0 / x.sqrt(), false),
    recip(|x| 1.0 / x, false),
    sin(f64::sin, false),
    cos(f64::cos, false),
    tanh(f64::tanh, false),
    atan(f64::atan, false),
    sigmoid(|x| (x * 0.5).tanh() * 0.5 + 0.5, false),
];

/// Functions with kinks or steps.
const OTHERS: &[One] = ones![
    abs(f64::abs, false),
    sign(|x| if x == 0.0 || x.is_nan() { x.abs() } else { 1f64.copysign(x) }, true),
    floor(f64::floor, true),
    ceil(f64::ceil, true),
    round(f64::round_ties_even, true),
    trunc(f64::trunc, true),
    relu(|x| if x <= 0.0 { 0.0 } else { x }, false),
];

fn max(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

fn min(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}

const ARITHMETIC: &[Two] = &[
    Two { name: "+", value: |a, b| a + b, write: |a, b| a + b, jumps: false },
    Two { name: "-", value: |a, b| a - b, write: |a, b| a - b, jumps: false },
    Two { name: "*", value: |a, b| a * b, write: |a, b| a * b, jumps: false },
    Two { name: "/", value: |a, b| a / b, write: |a, b| a / b, jumps: false },
];

fn rem(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

const EXTREMES: &[Two] = &[
    Two { name: "%", value: rem, write: |a, b| a % b, jumps: true },
    Two { name: "max", value: max, write: |a, b| a.max(b), jumps: false },
    Two { name: "min", value: min, write: |a, b| a.min(b), jumps: false },
    Two { name: "atan2", value: f64::atan2, write: |a, b| a.atan2(b), jumps: true },
];

const NUMBERS: [f64; 9] = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1e-3, 100.0];

/// A strategy for expressions of `inputs` inputs; only of smooth ops if `smooth`.
pub(super) fn trees(inputs: usize, smooth: bool) -> impl Strategy<Value = Tree> {
    let ones: Vec<One> = if smooth { SMOOTH.to_vec() } else { [SMOOTH, OTHERS].concat() };
    let twos: Vec<Two> = if smooth { ARITHMETIC.to_vec() } else { [ARITHMETIC, EXTREMES].concat() };
    let leaf = prop_oneof![
        3 => (0..inputs).prop_map(Tree::Input),
        1 => prop::sample::select(NUMBERS.to_vec()).prop_map(Tree::Number),
    ];
    leaf.prop_recursive(5, 24, 4, move |inner| {
        let one = (prop::sample::select(ones.clone()), inner.clone()).prop_map(|(op, x)| Tree::One(op, Box::new(x)));
        let two = (prop::sample::select(twos.clone()), inner.clone(), inner.clone())
            .prop_map(|(op, a, b)| Tree::Two(op, Box::new(a), Box::new(b)));
        let select = [inner.clone(), inner.clone(), inner.clone(), inner].prop_map(|four| Tree::Select(Box::new(four)));
        if smooth {
            prop_oneof![2 => one, 3 => two].boxed()
        } else {
            prop_oneof![3 => one, 4 => two, 1 => select].boxed()
        }
    })
}

impl Tree {
    /// The program of this expression.
    pub(super) fn program(&self, inputs: usize) -> Program {
        // A constant takes the dtype of the operands with which it is combined: that of the inputs, if there is no
        // other.
        Program::build("random", inputs, 0, |b, x, _| vec![self.write(b, x).cast_like(x[0])])
    }

    /// Tells whether the expression depends on an input.
    pub(super) fn reads(&self) -> bool {
        match self {
            Tree::Input(_) => true,
            Tree::Number(_) => false,
            Tree::One(_, a) => a.reads(),
            Tree::Two(_, l, r) => l.reads() || r.reads(),
            Tree::Select(four) => four.iter().any(Tree::reads),
        }
    }

    fn write<'b>(&self, b: &'b ProgramBuilder, x: &[Expr<'b>]) -> Expr<'b> {
        match self {
            Tree::Input(i) => x[*i],
            Tree::Number(v) => b.c(*v),
            Tree::One(op, a) => (op.write)(a.write(b, x)),
            Tree::Two(op, l, r) => (op.write)(l.write(b, x), r.write(b, x)),
            Tree::Select(four) => {
                let [l, r, then, or] = &**four;
                l.write(b, x).lt(r.write(b, x)).select(then.write(b, x), or.write(b, x))
            }
        }
    }

    /// Tells whether every intermediate has ordinary magnitude: only there do the chain rule and differences agree.
    pub(super) fn is_tame(&self, x: &[f64]) -> bool {
        let parts = match self {
            Tree::Input(_) | Tree::Number(_) => true,
            Tree::One(_, a) => a.is_tame(x),
            Tree::Two(_, l, r) => l.is_tame(x) && r.is_tame(x),
            Tree::Select(four) => four.iter().all(|t| t.is_tame(x)),
        };
        parts && self.value(x).abs() < 1e6
    }

    /// The value of the expression, with every operation in `f64`.
    pub(super) fn value(&self, x: &[f64]) -> f64 {
        match self {
            Tree::Input(i) => x[*i],
            Tree::Number(v) => *v,
            Tree::One(op, a) => (op.value)(a.value(x)),
            Tree::Two(op, l, r) => (op.value)(l.value(x), r.value(x)),
            Tree::Select(four) => {
                let [l, r, then, or] = &**four;
                if l.value(x) < r.value(x) { then.value(x) } else { or.value(x) }
            }
        }
    }
}

impl fmt::Debug for One {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for Two {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tree::Input(i) => write!(f, "x{i}"),
            Tree::Number(v) => write!(f, "{v:?}"),
            Tree::One(op, a) => write!(f, "{}({a:?})", op.name),
            Tree::Two(op, l, r) => write!(f, "({l:?} {} {r:?})", op.name),
            Tree::Select(four) => {
                let [l, r, then, or] = &**four;
                write!(f, "({l:?} < {r:?} ? {then:?} : {or:?})")
            }
        }
    }
}

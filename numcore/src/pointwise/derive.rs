//! Symbolic differentiation: one row per op. No row makes a zero term, and values of the forward are shared.

use super::{Binary, Builder, Const, Derivative, Expr, Id, Inst, Program, Unary};

/// The gradient of input `wrt`, with only the inputs it reads; `None` where it is zero by structure.
pub(super) fn derivative(program: &Program, wrt: usize) -> Option<Derivative> {
    let builder = Builder::default();
    let id = gradient(program, &builder, wrt)?;
    let outs = program.outputs().len();
    let whole = builder.finish(program.name(), program.inputs() + outs, program.scalars(), &[builder.expr(id)]);
    let inputs: Box<[u16]> = (0..whole.inputs() as u16).filter(|i| whole.insts().contains(&Inst::Input(*i))).collect();
    Some(Derivative { program: renumbered(&whole, &inputs), inputs })
}

/// The same program with inputs `kept[i]` as its input `i`.
fn renumbered(program: &Program, kept: &[u16]) -> Program {
    let position = |k: u16| kept.iter().position(|&i| i == k).unwrap_or(0) as u16;
    let number = |inst: &Inst| if let Inst::Input(k) = inst { Inst::Input(position(*k)) } else { *inst };
    let insts = program.insts().iter().map(number).collect();
    Program::from_parts(program.name(), insts, program.outputs().to_vec(), kept.len(), program.scalars())
}

fn gradient(program: &Program, b: &Builder, wrt: usize) -> Option<Id> {
    let insts = program.insts();
    let mut forward: Vec<Id> = Vec::with_capacity(insts.len());
    for inst in insts {
        forward.push(b.push(inst.map(|a| forward[a as usize])));
    }
    let reaches = reaching(insts, wrt);
    let mut grads: Vec<Option<Id>> = vec![None; insts.len()];
    for (k, &o) in program.outputs().iter().enumerate() {
        let upstream = b.input((program.inputs() + k) as u16).id();
        accumulate(b, &mut grads[o as usize], upstream);
    }
    let mut result = None;
    for i in (0..insts.len()).rev().filter(|&i| reaches[i]) {
        let Some(u) = grads[i] else { continue };
        if insts[i] == Inst::Input(wrt as u16) {
            accumulate(b, &mut result, u);
            continue;
        }
        let row = Row { b, forward: &forward, y: b.expr(forward[i]), u: b.expr(u) };
        for (operand, grad) in row.operands(insts[i]).into_iter().flatten() {
            if reaches[operand as usize] {
                accumulate(b, &mut grads[operand as usize], grad(&row).id());
            }
        }
    }
    result
}

/// Which values depend on input `wrt`.
fn reaching(insts: &[Inst], wrt: usize) -> Vec<bool> {
    let mut reaches: Vec<bool> = Vec::with_capacity(insts.len());
    for inst in insts {
        let through = inst.operands().any(|a| reaches[a as usize]);
        reaches.push(through || *inst == Inst::Input(wrt as u16));
    }
    reaches
}

fn accumulate(b: &Builder, sum: &mut Option<Id>, term: Id) {
    *sum = Some(match *sum {
        Some(s) => b.bin(Binary::Add, s, term),
        None => term,
    });
}

/// One value's place in the chain rule: its own forward value `y` and the gradient `u` of it.
struct Row<'a, 'b> {
    b: &'b Builder,
    forward: &'a [Id],
    y: Expr<'b>,
    u: Expr<'b>,
}

type Rule<'a, 'b> = Box<dyn Fn(&Row<'a, 'b>) -> Expr<'b> + 'a>;
type Rules<'a, 'b> = [Option<(Id, Rule<'a, 'b>)>; 2];

impl<'a, 'b: 'a> Row<'a, 'b> {
    fn at(&self, a: Id) -> Expr<'b> {
        self.b.expr(self.forward[a as usize])
    }

    /// Each operand a gradient flows to, with how.
    fn operands(&self, inst: Inst) -> Rules<'a, 'b> {
        match inst {
            Inst::Unary(op, a) => [unary(op, self.at(a)).map(|r| (a, r)), None],
            Inst::Binary(op, l, r) => {
                let [left, right] = binary(op, self.at(l), self.at(r));
                [left.map(|f| (l, f)), right.map(|f| (r, f))]
            }
            Inst::Select(c, l, r) => {
                let c = self.at(c);
                [
                    Some((l, Box::new(move |row| c.select(row.u, row.zero())))),
                    Some((r, Box::new(move |row| c.select(row.zero(), row.u)))),
                ]
            }
            Inst::Cast(to, a) if to.is_float() => [Some((a, back(self.at(a)))), None],
            Inst::CastLike(a, _) => [Some((a, back(self.at(a)))), None],
            _ => [None, None],
        }
    }

    /// A zero that takes the type of what it meets.
    fn zero(&self) -> Expr<'b> {
        self.b.expr(self.b.push(Inst::Const(Const::Int(0))))
    }
}

fn back<'a, 'b: 'a>(like: Expr<'b>) -> Rule<'a, 'b> {
    Box::new(move |row| row.u.cast_like(like))
}

fn rule<'a, 'b: 'a>(f: impl Fn(Expr<'b>, Expr<'b>) -> Expr<'b> + 'a) -> Option<Rule<'a, 'b>> {
    Some(Box::new(move |row| f(row.u, row.y)))
}

/// `u · dy/dx`, from `x`, the result `y` and its gradient `u`.
fn unary<'a, 'b: 'a>(op: Unary, x: Expr<'b>) -> Option<Rule<'a, 'b>> {
    use std::f64::consts::{FRAC_2_SQRT_PI, LN_2};
    match op {
        Unary::Neg => rule(|u, _| -u),
        Unary::Abs => rule(move |u, _| u * x.sign()),
        Unary::Exp => rule(|u, y| u * y),
        Unary::Expm1 => rule(|u, y| u * (y + 1.0)),
        Unary::Exp2 => rule(|u, y| u * y * LN_2),
        Unary::Log => rule(move |u, _| u / x),
        Unary::Log1p => rule(move |u, _| u / (x + 1.0)),
        Unary::Log2 => rule(move |u, _| u / (x * LN_2)),
        Unary::Sqrt => rule(|u, y| u * 0.5 / y),
        Unary::Rsqrt => rule(|u, y| u * -0.5 * y * y * y),
        Unary::Recip => rule(|u, y| -(u * y * y)),
        Unary::Sin => rule(move |u, _| u * x.cos()),
        Unary::Cos => rule(move |u, _| -(u * x.sin())),
        Unary::Tan => rule(|u, y| u * (y * y + 1.0)),
        Unary::Asin => rule(move |u, _| u * (1.0 - x * x).rsqrt()),
        Unary::Acos => rule(move |u, _| -(u * (1.0 - x * x).rsqrt())),
        Unary::Atan => rule(move |u, _| u / (x * x + 1.0)),
        Unary::Sinh => rule(move |u, _| u * x.cosh()),
        Unary::Cosh => rule(move |u, _| u * x.sinh()),
        Unary::Tanh => rule(|u, y| u * (1.0 - y * y)),
        Unary::Erf => rule(move |u, _| u * (-(x * x)).exp() * FRAC_2_SQRT_PI),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc | Unary::Not => None,
    }
}

/// The same for both operands `a`, `b`.
fn binary<'a, 'b: 'a>(op: Binary, a: Expr<'b>, b: Expr<'b>) -> [Option<Rule<'a, 'b>>; 2] {
    match op {
        Binary::Add => [rule(|u, _| u), rule(|u, _| u)],
        Binary::Sub => [rule(|u, _| u), rule(|u, _| -u)],
        Binary::Mul => [rule(move |u, _| u * b), rule(move |u, _| u * a)],
        Binary::Div => [rule(move |u, _| u / b), rule(move |u, y| -(u * y / b))],
        Binary::Rem => [rule(|u, _| u), rule(move |u, _| -(u * (a / b).floor()))],
        Binary::Pow => [
            rule(move |u, _| b.eq(0.0).select(0.0, u * b * a.pow(b - 1.0))),
            rule(move |u, y| (a.eq(0.0) & b.ge(0.0)).select(0.0, u * y * a.log())),
        ],
        Binary::Atan2 => [rule(move |u, _| u * b / (a * a + b * b)), rule(move |u, _| -(u * a / (a * a + b * b)))],
        Binary::Max => [share(b, a), share(a, b)],
        Binary::Min => [share(a, b), share(b, a)],
        _ => [None, None],
    }
}

/// The gradient of the operand that wins when `less < more`: all of it, half at a tie.
fn share<'a, 'b: 'a>(less: Expr<'b>, more: Expr<'b>) -> Option<Rule<'a, 'b>> {
    rule(move |u, _| less.lt(more).select(u, less.eq(more).select(u * 0.5, 0.0)))
}

//! Symbolic differentiation: one row per op, for gradients and for tangents. No row creates a zero term, and values of
//! the forward program are shared.

use std::f64::consts::{FRAC_2_SQRT_PI, LN_2};

use super::{Binary, Derivative, Expr, Id, Inst, Program, ProgramBuilder, Unary};

/// The derivative with respect to input `wrt`, with only the inputs that it reads; `None` if it is zero by structure.
pub(super) fn derivative(program: &Program, wrt: usize) -> Option<Derivative> {
    let builder = ProgramBuilder::default();
    let gradient = gradients(program, &builder, &[wrt])[0]?;
    let whole = finish(program, &builder, &[gradient]);
    let inputs: Box<[u16]> = (0..whole.inputs() as u16).filter(|i| whole.insts().contains(&Inst::Input(*i))).collect();
    Some(Derivative { program: renumbered(&whole, &inputs), inputs })
}

/// The derivatives with respect to inputs `wrt` as one program; zeros for an input that has none.
pub(super) fn differentiate(program: &Program, wrt: &[usize]) -> Program {
    let b = ProgramBuilder::default();
    let zero = |i: usize| b.int(0).cast_like(b.input(i as u16));
    let found = gradients(program, &b, wrt).into_iter().zip(wrt);
    let gradients: Vec<Expr<'_>> = found.map(|(g, &i)| g.unwrap_or_else(|| zero(i))).collect();
    finish(program, &b, &gradients)
}

/// The tangents of the outputs: forward accumulation over the values that depend on inputs `wrt`. `None` if all are
/// zero by structure.
pub(super) fn tangent(program: &Program, wrt: u64) -> Option<Program> {
    let b = ProgramBuilder::default();
    let mut primal: Vec<Id> = Vec::with_capacity(program.insts().len());
    let mut terms: Vec<Option<GradTerm<'_>>> = Vec::with_capacity(program.insts().len());
    for inst in program.insts() {
        let here = inst.map(|a| primal[a as usize]);
        let y = b.expr(b.push(here));
        let mut term = None;
        if let Inst::Input(k) = *inst
            && wrt >> k & 1 == 1
        {
            term = Some(GradTerm { when: None, value: b.input(program.inputs() as u16 + k) });
        }
        for (j, operand) in inst.operands().enumerate() {
            let Some(t) = terms[operand as usize] else { continue };
            let part = match here {
                Inst::Cast(to, _) if to.is_float() => t.with(t.value.cast(to)),
                Inst::CastLike(_, like) if j == 0 => t.with(t.value.cast_like(b.expr(like))),
                Inst::Cast(..) | Inst::CastLike(..) => None,
                _ => back(&b, here, y, t)[j],
            };
            part.into_iter().for_each(|part| GradTerm::add(&mut term, part));
        }
        primal.push(y.id());
        terms.push(term);
    }
    let outputs = program.outputs().iter().map(|&o| (terms[o as usize], b.expr(primal[o as usize])));
    if outputs.clone().all(|(term, _)| term.is_none()) {
        return None;
    }
    let outputs: Vec<Expr<'_>> =
        outputs.map(|(term, y)| term.map_or_else(|| b.int(0).cast_like(y), GradTerm::whole)).collect();
    Some(b.finish(program.name(), 2 * program.inputs(), program.scalars(), &outputs))
}

fn finish(program: &Program, b: &ProgramBuilder, outputs: &[Expr<'_>]) -> Program {
    b.finish(program.name(), program.inputs() + program.outputs().len(), program.scalars(), outputs)
}

/// The program with input `kept[i]` renumbered to `i`.
fn renumbered(program: &Program, kept: &[u16]) -> Program {
    let position = |k: u16| kept.iter().position(|&i| i == k).unwrap_or(0) as u16;
    let number = |inst: &Inst| if let Inst::Input(k) = inst { Inst::Input(position(*k)) } else { *inst };
    let insts = program.insts().iter().map(number).collect();
    Program::from_parts(program.name(), insts, program.outputs().to_vec(), kept.len(), program.scalars())
}

/// Reverse accumulation over the values that depend on inputs `wrt`.
fn gradients<'b>(program: &Program, b: &'b ProgramBuilder, wrt: &[usize]) -> Vec<Option<Expr<'b>>> {
    let insts = program.insts();
    let mut forward: Vec<Id> = Vec::with_capacity(insts.len());
    for inst in insts {
        forward.push(b.push(inst.map(|a| forward[a as usize])));
    }
    let reaches = reaching(insts, wrt);
    let mut terms: Vec<Option<GradTerm<'b>>> = vec![None; insts.len()];
    for (k, &o) in program.outputs().iter().enumerate() {
        let upstream = b.input((program.inputs() + k) as u16);
        GradTerm::add(&mut terms[o as usize], GradTerm { when: None, value: upstream });
    }
    for i in (0..insts.len()).rev().filter(|&i| reaches[i]) {
        let Some(u) = terms[i] else { continue };
        let inst = insts[i].map(|a| forward[a as usize]);
        for (operand, term) in insts[i].operands().zip(back(b, inst, b.expr(forward[i]), u)) {
            if let Some(term) = term.filter(|_| reaches[operand as usize]) {
                GradTerm::add(&mut terms[operand as usize], term);
            }
        }
    }
    let at = |w: usize| insts.iter().position(|inst| *inst == Inst::Input(w as u16));
    wrt.iter().map(|&w| terms[at(w)?].map(GradTerm::whole)).collect()
}

/// A flag per value: true if it depends on inputs `wrt`.
fn reaching(insts: &[Inst], wrt: &[usize]) -> Vec<bool> {
    let mut reaches: Vec<bool> = Vec::with_capacity(insts.len());
    for inst in insts {
        let through = inst.operands().any(|a| reaches[a as usize]);
        reaches.push(through || matches!(inst, Inst::Input(k) if wrt.contains(&(*k as usize))));
    }
    reaches
}

/// A gradient term: `value` where the condition holds (or fails, as the flag says), 0 elsewhere.
///
/// Terms stay conditional until two are summed. The branches of a `select` thus become a `select`, not a sum with
/// zeros. An overflow in the branch not chosen is never multiplied by 0.
#[derive(Clone, Copy)]
struct GradTerm<'b> {
    when: Option<(Expr<'b>, bool)>,
    value: Expr<'b>,
}

impl<'b> GradTerm<'b> {
    fn whole(self) -> Expr<'b> {
        match self.when {
            None => self.value,
            Some((c, true)) => c.select(self.value, 0.0),
            Some((c, false)) => c.select(0.0, self.value),
        }
    }

    fn with(self, value: Expr<'b>) -> Option<GradTerm<'b>> {
        Some(GradTerm { value, ..self })
    }

    fn add(sum: &mut Option<GradTerm<'b>>, term: GradTerm<'b>) {
        let Some(old) = sum.replace(term) else { return };
        *sum = match (old.when, term.when) {
            (Some((c, a)), Some((d, b))) if c.id() == d.id() && a == b => old.with(old.value + term.value),
            (Some((c, a)), Some((d, _))) if c.id() == d.id() => {
                let (yes, no) = if a { (old.value, term.value) } else { (term.value, old.value) };
                Some(GradTerm { when: None, value: c.select(yes, no) })
            }
            _ => Some(GradTerm { when: None, value: old.whole() + term.whole() }),
        };
    }
}

/// The gradient terms of each operand of `y = inst`, whose gradient is `u`.
fn back<'b>(b: &'b ProgramBuilder, inst: Inst, y: Expr<'b>, u: GradTerm<'b>) -> [Option<GradTerm<'b>>; 3] {
    match inst {
        Inst::Unary(op, x) => [unary(op, b.expr(x), y, u.value).and_then(|g| u.with(g)), None, None],
        Inst::Binary(op, l, r) => {
            let [l, r] = binary(op, b.expr(l), b.expr(r), y, u.value);
            [l.and_then(|g| u.with(g)), r.and_then(|g| u.with(g)), None]
        }
        Inst::Select(c, ..) => {
            let arm = |holds| Some(GradTerm { when: Some((b.expr(c), holds)), value: u.whole() });
            [None, arm(true), arm(false)]
        }
        Inst::Cast(to, a) if to.is_float() => [u.with(u.value.cast_like(b.expr(a))), None, None],
        Inst::CastLike(a, _) => [u.with(u.value.cast_like(b.expr(a))), None, None],
        _ => [None; 3],
    }
}

/// The gradient of a unary op, `u · dy/dx`.
fn unary<'b>(op: Unary, x: Expr<'b>, y: Expr<'b>, u: Expr<'b>) -> Option<Expr<'b>> {
    Some(match op {
        Unary::Neg => -u,
        Unary::Abs => u * x.sign(),
        Unary::Exp => u * y,
        // The exponential is computed anew: y + 1 loses all digits where eˣ is small compared with 1.
        Unary::Expm1 => u * x.exp(),
        // The factor is the root of `y`, which is finite where the derivative is finite and `y` is not.
        Unary::Exp2 => {
            let root = (x * 0.5).exp2();
            u * LN_2 * root * root
        }
        Unary::Log => u / x,
        Unary::Log1p => u / (x + 1.0),
        Unary::Log2 => u / (x * LN_2),
        Unary::Sqrt => u / (y * 2.0),
        Unary::Rsqrt => u * -0.5 * (y * y * y),
        Unary::Recip => -(u * (y * y)),
        Unary::Sin => u * x.cos(),
        Unary::Cos => -(u * x.sin()),
        Unary::Tan => u * (y * y + 1.0),
        // The product is not `1 − x²`, which is rounded near ±1.
        Unary::Asin => u * ((1.0 - x) * (x + 1.0)).rsqrt(),
        Unary::Acos => -(u * ((1.0 - x) * (x + 1.0)).rsqrt()),
        Unary::Atan => u / (x * x + 1.0),
        Unary::Sinh => u * x.cosh(),
        Unary::Cosh => u * x.sinh(),
        // The slope `1 − y²` loses all digits for large |x|; it is the square of
        // `1 / cosh(x) = 2e^−|x| / (1 + e^−2|x|)`.
        Unary::Tanh => {
            let negative = x.lt(0.0);
            let z = negative.select(x, -x).exp();
            let s = z * 2.0 / (z * z + 1.0);
            z.lt(0.5).select(u * s * s, u * (1.0 - y * y))
        }
        Unary::Erf => u * (-(x * x)).exp() * FRAC_2_SQRT_PI,
        Unary::Erfc => u * (-(x * x)).exp() * -FRAC_2_SQRT_PI,
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc | Unary::Not => return None,
    })
}

/// The gradients of a binary op, for both operands.
fn binary<'b>(op: Binary, a: Expr<'b>, b: Expr<'b>, y: Expr<'b>, u: Expr<'b>) -> [Option<Expr<'b>>; 2] {
    let [da, db] = match op {
        Binary::Add => [u, u],
        Binary::Sub => [u, -u],
        Binary::Mul => [u * b, u * a],
        Binary::Div => [u / b, -(u / b * y)],
        Binary::Rem => [u, -(u * (a / b).floor())],
        Binary::Pow => {
            [b.eq(0.0).select(0.0, u * (b * a.pow(b - 1.0))), (a.eq(0.0) & b.ge(0.0)).select(0.0, u * (y * a.log()))]
        }
        Binary::Atan2 => {
            // The ratio of the smaller to the larger operand is used, since `a² + b²` may overflow or underflow. At the
            // origin, which has no angle, the gradient is 0, as PyTorch's.
            let steep = b.abs().lt(a.abs());
            let large = steep.select(a, b);
            let ratio = steep.select(b, a) / large;
            let most = large.eq(0.0).select(0.0, u / large / (ratio * ratio + 1.0));
            let least = most * ratio;
            [steep.select(least, most), -steep.select(most, least)]
        }
        Binary::Max => [winner(a.lt(b), a, b, u), winner(b.lt(a), a, b, u)],
        Binary::Min => [winner(b.lt(a), a, b, u), winner(a.lt(b), a, b, u)],
        _ => return [None; 2],
    };
    [Some(da), Some(db)]
}

/// The whole gradient for the operand that won, half of it at a tie (as in PyTorch), and 0 for the one that lost.
fn winner<'b>(lost: Expr<'b>, a: Expr<'b>, b: Expr<'b>, u: Expr<'b>) -> Expr<'b> {
    lost.select(0.0, a.eq(b).select(u * 0.5, u))
}

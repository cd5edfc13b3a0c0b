//! Building: equal values are shared, constants folded, and only identities that are exact for NaN, ±0 and ±∞ are used.

use std::{cell::RefCell, collections::HashMap};

use super::{Binary, Const, Expr, Id, Inst, Program, Unary};

/// Collects the values of a program in the making.
#[derive(Default)]
pub struct Builder(RefCell<State>);

#[derive(Default)]
struct State {
    insts: Vec<Inst>,
    known: HashMap<Inst, Id>,
}

impl Builder {
    /// A real number.
    pub fn c(&self, value: f64) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Float(value.to_bits()))))
    }

    /// A whole number.
    pub fn int(&self, value: i64) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Int(value))))
    }

    /// A truth value.
    pub fn bool(&self, value: bool) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Bool(value))))
    }

    /// The element's row-major position in the output.
    pub fn index(&self) -> Expr<'_> {
        self.expr(self.push(Inst::Index))
    }

    /// 32 random bits of each element, keyed by scalar `seed`.
    pub fn random(&self, seed: u16, stream: u32) -> Expr<'_> {
        self.expr(self.push(Inst::Random { seed, stream }))
    }

    pub(super) fn input(&self, i: u16) -> Expr<'_> {
        self.expr(self.push(Inst::Input(i)))
    }

    pub(super) fn scalar(&self, i: u16) -> Expr<'_> {
        self.expr(self.push(Inst::Scalar(i)))
    }

    pub(super) fn expr(&self, id: Id) -> Expr<'_> {
        Expr::new(self, id)
    }

    /// The number of a value, simplified; an equal one that exists already is shared.
    pub(super) fn push(&self, inst: Inst) -> Id {
        let mut state = self.0.borrow_mut();
        match simplify(&state.insts, inst) {
            Simple::Is(id) => id,
            Simple::Inst(inst) => state.share(inst),
        }
    }

    /// As [`push`](Builder::push) without simplifying: the reference that simplification is tested against.
    #[cfg(test)]
    pub(super) fn push_plain(&self, inst: Inst) -> Id {
        let mut state = self.0.borrow_mut();
        state.insts.push(inst);
        state.insts.len() as Id - 1
    }

    pub(super) fn finish(&self, name: &'static str, inputs: usize, scalars: usize, outputs: &[Expr<'_>]) -> Program {
        let outputs: Vec<Id> = outputs.iter().map(|e| e.id()).collect();
        let (insts, outputs) = live(&self.0.borrow().insts, &outputs);
        Program::from_parts(name, insts, outputs, inputs, scalars)
    }
}

impl State {
    fn share(&mut self, inst: Inst) -> Id {
        let next = self.insts.len() as Id;
        let id = *self.known.entry(inst).or_insert(next);
        if id == next {
            self.insts.push(inst);
        }
        id
    }
}

/// The values that outputs depend on, renumbered.
pub(super) fn live(insts: &[Inst], outputs: &[Id]) -> (Vec<Inst>, Vec<Id>) {
    let mut used = vec![false; insts.len()];
    outputs.iter().for_each(|&o| used[o as usize] = true);
    for i in (0..insts.len()).rev() {
        if used[i] {
            insts[i].operands().for_each(|a| used[a as usize] = true);
        }
    }
    let mut number = vec![0; insts.len()];
    let mut kept = Vec::new();
    for (i, inst) in insts.iter().enumerate().filter(|(i, _)| used[*i]) {
        number[i] = kept.len() as Id;
        kept.push(inst.map(|a| number[a as usize]));
    }
    (kept, outputs.iter().map(|&o| number[o as usize]).collect())
}

enum Simple {
    Is(Id),
    Inst(Inst),
}

fn simplify(insts: &[Inst], inst: Inst) -> Simple {
    match inst {
        Inst::Unary(op, a) => unary(insts, op, a),
        Inst::Binary(op, a, b) => binary(insts, op, a, b),
        Inst::Select(c, a, b) => match insts[c as usize] {
            Inst::Const(Const::Bool(hold)) => Simple::Is(if hold { a } else { b }),
            _ if a == b => Simple::Is(a),
            _ => Simple::Inst(inst),
        },
        Inst::Cast(to, a) => match insts[a as usize] {
            Inst::Cast(from, _) if from == to => Simple::Is(a),
            _ => Simple::Inst(inst),
        },
        Inst::CastLike(a, b) if a == b => Simple::Is(a),
        _ => Simple::Inst(inst),
    }
}

fn float(insts: &[Inst], a: Id) -> Option<f64> {
    match insts[a as usize] {
        Inst::Const(Const::Float(bits)) => Some(f64::from_bits(bits)),
        _ => None,
    }
}

fn constant(value: f64) -> Simple {
    Simple::Inst(Inst::Const(Const::Float(value.to_bits())))
}

fn unary(insts: &[Inst], op: Unary, a: Id) -> Simple {
    match (op, insts[a as usize]) {
        (Unary::Neg, Inst::Unary(Unary::Neg, x)) | (Unary::Not, Inst::Unary(Unary::Not, x)) => Simple::Is(x),
        (Unary::Not, Inst::Const(Const::Bool(b))) => Simple::Inst(Inst::Const(Const::Bool(!b))),
        (Unary::Neg, Inst::Const(Const::Int(k))) => Simple::Inst(Inst::Const(Const::Int(k.wrapping_neg()))),
        _ => match float(insts, a) {
            Some(x) if op != Unary::Not => constant(op.eval(x)),
            _ => Simple::Inst(Inst::Unary(op, a)),
        },
    }
}

fn binary(insts: &[Inst], op: Binary, a: Id, b: Id) -> Simple {
    use Binary::*;
    let (x, y) = (float(insts, a), float(insts, b));
    if let (Some(x), Some(y)) = (x, y) {
        let value = op.eval(x, y);
        return match op.is_comparison() {
            true => Simple::Inst(Inst::Const(Const::Bool(value != 0.0))),
            false => constant(value),
        };
    }
    let negative_zero = |v: f64| v == 0.0 && v.is_sign_negative();
    match (op, x, y) {
        (Add, Some(v), _) if negative_zero(v) => Simple::Is(b),
        (Add, _, Some(v)) if negative_zero(v) => Simple::Is(a),
        (Sub, _, Some(v)) if v == 0.0 && v.is_sign_positive() => Simple::Is(a),
        (Mul, Some(1.0), _) => Simple::Is(b),
        (Mul | Div, _, Some(1.0)) => Simple::Is(a),
        (Mul, Some(-1.0), _) => unary(insts, Unary::Neg, b),
        (Mul | Div, _, Some(-1.0)) => unary(insts, Unary::Neg, a),
        _ if op.commutes() && a > b => Simple::Inst(Inst::Binary(op, b, a)),
        _ => Simple::Inst(Inst::Binary(op, a, b)),
    }
}

impl Builder {
    pub(super) fn bin(&self, op: Binary, a: Id, b: Id) -> Id {
        self.push(Inst::Binary(op, a, b))
    }
}

//! Building of programs: equal values are shared, constants are folded, and only identities that are exact for NaN, ±0
//! and ±∞ are used.

use std::{cell::RefCell, collections::HashMap};

use super::{Binary, Const, Expr, Id, Inst, Number, OpClass, Program, Unary, types};

/// A program that is being built; `Expr` values refer to it.
#[derive(Default)]
pub struct ProgramBuilder(RefCell<BuilderState>);

#[derive(Default)]
struct BuilderState {
    insts: Vec<Inst>,
    /// A flag per value: true if no input determines its dtype, because it is made of constants, scalars and positions
    /// alone.
    weak: Vec<bool>,
    known: HashMap<Inst, Id>,
}

impl ProgramBuilder {
    /// A real constant, which takes the dtype of the operands it is combined with.
    pub fn c(&self, value: f64) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Float(value.to_bits()))))
    }

    /// An integer constant, which takes the dtype of the operands it is combined with.
    pub fn int(&self, value: i64) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Int(value))))
    }

    /// A constant of dtype `bool`.
    pub fn bool(&self, value: bool) -> Expr<'_> {
        self.expr(self.push(Inst::Const(Const::Bool(value))))
    }

    /// The element's row-major position in the output.
    pub fn index(&self) -> Expr<'_> {
        self.expr(self.push(Inst::Index))
    }

    /// Random bits (32) for each element, under the key in scalar `seed`; streams under one key are independent.
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

    pub(super) fn inst(&self, id: Id) -> Inst {
        self.0.borrow().insts[id as usize]
    }

    /// The id of a value after simplification; an equal value that exists already is shared.
    pub(super) fn push(&self, inst: Inst) -> Id {
        let mut state = self.0.borrow_mut();
        match state.simplify(inst) {
            Simple::Is(id) => id,
            Simple::Inst(inst) => state.share(inst),
            Simple::Times(a, factor) => {
                let factor = state.share(Inst::Const(Const::Float(factor.to_bits())));
                state.share(Inst::Binary(Binary::Mul, a, factor))
            }
        }
    }

    /// Appends a value without simplifying or sharing: the reference that simplification is tested against.
    #[cfg(test)]
    pub(super) fn push_plain(&self, inst: Inst) -> Id {
        self.0.borrow_mut().append(inst)
    }

    pub(super) fn finish(&self, name: &'static str, inputs: usize, scalars: usize, outputs: &[Expr<'_>]) -> Program {
        let outputs: Vec<Id> = outputs.iter().map(|e| e.id()).collect();
        let (insts, outputs) = live(&self.0.borrow().insts, &outputs);
        let (insts, outputs) = types::split(&insts, &outputs);
        Program::from_parts(name, insts, outputs, inputs, scalars)
    }
}

/// Keeps the values that outputs depend on, and renumbers them.
fn live(insts: &[Inst], outputs: &[Id]) -> (Vec<Inst>, Vec<Id>) {
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

impl BuilderState {
    fn share(&mut self, inst: Inst) -> Id {
        match self.known.get(&inst) {
            Some(&id) => id,
            None => {
                let id = self.append(inst);
                self.known.insert(inst, id);
                id
            }
        }
    }

    fn append(&mut self, inst: Inst) -> Id {
        let weak = |a: Id| self.weak[a as usize];
        self.weak.push(match inst {
            Inst::Const(_) | Inst::Scalar(_) | Inst::Index => true,
            Inst::Input(_) | Inst::Random { .. } | Inst::Cast(..) => false,
            Inst::Binary(op, ..) if op.is_comparison() => false,
            Inst::CastLike(_, like) => weak(like),
            Inst::Select(_, a, b) | Inst::Binary(_, a, b) => weak(a) && weak(b),
            Inst::Unary(_, a) => weak(a),
        });
        self.insts.push(inst);
        self.insts.len() as Id - 1
    }
}

enum Simple {
    Is(Id),
    Inst(Inst),
    Times(Id, f64),
}

impl BuilderState {
    fn simplify(&self, inst: Inst) -> Simple {
        match inst {
            Inst::Unary(op, a) => self.unary(op, a),
            Inst::Binary(op, a, b) => self.binary(op, a, b),
            Inst::Select(c, a, b) => self.select(c, a, b),
            Inst::Cast(to, a) => match self.inst(a) {
                Inst::Cast(from, _) if from == to => Simple::Is(a),
                _ => Simple::Inst(inst),
            },
            Inst::CastLike(a, like) => match self.inst(a) {
                _ if a == like => Simple::Is(a),
                Inst::CastLike(_, same) if same == like => Simple::Is(a),
                _ => Simple::Inst(inst),
            },
            _ => Simple::Inst(inst),
        }
    }

    fn inst(&self, a: Id) -> Inst {
        self.insts[a as usize]
    }

    fn number(&self, a: Id) -> Option<Number> {
        if let Inst::Const(c) = self.inst(a) { Some(c.into()) } else { None }
    }

    /// The operand of `v`, if `v` is a negation.
    fn negated(&self, v: Id) -> Option<Id> {
        if let Inst::Unary(Unary::Neg, x) = self.inst(v) { Some(x) } else { None }
    }

    fn select(&self, c: Id, a: Id, b: Id) -> Simple {
        let (chosen, other) = match self.inst(c) {
            _ if a == b => return Simple::Is(a),
            Inst::Const(Const::Bool(true)) => (a, b),
            Inst::Const(Const::Bool(false)) => (b, a),
            Inst::Unary(Unary::Not, c) => return Simple::Inst(Inst::Select(c, b, a)),
            _ => return Simple::Inst(Inst::Select(c, a, b)),
        };
        // The branch that is not chosen may determine the dtype of the other.
        match (self.weak[chosen as usize], self.weak[other as usize]) {
            (false, _) => Simple::Is(chosen),
            (true, false) if self.number(chosen).is_some() => Simple::Inst(Inst::CastLike(chosen, other)),
            _ => Simple::Inst(Inst::Select(c, a, b)),
        }
    }

    fn unary(&self, op: Unary, a: Id) -> Simple {
        match (op, self.inst(a)) {
            (Unary::Neg, Inst::Unary(Unary::Neg, x)) | (Unary::Not, Inst::Unary(Unary::Not, x)) => {
                return Simple::Is(x);
            }
            _ => {}
        }
        match self.number(a) {
            Some(x @ Number::Float(_)) if op != Unary::Not => constant(op.eval(x)),
            Some(x @ Number::Bool(_)) if op == Unary::Not => constant(op.eval(x)),
            Some(Number::Int(x)) if op == Unary::Neg && x != i64::MIN => constant(Number::Int(-x)),
            _ => Simple::Inst(Inst::Unary(op, a)),
        }
    }

    fn binary(&self, op: Binary, a: Id, b: Id) -> Simple {
        if let (Some(x), Some(y)) = (self.number(a), self.number(b))
            && let Some(value) = fold(op, x, y)
        {
            return constant(value);
        }
        match (op, self.negated(a), self.negated(b)) {
            (Binary::Add, _, Some(b)) => Simple::Inst(Inst::Binary(Binary::Sub, a, b)),
            (Binary::Add, Some(a), _) => Simple::Inst(Inst::Binary(Binary::Sub, b, a)),
            (Binary::Sub, _, Some(b)) => self.binary(Binary::Add, a, b),
            _ if op.commutes() && self.order(a) > self.order(b) => self.with_right(op, b, a),
            _ => self.with_right(op, a, b),
        }
    }

    /// The sort key of commutative operands: constants come last.
    fn order(&self, a: Id) -> (bool, Id) {
        (self.number(a).is_some(), a)
    }

    /// The simplification that a constant on the right allows.
    fn with_right(&self, op: Binary, a: Id, b: Id) -> Simple {
        use Binary::*;
        let same = Simple::Inst(Inst::Binary(op, a, b));
        match (op, self.number(b)) {
            // A real constant may be all that makes `a`, built from integer constants, a float.
            (_, Some(Number::Float(_))) if self.weak[a as usize] => same,
            (Mul | Div | Pow, Some(Number::Float(1.0) | Number::Int(1))) => Simple::Is(a),
            // A quotient by the integer −1 is no negation: unsigned integers read it as their largest value.
            (Mul | Div, Some(Number::Float(-1.0))) | (Mul, Some(Number::Int(-1))) => self.unary(Unary::Neg, a),
            (Add, Some(Number::Float(y))) if is_negative_zero(y) => Simple::Is(a),
            (Sub, Some(Number::Float(y))) if y == 0.0 && !is_negative_zero(y) => Simple::Is(a),
            (Sub, Some(Number::Int(0))) => Simple::Is(a),
            (Div, Some(Number::Float(y))) if is_power_of_two(y) => Simple::Times(a, y.recip()),
            (And, Some(Number::Bool(true))) | (Or | Xor, Some(Number::Bool(false))) => Simple::Is(a),
            (And | Or, _) if a == b => Simple::Is(a),
            _ => same,
        }
    }
}

fn constant(value: Number) -> Simple {
    Simple::Inst(Inst::Const(value.into()))
}

/// The result of an op on two constants, if it does not depend on the dtype that they will have.
fn fold(op: Binary, x: Number, y: Number) -> Option<Number> {
    let small = |v: i64| (0..128).contains(&v);
    match (x, y) {
        (Number::Float(_), Number::Float(_)) if !matches!(op.class(), OpClass::Int | OpClass::Bits) => {
            Some(op.eval(x, y, 64))
        }
        (Number::Bool(_), Number::Bool(_)) if matches!(op.class(), OpClass::Bits | OpClass::Any) => {
            Some(op.eval(x, y, 8))
        }
        (Number::Int(x), Number::Int(y)) => match op {
            Binary::Add => x.checked_add(y).map(Number::Int),
            Binary::Sub => x.checked_sub(y).map(Number::Int),
            Binary::Mul => x.checked_mul(y).map(Number::Int),
            _ if op.is_comparison() && small(x) && small(y) => Some(op.eval(Number::Int(x), Number::Int(y), 64)),
            _ => None,
        },
        _ => None,
    }
}

fn is_negative_zero(x: f64) -> bool {
    x == 0.0 && x.is_sign_negative()
}

/// Tells whether `1/x` is exact, also in `f32`, so that multiplying by it equals dividing by `x`.
fn is_power_of_two(x: f64) -> bool {
    let mantissa = x.to_bits() & ((1 << 52) - 1);
    mantissa == 0 && (2f64.powi(-126)..=2f64.powi(126)).contains(&x.abs())
}

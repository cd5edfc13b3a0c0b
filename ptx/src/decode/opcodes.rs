//! Opcodes: those of the table of computations, control flow, shuffles.

use super::{KernelDecoder, NameScope, OpenBody, Operand, Symbol};
use crate::{
    compute::{self, ComputeOp},
    error::PtxError,
    instruction::{Shuffle, ShuffleMode, WarpAction},
    registers::{Class, RegisterSlot},
};

/// The text of an instruction: its opcode, the part of that behind the first point, its operands, and known names.
#[derive(Clone, Copy)]
pub(super) struct Statement<'t, 'a> {
    pub opcode: &'t str,
    pub modifiers: &'t str,
    pub operands: &'t [Operand<'a>],
    pub scope: &'t NameScope<'a>,
}

impl<'a> KernelDecoder<'a, '_, '_> {
    /// Decodes an instruction by its opcode and its operands.
    pub(super) fn opcode(
        &mut self,
        opcode: &str,
        operands: &[Operand<'a>],
        body: &mut OpenBody<'a>,
    ) -> Result<(), PtxError> {
        let scope = &body.scope;
        let (base, modifiers) = opcode.split_once('.').unwrap_or((opcode, ""));
        let statement = Statement { opcode, modifiers, operands, scope };
        match (base, operands) {
            ("mov", [Operand::Vector(parts), from]) => self.unpack(modifiers, parts, from, scope),
            ("mov", [to, Operand::Vector(parts)]) => {
                let all: Vec<_> = std::iter::once(to).chain(parts).cloned().collect();
                self.compute(&format!("pack.{modifiers}"), &all, scope)
            }
            // An address is the same number in its own memory and among all: accesses name their memory.
            ("cvta", _)
                if ["to.global.u64", "global.u64", "to.shared.u64", "shared.u64", "to.local.u64", "local.u64"]
                    .contains(&modifiers) =>
            {
                self.compute("mov.u64", operands, scope)
            }
            ("bra", [Operand::Name(label)]) if ["", "uni"].contains(&modifiers) => {
                body.branches.push((self.instructions.len(), label, self.line.ptx));
                self.push(WarpAction::Branch { to: 0 });
                Ok(())
            }
            // From a function, to the end of its body.
            ("ret", []) if ["", "uni"].contains(&modifiers) && !self.calls.is_empty() => {
                body.branches.push((self.instructions.len(), "", self.line.ptx));
                self.push(WarpAction::Branch { to: 0 });
                Ok(())
            }
            ("ret", []) if ["", "uni"].contains(&modifiers) => {
                self.push(WarpAction::Exit);
                Ok(())
            }
            ("exit", []) if modifiers.is_empty() => {
                self.push(WarpAction::Exit);
                Ok(())
            }
            ("bar" | "barrier", [Operand::Literal(zero)])
                if zero.bits(Class::Word) == Some(0) && ["sync", "sync.aligned"].contains(&modifiers) =>
            {
                self.push(WarpAction::Barrier);
                Ok(())
            }
            ("shfl", _) => self.shuffle(statement),
            ("ld" | "st", _) => self.access(statement),
            ("atom" | "red", _) => self.atomic(statement),
            ("cp", _) => self.copy(statement),
            ("ldmatrix", _) => self.load_matrices(statement),
            ("mma", _) => self.multiply_matrices(statement),
            ("wgmma", _) => self.tiles(statement),
            ("fence", []) if modifiers == "proxy.async.shared::cta" => {
                self.push(WarpAction::FenceWrites);
                Ok(())
            }
            _ => match carried(opcode) {
                Some(row) => self.carried(&row, opcode, operands, scope),
                None => self.compute(opcode, operands, scope),
            },
        }
    }

    /// The error of an opcode that is not known.
    pub(super) fn unknown(&self, opcode: &str) -> PtxError {
        self.error(format!("unknown opcode `{opcode}`, or one with other operands than these"))
    }

    /// Decodes a row of the table of computations.
    fn compute(&mut self, opcode: &str, operands: &[Operand<'a>], scope: &NameScope<'a>) -> Result<(), PtxError> {
        let Some(ComputeOp { result, operands: classes, run }) = compute::find(opcode) else {
            return Err(self.unknown(opcode));
        };
        let [Operand::Name(to), from @ ..] = operands else { return Err(self.unknown(opcode)) };
        if from.len() != classes.len() {
            return Err(self.unknown(opcode));
        }
        let mut rows = [0; 5];
        rows[0] = self.register(scope, to, *result)?;
        for (row, (operand, class)) in rows[1..].iter_mut().zip(from.iter().zip(*classes)) {
            *row = match operand {
                Operand::Name(name) if opcode.starts_with("cvt.") => self.lower_half(scope, name, *class)?,
                _ => self.source(scope, operand, *class)?.row,
            };
        }
        self.push(WarpAction::Compute { run: *run, rows });
        Ok(())
    }

    /// Decodes arithmetic with a carry: `row` is the opcode that takes one. The carry that goes on is computed first,
    /// since the result may replace an operand.
    fn carried(
        &mut self,
        row: &str,
        opcode: &str,
        operands: &[Operand<'a>],
        scope: &NameScope<'a>,
    ) -> Result<(), PtxError> {
        let [to, from @ ..] = operands else { return Err(self.unknown(opcode)) };
        let rows = &mut self.rows;
        let carry = *self.carry.get_or_insert_with(|| rows.take(Class::Mask, 1));
        let next = rows.take(Class::Mask, 1);
        let takes = opcode.split('.').next().is_some_and(|base| base.ends_with('c'));
        let taken = if takes { carry } else { self.constant(Class::Mask, 0) };
        let gives = opcode.contains(".cc.");
        let rows_of = |decoder: &mut Self, result: u32| {
            let mut rows = [result, 0, 0, 0, 0];
            for (row, operand) in rows[1..].iter_mut().zip(from) {
                *row = decoder.source(scope, operand, Class::Word)?.row;
            }
            rows[from.len() + 1] = taken.row;
            Ok(rows)
        };
        let (base, kind) = row.rsplit_once('.').ok_or_else(|| self.unknown(opcode))?;
        let (Some(value), Some(out)) = (compute::find(row), compute::find(&format!("{base}.out.{kind}"))) else {
            return Err(self.unknown(opcode));
        };
        let Operand::Name(to) = to else { return Err(self.unknown(opcode)) };
        if from.len() + 1 != value.operands.len() {
            return Err(self.unknown(opcode));
        }
        if gives {
            let rows = rows_of(self, next.row)?;
            self.push(WarpAction::Compute { run: out.run, rows });
        }
        let to = self.register(scope, to, Class::Word)?;
        let rows = rows_of(self, to)?;
        self.push(WarpAction::Compute { run: value.run, rows });
        if gives {
            let copy = compute::find("mov.pred").ok_or_else(|| self.unknown(opcode))?;
            self.push(WarpAction::Compute { run: copy.run, rows: [carry.row, next.row, 0, 0, 0] });
        }
        Ok(())
    }

    /// The operand of a conversion, whose register may be larger than the type that is read.
    fn lower_half(&mut self, scope: &NameScope<'a>, name: &'a str, class: Class) -> Result<u32, PtxError> {
        match self.symbol(scope, name)? {
            Symbol::Register(RegisterSlot { class: Class::Long, .. }) if class == Class::Word => {
                let to = self.rows.take(Class::Word, 1).row;
                let from = self.source(scope, &Operand::Name(name), Class::Long)?.row;
                let low = compute::find("low.b64").ok_or_else(|| self.unknown("low.b64"))?;
                self.push(WarpAction::Compute { run: low.run, rows: [to, from, 0, 0, 0] });
                Ok(to)
            }
            _ => self.source(scope, &Operand::Name(name), class).map(|slot| slot.row),
        }
    }

    /// `mov.b64 {low, high}, from`, in which a part may be `_`.
    fn unpack(
        &mut self,
        modifiers: &str,
        parts: &[Operand<'a>],
        from: &Operand<'a>,
        scope: &NameScope<'a>,
    ) -> Result<(), PtxError> {
        let [low, high] = parts else { return Err(self.unknown(&format!("mov.{modifiers}"))) };
        for (part, to) in [("low", low), ("high", high)] {
            if *to != Operand::Name("_") {
                self.compute(&format!("{part}.{modifiers}"), &[to.clone(), from.clone()], scope)?;
            }
        }
        Ok(())
    }

    /// `shfl.sync.mode.b32 result|found, value, distance, clamp, members`.
    fn shuffle(&mut self, Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>) -> Result<(), PtxError> {
        let mode = match modifiers {
            "sync.up.b32" => ShuffleMode::Up,
            "sync.down.b32" => ShuffleMode::Down,
            "sync.bfly.b32" => ShuffleMode::Butterfly,
            "sync.idx.b32" => ShuffleMode::Index,
            _ => return Err(self.unknown(opcode)),
        };
        let [to, value, distance, clamp, members] = operands else { return Err(self.unknown(opcode)) };
        let (result, found) = match to {
            Operand::Name(name) => (*name, None),
            Operand::Pair(name, found) => (*name, Some(self.register(scope, found, Class::Mask)?)),
            _ => return Err(self.unknown(opcode)),
        };
        let shuffle = Shuffle {
            mode,
            result: self.register(scope, result, Class::Word)?,
            found,
            value: self.source(scope, value, Class::Word)?.row,
            distance: self.source(scope, distance, Class::Word)?.row,
            clamp: self.source(scope, clamp, Class::Word)?.row,
            members: self.source(scope, members, Class::Word)?.row,
        };
        self.push(WarpAction::Shuffle(shuffle));
        Ok(())
    }
}

/// The row of an opcode that takes a carry or gives one: `addc.u32` for `add.cc.u32` say.
fn carried(opcode: &str) -> Option<String> {
    let plain = opcode.replacen(".cc", "", 1);
    let (base, rest) = plain.split_once('.')?;
    let root = base.strip_suffix('c').unwrap_or(base);
    let is = (plain != opcode || root != base) && ["add", "sub", "mad"].contains(&root);
    is.then(|| format!("{root}c.{rest}"))
}

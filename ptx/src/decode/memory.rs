//! Opcodes that reach memory: loads, stores, atomic operations, asynchronous copies.

use super::{KernelDecoder, NameScope, Operand, Symbol, opcodes::Statement};
use crate::{
    error::{PtxError, Space},
    instruction::{Atomic, MemoryAccess, OperandAddress, WarpAction},
    registers::{Class, RegisterSlot},
    variable::size_of,
};

/// The new value of an atomic operation, from the old one and the operand.
type AtomicCombine = fn(u32, u32) -> u32;

/// Atomic operations on 32 bits, by the modifiers after the space.
const ATOMICS: &[(&str, AtomicCombine)] = &[
    ("or.b32", |old, x| old | x),
    ("and.b32", |old, x| old & x),
    ("xor.b32", |old, x| old ^ x),
    ("exch.b32", |_, x| x),
    ("add.u32", u32::wrapping_add),
    ("add.s32", u32::wrapping_add),
    ("min.u32", |old, x| old.min(x)),
    ("max.u32", |old, x| old.max(x)),
    ("min.s32", |old, x| (old as i32).min(x as i32) as u32),
    ("max.s32", |old, x| (old as i32).max(x as i32) as u32),
];

impl<'a> KernelDecoder<'a, '_, '_> {
    /// `ld.space.v2.type {a, b}, [address]`, or `st` with its operands the other way round.
    pub(super) fn access(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<(), PtxError> {
        let stores = opcode.starts_with("st");
        let words: Vec<&str> = modifiers.split('.').filter(|word| *word != "nc").collect();
        let (space, count, kind) = match words[..] {
            [space, kind] => (space, 1, kind),
            [space, "v2", kind] => (space, 2, kind),
            [space, "v4", kind] => (space, 4, kind),
            _ => return Err(self.unknown(opcode)),
        };
        let space = match space {
            "param" => Space::Parameters,
            "global" => Space::Global,
            "shared" => Space::Shared,
            "local" => Space::Local,
            _ => return Err(self.unknown(opcode)),
        };
        let (Some(bytes), [first, second]) = (size_of(kind), operands) else { return Err(self.unknown(opcode)) };
        let (memory, value) = if stores { (first, second) } else { (second, first) };
        let (address, space) = self.address(scope, memory, space)?;
        let values = match value {
            Operand::Vector(all) => all.as_slice(),
            one => std::slice::from_ref(one),
        };
        if values.len() != count {
            return Err(self.unknown(opcode));
        }
        let mut registers = [RegisterSlot { class: Class::Word, row: 0 }; 4];
        for (to, value) in registers.iter_mut().zip(values) {
            *to = if stores { self.stored(scope, value, bytes)? } else { self.loaded(scope, value)? };
        }
        let signed = kind.starts_with('s');
        let access = MemoryAccess { space, address, bytes: bytes as u8, signed, count: count as u8, registers };
        self.watch(space, access.size());
        self.push(if stores { WarpAction::Store(access) } else { WarpAction::Load(access) });
        Ok(())
    }

    /// A register that a load writes; it may be larger than the value.
    fn loaded(&mut self, scope: &NameScope<'a>, operand: &Operand<'a>) -> Result<RegisterSlot, PtxError> {
        match operand {
            Operand::Name(name) => match self.symbol(scope, name)? {
                Symbol::Register(slot) if slot.class != Class::Mask => Ok(slot),
                _ => Err(self.error(format!("a load into {operand}"))),
            },
            _ => Err(self.error(format!("a load into {operand}"))),
        }
    }

    /// A register that a store reads; it may be larger than the value.
    fn stored(&mut self, scope: &NameScope<'a>, operand: &Operand<'a>, bytes: usize) -> Result<RegisterSlot, PtxError> {
        match operand {
            Operand::Name(_) => self.loaded(scope, operand),
            _ => self.source(scope, operand, if bytes == 8 { Class::Long } else { Class::Word }),
        }
    }

    /// An address, and its memory: that of the variable it begins with, if this is the memory of one thread.
    fn address(
        &mut self,
        scope: &NameScope<'a>,
        operand: &Operand<'a>,
        space: Space,
    ) -> Result<(OperandAddress, Space), PtxError> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.error(format!("{operand} is no address")));
        };
        let (mut class, mut space) = (Class::Long, space);
        if let Operand::Name(name) = **base {
            match self.symbol(scope, name)? {
                Symbol::Register(slot) => class = slot.class,
                // The parameters of a call.
                Symbol::Memory(Space::Local, _) => space = Space::Local,
                _ => {}
            }
        }
        Ok((OperandAddress { base: self.source(scope, base, class)?, offset: *offset }, space))
    }

    fn address_in(
        &mut self,
        scope: &NameScope<'a>,
        operand: &Operand<'a>,
        space: Space,
    ) -> Result<OperandAddress, PtxError> {
        self.address(scope, operand, space).map(|(address, _)| address)
    }

    /// Notes the size of an access.
    pub(super) fn watch(&mut self, space: Space, bytes: usize) {
        match space {
            Space::Shared => self.shared_unit = self.shared_unit.min(bytes),
            Space::Global => self.global_unit = self.global_unit.min(bytes),
            Space::Parameters | Space::Local => {}
        }
    }

    /// `atom.global.or.b32 old, [address], operand`, or `red` without `old`.
    pub(super) fn atomic(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<(), PtxError> {
        let reduces = opcode.starts_with("red");
        let name = modifiers.strip_prefix("global.").or_else(|| modifiers.strip_prefix("relaxed.gpu.global."));
        let Some((_, operation)) = ATOMICS.iter().find(|(known, _)| Some(*known) == name) else {
            return Err(self.unknown(opcode));
        };
        let (result, address, operand) = match operands {
            [address, operand] if reduces => (None, address, operand),
            [Operand::Name("_"), address, operand] => (None, address, operand),
            [result, address, operand] if !reduces => (Some(self.loaded(scope, result)?), address, operand),
            _ => return Err(self.unknown(opcode)),
        };
        let address = self.address_in(scope, address, Space::Global)?;
        let operand = self.source(scope, operand, Class::Word)?;
        self.watch(Space::Global, 4);
        self.push(WarpAction::Atomic(Atomic { address, operation: *operation, operand, result }));
        Ok(())
    }

    /// `cp.async.cg.shared.global [to], [from], 16, bytes`, and the end of, and the wait for, groups of copies.
    pub(super) fn copy(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<(), PtxError> {
        let action = match (modifiers, operands) {
            ("async.cg.shared.global" | "async.ca.shared.global", [to, from, Operand::Literal(size), rest @ ..])
                if size.bits(Class::Word) == Some(16) && rest.len() <= 1 =>
            {
                let bytes = match rest {
                    [bytes] => self.source(scope, bytes, Class::Word)?,
                    _ => self.constant(Class::Word, 16),
                };
                let to = self.address_in(scope, to, Space::Shared)?;
                WarpAction::StartCopy { to, from: self.address_in(scope, from, Space::Global)?, bytes }
            }
            ("async.commit_group", []) => WarpAction::CommitCopies,
            ("async.wait_all", []) => {
                self.push(WarpAction::CommitCopies);
                WarpAction::AwaitCopies { left: 0 }
            }
            ("async.wait_group", [Operand::Literal(left)]) => {
                WarpAction::AwaitCopies { left: left.bits(Class::Word).unwrap_or(0) as u32 }
            }
            _ => return Err(self.unknown(opcode)),
        };
        self.push(action);
        Ok(())
    }

    /// The address of an instruction on matrices in shared memory.
    pub(super) fn matrices_at(
        &mut self,
        scope: &NameScope<'a>,
        operand: &Operand<'a>,
    ) -> Result<OperandAddress, PtxError> {
        self.address_in(scope, operand, Space::Shared)
    }
}

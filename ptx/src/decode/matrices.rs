//! Opcodes on matrices: loads of 8 × 8 tiles and products by tensor cores.

use super::{KernelDecoder, NameScope, Operand, opcodes::Statement};
use crate::{
    error::PtxError,
    half::{from_bf16, from_f16},
    instruction::{LoadMatrices, MultiplyMatrices, WarpAction},
    registers::Class,
};

/// The value of an element of a product's operands.
type Widen = fn(u16) -> f32;

/// Products: their modifiers, and the type of their operands.
const PRODUCTS: &[(&str, Widen)] = &[
    ("sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", from_f16),
    ("sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", from_bf16),
];

impl<'a> KernelDecoder<'a, '_, '_> {
    /// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [address]`.
    pub(super) fn load_matrices(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<(), PtxError> {
        let transposed = match modifiers {
            "sync.aligned.m8n8.x4.shared.b16" => false,
            "sync.aligned.m8n8.x4.trans.shared.b16" => true,
            _ => return Err(self.unknown(opcode)),
        };
        let [to, address] = operands else { return Err(self.unknown(opcode)) };
        let address = self.matrices_at(scope, address)?;
        let results = self.results(opcode, to, scope)?;
        self.push(WarpAction::LoadMatrices(LoadMatrices { address, transposed, results }));
        Ok(())
    }

    /// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d}, {a}, {b}, {c}`.
    pub(super) fn multiply_matrices(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<(), PtxError> {
        let Some((_, widen)) = PRODUCTS.iter().find(|(known, _)| *known == modifiers) else {
            return Err(self.unknown(opcode));
        };
        let [d, a, b, c] = operands else { return Err(self.unknown(opcode)) };
        let product = MultiplyMatrices {
            widen: *widen,
            d: self.results(opcode, d, scope)?,
            a: self.words(opcode, a, scope)?,
            b: self.words(opcode, b, scope)?,
            c: self.words(opcode, c, scope)?,
        };
        self.push(WarpAction::MultiplyMatrices(product));
        Ok(())
    }

    /// The rows of a vector of registers that an instruction writes.
    fn results<const N: usize>(
        &mut self,
        opcode: &str,
        operand: &Operand<'a>,
        scope: &NameScope<'a>,
    ) -> Result<[u32; N], PtxError> {
        self.each(opcode, operand, |decoder, part| match part {
            Operand::Name(name) => decoder.register(scope, name, Class::Word),
            _ => Err(decoder.unknown(opcode)),
        })
    }

    /// The rows of a vector of operands.
    pub(super) fn words<const N: usize>(
        &mut self,
        opcode: &str,
        operand: &Operand<'a>,
        scope: &NameScope<'a>,
    ) -> Result<[u32; N], PtxError> {
        self.each(opcode, operand, |decoder, part| decoder.source(scope, part, Class::Word).map(|slot| slot.row))
    }

    fn each<const N: usize>(
        &mut self,
        opcode: &str,
        operand: &Operand<'a>,
        row: impl Fn(&mut Self, &Operand<'a>) -> Result<u32, PtxError>,
    ) -> Result<[u32; N], PtxError> {
        let Operand::Vector(parts) = operand else { return Err(self.unknown(opcode)) };
        let rows = parts.iter().map(|part| row(self, part)).collect::<Result<Vec<_>, _>>()?;
        rows.try_into().map_err(|_| self.unknown(opcode))
    }
}

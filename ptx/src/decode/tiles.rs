//! Opcodes of a warpgroup's products: tiles in shared memory, multiplied asynchronously.

use super::{KernelDecoder, Operand, opcodes::Statement};
use crate::{
    error::PtxError,
    half::{from_bf16, from_f16},
    instruction::{SharedTile, TileOperand, TileProduct, WarpAction},
    registers::Class,
};

impl<'a> KernelDecoder<'a, '_, '_> {
    /// Decodes `wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {d}, a, b, accumulate, 1, 1, transposed…`, and
    /// the fence, the end of, and the wait for, groups of products.
    pub(super) fn tiles(&mut self, statement: Statement<'_, 'a>) -> Result<(), PtxError> {
        let action = match (statement.modifiers, statement.operands) {
            ("fence.sync.aligned", []) => WarpAction::FenceProducts,
            ("commit_group.sync.aligned", []) => WarpAction::CommitProducts,
            ("wait_group.sync.aligned", [Operand::Literal(left)]) => {
                WarpAction::AwaitProducts { left: left.bits(Class::Word).unwrap_or(0) as u32 }
            }
            _ => {
                let product = self.tile_product(statement)?;
                self.tile_products.push(product);
                WarpAction::MultiplyTiles { product: self.tile_products.len() as u32 - 1 }
            }
        };
        self.push(action);
        Ok(())
    }

    fn tile_product(
        &mut self,
        Statement { opcode, modifiers, operands, scope }: Statement<'_, 'a>,
    ) -> Result<TileProduct, PtxError> {
        let shape = modifiers.strip_prefix("mma_async.sync.aligned.m64n");
        let (columns, kind) =
            shape.and_then(|shape| shape.split_once("k16.f32.")).ok_or_else(|| self.unknown(opcode))?;
        let columns: usize = columns.parse().map_err(|_| self.unknown(opcode))?;
        let widen = match kind {
            "f16.f16" => from_f16,
            "bf16.bf16" => from_bf16,
            _ => return Err(self.unknown(opcode)),
        };
        let [Operand::Vector(d), a, b, accumulate, flags @ ..] = operands else { return Err(self.unknown(opcode)) };
        let flags: Option<Vec<u64>> = flags
            .iter()
            .map(|flag| if let Operand::Literal(literal) = flag { literal.bits(Class::Word) } else { None })
            .collect();
        let in_registers = matches!(a, Operand::Vector(_));
        // Operands are not negated; those in registers are not transposed.
        let transposed = match (flags.as_deref(), in_registers) {
            (Some([1, 1, b]), true) => [0, *b],
            (Some([1, 1, a, b]), false) => [*a, *b],
            _ => return Err(self.unknown(opcode)),
        };
        if d.len() * 2 != columns || !columns.is_multiple_of(8) {
            return Err(self.unknown(opcode));
        }
        let rows = d.iter().map(|part| match part {
            Operand::Name(name) => self.register(scope, name, Class::Word),
            _ => Err(self.unknown(opcode)),
        });
        let d = rows.collect::<Result<Vec<_>, _>>()?;
        let descriptor = |decoder: &mut Self, operand, transposed| {
            let descriptor = decoder.source(scope, operand, Class::Long)?;
            Ok::<_, PtxError>(SharedTile { descriptor, transposed: transposed != 0 })
        };
        let a = match in_registers {
            true => TileOperand::Registers(self.words(opcode, a, scope)?),
            false => TileOperand::Shared(descriptor(self, a, transposed[0])?),
        };
        let b = descriptor(self, b, transposed[1])?;
        let accumulate = self.source(scope, accumulate, Class::Mask)?;
        Ok(TileProduct { widen, d, a, b, accumulate })
    }
}

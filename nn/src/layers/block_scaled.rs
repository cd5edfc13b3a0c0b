//! Linear layers whose products have 8-bit operands with a scale per block.

use std::{any::Any, sync::Arc};

use autograd::Var;
use numcore::{
    Error, Result, Runtime,
    fused::{BlockScaledLinear, BlockScaling},
    ops::Apply,
};

use super::{Adapter, Linear};
use crate::{Module, ModuleEntry, Visitor, walk};

/// Rounds the operands of a linear layer's three products by blocks; the weight itself keeps its dtype.
struct BlockScaledAdapter(BlockScaling);

impl<R: Runtime> Module<R> for BlockScaledAdapter {
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}

impl<R: Runtime> Adapter<R> for BlockScaledAdapter {
    #[track_caller]
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        layer.complete(Var::apply1(BlockScaledLinear { scaling: self.0 }, &[x, &layer.weight.var()])?)
    }

    fn can_be_cut(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Lets the linear layers that `which` picks by name compute with 8-bit operands, in forward and backward, and returns
/// their number. Weights are not changed: they, their gradients and the optimizer's state keep their dtype.
///
/// Blocks begin where a rank's own piece of a weight, and its own rows of `x`, begin. So a layer that is cut elsewhere
/// than at a multiple of 128 has other blocks than the whole layer.
///
/// ```
/// # use nn::{Gpt, GptConfig, Init, block_scaled};
/// # use numcore::{NullRuntime, fused::BlockScaling};
/// # let init = Init::new(&NullRuntime::new(), 1);
/// let config = GptConfig { vocab: 64, context: 8, layers: 2, heads: 2, width: 16, ..Default::default() };
/// let model = Gpt::new(&init, config)?;
/// let scaled = block_scaled(&model, BlockScaling { powers_of_two: true }, |name| name.starts_with("blocks."))?;
/// assert_eq!(scaled, 8);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// Fails, and changes nothing, if `which` picks no layer, or a layer that has an adapter already.
#[doc(alias = "fp8")]
#[doc(alias = "Float8Linear")]
pub fn block_scaled<R: Runtime>(
    model: &impl Module<R>,
    scaling: BlockScaling,
    which: impl Fn(&str) -> bool,
) -> Result<usize> {
    let mut slots = Vec::new();
    walk(model, |name, entry| {
        if let ModuleEntry::Adapter(slot) = entry
            && which(name)
        {
            slots.push((name.to_owned(), slot.clone()));
        }
    });
    if let Some((name, _)) = slots.iter().find(|(_, slot)| slot.get().is_some()) {
        return Err(Error::state(name.clone(), "has an adapter already, and cannot compute with 8-bit operands"));
    }
    if slots.is_empty() {
        return Err(Error::usage("block_scaled", "no linear layer has a name that was asked for"));
    }
    slots.iter().for_each(|(_, slot)| drop(slot.replace(Some(Arc::new(BlockScaledAdapter(scaling))))));
    Ok(slots.len())
}

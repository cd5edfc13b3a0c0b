//! Fused operations.

use numcore::{Out, Result, Support, View, fused::FusedOp};

use crate::{Wgpu, reduce};

/// Runs `op` if there is a kernel for it at these types and strides.
pub(crate) fn run(wgpu: &Wgpu, op: &FusedOp, ins: &[View<'_, Wgpu>], outs: &mut [Out<'_, Wgpu>]) -> Result<Support> {
    match op {
        FusedOp::Softmax(_) | FusedOp::SoftmaxGrad(_) if ins[0].layout().numel() == 0 => Ok(Support::Done),
        FusedOp::Attention(_) if ins[1].layout().numel() == 0 => {
            // Of no keys: the softmax of nothing.
            let mut values = [0f64, f64::NEG_INFINITY].into_iter();
            for out in outs.iter_mut() {
                reduce::fill(wgpu, values.next().unwrap_or(0.0).into(), std::slice::from_mut(out))?;
            }
            Ok(Support::Done)
        }
        _ => Ok(Support::Decompose),
    }
}

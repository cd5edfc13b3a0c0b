//! What gradients travel as.

use super::PowerSgd;

/// What gradients are sent as. They are summed in `f32` either way.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum GradCompression {
    /// As they are.
    #[default]
    Own,
    /// Sent as `bf16`: half the bytes of `f32`, its range, three digits.
    Bf16,
    /// Sent as `f16`: half the bytes, four digits. Sums over examples or tokens would leave its range (65504), so what is sent is the gradient
    /// of the mean loss, times the loss scale where there is one: a rank's sum times `n / weight`, averaged over the `n` ranks, where
    /// `weight` is what all losses of the step weigh. It is known to all after one more exchange of one number, with which the last
    /// backward pass of a step begins.
    F16,
    /// As products of thin matrices, with what is lost sent later; what is not compressed travels as it is. Not in canonical order.
    PowerSgd(PowerSgd),
}

impl GradCompression {
    /// Whether it needs to know what the losses of a step weigh.
    pub(crate) fn sends_means(self) -> bool {
        self == GradCompression::F16
    }
}

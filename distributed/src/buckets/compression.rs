//! Formats in which gradients travel between ranks.

/// The format in which gradients travel between ranks. Values in half precision are summed in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum GradCompression {
    /// The gradient's own dtype, uncompressed.
    #[default]
    Own,
    /// `bf16`: half the bytes of `f32`, its range, three digits.
    Bf16,
    /// `f16`: half the bytes of `f32`, four digits. Sums over examples or tokens would leave its range (65504). So the
    /// gradient of the mean loss is sent, times the loss scale if there is one. It is a rank's sum times `n / weight`,
    /// averaged over the `n` ranks. `weight` is the sum of the weights of all losses of the step. Ranks learn it by one
    /// more all-reduce, of one number, at the start of the step's last backward pass.
    F16,
}

impl GradCompression {
    /// Tells whether the reducer needs the total weight of the step's losses.
    pub(crate) fn sends_means(self) -> bool {
        self == GradCompression::F16
    }
}

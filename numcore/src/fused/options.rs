//! Options of the methods for neural networks.

/// The reduction of the rows' losses to the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean, weighted if the loss has weights.
    #[default]
    Mean,
    /// The sum over all rows.
    Sum,
    /// No reduction: one loss per row.
    None,
}

/// Options of [`NnOps::cross_entropy`](super::NnOps::cross_entropy), with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions {
    /// The class whose rows do not contribute; −100 by convention.
    pub ignore_index: i64,
    /// The probability mass that is spread over all classes.
    pub label_smoothing: f64,
    /// The reduction of the rows' losses.
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Mean }
    }
}

/// The geometry of a two-dimensional convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvOptions {
    /// The stride between outputs, per axis.
    pub stride: [usize; 2],
    /// Zero padding at both edges of each axis of the input.
    pub padding: [usize; 2],
    /// The distance between elements of the kernel, per axis.
    pub dilation: [usize; 2],
    /// The number of channel groups; channels of different groups do not mix.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        ConvOptions { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

/// The geometry of a one-dimensional convolution.
#[derive(Clone, Copy, Debug)]
pub struct Conv1dOptions {
    /// The stride between outputs.
    pub stride: usize,
    /// Zero padding at both edges of the input.
    pub padding: usize,
    /// The distance between elements of the kernel.
    pub dilation: usize,
    /// The number of channel groups; channels of different groups do not mix.
    pub groups: usize,
}

impl Default for Conv1dOptions {
    fn default() -> Self {
        Conv1dOptions { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

/// The geometry for one-dimensional data seen as `[B, C, 1, L]`.
impl From<Conv1dOptions> for ConvOptions {
    fn from(Conv1dOptions { stride, padding, dilation, groups }: Conv1dOptions) -> Self {
        ConvOptions { stride: [1, stride], padding: [0, padding], dilation: [1, dilation], groups }
    }
}

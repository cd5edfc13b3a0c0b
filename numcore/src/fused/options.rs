//! Options of the methods of neural networks.

/// How the losses of the rows are reduced to the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean (weighted, where the loss has weights).
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
    /// Rows of this class do not count; −100 by convention.
    pub ignore_index: i64,
    /// How much of the target is spread over all classes.
    pub label_smoothing: f64,
    /// How the losses of the rows are reduced.
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Mean }
    }
}

/// Geometry of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvOptions {
    /// From one output to the next, per axis.
    pub stride: [usize; 2],
    /// Zeros around the input, per axis.
    pub padding: [usize; 2],
    /// From one weight to the next, per axis.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        ConvOptions { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

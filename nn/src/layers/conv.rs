//! Convolutions over one, two and three axes.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    fused::{Conv1dOptions, ConvOptions},
    ops::{ConvNd, ConvOps, ConvPadding, PadMode},
};

use super::optional;
use crate::{Forward, Init, Initializer, Module, Param};

/// Convolution over `N` axes of `x: [B, C, ..]`, giving `[B, O, ..]`.
#[derive(Debug, Module)]
pub struct Conv<R: Runtime, const N: usize> {
    /// The kernels, `[O, C/G, K1 .. KN]`.
    pub weight: Param<R>,
    /// The bias of each output channel, `[O]`.
    pub bias: Option<Param<R>>,
    #[module(skip)]
    options: ConvNd<N>,
}

/// Convolution of `x: [N, C, L]`, giving `[N, O, M]`.
pub type Conv1d<R> = Conv<R, 1>;
/// Convolution of `x: [N, C, H, W]`, giving `[N, O, P, Q]`.
pub type Conv2d<R> = Conv<R, 2>;
/// Convolution of `x: [N, C, D, H, W]`, giving `[N, O, M, P, Q]`.
pub type Conv3d<R> = Conv<R, 3>;

/// Transposed convolution over `N` axes of `x: [B, C, ..]`, giving `[B, O, ..]`: the adjoint of a [`Conv`] from `O`
/// channels to `C`.
#[derive(Debug, Module)]
pub struct ConvTranspose<R: Runtime, const N: usize> {
    /// The kernels, `[C, O/G, K1 .. KN]`.
    pub weight: Param<R>,
    /// The bias of each output channel, `[O]`.
    pub bias: Option<Param<R>>,
    #[module(skip)]
    options: ConvNd<N>,
    #[module(skip)]
    output_padding: [usize; N],
}

/// Transposed convolution of `x: [N, C, M]`, giving `[N, O, L]`.
pub type ConvTranspose1d<R> = ConvTranspose<R, 1>;
/// Transposed convolution of `x: [N, C, P, Q]`, giving `[N, O, H, W]`.
pub type ConvTranspose2d<R> = ConvTranspose<R, 2>;
/// Transposed convolution of `x: [N, C, M, P, Q]`, giving `[N, O, D, H, W]`.
pub type ConvTranspose3d<R> = ConvTranspose<R, 3>;

impl<R: Runtime> Conv<R, 1> {
    /// A layer with weight and bias uniform in `±1/√(C/G · K)`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: usize, options: Conv1dOptions) -> Result<Self> {
        Self::build(init, [inputs, outputs], [kernel], options.into())
    }
}

impl<R: Runtime> Conv<R, 2> {
    /// A layer with weight and bias uniform in `±1/√(C/G · R · S)`.
    #[track_caller]
    pub fn new(
        init: &Init<R>,
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        options: ConvOptions,
    ) -> Result<Self> {
        Self::build(init, [inputs, outputs], kernel, options.into())
    }
}

impl<R: Runtime> Conv<R, 3> {
    /// A layer with weight and bias uniform in `±1/√(C/G · D · R · S)`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: [usize; 3], options: ConvNd<3>) -> Result<Self> {
        Self::build(init, [inputs, outputs], kernel, options)
    }
}

impl<R: Runtime, const N: usize> Conv<R, N> {
    #[track_caller]
    fn build(init: &Init<R>, channels: [usize; 2], kernel: [usize; N], options: ConvNd<N>) -> Result<Self> {
        let (weight, bias) = parameters(init, channels, options.groups, &kernel, WeightAxis::Outputs)?;
        Ok(Conv { weight, bias, options })
    }

    /// Drops the bias.
    pub fn without_bias(mut self) -> Self {
        self.bias = None;
        self
    }

    /// Replaces the padding of the options: symmetric, given for each side, or [`ConvPadding::Same`] as PyTorch's
    /// `padding="same"`. With a stride above 1, `Same` is an error of `forward`.
    pub fn with_padding(mut self, padding: ConvPadding<N>) -> Self {
        self.options.padding = padding;
        self
    }

    /// Pads with the input's own elements, as PyTorch's `padding_mode` does.
    #[doc(alias = "padding_mode")]
    pub fn with_padding_mode(mut self, mode: PadMode) -> Self {
        self.options.mode = mode;
        self
    }
}

impl<R: Runtime> ConvTranspose<R, 1> {
    /// A layer with weight and bias uniform in `±1/√(O/G · K)`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: usize, options: Conv1dOptions) -> Result<Self> {
        Self::build(init, [inputs, outputs], [kernel], options.into())
    }
}

impl<R: Runtime> ConvTranspose<R, 2> {
    /// A layer with weight and bias uniform in `±1/√(O/G · R · S)`.
    #[track_caller]
    pub fn new(
        init: &Init<R>,
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        options: ConvOptions,
    ) -> Result<Self> {
        Self::build(init, [inputs, outputs], kernel, options.into())
    }
}

impl<R: Runtime> ConvTranspose<R, 3> {
    /// A layer with weight and bias uniform in `±1/√(O/G · D · R · S)`.
    #[track_caller]
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: [usize; 3], options: ConvNd<3>) -> Result<Self> {
        Self::build(init, [inputs, outputs], kernel, options)
    }
}

impl<R: Runtime, const N: usize> ConvTranspose<R, N> {
    #[track_caller]
    fn build(init: &Init<R>, channels: [usize; 2], kernel: [usize; N], options: ConvNd<N>) -> Result<Self> {
        let (weight, bias) = parameters(init, channels, options.groups, &kernel, WeightAxis::Inputs)?;
        Ok(ConvTranspose { weight, bias, options, output_padding: [0; N] })
    }

    /// Drops the bias.
    pub fn without_bias(mut self) -> Self {
        self.bias = None;
        self
    }

    /// Enlarges the result, whose size a stride leaves undetermined.
    ///
    /// # Errors
    /// An error unless the padding is less than the stride or the dilation on each axis.
    #[track_caller]
    pub fn with_output_padding(mut self, output_padding: [usize; N]) -> Result<Self> {
        let stride = self.options.stride;
        if (0..N).any(|i| output_padding[i] >= stride[i].max(self.options.dilation[i])) {
            let why =
                format!("output padding {output_padding:?} must be less than the stride {stride:?} (or the dilation)");
            return Err(Error::config("conv_transpose", "output_padding", why)).at_caller();
        }
        self.output_padding = output_padding;
        Ok(self)
    }
}

/// The channels along a weight's first axis.
#[derive(Clone, Copy, PartialEq)]
enum WeightAxis {
    Outputs,
    Inputs,
}

#[track_caller]
fn parameters<R: Runtime>(
    init: &Init<R>,
    [inputs, outputs]: [usize; 2],
    groups: usize,
    kernel: &[usize],
    first: WeightAxis,
) -> Result<(Param<R>, Option<Param<R>>)> {
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        let why = format!("{groups} groups do not divide {inputs} input and {outputs} output channels");
        return Err(Error::config("conv", "groups", why)).at_caller();
    }
    if kernel.contains(&0) {
        return Err(Error::config("conv", "kernel", format!("a kernel of {kernel:?} has no elements"))).at_caller();
    }
    let [first, second] = if first == WeightAxis::Outputs { [outputs, inputs] } else { [inputs, outputs] };
    let shape = [&[first, second / groups], kernel].concat();
    let how = Initializer::by_fan(shape[1..].iter().product());
    Ok((init.weight(shape, how)?, Some(init.bias([outputs], how)?)))
}

impl<R: Runtime, const N: usize> Forward<R> for Conv<R, N> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.conv(&self.weight.var(), optional(&self.bias).as_ref(), &self.options).at_caller()
    }
}

impl<R: Runtime, const N: usize> Forward<R> for ConvTranspose<R, N> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let bias = optional(&self.bias);
        x.conv_transpose(&self.weight.var(), bias.as_ref(), &self.options, self.output_padding).at_caller()
    }
}

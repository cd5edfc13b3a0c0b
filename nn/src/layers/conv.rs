//! Convolutions.

use autograd::Var;
use numcore::{
    Error, Result, Runtime,
    fused::{ConvOptions, NnOps},
};

use super::{optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param};

/// Geometry of a [`Conv1d`].
#[derive(Clone, Copy, Debug)]
pub struct Conv1dOptions {
    /// From one output to the next.
    pub stride: usize,
    /// Zeros around the input.
    pub padding: usize,
    /// From one weight to the next.
    pub dilation: usize,
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for Conv1dOptions {
    fn default() -> Self {
        Conv1dOptions { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

/// Convolution of `x: [N, C, L]`, giving `[N, O, M]`.
#[derive(Debug, Module)]
pub struct Conv1d<R: Runtime> {
    /// `[O, C/G, K]`.
    pub weight: Param<R>,
    /// `[O]`.
    pub bias: Option<Param<R>>,
    #[module(skip)]
    options: Conv1dOptions,
}

/// Convolution of `x: [N, C, H, W]`, giving `[N, O, P, Q]`.
#[derive(Debug, Module)]
pub struct Conv2d<R: Runtime> {
    /// `[O, C/G, R, S]`.
    pub weight: Param<R>,
    /// `[O]`.
    pub bias: Option<Param<R>>,
    #[module(skip)]
    options: ConvOptions,
}

/// Transposed convolution of `x: [N, C, P, Q]`, giving `[N, O, H, W]`: the adjoint of a [`Conv2d`] from `O` channels to `C`.
#[derive(Debug, Module)]
pub struct ConvTranspose2d<R: Runtime> {
    /// `[C, O/G, R, S]`.
    pub weight: Param<R>,
    /// `[O]`.
    pub bias: Option<Param<R>>,
    #[module(skip)]
    options: ConvOptions,
    output_padding: [usize; 2],
}

without_bias!(Conv1d, Conv2d, ConvTranspose2d);

impl<R: Runtime> Conv1d<R> {
    /// Weight and bias uniform in `±1/√(C/G · K)`.
    pub fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: usize, options: Conv1dOptions) -> Result<Self> {
        let (weight, bias) = parameters(init, [inputs, outputs], options.groups, &[kernel], Side::Outputs)?;
        Ok(Conv1d { weight, bias, options })
    }
}

impl<R: Runtime> Conv2d<R> {
    /// Weight and bias uniform in `±1/√(C/G · R · S)`.
    pub fn new(
        init: &Init<R>,
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        options: ConvOptions,
    ) -> Result<Self> {
        let (weight, bias) = parameters(init, [inputs, outputs], options.groups, &kernel, Side::Outputs)?;
        Ok(Conv2d { weight, bias, options })
    }
}

impl<R: Runtime> ConvTranspose2d<R> {
    /// Weight and bias uniform in `±1/√(O/G · R · S)`.
    pub fn new(
        init: &Init<R>,
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        options: ConvOptions,
    ) -> Result<Self> {
        let (weight, bias) = parameters(init, [inputs, outputs], options.groups, &kernel, Side::Inputs)?;
        Ok(ConvTranspose2d { weight, bias, options, output_padding: [0; 2] })
    }

    /// Lengthens the result, whose size a stride leaves open; less than the stride.
    pub fn with_output_padding(mut self, output_padding: [usize; 2]) -> Result<Self> {
        let stride = self.options.stride;
        if (0..2).any(|i| output_padding[i] >= stride[i].max(self.options.dilation[i])) {
            let why =
                format!("output padding {output_padding:?} must be less than the stride {stride:?} (or the dilation)");
            return Err(Error::argument("conv_transpose2d", why));
        }
        self.output_padding = output_padding;
        Ok(self)
    }
}

/// Which channels a weight's first axis counts.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Outputs,
    Inputs,
}

fn parameters<R: Runtime>(
    init: &Init<R>,
    [inputs, outputs]: [usize; 2],
    groups: usize,
    kernel: &[usize],
    first: Side,
) -> Result<(Param<R>, Option<Param<R>>)> {
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        let why = format!("{groups} groups do not divide {inputs} input and {outputs} output channels");
        return Err(Error::argument("conv", why));
    }
    let [first, second] = if first == Side::Outputs { [outputs, inputs] } else { [inputs, outputs] };
    let shape = [&[first, second / groups], kernel].concat();
    let how = Initializer::by_fan(shape[1..].iter().product());
    Ok((init.weight(shape, how)?, Some(init.bias([outputs], how)?)))
}

impl<R: Runtime> Forward<R> for Conv1d<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let Conv1dOptions { stride, padding, dilation, groups } = self.options;
        x.conv1d(&self.weight.var(), optional(&self.bias).as_ref(), stride, padding, dilation, groups)
    }
}

impl<R: Runtime> Forward<R> for Conv2d<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.conv2d(&self.weight.var(), optional(&self.bias).as_ref(), self.options)
    }
}

impl<R: Runtime> Forward<R> for ConvTranspose2d<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.conv_transpose2d(&self.weight.var(), optional(&self.bias).as_ref(), self.options, self.output_padding)
    }
}

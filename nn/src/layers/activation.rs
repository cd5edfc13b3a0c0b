//! Activations as modules: each applies the method with its name.

use autograd::Var;
use numcore::{Result, Runtime, Within, fused::NnOps, ops::PointwiseOps};

use crate::{Forward, Init, Initializer, Module, Param};

macro_rules! activations {
    (
        plain { $($(#[$doc:meta])* $name:ident $method:ident;)* }
        with { $($(#[$with_doc:meta])* $with:ident($(#[$field_doc:meta])* $field:ident: $ty:ty) $with_method:ident;)* }
    ) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Module)]
            pub struct $name;

            impl<R: Runtime> Forward<R> for $name {
                #[track_caller]
                fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                    x.$method().at_caller()
                }
            }
        )*
        $(
            $(#[$with_doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Module)]
            pub struct $with {
                $(#[$field_doc])*
                pub $field: $ty,
            }

            impl<R: Runtime> Forward<R> for $with {
                #[track_caller]
                fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                    x.$with_method(self.$field).at_caller()
                }
            }
        )*
    };
}

activations! {
    plain {
        /// The rectified linear unit, `max(x, 0)`.
        Relu relu;
        /// The GELU activation, `x · Φ(x)` (Hendrycks & Gimpel 2016).
        Gelu gelu;
        /// The tanh approximation of [`Gelu`].
        GeluTanh gelu_tanh;
        /// The SiLU activation, `x · sigmoid(x)` (Elfwing et al. 2018).
        Silu silu;
        /// The Mish activation, `x · tanh(softplus(x))` (Misra 2019).
        Mish mish;
        /// The self-normalizing ELU activation (Klambauer et al. 2017).
        Selu selu;
        /// The hyperbolic tangent, elementwise.
        Tanh tanh;
        /// The logistic function, `1 / (1 + e⁻ˣ)`.
        Sigmoid sigmoid;
        /// The logarithm of the sigmoid, `ln(sigmoid(x))`.
        LogSigmoid log_sigmoid;
        /// The softplus activation, `ln(1 + eˣ)`.
        Softplus softplus;
        /// The softsign activation, `x / (1 + |x|)`.
        Softsign softsign;
        /// The hard-swish activation, `x · min(max(x + 3, 0), 6) / 6` (Howard et al. 2019).
        Hardswish hardswish;
        /// The hard-sigmoid activation, `min(max(x + 3, 0), 6) / 6`.
        Hardsigmoid hardsigmoid;
        /// The clipped ReLU, `min(max(x, 0), 6)`.
        Relu6 relu6;
        /// The tanh-shrink activation, `x − tanh(x)`.
        Tanhshrink tanhshrink;
    }
    with {
        /// The leaky ReLU: `x` where positive, `slope · x` elsewhere.
        LeakyRelu(
            /// The slope for negative inputs; 0.01 by convention.
            slope: f64
        ) leaky_relu;
        /// The ELU activation: `x` where positive, `alpha · (eˣ − 1)` elsewhere (Clevert et al. 2016).
        Elu(
            /// The scale of negative outputs; 1 by convention.
            alpha: f64
        ) elu;
        /// The CELU activation: `x` where positive, `alpha · (e^(x/alpha) − 1)` elsewhere (Barron 2017).
        Celu(
            /// The scale of negative outputs; 1 by convention.
            alpha: f64
        ) celu;
        /// The soft-shrink activation: `x` moved towards 0 by `lambda`, 0 in between.
        Softshrink(
            /// The threshold; 0.5 by convention.
            lambda: f64
        ) softshrink;
        /// The hard-shrink activation: `x` where its magnitude is above `lambda`, 0 elsewhere.
        Hardshrink(
            /// The threshold; 0.5 by convention.
            lambda: f64
        ) hardshrink;
        /// The gated linear unit `a · sigmoid(b)`, where `a` and `b` are the two parts of `x` along an axis (Dauphin et
        /// al. 2017).
        Glu(
            /// The axis that is split in two.
            axis: isize
        ) glu;
        /// Softmax, `eˣ / Σ eˣ` along an axis.
        Softmax(
            /// The axis that is normalized.
            axis: isize
        ) softmax;
        /// The logarithm of the softmax along an axis.
        LogSoftmax(
            /// The axis that is normalized.
            axis: isize
        ) log_softmax;
    }
}

/// The PReLU activation of `x: [N, C, ..]`: `x` where positive, `weight · x` elsewhere (He et al. 2015).
#[derive(Debug, Module)]
pub struct PRelu<R: Runtime> {
    /// The negative slopes, `[C]`, or `[1]` for all channels.
    pub weight: Param<R>,
}

impl<R: Runtime> PRelu<R> {
    /// Creates a layer with a negative slope of 0.25 for each of `count` channels; a count of 1 shares it between all.
    #[track_caller]
    pub fn new(init: &Init<R>, count: usize) -> Result<Self> {
        Ok(PRelu { weight: init.param([count], Initializer::Constant(0.25))? })
    }
}

impl<R: Runtime> Forward<R> for PRelu<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.prelu(&self.weight.var()).at_caller()
    }
}

/// The activation that a model has between its linear layers, as an option; the types above are layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// The rectified linear unit, [`Relu`].
    Relu,
    /// The exact GELU, [`Gelu`].
    #[default]
    Gelu,
    /// The tanh approximation, [`GeluTanh`], of GPT-2 and its descendants.
    GeluTanh,
    /// The SiLU, [`Silu`].
    Silu,
    /// The approximation `x · sigmoid(1.702x)` of the GELU, of CLIP.
    QuickGelu,
}

impl Activation {
    /// Applies the activation to each element.
    #[track_caller]
    pub fn apply<R: Runtime>(self, x: &Var<R>) -> Result<Var<R>> {
        match self {
            Activation::Relu => x.relu(),
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::QuickGelu => x.mul(&x.mul(1.702)?.sigmoid()?),
        }
    }
}

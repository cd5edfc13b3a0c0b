//! Activations as modules: each applies the method of its name.

use autograd::Var;
use numcore::{Result, Runtime, fused::NnOps, ops::PointwiseOps};

use crate::{Forward, Module};

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
                fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                    x.$method()
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
                fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                    x.$with_method(self.$field)
                }
            }
        )*
    };
}

activations! {
    plain {
        /// `max(x, 0)`.
        Relu relu;
        /// `x · Φ(x)` (Hendrycks & Gimpel 2016).
        Gelu gelu;
        /// The tanh approximation of [`Gelu`].
        GeluTanh gelu_tanh;
        /// `x · sigmoid(x)` (Elfwing et al. 2018).
        Silu silu;
        /// `x · tanh(softplus(x))` (Misra 2019).
        Mish mish;
        /// Self-normalising ELU (Klambauer et al. 2017).
        Selu selu;
        /// Hyperbolic tangent.
        Tanh tanh;
        /// `1 / (1 + e⁻ˣ)`.
        Sigmoid sigmoid;
        /// `ln(sigmoid(x))`.
        LogSigmoid log_sigmoid;
        /// `ln(1 + eˣ)`.
        Softplus softplus;
        /// `x / (1 + |x|)`.
        Softsign softsign;
        /// `x · min(max(x + 3, 0), 6) / 6` (Howard et al. 2019).
        Hardswish hardswish;
        /// `min(max(x + 3, 0), 6) / 6`.
        Hardsigmoid hardsigmoid;
    }
    with {
        /// `x` where positive, `slope · x` elsewhere.
        LeakyRelu(
            /// 0.01 by convention.
            slope: f64
        ) leaky_relu;
        /// `x` where positive, `alpha · (eˣ − 1)` elsewhere (Clevert et al. 2016).
        Elu(
            /// 1 by convention.
            alpha: f64
        ) elu;
        /// `eˣ / Σ eˣ` along an axis.
        Softmax(
            /// Which.
            axis: isize
        ) softmax;
        /// The logarithm of [`Softmax`].
        LogSoftmax(
            /// Which.
            axis: isize
        ) log_softmax;
    }
}
